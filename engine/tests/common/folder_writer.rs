//! Writes a tiny model as Hugging Face lays it out: the same weights as its GGUF file.

use std::collections::BTreeMap;
use std::path::Path;

use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};

use super::gguf_writer::{F32, Tiny, tiny_tokens};

/// Transformers' name for a tensor.
fn name(gguf: &str) -> String {
    match gguf {
        "token_embd.weight" => return "model.embed_tokens.weight".into(),
        "output_norm.weight" => return "model.norm.weight".into(),
        "output.weight" => return "lm_head.weight".into(),
        _ => {}
    }
    let parts: Vec<&str> = gguf.split('.').collect();
    let module = match parts[2] {
        "attn_norm" => "input_layernorm",
        "ffn_norm" => "post_attention_layernorm",
        "attn_q" => "self_attn.q_proj",
        "attn_k" => "self_attn.k_proj",
        "attn_v" => "self_attn.v_proj",
        "attn_output" => "self_attn.o_proj",
        "attn_q_norm" => "self_attn.q_norm",
        "attn_k_norm" => "self_attn.k_norm",
        "ffn_gate" => "mlp.gate_proj",
        "ffn_up" => "mlp.up_proj",
        "ffn_down" => "mlp.down_proj",
        other => panic!("no name for {other}"),
    };
    format!("model.layers.{}.{module}.{}", parts[1], parts[3])
}

/// The model's `config.json`.
pub(crate) fn config(tiny: &Tiny) -> Value {
    let class = match tiny.architecture {
        "llama" => "LlamaForCausalLM",
        "qwen2" => "Qwen2ForCausalLM",
        "qwen3" => "Qwen3ForCausalLM",
        other => panic!("no class for {other}"),
    };
    json!({
        "architectures": [class],
        "num_hidden_layers": tiny.layers,
        "hidden_size": tiny.width,
        "intermediate_size": tiny.ffn,
        "num_attention_heads": tiny.heads,
        "num_key_value_heads": tiny.kv_heads,
        "head_dim": tiny.head_dim,
        "max_position_embeddings": tiny.context,
        "vocab_size": tiny_tokens().0.len(),
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": !tiny.untied,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    })
}

/// The model's `tokenizer.json`: the same tokens as its GGUF file.
pub(crate) fn tokenizer() -> Value {
    let (tokens, merges) = tiny_tokens();
    let vocab: BTreeMap<&str, usize> = tokens.iter().map(String::as_str).zip(0..).collect();
    let added = |token: usize| {
        json!({
            "id": token, "content": tokens[token], "special": true, "normalized": false,
            "single_word": false, "lstrip": false, "rstrip": false,
        })
    };
    let bytes =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [added(0), added(1), added(2)],
        "normalizer": null,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": true}, bytes],
        },
        "post_processor": null,
        "decoder": bytes,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocab,
            "merges": merges,
        },
    })
}

/// Writes a folder with `shards` files of weights; one is `model.safetensors`, more have an index.
pub(crate) fn write(tiny: &Tiny, folder: &Path, shards: usize) {
    let save = |name: &str, value: &Value| std::fs::write(folder.join(name), value.to_string()).unwrap();
    save("config.json", &config(tiny));
    save("tokenizer.json", &tokenizer());
    save(
        "tokenizer_config.json",
        &json!({"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}}),
    );
    save("generation_config.json", &json!({"eos_token_id": [2, 0]}));

    let writer = tiny.writer();
    let mut map = BTreeMap::new();
    for shard in 0..shards {
        let file = match shards {
            1 => "model.safetensors".into(),
            _ => format!("model-{:05}-of-{shards:05}.safetensors", shard + 1),
        };
        let mut tensors = BTreeMap::new();
        for tensor in writer.tensors.iter().skip(shard).step_by(shards) {
            assert_eq!(tensor.kind, F32, "quantised weights have no place in this format");
            let shape = tensor.shape.iter().map(|size| *size as usize).collect();
            let view = TensorView::new(Dtype::F32, shape, &tensor.data).unwrap();
            map.insert(name(&tensor.name), file.clone());
            tensors.insert(name(&tensor.name), view);
        }
        safetensors::serialize_to_file(tensors, None, &folder.join(&file)).unwrap();
    }
    if shards > 1 {
        save("model.safetensors.index.json", &json!({"metadata": {}, "weight_map": map}));
    }
}
