//! Keys and values in fewer bits. Each token has scales of its own, so that what
//! a page holds does not depend on how its tokens came.
//!
//! The lanes of a bf16 page (see [`super`]) are `[A][B]` pairs of numbers: `[D/2]
//! [16 tokens]` for keys, `[8 token pairs][D]` for values. In u16:
//!
//! * int8: `{16 scales, [A][B]}`, a lane's two numbers in its low and high byte,
//!   each `scale·q`;
//! * int4: `{[G][16] steps, [G][16] minima, [A/2][B]}`, the numbers of lanes `2a`
//!   and `2a + 1` in four nibbles, each `step·q + minimum` with scales for each
//!   group of up to 32 dimensions.
//!
//! Scales are bf16, and what was no number stays none.

use half::bf16;

use crate::{KvPrecision, PAGE_TOKENS, cpu::path::vectorised};

/// Dimensions that share a step and a minimum of int4.
const GROUP: usize = 32;

/// Where the numbers of a lane stand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Keys,
    Values,
}

impl Side {
    /// Lane `[a][b]` and half of a token's dimension.
    fn place(self, token: usize, d: usize) -> (usize, usize, usize) {
        match self {
            Self::Keys => (d / 2, token, d % 2),
            Self::Values => (token / 2, d, token % 2),
        }
    }

    /// B of `[A][B]`.
    fn width(self, dim: usize) -> usize {
        match self {
            Self::Keys => PAGE_TOKENS,
            Self::Values => dim,
        }
    }
}

/// u16 that the keys of a head in a page take, and its values.
pub(super) fn numbers(precision: KvPrecision, dim: usize) -> usize {
    let lanes = PAGE_TOKENS * dim / 2;
    match precision {
        KvPrecision::Bf16 => 2 * lanes,
        KvPrecision::Int8 => PAGE_TOKENS + lanes,
        KvPrecision::Int4 => 2 * PAGE_TOKENS * dim.div_ceil(GROUP) + lanes / 2,
    }
}

/// Packs one token's key or value into its page.
pub(super) fn store(precision: KvPrecision, side: Side, page: &mut [u16], token: usize, x: &[f32]) {
    let width = side.width(x.len());
    if precision == KvPrecision::Int8 {
        let (scales, lanes) = page.split_at_mut(PAGE_TOKENS);
        let scale = bf16::from_f32(largest(x) / 127.0);
        scales[token] = scale.to_bits();
        let inverse = inverse(scale.to_f32());
        for (d, x) in x.iter().enumerate() {
            let (a, b, half) = side.place(token, d);
            let q = (x * inverse).round_ties_even().clamp(-127.0, 127.0) as i8;
            put(&mut lanes[a * width + b], 8 * half, 0xff, q.cast_unsigned());
        }
        return;
    }
    let groups = x.len().div_ceil(GROUP);
    let (steps, rest) = page.split_at_mut(groups * PAGE_TOKENS);
    let (minima, lanes) = rest.split_at_mut(groups * PAGE_TOKENS);
    for (group, x) in x.chunks(GROUP).enumerate() {
        let min = x.iter().copied().fold(f32::INFINITY, f32::min);
        let max = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let lost = largest(x).is_nan();
        let step = bf16::from_f32(if lost { f32::NAN } else { (max - min) / 15.0 });
        let min = bf16::from_f32(min);
        steps[group * PAGE_TOKENS + token] = step.to_bits();
        minima[group * PAGE_TOKENS + token] = min.to_bits();
        let inverse = inverse(step.to_f32());
        for (d, x) in (group * GROUP..).zip(x) {
            let (a, b, half) = side.place(token, d);
            let q = ((x - min.to_f32()) * inverse).round_ties_even().clamp(0.0, 15.0) as u8;
            put(&mut lanes[a / 2 * width + b], 4 * (a % 2 * 2 + half), 15, q);
        }
    }
}

/// The largest size among numbers; as integers, so that a NaN is the largest of
/// all and is not lost.
fn largest(x: &[f32]) -> f32 {
    f32::from_bits(x.iter().fold(0, |largest, x| (x.to_bits() & 0x7fff_ffff).max(largest)))
}

