//! The configuration of a folder: `config.json`, as Transformers 4 and 5 write it.

use forkpoint_kernels::{Activation, RopePairing};
use serde_json::Value;

use super::{Numbers, Scaling, factor, within};
use crate::load::error::{At, LoadError};
use crate::model::Config;

/// Architectures by Transformers' class, and their name in GGUF.
const ARCHITECTURES: [(&str, &str); 4] = [
    ("LlamaForCausalLM", "llama"),
    ("MistralForCausalLM", "llama"),
    ("Qwen2ForCausalLM", "qwen2"),
    ("Qwen3ForCausalLM", "qwen3"),
];

/// `config.json`, with the file's name for errors.
struct Json<'a> {
    at: At<'a>,
    value: &'a Value,
}

impl<'a> Json<'a> {
    /// A field that is there and not null.
    fn get(&self, key: &str) -> Option<&'a Value> {
        self.value.get(key).filter(|value| !value.is_null())
    }

    fn unsigned(&self, key: &str) -> Result<Option<u64>, LoadError> {
        let wrong = |value| self.at.invalid(key, "a whole number", value);
        self.get(key).map(|value| value.as_u64().ok_or_else(|| wrong(value))).transpose()
    }

    fn float(&self, key: &str) -> Result<Option<f64>, LoadError> {
        let wrong = |value| self.at.invalid(key, "a number", value);
        self.get(key).map(|value| value.as_f64().ok_or_else(|| wrong(value))).transpose()
    }

    fn bool(&self, key: &str) -> Result<bool, LoadError> {
        let wrong = |value| self.at.invalid(key, "true or false", value);
        Ok(self
            .get(key)
            .map(|value| value.as_bool().ok_or_else(|| wrong(value)))
            .transpose()?
            .unwrap_or(false))
    }

    fn text(&self, key: &str) -> Result<Option<&'a str>, LoadError> {
        let wrong = |value| self.at.invalid(key, "a string", value);
        self.get(key).map(|value| value.as_str().ok_or_else(|| wrong(value))).transpose()
    }

    fn required(&self, key: &str) -> Result<u64, LoadError> {
        self.unsigned(key)?.ok_or_else(|| self.at.missing(key))
    }

    fn refuse(&self, key: &str, supported: &str) -> Result<(), LoadError> {
        match self.get(key) {
            Some(value) => Err(self.at.unsupported(key, value, supported)),
            None => Ok(()),
        }
    }
}

/// Reads `config.json` as Transformers writes it.
///
/// # Errors
/// When the architecture or a switch is not supported, a key is missing, or
/// numbers contradict each other.
pub(in crate::load) fn from_json(at: At<'_>, value: &Value, vocab: usize) -> Result<Config, LoadError> {
    let json = Json { at, value };
    let named = value.pointer("/architectures/0").and_then(Value::as_str);
    let class = named.ok_or_else(|| at.missing("architectures[0]"))?;
    let supported = || ARCHITECTURES.map(|(class, _)| class).join(", ");
    let (_, architecture) = ARCHITECTURES
        .iter()
        .find(|(known, _)| *known == class)
        .ok_or_else(|| at.unsupported("architecture", class, supported()))?;

    for key in ["num_experts", "num_local_experts", "n_routed_experts"] {
        json.refuse(key, "dense models")?;
    }
    for key in ["final_logit_softcapping", "attn_logit_softcapping", "clip_qkv"] {
        json.refuse(key, "null")?;
    }
    for key in ["embedding_multiplier", "residual_multiplier", "logits_scaling", "attention_multiplier"] {
        json.refuse(key, "null")?;
    }
    json.refuse("quantization_config", "tensors in F32, F16 or BF16")?;
    for key in ["attention_bias", "mlp_bias"] {
        if json.bool(key)? {
            return Err(at.unsupported(key, true, "false"));
        }
    }
    let activation = match json.text("hidden_act")?.unwrap_or("silu") {
        "silu" | "swish" => Activation::Silu,
        "gelu_pytorch_tanh" => Activation::GeluTanh,
        other => return Err(at.unsupported("hidden_act", other, "silu, gelu_pytorch_tanh")),
    };
    let heads = json.required("num_attention_heads")?;
    let (base, scaling) = json_rope(&json)?;
    let numbers = Numbers {
        architecture: (*architecture).into(),
        layers: json.required("num_hidden_layers")?,
        width: json.required("hidden_size")?,
        ffn: json.required("intermediate_size")?,
        heads,
        kv_heads: json.unsigned("num_key_value_heads")?.unwrap_or(heads),
        // Qwen3 has a default of its own in Transformers; the others divide the width.
        head_dim: json.unsigned("head_dim")?.or((class == "Qwen3ForCausalLM").then_some(128)),
        context: json.required("max_position_embeddings")?,
        eps: json.float("rms_norm_eps")?.ok_or_else(|| at.missing("rms_norm_eps"))?,
        base,
        scaling,
        pairing: RopePairing::Halves,
        scale: None,
        qk_norm: class == "Qwen3ForCausalLM",
        qkv_bias: class == "Qwen2ForCausalLM",
        tied: json.bool("tie_word_embeddings")?,
        activation,
    };
    let mut config = numbers.config(at, vocab)?;
    let size = json.required("vocab_size")?;
    if size != vocab as u64 {
        return Err(at.invalid("vocab_size", format_args!("the embedding's {vocab} rows"), size));
    }
    json_windows(&json, class, &mut config)?;
    Ok(config)
}

