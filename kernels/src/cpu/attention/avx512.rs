//! AVX-512 F: bf16 widened by a shift, sums in f32.
//!
//! As AVX2 does it; a page's 16 tokens are one vector of keys. Queries and weights
//! stay f32: `vdpbf16ps` would round them, at a price that docs/decisions/005 shows.

use super::tile::{Kernels, SCORES};
use crate::{
    PAGE_TOKENS,
    cpu::{attention::MAX_HEAD_DIM, instructions::*, rowwise::EXP2},
};

pub(super) struct Avx512;

/// Calls `$f::<queries, width>` with the tile's count of queries.
macro_rules! by_count {
    ($count:expr, $f:ident::<_, $width:literal>($($arg:expr),*)) => {
        match $count {
            0 => (),
            1 => $f::<1, $width>($($arg),*),
            2 => $f::<2, $width>($($arg),*),
            3 => $f::<3, $width>($($arg),*),
            4 => $f::<4, $width>($($arg),*),
            5 => $f::<5, $width>($($arg),*),
            6 => $f::<6, $width>($($arg),*),
            7 => $f::<7, $width>($($arg),*),
            8 => $f::<8, $width>($($arg),*),
            count => unreachable!("{count} queries in a tile"),
        }
    };
}

impl Kernels for Avx512 {
    const TILE: usize = 8;

    unsafe fn scores(count: usize, dim: usize, queries: *const f32, pages: &[*const u16], scores: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { by_count!(count, scores_of::<_, 2>(dim, queries, pages, scores)) }
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
        // SAFETY: the caller's promise; a pass takes 16 dimensions a vector, and
        // its width divides `dim`.
        unsafe {
            if dim.is_multiple_of(32) {
                by_count!(count, values_of::<_, 2>(dim, weights, pages, sums, stride));
            } else {
                by_count!(count, values_of::<_, 1>(dim, weights, pages, sums, stride));
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
#[cfg_attr(not(feature = "emulate-avx512"), target_feature(enable = "avx512f"))]
fn even(pairs: __m512i) -> __m512 {
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs))
}

/// The second of each lane's two bf16, as f32.
#[inline]
#[cfg_attr(not(feature = "emulate-avx512"), target_feature(enable = "avx512f"))]
fn odd(pairs: __m512i) -> __m512 {
    _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(0xffff_0000u32.cast_signed())))
}

/// `Q` queries over all pages, `P` pages at a time.
///
/// # Safety
/// As for [`Kernels::scores`].
#[cfg_attr(not(feature = "emulate-avx512"), target_feature(enable = "avx512f"))]
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
#[cfg_attr(not(feature = "emulate-avx512"), target_feature(enable = "avx512f"))]
unsafe fn scores_at<const Q: usize, const P: usize>(
    dim: usize,
    queries: *const f32,
    pages: [*const u16; P],
    next: [*const u16; P],
    scores: *mut f32,
) {
    let mut sums = [[_mm512_setzero_ps(); P]; Q];
    for pair in 0..dim / 2 {
        for (p, page) in pages.iter().enumerate() {
            // SAFETY: 16 lanes of dimension pair `pair`, and the queries' two
            // numbers there.
            unsafe {
                _mm_prefetch::<_MM_HINT_T0>(next[p].add(pair * 2 * PAGE_TOKENS).cast());
                let keys = _mm512_loadu_si512(page.add(pair * 2 * PAGE_TOKENS).cast());
                let k = [even(keys), odd(keys)];
                for (q, sums) in sums.iter_mut().enumerate() {
                    let query = queries.add(q * MAX_HEAD_DIM + 2 * pair);
                    sums[p] = _mm512_fmadd_ps(_mm512_set1_ps(*query), k[0], sums[p]);
                    sums[p] = _mm512_fmadd_ps(_mm512_set1_ps(*query.add(1)), k[1], sums[p]);
                }
            }
        }
    }
    for (q, sums) in sums.iter().enumerate() {
        for (p, &sums) in sums.iter().enumerate() {
            // SAFETY: 16 scores of query `q` and page `p`.
            unsafe { _mm512_storeu_ps(scores.add(q * SCORES + p * PAGE_TOKENS), sums) };
        }
    }
}

/// # Safety
/// As for [`Kernels::softmax`].
#[cfg_attr(not(feature = "emulate-avx512"), target_feature(enable = "avx512f"))]
unsafe fn softmax(scores: &mut [f32]) -> (f32, f32) {
    let chunks = scores.as_chunks_mut::<16>().0;
    let mut max = _mm512_set1_ps(f32::NEG_INFINITY);
    for chunk in chunks.iter() {
        // SAFETY: 16 scores. A score that is not a number is passed over here
        // and shows in the sum.
        max = unsafe { _mm512_max_ps(_mm512_loadu_ps(chunk.as_ptr()), max) };
    }
    let max = folded(max, |a, b| if a > b { a } else { b });
    let shift = _mm512_set1_ps(max);
    let mut sum = _mm512_setzero_ps();
    for chunk in chunks {
        // SAFETY: 16 scores.
        unsafe {
            let power = exp2(_mm512_sub_ps(_mm512_loadu_ps(chunk.as_ptr()), shift));
            _mm512_storeu_ps(chunk.as_mut_ptr(), power);
            sum = _mm512_add_ps(sum, power);
        }
    }
    (max, folded(sum, |a, b| a + b))
}

