//! `expect.json`: what must come of a request. Objects are compared key by key; what is not mentioned may be anything,
//! but that an empty object is empty.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::policy::Step;

/// The keys that an expectation may have.
const KEYS: [&str; 7] = ["plan", "reason", "labels", "fault", "questions", "drafts", "store"];

/// How far numbers may be apart, of their size: a policy's `f32` is a file's `0.3`.
const CLOSE: f64 = 1e-6;

/// What came of a request, as expectations see it.
#[must_use]
pub fn outcome(step: &Step, store: &BTreeMap<String, String>) -> Value {
    json!({
        "plan": step.plan,
        "reason": step.reason,
        "labels": step.labels.iter().cloned().collect::<BTreeMap<_, _>>(),
        "fault": step.fault.as_ref().map(|fault| fault.kind.code()),
        "questions": step.used.decisions,
        "drafts": step.used.drafts,
        "store": store,
    })
}

/// Where an outcome is not what is expected, one sentence each.
#[must_use]
pub fn differences(expected: &Value, outcome: &Value) -> Vec<String> {
    let mut found = Vec::new();
    match expected.as_object() {
        None => found.push("expect.json is not an object".to_owned()),
        Some(map) => {
            let unknown = map.keys().filter(|key| !KEYS.contains(&key.as_str()));
            found.extend(unknown.map(|key| format!("{key:?} is no key; there are {}", KEYS.join(", "))));
            if found.is_empty() {
                map.iter().for_each(|(key, expected)| compare(key, expected, &outcome[key], &mut found));
            }
        }
    }
    found
}

fn compare(path: &str, expected: &Value, got: &Value, found: &mut Vec<String>) {
    let same = match (expected, got) {
        // An empty object says that there is nothing.
        (Value::Object(expected), Value::Object(got)) if expected.is_empty() => got.is_empty(),
        (Value::Object(expected), Value::Object(got)) => {
            for (key, expected) in expected {
                compare(&format!("{path}.{key}"), expected, got.get(key).unwrap_or(&Value::Null), found);
            }
            return;
        }
        (Value::Array(expected), Value::Array(got)) if expected.len() == got.len() => {
            for (at, (expected, got)) in expected.iter().zip(got).enumerate() {
                compare(&format!("{path}[{at}]"), expected, got, found);
            }
            return;
        }
        (Value::Number(expected), Value::Number(got)) => {
            let (expected, got) = (expected.as_f64().unwrap_or(f64::NAN), got.as_f64().unwrap_or(f64::NAN));
            (expected - got).abs() <= CLOSE * expected.abs().max(1.0)
        }
        (expected, got) => expected == got,
    };
    if !same {
        found.push(format!("{path}: expected {expected}, got {got}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn got() -> Value {
        json!({
            "plan": {"kind": "generate", "tools": ["a", "b"], "sampling": {"temperature": 0.30000001192092896}},
            "reason": "plain", "labels": {"x": "1"}, "fault": null, "questions": 2, "drafts": 0, "store": {},
        })
    }

    #[test]
    fn what_is_not_mentioned_may_be_anything() {
        for expected in [
            json!({}),
            json!({"reason": "plain", "fault": null, "store": {}}),
            json!({"plan": {"sampling": {"temperature": 0.3}, "tools": ["a", "b"]}, "questions": 2}),
        ] {
            assert!(differences(&expected, &got()).is_empty(), "{expected}");
        }
    }

    #[test]
    fn what_differs_is_named_with_both_sides() {
        for (expected, says) in [
            (json!({"reason": "other"}), "reason: expected \"other\", got \"plain\""),
            (
                json!({"plan": {"kind": "next", "tools": ["a"]}}),
                "plan.kind: expected \"next\", got \"generate\"",
            ),
            (json!({"plan": {"tools": ["a"]}}), "plan.tools: expected [\"a\"], got [\"a\",\"b\"]"),
            (json!({"plan": {"tools": ["a", "c"]}}), "plan.tools[1]: expected \"c\", got \"b\""),
            (json!({"labels": {}}), "labels: expected {}, got {\"x\":\"1\"}"),
            (json!({"labels": {"y": "2"}}), "labels.y: expected \"2\", got null"),
            (json!({"plan": null}), "plan: expected null"),
            (json!({"resaon": "plain"}), "\"resaon\" is no key; there are plan"),
            (json!([]), "not an object"),
        ] {
            let found = differences(&expected, &got());
            assert!(found.iter().any(|line| line.contains(says)), "{expected}: {found:?}");
        }
    }
}
