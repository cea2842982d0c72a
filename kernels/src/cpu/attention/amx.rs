//! AMX: a tile of 16 queries with a page, products of bf16 with sums in f32.
//!
//! A query is the sum of two bf16, within 2⁻¹⁷ of it, since an error of a score grows in its
//! power; a weight is one, within 2⁻⁸ (docs/decisions/005). Keys and values are bf16.

use std::mem::{MaybeUninit, transmute};

use super::{
    MAX_HEAD_DIM, SPLIT_PAGES,
    avx512::Avx512,
    tile::{Kernels, SCORES},
};
use crate::{
    PAGE_TOKENS, SPLIT_TOKENS,
    cpu::{
        instructions::*,
        tiles::{self, ROWS, STEP, TERMS, Tiles},
    },
};

/// Pages whose scores are summed side by side, and groups of 16 dimensions of values.
const WIDE: usize = 4;

/// Queries of a tile so few that memory is what it waits for.
const FEW: usize = 4;

pub(super) struct Amx;

/// Whether heads of so many dimensions are for tiles.
pub(super) fn takes(dim: usize) -> bool {
    dim.is_multiple_of(STEP)
}

/// Terms as tiles read them: rows that start within a cache line take four times as long.
#[repr(C, align(64))]
struct Terms<const N: usize>([MaybeUninit<u16>; N]);

impl<const N: usize> Terms<N> {
    const NEW: Self = Self([const { MaybeUninit::uninit() }; N]);

    fn start(&mut self) -> *mut u16 {
        self.0.as_mut_ptr().cast()
    }
}

/// Calls `$f::<count>` with a count of 1 to 4.
macro_rules! up_to_four {
    ($count:expr, $f:ident, $($arg:expr),*) => {
        match $count {
            1 => $f::<1>($($arg),*),
            2 => $f::<2>($($arg),*),
            3 => $f::<3>($($arg),*),
            4 => $f::<4>($($arg),*),
            count => unreachable!("{count} of four"),
        }
    };
}

impl Kernels for Amx {
    const TILE: usize = ROWS;
    const BY_PAGE: bool = true;

    unsafe fn scores(count: usize, dim: usize, queries: *const f32, pages: &[*const u16], scores: *mut f32) {
        // `[step][term][16 queries][32 dimensions]`; rows beyond `count` are never read.
        let mut terms = Terms::<{ MAX_HEAD_DIM * TERMS * ROWS }>::NEW;
        // SAFETY: the caller's promise, and the terms of its queries.
        unsafe {
            if count <= FEW {
                ahead(pages, dim);
            }
            for q in 0..count {
                query_terms(dim, queries.add(q * MAX_HEAD_DIM), terms.start().add(q * STEP));
            }
            let _tiles = Tiles::wide(count);
            for (i, pages) in pages.chunks(WIDE).enumerate() {
                let out = scores.add(i * WIDE * PAGE_TOKENS);
                up_to_four!(pages.len(), scores_of, dim, terms.start().cast(), pages, out);
            }
        }
    }

    unsafe fn softmax(scores: &mut [f32]) -> (f32, f32) {
        // SAFETY: the caller's promise.
        unsafe { Avx512::softmax(scores) }
    }

    unsafe fn values(
        count: usize,
        dim: usize,
        weights: *const f32,
        pages: &[*const u16],
        sums: *mut f32,
        stride: usize,
    ) {
        // `[16 queries][SPLIT_TOKENS]`.
        let mut terms = Terms::<{ ROWS * SPLIT_TOKENS }>::NEW;
        // SAFETY: the caller's promise, and the terms of its weights.
        unsafe {
            if count <= FEW {
                ahead(pages, dim);
            }
            for q in 0..count {
                let to = terms.start().add(q * SPLIT_TOKENS);
                weight_terms(pages.len(), weights.add(q * SCORES), to);
            }
            let _tiles = Tiles::narrow(count);
            for d in (0..dim).step_by(WIDE * 16) {
                let groups = WIDE.min((dim - d) / 16);
                up_to_four!(
                    groups,
                    values_of,
                    dim,
                    d,
                    terms.start().cast_const(),
                    2 * SPLIT_TOKENS,
                    pages,
                    sums.add(d),
                    4 * stride
                );
            }
        }
    }

