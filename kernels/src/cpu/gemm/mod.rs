//! Matrix products of activations with weights.
//!
//! One panel of 16 outputs meets a run of rows at a time. A kernel takes rows in
//! tiles of its own size, but adds each row's products in the order of the
//! inputs whatever the tile, so that a row's result does not depend on its
//! neighbours.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod avx512bf16;
#[cfg(target_arch = "x86_64")]
mod avxvnni;
mod scalar;

use super::{
    Matrix, Path, Rows,
    pool::{Pool, share},
    quantise::{QBlock, pair_rest, pair_row, quantise_rest, quantise_row},
    weights::{BLOCK, LANES, Packing, by_packing},
};
use crate::Format;

/// Rows that pass by a panel before the next panel is loaded: their activations
/// stay in the second-level cache.
const ROWS: usize = 64;
/// Bytes of activations that should stay in that cache.
const CACHE: usize = 256 * 1024;
/// Multiplications under which a call stays on one thread.
const SMALL: usize = 128 * 1024;

/// How many int8, or bf16, stand for an activation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rounding {
    /// One.
    Coarse,
    /// A second one for what the first rounds off.
    Fine,
}

/// Activations as int8 and bf16, reused from call to call.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    blocks: Vec<QBlock>,
    pairs: Vec<u32>,
}

/// What a kernel reads: a run of rows of one panel's inputs.
#[derive(Clone, Copy)]
struct Input<'a, T> {
    data: &'a [T],
    /// Elements from one row to the next.
    stride: usize,
    rows: usize,
}

impl<'a, T> Input<'a, T> {
    fn row(&self, row: usize) -> &'a [T] {
        &self.data[row * self.stride..][..self.stride]
    }
}

/// Where a kernel's results go: up to 16 outputs of each row.
#[derive(Clone, Copy)]
struct Output {
    start: *mut f32,
    stride: usize,
    lanes: usize,
}

impl Output {
    /// Writes a row's outputs.
    ///
    /// # Safety
    /// `row` is one of the call's rows, and nobody else touches its outputs.
    #[inline(always)]
    unsafe fn put(self, row: usize, values: &[f32; LANES]) {
        // SAFETY: `lanes` numbers from `start + row · stride` are this panel's
        // part of the row, by the contract.
        unsafe {
            let to = self.start.add(row * self.stride);
            std::ptr::copy_nonoverlapping(values.as_ptr(), to, self.lanes);
        }
    }

    /// Adds to a row's outputs.
    ///
    /// # Safety
    /// As [`Output::put`]; the outputs were put before.
    #[inline(always)]
    unsafe fn add(self, row: usize, values: &[f32; LANES]) {
        for (lane, value) in values[..self.lanes].iter().enumerate() {
            // SAFETY: `lanes` numbers from `start + row · stride` are this
            // panel's part of the row, by the contract.
            unsafe { *self.start.add(row * self.stride + lane) += value };
        }
    }
}

