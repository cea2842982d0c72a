//! A few queries over the pages of one split.

use std::{ops::Range, ptr};

use super::{MAX_HEAD_DIM, SPLIT_PAGES, state_len};
use crate::{PAGE_TOKENS, PageId, SPLIT_TOKENS, cpu::lines::Lines};

/// Queries in a tile at most.
pub(super) const MAX_TILE: usize = 16;
/// From one query's scores to the next's: off the same cache set.
pub(super) const SCORES: usize = SPLIT_TOKENS + 16;

/// The inner loops of a path.
///
/// Queries lie [`MAX_HEAD_DIM`] numbers apart, scores [`SCORES`], sums as given.
/// Keys and values are pages as in [`Kv`](crate::cpu::Kv).
pub(super) trait Kernels {
    /// Queries that walk the pages together, at most [`MAX_TILE`].
    const TILE: usize;
    /// [`values`](Self::values) sums a page's tokens before it adds them, so that a part of
    /// a page cannot be added token by token.
    const BY_PAGE: bool = false;

    /// `scores[query][16·i + token] = Σ_d query[d] · pages[i][token][d]`, the
    /// sum in an order that is the path's own, for `count` queries.
    ///
    /// # Safety
    /// The processor has the path's features; `count` queries of `dim` numbers
    /// and scores of `16 · pages.len()` can be read and written; a page has
    /// `16 · dim` numbers.
    unsafe fn scores(count: usize, dim: usize, queries: *const f32, pages: &[*const u16], scores: *mut f32);

    /// Turns scores into `2^(score − maximum)`; returns the maximum and the sum
    /// of the powers. `scores.len()` is a multiple of 16, and −∞ becomes exactly
    /// 0.
    ///
    /// # Safety
    /// The processor has the path's features.
    unsafe fn softmax(scores: &mut [f32]) -> (f32, f32);

    /// `sums[query][d] += Σ weights[query][16·i + token] · pages[i][token][d]`,
    /// in an order that is the path's own and no other query's matter. Queries' sums lie `stride` apart.
    ///
    /// # Safety
    /// As for [`scores`](Self::scores), for sums of `dim` numbers.
    unsafe fn values(
        count: usize,
        dim: usize,
        weights: *const f32,
        pages: &[*const u16],
        sums: *mut f32,
        stride: usize,
    );

    /// The same for one query and one token: the even or odd one of a pair,
    /// `[D][2]` of a page.
    ///
    /// # Safety
    /// The processor has the path's features, `pair` has `2 · dim` numbers and
    /// `sums` `dim`.
    unsafe fn value(dim: usize, weight: f32, pair: *const u16, odd: bool, sums: *mut f32);
}

/// Up to [`MAX_TILE`] queries, what they see of a split, and their results.
#[derive(Debug)]
pub(super) struct Tile {
    count: usize,
    keys: [Range<usize>; MAX_TILE],
    queries: Lines<f32>,
    scores: Lines<f32>,
    states: Lines<f32>,
    /// Pages `first..end` of the split.
    first: usize,
    end: usize,
    key_pages: [*const u16; SPLIT_PAGES],
    value_pages: [*const u16; SPLIT_PAGES],
}

// SAFETY: the pointers are set and used within one call; between calls they are
// dead values.
unsafe impl Send for Tile {}

impl Default for Tile {
    fn default() -> Self {
        Self {
            count: 0,
            keys: [const { 0..0 }; MAX_TILE],
            queries: Lines::zeros(MAX_TILE * MAX_HEAD_DIM),
            scores: Lines::zeros(MAX_TILE * SCORES),
            states: Lines::zeros(MAX_TILE * state_len(MAX_HEAD_DIM)),
            first: 0,
            end: 0,
            key_pages: [ptr::null(); SPLIT_PAGES],
            value_pages: [ptr::null(); SPLIT_PAGES],
        }
    }
}

impl Tile {
    pub(super) fn clear(&mut self) {
        self.count = 0;
    }

    /// Adds a query that sees `keys` of the split, none if empty.
    pub(super) fn push(&mut self, query: &[f32], keys: Range<usize>) {
        self.queries[self.count * MAX_HEAD_DIM..][..query.len()].copy_from_slice(query);
        self.keys[self.count] = keys;
        self.count += 1;
    }

    /// The queries that see a key.
    fn seeing(&self) -> impl Iterator<Item = (usize, Range<usize>)> {
        self.keys[..self.count].iter().cloned().enumerate().filter(|(_, keys)| !keys.is_empty())
    }

