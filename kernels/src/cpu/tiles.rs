//! The tile registers of AMX: eight matrices of up to 16 rows of up to 64 bytes, and their
//! products in bf16.
//!
//! Rust has no stable intrinsics for them, so the product here is some lines of assembly
//! that load tiles, multiply and store: nothing stays in a register between two calls but
//! the shapes, which a [`Tiles`] sets. What it computes is written in plain Rust as well.
//! With the feature `emulate-avx512` that stands in for the instructions; where there are
//! both, a test holds them to the same bits.

#[cfg_attr(feature = "emulate-avx512", expect(dead_code, reason = "plain Rust stands in"))]
mod instructions;
#[cfg(any(test, feature = "emulate-avx512"))]
mod plain;

use std::{marker::PhantomData, sync::LazyLock};

#[cfg(not(feature = "emulate-avx512"))]
use instructions as run;
#[cfg(feature = "emulate-avx512")]
use plain as run;

/// Rows of a tile at most.
pub(super) const ROWS: usize = 16;
/// Bf16 in a full tile's row: what a step takes of each input and output.
pub(super) const STEP: usize = 32;

/// Whether the processor has tiles of bf16, and the system lets this process use them.
pub(super) fn available() -> bool {
    static AVAILABLE: LazyLock<bool> = LazyLock::new(instructions::ask);
    *AVAILABLE
}

/// The shapes of this thread's registers, while it lives.
pub(super) struct Tiles {
    of_this_thread: PhantomData<*const ()>,
}

impl Tiles {
    /// For runs of so many rows, 1 to 16.
    ///
    /// # Safety
    /// Tiles are [`available`], and this thread has no others set.
    pub(super) unsafe fn of(rows: usize) -> Self {
        assert!((1..=ROWS).contains(&rows), "{rows} rows of a tile");
        // SAFETY: the caller's promise.
        unsafe { run::configure(rows as u8) };
        Self { of_this_thread: PhantomData }
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: whoever made it promised that there are tiles.
        unsafe { run::release() }
    }
}

/// `out[t][r][o] = Σ_k rows[t][r][k] · weights[k][o]` for `T` runs of rows, 1 to 4. A k is a
/// pair of bf16, of which there are `16 · steps`, at least one step; weights are
/// `[k][16 outputs][2]`. Rows lie `stride` bytes apart, and results `out_stride`.
///
/// # Safety
/// [`Tiles`] are set for each run's rows; all that is named can be read, or written.
#[inline(always)]
pub(super) unsafe fn products<const T: usize>(
    rows: [*const u32; T],
    stride: usize,
    weights: *const u8,
    steps: usize,
    out: [*mut f32; T],
    out_stride: usize,
) {
    assert!(steps > 0, "no step");
    // SAFETY: the caller's promise.
    unsafe { run::products(rows, stride, weights, steps, out, out_stride) }
}

#[cfg(all(test, not(feature = "emulate-avx512")))]
mod tests {
    use half::bf16;

    use super::*;

    /// Reproducible bf16, some of them extreme: subnormal, infinite, not a number.
    fn pairs(count: usize, seed: u32, extreme: bool) -> Vec<u32> {
        let mut state = seed;
        let mut half = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let number = (state >> 8) as f32 / (1 << 23) as f32 - 1.0;
            let odd = match state >> 8 & 63 {
                0 if extreme => f32::from_bits(0x0001_0000),
                1 if extreme => 1e-30 * number,
                2 if extreme => 1e19 * number,
                _ => number,
            };
            u32::from(bf16::from_f32(odd).to_bits())
        };
        (0..count).map(|_| half() | half() << 16).collect()
    }

    #[test]
    fn plain_rust_and_the_instructions_agree_to_the_bit() {
        if !available() {
            return;
        }
        for (rows, steps) in [(1, 1), (3, 2), (16, 1), (16, 5)] {
            for extreme in [false, true] {
                let k = 16 * steps;
                let x = pairs(2 * rows * k, 7, extreme);
                let weights = pairs(k * 16, 11, extreme);
                let results = [instructions::products::<2>, plain::products::<2>].map(|products| {
                    let mut out = vec![f32::NAN; 2 * rows * 16];
                    let runs = [x.as_ptr(), &raw const x[rows * k]];
                    let to = [out.as_mut_ptr(), &raw mut out[rows * 16]];
                    // SAFETY: there are tiles, and all is as long as the shapes say.
                    unsafe {
                        instructions::configure(rows as u8);
                        plain::configure(rows as u8);
                        products(runs, 4 * k, weights.as_ptr().cast(), steps, to, 64);
                        plain::release();
                        instructions::release();
                    }
                    out.into_iter().map(f32::to_bits).collect::<Vec<_>>()
                });
                assert_eq!(results[0], results[1], "{rows} rows, {steps} steps, extreme: {extreme}");
            }
        }
    }
}
