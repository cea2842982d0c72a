//! How well a probe does on examples that it was not fitted from: cross-validation
//! by families, and what is measured with it.

use serde::{Deserialize, Serialize};

use super::artifact::short;
use super::compact::Compact;
use super::fit::{self, Head, Scale};
use super::scope::{self, Nearness};
use crate::decide::mode;

/// Parts that the families are dealt into.
const FOLDS: usize = 5;
/// Penalties to choose from, for `width / examples` of 1. In the experiments of
/// docs/decisions/007 the best lay at .1 or below.
const STRENGTHS: [f64; 5] = [1.0, 0.3, 0.1, 0.03, 0.01];
/// Bins of the calibration error.
const BINS: usize = 10;

/// What cross-validation found.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Quality {
    /// Parts that the examples were dealt into; each was judged by a fit on the others.
    pub folds: usize,
    /// Share of examples whose likeliest label is right.
    pub accuracy: f64,
    /// Accuracy of the commonest label.
    pub majority: f64,
    /// Expected calibration error: the mean distance of confidence from accuracy, over
    /// ten bins of the likeliest label's probability (Naeini et al. 2015).
    pub ece: f64,
    /// Brier's score, summed over labels: 0 is perfect, 2 is certain and wrong.
    pub brier: f64,
    /// How many examples of each label (row) were given each label (column).
    pub confusion: Vec<Vec<u32>>,
    /// How well mass tells the examples without a label from the others: the area
    /// under the ROC curve. None where there are no such examples.
    pub scope: Option<f64>,
    /// How label reads of the same question do; none until it was measured.
    pub label_reads: Option<LabelReads>,
}

impl Quality {
    /// Whether a stranger's figures can be what they say, for so many labels.
    pub(super) fn check(&self, labels: usize) -> Result<(), String> {
        let reads = self.label_reads.map(|reads| reads.accuracy);
        let shares = [
            Some(self.accuracy),
            Some(self.majority),
            Some(self.ece),
            Some(self.brier / 2.0),
            self.scope,
            reads,
        ];
        if !shares.into_iter().flatten().all(|share| (0.0..=1.0).contains(&share)) {
            return Err("a quality that is no share".into());
        }
        if self.confusion.len() != labels || self.confusion.iter().any(|row| row.len() != labels) {
            return Err(format!("a confusion of other than {labels} labels"));
        }
        Ok(())
    }

    /// With numbers of as many digits as a file holds.
    pub(super) fn short(self) -> Self {
        let Self { accuracy, majority, ece, brier, scope, .. } = self;
        let [accuracy, majority, ece, brier] = [accuracy, majority, ece, brier].map(short);
        Self { accuracy, majority, ece, brier, scope: scope.map(short), ..self }
    }
}

/// Label reads on a probe's examples.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LabelReads {
    /// How many examples were read, evenly from all.
    pub examples: usize,
    /// Share of them that was right.
    pub accuracy: f64,
}

/// What is chosen by cross-validation, and how good it is.
pub(super) struct Validated {
    pub(super) strength: f64,
    pub(super) temperature: f64,
    pub(super) nearness: Nearness,
    pub(super) quality: Quality,
}

/// Examples as features. The last `outside` of the rows are out of scope.
pub(super) struct Sample<'a> {
    pub(super) rows: &'a [&'a [f32]],
    pub(super) labels: &'a [usize],
    pub(super) families: &'a [u64],
    pub(super) outside: &'a [&'a [f32]],
    pub(super) classes: usize,
    pub(super) ordinal: bool,
}

/// One part of the examples, judged by the others.
struct Fold {
    /// Places of the examples in it.
    places: Vec<usize>,
    scale: Scale,
    fitted: Vec<Vec<f64>>,
    fitted_labels: Vec<usize>,
    held: Vec<Vec<f64>>,
}

