//! The Llama shape: config, weights, forward.

use std::ops::Range;
use std::rc::Rc;

use forkpoint_kernels::{
    Activation, Attention, AttentionBatch, Backend, HiddenShape, KernelError, KvPrecision, KvShape, Operand,
    PageId, Place, Rope, Rounding, Slot,
};

use crate::error::StartError;
use crate::load::Checkpoint;

/// The numbers and switches that tell one model of this shape from another.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// The architecture's name in the checkpoint: "llama", "qwen3".
    pub architecture: String,
    /// Transformer blocks.
    pub layers: usize,
    /// Width of the residual stream.
    pub width: usize,
    /// Width of the feed-forward block.
    pub ffn: usize,
    /// Query heads.
    pub heads: usize,
    /// Key-value heads.
    pub kv_heads: usize,
    /// Numbers in a head.
    pub head_dim: usize,
    /// Tokens that the model was trained to read at once.
    pub context: usize,
    /// Rows of the embedding table.
    pub vocab: usize,
    /// Added to the mean square in every norm.
    pub eps: f32,
    /// Rotary embedding, long-context scaling included.
    pub rope: Rope,
    /// What scores are multiplied with; `1/sqrt(head_dim)` but for Gemma.
    pub attention_scale: f32,
    /// What embeddings are multiplied with; 1 but for Gemma.
    pub embedding_scale: f32,
    /// Norm over each head of queries and keys (Qwen3, Gemma 3).
    pub qk_norm: bool,
    /// Biases on the query, key and value projections (Qwen2).
    pub qkv_bias: bool,
    /// The head is the embedding table.
    pub tied: bool,
    /// The gate's activation.
    pub activation: Activation,
    /// Sliding window of each layer; `None` sees all.
    pub windows: Vec<Option<u32>>,
}

impl Config {
    /// The shape of an arena of `pages` for this model.
    #[must_use]
    pub fn kv_shape(&self, pages: usize, precision: KvPrecision) -> KvShape {
        let (layers, heads, head_dim) = (self.layers, self.kv_heads, self.head_dim);
        KvShape { layers, heads, head_dim, pages, precision }
    }
}

/// Weights of one block, in the device's layout.
struct Block<B: Backend> {
    attention_norm: B::Vector,
    q: B::Matrix,
    k: B::Matrix,
    v: B::Matrix,
    qkv_bias: Option<[B::Vector; 3]>,
    qk_norm: Option<[B::Vector; 2]>,
    o: B::Matrix,
    ffn_norm: B::Vector,
    gate: B::Matrix,
    up: B::Matrix,
    down: B::Matrix,
}

impl<B: Backend> Block<B> {
    fn load(
        config: &Config,
        checkpoint: &Checkpoint,
        device: &mut B,
        layer: usize,
    ) -> Result<Self, StartError> {
        let name = |part: &str| format!("blk.{layer}.{part}");
        let vector = |device: &mut B, part: &str| -> Result<B::Vector, StartError> {
            Ok(device.vector(&checkpoint.vector(&name(part))?))
        };
        let matrix = |device: &mut B, part: &str| -> Result<B::Matrix, StartError> {
            checkpoint.upload(&name(part), device)
        };
        let qkv_bias = if config.qkv_bias {
            let [q, k, v] = ["attn_q.bias", "attn_k.bias", "attn_v.bias"];
            Some([vector(device, q)?, vector(device, k)?, vector(device, v)?])
        } else {
            None
        };
        let qk_norm = if config.qk_norm {
            Some([vector(device, "attn_q_norm.weight")?, vector(device, "attn_k_norm.weight")?])
        } else {
            None
        };
        Ok(Self {
            attention_norm: vector(device, "attn_norm.weight")?,
            q: matrix(device, "attn_q.weight")?,
            k: matrix(device, "attn_k.weight")?,
            v: matrix(device, "attn_v.weight")?,
            qkv_bias,
            qk_norm,
            o: matrix(device, "attn_output.weight")?,
            ffn_norm: vector(device, "ffn_norm.weight")?,
            gate: matrix(device, "ffn_gate.weight")?,
            up: matrix(device, "ffn_up.weight")?,
            down: matrix(device, "ffn_down.weight")?,
        })
    }
}

/// Activations of a step, allocated once for its most rows.
struct Scratch<B: Backend> {
    x: B::Rows,
    q: B::Rows,
    k: B::Rows,
    v: B::Rows,
    attended: B::Rows,
    gate: B::Rows,
    up: B::Rows,
    read: B::Rows,
    tips: B::Rows,
    logits: B::Rows,
}

