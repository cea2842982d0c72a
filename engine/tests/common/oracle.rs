//! The Llama shape once more, as plainly as it can be written: weights
//! dequantised, everything in f32, no pages, no reuse, no int8. It shares
//! nothing with the engine but the reader of checkpoints.

use forkpoint_engine::load::Checkpoint;
use forkpoint_engine::model::Config;
use forkpoint_kernels::{Activation, RopePairing};
use ndarray::{Array1, Array2, ArrayView1, Axis, s};

struct Block {
    attention_norm: Array1<f32>,
    q: Array2<f32>,
    k: Array2<f32>,
    v: Array2<f32>,
    o: Array2<f32>,
    bias: Option<[Array1<f32>; 3]>,
    norms: Option<[Array1<f32>; 2]>,
    ffn_norm: Array1<f32>,
    gate: Array2<f32>,
    up: Array2<f32>,
    down: Array2<f32>,
}

/// A model whose every number is an f32.
pub(crate) struct Oracle {
    config: Config,
    embedding: Array2<f32>,
    blocks: Vec<Block>,
    output_norm: Array1<f32>,
    head: Option<Array2<f32>>,
}

fn matrix(checkpoint: &Checkpoint, name: &str) -> Array2<f32> {
    let source = checkpoint.matrix(name).unwrap();
    let mut all = Array2::zeros((source.rows(), source.cols()));
    for (row, mut out) in all.rows_mut().into_iter().enumerate() {
        source.dequantize_row(row, out.as_slice_mut().unwrap());
    }
    all
}

fn vector(checkpoint: &Checkpoint, name: &str) -> Array1<f32> {
    checkpoint.vector(name).unwrap().into()
}

impl Oracle {
    pub(crate) fn load(checkpoint: &Checkpoint) -> Self {
        let config = checkpoint.config.clone();
        let block = |layer: usize| {
            let matrix = |part: &str| matrix(checkpoint, &format!("blk.{layer}.{part}.weight"));
            let vector = |part: &str| vector(checkpoint, &format!("blk.{layer}.{part}"));
            Block {
                attention_norm: vector("attn_norm.weight"),
                q: matrix("attn_q"),
                k: matrix("attn_k"),
                v: matrix("attn_v"),
                o: matrix("attn_output"),
                bias: config.qkv_bias.then(|| ["attn_q.bias", "attn_k.bias", "attn_v.bias"].map(vector)),
                norms: config.qk_norm.then(|| ["attn_q_norm.weight", "attn_k_norm.weight"].map(vector)),
                ffn_norm: vector("ffn_norm.weight"),
                gate: matrix("ffn_gate"),
                up: matrix("ffn_up"),
                down: matrix("ffn_down"),
            }
        };
        Self {
            embedding: matrix(checkpoint, "token_embd.weight"),
            blocks: (0..config.layers).map(block).collect(),
            output_norm: vector(checkpoint, "output_norm.weight"),
            head: (!config.tied).then(|| matrix(checkpoint, "output.weight")),
            config,
        }
    }

    /// Log-probabilities, over the vocabulary, of the token after these.
    pub(crate) fn logprobs(&self, tokens: &[u32]) -> Vec<f32> {
        let config = &self.config;
        let mut x = Array2::zeros((tokens.len(), config.width));
        for (mut row, &token) in x.rows_mut().into_iter().zip(tokens) {
            row.assign(&(&self.embedding.row(token as usize) * config.embedding_scale));
        }
        for block in &self.blocks {
            let attended = self.attend(block, &norm(&x, &block.attention_norm, config.eps));
            x += &attended.dot(&block.o.t());
            let h = norm(&x, &block.ffn_norm, config.eps);
            let activation = match config.activation {
                Activation::Silu => |x: f32| x / (1.0 + (-x).exp()),
                Activation::GeluTanh => {
                    |x: f32| 0.5 * x * (1.0 + (0.797_884_6 * (x + 0.044_715 * x * x * x)).tanh())
                }
            };
            let gated = h.dot(&block.gate.t()).mapv(activation) * h.dot(&block.up.t());
            x += &gated.dot(&block.down.t());
        }
        let last = norm(&x.slice(s![-1.., ..]).to_owned(), &self.output_norm, config.eps);
        let logits = last.dot(&self.head.as_ref().unwrap_or(&self.embedding).t());
        log_softmax(logits.row(0))
    }

