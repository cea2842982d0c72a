//! Weight formats as files hold them, and the scalar reference that reads each.
//!
//! The quantised layouts are ggml's (`ggml-common.h` and `ggml-quants.c` of
//! llama.cpp): a row is a run of blocks, every number little-endian.

use std::fmt;

use half::{bf16, f16};

use crate::KernelError;

/// How a file packs the numbers of a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Format {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// The upper half of an IEEE single.
    BF16,
    /// 32 numbers `d·(q − 8)`: f16 d, 16 bytes of nibbles.
    Q4_0,
    /// 32 numbers `d·q + m`: f16 d, f16 m, 16 bytes of nibbles.
    Q4_1,
    /// 32 numbers `d·(q − 16)`: f16 d, 32 fifth bits, 16 bytes of nibbles.
    Q5_0,
    /// 32 numbers `d·q`: f16 d, 32 signed bytes.
    Q8_0,
    /// 256 numbers in eight groups, `d·scale·q − dmin·min`: f16 d, f16 dmin,
    /// 12 bytes of 6-bit scales and mins, 128 bytes of nibbles.
    Q4K,
    /// 256 numbers in sixteen groups, `d·scale·(q − 32)`: 128 bytes of low
    /// nibbles, 64 bytes of upper bit pairs, 16 signed scales, f16 d.
    Q6K,
}

impl Format {
    /// The name that GGUF tools print.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::BF16 => "BF16",
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q5_0 => "Q5_0",
            Self::Q8_0 => "Q8_0",
            Self::Q4K => "Q4_K",
            Self::Q6K => "Q6_K",
        }
    }

    /// Numbers in a block.
    #[must_use]
    pub const fn block(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::BF16 => 1,
            Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q8_0 => 32,
            Self::Q4K | Self::Q6K => 256,
        }
    }

    /// Bytes in a block.
    #[must_use]
    pub const fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q8_0 => 34,
            Self::Q4K => 144,
            Self::Q6K => 210,
        }
    }

    /// Bytes of a row of `cols` numbers, which must divide into blocks.
    #[must_use]
    pub const fn row_bytes(self, cols: usize) -> usize {
        cols / self.block() * self.block_bytes()
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A weight matrix as a file holds it: `rows` outputs of `cols` inputs each,
/// row after row.
#[derive(Debug, Clone, Copy)]
pub struct HostMatrix<'a> {
    format: Format,
    rows: usize,
    cols: usize,
    data: &'a [u8],
}

impl<'a> HostMatrix<'a> {
    /// Takes the bytes of a matrix of `rows` outputs and `cols` inputs. Any
    /// alignment will do.
    ///
    /// # Errors
    /// [`KernelError::Shape`] without a row or a column,
    /// [`KernelError::Blocks`] when rows do not divide into blocks,
    /// [`KernelError::Size`] when `data` has another length than the shape.
    pub fn new(format: Format, rows: usize, cols: usize, data: &'a [u8]) -> Result<Self, KernelError> {
        for (what, got) in [("a matrix's rows", rows), ("a matrix's columns", cols)] {
            if got == 0 {
                return Err(KernelError::Shape { what, expected: "at least 1", got });
            }
        }
        if !cols.is_multiple_of(format.block()) {
            return Err(KernelError::Blocks { format: format.name(), block: format.block(), cols });
        }
        // The shape is a file's word: it may overflow.
        let expected = (cols / format.block())
            .checked_mul(format.block_bytes())
            .and_then(|row| row.checked_mul(rows))
            .unwrap_or(usize::MAX);
        if data.len() != expected {
            return Err(KernelError::Size { format: format.name(), rows, cols, expected, got: data.len() });
        }
        Ok(Self { format, rows, cols, data })
    }

    /// How the numbers are packed.
    #[must_use]
    pub fn format(&self) -> Format {
        self.format
    }

