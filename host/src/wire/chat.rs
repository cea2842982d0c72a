//! `POST /v1/chat/completions`: OpenAI's chat request, its reply and its stream.

use forkpoint_engine::{Conversation, FinishReason, Message, Role, Sampling, TokenLogprob, Tool};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::error::{ApiError, Kind};
use super::sampling::{SamplingFields, refuse_unsupported};
use super::value::{TextOr, read};

/// Tools that a request may offer.
const MAX_TOOLS: usize = 256;

#[derive(Deserialize)]
struct Fields {
    #[serde(default)]
    model: Option<String>,
    messages: Vec<MessageFields>,
    #[serde(default)]
    tools: Option<Vec<ToolFields>>,
    tool_choice: Option<Value>,
    logprobs: Option<bool>,
    top_logprobs: Option<u8>,
}

#[derive(Deserialize)]
struct MessageFields {
    role: String,
    content: Option<TextOr<Part>>,
    tool_calls: Option<Vec<Value>>,
    tool_call_id: Option<String>,
}

#[derive(Deserialize)]
struct Part {
    r#type: String,
    text: Option<String>,
}

#[derive(Deserialize)]
struct ToolFields {
    r#type: String,
    function: Option<FunctionFields>,
}

#[derive(Deserialize)]
struct FunctionFields {
    name: String,
    description: Option<String>,
    parameters: Option<Map<String, Value>>,
}

/// A chat request, checked.
#[derive(Debug)]
pub struct ChatRequest {
    /// The model asked for; none or empty takes the server's default.
    pub model: Option<String>,
    /// The turns and the tools on offer.
    pub conversation: Conversation,
    /// How the reply is sampled.
    pub sampling: Sampling,
    /// Whether and how it is streamed, and the salt.
    pub fields: SamplingFields,
}

impl ChatRequest {
    /// Reads a request out of its body; sampling that it leaves out is as `usual`.
    ///
    /// # Errors
    /// [`Kind::Invalid`] or [`Kind::Unsupported`], naming the field.
    pub fn read(body: &Value, usual: &Sampling) -> Result<Self, ApiError> {
        let fields: Fields = read(body)?;
        let sampling_fields: SamplingFields = read(body)?;
        refuse_unsupported(body)?;
        let mut sampling = sampling_fields.sampling(usual)?;
        sampling.logprobs = match (fields.logprobs.unwrap_or(false), fields.top_logprobs) {
            (false, None | Some(0)) => None,
            (false, Some(_)) => return Err(ApiError::field("top_logprobs", "needs `logprobs` to be true")),
            (true, Some(top)) if top > 20 => {
                return Err(ApiError::field("top_logprobs", format!("must be from 0 to 20, got {top}")));
            }
            (true, top) => Some(top.unwrap_or(0)),
        };
        if fields.messages.is_empty() {
            return Err(ApiError::field("messages", "at least one message is needed"));
        }
        let messages = fields
            .messages
            .into_iter()
            .enumerate()
            .map(|(index, message)| message.into_message(index))
            .collect::<Result<Vec<_>, _>>()?;
        let offered = fields.tools.unwrap_or_default();
        // Tools are read even when the choice is "none", so that a bad one is told either way.
        let mut tools = read_tools(offered)?;
        if fields.tool_choice == Some(Value::from("none")) {
            tools.clear();
        }
        Ok(Self {
            model: fields.model.filter(|model| !model.is_empty()),
            conversation: Conversation { messages, tools },
            sampling,
            fields: sampling_fields,
        })
    }
}

impl MessageFields {
    fn into_message(self, index: usize) -> Result<Message, ApiError> {
        let at = |name: &str| [Value::from("messages"), Value::from(index), Value::from(name)];
        let role = match self.role.as_str() {
            "system" | "developer" => Role::System,
            "user" => Role::User,
            "assistant" => Role::Assistant,
            "tool" => Role::Tool,
            other => {
                let message =
                    format!("must be one of system, developer, user, assistant, tool; got {other:?}");
                return Err(ApiError::at(at("role"), message));
            }
        };
        let calls = self.tool_calls.filter(|calls| !calls.is_empty());
        if calls.is_some() && role != Role::Assistant {
            return Err(ApiError::at(at("tool_calls"), "only an assistant message may call tools"));
        }
        for call in calls.iter().flatten() {
            if !call["function"]["name"].is_string() {
                return Err(ApiError::at(at("tool_calls"), "each call needs `function.name`"));
            }
        }
        let content = match self.content {
            Some(TextOr::Text(text)) => text,
            Some(TextOr::Many(parts)) => join_parts(parts, index)?,
            None if role == Role::Assistant => String::new(),
            None => return Err(ApiError::at(at("content"), "this field is required")),
        };
        Ok(Message { role, content, tool_calls: calls.map(Value::from), tool_call_id: self.tool_call_id })
    }
}

