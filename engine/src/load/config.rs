//! A checkpoint's numbers and switches, from GGUF metadata or `config.json`.
//!
//! What this engine does not compute is refused by name, never ignored: a model
//! that loads and answers wrongly is worse than one that does not load.

mod gguf;
mod json;

pub(super) use gguf::from_gguf;
pub(super) use json::from_json;

use forkpoint_kernels::{Activation, Rope, RopePairing};

use super::error::{At, LoadError};
use crate::model::Config;

/// How positions are stretched beyond the length that the model was trained on.
#[derive(Debug, Clone, PartialEq)]
enum Scaling {
    None,
    /// Every rotation is slowed by the factor.
    Linear(f64),
    /// Slow rotations are slowed more: Llama 3.1.
    Llama3 {
        factor: f64,
        low: f64,
        high: f64,
        context: f64,
    },
}

/// Rotations per token of each pair: `base^(-2i / head_dim)`, scaled.
///
/// The Llama 3 rule is `_compute_llama3_parameters` of Transformers'
/// `modeling_rope_utils.py`: pairs whose wavelength exceeds `context / low` are
/// slowed by the factor, those below `context / high` are left alone, and
/// between the two it is interpolated.
fn frequencies(head_dim: usize, base: f64, scaling: &Scaling) -> Vec<f32> {
    let frequency = |pair: usize| {
        let plain = base.powf(-2.0 * pair as f64 / head_dim as f64);
        match *scaling {
            Scaling::None => plain,
            Scaling::Linear(factor) => plain / factor,
            Scaling::Llama3 { factor, low, high, context } => {
                let turns = context * plain / std::f64::consts::TAU;
                let kept = ((turns - low) / (high - low)).clamp(0.0, 1.0);
                (1.0 - kept) * plain / factor + kept * plain
            }
        }
    };
    (0..head_dim / 2).map(|pair| frequency(pair) as f32).collect()
}

/// Numbers of either source, not yet checked against each other.
struct Numbers {
    architecture: String,
    layers: u64,
    width: u64,
    ffn: u64,
    heads: u64,
    kv_heads: u64,
    head_dim: Option<u64>,
    context: u64,
    eps: f64,
    base: f64,
    scaling: Scaling,
    pairing: RopePairing,
    scale: Option<f64>,
    qk_norm: bool,
    qkv_bias: bool,
    tied: bool,
    activation: Activation,
}

impl Numbers {
    /// Checks the numbers against each other; `vocab` is the embedding table's rows.
    fn config(self, at: At<'_>, vocab: usize) -> Result<Config, LoadError> {
        let layers = within(at, "the number of layers", self.layers, 1, 1 << 10)?;
        let width = within(at, "the width", self.width, 16, 1 << 17)?;
        let ffn = within(at, "the feed-forward width", self.ffn, 16, 1 << 20)?;
        let heads = within(at, "the number of heads", self.heads, 1, 1 << 10)?;
        let kv_heads = within(at, "the number of key-value heads", self.kv_heads, 1, 1 << 10)?;
        let context = within(at, "the context length", self.context, 1, 1 << 30)?;
        if !heads.is_multiple_of(kv_heads) {
            let what = format!("a multiple of the {kv_heads} key-value heads");
            return Err(at.invalid("the number of heads", what, heads));
        }
        let head_dim = match self.head_dim {
            Some(given) => within(at, "the head's size", given, 1, 1 << 10)?,
            None if width.is_multiple_of(heads) => width / heads,
            None => return Err(at.invalid("the width", format!("a multiple of the {heads} heads"), width)),
        };
        if !head_dim.is_multiple_of(16) || head_dim > 256 {
            return Err(at.unsupported("a head's size of", head_dim, "multiples of 16 up to 256"));
        }
        if !(self.eps > 0.0 && self.eps < 1.0) {
            return Err(at.invalid("the norm's epsilon", "between 0 and 1", self.eps));
        }
        if !(self.base.is_finite() && self.base > 1.0) {
            return Err(at.invalid("the rotary base", "a number above 1", self.base));
        }
        if let Some(scale) = self.scale
            && !(scale.is_finite() && scale > 0.0)
        {
            return Err(at.invalid("the attention scale", "a number above 0", scale));
        }
        let attention_scale = self.scale.unwrap_or(1.0 / (head_dim as f64).sqrt()) as f32;
        let frequencies = frequencies(head_dim, self.base, &self.scaling);
        Ok(Config {
            architecture: self.architecture,
            layers,
            width,
            ffn,
            heads,
            kv_heads,
            head_dim,
            context,
            vocab,
            eps: self.eps as f32,
            rope: Rope { frequencies, pairing: self.pairing },
            attention_scale,
            embedding_scale: 1.0,
            qk_norm: self.qk_norm,
            qkv_bias: self.qkv_bias,
            tied: self.tied,
            activation: self.activation,
            windows: vec![None; layers],
        })
    }
}

fn within(at: At<'_>, what: &str, value: u64, least: usize, most: usize) -> Result<usize, LoadError> {
    let wrong = || at.invalid(what, format_args!("{least} to {most}"), value);
    usize::try_from(value).ok().filter(|value| (least..=most).contains(value)).ok_or_else(wrong)
}

fn factor(at: At<'_>, what: &str, value: f64) -> Result<f64, LoadError> {
    let sound = value.is_finite() && value > 0.0;
    if sound { Ok(value) } else { Err(at.invalid(what, "a number above 0", value)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn llama3_scaling_keeps_fast_pairs_and_slows_slow_ones() {
        // Llama 3.1 8B: the expected values are Transformers', computed by hand from its formula.
        let scaling = Scaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, context: 8192.0 };
        let scaled = frequencies(128, 500_000.0, &scaling);
        let plain = frequencies(128, 500_000.0, &Scaling::None);
        assert_eq!(scaled[0], 1.0);
        assert_eq!(scaled[20], plain[20]);
        assert_eq!(scaled[63], plain[63] / 8.0);
        // Pair 32: wavelength 2 pi * sqrt(500000) = 4443, between 2048 and 8192.
        let kept = (8192.0 / 4442.88 - 1.0) / 3.0;
        let expected = (1.0 - kept) * f64::from(plain[32]) / 8.0 + kept * f64::from(plain[32]);
        assert!((f64::from(scaled[32]) / expected - 1.0).abs() < 1e-4);
    }

    #[test]
    fn linear_scaling_divides_all() {
        let scaled = frequencies(16, 10_000.0, &Scaling::Linear(4.0));
        let plain = frequencies(16, 10_000.0, &Scaling::None);
        assert!(scaled.iter().zip(&plain).all(|(scaled, plain)| *scaled == plain / 4.0));
    }
}
