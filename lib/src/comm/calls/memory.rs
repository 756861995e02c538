//! Memory that calls are made of: slices, or buffers whose element type is known at run time.

use crate::dtype::{DType, Element};

/// What a call reads.
///
/// # Safety
/// `address` is where `elements` elements of `dtype` lie, for as long as the value is borrowed.
pub(crate) unsafe trait Memory {
    /// Type of the elements.
    fn dtype(&self) -> DType;
    /// Number of elements.
    fn elements(&self) -> usize;
    /// Where they lie.
    fn address(&self) -> *const u8;
}

/// What a call writes.
///
/// # Safety
/// As [`Memory`], and nobody else touches the elements while the value is borrowed.
pub(crate) unsafe trait MemoryMut: Memory {
    /// Where the elements lie.
    fn address_mut(&mut self) -> *mut u8;
}

// SAFETY: a slice is its elements.
unsafe impl<T: Element> Memory for [T] {
    #[inline]
    fn dtype(&self) -> DType {
        T::DTYPE
    }
    #[inline]
    fn elements(&self) -> usize {
        self.len()
    }
    #[inline]
    fn address(&self) -> *const u8 {
        self.as_ptr().cast()
    }
}

// SAFETY: as above.
unsafe impl<T: Element> MemoryMut for [T] {
    #[inline]
    fn address_mut(&mut self) -> *mut u8 {
        self.as_mut_ptr().cast()
    }
}