/// Text parts become one text, a line each, as vLLM and llama.cpp read them.
fn join_parts(parts: Vec<Part>, message: usize) -> Result<String, ApiError> {
    let mut lines = Vec::with_capacity(parts.len());
    for (index, part) in parts.into_iter().enumerate() {
        let at =
            |name: &str| [json!("messages"), json!(message), json!("content"), json!(index), json!(name)];
        match (part.r#type.as_str(), part.text) {
            ("text" | "input_text", Some(text)) => lines.push(text),
            ("text" | "input_text", None) => return Err(ApiError::at(at("text"), "this field is required")),
            ("image_url" | "input_image", _) => {
                return Err(ApiError::at(at("type"), "images are not supported").with_kind(Kind::Unsupported));
            }
            (other, _) => {
                let message = format!("only \"text\" parts are supported, got {other:?}");
                return Err(ApiError::at(at("type"), message).with_kind(Kind::Unsupported));
            }
        }
    }
    Ok(lines.join("\n"))
}

fn read_tools(tools: Vec<ToolFields>) -> Result<Vec<Tool>, ApiError> {
    if tools.len() > MAX_TOOLS {
        return Err(ApiError::field("tools", format!("at most {MAX_TOOLS} tools, got {}", tools.len())));
    }
    let mut read: Vec<Tool> = Vec::with_capacity(tools.len());
    for (index, tool) in tools.into_iter().enumerate() {
        let at = |name: &str| [json!("tools"), json!(index), json!(name)];
        if tool.r#type != "function" {
            let message = format!("only \"function\" is supported, got {:?}", tool.r#type);
            return Err(ApiError::at(at("type"), message).with_kind(Kind::Unsupported));
        }
        let Some(function) = tool.function else {
            return Err(ApiError::at(at("function"), "this field is required"));
        };
        if function.name.is_empty() {
            return Err(ApiError::at(at("function"), "`name` must not be empty"));
        }
        if read.iter().any(|tool| tool.name == function.name) {
            return Err(ApiError::at(
                at("function"),
                format!("there are two tools named {:?}", function.name),
            ));
        }
        let parameters =
            function.parameters.map_or_else(|| json!({"type": "object", "properties": {}}), Value::Object);
        read.push(Tool { name: function.name, description: function.description, parameters });
    }
    Ok(read)
}

/// What a request cost, as replies report it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct UsageReport {
    /// Tokens that the reply was generated after.
    pub prompt: u32,
    /// Tokens of the reply.
    pub completion: u32,
    /// Of the prompt's tokens, those that were resident already.
    pub reused: u32,
    /// Tokens that were computed before the reply began.
    pub computed: u32,
    /// Questions that were answered on the way.
    pub decisions: u32,
    /// Suffix tokens computed to answer them.
    pub decided: u32,
}

impl UsageReport {
    /// OpenAI's usage object, with what forking saved beside it.
    #[must_use]
    pub fn to_json(self) -> Value {
        json!({
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": { "cached_tokens": self.reused },
            "x_forkpoint": {
                "reused": self.reused,
                "computed": self.computed,
                "decisions": self.decisions,
                "decided_tokens": self.decided,
            },
        })
    }
}

/// What names a reply, the same in each of its chunks.
#[derive(Debug, Clone)]
pub struct Naming {
    /// `chatcmpl-…` or `cmpl-…`.
    pub id: String,
    /// Seconds since 1970.
    pub created: u64,
    /// The model that wrote it.
    pub model: String,
    /// Of what determines the logits.
    pub fingerprint: String,
}

impl Naming {
    fn envelope(&self, object: &str, choices: Value) -> Value {
        json!({
            "id": self.id,
            "object": object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        })
    }

    /// A whole reply.
    #[must_use]
    pub fn chat_completion(
        &self,
        text: &str,
        tokens: Option<&[TokenLogprob]>,
        reason: FinishReason,
        usage: UsageReport,
    ) -> Value {
        let mut reply = self.envelope(
            "chat.completion",
            json!([{
                "index": 0,
                "message": { "role": "assistant", "content": text, "refusal": null },
                "logprobs": tokens.map(chat_logprobs),
                "finish_reason": reason,
            }]),
        );
        reply["usage"] = usage.to_json();
        reply
    }

    /// A chunk of a stream. With `usage_follows`, it says that it is not the one that carries the usage.
    #[must_use]
    pub fn chat_chunk(
        &self,
        delta: Value,
        tokens: Option<&[TokenLogprob]>,
        reason: Option<FinishReason>,
        usage_follows: bool,
    ) -> Value {
        let mut chunk = self.envelope(
            "chat.completion.chunk",
            json!([{
                "index": 0,
                "delta": delta,
                "logprobs": tokens.map(chat_logprobs),
                "finish_reason": reason,
            }]),
        );
        if usage_follows {
            chunk["usage"] = Value::Null;
        }
        chunk
    }

