//! The arena of key and value pages.
//!
//! `[layer][page][head]{K, V}`. In bf16 a head's keys in a page are `[D/2][16
//! tokens][2]`, its values `[8 token pairs][D][2]`: in either, a 32-bit lane
//! holds two neighbours of the dimension that is summed over, so one load serves
//! two steps of a dot product for 16 tokens or dimensions. In fewer bits they are
//! [`packed`], and unpacked to the same lanes before they are read.

mod packed;

use half::bf16;

use self::packed::Side;
use super::pool::{Parts, Pool, share};
use super::rowwise::{Angles, rotate};
use super::{Path, Rows, arena::Arena};
use crate::{KernelError, KvPrecision, KvShape, PAGE_TOKENS, PageId, Place};

/// Pages of keys and values.
#[derive(Debug)]
pub struct Kv {
    shape: KvShape,
    data: Arena<u16>,
}

impl Kv {
    pub(super) fn new(shape: KvShape) -> Result<Self, KernelError> {
        let dim = shape.head_dim;
        if dim == 0 || !dim.is_multiple_of(16) || dim > super::attention::MAX_HEAD_DIM {
            return Err(KernelError::Shape {
                what: "a head's dimension",
                expected: "a multiple of 16 up to 256",
                got: dim,
            });
        }
        let numbers = shape
            .layers
            .checked_mul(shape.pages)
            .and_then(|n| n.checked_mul(shape.heads))
            .and_then(|n| n.checked_mul(2 * packed::numbers(shape.precision, dim)))
            .unwrap_or(usize::MAX);
        Ok(Self { shape, data: Arena::new(numbers)? })
    }

    /// What the arena holds.
    #[must_use]
    pub fn shape(&self) -> KvShape {
        self.shape
    }

    /// u16 of one head's keys in a page, and of its values.
    fn head_numbers(&self) -> usize {
        packed::numbers(self.shape.precision, self.shape.head_dim)
    }

    /// 32-bit lanes of one head's keys in a page, and of its values.
    pub(super) fn lanes(&self) -> usize {
        PAGE_TOKENS * self.shape.head_dim / 2
    }

    /// Whether pages must be unpacked before a kernel reads them.
    pub(super) fn is_packed(&self) -> bool {
        self.shape.precision != KvPrecision::Bf16
    }

    /// Unpacks a head's keys and values in a page, each to `lanes` pairs of bf16.
    pub(super) fn unpack(
        &self,
        path: Path,
        layer: usize,
        page: PageId,
        head: usize,
        keys: &mut [u32],
        values: &mut [u32],
    ) {
        let (k, v) = self.head(layer, page, head);
        packed::unpack(path, self.shape.precision, Side::Keys, k, keys);
        packed::unpack(path, self.shape.precision, Side::Values, v, values);
    }

    /// Where a page's head has its keys in a layer; its values follow.
    fn starts(&self, layer: usize) -> impl Fn(PageId, usize) -> usize + Sync + use<> {
        let (KvShape { layers, heads, pages, .. }, numbers) = (self.shape, self.head_numbers());
        assert!(layer < layers, "layer {layer} of {layers}");
        move |page, head| {
            assert!((page as usize) < pages && head < heads, "page {page}, head {head}");
            ((layer * pages + page as usize) * heads + head) * 2 * numbers
        }
    }

    fn start(&self, layer: usize, page: PageId, head: usize) -> usize {
        self.starts(layer)(page, head)
    }

    /// A head's keys and values in a page.
    pub(super) fn head(&self, layer: usize, page: PageId, head: usize) -> (&[u16], &[u16]) {
        self.data.as_slice()[self.start(layer, page, head)..][..2 * self.head_numbers()]
            .split_at(self.head_numbers())
    }

    pub(super) fn copy_page(&mut self, from: PageId, to: PageId, tokens: usize) {
        assert!(tokens <= PAGE_TOKENS, "{tokens} tokens of a page");
        let (dim, numbers) = (self.shape.head_dim, self.head_numbers());
        for layer in 0..self.shape.layers {
            for head in 0..self.shape.heads {
                let (from, to) = (self.start(layer, from, head), self.start(layer, to, head));
                let data = self.data.as_mut_slice();
                if self.shape.precision != KvPrecision::Bf16 {
                    // The tokens that follow are written before they are read.
                    data.copy_within(from..from + 2 * numbers, to);
                    continue;
                }
                for pair in (0..numbers).step_by(2 * PAGE_TOKENS) {
                    data.copy_within(from + pair..from + pair + 2 * tokens, to + pair);
                }
                let (from, to) = (from + numbers, to + numbers);
                let whole = tokens / 2 * 2 * dim;
                data.copy_within(from..from + whole, to);
                if tokens % 2 == 1 {
                    for i in (whole..whole + 2 * dim).step_by(2) {
                        data[to + i] = data[from + i];
                    }
                }
            }
        }
    }
}

