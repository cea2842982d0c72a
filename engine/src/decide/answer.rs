//! From logits to probabilities, and from probabilities to an answer.

use super::question::{Answer, Criteria, Rung, Verdict};
use crate::error::EngineError;

/// What the logits at a reply's start say of some labels.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Reading {
    /// Probability of each label among the labels; they sum to 1.
    pub(crate) probabilities: Vec<f64>,
    /// Probability of all labels over the whole vocabulary.
    pub(crate) mass: f64,
    /// Whether the likeliest token of all is a label.
    pub(crate) argmax_is_label: bool,
}

/// Reads labels off the logits over the vocabulary. A label's probability is
/// the sum over its spellings.
pub(crate) fn read(logits: &[f32], labels: &[Vec<u32>]) -> Reading {
    let (argmax, top) = argmax(logits);
    let exp = |logit: f32| f64::from(logit - top).exp();
    let total: f64 = logits.iter().copied().map(exp).sum();

    // Relative to the best label rather than to the best token, so that labels
    // which the model finds absurd still divide cleanly among themselves.
    let logit = |&token: &u32| logits[token as usize];
    let best = labels.iter().flatten().map(logit).fold(f32::NEG_INFINITY, f32::max);
    let weights: Vec<f64> = labels
        .iter()
        .map(|label| label.iter().map(|token| f64::from(logit(token) - best).exp()).sum())
        .collect();
    let sum: f64 = weights.iter().sum();
    Reading {
        probabilities: weights.iter().map(|weight| weight / sum).collect(),
        mass: (sum * exp(best) / total).clamp(0.0, 1.0),
        argmax_is_label: labels.iter().flatten().any(|&token| token as usize == argmax),
    }
}

/// The first of the largest.
fn argmax(logits: &[f32]) -> (usize, f32) {
    logits.iter().copied().enumerate().fold((0, f32::NEG_INFINITY), |best, (token, logit)| {
        if logit > best.1 { (token, logit) } else { best }
    })
}

/// The answer that a reading gives to a question.
pub(crate) fn answer(criteria: &Criteria, reading: Reading) -> Answer {
    let Reading { probabilities, mass, argmax_is_label } = reading;
    let (verdict, confidence) = match criteria {
        Criteria::Choice(_) => (Verdict::Choice(mode(&probabilities)), choice_confidence(&probabilities)),
        Criteria::Boolean { .. } => (Verdict::Boolean(probabilities[0]), choice_confidence(&probabilities)),
        Criteria::Score(_) => {
            let expected = probabilities.iter().enumerate().map(|(level, p)| level as f64 * p).sum();
            (Verdict::Score(expected), score_confidence(&probabilities))
        }
    };
    Answer { verdict, probabilities, confidence, mass, argmax_is_label, rung: Rung::Labels }
}

impl Answer {
    /// The answer that these probabilities give, with no model at all: of each option, of yes then no, or of each
    /// level.
    ///
    /// # Errors
    /// When there are not as many as may be answered, or they are not probabilities that sum to 1.
    pub fn of(
        criteria: &Criteria,
        probabilities: Vec<f64>,
        mass: f64,
        rung: Rung,
    ) -> Result<Self, EngineError> {
        let wanted = match criteria {
            Criteria::Choice(options) => options.len(),
            Criteria::Boolean { .. } => 2,
            Criteria::Score(levels) => levels.len(),
        };
        let sum: f64 = probabilities.iter().sum();
        let proper = |p: &f64| (0.0..=1.0).contains(p);
        if probabilities.len() != wanted || wanted == 0 {
            let message = format!("{wanted} probabilities are expected, got {}", probabilities.len());
            return Err(EngineError::Invalid(message));
        }
        if !probabilities.iter().all(proper) || (sum - 1.0).abs() > 1e-6 || !proper(&mass) {
            let message =
                format!("probabilities are from 0 to 1 and sum to 1, got {probabilities:?}, mass {mass}");
            return Err(EngineError::Invalid(message));
        }
        let reading = Reading { probabilities, mass, argmax_is_label: true };
        Ok(Self { rung, ..answer(criteria, reading) })
    }
}

/// The likeliest option; the first of equals.
pub(crate) fn mode(probabilities: &[f64]) -> usize {
    (0..probabilities.len()).fold(0, |best, i| if probabilities[i] > probabilities[best] { i } else { best })
}

