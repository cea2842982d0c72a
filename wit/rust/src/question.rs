//! Questions, and what their answers say.

use crate::bindings::forkpoint::policy::engine::{self, Rung, Verdict};
use crate::{BooleanSides, ChoiceOption, Criteria, Question};

/// A yes-or-no question.
pub fn boolean(instructions: impl Into<String>) -> Question {
    question(instructions, Criteria::Boolean(BooleanSides { yes: None, no: None }))
}

/// One of 1 to 26 named options. An option is a name, or a name and what it means:
/// `choice("Which?", [("billing", "money and invoices"), ("other", "anything else")])`.
pub fn choice<O: Into<ChoiceOption>>(
    instructions: impl Into<String>,
    options: impl IntoIterator<Item = O>,
) -> Question {
    question(instructions, Criteria::Choice(options.into_iter().map(Into::into).collect()))
}

/// A place on a scale of 2 to 10 levels, lowest first.
pub fn score<L: Into<String>>(
    instructions: impl Into<String>,
    levels: impl IntoIterator<Item = L>,
) -> Question {
    question(instructions, Criteria::Score(levels.into_iter().map(Into::into).collect()))
}

fn question(instructions: impl Into<String>, criteria: Criteria) -> Question {
    Question { instructions: instructions.into(), criteria, probe: None }
}

impl Question {
    /// Says when to answer yes and when no. A question of another kind stays as it is.
    #[must_use]
    pub fn sides(mut self, yes: impl Into<String>, no: impl Into<String>) -> Self {
        if let Criteria::Boolean(sides) = &mut self.criteria {
            *sides = BooleanSides { yes: Some(yes.into()), no: Some(no.into()) };
        }
        self
    }

    /// Has the question answered by the probe of this name, which costs no tokens.
    #[must_use]
    pub fn probe(mut self, name: impl Into<String>) -> Self {
        self.probe = Some(name.into());
        self
    }

    /// What the probabilities of its answer stand for, in order; a boolean answer has only that of yes.
    fn names(&self) -> Vec<String> {
        match &self.criteria {
            Criteria::Choice(options) => options.iter().map(|option| option.name.clone()).collect(),
            Criteria::Boolean(_) => vec!["yes".to_owned(), "no".to_owned()],
            Criteria::Score(levels) => levels.clone(),
        }
    }
}

impl From<&str> for ChoiceOption {
    fn from(name: &str) -> Self {
        Self { name: name.to_owned(), description: None }
    }
}

impl From<String> for ChoiceOption {
    fn from(name: String) -> Self {
        Self { name, description: None }
    }
}

impl<N: Into<String>, D: Into<String>> From<(N, D)> for ChoiceOption {
    fn from((name, description): (N, D)) -> Self {
        Self { name: name.into(), description: Some(description.into()) }
    }
}

/// What a question got.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Answer {
    /// The probability of yes. NaN unless the question was a boolean, so that no comparison with it holds.
    pub yes: f64,
    /// The expected level, 0 for the first: may fall between two. NaN unless the question was a score.
    pub level: f64,
    /// From 0, all answers alike, to 1, all on one. For a boolean: how far `yes` is from one half, times two.
    pub confidence: f64,
    /// How far to trust that the model took this for a question at all; low means unsure, whatever
    /// `confidence` says.
    pub mass: f64,
    /// What answered: the labels' probabilities, or a probe.
    pub rung: Rung,
    /// Options or levels with their probabilities, in the order asked; yes and no for a boolean.
    pub probabilities: Vec<(String, f64)>,
}

impl Answer {
    /// Whether this is the likeliest answer: an option, a level's text, or "yes" or "no". Of answers that are
    /// alike, the first asked wins.
    #[must_use]
    pub fn is(&self, name: &str) -> bool {
        self.top() == name
    }

    /// The likeliest answer; of those alike, the first asked.
    #[must_use]
    pub fn top(&self) -> &str {
        let mut best = ("", f64::NEG_INFINITY);
        for (name, probability) in &self.probabilities {
            if *probability > best.1 {
                best = (name, *probability);
            }
        }
        best.0
    }

