//! Plain weights to blocks of 32, as `--quantize` asks.

use std::thread;

use half::f16;

use crate::{Format, HostMatrix, KernelError};

/// Numbers in a block.
const BLOCK: usize = 32;

/// Packs a matrix of plain numbers as [`Format::Q8_0`] or [`Format::Q4_1`], on
/// `threads` threads. The result are the bytes of a [`HostMatrix`] of that
/// format and the same shape.
///
/// Eight bits round to the nearest of 255 steps of the block's largest number.
/// Four bits round to 16 steps between its smallest and its largest, after which
/// the two scales are fitted once more to the rounded numbers by least squares.
///
/// # Errors
/// [`KernelError::Blocks`] when rows do not divide into blocks of 32.
///
/// # Panics
/// When `to` is another format, which is a bug of the caller.
pub fn quantize(source: &HostMatrix<'_>, to: Format, threads: usize) -> Result<Vec<u8>, KernelError> {
    let pack = match to {
        Format::Q8_0 => q8_0,
        Format::Q4_1 => q4_1,
        other => panic!("nothing is quantised to {other} here"),
    };
    let (rows, cols) = (source.rows(), source.cols());
    if !cols.is_multiple_of(BLOCK) {
        return Err(KernelError::Blocks { format: to.name(), block: BLOCK, cols });
    }
    let row_bytes = to.row_bytes(cols);
    let mut out = vec![0; rows * row_bytes];
    let share = rows.div_ceil(threads.max(1));
    thread::scope(|scope| {
        for (part, bytes) in out.chunks_mut(share * row_bytes).enumerate() {
            scope.spawn(move || {
                let mut numbers = vec![0.0; cols];
                for (i, row) in bytes.chunks_exact_mut(row_bytes).enumerate() {
                    source.dequantize_row(part * share + i, &mut numbers);
                    let blocks = row.chunks_exact_mut(to.block_bytes());
                    numbers.as_chunks().0.iter().zip(blocks).for_each(|(w, block)| pack(w, block));
                }
            });
        }
    });
    Ok(out)
}

fn q8_0(w: &[f32; BLOCK], out: &mut [u8]) {
    let largest = w.iter().fold(0.0f32, |largest, w| largest.max(w.abs()));
    let d = f16::from_f32(largest / 127.0);
    out[..2].copy_from_slice(&d.to_le_bytes());
    let inverse = inverse(d.to_f32());
    for (q, w) in out[2..].iter_mut().zip(w) {
        // The cast saturates: a scale that was rounded down may ask for 128.
        *q = ((w * inverse).round_ties_even().max(-127.0) as i8).cast_unsigned();
    }
}

fn q4_1(w: &[f32; BLOCK], out: &mut [u8]) {
    let min = w.iter().copied().fold(f32::INFINITY, f32::min);
    let max = w.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let first = Affine::new((max - min) / 15.0, min);
    let fitted = first.fit(w);
    let best = if fitted.error(w) < first.error(w) { fitted } else { first };
    out[..2].copy_from_slice(&best.d.to_le_bytes());
    out[2..4].copy_from_slice(&best.m.to_le_bytes());
    for (j, byte) in out[4..].iter_mut().enumerate() {
        *byte = best.q(w[j]) | best.q(w[j + BLOCK / 2]) << 4;
    }
}

/// Weights as `d·q + m`, q in 0..=15.
#[derive(Clone, Copy)]
struct Affine {
    d: f16,
    m: f16,
}

impl Affine {
    fn new(d: f32, m: f32) -> Self {
        Self { d: f16::from_f32(d), m: f16::from_f32(m) }
    }

    fn q(self, w: f32) -> u8 {
        ((w - self.m.to_f32()) * inverse(self.d.to_f32())).round_ties_even().clamp(0.0, 15.0) as u8
    }

