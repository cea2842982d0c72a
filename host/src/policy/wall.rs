//! Wall time of one call, but for what the opening of its session takes: how long a prefill lasts is no doing of the
//! policy's.

use std::pin::pin;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long a call may last.
#[derive(Debug)]
pub(super) struct Wall {
    start: Instant,
    limit: Duration,
    apart: Mutex<Apart>,
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
        Self { start: Instant::now(), limit, apart: Mutex::default() }
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
            if let Ok(done) = tokio::time::timeout_at(self.end().into(), &mut call).await {
                return Some(done);
            }
            // Some of the time that has passed may not count.
            if self.end() <= Instant::now() {
                return None;
            }
        }
    }

    /// When the time is over, if all of it counts from now on.
    fn end(&self) -> Instant {
        let apart =
            self.apart(|apart| apart.before + apart.since.map_or(Duration::ZERO, |since| since.elapsed()));
        self.start + self.limit + apart
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
}
