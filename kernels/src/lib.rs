//! The arithmetic of a transformer, behind one trait.
//!
//! [`Backend`] is the seam between the model and a device. [`cpu::Cpu`]
//! implements it for this machine's processor: a scalar reference of every
//! operation, and SIMD paths (AVX2, AVX-512) of those that cost time, chosen at
//! run time. The project's `unsafe` code lives in this crate, but for the call
//! that loads compiled policies.
//!
//! Kernels know no model and no session: they see matrices, rows and pages.
//!
//! # Promises that every implementation keeps
//!
//! * **Batch invariance.** A row's result depends on that row's inputs alone,
//!   bit for bit: not on how many rows share the call, in which order they
//!   stand, how they are grouped, or how many threads run. Reductions have a
//!   fixed order and fixed splits.
//! * **No allocation, lock or channel** in an operation once buffers exist.
//!
//! # Example
//!
//! ```
//! use forkpoint_kernels::{Backend, Format, HostMatrix, Operand, Rounding, cpu::Cpu};
//!
//! let mut cpu = Cpu::detect(2)?;
//! // Two outputs of three inputs each, row by row.
//! let data: Vec<u8> = [1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0].iter().flat_map(|v| v.to_le_bytes()).collect();
//! let matrix = cpu.matrix(&HostMatrix::new(Format::F32, 2, 3, &data)?)?;
//! let mut x = cpu.rows(1, 3);
//! let mut y = cpu.rows(1, 2);
//! cpu.write(&mut x, &[1.0, 0.0, -1.0]);
//! cpu.linear(Operand::Rows(&x), Rounding::Coarse, &mut [(&matrix, &mut y)]);
//! assert_eq!(cpu.read(&y, 0), [-2.0, -2.0]);
//! # Ok::<(), forkpoint_kernels::KernelError>(())
//! ```

#![allow(unsafe_code, reason = "SIMD, memory maps and the thread pool: this crate is where they live")]

pub mod cpu;
mod error;
mod format;
mod map;
mod quantize;

use std::ops::Range;

pub use error::KernelError;
pub use format::{Format, HostMatrix};
pub use map::MappedFile;
pub use quantize::quantize;

/// Tokens in a page of keys and values.
pub const PAGE_TOKENS: usize = 16;

/// Keys that attention reduces together before it merges with the next such
/// split: fixed, so that the order of every sum is fixed.
pub const SPLIT_TOKENS: usize = 512;

/// A page of the arena, by its place.
pub type PageId = u32;

/// What one arena of keys and values holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvShape {
    /// Layers of the model.
    pub layers: usize,
    /// Heads of keys and values per layer.
    pub heads: usize,
    /// Numbers in one head's key, and in its value: a multiple of 16.
    pub head_dim: usize,
    /// Pages in the arena.
    pub pages: usize,
    /// How its numbers are kept.
    pub precision: KvPrecision,
}

impl KvShape {
    /// Bytes of one page over all layers, keys and values.
    #[must_use]
    pub fn page_bytes(&self) -> usize {
        let numbers = self.head_dim * PAGE_TOKENS;
        // Scales are bf16: one a token, or two a token and group of 32.
        let bytes = match self.precision {
            KvPrecision::Bf16 => 2 * numbers,
            KvPrecision::Int8 => numbers + 2 * PAGE_TOKENS,
            KvPrecision::Int4 => numbers / 2 + 4 * PAGE_TOKENS * self.head_dim.div_ceil(32),
        };
        2 * self.layers * self.heads * bytes
    }
}

/// What one arena of hidden states holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HiddenShape {
    /// Layers whose states are kept.
    pub layers: usize,
    /// Numbers in a state.
    pub width: usize,
    /// Pages in the arena.
    pub pages: usize,
}

impl HiddenShape {
    /// Bytes of one page over all kept layers: bf16 states, and an f32 sum over them.
    #[must_use]
    pub fn page_bytes(&self) -> usize {
        self.layers * self.width * (2 * PAGE_TOKENS + 4)
    }
}

/// How an arena keeps keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub enum KvPrecision {
    /// 16 bits a number.
    #[default]
    Bf16,
    /// 8 bits, and a scale for each token and head.
    Int8,
    /// 4 bits, and a step and a minimum for each token and 32 dimensions.
    Int4,
}

impl KvPrecision {
    /// All of them, the most precise first.
    pub const ALL: [Self; 3] = [Self::Bf16, Self::Int8, Self::Int4];

    /// The word for it in flags and files.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::Int8 => "int8",
            Self::Int4 => "int4",
        }
    }
}

impl std::str::FromStr for KvPrecision {
    type Err = String;

