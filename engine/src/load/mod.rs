//! Checkpoints: a `.gguf` file, or a folder as Hugging Face lays it out.
//!
//! Both give the same [`Checkpoint`]: a configuration, a tokenizer, a chat
//! template, and tensors under GGUF's names. Everything is checked on opening:
//! that the architecture and its switches are supported, and that every tensor
//! is there in the shape that the configuration implies, and no other.

mod config;
mod error;
mod gguf;
mod quantize;
mod recommended;
mod safetensors;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use forkpoint_kernels::{Format, HostMatrix, MappedFile};
use half::{bf16, f16};
use serde_json::Value;
use xxhash_rust::xxh3::Xxh3;

pub use error::LoadError;
pub use quantize::Quantize;

pub(crate) use error::At;
pub(crate) use gguf::Gguf;

use crate::generate::Sampling;
use crate::model::Config;
use crate::template::ChatTemplate;
use crate::tokenizer::Tokenizer;

/// Where a tensor lies, and in what form.
#[derive(Debug, Clone)]
pub(crate) struct Tensor {
    format: Format,
    /// Rows first: outputs, then inputs.
    shape: Vec<usize>,
    /// Which of the checkpoint's files.
    file: usize,
    /// Its bytes there.
    range: Range<usize>,
}

/// A model's files, opened and checked. Weights stay mapped until they are read.
#[derive(Debug)]
pub struct Checkpoint {
    /// The model's shape.
    pub config: Config,
    /// Text to tokens and back.
    pub tokenizer: Arc<Tokenizer>,
    /// Conversations to text.
    pub template: Arc<ChatTemplate>,
    /// `general.name` of a GGUF file, or the folder's name.
    pub name: String,
    /// How its makers recommend to sample it, where they say so.
    pub sampling: Sampling,
    path: PathBuf,
    files: Vec<MappedFile>,
    tensors: BTreeMap<String, Tensor>,
    /// What plain matrices are packed to as they are read.
    quantize: Option<Quantize>,
}

impl Checkpoint {
    /// Opens a `.gguf` file, or a folder with `config.json`, `tokenizer.json`
    /// and `*.safetensors`.
    ///
    /// # Errors
    /// When a file is missing, damaged or contradicts another, or the model
    /// asks for something that this engine does not compute.
    pub fn open(path: &Path) -> Result<Self, LoadError> {
        let metadata = std::fs::metadata(path).map_err(|error| At(path).io(error))?;
        let checkpoint = if metadata.is_dir() { Self::open_folder(path)? } else { Self::open_gguf(path)? };
        checkpoint.check_tensors()?;
        Ok(checkpoint)
    }

    fn open_gguf(path: &Path) -> Result<Self, LoadError> {
        let at = At(path);
        let file = MappedFile::open(path).map_err(|error| at.io(error))?;
        let gguf = Gguf::parse(at, &file)?;
        let vocab = vocab(at, &gguf.tensors)?;
        let factors = match gguf.tensors.get(ROPE_FACTORS) {
            Some(tensor) => Some(vector(at, ROPE_FACTORS, tensor, &file[tensor.range.clone()])?),
            None => None,
        };
        let config = config::from_gguf(&gguf, vocab, factors.as_deref())?;
        let tokenizer = Tokenizer::from_gguf(&gguf, vocab)?;
        let text = |key: &str| gguf.text(key);
        let template = text("tokenizer.chat_template")?;
        let with_tools = text("tokenizer.chat_template.tool_use")?;
        let template = chat_template(at, template, with_tools, &tokenizer)?;
        let name = match gguf.text("general.name")? {
            Some(name) => name.into(),
            None => stem(path),
        };
        let sampling = recommended::from_gguf(at, &gguf)?;
        let tensors = gguf.tensors;
        let (tokenizer, template) = (Arc::new(tokenizer), Arc::new(template));
        let (path, files) = (path.into(), vec![file]);
        Ok(Self { config, tokenizer, template, name, sampling, path, files, tensors, quantize: None })
    }

    fn open_folder(folder: &Path) -> Result<Self, LoadError> {
        let path = folder.join("config.json");
        let at = At(&path);
        let json = safetensors::read_json(&path)?.ok_or_else(|| At(folder).missing("config.json"))?;
        let (files, tensors) = safetensors::open(folder)?;
        let vocab = vocab(At(folder), &tensors)?;
        let config = config::from_json(at, &json, vocab)?;

        let side = |name: &str| safetensors::read_json(&folder.join(name));
        let settings = side("tokenizer_config.json")?.unwrap_or(Value::Null);
        let generation = side("generation_config.json")?.unwrap_or(Value::Null);
        let path = folder.join("tokenizer.json");
        let bytes = safetensors::read_small(&path)?.ok_or_else(|| At(folder).missing("tokenizer.json"))?;
        let tokenizer = Tokenizer::from_json(At(&path), &bytes, vocab, &settings, &[&generation, &json])?;

        let path = folder.join("chat_template.jinja");
        let file = safetensors::read_small(&path)?;
        let file = file.map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        // One string, or a list of named ones.
        let named = |name: &str| match settings.get("chat_template") {
            Some(Value::String(text)) if name == "default" => Some(text.as_str()),
            Some(Value::Array(list)) => {
                let found = list.iter().find(|entry| entry.get("name").is_some_and(|own| own == name));
                found?.get("template")?.as_str()
            }
            _ => None,
        };
        let source = file.as_deref().or(named("default"));
        let template = chat_template(At(folder), source, named("tool_use"), &tokenizer)?;
        let (tokenizer, template) = (Arc::new(tokenizer), Arc::new(template));
        let sampling = recommended::from_json(At(&folder.join("generation_config.json")), &generation)?;
        let (name, path) = (stem(folder), folder.into());
        Ok(Self { config, tokenizer, template, name, sampling, path, files, tensors, quantize: None })
    }

