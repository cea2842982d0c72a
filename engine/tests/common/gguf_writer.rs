//! Writes GGUF files: any metadata and tensors, or a small random model that loads.

use std::path::Path;

/// A metadata value.
#[derive(Debug, Clone)]
pub(crate) enum Value {
    U32(u32),
    F32(f32),
    Bool(bool),
    Text(String),
    Texts(Vec<String>),
    I32s(Vec<i32>),
    F32s(Vec<f32>),
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self::Text(text.into())
    }
}

impl From<u32> for Value {
    fn from(number: u32) -> Self {
        Self::U32(number)
    }
}

impl From<f32> for Value {
    fn from(number: f32) -> Self {
        Self::F32(number)
    }
}

impl From<bool> for Value {
    fn from(truth: bool) -> Self {
        Self::Bool(truth)
    }
}

impl From<&[&str]> for Value {
    fn from(texts: &[&str]) -> Self {
        Self::Texts(texts.iter().map(|text| (*text).into()).collect())
    }
}

/// A tensor as it goes into the file.
#[derive(Debug, Clone)]
pub(crate) struct Tensor {
    pub(crate) name: String,
    /// Rows first, as the engine has it; the file has them the other way round.
    pub(crate) shape: Vec<u64>,
    /// ggml's number of the type.
    pub(crate) kind: u32,
    pub(crate) data: Vec<u8>,
}

/// ggml's number for f32.
pub(crate) const F32: u32 = 0;
/// ggml's number for Q8_0: 32 numbers in 34 bytes, an f16 scale and i8 each.
pub(crate) const Q8_0: u32 = 8;

/// A GGUF file in the making.
#[derive(Debug, Clone, Default)]
pub(crate) struct GgufWriter {
    pub(crate) metadata: Vec<(String, Value)>,
    pub(crate) tensors: Vec<Tensor>,
}

impl GgufWriter {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// Sets a key, in place where it is there already.
    pub(crate) fn set(&mut self, key: &str, value: impl Into<Value>) -> &mut Self {
        let value = value.into();
        match self.metadata.iter_mut().find(|(own, _)| own == key) {
            Some((_, own)) => *own = value,
            None => self.metadata.push((key.into(), value)),
        }
        self
    }

    /// Removes a key.
    pub(crate) fn unset(&mut self, key: &str) -> &mut Self {
        self.metadata.retain(|(own, _)| own != key);
        self
    }

    /// Adds a tensor of f32.
    pub(crate) fn f32s(&mut self, name: &str, shape: &[u64], values: &[f32]) -> &mut Self {
        assert_eq!(shape.iter().product::<u64>(), values.len() as u64, "{name}");
        let data = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.tensor(name, shape, F32, data)
    }

    /// Adds a tensor of Q8_0, rounded from f32.
    pub(crate) fn q8_0(&mut self, name: &str, shape: &[u64], values: &[f32]) -> &mut Self {
        assert_eq!(shape.iter().product::<u64>(), values.len() as u64, "{name}");
        assert!(shape.last().is_some_and(|columns| columns % 32 == 0), "{name}: rows of whole blocks");
        let mut data = Vec::new();
        for block in values.chunks(32) {
            let most = block.iter().fold(0f32, |most, value| most.max(value.abs()));
            let scale = half::f16::from_f32(most / 127.0);
            data.extend_from_slice(&scale.to_le_bytes());
            let inverse = if most > 0.0 { 1.0 / scale.to_f32() } else { 0.0 };
            data.extend(block.iter().map(|value| (value * inverse).round().clamp(-127.0, 127.0) as i8 as u8));
        }
        self.tensor(name, shape, Q8_0, data)
    }

    /// Adds a tensor of any type.
    pub(crate) fn tensor(&mut self, name: &str, shape: &[u64], kind: u32, data: Vec<u8>) -> &mut Self {
        self.tensors.push(Tensor { name: name.into(), shape: shape.to_vec(), kind, data });
        self
    }

