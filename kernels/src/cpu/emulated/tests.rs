//! The emulation against values from the manual, and against the processor.

use std::{arch::x86_64 as real, mem::transmute};

use half::bf16;

use super::*;

/// Sixteen numbers, the given ones first.
fn of<const N: usize>(first: [f32; N]) -> __m512 {
    floats(|i| first.get(i).copied().unwrap_or(0.0))
}

#[test]
fn fused_products_round_once() {
    // (1 + 2⁻¹²)² = 1 + 2⁻¹¹ + 2⁻²⁴, whose last term a rounded product loses.
    let x = 1.0 + 2f32.powi(-12);
    let rest = 1.0 + 2f32.powi(-11);
    let x = _mm512_set1_ps(x);
    assert_eq!(_mm512_fmsub_ps(x, x, _mm512_set1_ps(rest)), _mm512_set1_ps(2f32.powi(-24)));
    assert_eq!(_mm512_fmadd_ps(x, x, _mm512_set1_ps(-rest)), _mm512_set1_ps(2f32.powi(-24)));
}

#[test]
fn byte_products_neither_mix_signs_nor_saturate() {
    let bytes = |b: [u8; 4]| _mm512_set1_epi32(i32::from_le_bytes(b));
    let dot = |sum, a, b| _mm512_dpbusd_epi32(_mm512_set1_epi32(sum), bytes(a), bytes(b)).0[3];
    assert_eq!(dot(5, [255; 4], [0x80; 4]), 5 - 4 * 255 * 128);
    assert_eq!(dot(0, [1, 2, 3, 4], [10, 0xff, 1, 0xfe]), 10 - 2 + 3 - 8);
    assert_eq!(dot(i32::MAX, [1, 0, 0, 0], [1, 0, 0, 0]), i32::MIN);
    let narrow = |v: [u16; 16]| {
        // SAFETY: 32 bytes, of which any are valid.
        unsafe { transmute::<[u16; 16], __m256i>(v) }
    };
    let mut a = [0; 16];
    (a[6], a[7]) = (0xff01, 0x0003);
    let got = words(_mm256_dpbusd_avx_epi32(
        narrow([7, 0].repeat(8).try_into().unwrap()),
        narrow(a),
        narrow([0xff02; 16]),
    ));
    // 7, and in the fourth lane 7 + 1 · 2 + 255 · −1 + 3 · 2.
    assert_eq!(got[..6], [7, 0, 7, 0, 7, 0]);
    assert_eq!((got[6], got[7]), ((7 + 2 - 255 + 6i32) as u16, 0xffff));
}

#[test]
fn the_larger_is_the_second_when_there_is_none() {
    let max = _mm512_max_ps(of([f32::NAN, 1.0, 0.0, -0.0, 2.0]), of([3.0, f32::NAN, -0.0, 0.0, 1.0]));
    assert_eq!(max.0[0], 3.0);
    assert!(max.0[1].is_nan());
    assert!(max.0[2].is_sign_negative() && max.0[3].is_sign_positive());
    assert_eq!(max.0[4], 2.0);
}

#[test]
fn numbers_round_to_even() {
    let a = of([0.5, 1.5, -2.5, 8_388_609.0, f32::NEG_INFINITY, f32::NAN, 3e9, -2_147_483_648.0]);
    let whole = _mm512_roundscale_ps::<8>(a);
    assert_eq!(whole.0[..5], [0.0, 2.0, -2.0, 8_388_609.0, f32::NEG_INFINITY]);
    assert!(whole.0[5].is_nan());
    let min = i32::MIN;
    assert_eq!(_mm512_cvtps_epi32(a).0[..8], [0, 2, -2, 8_388_609, min, min, min, min]);
    // 2²⁴ + 1 and 2²⁴ + 3 lie between two f32.
    assert_eq!(_mm512_cvtepi32_ps(_mm512_set1_epi32(16_777_217)).0[0], 16_777_216.0);
    assert_eq!(_mm512_cvtepi32_ps(_mm512_set1_epi32(16_777_219)).0[0], 16_777_220.0);
}

#[test]
fn comparison_counts_what_is_not_a_number() {
    let mask = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(of([-1.0, 0.0, 1.0, f32::NAN, -0.0]), of([]));
    assert_eq!(mask & 0b1_1111, 0b1_1110);
    let a = of([1.0, 2.0, f32::NAN]);
    assert_eq!(_mm512_maskz_mov_ps(0b10, a), of([0.0, 2.0]));
}

#[test]
fn halves_widen_exactly() {
    // One, the largest, the smallest below normal, minus zero, infinity.
    let half = [0x3c00u16, 0x7bff, 0x0001, 0x8000, 0x7c00];
    let words: [u16; 16] = std::array::from_fn(|i| half.get(i).copied().unwrap_or(0));
    // SAFETY: 32 bytes, of which any are valid.
    let words: __m256i = unsafe { transmute(words) };
    let wide = _mm512_cvtph_ps(words);
    assert_eq!(wide.0[..5], [1.0, 65504.0, 2f32.powi(-24), -0.0, f32::INFINITY]);
    assert!(wide.0[3].is_sign_negative());
    assert_eq!(_mm512_cvtepu16_epi32(words).0[3], 0x8000);
}

