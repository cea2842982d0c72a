//! Checkpoints as Hugging Face lays them out.

mod common;

use std::path::Path;

use common::folder_writer::{config, tokenizer, write};
use common::gguf_writer::Tiny;
use forkpoint_engine::load::Checkpoint;
use forkpoint_engine::{Message, Role};
use forkpoint_kernels::{Format, RopePairing};
use serde_json::{Value, json};

fn folder(tiny: &Tiny, shards: usize) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    write(tiny, folder.path(), shards);
    folder
}

fn save(folder: &Path, name: &str, value: &Value) {
    std::fs::write(folder.join(name), value.to_string()).unwrap();
}

/// Opens a tiny Llama with its configuration changed.
fn with(change: impl FnOnce(&mut Value)) -> Result<Checkpoint, String> {
    let folder = folder(&Tiny::default(), 1);
    let mut value = config(&Tiny::default());
    change(&mut value);
    save(folder.path(), "config.json", &value);
    Checkpoint::open(folder.path()).map_err(|error| error.to_string())
}

#[track_caller]
fn refused(change: impl FnOnce(&mut Value), words: &[&str]) {
    let error = with(change).expect_err("it must be refused");
    for word in words {
        assert!(error.contains(word), "{word:?} is not in {error:?}");
    }
}

#[test]
fn a_folder_holds_what_the_gguf_file_holds() {
    for (architecture, shards) in [("llama", 1), ("qwen2", 2), ("qwen3", 3)] {
        let tiny = Tiny { architecture, untied: shards == 2, ..Tiny::default() };
        let home = folder(&tiny, shards);
        let checkpoint = Checkpoint::open(home.path()).unwrap();
        let file = home.path().join("model.gguf");
        tiny.write(&file);
        let gguf = Checkpoint::open(&file).unwrap();

        // Of llama GGUF reorders q and k; here nobody did, so only the pairing differs.
        let mut expected = gguf.config.clone();
        expected.rope.pairing = RopePairing::Halves;
        assert_eq!(checkpoint.config, expected);
        assert_eq!(checkpoint.parameters(), gguf.parameters());
        assert_eq!(checkpoint.tensor_bytes(), gguf.tensor_bytes());
        let (here, there) = (checkpoint.matrix("blk.1.ffn_up.weight"), gguf.matrix("blk.1.ffn_up.weight"));
        let (here, there) = (here.unwrap(), there.unwrap());
        assert_eq!((here.format(), here.rows(), here.cols()), (Format::F32, 96, 64));
        assert_eq!(here.row(95), there.row(95));
        let norm = "blk.0.attn_norm.weight";
        assert_eq!(checkpoint.vector(norm).unwrap(), gguf.vector(norm).unwrap());
        if architecture != "llama" {
            assert_eq!(checkpoint.fingerprint(), gguf.fingerprint());
        }

        let text = "<|im_start|>user\nYes, the 12 users' inner café 😀<|im_end|>\n";
        let tokens = checkpoint.tokenizer.encode(text);
        assert_eq!(tokens, gguf.tokenizer.encode(text));
        assert_eq!(checkpoint.tokenizer.encode_plain(text), gguf.tokenizer.encode_plain(text));
        assert_eq!(checkpoint.tokenizer.decode(&tokens), "user\nYes, the 12 users' inner café 😀\n");
        assert_eq!((checkpoint.tokenizer.bos(), checkpoint.tokenizer.add_bos()), (Some(1), false));
        assert_eq!(checkpoint.tokenizer.eos(), [2, 0]);
        assert_eq!(checkpoint.tokenizer.vocab(), 270);
    }
}

