//! The reference: products one row at a time.

use half::{bf16, f16};

use super::{Input, Output};
use crate::{
    Format,
    cpu::{
        quantise::QBlock,
        weights::{BLOCK, LANES, PackedBlock, Packing},
    },
};

/// Σ over blocks of `d·(scale·Σ q·x − OFFSET·sum)`, or `d·scale·Σ q·x + m·sum`.
///
/// # Safety
/// As for [`Output::put`], for all of the input's rows.
pub(super) unsafe fn quantised<P: Packing>(panel: &[u8], x: Input<'_, QBlock>, out: Output) {
    let per_group = BLOCK / P::GROUPS;
    for row in 0..x.rows {
        let mut sums = [0.0f32; LANES];
        for (i, activations) in x.row(row).iter().enumerate() {
            let block = PackedBlock::<P>::of(panel, i);
            for group in 0..P::GROUPS {
                let sum = activations.group_sum(group, P::GROUPS);
                let inputs = group * per_group..(group + 1) * per_group;
                for (lane, total) in sums.iter_mut().enumerate() {
                    let dot: i32 = inputs
                        .clone()
                        .map(|i| i32::from(block.q(lane, i)) * i32::from(activations.q[i]))
                        .sum();
                    let (d, dot) = (block.d(group, lane), dot as f32 * activations.scale);
                    *total += if P::AFFINE {
                        d * dot + block.m(group, lane) * sum
                    } else {
                        d * (dot - f32::from(P::OFFSET) * sum)
                    };
                }
            }
        }
        // SAFETY: the caller's promise.
        unsafe { out.put(row, &sums) };
    }
}

/// Σ over inputs of `w·x` for weights of a plain type.
///
/// # Safety
/// As for [`Output::put`], for all of the input's rows.
pub(super) unsafe fn plain(format: Format, panel: &[u8], x: Input<'_, f32>, out: Output) {
    match format {
        Format::F32 => {
            // SAFETY: the caller's promise.
            unsafe { widened::<4, 1>(panel, x, out, f32::from_le_bytes) }
        }
        Format::F16 => {
            // SAFETY: the caller's promise.
            unsafe { widened::<2, 1>(panel, x, out, |b| f16::from_le_bytes(b).to_f32()) }
        }
        _ => {
            // SAFETY: the caller's promise.
            unsafe { widened::<2, 2>(panel, x, out, |b| bf16::from_le_bytes(b).to_f32()) }
        }
    }
}

/// Numbers of `N` bytes, of which `S` share a lane.
///
/// # Safety
/// As for [`Output::put`], for all of the input's rows.
unsafe fn widened<const N: usize, const S: usize>(
    panel: &[u8],
    x: Input<'_, f32>,
    out: Output,
    widen: impl Fn([u8; N]) -> f32,
) {
    let weights = panel.as_chunks::<N>().0;
    for row in 0..x.rows {
        let mut sums = [0.0f32; LANES];
        for (weights, x) in weights.chunks(LANES * S).zip(x.row(row).chunks(S)) {
            for (sum, weights) in sums.iter_mut().zip(weights.as_chunks::<S>().0) {
                for (&w, x) in weights.iter().zip(x) {
                    *sum += widen(w) * x;
                }
            }
        }
        // SAFETY: the caller's promise.
        unsafe { out.put(row, &sums) };
    }
}
