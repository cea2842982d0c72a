//! AVX-512 and AVX-VNNI in plain Rust, so that their kernels can be tested where
//! they are not.
//!
//! With the feature `emulate-avx512` those kernels are compiled against this module instead of the processor's instructions: the same names, with the
//! semantics of Intel's Intrinsics Guide and Software Developer's Manual. It has
//! just what the kernels use; where an instruction takes an immediate, just the
//! values that they give it. Narrower vectors stay the processor's own.
//!
//! A type here shadows the real one of the same name, so a kernel that mixes
//! them does not compile.

pub(crate) use std::arch::x86_64::*;

use half::{bf16, f16};

/// Sixteen f32.
#[derive(Debug, Clone, Copy, PartialEq)]
#[repr(C, align(64))]
pub(crate) struct __m512([f32; 16]);

/// 64 bytes of integers, as sixteen dwords.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C, align(64))]
pub(crate) struct __m512i([i32; 16]);

/// 32 bf16: two to a dword, the first in its lower half.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct __m512bh([i32; 16]);

/// The f32 that `f` gives for each lane.
#[inline(always)]
fn floats(f: impl Fn(usize) -> f32) -> __m512 {
    let mut out = [0.0; 16];
    for (lane, out) in out.iter_mut().enumerate() {
        *out = f(lane);
    }
    __m512(out)
}

/// The dword that `f` gives for each lane.
#[inline(always)]
fn dwords(f: impl Fn(usize) -> i32) -> __m512i {
    let mut out = [0; 16];
    for (lane, out) in out.iter_mut().enumerate() {
        *out = f(lane);
    }
    __m512i(out)
}

/// The 16 words of a real vector, the lowest first.
#[inline(always)]
fn words(v: __m256i) -> [u16; 16] {
    // SAFETY: both are 32 bytes, of which any are valid.
    unsafe { std::mem::transmute(v) }
}

/// Zeros.
#[inline(always)]
pub(crate) fn _mm512_setzero_ps() -> __m512 {
    __m512([0.0; 16])
}

/// Zeros.
#[inline(always)]
pub(crate) fn _mm512_setzero_si512() -> __m512i {
    __m512i([0; 16])
}

/// `a` in every lane.
#[inline(always)]
pub(crate) fn _mm512_set1_ps(a: f32) -> __m512 {
    __m512([a; 16])
}

/// `a` in every dword.
#[inline(always)]
pub(crate) fn _mm512_set1_epi32(a: i32) -> __m512i {
    __m512i([a; 16])
}

/// `a` in every byte.
#[inline(always)]
pub(crate) fn _mm512_set1_epi8(a: i8) -> __m512i {
    _mm512_set1_epi32(i32::from_le_bytes([a.cast_unsigned(); 4]))
}

/// Sixteen f32 from any address.
///
/// # Safety
/// They are readable.
#[inline(always)]
pub(crate) unsafe fn _mm512_loadu_ps(from: *const f32) -> __m512 {
    // SAFETY: the caller's promise.
    __m512(unsafe { from.cast::<[f32; 16]>().read_unaligned() })
}

/// 64 bytes from any address.
///
/// # Safety
/// They are readable.
#[inline(always)]
pub(crate) unsafe fn _mm512_loadu_si512(from: *const __m512i) -> __m512i {
    // SAFETY: the caller's promise.
    unsafe { from.read_unaligned() }
}

/// Sixteen f32 to any address.
///
/// # Safety
/// They are writable.
#[inline(always)]
pub(crate) unsafe fn _mm512_storeu_ps(to: *mut f32, a: __m512) {
    // SAFETY: the caller's promise.
    unsafe { to.cast::<[f32; 16]>().write_unaligned(a.0) }
}

/// Stores the lanes whose bit is set; touches no other.
///
/// # Safety
/// Those lanes are writable.
#[inline(always)]
pub(crate) unsafe fn _mm512_mask_storeu_ps(to: *mut f32, mask: __mmask16, a: __m512) {
    for (lane, value) in a.0.into_iter().enumerate() {
        if mask >> lane & 1 == 1 {
            // SAFETY: the caller's promise.
            unsafe { to.add(lane).write_unaligned(value) }
        }
    }
}