    /// The file's bytes: version 3, aligned to 32.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(3u32.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, value) in &self.metadata {
            text(&mut out, key);
            put(&mut out, value);
        }
        let mut offset = 0;
        for tensor in &self.tensors {
            text(&mut out, &tensor.name);
            out.extend((tensor.shape.len() as u32).to_le_bytes());
            for size in tensor.shape.iter().rev() {
                out.extend(size.to_le_bytes());
            }
            out.extend(tensor.kind.to_le_bytes());
            out.extend((offset as u64).to_le_bytes());
            offset = (offset + tensor.data.len()).next_multiple_of(32);
        }
        for tensor in &self.tensors {
            out.resize(out.len().next_multiple_of(32), 0);
            out.extend_from_slice(&tensor.data);
        }
        out
    }

    /// Writes the file.
    pub(crate) fn write(&self, path: &Path) {
        std::fs::write(path, self.bytes()).expect("the file can be written");
    }
}

fn text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend_from_slice(text.as_bytes());
}

fn put(out: &mut Vec<u8>, value: &Value) {
    let array = |out: &mut Vec<u8>, kind: u32, count: usize| {
        out.extend(9u32.to_le_bytes());
        out.extend(kind.to_le_bytes());
        out.extend((count as u64).to_le_bytes());
    };
    match value {
        Value::U32(number) => {
            out.extend(4u32.to_le_bytes());
            out.extend(number.to_le_bytes());
        }
        Value::F32(number) => {
            out.extend(6u32.to_le_bytes());
            out.extend(number.to_le_bytes());
        }
        Value::Bool(truth) => {
            out.extend(7u32.to_le_bytes());
            out.push(u8::from(*truth));
        }
        Value::Text(string) => {
            out.extend(8u32.to_le_bytes());
            text(out, string);
        }
        Value::Texts(strings) => {
            array(out, 8, strings.len());
            strings.iter().for_each(|string| text(out, string));
        }
        Value::I32s(numbers) => {
            array(out, 5, numbers.len());
            out.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
        }
        Value::F32s(numbers) => {
            array(out, 6, numbers.len());
            out.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
        }
    }
}

/// The shape of a small random model.
#[derive(Debug, Clone)]
pub(crate) struct Tiny {
    /// "llama", "qwen2" or "qwen3": the last two have biases and QK-norm.
    pub(crate) architecture: &'static str,
    pub(crate) layers: u64,
    pub(crate) width: u64,
    pub(crate) ffn: u64,
    pub(crate) heads: u64,
    pub(crate) kv_heads: u64,
    pub(crate) head_dim: u64,
    pub(crate) context: u32,
    /// A head of its own instead of the embedding table.
    pub(crate) untied: bool,
    /// Matrices in Q8_0 instead of f32; widths must be multiples of 32.
    pub(crate) quantised: bool,
    /// Where the random numbers start.
    pub(crate) seed: u64,
}

impl Default for Tiny {
    fn default() -> Self {
        Self {
            architecture: "llama",
            layers: 2,
            width: 64,
            ffn: 96,
            heads: 4,
            kv_heads: 2,
            head_dim: 16,
            context: 512,
            untied: false,
            quantised: false,
            seed: 1,
        }
    }
}

/// The tokens of a tiny model: three marks, the 256 bytes, and what merges make.
pub(crate) fn tiny_tokens() -> (Vec<String>, Vec<String>) {
    let marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"].map(String::from);
    let printable = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let mut shifted = '\u{100}'..;
    let spell = |byte: u8| if printable(&byte) { char::from(byte) } else { shifted.next().expect("endless") };
    let mut tokens: Vec<String> = marks.into_iter().chain((0..=255u8).map(spell).map(String::from)).collect();
    let merges = ["Ġ t", "h e", "Ġt he", "i n", "Y e", "Ye s", "N o", "e r", "Ġ a", "u s", "us er"];
    tokens.extend(merges.iter().map(|merge| merge.replace(' ', "")));
    (tokens, merges.map(String::from).into())
}

