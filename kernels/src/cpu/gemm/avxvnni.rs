//! Products of int8 with AVX-VNNI: `vpdpbusd` on the half-wide vectors of AVX2.
//!
//! It adds four products of unsigned weights and signed activations in 32 bits,
//! so nothing saturates, and does what takes AVX2 three instructions.

use super::{
    Input, Output,
    avx2::{broadcast, put, scales},
};
use crate::cpu::{
    instructions::*,
    quantise::QBlock,
    weights::{BLOCK, Packing},
};

/// # Safety
/// The processor has AVX-VNNI, AVX2, FMA and F16C; and as for [`Output::put`],
/// for all of the input's rows.
#[target_feature(enable = "avx2,fma,f16c")]
#[cfg_attr(not(feature = "emulate-avx512"), target_feature(enable = "avxvnni"))]
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
#[cfg_attr(not(feature = "emulate-avx512"), target_feature(enable = "avxvnni"))]
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
            let rows: [*const QBlock; R] =
                std::array::from_fn(|r| x.data.as_ptr().add((first + r) * x.stride + b));
            for group in 0..P::GROUPS {
                let dots = dots::<P, R, V>(block, rows, lane, group);
                let d = scales::<P, V>(block, group, lane);
                let m = if P::AFFINE { scales::<P, V>(block, P::GROUPS + group, lane) } else { d };
                for (r, sums) in sums.iter_mut().enumerate() {
                    let scale = _mm256_set1_ps((*rows[r]).scale);
                    let sum = (*rows[r]).group_sum(group, P::GROUPS);
                    for (v, total) in sums.iter_mut().enumerate() {
                        let dot = _mm256_cvtepi32_ps(dots[r][v]);
                        *total = if P::AFFINE {
                            let with_min = _mm256_fmadd_ps(m[v], _mm256_set1_ps(sum), *total);
                            _mm256_fmadd_ps(d[v], _mm256_mul_ps(dot, scale), with_min)
                        } else {
                            let offset = _mm256_set1_ps(f32::from(P::OFFSET) * sum);
                            _mm256_fmadd_ps(d[v], _mm256_fmsub_ps(dot, scale, offset), *total)
                        };
                    }
                }
            }
        }
    }
    for (r, sums) in sums.iter().enumerate() {
        // SAFETY: the caller's promise.
        unsafe { put(out, first + r, lane, sums) };
    }
}

/// Σ q·x over a group's inputs.
///
/// # Safety
/// `block` and `rows` point to blocks, and `group` is one of the block's.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
#[cfg_attr(not(feature = "emulate-avx512"), target_feature(enable = "avxvnni"))]
unsafe fn dots<P: Packing, const R: usize, const V: usize>(
    block: *const u8,
    rows: [*const QBlock; R],
    lane: usize,
    group: usize,
) -> [[__m256i; V]; R] {
    let mask = _mm256_set1_epi8(15);
    // Two sums a row and vector: the chain of one alone would be slower.
    let mut sums = [[[_mm256_setzero_si256(); V]; 2]; R];
    let step = if P::NIBBLES { 8 } else { 4 };
    let chunks = BLOCK / step / P::GROUPS;
    for chunk in group * chunks..(group + 1) * chunks {
        // SAFETY: `8 · V` outputs of chunk `chunk` of a block's q, and the
        // chunk's inputs.
        unsafe {
            let bytes = block.add(P::QUANTS + chunk * 64 + lane * 4).cast::<__m256i>();
            for v in 0..V {
                let q = _mm256_loadu_si256(bytes.add(v));
                if P::NIBBLES {
                    let low = _mm256_and_si256(q, mask);
                    let high = _mm256_and_si256(_mm256_srli_epi16::<4>(q), mask);
                    for (&row, sums) in rows.iter().zip(&mut sums) {
                        let x = [broadcast(row, chunk * 8), broadcast(row, chunk * 8 + 4)];
                        sums[0][v] = _mm256_dpbusd_avx_epi32(sums[0][v], low, x[0]);
                        sums[1][v] = _mm256_dpbusd_avx_epi32(sums[1][v], high, x[1]);
                    }
                } else {
                    for (&row, sums) in rows.iter().zip(&mut sums) {
                        let sum = &mut sums[chunk % 2][v];
                        *sum = _mm256_dpbusd_avx_epi32(*sum, q, broadcast(row, chunk * 4));
                    }
                }
            }
        }
    }
    // Not `map`: the library's code has no AVX2, so vectors would pass through
    // memory.
    let mut dots = [[_mm256_setzero_si256(); V]; R];
    for (dots, [even, odd]) in dots.iter_mut().zip(&sums) {
        for (v, dot) in dots.iter_mut().enumerate() {
            *dot = _mm256_add_epi32(even[v], odd[v]);
        }
    }
    dots
}
