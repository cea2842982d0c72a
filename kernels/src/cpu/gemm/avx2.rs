//! Products with AVX2: int8 by `vpmaddubsw`, plain types by f32 FMA.
//!
//! `vpmaddubsw` multiplies unsigned with signed bytes and adds neighbours in 16
//! bits, saturating. Nibbles are at most 15 and activations 127, so even eight
//! such sums stay below 2¹⁵ (8 · 2 · 15 · 127 = 30,480). Five and six bits stay
//! within one (2 · 63 · 127 = 16,002). Eight bits would not (2 · 255 · 127), so
//! there the weight's sign moves to the activation: |w| ≤ 128, and
//! 2 · 128 · 127 = 32,512 fits.

use std::arch::x86_64::*;

use super::{Input, Output};
use crate::cpu::{
    quantise::QBlock,
    weights::{BLOCK, LANES, Packing},
};

/// Rows of a tile of quantised weights.
const TILE: usize = 4;
/// Rows of a tile of plain weights: 12 sums, 2 weights and an activation.
const PLAIN_TILE: usize = 6;

/// Two vectors of a panel's 16 outputs.
type Pair = [__m256; 2];

/// # Safety
/// The processor has AVX2, FMA and F16C; and as for [`Output::put`], for all of
/// the input's rows.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn quantised<P: Packing>(panel: &[u8], x: Input<'_, QBlock>, out: Output) {
    assert_eq!(panel.len(), x.stride * P::BYTES, "blocks of the panel and of the rows");
    assert!(x.data.len() >= x.rows * x.stride, "rows of the input");
    let mut row = 0;
    while row < x.rows {
        // SAFETY: the panel has `stride` blocks, as many as each row of the
        // input, and rows `row..row + R` exist; the rest is the caller's promise.
        unsafe {
            row += match x.rows - row {
                1 => tile::<P, 1>(panel, x, row, out),
                2 => tile::<P, 2>(panel, x, row, out),
                3 => tile::<P, 3>(panel, x, row, out),
                _ => tile::<P, TILE>(panel, x, row, out),
            }
        }
    }
}

/// `R` rows from `first`; returns `R`.
///
/// # Safety
/// As for [`quantised`], with rows and blocks in bounds.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn tile<P: Packing, const R: usize>(
    panel: &[u8],
    x: Input<'_, QBlock>,
    first: usize,
    out: Output,
) -> usize {
    let mut sums = [[_mm256_setzero_ps(); 2]; R];
    for b in 0..x.stride {
        // SAFETY: block `b` of the panel and of each row lie in bounds.
        unsafe {
            let block = panel.as_ptr().add(b * P::BYTES);
            let rows: [*const QBlock; R] =
                std::array::from_fn(|r| x.data.as_ptr().add((first + r) * x.stride + b));
            for group in 0..P::GROUPS {
                let dots = if P::NIBBLES {
                    nibble_dots::<P, R>(block, rows)
                } else {
                    byte_dots::<P, R>(block, rows, group)
                };
                let d = scales::<P>(block, group);
                let m = if P::AFFINE { scales::<P>(block, P::GROUPS + group) } else { d };
                for r in 0..R {
                    let scale = _mm256_set1_ps((*rows[r]).scale);
                    let sum = (*rows[r]).group_sum(group, P::GROUPS);
                    for half in 0..2 {
                        let dot = _mm256_cvtepi32_ps(dots[r][half]);
                        let total = &mut sums[r][half];
                        *total = if P::AFFINE {
                            let with_min = _mm256_fmadd_ps(m[half], _mm256_set1_ps(sum), *total);
                            _mm256_fmadd_ps(d[half], _mm256_mul_ps(dot, scale), with_min)
                        } else if signed::<P>() {
                            _mm256_fmadd_ps(d[half], _mm256_mul_ps(dot, scale), *total)
                        } else {
                            let offset = _mm256_set1_ps(f32::from(P::OFFSET) * sum);
                            _mm256_fmadd_ps(d[half], _mm256_fmsub_ps(dot, scale, offset), *total)
                        };
                    }
                }
            }
        }
    }
    for (r, sums) in sums.iter().enumerate() {
        // SAFETY: the caller's promise.
        unsafe { put(out, first + r, sums) };
    }
    R
}

