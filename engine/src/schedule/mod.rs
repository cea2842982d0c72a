//! The engine's thread: it owns the model, the pages and the schedule.
//!
//! Everyone else sends [`Command`]s. Work is a queue of [`Job`]s, each a
//! sequence with tokens still to compute; a step takes rows from many jobs:
//! decisions first, then every reply's next token, then chunks of prefill.

mod admit;
mod command;
mod job;
mod pace;
mod step;

use std::collections::{HashMap, HashSet, VecDeque};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::error::EngineError;
use crate::kv::{Chain, PageCopy, Pages, Purpose, Sequence, Shortage, branch};
use crate::model::Llama;
use crate::tokenizer::Tokenizer;
use command::Reply;
pub(crate) use command::{Base, Command, Found, Grown, Reach, Readings, SequenceId, Suffix, Wanted, Write};
use forkpoint_kernels::{Backend, PAGE_TOKENS};
use job::{Job, Read, ReadCall, SMALL_REST, Then, Writer};
use pace::Pace;

/// Counters that any thread may read.
#[derive(Debug, Default)]
pub(crate) struct Gauges {
    pub(crate) steps: AtomicU64,
    pub(crate) prefill_tokens: AtomicU64,
    pub(crate) reused_tokens: AtomicU64,
    pub(crate) decisions: AtomicU64,
    pub(crate) decided_tokens: AtomicU64,
    pub(crate) generated_tokens: AtomicU64,
    pub(crate) studied_tokens: AtomicU64,
    pub(crate) hidden_page_bytes: AtomicU64,
    pub(crate) evictions: AtomicU64,
    pub(crate) sessions: AtomicU64,
    pub(crate) waiting: AtomicU64,
    pub(crate) pages_held: AtomicU64,
    pub(crate) pages_cached: AtomicU64,
}

/// Where a job starts: what is there, and the tokens still to compute.
struct Start {
    sequence: Sequence,
    tokens: Vec<u32>,
    /// A new prompt, not what follows a live session.
    fresh: bool,
}

/// Bounds of the schedule.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// Prefill tokens in a step at most; the machine's pace sets how many.
    pub(crate) chunk: usize,
    /// Jobs that may wait.
    pub(crate) queue: usize,
    /// Tokens that a session may hold.
    pub(crate) context: usize,
    /// How long a prompt waits for pages that live sessions hold.
    pub(crate) patience: Duration,
}

impl Limits {
    /// Rows of decisions in a step at most.
    fn decisions(&self) -> usize {
        2 * self.chunk
    }

    /// Replies in a step, of one row each.
    fn replies(&self) -> usize {
        self.chunk
    }

    /// Rows of prefill in a step that has `used` others, of `chunk` without
    /// them: it gives way, but never starves.
    fn prefill(chunk: usize, used: usize) -> usize {
        chunk.saturating_sub(used).max(chunk.div_ceil(4))
    }

    /// Rows of a step at most.
    pub(crate) fn rows(&self) -> usize {
        let others = self.decisions() + self.replies();
        // A decision and a prompt may each have a rest that goes along.
        others + Self::prefill(self.chunk, others) + 2 * SMALL_REST
    }
}

/// How often jobs that wait for pages are looked at when nothing else happens.
const WAIT: Duration = Duration::from_millis(50);

/// The thread's state.
pub(crate) struct Scheduler<B: Backend> {
    model: Llama<B>,
    tokenizer: Arc<Tokenizer>,
    pages: Pages,
    limits: Limits,
    sessions: HashMap<SequenceId, Sequence>,
    jobs: VecDeque<Job>,
    pace: Pace,
    /// Since when no job got the pages that it needs.
    stuck: Option<Instant>,
    gauges: Arc<Gauges>,
    /// Seeds replies that name no seed.
    seeds: u64,
    /// Which set of hidden states pages keep: 0 none, and one more with each change.
    hidden: u32,
    /// When the server's own study last had a step.
    studied: Instant,
    /// How long that took.
    study_took: Duration,
    /// Rows of its next step, while no requests come.
    study_rows: usize,
    /// When a request last had one.
    requested: Instant,
}

impl<B: Backend> Scheduler<B> {
    pub(crate) fn new(
        model: Llama<B>,
        tokenizer: Arc<Tokenizer>,
        pages: usize,
        limits: Limits,
        gauges: Arc<Gauges>,
    ) -> Self {
        let seeds = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .map_or(0, |since| since.as_nanos() as u64);
        Self {
            model,
            tokenizer,
            pages: Pages::new(pages),
            limits,
            sessions: HashMap::new(),
            jobs: VecDeque::new(),
            pace: Pace::default(),
            stuck: None,
            gauges,
            seeds,
            studied: Instant::now(),
            study_took: Duration::ZERO,
            study_rows: step::STUDY,
            hidden: 0,
            requested: Instant::now(),
        }
    }

