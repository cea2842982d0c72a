//! What a running guest has: its sessions, its budgets and its bounds.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forkpoint_engine::{Answer, Completion, EngineError, Message, Probe, Question, Sampling, Session, Usage};
use wasmtime::component::Resource;

use super::capabilities::Capabilities;
use super::clock::Clock;
use super::contract::engine;
use super::convert;
use super::fault::FaultKind;
use super::limits::Limits;
use super::offline::OfflineSession;
use super::opening::Opening;
use super::plan::RouteRequest;
use super::sessions::{NoSession, Sessions};
use super::settings::PolicySettings;
use super::store::KeyValue;
use super::trace::{Decision, Failure, FailureKind, Used};
use super::wall::Wall;
use crate::probe::shelf::{self, Entry, Probes};

/// No tokenizer makes fewer tokens of a prompt's text than one for so many bytes, runs of blanks apart: a
/// question that must overspend is refused before it is computed.
const BYTES_PER_TOKEN: usize = 8;

/// What stands behind a guest's `session`.
#[expect(unreachable_pub, reason = "the bindings re-export it")]
pub enum Place {
    /// A session of the engine, opened by the first call that needs it.
    Engine(Opening),
    /// One without an engine.
    Offline(OfflineSession),
}

impl Place {
    /// What the engine has for it; nothing without one.
    pub(super) fn into_opening(self) -> Option<Opening> {
        match self {
            Self::Engine(opening) => Some(opening),
            Self::Offline(_) => None,
        }
    }

    /// The engine's session, if it is open.
    pub(super) fn into_session(self) -> Option<Session> {
        self.into_opening().and_then(Opening::into_session)
    }

    /// Why the engine could not open it, if it was asked to.
    pub(super) fn failure(&self) -> Option<&EngineError> {
        match self {
            Self::Engine(opening) => opening.failure(),
            Self::Offline(_) => None,
        }
    }

    /// Whether a call finds it open.
    pub(super) fn is_open(&self) -> bool {
        match self {
            Self::Engine(opening) => opening.session().is_some(),
            Self::Offline(_) => true,
        }
    }

    pub(super) async fn open(&mut self) -> Result<(), Refusal> {
        match self {
            Self::Engine(opening) => Ok(opening.open().await.map(|_| ())?),
            Self::Offline(_) => Ok(()),
        }
    }

    /// What the guest is told of it.
    pub(super) fn told(&self) -> Usage {
        match self {
            Self::Engine(opening) => opening.told(),
            Self::Offline(session) => session.usage(),
        }
    }

    /// Nothing where it is not open.
    pub(super) fn usage(&self) -> Usage {
        match self {
            Self::Engine(opening) => opening.usage().unwrap_or_default(),
            Self::Offline(session) => session.usage(),
        }
    }

    pub(super) async fn fork(&mut self) -> Result<Self, Refusal> {
        Ok(match self {
            Self::Engine(opening) => Self::Engine(opening.open().await?.fork().await?.into()),
            Self::Offline(session) => Self::Offline(session.fork()?),
        })
    }

    pub(super) async fn append(&mut self, messages: &[Message]) -> Result<u32, Refusal> {
        match self {
            Self::Engine(opening) => Ok(opening.open().await?.append(messages).await?),
            Self::Offline(session) => Ok(session.append(messages)),
        }
    }

    /// `names` are the probes as the questions name them, `probes` those that are fitted.
    async fn decide(
        &mut self,
        questions: &[Question],
        names: &[Option<String>],
        probes: &[Option<Arc<Probe>>],
    ) -> Result<Vec<Answer>, Refusal> {
        match self {
            Self::Engine(_) if questions.is_empty() => Ok(Vec::new()),
            Self::Engine(opening) => Ok(opening.open().await?.decide_by(questions, probes).await?),
            Self::Offline(session) => {
                let names = names.iter().map(Option::as_deref);
                let questions: Vec<_> = questions.iter().zip(names).collect();
                Ok(session.decide(&questions)?)
            }
        }
    }

    pub(super) async fn draft(&mut self, sampling: Sampling) -> Result<Completion, Refusal> {
        match self {
            Self::Engine(opening) => Ok(opening.open().await?.draft(sampling).await?),
            Self::Offline(session) => Ok(session.draft(sampling.max_tokens)?),
        }
    }
}

