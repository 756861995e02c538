//! Custom operators of a communicator: factors that inputs are multiplied by before they are summed.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::c_int;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use cudarc::driver::CudaFunction;
use tinynccl::DType;

use crate::abi::NUM_OPS;
use crate::abi::error::Result;

/// A factor, and the kernel that multiplies by it. Collectives keep a copy: callers may destroy the operator as soon as
/// the call has returned, inside a group too.
#[derive(Debug, Clone)]
pub(crate) struct Scale {
    pub(crate) dtype: DType,
    pub(crate) factor: Factor,
    pub(crate) kernel: CudaFunction,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Factor {
    /// The bytes of an element, in memory order.
    Value([u8; 8]),
    /// Its address on the device, read when the call runs.
    At(u64),
}

/// The custom operators of a communicator, and their kernels.
#[derive(Debug, Default)]
pub(crate) struct Operators {
    live: Mutex<HashMap<c_int, Scale>>,
    kernels: Mutex<HashMap<DType, CudaFunction>>,
}

impl Operators {
    fn live(&self) -> MutexGuard<'_, HashMap<c_int, Scale>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds an operator; returns a number that no live one has. They count through all communicators, so that one of
    /// another communicator is noticed.
    pub(crate) fn insert(&self, scale: Scale) -> c_int {
        let mut live = self.live();
        loop {
            let number = next();
            if let Entry::Vacant(vacant) = live.entry(number) {
                vacant.insert(scale);
                return number;
            }
        }
    }

    /// Returns the operator of this number, if it is live.
    pub(crate) fn get(&self, op: c_int) -> Option<Scale> {
        self.live().get(&op).cloned()
    }

    /// Removes an operator; returns false if there is none of this number.
    pub(crate) fn remove(&self, op: c_int) -> bool {
        self.live().remove(&op).is_some()
    }

    /// Returns the kernel for elements of `dtype`, which `load` loads the first time.
    pub(crate) fn kernel(&self, dtype: DType, load: impl FnOnce() -> Result<CudaFunction>) -> Result<CudaFunction> {
        let mut kernels = self.kernels.lock().unwrap_or_else(PoisonError::into_inner);
        match kernels.entry(dtype) {
            Entry::Occupied(found) => Ok(found.get().clone()),
            Entry::Vacant(vacant) => Ok(vacant.insert(load()?).clone()),
        }
    }
}

fn next() -> c_int {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let span = (c_int::MAX - NUM_OPS) as u32;
    NUM_OPS + (NEXT.fetch_add(1, Ordering::Relaxed) % span) as c_int
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_of_custom_operators_and_not_repeated() {
        let (one, other) = (next(), next());
        assert!(one >= NUM_OPS && other >= NUM_OPS && one != other);
    }
}