    /// The scales that lie nearest to `w` for the q that these give: the line of
    /// least squares through (q, w).
    fn fit(self, w: &[f32; BLOCK]) -> Self {
        let n = BLOCK as f32;
        let (mut q1, mut q2, mut w1, mut qw) = (0.0, 0.0, 0.0, 0.0);
        for &w in w {
            let q = f32::from(self.q(w));
            q1 += q;
            q2 += q * q;
            w1 += w;
            qw += q * w;
        }
        let spread = n * q2 - q1 * q1;
        if spread == 0.0 {
            return self;
        }
        let d = (n * qw - q1 * w1) / spread;
        Self::new(d, (w1 - d * q1) / n)
    }

    fn error(self, w: &[f32; BLOCK]) -> f32 {
        w.iter().map(|&w| (self.d.to_f32() * f32::from(self.q(w)) + self.m.to_f32() - w).powi(2)).sum()
    }
}

/// `1 / d`, or 0 where all numbers of a block are the same.
fn inverse(d: f32) -> f32 {
    if d == 0.0 { 0.0 } else { 1.0 / d }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers around 0, as weights are: a sum of 3 uniform ones.
    fn weights(n: usize) -> Vec<f32> {
        let mut state = 1u64;
        let mut uniform = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1 << 24) as f32 - 0.5
        };
        (0..n).map(|_| (uniform() + uniform() + uniform()) * 0.1).collect()
    }

    /// Root of the mean square error, over that of the numbers.
    fn distance(w: &[f32], to: Format, threads: usize) -> f32 {
        let (rows, cols) = (w.len() / 64, 64);
        let bytes: Vec<u8> = w.iter().flat_map(|w| w.to_le_bytes()).collect();
        let source = HostMatrix::new(Format::F32, rows, cols, &bytes).unwrap();
        let packed = quantize(&source, to, threads).unwrap();
        assert_eq!(packed, quantize(&source, to, 1).unwrap(), "whatever the threads");
        let packed = HostMatrix::new(to, rows, cols, &packed).unwrap();
        let (mut error, mut size) = (0.0, 0.0);
        let mut row = vec![0.0; cols];
        for (i, w) in w.chunks_exact(cols).enumerate() {
            packed.dequantize_row(i, &mut row);
            error += w.iter().zip(&row).map(|(w, v)| (w - v) * (w - v)).sum::<f32>();
            size += w.iter().map(|w| w * w).sum::<f32>();
        }
        (error / size).sqrt()
    }

    #[test]
    fn is_as_near_as_the_steps_are_wide() {
        let w = weights(64 * 37);
        // Steps of s are s/√12 apart from the truth: of 2·2.4 σ in 254 and 15.
        for (to, most) in [(Format::Q8_0, 0.0062), (Format::Q4_1, 0.094)] {
            let distance = distance(&w, to, 3);
            assert!(distance > most / 2.0 && distance < most, "{to}: {distance}");
        }
    }

    #[test]
    fn blocks_of_one_number_and_of_zeros_are_exact() {
        for w in [0.0, 0.25, -3.0] {
            let bytes: Vec<u8> = [w; 32].iter().flat_map(|w: &f32| w.to_le_bytes()).collect();
            let source = HostMatrix::new(Format::F32, 1, 32, &bytes).unwrap();
            let mut out = [1.0; 32];
            for (to, off) in [(Format::Q8_0, 1e-3 * w.abs()), (Format::Q4_1, 0.0)] {
                let packed = quantize(&source, to, 1).unwrap();
                HostMatrix::new(to, 1, 32, &packed).unwrap().dequantize_row(0, &mut out);
                assert!(out.iter().all(|v| (v - w).abs() <= off), "{to} of {w}: {}", out[0]);
            }
        }
    }

    #[test]
    fn rows_that_do_not_divide_are_refused() {
        let source = HostMatrix::new(Format::F32, 1, 33, &[0; 132]).unwrap();
        let error = quantize(&source, Format::Q8_0, 1).unwrap_err();
        assert!(matches!(error, KernelError::Blocks { block: 32, cols: 33, .. }), "{error}");
    }
}
