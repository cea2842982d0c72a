//! Softmax attention over pages.
//!
//! The unit is a query: one query head of one row. The queries of a key-value
//! head are taken in blocks, and a block in tiles of a few queries that walk the
//! same pages. Keys are reduced in splits of [`SPLIT_TOKENS`]: all scores, their
//! maximum, powers, their sum, weighted values. A query's splits are merged in
//! order, by whichever thread. Nothing of a query's arithmetic depends on its
//! tile, its block or who computes it: keys that it does not see are either
//! left out or added as exact zeros.
//!
//! With few blocks (decode), the splits of a block go to different threads and
//! their results are merged afterwards, in the same order.

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod scalar;
#[cfg(test)]
mod terms;
mod tile;

use std::{
    ops::Range,
    sync::atomic::{AtomicUsize, Ordering},
};

use self::tile::{Kernels, Tile};
use super::{
    Kv, Path, Rows,
    lines::Lines,
    path::vectorised,
    pool::{Parts, Pool, share},
};
use crate::{Attention, AttentionBatch, PAGE_TOKENS, PageId, SPLIT_TOKENS, Span};

/// The largest head that the kernels take.
pub(crate) const MAX_HEAD_DIM: usize = 256;
/// Pages of a split.
const SPLIT_PAGES: usize = SPLIT_TOKENS / PAGE_TOKENS;
/// Queries of a block: what passes by a split while it lies in the cache.
const BLOCK_QUERIES: usize = 48;
/// Numbers of split results kept at most (64 MiB): beyond, splits of a block
/// stay together.
const MAX_PARTIALS: usize = 16 << 20;

/// A row of the step and what it sees.
#[derive(Debug, Clone, Copy)]
struct Row {
    /// Its place in the step.
    row: usize,
    /// Keys that it sees, by position.
    first: usize,
    end: usize,
    /// Where its session's pages start in the table.
    pages: usize,
}

impl Row {
    /// Keys that it sees in a split, counted from the split's start.
    fn keys(&self, split: usize) -> Range<usize> {
        let start = split * SPLIT_TOKENS;
        let local = |key: usize| key.saturating_sub(start).min(SPLIT_TOKENS);
        local(self.first)..local(self.end)
    }

    /// Splits that hold a key that it sees.
    fn splits(&self) -> Range<usize> {
        self.first / SPLIT_TOKENS..self.end.div_ceil(SPLIT_TOKENS)
    }
}

/// Rows of one group whose queries are taken together.
#[derive(Debug, Clone)]
struct Block {
    /// Among the batch's rows in the order of groups.
    rows: Range<usize>,
    /// Splits that any of them sees.
    splits: Range<usize>,
    /// Splits whose pages are the same for all of them.
    shared: usize,
}

/// Buffers that grow to the largest step and stay.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    rows: Vec<Row>,
    blocks: Vec<Block>,
    threads: Vec<ThreadScratch>,
    /// `[row][head][split]` results, where splits are computed apart.
    partials: Vec<f32>,
}

#[derive(Debug, Default)]
struct ThreadScratch {
    /// A block's queries, scaled.
    queries: Vec<f32>,
    /// A block's merged results.
    states: Vec<f32>,
    tile: Tile,
    unpacked: Unpacked,
}

/// The pages of one head and split as the kernels read them, where the arena
/// packs them: unpacked once for all tiles of a block.
#[derive(Debug, Default)]
struct Unpacked {
    /// Which page lies in each place.
    pages: [Option<PageId>; SPLIT_PAGES],
    /// `[place]{keys, values}`, two bf16 to a lane.
    lanes: Lines<u32>,
}

impl Unpacked {
    /// Forgets what lies there: another split's, head's or layer's. Nothing moves
    /// until the next call.
    fn clear(&mut self, kv: &Kv) {
        self.pages = [None; SPLIT_PAGES];
        if kv.is_packed() {
            self.lanes.at_least(SPLIT_PAGES * 2 * kv.lanes());
        }
    }

