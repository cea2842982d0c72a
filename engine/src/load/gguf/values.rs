//! Metadata values, and the bounds-checked reading of them.

use crate::load::error::{At, LoadError};

/// A metadata value.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Value<'a> {
    /// Any of the unsigned widths.
    Unsigned(u64),
    /// Any of the signed widths.
    Signed(i64),
    /// f32 or f64.
    Float(f64),
    /// true or false.
    Bool(bool),
    /// UTF-8.
    Text(&'a str),
    /// Values of one kind.
    Array(Array<'a>),
}

/// An array, still as bytes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Array<'a> {
    pub(super) kind: Kind,
    /// How many elements.
    pub(crate) count: usize,
    bytes: &'a [u8],
}

/// The kinds of values, by GGUF's number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    U8 = 0,
    I8 = 1,
    U16 = 2,
    I16 = 3,
    U32 = 4,
    I32 = 5,
    F32 = 6,
    Bool = 7,
    Text = 8,
    Array = 9,
    U64 = 10,
    I64 = 11,
    F64 = 12,
}

impl Kind {
    fn new(number: u32) -> Option<Self> {
        use Kind::{Array, Bool, F32, F64, I8, I16, I32, I64, Text, U8, U16, U32, U64};
        let kinds = [U8, I8, U16, I16, U32, I32, F32, Bool, Text, Array, U64, I64, F64];
        kinds.get(number as usize).copied()
    }

    /// Bytes of one value; none for those whose length varies.
    const fn size(self) -> Option<usize> {
        match self {
            Kind::U8 | Kind::I8 | Kind::Bool => Some(1),
            Kind::U16 | Kind::I16 => Some(2),
            Kind::U32 | Kind::I32 | Kind::F32 => Some(4),
            Kind::U64 | Kind::I64 | Kind::F64 => Some(8),
            Kind::Text | Kind::Array => None,
        }
    }
}

/// Reads forward through the header.
pub(super) struct Cursor<'a> {
    pub(super) at: At<'a>,
    pub(super) bytes: &'a [u8],
    pub(super) position: usize,
}

impl<'a> Cursor<'a> {
    fn take(&mut self, count: u64, what: &str) -> Result<&'a [u8], LoadError> {
        let rest = &self.bytes[self.position..];
        match usize::try_from(count).ok().and_then(|count| rest.get(..count)) {
            Some(taken) => {
                self.position += taken.len();
                Ok(taken)
            }
            None => Err(LoadError::Truncated {
                path: self.at.0.into(),
                what: what.into(),
                needs: count,
                at: self.position as u64,
                length: self.bytes.len() as u64,
            }),
        }
    }

    pub(super) fn number<const N: usize>(&mut self, what: &str) -> Result<[u8; N], LoadError> {
        let taken = self.take(N as u64, what)?;
        let mut number = [0; N];
        number.copy_from_slice(taken);
        Ok(number)
    }

    pub(super) fn u32(&mut self, what: &str) -> Result<u32, LoadError> {
        self.number(what).map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self, what: &str) -> Result<u64, LoadError> {
        self.number(what).map(u64::from_le_bytes)
    }

    pub(super) fn text(&mut self, most: u64, what: &str) -> Result<&'a str, LoadError> {
        let length = self.u64(what)?;
        if length > most {
            return Err(self.at.invalid(what, format_args!("at most {most} bytes long"), length));
        }
        let bytes = self.take(length, what)?;
        std::str::from_utf8(bytes).map_err(|error| self.at.invalid(what, "UTF-8", error))
    }

    pub(super) fn kind(&mut self, what: &str) -> Result<Kind, LoadError> {
        let number = self.u32(what)?;
        Kind::new(number)
            .ok_or_else(|| self.at.invalid(format_args!("the type of {what}"), "0 to 12", number))
    }

    pub(super) fn value(&mut self, kind: Kind, what: &str) -> Result<Value<'a>, LoadError> {
        match kind.size() {
            Some(size) => {
                let bytes = self.take(size as u64, what)?;
                scalar(kind, bytes).ok_or_else(|| self.at.invalid(what, "0 or 1", bytes[0]))
            }
            None if kind == Kind::Text => self.text(u64::MAX, what).map(Value::Text),
            None => self.array(what).map(Value::Array),
        }
    }

    fn array(&mut self, what: &str) -> Result<Array<'a>, LoadError> {
        let kind = self.kind(what)?;
        let count = self.u64(what)?;
        let start = self.position;
        match kind.size() {
            Some(size) => {
                self.take(count.saturating_mul(size as u64), what)?;
            }
            None if kind == Kind::Text => {
                for _ in 0..count {
                    let length = self.u64(what)?;
                    self.take(length, what)?;
                }
            }
            None => return Err(self.at.invalid(what, "an array of plain values", "an array of arrays")),
        }
        // Fits: each element took at least a byte of the file.
        Ok(Array { kind, count: count as usize, bytes: &self.bytes[start..self.position] })
    }
}