/// One number of all lanes: the second half joins the first, and so on. One lane after the
/// other would take as long as a split's powers.
#[inline]
#[cfg_attr(not(feature = "emulate-avx512"), target_feature(enable = "avx512f"))]
fn folded(v: __m512, join: impl Fn(f32, f32) -> f32) -> f32 {
    let mut lanes = [0.0; 16];
    // SAFETY: 16 numbers.
    unsafe { _mm512_storeu_ps(lanes.as_mut_ptr(), v) };
    for half in [8, 4, 2, 1] {
        for lane in 0..half {
            lanes[lane] = join(lanes[lane], lanes[lane + half]);
        }
    }
    lanes[0]
}

/// `2^x` for x up to 0, exactly 0 below −126.
#[inline]
#[cfg_attr(not(feature = "emulate-avx512"), target_feature(enable = "avx512f"))]
fn exp2(x: __m512) -> __m512 {
    // Not "at least": what is not a number stays.
    let kept = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, _mm512_set1_ps(-126.0));
    let n = _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x);
    let f = _mm512_sub_ps(x, n);
    let mut p = _mm512_set1_ps(EXP2[6]);
    for &c in EXP2[..6].iter().rev() {
        p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(c));
    }
    let exponent = _mm512_slli_epi32::<23>(_mm512_cvtps_epi32(n));
    let power = _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p), exponent));
    _mm512_maskz_mov_ps(kept, power)
}

/// Pages whose values are summed before the next dimensions: they stay in the
/// first-level cache.
const NEAR: usize = 4;

/// `Q` queries, `16 · W` dimensions at a time.
///
/// # Safety
/// As for [`Kernels::values`]; `16 · W` divides `dim`.
#[cfg_attr(not(feature = "emulate-avx512"), target_feature(enable = "avx512f"))]
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
#[cfg_attr(not(feature = "emulate-avx512"), target_feature(enable = "avx512f"))]
unsafe fn values_at<const Q: usize, const W: usize>(
    dim: usize,
    weights: *const f32,
    pages: &[*const u16],
    next: &[*const u16],
    out: *mut f32,
    stride: usize,
) {
    for d in (0..dim).step_by(16 * W) {
        let mut sums = [[_mm512_setzero_ps(); W]; Q];
        for (q, sums) in sums.iter_mut().enumerate() {
            for (w, sum) in sums.iter_mut().enumerate() {
                // SAFETY: 16 of the query's sums.
                *sum = unsafe { _mm512_loadu_ps(out.add(q * stride + d + 16 * w)) };
            }
        }
        for (i, page) in pages.iter().enumerate() {
            let next = next.get(i).unwrap_or(page);
            for pair in 0..PAGE_TOKENS / 2 {
                let token = i * PAGE_TOKENS + 2 * pair;
                // SAFETY: token pair `pair` has `2 · dim` numbers from there, and
                // each query two weights.
                unsafe {
                    let values = page.add((pair * dim + d) * 2).cast::<__m512i>();
                    _mm_prefetch::<_MM_HINT_T0>(next.add((pair * dim + d) * 2).cast());
                    for w in 0..W {
                        let values = _mm512_loadu_si512(values.add(w));
                        let v = [even(values), odd(values)];
                        for (q, sums) in sums.iter_mut().enumerate() {
                            let weight = weights.add(q * SCORES + token);
                            sums[w] = _mm512_fmadd_ps(_mm512_set1_ps(*weight), v[0], sums[w]);
                            sums[w] = _mm512_fmadd_ps(_mm512_set1_ps(*weight.add(1)), v[1], sums[w]);
                        }
                    }
                }
            }
        }
        for (q, sums) in sums.iter().enumerate() {
            for (w, &sum) in sums.iter().enumerate() {
                // SAFETY: 16 of the query's sums.
                unsafe { _mm512_storeu_ps(out.add(q * stride + d + 16 * w), sum) };
            }
        }
    }
}

/// # Safety
/// As for [`Kernels::value`].
#[cfg_attr(not(feature = "emulate-avx512"), target_feature(enable = "avx512f"))]
unsafe fn value(dim: usize, weight: f32, pair: *const u16, second: bool, sums: *mut f32) {
    let weight = _mm512_set1_ps(weight);
    for d in (0..dim).step_by(16) {
        // SAFETY: 16 lanes of the pair and 16 sums.
        unsafe {
            let values = _mm512_loadu_si512(pair.add(2 * d).cast());
            let v = if second { odd(values) } else { even(values) };
            let at = sums.add(d);
            _mm512_storeu_ps(at, _mm512_fmadd_ps(weight, v, _mm512_loadu_ps(at)));
        }
    }
}
