//! What happened while a request went through its policies: for the journal, the log and metrics.

use forkpoint_engine::{Answer, Question};
use serde::Serialize;

use super::Fault;

/// The policies that were asked, in order. Holds no text of the conversation; a policy's questions are its own.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Trace {
    /// One entry for each policy asked.
    pub steps: Vec<Step>,
}

impl Trace {
    /// What all policies of the chain used together.
    #[must_use]
    pub fn used(&self) -> Used {
        let mut sum = Used::default();
        for Step { used, .. } in &self.steps {
            sum.cpu_us += used.cpu_us;
            sum.host_us += used.host_us;
            sum.wall_us += used.wall_us;
            sum.memory = sum.memory.max(used.memory);
            sum.calls += used.calls;
            sum.decisions += used.decisions;
            sum.decided_tokens += used.decided_tokens;
            sum.generated_tokens += used.generated_tokens;
            sum.forks += used.forks;
            sum.log_lines += used.log_lines;
        }
        sum
    }

    /// The fault that decided the plan, if one did.
    #[must_use]
    pub fn fault(&self) -> Option<&Fault> {
        self.steps.last()?.fault.as_ref()
    }
}

/// One policy's part.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Step {
    /// The policy.
    pub policy: String,
    /// Its version: the first 12 digits of the component's hash, or nothing when none is served.
    pub version: String,
    /// The kind of its plan: "generate", "forward", "reply", "reject" or "next"; none after a fault.
    pub plan: Option<&'static str>,
    /// Its reason, or the fault's.
    pub reason: String,
    /// Why it gave no plan.
    pub fault: Option<Fault>,
    /// What it asked, in order.
    pub decisions: Vec<Decision>,
    /// What it used.
    pub used: Used,
}

/// One `decide` of a policy.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Decision {
    /// Microseconds from the policy's start to the call.
    pub at_us: u64,
    /// Microseconds until it was answered.
    pub took_us: u64,
    /// What was asked.
    pub questions: Vec<Question>,
    /// The probe that each question named, if it did.
    pub probes: Vec<Option<String>>,
    /// What was answered, one a question; empty when the call failed.
    pub answers: Vec<Answer>,
    /// What the guest was told instead of answers.
    pub failure: Option<String>,
}

/// What one call used of its limits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Used {
    /// Microseconds of processor time in the guest.
    pub cpu_us: u64,
    /// Microseconds that it waited for imports.
    pub host_us: u64,
    /// Microseconds from start to end, the wait for a place in the pool included.
    pub wall_us: u64,
    /// Largest linear memory, in bytes.
    pub memory: u64,
    /// Calls of imports.
    pub calls: u64,
    /// Questions asked.
    pub decisions: u64,
    /// Tokens computed for questions and appended turns.
    pub decided_tokens: u64,
    /// Tokens of drafts.
    pub generated_tokens: u64,
    /// Forks made.
    pub forks: u64,
    /// Lines logged, those dropped included.
    pub log_lines: u64,
}
