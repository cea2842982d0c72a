//! One step: which rows of which jobs, and what follows from them.

use std::collections::{HashSet, VecDeque};
use std::rc::Rc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use forkpoint_kernels::{AttentionBatch, Backend, Group, PAGE_TOKENS, PageId, Slot, Span};

use super::admit::{Admission, Line};
use super::job::{Job, Pick, Picking, Read, Then};
use super::{Limits, Scheduler, Start, Suffix};
use crate::error::EngineError;
use crate::kv::Chain;
use crate::model::Step;

/// How long jobs that compute already wait for a session to end, when none of
/// them has room to go on.
const GRACE: Duration = Duration::from_secs(1);

/// Rows of decisions that a step takes however slow the machine: a question or
/// two.
const LEAST_DECISIONS: usize = 64;

/// Rows of the server's own study in a step while there are requests: one that arrives
/// meanwhile waits for few.
pub(super) const STUDY: usize = 16;

/// And at most when none has come for a while, nor may come in the next moment; as many
/// as a step of [`STUDY_STEP`] has room for.
const STUDY_ALONE: usize = 128;

/// How long a study's step may last then.
const STUDY_STEP: Duration = Duration::from_millis(100);

/// How long it must have been quiet for that.
const QUIET: Duration = Duration::from_secs(3);

/// How many times as long as a study's step took requests may keep it from the next:
/// it gets a tenth of a busy machine.
const STUDY_SHARE: u32 = 9;

/// A job's part of a step: its next `rows` pending tokens. None when it only
/// waits for the logits of a tip that is there.
struct Part {
    job: Job,
    rows: usize,
}

/// A step's rows as the model takes them.
#[derive(Default)]
struct Plan {
    tokens: Vec<u32>,
    positions: Vec<u32>,
    slots: Vec<Slot>,
    groups: Vec<Group>,
    spans: Vec<Span>,
    table: Vec<PageId>,
}

impl<B: Backend> Scheduler<B> {
    /// Computes one step and hands on what it yields. Returns whether anything
    /// moved: if not, every job waits for pages.
    pub(super) fn step(&mut self) -> bool {
        let before = self.jobs.len();
        let mut parts = Vec::new();
        if self.jobs.iter().all(Job::is_study) || self.studied.elapsed() >= STUDY_SHARE * self.study_took {
            parts = self.study();
        }
        if parts.is_empty() {
            parts = self.select();
            self.reserve(&mut parts);
        }
        // Requests that wait for pages may wait for a study's.
        if parts.is_empty() {
            parts = self.study();
        }
        if parts.is_empty() {
            return self.jobs.len() < before;
        }
        self.compute(&mut parts);
        self.follow(parts);
        self.gauges.steps.fetch_add(1, Relaxed);
        true
    }

    /// Takes the jobs of this step off the queue: decisions first, then every
    /// reply's next token, then prefill in turns with the rest of the budget.
    fn select(&mut self) -> Vec<Part> {
        let limits = self.limits;
        let mut waiting = std::mem::take(&mut self.jobs);
        let mut parts = Vec::new();

        let mut line = Line::default();
        let most = limits.decisions();
        let most = self.pace.rows(most).max(LEAST_DECISIONS.min(most));
        let mut decisions = most;
        let decides = |job: &Job| job.is_decision() && !job.is_study();
        waiting = self.take(waiting, &mut parts, decides, &mut decisions, &mut line);
        let mut replies = limits.replies();
        waiting = self.take(waiting, &mut parts, |job| job.is_decode(), &mut replies, &mut line);
        let used = most - decisions + limits.replies() - replies;
        let mut prefill = Limits::prefill(self.pace.rows(limits.chunk), used);
        line.promised = promised(&parts, &waiting);
        let prompts = |job: &Job| !job.is_decision() && !job.is_study();
        waiting = self.take(waiting, &mut parts, prompts, &mut prefill, &mut line);
        if !parts.is_empty() {
            self.requested = Instant::now();
        }
        self.jobs = waiting;
        parts
    }