#[test]
fn weights_may_be_halves() {
    let home = folder(&Tiny::default(), 1);
    let path = home.path().join("model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let all = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let halves: Vec<(String, Vec<usize>, Vec<u8>)> = all
        .iter()
        .map(|(name, view)| {
            let numbers = view.data().as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
            let data = numbers.flat_map(|number| half::bf16::from_f32(number).to_le_bytes()).collect();
            (name.to_owned(), view.shape().to_vec(), data)
        })
        .collect();
    let views = halves.iter().map(|(name, shape, data)| {
        let view = safetensors::tensor::TensorView::new(safetensors::Dtype::BF16, shape.clone(), data);
        (name.as_str(), view.unwrap())
    });
    safetensors::serialize_to_file(views, None, &path).unwrap();
    let checkpoint = Checkpoint::open(home.path()).unwrap();
    assert_eq!(checkpoint.matrix("token_embd.weight").unwrap().format(), Format::BF16);
    let norm = checkpoint.vector("output_norm.weight").unwrap();
    assert!(norm.iter().all(|gain| (gain - 1.0).abs() <= 0.11));
}

#[test]
fn both_spellings_of_the_rotary_settings() {
    let plain = with(|_| {}).unwrap().config.rope.frequencies;
    let v5 = with(|config| {
        config.as_object_mut().unwrap().remove("rope_theta");
        config["rope_parameters"] = json!({"rope_type": "default", "rope_theta": 10_000.0});
    });
    assert_eq!(v5.unwrap().config.rope.frequencies, plain);
    let linear = with(|config| config["rope_scaling"] = json!({"type": "linear", "factor": 2.0}));
    assert_eq!(linear.unwrap().config.rope.frequencies[3], plain[3] / 2.0);
    let scaling = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    });
    let llama3 = with(|config| config["rope_scaling"] = scaling.clone()).unwrap().config.rope.frequencies;
    assert_eq!((llama3[0], llama3[7]), (plain[0], plain[7] / 8.0));

    refused(
        |config| config["rope_scaling"] = json!({"rope_type": "yarn", "factor": 4.0}),
        &["yarn", "llama3"],
    );
    refused(|config| config["rope_scaling"] = json!({"rope_type": "linear"}), &["factor", "missing"]);
    refused(|config| config["partial_rotary_factor"] = json!(0.5), &["partial_rotary_factor"]);
}

#[test]
fn windows_follow_the_layers() {
    let mistral = |window: Option<Value>| {
        with(|config| {
            config["architectures"] = json!(["MistralForCausalLM"]);
            if let Some(window) = window {
                config["sliding_window"] = window;
            }
        })
    };
    assert_eq!(mistral(Some(json!(64))).unwrap().config.windows, [Some(64); 2]);
    assert_eq!(mistral(Some(json!(null))).unwrap().config.windows, [None; 2]);
    // The default, 4096, is beyond this context.
    assert_eq!(mistral(None).unwrap().config.windows, [None; 2]);

    let tiny = Tiny { architecture: "qwen3", ..Tiny::default() };
    let home = folder(&tiny, 1);
    let mut value = config(&tiny);
    value["sliding_window"] = json!(32);
    save(home.path(), "config.json", &value);
    assert_eq!(Checkpoint::open(home.path()).unwrap().config.windows, [None; 2]);
    value["use_sliding_window"] = json!(true);
    value["max_window_layers"] = json!(1);
    save(home.path(), "config.json", &value);
    assert_eq!(Checkpoint::open(home.path()).unwrap().config.windows, [None, Some(32)]);
    value["layer_types"] = json!(["sliding_attention", "full_attention"]);
    save(home.path(), "config.json", &value);
    assert_eq!(Checkpoint::open(home.path()).unwrap().config.windows, [Some(32), None]);
}

#[test]
fn what_is_not_supported_is_named() {
    refused(
        |config| config["architectures"] = json!(["MixtralForCausalLM"]),
        &["MixtralForCausalLM", "LlamaForCausalLM", "config.json"],
    );
    refused(|config| config["attention_bias"] = json!(true), &["attention_bias"]);
    refused(|config| config["mlp_bias"] = json!(true), &["mlp_bias"]);
    refused(|config| config["num_local_experts"] = json!(8), &["num_local_experts"]);
    refused(|config| config["final_logit_softcapping"] = json!(30.0), &["final_logit_softcapping"]);
    refused(
        |config| config["quantization_config"] = json!({"quant_method": "awq"}),
        &["quantization_config"],
    );
    refused(|config| config["hidden_act"] = json!("relu"), &["relu", "silu"]);
    refused(|config| config["layer_types"] = json!(["full_attention"]), &["layer_types", "2 entries"]);
    refused(
        |config| config["layer_types"] = json!(["linear_attention", "linear_attention"]),
        &["linear_attention"],
    );
    refused(|config| config["vocab_size"] = json!(100), &["vocab_size", "270"]);
    refused(|config| config["num_hidden_layers"] = json!(3), &["blk.2.", "missing"]);
    refused(|config| config["num_hidden_layers"] = json!(1), &["blk.1.", "not supported"]);
    refused(|config| config["tie_word_embeddings"] = json!(false), &["output.weight", "missing"]);
    refused(|config| config["hidden_size"] = json!("wide"), &["hidden_size", "wide"]);
    refused(
        |config| drop(config.as_object_mut().unwrap().remove("rms_norm_eps")),
        &["rms_norm_eps", "missing"],
    );
}

