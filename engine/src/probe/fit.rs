//! Fitting: regularised logistic regression on standardised features, multinomial for
//! names and ordinal for levels, by L-BFGS. Deterministic: sums have a fixed order.

use argmin::core::{CostFunction, Executor, Gradient, State};
use argmin::solver::linesearch::MoreThuenteLineSearch;
use argmin::solver::quasinewton::LBFGS;

use super::compact::Compact;

/// Steps after which the optimiser stops.
const STEPS: u64 = 100;
/// Gradients that L-BFGS remembers.
const MEMORY: usize = 10;

/// Features row by row.
#[derive(Debug, Clone, Copy)]
struct Table<'a> {
    rows: &'a [Vec<f64>],
    /// The place of each row's label.
    labels: &'a [usize],
    /// How many labels there are.
    classes: usize,
}

/// What one number of the features is worth: shift and scale that bring it to mean
/// 0 and deviation 1 over the examples.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Scale {
    pub(super) mean: Vec<f64>,
    pub(super) deviation: Vec<f64>,
}

impl Scale {
    pub(super) fn of(rows: &[&[f32]]) -> Self {
        let (count, width) = (rows.len() as f64, rows[0].len());
        let mut mean = vec![0.0; width];
        let mut deviation = vec![0.0; width];
        for row in rows {
            mean.iter_mut().zip(*row).for_each(|(mean, &x)| *mean += f64::from(x) / count);
        }
        for row in rows {
            for ((deviation, &x), mean) in deviation.iter_mut().zip(*row).zip(&mean) {
                *deviation += (f64::from(x) - mean).powi(2) / count;
            }
        }
        // A number that never changes says nothing, whatever it is divided by.
        let least = 1e-3 * (deviation.iter().sum::<f64>() / width as f64).sqrt().max(1e-9);
        deviation.iter_mut().for_each(|deviation| *deviation = deviation.sqrt().max(least));
        Self { mean, deviation }
    }

    pub(super) fn apply(&self, row: &[f32]) -> Vec<f64> {
        let scaled = row.iter().zip(&self.mean).zip(&self.deviation);
        scaled.map(|((&x, mean), deviation)| (f64::from(x) - mean) / deviation).collect()
    }
}

/// A linear head: scores of a row, and what they mean.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Head {
    /// Softmax over a score a label.
    Names {
        /// `[label][feature]`.
        weights: Vec<Vec<f64>>,
        bias: Vec<f64>,
    },
    /// The chance to lie at or below level `k` is `sigmoid(thresholds[k] - score)`:
    /// McCullagh's proportional odds.
    Levels {
        weights: Vec<f64>,
        /// Ascending, one fewer than levels.
        thresholds: Vec<f64>,
    },
}

impl Head {
    /// Probabilities of each label for a standardised row, at a temperature.
    pub(super) fn probabilities(&self, row: &[f64], temperature: f64) -> Vec<f64> {
        match self {
            Self::Names { weights, bias } => {
                let scores: Vec<f64> = weights
                    .iter()
                    .zip(bias)
                    .map(|(weights, bias)| (dot(weights, row) + bias) / temperature)
                    .collect();
                softmax(&scores)
            }
            Self::Levels { weights, thresholds } => {
                let score = dot(weights, row);
                let below: Vec<f64> =
                    thresholds.iter().map(|threshold| sigmoid((threshold - score) / temperature)).collect();
                let ends = below.iter().copied().chain([1.0]);
                let starts = [0.0].into_iter().chain(below.iter().copied());
                ends.zip(starts).map(|(end, start)| (end - start).max(0.0)).collect()
            }
        }
    }
}

/// Fits a head. `strength` is the penalty on the squared weights, relative to a mean
/// loss in which each label counts alike.
pub(super) fn fit(
    rows: &Compact<'_>,
    labels: &[usize],
    classes: usize,
    ordinal: bool,
    strength: f64,
) -> Head {
    let table = Table { rows: rows.rows(), labels, classes };
    let width = table.rows[0].len();
    let counts = counts(table);
    let weight = |label: usize| 1.0 / (classes * counts[label]) as f64;
    let loss = Loss { table, strength, ordinal, share: (0..classes).map(weight).collect() };
    let start = if ordinal { loss.ordinal_start(width) } else { vec![0.0; classes * (width + 1)] };
    let search = MoreThuenteLineSearch::new();
    let solver = LBFGS::new(search, MEMORY).with_tolerance_grad(1e-5);
    let solver = solver.expect("the tolerance is positive");
    let run = Executor::new(loss.clone(), solver)
        .configure(|state| state.param(start.clone()).max_iters(STEPS))
        .timer(false)
        .ctrlc(false)
        .run();
    // A line search that finds no better point ends the run there, with the best so far.
    let run = run.expect("neither the loss nor its gradient fails");
    let found = run.state().get_best_param().cloned().unwrap_or(start);
    match loss.head(&found, width) {
        Head::Names { weights, bias } => {
            Head::Names { weights: weights.iter().map(|row| rows.expand(row)).collect(), bias }
        }
        Head::Levels { weights, thresholds } => Head::Levels { weights: rows.expand(&weights), thresholds },
    }
}

