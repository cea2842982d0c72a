//! Products of bf16 with AVX-512 BF16: `vdpbf16ps` on pairs of inputs.
//!
//! A vector has the panel's 16 outputs, one a lane, each with two neighbouring
//! inputs. Activations come rounded to bf16, so that one instruction does what
//! takes f32 two.

use std::mem::transmute;

use super::{
    Input, Output,
    avx512::{ahead, put},
};
use crate::cpu::{instructions::*, weights::LANES};

/// Rows of a tile: two sums each, two vectors of weights and an activation.
const TILE: usize = 8;

/// # Safety
/// The processor has AVX-512 F, BW, VL, VNNI and BF16; and as for
/// [`Output::put`], for all of the input's rows.
#[cfg_attr(
    not(feature = "emulate-avx512"),
    target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512bf16")
)]
pub(super) unsafe fn pairs(panel: &[u8], x: Input<'_, u32>, out: Output) {
    assert_eq!(panel.len(), x.stride * LANES * 4, "inputs of the panel and of the rows");
    assert!(x.data.len() >= x.rows * x.stride, "rows of the input");
    let mut row = 0;
    while row < x.rows {
        // SAFETY: the panel has `stride` pairs, as many as each row, and rows
        // `row..row + R` exist; the rest is the caller's promise.
        unsafe {
            row += match x.rows - row {
                1 => tile::<1>(panel, x, row, out),
                2 => tile::<2>(panel, x, row, out),
                3 => tile::<3>(panel, x, row, out),
                4..TILE => tile::<4>(panel, x, row, out),
                _ => tile::<TILE>(panel, x, row, out),
            }
        }
    }
}

/// `R` rows from `first`; returns `R`.
///
/// # Safety
/// As for [`pairs`], with rows and inputs in bounds.
#[inline]
#[cfg_attr(
    not(feature = "emulate-avx512"),
    target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512bf16")
)]
unsafe fn tile<const R: usize>(panel: &[u8], x: Input<'_, u32>, first: usize, out: Output) -> usize {
    // Two sums a row, of even and of odd pairs: the chain of one alone would be
    // slower than memory.
    let mut sums = [[_mm512_setzero_ps(); 2]; R];
    for i in (0..x.stride).step_by(2) {
        if R < TILE {
            ahead(panel.as_ptr().wrapping_add(i * LANES * 4), 2 * LANES * 4);
        }
        for odd in 0..2.min(x.stride - i) {
            // SAFETY: pair `i + odd` of the panel and of each row lie in bounds;
            // vectors of one size, of which any bits are valid.
            unsafe {
                let weights = _mm512_loadu_si512(panel.as_ptr().add((i + odd) * LANES * 4).cast());
                for (r, sums) in sums.iter_mut().enumerate() {
                    let pair = *x.data.as_ptr().add((first + r) * x.stride + i + odd);
                    let pair = _mm512_set1_epi32(pair.cast_signed());
                    sums[odd] = _mm512_dpbf16_ps(
                        sums[odd],
                        transmute::<__m512i, __m512bh>(weights),
                        transmute::<__m512i, __m512bh>(pair),
                    );
                }
            }
        }
    }
    for (r, [even, odd]) in sums.iter().enumerate() {
        // SAFETY: the caller's promise.
        unsafe { put(out, first + r, _mm512_add_ps(*even, *odd)) };
    }
    R
}