    /// Serves commands until told to stop or nobody can send any more.
    pub(crate) fn run(mut self, commands: &mpsc::Receiver<Command>) {
        loop {
            // Nothing to compute: sleep until somebody asks.
            if self.jobs.is_empty() {
                self.publish();
                match commands.recv() {
                    Ok(Command::Stop) | Err(_) => break,
                    Ok(command) => self.accept(command),
                }
            }
            loop {
                match commands.try_recv() {
                    Ok(Command::Stop) | Err(mpsc::TryRecvError::Disconnected) => return self.stop(),
                    Ok(command) => self.accept(command),
                    Err(mpsc::TryRecvError::Empty) => break,
                }
            }
            self.drop_abandoned();
            let moved = self.step();
            if cfg!(debug_assertions) {
                self.pages.check();
            }
            self.publish();
            if !moved && !self.jobs.is_empty() {
                // All wait for pages, which only a session's release frees.
                match commands.recv_timeout(WAIT) {
                    Ok(Command::Stop) | Err(mpsc::RecvTimeoutError::Disconnected) => break,
                    Ok(command) => self.accept(command),
                    Err(mpsc::RecvTimeoutError::Timeout) => {}
                }
            }
        }
        self.stop();
    }

    fn accept(&mut self, command: Command) {
        match command {
            Command::Grow { id, base, tokens, reply } => match self.base(base, tokens) {
                Ok(start) => self.grow(id, start, reply),
                Err(error) => drop(reply.send(Err(error))),
            },
            Command::Read { base, suffixes, reply } => match self.read(base, suffixes) {
                Ok(call) => call.borrow_mut().reply = Some(reply),
                Err(error) => drop(reply.send(Err(error))),
            },
            Command::Write { id, base, tokens, write, reply } => {
                let start = self.check_deep(base).and_then(|()| self.base(base, tokens));
                let outcome = start.map(|start| self.write(id, start, write));
                drop(reply.send(outcome));
            }
            Command::Keep { layers, reply } => drop(reply.send(self.keep_hidden(layers))),
            Command::Features { id, reach, layers, reply } => {
                drop(reply.send(self.features(id, &reach, &layers)));
            }
            Command::Release { id } => {
                if let Some(sequence) = self.sessions.remove(&id) {
                    sequence.retire();
                }
                if let Some(place) = self.jobs.iter().position(|job| job.id == Some(id))
                    && let Some(job) = self.jobs.remove(place)
                {
                    job.sequence.retire();
                }
            }
            Command::Stop => unreachable!("handled by the loop"),
        }
    }

    /// The sequence that a call starts from and what is left to compute.
    /// Refuses what could not be served even alone; what others hold it waits
    /// for.
    fn base(&mut self, base: Base, mut tokens: Vec<u32>) -> Result<Start, EngineError> {
        if self.purpose(base)? == Purpose::Request {
            self.check_queue()?;
        }
        let fresh = matches!(base, Base::Root(..));
        let sequence = match base {
            // What it can reuse is looked up when it may begin.
            Base::Root(root, purpose) => self.sequence(root, purpose),
            Base::Tip(id) => self.fork(id, self.session(id)?.len())?,
            Base::Beginning(id) => {
                let at = common(self.session(id)?.tokens(), &tokens);
                tokens.drain(..at);
                self.fork(id, at)?
            }
        };
        let refused = if sequence.len() + tokens.len() > self.limits.context {
            Some(self.too_long(sequence.len() + tokens.len()))
        } else {
            let pages = (sequence.len() + tokens.len()).div_ceil(PAGE_TOKENS);
            (pages > self.pages.total()).then(|| self.full(Shortage { pages }))
        };
        match refused {
            Some(error) => {
                sequence.retire();
                Err(error)
            }
            None => Ok(Start { sequence, tokens, fresh }),
        }
    }

    /// What a call is for: as what it continues.
    fn purpose(&self, base: Base) -> Result<Purpose, EngineError> {
        match base {
            Base::Root(_, purpose) => Ok(purpose),
            Base::Tip(id) | Base::Beginning(id) => Ok(self.session(id)?.purpose()),
        }
    }

