//! Plans, and why.

use crate::{Forward, Generation, Message, Plan, Rejection, Routing, Sampling, Session};

/// Replies from a model in this process; by itself the session's own, with what the client asked for.
pub fn generate() -> Generate {
    Generate(Generation {
        on: None,
        model: None,
        append: Vec::new(),
        tools: None,
        sampling: Sampling::default(),
    })
}

/// Sends the request to an upstream that the operator named.
pub fn forward(upstream: impl Into<String>) -> ForwardTo {
    ForwardTo(Forward { upstream: upstream.into(), model: None })
}

/// Answers with this text; no model runs. Its reason is "reply".
pub fn reply(text: impl Into<String>) -> Routing {
    routing(Plan::Reply(text.into()), "reply")
}

/// Refuses with an HTTP status of 400 to 599, a code for programs, which is the reason too, and a sentence
/// for people.
pub fn reject(status: u16, code: impl Into<String>, message: impl Into<String>) -> Routing {
    let code = code.into();
    let reason = code.clone();
    routing(Plan::Reject(Rejection { status, code, message: message.into() }), reason)
}

/// Has no opinion: the next policy of the chain is asked. Its reason is "next".
#[must_use]
pub fn next() -> Routing {
    routing(Plan::Next, "next")
}

fn routing(plan: Plan, reason: impl Into<String>) -> Routing {
    Routing { plan, reason: reason.into(), labels: Vec::new() }
}

impl Routing {
    /// Says why, as a short code for metrics and journals.
    #[must_use]
    pub fn because(mut self, reason: impl Into<String>) -> Self {
        self.reason = reason.into();
        self
    }

    /// Adds a name and value to the journal.
    #[must_use]
    pub fn label(mut self, name: impl Into<String>, value: impl ToString) -> Self {
        self.labels.push((name.into(), value.to_string()));
        self
    }

    /// Adds a name and a figure, with two digits, to the journal.
    #[must_use]
    pub fn figure(self, name: impl Into<String>, value: f64) -> Self {
        self.label(name, format!("{value:.2}"))
    }
}

/// A reply to be generated; [`Generate::because`] makes it a plan.
#[derive(Debug)]
#[must_use = "a generation does nothing until it is returned"]
pub struct Generate(Generation);

impl Generate {
    /// Adds a turn of instructions after the conversation, where it keeps the conversation warm.
    pub fn system(self, text: impl Into<String>) -> Self {
        self.append(Message::system(text))
    }

    /// Adds a turn after the conversation.
    pub fn append(mut self, turn: Message) -> Self {
        self.0.append.push(turn);
        self
    }

    /// Mounts these tools, by name, and no others.
    pub fn mount<T: Into<String>>(mut self, tools: impl IntoIterator<Item = T>) -> Self {
        self.0.tools.get_or_insert_default().extend(tools.into_iter().map(Into::into));
        self
    }

    /// Mounts no tools, whatever the client offers.
    pub fn without_tools(mut self) -> Self {
        self.0.tools = Some(Vec::new());
        self
    }

    /// Takes a model that the operator loaded, at the cost of a prefill, rather than the session's own.
    pub fn model(mut self, name: impl Into<String>) -> Self {
        self.0.model = Some(name.into());
        self
    }

    /// Continues from this fork rather than from the request's session.
    pub fn on(mut self, fork: Session) -> Self {
        self.0.on = Some(fork);
        self
    }

    /// Sets the temperature in the client's place.
    pub fn temperature(mut self, temperature: f32) -> Self {
        self.0.sampling.temperature = Some(temperature);
        self
    }

    /// Bounds the reply in the client's place.
    pub fn max_tokens(mut self, tokens: u32) -> Self {
        self.0.sampling.max_tokens = Some(tokens);
        self
    }

    /// Sets all sampling in the client's place; what is `None` keeps the client's value.
    pub fn sampling(mut self, sampling: Sampling) -> Self {
        self.0.sampling = sampling;
        self
    }

    /// Says why, as a short code for metrics and journals.
    pub fn because(self, reason: impl Into<String>) -> Routing {
        routing(Plan::Generate(self.0), reason)
    }
}

impl From<Generate> for Routing {
    fn from(generate: Generate) -> Self {
        generate.because("generate")
    }
}

/// A request to be sent to an upstream; [`ForwardTo::because`] makes it a plan.
#[derive(Debug)]
#[must_use = "a forward does nothing until it is returned"]
pub struct ForwardTo(Forward);

impl ForwardTo {
    /// Asks the upstream for this model rather than by its own rule.
    pub fn model(mut self, name: impl Into<String>) -> Self {
        self.0.model = Some(name.into());
        self
    }

    /// Says why, as a short code for metrics and journals.
    pub fn because(self, reason: impl Into<String>) -> Routing {
        routing(Plan::Forward(self.0), reason)
    }
}

impl From<ForwardTo> for Routing {
    fn from(forward: ForwardTo) -> Self {
        forward.because("forward")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Role;

    #[test]
    fn a_generation_keeps_what_it_does_not_set() {
        let Plan::Generate(plain) = generate().because("plain").plan else { panic!() };
        assert!(plain.on.is_none() && plain.model.is_none() && plain.append.is_empty());
        assert_eq!(plain.tools, None, "the client's tools stay");
        assert_eq!(plain.sampling.temperature, None);
    }

    #[test]
    fn a_generation_collects_turns_and_tools() {
        let routing = generate()
            .system("Be brief.")
            .append(Message::user("And polite."))
            .mount(["bash"])
            .mount(["read"])
            .temperature(0.0)
            .max_tokens(64)
            .because("needs-shell")
            .label("by", "rule")
            .figure("risk", 0.8149);
        assert_eq!(routing.reason, "needs-shell");
        assert_eq!(
            routing.labels,
            [("by", "rule"), ("risk", "0.81")].map(|(k, v)| (k.to_owned(), v.to_owned()))
        );
        let Plan::Generate(made) = routing.plan else { panic!() };
        assert_eq!(made.append[0].role, Role::System);
        assert_eq!(made.append[1].content, "And polite.");
        assert_eq!(made.tools.unwrap(), ["bash", "read"]);
        assert_eq!(made.sampling.max_tokens, Some(64));
    }

    #[test]
    fn no_tools_is_not_the_client_s_tools() {
        let Plan::Generate(made) = generate().without_tools().because("x").plan else { panic!() };
        assert_eq!(made.tools, Some(Vec::new()));
    }

    #[test]
    fn every_plan_has_a_reason() {
        assert_eq!(Routing::from(generate()).reason, "generate");
        assert_eq!(Routing::from(forward("strong")).reason, "forward");
        assert_eq!(reply("hello").reason, "reply");
        assert_eq!(next().reason, "next");
        let refused = reject(403, "shell-risk", "No.");
        assert_eq!(refused.reason, "shell-risk");
        let Plan::Reject(rejection) = refused.because("other").plan else { panic!() };
        assert_eq!((rejection.status, rejection.code.as_str()), (403, "shell-risk"));
    }

    #[test]
    fn a_forward_may_name_the_model() {
        let Plan::Forward(plan) = forward("strong").model("big").because("hard").plan else { panic!() };
        assert_eq!((plan.upstream.as_str(), plan.model.as_deref()), ("strong", Some("big")));
    }
}