/// Why the host ends a call, as the error that unwinds the guest.
#[derive(Debug, thiserror::Error)]
pub(super) enum Halt {
    #[error("used {0} ms of processor time, the limit (cpu_ms)")]
    Cpu(u64),
    #[error("asked for {0} MiB of memory, the limit (memory_mb) is {1}")]
    Memory(u64, u64),
    #[error("called imports {0} times, the limit (calls)")]
    Calls(u64),
    #[error("{0} is not granted: policies have no WASI")]
    Denied(String),
    #[error("{0} is a capability that the manifest does not ask for or the operator does not grant")]
    Ungranted(&'static str),
}

impl Halt {
    pub(super) fn kind(&self) -> FaultKind {
        match self {
            Self::Cpu(_) => FaultKind::Cpu,
            Self::Memory(..) => FaultKind::Memory,
            Self::Calls(_) => FaultKind::Calls,
            Self::Denied(_) | Self::Ungranted(_) => FaultKind::Denied,
        }
    }
}

/// What an import of the engine gives instead of its result.
#[expect(unreachable_pub, reason = "the bindings re-export it")]
#[derive(Debug)]
pub enum Refusal {
    /// For the guest to handle.
    Failure(engine::Failure),
    /// The end of the call.
    Trap(wasmtime::Error),
}

impl From<&EngineError> for Refusal {
    fn from(error: &EngineError) -> Self {
        Self::Failure(convert::failure_out(error))
    }
}

impl From<EngineError> for Refusal {
    fn from(error: EngineError) -> Self {
        Self::from(&error)
    }
}

impl From<Failure> for Refusal {
    fn from(failure: Failure) -> Self {
        let message = failure.message;
        Self::Failure(match failure.kind {
            FailureKind::Invalid => engine::Failure::Invalid(message),
            FailureKind::Full => engine::Failure::Full(message),
            FailureKind::Budget => engine::Failure::Budget(message),
            FailureKind::Denied => engine::Failure::Denied(message),
            FailureKind::Unavailable => engine::Failure::Unavailable(message),
        })
    }
}

impl From<NoSession> for Refusal {
    fn from(error: NoSession) -> Self {
        Self::Trap(error.into())
    }
}

impl From<wasmtime::Error> for Refusal {
    fn from(error: wasmtime::Error) -> Self {
        Self::Trap(error)
    }
}

pub(super) fn budget<T>(message: String) -> Result<T, Refusal> {
    Err(Refusal::Failure(engine::Failure::Budget(message)))
}

/// The data of a guest's store.
pub(super) struct State {
    pub(super) sessions: Sessions,
    pub(super) clock: Arc<Clock>,
    wall: Arc<Wall>,
    pub(super) limits: Limits,
    pub(super) used: Used,
    pub(super) decisions: Vec<Decision>,
    /// The handle of the request's session; after a first change, of the fork of it.
    lent: Resource<Place>,
    /// The request's session, once the guest has changed what it was lent.
    original: Option<Place>,
    pub(super) policy: Arc<str>,
    pub(super) settings: Arc<PolicySettings>,
    pub(super) held: Held,
    pub(super) request: Asked,
    /// When the policy was asked.
    pub(super) started: Instant,
    pub(super) waited: Duration,
    memories: usize,
}

/// What all calls of a policy share.
pub(super) struct Held {
    pub(super) store: Arc<KeyValue>,
    /// None where they are switched off: then label reads answer.
    pub(super) probes: Option<Arc<Probes>>,
}

/// What the imports need of the request.
pub(super) struct Asked {
    pub(super) id: String,
    pub(super) drafts: Sampling,
    /// No engine stands behind it.
    pub(super) offline: bool,
}

impl State {
    /// The state of a guest that is lent `place`, by a call that began at `started` and whose time is `wall`.
    pub(super) fn new(
        policy: Arc<str>,
        settings: Arc<PolicySettings>,
        held: Held,
        request: &RouteRequest,
        place: Place,
        (started, wall): (Instant, Arc<Wall>),
    ) -> Self {
        let offline = matches!(place, Place::Offline(_));
        let mut sessions = Sessions::default();
        let lent = sessions.push(place);
        let request = Asked { id: request.id.clone(), drafts: request.drafts.clone(), offline };
        Self {
            sessions,
            clock: Arc::default(),
            wall,
            limits: settings.limits,
            used: Used::default(),
            decisions: Vec::new(),
            lent,
            original: None,
            policy,
            settings,
            held,
            request,
            started,
            waited: Duration::ZERO,
            memories: 0,
        }
    }