    /// Takes a few rows of the server's own study, apart from requests.
    fn study(&mut self) -> Vec<Part> {
        let waiting = std::mem::take(&mut self.jobs);
        let mut parts = Vec::new();
        let mut line = Line::default();
        line.promised = promised(&parts, &waiting);
        line.studied = waiting.iter().filter(|job| job.admitted && job.is_study()).map(Job::pages).sum();
        let alone = self.requested.elapsed() >= QUIET;
        let mut rows = if alone { self.study_rows } else { STUDY };
        // Shallow rows make shallow steps.
        let mut rest = self.take(waiting, &mut parts, |job| job.is_shallow(), &mut rows, &mut line);
        if parts.is_empty() {
            rest = self.take(rest, &mut parts, Job::is_study, &mut rows, &mut line);
        }
        self.jobs = rest;
        if !parts.is_empty() {
            self.reserve(&mut parts);
        }
        parts
    }

    /// Takes jobs of a kind while the budget of rows lasts. Returns the others.
    fn take(
        &mut self,
        waiting: VecDeque<Job>,
        parts: &mut Vec<Part>,
        kind: impl Fn(&Job) -> bool,
        budget: &mut usize,
        line: &mut Line,
    ) -> VecDeque<Job> {
        let mut others = VecDeque::with_capacity(waiting.len());
        let mut computing: HashSet<Chain> = HashSet::new();
        for mut job in waiting {
            if !kind(&job) || *budget == 0 {
                others.push_back(job);
                continue;
            }
            if !job.admitted {
                match self.admit(&mut job, line) {
                    Admission::Begins => {}
                    Admission::Waits => {
                        others.push_back(job);
                        continue;
                    }
                    Admission::Fails(error) => {
                        job.fail(error);
                        continue;
                    }
                }
            }
            if !job.is_decision() && !job.is_decode() {
                let found = job.reuse();
                self.gauges.reused_tokens.fetch_add(found as u64, Relaxed);
                // Whoever computes the same page this step computes it for both.
                let next = job.sequence.next_chain(job.pending());
                if next.is_some_and(|next| !computing.insert(next)) {
                    others.push_back(job);
                    continue;
                }
            }
            if job.is_done() && matches!(job.then, Then::Keep { .. }) {
                self.keep(job);
                continue;
            }
            if let Err(error) = self.find_something_to_read(&mut job) {
                job.fail(error);
                continue;
            }
            let rows = job.next_rows(*budget);
            *budget = budget.saturating_sub(rows);
            parts.push(Part { job, rows });
        }
        others
    }

    /// A job with nothing left to compute reads its sequence's tip; where that
    /// is missing, the last token is computed again.
    fn find_something_to_read(&mut self, job: &mut Job) -> Result<(), EngineError> {
        if !job.is_done() || job.sequence.tip().is_some() {
            return Ok(());
        }
        if job.sequence.len() == 0 {
            return Err(EngineError::Invalid("there is no token to continue from".into()));
        }
        if let Some(copy) = job.step_back().map_err(|shortage| self.full(shortage))? {
            self.copy(&copy);
        }
        Ok(())
    }

    /// Makes room for every part's rows. A job that gets none waits for those
    /// that go on, and for sessions that may end. When neither helps, the one
    /// that has computed least fails.
    fn reserve(&mut self, parts: &mut Vec<Part>) {
        let mut short = Vec::new();
        let mut kept = Vec::with_capacity(parts.len());
        for mut part in parts.drain(..) {
            match part.job.sequence.reserve(part.rows) {
                Ok(()) => {
                    part.job.has_room();
                    kept.push(part);
                }
                Err(shortage) if part.job.short_for() >= self.limits.patience => {
                    part.job.fail(self.full(shortage));
                }
                Err(shortage) => short.push((part.job, shortage)),
            }
        }
        *parts = kept;
        if !parts.is_empty() || short.is_empty() {
            self.stuck = None;
        } else if self.sessions.is_empty() || self.stuck_for() >= GRACE.min(self.limits.patience) {
            let requests = short.iter().enumerate().filter(|(_, (job, _))| !job.is_study());
            let least = requests.min_by_key(|(_, (job, _))| job.computed);
            if let Some(index) = least.map(|(index, _)| index) {
                let (job, shortage) = short.remove(index);
                job.fail(self.full(shortage));
                self.stuck = None;
            }
        }
        for (job, _) in short.into_iter().rev() {
            self.jobs.push_front(job);
        }
    }

    /// Since when no job got the pages that it needs.
    fn stuck_for(&mut self) -> Duration {
        self.stuck.get_or_insert_with(Instant::now).elapsed()
    }