impl Tiny {
    /// The model's file. Weights are uniform, scaled so that activations neither die nor blow up.
    pub(crate) fn writer(&self) -> GgufWriter {
        let mut writer = GgufWriter::new();
        let (tokens, merges) = tiny_tokens();
        let vocab = tokens.len() as u64;
        let arch = self.architecture;
        writer.set("general.architecture", arch).set("general.name", "tiny");
        for (name, number) in [
            ("block_count", self.layers),
            ("context_length", self.context.into()),
            ("embedding_length", self.width),
            ("feed_forward_length", self.ffn),
            ("attention.head_count", self.heads),
            ("attention.head_count_kv", self.kv_heads),
            ("attention.key_length", self.head_dim),
            ("attention.value_length", self.head_dim),
        ] {
            writer.set(&format!("{arch}.{name}"), number as u32);
        }
        writer.set(&format!("{arch}.attention.layer_norm_rms_epsilon"), 1e-5f32);
        writer.set(&format!("{arch}.rope.freq_base"), 10_000.0f32);
        writer.set("tokenizer.ggml.model", "gpt2").set("tokenizer.ggml.pre", "smollm");
        let kinds = (0..vocab).map(|token| if token < 3 { 3 } else { 1 }).collect();
        writer.set("tokenizer.ggml.tokens", Value::Texts(tokens));
        writer.set("tokenizer.ggml.token_type", Value::I32s(kinds));
        writer.set("tokenizer.ggml.merges", Value::Texts(merges));
        writer.set("tokenizer.ggml.bos_token_id", 1u32);
        writer.set("tokenizer.ggml.eos_token_id", 2u32);
        self.tensors(&mut writer, vocab);
        writer
    }

    fn tensors(&self, writer: &mut GgufWriter, vocab: u64) {
        let mut random = Random(self.seed);
        let (d, ffn) = (self.width, self.ffn);
        let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let mut matrix = |writer: &mut GgufWriter, name: String, rows: u64, columns: u64| {
            let spread = (3.0 / columns as f32).sqrt();
            let values: Vec<f32> = (0..rows * columns).map(|_| spread * random.next()).collect();
            match self.quantised {
                true => writer.q8_0(&name, &[rows, columns], &values),
                false => writer.f32s(&name, &[rows, columns], &values),
            };
        };
        matrix(writer, "token_embd.weight".into(), vocab, d);
        if self.untied {
            matrix(writer, "output.weight".into(), vocab, d);
        }
        for layer in 0..self.layers {
            for (name, rows, columns) in [
                ("attn_q", q, d),
                ("attn_k", kv, d),
                ("attn_v", kv, d),
                ("attn_output", d, q),
                ("ffn_gate", ffn, d),
                ("ffn_up", ffn, d),
                ("ffn_down", d, ffn),
            ] {
                matrix(writer, format!("blk.{layer}.{name}.weight"), rows, columns);
            }
        }
        let mut vector = |name: String, size: u64, around: f32| {
            let values: Vec<f32> = (0..size).map(|_| around + 0.1 * random.next()).collect();
            writer.f32s(&name, &[size], &values);
        };
        vector("output_norm.weight".into(), d, 1.0);
        for layer in 0..self.layers {
            vector(format!("blk.{layer}.attn_norm.weight"), d, 1.0);
            vector(format!("blk.{layer}.ffn_norm.weight"), d, 1.0);
            if self.architecture == "qwen3" {
                vector(format!("blk.{layer}.attn_q_norm.weight"), self.head_dim, 1.0);
                vector(format!("blk.{layer}.attn_k_norm.weight"), self.head_dim, 1.0);
            }
            if self.architecture == "qwen2" {
                for (name, size) in [("attn_q", q), ("attn_k", kv), ("attn_v", kv)] {
                    vector(format!("blk.{layer}.{name}.bias"), size, 0.0);
                }
            }
        }
    }

    /// Writes the model's file.
    pub(crate) fn write(&self, path: &Path) {
        self.writer().write(path);
    }
}

/// xorshift64*: numbers from -1 to 1, the same on every machine.
struct Random(u64);

impl Random {
    fn next(&mut self) -> f32 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let bits = self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 40;
        bits as f32 / (1u64 << 23) as f32 - 1.0
    }
}
