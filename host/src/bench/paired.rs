//! One thing to be measured, on every side in turn.

use std::collections::BTreeSet;

use serde_json::Value;

use super::error::BenchError;
use super::side::{Sample, Side};
use super::stats::{Summary, ratios};

/// A number that a run gives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Metric {
    pub(super) name: &'static str,
    pub(super) unit: &'static str,
    pub(super) higher_is_better: bool,
}

/// Something to be measured.
#[derive(Debug, Clone)]
pub(super) struct Case {
    /// The word for it in `--only`.
    pub(super) measure: &'static str,
    pub(super) name: String,
    /// What each run gives, in this order; by the first one the best way of asking is chosen.
    pub(super) metrics: &'static [Metric],
    /// What was put to the sides: counts of tokens and the like.
    pub(super) facts: Value,
    /// Whether every side runs once before the runs that count.
    pub(super) rehearse: bool,
    /// The other side is a yardstick, which nothing can be better than: ratios say how many times as long Forkpoint
    /// takes.
    pub(super) yardstick: bool,
}

/// What one side did.
#[derive(Debug, Clone)]
pub(super) struct Row {
    pub(super) side: String,
    pub(super) kind: &'static str,
    /// Why it has no figures, if so.
    pub(super) lacks: Option<String>,
    pub(super) ways: Vec<Way>,
}

/// The runs of one way of asking.
#[derive(Debug, Clone)]
pub(super) struct Way {
    pub(super) name: &'static str,
    /// For each repeat, a value for each metric.
    pub(super) runs: Vec<Vec<f64>>,
}

impl Way {
    pub(super) fn values(&self, metric: usize) -> Vec<f64> {
        self.runs.iter().map(|run| run[metric]).collect()
    }
}

/// A case with all that came of it.
#[derive(Debug, Clone)]
pub(super) struct Measured {
    pub(super) case: Case,
    /// Forkpoint's first.
    pub(super) rows: Vec<Row>,
    pub(super) notes: BTreeSet<String>,
}

/// Forkpoint beside a peer.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Ratio {
    /// How many times better Forkpoint was in each repeat; of a yardstick, how many times as long it took.
    pub(super) pairs: Vec<f64>,
    pub(super) summary: Summary,
    /// Whether no other peer of this kind comes nearer.
    pub(super) best_of_its_kind: bool,
}

impl Row {
    pub(super) fn new(side: &str, kind: &'static str) -> Self {
        Self { side: side.to_owned(), kind, lacks: None, ways: Vec::new() }
    }

    pub(super) fn add(&mut self, way: &'static str, values: Vec<f64>) {
        match self.ways.iter_mut().find(|known| known.name == way) {
            Some(known) => known.runs.push(values),
            None => self.ways.push(Way { name: way, runs: vec![values] }),
        }
    }

    /// The way that counts: the one whose first metric has the best median.
    pub(super) fn best(&self, case: &Case) -> Option<&Way> {
        let score = |way: &Way| {
            let median = Summary::of(&way.values(0)).map_or(f64::NAN, |summary| summary.median);
            if case.metrics[0].higher_is_better { -median } else { median }
        };
        self.ways.iter().min_by(|a, b| score(a).total_cmp(&score(b)))
    }
}

impl Measured {
    pub(super) fn new(case: Case, rows: Vec<Row>) -> Self {
        Self { case, rows, notes: BTreeSet::new() }
    }

    /// How many times better Forkpoint is than the side of a row; nothing for its own row and for one without figures.
    pub(super) fn ratio(&self, row: &Row, metric: usize) -> Option<Ratio> {
        let (pairs, summary) = self.pairs(row, metric)?;
        let median = summary.median;
        let others = self.rows.iter().filter(|other| other.kind == row.kind && other.side != row.side);
        let best_of_its_kind =
            others.filter_map(|other| self.pairs(other, metric)).all(|(_, other)| other.median >= median);
        Some(Ratio { pairs, summary, best_of_its_kind })
    }

    fn pairs(&self, row: &Row, metric: usize) -> Option<(Vec<f64>, Summary)> {
        let ours = self.rows.first()?;
        if ours.side == row.side {
            return None;
        }
        let higher_is_better = self.case.metrics[metric].higher_is_better != self.case.yardstick;
        let (ours, theirs) = (ours.best(&self.case)?, row.best(&self.case)?);
        let pairs = ratios(&ours.values(metric), &theirs.values(metric), higher_is_better);
        let summary = Summary::of(&pairs)?;
        Some((pairs, summary))
    }
}

