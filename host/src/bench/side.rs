//! The sides of a comparison, and how each is asked.

use std::str::FromStr;
use std::time::Duration;

use serde_json::json;

use super::client::Client;
use super::error::BenchError;
use super::forkpoint::Forkpoint;
use super::llama::Llama;
use super::text::{Asked, State, Text};
use super::vllm::Vllm;

/// A peer that `--against` names: `llama=http://…`, or with a label for the table, `llama:q4_0=http://…`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Against {
    /// What it is.
    pub kind: PeerKind,
    /// Its name in the table.
    pub name: String,
    /// Its base, `http://host:port`.
    pub url: String,
}

/// A peer that Forkpoint can be measured against.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PeerKind {
    /// llama.cpp's `llama-server`.
    Llama,
    /// vLLM.
    Vllm,
}

impl PeerKind {
    /// The word for it.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Vllm => "vllm",
        }
    }
}

impl FromStr for Against {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let form = "write it like llama=http://127.0.0.1:8080, or with a label llama:q4_0=http://…";
        let (name, url) = text.split_once('=').ok_or_else(|| format!("{text:?} names no URL; {form}"))?;
        let (kind, label) = name.split_once(':').map_or((name, None), |(kind, label)| (kind, Some(label)));
        let kind = match kind {
            "llama" => PeerKind::Llama,
            "vllm" => PeerKind::Vllm,
            other => return Err(format!("{other:?} is no peer; there are llama and vllm; {form}")),
        };
        if label == Some("") {
            return Err(format!("{text:?} has an empty label; {form}"));
        }
        let parsed =
            reqwest::Url::parse(url).map_err(|error| format!("{url:?} is no URL ({error}); {form}"))?;
        if !matches!(parsed.scheme(), "http" | "https") || parsed.host_str().is_none() {
            return Err(format!("{url:?} is no http URL; {form}"));
        }
        Ok(Self { kind, name: name.to_owned(), url: url.trim_end_matches('/').to_owned() })
    }
}

/// What one run of one side gave: a number for each of the case's metrics.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Sample {
    /// How it was asked, where a side can be asked in several ways.
    pub(super) way: &'static str,
    pub(super) values: Vec<f64>,
    /// What a reader must know of this run.
    pub(super) note: Option<String>,
}

impl Sample {
    pub(super) fn one(value: f64) -> Vec<Self> {
        vec![Self { way: "", values: vec![value], note: None }]
    }
}

/// A streamed reply: how many tokens came after those of the first event, and in how many seconds.
pub(super) struct Decoded {
    pub(super) tokens: u32,
    pub(super) seconds: f64,
}

/// How long a call took, and what a reader must know of it.
pub(super) struct Took {
    pub(super) seconds: f64,
    pub(super) note: Option<String>,
}

/// The calls of a triage loop.
pub(super) struct Loop<'a> {
    pub(super) state: &'a State,
    /// What the policy asked, in order.
    pub(super) asked: &'a [Asked],
    /// What a reply opens with.
    pub(super) opening: &'a [u32],
    /// Tokens of the reply.
    pub(super) reply: u32,
}

/// A server under test.
#[derive(Clone)]
pub(super) enum Side {
    Forkpoint(Forkpoint),
    Llama(Llama),
    Vllm(Vllm),
}

impl Side {
    /// Connects to a peer and asks it what it is.
    pub(super) async fn connect(
        against: &Against,
        engine: &forkpoint_engine::Engine,
    ) -> Result<Self, BenchError> {
        let client = Client::new(&against.name, &against.url)?;
        Ok(match against.kind {
            PeerKind::Llama => Self::Llama(Llama::connect(client).await?),
            PeerKind::Vllm => Self::Vllm(Vllm::connect(client, engine.clone()).await?),
        })
    }

    /// Its name in the table.
    pub(super) fn name(&self) -> &str {
        match self {
            Self::Forkpoint(side) => &side.client.side,
            Self::Llama(side) => &side.client.side,
            Self::Vllm(side) => &side.client.side,
        }
    }