/// One ragged batch: rows of any number of sessions.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Step<'a> {
    /// The token of each row.
    pub(crate) tokens: &'a [u32],
    /// Its position in its session.
    pub(crate) positions: &'a [u32],
    /// Where its key and value go.
    pub(crate) slots: &'a [Slot],
    /// Who attends to what.
    pub(crate) batch: AttentionBatch<'a>,
    /// Nothing is read of these rows but hidden states: the blocks above the
    /// last that is kept are left out.
    pub(crate) shallow: bool,
}

/// Hidden states that pages keep.
struct Kept<B: Backend> {
    /// After how many blocks, ascending.
    layers: Vec<usize>,
    states: B::Hidden,
}

/// Rows whose logits are computed at once; the vocabulary is wide.
const HEAD_ROWS: usize = 16;

/// A model on a device, with the arena of its keys and values.
pub(crate) struct Llama<B: Backend> {
    config: Config,
    device: B,
    kv: B::Kv,
    embedding: B::Matrix,
    blocks: Vec<Block<B>>,
    output_norm: B::Vector,
    /// None where the head is the embedding table.
    head: Option<B::Matrix>,
    scratch: Scratch<B>,
    /// Absent until somebody asks for it.
    kept: Option<Kept<B>>,
}

impl<B: Backend> Llama<B> {
    /// Repacks a checkpoint's weights and reserves the arena. A step holds at
    /// most `rows` rows.
    pub(crate) fn load(
        mut device: B,
        checkpoint: &Checkpoint,
        kv: KvShape,
        rows: usize,
    ) -> Result<Self, StartError> {
        let config = checkpoint.config.clone();
        let kv = device.kv(kv)?;
        let embedding = checkpoint.upload("token_embd.weight", &mut device)?;
        let blocks = (0..config.layers)
            .map(|layer| Block::load(&config, checkpoint, &mut device, layer))
            .collect::<Result<_, _>>()?;
        let output_norm = device.vector(&checkpoint.vector("output_norm.weight")?);
        let head = if config.tied { None } else { Some(checkpoint.upload("output.weight", &mut device)?) };
        let (width, queries) = (config.width, config.heads * config.head_dim);
        let keys = config.kv_heads * config.head_dim;
        let scratch = Scratch {
            x: device.rows(rows, width),
            q: device.rows(rows, queries),
            k: device.rows(rows, keys),
            v: device.rows(rows, keys),
            attended: device.rows(rows, queries),
            gate: device.rows(rows, config.ffn),
            up: device.rows(rows, config.ffn),
            read: device.rows(HEAD_ROWS, width),
            tips: device.rows(HEAD_ROWS, width),
            logits: device.rows(HEAD_ROWS, config.vocab),
        };
        Ok(Self { config, device, kv, embedding, blocks, output_norm, head, scratch, kept: None })
    }

    /// What runs the model, for a person.
    pub(crate) fn device(&self) -> String {
        self.device.describe()
    }

    /// Runs a step. Keys and values land in their slots; hidden states wait
    /// for [`Llama::tips`].
    pub(crate) fn forward(&mut self, step: Step<'_>) {
        let Self { config, device, kv, scratch: s, kept, .. } = self;
        let deepest = kept.as_ref().and_then(|kept| kept.layers.last().copied());
        let depth = deepest.filter(|_| step.shallow).unwrap_or(config.layers);
        device.embed(&self.embedding, step.tokens, config.embedding_scale, &mut s.x);
        for (layer, block) in self.blocks[..depth].iter().enumerate() {
            let normed = Operand::Norm { x: &s.x, gain: &block.attention_norm, eps: config.eps };
            let mut qkv = [(&block.q, &mut s.q), (&block.k, &mut s.k), (&block.v, &mut s.v)];
            device.linear(normed, Rounding::Coarse, &mut qkv);
            if let Some([q, k, v]) = &block.qkv_bias {
                device.bias(&mut s.q, q);
                device.bias(&mut s.k, k);
                device.bias(&mut s.v, v);
            }
            if let Some([q, k]) = &block.qk_norm {
                device.head_norm(&mut s.q, q, config.eps);
                device.head_norm(&mut s.k, k, config.eps);
            }
            let place = Place { positions: step.positions, rope: &config.rope, slots: step.slots };
            device.rope_store(&place, [&mut s.q, &mut s.k, &mut s.v], kv, layer);
            let attention = Attention {
                heads: config.heads,
                scale: config.attention_scale,
                window: config.windows[layer],
            };
            device.attend(&attention, &s.q, kv, layer, step.batch, &mut s.attended);
            device.linear_add(Operand::Rows(&s.attended), Rounding::Coarse, &block.o, &mut s.x);

            let normed = Operand::Norm { x: &s.x, gain: &block.ffn_norm, eps: config.eps };
            device.linear(
                normed,
                Rounding::Coarse,
                &mut [(&block.gate, &mut s.gate), (&block.up, &mut s.up)],
            );
            let gated = Operand::Gate { activation: config.activation, gate: &s.gate, up: &s.up };
            // Products of two activations have outliers.
            device.linear_add(gated, Rounding::Outliers, &block.down, &mut s.x);
            if let Some(kept) = kept
                && let Ok(place) = kept.layers.binary_search(&(layer + 1))
            {
                device.keep(&mut kept.states, place, &s.x, step.slots);
            }
        }
    }

