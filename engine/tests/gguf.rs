//! Checkpoints: what loads, what is refused, and that no file makes the reader panic.

mod common;

use std::path::Path;

use common::gguf_writer::{GgufWriter, Tiny, Value};
use forkpoint_engine::load::{Checkpoint, LoadError};
use forkpoint_kernels::{Format, RopePairing};
use proptest::prelude::*;

fn open(bytes: &[u8]) -> Result<Checkpoint, LoadError> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    std::fs::write(&path, bytes).unwrap();
    Checkpoint::open(&path)
}

/// Tries a tiny model with one change; the error must say each of `words`.
#[track_caller]
fn refused(change: impl FnOnce(&mut GgufWriter), words: &[&str]) {
    let mut writer = Tiny::default().writer();
    change(&mut writer);
    let error = open(&writer.bytes()).expect_err("it must be refused").to_string();
    for word in words {
        assert!(error.contains(word), "{word:?} is not in {error:?}");
    }
}

/// The same, where the change is one key's value.
#[track_caller]
fn refused_with(key: &str, value: impl Into<Value>, words: &[&str]) {
    refused(
        |writer| {
            writer.set(key, value);
        },
        words,
    );
}

/// The same, where the change is one more tensor.
#[track_caller]
fn refused_tensor(name: &str, values: &[f32], words: &[&str]) {
    refused(
        |writer| {
            writer.f32s(name, &[values.len() as u64], values);
        },
        words,
    );
}

#[test]
fn the_test_model_is_what_it_says() {
    let checkpoint = Checkpoint::open(&common::smollm2()).unwrap();
    let config = &checkpoint.config;
    assert_eq!(checkpoint.name, "Smollm2 135M 8k Lc100K Mix1 Ep2");
    assert_eq!(config.architecture, "llama");
    assert_eq!((config.layers, config.width, config.ffn), (30, 576, 1536));
    assert_eq!((config.heads, config.kv_heads, config.head_dim), (9, 3, 64));
    assert_eq!((config.context, config.vocab), (8192, 49_152));
    assert_eq!((config.eps, config.attention_scale, config.embedding_scale), (1e-5, 0.125, 1.0));
    assert_eq!(config.rope.pairing, RopePairing::Adjacent);
    assert_eq!((config.rope.frequencies.len(), config.rope.frequencies[0]), (32, 1.0));
    assert!((config.rope.frequencies[16] / 1e5f32.powf(-0.5) - 1.0).abs() < 1e-6);
    assert!(config.tied && !config.qk_norm && !config.qkv_bias);
    assert_eq!(config.windows, [None; 30]);

    assert_eq!(checkpoint.parameters(), 134_515_008);
    assert_eq!(checkpoint.tensor_bytes(), 96_576_768);
    let embedding = checkpoint.matrix("token_embd.weight").unwrap();
    assert_eq!((embedding.format(), embedding.rows(), embedding.cols()), (Format::Q8_0, 49_152, 576));
    let down = checkpoint.matrix("blk.29.ffn_down.weight").unwrap();
    assert_eq!((down.format(), down.rows(), down.cols()), (Format::Q4_1, 576, 1536));
    assert_eq!(checkpoint.vector("output_norm.weight").unwrap().len(), 576);
    assert!(checkpoint.has("blk.0.attn_q.weight") && !checkpoint.has("blk.30.attn_q.weight"));
    assert!(checkpoint.matrix("output_norm.weight").is_err() && checkpoint.vector("output.weight").is_err());
}

#[test]
fn tiny_models_of_each_architecture_load() {
    for architecture in ["llama", "qwen2", "qwen3"] {
        for (untied, quantised) in [(false, false), (true, true)] {
            let tiny = Tiny { architecture, untied, quantised, ..Tiny::default() };
            let checkpoint = open(&tiny.writer().bytes()).unwrap();
            let config = &checkpoint.config;
            assert_eq!(config.tied, !untied);
            assert_eq!((config.qk_norm, config.qkv_bias), (architecture == "qwen3", architecture == "qwen2"));
            let halves = architecture != "llama";
            assert_eq!(config.rope.pairing == RopePairing::Halves, halves);
            assert_eq!(checkpoint.tokenizer.encode("<|im_start|> the user"), [1, 261, 3 + 32, 269]);
        }
    }
}

#[test]
fn fingerprints_follow_what_determines_the_logits() {
    let print = |writer: &GgufWriter| open(&writer.bytes()).unwrap().fingerprint();
    let plain = print(&Tiny::default().writer());
    assert_eq!(plain, print(&Tiny::default().writer()));

    let mut renamed = Tiny::default().writer();
    renamed.set("general.name", "other");
    assert_eq!(plain, print(&renamed));

    let mut turned = Tiny::default().writer();
    turned.set("llama.rope.freq_base", 20_000.0f32);
    assert_ne!(plain, print(&turned));

    let mut nudged = Tiny::default().writer();
    nudged.tensors[3].data[0] ^= 1;
    assert_ne!(plain, print(&nudged));
}