fn counts(table: Table<'_>) -> Vec<usize> {
    let mut counts = vec![0; table.classes];
    table.labels.iter().for_each(|&label| counts[label] += 1);
    counts.iter_mut().for_each(|count| *count = (*count).max(1));
    counts
}

#[derive(Clone)]
struct Loss<'a> {
    table: Table<'a>,
    strength: f64,
    ordinal: bool,
    /// How much a row of each label counts.
    share: Vec<f64>,
}

impl Loss<'_> {
    /// Thresholds at the quantiles of a uniform answer, as offset and logs of gaps.
    fn ordinal_start(&self, width: usize) -> Vec<f64> {
        let classes = self.table.classes as f64;
        let at = |k: usize| ((k as f64 / classes) / (1.0 - k as f64 / classes)).ln();
        let mut start = vec![0.0; width];
        start.push(at(1));
        start.extend((2..self.table.classes).map(|k| (at(k) - at(k - 1)).ln()));
        start
    }

    fn head(&self, parameters: &[f64], width: usize) -> Head {
        if self.ordinal {
            let (weights, rest) = parameters.split_at(width);
            return Head::Levels { weights: weights.to_vec(), thresholds: thresholds(rest) };
        }
        let rows = parameters.chunks_exact(width + 1);
        let weights = rows.clone().map(|row| row[..width].to_vec()).collect();
        Head::Names { weights, bias: rows.map(|row| row[width]).collect() }
    }

    /// The loss, and its gradient where asked.
    fn at(&self, parameters: &[f64], mut gradient: Option<&mut Vec<f64>>) -> f64 {
        let width = self.table.rows[0].len();
        let mut loss = 0.0;
        for (row, &label) in self.table.rows.iter().zip(self.table.labels) {
            let share = self.share[label];
            loss += share
                * if self.ordinal {
                    self.level(parameters, row, label, share, gradient.as_deref_mut())
                } else {
                    self.name(parameters, row, label, share, gradient.as_deref_mut())
                };
        }
        // Neither biases nor thresholds are penalised.
        let rows = if self.ordinal { 1 } else { self.table.classes };
        for row in 0..rows {
            let start = row * (width + 1);
            for place in start..start + width {
                loss += 0.5 * self.strength * parameters[place].powi(2);
                if let Some(gradient) = gradient.as_deref_mut() {
                    gradient[place] += self.strength * parameters[place];
                }
            }
        }
        loss
    }

    fn name(
        &self,
        parameters: &[f64],
        row: &[f64],
        label: usize,
        share: f64,
        gradient: Option<&mut Vec<f64>>,
    ) -> f64 {
        let width = row.len();
        let scores: Vec<f64> = parameters
            .chunks_exact(width + 1)
            .map(|weights| dot(&weights[..width], row) + weights[width])
            .collect();
        let probabilities = softmax(&scores);
        if let Some(gradient) = gradient {
            for (class, gradient) in gradient.chunks_exact_mut(width + 1).enumerate() {
                let error = share * (probabilities[class] - f64::from(u8::from(class == label)));
                add(&mut gradient[..width], error, row);
                gradient[width] += error;
            }
        }
        -probabilities[label].max(f64::MIN_POSITIVE).ln()
    }

    fn level(
        &self,
        parameters: &[f64],
        row: &[f64],
        label: usize,
        share: f64,
        gradient: Option<&mut Vec<f64>>,
    ) -> f64 {
        let (width, last) = (row.len(), self.table.classes - 1);
        let (weights, rest) = parameters.split_at(width);
        let thresholds = thresholds(rest);
        let score = dot(weights, row);
        let end = if label == last { 1.0 } else { sigmoid(thresholds[label] - score) };
        let start = if label == 0 { 0.0 } else { sigmoid(thresholds[label - 1] - score) };
        let chance = (end - start).max(1e-12);
        if let Some(gradient) = gradient {
            let (slope_end, slope_start) = (end * (1.0 - end), start * (1.0 - start));
            add(&mut gradient[..width], share * (slope_end - slope_start) / chance, row);
            // Threshold k is the offset and all gaps up to it.
            let mut along = |k: usize, slope: f64| {
                gradient[width] += slope;
                for gap in 1..=k {
                    gradient[width + gap] += slope * widen(rest[gap]);
                }
            };
            if label < last {
                along(label, -share * slope_end / chance);
            }
            if label > 0 {
                along(label - 1, share * slope_start / chance);
            }
        }
        -chance.ln()
    }
}

