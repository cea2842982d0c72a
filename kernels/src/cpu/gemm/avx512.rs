//! Products with AVX-512: int8 by `vpdpbusd`, plain types by f32 FMA.
//!
//! A vector has the panel's 16 outputs, one a lane; `vpdpbusd` adds four
//! products of unsigned weights and signed activations to each in 32 bits, so
//! nothing saturates.

use super::{Input, Output};
use crate::cpu::{
    instructions::*,
    quantise::QBlock,
    weights::{BLOCK, LANES, Packing},
};

/// Rows of a tile: a sum, two dot products and a share of 5 other registers.
const TILE: usize = 8;

/// # Safety
/// The processor has AVX-512 F, BW, VL and VNNI; and as for [`Output::put`], for
/// all of the input's rows.
#[cfg_attr(not(feature = "emulate-avx512"), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni"))]
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
                4..TILE => tile::<P, 4>(panel, x, row, out),
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
#[cfg_attr(not(feature = "emulate-avx512"), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni"))]
unsafe fn tile<P: Packing, const R: usize>(
    panel: &[u8],
    x: Input<'_, QBlock>,
    first: usize,
    out: Output,
) -> usize {
    let mut sums = [_mm512_setzero_ps(); R];
    for b in 0..x.stride {
        // SAFETY: block `b` of the panel and of each row lie in bounds.
        unsafe {
            let block = panel.as_ptr().add(b * P::BYTES);
            if R < TILE {
                ahead(block, P::BYTES);
            }
            let rows: [*const QBlock; R] =
                std::array::from_fn(|r| x.data.as_ptr().add((first + r) * x.stride + b));
            for group in 0..P::GROUPS {
                let dots = dots::<P, R>(block, rows, group);
                let d = scales::<P>(block, group);
                let m = if P::AFFINE { scales::<P>(block, P::GROUPS + group) } else { d };
                for r in 0..R {
                    let scale = _mm512_set1_ps((*rows[r]).scale);
                    let sum = (*rows[r]).group_sum(group, P::GROUPS);
                    let dot = _mm512_cvtepi32_ps(dots[r]);
                    sums[r] = if P::AFFINE {
                        let with_min = _mm512_fmadd_ps(m, _mm512_set1_ps(sum), sums[r]);
                        _mm512_fmadd_ps(d, _mm512_mul_ps(dot, scale), with_min)
                    } else {
                        let offset = _mm512_set1_ps(f32::from(P::OFFSET) * sum);
                        _mm512_fmadd_ps(d, _mm512_fmsub_ps(dot, scale, offset), sums[r])
                    };
                }
            }
        }
    }
    for (r, &sums) in sums.iter().enumerate() {
        // SAFETY: the caller's promise.
        unsafe { put(out, first + r, sums) };
    }
    R
}

/// Asks for the weights of a block that comes soon, into the second-level cache: with few
/// rows memory is what a product waits for, and a core that only reads what it needs next
/// has too few lines on their way.
#[inline]
#[cfg_attr(not(feature = "emulate-avx512"), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni"))]
pub(super) fn ahead(block: *const u8, bytes: usize) {
    const AHEAD: usize = 8192;
    #[cfg_attr(not(feature = "emulate-avx512"), expect(unused_unsafe, reason = "the features are enabled"))]
    for line in (0..bytes).step_by(64) {
        // SAFETY: it reads nothing, wherever it points.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(block.wrapping_add(AHEAD + line).cast()) };
    }
}

/// Σ q·x over a group's inputs.
///
/// # Safety
/// `block` and `rows` point to blocks, and `group` is one of the block's.
#[inline]
#[cfg_attr(not(feature = "emulate-avx512"), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni"))]
unsafe fn dots<P: Packing, const R: usize>(
    block: *const u8,
    rows: [*const QBlock; R],
    group: usize,
) -> [__m512i; R] {
    // Two sums a row: the chain of one alone would be slower than memory.
    let mut sums = [[_mm512_setzero_si512(); 2]; R];
    let step = if P::NIBBLES { 8 } else { 4 };
    let chunks = BLOCK / step / P::GROUPS;
    for chunk in group * chunks..(group + 1) * chunks {
        // SAFETY: chunk `chunk` of a block's q, 64 bytes, and of its inputs.
        unsafe {
            let q = _mm512_loadu_si512(block.add(P::QUANTS + chunk * 64).cast());
            if P::NIBBLES {
                let mask = _mm512_set1_epi8(15);
                let low = _mm512_and_si512(q, mask);
                let high = _mm512_and_si512(_mm512_srli_epi16::<4>(q), mask);
                for r in 0..R {
                    sums[r][0] = _mm512_dpbusd_epi32(sums[r][0], low, broadcast(rows[r], chunk * 8));
                    sums[r][1] = _mm512_dpbusd_epi32(sums[r][1], high, broadcast(rows[r], chunk * 8 + 4));
                }
            } else {
                for r in 0..R {
                    let sum = &mut sums[r][chunk % 2];
                    *sum = _mm512_dpbusd_epi32(*sum, q, broadcast(rows[r], chunk * 4));
                }
            }
        }
    }
    // Not `map`: the library's code has no AVX-512, so vectors would pass through
    // memory.
    let mut dots = [_mm512_setzero_si512(); R];
    for (dot, &[a, b]) in dots.iter_mut().zip(&sums) {
        *dot = _mm512_add_epi32(a, b);
    }
    dots
}

