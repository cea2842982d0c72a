//! Processor time of one guest: measured on the thread that runs it, so that a busy machine, a wait for the
//! engine or another import that waits never counts against a policy.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// Runs while the guest runs. A guest never runs on two threads at once, and what moves it from one to the next
/// orders memory; that it is atomic is for the compiler alone.
#[derive(Debug, Default)]
pub(super) struct Clock {
    /// Nanoseconds before `since`.
    spent: AtomicU64,
    /// The thread's own clock when the guest last began to run; 0 while it does not.
    since: AtomicU64,
}

impl Clock {
    /// The guest runs from here, on this thread.
    pub(super) fn resume(&self) {
        self.since.store(thread_time(), Relaxed);
    }

    /// The guest stops here, on the thread where it was resumed. Returns what it has spent so far.
    pub(super) fn pause(&self) -> Duration {
        let since = self.since.swap(0, Relaxed);
        if since != 0 {
            self.spent.fetch_add(thread_time().saturating_sub(since), Relaxed);
        }
        self.spent()
    }

    /// The guest has spent so much already.
    pub(super) fn add(&self, spent: Duration) {
        self.spent.fetch_add(u64::try_from(spent.as_nanos()).unwrap_or(u64::MAX), Relaxed);
    }

    /// What the guest had spent when it last stopped.
    pub(super) fn spent(&self) -> Duration {
        Duration::from_nanos(self.spent.load(Relaxed))
    }
}

/// Nanoseconds that this thread has run on a processor.
fn thread_time() -> u64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    u64::try_from(time.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(time.tv_nsec).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn sleep_is_free_and_work_is_not() {
        let clock = Clock::default();
        clock.resume();
        std::thread::sleep(Duration::from_millis(30));
        assert!(clock.pause() < Duration::from_millis(15), "{:?}", clock.spent());
        let idle = clock.spent();
        clock.resume();
        while clock.pause() < idle + Duration::from_millis(5) {
            clock.resume();
            let start = Instant::now();
            while start.elapsed() < Duration::from_micros(200) {
                std::hint::spin_loop();
            }
        }
        assert_eq!(clock.pause(), clock.spent(), "a paused clock stands still");
        let before = clock.spent();
        clock.add(Duration::from_millis(7));
        assert_eq!(clock.spent(), before + Duration::from_millis(7));
    }
}
