//! Weight matrices in the layout that the kernels read.
//!
//! A matrix is a run of panels of 16 outputs. A quantised panel is a run of
//! blocks of 32 inputs, each `{16 d, 16 m, 16 × 32 q}` (scales first, per group
//! of inputs), in which every weight is `d·q + m`, or `d·(q − OFFSET)` for the
//! formats that store no minimum. The q of one output stand four to a dword,
//! so that a lane of a dot-product instruction is an output:
//!
//! * bytes: byte `64c + 4o + j` is output `o`, input `4c + j`;
//! * nibbles: byte `64c + 4o + j` holds inputs `8c + j` (low) and `8c + 4 + j`.
//!
//! Repacking keeps each quantised number and scale exactly: nothing is
//! quantised again. A plain panel is `[input][16 outputs]` in the file's type; of
//! bf16 two inputs share a lane, `[input / 2][16 outputs][2]`, the last of an odd
//! number with a zero.

use std::ops::Range;

use half::{bf16, f16};

use super::{arena::Arena, pool::Pool};
use crate::{
    Format, HostMatrix, KernelError,
    format::{half_at, q4_k_scale_min},
};

/// Outputs in a panel.
pub(crate) const LANES: usize = 16;
/// Inputs in a block of a quantised panel.
pub(crate) const BLOCK: usize = 32;

/// How a quantised format's blocks are packed in a panel.
pub(crate) trait Packing {
    /// Two q to a byte.
    const NIBBLES: bool = false;
    /// Scales of an output in a block.
    const GROUPS: usize = 1;
    /// Scales are f16, else f32.
    const HALF: bool = true;
    /// Weights are `d·q + m`, else `d·(q − OFFSET)`.
    const AFFINE: bool = false;
    /// What is taken from q.
    const OFFSET: u8 = 0;
    /// The largest q.
    const MOST: u8;

    /// Bytes of one scale.
    const SCALE: usize = if Self::HALF { 2 } else { 4 };
    /// Where the minima start in a block.
    const MINIMA: usize = Self::GROUPS * LANES * Self::SCALE;
    /// Where the q start in a block.
    const QUANTS: usize = Self::MINIMA * if Self::AFFINE { 2 } else { 1 };
    /// Bytes of a block.
    const BYTES: usize = Self::QUANTS + LANES * BLOCK / if Self::NIBBLES { 2 } else { 1 };
}

pub(crate) struct Q4_0;
pub(crate) struct Q4_1;
pub(crate) struct Q5_0;
pub(crate) struct Q8_0;
pub(crate) struct Q4K;
pub(crate) struct Q6K;

impl Packing for Q4_0 {
    const MOST: u8 = 15;
    const NIBBLES: bool = true;
    const OFFSET: u8 = 8;
}
impl Packing for Q4_1 {
    const MOST: u8 = 15;
    const NIBBLES: bool = true;
    const AFFINE: bool = true;
}
impl Packing for Q5_0 {
    const MOST: u8 = 31;
    const OFFSET: u8 = 16;
}
impl Packing for Q8_0 {
    const MOST: u8 = 255;
    const OFFSET: u8 = 128;
}
/// A group's scale is a product of the file's two: too long for f16.
impl Packing for Q4K {
    const MOST: u8 = 15;
    const NIBBLES: bool = true;
    const AFFINE: bool = true;
    const HALF: bool = false;
}
impl Packing for Q6K {
    const MOST: u8 = 63;
    const GROUPS: usize = 2;
    const HALF: bool = false;
    const OFFSET: u8 = 32;
}

/// Evaluates `$quantised` with `$P` set to the format's [`Packing`], or
/// `$plain` for formats that are not quantised.
macro_rules! by_packing {
    ($format:expr, $P:ident => $quantised:expr, _ => $plain:expr) => {
        match $format {
            $crate::Format::Q4_0 => {
                type $P = $crate::cpu::weights::Q4_0;
                $quantised
            }
            $crate::Format::Q4_1 => {
                type $P = $crate::cpu::weights::Q4_1;
                $quantised
            }
            $crate::Format::Q5_0 => {
                type $P = $crate::cpu::weights::Q5_0;
                $quantised
            }
            $crate::Format::Q8_0 => {
                type $P = $crate::cpu::weights::Q8_0;
                $quantised
            }
            $crate::Format::Q4K => {
                type $P = $crate::cpu::weights::Q4K;
                $quantised
            }
            $crate::Format::Q6K => {
                type $P = $crate::cpu::weights::Q6K;
                $quantised
            }
            $crate::Format::F32 | $crate::Format::F16 | $crate::Format::BF16 => $plain,
        }
    };
}
pub(crate) use by_packing;

/// A weight matrix, repacked.
#[derive(Debug)]
pub struct Matrix {
    format: Format,
    outputs: usize,
    inputs: usize,
    panel_bytes: usize,
    data: Arena<u8>,
}