    /// Runs the model over all rows, and keeps the tips of finished jobs.
    fn compute(&mut self, parts: &mut [Part]) {
        let plan = Plan::of(parts);
        if plan.tokens.is_empty() {
            return;
        }
        let start = Instant::now();
        let shallow = parts.iter().all(|part| part.job.is_shallow());
        self.model.forward(Step {
            tokens: &plan.tokens,
            positions: &plan.positions,
            slots: &plan.slots,
            batch: AttentionBatch { groups: &plan.groups, spans: &plan.spans, table: &plan.table },
            shallow,
        });
        if parts[0].job.is_study() {
            (self.studied, self.study_took) = (Instant::now(), start.elapsed());
            self.study_rows = match plan.tokens.len() {
                rows if self.study_took > STUDY_STEP => (rows / 2).max(STUDY),
                rows if rows >= self.study_rows && self.study_took < STUDY_STEP / 2 => 2 * rows,
                _ => self.study_rows,
            }
            .min(STUDY_ALONE.min(self.limits.chunk));
        }
        if parts.iter().any(|part| !part.job.is_decode()) && !shallow {
            self.pace.learn(plan.tokens.len(), start.elapsed());
        }
        let mut finished = Vec::new();
        let mut row = 0;
        for (index, part) in parts.iter_mut().enumerate().filter(|(_, part)| part.rows > 0) {
            row += part.rows;
            self.count(part);
            part.job.advance(part.rows);
            if part.job.is_done() {
                finished.push((index, row as u32 - 1));
            }
        }
        if shallow {
            return;
        }
        let rows: Vec<u32> = finished.iter().map(|&(_, row)| row).collect();
        for ((index, _), tip) in finished.into_iter().zip(self.model.tips(&rows)) {
            parts[index].job.sequence.set_tip(tip);
        }
    }

    fn count(&self, part: &Part) {
        let rows = part.rows as u64;
        match &part.job.then {
            Then::Head { call, .. } | Then::Read(Read { call, .. }) => {
                call.borrow_mut().count(part.rows);
                let study = part.job.is_study();
                let gauge = if study { &self.gauges.studied_tokens } else { &self.gauges.decided_tokens };
                gauge.fetch_add(rows, Relaxed);
            }
            // A reply's own tokens were counted when they were sampled.
            Then::Write(_) if part.job.is_decode() => {}
            Then::Keep { .. } | Then::Write(_) if part.job.is_study() => {
                self.gauges.studied_tokens.fetch_add(rows, Relaxed);
            }
            Then::Keep { .. } | Then::Write(_) => {
                self.gauges.prefill_tokens.fetch_add(rows, Relaxed);
            }
        }
    }

    /// Hands on what finished jobs yield; the others wait for the next step.
    fn follow(&mut self, parts: Vec<Part>) {
        let (mut readers, mut begun) = (Vec::new(), Vec::new());
        for Part { job, .. } in parts {
            match &job.then {
                _ if !job.is_done() && job.is_decision() => begun.push(job),
                _ if !job.is_done() => self.jobs.push_back(job),
                Then::Keep { .. } => self.keep(job),
                Then::Head { .. } => begun.extend(self.split(job)),
                Then::Read(_) | Then::Write(_) => readers.push(job),
            }
        }
        // A decision that has begun goes on before others begin: at the end of the queue its rest would wait for all of
        // them once more.
        for job in begun.into_iter().rev() {
            self.jobs.push_front(job);
        }
        let tips: Vec<Rc<[f32]>> = readers.iter().filter_map(|job| job.sequence.tip().cloned()).collect();
        debug_assert_eq!(tips.len(), readers.len(), "a finished job has a tip");
        // Each passes over the whole vocabulary: side by side, then.
        let reads: Vec<Mutex<Picking>> = readers.iter_mut().map(|job| Mutex::new(job.picking())).collect();
        self.model.logits(&tips, |index, logits| {
            reads[index].lock().unwrap_or_else(PoisonError::into_inner).pick(logits);
        });
        let picks: Vec<Option<Pick>> = reads
            .into_iter()
            .map(|read| read.into_inner().unwrap_or_else(PoisonError::into_inner).picked)
            .collect();
        for (mut job, pick) in readers.into_iter().zip(picks) {
            let next = self.put(&mut job, pick.expect("every tip has logits"));
            match (next, job.id) {
                (Some(token), _) => {
                    job.push(token);
                    self.jobs.push_back(job);
                }
                // A finished reply is a session of whoever holds its stream.
                (None, Some(id)) => drop(self.sessions.insert(id, job.sequence)),
                (None, None) => job.sequence.retire(),
            }
        }
    }

