//! Numbers that start on a cache line. What starts within one costs two loads a vector, and
//! a tile four times its time.

use std::{
    ops::{Deref, DerefMut},
    slice,
};

/// Numbers of a line.
const NUMBERS: usize = 16;

#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
struct Line<T>([T; NUMBERS]);

/// Whole lines of numbers of 32 bits, zeros at first; grows and stays.
#[derive(Debug, Clone)]
pub(crate) struct Lines<T>(Vec<Line<T>>);

impl<T> Default for Lines<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T: Copy + Default> Lines<T> {
    pub(crate) fn zeros(numbers: usize) -> Self {
        let mut lines = Self::default();
        lines.at_least(numbers);
        lines
    }

    /// Where the numbers start; borrows none of them.
    pub(crate) fn as_mut_ptr(&mut self) -> *mut T {
        self.0.as_mut_ptr().cast()
    }

    /// The first `numbers`, of which there are as many from now on.
    pub(crate) fn at_least(&mut self, numbers: usize) -> &mut [T] {
        let lines = numbers.div_ceil(NUMBERS);
        if self.0.len() < lines {
            self.0.resize(lines, Line([T::default(); NUMBERS]));
        }
        &mut self[..numbers]
    }
}

impl<T> Deref for Lines<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        const { assert!(size_of::<Line<T>>() == NUMBERS * size_of::<T>()) };
        // SAFETY: lines follow each other without a gap, and so do their numbers.
        unsafe { slice::from_raw_parts(self.0.as_ptr().cast(), NUMBERS * self.0.len()) }
    }
}

impl<T> DerefMut for Lines<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`.
        unsafe { slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), NUMBERS * self.0.len()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_start_on_a_line_and_keep_what_they_hold() {
        let mut lines = Lines::zeros(3);
        lines[2] = 5u32;
        assert_eq!(lines.at_least(40), [[0, 0, 5].as_slice(), &[0; 37]].concat());
        assert_eq!((lines.len(), lines.as_ptr().addr() % 64), (48, 0));
        assert_eq!(lines.at_least(2), [0, 0]);
        assert_eq!(Lines::<f32>::default().len(), 0);
    }
}