/// Which layers see only the latest tokens.
fn json_windows(json: &Json<'_>, class: &str, config: &mut Config) -> Result<(), LoadError> {
    let at = json.at;
    let qwen = class.starts_with("Qwen");
    let used = if qwen { json.bool("use_sliding_window")? } else { class == "MistralForCausalLM" };
    // Transformers' Mistral has a window unless the file says null.
    let absent = json.value.get("sliding_window").is_none();
    let default = (absent && class == "MistralForCausalLM").then_some(4096);
    let window = match json.unsigned("sliding_window")?.or(default) {
        Some(window) if used => Some(within(at, "sliding_window", window, 1, u32::MAX as usize)? as u32),
        _ => None,
    };
    // Qwen's lower layers see all.
    let full = if qwen { json.unsigned("max_window_layers")?.unwrap_or(0) } else { 0 };
    for (layer, slot) in config.windows.iter_mut().enumerate() {
        *slot = window.filter(|window| layer as u64 >= full && (*window as usize) < config.context);
    }
    let Some(types) = json.get("layer_types") else { return Ok(()) };
    let types = types.as_array().ok_or_else(|| at.invalid("layer_types", "an array", types))?;
    if types.len() != config.layers {
        return Err(at.invalid("layer_types", format_args!("{} entries", config.layers), types.len()));
    }
    for (slot, kind) in config.windows.iter_mut().zip(types) {
        *slot = match (kind.as_str(), window) {
            (Some("full_attention"), _) => None,
            (Some("sliding_attention"), Some(window)) => {
                Some(window).filter(|window| (*window as usize) < config.context)
            }
            (Some("sliding_attention"), None) => return Err(at.missing("sliding_window")),
            _ => return Err(at.unsupported("layer type", kind, "full_attention, sliding_attention")),
        };
    }
    Ok(())
}

/// The rotary base and scaling, as Transformers 4 (`rope_theta`, `rope_scaling`) or 5
/// (`rope_parameters`) write them.
fn json_rope(json: &Json<'_>) -> Result<(f64, Scaling), LoadError> {
    let at = json.at;
    let outer_base = json.float("rope_theta")?;
    partial_rotary(json)?;
    let Some(value) = json.get("rope_parameters").or_else(|| json.get("rope_scaling")) else {
        return Ok((outer_base.unwrap_or(10_000.0), Scaling::None));
    };
    let rope = Json { at, value };
    partial_rotary(&rope)?;
    let base = rope.float("rope_theta")?.or(outer_base).unwrap_or(10_000.0);
    let number = |key: &str| {
        let value = rope.float(key)?.ok_or_else(|| at.missing(format_args!("the rotary scaling's {key}")))?;
        factor(at, key, value)
    };
    let kind = rope.text("rope_type")?.or(rope.text("type")?);
    let scaling = match kind.ok_or_else(|| at.missing("the rotary scaling's rope_type"))? {
        "default" => Scaling::None,
        "linear" => Scaling::Linear(number("factor")?),
        "llama3" => {
            let (low, high) = (number("low_freq_factor")?, number("high_freq_factor")?);
            if high <= low {
                return Err(at.invalid("high_freq_factor", format_args!("above {low}"), high));
            }
            let context = number("original_max_position_embeddings")?;
            Scaling::Llama3 { factor: number("factor")?, low, high, context }
        }
        other => return Err(at.unsupported("rotary scaling", other, "default, linear, llama3")),
    };
    Ok((base, scaling))
}

fn partial_rotary(json: &Json<'_>) -> Result<(), LoadError> {
    match json.float("partial_rotary_factor")? {
        Some(part) if part != 1.0 => Err(json.at.unsupported("partial_rotary_factor", part, "1")),
        _ => Ok(()),
    }
}