    fn from_str(word: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|precision| precision.name() == word)
            .ok_or_else(|| format!("must be bf16, int8 or int4, got {word:?}"))
    }
}

/// Where a row's key and value are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slot {
    /// The page: private to the row's session.
    pub page: PageId,
    /// The token's place in it, below [`PAGE_TOKENS`].
    pub offset: u32,
}

/// Where a step's rows stand.
#[derive(Debug, Clone, Copy)]
pub struct Place<'a> {
    /// The position of each in its session.
    pub positions: &'a [u32],
    /// How positions turn.
    pub rope: &'a Rope,
    /// Where each one's key and value go.
    pub slots: &'a [Slot],
}

/// Consecutive rows of one session in a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Span {
    /// The first of its rows in the step.
    pub row: u32,
    /// How many rows.
    pub rows: u32,
    /// Position in the session of its first row; row `i` attends to the keys
    /// at positions `0..=position + i`.
    pub position: u32,
    /// Where the session's pages start in the step's page table. Position `p`
    /// lies in page `table[pages + p / 16]`.
    pub pages: u32,
}

/// Spans that share their leading pages, so that each page is read once for
/// all of their rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    /// The first of its spans.
    pub span: u32,
    /// How many spans.
    pub spans: u32,
    /// Leading pages that are the same in all its spans and lie wholly before
    /// each span's first row. Says what may be shared, never what is computed:
    /// results do not depend on it.
    pub shared: u32,
}

/// Who attends to what in one step. Slices of one step's plan.
#[derive(Debug, Clone, Copy)]
pub struct AttentionBatch<'a> {
    /// Groups, in order; together they name every span once.
    pub groups: &'a [Group],
    /// Spans, in order of their rows.
    pub spans: &'a [Span],
    /// Pages of all spans' sessions.
    pub table: &'a [PageId],
}

/// The shape of one layer's attention.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Attention {
    /// Query heads; a multiple of the arena's key-value heads.
    pub heads: usize,
    /// What scores are multiplied with before the softmax.
    pub scale: f32,
    /// Sliding window: a row sees this many latest keys, itself included.
    pub window: Option<u32>,
}

/// How rotary embedding pairs the numbers of a head, and how fast they turn.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    /// Rotations per token of each pair, in radians: `head_dim / 2` values.
    pub frequencies: Vec<f32>,
    /// Which numbers turn together.
    pub pairing: RopePairing,
}

/// Which numbers of a head turn together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopePairing {
    /// `2i` with `2i + 1`: GGUF files of the llama architecture.
    Adjacent,
    /// `i` with `i + head_dim / 2`: Hugging Face's order ("neox").
    Halves,
}

/// The gate's activation in a feed-forward block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// `x · sigmoid(x)`.
    Silu,
    /// The tanh approximation of GELU.
    GeluTanh,
}

/// How far activations are rounded where the weights are quantised, or are bf16 and the processor multiplies bf16.
/// Other plain weights meet them as they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rounding {
    /// To 7 bits and a sign; to one bf16.
    Coarse,
    /// Of inputs that have outliers. To 15 bits, at twice the products: those of 32 that share a scale with an outlier
    /// would be left few. To one bf16, which has an exponent of its own.
    Outliers,
    /// To 15 bits, to two bf16, at twice the products: for results that much hangs on.
    Fine,
}

/// What a product multiplies: rows as they are, or made of others one by one on the way to it.
pub enum Operand<'a, B: Backend> {
    /// These.
    Rows(&'a B::Rows),
    /// The root-mean-square norm of each, times a gain.
    Norm {
        /// What is normed.
        x: &'a B::Rows,
        /// A factor for each number of a row.
        gain: &'a B::Vector,
        /// Added to the mean square.
        eps: f32,
    },
    /// `activation(gate) · up`.
    Gate {
        /// Of the gate.
        activation: Activation,
        /// One factor.
        gate: &'a B::Rows,
        /// The other.
        up: &'a B::Rows,
    },
}

impl<B: Backend> Clone for Operand<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backend> Copy for Operand<'_, B> {}

/// A device that can run a transformer.
///
/// `Rows` are activations: f32, `len` rows of a fixed width, row-major. Every
/// operation works on all `len` rows of its input and sets the `len` of its
/// output. Shapes that do not fit are a bug of the caller and panic; what a
/// file or a user can cause is a [`KernelError`].
pub trait Backend: Sized {
    /// A weight matrix in the device's own layout.
    type Matrix;
    /// A weight vector (a norm's gains, a bias), f32.
    type Vector;
    /// Activations.
    type Rows;
    /// The arena of key and value pages.
    type Kv;
    /// The arena of hidden states beside them.
    type Hidden;