#[test]
fn rotary_factors_divide_and_linear_scaling_slows() {
    let plain = open(&Tiny::default().writer().bytes()).unwrap().config.rope.frequencies;
    let mut writer = Tiny::default().writer();
    writer.f32s("rope_freqs.weight", &[8], &[1.0, 1.0, 1.0, 1.0, 2.0, 4.0, 8.0, 8.0]);
    let divided = open(&writer.bytes()).unwrap().config.rope.frequencies;
    assert_eq!(divided[..4], plain[..4]);
    assert_eq!(divided[4..], [plain[4] / 2.0, plain[5] / 4.0, plain[6] / 8.0, plain[7] / 8.0]);

    let mut writer = Tiny::default().writer();
    writer.set("llama.rope.scaling.type", "linear").set("llama.rope.scaling.factor", 4.0f32);
    let slowed = open(&writer.bytes()).unwrap().config.rope.frequencies;
    assert!(slowed.iter().zip(&plain).all(|(slowed, plain)| slowed * 4.0 == *plain));

    refused_tensor("rope_freqs.weight", &[1.0; 4], &["rope_freqs.weight", "8"]);
    refused_tensor("rope_freqs.weight", &[0.0; 8], &["rope_freqs.weight", "above 0"]);
}

#[test]
fn what_is_not_supported_is_named_with_what_is() {
    let words = ["architecture mamba", "llama, qwen2, qwen3", "model.gguf"];
    refused_with("general.architecture", "mamba", &words);
    refused_with("tokenizer.ggml.pre", "gpt-5o", &["gpt-5o", "smollm", "llama-bpe", "qwen2"]);
    refused_with("tokenizer.ggml.model", "llama", &["tokenizer llama", "gpt2"]);
    refused(|writer| writer.tensors[0].kind = 23, &["token_embd.weight", "IQ4_XS", "Q4_K"]);
    refused(|writer| writer.tensors[0].kind = 77, &["token_embd.weight", "number 77"]);
    refused_with("llama.expert_count", 8u32, &["mixture of experts"]);
    refused_with("llama.rope.scaling.type", "yarn", &["yarn", "linear"]);
    refused_with("llama.attn_logit_softcapping", 50.0f32, &["attn_logit_softcapping"]);
    refused_with("llama.attention.sliding_window", 64u32, &["sliding_window"]);
    refused_with("llama.rope.dimension_count", 8u32, &["rope.dimension_count", "16"]);
    refused_with("split.count", 3u32, &["3 files"]);
    refused_tensor("blk.0.ffn_gate_inp.weight", &[1.0], &["ffn_gate_inp"]);
    refused_tensor("blk.0.attn_output.bias", &[1.0; 64], &["attn_output.bias"]);
}

#[test]
fn contradictions_are_named() {
    refused(
        |writer| {
            writer.unset("llama.block_count");
        },
        &["llama.block_count", "missing"],
    );
    refused_with("llama.block_count", "two", &["llama.block_count", "two"]);
    refused_with("llama.block_count", 3u32, &["blk.2.", "missing"]);
    refused_with("llama.block_count", 0u32, &["layers", "got 0"]);
    refused_with("llama.attention.head_count_kv", 3u32, &["multiple of the 3"]);
    refused_with("llama.attention.head_count", 0u32, &["heads", "got 0"]);
    refused_with("llama.attention.head_count", 8u32, &["attn_output.weight", "[64, 128]", "[64, 64]"]);
    refused(
        |writer| {
            for name in ["key_length", "value_length"] {
                writer.set(&format!("llama.attention.{name}"), 24u32);
            }
        },
        &["24", "multiples of 16"],
    );
    refused_with("llama.vocab_size", 999u32, &["vocab_size", "270"]);
    refused_with("llama.rope.freq_base", f32::NAN, &["rotary base"]);
    refused_with("tokenizer.ggml.eos_token_id", 270u32, &["eos_token_id", "270"]);
    refused_with("tokenizer.ggml.tokens", &["a"][..], &["tokenizer.ggml.tokens", "270"]);
    refused_with("tokenizer.ggml.tokens", &["a"; 270][..], &["tokenizer.ggml.tokens", "twice"]);
    for merge in ["Y e s", "x", "", " ", "Ye x", "YeYe YeYe"] {
        refused_with("tokenizer.ggml.merges", &[merge][..], &["tokenizer.ggml.merges"]);
    }
    refused_with("tokenizer.chat_template", "{% if %}", &["chat template"]);
    refused(
        |writer| writer.tensors.retain(|tensor| tensor.name != "output_norm.weight"),
        &["output_norm.weight", "missing"],
    );
    refused(|writer| writer.tensors[5].shape.push(1), &["shape"]);
    refused(|writer| writer.tensors[5].shape[0] = 0, &["sizes above 0"]);
    refused(|writer| writer.tensors[5].shape[0] = u64::MAX / 2, &["shape"]);
    refused(|writer| writer.tensors[5].shape = vec![1; 5], &["dimensions"]);
    refused(|writer| writer.tensors[5].name = "token_embd.weight".into(), &["token_embd.weight twice"]);
    refused(
        |writer| writer.metadata.push(("llama.block_count".into(), Value::U32(2))),
        &["block_count twice"],
    );
    refused_with("general.alignment", 24u32, &["general.alignment", "power of two"]);
    refused_with("general.alignment", 0u32, &["general.alignment"]);
}

