//! Text to tokens and back.
//!
//! A tokenizer comes from GGUF metadata or from a `tokenizer.json`. The
//! `tokenizers` crate does the splitting and merging; what a token stands for is
//! kept here as bytes, because a token may hold part of a character.

mod gguf;
mod json;
mod known;
mod pieces;

use std::fmt;
use std::ops::Range;

use tokenizers::{AddedVocabulary, Model, OffsetType, PreTokenizedString, PreTokenizer};

pub(crate) use known::Known;
use pieces::Pieces;

/// A model's vocabulary and how text is cut into it. `Send + Sync`; share it in an `Arc`.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// The added tokens once more, with special ones switched off.
    plain: AddedVocabulary,
    pieces: Pieces,
    bos: Option<u32>,
    eos: Vec<u32>,
    add_bos: bool,
}

/// What a source says, before it becomes a [`Tokenizer`].
struct Parts {
    inner: tokenizers::Tokenizer,
    pieces: Pieces,
    bos: Option<u32>,
    /// Ends of a turn that the source names, the main one first.
    eos: Vec<u32>,
    add_bos: bool,
}

/// Special tokens that end a turn wherever a vocabulary has them, so that a model stops even where its
/// files name only one of several.
const TURN_ENDS: [&str; 8] = [
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "<|end|>",
    "</s>",
];

impl Tokenizer {
    fn new(parts: Parts) -> Self {
        let Parts { inner, pieces, bos, mut eos, add_bos } = parts;
        for end in TURN_ENDS {
            if let Some(token) = pieces.special(end)
                && !eos.contains(&token)
            {
                eos.push(token);
            }
        }
        let mut plain = inner.get_added_vocabulary().clone();
        plain.set_encode_special_tokens(true);
        Self { inner, plain, pieces, bos, eos, add_bos }
    }

    /// The tokens of a text. Special tokens written in it are recognised, as chat templates need;
    /// nothing is added.
    #[must_use]
    pub fn encode(&self, text: &str) -> Vec<u32> {
        match self.inner.encode_fast(text, false) {
            Ok(encoding) => encoding.get_ids().to_vec(),
            // No text makes the vocabularies that load here fail; if one did, its bytes still say it.
            Err(_) => self.pieces.spell(text.as_bytes()),
        }
    }

    /// The tokens of a text that is not trusted: `<|im_end|>` in it is ten characters, never a token
    /// that [`is_special`](Self::is_special).
    #[must_use]
    pub fn encode_plain(&self, text: &str) -> Vec<u32> {
        let Ok(tokens) = self.try_encode_plain(text) else { return self.pieces.spell(text.as_bytes()) };
        if !tokens.iter().any(|token| self.is_special(*token)) {
            return tokens;
        }
        // A vocabulary whose merges, or whose whole words, make up a special token.
        let spelled = |token: u32| match self.pieces.content(token) {
            Some(content) => self.pieces.spell(content.as_bytes()),
            None if self.is_special(token) => Vec::new(),
            None => vec![token],
        };
        tokens.into_iter().flat_map(spelled).collect()
    }

    fn try_encode_plain(&self, text: &str) -> tokenizers::Result<Vec<u32>> {
        self.cut(self.plain.extract_and_normalize(self.inner.get_normalizer(), text))
    }

    /// The tokens of a text whose special tokens are found.
    fn cut(&self, mut text: PreTokenizedString) -> tokenizers::Result<Vec<u32>> {
        if let Some(splitter) = self.inner.get_pre_tokenizer() {
            splitter.pre_tokenize(&mut text)?;
        }
        text.tokenize(|piece| self.inner.get_model().tokenize(piece.get()))?;
        Ok(text.into_encoding(None, 0, OffsetType::None)?.get_ids().to_vec())
    }

    /// What a token stands for. Empty for special tokens, and for numbers outside the vocabulary.
    #[must_use]
    pub fn bytes(&self, token: u32) -> &[u8] {
        self.pieces.bytes(token)
    }

    /// Whether a token is a mark of the model's own (a control token, an unused row) and never text.
    #[must_use]
    pub fn is_special(&self, token: u32) -> bool {
        self.pieces.is_special(token)
    }

    /// Whether a text begins with a special token, as [`encode`](Self::encode) reads it.
    #[must_use]
    pub fn starts_with_special(&self, text: &str) -> bool {
        self.pieces.specials().any(|(content, _)| text.starts_with(content))
    }

    /// How a special token is written; none for others.
    #[must_use]
    pub fn content(&self, token: u32) -> Option<&str> {
        self.pieces.content(token)
    }

    /// The special token that is written so.
    #[must_use]
    pub fn special(&self, content: &str) -> Option<u32> {
        self.pieces.special(content)
    }

    /// Rows of the embedding table; every token is below it.
    #[must_use]
    pub fn vocab(&self) -> usize {
        self.pieces.len()
    }

    /// The token that begins a text, where the model has one.
    #[must_use]
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// Whether the files ask for [`bos`](Self::bos) before raw text. Chat templates write it themselves.
    #[must_use]
    pub fn add_bos(&self) -> bool {
        self.add_bos
    }

    /// Every token that ends a turn, the main one first.
    #[must_use]
    pub fn eos(&self) -> &[u32] {
        &self.eos
    }

    /// Which of a text's tokens spell some of its bytes, if only in part. Where the
    /// vocabulary's normaliser changed the text, places shift by what it changed.
    #[must_use]
    pub fn spelling(&self, tokens: &[u32], bytes: &Range<usize>) -> Range<usize> {
        let mut at = 0;
        let mut found = tokens.len()..tokens.len();
        for (place, &token) in tokens.iter().enumerate() {
            if at >= bytes.end {
                found.end = place;
                break;
            }
            at += if self.is_special(token) {
                self.content(token).map_or(0, str::len)
            } else {
                self.bytes(token).len()
            };
            if at > bytes.start && found.start == tokens.len() {
                found.start = place;
            }
        }
        found
    }

    /// The text of tokens. Special ones are left out; bytes that are not UTF-8 become U+FFFD.
    #[must_use]
    pub fn decode(&self, tokens: &[u32]) -> String {
        let bytes: Vec<u8> = tokens.iter().flat_map(|token| self.bytes(*token)).copied().collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer")
            .field("vocab", &self.vocab())
            .field("bos", &self.bos)
            .field("eos", &self.eos)
            .field("add_bos", &self.add_bos)
            .finish_non_exhaustive()
    }
}