    unsafe fn value(_: usize, _: f32, _: *const u16, _: bool, _: *mut f32) {
        unreachable!("pages are added whole");
    }
}

/// Asks for pages, into the second-level cache.
fn ahead(pages: &[*const u16], dim: usize) {
    for page in pages {
        for number in (0..PAGE_TOKENS * dim).step_by(32) {
            // SAFETY: it reads nothing, wherever it points.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(page.wrapping_add(number).cast()) };
        }
    }
}

/// # Safety
/// As for [`tiles::scores`], of `P` pages.
unsafe fn scores_of<const P: usize>(dim: usize, terms: *const u32, pages: &[*const u16], out: *mut f32) {
    let pages = pages.as_array::<P>().expect("a chunk of pages");
    // SAFETY: the caller's promise.
    unsafe { tiles::scores::<P>(terms, dim / STEP, *pages, out, 4 * SCORES) }
}

/// # Safety
/// As for [`tiles::weighted`], of the dimensions from `d`.
unsafe fn values_of<const C: usize>(
    dim: usize,
    d: usize,
    terms: *const u16,
    term_stride: usize,
    pages: &[*const u16],
    sums: *mut f32,
    stride: usize,
) {
    let mut from = [std::ptr::null(); SPLIT_PAGES];
    for (from, page) in from.iter_mut().zip(pages) {
        // SAFETY: a pair's numbers from dimension `d`, two to each.
        *from = unsafe { page.add(2 * d) };
    }
    // SAFETY: the caller's promise.
    unsafe { tiles::weighted::<C>(terms, term_stride, &from[..pages.len()], 4 * dim, sums, stride) }
}

/// The nearest bf16, and what is left.
#[inline]
#[cfg_attr(not(feature = "emulate-avx512"), target_feature(enable = "avx512f,avx512bf16"))]
fn split(x: __m512) -> (__m256i, __m512) {
    // SAFETY: both are 32 bytes, of which any are valid.
    let near: __m256i = unsafe { transmute(_mm512_cvtneps_pbh(x)) };
    let wide = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(near)));
    (near, _mm512_sub_ps(x, wide))
}

/// A query as two bf16 a number, in the tiles' order.
///
/// # Safety
/// The processor has AVX-512 F and BF16; `dim` numbers can be read, and all steps' terms of
/// this query's row be written.
#[cfg_attr(not(feature = "emulate-avx512"), target_feature(enable = "avx512f,avx512bf16"))]
unsafe fn query_terms(dim: usize, query: *const f32, to: *mut u16) {
    for d in (0..dim).step_by(16) {
        // SAFETY: 16 of the query's numbers, and their places.
        unsafe {
            let mut rest = _mm512_loadu_ps(query.add(d));
            for term in 0..TERMS {
                let near;
                (near, rest) = split(rest);
                let at = (d / STEP * TERMS + term) * ROWS * STEP + d % STEP;
                _mm256_storeu_si256(to.add(at).cast(), near);
            }
        }
    }
}

/// The weights of some pages' tokens as a bf16 each.
///
/// # Safety
/// As for [`query_terms`], with 16 weights a page.
#[cfg_attr(not(feature = "emulate-avx512"), target_feature(enable = "avx512f,avx512bf16"))]
unsafe fn weight_terms(pages: usize, weights: *const f32, to: *mut u16) {
    for token in (0..pages * PAGE_TOKENS).step_by(PAGE_TOKENS) {
        // SAFETY: 16 weights and their places.
        unsafe {
            let (near, _) = split(_mm512_loadu_ps(weights.add(token)));
            _mm256_storeu_si256(to.add(token).cast(), near);
        }
    }
}