    fn attend(&self, block: &Block, h: &Array2<f32>) -> Array2<f32> {
        let Config { heads, kv_heads, head_dim, .. } = self.config;
        let mut qkv = [h.dot(&block.q.t()), h.dot(&block.k.t()), h.dot(&block.v.t())];
        if let Some(bias) = &block.bias {
            qkv.iter_mut().zip(bias).for_each(|(rows, bias)| *rows += bias);
        }
        let [mut q, mut k, v] = qkv;
        if let Some([q_norm, k_norm]) = &block.norms {
            for (rows, gain) in [(&mut q, q_norm), (&mut k, k_norm)] {
                let by_head = (rows.len() / head_dim, head_dim);
                let heads = rows.clone().into_shape_with_order(by_head).unwrap();
                let normed = norm(&heads, gain, self.config.eps);
                *rows = normed.into_shape_with_order(rows.raw_dim()).unwrap();
            }
        }
        self.rope(&mut q);
        self.rope(&mut k);
        let mut out = Array2::zeros((h.nrows(), heads * head_dim));
        for head in 0..heads {
            let columns = |head: usize| s![.., head * head_dim..(head + 1) * head_dim];
            let group = head / (heads / kv_heads);
            let mut scores = q.slice(columns(head)).dot(&k.slice(columns(group)).t());
            for (row, mut scores) in scores.rows_mut().into_iter().enumerate() {
                scores *= self.config.attention_scale;
                scores.slice_mut(s![row + 1..]).fill(f32::NEG_INFINITY);
                let top = scores.fold(f32::NEG_INFINITY, |a, &b| a.max(b));
                scores.mapv_inplace(|score| (score - top).exp());
                let sum = scores.sum();
                scores /= sum;
            }
            out.slice_mut(columns(head)).assign(&scores.dot(&v.slice(columns(group))));
        }
        out
    }

    fn rope(&self, rows: &mut Array2<f32>) {
        let (rope, dim) = (&self.config.rope, self.config.head_dim);
        for (position, mut row) in rows.rows_mut().into_iter().enumerate() {
            for head in row.as_slice_mut().unwrap().chunks_exact_mut(dim) {
                for (pair, frequency) in rope.frequencies.iter().enumerate() {
                    let (a, b) = match rope.pairing {
                        RopePairing::Adjacent => (2 * pair, 2 * pair + 1),
                        RopePairing::Halves => (pair, pair + dim / 2),
                    };
                    let (sin, cos) = (position as f64 * f64::from(*frequency)).sin_cos();
                    let (x, y) = (f64::from(head[a]), f64::from(head[b]));
                    head[a] = (x * cos - y * sin) as f32;
                    head[b] = (y * cos + x * sin) as f32;
                }
            }
        }
    }
}

fn norm(rows: &Array2<f32>, gain: &Array1<f32>, eps: f32) -> Array2<f32> {
    let mean = rows.mapv(|x| x * x).mean_axis(Axis(1)).unwrap();
    let scale = mean.mapv(|mean| 1.0 / (mean + eps).sqrt()).insert_axis(Axis(1));
    rows * &scale * gain
}

/// Log-probabilities of logits.
pub(crate) fn log_softmax(logits: ArrayView1<'_, f32>) -> Vec<f32> {
    let top = logits.fold(f32::NEG_INFINITY, |a, &b| a.max(b));
    let sum: f64 = logits.iter().map(|&x| f64::from(x - top).exp()).sum();
    logits.iter().map(|&x| x - top - sum.ln() as f32).collect()
}
