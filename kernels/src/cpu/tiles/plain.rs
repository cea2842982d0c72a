//! What the instructions compute, number by number.
//!
//! `tdpbf16ps` (Intel's Software Developer's Manual, volume 2) takes the products of the
//! pairs' first numbers and of their second ones into two sums, pair after pair, each step a
//! multiply-add that is rounded once; the sum of both is added to what the tile held. What
//! is below the normal numbers, going in or coming out, is zero.

use std::cell::Cell;

use super::{ROWS, Shapes, TERMS};

/// Numbers of 32 bits in a tile's row.
const COLUMNS: usize = 16;

thread_local! {
    static SHAPES: Cell<Option<Shapes>> = const { Cell::new(None) };
}

/// # Safety
/// None: what is not set, or set twice, panics.
pub(super) unsafe fn configure(shapes: &Shapes) {
    assert_eq!(SHAPES.replace(Some(*shapes)), None, "tiles that this thread had set");
}

/// # Safety
/// As for [`configure`].
pub(super) unsafe fn release() {
    assert!(SHAPES.take().is_some(), "no tiles were set");
}

/// Rows of the sums, if the shapes are `made` of so many.
fn rows_of(made: fn(u8) -> Shapes) -> usize {
    let shapes = SHAPES.get().expect("tiles are set");
    let rows = shapes[0].0;
    assert_eq!(shapes, made(rows), "shapes of the operation");
    rows.into()
}

/// Zero, of the same sign, for what is below the normal numbers.
#[inline(always)]
fn flushed(x: f32) -> f32 {
    if x.abs() < f32::MIN_POSITIVE { 0f32.copysign(x) } else { x }
}

/// A pair's numbers.
#[inline(always)]
fn numbers(pair: u32) -> [f32; 2] {
    [f32::from_bits(pair << 16), f32::from_bits(pair >> 16 << 16)].map(flushed)
}

/// Adds to a tile's row the products of a left row's pairs with as many right rows, whose
/// bytes from one to the next are given.
///
/// # Safety
/// The processor has AVX2 and FMA, as every path has that this stands in for; the pairs can
/// be read.
#[target_feature(enable = "avx2,fma")]
unsafe fn add_products(tile: &mut [f32; COLUMNS], pairs: usize, left: *const u8, right: (*const u8, usize)) {
    let mut sums = [[0.0f32; COLUMNS]; 2];
    for k in 0..pairs {
        // SAFETY: the caller's promise.
        let (left, right) = unsafe {
            let line = right.0.add(k * right.1).cast::<[u32; COLUMNS]>();
            (left.add(4 * k).cast::<u32>().read_unaligned(), line.read_unaligned())
        };
        let left = numbers(left);
        for (sums, half) in sums.iter_mut().zip(0..2) {
            for (sum, right) in sums.iter_mut().zip(right) {
                *sum = flushed(left[half].mul_add(numbers(right)[half], *sum));
            }
        }
    }
    for (column, tile) in tile.iter_mut().enumerate() {
        *tile = flushed(flushed(*tile) + flushed(sums[0][column] + sums[1][column]));
    }
}

/// # Safety
/// As for the instructions.
pub(in crate::cpu) unsafe fn products<const T: usize, const P: usize>(
    rows: [*const u32; T],
    stride: usize,
    weights: *const u8,
    steps: usize,
    out: [*mut f32; T],
    out_stride: usize,
) {
    let each = rows.into_iter().zip(out).flat_map(|run| (0..P).map(move |p| (run, p)));
    for ((rows, out), p) in each {
        for r in 0..rows_of(super::wide) {
            let mut tile = [0.0; COLUMNS];
            // SAFETY: the caller's promise.
            unsafe {
                let (row, panel) = (rows.cast::<u8>().add(r * stride), weights.add(p * 1024 * steps));
                for step in 0..steps {
                    add_products(&mut tile, 16, row.add(64 * step), (panel.add(1024 * step), 64));
                }
                let out = out.byte_add(r * out_stride).add(p * COLUMNS);
                out.cast::<[f32; COLUMNS]>().write_unaligned(tile);
            }
        }
    }
}

/// # Safety
/// As for the instructions.
pub(in crate::cpu) unsafe fn scores<const P: usize>(
    rows: *const u32,
    steps: usize,
    pages: [*const u16; P],
    out: *mut f32,
    stride: usize,
) {
    for (p, page) in pages.into_iter().enumerate() {
        for r in 0..rows_of(super::wide) {
            let mut tile = [0.0; COLUMNS];
            // SAFETY: the caller's promise.
            unsafe {
                for step in 0..steps {
                    for term in (0..TERMS).rev() {
                        let row = rows.cast::<u8>().add(((step * TERMS + term) * ROWS + r) * 64);
                        add_products(&mut tile, 16, row, (page.cast::<u8>().add(1024 * step), 64));
                    }
                }
                out.byte_add(r * stride).add(p * COLUMNS).cast::<[f32; COLUMNS]>().write_unaligned(tile);
            }
        }
    }
}

/// # Safety
/// As for the instructions.
pub(in crate::cpu) unsafe fn weighted<const C: usize>(
    weights: *const u16,
    weight_stride: usize,
    pages: &[*const u16],
    pair_stride: usize,
    out: *mut f32,
    stride: usize,
) {
    for r in 0..rows_of(super::narrow) {
        for c in 0..C {
            // SAFETY: the caller's promise.
            unsafe {
                let out = out.byte_add(r * stride).add(c * COLUMNS).cast::<[f32; COLUMNS]>();
                let mut tile = out.read_unaligned();
                for (p, page) in pages.iter().enumerate() {
                    let row = weights.cast::<u8>().add(r * weight_stride + 32 * p);
                    add_products(&mut tile, 8, row, (page.cast::<u8>().add(64 * c), pair_stride));
                }
                out.write_unaligned(tile);
            }
        }
    }
}