/// Where a number stands in the file's table of tensors: behind the name.
fn behind(bytes: &[u8], name: &str, skip: usize) -> usize {
    let place = bytes.windows(name.len()).position(|window| window == name.as_bytes()).unwrap();
    place + name.len() + skip
}

#[test]
fn tensors_must_lie_inside_the_file_and_apart() {
    let good = Tiny::default().writer().bytes();
    // Behind the name: the number of dimensions, two sizes, the type, the offset.
    let offset = behind(&good, "blk.0.attn_q.weight", 4 + 16 + 4);
    let with = |value: u64| {
        let mut bytes = good.clone();
        bytes[offset..offset + 8].copy_from_slice(&value.to_le_bytes());
        open(&bytes).unwrap_err().to_string()
    };
    assert!(with(0).contains("inside"), "{}", with(0));
    assert!(with(1).contains("multiple of 32"), "{}", with(1));
    assert!(with(1 << 40).contains("needs"), "{}", with(1 << 40));
    assert!(with(!31).contains("needs"), "{}", with(!31));
}

#[test]
fn headers_lie_about_counts() {
    let good = Tiny::default().writer().bytes();
    let with = |range: std::ops::Range<usize>, value: u64| {
        let mut bytes = good.clone();
        let length = range.len();
        bytes[range].copy_from_slice(&value.to_le_bytes()[..length]);
        open(&bytes).unwrap_err().to_string()
    };
    assert!(with(0..4, 0).contains("GGUF"));
    assert!(with(4..8, 1).contains("version 1"));
    assert!(with(4..8, 0x0300_0000).contains("big-endian"));
    assert!(with(8..16, u64::MAX).contains("number of tensors"));
    assert!(with(16..24, u64::MAX).contains("number of metadata keys"));
    assert!(with(16..24, 60_000).contains("model.gguf"));
    // The first key's length, and an array's count.
    assert!(with(24..32, u64::MAX).contains("metadata key"));
    let count = behind(&good, "tokenizer.ggml.tokens", 8);
    assert!(with(count..count + 8, u64::MAX).contains("tokenizer.ggml.tokens"));
    let kinds = behind(&good, "tokenizer.ggml.token_type", 8);
    assert!(with(kinds..kinds + 8, u64::MAX / 4 + 1).contains("tokenizer.ggml.token_type"));
}

#[test]
fn files_that_are_not_models() {
    assert!(matches!(Checkpoint::open(Path::new("/nonexistent/x.gguf")), Err(LoadError::Io { .. })));
    assert!(open(b"").is_err());
    assert!(open(b"GGUF").unwrap_err().to_string().contains("version"));
    let folder = tempfile::tempdir().unwrap();
    assert!(Checkpoint::open(folder.path()).unwrap_err().to_string().contains("config.json"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// A file that was cut short is refused wherever it was cut.
    #[test]
    fn truncated_files_are_refused(part in 0.0..1.0f64) {
        let good = Tiny::default().writer().bytes();
        let kept = (good.len() as f64 * part) as usize;
        prop_assert!(open(&good[..kept]).is_err());
    }

    /// Whatever stands in the header, opening answers; and what opens can be read in full.
    #[test]
    fn damaged_files_never_panic(changes in prop::collection::vec((0.0..1.0f64, any::<u8>()), 1..6)) {
        let writer = Tiny::default().writer();
        let mut bytes = writer.bytes();
        let header = bytes.len() - writer.tensors.iter().map(|tensor| tensor.data.len()).sum::<usize>();
        for (place, byte) in changes {
            bytes[(place * header as f64) as usize] = byte;
        }
        if let Ok(checkpoint) = open(&bytes) {
            let _ = checkpoint.fingerprint();
            checkpoint.matrix("token_embd.weight").unwrap();
            checkpoint.vector("output_norm.weight").unwrap();
        }
    }
}
