//! Matrix products of activations with weights.
//!
//! One panel of 16 outputs meets a run of rows at a time. A kernel takes rows in
//! tiles of its own size, but adds each row's products in the order of the
//! inputs whatever the tile, so that a row's result does not depend on its
//! neighbours.

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod avx512bf16;
#[cfg(target_arch = "x86_64")]
mod avxvnni;
mod operand;
mod scalar;

pub(crate) use self::operand::Scratch;
use self::operand::{Activations, Input, Needs};
use super::{
    Cpu, Matrix, Path, Rows,
    pool::{Pool, share},
    quantise::QBlock,
    weights::{LANES, Packing, by_packing},
};
use crate::{Format, Operand, Rounding};

/// Rows that pass by a panel before the next panel is loaded, at most, and bytes of their
/// activations, two to an input, which should stay in the second-level cache. Processors with
/// tiles have one of 2 MiB, and tiles are so fast that weights which serve 64 rows keep them
/// waiting; what is multiplied without them there takes as long either way.
const ROWS: usize = 256;
const CACHE: usize = 1024 * 1024;
const ROWS_WITHOUT_TILES: usize = 64;
const CACHE_WITHOUT_TILES: usize = 256 * 1024;
/// Panels that tiles take at a time: a load of activations serves both.
const TOGETHER: usize = 2;
/// Multiplications under which a call stays on one thread.
const SMALL: usize = 128 * 1024;

/// Where a kernel's results go: the outputs of its panels in each row.
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
    unsafe fn put<const W: usize>(self, row: usize, values: &[f32; W]) {
        // SAFETY: `lanes` numbers, no more than the panels have, from `start + row · stride`
        // are these panels' part of the row, by the contract.
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
    unsafe fn add<const W: usize>(self, row: usize, values: &[f32; W]) {
        // SAFETY: `lanes` numbers from `start + row · stride` are these panels' part of
        // the row, by the contract.
        let out = unsafe { std::slice::from_raw_parts_mut(self.start.add(row * self.stride), self.lanes) };
        match out.as_mut_array::<W>() {
            Some(out) => out.iter_mut().zip(values).for_each(|(out, value)| *out += value),
            None => out.iter_mut().zip(values).for_each(|(out, value)| *out += value),
        }
    }
}