    /// Page `id` of a layer and head, in a place of the split: its keys and its
    /// values. They stay readable while other places are filled.
    fn get(
        &mut self,
        path: Path,
        kv: &Kv,
        layer: usize,
        head: usize,
        place: usize,
        id: PageId,
    ) -> (*const u16, *const u16) {
        let lanes = kv.lanes();
        assert!((place + 1) * 2 * lanes <= self.lanes.len(), "place {place} of a split");
        // SAFETY: within the buffer. `as_mut_ptr` borrows none of what it holds,
        // so pointers to other places, which are read later, stay valid.
        let start = unsafe { self.lanes.as_mut_ptr().add(place * 2 * lanes) };
        if self.pages[place] != Some(id) {
            // SAFETY: this place's lanes, which nobody else reads meanwhile.
            let (keys, values) =
                unsafe { std::slice::from_raw_parts_mut(start, 2 * lanes) }.split_at_mut(lanes);
            kv.unpack(path, layer, id, head, keys, values);
            self.pages[place] = Some(id);
        }
        // SAFETY: the values follow the keys.
        (start.cast_const().cast(), unsafe { start.add(lanes) }.cast_const().cast())
    }
}

/// A softmax so far, `[maximum, sum, D weighted values]`: unnormalised, scores
/// in powers of two.
fn state_len(dim: usize) -> usize {
    // Values start on a vector's alignment.
    16 + dim
}

vectorised! {
    /// Merges a later split's state into an earlier one's.
    fn merge(state: &mut [f32], later: &[f32]) {
        let max = state[0].max(later[0]);
        // `max` drops a NaN, the sum below does not.
        let (a, b) = ((state[0] - max).exp2(), (later[0] - max).exp2());
        state[0] = max;
        state[1] = state[1] * a + later[1] * b;
        for (x, y) in state[16..].iter_mut().zip(&later[16..]) {
            *x = *x * a + y * b;
        }
    }
}

vectorised! {
    /// The attention's output from the last state.
    fn finish(state: &[f32], out: &mut [f32]) {
        let inverse = 1.0 / state[1];
        for (out, x) in out.iter_mut().zip(&state[16..]) {
            *out = x * inverse;
        }
    }
}

/// What every task of a call reads.
struct Call<'a> {
    path: Path,
    attention: &'a Attention,
    q: &'a Rows,
    kv: &'a Kv,
    layer: usize,
    table: &'a [u32],
    rows: &'a [Row],
    /// Query heads of a key-value head.
    per_head: usize,
    dim: usize,
}

#[expect(clippy::too_many_arguments, reason = "the trait's operation, and what a Cpu lends it")]
pub(crate) fn attend(
    path: Path,
    pool: &mut Pool,
    scratch: &mut Scratch,
    attention: &Attention,
    q: &Rows,
    kv: &Kv,
    layer: usize,
    batch: AttentionBatch<'_>,
    out: &mut Rows,
) {
    let shape = kv.shape();
    assert!(attention.heads.is_multiple_of(shape.heads), "query heads divide into key-value heads");
    assert_eq!(q.width(), attention.heads * shape.head_dim, "width of queries");
    assert_eq!(out.width(), q.width(), "width of results");
    out.set_len(q.len());
    scratch.plan(attention, batch, q.len(), attention.heads / shape.heads);
    let Scratch { rows, blocks, threads, partials } = scratch;
    threads.resize_with(threads.len().max(pool.threads()), ThreadScratch::default);
    let call = Call {
        path,
        attention,
        q,
        kv,
        layer,
        table: batch.table,
        rows,
        per_head: attention.heads / shape.heads,
        dim: shape.head_dim,
    };
    match path {
        Path::Scalar => call.run::<scalar::Scalar>(pool, blocks, threads, partials, out),
        #[cfg(target_arch = "x86_64")]
        Path::Avx2 | Path::AvxVnni => call.run::<avx2::Avx2>(pool, blocks, threads, partials, out),
        #[cfg(target_arch = "x86_64")]
        Path::Amx if amx::takes(call.dim) => call.run::<amx::Amx>(pool, blocks, threads, partials, out),
        #[cfg(target_arch = "x86_64")]
        // Rounding queries to bf16 for `vdpbf16ps` would cost more than f32 may miss.
        Path::Avx512 | Path::Avx512Bf16 | Path::Amx => {
            call.run::<avx512::Avx512>(pool, blocks, threads, partials, out)
        }
        #[cfg(not(target_arch = "x86_64"))]
        _ => unreachable!("a path of another processor"),
    }
}

