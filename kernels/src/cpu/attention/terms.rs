//! What attention with `vdpbf16ps` would cost in accuracy: queries and softmax
//! weights as sums of a few bf16, each the nearest to what the others leave.

use half::bf16;

use super::{
    MAX_HEAD_DIM, finish, merge,
    scalar::Scalar,
    state_len,
    tile::{Kernels, SCORES},
};
use crate::{PAGE_TOKENS, SPLIT_TOKENS, cpu::Path};

/// The reference, with queries of `Q` bf16 and weights of `W`; exact with three.
struct Terms<const Q: usize, const W: usize>;

/// The sum of `terms` bf16 that is nearest to `x`.
fn rounded(x: f32, terms: usize) -> f32 {
    (0..terms).fold(0.0, |sum, _| sum + bf16::from_f32(x - sum).to_f32())
}

impl<const Q: usize, const W: usize> Kernels for Terms<Q, W> {
    const TILE: usize = 1;

    unsafe fn scores(_: usize, dim: usize, queries: *const f32, pages: &[*const u16], scores: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe {
            let query = std::slice::from_raw_parts(queries, dim);
            let query: Vec<f32> = query.iter().map(|&q| rounded(q, Q)).collect();
            Scalar::scores(1, dim, query.as_ptr(), pages, scores);
        }
    }

    unsafe fn softmax(scores: &mut [f32]) -> (f32, f32) {
        // SAFETY: the caller's promise.
        unsafe { Scalar::softmax(scores) }
    }

    unsafe fn values(
        _: usize,
        dim: usize,
        weights: *const f32,
        pages: &[*const u16],
        sums: *mut f32,
        stride: usize,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            let weights = std::slice::from_raw_parts(weights, pages.len() * PAGE_TOKENS);
            let weights: Vec<f32> = weights.iter().map(|&w| rounded(w, W)).collect();
            Scalar::values(1, dim, weights.as_ptr(), pages, sums, stride);
        }
    }

    unsafe fn value(_: usize, _: f32, _: *const u16, _: bool, _: *mut f32) {
        unreachable!("all pages are whole");
    }
}

const KEYS: usize = 4096;
const DIM: usize = 64;
/// log2(e): the kernels take powers of two.
const SCALE: f64 = std::f64::consts::LOG2_E / 8.0;