fn inverse(scale: f32) -> f32 {
    if scale == 0.0 { 0.0 } else { 1.0 / scale }
}

/// Sets some of a lane's bits.
fn put(lane: &mut u16, shift: usize, mask: u16, q: u8) {
    *lane = *lane & !(mask << shift) | u16::from(q) << shift;
}

/// Unpacks a head's keys or values in a page to lanes of two bf16: `out.len()`
/// is 8 times the head's dimension.
pub(super) fn unpack(
    path: super::super::Path,
    precision: KvPrecision,
    side: Side,
    page: &[u16],
    out: &mut [u32],
) {
    match (precision, side) {
        (KvPrecision::Int8, Side::Keys) => keys_of_8(path, page, out),
        (KvPrecision::Int8, Side::Values) => values_of_8(path, page, out),
        (KvPrecision::Int4, Side::Keys) => keys_of_4(path, page, out),
        (KvPrecision::Int4, Side::Values) => values_of_4(path, page, out),
        (KvPrecision::Bf16, _) => unreachable!("bf16 is not packed"),
    }
}

/// Two numbers as bf16, rounded to nearest, in a lane.
#[inline(always)]
fn lane(low: f32, high: f32) -> u32 {
    (low.to_bits().wrapping_add(0x8000) >> 16) | (high.to_bits().wrapping_add(0x8000) & 0xffff_0000)
}

