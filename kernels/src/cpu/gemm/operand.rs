//! What a product multiplies: rows that are made, and rounded, in one visit each.

use std::mem::MaybeUninit;
use std::ops::Range;

use super::{Output, ROWS};
use crate::cpu::{
    Cpu, Path,
    lines::Lines,
    pool::{Parts, Pool},
    quantise::{QBlock, pair_rest, pair_row, quantise_rest, quantise_row},
    rowwise,
    weights::BLOCK,
};
use crate::{Operand, Rounding};

/// Activations of a call, reused from call to call.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    made: Vec<f32>,
    blocks: Vec<QBlock>,
    pairs: Lines<u32>,
}

/// Which types a call's matrices are multiplied in.
#[derive(Clone, Copy, Default)]
pub(super) struct Needs {
    pub(super) plain: bool,
    pub(super) blocks: bool,
    pub(super) pairs: bool,
}

/// A call's activations in each type that was needed; the others have none.
#[derive(Clone, Copy)]
pub(super) struct Activations<'a> {
    pub(super) plain: Rounded<'a, f32>,
    pub(super) blocks: Rounded<'a, QBlock>,
    /// Two bf16 each, the last of an odd number with a zero.
    pub(super) pairs: Rounded<'a, u32>,
}

/// Rounded activations, row after row.
#[derive(Clone, Copy)]
pub(super) struct Rounded<'a, T> {
    coarse: &'a [T],
    /// What the coarse ones rounded off, or nothing.
    fine: &'a [T],
    of_row: usize,
}

/// What a kernel reads: a run of rows of one panel's inputs.
#[derive(Clone, Copy)]
pub(super) struct Input<'a, T> {
    pub(super) data: &'a [T],
    /// Elements from one row to the next.
    pub(super) stride: usize,
    pub(super) rows: usize,
}

impl<'a, T> Input<'a, T> {
    pub(super) fn row(&self, row: usize) -> &'a [T] {
        &self.data[row * self.stride..][..self.stride]
    }
}

impl Operand<'_, Cpu> {
    /// Rows, and numbers in each.
    pub(super) fn shape(&self) -> (usize, usize) {
        match *self {
            Self::Rows(x) => (x.len(), x.width()),
            Self::Norm { x, gain, .. } => {
                assert_eq!(x.width(), gain.len(), "width of the rows and the gain");
                (x.len(), x.width())
            }
            Self::Gate { gate, up, .. } => {
                assert_eq!((gate.len(), gate.width()), (up.len(), up.width()), "shape of gate and up");
                (gate.len(), gate.width())
            }
        }
    }

    fn make(&self, path: Path, row: usize, out: &mut [f32]) {
        match *self {
            Self::Rows(x) => out.copy_from_slice(x.row(row)),
            Self::Norm { x, gain, eps } => rowwise::rms_norm(path, x.row(row), gain, eps, out),
            Self::Gate { activation, gate, up } => {
                rowwise::gate(path, activation, gate.row(row), up.row(row), out);
            }
        }
    }

    /// Elementary operations for one number.
    fn cost(&self) -> usize {
        match self {
            Self::Rows(_) => 0,
            Self::Norm { .. } => 1,
            Self::Gate { .. } => 8,
        }
    }

    /// Makes all rows and rounds them to what is needed.
    pub(super) fn prepare<'a>(
        &'a self,
        path: Path,
        pool: &mut Pool,
        scratch: &'a mut Scratch,
        rounding: Rounding,
        needs: Needs,
    ) -> Activations<'a> {
        let (rows, width) = self.shape();
        let of_blocks = if needs.blocks { width / BLOCK } else { 0 };
        let of_pairs = if needs.pairs { width.div_ceil(2) } else { 0 };
        let given = match *self {
            Self::Rows(x) => Some(x),
            _ => None,
        };
        // Rows that only their rounding is needed of stay in a thread's first-level cache.
        let made_rows = match given {
            Some(_) => 0,
            None if needs.plain => rows,
            None => pool.threads(),
        };
        let (fine_blocks, fine_pairs) = (rounding != Rounding::Coarse, rounding == Rounding::Fine);
        let (block_copies, pair_copies) = (1 + usize::from(fine_blocks), 1 + usize::from(fine_pairs));
        let made = Parts::new(at_least(&mut scratch.made, made_rows * width, 0.0));
        let blocks = Parts::new(at_least(&mut scratch.blocks, block_copies * rows * of_blocks, QBlock::ZERO));
        let pairs = Parts::new(scratch.pairs.at_least(pair_copies * rows * of_pairs));
        let visit = |thread: usize, share: Range<usize>| {
            for row in share {
                let x = match given {
                    Some(x) => x.row(row),
                    None => {
                        let at = if needs.plain { row } else { thread };
                        // SAFETY: a row falls to one thread, and `at` to one row at a time.
                        let out = unsafe { made.slice(at * width, width) };
                        self.make(path, row, out);
                        &*out
                    }
                };
                if needs.blocks {
                    // SAFETY: a row falls to one thread, and its copies do not overlap.
                    let part =
                        |copy: usize| unsafe { blocks.slice((copy * rows + row) * of_blocks, of_blocks) };
                    let coarse = part(0);
                    quantise_row(path, x, coarse);
                    if fine_blocks {
                        quantise_rest(path, x, coarse, part(1));
                    }
                }
                if needs.pairs {
                    // SAFETY: as above.
                    let part = |copy: usize| unsafe { pairs.slice((copy * rows + row) * of_pairs, of_pairs) };
                    let coarse = part(0);
                    pair_row(path, x, coarse);
                    if fine_pairs {
                        pair_rest(path, x, coarse, part(1));
                    }
                }
            }
        };
        let rounded = usize::from(needs.blocks) * block_copies + usize::from(needs.pairs) * pair_copies;
        let cost = rows * width * (self.cost() + rounded);
        if cost > 0 {
            pool.shares(rows, cost, &visit);
        }
        let plain = match given {
            Some(x) => x.as_slice(),
            None if needs.plain => &scratch.made[..rows * width],
            None => &[],
        };
        Activations {
            plain: Rounded { coarse: plain, fine: &[], of_row: width },
            blocks: Rounded::of(&scratch.blocks, rows, of_blocks, fine_blocks),
            pairs: Rounded::of(&scratch.pairs, rows, of_pairs, fine_pairs),
        }
    }
}

