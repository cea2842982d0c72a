//! What the engine's thread is asked to do, and what it answers.

use std::sync::Arc;

use tokio::sync::{mpsc, oneshot};

use crate::decide::{self, LabelSet, Reading};
use crate::error::EngineError;
use crate::generate::{Event, Sampling};
use crate::kv::{Chain, Purpose};

/// A sequence that a handle outside holds.
pub(crate) type SequenceId = u64;

/// What a call's tokens continue.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Base {
    /// Nothing: the whole of a tenant's new session.
    Root(Chain, Purpose),
    /// A session: the tokens come after its last.
    Tip(SequenceId),
    /// As much of a session as the tokens begin like.
    Beginning(SequenceId),
}

/// A session that was opened, grown or forked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Grown {
    pub(crate) tokens: usize,
    pub(crate) reused: usize,
    pub(crate) computed: usize,
}

/// Tokens after a session, and what to read behind them.
#[derive(Debug)]
pub(crate) struct Suffix {
    pub(crate) tokens: Vec<u32>,
    pub(crate) wanted: Wanted,
}

/// What is read off the logits behind a suffix.
#[derive(Debug)]
pub(crate) enum Wanted {
    /// How likely each label is.
    Labels(LabelSet),
    /// All of them.
    Logits,
}

/// What was read.
#[derive(Debug, Clone)]
pub(crate) enum Found {
    Labels(Reading),
    Logits(Vec<f32>),
}

impl Wanted {
    pub(super) fn read(&self, logits: &[f32]) -> Found {
        match self {
            Self::Labels(labels) => Found::Labels(decide::read(logits, labels)),
            Self::Logits => Found::Logits(logits.to_vec()),
        }
    }
}

/// What [`Command::Read`] answers.
#[derive(Debug)]
pub(crate) struct Readings {
    /// One for each suffix, in order.
    pub(crate) found: Vec<Found>,
    /// Tokens computed for them.
    pub(crate) computed: usize,
}

/// A reply to write.
#[derive(Debug)]
pub(crate) struct Write {
    pub(crate) sampling: Sampling,
    /// Tokens that end the reply, never part of it.
    pub(crate) eos: Arc<[u32]>,
    /// Most tokens to write.
    pub(crate) limit: usize,
    pub(crate) events: mpsc::UnboundedSender<Event>,
}

/// Which tokens of a session hidden states are read of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Reach {
    /// These, by place.
    Tokens(std::ops::Range<usize>),
    /// Those that spell these bytes of the session's text.
    Bytes(std::ops::Range<usize>),
    /// The last, at most so many.
    Last(usize),
}

pub(super) type Reply<T> = oneshot::Sender<Result<T, EngineError>>;

/// What the engine's thread is asked to do.
pub(crate) enum Command {
    /// Makes session `id` out of a base and more tokens.
    Grow { id: SequenceId, base: Base, tokens: Vec<u32>, reply: Reply<Grown> },
    /// Reads labels after suffixes of a session.
    Read { base: Base, suffixes: Vec<Suffix>, reply: Reply<Readings> },
    /// Writes a reply as session `id`.
    Write { id: SequenceId, base: Base, tokens: Vec<u32>, write: Write, reply: Reply<()> },
    /// Keeps these layers' hidden states from now on.
    Keep { layers: Vec<usize>, reply: Reply<()> },
    /// Reads hidden states of session `id`.
    Features { id: SequenceId, reach: Reach, layers: Vec<usize>, reply: Reply<Vec<Vec<f32>>> },
    /// Gives up session `id` and whatever computes it.
    Release { id: SequenceId },
    /// Ends every job and the thread.
    Stop,
}
