//! Turns journaled decisions that a person corrected into examples of a probe. Nothing learns by itself: a person
//! names the request and the right label.

use std::collections::{HashMap, HashSet};

use forkpoint_engine::{Examples, Role};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::journal::Record;

/// One line of the corrections.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Correction {
    /// The request's id, as the journal and the reply's `x-request-id` have it.
    id: String,
    /// The right label; null for a request that the question does not fit.
    label: Value,
    /// Near-copies of one another share it.
    #[serde(default)]
    family: Option<String>,
}

/// What came of the corrections.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
pub struct Labelled {
    /// The examples with those that are new.
    #[serde(skip)]
    pub examples: String,
    /// New examples.
    pub added: usize,
    /// Corrections whose text is an example already.
    pub known: usize,
    /// Corrections that came to nothing, and why.
    pub passed_over: Vec<String>,
}

/// Adds the corrected requests of a journal to a file of examples; its text may be empty.
///
/// # Errors
/// When a correction cannot be read, or the examples with the new ones could not be fitted from.
pub fn label(corrections: &str, records: &[Record], examples: &str) -> Result<Labelled, String> {
    let by_id: HashMap<&str, &Record> = records.iter().map(|record| (record.id.as_str(), record)).collect();
    let mut done = Labelled { examples: examples.to_owned(), ..Labelled::default() };
    if !done.examples.is_empty() && !done.examples.ends_with('\n') {
        done.examples.push('\n');
    }
    let mut texts: HashSet<String> =
        examples.lines().filter_map(|line| key(&serde_json::from_str(line).ok()?)).collect();
    for (at, line) in corrections.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let correction: Correction =
            serde_json::from_str(line).map_err(|error| format!("corrections, line {}: {error}", at + 1))?;
        let Some(record) = by_id.get(correction.id.as_str()) else {
            done.passed_over.push(format!("{}: not in the journal", correction.id));
            continue;
        };
        if !record.has_prompt() {
            done.passed_over.push(format!("{}: its prompt was not kept ([journal] prompts)", correction.id));
            continue;
        }
        let example = example(record, &correction);
        match key(&example) {
            Some(text) if !texts.insert(text.clone()) => done.known += 1,
            _ => {
                done.examples.push_str(&example.to_string());
                done.examples.push('\n');
                done.added += 1;
            }
        }
    }
    Examples::parse(&done.examples).map_err(|error| format!("with the corrections: {error}"))?;
    Ok(done)
}

fn example(record: &Record, correction: &Correction) -> Value {
    let mut example = match &record.messages[..] {
        [turn] if turn.role == Role::User => json!({ "text": turn.content }),
        turns => {
            let turn = |turn: &crate::journal::Turn| json!({ "role": turn.role, "content": turn.content });
            json!({ "messages": turns.iter().map(turn).collect::<Vec<_>>() })
        }
    };
    example["label"] = correction.label.clone();
    if let Some(family) = &correction.family {
        example["family"] = json!(family);
    }
    example["tags"] = json!(["journal"]);
    example
}

/// What an example is of.
fn key(example: &Value) -> Option<String> {
    example.get("text").or_else(|| example.get("messages")).map(Value::to_string)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::journal::Turn;

    fn record(id: &str, texts: &[&str]) -> Record {
        let turn = |text: &&str| Turn {
            role: Role::User,
            bytes: text.len(),
            content: Some((*text).to_owned()),
            tool_calls: None,
            tool_call_id: None,
        };
        Record { id: id.into(), messages: texts.iter().map(turn).collect(), ..Record::default() }
    }

    const EXAMPLES: &str = r#"{"text": "list the files", "label": "yes"}
{"text": "stop nginx", "label": "yes"}
{"text": "what is rust", "label": "no"}
{"text": "sing a song", "label": "no"}"#;

    #[test]
    fn corrected_requests_become_examples_once() {
        let mut bare = record("bare", &["x"]);
        bare.messages[0].content = None;
        let records = [record("a", &["list the files"]), record("b", &["hello", "restart nginx"]), bare];
        let corrections = "{\"id\": \"a\", \"label\": \"yes\"}\n\n{\"id\": \"b\", \"label\": \"yes\", \"family\": \"f\"}\n\
                           {\"id\": \"gone\", \"label\": \"no\"}\n{\"id\": \"bare\", \"label\": \"no\"}\n{\"id\": \"b\", \"label\": \"yes\"}";
        let done = label(corrections, &records, EXAMPLES).unwrap();
        assert_eq!((done.added, done.known), (1, 2));
        assert!(
            done.passed_over[0].contains("not in the journal") && done.passed_over[1].contains("prompts")
        );
        assert_eq!(Examples::parse(&done.examples).unwrap().examples.len(), 5);
        assert!(done.examples.contains("\"family\":\"f\""), "{}", done.examples);
    }

    #[test]
    fn what_could_not_be_fitted_is_refused() {
        let records = [record("a", &["new"])];
        assert!(label("{\"id\": 1}", &records, EXAMPLES).unwrap_err().contains("line 1"));
        assert!(label("{\"id\": \"a\", \"label\": 7}", &records, EXAMPLES).is_err());
    }
}
