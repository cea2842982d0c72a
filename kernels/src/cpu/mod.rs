//! The processor as a device.
//!
//! [`Cpu`] runs each operation on its threads together. What costs time, the
//! matrix products and attention, has a kernel per [`Path`]; the rest is one
//! body of plain Rust that the compiler vectorises for each.

mod arena;
mod attention;
#[cfg(all(target_arch = "x86_64", feature = "emulate-avx512"))]
mod emulated;
mod gemm;
mod hidden;
mod kv;
mod lines;
mod path;
mod pool;
mod quantise;
mod rows;
mod rowwise;
#[cfg(target_arch = "x86_64")]
mod tiles;
mod weights;

pub use hidden::Hidden;
pub use kv::Kv;
pub use path::Path;
pub use rows::Rows;
pub use weights::Matrix;

use std::ops::Range;

#[cfg(all(target_arch = "x86_64", not(feature = "emulate-avx512")))]
use std::arch::x86_64 as instructions;

// The kernels for AVX-512 and AVX-VNNI have their instructions from either.
#[cfg(all(target_arch = "x86_64", feature = "emulate-avx512"))]
use self::emulated as instructions;
use self::{pool::Pool, rowwise::Angles};
use crate::{
    Attention, AttentionBatch, Backend, HiddenShape, HostMatrix, KernelError, KvShape, Operand, PageId,
    Place, Rounding, Slot,
};

/// Angle tables that are kept: a model has one rotary embedding, or one for its
/// windowed layers and one for the others.
const ROPES: usize = 2;

/// This machine's processor.
pub struct Cpu {
    path: Path,
    pool: Pool,
    products: gemm::Scratch,
    attention: attention::Scratch,
    angles: [Angles; ROPES],
    /// The table to compute anew when none fits.
    oldest: usize,
}

impl Cpu {
    /// The best path that this processor has, or the one that the environment
    /// variable `FORKPOINT_CPU` names: `scalar`, `avx2`, `avxvnni`, `avx512`, `avx512bf16` or `amx`. Runs on
    /// `threads` threads, the caller's among them.
    ///
    /// # Errors
    /// [`KernelError::UnknownPath`] and [`KernelError::Path`] when
    /// `FORKPOINT_CPU` asks for what there is not.
    pub fn detect(threads: usize) -> Result<Self, KernelError> {
        Self::with_path(Path::detect()?, threads)
    }

    /// A given path, on `threads` threads, the caller's among them.
    ///
    /// # Errors
    /// [`KernelError::Path`] when the processor lacks what the path needs.
    pub fn with_path(path: Path, threads: usize) -> Result<Self, KernelError> {
        if !path.available() {
            return Err(KernelError::Path { path: path.name(), needs: path.needs() });
        }
        Ok(Self {
            path,
            pool: Pool::new(threads),
            products: gemm::Scratch::default(),
            attention: attention::Scratch::default(),
            angles: Default::default(),
            oldest: 0,
        })
    }

    /// The path in use.
    #[must_use]
    pub fn path(&self) -> Path {
        self.path
    }

    /// Threads in use, the caller's included.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// Calls `f(i, row i)` for each row that is set; `cost` is the count of
    /// elementary operations for one number.
    fn each_row(&mut self, rows: &mut Rows, cost: usize, f: impl Fn(usize, &mut [f32]) + Sync) {
        let (len, width) = (rows.len(), rows.width());
        if len > 0 {
            self.pool.chunks(rows.as_mut_slice(), width, len * width * cost, &f);
        }
    }
}

impl Backend for Cpu {
    type Matrix = Matrix;
    type Vector = Vec<f32>;
    type Rows = Rows;
    type Kv = Kv;
    type Hidden = Hidden;

    fn describe(&self) -> String {
        let threads = self.threads();
        format!("{}, {threads} thread{}", self.path.name(), if threads == 1 { "" } else { "s" })
    }

    fn matrix(&mut self, source: &HostMatrix<'_>) -> Result<Matrix, KernelError> {
        Matrix::new(source, &mut self.pool)
    }

    fn vector(&mut self, source: &[f32]) -> Vec<f32> {
        source.to_vec()
    }

    fn rows(&mut self, capacity: usize, width: usize) -> Rows {
        Rows::new(capacity, width)
    }

    fn kv(&mut self, shape: KvShape) -> Result<Kv, KernelError> {
        Kv::new(shape)
    }

    fn hidden(&mut self, shape: HiddenShape) -> Result<Hidden, KernelError> {
        Hidden::new(shape)
    }