    /// Keeps the hidden states after each of these counts of blocks, of every token
    /// computed from now on, for an arena of `pages`.
    pub(crate) fn keep(&mut self, mut layers: Vec<usize>, pages: usize) -> Result<(), KernelError> {
        layers.sort_unstable();
        layers.dedup();
        let shape = HiddenShape { layers: layers.len(), width: self.config.width, pages };
        // Never two of them at once.
        self.kept = None;
        self.kept = Some(Kept { states: self.device.hidden(shape)?, layers });
        Ok(())
    }

    /// Bytes of a page of kept hidden states.
    pub(crate) fn hidden_page_bytes(&self) -> usize {
        let layers = self.kept().len();
        HiddenShape { layers, width: self.config.width, pages: 1 }.page_bytes()
    }

    /// The layers whose states are kept.
    pub(crate) fn kept(&self) -> &[usize] {
        self.kept.as_ref().map_or(&[], |kept| &kept.layers)
    }

    /// The mean of a kept layer's states over some tokens of the session with these
    /// pages; none where the layer is not kept.
    pub(crate) fn mean(&mut self, layer: usize, pages: &[PageId], tokens: Range<usize>) -> Option<Vec<f32>> {
        let kept = self.kept.as_ref()?;
        let place = kept.layers.binary_search(&layer).ok()?;
        let mut mean = vec![0.0; self.config.width];
        self.device.mean(&kept.states, place, pages, tokens, &mut mean);
        Some(mean)
    }

    /// The final-norm hidden state of some rows of the last step.
    pub(crate) fn tips(&mut self, rows: &[u32]) -> Vec<Rc<[f32]>> {
        let Self { config, device, scratch: s, .. } = self;
        let mut tips = Vec::with_capacity(rows.len());
        for rows in rows.chunks(HEAD_ROWS) {
            device.gather(&s.x, rows, &mut s.read);
            device.rms_norm(&s.read, &self.output_norm, config.eps, &mut s.tips);
            tips.extend((0..rows.len()).map(|row| Rc::from(device.read(&s.tips, row))));
        }
        tips
    }

    /// Calls `with` for each tip with its logits over the vocabulary, on several threads at once.
    pub(crate) fn logits(&mut self, tips: &[Rc<[f32]>], with: impl Fn(usize, &[f32]) + Sync) {
        let Self { device, scratch: s, .. } = self;
        let head = self.head.as_ref().unwrap_or(&self.embedding);
        let mut flat = Vec::with_capacity(HEAD_ROWS * self.config.width);
        for (chunk, tips) in tips.chunks(HEAD_ROWS).enumerate() {
            flat.clear();
            tips.iter().for_each(|tip| flat.extend_from_slice(tip));
            device.write(&mut s.tips, &flat);
            // Few rows, and every label is read off them.
            device.linear(Operand::Rows(&s.tips), Rounding::Fine, &mut [(head, &mut s.logits)]);
            device.read_each(&s.logits, &|row, logits| with(chunk * HEAD_ROWS + row, logits));
        }
    }

    /// Copies the first tokens of a page to another, in all layers.
    pub(crate) fn copy_page(&mut self, from: PageId, to: PageId, tokens: usize) {
        self.device.copy_page(&mut self.kv, from, to, tokens);
        if let Some(kept) = &mut self.kept {
            self.device.copy_hidden(&mut kept.states, from, to, tokens);
        }
    }
}