    /// Hands on what a job read off its logits, and counts it before anyone hears of it. Returns the token to compute
    /// next.
    fn put(&self, job: &mut Job, pick: Pick) -> Option<u32> {
        let study = job.is_study();
        match (&mut job.then, pick) {
            (Then::Read(Read { call, index, .. }), Pick::Found(found)) => {
                self.gauges.decisions.fetch_add(u64::from(!study), Relaxed);
                call.borrow_mut().put(*index, found);
                None
            }
            (Then::Write(writer), Pick::Token(choice)) => {
                // The sampled token itself needs room to be computed.
                let room = self.limits.context.saturating_sub(job.sequence.len() + 1);
                self.gauges.generated_tokens.fetch_add(u64::from(!writer.ends_at(&choice)), Relaxed);
                writer.next(&job.sequence, choice, room)
            }
            _ => unreachable!("a job picks what follows it"),
        }
    }

    /// The common head of a decision is computed: its suffixes fork from it. Returns their jobs.
    fn split(&mut self, job: Job) -> Vec<Job> {
        let Job { sequence, then: Then::Head { head, suffixes, call }, .. } = job else {
            unreachable!("only heads are split")
        };
        let mut jobs = Vec::with_capacity(suffixes.len());
        for (index, Suffix { mut tokens, wanted }) in suffixes.into_iter().enumerate() {
            tokens.drain(..head);
            let then = Then::Read(Read { call: call.clone(), index, wanted });
            match sequence.fork(sequence.len()) {
                Ok((fork, copy)) => {
                    if let Some(copy) = copy {
                        self.copy(&copy);
                    }
                    let start = Start { sequence: fork, tokens, fresh: false };
                    jobs.push(Job::new(None, start, then));
                }
                Err(shortage) => {
                    let error = self.full(shortage);
                    call.borrow_mut().fail(error);
                    break;
                }
            }
        }
        sequence.retire();
        jobs
    }
}

/// Pages that jobs under way will still take.
fn promised(parts: &[Part], waiting: &VecDeque<Job>) -> usize {
    let under_way = parts.iter().map(|part| &part.job).chain(waiting.iter().filter(|job| job.admitted));
    under_way.map(Job::pages_to_come).sum()
}

impl Plan {
    fn of(parts: &[Part]) -> Self {
        let mut plan = Self::default();
        let mut previous: Option<&Part> = None;
        for part in parts.iter().filter(|part| part.rows > 0) {
            let joins = previous.is_some_and(|before| same_call(&before.job, &part.job));
            plan.push(part, joins);
            previous = Some(part);
        }
        plan
    }

    /// Adds a part's rows, as a member of the last group where it `joins`.
    fn push(&mut self, part: &Part, joins: bool) {
        let sequence = &part.job.sequence;
        let (row, position) = (self.tokens.len() as u32, sequence.len() as u32);
        let pages = self.table.len();
        self.tokens.extend_from_slice(&part.job.pending()[..part.rows]);
        self.positions.extend(position..position + part.rows as u32);
        self.slots.extend(sequence.slots(part.rows));
        self.table.extend(sequence.page_ids());
        let whole = (position as usize / PAGE_TOKENS) as u32;
        match self.groups.last_mut().filter(|_| joins) {
            Some(group) => {
                let first = &self.table[self.spans[group.span as usize].pages as usize..pages];
                let same = first.iter().zip(&self.table[pages..]).take_while(|(a, b)| a == b).count();
                group.shared = group.shared.min(whole).min(same as u32);
                group.spans += 1;
            }
            None => self.groups.push(Group { span: self.spans.len() as u32, spans: 1, shared: whole }),
        }
        self.spans.push(Span { row, rows: part.rows as u32, position, pages: pages as u32 });
    }
}

/// Whether two jobs are suffixes of one decision, and so forks of one session.
fn same_call(a: &Job, b: &Job) -> bool {
    matches!((a.call(), b.call()), (Some(a), Some(b)) if Rc::ptr_eq(a, b))
}
