//! Products of bf16 with AMX: tiles of 16 rows and 16 outputs, which keep their sums over
//! all inputs.
//!
//! Quantised weights stay with `vpdpbusd`. A group of 32 inputs has a scale of its own, so that
//! its tile would be loaded, multiplied once and stored, and loads and stores of tiles take as
//! long as products and do not overlap with them: it was slower.

use super::{Input, Output, ROWS as RUN, avx512bf16, operand::Aside};
use crate::Format;
use crate::cpu::{
    tiles::{self, ROWS, STEP, Tiles},
    weights::LANES,
};

/// Tiles that a load of weights serves.
const SIDE_BY_SIDE: usize = 4;

/// Sets what a run of rows needs for a matrix; nothing if it is not for tiles.
///
/// # Safety
/// There are tiles, and this thread has none set.
pub(super) unsafe fn prepare(format: Format, inputs: usize, rows: usize) -> Option<Tiles> {
    // SAFETY: the caller's promise.
    (format == Format::BF16 && takes(inputs.div_ceil(2))).then(|| unsafe { Tiles::wide(rows.min(ROWS)) })
}

/// Whether rows of so many pairs are for tiles.
fn takes(pairs: usize) -> bool {
    pairs.is_multiple_of(STEP / 2)
}

/// # Safety
/// The processor has AVX-512 F, BW, VL, VNNI and BF16; [`prepare`] was asked; and as for
/// [`Output::put`], for all of the input's rows.
#[cfg_attr(
    not(feature = "emulate-avx512"),
    target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512bf16")
)]
pub(super) unsafe fn pairs(panel: &[u8], x: Input<'_, u32>, out: Output) {
    if !takes(x.stride) {
        // SAFETY: the caller's promise.
        return unsafe { avx512bf16::pairs(panel, x, out) };
    }
    assert_eq!(panel.len(), x.stride * LANES * 4, "inputs of the panel and of the rows");
    assert!(x.data.len() >= x.rows * x.stride && x.rows <= RUN, "rows of the input");
    if out.lanes == LANES {
        // SAFETY: the caller's promise.
        return unsafe { all_tiles(panel, x, out) };
    }
    let mut whole = Aside::NEW;
    // SAFETY: there is room for the run, all of which is put; then the caller's promise.
    unsafe {
        all_tiles(panel, x, whole.output());
        for (r, row) in whole.rows(x.rows).iter().enumerate() {
            out.put(r, row);
        }
    }
}

/// # Safety
/// As for [`pairs`], with 16 outputs in each row.
unsafe fn all_tiles(panel: &[u8], x: Input<'_, u32>, out: Output) {
    let count = x.rows.div_ceil(ROWS);
    for first in (0..count).step_by(SIDE_BY_SIDE) {
        // SAFETY: the caller's promise.
        unsafe {
            match SIDE_BY_SIDE.min(count - first) {
                1 => some_tiles::<1>(panel, x, first, out),
                2 => some_tiles::<2>(panel, x, first, out),
                3 => some_tiles::<3>(panel, x, first, out),
                _ => some_tiles::<SIDE_BY_SIDE>(panel, x, first, out),
            }
        }
    }
}

/// # Safety
/// As for [`all_tiles`], of which `T` start with tile `first`.
unsafe fn some_tiles<const T: usize>(panel: &[u8], x: Input<'_, u32>, first: usize, out: Output) {
    // The last tile reaches back into the one before rather than beyond the rows.
    let row = |tile: usize| (tile * ROWS).min(x.rows.saturating_sub(ROWS));
    let rows: [usize; T] = std::array::from_fn(|tile| row(first + tile));
    // SAFETY: rows from each tile's first lie in bounds, as many as tiles are set for; a row
    // that two tiles have is written twice.
    unsafe {
        tiles::products(
            rows.map(|row| x.data.as_ptr().add(row * x.stride)),
            4 * x.stride,
            panel.as_ptr(),
            2 * x.stride / STEP,
            rows.map(|row| out.start.add(row * out.stride)),
            4 * out.stride,
        );
    }
}