/// `out = x · Wᵀ` for each pair.
pub(crate) fn linear(
    path: Path,
    pool: &mut Pool,
    scratch: &mut Scratch,
    rounding: Rounding,
    x: &Rows,
    outputs: &mut [(&Matrix, &mut Rows)],
) {
    let (rows, inputs) = (x.len(), x.width());
    for (matrix, out) in outputs.iter_mut() {
        assert_eq!(matrix.inputs(), inputs, "inputs of the matrix and width of the rows");
        assert_eq!(matrix.outputs(), out.width(), "outputs of the matrix and width of the result");
        out.set_len(rows);
    }
    if rows == 0 {
        return;
    }
    let mut activations = Activations::default();
    if outputs.iter().any(|(matrix, _)| matrix.quantised()) {
        let coarse = |row: &[f32], out: &mut [QBlock]| quantise_row(path, row, out);
        let fine = |row: &[f32], coarse: &[QBlock], out: &mut [QBlock]| quantise_rest(path, row, coarse, out);
        let of_row = inputs / BLOCK;
        activations.blocks =
            round(&mut scratch.blocks, QBlock::ZERO, of_row, pool, rounding, x, coarse, fine);
    }
    if path == Path::Avx512Bf16 && outputs.iter().any(|(matrix, _)| matrix.format() == Format::BF16) {
        let coarse = |row: &[f32], out: &mut [u32]| pair_row(path, row, out);
        let fine = |row: &[f32], coarse: &[u32], out: &mut [u32]| pair_rest(path, row, coarse, out);
        let of_row = inputs.div_ceil(2);
        activations.pairs = round(&mut scratch.pairs, 0, of_row, pool, rounding, x, coarse, fine);
    }
    let outputs = &*outputs;
    let panels: usize = outputs.iter().map(|(matrix, _)| matrix.panels()).sum();
    let chunk = ROWS.min(CACHE / (inputs * 2)).max(8);
    let part = |thread: usize, threads: usize| {
        let mine = share(panels, thread, threads);
        for first in (0..rows).step_by(chunk) {
            let run = first..rows.min(first + chunk);
            let mut before = 0;
            for (matrix, out) in outputs {
                let (start, end) = (mine.start.max(before), mine.end.min(before + matrix.panels()));
                for panel in start..end {
                    product(path, matrix, panel - before, x, activations, run.clone(), out);
                }
                before += matrix.panels();
            }
        }
    };
    if rows * panels * LANES * inputs < SMALL {
        part(0, 1);
    } else {
        let threads = pool.threads();
        pool.run(&|thread| part(thread, threads));
    }
}

/// A call's activations in the narrower types that its matrices are multiplied in.
#[derive(Clone, Copy, Default)]
struct Activations<'a> {
    blocks: Rounded<'a, QBlock>,
    /// Two bf16 each, the last of an odd number with a zero.
    pairs: Rounded<'a, u32>,
}

/// Rounded activations, row after row.
#[derive(Clone, Copy)]
struct Rounded<'a, T> {
    coarse: &'a [T],
    /// What the coarse ones rounded off, or nothing.
    fine: &'a [T],
}

impl<T> Default for Rounded<'_, T> {
    fn default() -> Self {
        Self { coarse: &[], fine: &[] }
    }
}

/// Rounds all rows to `of_row` elements each, in `buffer`.
#[expect(clippy::too_many_arguments, reason = "what two types of element share")]
fn round<'a, T: Copy + Send + Sync>(
    buffer: &'a mut Vec<T>,
    zero: T,
    of_row: usize,
    pool: &mut Pool,
    rounding: Rounding,
    x: &Rows,
    coarsely: impl Fn(&[f32], &mut [T]) + Sync,
    finely: impl Fn(&[f32], &[T], &mut [T]) + Sync,
) -> Rounded<'a, T> {
    let all = x.len() * of_row;
    if buffer.len() < 2 * all {
        buffer.resize(2 * all, zero);
    }
    let cost = x.len() * x.width();
    let (coarse, fine) = buffer[..2 * all].split_at_mut(all);
    pool.chunks(coarse, of_row, cost, &|row, out| coarsely(x.row(row), out));
    if rounding == Rounding::Coarse {
        return Rounded { coarse, fine: &[] };
    }
    let first = &*coarse;
    pool.chunks(fine, of_row, 2 * cost, &|row, out| {
        finely(x.row(row), &first[row * of_row..][..of_row], out);
    });
    Rounded { coarse, fine }
}

impl<T> Rounded<'_, T> {
    /// Multiplies a run of rows of `of_row` elements: the coarse ones, and then
    /// what they rounded off.
    ///
    /// # Safety
    /// As for [`Output::put`], for all of the run's rows; `kernel` puts each.
    unsafe fn multiply(
        self,
        of_row: usize,
        run: std::ops::Range<usize>,
        output: Output,
        kernel: impl Fn(Input<'_, T>, Output),
    ) {
        let rows = run.len();
        let elements = run.start * of_row..run.end * of_row;
        kernel(Input { data: &self.coarse[elements.clone()], stride: of_row, rows }, output);
        if self.fine.is_empty() {
            return;
        }
        let mut rest = [[0.0; LANES]; ROWS];
        let spare = Output { start: rest.as_mut_ptr().cast(), stride: LANES, lanes: LANES };
        kernel(Input { data: &self.fine[elements], stride: of_row, rows }, spare);
        for (row, rest) in rest[..rows].iter().enumerate() {
            // SAFETY: the caller's promise.
            unsafe { output.add(row, rest) };
        }
    }
}

