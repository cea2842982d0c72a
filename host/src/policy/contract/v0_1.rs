//! Contract 0.1, `wit/policy.wit`, for components built against it: its types become the newest and back, its imports
//! are the newest ones.

use wasmtime::component::Resource;

use super::translate::{Translate, same};
use super::{v0_1 as older, v0_2 as newest};
use crate::policy::guest::{Halt, Place, Refusal, State};

wasmtime::component::bindgen!({
    path: "../wit",
    world: "policy",
    imports: {
        default: trappable,
        "forkpoint:policy/engine.decide": async | trappable,
        "forkpoint:policy/engine.generate": async | trappable,
        "forkpoint:policy/engine.[method]session.fork": async | trappable,
        "forkpoint:policy/engine.[method]session.append": async | trappable,
        "forkpoint:policy/engine.[method]session.usage": async | trappable,
    },
    exports: { default: async },
    with: { "forkpoint:policy/engine.session": crate::policy::guest::Place },
    trappable_error_type: { "forkpoint:policy/engine.failure" => crate::policy::guest::Refusal },
});

use self::forkpoint::policy::{dispatch, engine, host, types};

same!(both types {
    enum Role { System, User, Assistant, Tool }
    struct ToolCall { id, name, arguments }
    struct Message { role, content, tool_calls, tool_call_id }
    struct Sampling { temperature, top_p, max_tokens, seed, stop }
});

same!(out types {
    struct Tool { name, description, parameters }
});

same!(in engine {
    struct ChoiceOption { name, description }
    struct BooleanSides { yes, no }
    enum Criteria { Choice(options), Boolean(sides), Score(levels) }
    struct Question { instructions, criteria, probe }
});

same!(out engine {
    struct ChoiceAnswer { choice, probabilities, confidence }
    struct ScoreAnswer { score, probabilities, confidence }
    enum Verdict { Choice(answer), Boolean(yes), Score(answer) }
    enum Rung { Labels, Probe }
    struct Answer { verdict, mass, rung }
    struct Usage { tokens, reused, computed }
    struct Completion { text, tokens, finish_reason }
    enum Failure { Invalid(why), Full(why), Budget(why), Denied(why), Unavailable(why) }
});

same!(in host {
    enum Level { Debug, Info, Warn, Error }
});

same!(in dispatch {
    struct Generation { on, model, append, tools, sampling }
    struct Forward { upstream, model }
    enum Plan { Generate(plan), Forward(plan), Reply(text), Reject(why), Next }
    struct Routing { plan, reason, labels }
});

/// Without `conversation`.
impl Translate<types::Request> for newest::types::Request {
    fn translate(self) -> types::Request {
        let Self { id, conversation: _, model, messages, tools, sampling, headers } = self;
        let (messages, tools) = (messages.translate(), tools.translate());
        types::Request { id, model, messages, tools, sampling: sampling.translate(), headers }
    }
}

/// It says nothing of `retry-after`.
impl Translate<newest::dispatch::Rejection> for dispatch::Rejection {
    fn translate(self) -> newest::dispatch::Rejection {
        let Self { status, code, message } = self;
        newest::dispatch::Rejection { status, code, message, retry_after: None }
    }
}

/// A sentence in place of the kind.
impl Translate<String> for newest::host::StoreFailure {
    fn translate(self) -> String {
        match self {
            Self::Denied => "denied: the store is not granted to this policy".to_owned(),
            Self::Full(why)
            | Self::TooLong(why)
            | Self::NotACounter(why)
            | Self::Overflow(why)
            | Self::Unavailable(why) => why,
        }
    }
}

impl engine::Host for State {
    fn convert_failure(&mut self, refusal: Refusal) -> wasmtime::Result<engine::Failure> {
        newest::engine::Host::convert_failure(self, refusal).map(Translate::translate)
    }

    async fn decide(
        &mut self,
        on: Resource<Place>,
        questions: Vec<engine::Question>,
    ) -> Result<Vec<engine::Answer>, Refusal> {
        newest::engine::Host::decide(self, on, questions.translate()).await.map(Translate::translate)
    }

    async fn generate(
        &mut self,
        on: Resource<Place>,
        sampling: types::Sampling,
    ) -> Result<engine::Completion, Refusal> {
        newest::engine::Host::generate(self, on, sampling.translate()).await.map(Translate::translate)
    }
}

impl engine::HostSession for State {
    async fn fork(&mut self, this: Resource<Place>) -> Result<Resource<Place>, Refusal> {
        newest::engine::HostSession::fork(self, this).await
    }