/// Turns queries and keys, and stores keys and values. Heads fall to threads: a head
/// of a page is a place of its own, whatever rows go there.
pub(super) fn rope_store(
    path: Path,
    pool: &mut Pool,
    place: &Place<'_>,
    angles: &Angles,
    qkv: [&mut Rows; 3],
    kv: &mut Kv,
    layer: usize,
) {
    let KvShape { heads, head_dim: dim, precision, .. } = kv.shape;
    let [q, k, v] = qkv;
    let rows = q.len();
    assert_eq!((place.positions.len(), place.slots.len()), (rows, rows), "positions, slots and rows");
    assert_eq!((k.len(), v.len()), (rows, rows), "rows of keys, of values and of queries");
    assert_eq!((k.width(), v.width()), (heads * dim, heads * dim), "width of keys and values");
    assert_eq!(2 * place.rope.frequencies.len(), dim, "numbers that turn, and a head's");
    assert!(q.width().is_multiple_of(dim), "heads of {dim} in {}", q.width());
    assert!(place.slots.iter().all(|slot| (slot.offset as usize) < PAGE_TOKENS), "offsets in a page");
    let (queries, numbers, threads) = (q.width() / dim, kv.head_numbers(), pool.threads());
    let start = kv.starts(layer);
    let (pages, v) = (Parts::new(kv.data.as_mut_slice()), &*v);
    let cost = rows * (q.width() + 8 * k.width());
    let (q, k) = (Parts::new(q.as_mut_slice()), Parts::new(k.as_mut_slice()));
    let work = |part: usize| {
        let mine = share(heads, part, threads);
        // Whoever has a key less has a query more.
        let turned = share(queries, threads - 1 - part, threads);
        for (row, slot) in place.slots.iter().enumerate() {
            let (cos, sin) = angles.row(row);
            // SAFETY: heads fall to one part each, and so do their places in pages.
            let q = unsafe { q.slice((row * queries + turned.start) * dim, turned.len() * dim) };
            rotate(path, q, cos, sin, place.rope.pairing);
            for head in mine.clone() {
                // SAFETY: as above.
                let (k, page) = unsafe {
                    (
                        k.slice((row * heads + head) * dim, dim),
                        pages.slice(start(slot.page, head), 2 * numbers),
                    )
                };
                rotate(path, k, cos, sin, place.rope.pairing);
                store(precision, page, slot.offset as usize, k, &v.row(row)[head * dim..][..dim]);
            }
        }
    };
    pool.shares(threads, cost, &|_, parts| parts.for_each(work));
}