/// Whether q minus its offset is multiplied as a signed byte.
const fn signed<P: Packing>() -> bool {
    P::OFFSET == 128
}

/// Σ q·x over a block's 32 inputs, q in nibbles.
///
/// # Safety
/// `block` and `rows` point to blocks.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn nibble_dots<P: Packing, const R: usize>(
    block: *const u8,
    rows: [*const QBlock; R],
) -> [[__m256i; 2]; R] {
    let mask = _mm256_set1_epi8(15);
    let mut sums = [[_mm256_setzero_si256(); 2]; R];
    for chunk in 0..BLOCK / 8 {
        // SAFETY: chunk `chunk` of a block's q, 64 bytes, and of its inputs, 8.
        unsafe {
            let bytes = block.add(P::QUANTS + chunk * 64).cast::<__m256i>();
            let [a, b] = [_mm256_loadu_si256(bytes), _mm256_loadu_si256(bytes.add(1))];
            let low = [_mm256_and_si256(a, mask), _mm256_and_si256(b, mask)];
            let [a, b] = [_mm256_srli_epi16::<4>(a), _mm256_srli_epi16::<4>(b)];
            let high = [_mm256_and_si256(a, mask), _mm256_and_si256(b, mask)];
            for r in 0..R {
                let x = broadcast(rows[r], chunk * 8);
                sums[r][0] = _mm256_add_epi16(sums[r][0], _mm256_maddubs_epi16(low[0], x));
                sums[r][1] = _mm256_add_epi16(sums[r][1], _mm256_maddubs_epi16(low[1], x));
                let x = broadcast(rows[r], chunk * 8 + 4);
                sums[r][0] = _mm256_add_epi16(sums[r][0], _mm256_maddubs_epi16(high[0], x));
                sums[r][1] = _mm256_add_epi16(sums[r][1], _mm256_maddubs_epi16(high[1], x));
            }
        }
    }
    // Not `map`: the library's code has no AVX2, so vectors would pass through
    // memory.
    let ones = _mm256_set1_epi16(1);
    for [a, b] in &mut sums {
        (*a, *b) = (_mm256_madd_epi16(*a, ones), _mm256_madd_epi16(*b, ones));
    }
    sums
}

/// Σ q·x over a group's inputs, q in bytes: less 128 where it has eight bits.
///
/// # Safety
/// `block` and `rows` point to blocks, and `group` is one of the block's.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn byte_dots<P: Packing, const R: usize>(
    block: *const u8,
    rows: [*const QBlock; R],
    group: usize,
) -> [[__m256i; 2]; R] {
    let ones = _mm256_set1_epi16(1);
    let bias = _mm256_set1_epi8(-128);
    let mut sums = [[_mm256_setzero_si256(); 2]; R];
    let chunks = BLOCK / 4 / P::GROUPS;
    for chunk in group * chunks..(group + 1) * chunks {
        // SAFETY: chunk `chunk` of a block's q, 64 bytes, and of its inputs, 4.
        unsafe {
            let bytes = block.add(P::QUANTS + chunk * 64).cast::<__m256i>();
            for half in 0..2 {
                let q = _mm256_loadu_si256(bytes.add(half));
                let w = _mm256_xor_si256(q, bias);
                let size = _mm256_abs_epi8(w);
                for r in 0..R {
                    let x = broadcast(rows[r], chunk * 4);
                    let products = if signed::<P>() {
                        _mm256_maddubs_epi16(size, _mm256_sign_epi8(x, w))
                    } else {
                        _mm256_maddubs_epi16(q, x)
                    };
                    sums[r][half] = _mm256_add_epi32(sums[r][half], _mm256_madd_epi16(products, ones));
                }
            }
        }
    }
    sums
}

/// Four activations from `input`, in every lane.
///
/// # Safety
/// `row` points to a block and `input + 4 <= 32`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn broadcast(row: *const QBlock, input: usize) -> __m256i {
    // SAFETY: within the block's 32 bytes.
    unsafe { _mm256_set1_epi32((*row).q.as_ptr().add(input).cast::<i32>().read_unaligned()) }
}