impl Scratch {
    /// Lists the batch's rows and cuts each group into blocks.
    fn plan(&mut self, attention: &Attention, batch: AttentionBatch<'_>, rows: usize, per_head: usize) {
        self.rows.clear();
        self.blocks.clear();
        let block_rows = (BLOCK_QUERIES / per_head).max(1);
        let window = attention.window.map_or(usize::MAX, |window| window as usize);
        assert!(window > 0, "a window holds the row itself");
        for group in batch.groups {
            let start = self.rows.len();
            let spans = &batch.spans[group.span as usize..][..group.spans as usize];
            let pages = |span: &Span| &batch.table[span.pages as usize..][..group.shared as usize];
            for span in spans {
                // To mix up sessions would be worse than to stop.
                assert!(group.shared * PAGE_TOKENS as u32 <= span.position, "shared pages lie before a span");
                assert!(pages(span) == pages(&spans[0]), "shared pages are the same");
            }
            for span in spans {
                assert!((span.row + span.rows) as usize <= rows, "rows of a span");
                self.rows.extend((0..span.rows as usize).map(|i| {
                    let end = span.position as usize + i + 1;
                    let first = end.saturating_sub(window);
                    Row { row: span.row as usize + i, first, end, pages: span.pages as usize }
                }));
            }
            let end = self.rows.len();
            for first in (start..end).step_by(block_rows) {
                let rows = first..end.min(first + block_rows);
                let seen = self.rows[rows.clone()].iter().map(Row::splits);
                let splits = seen.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)).unwrap_or(0..0);
                let shared = if group.spans == 1 { splits.end } else { group.shared as usize / SPLIT_PAGES };
                self.blocks.push(Block { rows, splits, shared });
            }
        }
    }
}

