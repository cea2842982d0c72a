//! Reading a request, and writing turns.

use crate::{Message, Request, Role, Sampling, Tool, ToolCall, stable_hash};

impl Request {
    /// The text of the user's last turn; empty where there is none.
    #[must_use]
    pub fn last_user(&self) -> &str {
        let mut turns = self.messages.iter().rev();
        turns.find(|turn| turn.role == Role::User).map_or("", |turn| &turn.content)
    }

    /// The turns after the user's last one: what the model called and what tools answered. All where no user spoke.
    #[must_use]
    pub fn since_user(&self) -> &[Message] {
        let user = self.messages.iter().rposition(|turn| turn.role == Role::User);
        &self.messages[user.map_or(0, |at| at + 1)..]
    }

    /// A key for the conversation: the same for each of its turns, whatever comes after the user's first one and
    /// whatever the system's say, since those may hold a date. Without a turn of the user, all turns count. Two
    /// conversations of one tenant that open with the same words share it; those of two tenants do not, so a policy
    /// that serves several gives the tenant, mostly [`filled_header`](Self::filled_header) of `x-tenant`.
    #[must_use]
    pub fn conversation_key(&self, tenant: Option<&str>) -> String {
        let first = self.messages.iter().find(|turn| turn.role == Role::User);
        let opening = first.map_or(&self.messages[..], std::slice::from_ref);
        format!(
            "{:016x}",
            stable_hash(tenant.into_iter().chain(opening.iter().map(|turn| turn.content.as_str())))
        )
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

    /// The first value of a header without blanks around it; `None` where nothing is left. For what names a tenant or a
    /// session: an empty name is nobody's.
    #[must_use]
    pub fn filled_header(&self, name: &str) -> Option<&str> {
        self.header(name).map(str::trim).filter(|value| !value.is_empty())
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
    fn a_conversation_keeps_its_key_as_it_grows() {
        let opening = || vec![Message::system("Today is Monday."), Message::user("Hello")];
        let mut grown = opening();
        grown[0] = Message::system("Today is Tuesday.");
        grown.extend([Message::assistant("Hi."), Message::user("And now?")]);
        let key = request(opening()).conversation_key(None);
        assert_eq!(request(grown).conversation_key(None), key);
        assert_ne!(request(vec![Message::user("Good day")]).conversation_key(None), key);
        assert_eq!(request(Vec::new()).conversation_key(None).len(), 16);
        let instructions = |text| request(vec![Message::system(text)]).conversation_key(None);
        assert_ne!(instructions("Sum up a."), instructions("Sum up b."), "no user spoke: all turns count");
    }

    #[test]
    fn tenants_share_no_key() {
        let key = |tenant| request(vec![Message::user("Hello")]).conversation_key(tenant);
        assert_eq!(key(Some("acme")), key(Some("acme")));
        assert_ne!(key(Some("acme")), key(Some("globex")));
        assert_ne!(key(Some("acme")), key(None));
    }

    #[test]
    fn turns_since_the_user_spoke_are_the_tools_and_the_model_s() {
        let turns = vec![Message::user("go"), Message::assistant(""), Message::new(Role::Tool, "done")];
        assert_eq!(request(turns).since_user().len(), 2);
        assert!(request(vec![Message::user("go")]).since_user().is_empty());
        assert_eq!(request(vec![Message::system("only")]).since_user().len(), 1);
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

    #[test]
    fn an_empty_header_names_nobody() {
        let named =
            |value: &str| Request { headers: vec![("x-team".into(), value.into())], ..request(Vec::new()) };
        assert_eq!(named(" blue ").filled_header("X-Team"), Some("blue"));
        assert_eq!(named("  ").filled_header("x-team"), None);
        assert_eq!(named("blue").filled_header("x-other"), None);
    }
}