    /// What runs the operations, for a person: "avx2, 2 threads".
    fn describe(&self) -> String;

    /// Repacks a weight matrix of `n` outputs and `k` inputs.
    ///
    /// # Errors
    /// When the device has no kernel for the format or the shape.
    fn matrix(&mut self, source: &HostMatrix<'_>) -> Result<Self::Matrix, KernelError>;

    /// Uploads a weight vector.
    fn vector(&mut self, source: &[f32]) -> Self::Vector;

    /// Room for `capacity` rows of `width` numbers; `len` is 0.
    fn rows(&mut self, capacity: usize, width: usize) -> Self::Rows;

    /// An arena of pages, zeroed; memory is committed as pages are used.
    ///
    /// # Errors
    /// When the machine does not give the memory.
    fn kv(&mut self, shape: KvShape) -> Result<Self::Kv, KernelError>;

    /// An arena of hidden states, zeroed; memory is committed as pages are used.
    ///
    /// # Errors
    /// When the machine does not give the memory.
    fn hidden(&mut self, shape: HiddenShape) -> Result<Self::Hidden, KernelError>;

    /// Sets the rows from row-major numbers; `len` becomes `from.len() / width`.
    fn write(&mut self, to: &mut Self::Rows, from: &[f32]);

    /// Reads one row back.
    fn read<'a>(&'a self, from: &'a Self::Rows, row: usize) -> &'a [f32];

    /// Calls `f(i, row i)` once for each row that is set, on several threads at once where
    /// there are any.
    fn read_each(&mut self, from: &Self::Rows, f: &(dyn Fn(usize, &[f32]) + Sync));

    /// `out[i] = table[tokens[i]] · scale`.
    fn embed(&mut self, table: &Self::Matrix, tokens: &[u32], scale: f32, out: &mut Self::Rows);

    /// `out[i] = from[rows[i]]`.
    fn gather(&mut self, from: &Self::Rows, rows: &[u32], out: &mut Self::Rows);

    /// Root-mean-square norm of each row, times `gain`.
    fn rms_norm(&mut self, x: &Self::Rows, gain: &Self::Vector, eps: f32, out: &mut Self::Rows);

    /// The same over each head of `gain.len()` numbers, in place (QK-norm).
    fn head_norm(&mut self, x: &mut Self::Rows, gain: &Self::Vector, eps: f32);

    /// `out = x · Wᵀ` for each pair: activations are made and rounded once for all.
    fn linear(
        &mut self,
        x: Operand<'_, Self>,
        rounding: Rounding,
        outputs: &mut [(&Self::Matrix, &mut Self::Rows)],
    );

    /// `to += x · Wᵀ`: the residual. `to` has as many rows as `x`, and keeps them.
    fn linear_add(
        &mut self,
        x: Operand<'_, Self>,
        rounding: Rounding,
        matrix: &Self::Matrix,
        to: &mut Self::Rows,
    );

    /// `x[i] += bias`.
    fn bias(&mut self, x: &mut Self::Rows, bias: &Self::Vector);

    /// Turns each head of row `i`'s query and key by `positions[i]`, and writes the key and the value to `slots[i]`
    /// of a layer, in the arena's precision. All three have a row for each position and slot, and keep them.
    fn rope_store(&mut self, place: &Place<'_>, qkv: [&mut Self::Rows; 3], kv: &mut Self::Kv, layer: usize);

    /// Softmax attention of each row over its session's pages.
    fn attend(
        &mut self,
        attention: &Attention,
        q: &Self::Rows,
        kv: &Self::Kv,
        layer: usize,
        batch: AttentionBatch<'_>,
        out: &mut Self::Rows,
    );

    /// Copies the first `tokens` tokens of a page, in all layers.
    fn copy_page(&mut self, kv: &mut Self::Kv, from: PageId, to: PageId, tokens: usize);

    /// Writes row `i` to `slots[i]` of a kept layer, in bf16. A page's tokens come in order.
    fn keep(&mut self, hidden: &mut Self::Hidden, layer: usize, x: &Self::Rows, slots: &[Slot]);

    /// The mean of a kept layer's states over some tokens of a session with these pages.
    fn mean(
        &mut self,
        hidden: &Self::Hidden,
        layer: usize,
        pages: &[PageId],
        tokens: Range<usize>,
        out: &mut [f32],
    );

    /// Copies the hidden states of the first `tokens` tokens of a page.
    fn copy_hidden(&mut self, hidden: &mut Self::Hidden, from: PageId, to: PageId, tokens: usize);
}
