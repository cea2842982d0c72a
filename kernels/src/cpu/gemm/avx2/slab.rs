//! Many rows of a quantised panel: the weights are unpacked once for all.
//!
//! A slab is a few blocks of a panel as bytes, with scales as f32; it and the
//! rows' activations of those inputs stay in the first-level cache. Rows pass by
//! in tiles of four, all 16 outputs at once: every integer sum of a block in a
//! register, the totals in memory. A row's arithmetic is that of
//! [`tile`](super::tile): what it adds, and in which order, is the same.

use std::arch::x86_64::*;

use super::{Input, Output, add_block, broadcast, scales, signed, sums_of_16_bits};
use crate::cpu::{
    gemm::ROWS,
    quantise::QBlock,
    weights::{BLOCK, LANES, Packing},
};

/// Rows of a tile: eight sums of 16 bits, two vectors of weights, activations.
const TILE: usize = 4;
/// Blocks of a slab: with 64 rows' activations they fill half the cache.
const BLOCKS: usize = 3;
/// Bytes of a block's 16 × 32 q.
const BYTES: usize = LANES * BLOCK;

/// A row's totals.
type Totals = [[f32; LANES]; ROWS];

/// Blocks of a panel, ready to multiply with.
#[repr(C, align(32))]
struct Slab {
    /// `64c + 4o + j` is output `o`, input `4c + j`; of signed formats the size.
    q: [[u8; BYTES]; BLOCKS],
    /// Of signed formats the number itself, for its sign.
    w: [[u8; BYTES]; BLOCKS],
    d: [[[f32; LANES]; 2]; BLOCKS],
    m: [[f32; LANES]; BLOCKS],
}

/// The whole tiles among the input's rows, at most [`ROWS`]; returns how many
/// rows they are.
///
/// # Safety
/// As for [`super::quantised`].
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn quantised<P: Packing>(panel: &[u8], x: Input<'_, QBlock>, out: Output) -> usize {
    let rows = x.rows / TILE * TILE;
    assert!(rows <= ROWS, "{rows} rows at once");
    let mut slab = Slab {
        q: [[0; BYTES]; BLOCKS],
        w: [[0; BYTES]; BLOCKS],
        d: [[[0.0; LANES]; 2]; BLOCKS],
        m: [[0.0; LANES]; BLOCKS],
    };
    let mut totals: Totals = [[0.0; LANES]; ROWS];
    for first in (0..x.stride).step_by(BLOCKS) {
        let blocks = BLOCKS.min(x.stride - first);
        // SAFETY: blocks `first..first + blocks` of the panel and of each row lie
        // in bounds, and rows `row..row + TILE` exist.
        unsafe {
            slab.unpack::<P>(panel.as_ptr().add(first * P::BYTES), blocks);
            for row in (0..rows).step_by(TILE) {
                slab.multiply::<P>(
                    blocks,
                    x.data.as_ptr().add(row * x.stride + first),
                    x.stride,
                    &mut totals,
                    row,
                );
            }
        }
    }
    for (row, totals) in totals[..rows].iter().enumerate() {
        // SAFETY: the caller's promise.
        unsafe { out.put(row, totals) };
    }
    rows
}

