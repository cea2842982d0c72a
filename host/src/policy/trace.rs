//! What happened while a request went through its policies: for the journal, the log and metrics.

use forkpoint_engine::{Answer, Message, Question};
use serde::{Deserialize, Serialize};

use super::Fault;
use super::plan::{GeneratePlan, Plan, SamplingOverrides};

/// The policies that were asked, in order. Holds no text of the conversation but what a policy itself repeats.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
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
            sum.reused_tokens += used.reused_tokens;
            sum.generated_tokens += used.generated_tokens;
            sum.forks += used.forks;
            sum.log_lines += used.log_lines;
            sum.drafts += used.drafts;
            sum.store_calls += used.store_calls;
            sum.warm += used.warm;
            sum.ready += used.ready;
            sum.fuel = sum.fuel.or(used.fuel).map(|_| sum.fuel.unwrap_or(0) + used.fuel.unwrap_or(0));
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
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// The policy.
    pub policy: String,
    /// Its version: the first 12 digits of the component's hash, or nothing when none is served.
    pub version: String,
    /// Microseconds from when the first policy of the chain was asked to when this one was.
    #[serde(default)]
    pub at_us: u64,
    /// Its plan; none after a fault.
    pub plan: Option<PlanRecord>,
    /// Its reason, or the fault's.
    pub reason: String,
    /// What it noted for the journal.
    pub labels: Vec<(String, String)>,
    /// Capabilities that it made use of, such as `store` or `upstreams.strong`.
    pub capabilities: Vec<String>,
    /// Why it gave no plan.
    pub fault: Option<Fault>,
    /// What it asked, in order.
    pub decisions: Vec<Decision>,
    /// What it used.
    pub used: Used,
}

/// A plan, as it is written down. Where a policy gives back a session, only whether it is the request's own.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum PlanRecord {
    /// Reply from a model in this process.
    Generate {
        /// What the reply continues.
        continues: Continues,
        /// The model named, if one is.
        model: Option<String>,
        /// Turns added.
        append: Vec<Message>,
        /// Tools named; none keeps the request's.
        tools: Option<Vec<String>>,
        /// What the policy set.
        sampling: SamplingOverrides,
    },
    /// Send the request on.
    Forward {
        /// Where.
        upstream: String,
        /// The model named there, if one is.
        model: Option<String>,
    },
    /// Answer with a text.
    Reply {
        /// The text.
        text: String,
    },
    /// Refuse.
    Reject {
        /// From 400 to 599.
        status: u16,
        /// For programs.
        code: String,
        /// For people.
        message: String,
        /// When the client may ask again, in seconds, where the policy said so.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        retry_after: Option<u32>,
    },
    /// Ask the next policy.
    Next,
}

/// What a reply continues.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Continues {
    /// The request's session, as it was.
    Session,
    /// A fork that the policy made, or the session as the policy changed it.
    Fork,
}

impl PlanRecord {
    /// `generate`, `forward`, `reply`, `reject` or `next`.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Generate { .. } => "generate",
            Self::Forward { .. } => "forward",
            Self::Reply { .. } => "reply",
            Self::Reject { .. } => "reject",
            Self::Next => "next",
        }
    }

    /// `changed`: the policy changed the request's session.
    pub(super) fn of(plan: Option<&Plan>, changed: bool) -> Self {
        match plan {
            None => Self::Next,
            Some(Plan::Generate(GeneratePlan { session, model, append, tools, sampling })) => {
                Self::Generate {
                    continues: if changed || session.is_some() {
                        Continues::Fork
                    } else {
                        Continues::Session
                    },
                    model: model.clone(),
                    append: append.clone(),
                    tools: tools.clone(),
                    sampling: sampling.clone(),
                }
            }
            Some(Plan::Forward { upstream, model }) => {
                Self::Forward { upstream: upstream.clone(), model: model.clone() }
            }
            Some(Plan::Reply(text)) => Self::Reply { text: text.clone() },
            Some(Plan::Reject { status, code, message, retry_after }) => Self::Reject {
                status: *status,
                code: code.clone(),
                message: message.clone(),
                retry_after: *retry_after,
            },
        }
    }
}

impl From<&Plan> for PlanRecord {
    fn from(plan: &Plan) -> Self {
        Self::of(Some(plan), false)
    }
}

/// Why an import of the engine gave nothing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{kind}: {message}")]
pub struct Failure {
    /// As the contract names it.
    pub kind: FailureKind,
    /// What the guest was told.
    pub message: String,
}

/// The kinds of the contract's `failure`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[expect(missing_docs, reason = "the contract says what each means")]
pub enum FailureKind {
    Invalid,
    Full,
    Budget,
    Denied,
    Unavailable,
}

impl std::fmt::Display for FailureKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Invalid => "invalid",
            Self::Full => "full",
            Self::Budget => "budget",
            Self::Denied => "denied",
            Self::Unavailable => "unavailable",
        })
    }
}

/// One `decide` of a policy.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Decision {
    /// Microseconds from when the policy was asked to the call, the wait for a place in the pool included.
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
    pub failure: Option<Failure>,
}

impl Used {
    /// Capabilities that a call made use of, but for those that its plan names.
    pub(super) fn capabilities(&self) -> Vec<String> {
        let used = [("generate", self.drafts), ("store", self.store_calls), ("log", self.log_lines)];
        used.iter().filter(|(_, count)| *count > 0).map(|(name, _)| (*name).to_owned()).collect()
    }
}

/// What one call used of its limits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
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
    /// Tokens that the sessions held already on which questions were asked: what a service apart from the engine would
    /// have computed again.
    pub reused_tokens: u64,
    /// Tokens of drafts.
    pub generated_tokens: u64,
    /// Forks made.
    pub forks: u64,
    /// Lines logged, those dropped included.
    pub log_lines: u64,
    /// Drafts written.
    pub drafts: u64,
    /// Calls of the store.
    pub store_calls: u64,
    /// 1 where an instance of an earlier call was used again, 0 where it was a fresh one.
    pub warm: u64,
    /// 1 where the fresh instance was there before the call, 0 where the call had to make it.
    pub ready: u64,
    /// Instructions of the guest, in wasmtime's unit, where they are counted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fuel: Option<u64>,
}
