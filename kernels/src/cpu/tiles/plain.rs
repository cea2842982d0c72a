//! What the instructions compute, number by number.
//!
//! `tdpbf16ps` (Intel's Software Developer's Manual, volume 2) takes the products of the
//! pairs' first numbers and of their second ones into two sums, pair after pair, each step a
//! multiply-add that is rounded once; the sum of both is added to what the tile held. What
//! is below the normal numbers, going in or coming out, is zero.

use std::cell::Cell;

thread_local! {
    static ROWS: Cell<Option<u8>> = const { Cell::new(None) };
}

/// # Safety
/// None: what is not set, or set twice, panics.
pub(super) unsafe fn configure(rows: u8) {
    assert_eq!(ROWS.replace(Some(rows)), None, "tiles that this thread had set");
}

/// # Safety
/// As for [`configure`].
pub(super) unsafe fn release() {
    assert!(ROWS.take().is_some(), "no tiles were set");
}

/// Zero, of the same sign, for what is below the normal numbers.
fn flushed(x: f32) -> f32 {
    if x.abs() < f32::MIN_POSITIVE { 0f32.copysign(x) } else { x }
}

/// A pair's numbers.
fn numbers(pair: u32) -> [f32; 2] {
    [f32::from_bits(pair << 16), f32::from_bits(pair >> 16 << 16)].map(flushed)
}

/// # Safety
/// As for [`super::products`].
pub(super) unsafe fn products<const T: usize>(
    rows: [*const u32; T],
    stride: usize,
    weights: *const u8,
    steps: usize,
    out: [*mut f32; T],
    out_stride: usize,
) {
    let count: usize = ROWS.get().expect("tiles are set").into();
    for (rows, out) in rows.into_iter().zip(out) {
        for (r, o) in (0..count).flat_map(|r| (0..16).map(move |o| (r, o))) {
            let mut tile = 0.0f32;
            for step in 0..steps {
                let mut sums = [0.0f32; 2];
                for k in 16 * step..16 * (step + 1) {
                    // SAFETY: the caller's promise.
                    let [x, w] = unsafe {
                        let (row, line) = (rows.byte_add(r * stride), weights.add(k * 64));
                        [row.add(k).read_unaligned(), line.cast::<u32>().add(o).read_unaligned()].map(numbers)
                    };
                    for ((sum, x), w) in sums.iter_mut().zip(x).zip(w) {
                        *sum = flushed(x.mul_add(w, *sum));
                    }
                }
                tile = flushed(tile + flushed(sums[0] + sums[1]));
            }
            // SAFETY: the caller's promise.
            unsafe { out.byte_add(r * out_stride).add(o).write(tile) };
        }
    }
}
