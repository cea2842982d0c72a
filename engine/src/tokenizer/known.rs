//! Tokens of what was said before.
//!
//! A conversation comes again with each of its turns, and with each question about it, and cutting it into tokens
//! costs more than a warm answer: most of the nine milliseconds that a probe's took over HTTP after 4,000 tokens. Special
//! tokens part a text into pieces that are cut one by one, so pieces are what is kept.

use std::sync::Arc;

use quick_cache::sync::Cache;
use quick_cache::{Equivalent, Weighter};
use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizerWrapper, Result};

use super::Tokenizer;

/// Bytes that texts and tokens take together, at most.
const MOST: u64 = 16 << 20;

/// Pieces that are shorter are cut again: it takes a few microseconds.
const LEAST: usize = 256;

/// What a piece takes in the table beside its text and its tokens, about.
const BESIDE: u64 = 96;

/// Pieces of text with their tokens, the ones used lately. Those of one salt are never found with another: how fast
/// a text is cut must not tell a tenant what others said.
#[derive(Debug)]
pub(crate) struct Known {
    pieces: Cache<Piece, Arc<[u32]>, Size>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Piece {
    salt: Box<str>,
    text: Box<str>,
}

/// A [`Piece`] to look for.
#[derive(Hash)]
struct Wanted<'a> {
    salt: &'a str,
    text: &'a str,
}

impl Equivalent<Piece> for Wanted<'_> {
    fn equivalent(&self, piece: &Piece) -> bool {
        *self.salt == *piece.salt && *self.text == *piece.text
    }
}

#[derive(Debug, Clone)]
struct Size;

impl Weighter<Piece, Arc<[u32]>> for Size {
    fn weight(&self, piece: &Piece, tokens: &Arc<[u32]>) -> u64 {
        (piece.salt.len() + piece.text.len() + size_of_val::<[u32]>(tokens)) as u64 + BESIDE
    }
}

impl Default for Known {
    fn default() -> Self {
        Self { pieces: Cache::with_weighter(MOST as usize / (8 * LEAST), MOST, Size) }
    }
}

impl Tokenizer {
    /// As [`encode`](Self::encode); pieces that are known are not cut again, and the others are known from then on.
    pub(crate) fn encode_known(&self, known: &Known, salt: &str, text: &str) -> Vec<u32> {
        if text.len() < LEAST || !self.inner.get_pre_tokenizer().is_none_or(cuts_pieces_alike) {
            return self.encode(text);
        }
        self.by_pieces(known, salt, text).unwrap_or_else(|_| self.encode(text))
    }

    fn by_pieces(&self, known: &Known, salt: &str, text: &str) -> Result<Vec<u32>> {
        let pieces =
            self.inner.get_added_vocabulary().extract_and_normalize(self.inner.get_normalizer(), text);
        let mut tokens = Vec::new();
        for (text, _, special) in pieces.get_splits(OffsetReferential::Original, OffsetType::None) {
            if let Some(special) = special {
                tokens.extend(special.iter().map(|token| token.id));
            } else if let Some(found) = known.pieces.get(&Wanted { salt, text }) {
                tokens.extend_from_slice(&found);
            } else {
                let cut = self.cut(PreTokenizedString::from(text))?;
                if text.len() >= LEAST {
                    known
                        .pieces
                        .insert(Piece { salt: salt.into(), text: text.into() }, cut.as_slice().into());
                }
                tokens.extend(cut);
            }
        }
        Ok(tokens)
    }
}

