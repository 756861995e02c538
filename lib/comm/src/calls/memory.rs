//! The memory of a call: slices, or buffers whose element type is known at run time.

use tinynccl_plan::dtype::{DType, Element};

/// Memory that a call reads.
///
/// # Safety
/// `address` must point to `elements` elements of `dtype` for as long as the value is borrowed.
pub unsafe trait Memory {
    /// Type of the elements.
    fn dtype(&self) -> DType;
    /// Number of elements.
    fn elements(&self) -> usize;
    /// Address of the first element.
    fn address(&self) -> *const u8;
}

/// Memory that a call writes.
///
/// # Safety
/// As [`Memory`], and nothing else may access the elements while the value is borrowed.
pub unsafe trait MemoryMut: Memory {
    /// Address of the first element, for writing.
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
