//! What is asked, and what comes back.

use serde::{Deserialize, Serialize};

/// Options that a choice may have: each needs a letter of its own.
pub const MAX_OPTIONS: usize = 26;

/// Levels that a score may have: each needs a digit of its own.
pub const MAX_LEVELS: usize = 10;

/// A typed question about a session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Question {
    /// What is asked, in words that the model reads; may be empty when the
    /// criteria say it all.
    pub instructions: String,
    /// What may be answered.
    pub criteria: Criteria,
}

/// What may be answered.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Criteria {
    /// One of 1 to [`MAX_OPTIONS`] options.
    Choice(Vec<ChoiceOption>),
    /// Yes or no, with a description of either where one helps.
    Boolean {
        /// What yes means.
        yes: Option<String>,
        /// What no means.
        no: Option<String>,
    },
    /// A level of 2 to [`MAX_LEVELS`], lowest first.
    Score(Vec<String>),
}

/// One option of a choice.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChoiceOption {
    /// Its name, which is the answer.
    pub name: String,
    /// What it stands for.
    pub description: Option<String>,
}

/// The answer to a question.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Answer {
    /// What was answered.
    pub verdict: Verdict,
    /// Of each option, of yes then no, or of each level; they sum to 1.
    pub probabilities: Vec<f64>,
    /// TypeSafe's confidence: 0 for a uniform answer, 1 for a certain one.
    pub confidence: f64,
    /// Probability on all labels over the whole vocabulary, 0 to 1.
    pub mass: f64,
    /// Whether the likeliest token of all is a label. A probe reads no token: true.
    pub argmax_is_label: bool,
    /// What answered.
    pub rung: Rung,
}

/// What an answer was read from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Rung {
    /// The probabilities of labels where a reply would start.
    Labels,
    /// The hidden states of the session, by a probe; `mass` is then how near the
    /// session lies to its examples.
    Probe,
}

/// What was answered.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// The likeliest option, by its place; the first of equals.
    Choice(usize),
    /// The probability of yes.
    Boolean(f64),
    /// The expected level: 0 is the first, and it may fall between two.
    Score(f64),
}
