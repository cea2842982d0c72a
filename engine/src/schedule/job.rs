//! Jobs: sequences with tokens still to compute, and what follows.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forkpoint_kernels::PAGE_TOKENS;
use tokio::sync::mpsc;

use super::pace::LEAST;
use super::{Found, Grown, Readings, Reply, SequenceId, Start, Suffix, Wanted, Write};
use crate::detokenize::Detokenizer;
use crate::error::EngineError;
use crate::generate::{Choice, Ended, Event, FinishReason, Sampler, StopScanner, TokenLogprob};
use crate::kv::{PageCopy, Purpose, Sequence, Shortage};
use crate::tokenizer::Tokenizer;

/// Rows that a request's part takes beyond a step's budget where nothing is left of it
/// then: as many as would waste a step of their own.
pub(super) const SMALL_REST: usize = LEAST - 1;

/// A sequence with tokens still to compute.
pub(super) struct Job {
    /// The handle's id; none for the forks of a decision.
    pub(super) id: Option<SequenceId>,
    pub(super) sequence: Sequence,
    tokens: Vec<u32>,
    done: usize,
    pub(super) reused: usize,
    pub(super) computed: usize,
    pub(super) then: Then,
    /// The pages of all its tokens are promised to it. What follows a live
    /// session never waits behind new prompts: they wait for its pages.
    pub(super) admitted: bool,
    /// Since when it lacks pages.
    short_since: Option<Instant>,
}

/// What follows once a job's tokens are computed.
pub(super) enum Then {
    /// The sequence becomes a session.
    Keep { reply: Reply<Grown> },
    /// The suffixes of a decision fork from here.
    Head { head: usize, suffixes: Vec<Suffix>, call: Call },
    /// Labels are read.
    Read(Read),
    /// A token of a reply is sampled, and is the next to compute.
    Write(Box<Writer>),
}

impl Job {
    pub(super) fn new(id: Option<SequenceId>, start: Start, then: Then) -> Self {
        let Start { sequence, tokens, fresh } = start;
        let admitted = !fresh;
        Self { id, sequence, tokens, done: 0, reused: 0, computed: 0, then, admitted, short_since: None }
    }

    /// Pages that it holds and still needs.
    pub(super) fn pages(&self) -> usize {
        self.sequence.page_ids().count() + self.pages_to_come()
    }

    /// Pages that its pending tokens still need.
    pub(super) fn pages_to_come(&self) -> usize {
        self.sequence.pages_for(self.pending().len())
    }

    /// It has what it needs.
    pub(super) fn begin(&mut self) {
        self.admitted = true;
        self.short_since = None;
    }

    pub(super) fn short_since(&self) -> Option<Instant> {
        self.short_since
    }

    /// It lacks pages; returns for how long by now.
    pub(super) fn short_for(&mut self) -> Duration {
        self.short_since.get_or_insert_with(Instant::now).elapsed()
    }

    /// It has the pages for its next rows.
    pub(super) fn has_room(&mut self) {
        self.short_since = None;
    }

    /// Gives up what it found resident: the job of a new prompt starts again.
    pub(super) fn forget(&mut self) {
        self.sequence.clear();
        (self.done, self.reused) = (0, 0);
    }

    /// Takes the beginning of a page that starts like its next tokens, after
    /// [`Job::reuse`]. Returns the copy to make.
    pub(super) fn reuse_beginning(&mut self) -> Option<PageCopy> {
        let before = self.sequence.len();
        let copy = self.sequence.reuse_beginning(&self.tokens[self.done..]);
        let found = self.sequence.len() - before;
        self.done += found;
        self.reused += found;
        copy
    }

    pub(super) fn pending(&self) -> &[u32] {
        &self.tokens[self.done..]
    }

    pub(super) fn is_done(&self) -> bool {
        self.done == self.tokens.len()
    }

    /// Skips tokens that another job computed meanwhile.
    pub(super) fn reuse(&mut self) -> usize {
        let found = self.sequence.reuse(&self.tokens[self.done..]);
        self.done += found;
        self.reused += found;
        found
    }

    /// The next `count` pending tokens were computed.
    pub(super) fn advance(&mut self, count: usize) {
        self.sequence.commit(&self.tokens[self.done..self.done + count]);
        self.done += count;
        self.computed += count;
    }

    /// The next token to compute.
    pub(super) fn push(&mut self, token: u32) {
        self.tokens.clear();
        self.tokens.push(token);
        self.done = 0;
    }

