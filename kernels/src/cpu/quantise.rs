//! Activations as int8, the other side of the integer dot products; and as pairs
//! of bf16, that of `vdpbf16ps` and `tdpbf16ps`.

#[cfg(target_arch = "x86_64")]
mod avx2;

use super::{Path, path::vectorised, weights::BLOCK};

/// 32 activations: `x ≈ scale · q`, `q` in −127..=127.
#[derive(Debug, Clone, Copy, PartialEq)]
#[repr(C)]
pub(crate) struct QBlock {
    pub(crate) q: [i8; BLOCK],
    pub(crate) scale: f32,
    /// `scale` times the sum of all q: what a minimum is multiplied with.
    pub(crate) sum: f32,
    /// The same of the first and of the last 16.
    pub(crate) halves: [f32; 2],
}

impl QBlock {
    pub(crate) const ZERO: Self = Self { q: [0; BLOCK], scale: 0.0, sum: 0.0, halves: [0.0; 2] };

    /// The sum of group `group` of `groups`.
    #[inline(always)]
    pub(crate) fn group_sum(&self, group: usize, groups: usize) -> f32 {
        if groups == 1 { self.sum } else { self.halves[group] }
    }
}

/// Activations smaller than this count as zero: `127 / x` would overflow.
const TINY: f32 = 1e-30;

/// Quantises a row: `x.len()` is 32 times `out.len()`.
pub(crate) fn quantise_row(path: Path, x: &[f32], out: &mut [QBlock]) {
    match path {
        Path::Scalar => {
            for (x, out) in x.as_chunks::<BLOCK>().0.iter().zip(out) {
                quantise(x, out);
            }
        }
        // SAFETY: every other path has AVX2, and a `Cpu` takes a path only if the processor
        // has it.
        #[cfg(target_arch = "x86_64")]
        _ => unsafe { avx2::row(x, out) },
        #[cfg(not(target_arch = "x86_64"))]
        _ => unreachable!("a path of another processor"),
    }
}

/// Quantises what [`quantise_row`] rounded off: the sum of both is `x` to about
/// 15 bits.
pub(crate) fn quantise_rest(path: Path, x: &[f32], coarse: &[QBlock], out: &mut [QBlock]) {
    match path {
        Path::Scalar => {
            for ((x, coarse), out) in x.as_chunks::<BLOCK>().0.iter().zip(coarse).zip(out) {
                quantise(&std::array::from_fn(|i| x[i] - coarse.scale * f32::from(coarse.q[i])), out);
            }
        }
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        _ => unsafe { avx2::rest(x, coarse, out) },
        #[cfg(not(target_arch = "x86_64"))]
        _ => unreachable!("a path of another processor"),
    }
}

/// Quantises a block: the reference.
fn quantise(x: &[f32; BLOCK], block: &mut QBlock) {
    // As integers, so that a NaN is the largest of all and is not lost.
    let largest = x.iter().fold(0, |largest, v| (v.to_bits() & 0x7fff_ffff).max(largest));
    let largest = f32::from_bits(largest);
    if largest < TINY {
        *block = QBlock::ZERO;
        return;
    }
    let inverse = 127.0 / largest;
    block.scale = largest / 127.0;
    block.q = x.map(|x| (x * inverse).round_ties_even() as i8);
    let sum = |q: &[i8]| q.iter().map(|&q| i32::from(q)).sum::<i32>();
    let sums = [sum(&block.q[..BLOCK / 2]), sum(&block.q[BLOCK / 2..])];
    block.halves = [block.scale * sums[0] as f32, block.scale * sums[1] as f32];
    block.sum = block.scale * (sums[0] + sums[1]) as f32;
}

/// The bits of the nearest bf16, ties to even; what is not a number stays so.
#[inline(always)]
fn nearest_bf16(x: f32) -> u32 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    if x.is_nan() { bits >> 16 | 0x40 } else { rounded }
}

/// The first of a pair, and the second.
#[inline(always)]
fn numbers_of(pair: u32) -> [f32; 2] {
    [f32::from_bits(pair << 16), f32::from_bits(pair >> 16 << 16)]
}

vectorised! {
    /// Rounds a row to pairs of bf16, the first in the lower half; `x` holds up to
    /// 2 · `out.len()` numbers, and zeros follow.
    fn pair_row(x: &[f32], out: &mut [u32]) {
        let (pairs, rest) = x.as_chunks::<2>();
        for ([a, b], out) in pairs.iter().zip(&mut *out) {
            *out = nearest_bf16(*a) | nearest_bf16(*b) << 16;
        }
        if let ([a], Some(out)) = (rest, out.last_mut()) {
            *out = nearest_bf16(*a);
        }
    }
}