    async fn append(&mut self, this: Resource<Place>, messages: Vec<types::Message>) -> Result<u32, Refusal> {
        newest::engine::HostSession::append(self, this, messages.translate()).await
    }

    async fn usage(&mut self, this: Resource<Place>) -> wasmtime::Result<engine::Usage> {
        newest::engine::HostSession::usage(self, this).await.map(Translate::translate)
    }

    fn drop(&mut self, this: Resource<Place>) -> wasmtime::Result<()> {
        newest::engine::HostSession::drop(self, this)
    }
}

impl host::Host for State {
    fn log(&mut self, level: host::Level, message: String) -> wasmtime::Result<()> {
        newest::host::Host::log(self, level.translate(), message)
    }

    fn config(&mut self, key: String) -> wasmtime::Result<Option<String>> {
        newest::host::Host::config(self, key)
    }

    fn get(&mut self, key: String) -> wasmtime::Result<Option<Vec<u8>>> {
        use newest::host::StoreFailure;
        match newest::host::Host::get(self, key)? {
            Ok(value) => Ok(value),
            // There is no other way to say so: no value would be a lie.
            Err(StoreFailure::Denied) => Err(Halt::Ungranted("store").into()),
            Err(failure) => Err(wasmtime::Error::msg(Translate::<String>::translate(failure))),
        }
    }

    fn set(
        &mut self,
        key: String,
        value: Vec<u8>,
        ttl_seconds: Option<u32>,
    ) -> wasmtime::Result<Result<(), String>> {
        let set = newest::host::Host::set(self, key, value, ttl_seconds)?;
        Ok(set.map_err(Translate::translate))
    }

    fn add(
        &mut self,
        key: String,
        delta: i64,
        ttl_seconds: Option<u32>,
    ) -> wasmtime::Result<Result<i64, String>> {
        let sum = newest::host::Host::add(self, key, delta, ttl_seconds)?;
        Ok(sum.map_err(Translate::translate))
    }
}

impl types::Host for State {}

impl dispatch::Host for State {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_loses_what_this_version_does_not_know_and_nothing_else() {
        let call = newest::types::ToolCall { id: "c1".into(), name: "bash".into(), arguments: "{}".into() };
        let message = newest::types::Message {
            role: newest::types::Role::Tool,
            content: "out".into(),
            tool_calls: vec![call],
            tool_call_id: Some("c1".into()),
        };
        let at = message.content.as_ptr();
        let tool = newest::types::Tool { name: "ls".into(), description: None, parameters: "{}".into() };
        let sampling = newest::types::Sampling {
            temperature: Some(0.5),
            top_p: None,
            max_tokens: Some(7),
            seed: Some(1),
            stop: vec!["x".into()],
        };
        let request = newest::types::Request {
            id: "r".into(),
            conversation: "0123456789abcdef".into(),
            model: "auto".into(),
            messages: vec![message],
            tools: vec![tool],
            sampling,
            headers: vec![("a".into(), "b".into())],
        };
        let told: types::Request = request.translate();
        assert_eq!((told.id.as_str(), told.model.as_str()), ("r", "auto"));
        let [message] = &told.messages[..] else { panic!("{:?}", told.messages) };
        assert_eq!((message.role, message.content.as_str()), (types::Role::Tool, "out"));
        assert_eq!(message.content.as_ptr(), at, "moved, not copied");
        assert_eq!(
            (message.tool_calls[0].name.as_str(), message.tool_call_id.as_deref()),
            ("bash", Some("c1"))
        );
        assert_eq!((told.tools[0].name.as_str(), told.sampling.max_tokens), ("ls", Some(7)));
        assert_eq!(
            (told.sampling.stop, told.headers),
            (vec!["x".to_owned()], vec![("a".into(), "b".into())])
        );
    }

    #[test]
    fn a_rejection_of_this_version_says_nothing_of_when_to_come_back() {
        let rejection = dispatch::Rejection { status: 429, code: "spent".into(), message: "Spent.".into() };
        let plan: newest::dispatch::Plan = dispatch::Plan::Reject(rejection).translate();
        let newest::dispatch::Plan::Reject(rejection) = plan else { panic!("{plan:?}") };
        assert_eq!((rejection.status, rejection.retry_after), (429, None));
    }

    #[test]
    fn what_the_store_refuses_is_a_sentence() {
        use newest::host::StoreFailure;
        let told = |failure: StoreFailure| -> String { failure.translate() };
        assert!(told(StoreFailure::Denied).starts_with("denied: the store"));
        assert_eq!(told(StoreFailure::NotACounter("no counter".into())), "no counter");
    }
}
