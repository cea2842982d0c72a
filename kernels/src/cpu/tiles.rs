//! The tile registers of AMX: eight matrices of up to 16 rows of up to 64 bytes, and their
//! products in bf16.
//!
//! Rust has no stable intrinsics for them, so each operation is some lines of assembly that
//! load tiles, multiply and store: nothing stays in a register between two calls but the
//! shapes, which a [`Tiles`] sets. What they compute is written in plain Rust as well.
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

pub(super) use run::{products, scores, weighted};

/// Rows of a tile at most.
pub(super) const ROWS: usize = 16;
/// Bf16 in a full tile's row: what a step takes of each input and output.
pub(super) const STEP: usize = 32;
/// Bf16 that a query's number is the sum of.
pub(super) const TERMS: usize = 2;

/// Rows and bytes in a row of each register.
type Shapes = [(u8, u16); 8];

/// For [`products`] and [`scores`]: four sums and two left sides of so many rows, and two
/// right sides of 16.
const fn wide(rows: u8) -> Shapes {
    let (left, right) = ((rows, 64), (16, 64));
    [left, left, left, left, left, left, right, right]
}

/// For [`weighted`]: four sums, two left sides of 32 bytes, and two right sides of 8 rows.
const fn narrow(rows: u8) -> Shapes {
    let (sum, left, right) = ((rows, 64), (rows, 32), (8, 64));
    [sum, sum, sum, sum, left, left, right, right]
}

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
    /// For [`products`] and [`scores`] of so many rows, 1 to 16.
    ///
    /// # Safety
    /// Tiles are [`available`], and this thread has no others set.
    pub(super) unsafe fn wide(rows: usize) -> Self {
        // SAFETY: the caller's promise.
        unsafe { Self::set(rows, wide) }
    }

    /// For [`weighted`] of so many rows, 1 to 16.
    ///
    /// # Safety
    /// As for [`wide`](Self::wide).
    pub(super) unsafe fn narrow(rows: usize) -> Self {
        // SAFETY: the caller's promise.
        unsafe { Self::set(rows, narrow) }
    }

    /// # Safety
    /// As for [`wide`](Self::wide).
    unsafe fn set(rows: usize, shapes: fn(u8) -> Shapes) -> Self {
        assert!((1..=ROWS).contains(&rows), "{rows} rows of a tile");
        // SAFETY: the caller's promise.
        unsafe { run::configure(&shapes(rows as u8)) };
        Self { of_this_thread: PhantomData }
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: whoever made it promised that there are tiles.
        unsafe { run::release() }
    }
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
                3 if extreme => f32::INFINITY,
                4 if extreme => f32::NAN,
                _ => number,
            };
            u32::from(bf16::from_f32(odd).to_bits())
        };
        (0..count).map(|_| half() | half() << 16).collect()
    }

    /// All operations of a module on the same pairs: results as bits, what is not a number
    /// as one.
    macro_rules! results {
        ($module:ident, $rows:expr, $steps:expr, $pairs:expr) => {{
            let (rows, steps): (u8, usize) = ($rows, $steps);
            let from = |pair: usize| &raw const $pairs[pair];
            let pages: [*const u16; 3] = [0, 512, 2048].map(|pair| from(pair).cast());
            let mut out = vec![0.5f32; 5 * 1024];
            let start = out.as_mut_ptr();
            let to = |number: usize| start.wrapping_add(number);
            // SAFETY: there are tiles; what is read and written is as long as the shapes and
            // the steps say, which 4,096 pairs and 5,120 numbers are enough for.
            unsafe {
                $module::configure(&wide(rows));
                let (left, right) = ([from(0), from(64)], from(512).cast());
                $module::products::<2, 1>(left, 64 * steps, right, steps, [0, 256].map(to), 64);
                $module::products::<1, 2>([from(3)], 64 * steps, right, steps, [to(3072)], 128);
                $module::products::<2, 2>(left, 64 * steps, right, steps, [3584, 4096].map(to), 128);
                $module::scores(from(7), steps, pages, to(1024), 256);
                $module::release();
                $module::configure(&narrow(rows));
                $module::weighted::<4>(from(1).cast(), 128, &pages, 256, to(2048), 256);
                $module::release();
            }
            let bits = |x: f32| if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() };
            out.into_iter().map(bits).collect::<Vec<_>>()
        }};
    }

    #[test]
    #[expect(clippy::print_stdout, reason = "a test that is skipped says so")]
    fn plain_rust_and_the_instructions_agree_to_the_bit() {
        if !available() {
            println!("skipped: this processor has no AMX to compare with");
            return;
        }
        for (rows, steps, extreme) in [(1, 1, false), (3, 2, true), (16, 1, true), (16, 3, false)] {
            let pairs = pairs(4096, 7, extreme);
            let real = results!(instructions, rows, steps, pairs);
            assert_ne!(real[..16], [0.5f32.to_bits(); 16], "something was computed");
            let plain = results!(plain, rows, steps, pairs);
            assert_eq!(real, plain, "{rows} rows, {steps} steps, extreme: {extreme}");
        }
    }
}
