//! Products of bf16 with AMX: tiles of 16 rows and 16 outputs, which keep their sums over
//! all inputs.
//!
//! Quantised weights stay with `vpdpbusd`. A group of 32 inputs has a scale of its own, so that
//! its tile would be multiplied once and stored: faster where nobody else uses the core, slower
//! beside a neighbour (docs/decisions/005).

use super::{Input, Output, ROWS as RUN, TOGETHER, avx512bf16, operand::Aside};
use crate::Format;
use crate::cpu::{
    Path,
    tiles::{self, ROWS, STEP, Tiles},
    weights::LANES,
};

/// Tiles of rows that a load of weights serves.
const SIDE_BY_SIDE: usize = 2;

/// Sets what a run of rows needs for a matrix; nothing if it is not for tiles.
///
/// # Safety
/// The path is the processor's, and this thread has no tiles set.
pub(super) unsafe fn prepare(path: Path, format: Format, inputs: usize, rows: usize) -> Option<Tiles> {
    let tiled = path == Path::Amx && format == Format::BF16 && takes(inputs.div_ceil(2));
    // SAFETY: the caller's promise.
    tiled.then(|| unsafe { Tiles::wide(rows.min(ROWS)) })
}

/// Whether rows of so many pairs are for tiles.
fn takes(pairs: usize) -> bool {
    pairs.is_multiple_of(STEP / 2)
}

/// `W` outputs, those of one panel or of two.
///
/// # Safety
/// The processor has AVX-512 F, BW, VL, VNNI and BF16; [`prepare`] was asked, and two
/// panels only where it set tiles; and as for [`Output::put`], for all of the input's rows.
#[cfg_attr(
    not(feature = "emulate-avx512"),
    target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512bf16")
)]
pub(super) unsafe fn pairs<const W: usize>(panels: &[u8], x: Input<'_, u32>, out: Output) {
    if !takes(x.stride) {
        // SAFETY: the caller's promise.
        return unsafe { avx512bf16::pairs(panels, x, out) };
    }
    assert_eq!(panels.len(), x.stride * W * 4, "inputs of the panels and of the rows");
    assert!(x.data.len() >= x.rows * x.stride && x.rows <= RUN, "rows of the input");
    if out.lanes == W {
        // SAFETY: the caller's promise.
        return unsafe { all_tiles::<W>(panels, x, out) };
    }
    let mut whole = Aside::<W>::NEW;
    // SAFETY: there is room for the run, all of which is put; then the caller's promise.
    unsafe {
        all_tiles::<W>(panels, x, whole.output());
        for (r, row) in whole.rows(x.rows).iter().enumerate() {
            out.put(r, row);
        }
    }
}

/// # Safety
/// As for [`pairs`], with `W` outputs in each row.
unsafe fn all_tiles<const W: usize>(panels: &[u8], x: Input<'_, u32>, out: Output) {
    let count = x.rows.div_ceil(ROWS);
    for first in (0..count).step_by(SIDE_BY_SIDE) {
        // SAFETY: the caller's promise.
        unsafe {
            match (SIDE_BY_SIDE.min(count - first), W / LANES) {
                (1, 1) => some_tiles::<1, 1>(panels, x, first, out),
                (1, _) => some_tiles::<1, TOGETHER>(panels, x, first, out),
                (_, 1) => some_tiles::<SIDE_BY_SIDE, 1>(panels, x, first, out),
                _ => some_tiles::<SIDE_BY_SIDE, TOGETHER>(panels, x, first, out),
            }
        }
    }
}

/// # Safety
/// As for [`all_tiles`] of `P` panels, with the `T` tiles of rows that start with `first`.
unsafe fn some_tiles<const T: usize, const P: usize>(
    panels: &[u8],
    x: Input<'_, u32>,
    first: usize,
    out: Output,
) {
    // The last tile reaches back into the one before rather than beyond the rows.
    let row = |tile: usize| (tile * ROWS).min(x.rows.saturating_sub(ROWS));
    let rows: [usize; T] = std::array::from_fn(|tile| row(first + tile));
    // SAFETY: rows from each tile's first lie in bounds, as many as tiles are set for; a row
    // that two tiles have is written twice.
    unsafe {
        tiles::products::<T, P>(
            rows.map(|row| x.data.as_ptr().add(row * x.stride)),
            4 * x.stride,
            panels.as_ptr(),
            2 * x.stride / STEP,
            rows.map(|row| out.start.add(row * out.stride)),
            4 * out.stride,
        );
    }
}