impl Call<'_> {
    fn run<K: Kernels>(
        &self,
        pool: &mut Pool,
        blocks: &[Block],
        threads: &mut [ThreadScratch],
        partials: &mut Vec<f32>,
        out: &mut Rows,
    ) {
        let (kv_heads, heads) = (self.kv.shape().heads, self.attention.heads);
        let splits = blocks.iter().map(|block| block.splits.end).max().unwrap_or(0);
        let (dim, len) = (self.dim, state_len(self.dim));
        let tasks = blocks.len() * kv_heads;
        let numbers = self.rows.len() * heads * splits * len;
        let next = AtomicUsize::new(0);
        let threads = Parts::new(threads);
        // Later blocks see more keys: they start first, so that no long one is
        // left for the end.
        let claim = |count: usize| {
            let i = next.fetch_add(1, Ordering::Relaxed);
            (i < count).then(|| count - 1 - i)
        };
        let width = out.width();
        let results = Parts::new(out.as_mut_slice());
        // SAFETY: only who finishes a query asks for its result.
        let result = |row: &Row, head: usize| unsafe { results.slice(row.row * width + head * dim, dim) };

        if pool.threads() == 1 || splits < 2 || tasks >= 3 * pool.threads() || numbers > MAX_PARTIALS {
            pool.run(&|thread| {
                // SAFETY: each thread has its own.
                let scratch = &mut unsafe { threads.slice(thread, 1) }[0];
                while let Some(task) = claim(tasks) {
                    let (block, head) = (&blocks[task / kv_heads], task % kv_heads);
                    self.whole_block::<K>(scratch, block, head, &result);
                }
            });
            return;
        }
        if partials.len() < numbers {
            partials.resize(numbers, 0.0);
        }
        let parts = Parts::new(partials);
        // SAFETY: one task computes a query's split, and one merges it later.
        let part = |row: usize, head: usize, split: usize| unsafe {
            parts.slice(((row * heads + head) * splits + split) * len, len)
        };
        pool.run(&|thread| {
            // SAFETY: each thread has its own.
            let scratch = &mut unsafe { threads.slice(thread, 1) }[0];
            while let Some(task) = claim(tasks * splits) {
                let (block, head) = (&blocks[task / splits / kv_heads], task / splits % kv_heads);
                let split = task % splits;
                if block.splits.contains(&split) {
                    self.load_queries(&mut scratch.queries, block, head);
                    self.split::<K>(scratch, block, head, split, |query, _, state| {
                        let (row, head) = self.place(block, head, query);
                        part(row, head, split).copy_from_slice(state);
                    });
                }
            }
        });
        let queries = self.rows.len() * heads;
        let count = pool.threads();
        pool.run(&|thread| {
            for query in share(queries, thread, count) {
                let (index, head) = (query / heads, query % heads);
                let row = &self.rows[index];
                let mut splits = row.splits();
                let state = part(index, head, splits.next().expect("a row sees itself"));
                for split in splits {
                    merge(self.path, state, part(index, head, split));
                }
                finish(self.path, state, result(row, head));
            }
        });
    }

    /// Row (among the batch's) and query head of a block's query.
    fn place(&self, block: &Block, kv_head: usize, query: usize) -> (usize, usize) {
        (block.rows.start + query / self.per_head, kv_head * self.per_head + query % self.per_head)
    }

    /// All splits of a block for one key-value head, merged and finished.
    fn whole_block<'r, K: Kernels>(
        &self,
        scratch: &mut ThreadScratch,
        block: &Block,
        head: usize,
        result: &impl Fn(&Row, usize) -> &'r mut [f32],
    ) {
        let len = state_len(self.dim);
        let queries = block.rows.len() * self.per_head;
        self.load_queries(&mut scratch.queries, block, head);
        let mut states = std::mem::take(&mut scratch.states);
        states.resize(states.len().max(queries * len), 0.0);
        for split in block.splits.clone() {
            self.split::<K>(scratch, block, head, split, |query, row, state| {
                let so_far = &mut states[query * len..][..len];
                if row.splits().start == split {
                    so_far.copy_from_slice(state);
                } else {
                    merge(self.path, so_far, state);
                }
            });
        }
        for query in 0..queries {
            let (row, head) = self.place(block, head, query);
            finish(self.path, &states[query * len..][..len], result(&self.rows[row], head));
        }
        scratch.states = states;
    }

    /// Copies a block's queries of one key-value head, times the scale and
    /// log2(e), since the softmax is taken in powers of two.
    fn load_queries(&self, queries: &mut Vec<f32>, block: &Block, kv_head: usize) {
        let scale = self.attention.scale * std::f32::consts::LOG2_E;
        queries.clear();
        for row in &self.rows[block.rows.clone()] {
            let of_head = kv_head * self.per_head * self.dim..(kv_head + 1) * self.per_head * self.dim;
            queries.extend(self.q.row(row.row)[of_head].iter().map(|q| q * scale));
        }
    }

    /// One split of a block: gives each query that sees a key of it, its row
    /// and its state to `take`.
    fn split<K: Kernels>(
        &self,
        scratch: &mut ThreadScratch,
        block: &Block,
        head: usize,
        split: usize,
        mut take: impl FnMut(usize, &Row, &[f32]),
    ) {
        let ThreadScratch { queries, tile, unpacked, .. } = scratch;
        unpacked.clear(self.kv);
        let rows = &self.rows[block.rows.clone()];
        let count = rows.len() * self.per_head;
        let mut start = 0;
        while start < count {
            let row = &rows[start / self.per_head];
            // Beyond the shared splits, only queries of one session walk together.
            let end = if split < block.shared {
                count
            } else {
                let other = rows[start / self.per_head..].iter().position(|other| other.pages != row.pages);
                other.map_or(count, |n| (start / self.per_head + n) * self.per_head)
            };
            let end = end.min(start + K::TILE);
            tile.clear();
            for query in start..end {
                tile.push(&queries[query * self.dim..][..self.dim], rows[query / self.per_head].keys(split));
            }
            if let Some(pages) = tile.pages() {
                let table = &self.table[row.pages + split * SPLIT_PAGES..];
                tile.load(&table[..pages.end], pages.start, |place, page| {
                    if self.kv.is_packed() {
                        return unpacked.get(self.path, self.kv, self.layer, head, place, page);
                    }
                    let (keys, values) = self.kv.head(self.layer, page, head);
                    (keys.as_ptr(), values.as_ptr())
                });
                tile.compute::<K>(self.dim);
                for (i, state) in tile.states(self.dim) {
                    take(start + i, &rows[(start + i) / self.per_head], state);
                }
            }
            start = end;
        }
    }
}