    /// Pages of the split that any of the queries sees.
    pub(super) fn pages(&self) -> Option<Range<usize>> {
        let pages = self.seeing().map(|(_, keys)| keys.start / PAGE_TOKENS..keys.end.div_ceil(PAGE_TOKENS));
        pages.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end))
    }

    /// Looks up the split's pages from page `first` on: `page` gives the keys and
    /// values of the split's page `i`.
    pub(super) fn load(
        &mut self,
        table: &[PageId],
        first: usize,
        mut page: impl FnMut(usize, PageId) -> (*const u16, *const u16),
    ) {
        (self.first, self.end) = (first, table.len());
        for (i, &id) in table.iter().enumerate().skip(first) {
            (self.key_pages[i], self.value_pages[i]) = page(i, id);
        }
    }

    /// Computes the states of the queries that see a key.
    pub(super) fn compute<K: Kernels>(&mut self, dim: usize) {
        const { assert!(K::TILE <= MAX_TILE) };
        let (first, end, len) = (self.first, self.end, state_len(dim));
        let (start, stop) = (first * PAGE_TOKENS, end * PAGE_TOKENS);
        let pages = &self.key_pages[first..end];
        // SAFETY: the buffers have room for a full tile and split; the pages
        // were just loaded; a `Cpu` takes a path only if the processor has it.
        unsafe {
            let scores = self.scores.as_mut_ptr().add(start);
            K::scores(self.count, dim, self.queries.as_ptr(), pages, scores);
        }
        for i in 0..self.count {
            let keys = self.keys[i].clone();
            let scores = &mut self.scores[i * SCORES..][..SPLIT_TOKENS];
            let state = &mut self.states[i * len..][..len];
            state[16..].fill(0.0);
            if keys.is_empty() {
                // It sees nothing, so nobody reads its scores, or takes its state.
                continue;
            }
            // What lies beyond the keys is another's, or never was written.
            scores[start..keys.start].fill(f32::NEG_INFINITY);
            scores[keys.end..stop].fill(f32::NEG_INFINITY);
            // SAFETY: as above.
            (state[0], state[1]) = unsafe { K::softmax(&mut scores[start..stop]) };
        }
        if K::BY_PAGE {
            self.values_by_page::<K>(dim);
        } else {
            self.values_and_edges::<K>(dim);
        }
    }

    /// Pages that all queries see whole are summed together; at the edges each query takes
    /// exactly its own tokens, since 0 times what is not a number would not be 0.
    fn values_and_edges<K: Kernels>(&mut self, dim: usize) {
        let (first, end) = (self.first, self.end);
        let whole = self.whole_pages();
        let leading = (first..whole.start, 0..whole.start * PAGE_TOKENS);
        let trailing = (whole.end..end, whole.end * PAGE_TOKENS..SPLIT_TOKENS);
        self.edge::<K>(dim, leading);
        self.values_of::<K>(dim, whole);
        self.edge::<K>(dim, trailing);
    }

    /// All pages are summed whole. A key that a query does not see weighs exactly 0 and so
    /// adds nothing, unless its value is not finite: such a page is copied for each query,
    /// with zeros in place of what it does not see.
    fn values_by_page<K: Kernels>(&mut self, dim: usize) {
        let whole = self.whole_pages();
        let mut next = self.first;
        for page in self.first..self.end {
            // SAFETY: the page was just loaded.
            let values = unsafe { std::slice::from_raw_parts(self.value_pages[page], PAGE_TOKENS * dim) };
            if whole.contains(&page) || values.iter().all(|bits| bits & 0x7f80 != 0x7f80) {
                continue;
            }
            self.values_of::<K>(dim, next..page);
            self.values_apart::<K>(dim, page, values);
            next = page + 1;
        }
        self.values_of::<K>(dim, next..self.end);
    }

    /// A page of which each query takes a copy.
    fn values_apart<K: Kernels>(&mut self, dim: usize, page: usize, values: &[u16]) {
        let len = state_len(dim);
        let (before, seen) = (self.states.clone(), self.value_pages[page]);
        let mut after = before.clone();
        for i in 0..self.count {
            let keys = self.keys[i].clone();
            let mut copy = values.to_vec();
            for (at, bits) in copy.iter_mut().enumerate() {
                // `[8 token pairs][D][2]`.
                let token = page * PAGE_TOKENS + at / (2 * dim) * 2 + at % 2;
                *bits = if keys.contains(&token) { *bits } else { 0 };
            }
            self.value_pages[page] = copy.as_ptr();
            self.values_of::<K>(dim, page..page + 1);
            after[i * len..][..len].copy_from_slice(&self.states[i * len..][..len]);
            self.states.copy_from_slice(&before);
        }
        (self.states, self.value_pages[page]) = (after, seen);
    }

    /// Adds the values of whole pages to all queries.
    fn values_of<K: Kernels>(&mut self, dim: usize, pages: Range<usize>) {
        if pages.is_empty() {
            return;
        }
        // SAFETY: the buffers have room for a full tile and split; the pages were just
        // loaded; the path as in `compute`.
        unsafe {
            let weights = self.scores.as_ptr().add(pages.start * PAGE_TOKENS);
            let sums = self.states.as_mut_ptr().add(16);
            K::values(self.count, dim, weights, &self.value_pages[pages], sums, state_len(dim));
        }
    }

    /// Pages of which every query sees every key; at the end when there are
    /// none.
    fn whole_pages(&self) -> Range<usize> {
        let keys = &self.keys[..self.count];
        let start = keys.iter().map(|keys| keys.start.div_ceil(PAGE_TOKENS)).max().unwrap_or(0);
        let end = keys.iter().map(|keys| keys.end / PAGE_TOKENS).min().unwrap_or(0);
        if start < end { start..end } else { self.end..self.end }
    }

    /// Adds the values of the tokens that each query sees among `tokens`.
    fn edge<K: Kernels>(&mut self, dim: usize, (pages, tokens): (Range<usize>, Range<usize>)) {
        if pages.is_empty() {
            return;
        }
        let len = state_len(dim);
        for i in 0..self.count {
            let keys = &self.keys[i];
            for key in keys.start.max(tokens.start)..keys.end.min(tokens.end) {
                let page = self.value_pages[key / PAGE_TOKENS];
                let token = key % PAGE_TOKENS;
                let weight = self.scores[i * SCORES + key];
                // SAFETY: token `token` of a loaded page, in pairs of `dim`; the
                // query's own sums; the path as in `compute`.
                unsafe {
                    let pair = page.add(token / 2 * 2 * dim);
                    K::value(dim, weight, pair, token % 2 == 1, self.states.as_mut_ptr().add(i * len + 16));
                }
            }
        }
    }

    /// The queries that see a key, and their states.
    pub(super) fn states(&self, dim: usize) -> impl Iterator<Item = (usize, &[f32])> {
        let len = state_len(dim);
        self.seeing().map(move |(i, _)| (i, &self.states[i * len..][..len]))
    }
}