    /// Checks that the tensors are those that the configuration implies.
    fn check_tensors(&self) -> Result<(), LoadError> {
        let expected = expected(&self.config);
        for (name, shape) in &expected {
            let tensor = self.tensor(name)?;
            if tensor.shape != *shape {
                let what = format!("the shape of tensor {name}");
                return Err(self.at().invalid(what, format!("{shape:?}"), format!("{:?}", tensor.shape)));
            }
            if shape.len() == 1 && !matches!(tensor.format, Format::F32 | Format::F16 | Format::BF16) {
                let what = format!("the type of tensor {name},");
                return Err(self.at().unsupported(what, tensor.format, "F32, F16, BF16"));
            }
        }
        // Of a tied model some files hold the head all the same; it is the embedding again.
        let known = |name: &str| {
            expected.contains_key(name)
                || name == ROPE_FACTORS
                || (self.config.tied && name == "output.weight")
        };
        match self.tensors.keys().find(|name| !known(name)) {
            Some(name) => Err(self.at().unsupported("tensor", name, "those of the Llama shape")),
            None => Ok(()),
        }
    }

    fn at(&self) -> At<'_> {
        At(&self.path)
    }

    fn tensor(&self, name: &str) -> Result<&Tensor, LoadError> {
        self.tensors.get(name).ok_or_else(|| self.at().missing(format_args!("tensor {name}")))
    }

    fn bytes(&self, tensor: &Tensor) -> &[u8] {
        &self.files[tensor.file][tensor.range.clone()]
    }

    /// A matrix, by GGUF's name: "token_embd.weight", "blk.3.attn_q.weight".
    ///
    /// # Errors
    /// When there is no such tensor, or it is not a matrix.
    pub fn matrix(&self, name: &str) -> Result<HostMatrix<'_>, LoadError> {
        let tensor = self.tensor(name)?;
        let [rows, columns] = tensor.shape[..] else {
            return Err(self.at().invalid(
                format!("tensor {name}"),
                "a matrix",
                format!("{:?}", tensor.shape),
            ));
        };
        HostMatrix::new(tensor.format, rows, columns, self.bytes(tensor))
            .map_err(|source| LoadError::Tensor { path: self.path.clone(), tensor: name.into(), source })
    }

    /// A vector, by GGUF's name: "output_norm.weight", "blk.0.attn_q.bias".
    ///
    /// # Errors
    /// When there is no such tensor, it is not a vector, or is quantised.
    pub fn vector(&self, name: &str) -> Result<Vec<f32>, LoadError> {
        let tensor = self.tensor(name)?;
        vector(self.at(), name, tensor, self.bytes(tensor))
    }

    /// Whether there is a tensor of this name.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// Bytes of all tensors, as they lie in the file.
    #[must_use]
    pub fn tensor_bytes(&self) -> u64 {
        self.tensors.values().map(|tensor| tensor.range.len() as u64).sum()
    }

    /// Numbers in all tensors; a tied head counts once.
    #[must_use]
    pub fn parameters(&self) -> u64 {
        let count = |tensor: &Tensor| tensor.shape.iter().map(|size| *size as u64).product::<u64>();
        let counted = |name: &str| name != ROPE_FACTORS && !(self.config.tied && name == "output.weight");
        self.tensors.iter().filter(|(name, _)| counted(name)).map(|(_, tensor)| count(tensor)).sum()
    }

    /// A hash of what determines the logits, to key what was computed with it.
    ///
    /// XXH3 over the configuration, the tensor table and a sample of the
    /// weights: tensors of up to 64 KiB whole, of larger ones 64 evenly spaced
    /// pieces of 256 bytes, the first and the last bytes among them. Two
    /// checkpoints that differ in other bytes alone have the same fingerprint;
    /// training and quantisation leave no such pairs.
    #[must_use]
    pub fn fingerprint(&self) -> u128 {
        const WHOLE: usize = 64 << 10;
        const PIECES: usize = 64;
        const PIECE: usize = 256;
        let mut hash = Xxh3::new();
        let mut text = |text: &str| {
            hash.update(&(text.len() as u64).to_le_bytes());
            hash.update(text.as_bytes());
        };
        text("forkpoint checkpoint 1");
        if let Some(quantize) = self.quantize {
            text(quantize.name());
        }
        text(&format!("{:?}", self.config));
        for (name, tensor) in &self.tensors {
            text(name);
            text(&format!("{} {:?}", tensor.format, tensor.shape));
        }
        for tensor in self.tensors.values() {
            let bytes = self.bytes(tensor);
            if bytes.len() <= WHOLE {
                hash.update(bytes);
                continue;
            }
            for piece in 0..PIECES {
                let start = (bytes.len() - PIECE) / (PIECES - 1) * piece;
                hash.update(&bytes[start..start + PIECE]);
            }
            hash.update(&bytes[bytes.len() - PIECE..]);
        }
        hash.digest128()
    }
}

