//! Calls and what came of them, so that like ones can be told.

use forkpoint_policy::{Request, Role};

/// A call of a tool, with its arguments in one form and the result where there is one.
#[derive(Debug, PartialEq)]
pub(crate) struct Call<'a> {
    pub(crate) name: &'a str,
    arguments: String,
    result: Option<&'a str>,
}

/// The calls since the user spoke, oldest first.
pub(crate) fn since_user(request: &Request) -> Vec<Call<'_>> {
    let turns = request.since_user();
    // Some clients count ids anew in each turn, so a result is looked for behind its call only, up to the next calls.
    let result = |at: usize, id: &str| {
        let behind = turns[at + 1..].iter().take_while(|turn| turn.role == Role::Tool);
        behind.filter(|turn| turn.tool_call_id.as_deref() == Some(id)).map(|turn| turn.content.trim()).next()
    };
    let calls =
        turns.iter().enumerate().flat_map(|(at, turn)| turn.tool_calls.iter().map(move |call| (at, call)));
    calls
        .map(|(at, call)| Call {
            name: &call.name,
            arguments: in_one_form(&call.arguments),
            result: result(at, &call.id),
        })
        .collect()
}

/// How often the last call was made in a row with one and the same result, itself included; calls of another kind in
/// between do not matter. Another result was progress, so what lies before it no longer counts.
pub(crate) fn repeats(calls: &[Call<'_>]) -> usize {
    let Some((last, before)) = calls.split_last() else { return 0 };
    let like = before.iter().rev().filter(|call| call.name == last.name && call.arguments == last.arguments);
    1 + like.take_while(|call| call.result == last.result).count()
}

/// JSON with its keys sorted and no blanks; other text with its blanks counted once.
fn in_one_form(arguments: &str) -> String {
    match serde_json::from_str::<serde_json::Value>(arguments) {
        Ok(value) => value.to_string(),
        Err(_) => arguments.split_whitespace().collect::<Vec<_>>().join(" "),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call<'a>(arguments: &str, result: Option<&'a str>) -> Call<'a> {
        Call { name: "bash", arguments: in_one_form(arguments), result }
    }

    #[test]
    fn arguments_are_alike_whatever_their_form() {
        assert_eq!(in_one_form(r#"{"b": 1, "a": "x"}"#), in_one_form("{\"a\":\"x\",\n\"b\":1}"));
        assert_ne!(
            in_one_form(r#"{"a": "x y"}"#),
            in_one_form(r#"{"a": "x  y"}"#),
            "inside a text blanks count"
        );
        assert_eq!(in_one_form("ls   -l"), "ls -l");
    }

    #[test]
    fn a_repeat_has_the_same_result() {
        assert_eq!(repeats(&[]), 0);
        let (a, b) = (|| call("1", Some("x")), || call("1", Some("y")));
        assert_eq!(repeats(&[a(), a(), a()]), 3);
        assert_eq!(repeats(&[a(), a(), b()]), 1, "something new came of it");
        assert_eq!(repeats(&[a(), a(), b(), a()]), 1, "what lies before the new result no longer counts");
        assert_eq!(repeats(&[a(), call("2", Some("x")), a()]), 2, "others in between do not matter");
    }
}
