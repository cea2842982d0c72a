//! Tokenizers from GGUF metadata.
//!
//! `tokenizer.ggml.model` and `tokenizer.ggml.pre` name a recipe; the rules
//! behind the names are those of llama.cpp's `llama-vocab.cpp`. A name that is
//! not known is an error: a wrong splitter gives other tokens, and silently
//! worse answers.

use std::collections::HashSet;

use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::normalizers::NFC;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, NormalizerWrapper, PreTokenizerWrapper, SplitDelimiterBehavior};

use super::pieces::{Piece, Pieces, Spelling};
use super::{Parts, Tokenizer};
use crate::load::{At, Gguf, LoadError};

/// How text is cut before merges.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Recipe {
    /// GPT-2's words.
    Gpt2,
    /// Single digits, then GPT-2's words.
    Digits,
    /// Llama 3's words; a word that is a token is that token, whatever the merges say.
    Llama3,
    /// NFC, then Llama 3's words with single digits.
    Qwen2,
}

/// Names of `tokenizer.ggml.pre`.
const RECIPES: [(&str, Recipe); 19] = [
    ("gpt-2", Recipe::Gpt2),
    ("phi-2", Recipe::Gpt2),
    ("smollm", Recipe::Digits),
    ("starcoder", Recipe::Digits),
    ("refact", Recipe::Digits),
    ("codeshell", Recipe::Digits),
    ("exaone", Recipe::Digits),
    ("minerva-7b", Recipe::Digits),
    ("llama-bpe", Recipe::Llama3),
    ("llama3", Recipe::Llama3),
    ("llama-v3", Recipe::Llama3),
    ("falcon3", Recipe::Llama3),
    ("falcon-h1", Recipe::Llama3),
    ("pixtral", Recipe::Llama3),
    ("midm-2.0", Recipe::Llama3),
    ("lfm2", Recipe::Llama3),
    ("qwen2", Recipe::Qwen2),
    ("deepseek-r1-qwen", Recipe::Qwen2),
    ("megrez", Recipe::Qwen2),
];

/// Llama 3's words, as its `tokenizer.json` gives them.
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Qwen 2's words, as its `tokenizer.json` gives them.
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Kinds of tokens: `llama_token_type` in llama.cpp.
const UNKNOWN: u32 = 2;
const CONTROL: u32 = 3;
const USER_DEFINED: u32 = 4;
const UNUSED: u32 = 5;

impl Tokenizer {
    /// Builds the tokenizer of a GGUF file whose embedding table has `vocab` rows.
    ///
    /// # Errors
    /// When a key is missing, the recipe is not known, or the vocabulary
    /// contradicts the merges or the embedding table.
    pub(crate) fn from_gguf(gguf: &Gguf<'_>, vocab: usize) -> Result<Self, LoadError> {
        let at = gguf.at();
        let model = gguf.text(MODEL)?.ok_or_else(|| at.missing(MODEL))?;
        if model != "gpt2" {
            return Err(at.unsupported("tokenizer", model, "gpt2"));
        }
        let pre = gguf.text(PRE)?.ok_or_else(|| at.missing(PRE))?;
        let recipe = RECIPES.iter().find(|(name, _)| *name == pre).map(|(_, recipe)| *recipe);
        let recipe = recipe
            .ok_or_else(|| at.unsupported("pre-tokenizer", pre, RECIPES.map(|(name, _)| name).join(", ")))?;

        let tokens = gguf.array(TOKENS)?.ok_or_else(|| at.missing(TOKENS))?.texts(at, TOKENS)?;
        if tokens.len() != vocab {
            return Err(at.invalid(
                TOKENS,
                format_args!("{vocab} strings, the embedding's rows"),
                tokens.len(),
            ));
        }
        let kinds = kinds(gguf, vocab)?;
        let merges = gguf.array(MERGES)?.ok_or_else(|| at.missing(MERGES))?.texts(at, MERGES)?;

        let bos = id(gguf, "tokenizer.ggml.bos_token_id", vocab)?;
        let mut eos = Vec::new();
        for key in ["eos_token_id", "eot_token_id", "eom_token_id"] {
            let token = id(gguf, &format!("tokenizer.ggml.{key}"), vocab)?;
            eos.extend(token.filter(|token| !eos.contains(token)));
        }
        let special = |token: usize| {
            let named = bos.iter().chain(&eos).any(|known| *known as usize == token);
            named || matches!(kinds[token], UNKNOWN | CONTROL | UNUSED)
        };
        let piece = |(token, text)| match kinds[token] {
            _ if special(token) => Piece::Special(text),
            USER_DEFINED => Piece::Verbatim(text),
            _ => Piece::Spelled(text),
        };
        let pieces = Pieces::new(Spelling::ByteLevel, tokens.iter().copied().enumerate().map(piece));

        let mut inner = tokenizers::Tokenizer::new(bpe(at, &tokens, &merges, recipe)?);
        let added = tokens.iter().enumerate().filter_map(|(token, text)| match kinds[token] {
            USER_DEFINED if !special(token) => Some(AddedToken::from(*text, false).normalized(false)),
            UNUSED | UNKNOWN => None,
            _ if special(token) => Some(AddedToken::from(*text, true)),
            _ => None,
        });
        let fault = |error| at.invalid("the tokenizer", "one that can be built", error);
        // Before the tokens: setting it goes over those that are there.
        if recipe == Recipe::Qwen2 {
            inner.with_normalizer(Some(NormalizerWrapper::from(NFC))).map_err(fault)?;
        }
        inner.add_tokens(added).map_err(fault)?;
        inner.with_pre_tokenizer(Some(splitter(recipe).map_err(fault)?));

        let add_bos = gguf.bool("tokenizer.ggml.add_bos_token")?.unwrap_or(recipe == Recipe::Llama3);
        Ok(Self::new(Parts { inner, pieces, bos, eos, add_bos: add_bos && bos.is_some() }))
    }
}

