//! Labels: the tokens that stand for an option where the reply starts.

use std::collections::HashMap;
use std::sync::Arc;

use super::question::{Criteria, MAX_LEVELS, MAX_OPTIONS};
use crate::chat::{Message, Role};
use crate::template::ChatTemplate;
use crate::tokenizer::Tokenizer;

/// For each option, every token that spells its label. Sets are disjoint.
pub(crate) type LabelSet = Arc<[Vec<u32>]>;

/// The labels of every type of question, proven for a tokenizer and template.
#[derive(Debug, Clone)]
pub(crate) struct Labels {
    letters: Vec<Vec<u32>>,
    digits: Vec<Vec<u32>>,
    /// Yes, then no.
    words: Vec<Vec<u32>>,
}

impl Labels {
    /// Proves that each label is one token of its own exactly where a reply
    /// starts, and collects the other tokens that spell it.
    ///
    /// # Errors
    /// Which label is not, and how it is split instead.
    pub(crate) fn prove(tokenizer: &Tokenizer, template: &ChatTemplate) -> Result<Self, String> {
        let asked = [Message::new(Role::User, "x")];
        let start = template.render(&asked, &[], true).map_err(|error| error.to_string())?;
        let before = tokenizer.encode(&start);
        let token = |label: &str| {
            let tokens = tokenizer.encode(&format!("{start}{label}"));
            match tokens.strip_prefix(before.as_slice()) {
                Some(&[token]) => Ok(token),
                _ => Err(format!(
                    "label {label:?} is not one token of its own at the reply's start: \
                     the prompt's {} tokens become {tokens:?}",
                    before.len()
                )),
            }
        };
        let spellings = spellings(tokenizer);
        let set = |label: &str| -> Result<Vec<u32>, String> {
            let proven = token(label)?;
            let mut tokens = vec![proven];
            let others = spellings.get(label).map_or(&[][..], Vec::as_slice);
            tokens.extend(others.iter().filter(|&&other| other != proven));
            Ok(tokens)
        };
        let letters = ('A'..='Z').take(MAX_OPTIONS).map(|letter| set(&letter.to_string()));
        let digits = (0..MAX_LEVELS).map(|digit| set(&digit.to_string()));
        Ok(Self {
            letters: letters.collect::<Result<_, _>>()?,
            digits: digits.collect::<Result<_, _>>()?,
            words: ["yes", "no"].into_iter().map(set).collect::<Result<_, _>>()?,
        })
    }

    /// The labels of a question's options, in their order.
    pub(crate) fn of(&self, criteria: &Criteria) -> LabelSet {
        match criteria {
            Criteria::Choice(options) => self.letters[..options.len()].into(),
            Criteria::Boolean { .. } => self.words.as_slice().into(),
            Criteria::Score(levels) => self.digits[..levels.len()].into(),
        }
    }
}

/// Every token that spells a label, by the label.
fn spellings(tokenizer: &Tokenizer) -> HashMap<String, Vec<u32>> {
    let mut spellings: HashMap<String, Vec<u32>> = HashMap::new();
    for token in 0..tokenizer.vocab() as u32 {
        if tokenizer.is_special(token) {
            continue;
        }
        if let Ok(text) = std::str::from_utf8(tokenizer.bytes(token))
            && let Some(label) = normalise(text)
        {
            spellings.entry(label).or_default().push(token);
        }
    }
    spellings
}

/// The label that a token's text spells: white space and an opening bracket or
/// emphasis before it do not count, nor does the case of yes and no. The case
/// of letters does, since "a" starts sentences.
fn normalise(text: &str) -> Option<String> {
    let bare = text.trim_start().trim_start_matches(['(', '*', '"', '\'', '`']);
    match bare.as_bytes() {
        [b'A'..=b'Z' | b'0'..=b'9'] => Some(bare.to_owned()),
        _ => Some(bare.to_ascii_lowercase()).filter(|word| word == "yes" || word == "no"),
    }
}

#[cfg(test)]
mod tests {
    use super::normalise;

    #[test]
    fn spellings_of_a_label_are_told_from_other_words() {
        for (text, label) in [
            ("A", Some("A")),
            (" A", Some("A")),
            ("\nA", Some("A")),
            ("(A", Some("A")),
            (" Yes", Some("yes")),
            ("NO", Some("no")),
            ("7", Some("7")),
            ("a", None),
            ("AB", None),
            ("A ", None),
            ("not", None),
            ("", None),
            ("10", None),
        ] {
            assert_eq!(normalise(text).as_deref(), label, "{text:?}");
        }
    }
}