    /// "forkpoint" or the kind of peer: of several of one kind the best counts.
    pub(super) fn kind(&self) -> &'static str {
        match self {
            Self::Forkpoint(_) => "forkpoint",
            Self::Llama(_) => PeerKind::Llama.word(),
            Self::Vllm(_) => PeerKind::Vllm.word(),
        }
    }

    /// How long it takes to stop spinning after its turn: whoever comes next needs the processor.
    pub(super) fn settle(&self) -> Duration {
        match self {
            Self::Forkpoint(_) | Self::Llama(_) => Duration::from_millis(50),
            // Its engine looks for more work for a whole second.
            Self::Vllm(_) => Duration::from_millis(1200),
        }
    }

    /// Tokens that a sequence of it may hold, where it says so.
    pub(super) fn context(&self) -> Option<usize> {
        match self {
            Self::Forkpoint(side) => Some(side.context),
            Self::Llama(side) => side.context,
            Self::Vllm(side) => side.context,
        }
    }

    /// What it says of itself.
    pub(super) fn describe(&self) -> serde_json::Value {
        let slots = if let Self::Llama(side) = self { Some(side.slots) } else { None };
        let server = match self {
            Self::Forkpoint(_) => Some(env!("CARGO_PKG_VERSION").to_owned()),
            Self::Llama(side) => side.build.clone(),
            Self::Vllm(side) => side.version.clone(),
        };
        json!({ "name": self.name(), "kind": self.kind(), "server": server, "context": self.context(), "slots": slots })
    }

    /// Seconds for a text that nothing is resident of, and one token.
    pub(super) async fn prefill(&self, text: &Text) -> Result<f64, BenchError> {
        match self {
            Self::Forkpoint(side) => side.prefill(text).await,
            Self::Llama(side) => side.prefill(text).await,
            Self::Vllm(side) => side.prefill(text).await,
        }
    }

    /// A reply of so many tokens to a text that may be resident.
    pub(super) async fn decode(&self, text: &Text, tokens: u32) -> Result<Decoded, BenchError> {
        match self {
            Self::Forkpoint(side) => side.decode(text, tokens).await,
            Self::Llama(side) => side.decode(text, tokens).await,
            Self::Vllm(side) => side.decode(text, tokens).await,
        }
    }

    /// Answers questions about a state, in one call where the side has one. `client` tells concurrent callers apart.
    /// `warm` says that the state was put to it before.
    pub(super) async fn decide(
        &self,
        state: &State,
        asked: &[Asked],
        client: usize,
        warm: bool,
    ) -> Result<Took, BenchError> {
        match self {
            Self::Forkpoint(side) => side.decide(state, asked, warm).await,
            Self::Llama(side) => side.decide(state, asked, client, super::llama::Way::Grammar, warm).await,
            Self::Vllm(side) => side.decide(state, asked).await,
        }
    }

    /// The same, in every way that the side can be asked.
    pub(super) async fn decide_each_way(
        &self,
        state: &State,
        asked: &[Asked],
    ) -> Result<Vec<Sample>, BenchError> {
        let sample = |way, took: Took| Sample { way, values: vec![took.seconds * 1e3], note: took.note };
        let Self::Llama(side) = self else {
            return Ok(vec![sample("", self.decide(state, asked, 0, true).await?)]);
        };
        let mut samples = Vec::new();
        for way in super::llama::Way::ALL {
            // The last way left the last question behind; asked again at once, it would cost nothing.
            side.forget_question(state).await?;
            samples.push(sample(way.word(), side.decide(state, asked, 0, way, true).await?));
        }
        Ok(samples)
    }

    /// Seconds for the triage loop, from a cold state to the reply's end.
    pub(super) async fn triage(&self, calls: &Loop<'_>) -> Result<Took, BenchError> {
        match self {
            Self::Forkpoint(side) => side.triage(calls).await,
            Self::Llama(side) => side.triage(calls).await,
            Self::Vllm(side) => side.triage(calls).await,
        }
    }

    /// Whether so many clients with states of their own can stay warm; if not, why.
    pub(super) fn holds(&self, clients: usize) -> Result<(), String> {
        match self {
            Self::Llama(side) if side.slots < clients => {
                Err(format!("has {} slots; -np {clients} would keep {clients} states warm", side.slots))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_is_named_with_or_without_a_label() {
        let plain: Against = "llama=http://127.0.0.1:8080/".parse().unwrap();
        assert_eq!((plain.kind, plain.name.as_str()), (PeerKind::Llama, "llama"));
        assert_eq!(plain.url, "http://127.0.0.1:8080");
        let labelled: Against = "vllm:bf16=http://127.0.0.1:1".parse().unwrap();
        assert_eq!((labelled.kind, labelled.name.as_str()), (PeerKind::Vllm, "vllm:bf16"));
    }

    #[test]
    fn a_peer_that_is_none_is_told_how_to_write_one() {
        for (text, message) in [
            ("llama", "names no URL"),
            ("ollama=http://h", "\"ollama\" is no peer"),
            ("llama:=http://h", "empty label"),
            ("llama=nowhere", "is no URL"),
            ("llama=ftp://h", "is no http URL"),
        ] {
            let error = text.parse::<Against>().unwrap_err();
            assert!(error.contains(message) && error.contains("write it like"), "{text}: {error}");
        }
    }
}
