//! A conversation, as clients send it and templates render it.

use serde::{Deserialize, Serialize};

/// Who speaks in a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// The operator's instructions.
    System,
    /// The person, or the agent that asks.
    User,
    /// The model.
    Assistant,
    /// What a tool answered.
    Tool,
}

/// One turn of a conversation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Message {
    /// Who speaks.
    pub role: Role,
    /// What is said.
    pub content: String,
    /// Calls that an assistant turn made, in OpenAI's shape.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub tool_calls: Option<serde_json::Value>,
    /// Which call a tool turn answers.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub tool_call_id: Option<String>,
}

impl Message {
    /// A turn that is text alone.
    #[must_use]
    pub fn new(role: Role, content: impl Into<String>) -> Self {
        Self { role, content: content.into(), tool_calls: None, tool_call_id: None }
    }
}

/// A function that the model may be offered.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Tool {
    /// Its name.
    pub name: String,
    /// What it does.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub description: Option<String>,
    /// JSON Schema of its arguments.
    pub parameters: serde_json::Value,
}

/// What a session holds: the turns so far and the tools on offer.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Conversation {
    /// Turns, oldest first.
    pub messages: Vec<Message>,
    /// Tools that the chat template shows to the model.
    pub tools: Vec<Tool>,
}

/// A system turn that offers tools after a conversation, where it leaves the
/// conversation's pages as they are. Nothing for no tools.
pub(crate) fn tools_turn(tools: &[Tool]) -> Option<Message> {
    if tools.is_empty() {
        return None;
    }
    let mut text = String::from(
        "You may call these tools. To call one, reply with its name and arguments as JSON between \
         <tool_call> and </tool_call>.",
    );
    for tool in tools {
        text.push('\n');
        text += &serde_json::json!(tool).to_string();
    }
    Some(Message::new(Role::System, text))
}