#[inline(always)]
fn wide(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

#[inline(always)]
fn byte(lane: u16, half: usize) -> f32 {
    f32::from((lane >> (8 * half)) as u8 as i8)
}

#[inline(always)]
fn nibble(lane: u16, place: usize) -> f32 {
    f32::from((lane >> (4 * place) & 15) as u8)
}

vectorised! {
    fn keys_of_8(page: &[u16], out: &mut [u32]) {
        let (scales, lanes) = page.split_first_chunk::<PAGE_TOKENS>().expect("a page has scales");
        let scales = scales.map(wide);
        for (lanes, out) in lanes.as_chunks::<PAGE_TOKENS>().0.iter().zip(out.as_chunks_mut::<PAGE_TOKENS>().0) {
            for b in 0..PAGE_TOKENS {
                out[b] = lane(byte(lanes[b], 0) * scales[b], byte(lanes[b], 1) * scales[b]);
            }
        }
    }
}

vectorised! {
    fn values_of_8(page: &[u16], out: &mut [u32]) {
        let (scales, lanes) = page.split_first_chunk::<PAGE_TOKENS>().expect("a page has scales");
        let dim = 2 * out.len() / PAGE_TOKENS;
        for ((scales, lanes), out) in
            scales.as_chunks::<2>().0.iter().zip(lanes.chunks_exact(dim)).zip(out.chunks_exact_mut(dim))
        {
            let scales = [wide(scales[0]), wide(scales[1])];
            for (out, &packed) in out.iter_mut().zip(lanes) {
                *out = lane(byte(packed, 0) * scales[0], byte(packed, 1) * scales[1]);
            }
        }
    }
}

vectorised! {
    fn keys_of_4(page: &[u16], out: &mut [u32]) {
        let dim = 2 * out.len() / PAGE_TOKENS;
        let groups = dim.div_ceil(GROUP);
        let (scales, lanes) = page.split_at(2 * groups * PAGE_TOKENS);
        let scales = scales.as_chunks::<PAGE_TOKENS>().0;
        let packed = lanes.as_chunks::<PAGE_TOKENS>().0.iter();
        // Four dimensions of 16 tokens at a time.
        for (i, (packed, out)) in packed.zip(out.as_chunks_mut::<{ 2 * PAGE_TOKENS }>().0).enumerate() {
            let (steps, minima) = (&scales[4 * i / GROUP], &scales[groups + 4 * i / GROUP]);
            for b in 0..PAGE_TOKENS {
                let (step, min, q) = (wide(steps[b]), wide(minima[b]), packed[b]);
                out[b] = lane(nibble(q, 0) * step + min, nibble(q, 1) * step + min);
                out[PAGE_TOKENS + b] = lane(nibble(q, 2) * step + min, nibble(q, 3) * step + min);
            }
        }
    }
}

vectorised! {
    fn values_of_4(page: &[u16], out: &mut [u32]) {
        let dim = 2 * out.len() / PAGE_TOKENS;
        let groups = dim.div_ceil(GROUP);
        let (scales, lanes) = page.split_at(2 * groups * PAGE_TOKENS);
        let scales = scales.as_chunks::<PAGE_TOKENS>().0;
        // Four tokens at a time.
        for (i, (packed, out)) in lanes.chunks_exact(dim).zip(out.chunks_exact_mut(2 * dim)).enumerate() {
            let (first, second) = out.split_at_mut(dim);
            for (group, packed) in packed.chunks(GROUP).enumerate() {
                let token = |t: usize| (wide(scales[group][4 * i + t]), wide(scales[groups + group][4 * i + t]));
                let [a, b, c, d] = [token(0), token(1), token(2), token(3)];
                let at = group * GROUP..group * GROUP + packed.len();
                for ((&q, out), next) in packed.iter().zip(&mut first[at.clone()]).zip(&mut second[at]) {
                    *out = lane(nibble(q, 0) * a.0 + a.1, nibble(q, 1) * b.0 + b.1);
                    *next = lane(nibble(q, 2) * c.0 + c.1, nibble(q, 3) * d.0 + d.1);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Path;

    fn token(t: usize, dim: usize) -> Vec<f32> {
        (0..dim).map(|d| ((t * 131 + d * 37) % 97) as f32 / 24.0 - 2.0 + (d / 32) as f32).collect()
    }

    /// What a page of 16 tokens reads as, by token and dimension.
    fn read_back(path: Path, precision: KvPrecision, side: Side, x: &[Vec<f32>]) -> Vec<Vec<f32>> {
        let dim = x[0].len();
        let mut page = vec![0xa5a5; numbers(precision, dim)];
        x.iter().enumerate().for_each(|(t, x)| store(precision, side, &mut page, t, x));
        let mut out = vec![0u32; PAGE_TOKENS * dim / 2];
        unpack(path, precision, side, &page, &mut out);
        let number = |t: usize, d: usize| {
            let (a, b, half) = side.place(t, d);
            wide((out[a * side.width(dim) + b] >> (16 * half)) as u16)
        };
        (0..PAGE_TOKENS).map(|t| (0..dim).map(|d| number(t, d)).collect()).collect()
    }

    #[test]
    fn each_number_comes_back_within_half_a_step() {
        for path in Path::ALL.into_iter().filter(|path| path.available()) {
            for dim in [16, 48, 64, 128] {
                let x: Vec<_> = (0..PAGE_TOKENS).map(|t| token(t, dim)).collect();
                for side in [Side::Keys, Side::Values] {
                    for (precision, steps) in [(KvPrecision::Int8, 254.0), (KvPrecision::Int4, 15.0)] {
                        let back = read_back(path, precision, side, &x);
                        for (x, back) in x.iter().flatten().zip(back.iter().flatten()) {
                            // Numbers span up to 8; scales and results are bf16.
                            let most = 8.0 / steps / 2.0 + 8.0 / 256.0;
                            assert!(
                                (x - back).abs() <= most,
                                "{precision:?} {side:?} {dim}: {x} came back as {back}"
                            );
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn a_token_moves_no_other_and_its_loss_shows() {
        for precision in [KvPrecision::Int8, KvPrecision::Int4] {
            for side in [Side::Keys, Side::Values] {
                let mut x: Vec<_> = (0..PAGE_TOKENS).map(|t| token(t, 64)).collect();
                let before = read_back(Path::Scalar, precision, side, &x);
                x[5][3] = f32::NAN;
                let after = read_back(Path::Scalar, precision, side, &x);
                assert!(after[5][3].is_nan());
                for t in (0..PAGE_TOKENS).filter(|&t| t != 5) {
                    assert_eq!(before[t], after[t]);
                }
            }
        }
    }

    #[test]
    fn zeros_stay_zeros() {
        let x = vec![vec![0.0; 32]; PAGE_TOKENS];
        for precision in [KvPrecision::Int8, KvPrecision::Int4] {
            assert_eq!(read_back(Path::Scalar, precision, Side::Keys, &x), x);
        }
    }
}