/// The 16 scales of a group; minima count on from the last group.
///
/// # Safety
/// `block` points to a packed block that has them.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn scales<P: Packing>(block: *const u8, group: usize) -> Pair {
    // SAFETY: 16 scales start there.
    unsafe {
        let at = block.add(group * LANES * P::SCALE);
        if P::HALF {
            let at = at.cast::<__m128i>();
            [_mm256_cvtph_ps(_mm_loadu_si128(at)), _mm256_cvtph_ps(_mm_loadu_si128(at.add(1)))]
        } else {
            let at = at.cast::<f32>();
            [_mm256_loadu_ps(at), _mm256_loadu_ps(at.add(8))]
        }
    }
}

/// # Safety
/// As for [`Output::put`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn put(out: Output, row: usize, sums: &Pair) {
    let mut values = [0.0; LANES];
    let whole = out.lanes == LANES;
    // SAFETY: 16 numbers, of the row or of `values`; the rest is the caller's
    // promise.
    unsafe {
        let to = if whole { out.start.add(row * out.stride) } else { values.as_mut_ptr() };
        _mm256_storeu_ps(to, sums[0]);
        _mm256_storeu_ps(to.add(8), sums[1]);
        if !whole {
            out.put(row, &values);
        }
    }
}

/// A plain type that widens to f32.
pub(super) trait Plain {
    /// Bytes of a number.
    const BYTES: usize;

    /// Loads 8 numbers.
    ///
    /// # Safety
    /// They are readable, and the processor has AVX2 and F16C.
    unsafe fn load(from: *const u8) -> __m256;
}

pub(super) struct F32;
pub(super) struct F16;
pub(super) struct Bf16;

impl Plain for F32 {
    const BYTES: usize = 4;

    #[inline(always)]
    unsafe fn load(from: *const u8) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe { _mm256_loadu_ps(from.cast()) }
    }
}

impl Plain for F16 {
    const BYTES: usize = 2;

    #[inline(always)]
    unsafe fn load(from: *const u8) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(from.cast())) }
    }
}

impl Plain for Bf16 {
    const BYTES: usize = 2;

    #[inline(always)]
    unsafe fn load(from: *const u8) -> __m256 {
        // SAFETY: the caller's promise. A bf16 is the upper half of an f32.
        unsafe {
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        }
    }
}

/// # Safety
/// The processor has AVX2, FMA and F16C; and as for [`Output::put`], for all of
/// the input's rows.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn plain<T: Plain>(panel: &[u8], x: Input<'_, f32>, out: Output) {
    assert_eq!(panel.len(), x.stride * LANES * T::BYTES, "inputs of the panel and of the rows");
    assert!(x.data.len() >= x.rows * x.stride, "rows of the input");
    let mut row = 0;
    while row < x.rows {
        // SAFETY: the panel has `stride` inputs, as many as each row, and rows
        // `row..row + R` exist; the rest is the caller's promise.
        unsafe {
            row += match x.rows - row {
                1 => plain_tile::<T, 1>(panel, x, row, out),
                2 => plain_tile::<T, 2>(panel, x, row, out),
                3 => plain_tile::<T, 3>(panel, x, row, out),
                4 => plain_tile::<T, 4>(panel, x, row, out),
                5 => plain_tile::<T, 5>(panel, x, row, out),
                _ => plain_tile::<T, PLAIN_TILE>(panel, x, row, out),
            }
        }
    }
}

/// `R` rows from `first`; returns `R`.
///
/// # Safety
/// As for [`plain`], with rows and inputs in bounds.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn plain_tile<T: Plain, const R: usize>(
    panel: &[u8],
    x: Input<'_, f32>,
    first: usize,
    out: Output,
) -> usize {
    let mut sums = [[_mm256_setzero_ps(); 2]; R];
    for i in 0..x.stride {
        // SAFETY: input `i` of the panel and of each row lie in bounds.
        unsafe {
            let weights = panel.as_ptr().add(i * LANES * T::BYTES);
            let w = [T::load(weights), T::load(weights.add(8 * T::BYTES))];
            for (r, sums) in sums.iter_mut().enumerate() {
                let x = _mm256_set1_ps(*x.data.as_ptr().add((first + r) * x.stride + i));
                sums[0] = _mm256_fmadd_ps(w[0], x, sums[0]);
                sums[1] = _mm256_fmadd_ps(w[1], x, sums[1]);
            }
        }
    }
    for (r, sums) in sums.iter().enumerate() {
        // SAFETY: the caller's promise.
        unsafe { put(out, first + r, sums) };
    }
    R
}