#[test]
fn shifts_keep_to_their_lanes() {
    let a = _mm512_set1_epi32(0xf1e2_d3c4u32.cast_signed());
    assert_eq!(_mm512_srli_epi16::<4>(a).0[7].cast_unsigned(), 0x0f1e_0d3c);
    assert_eq!(_mm512_slli_epi32::<16>(a).0[7].cast_unsigned(), 0xd3c4_0000);
    assert_eq!(_mm512_set1_epi8(-2).0[0].cast_unsigned(), 0xfefe_fefe);
}

#[test]
fn a_masked_store_touches_its_lanes_alone() {
    let mut to = [7.0; 3];
    // SAFETY: lanes 0 and 2 lie in `to`.
    unsafe { _mm512_mask_storeu_ps(to.as_mut_ptr(), 0b101, of([1.0, 2.0, 3.0, 4.0])) };
    assert_eq!(to, [1.0, 7.0, 3.0]);
}

#[test]
fn pairs_of_bf16_add_the_second_first_and_flush() {
    let bits = |v: f32| i32::from(bf16::from_f32(v).to_bits());
    let pairs = |first: f32, second: f32| __m512bh([bits(first) | bits(second) << 16; 16]);
    let dot = |sum, a, b| _mm512_dpbf16_ps(_mm512_set1_ps(sum), a, b).0[9];
    assert_eq!(dot(0.5, pairs(2.0, 3.0), pairs(-5.0, 7.0)), 11.5);
    // 1 is lost in 2²⁵ and stays when the second product took that away before.
    let big = 33_554_432.0;
    assert_eq!(dot(big, pairs(1.0, -1.0), pairs(1.0, big)), 1.0);
    assert_eq!(dot(big, pairs(-1.0, 1.0), pairs(big, 1.0)), 0.0);
    assert_eq!(dot(0.0, pairs(1e-39, 0.0), pairs(1e10, 0.0)), 0.0);
    assert_eq!(dot(1e-39, pairs(1e-20, 0.0), pairs(1e-19, 0.0)), 0.0);
    assert!(dot(0.0, pairs(f32::INFINITY, 1.0), pairs(0.0, 1.0)).is_nan());
}

/// Dwords of any bits, among them those of odd numbers.
fn random(state: &mut u64) -> __m512i {
    let odd = [f32::NAN, f32::INFINITY, -0.0, 0.5, -2.5, 1e-40, 3e9, f32::MAX, 16_777_219.0];
    __m512i([(); 16].map(|()| {
        *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        match *state >> 60 {
            0..4 => odd[(*state >> 33) as usize % odd.len()].to_bits().cast_signed(),
            4..10 => ((*state >> 40) as f32 / 65536.0 - 100.0).to_bits().cast_signed(),
            _ => (*state >> 32) as i32,
        }
    }))
}

