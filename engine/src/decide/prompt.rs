//! The words that put a question to the model: those of vLLM's `/v1/systemone`, so that with the same weights the
//! same is asked (docs/decisions/013).

use std::fmt::Write;

use super::question::{Criteria, MAX_LEVELS, MAX_OPTIONS, Question};
use crate::error::EngineError;

/// The turn that asks a question: what is asked, the labels with what they
/// stand for, and how to answer. Whoever asks gave the question no name here:
/// ids must not move answers.
///
/// # Errors
/// [`EngineError::Invalid`] when nothing is asked, or the options or levels
/// are too few, too many or not distinct.
pub(crate) fn question_text(question: &Question) -> Result<String, EngineError> {
    let instructions = question.instructions.trim();
    let mut text = String::new();
    if !instructions.is_empty() {
        let _ = writeln!(text, "Question: {instructions}");
    }
    match &question.criteria {
        Criteria::Choice(options) => {
            count("a choice", "options", options.len(), 1, MAX_OPTIONS)?;
            distinct(options.iter().map(|option| option.name.as_str()))?;
            for (letter, option) in ('A'..='Z').zip(options) {
                line(&mut text, &format!("{letter}: {}", option.name), option.description.as_deref(), " - ");
            }
            text.push_str("Answer with the letter of one option only.");
        }
        Criteria::Boolean { yes, no } => {
            if instructions.is_empty() && yes.is_none() && no.is_none() {
                return Err(invalid("a boolean without instructions needs a description of yes or no"));
            }
            line(&mut text, "yes", yes.as_deref(), ": ");
            line(&mut text, "no", no.as_deref(), ": ");
            text.push_str("Answer with yes or no only.");
        }
        Criteria::Score(levels) => {
            count("a score", "levels", levels.len(), 2, MAX_LEVELS)?;
            for (digit, level) in levels.iter().enumerate() {
                line(&mut text, &digit.to_string(), Some(level), ": ");
            }
            text.push_str("Answer with the number of one level only.");
        }
    }
    Ok(text)
}

fn line(text: &mut String, label: &str, description: Option<&str>, separator: &str) {
    match description.map(str::trim).filter(|text| !text.is_empty()) {
        Some(description) => {
            let _ = writeln!(text, "{label}{separator}{description}");
        }
        None => {
            let _ = writeln!(text, "{label}");
        }
    }
}

fn count(kind: &str, what: &str, got: usize, least: usize, most: usize) -> Result<(), EngineError> {
    if (least..=most).contains(&got) {
        return Ok(());
    }
    Err(invalid(format!("{kind} takes {least} to {most} {what}, got {got}")))
}

fn distinct<'a>(names: impl Iterator<Item = &'a str>) -> Result<(), EngineError> {
    let mut seen = std::collections::HashSet::new();
    for name in names {
        if name.trim().is_empty() {
            return Err(invalid("an option's name must not be empty"));
        }
        if !seen.insert(name) {
            return Err(invalid(format!("option {name:?} is there twice")));
        }
    }
    Ok(())
}

fn invalid(message: impl Into<String>) -> EngineError {
    EngineError::Invalid(message.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decide::ChoiceOption;

    fn ask(instructions: &str, criteria: Criteria) -> Result<String, String> {
        question_text(&Question { instructions: instructions.into(), criteria }).map_err(|e| e.to_string())
    }

    fn options(names: &[(&str, Option<&str>)]) -> Criteria {
        let option = |(name, description): &(&str, Option<&str>)| ChoiceOption {
            name: (*name).into(),
            description: description.map(Into::into),
        };
        Criteria::Choice(names.iter().map(option).collect())
    }

    #[test]
    fn a_choice_shows_a_letter_a_name_and_what_it_stands_for() {
        let text = ask(" Which team? ", options(&[("billing", Some("invoices")), ("human", None)])).unwrap();
        let expected = "Question: Which team?\nA: billing - invoices\nB: human\n\
                        Answer with the letter of one option only.";
        assert_eq!(text, expected);
    }

    #[test]
    fn a_boolean_shows_both_words_even_without_criteria() {
        let text = ask("Is it?", Criteria::Boolean { yes: None, no: Some("never".into()) }).unwrap();
        assert_eq!(text, "Question: Is it?\nyes\nno: never\nAnswer with yes or no only.");
    }

    #[test]
    fn a_score_counts_its_levels_from_nought() {
        let text = ask("", Criteria::Score(vec!["low".into(), "high".into()])).unwrap();
        assert_eq!(text, "0: low\n1: high\nAnswer with the number of one level only.");
    }

    #[test]
    fn what_cannot_be_asked_is_named() {
        let many = |n: usize| (0..n).map(|i| format!("level {i}")).collect::<Vec<_>>();
        let names: Vec<String> = (0..27).map(|i| format!("option {i}")).collect();
        let too_many: Vec<_> = names.iter().map(|name| (name.as_str(), None)).collect();
        let cases = [
            (ask("Which?", options(&[])), "a choice takes 1 to 26 options, got 0"),
            (ask("Which?", options(&too_many)), "a choice takes 1 to 26 options, got 27"),
            (ask("Which?", options(&[("a", None), ("a", None)])), "option \"a\" is there twice"),
            (ask("Which?", options(&[(" ", None)])), "an option's name must not be empty"),
            (ask("How?", Criteria::Score(many(1))), "a score takes 2 to 10 levels, got 1"),
            (ask("How?", Criteria::Score(many(11))), "a score takes 2 to 10 levels, got 11"),
            (
                ask(" ", Criteria::Boolean { yes: None, no: None }),
                "a boolean without instructions needs a description of yes or no",
            ),
        ];
        for (got, expected) in cases {
            assert_eq!(got, Err(expected.to_owned()));
        }
    }
}
