//! What each token stands for.

use std::collections::HashMap;
use std::sync::LazyLock;

/// How a vocabulary writes bytes as text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Spelling {
    /// Each byte is one character of GPT-2's table.
    ByteLevel,
    /// Text as it is, `▁` for a space, and `<0x0A>` for a byte alone.
    SentencePiece,
}

/// The bytes of every token, end to end, and which tokens are special.
#[derive(Debug)]
pub(super) struct Pieces {
    bytes: Vec<u8>,
    /// Where each token's bytes end; they begin where the last one's end.
    ends: Vec<u32>,
    special: Vec<bool>,
    /// Special tokens by the text that is written for them.
    by_content: HashMap<String, u32>,
    by_token: HashMap<u32, String>,
    /// The token of each single byte.
    singles: Box<[Option<u32>; 256]>,
}

/// One token of a source's vocabulary.
#[derive(Debug, Clone, Copy)]
pub(super) enum Piece<'a> {
    /// Written in the vocabulary's spelling.
    Spelled(&'a str),
    /// Written as it is, and part of the text: an added token that is not special.
    Verbatim(&'a str),
    /// A mark of the model's own. Nothing where the row has no name.
    Special(&'a str),
}

impl Pieces {
    /// Lays out a vocabulary, token by token.
    pub(super) fn new<'a>(spelling: Spelling, pieces: impl IntoIterator<Item = Piece<'a>>) -> Self {
        let mut built = Self {
            bytes: Vec::new(),
            ends: Vec::new(),
            special: Vec::new(),
            by_content: HashMap::new(),
            by_token: HashMap::new(),
            singles: Box::new([None; 256]),
        };
        for (token, piece) in (0..).zip(pieces) {
            let start = built.bytes.len();
            match piece {
                Piece::Spelled(text) => unspell(spelling, text, &mut built.bytes),
                Piece::Verbatim(text) => built.bytes.extend_from_slice(text.as_bytes()),
                Piece::Special(text) => {
                    if !text.is_empty() {
                        built.by_content.insert(text.into(), token);
                        built.by_token.insert(token, text.into());
                    }
                }
            }
            if let [single] = built.bytes[start..] {
                built.singles[usize::from(single)].get_or_insert(token);
            }
            built.special.push(matches!(piece, Piece::Special(_)));
            built.ends.push(built.bytes.len() as u32);
        }
        built
    }

    pub(super) fn len(&self) -> usize {
        self.ends.len()
    }

    pub(super) fn bytes(&self, token: u32) -> &[u8] {
        let token = token as usize;
        let Some(end) = self.ends.get(token) else { return &[] };
        let start = if token == 0 { 0 } else { self.ends[token - 1] };
        &self.bytes[start as usize..*end as usize]
    }

    pub(super) fn is_special(&self, token: u32) -> bool {
        self.special.get(token as usize).copied().unwrap_or(true)
    }

    pub(super) fn special(&self, content: &str) -> Option<u32> {
        self.by_content.get(content).copied()
    }

    pub(super) fn content(&self, token: u32) -> Option<&str> {
        self.by_token.get(&token).map(String::as_str)
    }

    pub(super) fn specials(&self) -> impl Iterator<Item = (&str, u32)> {
        self.by_content.iter().map(|(content, token)| (content.as_str(), *token))
    }

    /// Bytes as one token each. Those that the vocabulary cannot say are left out.
    pub(super) fn spell(&self, bytes: &[u8]) -> Vec<u32> {
        bytes.iter().filter_map(|byte| self.singles[usize::from(*byte)]).collect()
    }
}

/// Appends the bytes that a token's text in the vocabulary stands for.
fn unspell(spelling: Spelling, text: &str, bytes: &mut Vec<u8>) {
    match spelling {
        Spelling::ByteLevel => {
            let start = bytes.len();
            for character in text.chars() {
                match BYTE_OF.get(&character) {
                    Some(byte) => bytes.push(*byte),
                    None => {
                        // Text that no byte-level merge could have made: it stands for itself.
                        bytes.truncate(start);
                        bytes.extend_from_slice(text.as_bytes());
                        return;
                    }
                }
            }
        }
        Spelling::SentencePiece => match single_byte(text) {
            Some(byte) => bytes.push(byte),
            None => bytes.extend_from_slice(text.replace('▁', " ").as_bytes()),
        },
    }
}

/// The byte that SentencePiece writes as `<0x0A>`.
fn single_byte(text: &str) -> Option<u8> {
    let digits = text.strip_prefix("<0x")?.strip_suffix('>')?;
    let hexadecimal = digits.len() == 2 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    if hexadecimal { u8::from_str_radix(digits, 16).ok() } else { None }
}

/// GPT-2's table (`bytes_to_unicode` in its `encoder.py`): printable Latin-1 stands for itself, the
/// other 68 bytes are U+0100 and on, in order.
static BYTE_OF: LazyLock<HashMap<char, u8>> = LazyLock::new(|| {
    let printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let (own, shifted): (Vec<u8>, Vec<u8>) = (0..=255u8).partition(|byte| printable(*byte));
    let own = own.into_iter().map(|byte| (char::from(byte), byte));
    own.chain(('\u{100}'..).zip(shifted)).collect()
});

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_level_table_covers_every_byte_once() {
        let mut bytes: Vec<u8> = BYTE_OF.values().copied().collect();
        bytes.sort_unstable();
        assert_eq!(bytes, (0..=255).collect::<Vec<u8>>());
        assert_eq!(BYTE_OF[&'Ġ'], b' ');
        assert_eq!(BYTE_OF[&'Ċ'], b'\n');
        assert_eq!(BYTE_OF[&'Ń'], 0xAD);
    }

    #[test]
    fn spellings_are_undone() {
        let bytes = |spelling, text| Pieces::new(spelling, [Piece::Spelled(text)]).bytes(0).to_vec();
        assert_eq!(bytes(Spelling::ByteLevel, "Ġcaf\u{c3}\u{a9}"), " café".as_bytes());
        assert_eq!(bytes(Spelling::ByteLevel, "你Ġ"), "你Ġ".as_bytes());
        assert_eq!(bytes(Spelling::SentencePiece, "▁a▁b"), b" a b");
        assert_eq!(bytes(Spelling::SentencePiece, "<0xE2>"), [0xE2]);
        assert_eq!(bytes(Spelling::SentencePiece, "<0x+1>"), b"<0x+1>");
    }

    #[test]
    fn special_tokens_have_no_bytes_and_outsiders_are_special() {
        let pieces = Pieces::new(Spelling::ByteLevel, [Piece::Special("<s>"), Piece::Spelled("a")]);
        assert_eq!((pieces.bytes(0), pieces.bytes(1), pieces.bytes(2)), (&b""[..], &b"a"[..], &b""[..]));
        assert_eq!([0, 1, 2].map(|token| pieces.is_special(token)), [true, false, true]);
        assert_eq!((pieces.special("<s>"), pieces.content(0)), (Some(0), Some("<s>")));
    }
}
