//! The threads that run an operation together.
//!
//! An operation lasts microseconds and hundreds follow each other in a step, so
//! workers spin for the next one before they sleep; a server without requests
//! burns no processor. Work is handed out by thread number, never by luck:
//! where it matters, results do not depend on who computes them.

use std::{
    any::Any,
    cell::UnsafeCell,
    ops::Range,
    panic::{self, AssertUnwindSafe},
    slice,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle},
};

/// Turns of the spin loop before a worker sleeps: roughly a tenth of a
/// millisecond, longer than any gap between the operations of a step.
const SPINS: u32 = 4000;

/// Elementary operations under which a call stays on the caller's thread:
/// about what waking the others costs.
const SMALL: usize = 16 * 1024;

type Job = dyn Fn(usize) + Sync;

/// What the caller and the workers share.
struct Shared {
    /// Counts jobs; a worker has a job when it differs from the last it saw.
    epoch: Line<AtomicU32>,
    /// Workers that have not finished the job yet.
    running: Line<AtomicUsize>,
    /// Valid from the change of `epoch` until `running` is 0.
    job: UnsafeCell<Option<*const Job>>,
    /// Whether each worker may be asleep.
    asleep: Vec<AtomicBool>,
    /// Whether a worker panicked: spares the lock when none did.
    failed: AtomicBool,
    /// The first panic of a worker.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    /// No job will follow.
    closed: AtomicBool,
}

/// Keeps a hot atomic off its neighbours' cache line.
#[repr(align(128))]
struct Line<T>(T);

// SAFETY: `job` is written only while no worker has work (`running` is 0 and
// `epoch` unchanged) and read only after `epoch` changed, which orders the two;
// what it points to is `Sync`.
unsafe impl Sync for Shared {}
// SAFETY: as above.
unsafe impl Send for Shared {}

/// A fixed set of threads, the caller among them.
pub(crate) struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

impl Pool {
    /// A pool of `threads`, the caller included; at least 1.
    pub(crate) fn new(threads: usize) -> Self {
        let helpers = threads.max(1) - 1;
        let shared = Arc::new(Shared {
            epoch: Line(AtomicU32::new(0)),
            running: Line(AtomicUsize::new(0)),
            job: UnsafeCell::new(None),
            asleep: (0..helpers).map(|_| AtomicBool::new(false)).collect(),
            failed: AtomicBool::new(false),
            panic: Mutex::new(None),
            closed: AtomicBool::new(false),
        });
        let workers = (0..helpers)
            .map(|worker| {
                let shared = Arc::clone(&shared);
                thread::Builder::new()
                    .name(format!("kernel-{}", worker + 1))
                    .spawn(move || work(&shared, worker))
                    .expect("the system gives a thread")
            })
            .collect();
        Self { shared, workers }
    }

    /// Threads, the caller included.
    pub(crate) fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `job` once with each thread number and returns when all are done.
    ///
    /// # Panics
    /// With the panic of a job, after all have ended; the pool stays usable.
    pub(crate) fn run(&mut self, job: &(dyn Fn(usize) + Sync)) {
        if self.workers.is_empty() {
            return job(0);
        }
        let shared = &*self.shared;
        // SAFETY: only the lifetime changes. No worker touches the job after
        // `running` is 0, which this function awaits before it returns or
        // unwinds.
        let erased: *const Job = unsafe { std::mem::transmute::<*const (dyn Fn(usize) + Sync), _>(job) };
        // SAFETY: `&mut self` and `running == 0` say that no worker reads it.
        unsafe { *shared.job.get() = Some(erased) };
        shared.running.0.store(self.workers.len(), Ordering::Relaxed);
        shared.epoch.0.fetch_add(1, Ordering::SeqCst);
        for (asleep, worker) in shared.asleep.iter().zip(&self.workers) {
            if asleep.load(Ordering::SeqCst) {
                worker.thread().unpark();
            }
        }
        let own = panic::catch_unwind(AssertUnwindSafe(|| job(0)));
        let mut spins = 0;
        while shared.running.0.load(Ordering::Acquire) > 0 {
            spins += 1;
            if spins < SPINS {
                std::hint::spin_loop();
            } else {
                // A worker lost its processor: do not keep another from it.
                thread::yield_now();
            }
        }
        let mut failure = own.err();
        if shared.failed.load(Ordering::Relaxed) {
            shared.failed.store(false, Ordering::Relaxed);
            let theirs = shared.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
            failure = failure.or(theirs);
        }
        if let Some(payload) = failure {
            panic::resume_unwind(payload);
        }
    }

    /// Calls `f(thread, share)` with each thread's share of `count` things. `cost` is
    /// roughly the call's count of elementary operations: what is small runs on
    /// the caller's thread alone.
    pub(crate) fn shares(&mut self, count: usize, cost: usize, f: &(impl Fn(usize, Range<usize>) + Sync)) {
        if cost < SMALL || self.workers.is_empty() {
            return f(0, 0..count);
        }
        let threads = self.threads();
        self.run(&|thread| f(thread, share(count, thread, threads)));
    }

    /// Calls `f(i, chunk i)` for each run of `size` elements of `data`, each
    /// once. `cost` is as for [`Pool::shares`].
    pub(crate) fn chunks<T: Send>(
        &mut self,
        data: &mut [T],
        size: usize,
        cost: usize,
        f: &(impl Fn(usize, &mut [T]) + Sync),
    ) {
        let count = data.len() / size;
        let all = Parts::new(data);
        self.shares(count, cost, &|_, share| {
            for i in share {
                // SAFETY: shares do not overlap, so each chunk is borrowed once.
                f(i, unsafe { all.slice(i * size, size) });
            }
        });
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.closed.store(true, Ordering::SeqCst);
        self.shared.epoch.0.fetch_add(1, Ordering::SeqCst);
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // A worker catches its jobs' panics, so it ends in order.
            let _ = worker.join();
        }
    }
}