/// TypeSafe's confidence of a choice: the top probability's distance from
/// uniform, `(max p - 1/n) / (1 - 1/n)`.
fn choice_confidence(probabilities: &[f64]) -> f64 {
    let n = probabilities.len() as f64;
    if n < 2.0 {
        return 1.0;
    }
    ((probabilities[mode(probabilities)] - 1.0 / n) / (1.0 - 1.0 / n)).clamp(0.0, 1.0)
}

/// TypeSafe's confidence of a score: `1 - spread / u`, where the spread is the
/// mean distance from the mode and `u` that of a uniform answer from the middle.
fn score_confidence(probabilities: &[f64]) -> f64 {
    let n = probabilities.len() as f64;
    let mode = mode(probabilities) as f64;
    let spread: f64 = probabilities.iter().enumerate().map(|(i, p)| p * (i as f64 - mode).abs()).sum();
    let uniform = (0..probabilities.len()).map(|i| (i as f64 - (n - 1.0) / 2.0).abs()).sum::<f64>() / n;
    (1.0 - spread / uniform).clamp(0.0, 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decide::ChoiceOption;

    fn reading(probabilities: &[f64]) -> Reading {
        Reading { probabilities: probabilities.to_vec(), mass: 0.5, argmax_is_label: true }
    }

    fn choice(n: usize) -> Criteria {
        Criteria::Choice((0..n).map(|i| ChoiceOption { name: i.to_string(), description: None }).collect())
    }

    fn close(a: f64, b: f64) {
        assert!((a - b).abs() < 1e-12, "{a} != {b}");
    }

    #[test]
    fn spellings_add_up_and_mass_is_over_the_vocabulary() {
        // Probabilities 1/8, 2/8, 4/8, 1/8.
        let logits = [0.0, 2f32.ln(), 4f32.ln(), 0.0];
        let got = read(&logits, &[vec![0, 3], vec![1]]);
        assert!((got.probabilities[0] - 0.5).abs() < 1e-6);
        assert!((got.mass - 0.5).abs() < 1e-6);
        assert!(!got.argmax_is_label);
        assert!(read(&logits, &[vec![2], vec![1]]).argmax_is_label);
    }

    #[test]
    fn labels_that_the_model_finds_absurd_still_sum_to_one() {
        let got = read(&[0.0, -2000.0, -2000.0], &[vec![1], vec![2]]);
        assert_eq!(got.probabilities, [0.5, 0.5]);
        assert_eq!(got.mass, 0.0);
    }

    #[test]
    fn confidence_is_typesafes() {
        close(answer(&choice(4), reading(&[0.25; 4])).confidence, 0.0);
        close(answer(&choice(4), reading(&[0.7, 0.1, 0.1, 0.1])).confidence, 0.6);
        close(answer(&choice(1), reading(&[1.0])).confidence, 1.0);
        let score = |p: &[f64]| answer(&Criteria::Score(vec![String::new(); p.len()]), reading(p)).confidence;
        // Mode 2, spread 0.25 · 1, uniform spread (1 + 0 + 1) / 3.
        close(score(&[0.0, 0.25, 0.75]), 1.0 - 0.25 / (2.0 / 3.0));
        close(score(&[0.5, 0.0, 0.5]), 0.0);
        // For two levels both formulas agree.
        close(score(&[0.2, 0.8]), 0.6);
    }

    #[test]
    fn an_answer_is_made_of_probabilities_or_refused() {
        let even = |n: usize| vec![1.0 / n as f64; n];
        let made = Answer::of(&choice(3), vec![0.2, 0.7, 0.1], 0.9, Rung::Probe).unwrap();
        assert_eq!((made.verdict, made.mass, made.rung), (Verdict::Choice(1), 0.9, Rung::Probe));
        for (criteria, probabilities, mass) in [
            (choice(0), vec![], 1.0),
            (choice(3), even(2), 1.0),
            (choice(2), vec![0.7, 0.7], 1.0),
            (choice(2), vec![-0.5, 1.5], 1.0),
            (choice(2), vec![f64::NAN, 1.0], 1.0),
            (choice(2), even(2), 1.5),
        ] {
            assert!(
                Answer::of(&criteria, probabilities.clone(), mass, Rung::Labels).is_err(),
                "{probabilities:?}"
            );
        }
    }

    #[test]
    fn a_score_is_the_expected_level_and_a_tie_goes_to_the_first() {
        let score = answer(&Criteria::Score(vec![String::new(); 3]), reading(&[0.2, 0.3, 0.5]));
        assert_eq!(score.verdict, Verdict::Score(1.3));
        assert_eq!(answer(&choice(3), reading(&[0.2, 0.4, 0.4])).verdict, Verdict::Choice(1));
    }
}
