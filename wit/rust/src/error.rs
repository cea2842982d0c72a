//! What a policy may fail with.

use crate::Failure;
use std::fmt;

/// A policy's result.
pub type Result<T, E = Error> = core::result::Result<T, E>;

/// Why a policy gave no plan. Returned from `route`, it takes the policy's fallback.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// The engine did not serve a call.
    Engine(Failure),
    /// The policy's own reason.
    Policy(String),
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        Self::Engine(failure)
    }
}

impl From<String> for Error {
    fn from(reason: String) -> Self {
        Self::Policy(reason)
    }
}

impl From<&str> for Error {
    fn from(reason: &str) -> Self {
        Self::Policy(reason.to_owned())
    }
}

impl Error {
    /// The kind of the engine's failure, such as "budget", or "policy" for the policy's own reason: short enough for
    /// a label.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Policy(_) => "policy",
            Self::Engine(Failure::Invalid(_)) => "invalid",
            Self::Engine(Failure::Full(_)) => "full",
            Self::Engine(Failure::Budget(_)) => "budget",
            Self::Engine(Failure::Denied(_)) => "denied",
            Self::Engine(Failure::Unavailable(_)) => "unavailable",
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Policy(reason) => out.write_str(reason),
            Self::Engine(
                Failure::Invalid(text)
                | Failure::Full(text)
                | Failure::Budget(text)
                | Failure::Denied(text)
                | Failure::Unavailable(text),
            ) => write!(out, "{}: {text}", self.kind()),
        }
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_failure_keeps_its_kind_in_the_text() {
        let error = Error::from(Failure::Budget("64 of 64 questions asked".into()));
        assert_eq!(error.to_string(), "budget: 64 of 64 questions asked");
        assert_eq!(error.kind(), "budget");
        let own = Error::from("no model fits");
        assert_eq!((own.to_string().as_str(), own.kind()), ("no model fits", "policy"));
    }
}
