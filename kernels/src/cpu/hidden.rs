//! The arena of hidden states: what some layers leave behind for each token, so
//! that a span of tokens can be read long after it was computed.
//!
//! `[layer][page][16 tokens][width]` in bf16, and `[layer][page][width]` in f32:
//! the sum over a full page, so that a long span costs a row a page.

use std::ops::Range;

use half::bf16;

use super::{Rows, arena::Arena};
use crate::{HiddenShape, KernelError, PAGE_TOKENS, PageId, Slot};

/// Pages of hidden states.
#[derive(Debug)]
pub struct Hidden {
    shape: HiddenShape,
    data: Arena<u16>,
    sums: Arena<f32>,
}

impl Hidden {
    pub(super) fn new(shape: HiddenShape) -> Result<Self, KernelError> {
        let rows = shape.layers.saturating_mul(shape.pages).saturating_mul(shape.width);
        let data = Arena::new(rows.saturating_mul(PAGE_TOKENS))?;
        Ok(Self { shape, data, sums: Arena::new(rows)? })
    }

    /// What the arena holds.
    #[must_use]
    pub fn shape(&self) -> HiddenShape {
        self.shape
    }

    /// A page's place among those of all layers.
    fn place(&self, layer: usize, page: PageId) -> usize {
        let HiddenShape { layers, pages, .. } = self.shape;
        assert!(layer < layers && (page as usize) < pages, "page {page}, layer {layer}");
        layer * pages + page as usize
    }

    /// The states of a page's tokens.
    fn page(&self, layer: usize, page: PageId) -> &[u16] {
        let numbers = PAGE_TOKENS * self.shape.width;
        &self.data.as_slice()[self.place(layer, page) * numbers..][..numbers]
    }

    pub(super) fn keep(&mut self, layer: usize, x: &Rows, slots: &[Slot]) {
        let width = self.shape.width;
        assert_eq!((x.width(), x.len()), (width, slots.len()), "rows of hidden states, and their slots");
        for (row, slot) in slots.iter().enumerate() {
            let offset = slot.offset as usize;
            assert!(offset < PAGE_TOKENS, "offset {offset} in a page");
            let start = (self.place(layer, slot.page) * PAGE_TOKENS + offset) * width;
            for (to, &from) in self.data.as_mut_slice()[start..][..width].iter_mut().zip(x.row(row)) {
                *to = bf16::from_f32(from).to_bits();
            }
            if offset == PAGE_TOKENS - 1 {
                self.sum_up(layer, slot.page);
            }
        }
    }

    /// Sums a page whose last token has come.
    fn sum_up(&mut self, layer: usize, page: PageId) {
        let (width, place) = (self.shape.width, self.place(layer, page));
        let sums = &mut self.sums.as_mut_slice()[place * width..][..width];
        sums.fill(0.0);
        let states = &self.data.as_slice()[place * PAGE_TOKENS * width..][..PAGE_TOKENS * width];
        add_rows(states, sums);
    }

    /// The order of the sum follows from the span alone: single tokens up to a
    /// page's end, whole pages, single tokens.
    pub(super) fn mean(&self, layer: usize, pages: &[PageId], tokens: Range<usize>, out: &mut [f32]) {
        let width = self.shape.width;
        assert!(!tokens.is_empty() && tokens.end <= pages.len() * PAGE_TOKENS, "tokens {tokens:?}");
        assert_eq!(out.len(), width, "width of the states and of the mean");
        out.fill(0.0);
        let mut at = tokens.start;
        while at < tokens.end {
            let (page, offset) = (pages[at / PAGE_TOKENS], at % PAGE_TOKENS);
            let count = (PAGE_TOKENS - offset).min(tokens.end - at);
            if count == PAGE_TOKENS {
                let sums = &self.sums.as_slice()[self.place(layer, page) * width..][..width];
                out.iter_mut().zip(sums).for_each(|(out, sum)| *out += sum);
            } else {
                add_rows(&self.page(layer, page)[offset * width..][..count * width], out);
            }
            at += count;
        }
        let share = 1.0 / tokens.len() as f32;
        out.iter_mut().for_each(|out| *out *= share);
    }