    /// What follows `self` in the same instance, whose memory is as large as it was left: by a call where it is `warm`, by
    /// its start where there was none.
    pub(super) fn followed_by(&self, mut next: Self, warm: bool) -> Self {
        let mut sessions = self.sessions.after();
        if let Ok(place) = next.sessions.take(&next.lent) {
            next.lent = sessions.push(place);
        }
        next.sessions = sessions;
        next.memories = self.memories;
        next.used.memory = self.memories as u64;
        (next.used.warm, next.used.ready) = (u64::from(warm), u64::from(!warm));
        if !warm {
            // Its start is a part of its only call.
            next.clock.add(self.clock.spent());
        }
        next
    }

    /// The handle that the guest is given for the call. It owns it in name: what lies behind stays here.
    pub(super) fn lend(&self) -> Resource<Place> {
        Resource::new_own(self.lent.rep())
    }

    /// Takes a session that the guest gave away; none when it is the request's own.
    pub(super) fn take(&mut self, owned: Resource<Place>) -> wasmtime::Result<Option<Place>> {
        if owned.rep() == self.lent.rep() {
            return Ok(None);
        }
        Ok(Some(self.sessions.take(&owned)?))
    }

    /// Drops a session that the guest is done with. The request's own is kept: it outlives the call.
    pub(super) fn discard(&mut self, owned: Resource<Place>) -> wasmtime::Result<()> {
        // A collector of garbage comes to the handles of one call in another.
        if self.sessions.is_past(&owned) {
            return Ok(());
        }
        self.take(owned).map(drop)
    }

    /// The request's session as it was lent, and the fork of it that the guest has changed, if it did.
    /// All others end.
    pub(super) fn give_back(&mut self) -> (Place, Option<Place>) {
        let lent = self.sessions.take(&self.lent).expect("neither `take` nor `discard` removes what is lent");
        self.sessions = self.sessions.after();
        match self.original.take() {
            None => (lent, None),
            Some(original) => (original, Some(lent)),
        }
    }

    /// Bytes of all memories, which only grow.
    pub(super) fn memory(&self) -> usize {
        self.memories
    }

    /// What was used, with the times as they stand now.
    pub(super) fn used(&self) -> Used {
        Used { cpu_us: micros(self.clock.spent()), host_us: micros(self.waited), ..self.used }
    }

    /// An import is called that answers at once, on the guest's own time: its clock costs as much as such a call.
    pub(super) fn count(&mut self) -> wasmtime::Result<()> {
        self.used.calls += 1;
        if self.used.calls > self.limits.calls {
            return Err(Halt::Calls(self.limits.calls).into());
        }
        Ok(())
    }

    /// An import is called that waits or works: the guest's clock stands still until the returned value is dropped.
    pub(super) fn enter(&mut self) -> wasmtime::Result<Outside> {
        self.clock.pause();
        self.count()?;
        Ok(Outside { clock: self.clock.clone() })
    }

    /// What the policy may do.
    pub(super) fn may(&self) -> &Capabilities {
        &self.settings.capabilities
    }

    /// The session behind a handle, for a change: the request's own is kept as it is, and a fork of it takes its
    /// place.
    pub(super) async fn writable(&mut self, on: &Resource<Place>) -> Result<&mut Place, Refusal> {
        if on.rep() == self.lent.rep() && self.original.is_none() {
            let place = self.sessions.get_mut(on)?;
            let fork = place.fork().await?;
            self.original = Some(std::mem::replace(place, fork));
        }
        Ok(self.sessions.get_mut(on)?)
    }

    /// Refuses what must cost more tokens than are left.
    pub(super) fn check_tokens(&self, bytes: usize) -> Result<(), Refusal> {
        let left = self.limits.decided_tokens.saturating_sub(self.used.decided_tokens);
        if left == 0 || (bytes / BYTES_PER_TOKEN) as u64 > left {
            return budget(format!(
                "{} of {} tokens (decided_tokens) are spent, {bytes} bytes more do not fit",
                self.used.decided_tokens, self.limits.decided_tokens
            ));
        }
        Ok(())
    }

