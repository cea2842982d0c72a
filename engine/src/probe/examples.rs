//! Labelled examples: what a probe is fitted from.
//!
//! Each is a text (one user turn) or messages (a conversation), and its label; a
//! family names those that are near-copies of one another, so that none is fitted from
//! while another is tested; tags are for people. One without a label is a text that
//! the question does not fit: never fitted from, it shows how well mass tells such
//! texts. [`Examples::parse`] reads a file of them.

use std::collections::{BTreeMap, HashMap, HashSet};

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::{xxh3_64, xxh3_128};

use crate::chat::{Conversation, Message, Role};
use crate::decide::{Criteria, MAX_LEVELS, MAX_OPTIONS};
use crate::features::Span;

/// Most examples that a probe is fitted from.
pub const MAX_EXAMPLES: usize = 2_000;
/// Most bytes of examples in one file.
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

/// What is said of all examples, whatever they are written in.
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

/// An example as it is written.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Row {
    /// One user turn; an example has this or `messages`.
    pub text: Option<String>,
    /// A conversation.
    pub messages: Option<Vec<Message>>,
    /// None marks a text that the question does not fit.
    pub label: Option<String>,
    /// The name of its near-copies; left out: that of its exact copies.
    pub family: Option<String>,
    /// Words for people.
    pub tags: Vec<String>,
}

/// Examples that a probe can be fitted from.
#[derive(Debug, Clone, PartialEq)]
pub struct Examples {
    /// The kind of question.
    pub kind: Kind,
    /// The question in words, where it is said.
    pub question: Option<String>,
    /// Labels: of a boolean yes and no, of a score its levels in order.
    pub labels: Vec<String>,
    /// Which tokens are read.
    pub span: Span,
    /// All of them, in order.
    pub examples: Vec<Example>,
    /// Of what a probe is fitted from, however it was written: tags are no part of it, nor is where those out of
    /// scope stand among the others.
    pub hash: u128,
    /// What a person should look at.
    pub warnings: Vec<String>,
}

/// Why examples cannot be fitted from.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ExamplesError {
    /// A line of a file is not what it should be.
    #[error("line {line}: {message}")]
    Line {
        /// Counted from 1.
        line: usize,
        /// What was expected and what came.
        message: String,
    },
    /// An example is not what it should be.
    #[error("example {number}: {message}")]
    Example {
        /// Its place, counted from 1.
        number: usize,
        /// What was expected and what came.
        message: String,
    },
    /// The whole is not what it should be.
    #[error("{0}")]
    Whole(String),
}

/// An example before all labels are known.
struct Read {
    conversation: Conversation,
    label: Option<String>,
    family: u64,
    tags: Vec<String>,
}

impl Examples {
    /// Takes examples as they are written.
    ///
    /// # Errors
    /// Names the example and what is wrong with it, or what the whole lacks.
    pub fn new(header: Header, rows: Vec<Row>) -> Result<Self, ExamplesError> {
        if rows.len() > MAX_EXAMPLES {
            let count = rows.len();
            return Err(whole(format!("{count} examples, a probe is fitted from at most {MAX_EXAMPLES}")));
        }
        let wrong = |at: usize, message| ExamplesError::Example { number: at + 1, message };
        let read = rows.into_iter().enumerate();
        let read = read.map(|(at, row)| row.read().map_err(|message| wrong(at, message)));
        let read = read.collect::<Result<Vec<_>, _>>()?;
        if matches!(header.span, Some(Span::Since(_) | Span::Last(0))) {
            return Err(whole("a span is \"last-user\", \"session\" or a \"last\" of at least 1".into()));
        }
        let labels = labels(&header, &read)?;
        let kind = kind(&header, &labels)?;
        let labels = if kind == Kind::Boolean { vec!["yes".into(), "no".into()] } else { labels };
        let mut examples = Vec::with_capacity(read.len());
        for (at, Read { conversation, label, family, tags }) in read.into_iter().enumerate() {
            let place = |label: String| {
                let place = labels.iter().position(|known| *known == label);
                place.ok_or_else(|| wrong(at, format!("label {label:?} is none of {}", labels.join(", "))))
            };
            examples.push(Example { conversation, label: label.map(place).transpose()?, family, tags });
        }
        let span = header.span.unwrap_or(Span::LastUser);
        let (hash, warnings) = (0, Vec::new());
        let mut examples = Self { kind, question: header.question, labels, span, examples, hash, warnings };
        examples.check()?;
        examples.hash = examples.hashed();
        Ok(examples)
    }

    fn hashed(&self) -> u128 {
        let rows = |labelled: bool| {
            let rows = self.examples.iter().filter(move |row| row.label.is_some() == labelled);
            rows.map(|row| (&row.conversation.messages, row.label, row.family))
        };
        let rows: Vec<_> = rows(true).chain(rows(false)).collect();
        let all = (self.kind, &self.question, &self.labels, self.span, rows);
        // JSON has no number, text or key here that it cannot hold.
        xxh3_128(&serde_json::to_vec(&all).expect("examples can be written as JSON"))
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
                return Err(whole(format!("label {label:?} has {count} examples, at least 2 are needed")));
            }
            if *count < FEW {
                self.warnings.push(format!("label {label:?} has {count} examples; give it {FEW} or more"));
            }
        }
        let labelled = self.examples.iter().filter(|example| example.label.is_some());
        let families: HashSet<u64> = labelled.map(|example| example.family).collect();
        if families.len() < 2 {
            let what = "all labelled examples are of one family; what is tested must be of another than what is fitted";
            return Err(whole(what.into()));
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

fn whole(message: String) -> ExamplesError {
    ExamplesError::Whole(message)
}

impl Row {
    fn read(self) -> Result<Read, String> {
        let messages = match (self.text, self.messages) {
            (Some(text), None) => vec![Message::new(Role::User, text)],
            (None, Some(messages)) => messages,
            _ => return Err("an example has either \"text\" or \"messages\"".into()),
        };
        if !messages.iter().any(|turn| turn.role == Role::User && !turn.content.trim().is_empty()) {
            return Err("an example needs a user turn that says something".into());
        }
        if let Some(bytes) =
            self.label.as_ref().map(String::len).filter(|bytes| !(1..=MAX_LABEL).contains(bytes))
        {
            return Err(format!("a label has 1 to {MAX_LABEL} bytes, got {bytes}"));
        }
        // Without a family, an example and its exact copies are one.
        let name = self.family.unwrap_or_else(|| messages.iter().map(|turn| turn.content.as_str()).collect());
        let conversation = Conversation { messages, tools: Vec::new() };
        Ok(Read { conversation, label: self.label, family: xxh3_64(name.as_bytes()), tags: self.tags })
    }
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
        return Err(whole(format!("a label is there twice among {}", labels.join(", "))));
    }
    match labels.len() {
        0 => Err(whole("there are no labelled examples".into())),
        1 => {
            Err(whole(format!("all examples have the label {:?}; at least two labels are needed", labels[0])))
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
            Err(whole(format!("a boolean has the labels yes and no, got {}", labels.join(", "))))
        }
        Kind::Score if header.labels.as_ref().is_none_or(Vec::is_empty) => {
            Err(whole("a score needs \"labels\", lowest level first".into()))
        }
        Kind::Score if labels.len() > MAX_LEVELS => {
            Err(whole(format!("a score has at most {MAX_LEVELS} levels, got {}", labels.len())))
        }
        Kind::Choice if labels.len() > MAX_OPTIONS => {
            Err(whole(format!("a choice has at most {MAX_OPTIONS} labels, got {}", labels.len())))
        }
        kind => Ok(kind),
    }
}
