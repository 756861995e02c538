//! Handles that programs hold: never an address, so that one that is not ours is an error.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, PoisonError, RwLock};

use cudarc::driver::sys::CUresult;

use crate::calls::Answer;

/// All objects of a kind, by handle.
pub(crate) struct Table<T> {
    objects: LazyLock<RwLock<HashMap<usize, Arc<T>>>>,
}

/// A handle that no object has or had. Far from null and from the numbers that CUDA gives a meaning, as streams 1 and
/// 2.
pub(crate) fn fresh() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0x5_0000);
    NEXT.fetch_add(0x10, Ordering::Relaxed)
}

impl<T> Table<T> {
    pub(crate) const fn new() -> Table<T> {
        Table { objects: LazyLock::new(RwLock::default) }
    }

    pub(crate) fn insert(&self, handle: usize, object: Arc<T>) {
        self.objects.write().unwrap_or_else(PoisonError::into_inner).insert(handle, object);
    }

    pub(crate) fn get<H>(&self, handle: *mut H) -> Answer<Arc<T>> {
        let objects = self.objects.read().unwrap_or_else(PoisonError::into_inner);
        objects.get(&handle.addr()).cloned().ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)
    }

    pub(crate) fn remove<H>(&self, handle: *mut H) -> Answer<Arc<T>> {
        let mut objects = self.objects.write().unwrap_or_else(PoisonError::into_inner);
        objects.remove(&handle.addr()).ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)
    }
}

/// The handle as C has it.
pub(crate) fn pointer<H>(handle: usize) -> *mut H {
    std::ptr::without_provenance_mut(handle)
}