    /// The probability of an option, a level's text, or "yes" or "no"; 0 for what was not asked.
    #[must_use]
    pub fn probability(&self, name: &str) -> f64 {
        self.probabilities.iter().find(|(known, _)| known == name).map_or(0.0, |(_, p)| *p)
    }
}

/// Puts the names back beside the probabilities, which the contract leaves in the order asked.
pub(crate) fn read_answer(question: &Question, answer: engine::Answer) -> Answer {
    let nan = f64::NAN;
    let (yes, level, confidence, values) = match answer.verdict {
        Verdict::Choice(choice) => (nan, nan, choice.confidence, choice.probabilities),
        Verdict::Boolean(yes) => (yes, nan, (2.0 * yes - 1.0).abs(), vec![yes, 1.0 - yes]),
        Verdict::Score(score) => (nan, score.score, score.confidence, score.probabilities),
    };
    let probabilities = question.names().into_iter().zip(values).collect();
    Answer { yes, level, confidence, mass: answer.mass, rung: answer.rung, probabilities }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bindings::forkpoint::policy::engine::{ChoiceAnswer, ScoreAnswer};

    fn answer(question: &Question, verdict: Verdict) -> Answer {
        read_answer(question, engine::Answer { verdict, mass: 0.9, rung: Rung::Labels })
    }

    #[test]
    fn options_may_carry_what_they_mean() {
        let asked = choice("Which?", [("billing", "money"), ("other", "the rest")]);
        let Criteria::Choice(options) = asked.criteria else { panic!("{asked:?}") };
        assert_eq!(options[0].name, "billing");
        assert_eq!(options[1].description.as_deref(), Some("the rest"));
        let Criteria::Choice(bare) = choice("Which?", ["a", "b"]).criteria else { panic!() };
        assert_eq!(bare[1].name, "b");
        assert_eq!(bare[1].description, None);
    }

    #[test]
    fn sides_describe_a_boolean_only() {
        let Criteria::Boolean(sides) = boolean("Is it?").sides("it is", "it is not").criteria else {
            panic!()
        };
        assert_eq!((sides.yes.as_deref(), sides.no.as_deref()), (Some("it is"), Some("it is not")));
        assert!(matches!(score("How?", ["low", "high"]).sides("a", "b").criteria, Criteria::Score(_)));
        assert_eq!(boolean("Is it?").probe("shell").probe.as_deref(), Some("shell"));
    }

    #[test]
    fn a_choice_names_its_probabilities() {
        let asked = choice("Harm?", ["nothing", "change", "destroy"]);
        let verdict = Verdict::Choice(ChoiceAnswer {
            choice: "destroy".into(),
            probabilities: vec![0.1, 0.2, 0.7],
            confidence: 0.55,
        });
        let got = answer(&asked, verdict);
        assert!(got.is("destroy") && !got.is("change"));
        assert_eq!(got.probability("change"), 0.2);
        assert_eq!(got.probability("unheard of"), 0.0);
        assert_eq!(got.yes.partial_cmp(&0.5), None, "no comparison with it holds");
    }

    #[test]
    fn a_boolean_derives_its_confidence() {
        let got = answer(&boolean("Is it?"), Verdict::Boolean(0.25));
        assert!(got.is("no"));
        assert_eq!((got.yes, got.confidence, got.probability("no")), (0.25, 0.5, 0.75));
        assert!(answer(&boolean("Is it?"), Verdict::Boolean(0.5)).is("yes"), "the first of those alike");
    }

    #[test]
    fn a_score_may_fall_between_levels() {
        let asked = score("How hard?", ["easy", "medium", "hard"]);
        let verdict =
            Verdict::Score(ScoreAnswer { score: 1.4, probabilities: vec![0.1, 0.4, 0.5], confidence: 0.3 });
        let got = answer(&asked, verdict);
        assert_eq!(got.level, 1.4);
        assert!(got.is("hard"));
    }
}
