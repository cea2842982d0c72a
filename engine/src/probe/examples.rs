//! Labelled examples: what a probe is fitted from.
//!
//! A file of JSON lines. Each holds one example: a `text` (one user turn) or
//! `messages` (a conversation), and its `label`; `family` names those that are
//! near-copies of one another, so that none is fitted from while another is tested;
//! `tags` are for people. A `label` of `null` marks a text that the question does not
//! fit: never fitted from, it shows how well mass tells such texts. The first line may
//! be `{"probe": {…}}`, a [`Header`], instead.

use std::collections::{BTreeMap, HashMap, HashSet};

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

use crate::chat::{Conversation, Message, Role};
use crate::decide::{Criteria, MAX_LEVELS, MAX_OPTIONS};
use crate::features::Span;

/// Most examples that a probe is fitted from.
pub const MAX_EXAMPLES: usize = 2_000;
/// Most bytes of a file of examples.
pub const MAX_BYTES: usize = 2 << 20;
/// Examples of a label under which a probe is not to be trusted.
pub const FEW: usize = 10;
/// The longest label, in bytes.
const MAX_LABEL: usize = 200;

/// What kind of question a probe answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// One of several names.
    Choice,
    /// `yes` or `no`.
    Boolean,
    /// One of several levels, lowest first.
    Score,
}

impl Kind {
    /// Its word in files.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Choice => "choice",
            Self::Boolean => "boolean",
            Self::Score => "score",
        }
    }
}

/// What a file of examples says of all of them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Header {
    /// The question in words, as label reads are asked it.
    pub question: Option<String>,
    /// Left out: `boolean` where the labels are yes and no, else `choice`.
    pub kind: Option<Kind>,
    /// All labels; for a score, which needs them, in the order of its levels.
    pub labels: Option<Vec<String>>,
    /// Which tokens of a session the probe reads; left out: the last user turn.
    pub span: Option<Span>,
}

/// One example.
#[derive(Debug, Clone, PartialEq)]
pub struct Example {
    /// What is judged.
    pub conversation: Conversation,
    /// The place of its label; none for a text that is out of scope.
    pub label: Option<usize>,
    /// Near-copies share it.
    pub family: u64,
    /// Words for people.
    pub tags: Vec<String>,
}

/// A file of examples that a probe can be fitted from.
#[derive(Debug, Clone, PartialEq)]
pub struct Examples {
    /// The kind of question.
    pub kind: Kind,
    /// The question in words, where the file has it.
    pub question: Option<String>,
    /// Labels: of a boolean yes and no, of a score its levels in order.
    pub labels: Vec<String>,
    /// Which tokens are read.
    pub span: Span,
    /// All of them, in order.
    pub examples: Vec<Example>,
    /// Of the file's bytes.
    pub hash: u128,
    /// What a person should look at.
    pub warnings: Vec<String>,
}

/// Why a file of examples cannot be fitted from.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ExamplesError {
    /// A line is not what it should be.
    #[error("line {line}: {message}")]
    Line {
        /// Counted from 1.
        line: usize,
        /// What was expected and what came.
        message: String,
    },
    /// The whole is not what it should be.
    #[error("{0}")]
    File(String),
}

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

/// An example before all labels are known.
struct Read {
    line: usize,
    conversation: Conversation,
    label: Option<String>,
    family: u64,
    tags: Vec<String>,
}

