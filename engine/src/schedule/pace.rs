//! How many rows of prefill and of decisions a step takes on this machine.

use std::time::Duration;

/// What a step's prefill, and its decisions, should last: how long a decision that arrives in
/// the middle of one waits at most, give or take.
const STEP: Duration = Duration::from_millis(100);
/// Rows under which a step wastes the weights that it reads.
pub(super) const LEAST: usize = 32;
/// The share of the past in what is expected of the next step.
const MEMORY: f64 = 0.7;

/// Seconds that a row takes, learnt from the steps so far. It grows with the
/// sessions, since each row attends to all keys before it.
#[derive(Debug, Default)]
pub(super) struct Pace {
    row: Option<f64>,
}

impl Pace {
    /// Rows for the next step, at most `most`. Results never depend on it: how a
    /// prompt is cut into steps moves no bit of its logits.
    pub(super) fn rows(&self, most: usize) -> usize {
        let Some(row) = self.row else { return most };
        let rows = (STEP.as_secs_f64() / row) as usize;
        rows.clamp(LEAST.min(most), most)
    }

    /// A step of `rows` rows lasted `time`. Steps of few rows say little: most
    /// of their time goes into reading the weights.
    pub(super) fn learn(&mut self, rows: usize, time: Duration) {
        if rows < LEAST {
            return;
        }
        let now = time.as_secs_f64() / rows as f64;
        self.row = Some(self.row.map_or(now, |before| MEMORY * before + (1.0 - MEMORY) * now));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn starts_at_the_most_and_follows_the_machine() {
        let mut pace = Pace::default();
        assert_eq!(pace.rows(256), 256);
        for _ in 0..20 {
            pace.learn(256, Duration::from_millis(256));
        }
        assert_eq!(pace.rows(256), 100);
        for _ in 0..20 {
            pace.learn(100, Duration::from_millis(1000));
        }
        assert_eq!(pace.rows(256), LEAST, "no less, however slow");
        for _ in 0..40 {
            pace.learn(64, Duration::from_millis(1));
        }
        assert_eq!(pace.rows(256), 256, "no more, however fast");
        assert_eq!(pace.rows(4), 4, "a smaller bound holds");
    }

    #[test]
    fn few_rows_say_nothing() {
        let mut pace = Pace::default();
        pace.learn(1, Duration::from_millis(50));
        assert_eq!(pace.rows(256), 256);
    }
}