/// Writes a token's key and value to its head's place in a page.
fn store(precision: KvPrecision, page: &mut [u16], offset: usize, k: &[f32], v: &[f32]) {
    let (keys, values) = page.split_at_mut(page.len() / 2);
    if precision != KvPrecision::Bf16 {
        packed::store(precision, Side::Keys, keys, offset, k);
        packed::store(precision, Side::Values, values, offset, v);
        return;
    }
    for (pair, k) in k.as_chunks::<2>().0.iter().enumerate() {
        let at = (pair * PAGE_TOKENS + offset) * 2;
        keys[at] = bf16::from_f32(k[0]).to_bits();
        keys[at + 1] = bf16::from_f32(k[1]).to_bits();
    }
    let pair = &mut values[offset / 2 * 2 * v.len()..][..2 * v.len()];
    for (to, &v) in pair[offset % 2..].iter_mut().step_by(2).zip(v) {
        *to = bf16::from_f32(v).to_bits();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Rope, RopePairing, Slot};

    const SHAPE: KvShape =
        KvShape { layers: 2, heads: 2, head_dim: 16, pages: 3, precision: KvPrecision::Bf16 };

    fn rows(tokens: usize, from: f32) -> Rows {
        let mut rows = Rows::new(tokens, 32);
        rows.set_len(tokens);
        // Whole numbers up to 256 are bf16 numbers.
        rows.as_mut_slice().iter_mut().enumerate().for_each(|(i, v)| *v = from + (i % 200) as f32);
        rows
    }

    fn key(kv: &Kv, layer: usize, page: PageId, head: usize, token: usize, d: usize) -> f32 {
        bf16::from_bits(kv.head(layer, page, head).0[(d / 2 * 16 + token) * 2 + d % 2]).to_f32()
    }

    fn value(kv: &Kv, layer: usize, page: PageId, head: usize, token: usize, d: usize) -> f32 {
        bf16::from_bits(kv.head(layer, page, head).1[(token / 2 * 16 + d) * 2 + token % 2]).to_f32()
    }

    /// Stores rows as they are: nothing turns.
    fn store(kv: &mut Kv, layer: usize, k: &Rows, v: &Rows, slots: &[Slot]) {
        let rope = Rope { frequencies: vec![0.0; 8], pairing: RopePairing::Halves };
        let positions = vec![0; slots.len()];
        let mut angles = Angles::default();
        angles.compute(&positions, &rope);
        let place = Place { positions: &positions, rope: &rope, slots };
        let copy = |rows: &Rows| {
            let mut copy = Rows::new(rows.len(), rows.width());
            copy.set_len(rows.len());
            copy.as_mut_slice().copy_from_slice(rows.as_slice());
            copy
        };
        let qkv = [&mut copy(k), &mut copy(k), &mut copy(v)];
        rope_store(Path::Scalar, &mut Pool::new(2), &place, &angles, qkv, kv, layer);
    }

    #[test]
    fn a_page_holds_what_was_stored_and_a_copy_its_first_tokens() {
        let mut kv = Kv::new(SHAPE).unwrap();
        let (k, v) = (rows(16, 1.0), rows(16, 2.0));
        let slots: Vec<Slot> = (0..16).map(|offset| Slot { page: 1, offset }).collect();
        for layer in 0..2 {
            store(&mut kv, layer, &k, &v, &slots);
        }
        for tokens in 0..=16 {
            let mut kv = Kv { shape: SHAPE, data: Arena::new(kv.data.len()).unwrap() };
            for layer in 0..2 {
                store(&mut kv, layer, &k, &v, &slots);
            }
            kv.copy_page(1, 2, tokens);
            for (layer, head, token, d) in
                (0..2 * 2 * 16 * 16).map(|i| (i / 512, i / 256 % 2, i / 16 % 16, i % 16))
            {
                let at = head * 16 + d;
                assert_eq!(key(&kv, layer, 1, head, token, d), k.row(token)[at]);
                assert_eq!(value(&kv, layer, 1, head, token, d), v.row(token)[at]);
                let copied = token < tokens;
                assert_eq!(key(&kv, layer, 2, head, token, d), if copied { k.row(token)[at] } else { 0.0 });
                assert_eq!(value(&kv, layer, 2, head, token, d), if copied { v.row(token)[at] } else { 0.0 });
            }
        }
        assert!(kv.head(0, 0, 0).0.iter().all(|&bits| bits == 0), "other pages stay");
    }

    #[test]
    fn what_is_stored_does_not_depend_on_the_threads() {
        for precision in KvPrecision::ALL {
            let shape = KvShape { head_dim: 64, pages: 8, precision, ..SHAPE };
            let run = |threads: usize| {
                let mut kv = Kv::new(shape).unwrap();
                let numbers = |width: usize| {
                    let mut rows = Rows::new(128, width);
                    rows.set_len(128);
                    let all = rows.as_mut_slice().iter_mut().enumerate();
                    all.for_each(|(i, v)| *v = ((i * 37) % 201) as f32 - 100.0);
                    rows
                };
                let (mut q, mut k, mut v) = (numbers(6 * 64), numbers(2 * 64), numbers(2 * 64));
                let rope = Rope {
                    frequencies: (0..32).map(|i| 0.8f32.powi(i)).collect(),
                    pairing: RopePairing::Halves,
                };
                let positions: Vec<u32> = (0..128).collect();
                let slots: Vec<Slot> = (0..128).map(|p| Slot { page: p / 16, offset: p % 16 }).collect();
                let mut angles = Angles::default();
                angles.compute(&positions, &rope);
                let place = Place { positions: &positions, rope: &rope, slots: &slots };
                let qkv = [&mut q, &mut k, &mut v];
                rope_store(Path::Scalar, &mut Pool::new(threads), &place, &angles, qkv, &mut kv, 1);
                (q.as_slice().to_vec(), k.as_slice().to_vec(), kv.data.as_slice().to_vec())
            };
            let alone = run(1);
            assert!(alone.2.iter().any(|&bits| bits != 0));
            // More than there are heads, too.
            assert!(run(2) == alone && run(5) == alone, "{precision:?}");
        }
    }

    #[test]
    fn a_page_takes_the_bytes_that_its_shape_says() {
        for precision in KvPrecision::ALL {
            for head_dim in [16, 48, 64, 128, 256] {
                let shape = KvShape { head_dim, precision, ..SHAPE };
                let bytes = 2 * Kv::new(shape).unwrap().data.len();
                assert_eq!(bytes, shape.pages * shape.page_bytes(), "{precision:?} {head_dim}");
            }
        }
    }

    #[test]
    fn shapes_that_no_kernel_has_are_refused() {
        for head_dim in [0, 8, 24, 272] {
            let error = Kv::new(KvShape { head_dim, ..SHAPE }).unwrap_err();
            assert!(matches!(error, KernelError::Shape { got, .. } if got == head_dim));
        }
    }
}