/// The first `count` elements of a buffer that grows when it must.
fn at_least<T: Copy>(buffer: &mut Vec<T>, count: usize, zero: T) -> &mut [T] {
    if buffer.len() < count {
        buffer.resize(count, zero);
    }
    &mut buffer[..count]
}

impl<'a, T> Rounded<'a, T> {
    fn of(buffer: &'a [T], rows: usize, of_row: usize, has_fine: bool) -> Self {
        let all = rows * of_row;
        let fine = if has_fine { &buffer[all..2 * all] } else { &[] };
        Self { coarse: &buffer[..all], fine, of_row }
    }

    /// Multiplies a run of rows: the coarse ones, and then what they rounded off. The
    /// sums, up to `W` of each row, are put, or added where it `adds`.
    ///
    /// # Safety
    /// As for [`Output::put`], or [`Output::add`], for all of the run's rows; `kernel`
    /// puts each.
    pub(super) unsafe fn multiply<const W: usize>(
        self,
        run: Range<usize>,
        output: Output,
        adds: bool,
        kernel: impl Fn(Input<'_, T>, Output),
    ) {
        let (rows, stride) = (run.len(), self.of_row);
        let elements = run.start * stride..run.end * stride;
        let coarse = Input { data: &self.coarse[elements.clone()], stride, rows };
        if self.fine.is_empty() && !adds {
            return kernel(coarse, output);
        }
        let mut sums = Aside::<W>::NEW;
        kernel(coarse, sums.output());
        // SAFETY: the kernel put them.
        let sums = unsafe { sums.rows(rows) };
        if !self.fine.is_empty() {
            let mut rest = Aside::<W>::NEW;
            kernel(Input { data: &self.fine[elements], stride, rows }, rest.output());
            // SAFETY: as above.
            for (sums, rest) in sums.iter_mut().zip(unsafe { rest.rows(rows) }) {
                sums.iter_mut().zip(rest).for_each(|(sum, rest)| *sum += *rest);
            }
        }
        for (row, sums) in sums.iter().enumerate() {
            // SAFETY: the caller's promise.
            unsafe { if adds { output.add(row, sums) } else { output.put(row, sums) } }
        }
    }
}

/// `W` outputs of a run's rows, beside their place. Zeroing them would cost as much as a row.
pub(super) struct Aside<const W: usize>([MaybeUninit<[f32; W]>; ROWS]);

impl<const W: usize> Aside<W> {
    pub(super) const NEW: Self = Self([MaybeUninit::uninit(); ROWS]);

    pub(super) fn output(&mut self) -> Output {
        Output { start: self.0.as_mut_ptr().cast(), stride: W, lanes: W }
    }

    /// # Safety
    /// The first `rows` were put.
    pub(super) unsafe fn rows(&mut self, rows: usize) -> &mut [[f32; W]] {
        // SAFETY: the caller's promise.
        unsafe { self.0[..rows].assume_init_mut() }
    }
}
