//! Reading a request, and writing turns.

use crate::{Message, Request, Role, Sampling, Tool, ToolCall};

impl Request {
    /// The text of the user's last turn; empty where there is none.
    #[must_use]
    pub fn last_user(&self) -> &str {
        let mut turns = self.messages.iter().rev();
        turns.find(|turn| turn.role == Role::User).map_or("", |turn| &turn.content)
    }

    /// The calls that the model proposed last and that no tool has answered yet: what a gate judges.
    #[must_use]
    pub fn pending_calls(&self) -> Vec<&ToolCall> {
        let Some(at) = self.messages.iter().rposition(|turn| !turn.tool_calls.is_empty()) else {
            return Vec::new();
        };
        let answered = |call: &ToolCall| {
            self.messages[at..].iter().any(|turn| turn.tool_call_id.as_ref() == Some(&call.id))
        };
        self.messages[at].tool_calls.iter().filter(|call| !answered(call)).collect()
    }

    /// The first value of a header, by its name in any case.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&str> {
        let mut headers = self.headers.iter();
        headers.find(|(known, _)| known.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_str())
    }

    /// The tool that the client offers under this name.
    #[must_use]
    pub fn tool(&self, name: &str) -> Option<&Tool> {
        self.tools.iter().find(|tool| tool.name == name)
    }
}

impl Message {
    /// A turn that is text alone.
    pub fn new(role: Role, content: impl Into<String>) -> Self {
        Self { role, content: content.into(), tool_calls: Vec::new(), tool_call_id: None }
    }

    /// A turn of instructions.
    pub fn system(content: impl Into<String>) -> Self {
        Self::new(Role::System, content)
    }

    /// A turn of the user.
    pub fn user(content: impl Into<String>) -> Self {
        Self::new(Role::User, content)
    }

    /// A turn of the model.
    pub fn assistant(content: impl Into<String>) -> Self {
        Self::new(Role::Assistant, content)
    }
}

impl Default for Sampling {
    /// Keeps everything that the client asked for.
    fn default() -> Self {
        Self { temperature: None, top_p: None, max_tokens: None, seed: None, stop: Vec::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(messages: Vec<Message>) -> Request {
        Request {
            id: "r1".into(),
            model: "local".into(),
            messages,
            tools: Vec::new(),
            sampling: Sampling::default(),
            headers: vec![("x-team".into(), "blue".into())],
        }
    }

    fn call(id: &str, name: &str) -> ToolCall {
        ToolCall { id: id.into(), name: name.into(), arguments: "{}".into() }
    }

    #[test]
    fn the_last_user_turn_is_found_behind_tool_turns() {
        let turns = vec![Message::user("first"), Message::user("second"), Message::assistant("reply")];
        assert_eq!(request(turns).last_user(), "second");
        assert_eq!(request(vec![Message::system("only")]).last_user(), "");
    }

    #[test]
    fn answered_calls_are_not_pending() {
        let mut proposes = Message::assistant("");
        proposes.tool_calls = vec![call("a", "bash"), call("b", "read")];
        let mut answers = Message::new(Role::Tool, "done");
        answers.tool_call_id = Some("a".into());
        let request = request(vec![Message::user("go"), proposes, answers]);
        let names: Vec<_> = request.pending_calls().iter().map(|call| call.name.as_str()).collect();
        assert_eq!(names, ["read"]);
    }

    #[test]
    fn headers_are_found_in_any_case() {
        assert_eq!(request(Vec::new()).header("X-Team"), Some("blue"));
        assert_eq!(request(Vec::new()).header("x-other"), None);
    }
}