/// The lanes whose bit is set, zero in the others.
#[inline(always)]
pub(crate) fn _mm512_maskz_mov_ps(mask: __mmask16, a: __m512) -> __m512 {
    floats(|i| if mask >> i & 1 == 1 { a.0[i] } else { 0.0 })
}

/// `a + b`.
#[inline(always)]
pub(crate) fn _mm512_add_ps(a: __m512, b: __m512) -> __m512 {
    floats(|i| a.0[i] + b.0[i])
}

/// `a − b`.
#[inline(always)]
pub(crate) fn _mm512_sub_ps(a: __m512, b: __m512) -> __m512 {
    floats(|i| a.0[i] - b.0[i])
}

/// `a · b`.
#[inline(always)]
pub(crate) fn _mm512_mul_ps(a: __m512, b: __m512) -> __m512 {
    floats(|i| a.0[i] * b.0[i])
}

/// `a · b + c`, rounded once.
#[inline(always)]
pub(crate) fn _mm512_fmadd_ps(a: __m512, b: __m512, c: __m512) -> __m512 {
    // SAFETY: the emulated path is available only where FMA is.
    unsafe { fused(&a, &b, &c) }
}

/// `a · b − c`, rounded once.
#[inline(always)]
pub(crate) fn _mm512_fmsub_ps(a: __m512, b: __m512, c: __m512) -> __m512 {
    _mm512_fmadd_ps(a, b, floats(|i| -c.0[i]))
}

/// One instruction a vector, where the portable form is a call a lane.
#[target_feature(enable = "avx2,fma")]
fn fused(a: &__m512, b: &__m512, c: &__m512) -> __m512 {
    let mut out = [0.0; 16];
    for (lane, out) in out.iter_mut().enumerate() {
        *out = a.0[lane].mul_add(b.0[lane], c.0[lane]);
    }
    __m512(out)
}

/// The larger; `b` when either is not a number or both are zero.
#[inline(always)]
pub(crate) fn _mm512_max_ps(a: __m512, b: __m512) -> __m512 {
    floats(|i| if a.0[i] > b.0[i] { a.0[i] } else { b.0[i] })
}

/// A bit per lane: with `_CMP_NLT_UQ`, set unless `a < b`; so set when either is
/// not a number.
#[inline(always)]
pub(crate) fn _mm512_cmp_ps_mask<const PREDICATE: i32>(a: __m512, b: __m512) -> __mmask16 {
    const { assert!(PREDICATE == _CMP_NLT_UQ) };
    let mut mask = 0;
    for (lane, (a, b)) in a.0.iter().zip(&b.0).enumerate() {
        mask |= u16::from(a.partial_cmp(b) != Some(std::cmp::Ordering::Less)) << lane;
    }
    mask
}

/// Rounded to a whole number, ties to even: immediate 8.
#[inline(always)]
pub(crate) fn _mm512_roundscale_ps<const IMMEDIATE: i32>(a: __m512) -> __m512 {
    const { assert!(IMMEDIATE == _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC) };
    floats(|i| a.0[i].round_ties_even())
}

/// The nearest dword, ties to even; `i32::MIN` for what is none or fits in none.
#[inline(always)]
pub(crate) fn _mm512_cvtps_epi32(a: __m512) -> __m512i {
    const LIMIT: f32 = 2_147_483_648.0;
    dwords(|i| {
        let rounded = a.0[i].round_ties_even();
        if (-LIMIT..LIMIT).contains(&rounded) { rounded as i32 } else { i32::MIN }
    })
}

/// Dwords as f32, rounded to the nearest.
#[inline(always)]
pub(crate) fn _mm512_cvtepi32_ps(a: __m512i) -> __m512 {
    floats(|i| a.0[i] as f32)
}

/// f16 as f32, exactly.
#[inline(always)]
pub(crate) fn _mm512_cvtph_ps(a: __m256i) -> __m512 {
    let a = words(a);
    floats(|i| f16::from_bits(a[i]).to_f32())
}

/// Words as dwords, without a sign.
#[inline(always)]
pub(crate) fn _mm512_cvtepu16_epi32(a: __m256i) -> __m512i {
    let a = words(a);
    dwords(|i| i32::from(a[i]))
}

/// The nearest bf16, ties to even; zero for what is below the normal numbers.
#[inline(always)]
pub(crate) fn _mm512_cvtneps_pbh(a: __m512) -> __m256bh {
    let halves: [u16; 16] = std::array::from_fn(|i| bf16::from_f32(flushed(a.0[i])).to_bits());
    // SAFETY: both are 32 bytes, of which any are valid.
    unsafe { std::mem::transmute(halves) }
}

