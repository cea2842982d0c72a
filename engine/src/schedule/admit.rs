//! Which new prompts may begin: those whose pages are there.
//!
//! A prompt that waits holds nothing, not even pages that it could reuse: what
//! is cached stays free for who computes. Once admitted, the pages of all its
//! tokens are promised to it.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use forkpoint_kernels::Backend;

use super::Scheduler;
use super::job::Job;
use crate::error::EngineError;
use crate::kv::Shortage;

/// How long others may pass a prompt that waits for pages. Then the pages that
/// come free are its own.
const HOLD: Duration = Duration::from_secs(1);
/// Waiting prompts that a step looks at: to look costs a search for each page.
const LOOKS: usize = 16;

/// The prompts that a step has looked at.
#[derive(Debug, Default)]
pub(super) struct Line {
    /// Pages that jobs under way will still take.
    pub(super) promised: usize,
    /// Pages of the studies under way.
    pub(super) studied: usize,
    /// Somebody has waited so long that nobody passes.
    held: bool,
    looks: usize,
}

/// What becomes of a prompt.
pub(super) enum Admission {
    Begins,
    Waits,
    Fails(EngineError),
}

impl<B: Backend> Scheduler<B> {
    /// Admits a prompt that has not begun, or leaves it as it was.
    pub(super) fn admit(&mut self, job: &mut Job, line: &mut Line) -> Admission {
        if line.looks == LOOKS {
            return Admission::Waits;
        }
        line.looks += 1;
        let before = self.pages.available();
        job.reuse();
        // Cached pages that it would hold can be nobody else's either.
        let pages = job.pages_to_come() + before - self.pages.available();
        let fits = pages == 0 || pages + line.promised + self.spare(job, line) <= before;
        // Studies leave most of the arena to requests, however many there are, and room for
        // their own decisions when there is nobody else.
        let total = self.pages.total();
        if job.is_study() && pages > total - total / 32 {
            job.forget();
            return Admission::Fails(self.full(Shortage { pages }));
        }
        let few = line.studied + pages <= total / 4 || (line.studied == 0 && self.sessions.is_empty());
        let fits = fits && (few || !job.is_study());
        if fits && (pages == 0 || !line.held) {
            if let Some(copy) = job.reuse_beginning() {
                self.copy(&copy);
            }
            self.gauges.reused_tokens.fetch_add(job.reused as u64, Relaxed);
            line.promised += job.pages_to_come();
            line.studied += if job.is_study() { job.pages() } else { 0 };
            job.begin();
            return Admission::Begins;
        }
        job.forget();
        if fits {
            return Admission::Waits;
        }
        let waited = job.short_for();
        if waited >= self.limits.patience && !job.is_study() {
            return Admission::Fails(self.full(Shortage { pages }));
        }
        line.held |= waited >= HOLD;
        Admission::Waits
    }

    /// Pages that stay free for the decisions and replies of the sessions that
    /// live, for as long as waiting for them to end may help.
    fn spare(&self, job: &Job, line: &Line) -> usize {
        let alone = line.promised == 0 && self.sessions.is_empty();
        let impatient = job.short_since().is_some_and(|since| since.elapsed() >= HOLD);
        if alone || (impatient && !job.is_study()) {
            0
        } else {
            // A fork takes a page for the tail, and one or more for its own tokens.
            (self.pages.total() / 32).max(2 * (self.sessions.len() + 1))
        }
    }
}