vectorised! {
    /// Rounds what [`pair_row`] rounded off: the sum of both is `x` to 16 bits.
    fn pair_rest(x: &[f32], coarse: &[u32], out: &mut [u32]) {
        for ((x, coarse), out) in x.chunks(2).zip(coarse).zip(out) {
            let [a, b] = numbers_of(*coarse);
            let second = x.get(1).map_or(0, |x| nearest_bf16(x - b));
            *out = nearest_bf16(x[0] - a) | second << 16;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths() -> impl Iterator<Item = Path> {
        Path::ALL.into_iter().filter(|path| path.available())
    }

    /// A block: the reference's, whose q every path has; and its scale and sums, unless they
    /// are none.
    fn quantise(x: [f32; BLOCK]) -> QBlock {
        let mut block = QBlock::ZERO;
        super::quantise(&x, &mut block);
        for path in paths() {
            let mut out = [QBlock::ZERO];
            quantise_row(path, &x, &mut out);
            let same = out[0] == block || !block.scale.is_finite() && !out[0].scale.is_finite();
            assert!(same && out[0].q == block.q, "{path:?}: {:?} is not {block:?}", out[0]);
        }
        block
    }

    #[test]
    fn rounds_to_even_and_keeps_the_extremes() {
        let mut x = [0.0; BLOCK];
        x[..6].copy_from_slice(&[127.0, -127.0, 0.5, 1.5, 2.5, -0.5]);
        x[31] = -3.0;
        let block = quantise(x);
        assert_eq!(block.q[..6], [127, -127, 0, 2, 2, 0]);
        assert_eq!((block.scale, block.sum), (1.0, 1.0));
        assert_eq!(block.halves, [4.0, -3.0]);
    }

    #[test]
    fn zeros_and_numbers_too_small() {
        for tiny in [0.0, f32::MIN_POSITIVE, 1e-40] {
            let block = quantise([tiny; BLOCK]);
            assert_eq!((block.q, block.scale, block.sum), ([0; BLOCK], 0.0, 0.0));
        }
        assert_eq!(quantise([-1e-29; BLOCK]).q, [-127; BLOCK]);
    }

    #[test]
    fn what_is_not_a_number_stays_so() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = [1.0; BLOCK];
            x[17] = bad;
            assert!(!quantise(x).scale.is_finite());
        }
    }

    #[test]
    fn the_rest_brings_fifteen_bits() {
        let x: [f32; BLOCK] =
            std::array::from_fn(|i| (i as f32 * 0.7).sin() * if i == 5 { 40.0 } else { 1.0 });
        let coarse = [quantise(x)];
        let mut reference = [QBlock::ZERO];
        quantise_rest(Path::Scalar, &x, &coarse, &mut reference);
        for path in paths() {
            let mut rest = [QBlock::ZERO];
            quantise_rest(path, &x, &coarse, &mut rest);
            assert_eq!(rest, reference, "{path:?}");
            for (i, x) in x.iter().enumerate() {
                let value = |block: &QBlock| block.scale * f32::from(block.q[i]);
                let (one, both) = (value(&coarse[0]), value(&coarse[0]) + value(&rest[0]));
                assert!((x - one).abs() <= 40.0 / 254.0 * 1.001);
                assert!((x - both).abs() <= 40.0 / 254.0 / 254.0 * 1.01, "{path:?}: {} != {both}", x);
            }
        }
    }

    #[test]
    fn pairs_are_the_nearest_bf16_and_the_rest() {
        // Two ties, just above one, the largest that is finite, and an odd one out.
        let bits = [0x3f80_8000u32, 0x3f81_8000, 0x3f80_8001, 0x7f7f_7fff, 0xc049_0fdb];
        let x = bits.map(f32::from_bits);
        for path in paths() {
            let (mut coarse, mut rest) = ([1; 3], [1; 3]);
            pair_row(path, &x, &mut coarse);
            assert_eq!(coarse, [0x3f82_3f80, 0x7f7f_3f81, 0x0000_c049]);
            pair_rest(path, &x, &coarse, &mut rest);
            let got = coarse.map(numbers_of).into_iter().zip(rest.map(numbers_of));
            let got = got.flat_map(|(a, b)| [a[0] + b[0], a[1] + b[1]]);
            for (x, got) in x.into_iter().zip(got) {
                assert!((x - got).abs() <= x.abs() * 2f32.powi(-17), "{path:?}: {got} != {x}");
            }
            assert_eq!(rest[2] >> 16, 0);
            pair_row(path, &[f32::from_bits(0x7f80_0001), f32::NEG_INFINITY], &mut coarse[..1]);
            assert_eq!(coarse[0], 0xff80_7fc0);
        }
    }
}
