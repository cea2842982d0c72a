//! A file of examples: JSON lines.
//!
//! Each holds one example: a `text` or `messages`, and its `label`; `family` and `tags`
//! may follow. A `label` of `null` marks a text that the question does not fit. The
//! first line may be `{"probe": {…}}`, a [`Header`], instead.

use serde::Deserialize;

use super::examples::{Examples, ExamplesError, Header, MAX_BYTES, Row};
use crate::chat::Message;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    text: Option<String>,
    messages: Option<Vec<Message>>,
    #[serde(default, deserialize_with = "present")]
    label: Option<serde_json::Value>,
    family: Option<String>,
    #[serde(default)]
    tags: Vec<String>,
}

/// Tells a `null` that is written from a key that is missing.
fn present<'de, D: serde::Deserializer<'de>>(d: D) -> Result<Option<serde_json::Value>, D::Error> {
    serde_json::Value::deserialize(d).map(Some)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct HeaderLine {
    probe: Header,
}

impl Examples {
    /// Reads a file's text.
    ///
    /// # Errors
    /// Names the line and what is wrong with it, or what the whole file lacks.
    pub fn parse(text: &str) -> Result<Self, ExamplesError> {
        if text.len() > MAX_BYTES {
            let message = format!("{} bytes, a file of examples has at most {MAX_BYTES}", text.len());
            return Err(ExamplesError::Whole(message));
        }
        let text = text.strip_prefix('\u{FEFF}').unwrap_or(text);
        let mut lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()).peekable();
        let header = match lines.next_if(|(_, line)| is_header(line)) {
            Some((at, line)) => {
                serde_json::from_str::<HeaderLine>(line).map_err(|error| wrong(at, error))?.probe
            }
            None => Header::default(),
        };
        let (mut rows, mut places) = (Vec::new(), Vec::new());
        for (at, line) in lines {
            rows.push(read_line(line).map_err(|error| wrong(at, error))?);
            places.push(at);
        }
        Self::new(header, rows).map_err(|error| match error {
            ExamplesError::Example { number, message } => wrong(places[number - 1], message),
            error => error,
        })
    }
}

fn wrong(at: usize, message: impl ToString) -> ExamplesError {
    ExamplesError::Line { line: at + 1, message: message.to_string() }
}

/// Whether a line is a [`Header`] rather than an example.
fn is_header(line: &str) -> bool {
    serde_json::from_str::<serde_json::Value>(line).is_ok_and(|value| value.get("probe").is_some())
}

fn read_line(line: &str) -> Result<Row, String> {
    let Line { text, messages, label, family, tags } =
        serde_json::from_str(line).map_err(|error| error.to_string())?;
    let label = match label {
        None => return Err("an example needs a \"label\"; null marks what is out of scope".into()),
        Some(serde_json::Value::Null) => None,
        Some(serde_json::Value::Bool(yes)) => Some(if yes { "yes" } else { "no" }.to_owned()),
        Some(serde_json::Value::String(label)) => Some(label),
        Some(other) => return Err(format!("a label is a string, a boolean or null, got {other}")),
    };
    Ok(Row { text, messages, label, family, tags })
}

#[cfg(test)]
mod tests {
    use super::super::examples::{Kind, MAX_EXAMPLES};
    use super::*;
    use crate::features::Span;

    fn lines(rows: &[(&str, &str)]) -> String {
        rows.iter().map(|(text, label)| format!("{{\"text\": {text:?}, \"label\": {label}}}\n")).collect()
    }

    const FOUR: &[(&str, &str)] =
        &[("ls", "\"yes\""), ("hello", "\"no\""), ("restart it", "true"), ("a poem", "false")];

    #[test]
    fn yes_and_no_make_a_boolean_and_a_header_is_heeded() {
        let examples = Examples::parse(&lines(FOUR)).unwrap();
        assert_eq!((examples.kind, examples.counts()), (Kind::Boolean, vec![2, 2]));
        assert_eq!(examples.span, Span::LastUser);
        assert_eq!(examples.warnings.len(), 2, "few of either: {:?}", examples.warnings);
        let header = r#"{"probe": {"kind": "score", "labels": ["no", "yes"], "span": {"last": 4}}}"#;
        let examples = Examples::parse(&format!("{header}\n{}", lines(FOUR))).unwrap();
        assert_eq!(
            (examples.kind, examples.labels.as_slice()),
            (Kind::Score, ["no", "yes"].map(String::from).as_slice())
        );
        assert_eq!((examples.span, examples.examples[0].label), (Span::Last(4), Some(1)));
    }

