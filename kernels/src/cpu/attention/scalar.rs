//! The reference, one number at a time.

use super::tile::{Kernels, SCORES};
use crate::{PAGE_TOKENS, cpu::attention::MAX_HEAD_DIM};

pub(super) struct Scalar;

/// A bf16 is the upper half of an f32.
fn widen(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

impl Kernels for Scalar {
    const TILE: usize = 4;

    unsafe fn scores(count: usize, dim: usize, queries: *const f32, pages: &[*const u16], scores: *mut f32) {
        for query in 0..count {
            // SAFETY: the caller's promise.
            let q = unsafe { std::slice::from_raw_parts(queries.add(query * MAX_HEAD_DIM), dim) };
            for (i, &page) in pages.iter().enumerate() {
                // SAFETY: the caller's promise.
                let keys = unsafe { std::slice::from_raw_parts(page, PAGE_TOKENS * dim) };
                let mut sums = [0.0f32; PAGE_TOKENS];
                for (q, keys) in q.as_chunks::<2>().0.iter().zip(keys.as_chunks::<{ 2 * PAGE_TOKENS }>().0) {
                    for (sum, key) in sums.iter_mut().zip(keys.as_chunks::<2>().0) {
                        *sum += q[0] * widen(key[0]);
                        *sum += q[1] * widen(key[1]);
                    }
                }
                // SAFETY: the caller's promise.
                unsafe {
                    let to = scores.add(query * SCORES + i * PAGE_TOKENS);
                    to.copy_from_nonoverlapping(sums.as_ptr(), PAGE_TOKENS);
                }
            }
        }
    }

    unsafe fn softmax(scores: &mut [f32]) -> (f32, f32) {
        let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let mut sum = 0.0;
        for score in scores {
            *score = (*score - max).exp2();
            sum += *score;
        }
        (max, sum)
    }

    unsafe fn values(
        count: usize,
        dim: usize,
        weights: *const f32,
        pages: &[*const u16],
        sums: *mut f32,
        stride: usize,
    ) {
        for query in 0..count {
            for (i, &page) in pages.iter().enumerate() {
                for token in 0..PAGE_TOKENS {
                    // SAFETY: the caller's promise.
                    unsafe {
                        let weight = *weights.add(query * SCORES + i * PAGE_TOKENS + token);
                        let pair = page.add(token / 2 * 2 * dim);
                        Self::value(dim, weight, pair, token % 2 == 1, sums.add(query * stride));
                    }
                }
            }
        }
    }

    unsafe fn value(dim: usize, weight: f32, pair: *const u16, odd: bool, sums: *mut f32) {
        for d in 0..dim {
            // SAFETY: the caller's promise.
            unsafe { *sums.add(d) += weight * widen(*pair.add(2 * d + usize::from(odd))) }
        }
    }
}