const MODEL: &str = "tokenizer.ggml.model";
const PRE: &str = "tokenizer.ggml.pre";
const TOKENS: &str = "tokenizer.ggml.tokens";
const MERGES: &str = "tokenizer.ggml.merges";
const KINDS: &str = "tokenizer.ggml.token_type";

/// Each token's kind; normal where the file does not say.
fn kinds(gguf: &Gguf<'_>, vocab: usize) -> Result<Vec<u32>, LoadError> {
    let at = gguf.at();
    let Some(array) = gguf.array(KINDS)? else { return Ok(vec![1; vocab]) };
    if array.count != vocab {
        return Err(at.invalid(KINDS, format_args!("{vocab} numbers, one a token"), array.count));
    }
    let kinds = array.numbers(at, KINDS)?;
    Ok(kinds.into_iter().map(|kind| kind as u32).collect())
}

/// A token that metadata names.
fn id(gguf: &Gguf<'_>, key: &str, vocab: usize) -> Result<Option<u32>, LoadError> {
    match gguf.unsigned(key)? {
        Some(token) if token >= vocab as u64 => {
            Err(gguf.at().invalid(key, format_args!("below the vocabulary's {vocab}"), token))
        }
        // It fits: vocabularies are smaller than u32::MAX.
        token => Ok(token.map(|token| token as u32)),
    }
}

/// The vocabulary and its merges, checked: the builder panics on merges that lead out of it.
fn bpe(at: At<'_>, tokens: &[&str], merges: &[&str], recipe: Recipe) -> Result<BPE, LoadError> {
    let vocab: Vocab = tokens.iter().map(|token| (*token).to_owned()).zip(0..).collect();
    if vocab.len() != tokens.len() {
        let mut seen = HashSet::new();
        let twice = tokens.iter().find(|token| !seen.insert(**token)).copied().unwrap_or_default();
        return Err(at.invalid(TOKENS, "strings that differ", format_args!("{twice:?} twice")));
    }
    let mut pairs = Vec::with_capacity(merges.len());
    for merge in merges {
        // The space that parts the two is never the first character: a token is not empty.
        let space = merge.char_indices().skip(1).find(|(_, character)| *character == ' ');
        let pair = space.map(|(place, _)| (&merge[..place], &merge[place + 1..]));
        let known = |pair: &(&str, &str)| {
            vocab.contains_key(pair.0)
                && vocab.contains_key(pair.1)
                && vocab.contains_key(&[pair.0, pair.1].concat())
        };
        let Some((left, right)) = pair.filter(known) else {
            return Err(at.invalid(MERGES, "pairs of tokens that make a token", format_args!("{merge:?}")));
        };
        pairs.push((left.to_owned(), right.to_owned()));
    }
    let builder = BPE::builder().vocab_and_merges(vocab, pairs).ignore_merges(recipe == Recipe::Llama3);
    builder.build().map_err(|error| at.invalid(MERGES, "merges of the vocabulary", error))
}

/// What cuts text into words.
fn splitter(recipe: Recipe) -> tokenizers::Result<PreTokenizerWrapper> {
    let bytes = |words| PreTokenizerWrapper::from(ByteLevel::new(false, true, words));
    let regex = |pattern: &str| {
        let pattern = SplitPattern::Regex(pattern.into());
        Split::new(pattern, SplitDelimiterBehavior::Isolated, false).map(PreTokenizerWrapper::from)
    };
    Ok(match recipe {
        Recipe::Gpt2 => bytes(true),
        Recipe::Digits => Sequence::new(vec![Digits::new(true).into(), bytes(true)]).into(),
        Recipe::Llama3 => Sequence::new(vec![regex(LLAMA3)?, bytes(false)]).into(),
        Recipe::Qwen2 => Sequence::new(vec![regex(QWEN2)?, bytes(false)]).into(),
    })
}
