//! `[probes.<name>]` of a manifest: the examples of a probe, with the keys that a file of examples has.
//!
//! TOML knows no null: what a file labels `null`, texts that the question does not fit, stands in `out_of_scope`.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use forkpoint_engine::probe::{ExamplesError, Header, Kind, Row};
use forkpoint_engine::{Examples, Message, Role, Span};
use serde::de::value::MapAccessDeserializer;
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use toml::Spanned;

use super::manifest::ManifestError;
use super::settings::is_policy_name;
use crate::probe::shipped::MAX_PROBES;

/// All tables as they are written, with their places in the manifest's text.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
pub(super) struct ProbeTables(BTreeMap<Spanned<String>, Spanned<Table>>);

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    question: Option<String>,
    kind: Option<Kind>,
    labels: Option<Vec<String>>,
    span: Option<Span>,
    examples: Vec<Spanned<Example>>,
    #[serde(default)]
    out_of_scope: Vec<Spanned<OutOfScope>>,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Example {
    text: Option<String>,
    messages: Option<Vec<Turn>>,
    label: Label,
    family: Option<String>,
    #[serde(default)]
    tags: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(untagged, expecting = "expected a label: a string, or true or false for yes and no")]
enum Label {
    Name(String),
    Yes(bool),
}

/// A text alone, or a table that says more of it.
#[derive(Debug, Clone, PartialEq)]
struct OutOfScope(Unlabelled);

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Unlabelled {
    text: Option<String>,
    messages: Option<Vec<Turn>>,
    family: Option<String>,
    #[serde(default)]
    tags: Vec<String>,
}

/// A turn with the keys of a [`Message`] and no others.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Turn {
    role: Role,
    content: String,
    #[serde(default, deserialize_with = "json")]
    tool_calls: Option<serde_json::Value>,
    tool_call_id: Option<String>,
}

impl ProbeTables {
    /// The examples of each table; `text` is the manifest's.
    ///
    /// # Errors
    /// Where a name, an example or a table cannot be.
    pub(super) fn read(self, text: &str) -> Result<BTreeMap<String, Arc<Examples>>, ManifestError> {
        if self.0.len() > MAX_PROBES {
            let last = self.0.keys().map(|name| name.span().start).max().unwrap_or_default();
            let message = format!("{} probes, a policy has at most {MAX_PROBES}", self.0.len());
            return Err(ManifestError::at(text, last, message));
        }
        let read = self.0.into_iter().map(|(name, table)| {
            let (at, name) = (name.span().start, name.into_inner());
            if !is_policy_name(&name) {
                let message = format!(
                    "{name:?} cannot be a probe's name: 1 to 64 of a-z, 0-9, - and _, a letter or digit first"
                );
                return Err(ManifestError::at(text, at, message));
            }
            let examples = read(&name, table, text)?;
            Ok((name, Arc::new(examples)))
        });
        read.collect()
    }
}

fn read(name: &str, table: Spanned<Table>, text: &str) -> Result<Examples, ManifestError> {
    let start = table.span().start;
    let Table { question, kind, labels, span, examples, out_of_scope } = table.into_inner();
    let (places, rows): (Vec<usize>, Vec<Row>) = examples
        .into_iter()
        .map(|example| (example.span().start, example.into_inner().into()))
        .chain(out_of_scope.into_iter().map(|text| (text.span().start, text.into_inner().0.into())))
        .unzip();
    Examples::new(Header { question, kind, labels, span }, rows).map_err(|error| match error {
        ExamplesError::Example { number, message } => ManifestError::at(text, places[number - 1], message),
        error => ManifestError::at(text, start, format!("the probe {name}: {error}")),
    })
}

impl From<Example> for Row {
    fn from(Example { text, messages, label, family, tags }: Example) -> Self {
        let label = match label {
            Label::Name(name) => name,
            Label::Yes(yes) => if yes { "yes" } else { "no" }.to_owned(),
        };
        Self { label: Some(label), ..Unlabelled { text, messages, family, tags }.into() }
    }
}

impl From<Unlabelled> for Row {
    fn from(Unlabelled { text, messages, family, tags }: Unlabelled) -> Self {
        let messages = messages.map(|turns| turns.into_iter().map(Message::from).collect());
        Self { text, messages, label: None, family, tags }
    }
}

impl From<Turn> for Message {
    fn from(Turn { role, content, tool_calls, tool_call_id }: Turn) -> Self {
        Self { role, content, tool_calls, tool_call_id }
    }
}