    fn write(&mut self, to: &mut Rows, from: &[f32]) {
        assert!(from.len().is_multiple_of(to.width()), "whole rows of {}, got {}", to.width(), from.len());
        to.set_len(from.len() / to.width());
        to.as_mut_slice().copy_from_slice(from);
    }

    fn read<'a>(&'a self, from: &'a Rows, row: usize) -> &'a [f32] {
        from.row(row)
    }

    fn read_each(&mut self, from: &Rows, f: &(dyn Fn(usize, &[f32]) + Sync)) {
        let cost = from.len() * from.width();
        self.pool.shares(from.len(), cost, &|_, share| share.for_each(|i| f(i, from.row(i))));
    }

    fn embed(&mut self, table: &Matrix, tokens: &[u32], scale: f32, out: &mut Rows) {
        assert_eq!(table.inputs(), out.width(), "width of the table and of the rows");
        let path = self.path;
        out.set_len(tokens.len());
        self.each_row(out, 4, |i, row| {
            table.row(tokens[i] as usize, row);
            if scale != 1.0 {
                rowwise::scale(path, row, scale);
            }
        });
    }

    fn gather(&mut self, from: &Rows, rows: &[u32], out: &mut Rows) {
        assert_eq!(from.width(), out.width(), "width of the rows");
        out.set_len(rows.len());
        self.each_row(out, 1, |i, row| row.copy_from_slice(from.row(rows[i] as usize)));
    }

    fn rms_norm(&mut self, x: &Rows, gain: &Vec<f32>, eps: f32, out: &mut Rows) {
        assert_eq!((x.width(), gain.len()), (out.width(), out.width()), "width of the rows and the gain");
        let path = self.path;
        out.set_len(x.len());
        self.each_row(out, 1, |i, out| rowwise::rms_norm(path, x.row(i), gain, eps, out));
    }

    fn head_norm(&mut self, x: &mut Rows, gain: &Vec<f32>, eps: f32) {
        assert!(x.width().is_multiple_of(gain.len()), "heads of {} in {}", gain.len(), x.width());
        let path = self.path;
        self.each_row(x, 1, |_, row| rowwise::head_norm(path, row, gain, eps));
    }

    fn linear(&mut self, x: Operand<'_, Self>, rounding: Rounding, outputs: &mut [(&Matrix, &mut Rows)]) {
        gemm::linear(self.path, &mut self.pool, &mut self.products, x, rounding, outputs, false);
    }

    fn linear_add(&mut self, x: Operand<'_, Self>, rounding: Rounding, matrix: &Matrix, to: &mut Rows) {
        gemm::linear(self.path, &mut self.pool, &mut self.products, x, rounding, &mut [(matrix, to)], true);
    }

    fn bias(&mut self, x: &mut Rows, bias: &Vec<f32>) {
        assert_eq!(x.width(), bias.len(), "width of the rows and the bias");
        let path = self.path;
        self.each_row(x, 1, |_, row| rowwise::add(path, row, bias));
    }

    fn rope_store(&mut self, place: &Place<'_>, qkv: [&mut Rows; 3], kv: &mut Kv, layer: usize) {
        let Place { positions, rope, .. } = *place;
        let table = self.angles.iter().position(|angles| angles.fit(positions, rope)).unwrap_or_else(|| {
            let table = self.oldest;
            self.angles[table].compute(positions, rope);
            self.oldest = (table + 1) % ROPES;
            table
        });
        kv::rope_store(self.path, &mut self.pool, place, &self.angles[table], qkv, kv, layer);
    }

    fn attend(
        &mut self,
        attention: &Attention,
        q: &Rows,
        kv: &Kv,
        layer: usize,
        batch: AttentionBatch<'_>,
        out: &mut Rows,
    ) {
        let Self { path, pool, attention: scratch, .. } = self;
        attention::attend(*path, pool, scratch, attention, q, kv, layer, batch, out);
    }

    fn copy_page(&mut self, kv: &mut Kv, from: PageId, to: PageId, tokens: usize) {
        kv.copy_page(from, to, tokens);
    }

    fn keep(&mut self, hidden: &mut Hidden, layer: usize, x: &Rows, slots: &[Slot]) {
        hidden.keep(layer, x, slots);
    }

    fn mean(
        &mut self,
        hidden: &Hidden,
        layer: usize,
        pages: &[PageId],
        tokens: Range<usize>,
        out: &mut [f32],
    ) {
        hidden.mean(layer, pages, tokens, out);
    }

    fn copy_hidden(&mut self, hidden: &mut Hidden, from: PageId, to: PageId, tokens: usize) {
        hidden.copy_page(from, to, tokens);
    }
}
