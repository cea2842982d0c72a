//! AVX2 and FMA: bf16 widened by a shift, sums in f32.
//!
//! Pages lie anywhere, so the hardware does not foresee the next: the kernels
//! ask for it while they work on one.

use std::arch::x86_64::*;

use super::tile::{Kernels, SCORES};
use crate::{
    PAGE_TOKENS,
    cpu::{attention::MAX_HEAD_DIM, rowwise::EXP2},
};

pub(super) struct Avx2;

impl Kernels for Avx2 {
    // 8 sums, 4 vectors of keys, 2 of queries: a fifth or sixth query spills.
    const TILE: usize = 4;

    unsafe fn scores(count: usize, dim: usize, queries: *const f32, pages: &[*const u16], scores: *mut f32) {
        // Few queries take several pages at a time, so that enough sums are
        // under way to hide an addition's latency.
        // SAFETY: the caller's promise.
        unsafe {
            match count {
                0 => (),
                1 => scores_of::<1, 4>(dim, queries, pages, scores),
                2 => scores_of::<2, 2>(dim, queries, pages, scores),
                3 => scores_of::<3, 1>(dim, queries, pages, scores),
                4 => scores_of::<4, 1>(dim, queries, pages, scores),
                _ => unreachable!("{count} queries in a tile"),
            }
        }
    }

    unsafe fn softmax(scores: &mut [f32]) -> (f32, f32) {
        // SAFETY: the caller's promise.
        unsafe { softmax(scores) }
    }

    unsafe fn values(
        count: usize,
        dim: usize,
        weights: *const f32,
        pages: &[*const u16],
        sums: *mut f32,
        stride: usize,
    ) {
        // SAFETY: the caller's promise; a pass takes 8 dimensions a vector, and
        // its width divides `dim`.
        unsafe {
            match count {
                0 => (),
                1 if dim.is_multiple_of(64) => values_of::<1, 8>(dim, weights, pages, sums, stride),
                1 => values_of::<1, 2>(dim, weights, pages, sums, stride),
                2 if dim.is_multiple_of(32) => values_of::<2, 4>(dim, weights, pages, sums, stride),
                2 => values_of::<2, 2>(dim, weights, pages, sums, stride),
                3 => values_of::<3, 2>(dim, weights, pages, sums, stride),
                4 => values_of::<4, 2>(dim, weights, pages, sums, stride),
                _ => unreachable!("{count} queries in a tile"),
            }
        }
    }

    unsafe fn value(dim: usize, weight: f32, pair: *const u16, odd: bool, sums: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { value(dim, weight, pair, odd, sums) }
    }
}

/// The first of each lane's two bf16, as f32.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn even(pairs: __m256i) -> __m256 {
    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(pairs))
}

/// The second of each lane's two bf16, as f32.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn odd(pairs: __m256i) -> __m256 {
    _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(0xffff_0000u32.cast_signed())))
}

/// `Q` queries over all pages, `P` pages at a time.
///
/// # Safety
/// As for [`Kernels::scores`].
#[target_feature(enable = "avx2,fma")]
unsafe fn scores_of<const Q: usize, const P: usize>(
    dim: usize,
    queries: *const f32,
    pages: &[*const u16],
    scores: *mut f32,
) {
    let (groups, rest) = pages.as_chunks::<P>();
    for (i, &pages) in groups.iter().enumerate() {
        let next = groups.get(i + 1).unwrap_or(&groups[i]);
        // SAFETY: the caller's promise, for pages of this group.
        unsafe { scores_at::<Q, P>(dim, queries, pages, *next, scores.add(i * P * PAGE_TOKENS)) }
    }
    for (i, &page) in rest.iter().enumerate() {
        // SAFETY: as above.
        unsafe {
            scores_at::<Q, 1>(dim, queries, [page], [page], scores.add((groups.len() * P + i) * PAGE_TOKENS))
        }
    }
}