impl Matrix {
    pub(super) fn new(source: &HostMatrix<'_>, pool: &mut Pool) -> Result<Self, KernelError> {
        let (format, outputs, inputs) = (source.format(), source.rows(), source.cols());
        let panel_bytes = by_packing!(format, P => inputs / BLOCK * P::BYTES,
            _ => inputs.next_multiple_of(shared(format)) * LANES * format.block_bytes());
        let mut data = Arena::new(outputs.div_ceil(LANES).saturating_mul(panel_bytes))?;
        pool.chunks(data.as_mut_slice(), panel_bytes, usize::MAX, &|panel, bytes| {
            for lane in 0..LANES.min(outputs - panel * LANES) {
                let row = source.row(panel * LANES + lane);
                by_packing!(format, P => pack::<P>(format, row, lane, bytes),
                    _ => pack_plain(format, row, lane, bytes));
            }
        });
        Ok(Self { format, outputs, inputs, panel_bytes, data })
    }

    /// The format that it came in and whose numbers it keeps.
    #[must_use]
    pub fn format(&self) -> Format {
        self.format
    }

    /// Numbers in a row of `linear`'s result.
    #[must_use]
    pub fn outputs(&self) -> usize {
        self.outputs
    }

    /// Numbers in a row of `linear`'s input.
    #[must_use]
    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// Bytes that it takes in memory.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.data.len()
    }

    /// Whether `linear` takes its input as int8 blocks.
    pub(super) fn quantised(&self) -> bool {
        by_packing!(self.format, P => { let _: Option<P> = None; true }, _ => false)
    }

    pub(super) fn panels(&self) -> usize {
        self.outputs.div_ceil(LANES)
    }

    fn panel(&self, panel: usize) -> &[u8] {
        self.some_panels(panel..panel + 1)
    }

    /// Panels that follow each other.
    pub(super) fn some_panels(&self, panels: Range<usize>) -> &[u8] {
        &self.data.as_slice()[panels.start * self.panel_bytes..panels.end * self.panel_bytes]
    }

    /// Unpacks one output's weights: bit for bit those of
    /// [`HostMatrix::dequantize_row`].
    pub(super) fn row(&self, output: usize, out: &mut [f32]) {
        assert!(output < self.outputs, "row {output} of a matrix of {}", self.outputs);
        let (panel, lane) = (self.panel(output / LANES), output % LANES);
        match self.format {
            Format::F32 => unpack_plain::<4, 1>(panel, lane, out, f32::from_le_bytes),
            Format::F16 => unpack_plain::<2, 1>(panel, lane, out, |b| f16::from_le_bytes(b).to_f32()),
            Format::BF16 => unpack_plain::<2, 2>(panel, lane, out, |b| bf16::from_le_bytes(b).to_f32()),
            quantised => by_packing!(quantised, P => unpack::<P>(panel, lane, out), _ => unreachable!()),
        }
    }
}

/// A block of a panel, read number by number.
pub(crate) struct PackedBlock<'a, P> {
    bytes: &'a [u8],
    packing: std::marker::PhantomData<P>,
}

impl<'a, P: Packing> PackedBlock<'a, P> {
    pub(crate) fn of(panel: &'a [u8], block: usize) -> Self {
        Self { bytes: &panel[block * P::BYTES..][..P::BYTES], packing: std::marker::PhantomData }
    }

    pub(crate) fn d(&self, group: usize, lane: usize) -> f32 {
        self.scale((group * LANES + lane) * P::SCALE)
    }

    pub(crate) fn m(&self, group: usize, lane: usize) -> f32 {
        self.scale(P::MINIMA + (group * LANES + lane) * P::SCALE)
    }

    fn scale(&self, at: usize) -> f32 {
        let b = self.bytes;
        if P::HALF { half_at(b, at) } else { f32::from_le_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]]) }
    }

    pub(crate) fn q(&self, lane: usize, input: usize) -> u8 {
        let (byte, shift) = place::<P>(lane, input);
        let q = self.bytes[byte] >> shift;
        if P::NIBBLES { q & 15 } else { q }
    }
}

/// The byte of a block that holds a q, and its lowest bit there.
fn place<P: Packing>(lane: usize, input: usize) -> (usize, u32) {
    if P::NIBBLES {
        (P::QUANTS + input / 8 * 64 + lane * 4 + input % 4, if input % 8 < 4 { 0 } else { 4 })
    } else {
        (P::QUANTS + input / 4 * 64 + lane * 4 + input % 4, 0)
    }
}

/// 32 numbers of a row as the file has them.
struct FileBlock {
    q: [u8; BLOCK],
    d: [f32; 2],
    m: f32,
}