    /// Opens the session behind a handle, unless it is open.
    pub(super) async fn open(&mut self, on: &Resource<Place>) -> Result<(), Refusal> {
        let place = self.sessions.get_mut(on)?;
        if place.is_open() {
            return Ok(());
        }
        let _stopped = self.wall.stop();
        let start = Instant::now();
        let opened = place.open().await;
        self.waited += start.elapsed();
        opened
    }

    /// Makes questions ready to be asked, and opens the session for them. What can be refused before is.
    pub(super) async fn admit<'a>(
        &mut self,
        on: &Resource<Place>,
        questions: &'a [Question],
        names: &[Option<String>],
    ) -> Result<Admitted<'a>, Refusal> {
        let (asked, more) = (self.used.decisions, questions.len() as u64);
        if asked + more > self.limits.decisions {
            return budget(format!(
                "{asked} of {} questions (decisions) are asked, {more} more do not fit",
                self.limits.decisions
            ));
        }
        // Without an engine nothing is read from examples.
        let shipped = self.held.probes.as_ref().filter(|_| !self.request.offline);
        let entries = names.iter().enumerate().map(|(index, name)| match (name, shipped) {
            (Some(name), Some(shipped)) => {
                let entry = shelf::find(shipped, name).cloned();
                entry.map(Some).map_err(|what| format!("question {index}: {what}"))
            }
            _ => Ok(None),
        });
        let entries: Vec<Option<Arc<Entry>>> = entries
            .collect::<Result<_, String>>()
            .map_err(|what| Refusal::Failure(engine::Failure::Invalid(what)))?;
        let questions = if entries.iter().all(Option::is_none) {
            Cow::Borrowed(questions)
        } else {
            let worded = questions.iter().zip(&entries).map(|(question, entry)| {
                entry.as_ref().map_or_else(|| question.clone(), |entry| entry.worded(question))
            });
            Cow::Owned(worded.collect())
        };
        // Also those that a probe is to answer: where the session cannot be read, labels are.
        self.check_tokens(questions.iter().map(convert::question_bytes).sum())?;
        if !questions.is_empty() {
            self.open(on).await?;
        }
        Ok(Admitted { questions, entries })
    }

    /// Asks what is admitted. `names` are the probes as the questions name them.
    pub(super) async fn ask(
        &mut self,
        on: &Resource<Place>,
        Admitted { questions, entries }: Admitted<'_>,
        names: &[Option<String>],
    ) -> Result<Vec<Answer>, Refusal> {
        let probes: Vec<Option<Arc<Probe>>> =
            entries.iter().map(|entry| entry.as_ref().and_then(|entry| entry.probe())).collect();
        self.used.decisions += questions.len() as u64;
        let place = self.sessions.get_mut(on)?;
        let held = place.usage().tokens;
        let before = place.usage().decided;
        let answers = place.decide(&questions, names, &probes).await;
        let decided = u64::from(place.usage().decided.saturating_sub(before));
        self.used.decided_tokens += decided;
        let answers = answers?;
        self.used.reused_tokens += u64::from(held);
        for (entry, answer) in entries.iter().zip(&answers) {
            if let Some(entry) = entry {
                entry.count(answer.rung);
            }
        }
        Ok(answers)
    }
}

/// Questions that may be asked, in the words that reach the prompt.
pub(super) struct Admitted<'a> {
    questions: Cow<'a, [Question]>,
    /// The probe that each names, if it does.
    entries: Vec<Option<Arc<Entry>>>,
}

/// While it lives, the guest waits for an import.
pub(super) struct Outside {
    clock: Arc<Clock>,
}

impl Drop for Outside {
    fn drop(&mut self) {
        self.clock.resume();
    }
}

pub(super) fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

impl wasmtime::ResourceLimiter for State {
    fn memory_growing(&mut self, current: usize, desired: usize, _: Option<usize>) -> wasmtime::Result<bool> {
        let total = self.memories.saturating_sub(current).saturating_add(desired);
        if total > self.limits.memory() {
            return Err(Halt::Memory(total.div_ceil(1 << 20) as u64, self.limits.memory_mb).into());
        }
        self.memories = total;
        self.used.memory = self.used.memory.max(total as u64);
        Ok(true)
    }

    fn table_growing(&mut self, _: usize, desired: usize, _: Option<usize>) -> wasmtime::Result<bool> {
        Ok(desired <= super::runtime::TABLE_ELEMENTS)
    }
}