/// `out = x · Wᵀ` for each pair, or `out += x · Wᵀ` where it `adds`.
pub(crate) fn linear(
    path: Path,
    pool: &mut Pool,
    scratch: &mut Scratch,
    x: Operand<'_, Cpu>,
    rounding: Rounding,
    outputs: &mut [(&Matrix, &mut Rows)],
    adds: bool,
) {
    let (rows, inputs) = x.shape();
    let mut needs = Needs::default();
    for (matrix, out) in outputs.iter_mut() {
        assert_eq!(matrix.inputs(), inputs, "inputs of the matrix and width of the rows");
        assert_eq!(matrix.outputs(), out.width(), "outputs of the matrix and width of the result");
        if adds {
            assert_eq!(out.len(), rows, "rows of the result, which are added to");
        }
        out.set_len(rows);
        match matrix.format() {
            _ if matrix.quantised() => needs.blocks = true,
            Format::BF16 if path.has_bf16() => needs.pairs = true,
            _ => needs.plain = true,
        }
    }
    if rows == 0 {
        return;
    }
    let activations = x.prepare(path, pool, scratch, rounding, needs);
    let outputs = &*outputs;
    let panels: usize = outputs.iter().map(|(matrix, _)| matrix.panels()).sum();
    let (most, cache) = match path {
        Path::Amx => (ROWS, CACHE),
        _ => (ROWS_WITHOUT_TILES, CACHE_WITHOUT_TILES),
    };
    // At least the rows of a full tile.
    let chunk = most.min(cache / (inputs * 2)).max(16);
    let part = |thread: usize, threads: usize| {
        let mine = share(panels, thread, threads);
        for first in (0..rows).step_by(chunk) {
            let run = first..rows.min(first + chunk);
            let mut before = 0;
            for (matrix, out) in outputs {
                let (start, end) = (mine.start.max(before), mine.end.min(before + matrix.panels()));
                // SAFETY: the path is the processor's, and no tiles are set between two matrices.
                #[cfg(target_arch = "x86_64")]
                let tiles = unsafe { amx::prepare(path, matrix.format(), inputs, run.len()) };
                #[cfg(not(target_arch = "x86_64"))]
                let tiles = None::<()>;
                let together = if tiles.is_some() { TOGETHER } else { 1 };
                for first in (start..end).step_by(together) {
                    let panels = first - before..end.min(first + together) - before;
                    product(path, matrix, panels, activations, run.clone(), out, adds);
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

/// A panel of `matrix`, or where tiles are set [`TOGETHER`] of them, with a run of rows.
fn product(
    path: Path,
    matrix: &Matrix,
    panels: std::ops::Range<usize>,
    activations: Activations<'_>,
    run: std::ops::Range<usize>,
    out: &Rows,
    adds: bool,
) {
    let (first, count) = (panels.start * LANES, panels.len());
    let weights = matrix.some_panels(panels);
    let output = Output {
        // SAFETY: the panels' first output in the run's first row lies in `out`,
        // whose length is set.
        start: unsafe { out.ptr().add(run.start * out.width() + first) },
        stride: out.width(),
        lanes: (count * LANES).min(matrix.outputs() - first),
    };
    // SAFETY: each panel and run is handed out once, so nobody else writes these
    // outputs, which `linear` borrows mutably; rows hold numbers from the start, so
    // they can be added to; a `Cpu` takes a path only if the processor has it; each kernel
    // is given as many panels as it has numbers for.
    unsafe {
        by_packing!(matrix.format(), P => {
            let kernel = |input: Input<'_, QBlock>, output| quantised::<P>(path, weights, input, output);
            activations.blocks.multiply::<LANES>(run, output, adds, kernel);
        }, _ => {
            #[cfg(target_arch = "x86_64")]
            if path.has_bf16() && matrix.format() == Format::BF16 {
                let pairs = activations.pairs;
                return match (path, count) {
                    (Path::Amx, TOGETHER) => {
                        let kernel = |input: Input<'_, u32>, output| {
                            amx::pairs::<{ TOGETHER * LANES }>(weights, input, output);
                        };
                        pairs.multiply::<{ TOGETHER * LANES }>(run, output, adds, kernel)
                    }
                    (Path::Amx, _) => {
                        let kernel = |input: Input<'_, u32>, output| amx::pairs::<LANES>(weights, input, output);
                        pairs.multiply::<LANES>(run, output, adds, kernel)
                    }
                    _ => {
                        let kernel = |input: Input<'_, u32>, output| avx512bf16::pairs(weights, input, output);
                        pairs.multiply::<LANES>(run, output, adds, kernel)
                    }
                };
            }
            let kernel = |input: Input<'_, f32>, output| plain(path, matrix.format(), weights, input, output);
            activations.plain.multiply::<LANES>(run, output, adds, kernel);
        });
    }
}

/// One panel of plain weights with a run of rows.
///
/// # Safety
/// The processor has the path; the outputs are nobody else's.
unsafe fn plain(path: Path, format: Format, weights: &[u8], input: Input<'_, f32>, output: Output) {
    // SAFETY: the caller's contract.
    unsafe {
        match (path, format) {
            #[cfg(target_arch = "x86_64")]
            (Path::Avx2 | Path::AvxVnni, Format::F32) => avx2::plain::<avx2::F32>(weights, input, output),
            #[cfg(target_arch = "x86_64")]
            (Path::Avx2 | Path::AvxVnni, Format::F16) => avx2::plain::<avx2::F16>(weights, input, output),
            #[cfg(target_arch = "x86_64")]
            (Path::Avx2 | Path::AvxVnni, _) => avx2::plain::<avx2::Bf16>(weights, input, output),
            #[cfg(target_arch = "x86_64")]
            (Path::Avx512 | Path::Avx512Bf16 | Path::Amx, Format::F32) => {
                avx512::plain::<avx512::F32>(weights, input, output);
            }
            #[cfg(target_arch = "x86_64")]
            (Path::Avx512 | Path::Avx512Bf16 | Path::Amx, Format::F16) => {
                avx512::plain::<avx512::F16>(weights, input, output);
            }
            #[cfg(target_arch = "x86_64")]
            (Path::Avx512 | Path::Avx512Bf16 | Path::Amx, _) => {
                avx512::plain::<avx512::Bf16>(weights, input, output)
            }
            (_, format) => scalar::plain(format, weights, input, output),
        }
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
            Path::Avx512 | Path::Avx512Bf16 | Path::Amx => avx512::quantised::<P>(weights, input, output),
            _ => scalar::quantised::<P>(weights, input, output),
        }
    }
}