    /// Refuses to read logits of a session that was computed for its hidden states.
    fn check_deep(&self, base: Base) -> Result<(), EngineError> {
        match self.purpose(base)? {
            Purpose::Features => Err(EngineError::Invalid("this session holds hidden states alone".into())),
            Purpose::Request | Purpose::Study => Ok(()),
        }
    }

    /// An empty sequence. Pages without hidden states, from before they were kept,
    /// are not found by sessions that have them, nor a study's by a request.
    fn sequence(&self, root: Chain, purpose: Purpose) -> Sequence {
        let word = match purpose {
            Purpose::Request if self.hidden == 0 => None,
            _ => Some(format!("{purpose:?} {}", self.hidden)),
        };
        let root = word.map_or(root, |word| branch(root, &word));
        Sequence::new(&self.pages, root, purpose, self.hidden)
    }

    fn keep_hidden(&mut self, layers: Vec<usize>) -> Result<(), EngineError> {
        let kept = self.model.kept();
        if layers.iter().all(|layer| kept.contains(layer)) {
            return Ok(());
        }
        // Whoever began before goes on without: its pages lack what is kept from now on.
        let layers: Vec<usize> = layers.into_iter().chain(kept.iter().copied()).collect();
        self.hidden += 1;
        self.model.keep(layers, self.pages.total())?;
        self.gauges.hidden_page_bytes.store(self.model.hidden_page_bytes() as u64, Relaxed);
        Ok(())
    }

    /// The mean of each layer's hidden states over some tokens of a session.
    fn features(
        &mut self,
        id: SequenceId,
        reach: &Reach,
        layers: &[usize],
    ) -> Result<Vec<Vec<f32>>, EngineError> {
        let sequence = self.sessions.get(&id).ok_or(EngineError::Stopped)?;
        if sequence.hidden() == 0 || sequence.hidden() != self.hidden {
            return Err(EngineError::NoHidden);
        }
        let tokens = match reach {
            Reach::Tokens(tokens) => tokens.clone(),
            Reach::Last(count) => sequence.len().saturating_sub(*count)..sequence.len(),
            Reach::Bytes(bytes) => self.tokenizer.spelling(sequence.tokens(), bytes),
        };
        if tokens.is_empty() || tokens.end > sequence.len() {
            let held = sequence.len();
            return Err(EngineError::Invalid(format!("no token in {tokens:?} of a session's {held}")));
        }
        let pages: Vec<_> = sequence.page_ids().collect();
        let mean =
            |&layer: &usize| self.model.mean(layer, &pages, tokens.clone()).ok_or(EngineError::NoHidden);
        layers.iter().map(mean).collect()
    }

    fn check_queue(&self) -> Result<(), EngineError> {
        let (waiting, limit) = (self.waiting(), self.limits.queue);
        if waiting < limit { Ok(()) } else { Err(EngineError::Busy { waiting, limit }) }
    }

    /// Requests' calls that wait or run: a decision is one, however much it asks.
    fn waiting(&self) -> usize {
        let jobs = || self.jobs.iter().filter(|job| !job.is_study());
        let decisions: HashSet<_> = jobs().filter_map(Job::call).map(Rc::as_ptr).collect();
        jobs().filter(|job| job.id.is_some()).count() + decisions.len()
    }

    fn session(&self, id: SequenceId) -> Result<&Sequence, EngineError> {
        self.sessions.get(&id).ok_or(EngineError::Stopped)
    }

    fn fork(&mut self, id: SequenceId, at: usize) -> Result<Sequence, EngineError> {
        let (child, copy) = self.session(id)?.fork(at).map_err(|shortage| self.full(shortage))?;
        if let Some(copy) = copy {
            self.copy(&copy);
        }
        Ok(child)
    }

    fn copy(&mut self, copy: &PageCopy) {
        self.model.copy_page(copy.from.id(), copy.to, copy.tokens);
    }

    fn full(&self, shortage: Shortage) -> EngineError {
        EngineError::Full { pages: shortage.pages, free: self.pages.available(), total: self.pages.total() }
    }

    fn too_long(&self, tokens: usize) -> EngineError {
        EngineError::TooLong { tokens, limit: self.limits.context }
    }

    fn grow(&mut self, id: SequenceId, start: Start, reply: Reply<Grown>) {
        let job = Job::new(Some(id), start, Then::Keep { reply });
        if job.is_done() {
            self.keep(job);
        } else {
            self.jobs.push_back(job);
        }
    }