/// A value of a fixed width; none for a bool that is neither 0 nor 1.
fn scalar(kind: Kind, bytes: &[u8]) -> Option<Value<'static>> {
    let mut wide = [0; 8];
    wide[..bytes.len()].copy_from_slice(bytes);
    let unsigned = u64::from_le_bytes(wide);
    // Sign extension: to the top, and back.
    let unused = 64 - 8 * bytes.len() as u32;
    let signed = ((unsigned << unused) as i64) >> unused;
    Some(match kind {
        Kind::U8 | Kind::U16 | Kind::U32 | Kind::U64 => Value::Unsigned(unsigned),
        Kind::I8 | Kind::I16 | Kind::I32 | Kind::I64 => Value::Signed(signed),
        Kind::F32 => Value::Float(f32::from_bits(unsigned as u32).into()),
        Kind::F64 => Value::Float(f64::from_bits(unsigned)),
        Kind::Bool if unsigned <= 1 => Value::Bool(unsigned == 1),
        Kind::Bool | Kind::Text | Kind::Array => return None,
    })
}

impl<'a> Array<'a> {
    /// The strings of an array of strings.
    ///
    /// # Errors
    /// When it holds another kind, or an element is not UTF-8.
    pub(crate) fn texts(self, at: At<'_>, key: &str) -> Result<Vec<&'a str>, LoadError> {
        if self.kind != Kind::Text {
            return Err(at.invalid(key, "an array of strings", format_args!("of {:?}", self.kind)));
        }
        let mut rest = self.bytes;
        let mut texts = Vec::with_capacity(self.count);
        for index in 0..self.count {
            // Lengths were checked when the array was read.
            let (length, tail) = rest.split_at(8);
            let length = length.iter().rev().fold(0, |sum, byte| sum << 8 | usize::from(*byte));
            let (bytes, tail) = tail.split_at(length);
            let text = std::str::from_utf8(bytes)
                .map_err(|error| at.invalid(format_args!("{key}[{index}]"), "UTF-8", error))?;
            texts.push(text);
            rest = tail;
        }
        Ok(texts)
    }

    /// The numbers of an array, whatever their width.
    ///
    /// # Errors
    /// When it holds strings.
    pub(crate) fn numbers(self, at: At<'_>, key: &str) -> Result<Vec<f64>, LoadError> {
        let wrong = || at.invalid(key, "an array of numbers", format_args!("of {:?}", self.kind));
        let size = self.kind.size().ok_or_else(wrong)?;
        let number = |bytes| match scalar(self.kind, bytes) {
            Some(Value::Unsigned(value)) => Ok(value as f64),
            Some(Value::Signed(value)) => Ok(value as f64),
            Some(Value::Float(value)) => Ok(value),
            _ => Err(wrong()),
        };
        self.bytes.chunks_exact(size).map(number).collect()
    }
}
