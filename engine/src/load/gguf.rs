//! GGUF, the single-file format of llama.cpp.
//!
//! A magic, a version, typed key-value metadata, a table of tensors, and one
//! aligned blob that holds their bytes. The format is described in ggml's
//! `docs/gguf.md`; versions 2 and 3 are read, little-endian.
//!
//! Files come from strangers. Every count, length and offset is checked against
//! the file's size before it is used, and nothing is copied here: metadata
//! values and arrays are slices of the mapped file.

mod values;

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use forkpoint_kernels::Format;

use super::Tensor;
use super::error::{At, LoadError};
use values::{Array, Cursor, Value};

/// Metadata keys that a file may have. Real files have about 40.
const MAX_KEYS: u64 = 1 << 16;
/// Tensors that a file may have. Llama 3.1 405B has 1138.
const MAX_TENSORS: u64 = 1 << 16;
/// Bytes of a key or of a tensor's name.
const MAX_NAME: u64 = 1 << 10;
/// Dimensions of a tensor.
const MAX_DIMENSIONS: u32 = 4;
/// The largest alignment of tensors that is taken seriously.
const MAX_ALIGNMENT: u64 = 1 << 16;
/// Where tensors are aligned when `general.alignment` says nothing.
const DEFAULT_ALIGNMENT: u64 = 32;

/// A parsed header. Borrows from the mapped file.
#[derive(Debug)]
pub(crate) struct Gguf<'a> {
    at: At<'a>,
    metadata: HashMap<&'a str, Value<'a>>,
    /// The tensor table, by name, with byte ranges of the whole file.
    pub(crate) tensors: BTreeMap<String, Tensor>,
}

impl<'a> Gguf<'a> {
    /// Reads the header of a file and checks its tensor table.
    ///
    /// # Errors
    /// When the file is not GGUF, is damaged, or stores a tensor in a format
    /// that the kernels do not have.
    pub(crate) fn parse(at: At<'a>, bytes: &'a [u8]) -> Result<Self, LoadError> {
        let mut cursor = Cursor { at, bytes, position: 0 };
        let magic: [u8; 4] = cursor.number("the magic")?;
        if magic != *b"GGUF" {
            return Err(at.invalid("the magic", "\"GGUF\"", format_args!("{:?}", magic.escape_ascii())));
        }
        let version = cursor.u32("the version")?;
        if !matches!(version, 2 | 3) {
            let order = if matches!(version.swap_bytes(), 1..=3) { " (big-endian)" } else { "" };
            return Err(at.unsupported("GGUF version", format_args!("{version}{order}"), "2, 3"));
        }
        let tensor_count = bounded(at, "the number of tensors", cursor.u64("the header")?, MAX_TENSORS)?;
        let key_count = bounded(at, "the number of metadata keys", cursor.u64("the header")?, MAX_KEYS)?;

        let mut gguf = Self { at, metadata: HashMap::new(), tensors: BTreeMap::new() };
        for _ in 0..key_count {
            let key = cursor.text(MAX_NAME, "a metadata key")?;
            let kind = cursor.kind(key)?;
            let value = cursor.value(kind, key)?;
            if gguf.metadata.insert(key, value).is_some() {
                return Err(at.invalid("metadata", "keys that differ", format_args!("{key} twice")));
            }
        }
        gguf.read_tensors(&mut cursor, tensor_count)?;
        Ok(gguf)
    }

