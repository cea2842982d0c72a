//! Wall time of one call, but for what the opening of its session takes: how long a prefill lasts is no doing of the
//! policy's.

use std::pin::pin;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

/// How long a call may last.
#[derive(Debug)]
pub(super) struct Wall {
    start: Instant,
    limit: Duration,
    apart: Mutex<Apart>,
    /// Time counts again.
    goes_on: Notify,
}

/// Time that does not count.
#[derive(Debug, Default)]
struct Apart {
    before: Duration,
    since: Option<Instant>,
}

impl Wall {
    /// A limit that counts from now on.
    pub(super) fn new(limit: Duration) -> Self {
        Self { start: Instant::now(), limit, apart: Mutex::default(), goes_on: Notify::new() }
    }

    /// While the returned value lives, no time counts.
    pub(super) fn stop(&self) -> Stopped<'_> {
        self.apart(|apart| apart.since = Some(Instant::now()));
        Stopped(self)
    }

    /// Waits for a call to its end; none once its time is over.
    pub(super) async fn hold<T>(&self, call: impl Future<Output = T>) -> Option<T> {
        let mut call = pin!(call);
        loop {
            if let Some(end) = self.end() {
                if let Ok(done) = tokio::time::timeout_at(end.into(), &mut call).await {
                    return Some(done);
                }
                if self.end().is_some_and(|end| end <= Instant::now()) {
                    return None;
                }
            } else {
                // It cannot be over before time counts again.
                tokio::select! {
                    biased;
                    done = &mut call => return Some(done),
                    () = self.goes_on.notified() => {}
                }
            }
        }
    }

    /// When the time is over; none while it does not count.
    fn end(&self) -> Option<Instant> {
        self.apart(|apart| apart.since.is_none().then_some(self.start + self.limit + apart.before))
    }

    fn apart<T>(&self, then: impl FnOnce(&mut Apart) -> T) -> T {
        then(&mut self.apart.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// While it lives, no time counts.
pub(super) struct Stopped<'a>(&'a Wall);

impl Drop for Stopped<'_> {
    fn drop(&mut self) {
        self.0.apart(|apart| {
            apart.before += apart.since.take().map_or(Duration::ZERO, |since| since.elapsed());
        });
        self.0.goes_on.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_millis(60);

    async fn sleep(limits: f64) {
        tokio::time::sleep(LIMIT.mul_f64(limits)).await;
    }

    #[tokio::test]
    async fn what_does_not_count_is_waited_for_and_what_does_is_not() {
        let wall = Wall::new(LIMIT);
        assert_eq!(wall.hold(sleep(4.0)).await, None);
        assert!(wall.start.elapsed() < LIMIT * 3, "{:?}", wall.start.elapsed());

        let wall = Wall::new(LIMIT);
        let stopped = async {
            let stopped = wall.stop();
            sleep(4.0).await;
            drop(stopped);
        };
        assert_eq!(wall.hold(stopped).await, Some(()));

        let wall = Wall::new(LIMIT);
        let both = async {
            let stopped = wall.stop();
            sleep(2.0).await;
            drop(stopped);
            sleep(4.0).await;
        };
        assert_eq!(wall.hold(both).await, None);
        assert!(wall.start.elapsed() < LIMIT * 5, "{:?}", wall.start.elapsed());
    }

    #[tokio::test]
    async fn a_call_whose_time_is_nearly_over_is_left_alone_while_it_does_not_count() {
        let wall = Wall::new(LIMIT);
        let mut polls = 0;
        let mut call = pin!(async {
            // Blocks the thread, so that the remainder is what it is meant to be.
            std::thread::sleep(LIMIT - Duration::from_millis(1));
            let stopped = wall.stop();
            sleep(50.0).await;
            drop(stopped);
        });
        let counted = std::future::poll_fn(|context| {
            polls += 1;
            call.as_mut().poll(context)
        });
        assert_eq!(wall.hold(counted).await, Some(()));
        assert!(polls < 10, "polled {polls} times for one sleep");

        // What does count after that ends it.
        let wall = Wall::new(LIMIT);
        let late = async {
            std::thread::sleep(LIMIT / 2);
            let stopped = wall.stop();
            sleep(4.0).await;
            drop(stopped);
            sleep(50.0).await;
        };
        assert_eq!(wall.hold(late).await, None);
        assert!(wall.start.elapsed() < LIMIT * 30, "{:?}", wall.start.elapsed());
    }
}