/// Whether what it makes of a piece is the same wherever the piece stands in a text.
fn cuts_pieces_alike(splitter: &PreTokenizerWrapper) -> bool {
    match splitter {
        PreTokenizerWrapper::ByteLevel(_)
        | PreTokenizerWrapper::Digits(_)
        | PreTokenizerWrapper::Split(_)
        | PreTokenizerWrapper::Whitespace(_)
        | PreTokenizerWrapper::WhitespaceSplit(_) => true,
        PreTokenizerWrapper::Sequence(parts) => parts.as_ref().iter().all(cuts_pieces_alike),
        // Metaspace may look for a text's beginning.
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use proptest::prelude::*;

    use super::*;
    use crate::load::Checkpoint;

    fn tokenizer() -> Arc<Tokenizer> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/qwen3-tiny");
        Checkpoint::open(&folder).expect("the test model loads").tokenizer
    }

    fn conversation(turns: &[&str]) -> String {
        turns.iter().map(|turn| format!("<|im_start|>user\n{turn}<|im_end|>\n")).collect()
    }

    #[test]
    fn a_text_has_the_same_tokens_new_and_known() {
        let (tokenizer, known) = (tokenizer(), Known::default());
        let long = "Where does the night begin, and who counts the hours? ".repeat(9);
        let texts = [
            long.clone(),
            conversation(&[&long, "short", &long]),
            conversation(&[&format!("  {long}\n\n"), &format!("{long}<|im_end|><|im_end|> {long}")]),
            format!("{long}<|im_start|>{long}naïve 日本語 🏳️‍🌈\r\n\t{long}"),
            "<|im_end|>".repeat(40),
        ];
        for text in &texts {
            let tokens = tokenizer.encode(text);
            for _ in 0..2 {
                assert_eq!(tokenizer.encode_known(&known, "a", text), tokens, "{text}");
            }
        }
    }

    proptest! {
        #[test]
        fn any_text_has_the_tokens_that_it_would_have(
            words in prop::collection::vec(r"(\PC{0,40}|<\|im_(start|end)\|>|\s{1,3}|[a-z ]{260,300})", 1..12),
        ) {
            thread_local!(static TOKENIZER: (Arc<Tokenizer>, Known) = (tokenizer(), Known::default()));
            let text = words.concat();
            TOKENIZER.with(|(tokenizer, known)| {
                assert_eq!(tokenizer.encode_known(known, "", &text), tokenizer.encode(&text));
            });
        }
    }

    #[test]
    fn a_turn_is_known_in_another_conversation_but_not_to_another_tenant() {
        let (tokenizer, known) = (tokenizer(), Known::default());
        let long = "The ferry leaves at noon. ".repeat(20);
        tokenizer.encode_known(&known, "a", &conversation(&[&long]));
        let before = known.pieces.len();
        assert!(before > 0);
        tokenizer.encode_known(&known, "a", &conversation(&["short", &long]));
        assert_eq!(known.pieces.len(), before, "one tenant's turn is kept once");
        tokenizer.encode_known(&known, "b", &conversation(&[&long]));
        assert_eq!(known.pieces.len(), 2 * before, "another tenant's copy is another");
    }

    #[test]
    fn no_more_is_kept_than_there_is_room_for() {
        let (tokenizer, known) = (tokenizer(), Known::default());
        for n in 0..600 {
            tokenizer.encode_known(&known, "a", &format!("{n} {}", "leaves and twigs ".repeat(1000)));
        }
        assert!(known.pieces.weight() <= MOST, "{}", known.pieces.weight());
        assert!(known.pieces.len() > 10, "{}", known.pieces.len());
    }

    #[test]
    fn a_splitter_that_looks_for_the_beginning_is_told_apart() {
        use tokenizers::pre_tokenizers::{byte_level::ByteLevel, metaspace::Metaspace, sequence::Sequence};
        let bytes = || PreTokenizerWrapper::from(ByteLevel::default());
        let meta = || PreTokenizerWrapper::from(Metaspace::default());
        assert!(cuts_pieces_alike(&Sequence::new(vec![bytes(), bytes()]).into()));
        assert!(!cuts_pieces_alike(&meta()));
        assert!(!cuts_pieces_alike(&Sequence::new(vec![bytes(), meta()]).into()));
    }
}
