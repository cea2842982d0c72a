//! Operations on one row at a time: norms, rotation, gates, sums.

use std::f32::consts::{LN_2, LOG2_E};

use super::path::vectorised;
use crate::{Activation, Rope, RopePairing};

/// Partial sums of a reduction: a fixed number, so that the order of additions
/// is the same on every processor.
const PARTIAL: usize = 16;

/// 2^f as a polynomial in f on −0.5..=0.5, to 3e-9: the interpolation in Chebyshev
/// nodes, lowest power first.
pub(crate) const EXP2: [f32; 7] =
    [1.0, LN_2, 0.240_226_5, 0.055_503_27, 0.009_618_057, 0.001_340_042_8, 0.000_154_614_45];

/// `e^x` without a branch or a call, to a few units in the last place; beyond
/// ±87 it stays at the value there.
#[inline(always)]
fn exp(x: f32) -> f32 {
    const ROUND: f32 = 12_582_912.0;
    let x = (x * LOG2_E).clamp(-126.0, 126.0);
    let shifted = x + ROUND;
    let f = x - (shifted - ROUND);
    let mut p = EXP2[6];
    for &c in EXP2[..6].iter().rev() {
        p = p * f + c;
    }
    let n = shifted.to_bits().wrapping_sub(ROUND.to_bits());
    f32::from_bits(p.to_bits().wrapping_add(n << 23))
}

/// `1 / sqrt(mean(x²) + eps)`.
#[inline(always)]
fn inverse_rms(x: &[f32], eps: f32) -> f32 {
    let mut sums = [0.0; PARTIAL];
    let (chunks, rest) = x.as_chunks::<PARTIAL>();
    for chunk in chunks {
        for (sum, v) in sums.iter_mut().zip(chunk) {
            *sum += v * v;
        }
    }
    for (sum, v) in sums.iter_mut().zip(rest) {
        *sum += v * v;
    }
    let mut width = PARTIAL / 2;
    while width > 0 {
        for i in 0..width {
            sums[i] += sums[i + width];
        }
        width /= 2;
    }
    1.0 / (sums[0] / x.len() as f32 + eps).sqrt()
}

vectorised! {
    fn rms_norm(x: &[f32], gain: &[f32], eps: f32, out: &mut [f32]) {
        let scale = inverse_rms(x, eps);
        for ((out, x), gain) in out.iter_mut().zip(x).zip(gain) {
            *out = x * scale * gain;
        }
    }
}

vectorised! {
    /// Norms each head of `gain.len()` numbers.
    fn head_norm(row: &mut [f32], gain: &[f32], eps: f32) {
        for head in row.chunks_exact_mut(gain.len()) {
            let scale = inverse_rms(head, eps);
            for (x, gain) in head.iter_mut().zip(gain) {
                *x = *x * scale * gain;
            }
        }
    }
}

vectorised! {
    fn add(x: &mut [f32], y: &[f32]) {
        for (x, y) in x.iter_mut().zip(y) {
            *x += y;
        }
    }
}

vectorised! {
    fn scale(x: &mut [f32], factor: f32) {
        for x in x {
            *x *= factor;
        }
    }
}

vectorised! {
    fn silu_gate(gate: &[f32], up: &[f32], out: &mut [f32]) {
        for ((out, x), up) in out.iter_mut().zip(gate).zip(up) {
            *out = x / (1.0 + exp(-x)) * up;
        }
    }
}

vectorised! {
    /// GELU by tanh (Hendrycks and Gimpel): with `u = √(2/π)(x + 0.044715x³)`,
    /// `x/2·(1 + tanh u)` is `x / (1 + e^(−2u))`.
    fn gelu_gate(gate: &[f32], up: &[f32], out: &mut [f32]) {
        const TWICE: f32 = 1.595_769;
        for ((out, x), up) in out.iter_mut().zip(gate).zip(up) {
            let u = TWICE * (x + 0.044_715 * x * x * x);
            *out = x / (1.0 + exp(-u)) * up;
        }
    }
}

/// `activation(gate) · up`.
pub(crate) fn gate(path: super::Path, activation: Activation, gate: &[f32], up: &[f32], out: &mut [f32]) {
    match activation {
        Activation::Silu => silu_gate(path, gate, up, out),
        Activation::GeluTanh => gelu_gate(path, gate, up, out),
    }
}

vectorised! {
    /// Turns each head of a row; `cos` and `sin` of half a head each.
    fn rotate(row: &mut [f32], cos: &[f32], sin: &[f32], pairing: RopePairing) {
        let half = cos.len();
        for head in row.chunks_exact_mut(2 * half) {
            match pairing {
                RopePairing::Halves => {
                    let (a, b) = head.split_at_mut(half);
                    for (((a, b), cos), sin) in a.iter_mut().zip(b).zip(cos).zip(sin) {
                        (*a, *b) = (*a * cos - *b * sin, *a * sin + *b * cos);
                    }
                }
                RopePairing::Adjacent => {
                    for ((pair, cos), sin) in head.as_chunks_mut::<2>().0.iter_mut().zip(cos).zip(sin) {
                        let [a, b] = *pair;
                        *pair = [a * cos - b * sin, a * sin + b * cos];
                    }
                }
            }
        }
    }
}

/// Cosines and sines of a step's rows, kept while the step runs through the
/// layers.
#[derive(Debug, Default)]
pub(crate) struct Angles {
    frequencies: Vec<f32>,
    positions: Vec<u32>,
    /// Per row: the cosines of all pairs, then their sines.
    values: Vec<f32>,
}

impl Angles {
    /// Whether it holds these rows' angles.
    pub(crate) fn fit(&self, positions: &[u32], rope: &Rope) -> bool {
        self.positions == positions && self.frequencies == rope.frequencies
    }

    pub(crate) fn compute(&mut self, positions: &[u32], rope: &Rope) {
        self.frequencies.clone_from(&rope.frequencies);
        self.positions.clear();
        self.positions.extend_from_slice(positions);
        self.values.clear();
        for &position in positions {
            // The product in f32, as the models were trained.
            let angles = rope.frequencies.iter().map(|f| position as f32 * f);
            self.values.extend(angles.clone().map(f32::cos));
            self.values.extend(angles.map(f32::sin));
        }
    }

    /// Cosines and sines of row `row`.
    pub(crate) fn row(&self, row: usize) -> (&[f32], &[f32]) {
        let half = self.frequencies.len();
        self.values[row * 2 * half..][..2 * half].split_at(half)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_close_everywhere() {
        let mut worst = 0.0f64;
        for i in -87_000..=87_000 {
            let x = i as f32 / 1000.0;
            let exact = f64::from(x).exp();
            worst = worst.max((f64::from(exp(x)) / exact - 1.0).abs());
        }
        // The product with log2(e) rounds: half a unit of 126, times ln 2.
        assert!(worst < 4e-6, "{worst:e}");
        assert!((exp(1.0) - std::f32::consts::E).abs() < 5e-7);
        assert_eq!(exp(0.0), 1.0);
        assert!(exp(f32::NEG_INFINITY) < 2e-38 && exp(f32::INFINITY) > 8e37);
        assert!(exp(f32::NAN).is_nan());
    }
}