/// The same bits.
#[inline(always)]
pub(crate) fn _mm512_castsi512_ps(a: __m512i) -> __m512 {
    floats(|i| f32::from_bits(a.0[i].cast_unsigned()))
}

/// The same bits.
#[inline(always)]
pub(crate) fn _mm512_castps_si512(a: __m512) -> __m512i {
    dwords(|i| a.0[i].to_bits().cast_signed())
}

/// `a & b`.
#[inline(always)]
pub(crate) fn _mm512_and_si512(a: __m512i, b: __m512i) -> __m512i {
    dwords(|i| a.0[i] & b.0[i])
}

/// `a + b`, wrapping.
#[inline(always)]
pub(crate) fn _mm512_add_epi32(a: __m512i, b: __m512i) -> __m512i {
    dwords(|i| a.0[i].wrapping_add(b.0[i]))
}

/// Dwords moved left, 0 beyond 31.
#[inline(always)]
pub(crate) fn _mm512_slli_epi32<const BITS: u32>(a: __m512i) -> __m512i {
    dwords(|i| a.0[i].cast_unsigned().checked_shl(BITS).unwrap_or(0).cast_signed())
}

/// Words moved right, zeros coming in; 0 beyond 15.
#[inline(always)]
pub(crate) fn _mm512_srli_epi16<const BITS: u32>(a: __m512i) -> __m512i {
    dwords(|i| {
        let [low, high] = [a.0[i] as u16, (a.0[i] >> 16) as u16].map(|w| w.checked_shr(BITS).unwrap_or(0));
        i32::from(low) | i32::from(high) << 16
    })
}

/// Adds to each dword of `sum` the four products of unsigned bytes of `a` with
/// signed ones of `b`; wraps where `vpdpbusds` would saturate.
#[inline(always)]
pub(crate) fn _mm512_dpbusd_epi32(sum: __m512i, a: __m512i, b: __m512i) -> __m512i {
    dwords(|i| dpbusd(sum.0[i], a.0[i], b.0[i]))
}

/// The same for eight dwords.
#[inline(always)]
pub(crate) fn _mm256_dpbusd_avx_epi32(sum: __m256i, a: __m256i, b: __m256i) -> __m256i {
    // SAFETY: all are 32 bytes, of which any are valid.
    unsafe {
        let [sum, a, b] = [sum, a, b].map(|v| std::mem::transmute::<__m256i, [i32; 8]>(v));
        let mut out = [0; 8];
        for (lane, out) in out.iter_mut().enumerate() {
            *out = dpbusd(sum[lane], a[lane], b[lane]);
        }
        std::mem::transmute(out)
    }
}

#[inline(always)]
fn dpbusd(sum: i32, a: i32, b: i32) -> i32 {
    let products = a.to_le_bytes().into_iter().zip(b.to_le_bytes());
    let dot: i32 = products.map(|(a, b)| i32::from(a) * i32::from(b.cast_signed())).sum();
    sum.wrapping_add(dot)
}

/// Adds to each f32 of `sum` the products of a dword's two bf16, the second first:
/// each product exact, each sum rounded to the nearest. What is below the normal
/// numbers, going in or coming out, is zero.
#[inline(always)]
pub(crate) fn _mm512_dpbf16_ps(sum: __m512, a: __m512bh, b: __m512bh) -> __m512 {
    let first = |v: __m512bh| floats(|i| flushed(f32::from_bits((v.0[i] << 16).cast_unsigned())));
    let second = |v: __m512bh| floats(|i| flushed(f32::from_bits((v.0[i] >> 16 << 16).cast_unsigned())));
    let flush = |v: __m512| floats(|i| flushed(v.0[i]));
    let sum = flush(_mm512_fmadd_ps(second(a), second(b), flush(sum)));
    flush(_mm512_fmadd_ps(first(a), first(b), sum))
}

/// Zero, of the same sign, for what is below the normal numbers.
#[inline(always)]
fn flushed(a: f32) -> f32 {
    if a.abs() < f32::MIN_POSITIVE { 0f32.copysign(a) } else { a }
}

#[cfg(test)]
mod tests;