/// The part of `count` things that falls to one of `threads`.
pub(crate) fn share(count: usize, thread: usize, threads: usize) -> Range<usize> {
    count * thread / threads..count * (thread + 1) / threads
}

/// A worker's life.
fn work(shared: &Shared, worker: usize) {
    let mut seen = 0;
    loop {
        let mut spins = 0;
        loop {
            let epoch = shared.epoch.0.load(Ordering::Acquire);
            if epoch != seen {
                seen = epoch;
                break;
            }
            spins += 1;
            if spins < SPINS {
                std::hint::spin_loop();
                continue;
            }
            // Say so first, look again, then sleep: a job that comes between
            // either is seen here or finds the flag and wakes us.
            shared.asleep[worker].store(true, Ordering::SeqCst);
            if shared.epoch.0.load(Ordering::SeqCst) == seen {
                thread::park();
            }
            shared.asleep[worker].store(false, Ordering::SeqCst);
        }
        if shared.closed.load(Ordering::SeqCst) {
            return;
        }
        // SAFETY: `epoch` changed and the pool is open, so a job is set and its
        // closure lives until we count down.
        let job = unsafe { &*(*shared.job.get()).expect("an epoch brings a job") };
        if let Err(payload) = panic::catch_unwind(AssertUnwindSafe(|| job(worker + 1))) {
            shared.panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(payload);
            shared.failed.store(true, Ordering::Relaxed);
        }
        shared.running.0.fetch_sub(1, Ordering::Release);
    }
}

/// A slice whose parts go to different threads.
pub(crate) struct Parts<'a, T> {
    start: *mut T,
    len: usize,
    _data: std::marker::PhantomData<&'a mut [T]>,
}

// SAFETY: it gives `&mut T` to other threads, one at a time by the contract of
// `slice`, which `T: Send` allows.
unsafe impl<T: Send> Sync for Parts<'_, T> {}

impl<'a, T> Parts<'a, T> {
    pub(crate) fn new(data: &'a mut [T]) -> Self {
        Self { start: data.as_mut_ptr(), len: data.len(), _data: std::marker::PhantomData }
    }

    /// Borrows `len` elements from `from`.
    ///
    /// # Safety
    /// No two borrows that live at the same time overlap.
    #[expect(clippy::mut_from_ref, reason = "disjoint parts are the caller's promise")]
    pub(crate) unsafe fn slice(&self, from: usize, len: usize) -> &mut [T] {
        assert!(from <= self.len && len <= self.len - from, "a part lies in its whole");
        // SAFETY: within the slice, and not borrowed elsewhere by the contract.
        unsafe { slice::from_raw_parts_mut(self.start.add(from), len) }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn every_thread_runs_every_job_once() {
        for threads in 1..=4 {
            let mut pool = Pool::new(threads);
            let counts: Vec<AtomicUsize> = (0..threads).map(|_| AtomicUsize::new(0)).collect();
            for round in 0..500 {
                pool.run(&|thread| {
                    counts[thread].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == round + 1));
            }
        }
    }

    #[test]
    fn a_sleeping_worker_wakes() {
        let mut pool = Pool::new(3);
        let count = AtomicUsize::new(0);
        for _ in 0..5 {
            // On a busy machine their spinning takes its time.
            let deadline = Instant::now() + Duration::from_secs(20);
            while !pool.shared.asleep.iter().all(|a| a.load(Ordering::SeqCst)) {
                assert!(Instant::now() < deadline, "idle workers sleep");
                thread::sleep(Duration::from_millis(1));
            }
            pool.run(&|_| {
                count.fetch_add(1, Ordering::Relaxed);
            });
        }
        assert_eq!(count.into_inner(), 15);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_survives() {
        let mut pool = Pool::new(3);
        for culprit in [vec![0], vec![1], vec![2], vec![0, 1, 2]] {
            let ended = AtomicUsize::new(0);
            let payload = panic::catch_unwind(AssertUnwindSafe(|| {
                pool.run(&|thread| {
                    ended.fetch_add(1, Ordering::Relaxed);
                    assert!(!culprit.contains(&thread), "thread {thread} fails");
                });
            }))
            .unwrap_err();
            assert!(payload.downcast_ref::<String>().unwrap().ends_with("fails"));
            assert_eq!(ended.into_inner(), 3, "all have run before the panic goes on");
            let mut data = vec![0; 100];
            pool.chunks(&mut data, 1, usize::MAX, &|i, chunk| chunk[0] = i);
            assert!(data.iter().enumerate().all(|(i, &v)| i == v));
        }
    }

    #[test]
    fn chunks_are_visited_once_whatever_the_threads() {
        for threads in 1..=3 {
            let mut pool = Pool::new(threads);
            for count in [0, 1, 2, 7] {
                for cost in [0, usize::MAX] {
                    let mut data = vec![0; count * 3];
                    pool.chunks(&mut data, 3, cost, &|i, chunk| chunk.iter_mut().for_each(|v| *v += i + 1));
                    let expected: Vec<usize> = (0..count).flat_map(|i| [i + 1; 3]).collect();
                    assert_eq!(data, expected);
                }
            }
        }
    }

    #[test]
    fn drop_ends_threads_that_spin_and_that_sleep() {
        for pause in [0, 20] {
            let pool = Pool::new(4);
            thread::sleep(Duration::from_millis(pause));
            let shared = Arc::downgrade(&pool.shared);
            drop(pool);
            assert!(shared.upgrade().is_none(), "no worker is left");
        }
    }
}