fn pack<P: Packing>(format: Format, row: &[u8], lane: usize, panel: &mut [u8]) {
    for (i, block) in panel.chunks_exact_mut(P::BYTES).enumerate() {
        let FileBlock { q, d, m } = file_block(format, row, i);
        for (group, &d) in d[..P::GROUPS].iter().enumerate() {
            put_scale::<P>(block, (group * LANES + lane) * P::SCALE, d);
        }
        if P::AFFINE {
            put_scale::<P>(block, P::MINIMA + lane * P::SCALE, m);
        }
        for (input, &q) in q.iter().enumerate() {
            let (byte, shift) = place::<P>(lane, input);
            block[byte] |= q << shift;
        }
    }
}

fn put_scale<P: Packing>(block: &mut [u8], at: usize, scale: f32) {
    if P::HALF {
        // It was read from an f16, so this loses nothing.
        block[at..at + 2].copy_from_slice(&f16::from_f32(scale).to_le_bytes());
    } else {
        block[at..at + 4].copy_from_slice(&scale.to_le_bytes());
    }
}

/// Block `i` of 32 numbers of a row; the formats are [`Format`]'s.
fn file_block(format: Format, row: &[u8], i: usize) -> FileBlock {
    let per_block = format.block() / BLOCK;
    let b = &row[i / per_block * format.block_bytes()..][..format.block_bytes()];
    let part = i % per_block;
    let nibbles =
        |bytes: &[u8]| std::array::from_fn(|j| if j < 16 { bytes[j] & 15 } else { bytes[j - 16] >> 4 });
    let d = half_at(b, 0);
    match format {
        Format::Q4_0 => FileBlock { q: nibbles(&b[2..]), d: [d; 2], m: 0.0 },
        Format::Q4_1 => FileBlock { q: nibbles(&b[4..]), d: [d; 2], m: half_at(b, 2) },
        Format::Q5_0 => {
            let fifth = u32::from_le_bytes([b[2], b[3], b[4], b[5]]);
            let mut q: [u8; BLOCK] = nibbles(&b[6..]);
            for (j, q) in q.iter_mut().enumerate() {
                *q |= ((fifth >> j & 1) as u8) << 4;
            }
            FileBlock { q, d: [d; 2], m: 0.0 }
        }
        // A signed byte plus 128.
        Format::Q8_0 => FileBlock { q: std::array::from_fn(|j| b[2 + j] ^ 0x80), d: [d; 2], m: 0.0 },
        Format::Q4K => {
            let (scale, min) = q4_k_scale_min(&b[4..16], part);
            let bytes = &b[16 + part / 2 * 32..][..BLOCK];
            FileBlock {
                q: std::array::from_fn(|j| bytes[j] >> (part % 2 * 4) & 15),
                d: [d * f32::from(scale); 2],
                m: -(half_at(b, 2) * f32::from(min)),
            }
        }
        Format::Q6K => {
            let (half, run, d) = (part / 4, part % 4, half_at(b, 208));
            let (low, high) = (&b[half * 64 + run % 2 * 32..], &b[128 + half * 32..]);
            FileBlock {
                q: std::array::from_fn(|j| low[j] >> (run / 2 * 4) & 15 | (high[j] >> (run * 2) & 3) << 4),
                d: std::array::from_fn(|g| d * f32::from(b[192 + part * 2 + g].cast_signed())),
                m: 0.0,
            }
        }
        Format::F32 | Format::F16 | Format::BF16 => unreachable!("{format} has no blocks of 32"),
    }
}

fn unpack<P: Packing>(panel: &[u8], lane: usize, out: &mut [f32]) {
    for (i, numbers) in out.chunks_exact_mut(BLOCK).enumerate() {
        let block = PackedBlock::<P>::of(panel, i);
        for (input, w) in numbers.iter_mut().enumerate() {
            let group = input * P::GROUPS / BLOCK;
            let (d, q) = (block.d(group, lane), f32::from(block.q(lane, input)));
            // The products are exact in f32: a scale has 18 bits at most, a q 8.
            *w = if P::AFFINE { d * q + block.m(group, lane) } else { d * (q - f32::from(P::OFFSET)) };
        }
    }
}

/// Inputs that share a lane of a plain format's panel.
fn shared(format: Format) -> usize {
    if format == Format::BF16 { 2 } else { 1 }
}

fn pack_plain(format: Format, row: &[u8], lane: usize, panel: &mut [u8]) {
    let size = format.block_bytes() * shared(format);
    // The last of an odd number of inputs fills half of its lane, beside zeros.
    for (numbers, group) in row.chunks(size).zip(panel.chunks_exact_mut(LANES * size)) {
        group[lane * size..][..numbers.len()].copy_from_slice(numbers);
    }
}

/// Numbers of `N` bytes, of which `S` share a lane.
fn unpack_plain<const N: usize, const S: usize>(
    panel: &[u8],
    lane: usize,
    out: &mut [f32],
    widen: impl Fn([u8; N]) -> f32,
) {
    for (numbers, group) in out.chunks_mut(S).zip(panel.chunks_exact(LANES * S * N)) {
        for (w, bytes) in numbers.iter_mut().zip(group[lane * S * N..].as_chunks::<N>().0) {
            *w = widen(*bytes);
        }
    }
}