/// A gap from its log, finite however far a search reaches.
fn widen(gap: f64) -> f64 {
    gap.min(30.0).exp()
}

/// Ascending thresholds from an offset and the logs of the gaps.
fn thresholds(rest: &[f64]) -> Vec<f64> {
    let mut at = rest[0];
    let mut thresholds = vec![at];
    for &gap in &rest[1..] {
        at += widen(gap);
        thresholds.push(at);
    }
    thresholds
}

impl CostFunction for Loss<'_> {
    type Param = Vec<f64>;
    type Output = f64;

    fn cost(&self, parameters: &Vec<f64>) -> Result<f64, argmin::core::Error> {
        Ok(self.at(parameters, None))
    }
}

impl Gradient for Loss<'_> {
    type Param = Vec<f64>;
    type Gradient = Vec<f64>;

    fn gradient(&self, parameters: &Vec<f64>) -> Result<Vec<f64>, argmin::core::Error> {
        let mut gradient = vec![0.0; parameters.len()];
        self.at(parameters, Some(&mut gradient));
        Ok(gradient)
    }
}

/// Eight sums side by side, so that the compiler may use wide registers.
pub(super) fn dot(a: &[f64], b: &[f64]) -> f64 {
    let mut sums = [0.0; 8];
    let (a8, a_rest) = a.as_chunks::<8>();
    let (b8, b_rest) = b.as_chunks::<8>();
    for (a, b) in a8.iter().zip(b8) {
        for i in 0..8 {
            sums[i] += a[i] * b[i];
        }
    }
    let rest: f64 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f64>() + rest
}

/// `to += scale · row`.
pub(super) fn add(to: &mut [f64], scale: f64, row: &[f64]) {
    to.iter_mut().zip(row).for_each(|(to, x)| *to += scale * x);
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn softmax(scores: &[f64]) -> Vec<f64> {
    let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|score| (score - top).exp()).collect();
    let sum: f64 = weights.iter().sum();
    weights.iter().map(|weight| weight / sum).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Points on a line, with a number beside them that says nothing.
    fn points(at: &[(f64, usize)]) -> (Vec<Vec<f64>>, Vec<usize>) {
        at.iter().enumerate().map(|(i, &(x, label))| (vec![x, (i % 3) as f64 - 1.0], label)).unzip()
    }

    #[test]
    fn gradients_are_the_loss_es_slopes() {
        let (rows, labels) = points(&[(-1.0, 0), (0.2, 1), (0.4, 2), (1.5, 2), (-0.3, 1)]);
        let table = Table { rows: &rows, labels: &labels, classes: 3 };
        for ordinal in [false, true] {
            let loss = Loss { table, strength: 0.1, ordinal, share: vec![0.2, 0.3, 0.5] };
            let size = if ordinal { 4 } else { 9 };
            let at: Vec<f64> = (0..size).map(|i| 0.3 - 0.17 * i as f64).collect();
            let gradient = loss.gradient(&at).unwrap();
            for place in 0..size {
                let moved = |by: f64| {
                    let mut at = at.clone();
                    at[place] += by;
                    loss.cost(&at).unwrap()
                };
                let slope = (moved(1e-6) - moved(-1e-6)) / 2e-6;
                assert!(
                    (slope - gradient[place]).abs() < 1e-6,
                    "{ordinal} {place}: {slope} {}",
                    gradient[place]
                );
            }
        }
    }

    #[test]
    fn levels_in_order_are_told_apart_and_between_them_the_answer_lies_between() {
        let at: Vec<(f64, usize)> = (0..30).map(|i| (f64::from(i) / 10.0 - 1.5, (i / 10) as usize)).collect();
        let (rows, labels) = points(&at);
        for ordinal in [false, true] {
            let head = fit(&Compact::new(&rows), &labels, 3, ordinal, 1e-3);
            for (row, &label) in rows.iter().zip(&labels) {
                let p = head.probabilities(row, 1.0);
                assert!((p.iter().sum::<f64>() - 1.0).abs() < 1e-9);
                if (row[0] * 10.0 + 15.0) as usize % 10 == 5 {
                    assert!(p[label] > 0.8, "{ordinal} {row:?}: {p:?}");
                }
            }
            let cold = head.probabilities(&rows[15], 4.0);
            assert!(cold[1] < head.probabilities(&rows[15], 1.0)[1], "a high temperature flattens");
        }
    }

    #[test]
    fn the_same_examples_give_the_same_bits() {
        let (rows, labels) = points(&[(-1.0, 0), (0.2, 1), (0.4, 1), (-1.5, 0)]);
        let fit = || fit(&Compact::new(&rows), &labels, 2, false, 0.01);
        assert_eq!(fit(), fit());
    }
}
