//! What to mend in a policy's questions, by rules that hold for small models and large.

use forkpoint_engine::{Criteria, Question};

/// Longest question that small models answer well, in bytes.
const LONG: usize = 400;

/// What is doubtful in a question, one sentence each.
#[must_use]
pub fn lint(question: &Question) -> Vec<String> {
    let mut found = Vec::new();
    let text = question.instructions.trim();
    let lower = text.to_lowercase();
    let has_word = |words: &[&str]| {
        lower.split(|c: char| !c.is_alphanumeric() && c != '\'').any(|word| words.contains(&word))
    };
    if text.is_empty() {
        found.push("has no instructions: the model sees the options alone".to_owned());
    }
    if text.len() > LONG {
        found.push(format!("has {} bytes; short questions are answered better and cost less", text.len()));
    }
    if text.matches('?').count() > 1 {
        found.push("asks more than one thing: ask each by itself, in the same call".to_owned());
    }
    match &question.criteria {
        Criteria::Boolean { .. } => {
            if has_word(&["not", "never", "isn't", "doesn't", "don't", "without"]) {
                found.push(
                    "is negated: yes then means no; ask the positive and turn the threshold".to_owned(),
                );
            }
            if lower.contains(" and ") && lower.contains('?') && has_word(&["both"]) {
                found.push("joins two judgments: ask each by itself and combine them in code".to_owned());
            }
        }
        Criteria::Choice(options) => {
            if options.len() == 1 {
                found.push("has one option: it is the answer whatever the session holds".to_owned());
            }
            let other = ["none", "other", "neither", "nothing", "unknown", "unclear", "something-else"];
            let open = |name: &str| {
                let name = name.to_lowercase();
                name.split(|c: char| !c.is_alphanumeric()).any(|word| other.contains(&word))
            };
            if options.len() > 2 && !options.iter().any(|option| open(&option.name)) {
                found.push(
                    "has no option for what fits none, such as `other`: the model must pick a wrong one"
                        .to_owned(),
                );
            }
            for (at, option) in options.iter().enumerate() {
                if options[..at].iter().any(|before| before.name.eq_ignore_ascii_case(&option.name)) {
                    found.push(format!("has the option {:?} twice", option.name));
                }
            }
        }
        Criteria::Score(levels) => {
            if levels.iter().any(|level| level.trim().is_empty()) {
                found.push("has a level without words: the model sees a bare number".to_owned());
            }
        }
    }
    let counts = ["how many", "number of", "what date", "what time", "count the"];
    if counts.iter().any(|words| lower.contains(words)) {
        found.push("asks for a count or a date, which labels are poor at: do that in code".to_owned());
    }
    found
}

#[cfg(test)]
mod tests {
    use forkpoint_engine::ChoiceOption;

    use super::*;

    fn boolean(text: &str) -> Question {
        Question { instructions: text.into(), criteria: Criteria::Boolean { yes: None, no: None } }
    }

    fn choice(names: &[&str]) -> Question {
        let option = |name: &&str| ChoiceOption { name: (*name).into(), description: None };
        Question {
            instructions: "Which team?".into(),
            criteria: Criteria::Choice(names.iter().map(option).collect()),
        }
    }

    #[test]
    fn good_questions_pass() {
        for question in [
            boolean("Does the last request need a shell?"),
            choice(&["billing", "technical", "other"]),
            choice(&["here", "elsewhere"]),
            Question {
                instructions: "How hard?".into(),
                criteria: Criteria::Score(vec!["easy".into(), "hard".into()]),
            },
        ] {
            assert!(lint(&question).is_empty(), "{question:?}: {:?}", lint(&question));
        }
    }

    #[test]
    fn doubtful_questions_are_told_why() {
        for (question, says) in [
            (boolean(""), "no instructions"),
            (boolean(&"word ".repeat(100)), "bytes; short"),
            (boolean("Is it safe? Is it fast?"), "more than one thing"),
            (boolean("Is this not safe?"), "negated"),
            (boolean("How many files are named?"), "count or a date"),
            (choice(&["only"]), "one option"),
            (choice(&["a", "b", "c"]), "fits none"),
            (choice(&["a", "A", "other"]), "twice"),
            (
                Question {
                    instructions: "How?".into(),
                    criteria: Criteria::Score(vec![String::new(), "x".into()]),
                },
                "bare number",
            ),
        ] {
            let found = lint(&question);
            assert!(found.iter().any(|line| line.contains(says)), "{question:?}: {found:?}");
        }
    }
}
