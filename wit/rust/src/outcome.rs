//! A plan as an operator writes it in a configuration.

use crate::{Error, Routing, forward, generate, next, reject, warn};
use std::str::FromStr;

/// What to do with a request, as the words of a configuration: `generate`, `next`, `reject STATUS`,
/// `forward UPSTREAM` or `forward UPSTREAM MODEL`. Read one with [`config_or`](crate::config_or):
/// `config_or("on-failure", Outcome::Next)?`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// The session's own model replies.
    Generate,
    /// The next policy of the chain is asked.
    Next,
    /// The client gets this HTTP status, from 400 to 599.
    Reject(u16),
    /// An upstream replies, with its own model where none is named.
    Forward(String, Option<String>),
}

impl Outcome {
    /// The plan, for this reason. A refusal takes the reason as its code and `message` as its sentence; the other
    /// plans have no use for it.
    #[must_use]
    pub fn because(&self, reason: &str, message: &str) -> Routing {
        match self {
            Self::Generate => generate().because(reason),
            Self::Next => next().because(reason),
            Self::Reject(status) => reject(*status, reason, message),
            Self::Forward(upstream, None) => forward(upstream).because(reason),
            Self::Forward(upstream, Some(model)) => forward(upstream).model(model).because(reason),
        }
    }

    /// The plan after a call that failed: its reason is `engine-failed`, its label `failure` says of which kind, and
    /// the log has the rest.
    #[must_use]
    pub fn after(&self, error: &Error) -> Routing {
        warn(&error.to_string());
        self.because("engine-failed", "The request could not be judged; try again later.")
            .label("failure", error.kind())
    }
}

impl FromStr for Outcome {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let words: Vec<&str> = text.split_whitespace().collect();
        match words[..] {
            ["generate"] => Ok(Self::Generate),
            ["next"] => Ok(Self::Next),
            ["reject", status] => match status.parse() {
                Ok(status @ 400..=599) => Ok(Self::Reject(status)),
                _ => Err(format!("a refusal's status is from 400 to 599, not {status:?}")),
            },
            ["forward", upstream] => Ok(Self::Forward(upstream.into(), None)),
            ["forward", upstream, model] => Ok(Self::Forward(upstream.into(), Some(model.into()))),
            _ => Err("expected generate, next, reject STATUS or forward UPSTREAM [MODEL]".into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Plan;

    #[test]
    fn an_outcome_is_read_or_refused() {
        assert_eq!("generate".parse(), Ok(Outcome::Generate));
        assert_eq!(" next ".parse(), Ok(Outcome::Next));
        assert_eq!("reject 503".parse(), Ok(Outcome::Reject(503)));
        assert_eq!("forward strong".parse(), Ok(Outcome::Forward("strong".into(), None)));
        assert_eq!(
            "forward strong large".parse(),
            Ok(Outcome::Forward("strong".into(), Some("large".into())))
        );
        for bad in
            ["", "Generate", "reject", "reject 200", "reject soon", "forward", "forward a b c", "allow"]
        {
            assert!(bad.parse::<Outcome>().is_err(), "{bad}");
        }
    }

    #[test]
    fn an_outcome_becomes_the_plan_that_it_names() {
        let Plan::Reject(refusal) = Outcome::Reject(503).because("busy", "Later.").plan else { panic!() };
        assert_eq!(
            (refusal.status, refusal.code.as_str(), refusal.message.as_str()),
            (503, "busy", "Later.")
        );
        let Plan::Forward(to) =
            Outcome::Forward("strong".into(), Some("large".into())).because("hard", "").plan
        else {
            panic!()
        };
        assert_eq!((to.upstream.as_str(), to.model.as_deref()), ("strong", Some("large")));
        assert!(matches!(Outcome::Next.because("no-view", "").plan, Plan::Next));
        assert_eq!(Outcome::Generate.because("plain", "").reason, "plain");
    }
}
