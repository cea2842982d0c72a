//! Tokens to text, as they come.

use std::sync::Arc;

use crate::tokenizer::Tokenizer;

/// Turns a stream of tokens into text without ever splitting a character.
///
/// All that [`push`](Self::push) and [`finish`](Self::finish) return, put
/// together, is what [`Tokenizer::decode`] returns for the same tokens.
#[derive(Debug, Clone)]
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    /// The start of a character whose other bytes have not come: at most three bytes.
    held: Vec<u8>,
}

impl Detokenizer {
    /// Starts a text.
    #[must_use]
    pub fn new(tokenizer: Arc<Tokenizer>) -> Self {
        Self { tokenizer, held: Vec::new() }
    }

    /// Takes a token; returns the text that is complete now, which may be empty.
    #[must_use]
    pub fn push(&mut self, token: u32) -> String {
        self.held.extend_from_slice(self.tokenizer.bytes(token));
        let mut text = String::new();
        let mut kept = 0;
        let mut chunks = self.held.utf8_chunks().peekable();
        while let Some(chunk) = chunks.next() {
            text.push_str(chunk.valid());
            let rest = chunk.invalid();
            if chunks.peek().is_none() && may_continue(rest) {
                kept = rest.len();
            } else if !rest.is_empty() {
                text.push(char::REPLACEMENT_CHARACTER);
            }
        }
        self.held.drain(..self.held.len() - kept);
        text
    }

    /// Ends the text: what is left of an unfinished character, as U+FFFD.
    #[must_use]
    pub fn finish(&mut self) -> String {
        let text = String::from_utf8_lossy(&self.held).into_owned();
        self.held.clear();
        text
    }
}

/// Whether bytes are the start of a character, which `from_utf8` says by naming no length.
fn may_continue(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;
    use crate::load::At;

    /// A token for every byte, then two of several bytes, and a special one.
    fn tokenizer() -> Arc<Tokenizer> {
        let mut vocab = serde_json::Map::new();
        for byte in 0..256 {
            vocab.insert(format!("<0x{byte:02X}>"), json!(byte));
        }
        vocab.insert("▁hi".into(), json!(256));
        vocab.insert("é".into(), json!(257));
        vocab.insert("</s>".into(), json!(258));
        let end = json!({
            "id": 258, "content": "</s>", "special": true, "normalized": false,
            "single_word": false, "lstrip": false, "rstrip": false,
        });
        let file = json!({
            "version": "1.0",
            "added_tokens": [end],
            "decoder": {"type": "Sequence", "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ]},
            "model": {"type": "BPE", "byte_fallback": true, "vocab": vocab, "merges": []},
        });
        let path = std::path::Path::new("tokenizer.json");
        let bytes = file.to_string();
        Arc::new(Tokenizer::from_json(At(path), bytes.as_bytes(), 260, &Value::Null, &[]).unwrap())
    }

    fn pushes(tokens: &[u32]) -> Vec<String> {
        let mut detokenizer = Detokenizer::new(tokenizer());
        let mut texts: Vec<String> = tokens.iter().map(|token| detokenizer.push(*token)).collect();
        texts.push(detokenizer.finish());
        texts
    }

    #[test]
    fn characters_come_whole() {
        assert_eq!(pushes(&[256, 0xF0, 0x9F, 0x98, 0x80, 257]), [" hi", "", "", "", "😀", "é", ""]);
        // A special token between the halves is nothing, as in decode.
        assert_eq!(pushes(&[0xC3, 258, 0xA9]), ["", "", "é", ""]);
    }

    #[test]
    fn broken_characters_are_replaced_once_they_cannot_be_mended() {
        assert_eq!(pushes(&[0xE2, 0x82, 0x41]), ["", "", "\u{fffd}A", ""]);
        assert_eq!(pushes(&[0xE2, 0xE2, 0x82, 0xAC]), ["", "\u{fffd}", "", "€", ""]);
        assert_eq!(pushes(&[0x80, 0xF0, 0x9F]), ["\u{fffd}", "", "", "\u{fffd}"]);
    }

    proptest! {
        #[test]
        fn pushes_together_are_decode(tokens in prop::collection::vec(prop_oneof![0u32..262, 0x80u32..0xF5], 0..24)) {
            prop_assert_eq!(pushes(&tokens).concat(), tokenizer().decode(&tokens));
        }
    }
}