impl Sample<'_> {
    pub(super) fn validate(&self) -> Validated {
        let folds = self.folds();
        let scaled: Vec<Fold> = (0..FOLDS).filter_map(|fold| self.fold(&folds, fold)).collect();
        if scaled.is_empty() {
            return self.unjudged();
        }
        let compact: Vec<Compact<'_>> = scaled.iter().map(|fold| Compact::new(&fold.fitted)).collect();
        let mut best: Option<(f64, f64, f64, Vec<Vec<f64>>)> = None;
        for relative in STRENGTHS {
            let strength = relative * self.rows[0].len() as f64 / self.rows.len() as f64;
            let heads: Vec<Head> = scaled
                .iter()
                .zip(&compact)
                .map(|(fold, rows)| fit::fit(rows, &fold.fitted_labels, self.classes, self.ordinal, strength))
                .collect();
            let predict = |temperature: f64| {
                let mut out = vec![Vec::new(); self.rows.len()];
                for (fold, head) in scaled.iter().zip(&heads) {
                    for (&place, row) in fold.places.iter().zip(&fold.held) {
                        out[place] = head.probabilities(row, temperature);
                    }
                }
                out
            };
            let temperature = lowest(|temperature| self.log_loss(&predict(temperature)));
            let predicted = predict(temperature);
            let loss = self.log_loss(&predicted);
            if best.as_ref().is_none_or(|(least, ..)| loss < *least) {
                best = Some((loss, strength, temperature, predicted));
            }
        }
        let (_, strength, temperature, predicted) = best.expect("there are strengths to try");
        let (inside, outside) = self.distances(&scaled);
        let quality = Quality {
            folds: scaled.len(),
            scope: (!outside.is_empty()).then(|| area(&inside, &outside)),
            ..measure(&predicted, self.labels, self.classes)
        };
        Validated { strength, temperature, nearness: Nearness::of(inside), quality }
    }

    /// What there is to say of examples that are all of one family.
    fn unjudged(&self) -> Validated {
        let strength = STRENGTHS[2] * self.rows[0].len() as f64 / self.rows.len() as f64;
        let even = vec![vec![1.0 / self.classes as f64; self.classes]; self.rows.len()];
        let quality = measure(&even, self.labels, self.classes);
        Validated { strength, temperature: 1.0, nearness: Nearness { half: 1.0, spread: 1.0 }, quality }
    }

    /// Which fold each example is in: whole families, dealt so that labels spread.
    fn folds(&self) -> Vec<usize> {
        let mut families: Vec<u64> = self.families.to_vec();
        families.sort_unstable();
        families.dedup();
        let mut held = vec![vec![0usize; self.classes]; FOLDS.min(families.len())];
        let mut folds = vec![0; self.rows.len()];
        for family in families {
            let places: Vec<usize> = (0..self.rows.len()).filter(|&i| self.families[i] == family).collect();
            let crowd = |fold: &Vec<usize>| places.iter().map(|&i| fold[self.labels[i]]).sum::<usize>();
            let size = |fold: &Vec<usize>| fold.iter().sum::<usize>();
            let key = |&fold: &usize| (crowd(&held[fold]), size(&held[fold]), fold);
            let fold = (0..held.len()).min_by_key(key).unwrap_or(0);
            for place in places {
                folds[place] = fold;
                held[fold][self.labels[place]] += 1;
            }
        }
        folds
    }

    fn fold(&self, folds: &[usize], fold: usize) -> Option<Fold> {
        let (places, others): (Vec<usize>, Vec<usize>) = (0..folds.len()).partition(|&i| folds[i] == fold);
        if places.is_empty() || others.is_empty() {
            return None;
        }
        let rows: Vec<&[f32]> = others.iter().map(|&i| self.rows[i]).collect();
        let scale = Scale::of(&rows);
        Some(Fold {
            fitted: rows.iter().map(|row| scale.apply(row)).collect(),
            fitted_labels: others.iter().map(|&i| self.labels[i]).collect(),
            held: places.iter().map(|&i| scale.apply(self.rows[i])).collect(),
            places,
            scale,
        })
    }

    /// Mean loss in which each label counts alike.
    fn log_loss(&self, predicted: &[Vec<f64>]) -> f64 {
        let mut sums = vec![(0.0, 0usize); self.classes];
        for (probabilities, &label) in predicted.iter().zip(self.labels) {
            if let Some(chance) = probabilities.get(label) {
                sums[label].0 -= chance.max(1e-12).ln();
                sums[label].1 += 1;
            }
        }
        sums.iter().filter(|(_, count)| *count > 0).map(|(sum, count)| sum / *count as f64).sum()
    }

    /// Distances of examples from the others' directions, and of those out of scope.
    fn distances(&self, folds: &[Fold]) -> (Vec<f64>, Vec<f64>) {
        let (mut inside, mut outside) = (Vec::new(), vec![0.0; self.outside.len()]);
        for fold in folds {
            let directions = scope::directions(&fold.fitted);
            inside.extend(fold.held.iter().map(|row| scope::distance(row, &directions)));
            for (sum, row) in outside.iter_mut().zip(self.outside) {
                *sum += scope::distance(&fold.scale.apply(row), &directions) / folds.len() as f64;
            }
        }
        (inside, outside)
    }
}