/// Reproducible numbers of variance 1, now and then a large one.
fn numbers(count: usize, state: &mut u64) -> Vec<f32> {
    let mut uniform = || {
        *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (*state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    let mut number = || uniform() + uniform() + uniform();
    (0..count).map(|i| number() * if i % 97 == 13 { 20.0 } else { 1.0 }).collect()
}

/// Attention of one query over all keys, by a path's kernels.
fn attend<K: Kernels>(query: &[f32], keys: &[Vec<u16>], values: &[Vec<u16>]) -> Vec<f32> {
    let mut padded = vec![0.0; MAX_HEAD_DIM];
    padded[..DIM].copy_from_slice(query);
    let mut whole: Option<Vec<f32>> = None;
    let splits = keys.chunks(SPLIT_TOKENS / PAGE_TOKENS).zip(values.chunks(SPLIT_TOKENS / PAGE_TOKENS));
    for (keys, values) in splits {
        let pointers = |pages: &[Vec<u16>]| pages.iter().map(|page| page.as_ptr()).collect::<Vec<_>>();
        let (mut scores, mut state) = (vec![0.0; SCORES], vec![0.0; state_len(DIM)]);
        // SAFETY: pages and buffers of a split; the test asks for the path first.
        unsafe {
            K::scores(1, DIM, padded.as_ptr(), &pointers(keys), scores.as_mut_ptr());
            (state[0], state[1]) = K::softmax(&mut scores[..SPLIT_TOKENS]);
            K::values(1, DIM, scores.as_ptr(), &pointers(values), state[16..].as_mut_ptr(), 0);
        }
        match &mut whole {
            None => whole = Some(state),
            Some(whole) => merge(Path::Scalar, whole, &state),
        }
    }
    let mut out = vec![0.0; DIM];
    finish(Path::Scalar, &whole.unwrap(), &mut out);
    out
}

/// The same in f64, and what the tests of all paths let f32 miss; `number` is what
/// a page keeps of a key's or value's number.
fn exact(query: &[f32], k: &[f32], v: &[f32], number: impl Fn(f32) -> f64) -> Vec<(f64, f64)> {
    let scores: Vec<(f64, f64)> = k
        .chunks(DIM)
        .map(|k| {
            let terms = query.iter().zip(k).map(|(&q, &k)| f64::from(q) * number(k));
            terms.fold((0.0, 0.0), |(sum, size), t| (sum + t, size + t.abs()))
        })
        .collect();
    let max = scores.iter().fold(f64::MIN, |max, s| max.max(s.0));
    let size = scores.iter().fold(0.0f64, |max, s| max.max(s.1)) / std::f64::consts::LOG2_E;
    let sum: f64 = scores.iter().map(|s| (s.0 - max).exp2()).sum();
    let loss = 1e-6 + size * 2f64.powi(-21);
    let mut out = vec![(0.0, 0.0); DIM];
    for (score, v) in scores.iter().zip(v.chunks(DIM)) {
        for (out, &v) in out.iter_mut().zip(v) {
            let term = (score.0 - max).exp2() / sum * number(v);
            *out = (out.0 + term, out.1 + term.abs() * loss);
        }
    }
    out
}

#[test]
#[expect(clippy::print_stdout, reason = "the figures of docs/decisions/005")]
fn one_or_two_terms_miss_more_than_f32_may() {
    let mut state = 5;
    let (k, v) = (numbers(KEYS * DIM, &mut state), numbers(KEYS * DIM, &mut state));
    let bits = |v: f32| bf16::from_f32(v).to_bits();
    let page_numbers = PAGE_TOKENS * DIM;
    let keys: Vec<Vec<u16>> = k
        .chunks(page_numbers)
        .map(|page| {
            // [D/2][16 tokens][2].
            let at = |i: usize| bits(page[i / 2 % PAGE_TOKENS * DIM + i / (2 * PAGE_TOKENS) * 2 + i % 2]);
            (0..page_numbers).map(at).collect()
        })
        .collect();
    let values: Vec<Vec<u16>> = v
        .chunks(page_numbers)
        .map(|page| {
            // [8 token pairs][D][2].
            let at = |i: usize| bits(page[(i / (2 * DIM) * 2 + i % 2) * DIM + i / 2 % DIM]);
            (0..page_numbers).map(at).collect()
        })
        .collect();
    // The worst share of the bound, and the squares of errors and results.
    let mut figures = [[0.0f64; 3]; 6];
    for _ in 0..24 {
        let query: Vec<f32> = numbers(DIM, &mut state).iter().map(|q| q * 1.5 * SCALE as f32).collect();
        let truth = exact(&query, &k, &v, |v| bf16::from_f32(v).to_f64());
        let whole: Vec<f64> = exact(&query, &k, &v, f64::from).into_iter().map(|(out, _)| out).collect();
        let wide = |out: Vec<f32>| out.into_iter().map(f64::from).collect();
        let results = [
            wide(attend::<Scalar>(&query, &keys, &values)),
            wide(attend::<Terms<3, 2>>(&query, &keys, &values)),
            wide(attend::<Terms<2, 2>>(&query, &keys, &values)),
            wide(attend::<Terms<2, 1>>(&query, &keys, &values)),
            wide(attend::<Terms<1, 1>>(&query, &keys, &values)),
            whole,
        ];
        for (figures, result) in figures.iter_mut().zip(results) {
            for (&(exact, bound), got) in truth.iter().zip(result) {
                let error = (got - exact).abs();
                figures[0] = figures[0].max(error / bound);
                figures[1] += error * error;
                figures[2] += exact * exact;
            }
        }
    }
    let names = ["f32", "terms 3, 2", "terms 2, 2", "terms 2, 1", "terms 1, 1", "keys and values in f64"];
    for (name, [worst, error, size]) in names.iter().zip(figures) {
        println!("{name}: {worst:.2} of the bound at worst, {:.1e} off (rms)", (error / size).sqrt());
    }
    let [f32, three, two, mixed, one, _] = figures.map(|[worst, ..]| worst);
    assert!(f32 < 1.0 && three < 1.0, "three terms hold an f32");
    assert!(two > 1.0 && mixed > 1.0 && one > 1.0, "fewer would do: multiply bf16 by vdpbf16ps");
}