impl Examples {
    /// Reads a file's text.
    ///
    /// # Errors
    /// Names the line and what is wrong with it, or what the whole file lacks.
    pub fn parse(text: &str) -> Result<Self, ExamplesError> {
        if text.len() > MAX_BYTES {
            return Err(file(format!("{} bytes, a file of examples has at most {MAX_BYTES}", text.len())));
        }
        let text_of_lines = text.strip_prefix('\u{FEFF}').unwrap_or(text);
        let mut lines =
            text_of_lines.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()).peekable();
        let header = match lines.next_if(|(_, line)| is_header(line)) {
            Some((at, line)) => {
                serde_json::from_str::<HeaderLine>(line).map_err(|error| wrong(at, error))?.probe
            }
            None => Header::default(),
        };
        let lines: Vec<(usize, &str)> = lines.collect();
        if lines.len() > MAX_EXAMPLES {
            let count = lines.len();
            return Err(file(format!("{count} examples, a probe is fitted from at most {MAX_EXAMPLES}")));
        }
        let read = lines.into_iter().map(|(at, line)| read_line(at, line)).collect::<Result<Vec<_>, _>>()?;
        if matches!(header.span, Some(Span::Since(_) | Span::Last(0))) {
            return Err(file("a span is \"last-user\", \"session\" or {\"last\": N}, N at least 1".into()));
        }
        let labels = labels(&header, &read)?;
        let kind = kind(&header, &labels)?;
        let labels = if kind == Kind::Boolean { vec!["yes".into(), "no".into()] } else { labels };
        let mut examples = Vec::with_capacity(read.len());
        for Read { line, conversation, label, family, tags } in read {
            let place = |label: String| {
                let place = labels.iter().position(|known| *known == label);
                place.ok_or_else(|| wrong(line, format!("label {label:?} is none of {}", labels.join(", "))))
            };
            examples.push(Example { conversation, label: label.map(place).transpose()?, family, tags });
        }
        let mut examples = Self {
            kind,
            question: header.question,
            labels,
            span: header.span.unwrap_or(Span::LastUser),
            examples,
            hash: {
                let mut hash = Xxh3::new();
                hash.update(text.as_bytes());
                hash.digest128()
            },
            warnings: Vec::new(),
        };
        examples.check()?;
        Ok(examples)
    }

    /// How many examples each label has, in the labels' order.
    #[must_use]
    pub fn counts(&self) -> Vec<usize> {
        let mut counts = vec![0; self.labels.len()];
        self.examples.iter().filter_map(|example| example.label).for_each(|label| counts[label] += 1);
        counts
    }

    /// The same with its labels in another order; `labels` are the same ones.
    #[must_use]
    pub fn relabelled(mut self, labels: &[String]) -> Self {
        let place = |old: usize| labels.iter().position(|label| *label == self.labels[old]);
        for example in &mut self.examples {
            example.label = example.label.and_then(place);
        }
        self.labels = labels.to_vec();
        self
    }

    /// What may be answered, as label reads are asked it.
    #[must_use]
    pub fn criteria(&self) -> Criteria {
        match self.kind {
            Kind::Boolean => Criteria::Boolean { yes: None, no: None },
            Kind::Score => Criteria::Score(self.labels.clone()),
            Kind::Choice => {
                let option =
                    |name: &String| crate::decide::ChoiceOption { name: name.clone(), description: None };
                Criteria::Choice(self.labels.iter().map(option).collect())
            }
        }
    }

    fn check(&mut self) -> Result<(), ExamplesError> {
        let counts = self.counts();
        for (label, count) in self.labels.iter().zip(&counts) {
            if *count < 2 {
                return Err(file(format!("label {label:?} has {count} examples, at least 2 are needed")));
            }
            if *count < FEW {
                self.warnings.push(format!("label {label:?} has {count} examples; give it {FEW} or more"));
            }
        }
        let labelled = self.examples.iter().filter(|example| example.label.is_some());
        let families: HashSet<u64> = labelled.map(|example| example.family).collect();
        if families.len() < 2 {
            let what = "all labelled examples are of one family; what is tested must be of another than what is fitted";
            return Err(file(what.into()));
        }
        let mut seen: HashMap<String, (usize, Option<usize>)> = HashMap::new();
        let (mut copies, mut contradictions) = (0, BTreeMap::new());
        for (place, example) in self.examples.iter().enumerate() {
            let turns = &example.conversation.messages;
            let text: Vec<&str> = turns.iter().map(|turn| turn.content.trim()).collect();
            let (first, label) =
                *seen.entry(text.join("\n").to_lowercase()).or_insert((place, example.label));
            if first != place {
                copies += 1;
                if label != example.label {
                    contradictions.insert(place + 1, first + 1);
                }
            }
        }
        if let Some((second, first)) = contradictions.first_key_value() {
            self.warnings.push(format!(
                "{} texts stand under two labels; the first are examples {first} and {second}",
                contradictions.len()
            ));
        }
        if copies > contradictions.len() {
            self.warnings.push(format!("{} examples are there twice", copies - contradictions.len()));
        }
        Ok(())
    }
}