/// One panel of `matrix` with a run of rows.
fn product(
    path: Path,
    matrix: &Matrix,
    panel: usize,
    x: &Rows,
    activations: Activations<'_>,
    run: std::ops::Range<usize>,
    out: &Rows,
) {
    let (inputs, rows) = (matrix.inputs(), run.len());
    let weights = matrix.panel(panel);
    let output = Output {
        // SAFETY: the panel's first output in the run's first row lies in `out`,
        // whose length is set.
        start: unsafe { out.ptr().add(run.start * out.width() + panel * LANES) },
        stride: out.width(),
        lanes: LANES.min(matrix.outputs() - panel * LANES),
    };
    // SAFETY: each panel and run is handed out once, so nobody else writes these
    // outputs, which `linear` borrows mutably; a `Cpu` takes a path only if the
    // processor has it.
    unsafe {
        by_packing!(matrix.format(), P => {
            let kernel = |input: Input<'_, QBlock>, output| quantised::<P>(path, weights, input, output);
            activations.blocks.multiply(inputs / BLOCK, run, output, kernel);
        }, _ => {
            let input = Input { data: &x.as_slice()[run.start * inputs..run.end * inputs], stride: inputs, rows };
            match (path, matrix.format()) {
                #[cfg(target_arch = "x86_64")]
                (Path::Avx2 | Path::AvxVnni, Format::F32) => avx2::plain::<avx2::F32>(weights, input, output),
                #[cfg(target_arch = "x86_64")]
                (Path::Avx2 | Path::AvxVnni, Format::F16) => avx2::plain::<avx2::F16>(weights, input, output),
                #[cfg(target_arch = "x86_64")]
                (Path::Avx2 | Path::AvxVnni, _) => avx2::plain::<avx2::Bf16>(weights, input, output),
                #[cfg(target_arch = "x86_64")]
                (Path::Avx512 | Path::Avx512Bf16, Format::F32) => avx512::plain::<avx512::F32>(weights, input, output),
                #[cfg(target_arch = "x86_64")]
                (Path::Avx512 | Path::Avx512Bf16, Format::F16) => avx512::plain::<avx512::F16>(weights, input, output),
                #[cfg(target_arch = "x86_64")]
                (Path::Avx512Bf16, Format::BF16) => {
                    let kernel = |input: Input<'_, u32>, output| avx512bf16::pairs(weights, input, output);
                    activations.pairs.multiply(inputs.div_ceil(2), run, output, kernel);
                }
                #[cfg(target_arch = "x86_64")]
                (Path::Avx512 | Path::Avx512Bf16, _) => avx512::plain::<avx512::Bf16>(weights, input, output),
                (_, format) => scalar::plain(format, weights, input, output),
            }
        });
    }
}

/// One quantised panel with a run of int8 rows.
///
/// # Safety
/// The processor has the path; the outputs are nobody else's.
unsafe fn quantised<P: Packing>(path: Path, weights: &[u8], input: Input<'_, QBlock>, output: Output) {
    // SAFETY: the caller's contract.
    unsafe {
        match path {
            #[cfg(target_arch = "x86_64")]
            Path::Avx2 => avx2::quantised::<P>(weights, input, output),
            #[cfg(target_arch = "x86_64")]
            Path::AvxVnni => avxvnni::quantised::<P>(weights, input, output),
            #[cfg(target_arch = "x86_64")]
            Path::Avx512 | Path::Avx512Bf16 => avx512::quantised::<P>(weights, input, output),
            _ => scalar::quantised::<P>(weights, input, output),
        }
    }
}