/// Accuracy, calibration and confusion of predictions; what else there is to know is
/// left at none.
pub(super) fn measure(predicted: &[Vec<f64>], labels: &[usize], classes: usize) -> Quality {
    let count = predicted.len().max(1) as f64;
    let mut confusion = vec![vec![0u32; classes]; classes];
    let mut confidences = Vec::with_capacity(predicted.len());
    let mut brier = 0.0;
    for (probabilities, &label) in predicted.iter().zip(labels) {
        let top = mode(probabilities);
        confusion[label][top] += 1;
        confidences.push((probabilities[top], top == label));
        brier += probabilities
            .iter()
            .enumerate()
            .map(|(i, p)| (p - f64::from(u8::from(i == label))).powi(2))
            .sum::<f64>();
    }
    let most = confusion.iter().map(|row| row.iter().sum::<u32>()).max().unwrap_or(0);
    Quality {
        folds: 0,
        accuracy: confidences.iter().filter(|(_, right)| *right).count() as f64 / count,
        majority: f64::from(most) / count,
        ece: calibration_error(&confidences),
        brier: brier / count,
        confusion,
        scope: None,
        label_reads: None,
    }
}

/// The expected calibration error, as [`Quality::ece`] defines it, of answers by the
/// probability of their likeliest label and whether that was right.
#[must_use]
pub fn calibration_error(confidences: &[(f64, bool)]) -> f64 {
    let mut bins = [0.0f64; BINS];
    for &(confidence, right) in confidences {
        let bin = ((confidence * BINS as f64) as usize).min(BINS - 1);
        // A bin's share times its gap is the gap of its sums.
        bins[bin] += confidence - f64::from(u8::from(right));
    }
    bins.iter().map(|gap| gap.abs()).sum::<f64>() / confidences.len().max(1) as f64
}

/// The chance that one of `high` lies above one of `low`: Mann and Whitney's.
pub(super) fn area(low: &[f64], high: &[f64]) -> f64 {
    let above: f64 = high
        .iter()
        .flat_map(|h| {
            low.iter().map(move |l| {
                if h > l {
                    1.0
                } else if h < l {
                    0.0
                } else {
                    0.5
                }
            })
        })
        .sum();
    above / (low.len() * high.len()) as f64
}

