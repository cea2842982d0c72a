//! Products with AVX2: int8 by `vpmaddubsw`, plain types by f32 FMA.
//!
//! `vpmaddubsw` multiplies unsigned with signed bytes and adds neighbours in 16
//! bits, saturating. Activations are at most 127, so eight such sums of nibbles
//! stay below 2¹⁵ (8 · 2 · 15 · 127 = 30,480), four of five bits (31,496), two
//! of six (32,004). Eight bits would not even fit once (2 · 255 · 127), so there
//! the weight's sign moves to the activation: |w| ≤ 128, and 2 · 128 · 127 =
//! 32,512 fits.

use std::arch::x86_64::*;

use super::{Input, Output};
use crate::cpu::{
    quantise::QBlock,
    weights::{BLOCK, LANES, Packing},
};

/// Rows of a tile of plain weights: 12 sums, 2 weights and an activation.
const PLAIN_TILE: usize = 6;

/// # Safety
/// The processor has AVX2, FMA and F16C; and as for [`Output::put`], for all of
/// the input's rows.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn quantised<P: Packing>(panel: &[u8], x: Input<'_, QBlock>, out: Output) {
    assert_eq!(panel.len(), x.stride * P::BYTES, "blocks of the panel and of the rows");
    assert!(x.data.len() >= x.rows * x.stride, "rows of the input");
    let mut row = 0;
    while row < x.rows {
        // One row or two take all 16 outputs at once; more take 8 and then 8,
        // for which all sums fit in registers.
        // SAFETY: the panel has `stride` blocks, as many as each row of the
        // input, and rows `row..row + R` exist; the rest is the caller's promise.
        unsafe {
            match x.rows - row {
                1 => tile::<P, 1, 2>(panel, x, row, 0, out),
                2 => tile::<P, 2, 2>(panel, x, row, 0, out),
                3 => {
                    tile::<P, 3, 1>(panel, x, row, 0, out);
                    tile::<P, 3, 1>(panel, x, row, 8, out);
                }
                _ => {
                    tile::<P, 4, 1>(panel, x, row, 0, out);
                    tile::<P, 4, 1>(panel, x, row, 8, out);
                }
            }
        }
        row += 4;
    }
}

/// `R` rows from `first`, and `8 · V` of the panel's outputs from `lane`.
///
/// # Safety
/// As for [`quantised`], with rows, blocks and outputs in bounds.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn tile<P: Packing, const R: usize, const V: usize>(
    panel: &[u8],
    x: Input<'_, QBlock>,
    first: usize,
    lane: usize,
    out: Output,
) {
    let mut sums = [[_mm256_setzero_ps(); V]; R];
    for b in 0..x.stride {
        // SAFETY: block `b` of the panel and of each row lie in bounds.
        unsafe {
            let block = panel.as_ptr().add(b * P::BYTES);
            if R < 4 && lane == 0 {
                ahead(block, P::BYTES);
            }
            let rows: [*const QBlock; R] =
                std::array::from_fn(|r| x.data.as_ptr().add((first + r) * x.stride + b));
            for group in 0..P::GROUPS {
                let dots = if P::NIBBLES {
                    nibble_dots::<P, R, V>(block, rows, lane)
                } else {
                    byte_dots::<P, R, V>(block, rows, lane, group)
                };
                let d = scales::<P, V>(block, group, lane);
                let m = if P::AFFINE { scales::<P, V>(block, P::GROUPS + group, lane) } else { d };
                for (r, sums) in sums.iter_mut().enumerate() {
                    add_block::<P, V>(sums, &dots[r], &d, &m, rows[r], group);
                }
            }
        }
    }
    for (r, sums) in sums.iter().enumerate() {
        // SAFETY: the caller's promise.
        unsafe { put(out, first + r, lane, sums) };
    }
}

/// Asks for the weights of a block that comes soon: with few rows memory is what
/// a product waits for, and the hardware's own foresight ends with each 4 KiB.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn ahead(block: *const u8, bytes: usize) {
    const AHEAD: usize = 2048;
    for line in (0..bytes).step_by(64) {
        // It reads nothing, wherever it points.
        _mm_prefetch::<_MM_HINT_T0>(block.wrapping_add(AHEAD + line).cast());
    }
}

/// Adds a group's dot products to a row's totals, with the scales that they
/// were taken without.
///
/// # Safety
/// `row` points to a block.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn add_block<P: Packing, const V: usize>(
    totals: &mut [__m256; V],
    dots: &[__m256i; V],
    d: &[__m256; V],
    m: &[__m256; V],
    row: *const QBlock,
    group: usize,
) {
    // SAFETY: the caller's promise.
    let (scale, sum) = unsafe { ((*row).scale, (*row).group_sum(group, P::GROUPS)) };
    let scale = _mm256_set1_ps(scale);
    for (v, total) in totals.iter_mut().enumerate() {
        let dot = _mm256_cvtepi32_ps(dots[v]);
        *total = if P::AFFINE {
            let with_min = _mm256_fmadd_ps(m[v], _mm256_set1_ps(sum), *total);
            _mm256_fmadd_ps(d[v], _mm256_mul_ps(dot, scale), with_min)
        } else if signed::<P>() {
            _mm256_fmadd_ps(d[v], _mm256_mul_ps(dot, scale), *total)
        } else {
            let offset = _mm256_set1_ps(f32::from(P::OFFSET) * sum);
            _mm256_fmadd_ps(d[v], _mm256_fmsub_ps(dot, scale, offset), *total)
        };
    }
}