    /// Outputs.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Inputs.
    #[must_use]
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The bytes of one row.
    ///
    /// # Panics
    /// When there is no such row.
    #[must_use]
    pub fn row(&self, row: usize) -> &'a [u8] {
        let bytes = self.format.row_bytes(self.cols);
        &self.data[row * bytes..][..bytes]
    }

    /// Unpacks one row to `cols` numbers: the reference of each format.
    ///
    /// # Panics
    /// When there is no such row, or `out` has another length than a row.
    pub fn dequantize_row(&self, row: usize, out: &mut [f32]) {
        assert_eq!(out.len(), self.cols, "numbers of a row");
        let unpack = match self.format {
            Format::F32 => |b: &[u8], w: &mut [f32]| w[0] = f32::from_le_bytes([b[0], b[1], b[2], b[3]]),
            Format::F16 => |b: &[u8], w: &mut [f32]| w[0] = half_at(b, 0),
            Format::BF16 => |b: &[u8], w: &mut [f32]| w[0] = bf16::from_le_bytes([b[0], b[1]]).to_f32(),
            Format::Q4_0 => q4_0,
            Format::Q4_1 => q4_1,
            Format::Q5_0 => q5_0,
            Format::Q8_0 => q8_0,
            Format::Q4K => q4_k,
            Format::Q6K => q6_k,
        };
        let blocks = self.row(row).chunks_exact(self.format.block_bytes());
        for (block, numbers) in blocks.zip(out.chunks_exact_mut(self.format.block())) {
            unpack(block, numbers);
        }
    }
}