    /// The chunk that carries the usage and no choice.
    #[must_use]
    pub fn usage_chunk(&self, object: &str, usage: UsageReport) -> Value {
        let mut chunk = self.envelope(object, json!([]));
        chunk["usage"] = usage.to_json();
        chunk
    }

    /// The same envelope for another object; for completions.
    #[must_use]
    pub fn other(&self, object: &str, choices: Value) -> Value {
        self.envelope(object, choices)
    }
}

fn chat_logprobs(tokens: &[TokenLogprob]) -> Value {
    let entry = |bytes: &[u8], logprob: f32| json!({ "token": String::from_utf8_lossy(bytes), "logprob": finite(logprob), "bytes": bytes });
    let content: Vec<Value> = tokens
        .iter()
        .map(|token| {
            let mut shown = entry(&token.bytes, token.logprob);
            shown["top_logprobs"] =
                token.top.iter().map(|(_, bytes, logprob)| entry(bytes, *logprob)).collect();
            shown
        })
        .collect();
    json!({ "content": content, "refusal": null })
}

/// JSON has no infinity; OpenAI writes -9999 for a token that cannot come.
#[must_use]
pub fn finite(logprob: f32) -> f32 {
    if logprob.is_finite() { logprob } else { -9999.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_whole_agent_conversation_is_read() {
        let request = ChatRequest::read(&json!({
            "model": "auto",
            "messages": [
                {"role": "developer", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                {"role": "assistant", "content": null, "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": "{}"}}]},
                {"role": "tool", "tool_call_id": "c1", "content": "file.txt"},
            ],
            "tools": [{"type": "function", "function": {"name": "ls"}}],
            "logprobs": true,
            "top_logprobs": 2
        }), &Sampling::default())
        .unwrap();
        let turns: Vec<(Role, &str)> =
            request.conversation.messages.iter().map(|turn| (turn.role, turn.content.as_str())).collect();
        assert_eq!(
            turns,
            [
                (Role::System, "Be brief."),
                (Role::User, "a\nb"),
                (Role::Assistant, ""),
                (Role::Tool, "file.txt")
            ]
        );
        assert_eq!(request.conversation.messages[2].tool_calls.as_ref().unwrap()[0]["id"], "c1");
        assert_eq!(request.conversation.messages[3].tool_call_id.as_deref(), Some("c1"));
        assert_eq!(request.conversation.tools[0].parameters, json!({"type": "object", "properties": {}}));
        assert_eq!(request.sampling.logprobs, Some(2));
    }

    #[test]
    fn choosing_no_tool_offers_none() {
        let body = json!({
            "messages": [{"role": "user", "content": "x"}],
            "tools": [{"type": "function", "function": {"name": "ls"}}],
            "tool_choice": "none"
        });
        assert!(ChatRequest::read(&body, &Sampling::default()).unwrap().conversation.tools.is_empty());
    }

    #[test]
    fn bad_requests_name_the_field() {
        let message = |message: Value| json!({ "messages": [message] });
        let tool = |tool: Value| json!({ "messages": [{"role": "user", "content": "x"}], "tools": [tool] });
        let cases = [
            (json!({}), "messages: this field is required"),
            (json!({"messages": []}), "messages: at least one message is needed"),
            (json!({"messages": "hi"}), "messages: invalid type: string \"hi\""),
            (json!({"model": 3, "messages": []}), "model: invalid type: integer `3`"),
            (message(json!({"content": "x"})), "messages[0].role: this field is required"),
            (message(json!({"role": "bot", "content": "x"})), "messages[0].role: must be one of system"),
            (message(json!({"role": "user"})), "messages[0].content: this field is required"),
            (
                message(json!({"role": "user", "content": 3})),
                "messages[0].content: invalid type: integer `3`",
            ),
            (
                message(json!({"role": "user", "content": [{"type": "text"}]})),
                "messages[0].content[0].text: this field is required",
            ),
            (
                message(
                    json!({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}),
                ),
                "messages[0].content[0].type: images are not supported",
            ),
            (
                message(json!({"role": "user", "content": "x", "tool_calls": [{}]})),
                "messages[0].tool_calls: only an assistant",
            ),
            (
                message(json!({"role": "assistant", "tool_calls": [{}]})),
                "messages[0].tool_calls: each call needs `function.name`",
            ),
            (tool(json!({"type": "web"})), "tools[0].type: only \"function\" is supported"),
            (tool(json!({"type": "function"})), "tools[0].function: this field is required"),
            (
                tool(json!({"type": "function", "function": {"name": "a", "parameters": []}})),
                "tools[0].function.parameters: invalid type: sequence",
            ),
        ];
        for (body, message) in cases {
            let error = ChatRequest::read(&body, &Sampling::default()).unwrap_err();
            assert!(error.message.starts_with(message), "{body}\n got {}\nwant {message}", error.message);
        }
    }
}