    /// A tip that is missing is computed from the last token once more.
    pub(super) fn step_back(&mut self) -> Result<Option<PageCopy>, Shortage> {
        let at = self.sequence.len() - 1;
        let last = self.sequence.tokens()[at];
        let (shorter, copy) = self.sequence.fork(at)?;
        std::mem::replace(&mut self.sequence, shorter).retire();
        self.push(last);
        Ok(copy)
    }

    /// What a finished job that reads logits does with them.
    pub(super) fn picking(&mut self) -> Picking<'_> {
        let source = match &mut self.then {
            Then::Read(read) => Source::Labels(&read.wanted),
            Then::Write(writer) => Source::Sampler(writer.sampler(&self.sequence)),
            Then::Keep { .. } | Then::Head { .. } => unreachable!("it reads no logits"),
        };
        Picking { source, picked: None }
    }

    /// Whether every request goes before it.
    pub(super) fn is_study(&self) -> bool {
        self.sequence.purpose() != Purpose::Request
    }

    /// Whether nothing but hidden states will be read of it.
    pub(super) fn is_shallow(&self) -> bool {
        self.sequence.purpose() == Purpose::Features
    }

    /// Whether it goes before others.
    pub(super) fn is_decision(&self) -> bool {
        matches!(self.then, Then::Read(_) | Then::Head { .. })
    }

    /// Whether it is a reply that waits for its next token.
    pub(super) fn is_decode(&self) -> bool {
        matches!(&self.then, Then::Write(writer) if writer.generated > 0)
    }

    /// The decision that it belongs to.
    pub(super) fn call(&self) -> Option<&Call> {
        match &self.then {
            Then::Head { call, .. } | Then::Read(Read { call, .. }) => Some(call),
            Then::Keep { .. } | Then::Write(_) => None,
        }
    }

    /// How many of its pending tokens to compute within a budget. A rest of a request's
    /// that would be small goes along, since a step of its own would take longer than it
    /// does here. A part that is not the last ends with a page, so that others find whole
    /// pages.
    pub(super) fn next_rows(&self, budget: usize) -> usize {
        let pending = self.pending().len();
        let rest = if self.is_study() { 0 } else { SMALL_REST };
        if pending <= budget + rest {
            return pending;
        }
        let end = self.sequence.len() + budget;
        let whole = end - end % PAGE_TOKENS;
        if whole > self.sequence.len() { whole - self.sequence.len() } else { budget }
    }

    /// Whether nobody waits for it any more.
    pub(super) fn is_abandoned(&self) -> bool {
        match &self.then {
            Then::Keep { reply } => reply.is_closed(),
            Then::Head { call, .. } | Then::Read(Read { call, .. }) => call.borrow().is_abandoned(),
            Then::Write(writer) => writer.events.is_closed(),
        }
    }

    /// Tells whoever waits, and gives the pages back.
    pub(super) fn fail(self, error: EngineError) {
        match self.then {
            Then::Keep { reply } => drop(reply.send(Err(error))),
            Then::Head { call, .. } | Then::Read(Read { call, .. }) => call.borrow_mut().fail(error),
            Then::Write(writer) => drop(writer.events.send(Event::Failed(error))),
        }
        self.sequence.retire();
    }
}

/// A decision whose suffixes are computed.
pub(super) type Call = Rc<RefCell<ReadCall>>;

/// What a decision has so far.
pub(super) struct ReadCall {
    found: Vec<Option<Found>>,
    computed: usize,
    pub(super) reply: Option<Reply<Readings>>,
}

impl ReadCall {
    pub(super) fn new(suffixes: usize) -> Call {
        Rc::new(RefCell::new(Self { found: vec![None; suffixes], computed: 0, reply: None }))
    }

    /// Counts tokens computed for it.
    pub(super) fn count(&mut self, tokens: usize) {
        self.computed += tokens;
    }

    /// Takes what was read behind a suffix; the last one answers the call.
    pub(super) fn put(&mut self, index: usize, found: Found) {
        self.found[index] = Some(found);
        if self.found.iter().all(Option::is_some)
            && let Some(reply) = self.reply.take()
        {
            let found = self.found.drain(..).flatten().collect();
            drop(reply.send(Ok(Readings { found, computed: self.computed })));
        }
    }

    /// Answers the call with an error; what is left of it is given up.
    pub(super) fn fail(&mut self, error: EngineError) {
        if let Some(reply) = self.reply.take() {
            drop(reply.send(Err(error)));
        }
    }

    /// Also after a failure: what is left of the call is then given up.
    fn is_abandoned(&self) -> bool {
        self.reply.as_ref().is_none_or(tokio::sync::oneshot::Sender::is_closed)
    }
}

/// One suffix of a decision.
pub(super) struct Read {
    pub(super) call: Call,
    pub(super) index: usize,
    pub(super) wanted: Wanted,
}