/// Measures a case on every side, repeat by repeat, each side first in turn. What `prepare` makes (for no repeat: of the
/// rehearsal) is put to every side of a repeat. A peer that refuses is left out of the case with its reason; where
/// Forkpoint does, the bench ends.
pub(super) async fn measure<T>(
    sides: &[Side],
    repeats: usize,
    case: Case,
    mut prepare: impl AsyncFnMut(Option<usize>) -> Result<T, BenchError>,
    mut run: impl AsyncFnMut(&Side, &T) -> Result<Vec<Sample>, BenchError>,
) -> Result<Measured, BenchError> {
    let rows = sides.iter().map(|side| Row::new(side.name(), side.kind())).collect();
    let mut measured = Measured::new(case, rows);
    // Whoever had the last turn, in the case before.
    let mut settle = sides.iter().map(Side::settle).max().unwrap_or_default();
    let rehearsal = measured.case.rehearse.then_some(None);
    for repeat in rehearsal.into_iter().chain((0..repeats).map(Some)) {
        let input = prepare(repeat).await?;
        for turn in 0..sides.len() {
            let at = (turn + repeat.unwrap_or(0)) % sides.len();
            let (side, row) = (&sides[at], &mut measured.rows[at]);
            if row.lacks.is_some() {
                continue;
            }
            tokio::time::sleep(std::mem::replace(&mut settle, side.settle())).await;
            match run(side, &input).await {
                Ok(samples) if repeat.is_some() => {
                    for sample in samples {
                        row.add(sample.way, sample.values);
                        measured.notes.extend(sample.note);
                    }
                }
                Ok(_) => {}
                Err(error) if matches!(side, Side::Forkpoint(_)) => return Err(error),
                Err(error) => {
                    // Pairs need every repeat of both sides.
                    row.ways.clear();
                    row.lacks = Some(error.without_side());
                }
            }
        }
    }
    Ok(measured)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const METRICS: &[Metric] = &[Metric { name: "time", unit: "ms", higher_is_better: false }];

    fn measured() -> Measured {
        let name = "a case".to_owned();
        let case = Case {
            measure: "decide",
            name,
            metrics: METRICS,
            facts: json!({}),
            rehearse: false,
            yardstick: false,
        };
        let mut ours = Row::new("forkpoint", "forkpoint");
        let (mut slow, mut fast) = (Row::new("llama:a", "llama"), Row::new("llama:b", "llama"));
        for (our, a, b) in [(10.0, 90.0, 40.0), (10.0, 80.0, 50.0), (20.0, 80.0, 60.0)] {
            ours.add("", vec![our]);
            slow.add("grammar", vec![a]);
            slow.add("n_probs", vec![a - 10.0]);
            fast.add("grammar", vec![b]);
        }
        let mut lacking = Row::new("vllm", "vllm");
        lacking.lacks = Some("501".into());
        Measured::new(case, vec![ours, slow, fast, lacking])
    }

    #[test]
    fn the_best_way_of_the_best_peer_counts() {
        let measured = measured();
        let row = |name: &str| measured.rows.iter().find(|row| row.side == name).unwrap();
        assert_eq!(row("llama:a").best(&measured.case).unwrap().name, "n_probs");
        let slow = measured.ratio(row("llama:a"), 0).unwrap();
        assert_eq!((slow.pairs.as_slice(), slow.summary.median), (&[8.0, 7.0, 3.5][..], 7.0));
        assert!(!slow.best_of_its_kind);
        let fast = measured.ratio(row("llama:b"), 0).unwrap();
        assert_eq!((fast.pairs.as_slice(), fast.best_of_its_kind), (&[4.0, 5.0, 3.0][..], true));
    }

    #[test]
    fn a_yardstick_says_how_many_times_as_long_it_took() {
        let mut measured = measured();
        measured.case.yardstick = true;
        assert_eq!(measured.ratio(&measured.rows[2], 0).unwrap().pairs, [0.25, 0.2, 1.0 / 3.0]);
    }

    #[test]
    fn only_peers_with_figures_have_a_ratio() {
        let measured = measured();
        assert_eq!(measured.ratio(&measured.rows[0], 0), None);
        assert_eq!(measured.ratio(&measured.rows[3], 0), None);
    }
}