/// # Safety
/// As for [`Kernels::scores`].
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn scores_at<const Q: usize, const P: usize>(
    dim: usize,
    queries: *const f32,
    pages: [*const u16; P],
    next: [*const u16; P],
    scores: *mut f32,
) {
    let mut sums = [[[_mm256_setzero_ps(); 2]; P]; Q];
    for pair in 0..dim / 2 {
        for (p, page) in pages.iter().enumerate() {
            // SAFETY: 16 lanes of dimension pair `pair`, and the queries' two
            // numbers there.
            unsafe {
                let keys = page.add(pair * 2 * PAGE_TOKENS).cast::<__m256i>();
                _mm_prefetch::<_MM_HINT_T0>(next[p].add(pair * 2 * PAGE_TOKENS).cast());
                let [a, b] = [_mm256_loadu_si256(keys), _mm256_loadu_si256(keys.add(1))];
                let k = [even(a), even(b)];
                for (q, sums) in sums.iter_mut().enumerate() {
                    let query = _mm256_set1_ps(*queries.add(q * MAX_HEAD_DIM + 2 * pair));
                    sums[p][0] = _mm256_fmadd_ps(query, k[0], sums[p][0]);
                    sums[p][1] = _mm256_fmadd_ps(query, k[1], sums[p][1]);
                }
                let k = [odd(a), odd(b)];
                for (q, sums) in sums.iter_mut().enumerate() {
                    let query = _mm256_set1_ps(*queries.add(q * MAX_HEAD_DIM + 2 * pair + 1));
                    sums[p][0] = _mm256_fmadd_ps(query, k[0], sums[p][0]);
                    sums[p][1] = _mm256_fmadd_ps(query, k[1], sums[p][1]);
                }
            }
        }
    }
    for (q, sums) in sums.iter().enumerate() {
        for (p, sums) in sums.iter().enumerate() {
            // SAFETY: 16 scores of query `q` and page `p`.
            unsafe {
                let to = scores.add(q * SCORES + p * PAGE_TOKENS);
                _mm256_storeu_ps(to, sums[0]);
                _mm256_storeu_ps(to.add(8), sums[1]);
            }
        }
    }
}

/// # Safety
/// As for [`Kernels::softmax`].
#[target_feature(enable = "avx2,fma")]
unsafe fn softmax(scores: &mut [f32]) -> (f32, f32) {
    let chunks = scores.as_chunks_mut::<16>().0;
    let mut max = [_mm256_set1_ps(f32::NEG_INFINITY); 2];
    for chunk in chunks.iter() {
        // SAFETY: 16 scores. A score that is not a number is passed over here
        // and shows in the sum.
        unsafe {
            max[0] = _mm256_max_ps(_mm256_loadu_ps(chunk.as_ptr()), max[0]);
            max[1] = _mm256_max_ps(_mm256_loadu_ps(chunk.as_ptr().add(8)), max[1]);
        }
    }
    let max = lanes(_mm256_max_ps(max[0], max[1])).into_iter().fold(f32::NEG_INFINITY, f32::max);
    let shift = _mm256_set1_ps(max);
    let mut sum = [_mm256_setzero_ps(); 2];
    for chunk in chunks {
        for (half, sum) in sum.iter_mut().enumerate() {
            // SAFETY: 8 of the chunk's 16 scores.
            unsafe {
                let at = chunk.as_mut_ptr().add(half * 8);
                let power = exp2(_mm256_sub_ps(_mm256_loadu_ps(at), shift));
                _mm256_storeu_ps(at, power);
                *sum = _mm256_add_ps(*sum, power);
            }
        }
    }
    (max, lanes(_mm256_add_ps(sum[0], sum[1])).into_iter().sum())
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn lanes(v: __m256) -> [f32; 8] {
    let mut out = [0.0; 8];
    // SAFETY: 8 numbers.
    unsafe { _mm256_storeu_ps(out.as_mut_ptr(), v) };
    out
}

/// `2^x` for x up to 0, exactly 0 below −126.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn exp2(x: __m256) -> __m256 {
    let lost = _mm256_cmp_ps::<_CMP_LT_OQ>(x, _mm256_set1_ps(-126.0));
    let n = _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x);
    let f = _mm256_sub_ps(x, n);
    let mut p = _mm256_set1_ps(EXP2[6]);
    for &c in EXP2[..6].iter().rev() {
        p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(c));
    }
    let exponent = _mm256_slli_epi32::<23>(_mm256_cvtps_epi32(n));
    let power = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), exponent));
    _mm256_andnot_ps(lost, power)
}