/// The part of a job that reads its logits, on whichever thread.
pub(super) struct Picking<'a> {
    source: Source<'a>,
    pub(super) picked: Option<Pick>,
}

enum Source<'a> {
    Labels(&'a Wanted),
    Sampler(&'a mut Sampler),
}

/// What was read off a job's logits.
pub(super) enum Pick {
    Found(Found),
    Token(Choice),
}

impl Picking<'_> {
    pub(super) fn pick(&mut self, logits: &[f32]) {
        self.picked = Some(match &mut self.source {
            Source::Labels(wanted) => Pick::Found(wanted.read(logits)),
            Source::Sampler(sampler) => Pick::Token(sampler.sample(logits)),
        });
    }
}

/// A reply as it is written.
pub(super) struct Writer {
    sampler: Option<Sampler>,
    write: Write,
    seed: u64,
    tokenizer: Arc<Tokenizer>,
    detokenizer: Detokenizer,
    stops: StopScanner,
    events: mpsc::UnboundedSender<Event>,
    prompt: usize,
    pub(super) generated: usize,
    /// Tokens that the reply follows.
    context: usize,
    /// A token was sampled that stands for no text.
    unspelled: bool,
    /// Log-probabilities of tokens whose text is still held back.
    logprobs: Vec<TokenLogprob>,
}

impl Writer {
    /// `prompt` tokens lie between the session and the reply.
    pub(super) fn new(write: Write, tokenizer: Arc<Tokenizer>, seed: u64, prompt: usize) -> Self {
        Self {
            sampler: None,
            seed,
            detokenizer: Detokenizer::new(Arc::clone(&tokenizer)),
            stops: StopScanner::new(write.sampling.stop.clone()),
            events: write.events.clone(),
            tokenizer,
            write,
            prompt,
            generated: 0,
            context: 0,
            unspelled: false,
            logprobs: Vec::new(),
        }
    }

    /// What chooses the reply's tokens; the first follows `sequence`.
    fn sampler(&mut self, sequence: &Sequence) -> &mut Sampler {
        let Self { write, seed, .. } = self;
        self.sampler.get_or_insert_with(|| Sampler::new(write.sampling.clone(), *seed, sequence.tokens()))
    }

    /// Whether a token ends the reply and is no part of it.
    pub(super) fn ends_at(&self, choice: &Choice) -> bool {
        self.write.eos.contains(&choice.token)
    }

    /// Passes a sampled token's text on. Returns the token to compute next, or
    /// none when the reply has ended. `room` is how many more tokens the context
    /// window holds.
    pub(super) fn next(&mut self, sequence: &Sequence, choice: Choice, room: usize) -> Option<u32> {
        if self.generated == 0 {
            self.context = sequence.len();
        }
        if self.ends_at(&choice) {
            return self.end(sequence, FinishReason::Stop, false);
        }
        self.generated += 1;
        self.unspelled |= self.tokenizer.is_special(choice.token);
        if self.write.sampling.logprobs.is_some() {
            let bytes = |token: u32| self.tokenizer.bytes(token).to_vec();
            let top = choice.top.iter().map(|&(token, logprob)| (token, bytes(token), logprob)).collect();
            self.logprobs.push(TokenLogprob {
                token: choice.token,
                bytes: bytes(choice.token),
                logprob: choice.logprob,
                top,
            });
        }
        let (text, stopped) = self.stops.push(&self.detokenizer.push(choice.token));
        self.send(text);
        if stopped {
            return self.end(sequence, FinishReason::Stop, true);
        }
        if self.generated >= self.write.limit || room == 0 {
            return self.end(sequence, FinishReason::Length, false);
        }
        Some(choice.token)
    }

    /// What was held back belongs to the reply unless a stop string cut it.
    fn end(&mut self, sequence: &Sequence, reason: FinishReason, cut: bool) -> Option<u32> {
        if !cut {
            let (mut text, stopped) = self.stops.push(&self.detokenizer.finish());
            if !stopped {
                text += &self.stops.finish();
            }
            self.send(text);
        }
        let ended = Ended {
            reason,
            prompt: self.prompt as u32,
            generated: self.generated as u32,
            context: self.context as u32,
            resident: sequence.len() as u32,
            spelled: !self.unspelled && sequence.len() == self.context + self.generated,
        };
        drop(self.events.send(Event::End(ended)));
        None
    }

    /// Nobody listening any more is seen by [`Job::is_abandoned`].
    fn send(&mut self, text: String) {
        if text.is_empty() && self.logprobs.is_empty() {
            return;
        }
        drop(self.events.send(Event::Text { text, tokens: std::mem::take(&mut self.logprobs) }));
    }
}