/// Four activations from `input`, in every lane.
///
/// # Safety
/// `row` points to a block and `input + 4 <= 32`.
#[inline]
#[cfg_attr(not(feature = "emulate-avx512"), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni"))]
unsafe fn broadcast(row: *const QBlock, input: usize) -> __m512i {
    // SAFETY: within the block's 32 bytes.
    unsafe { _mm512_set1_epi32((*row).q.as_ptr().add(input).cast::<i32>().read_unaligned()) }
}

/// The 16 scales of a group; minima count on from the last group.
///
/// # Safety
/// `block` points to a packed block that has them.
#[inline]
#[cfg_attr(not(feature = "emulate-avx512"), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni"))]
unsafe fn scales<P: Packing>(block: *const u8, group: usize) -> __m512 {
    // SAFETY: 16 scales start there.
    unsafe {
        let at = block.add(group * LANES * P::SCALE);
        if P::HALF { _mm512_cvtph_ps(_mm256_loadu_si256(at.cast())) } else { _mm512_loadu_ps(at.cast()) }
    }
}

/// # Safety
/// As for [`Output::put`].
#[inline]
#[cfg_attr(not(feature = "emulate-avx512"), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni"))]
pub(super) unsafe fn put(out: Output, row: usize, sums: __m512) {
    // SAFETY: a masked store touches the panel's outputs of the row alone, which
    // are the caller's promise.
    unsafe {
        let mask = (u16::MAX) >> (LANES - out.lanes);
        _mm512_mask_storeu_ps(out.start.add(row * out.stride), mask, sums);
    }
}

/// A plain type that widens to f32.
pub(super) trait Plain {
    /// Inputs that share a lane.
    const SHARED: usize;
    /// Bytes of a number.
    const BYTES: usize;

    /// Loads 16 weights of input `input` of those that share the lanes at `from`.
    ///
    /// # Safety
    /// They are readable, and the processor has AVX-512 F.
    unsafe fn load(from: *const u8, input: usize) -> __m512;
}

pub(super) struct F32;
pub(super) struct F16;
pub(super) struct Bf16;

impl Plain for F32 {
    const SHARED: usize = 1;
    const BYTES: usize = 4;

    #[inline(always)]
    unsafe fn load(from: *const u8, _: usize) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { _mm512_loadu_ps(from.cast()) }
    }
}

impl Plain for F16 {
    const SHARED: usize = 1;
    const BYTES: usize = 2;

    #[inline(always)]
    unsafe fn load(from: *const u8, _: usize) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) }
    }
}

impl Plain for Bf16 {
    const SHARED: usize = 2;
    const BYTES: usize = 2;

    #[inline(always)]
    unsafe fn load(from: *const u8, input: usize) -> __m512 {
        // SAFETY: the caller's promise. A bf16 is the upper half of an f32.
        unsafe {
            let pairs = _mm512_loadu_si512(from.cast());
            let upper = if input == 0 {
                _mm512_slli_epi32::<16>(pairs)
            } else {
                _mm512_and_si512(pairs, _mm512_set1_epi32(0xffff_0000u32.cast_signed()))
            };
            _mm512_castsi512_ps(upper)
        }
    }
}

/// # Safety
/// The processor has AVX-512 F, BW and VL; and as for [`Output::put`], for all
/// of the input's rows.
#[cfg_attr(not(feature = "emulate-avx512"), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni"))]
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
                4..TILE => plain_tile::<T, 4>(panel, x, row, out),
                _ => plain_tile::<T, TILE>(panel, x, row, out),
            }
        }
    }
}

/// `R` rows from `first`; returns `R`.
///
/// # Safety
/// As for [`plain`], with rows and inputs in bounds.
#[inline]
#[cfg_attr(not(feature = "emulate-avx512"), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni"))]
unsafe fn plain_tile<T: Plain, const R: usize>(
    panel: &[u8],
    x: Input<'_, f32>,
    first: usize,
    out: Output,
) -> usize {
    let mut sums = [_mm512_setzero_ps(); R];
    for i in (0..x.stride).step_by(T::SHARED) {
        if R < TILE {
            ahead(panel.as_ptr().wrapping_add(i * LANES * T::BYTES), T::SHARED * LANES * T::BYTES);
        }
        for input in 0..T::SHARED.min(x.stride - i) {
            // SAFETY: input `i + input` of the panel and of each row lie in bounds.
            unsafe {
                let w = T::load(panel.as_ptr().add(i * LANES * T::BYTES), input);
                for (r, sum) in sums.iter_mut().enumerate() {
                    let x = _mm512_set1_ps(*x.data.as_ptr().add((first + r) * x.stride + i + input));
                    *sum = _mm512_fmadd_ps(w, x, *sum);
                }
            }
        }
    }
    for (r, &sums) in sums.iter().enumerate() {
        // SAFETY: the caller's promise.
        unsafe { put(out, first + r, sums) };
    }
    R
}
