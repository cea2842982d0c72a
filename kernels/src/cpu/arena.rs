//! Memory for weights, activations and pages: zeroed, aligned to a cache line,
//! committed as it is touched, in huge pages where it is large.

use std::{ptr::NonNull, slice};

use memmap2::MmapMut;

use crate::KernelError;

/// A huge page: arenas at least this large start on one.
const HUGE: usize = 2 << 20;

/// Numbers of which every bit pattern is a value, so that zeroed memory holds
/// them.
///
/// # Safety
/// The type has no padding, no invalid bit pattern and an alignment that
/// divides 64.
pub(crate) unsafe trait Plain: Copy + Send + Sync + 'static {}

// SAFETY: a byte has neither padding nor invalid patterns.
unsafe impl Plain for u8 {}
// SAFETY: as for bytes.
unsafe impl Plain for u16 {}
// SAFETY: every pattern of 32 bits is an f32, NaNs included.
unsafe impl Plain for f32 {}

/// Zeroed numbers at an address that does not move.
///
/// The pointer, not the map, is what slices come from, so that parts of one
/// arena can be written by several threads at once.
#[derive(Debug)]
pub(crate) struct Arena<T> {
    start: NonNull<T>,
    len: usize,
    /// Owns the memory; never touched again.
    _map: MmapMut,
}

// SAFETY: the arena owns its memory, and shared access reads plain numbers.
unsafe impl<T: Plain> Send for Arena<T> {}
// SAFETY: as above.
unsafe impl<T: Plain> Sync for Arena<T> {}

impl<T: Plain> Arena<T> {
    /// Reserves room for `len` numbers.
    ///
    /// # Errors
    /// [`KernelError::Memory`] when the system refuses.
    pub(crate) fn new(len: usize) -> Result<Self, KernelError> {
        let bytes = len.saturating_mul(size_of::<T>()).max(64);
        let slack = if bytes >= HUGE { HUGE } else { 0 };
        let mut map = MmapMut::map_anon(bytes.saturating_add(slack))
            .map_err(|source| KernelError::Memory { bytes, source })?;
        // Advice only: without huge pages the arena works all the same.
        #[cfg(target_os = "linux")]
        if slack > 0 {
            let _ = map.advise(memmap2::Advice::HugePage);
        }
        let base = map.as_mut_ptr();
        let skip = if slack > 0 { base.align_offset(HUGE) } else { 0 };
        // SAFETY: `skip` is below `slack`, which the map has beyond `bytes`.
        let start = unsafe { base.add(skip) };
        let start = NonNull::new(start.cast()).expect("a map has an address");
        Ok(Self { start, len, _map: map })
    }

    /// The first number. Writing through it is for who knows that nobody else
    /// reads or writes the same numbers meanwhile.
    pub(crate) fn ptr(&self) -> *mut T {
        self.start.as_ptr()
    }

    /// How many numbers it holds.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn as_slice(&self) -> &[T] {
        // SAFETY: `len` zeroed or written numbers of a plain type from `start`,
        // mapped as long as `self`; kernels write to an arena only under a
        // mutable borrow of what owns it.
        unsafe { slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }

    pub(crate) fn as_mut_slice(&mut self) -> &mut [T] {
        // SAFETY: as in `as_slice`, and the borrow is exclusive.
        unsafe { slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeroed_and_aligned() {
        for len in [0, 1, 1000, HUGE / 4, HUGE + 5] {
            let mut arena = Arena::<f32>::new(len).unwrap();
            assert_eq!(arena.len(), len);
            assert_eq!(arena.ptr().align_offset(64), 0);
            assert!(arena.as_slice().iter().all(|&v| v == 0.0));
            arena.as_mut_slice().fill(1.0);
            assert_eq!(arena.as_slice().iter().sum::<f32>(), len as f32);
        }
    }

    #[test]
    fn too_much_is_an_error() {
        let error = Arena::<u8>::new(usize::MAX / 4).unwrap_err();
        assert!(matches!(error, KernelError::Memory { .. }), "{error}");
    }
}