    pub(super) fn copy_page(&mut self, from: PageId, to: PageId, tokens: usize) {
        assert!(tokens <= PAGE_TOKENS, "{tokens} tokens of a page");
        let width = self.shape.width;
        for layer in 0..self.shape.layers {
            let (from, place) = (self.place(layer, from), self.place(layer, to));
            let (start, numbers) = (from * PAGE_TOKENS * width, tokens * width);
            self.data.as_mut_slice().copy_within(start..start + numbers, place * PAGE_TOKENS * width);
            if tokens == PAGE_TOKENS {
                self.sum_up(layer, to);
            }
        }
    }
}

/// Adds rows of bf16, one after the other.
fn add_rows(rows: &[u16], out: &mut [f32]) {
    for row in rows.chunks_exact(out.len()) {
        for (out, &bits) in out.iter_mut().zip(row) {
            *out += bf16::from_bits(bits).to_f32();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: HiddenShape = HiddenShape { layers: 2, width: 8, pages: 6 };

    /// Token `t` of layer `l` holds `100 l + t` in every place; all are bf16 numbers.
    fn filled(pages: &[PageId]) -> Hidden {
        let mut hidden = Hidden::new(SHAPE).unwrap();
        let slots: Vec<Slot> = (0..pages.len() * PAGE_TOKENS)
            .map(|t| Slot { page: pages[t / PAGE_TOKENS], offset: (t % PAGE_TOKENS) as u32 })
            .collect();
        for layer in 0..SHAPE.layers {
            let mut rows = Rows::new(slots.len(), SHAPE.width);
            rows.set_len(slots.len());
            for (i, number) in rows.as_mut_slice().iter_mut().enumerate() {
                *number = (100 * layer + i / SHAPE.width) as f32;
            }
            hidden.keep(layer, &rows, &slots);
        }
        hidden
    }

    fn mean(hidden: &Hidden, layer: usize, pages: &[PageId], tokens: Range<usize>) -> f32 {
        let mut out = [f32::NAN; SHAPE.width];
        hidden.mean(layer, pages, tokens, &mut out);
        assert!(out.iter().all(|&number| number == out[0]));
        out[0]
    }

    #[test]
    fn any_span_has_the_mean_of_its_tokens() {
        let pages = [3, 0, 5];
        let hidden = filled(&pages);
        for layer in 0..SHAPE.layers {
            for start in 0..48 {
                for end in start + 1..=48 {
                    let expected = (start + end - 1) as f32 / 2.0 + 100.0 * layer as f32;
                    let got = mean(&hidden, layer, &pages, start..end);
                    assert!((got - expected).abs() < 1e-4, "{start}..{end}: {got}, not {expected}");
                }
            }
        }
    }

    #[test]
    fn a_copy_has_the_first_tokens_and_fills_up_on_its_own() {
        for tokens in [0, 1, 7, 16] {
            let mut hidden = filled(&[1]);
            hidden.copy_page(1, 4, tokens);
            if tokens > 0 {
                assert_eq!(
                    mean(&hidden, 1, &[4], 0..tokens),
                    mean(&hidden, 1, &[1], 0..tokens),
                    "{tokens} tokens"
                );
            }
            let mut row = Rows::new(1, SHAPE.width);
            row.set_len(1);
            row.as_mut_slice().fill(1000.0);
            for offset in tokens..16 {
                hidden.keep(0, &row, &[Slot { page: 4, offset: offset as u32 }]);
            }
            let sum = (0..tokens).sum::<usize>() + 1000 * (16 - tokens);
            assert_eq!(mean(&hidden, 0, &[4], 0..16), sum as f32 / 16.0);
            assert_eq!(mean(&hidden, 0, &[1], 0..16), 7.5, "the page it came from stays");
        }
    }
}