/// The f16 at byte `at`.
pub(crate) fn half_at(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

fn q4_0(b: &[u8], w: &mut [f32]) {
    let d = half_at(b, 0);
    for (j, &byte) in b[2..].iter().enumerate() {
        w[j] = d * (f32::from(byte & 15) - 8.0);
        w[j + 16] = d * (f32::from(byte >> 4) - 8.0);
    }
}

fn q4_1(b: &[u8], w: &mut [f32]) {
    let (d, m) = (half_at(b, 0), half_at(b, 2));
    for (j, &byte) in b[4..].iter().enumerate() {
        w[j] = d * f32::from(byte & 15) + m;
        w[j + 16] = d * f32::from(byte >> 4) + m;
    }
}

fn q5_0(b: &[u8], w: &mut [f32]) {
    let d = half_at(b, 0);
    let fifth = u32::from_le_bytes([b[2], b[3], b[4], b[5]]);
    for (j, &byte) in b[6..].iter().enumerate() {
        let low = byte & 15 | ((fifth >> j & 1) as u8) << 4;
        let high = byte >> 4 | ((fifth >> (j + 16) & 1) as u8) << 4;
        w[j] = d * (f32::from(low) - 16.0);
        w[j + 16] = d * (f32::from(high) - 16.0);
    }
}

fn q8_0(b: &[u8], w: &mut [f32]) {
    let d = half_at(b, 0);
    for (w, &byte) in w.iter_mut().zip(&b[2..]) {
        *w = d * f32::from(byte.cast_signed());
    }
}

/// Scale and min of group `group` of eight, 6 bits each in 12 bytes.
pub(crate) fn q4_k_scale_min(packed: &[u8], group: usize) -> (u8, u8) {
    if group < 4 {
        (packed[group] & 63, packed[group + 4] & 63)
    } else {
        let low = packed[group + 4];
        (low & 15 | packed[group - 4] >> 6 << 4, low >> 4 | packed[group] >> 6 << 4)
    }
}

fn q4_k(b: &[u8], w: &mut [f32]) {
    let (d, dmin) = (half_at(b, 0), half_at(b, 2));
    for group in 0..8 {
        let (scale, min) = q4_k_scale_min(&b[4..16], group);
        let (scale, min) = (d * f32::from(scale), dmin * f32::from(min));
        // Two groups share 32 bytes: the even one has the low nibbles.
        for (j, &byte) in b[16 + group / 2 * 32..][..32].iter().enumerate() {
            w[group * 32 + j] = scale * f32::from(byte >> (group % 2 * 4) & 15) - min;
        }
    }
}

fn q6_k(b: &[u8], w: &mut [f32]) {
    let (low, high, scales, d) = (&b[..128], &b[128..192], &b[192..208], half_at(b, 208));
    for (i, w) in w.iter_mut().enumerate() {
        // Each half of 128 numbers is four runs of 32 over the same 32 bytes
        // of bit pairs and 64 bytes of nibbles.
        let (half, run, l) = (i / 128, i % 128 / 32, i % 32);
        let nibble = low[half * 64 + run % 2 * 32 + l] >> (run / 2 * 4) & 15;
        let q = nibble | (high[half * 32 + l] >> (run * 2) & 3) << 4;
        *w = d * f32::from(scales[i / 16].cast_signed()) * (f32::from(q) - 32.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: [u8; 2] = 0x3c00u16.to_le_bytes();
    const TWO: [u8; 2] = 0x4000u16.to_le_bytes();

    fn unpack(format: Format, block: &[u8]) -> Vec<f32> {
        let matrix = HostMatrix::new(format, 1, format.block(), block).unwrap();
        let mut out = vec![f32::NAN; format.block()];
        matrix.dequantize_row(0, &mut out);
        out
    }

    #[test]
    fn plain_numbers() {
        let data: Vec<u8> = [1.5f32, -2.0].iter().flat_map(|v| v.to_le_bytes()).collect();
        let matrix = HostMatrix::new(Format::F32, 2, 1, &data).unwrap();
        let mut out = [0.0];
        matrix.dequantize_row(1, &mut out);
        assert_eq!(out, [-2.0]);
        assert_eq!(unpack(Format::F16, &TWO), [2.0]);
        assert_eq!(unpack(Format::BF16, &0xc040u16.to_le_bytes()), [-3.0]);
    }

    #[test]
    fn q4_blocks() {
        let nibbles: Vec<u8> = (0..16).map(|j| j | (15 - j) << 4).collect();
        let w = unpack(Format::Q4_0, &[&TWO[..], &nibbles].concat());
        assert_eq!((w[0], w[3], w[15]), (-16.0, -10.0, 14.0));
        assert_eq!((w[16], w[31]), (14.0, -16.0));
        let w = unpack(Format::Q4_1, &[&TWO[..], &ONE, &nibbles].concat());
        assert_eq!((w[0], w[3], w[16], w[31]), (1.0, 7.0, 31.0, 1.0));
    }

    #[test]
    fn q5_block() {
        let mut block = [&ONE[..], &0x8000_0002u32.to_le_bytes(), &[0u8; 16]].concat();
        block[6] = 0xa3;
        let w = unpack(Format::Q5_0, &block);
        // Nibble 3 without its fifth bit; bit 1 alone; nibble 10; bit 31 alone.
        assert_eq!((w[0], w[1], w[16], w[31]), (-13.0, 0.0, -6.0, 0.0));
        assert_eq!(w[2], -16.0);
    }

    #[test]
    fn q8_block() {
        let mut block = [&TWO[..], &[0u8; 32]].concat();
        (block[2], block[33]) = (0x80, 0x7f);
        let w = unpack(Format::Q8_0, &block);
        assert_eq!((w[0], w[1], w[31]), (-256.0, 0.0, 254.0));
    }

    #[test]
    fn q4_k_block() {
        let mut block = vec![0u8; 144];
        block[0..2].copy_from_slice(&ONE);
        block[2..4].copy_from_slice(&TWO);
        // Group 1: scale 5, min 3. Group 6: scale 0b11_0010, min 0b01_0111.
        block[4 + 1] = 5;
        block[4 + 5] = 3;
        block[4 + 10] = 0x72;
        block[4 + 2] = 0b1100_0000;
        block[4 + 6] = 0b0100_0000;
        block[16] = 0x94;
        block[16 + 96] = 0x07;
        let w = unpack(Format::Q4K, &block);
        assert_eq!((w[0], w[32], w[33]), (0.0, 5.0 * 9.0 - 6.0, -6.0));
        assert_eq!((w[192], w[193]), (50.0 * 7.0 - 2.0 * 23.0, -46.0));
    }

    #[test]
    fn q6_k_block() {
        let mut block = vec![0u8; 210];
        block[208..].copy_from_slice(&TWO);
        block[192] = 3;
        block[192 + 15] = 0xfe;
        // Number 0: low 7, upper pair 1. Number 255: low 2, upper pair 3.
        block[0] = 0x07;
        block[128] = 0x01;
        block[127] = 0x20;
        block[191] = 0xc0;
        let w = unpack(Format::Q6K, &block);
        assert_eq!(w[0], 2.0 * 3.0 * (23.0 - 32.0));
        assert_eq!(w[1], 2.0 * 3.0 * -32.0);
        assert_eq!(w[16], 0.0);
        assert_eq!(w[255], 2.0 * -2.0 * (50.0 - 32.0));
    }

    #[test]
    fn wrong_shapes_are_named() {
        let error = HostMatrix::new(Format::Q4K, 2, 100, &[]).unwrap_err();
        assert_eq!(error.to_string(), "Q4_K packs 256 numbers a block, which does not divide rows of 100");
        let error = HostMatrix::new(Format::Q8_0, 2, 64, &[0; 5]).unwrap_err();
        assert_eq!(error.to_string(), "a 2 x 64 matrix in Q8_0 needs 136 bytes, got 5");
        assert!(matches!(HostMatrix::new(Format::F32, 0, 1, &[]), Err(KernelError::Shape { got: 0, .. })));
        assert!(matches!(
            HostMatrix::new(Format::F32, usize::MAX, 2, &[]),
            Err(KernelError::Size { expected: usize::MAX, .. })
        ));
    }
}