impl Slab {
    /// # Safety
    /// `from` points to `blocks` packed blocks.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn unpack<P: Packing>(&mut self, from: *const u8, blocks: usize) {
        let mask = _mm256_set1_epi8(15);
        let bias = _mm256_set1_epi8(P::OFFSET.cast_signed());
        for b in 0..blocks {
            // SAFETY: a block's scales and q lie where its packing says, and the
            // slab has room for them.
            unsafe {
                let block = from.add(b * P::BYTES);
                for group in 0..P::GROUPS {
                    store(&mut self.d[b][group], &scales::<P, 2>(block, group, 0));
                }
                if P::AFFINE {
                    store(&mut self.m[b], &scales::<P, 2>(block, P::GROUPS, 0));
                }
                let packed = block.add(P::QUANTS).cast::<__m256i>();
                let q = self.q[b].as_mut_ptr().cast::<__m256i>();
                let w = self.w[b].as_mut_ptr().cast::<__m256i>();
                if P::NIBBLES {
                    for i in 0..BYTES / 64 {
                        let bytes = _mm256_loadu_si256(packed.add(i));
                        // 64 packed bytes are 8 inputs: 4 low, then 4 high.
                        let to = q.add(i / 2 * 4 + i % 2);
                        _mm256_storeu_si256(to, _mm256_and_si256(bytes, mask));
                        _mm256_storeu_si256(to.add(2), _mm256_and_si256(_mm256_srli_epi16::<4>(bytes), mask));
                    }
                } else {
                    for i in 0..BYTES / 32 {
                        let bytes = _mm256_loadu_si256(packed.add(i));
                        if signed::<P>() {
                            let number = _mm256_xor_si256(bytes, bias);
                            _mm256_storeu_si256(w.add(i), number);
                            _mm256_storeu_si256(q.add(i), _mm256_abs_epi8(number));
                        } else {
                            _mm256_storeu_si256(q.add(i), bytes);
                        }
                    }
                }
            }
        }
    }

    /// Adds the slab's products with the rows of a tile to `totals`.
    ///
    /// # Safety
    /// `x` points to `blocks` blocks of the tile's first row, and the next rows'
    /// lie `stride` apart.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn multiply<P: Packing>(
        &self,
        blocks: usize,
        x: *const QBlock,
        stride: usize,
        totals: &mut Totals,
        first: usize,
    ) {
        let totals: &mut [[f32; LANES]; TILE] = totals[first..].first_chunk_mut().expect("rows of a tile");
        for b in 0..blocks {
            // SAFETY: the caller's promise, and the slab's own blocks.
            unsafe {
                let rows: [*const QBlock; TILE] = std::array::from_fn(|r| x.add(r * stride + b));
                for group in 0..P::GROUPS {
                    let dots = self.dots::<P>(b, group, rows);
                    let d = load(&self.d[b][group]);
                    let m = if P::AFFINE { load(&self.m[b]) } else { d };
                    for (r, total) in totals.iter_mut().enumerate() {
                        let mut sums = load(total);
                        add_block::<P, 2>(&mut sums, &dots[r], &d, &m, rows[r], group);
                        store(total, &sums);
                    }
                }
            }
        }
    }

    /// Σ q·x over a group's inputs.
    ///
    /// # Safety
    /// `rows` point to blocks.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn dots<P: Packing>(
        &self,
        block: usize,
        group: usize,
        rows: [*const QBlock; TILE],
    ) -> [[__m256i; 2]; TILE] {
        const { assert!(BYTES.is_multiple_of(64), "a block of the slab keeps the alignment of its first") };
        const { assert!((BLOCK / 4 / P::GROUPS).is_multiple_of(run::<P>()), "runs end with their group") };
        let ones = _mm256_set1_epi16(1);
        let chunks = BLOCK / 4 / P::GROUPS;
        let run = run::<P>();
        let mut dots = [[_mm256_setzero_si256(); 2]; TILE];
        for start in (group * chunks..(group + 1) * chunks).step_by(run) {
            let mut sums = [[_mm256_setzero_si256(); 2]; TILE];
            for chunk in start..start + run {
                // SAFETY: chunk `chunk` of the slab's block and of each row's.
                unsafe {
                    let at = chunk * 64;
                    let q = self.q[block].as_ptr().add(at).cast::<__m256i>();
                    let q = [_mm256_load_si256(q), _mm256_load_si256(q.add(1))];
                    let w = self.w[block].as_ptr().add(at).cast::<__m256i>();
                    for (&row, sums) in rows.iter().zip(&mut sums) {
                        let x = broadcast(row, chunk * 4);
                        for (v, sum) in sums.iter_mut().enumerate() {
                            let x = if signed::<P>() {
                                _mm256_sign_epi8(x, _mm256_load_si256(w.add(v)))
                            } else {
                                x
                            };
                            *sum = _mm256_add_epi16(*sum, _mm256_maddubs_epi16(q[v], x));
                        }
                    }
                }
            }
            for (dot, &sum) in dots.as_flattened_mut().iter_mut().zip(sums.as_flattened()) {
                *dot = _mm256_add_epi32(*dot, _mm256_madd_epi16(sum, ones));
            }
        }
        dots
    }
}

/// Chunks of 4 inputs that are summed in 16 bits.
const fn run<P: Packing>() -> usize {
    let chunks = BLOCK / 4 / P::GROUPS;
    let most = sums_of_16_bits::<P>();
    if most < chunks { most } else { chunks }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn load(from: &[f32; LANES]) -> [__m256; 2] {
    // SAFETY: 16 numbers.
    unsafe { [_mm256_loadu_ps(from.as_ptr()), _mm256_loadu_ps(from.as_ptr().add(8))] }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn store(to: &mut [f32; LANES], values: &[__m256; 2]) {
    // SAFETY: 16 numbers.
    unsafe {
        _mm256_storeu_ps(to.as_mut_ptr(), values[0]);
        _mm256_storeu_ps(to.as_mut_ptr().add(8), values[1]);
    }
}