/// The temperature, from 1/8 to 8, with the least loss: golden section over its log.
fn lowest(loss: impl Fn(f64) -> f64) -> f64 {
    let golden = (5f64.sqrt() - 1.0) / 2.0;
    let (mut low, mut high) = (-(8f64.ln()), 8f64.ln());
    for _ in 0..24 {
        let (a, b) = (high - golden * (high - low), low + golden * (high - low));
        if loss(a.exp()) <= loss(b.exp()) {
            high = b;
        } else {
            low = a;
        }
    }
    f64::midpoint(low, high).exp()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn predictions_are_measured_by_hand() {
        let predicted = [vec![0.9, 0.1], vec![0.6, 0.4], vec![0.35, 0.65], vec![0.95, 0.05]];
        let got = measure(&predicted, &[0, 1, 1, 0], 2);
        assert_eq!(got.confusion, [[2, 0], [1, 1]]);
        assert_eq!((got.accuracy, got.majority), (0.75, 0.5));
        // Bins: .9 and .95 are right (gap .15), .6 is wrong and .65 right (gap .25).
        assert!((got.ece - (0.15 + 0.25) / 4.0).abs() < 1e-12, "{}", got.ece);
        let brier = 2.0 * (0.01 + 0.36 + 0.1225 + 0.0025) / 4.0;
        assert!((got.brier - brier).abs() < 1e-12);
    }

    #[test]
    fn a_bin_is_as_far_off_as_its_answers_together() {
        assert!((calibration_error(&[(0.9, true), (0.9, false)]) - 0.4).abs() < 1e-12);
        assert_eq!(calibration_error(&[]), 0.0);
        // Half of those that are about half sure are right.
        assert!(calibration_error(&[(0.55, true), (0.55, false), (0.5, true), (0.5, false)]) < 0.03);
    }

    #[test]
    fn an_area_of_one_half_tells_nothing() {
        assert_eq!(area(&[1.0, 2.0], &[3.0, 4.0]), 1.0);
        assert_eq!(area(&[1.0, 4.0], &[2.0, 3.0]), 0.5);
        assert_eq!(area(&[1.0], &[1.0]), 0.5);
    }

    #[test]
    fn the_temperature_with_the_least_loss_is_found() {
        let found = lowest(|t: f64| (t.ln() - 0.7).powi(2));
        assert!((found.ln() - 0.7).abs() < 1e-3, "{found}");
    }

    #[test]
    fn few_families_are_judged_by_each_other_and_one_by_none() {
        let rows: Vec<Vec<f32>> = (0..4).map(|i| vec![i as f32, 1.0]).collect();
        let rows: Vec<&[f32]> = rows.iter().map(Vec::as_slice).collect();
        for (families, folds) in [([1, 1, 2, 2], 2), ([1, 2, 1, 2], 2), ([1, 1, 1, 1], 0)] {
            let labels = &[0, 0, 1, 1];
            let sample =
                Sample { rows: &rows, labels, families: &families, outside: &[], classes: 2, ordinal: false };
            assert_eq!(sample.validate().quality.folds, folds, "{families:?}");
        }
    }

    #[test]
    fn families_stay_together_and_labels_spread() {
        let rows: Vec<Vec<f32>> =
            (0..40).map(|i| vec![if i % 2 == 0 { 1.0 } else { -1.0 }, i as f32]).collect();
        let rows: Vec<&[f32]> = rows.iter().map(Vec::as_slice).collect();
        let labels: Vec<usize> = (0..40).map(|i| i % 2).collect();
        let families: Vec<u64> = (0..40).map(|i| i / 4).collect();
        let sample = Sample {
            rows: &rows,
            labels: &labels,
            families: &families,
            outside: &[],
            classes: 2,
            ordinal: false,
        };
        let folds = sample.folds();
        for family in 0..10 {
            assert!(folds[4 * family..4 * family + 4].iter().all(|fold| *fold == folds[4 * family]));
        }
        let validated = sample.validate();
        assert_eq!((validated.quality.folds, validated.quality.accuracy), (5, 1.0));
        assert_eq!(validated.quality.scope, None);
    }
}