#[test]
fn damaged_folders() {
    let refused = |shards: usize, damage: &dyn Fn(&Path), word: &str| {
        let home = folder(&Tiny::default(), shards);
        damage(home.path());
        let error = Checkpoint::open(home.path()).expect_err("it must be refused").to_string();
        assert!(error.contains(word), "{word:?} is not in {error:?}");
    };
    let remove = |name: &'static str| move |home: &Path| std::fs::remove_file(home.join(name)).unwrap();
    refused(1, &remove("tokenizer.json"), "tokenizer.json is missing");
    refused(1, &remove("model.safetensors"), "model.safetensors or");
    refused(2, &remove("model-00002-of-00002.safetensors"), "model-00002-of-00002.safetensors");
    refused(1, &|home| std::fs::write(home.join("config.json"), "{").unwrap(), "JSON");
    refused(1, &|home| std::fs::write(home.join("model.safetensors"), "short").unwrap(), "safetensors");
    let index = "model.safetensors.index.json";
    refused(2, &|home| save(home, index, &json!({})), "weight_map");
    let outside = json!({"weight_map": {"model.norm.weight": "../model.safetensors"}});
    refused(2, &|home| save(home, index, &outside), "beside it");
    let incomplete = json!({"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}});
    refused(2, &|home| save(home, index, &incomplete), index);
    let cut = |home: &Path| {
        let path = home.join("model.safetensors");
        let bytes = std::fs::read(&path).unwrap();
        std::fs::write(&path, &bytes[..bytes.len() - 5]).unwrap();
    };
    refused(1, &cut, "safetensors");

    let tokens = |change: &dyn Fn(&mut Value), word: &str| {
        let change = |home: &Path| {
            let mut value = tokenizer();
            change(&mut value);
            save(home, "tokenizer.json", &value);
        };
        refused(1, &change, word);
    };
    tokens(&|value| value["model"]["type"] = json!("Unigram"), "Unigram");
    tokens(&|value| value["decoder"] = json!({"type": "WordPiece"}), "WordPiece");
    tokens(&|value| value["model"]["merges"] = json!(["a\u{fffd} b"]), "merge");
    tokens(&|value| value["model"]["merges"] = json!([["Ye", "Ye"]]), "merge");
    tokens(&|value| value["model"]["vocab"]["far"] = json!(4_000_000_000u32), "4000000000");
    tokens(&|value| value["added_tokens"][0]["id"] = json!(270), "270");
    tokens(&|value| value["model"]["continuing_subword_prefix"] = json!("##"), "continuing_subword_prefix");
}

#[test]
fn nothing_is_cut_because_the_tokenizer_says_so() {
    let home = folder(&Tiny::default(), 1);
    let mut value = tokenizer();
    value["truncation"] =
        json!({"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0});
    save(home.path(), "tokenizer.json", &value);
    let checkpoint = Checkpoint::open(home.path()).unwrap();
    assert_eq!(checkpoint.tokenizer.encode("xxxxxxxxxx").len(), 10);
}

#[test]
fn templates_of_a_folder() {
    let turns = [Message::new(Role::User, "Hi")];
    let render = |home: &Path| Checkpoint::open(home).unwrap().template.render(&turns, &[], true).unwrap();
    let home = folder(&Tiny::default(), 1);
    let home = home.path();
    assert_eq!(render(home), "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n");
    save(
        home,
        "tokenizer_config.json",
        &json!({"bos_token": "<|im_start|>", "chat_template": "one {{ bos_token }}"}),
    );
    assert_eq!(render(home), "one <|im_start|>");
    let list = json!([{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "two"}]);
    save(home, "tokenizer_config.json", &json!({"chat_template": list}));
    assert_eq!(render(home), "two");
    std::fs::write(home.join("chat_template.jinja"), "three").unwrap();
    assert_eq!(render(home), "three");
}
