//! How a call of a policy can fail: a closed set, because each kind is a metrics label and a reason code.

use serde::{Deserialize, Serialize};

/// The kind of a fault. A plan that a fault led to has the reason `policy-` and this word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FaultKind {
    /// The guest's own code ran longer than `cpu_ms`.
    Cpu,
    /// The call took longer than `wall_ms`.
    Wall,
    /// The guest asked for more than `memory_mb`.
    Memory,
    /// The guest called imports more often than `calls`.
    Calls,
    /// The guest recursed too deeply.
    Stack,
    /// The guest trapped, or what it returned cannot be read.
    Trap,
    /// The guest made use of what it is not granted: WASI, which no policy is, or a capability.
    Denied,
    /// The policy returned an error.
    Error,
    /// The plan names what does not exist, or is out of range.
    InvalidPlan,
    /// More requests wait for policies than the pool takes.
    Busy,
    /// The component could not be instantiated.
    Instantiate,
    /// No version of the policy is served.
    Unavailable,
}

impl FaultKind {
    /// Every kind, for metrics that show zeros.
    pub const ALL: [Self; 12] = [
        Self::Cpu,
        Self::Wall,
        Self::Memory,
        Self::Calls,
        Self::Stack,
        Self::Trap,
        Self::Denied,
        Self::Error,
        Self::InvalidPlan,
        Self::Busy,
        Self::Instantiate,
        Self::Unavailable,
    ];

    /// The word for metrics and journals.
    #[must_use]
    pub fn code(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Wall => "wall",
            Self::Memory => "memory",
            Self::Calls => "calls",
            Self::Stack => "stack",
            Self::Trap => "trap",
            Self::Denied => "denied",
            Self::Error => "error",
            Self::InvalidPlan => "invalid-plan",
            Self::Busy => "busy",
            Self::Instantiate => "instantiate",
            Self::Unavailable => "unavailable",
        }
    }

    /// The reason of a plan that this fault led to, such as `policy-cpu`.
    #[must_use]
    pub fn reason(self) -> String {
        format!("policy-{}", self.code())
    }
}

impl std::fmt::Display for FaultKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.code())
    }
}

/// Why a call of a policy gave no plan.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{kind}: {message}")]
pub struct Fault {
    /// What happened.
    pub kind: FaultKind,
    /// The bound that was met, or what the policy or the runtime said. One line.
    pub message: String,
}

impl Fault {
    pub(super) fn new(kind: FaultKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_what_is_serialized() {
        for kind in FaultKind::ALL {
            assert_eq!(serde_json::to_value(kind).unwrap(), kind.code());
        }
    }
}