/// Whether q minus its offset is multiplied as a signed byte.
const fn signed<P: Packing>() -> bool {
    P::OFFSET == 128
}

/// Chunks of 4 inputs whose sums 16 bits hold.
const fn run<P: Packing>() -> usize {
    let chunks = BLOCK / 4 / P::GROUPS;
    let most = if signed::<P>() { 1 } else { i16::MAX as usize / (2 * 127 * P::MOST as usize) };
    if most < chunks { most } else { chunks }
}

/// Σ q·x over a block's 32 inputs, q in nibbles.
///
/// # Safety
/// `block` and `rows` point to blocks.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn nibble_dots<P: Packing, const R: usize, const V: usize>(
    block: *const u8,
    rows: [*const QBlock; R],
    lane: usize,
) -> [[__m256i; V]; R] {
    // No `map` over vectors here: the library's code has no AVX2, so they would
    // pass through memory.
    let mask = _mm256_set1_epi8(15);
    let mut sums = [[_mm256_setzero_si256(); V]; R];
    for chunk in 0..BLOCK / 8 {
        // SAFETY: `8 · V` outputs of chunk `chunk` of a block's q, and the
        // chunk's 8 inputs.
        unsafe {
            let bytes = block.add(P::QUANTS + chunk * 64 + lane * 4).cast::<__m256i>();
            let mut low = [_mm256_setzero_si256(); V];
            let mut high = low;
            for (v, (low, high)) in low.iter_mut().zip(&mut high).enumerate() {
                let packed = _mm256_loadu_si256(bytes.add(v));
                *low = _mm256_and_si256(packed, mask);
                *high = _mm256_and_si256(_mm256_srli_epi16::<4>(packed), mask);
            }
            for (&row, sums) in rows.iter().zip(&mut sums) {
                let x = [broadcast(row, chunk * 8), broadcast(row, chunk * 8 + 4)];
                for (v, sum) in sums.iter_mut().enumerate() {
                    *sum = _mm256_add_epi16(*sum, _mm256_maddubs_epi16(low[v], x[0]));
                    *sum = _mm256_add_epi16(*sum, _mm256_maddubs_epi16(high[v], x[1]));
                }
            }
        }
    }
    let ones = _mm256_set1_epi16(1);
    for sum in sums.as_flattened_mut() {
        *sum = _mm256_madd_epi16(*sum, ones);
    }
    sums
}

