//! Tokenizers from Hugging Face's `tokenizer.json`.

use std::collections::HashMap;

use serde::Deserialize;
use serde_json::Value;

use super::pieces::{Piece, Pieces, Spelling};
use super::{Parts, Tokenizer};
use crate::load::{At, LoadError};

/// The fields of `tokenizer.json` that are checked here; the `tokenizers` crate reads the others.
#[derive(Deserialize)]
struct File {
    model: Model,
    #[serde(default)]
    added_tokens: Vec<Added>,
    #[serde(default)]
    decoder: Value,
}

#[derive(Deserialize)]
struct Model {
    #[serde(rename = "type", default)]
    kind: Option<String>,
    vocab: Value,
    #[serde(default)]
    merges: Vec<Merge>,
    #[serde(default)]
    continuing_subword_prefix: Option<String>,
    #[serde(default)]
    dropout: Option<f64>,
}

/// A merge: a pair, or both with a space between.
#[derive(Deserialize)]
#[serde(untagged)]
enum Merge {
    Pair(String, String),
    Joined(String),
}

#[derive(Deserialize)]
struct Added {
    id: u32,
    content: String,
    special: bool,
}

impl Tokenizer {
    /// Builds the tokenizer of a folder.
    ///
    /// `settings` is `tokenizer_config.json` or null; `generation` are the
    /// files that may name `eos_token_id`, the most binding first.
    ///
    /// # Errors
    /// When the file is damaged, is not a BPE, or has tokens beyond the
    /// embedding table's `vocab` rows.
    pub(crate) fn from_json(
        at: At<'_>,
        bytes: &[u8],
        vocab: usize,
        settings: &Value,
        generation: &[&Value],
    ) -> Result<Self, LoadError> {
        let file: File = serde_json::from_slice(bytes)
            .map_err(|error| at.invalid("the file", "a tokenizer as Hugging Face writes it", error))?;
        let words = check(at, &file.model, vocab)?;
        let spelling = spelling(at, &file.decoder)?;

        let mut pieces = vec![Piece::Special(""); vocab];
        for (word, token) in &words {
            pieces[*token as usize] = Piece::Spelled(word);
        }
        for added in &file.added_tokens {
            let slot = pieces.get_mut(added.id as usize).ok_or_else(|| {
                at.invalid(format_args!("token {:?}", added.content), format_args!("below {vocab}"), added.id)
            })?;
            let content = added.content.as_str();
            *slot = if added.special { Piece::Special(content) } else { Piece::Verbatim(content) };
        }
        let pieces = Pieces::new(spelling, pieces);

        let fault = |error| at.invalid("the tokenizer", "one that can be built", error);
        let mut inner = tokenizers::Tokenizer::from_bytes(bytes).map_err(fault)?;
        // A limit on length that came with the file would cut prompts silently.
        inner.with_truncation(None).map_err(fault)?;
        inner.with_padding(None);

        let named = |token: &Value| {
            let content = token.as_str().or_else(|| token.get("content")?.as_str())?;
            inner.token_to_id(content)
        };
        let bos = settings.get("bos_token").and_then(named);
        let mut eos = Vec::new();
        let numbers = generation.iter().filter_map(|file| file.get("eos_token_id"));
        let numbers = numbers.flat_map(|value| match value {
            Value::Array(list) => list.iter().collect(),
            one => vec![one],
        });
        let numbers = numbers.filter_map(Value::as_u64).filter(|token| *token < vocab as u64);
        // The chat's end comes first: `eos_token` of an instruct model; then what generation stops at.
        for token in
            settings.get("eos_token").and_then(named).into_iter().chain(numbers.map(|token| token as u32))
        {
            if !eos.contains(&token) {
                eos.push(token);
            }
        }
        let empty = inner.encode_fast("", true).map_err(fault)?;
        let add_bos = bos.is_some() && empty.get_ids().first().copied() == bos;
        Ok(Self::new(Parts { inner, pieces, bos, eos, add_bos }))
    }
}

/// Checks what the `tokenizers` crate takes on trust, and panics on; returns the vocabulary.
fn check(at: At<'_>, model: &Model, vocab: usize) -> Result<HashMap<String, u32>, LoadError> {
    match model.kind.as_deref() {
        None | Some("BPE") => {}
        Some(other) => return Err(at.unsupported("tokenizer", other, "BPE")),
    }
    if model.continuing_subword_prefix.as_ref().is_some_and(|prefix| !prefix.is_empty()) {
        return Err(at.unsupported("continuing_subword_prefix", "in a BPE", "none"));
    }
    if model.dropout.is_some_and(|dropout| dropout != 0.0) {
        return Err(at.unsupported("dropout", "in a BPE", "none"));
    }
    let words: HashMap<String, u32> = HashMap::deserialize(&model.vocab)
        .map_err(|error| at.invalid("the vocabulary", "strings with numbers", error))?;
    if let Some((word, token)) = words.iter().find(|(_, token)| **token as usize >= vocab) {
        let expected = format!("below the embedding's {vocab} rows");
        return Err(at.invalid(format_args!("the number of token {word:?}"), expected, token));
    }
    for merge in &model.merges {
        let pair = match merge {
            Merge::Pair(left, right) => Some((left.as_str(), right.as_str())),
            Merge::Joined(both) => both.split_once(' '),
        };
        let known = |(left, right): (&str, &str)| {
            words.contains_key(left)
                && words.contains_key(right)
                && words.contains_key(&[left, right].concat())
        };
        if !pair.is_some_and(known) {
            let got = pair.map_or_else(|| "no pair".into(), |pair| format!("{pair:?}"));
            return Err(at.invalid("a merge", "a pair of tokens that make a token", got));
        }
    }
    Ok(words)
}

/// How the vocabulary writes bytes: what the decoder undoes.
fn spelling(at: At<'_>, decoder: &Value) -> Result<Spelling, LoadError> {
    let kind = |value: &Value| value.get("type").and_then(Value::as_str).unwrap_or("none").to_owned();
    let steps = match decoder.get("decoders").and_then(Value::as_array) {
        Some(steps) => steps.iter().map(kind).collect(),
        None => vec![kind(decoder)],
    };
    let steps: Vec<&str> = steps.iter().map(String::as_str).collect();
    match steps[..] {
        ["ByteLevel"] => Ok(Spelling::ByteLevel),
        ["Replace", "ByteFallback", "Fuse"] | ["Replace", "ByteFallback", "Fuse", "Strip"] => {
            Ok(Spelling::SentencePiece)
        }
        _ => Err(at.unsupported("decoder", steps.join(" + "), "ByteLevel, Replace + ByteFallback + Fuse")),
    }
}