/// What JSON can say; a date, or a number that is none, would become something else.
fn json<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<serde_json::Value>, D::Error> {
    fn of(value: toml::Value) -> Result<serde_json::Value, String> {
        Ok(match value {
            toml::Value::String(text) => text.into(),
            toml::Value::Integer(number) => number.into(),
            toml::Value::Boolean(yes) => yes.into(),
            toml::Value::Float(number) if number.is_finite() => number.into(),
            toml::Value::Float(_) | toml::Value::Datetime(_) => {
                return Err(format!("expected what JSON can say, got {value}"));
            }
            toml::Value::Array(values) => values.into_iter().map(of).collect::<Result<Vec<_>, _>>()?.into(),
            toml::Value::Table(table) => {
                let entries = table.into_iter().map(|(key, value)| Ok((key, of(value)?)));
                serde_json::Value::Object(entries.collect::<Result<_, String>>()?)
            }
        })
    }
    of(toml::Value::deserialize(deserializer)?).map(Some).map_err(serde::de::Error::custom)
}

impl<'de> Deserialize<'de> for OutOfScope {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TextOrTable;

        impl<'de> Visitor<'de> for TextOrTable {
            type Value = OutOfScope;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a text, or a table with `text` or `messages`")
            }

            fn visit_str<E>(self, text: &str) -> Result<OutOfScope, E> {
                Ok(OutOfScope(Unlabelled { text: Some(text.to_owned()), ..Unlabelled::default() }))
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<OutOfScope, A::Error> {
                Unlabelled::deserialize(MapAccessDeserializer::new(map)).map(OutOfScope)
            }
        }

        deserializer.deserialize_any(TextOrTable)
    }
}

#[cfg(test)]
mod tests {
    use super::super::Manifest;
    use super::*;

    const FILE: &str = r#"{"probe": {"question": "Does it need a shell?", "span": {"last": 64}}}
{"text": "restart nginx", "label": "yes"}
{"text": "is it a web server?", "label": null}
{"text": "what is nginx?", "label": false, "family": "nginx", "tags": ["short"]}
{"messages": [{"role": "user", "content": "is it up?"}, {"role": "assistant", "content": "",
 "tool_calls": [{"type": "function", "id": "1", "function": {"name": "ps", "arguments": "{}"}}]}], "label": true}
{"text": "sing me a song", "label": "no"}
{"messages": [{"role": "user", "content": "2 cups of flour"}], "label": null, "family": "kitchen"}
"#;

    const TABLE: &str = r#"
[probes.shell]
question = "Does it need a shell?"
span = { last = 64 }
examples = [
    { text = "restart nginx", label = "yes" },
    { text = "what is nginx?", label = false, family = "nginx", tags = ["small"] },
    { label = true, messages = [
        { role = "user", content = "is it up?" },
        { role = "assistant", content = "", tool_calls = [
            { type = "function", id = "1", function = { name = "ps", arguments = "{}" } },
        ] },
    ] },
    { text = "sing me a song", label = "no" },
]
out_of_scope = [
    "is it a web server?",
    { messages = [{ role = "user", content = "2 cups of flour" }], family = "kitchen" },
]
"#;

    #[test]
    fn a_table_says_what_a_file_says() {
        let manifest = Manifest::parse(TABLE).unwrap();
        let table = manifest.probes["shell"].as_ref();
        // A line of JSON is one line.
        let file = Examples::parse(&FILE.replace(",\n", ",")).unwrap();
        assert_eq!(table.hash, file.hash);
        assert_eq!((table.kind, table.span, table.counts()), (Kind::Boolean, Span::Last(64), vec![2, 2]));
        assert_eq!((&table.question, &table.labels), (&file.question, &file.labels));
        // Those out of scope come last; tags are no part of the hash.
        let rows = [0, 2, 3, 4, 1, 5].map(|place| &file.examples[place]);
        for (row, expected) in table.examples.iter().zip(rows) {
            assert_eq!((&row.conversation, row.label), (&expected.conversation, expected.label));
            assert_eq!(row.family, expected.family);
        }
        assert_eq!((table.examples.len(), table.examples[1].tags.as_slice()), (6, &["small".to_owned()][..]));
        // Arrays of tables are the same.
        let rows = ["restart nginx:yes", "ls:yes", "what is nginx?:no", "sing me a song:no"];
        let rows = rows.map(|row| row.split_once(':').unwrap());
        let long =
            rows.map(|(text, label)| format!("[[probes.s.examples]]\ntext = '{text}'\nlabel = '{label}'\n"));
        let lines = rows.map(|(text, label)| format!("{{\"text\": \"{text}\", \"label\": \"{label}\"}}\n"));
        let long = Manifest::parse(&long.concat()).unwrap();
        assert_eq!(long.probes["s"].hash, Examples::parse(&lines.concat()).unwrap().hash);
    }