/// Σ q·x over a group's inputs, q in bytes: less 128 where it has eight bits.
///
/// # Safety
/// `block` and `rows` point to blocks, and `group` is one of the block's.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn byte_dots<P: Packing, const R: usize, const V: usize>(
    block: *const u8,
    rows: [*const QBlock; R],
    lane: usize,
    group: usize,
) -> [[__m256i; V]; R] {
    const { assert!((BLOCK / 4 / P::GROUPS).is_multiple_of(run::<P>()), "runs end with their group") };
    let ones = _mm256_set1_epi16(1);
    let bias = _mm256_set1_epi8(-128);
    let mut sums = [[_mm256_setzero_si256(); V]; R];
    let chunks = BLOCK / 4 / P::GROUPS;
    let mut shorts = sums;
    for chunk in group * chunks..(group + 1) * chunks {
        // SAFETY: `8 · V` outputs of chunk `chunk` of a block's q, and the
        // chunk's 4 inputs.
        unsafe {
            let bytes = block.add(P::QUANTS + chunk * 64 + lane * 4).cast::<__m256i>();
            let mut q = [_mm256_setzero_si256(); V];
            let (mut w, mut size) = (q, q);
            for (v, q) in q.iter_mut().enumerate() {
                *q = _mm256_loadu_si256(bytes.add(v));
                w[v] = _mm256_xor_si256(*q, bias);
                size[v] = _mm256_abs_epi8(w[v]);
            }
            for (&row, shorts) in rows.iter().zip(&mut shorts) {
                let x = broadcast(row, chunk * 4);
                for (v, short) in shorts.iter_mut().enumerate() {
                    let products = if signed::<P>() {
                        _mm256_maddubs_epi16(size[v], _mm256_sign_epi8(x, w[v]))
                    } else {
                        _mm256_maddubs_epi16(q[v], x)
                    };
                    let first = chunk % run::<P>() == 0;
                    *short = if first { products } else { _mm256_add_epi16(*short, products) };
                }
            }
        }
        if chunk % run::<P>() == run::<P>() - 1 {
            for (sum, &short) in sums.as_flattened_mut().iter_mut().zip(shorts.as_flattened()) {
                *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(short, ones));
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
pub(super) unsafe fn broadcast(row: *const QBlock, input: usize) -> __m256i {
    // SAFETY: within the block's 32 bytes.
    unsafe { _mm256_set1_epi32((*row).q.as_ptr().add(input).cast::<i32>().read_unaligned()) }
}

/// `8 · V` scales of a group from `lane`; minima count on from the last group.
///
/// # Safety
/// `block` points to a packed block that has them.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn scales<P: Packing, const V: usize>(
    block: *const u8,
    group: usize,
    lane: usize,
) -> [__m256; V] {
    let mut scales = [_mm256_setzero_ps(); V];
    for (v, scales) in scales.iter_mut().enumerate() {
        // SAFETY: 8 scales start there.
        unsafe {
            let at = block.add((group * LANES + lane + 8 * v) * P::SCALE);
            *scales = if P::HALF { F16::load(at, 0) } else { F32::load(at, 0) };
        }
    }
    scales
}

/// Writes a row's outputs from `lane`.
///
/// # Safety
/// As for [`Output::put`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn put<const V: usize>(out: Output, row: usize, lane: usize, sums: &[__m256; V]) {
    if lane >= out.lanes {
        return;
    }
    let mut values = [0.0; LANES];
    let whole = out.lanes == LANES;
    // SAFETY: `8 · V` numbers, of the row or of `values`; the rest is the
    // caller's promise.
    unsafe {
        let row = out.start.add(row * out.stride + lane);
        let to = if whole { row } else { values.as_mut_ptr() };
        for (v, &sum) in sums.iter().enumerate() {
            _mm256_storeu_ps(to.add(8 * v), sum);
        }
        if !whole {
            row.copy_from_nonoverlapping(to, (out.lanes - lane).min(8 * V));
        }
    }
}

/// A plain type that widens to f32.
pub(super) trait Plain {
    /// Inputs that share a lane.
    const SHARED: usize;
    /// Bytes of a number.
    const BYTES: usize;

    /// Loads 8 weights of input `input` of those that share the lanes at `from`.
    ///
    /// # Safety
    /// They are readable, and the processor has AVX2 and F16C.
    unsafe fn load(from: *const u8, input: usize) -> __m256;
}

pub(super) struct F32;
pub(super) struct F16;
pub(super) struct Bf16;

impl Plain for F32 {
    const SHARED: usize = 1;
    const BYTES: usize = 4;

    #[inline(always)]
    unsafe fn load(from: *const u8, _: usize) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe { _mm256_loadu_ps(from.cast()) }
    }
}

impl Plain for F16 {
    const SHARED: usize = 1;
    const BYTES: usize = 2;

    #[inline(always)]
    unsafe fn load(from: *const u8, _: usize) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(from.cast())) }
    }
}

impl Plain for Bf16 {
    const SHARED: usize = 2;
    const BYTES: usize = 2;

    #[inline(always)]
    unsafe fn load(from: *const u8, input: usize) -> __m256 {
        // SAFETY: the caller's promise. A bf16 is the upper half of an f32.
        unsafe {
            let pairs = _mm256_loadu_si256(from.cast());
            let upper = if input == 0 {
                _mm256_slli_epi32::<16>(pairs)
            } else {
                _mm256_and_si256(pairs, _mm256_set1_epi32(0xffff_0000u32.cast_signed()))
            };
            _mm256_castsi256_ps(upper)
        }
    }
}

/// # Safety
/// The processor has AVX2, FMA and F16C; and as for [`Output::put`], for all of
/// the input's rows.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn plain<T: Plain>(panel: &[u8], x: Input<'_, f32>, out: Output) {
    let inputs = x.stride.next_multiple_of(T::SHARED);
    assert_eq!(panel.len(), inputs * LANES * T::BYTES, "inputs of the panel and of the rows");
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
    // Inputs that share lanes go together, so that the loop over them unrolls.
    let together = x.stride / T::SHARED * T::SHARED;
    let mut add = |i: usize, input: usize| {
        // SAFETY: input `i + input` of the panel and of each row lie in bounds.
        unsafe {
            let weights = panel.as_ptr().add(i * LANES * T::BYTES);
            let w = [T::load(weights, input), T::load(weights.add(8 * T::SHARED * T::BYTES), input)];
            for (r, sums) in sums.iter_mut().enumerate() {
                let x = _mm256_set1_ps(*x.data.as_ptr().add((first + r) * x.stride + i + input));
                sums[0] = _mm256_fmadd_ps(w[0], x, sums[0]);
                sums[1] = _mm256_fmadd_ps(w[1], x, sums[1]);
            }
        }
    };
    for i in (0..together).step_by(T::SHARED) {
        for input in 0..T::SHARED {
            add(i, input);
        }
    }
    if together < x.stride {
        add(together, 0);
    }
    for (r, sums) in sums.iter().enumerate() {
        // SAFETY: the caller's promise.
        unsafe { put(out, first + r, 0, sums) };
    }
    R
}