    fn read_tensors(&mut self, cursor: &mut Cursor<'a>, count: u64) -> Result<(), LoadError> {
        let at = self.at;
        let alignment = self.unsigned("general.alignment")?.unwrap_or(DEFAULT_ALIGNMENT);
        if !alignment.is_power_of_two() || alignment > MAX_ALIGNMENT {
            let expected = format_args!("a power of two up to {MAX_ALIGNMENT}").to_string();
            return Err(at.invalid("general.alignment", expected, alignment));
        }

        // Offsets count from the blob's start, which is known once the table has been read.
        let mut offsets = Vec::new();
        for _ in 0..count {
            let name = cursor.text(MAX_NAME, "a tensor's name")?;
            let (tensor, offset) = read_tensor(cursor, name)?;
            if offset % alignment != 0 {
                let expected = format_args!("a multiple of {alignment}").to_string();
                return Err(at.invalid(format_args!("the offset of tensor {name}"), expected, offset));
            }
            offsets.push((name, offset));
            if self.tensors.insert(name.into(), tensor).is_some() {
                return Err(at.invalid(
                    "the tensor table",
                    "names that differ",
                    format_args!("{name} twice"),
                ));
            }
        }

        let blob = (cursor.position as u64).next_multiple_of(alignment);
        let length = cursor.bytes.len() as u64;
        let mut ranges: Vec<(Range<usize>, &str)> = Vec::with_capacity(offsets.len());
        for (name, offset) in offsets {
            let Some(tensor) = self.tensors.get_mut(name) else { continue };
            let size = tensor.range.len() as u64;
            let start = blob.saturating_add(offset);
            if start.saturating_add(size) > length {
                let what = format!("tensor {name}");
                return Err(LoadError::Truncated { path: at.0.into(), what, needs: size, at: start, length });
            }
            tensor.range = start as usize..(start + size) as usize;
            ranges.push((tensor.range.clone(), name));
        }
        ranges.sort_unstable_by_key(|(range, _)| range.start);
        for pair in ranges.windows(2) {
            if pair[0].0.end > pair[1].0.start {
                let what = format_args!("tensor {}", pair[1].1).to_string();
                return Err(at.invalid(
                    what,
                    "apart from its neighbours",
                    format_args!("inside {}", pair[0].1),
                ));
            }
        }
        Ok(())
    }

    /// A string; none where the key is absent.
    ///
    /// # Errors
    /// When the value is of another type.
    pub(crate) fn text(&self, key: &str) -> Result<Option<&'a str>, LoadError> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(Value::Text(text)) => Ok(Some(text)),
            Some(other) => Err(self.wrong(key, "a string", *other)),
        }
    }

    /// A number that is whole and not negative.
    ///
    /// # Errors
    /// When the value is of another type, or negative.
    pub(crate) fn unsigned(&self, key: &str) -> Result<Option<u64>, LoadError> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(Value::Unsigned(value)) => Ok(Some(*value)),
            Some(Value::Signed(value)) if *value >= 0 => Ok(Some(*value as u64)),
            Some(other) => Err(self.wrong(key, "a whole number", *other)),
        }
    }

    /// A number, with or without a fraction.
    ///
    /// # Errors
    /// When the value is of another type.
    pub(crate) fn float(&self, key: &str) -> Result<Option<f64>, LoadError> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(Value::Float(value)) => Ok(Some(*value)),
            Some(Value::Unsigned(value)) => Ok(Some(*value as f64)),
            Some(Value::Signed(value)) => Ok(Some(*value as f64)),
            Some(other) => Err(self.wrong(key, "a number", *other)),
        }
    }

    /// true or false.
    ///
    /// # Errors
    /// When the value is of another type.
    pub(crate) fn bool(&self, key: &str) -> Result<Option<bool>, LoadError> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(Value::Bool(value)) => Ok(Some(*value)),
            Some(other) => Err(self.wrong(key, "true or false", *other)),
        }
    }

    /// An array.
    ///
    /// # Errors
    /// When the value is of another type.
    pub(crate) fn array(&self, key: &str) -> Result<Option<Array<'a>>, LoadError> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(Value::Array(array)) => Ok(Some(*array)),
            Some(other) => Err(self.wrong(key, "an array", *other)),
        }
    }

    /// The names of all metadata.
    pub(crate) fn keys(&self) -> impl Iterator<Item = &'a str> {
        self.metadata.keys().copied()
    }

    /// The file, for errors.
    pub(crate) fn at(&self) -> At<'a> {
        self.at
    }

    fn wrong(&self, key: &str, expected: &str, got: Value<'_>) -> LoadError {
        match got {
            Value::Array(array) => {
                self.at.invalid(key, expected, format_args!("an array of {} {:?}", array.count, array.kind))
            }
            other => self.at.invalid(key, expected, format_args!("{other:?}")),
        }
    }
}