    #[test]
    fn what_cannot_be_is_refused_where_it_stands() {
        let shell = |from: &str, to: &str| {
            assert!(TABLE.contains(from), "{from}");
            TABLE.replace(from, to)
        };
        let many = |count: usize| -> String {
            let rows = "{ text = 'a', label = 'x' },".repeat(count);
            format!("[probes.many]\nexamples = [{rows}]")
        };
        let probes = |count: usize| -> String {
            (0..count).map(|n| TABLE.replace("[probes.shell]", &format!("[probes.p{n}]"))).collect()
        };
        let lines = TABLE.lines().count();
        let (text, song) = ("text = \"restart nginx\"", "{ text = \"sing me a song\", label = \"no\" }");
        for (manifest, place, says) in [
            (shell("question", "qestion"), (3, 1), "unknown field `qestion`"),
            (shell("span = { last = 64 }", "span = 'first'"), (4, 8), "unknown variant `first`"),
            (shell("last = 64", "last = 0"), (2, 1), "the probe shell: a span is"),
            (shell("last = 64", "since = 2"), (2, 1), "a span is"),
            (shell("span", "kind = 'scale'\nspan"), (4, 8), "unknown variant `scale`"),
            (shell("span", "kind = 'score'\nspan"), (2, 1), "lowest level first"),
            (shell("span", "labels = ['yes', 'yes']\nspan"), (2, 1), "a label is there twice"),
            (shell("span", "labels = ['yes', 'maybe']\nspan"), (8, 5), "label \"no\" is none of yes, maybe"),
            (shell(text, "txt = 'a'"), (6, 7), "unknown field `txt`"),
            (shell(text, "text = 7"), (6, 14), "expected a string"),
            (shell(text, "text = ' '"), (6, 5), "needs a user turn that says something"),
            (shell(&format!("{text}, "), ""), (6, 5), "either \"text\" or \"messages\""),
            (shell("label = \"yes\"", "label = 1"), (6, 39), "a string, or true or false"),
            (shell("label = \"yes\"", "label = ''"), (6, 5), "a label has 1 to 200 bytes, got 0"),
            (shell(", label = \"yes\"", ""), (6, 5), "missing field `label`"),
            (shell(song, "{ text = \"la\", label = true }"), (2, 1), "label \"no\" has 1 examples"),
            (shell("role = \"user\", content = \"is", "role = \"usr\", content = \"is"), (9, 18), "`usr`"),
            (shell("content = \"is it up?\"", "content = \"is it up?\", name = \"x\""), (9, 49), "`name`"),
            (shell("family = \"kitchen\"", "label = \"no\""), (18, 68), "unknown field `label`"),
            (shell("arguments = \"{}\"", "arguments = 2026-01-01"), (10, 58), "JSON can say, got 2026-01-01"),
            (shell("id = \"1\"", "id = nan"), (10, 58), "what JSON can say, got nan"),
            (shell("\"is it a web server?\"", "7"), (17, 5), "a text, or a table"),
            (shell("\"is it a web server?\"", "''"), (17, 5), "needs a user turn"),
            (shell("probes.shell", "probes.\"a b\""), (2, 9), "\"a b\" cannot be a probe's name"),
            ("[probes.shell]\nquestion = 'Is it?'".into(), (1, 1), "missing field `examples`"),
            ("[probes]\nshell = 'shell.jsonl'".into(), (2, 9), "invalid type: string"),
            (many(1), (1, 1), "the probe many: all examples have the label \"x\""),
            (many(2_001), (1, 1), "2001 examples, a probe is fitted from at most 2000"),
            (probes(17), (16 * lines + 2, 9), "17 probes, a policy has at most 16"),
        ] {
            let error = Manifest::parse(&manifest).unwrap_err();
            assert!(error.message.contains(says), "{says}: {error}");
            assert_eq!((error.line, error.column), place, "{says}: {error}");
        }
        assert_eq!(Manifest::parse(&probes(16)).unwrap().probes.len(), 16);
    }
}
