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

impl fmt::Display for Error {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (kind, text) = match self {
            Self::Policy(reason) => return out.write_str(reason),
            Self::Engine(Failure::Invalid(text)) => ("invalid", text),
            Self::Engine(Failure::Full(text)) => ("full", text),
            Self::Engine(Failure::Budget(text)) => ("budget", text),
            Self::Engine(Failure::Denied(text)) => ("denied", text),
            Self::Engine(Failure::Unavailable(text)) => ("unavailable", text),
        };
        write!(out, "{kind}: {text}")
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
        assert_eq!(Error::from("no model fits").to_string(), "no model fits");
    }
}
