//! The configuration of a GGUF file.

use forkpoint_kernels::{Activation, RopePairing};

use super::{Numbers, Scaling, factor};
use crate::load::error::LoadError;
use crate::load::gguf::Gguf;
use crate::model::Config;

/// Architectures by GGUF's `general.architecture`.
const ARCHITECTURES: [&str; 3] = ["llama", "qwen2", "qwen3"];

/// Hyperparameters (after `<architecture>.`) that are read, or that change nothing here.
const KEYS: [&str; 23] = [
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "attention.scale",
    "attention.sliding_window",
    "attention.causal",
    "rope.freq_base",
    "rope.dimension_count",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "rope.scale_linear",
    "vocab_size",
    "expert_count",
    "expert_used_count",
    "tensor_data_layout",
];

/// Reads the configuration of a GGUF file.
///
/// `factors` is the tensor `rope_freqs.weight` where there is one: what each
/// pair's rotation is divided by. llama.cpp's converter bakes the Llama 3 rule
/// into it.
///
/// # Errors
/// When the architecture or a switch is not supported, a key is missing, or
/// numbers contradict each other.
pub(in crate::load) fn from_gguf(
    gguf: &Gguf<'_>,
    vocab: usize,
    factors: Option<&[f32]>,
) -> Result<Config, LoadError> {
    let at = gguf.at();
    let key = "general.architecture";
    let architecture = gguf.text(key)?.ok_or_else(|| at.missing(key))?;
    if !ARCHITECTURES.contains(&architecture) {
        return Err(at.unsupported("architecture", architecture, ARCHITECTURES.join(", ")));
    }
    let key = |name: &str| format!("{architecture}.{name}");
    for full in gguf.keys() {
        if let Some(name) = full.strip_prefix(architecture).and_then(|rest| rest.strip_prefix('.'))
            && !KEYS.contains(&name)
            && !name.starts_with("decision.")
        {
            return Err(at.unsupported("hyperparameter", full, KEYS.join(", ")));
        }
    }
    if let Some(parts) = gguf.unsigned("split.count")?
        && parts > 1
    {
        return Err(at.unsupported("a model split into", format_args!("{parts} files"), "a single file"));
    }
    if let Some(experts) = gguf.unsigned(&key("expert_count"))?
        && experts > 0
    {
        return Err(at.unsupported("mixture of experts:", key("expert_count"), "dense models"));
    }
    if gguf.bool(&key("attention.causal"))? == Some(false) {
        return Err(at.unsupported("attention", "that is not causal", "causal attention"));
    }
    let required = |name: &str| {
        let key = key(name);
        gguf.unsigned(&key)?.ok_or_else(|| at.missing(key))
    };
    let heads = required("attention.head_count")?;
    let head_dim = gguf.unsigned(&key("attention.key_length"))?;
    let context = required("context_length")?;
    let width = required("embedding_length")?;

    let size = head_dim.unwrap_or(width / heads.max(1));
    for name in ["attention.value_length", "rope.dimension_count"] {
        if let Some(other) = gguf.unsigned(&key(name))?
            && other != size
        {
            return Err(at.unsupported(key(name), other, format_args!("the head's size, {size}")));
        }
    }
    // Converters write the window of models that were trained within it; only a shorter one changes anything.
    if let Some(window) = gguf.unsigned(&key("attention.sliding_window"))?
        && window > 0
        && window < context
    {
        return Err(at.unsupported(key("attention.sliding_window"), window, "full attention"));
    }
    let eps = key("attention.layer_norm_rms_epsilon");
    let numbers = Numbers {
        architecture: architecture.into(),
        layers: required("block_count")?,
        width,
        ffn: required("feed_forward_length")?,
        heads,
        kv_heads: gguf.unsigned(&key("attention.head_count_kv"))?.unwrap_or(heads),
        head_dim,
        context,
        eps: gguf.float(&eps)?.ok_or_else(|| at.missing(eps))?,
        base: gguf.float(&key("rope.freq_base"))?.unwrap_or(10_000.0),
        scaling: gguf_scaling(gguf, architecture)?,
        // The converter reorders the rows of q and k for llama alone.
        pairing: if architecture == "llama" { RopePairing::Adjacent } else { RopePairing::Halves },
        scale: gguf.float(&key("attention.scale"))?.filter(|scale| *scale != 0.0),
        qk_norm: architecture == "qwen3",
        qkv_bias: gguf.tensors.contains_key("blk.0.attn_q.bias"),
        tied: !gguf.tensors.contains_key("output.weight"),
        activation: Activation::Silu,
    };
    let mut config = numbers.config(at, vocab)?;
    if let Some(size) = gguf.unsigned(&key("vocab_size"))?
        && size != vocab as u64
    {
        return Err(at.invalid(key("vocab_size"), format_args!("the embedding's {vocab} rows"), size));
    }
    if let Some(factors) = factors {
        if factors.len() != config.rope.frequencies.len() {
            let expected = format!("{} numbers", config.rope.frequencies.len());
            return Err(at.invalid("rope_freqs.weight", expected, factors.len()));
        }
        for (frequency, divisor) in config.rope.frequencies.iter_mut().zip(factors) {
            *frequency /= factor(at, "rope_freqs.weight", f64::from(*divisor))? as f32;
        }
    }
    Ok(config)
}

fn gguf_scaling(gguf: &Gguf<'_>, architecture: &str) -> Result<Scaling, LoadError> {
    let at = gguf.at();
    let key = |name: &str| format!("{architecture}.rope.{name}");
    let (what, old) = (key("scaling.factor"), key("scale_linear"));
    let by = gguf.float(&what)?.or(gguf.float(&old)?).filter(|by| *by != 0.0);
    match (gguf.text(&key("scaling.type"))?, by) {
        (None, None) | (Some("none"), _) => Ok(Scaling::None),
        (None | Some("linear"), Some(by)) => Ok(Scaling::Linear(factor(at, &what, by)?)),
        (Some("linear"), None) => Err(at.missing(what)),
        (Some(other), _) => Err(at.unsupported("rotary scaling", other, "none, linear")),
    }
}
