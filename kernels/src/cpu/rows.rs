//! Activations: rows of f32.

use super::arena::Arena;

/// Up to `capacity` rows of `width` numbers, row after row.
#[derive(Debug)]
pub struct Rows {
    data: Arena<f32>,
    capacity: usize,
    width: usize,
    len: usize,
}

impl Rows {
    /// # Panics
    /// When the machine has no memory for it, as for a `Vec`.
    pub(super) fn new(capacity: usize, width: usize) -> Self {
        let data = Arena::new(capacity * width).expect("memory for activations");
        Self { data, capacity, width, len: 0 }
    }

    /// Rows that are set.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no row is set.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Rows that there is room for.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Numbers in a row.
    #[must_use]
    pub fn width(&self) -> usize {
        self.width
    }

    pub(super) fn set_len(&mut self, len: usize) {
        assert!(len <= self.capacity, "{len} rows do not fit in {}", self.capacity);
        self.len = len;
    }

    /// The rows that are set.
    pub(super) fn as_slice(&self) -> &[f32] {
        &self.data.as_slice()[..self.len * self.width]
    }

    pub(super) fn as_mut_slice(&mut self) -> &mut [f32] {
        &mut self.data.as_mut_slice()[..self.len * self.width]
    }

    pub(super) fn row(&self, row: usize) -> &[f32] {
        assert!(row < self.len, "row {row} of {}", self.len);
        &self.as_slice()[row * self.width..][..self.width]
    }

    /// The first number: kernels write a matrix's part of each row through it,
    /// under a mutable borrow of these rows.
    pub(super) fn ptr(&self) -> *mut f32 {
        self.data.ptr()
    }
}