fn wrong(at: usize, message: impl ToString) -> ExamplesError {
    ExamplesError::Line { line: at + 1, message: message.to_string() }
}

fn file(message: String) -> ExamplesError {
    ExamplesError::File(message)
}

/// Whether a line is a [`Header`] rather than an example.
fn is_header(line: &str) -> bool {
    serde_json::from_str::<serde_json::Value>(line).is_ok_and(|value| value.get("probe").is_some())
}

fn read_line(at: usize, line: &str) -> Result<Read, ExamplesError> {
    let parsed: Line = serde_json::from_str(line).map_err(|error| wrong(at, error))?;
    let messages = match (parsed.text, parsed.messages) {
        (Some(text), None) => vec![Message::new(Role::User, text)],
        (None, Some(messages)) => messages,
        _ => return Err(wrong(at, "an example has either \"text\" or \"messages\"")),
    };
    if !messages.iter().any(|message| message.role == Role::User && !message.content.trim().is_empty()) {
        return Err(wrong(at, "an example needs a user turn that says something"));
    }
    let label = match parsed.label {
        None => return Err(wrong(at, "an example needs a \"label\"; null marks what is out of scope")),
        Some(serde_json::Value::Null) => None,
        Some(serde_json::Value::Bool(yes)) => Some(if yes { "yes" } else { "no" }.to_owned()),
        Some(serde_json::Value::String(label)) if (1..=MAX_LABEL).contains(&label.len()) => Some(label),
        Some(serde_json::Value::String(label)) => {
            let bytes = label.len();
            return Err(wrong(at, format!("a label has 1 to {MAX_LABEL} bytes, got {bytes}")));
        }
        Some(other) => return Err(wrong(at, format!("a label is a string, a boolean or null, got {other}"))),
    };
    // Without a family, an example and its exact copies are one.
    let name = parsed.family.unwrap_or_else(|| messages.iter().map(|m| m.content.as_str()).collect());
    let family = xxhash_rust::xxh3::xxh3_64(name.as_bytes());
    let conversation = Conversation { messages, tools: Vec::new() };
    Ok(Read { line: at, conversation, label, family, tags: parsed.tags })
}

/// All labels, in order.
fn labels(header: &Header, read: &[Read]) -> Result<Vec<String>, ExamplesError> {
    let mut labels = header.labels.clone().unwrap_or_default();
    if labels.is_empty() {
        for label in read.iter().filter_map(|read| read.label.as_ref()) {
            if !labels.contains(label) {
                labels.push(label.clone());
            }
        }
    }
    let distinct: HashSet<_> = labels.iter().collect();
    if distinct.len() < labels.len() {
        return Err(file(format!("a label is there twice among {}", labels.join(", "))));
    }
    match labels.len() {
        0 => Err(file("there are no labelled examples".into())),
        1 => {
            Err(file(format!("all examples have the label {:?}; at least two labels are needed", labels[0])))
        }
        _ => Ok(labels),
    }
}

fn kind(header: &Header, labels: &[String]) -> Result<Kind, ExamplesError> {
    let yes_no =
        labels.len() == 2 && ["yes", "no"].iter().all(|word| labels.iter().any(|label| label == word));
    let kind = header.kind.unwrap_or(if yes_no { Kind::Boolean } else { Kind::Choice });
    match kind {
        Kind::Boolean if !yes_no => {
            Err(file(format!("a boolean has the labels yes and no, got {}", labels.join(", "))))
        }
        Kind::Score if header.labels.as_ref().is_none_or(Vec::is_empty) => {
            Err(file("a score needs \"labels\" in its first line, lowest level first".into()))
        }
        Kind::Score if labels.len() > MAX_LEVELS => {
            Err(file(format!("a score has at most {MAX_LEVELS} levels, got {}", labels.len())))
        }
        Kind::Choice if labels.len() > MAX_OPTIONS => {
            Err(file(format!("a choice has at most {MAX_OPTIONS} labels, got {}", labels.len())))
        }
        kind => Ok(kind),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
