//! What is noted of a request on its way, for the spans that are made of it once it is over.

use std::time::Instant;

use forkpoint_engine::{FinishReason, Rung, Usage};
use opentelemetry::trace::SpanId;

use crate::policy::{Decision, FailureKind, Step, is_policy_name};

/// When the parts of a request began and ended. A part that has not ended ends with the request.
#[derive(Debug, Default, Clone)]
pub(crate) struct Timeline {
    /// The model that the client named, if there is one of that name.
    pub(crate) model: Option<String>,
    /// The session was opened, with what it holds or the error's code; with neither where that was given up.
    pub(crate) opened: Option<(Phase, Option<Result<Usage, String>>)>,
    /// Policies were asked: from when on, and what each did.
    pub(crate) chain: Option<(Instant, Vec<Step>)>,
    /// The client's own questions were answered; with nothing where they were not.
    pub(crate) decided: Option<(Phase, Option<Asked>)>,
    /// A reply was generated, or the request forwarded.
    pub(crate) dispatched: Option<(Phase, Dispatched)>,
}

/// From when on, and until when.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Phase {
    pub(super) from: Instant,
    pub(super) to: Option<Instant>,
}

impl Phase {
    /// It begins now.
    pub(crate) fn begin() -> Self {
        Self { from: Instant::now(), to: None }
    }

    /// It ends now.
    pub(crate) fn end(&mut self) {
        self.to = Some(Instant::now());
    }
}

/// What was asked of a session in one call, without a word of it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Asked {
    pub(crate) questions: usize,
    /// The probes that the questions name.
    pub(crate) probes: Vec<String>,
    /// What answered each question.
    pub(crate) rungs: Vec<Rung>,
    pub(crate) failure: Option<FailureKind>,
}

impl From<&Decision> for Asked {
    fn from(decision: &Decision) -> Self {
        // A guest may name what cannot be a probe, in any words.
        let can_be = |name: &&String| is_policy_name(name);
        Self {
            questions: decision.questions.len(),
            probes: decision.probes.iter().flatten().filter(can_be).cloned().collect(),
            rungs: decision.answers.iter().map(|answer| answer.rung).collect(),
            failure: decision.failure.as_ref().map(|failure| failure.kind),
        }
    }
}

/// Where the answer comes from.
#[derive(Debug, Clone)]
pub(crate) enum Dispatched {
    /// The model here.
    Generate {
        /// `chat` or `text_completion`.
        operation: &'static str,
        /// Why the reply ended, once it has.
        finish: Option<FinishReason>,
    },
    /// An upstream.
    Forward(Forwarded),
}

/// A request to an upstream.
#[derive(Debug, Clone)]
pub(crate) struct Forwarded {
    /// The span that the upstream was told of.
    pub(crate) span: SpanId,
    /// The upstream's name here.
    pub(crate) upstream: String,
    /// The model named there.
    pub(crate) model: String,
    /// Its host.
    pub(crate) address: String,
    pub(crate) port: Option<u16>,
    /// What it answered, once it has.
    pub(crate) status: Option<u16>,
}

impl Timeline {
    /// The reply is whole.
    pub(crate) fn generated(&mut self, reason: FinishReason) {
        if let Some((phase, Dispatched::Generate { finish, .. })) = &mut self.dispatched {
            phase.end();
            *finish = Some(reason);
        }
    }

    /// An upstream has begun to answer.
    pub(crate) fn answered(&mut self, status: u16) {
        if let Some((_, Dispatched::Forward(forwarded))) = &mut self.dispatched {
            forwarded.status = Some(status);
        }
    }

    /// Nothing more comes of what was dispatched.
    pub(crate) fn dispatch_ends(&mut self) {
        if let Some((phase, _)) = &mut self.dispatched {
            phase.end();
        }
    }
}