/// One row of the tensor table, and its offset in the blob. The range's length is the tensor's size.
fn read_tensor(cursor: &mut Cursor<'_>, name: &str) -> Result<(Tensor, u64), LoadError> {
    let at = cursor.at;
    let what = format!("tensor {name}");
    let dimensions = cursor.u32(&what)?;
    if !(1..=MAX_DIMENSIONS).contains(&dimensions) {
        return Err(at.invalid(format_args!("{what}'s dimensions"), "1 to 4 in number", dimensions));
    }
    let mut shape = Vec::new();
    for _ in 0..dimensions {
        shape.push(cursor.u64(&what)?);
    }
    let number = cursor.u32(&what)?;
    let format = format(number).ok_or_else(|| {
        at.unsupported(format_args!("the type of {what},"), type_name(number), supported_formats())
    })?;
    let offset = cursor.u64(&what)?;

    let columns = shape[0];
    let elements = shape.iter().try_fold(1u64, |product, size| product.checked_mul(*size));
    let block = format.block() as u64;
    let size = elements
        .filter(|elements| *elements > 0 && columns % block == 0)
        .and_then(|elements| (elements / block).checked_mul(format.block_bytes() as u64))
        .and_then(|size| usize::try_from(size).ok());
    let Some(size) = size else {
        let expected = format!("sizes above 0, the first a multiple of {block}, that fit in memory");
        return Err(at.invalid(format_args!("{what}'s shape"), expected, format_args!("{shape:?}")));
    };
    // GGUF writes the fastest-moving dimension first; here rows come first. Each fits: the product does.
    let shape = shape.iter().rev().map(|size| *size as usize).collect();
    Ok((Tensor { format, shape, file: 0, range: 0..size }, offset))
}

fn bounded(at: At<'_>, what: &str, value: u64, most: u64) -> Result<u64, LoadError> {
    if value <= most { Ok(value) } else { Err(at.invalid(what, format_args!("at most {most}"), value)) }
}

/// The formats that the kernels have, by ggml's number (`enum ggml_type`).
const FORMATS: [(u32, Format); 9] = [
    (0, Format::F32),
    (1, Format::F16),
    (30, Format::BF16),
    (2, Format::Q4_0),
    (3, Format::Q4_1),
    (6, Format::Q5_0),
    (8, Format::Q8_0),
    (12, Format::Q4K),
    (14, Format::Q6K),
];

fn format(number: u32) -> Option<Format> {
    FORMATS.iter().find(|(known, _)| *known == number).map(|(_, format)| *format)
}

fn supported_formats() -> String {
    FORMATS.map(|(_, format)| format.to_string()).join(", ")
}

/// ggml's name for a type that has no kernel here.
fn type_name(number: u32) -> String {
    let name = match number {
        7 => "Q5_1",
        9 => "Q8_1",
        10 => "Q2_K",
        11 => "Q3_K",
        13 => "Q5_K",
        15 => "Q8_K",
        16 => "IQ2_XXS",
        17 => "IQ2_XS",
        18 => "IQ3_XXS",
        19 => "IQ1_S",
        20 => "IQ4_NL",
        21 => "IQ3_S",
        22 => "IQ2_S",
        23 => "IQ4_XS",
        24 => "I8",
        25 => "I16",
        26 => "I32",
        27 => "I64",
        28 => "F64",
        29 => "IQ1_M",
        34 => "TQ1_0",
        35 => "TQ2_0",
        39 => "MXFP4",
        _ => return format!("number {number}"),
    };
    name.into()
}