    /// A finished sequence becomes a session.
    fn keep(&mut self, job: Job) {
        let Job { id: Some(id), sequence, then: Then::Keep { reply }, reused, computed, .. } = job else {
            unreachable!("only jobs that keep their sequence are kept")
        };
        let grown = Grown { tokens: sequence.len(), reused, computed };
        self.sessions.insert(id, sequence);
        if reply.send(Ok(grown)).is_err() {
            // Whoever asked went away, and with them the handle.
            self.release(id);
        }
    }

    fn release(&mut self, id: SequenceId) {
        if let Some(sequence) = self.sessions.remove(&id) {
            sequence.retire();
        }
    }

    fn write(&mut self, id: SequenceId, start: Start, write: Write) {
        self.seeds = self.seeds.wrapping_add(1);
        let writer = Writer::new(write, Arc::clone(&self.tokenizer), self.seeds, start.tokens.len());
        self.jobs.push_back(Job::new(Some(id), start, Then::Write(Box::new(writer))));
    }

    /// Queues a decision: forks of a session, one for each suffix. A head that
    /// all suffixes share is computed once when that saves a page or more.
    fn read(&mut self, base: Base, mut suffixes: Vec<Suffix>) -> Result<job::Call, EngineError> {
        self.check_deep(base)?;
        if self.purpose(base)? == Purpose::Request {
            self.check_queue()?;
        }
        let (id, at) = match base {
            Base::Root(..) => return Err(EngineError::Invalid("a decision needs a session".into())),
            Base::Tip(id) => (id, self.session(id)?.len()),
            Base::Beginning(id) => {
                let held = self.session(id)?.tokens();
                let at = suffixes.iter().map(|suffix| common(held, &suffix.tokens)).min().unwrap_or(0);
                suffixes.iter_mut().for_each(|suffix| drop(suffix.tokens.drain(..at)));
                (id, at)
            }
        };
        let longest = suffixes.iter().map(|suffix| suffix.tokens.len()).max().unwrap_or(0);
        if at + longest > self.limits.context {
            return Err(self.too_long(at + longest));
        }
        let call = ReadCall::new(suffixes.len());
        let head = common_head(&suffixes);
        if suffixes.len().saturating_sub(1) * head >= PAGE_TOKENS {
            let start = Start {
                sequence: self.fork(id, at)?,
                tokens: suffixes[0].tokens[..head].to_vec(),
                fresh: false,
            };
            self.jobs.push_back(Job::new(None, start, Then::Head { head, suffixes, call: call.clone() }));
            return Ok(call);
        }
        let mut forks = Vec::with_capacity(suffixes.len());
        for (index, Suffix { tokens, wanted }) in suffixes.into_iter().enumerate() {
            let start = Start { sequence: self.fork(id, at)?, tokens, fresh: false };
            forks.push(Job::new(None, start, Then::Read(Read { call: call.clone(), index, wanted })));
        }
        self.jobs.extend(forks);
        Ok(call)
    }

    /// Gives up jobs whose caller went away.
    fn drop_abandoned(&mut self) {
        for _ in 0..self.jobs.len() {
            let Some(job) = self.jobs.pop_front() else { return };
            if job.is_abandoned() {
                job.sequence.retire();
            } else {
                self.jobs.push_back(job);
            }
        }
    }

    fn publish(&self) {
        let census = self.pages.census();
        self.gauges.evictions.store(census.evictions, Relaxed);
        self.gauges.pages_held.store(census.held as u64, Relaxed);
        self.gauges.pages_cached.store(census.cached as u64, Relaxed);
        let computing = self.jobs.iter().filter(|job| job.id.is_some()).count();
        self.gauges.sessions.store((self.sessions.len() + computing) as u64, Relaxed);
        self.gauges.waiting.store(self.waiting() as u64, Relaxed);
    }

    fn stop(mut self) {
        for job in std::mem::take(&mut self.jobs) {
            job.fail(EngineError::Stopped);
        }
        self.sessions.clear();
        self.publish();
    }
}

/// Tokens that all suffixes start with, at least one short of the shortest.
fn common_head(suffixes: &[Suffix]) -> usize {
    let Some((first, rest)) = suffixes.split_first() else { return 0 };
    let shortest = suffixes.iter().map(|suffix| suffix.tokens.len()).min().unwrap_or(0);
    let shared = rest.iter().map(|other| common(&first.tokens, &other.tokens)).min();
    shared.unwrap_or(0).min(shortest.saturating_sub(1))
}

/// How many tokens two sequences have in common from their start.
fn common(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}
