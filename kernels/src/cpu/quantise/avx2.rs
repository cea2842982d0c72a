//! Quantisation by AVX2, for every path that has it: what a compiler makes of the plain
//! loops takes four times as long.

use std::arch::x86_64::*;

use super::{BLOCK, QBlock, TINY};

/// A block's numbers, eight to a vector.
type Numbers = [__m256; 4];

/// # Safety
/// The processor has AVX2.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn row(x: &[f32], out: &mut [QBlock]) {
    for (x, out) in x.as_chunks::<BLOCK>().0.iter().zip(out) {
        block(numbers(x), out);
    }
}

/// # Safety
/// The processor has AVX2.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn rest(x: &[f32], coarse: &[QBlock], out: &mut [QBlock]) {
    for ((x, coarse), out) in x.as_chunks::<BLOCK>().0.iter().zip(coarse).zip(out) {
        let (mut x, scale) = (numbers(x), _mm256_set1_ps(coarse.scale));
        for (x, q) in x.iter_mut().zip(coarse.q.as_chunks::<8>().0) {
            let q = _mm256_cvtepi8_epi32(_mm_set_epi64x(0, i64::from_le_bytes(q.map(i8::cast_unsigned))));
            // Two roundings, as the reference has them.
            *x = _mm256_sub_ps(*x, _mm256_mul_ps(scale, _mm256_cvtepi32_ps(q)));
        }
        block(x, out);
    }
}

#[inline]
#[target_feature(enable = "avx2")]
fn numbers(x: &[f32; BLOCK]) -> Numbers {
    let mut numbers = [_mm256_setzero_ps(); 4];
    for (numbers, x) in numbers.iter_mut().zip(x.as_chunks::<8>().0) {
        // SAFETY: eight numbers.
        *numbers = unsafe { _mm256_loadu_ps(x.as_ptr()) };
    }
    numbers
}

#[inline]
#[target_feature(enable = "avx2")]
fn block(x: Numbers, out: &mut QBlock) {
    let largest = largest(&x);
    if largest < TINY {
        *out = QBlock::ZERO;
        return;
    }
    let inverse = _mm256_set1_ps(127.0 / largest);
    out.scale = largest / 127.0;
    let mut q = [_mm256_setzero_si256(); 4];
    for (q, x) in q.iter_mut().zip(x) {
        // 0 for what is not a number, as in the reference: an infinity times the inverse of one.
        let scaled = _mm256_mul_ps(x, inverse);
        let number = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_ORD_Q>(scaled, scaled));
        *q = _mm256_and_si256(_mm256_cvtps_epi32(scaled), number);
    }
    // Packing interleaves the halves of 128 bits.
    let words = [_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3])];
    let bytes = _mm256_packs_epi16(words[0], words[1]);
    let bytes = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    // SAFETY: a block's 32 bytes.
    unsafe { _mm256_storeu_si256(out.q.as_mut_ptr().cast(), bytes) };
    let pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes);
    let fours = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    let eights = _mm256_hadd_epi32(fours, fours);
    let sixteens = _mm256_hadd_epi32(eights, eights);
    let sums = [_mm256_extract_epi32::<0>(sixteens), _mm256_extract_epi32::<4>(sixteens)];
    out.halves = [out.scale * sums[0] as f32, out.scale * sums[1] as f32];
    out.sum = out.scale * (sums[0] + sums[1]) as f32;
}

/// The largest size, as integers compare, so that a NaN is the largest of all and is not
/// lost.
#[inline]
#[target_feature(enable = "avx2")]
fn largest(x: &Numbers) -> f32 {
    let mut most = _mm256_setzero_si256();
    for &x in x {
        let size = _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7fff_ffff));
        most = _mm256_max_epi32(most, size);
    }
    let four = _mm_max_epi32(_mm256_castsi256_si128(most), _mm256_extracti128_si256::<1>(most));
    let two = _mm_max_epi32(four, _mm_shuffle_epi32::<0b01_00_11_10>(four));
    let one = _mm_max_epi32(two, _mm_shuffle_epi32::<0b00_00_00_01>(two));
    f32::from_bits(_mm_cvtsi128_si32(one).cast_unsigned())
}
