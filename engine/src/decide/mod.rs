//! Decisions: typed questions, answered by reading the probabilities of labels
//! where a reply to the question would start. No token is decoded.

mod answer;
mod labels;
mod prompt;
mod question;

pub(crate) use answer::{Reading, answer, mode, read};
pub(crate) use labels::{LabelSet, Labels};
pub(crate) use prompt::question_text;
pub use question::{Answer, ChoiceOption, Criteria, MAX_LEVELS, MAX_OPTIONS, Question, Rung, Verdict};