    #[test]
    fn what_cannot_be_fitted_is_named() {
        let error = |text: &str| Examples::parse(text).unwrap_err().to_string();
        let cases = [
            (String::new(), "there are no labelled examples"),
            (
                lines(&[("a", "\"x\""), ("b", "\"x\"")]),
                "all examples have the label \"x\"; at least two labels are needed",
            ),
            (
                lines(&[("a", "\"x\""), ("b", "\"x\""), ("c", "\"y\"")]),
                "label \"y\" has 1 examples, at least 2 are needed",
            ),
            (
                "{\"text\": \"a\"}".into(),
                "line 1: an example needs a \"label\"; null marks what is out of scope",
            ),
            ("\n{\"label\": \"x\"}".into(), "line 2: an example has either \"text\" or \"messages\""),
            (lines(&[("", "\"x\"")]), "line 1: an example needs a user turn that says something"),
            (lines(&[("a", "3")]), "line 1: a label is a string, a boolean or null, got 3"),
        ];
        for (text, expected) in cases {
            assert_eq!(error(&text), expected);
        }
        assert!(
            error("{\"text\": \"a\", \"label\": \"x\", \"lable\": 1}")
                .starts_with("line 1: unknown field `lable`")
        );
        assert!(error("not json").starts_with("line 1: "));
        let score = format!("{{\"probe\": {{\"kind\": \"score\"}}}}\n{}", lines(FOUR));
        assert!(error(&score).contains("lowest level first"));
        let family: String = FOUR
            .iter()
            .map(|(text, label)| format!("{{\"text\": {text:?}, \"label\": {label}, \"family\": \"x\"}}\n"))
            .collect();
        assert!(error(&family).contains("all labelled examples are of one family"));
        for span in ["{\"last\": 0}", "{\"since\": 3}"] {
            let text = format!("{{ \"probe\": {{\"span\": {span}}}}}\n{}", lines(FOUR));
            assert!(error(&text).contains("a span is"), "{}", error(&text));
        }
        let many = lines(&vec![("a", "\"x\""); MAX_EXAMPLES + 1]);
        assert!(error(&many).contains("at most 2000"), "{}", error(&many));
        assert!(error(&" ".repeat(MAX_BYTES + 1)).contains("a file of examples has at most"));
    }

    #[test]
    fn copies_and_contradictions_are_warned_of() {
        let mut rows = FOUR.to_vec();
        rows.extend([("LS ", "\"no\""), ("hello", "\"no\""), ("noise", "null")]);
        let examples = Examples::parse(&lines(&rows)).unwrap();
        let said = examples.warnings.join("\n");
        assert!(said.contains("1 texts stand under two labels; the first are examples 1 and 5"), "{said}");
        assert!(said.contains("1 examples are there twice"), "{said}");
        assert_eq!(examples.examples[6].label, None);
        assert_eq!(examples.examples[1].family, examples.examples[5].family);
    }

    #[test]
    fn the_same_examples_have_one_hash_however_they_are_written() {
        let hash = |text: &str| Examples::parse(text).unwrap().hash;
        let mut rows = FOUR.to_vec();
        rows.insert(1, ("noise", "null"));
        let first = hash(&lines(&rows));
        // White space, order of keys, what is the default anyway, tags, and where those out of scope stand.
        let other = r#"
            {"probe": {"kind": "boolean", "labels": ["no", "yes"], "span": "last-user"}}
            {"label": "yes", "messages": [{"content": "ls", "role": "user"}]}

            {"label": false, "text": "hello", "tags": ["greeting"], "family": "hello"}
            {"label": true, "text": "restart it"}
            {"label": "no", "text": "a poem"}
            {"label": null, "text": "noise"}
        "#;
        assert_eq!(hash(other), first);
        let other = other.to_owned() + "{\"text\": \"bye\", \"label\": \"no\"}";
        for (from, to) in [
            ("\"ls\"", "\"ls \""),
            ("false", "true"),
            ("\"family\": \"hello\"", "\"family\": \"greeting\""),
            ("last-user", "session"),
            ("\"kind\"", "\"question\": \"Which?\", \"kind\""),
            ("\"kind\": \"boolean\"", "\"kind\": \"score\""),
            ("\"noise\"", "\"more noise\""),
        ] {
            assert_ne!(hash(&other.replace(from, to)), hash(&other), "{from}");
        }
    }
}
