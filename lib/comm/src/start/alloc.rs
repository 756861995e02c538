//! Symmetric buffers: memory of one rank that all ranks of the host map.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use crate::Comm;
use crate::calls::persistent::{OwnedBuffer, sealed};
use crate::engine::board::BoardState;
use crate::symmetric::{Allocation, region_bytes};
use tinynccl_plan::dtype::Element;
use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::threads::lock;
use tinynccl_transport::mapping::Mapping;

/// A slice that collectives of its communicator use without a copy if all ranks share memory.
///
/// Use it as a slice (`&buffer[..]`, `&mut buffer`). Dropping it is local: other ranks may drop theirs later.
pub struct SymmetricBuffer<T: Element> {
    allocation: Arc<Allocation>,
    rank: usize,
    len: usize,
    shared: bool,
    _elements: PhantomData<T>,
}

// SAFETY: it owns its region like a `Vec`; other ranks touch it only within calls that hold it borrowed here.
unsafe impl<T: Element> Send for SymmetricBuffer<T> {}
// SAFETY: as above; a shared reference gives out shared slices only.
unsafe impl<T: Element> Sync for SymmetricBuffer<T> {}

impl<T: Element> SymmetricBuffer<T> {
    /// Returns true if the ranks of the communicator share this memory. If not, it is an ordinary buffer.
    pub fn is_shared(&self) -> bool {
        self.shared
    }
}

impl<T: Element> Deref for SymmetricBuffer<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        // SAFETY: our region has `len` elements, page-aligned, zeroed at first; every bit pattern is an element.
        unsafe { std::slice::from_raw_parts(self.allocation.base(self.rank).cast(), self.len) }
    }
}

impl<T: Element> DerefMut for SymmetricBuffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and we hold the only reference in this process.
        unsafe { std::slice::from_raw_parts_mut(self.allocation.base(self.rank).cast(), self.len) }
    }
}

impl<T: Element> sealed::Sealed for SymmetricBuffer<T> {}
impl<T: Element> OwnedBuffer for SymmetricBuffer<T> {
    type Element = T;
}

impl<T: Element> fmt::Debug for SymmetricBuffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SymmetricBuffer of {} {} (shared: {})", self.len, T::DTYPE, self.shared)
    }
}

impl Comm {
    /// A zeroed buffer of `len` elements on every rank. Every rank calls it, with the same size in bytes.
    ///
    /// Collectives larger than [`Config::one_shot`](tinynccl_sys::Config::one_shot) whose buffers (input and output, on
    /// all ranks) come from here read and write the peers' memory directly: two-shot all_reduce without a staging copy.
    /// Parts of a buffer qualify, too, and may have different offsets on different ranks. If ranks are on several
    /// hosts, it is ordinary memory. Memory is allocated in pages: from 2 MiB per rank on in huge pages, if the system
    /// has them.
    ///
    /// ```
    /// # extern crate tinynccl_comm as tinynccl;
    /// # use tinynccl::ReduceOp;
    /// # tinynccl::comm::on_threads(2, |comm| {
    /// let mut gradient = comm.alloc::<f32>(1 << 16)?;
    /// gradient.fill(1.0);
    /// comm.all_reduce_in_place(&mut gradient, ReduceOp::Sum)?;
    /// assert_eq!(gradient[0], 2.0);
    /// # Ok(())
    /// # }).unwrap();
    /// ```
    pub fn alloc<T: Element>(&self, len: usize) -> Result<SymmetricBuffer<T>> {
        let inner = &self.inner;
        let state = &inner.state;
        state.check(|| "alloc".to_owned())?;
        inner.queue.drain();
        let too_large = || Error::invalid("alloc", format!("{len} elements of {}: too large", T::DTYPE));
        let bytes = len.checked_mul(size_of::<T>()).filter(|&b| b <= isize::MAX as usize).ok_or_else(too_large)?;
        let region = region_bytes(bytes).ok_or_else(too_large)?;
        let mut engine = lock(&inner.engine);
        inner.open_board(&mut engine)?;
        let mut shared = None;
        let id = engine.registry.next_id();
        if matches!(engine.board, BoardState::Open(_)) {
            let all = region.checked_mul(self.size()).ok_or_else(too_large)?;
            let key = format!("{}-{id}", state.key("alloc"));
            let failed = |error| state.fail_everywhere(state.exchange_failed("alloc", error));
            shared = state.share(&key, all).map_err(failed)?;
        }
        let is_shared = shared.is_some();
        let (memory, rank) = match shared {
            Some(memory) => (memory, self.rank()),
            None => (Arc::new(Mapping::anonymous(region)?), 0),
        };
        let allocation = Arc::new(Allocation::new(memory, id, rank, region));
        if is_shared {
            engine.registry.add(&allocation);
        }
        Ok(SymmetricBuffer { allocation, rank, len, shared: is_shared, _elements: PhantomData })
    }
}