/// Pages whose values are summed before the next dimensions: they stay in the
/// first-level cache.
const NEAR: usize = 4;

/// `Q` queries, `8 · W` dimensions at a time.
///
/// # Safety
/// As for [`Kernels::values`]; `8 · W` divides `dim`.
#[target_feature(enable = "avx2,fma")]
unsafe fn values_of<const Q: usize, const W: usize>(
    dim: usize,
    weights: *const f32,
    pages: &[*const u16],
    out: *mut f32,
    stride: usize,
) {
    for (i, near) in pages.chunks(NEAR).enumerate() {
        let next = pages.get((i + 1) * NEAR..).unwrap_or_default();
        // SAFETY: the caller's promise, for these pages' weights.
        unsafe { values_at::<Q, W>(dim, weights.add(i * NEAR * PAGE_TOKENS), near, next, out, stride) }
    }
}

/// # Safety
/// As for [`values_of`].
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn values_at<const Q: usize, const W: usize>(
    dim: usize,
    weights: *const f32,
    pages: &[*const u16],
    next: &[*const u16],
    out: *mut f32,
    stride: usize,
) {
    for d in (0..dim).step_by(8 * W) {
        let mut sums = [[_mm256_setzero_ps(); W]; Q];
        for (q, sums) in sums.iter_mut().enumerate() {
            for (w, sum) in sums.iter_mut().enumerate() {
                // SAFETY: 8 of the query's sums.
                *sum = unsafe { _mm256_loadu_ps(out.add(q * stride + d + 8 * w)) };
            }
        }
        for (i, page) in pages.iter().enumerate() {
            let next = next.get(i).unwrap_or(page);
            for pair in 0..PAGE_TOKENS / 2 {
                let token = i * PAGE_TOKENS + 2 * pair;
                // SAFETY: token pair `pair` has `2 · dim` numbers from there, and
                // each query two weights.
                unsafe {
                    let values = page.add((pair * dim + d) * 2).cast::<__m256i>();
                    _mm_prefetch::<_MM_HINT_T0>(next.add((pair * dim + d) * 2).cast());
                    for w in 0..W {
                        let values = _mm256_loadu_si256(values.add(w));
                        let v = even(values);
                        for (q, sums) in sums.iter_mut().enumerate() {
                            let weight = _mm256_set1_ps(*weights.add(q * SCORES + token));
                            sums[w] = _mm256_fmadd_ps(weight, v, sums[w]);
                        }
                        let v = odd(values);
                        for (q, sums) in sums.iter_mut().enumerate() {
                            let weight = _mm256_set1_ps(*weights.add(q * SCORES + token + 1));
                            sums[w] = _mm256_fmadd_ps(weight, v, sums[w]);
                        }
                    }
                }
            }
        }
        for (q, sums) in sums.iter().enumerate() {
            for (w, &sum) in sums.iter().enumerate() {
                // SAFETY: 8 of the query's sums.
                unsafe { _mm256_storeu_ps(out.add(q * stride + d + 8 * w), sum) };
            }
        }
    }
}

/// # Safety
/// As for [`Kernels::value`].
#[target_feature(enable = "avx2,fma")]
unsafe fn value(dim: usize, weight: f32, pair: *const u16, second: bool, sums: *mut f32) {
    let weight = _mm256_set1_ps(weight);
    for d in (0..dim).step_by(8) {
        // SAFETY: 8 lanes of the pair and 8 sums.
        unsafe {
            let values = _mm256_loadu_si256(pair.add(2 * d).cast());
            let v = if second { odd(values) } else { even(values) };
            let at = sums.add(d);
            _mm256_storeu_ps(at, _mm256_fmadd_ps(weight, v, _mm256_loadu_ps(at)));
        }
    }
}