/// As bits, with one for all that are not a number.
fn bits(v: __m512) -> [u32; 16] {
    v.0.map(|v| if v.is_nan() { f32::NAN.to_bits() } else { v.to_bits() })
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn compare_with_the_processor(rounds: usize) {
    let wide = |v: __m512i| -> real::__m512i {
        // SAFETY: both are 64 bytes, of which any are valid.
        unsafe { transmute(v) }
    };
    let dwords = |v: real::__m512i| -> __m512i {
        // SAFETY: as above.
        unsafe { transmute(v) }
    };
    let floats = |v: real::__m512| -> [u32; 16] {
        // SAFETY: as above.
        bits(unsafe { transmute::<real::__m512, __m512>(v) })
    };
    let mut state = 1;
    for _ in 0..rounds {
        let [a, b, c] = [(); 3].map(|()| random(&mut state));
        let [fa, fb, fc] = [a, b, c].map(_mm512_castsi512_ps);
        let [ra, rb, rc] = [a, b, c].map(wide);
        let [ga, gb, gc] =
            [real::_mm512_castsi512_ps(ra), real::_mm512_castsi512_ps(rb), real::_mm512_castsi512_ps(rc)];
        assert_eq!(bits(_mm512_add_ps(fa, fb)), floats(real::_mm512_add_ps(ga, gb)));
        assert_eq!(bits(_mm512_sub_ps(fa, fb)), floats(real::_mm512_sub_ps(ga, gb)));
        assert_eq!(bits(_mm512_mul_ps(fa, fb)), floats(real::_mm512_mul_ps(ga, gb)));
        assert_eq!(bits(_mm512_fmadd_ps(fa, fb, fc)), floats(real::_mm512_fmadd_ps(ga, gb, gc)));
        assert_eq!(bits(_mm512_fmsub_ps(fa, fb, fc)), floats(real::_mm512_fmsub_ps(ga, gb, gc)));
        assert_eq!(bits(_mm512_max_ps(fa, fb)), floats(real::_mm512_max_ps(ga, gb)));
        let mask = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(fa, fb);
        assert_eq!(mask, real::_mm512_cmp_ps_mask::<_CMP_NLT_UQ>(ga, gb));
        assert_eq!(bits(_mm512_maskz_mov_ps(mask, fc)), floats(real::_mm512_maskz_mov_ps(mask, gc)));
        assert_eq!(bits(_mm512_roundscale_ps::<8>(fa)), floats(real::_mm512_roundscale_ps::<8>(ga)));
        assert_eq!(_mm512_cvtps_epi32(fa), dwords(real::_mm512_cvtps_epi32(ga)));
        assert_eq!(bits(_mm512_cvtepi32_ps(a)), floats(real::_mm512_cvtepi32_ps(ra)));
        assert_eq!(_mm512_castps_si512(fa), dwords(real::_mm512_castps_si512(ga)));
        assert_eq!(_mm512_and_si512(a, b), dwords(real::_mm512_and_si512(ra, rb)));
        assert_eq!(_mm512_add_epi32(a, b), dwords(real::_mm512_add_epi32(ra, rb)));
        assert_eq!(_mm512_slli_epi32::<16>(a), dwords(real::_mm512_slli_epi32::<16>(ra)));
        assert_eq!(_mm512_slli_epi32::<23>(a), dwords(real::_mm512_slli_epi32::<23>(ra)));
        assert_eq!(_mm512_srli_epi16::<4>(a), dwords(real::_mm512_srli_epi16::<4>(ra)));
        assert_eq!(_mm512_dpbusd_epi32(c, a, b), dwords(real::_mm512_dpbusd_epi32(rc, ra, rb)));
        let half = _mm512_castsi512_si256(ra);
        assert_eq!(bits(_mm512_cvtph_ps(half)), floats(real::_mm512_cvtph_ps(half)));
        assert_eq!(_mm512_cvtepu16_epi32(half), dwords(real::_mm512_cvtepu16_epi32(half)));
        if is_x86_feature_detected!("avxvnni") {
            let [sa, sb, sc] = [ra, rb, rc].map(|v| _mm512_castsi512_si256(v));
            // SAFETY: the processor has AVX-VNNI.
            let dots = unsafe { real::_mm256_dpbusd_avx_epi32(sc, sa, sb) };
            assert_eq!(words(_mm256_dpbusd_avx_epi32(sc, sa, sb)), words(dots));
        }
        let (mut emulated, mut stored) = ([7.0f32; 16], [7.0f32; 16]);
        // SAFETY: sixteen numbers each.
        unsafe {
            _mm512_mask_storeu_ps(emulated.as_mut_ptr(), mask, fa);
            real::_mm512_mask_storeu_ps(stored.as_mut_ptr(), mask, ga);
        }
        assert_eq!(emulated.map(f32::to_bits), stored.map(f32::to_bits));
    }
}

#[target_feature(enable = "avx512f,avx512bf16")]
fn compare_bf16_with_the_processor(rounds: usize) {
    let mut state = 2;
    for _ in 0..rounds {
        let [a, b, c] = [(); 3].map(|()| random(&mut state));
        let sum = _mm512_castsi512_ps(c);
        let emulated = _mm512_dpbf16_ps(sum, __m512bh(a.0), __m512bh(b.0));
        // SAFETY: all are vectors of one size, of which any bits are valid.
        let real = unsafe {
            let [a, b] = [a, b].map(|v| transmute::<__m512i, real::__m512bh>(v));
            let sum = real::_mm512_dpbf16_ps(transmute::<__m512, real::__m512>(sum), a, b);
            transmute::<real::__m512, __m512>(sum)
        };
        assert_eq!(bits(emulated), bits(real));
        // SAFETY: as above.
        let [near, emulated] = unsafe {
            let near = real::_mm512_cvtneps_pbh(transmute::<__m512, real::__m512>(sum));
            [near, _mm512_cvtneps_pbh(sum)].map(|v| words(transmute::<__m256bh, __m256i>(v)))
        };
        // What is not a number stays so, whichever.
        let numbers = |v: [u16; 16]| v.map(|v| if bf16::from_bits(v).is_nan() { 0x7fc0 } else { v });
        assert_eq!(numbers(emulated), numbers(near));
    }
}

#[test]
#[expect(clippy::print_stdout, reason = "a test that is skipped says so")]
fn the_processor_does_the_same() {
    if is_x86_feature_detected!("avx512bf16") {
        // SAFETY: it has that, and so AVX-512 F.
        unsafe { compare_bf16_with_the_processor(10_000) };
    } else {
        println!("skipped: this processor has no avx512bf16 to compare with");
    }
    if is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512vnni")
    {
        // SAFETY: it has them.
        unsafe { compare_with_the_processor(10_000) };
    } else {
        println!("skipped: this processor has no avx512 to compare with");
    }
}