/// What each pair's rotation is divided by, in GGUF files of Llama 3.1 and later.
const ROPE_FACTORS: &str = "rope_freqs.weight";

/// The tensors of a model, and their shapes.
fn expected(config: &Config) -> BTreeMap<String, Vec<usize>> {
    let (q, kv) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
    let (d, ffn) = (config.width, config.ffn);
    let mut all = BTreeMap::new();
    all.insert("token_embd.weight".to_string(), vec![config.vocab, d]);
    all.insert("output_norm.weight".to_string(), vec![d]);
    if !config.tied {
        all.insert("output.weight".to_string(), vec![config.vocab, d]);
    }
    for layer in 0..config.layers {
        let mut add = |name: &str, shape: &[usize]| all.insert(format!("blk.{layer}.{name}"), shape.to_vec());
        add("attn_norm.weight", &[d]);
        add("attn_q.weight", &[q, d]);
        add("attn_k.weight", &[kv, d]);
        add("attn_v.weight", &[kv, d]);
        add("attn_output.weight", &[d, q]);
        add("ffn_norm.weight", &[d]);
        add("ffn_gate.weight", &[ffn, d]);
        add("ffn_up.weight", &[ffn, d]);
        add("ffn_down.weight", &[d, ffn]);
        if config.qkv_bias {
            add("attn_q.bias", &[q]);
            add("attn_k.bias", &[kv]);
            add("attn_v.bias", &[kv]);
        }
        if config.qk_norm {
            add("attn_q_norm.weight", &[config.head_dim]);
            add("attn_k_norm.weight", &[config.head_dim]);
        }
    }
    all
}

/// Rows of the embedding table.
fn vocab(at: At<'_>, tensors: &BTreeMap<String, Tensor>) -> Result<usize, LoadError> {
    let name = "token_embd.weight";
    let tensor = tensors.get(name).ok_or_else(|| at.missing(format_args!("tensor {name}")))?;
    match tensor.shape[..] {
        // Tokens are u32, and u32::MAX is nobody's.
        [rows, _] if rows < u32::MAX as usize => Ok(rows),
        _ => {
            Err(at.invalid(format!("the shape of tensor {name}"), "a matrix", format!("{:?}", tensor.shape)))
        }
    }
}

/// The numbers of a vector, as f32.
fn vector(at: At<'_>, name: &str, tensor: &Tensor, bytes: &[u8]) -> Result<Vec<f32>, LoadError> {
    let what = format!("tensor {name}");
    if tensor.shape.len() != 1 {
        return Err(at.invalid(what, "a vector", format!("{:?}", tensor.shape)));
    }
    let halves = || bytes.as_chunks::<2>().0.iter();
    match tensor.format {
        Format::F32 => Ok(bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()),
        Format::F16 => Ok(halves().map(|bytes| f16::from_le_bytes(*bytes).to_f32()).collect()),
        Format::BF16 => Ok(halves().map(|bytes| bf16::from_le_bytes(*bytes).to_f32()).collect()),
        other => Err(at.unsupported(format_args!("the type of {what},"), other, "F32, F16, BF16")),
    }
}

/// The model's template; ChatML where it has none but its vocabulary was made for it.
fn chat_template(
    at: At<'_>,
    source: Option<&str>,
    with_tools: Option<&str>,
    tokenizer: &Tokenizer,
) -> Result<ChatTemplate, LoadError> {
    let content = |token: Option<u32>| token.and_then(|token| tokenizer.content(token));
    let bos = content(tokenizer.bos());
    let eos = content(tokenizer.eos().first().copied());
    let Some(source) = source else {
        let chatml = ["<|im_start|>", "<|im_end|>"].iter().all(|tag| tokenizer.starts_with_special(tag));
        return Ok(if chatml { ChatTemplate::chatml() } else { ChatTemplate::missing() });
    };
    let wrong = |error| at.invalid("the chat template", "a Jinja template", error);
    let template = ChatTemplate::new(source, bos, eos).map_err(wrong)?;
    match with_tools {
        Some(source) => template.with_tools(source).map_err(wrong),
        None => Ok(template),
    }
}

/// A file's or folder's name, without `.gguf`.
fn stem(path: &Path) -> String {
    let path = path.canonicalize().unwrap_or_else(|_| path.into());
    let name = if path.is_dir() { path.file_name() } else { path.file_stem() };
    name.map_or_else(|| "model".into(), |name| name.to_string_lossy().into_owned())
}
