//! Synchronisation of streams and workers: two counts per worker, in page-locked memory.
//!
//! A stream counts the chunks that are in their slots, and the worker's thread those that it has finished. A stream
//! waits for the second count by `cuStreamWaitValue32`; the thread polls the first. Counts wrap, so comparisons use
//! their difference.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use cudarc::driver::{CudaContext, DriverError, result, sys};

use crate::driver::cuda;
use tinynccl_plan::error::{Error, Result};

/// Added to a count to release all waits: more chunks than can be in flight.
const RELEASE: u32 = 1 << 30;

/// The GPU writes one line, the CPU the other.
#[repr(C, align(64))]
struct Line {
    count: AtomicU32,
}

#[repr(C)]
struct Lines {
    arrived: Line,
    done: Line,
}

/// The counts of all workers.
#[derive(Debug)]
pub(super) struct Signals {
    context: Arc<CudaContext>,
    lines: NonNull<Lines>,
    workers: usize,
    /// Address of the counts as the device sees them.
    address: sys::CUdeviceptr,
    released: AtomicBool,
}

// SAFETY: atomics in memory that lives as long as this.
unsafe impl Send for Signals {}
// SAFETY: as above.
unsafe impl Sync for Signals {}

impl Signals {
    pub(super) fn new(context: &Arc<CudaContext>, workers: usize) -> Result<Signals> {
        let failed = |e| cuda("DeviceComm", "allocating page-locked memory for counts", e);
        context.bind_to_thread().map_err(failed)?;
        let flags = sys::CU_MEMHOSTALLOC_DEVICEMAP | sys::CU_MEMHOSTALLOC_PORTABLE;
        // SAFETY: allocates; freed once, by `drop`.
        let memory = unsafe { result::malloc_host(workers * size_of::<Lines>(), flags) }.map_err(failed)?;
        let Some(lines) = NonNull::new(memory.cast::<Lines>()) else {
            return Err(Error::invalid("DeviceComm", "CUDA returned neither page-locked memory nor an error"));
        };
        // SAFETY: fresh, page-aligned memory of that size; zeroes are valid atomics.
        unsafe { lines.write_bytes(0, workers) };
        let mut signals =
            Signals { context: context.clone(), lines, workers, address: 0, released: AtomicBool::new(false) };
        // SAFETY: the memory is of malloc_host with DEVICEMAP; writes the address.
        unsafe { sys::cuMemHostGetDevicePointer_v2(&mut signals.address, memory, 0) }.result().map_err(failed)?;
        Ok(signals)
    }

    fn lines(&self, worker: usize) -> &Lines {
        debug_assert!(worker < self.workers);
        // SAFETY: `workers` of them are valid as long as self; only atomics are in them.
        unsafe { self.lines.add(worker).as_ref() }
    }

    /// Returns true once the stream has copied chunk `number` of the worker (counted from 0, over all calls) into its
    /// slot.
    #[inline]
    pub(super) fn has_arrived(&self, worker: usize, number: u32) -> bool {
        reached(self.lines(worker).arrived.count.load(Ordering::Acquire), number)
    }

    /// The host is done with the worker's chunk `number`, the next one.
    #[inline]
    pub(super) fn finish(&self, worker: usize, number: u32) {
        let done = &self.lines(worker).done.count;
        // It fails if the waits were released before: they must stay released.
        let _ = done.compare_exchange(number, number.wrapping_add(1), Ordering::Release, Ordering::Relaxed);
    }

    /// Releases all waits for the host, from now on.
    pub(super) fn release(&self) {
        if !self.released.swap(true, Ordering::AcqRel) {
            for worker in 0..self.workers {
                self.lines(worker).done.count.fetch_add(RELEASE, Ordering::AcqRel);
            }
        }
    }

    /// Makes the stream signal that chunk `number` is in its slot.
    ///
    /// # Safety
    /// `stream` must be a stream of this context.
    pub(super) unsafe fn arrive(&self, stream: sys::CUstream, worker: usize, number: u32) -> Result<(), DriverError> {
        let at = self.address + (worker * size_of::<Lines>()) as u64;
        // SAFETY: the address is in our lines; the caller vouches for the stream.
        unsafe { sys::cuStreamWriteValue32_v2(stream, at, number.wrapping_add(1), 0) }.result()
    }

    /// Makes the stream wait until the host is done with chunk `number`.
    ///
    /// # Safety
    /// As [`Signals::arrive`].
    pub(super) unsafe fn wait(&self, stream: sys::CUstream, worker: usize, number: u32) -> Result<(), DriverError> {
        let at = self.address + (worker * size_of::<Lines>() + std::mem::offset_of!(Lines, done)) as u64;
        let geq = sys::CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_GEQ as u32;
        // SAFETY: as above.
        unsafe { sys::cuStreamWaitValue32_v2(stream, at, number.wrapping_add(1), geq) }.result()
    }
}

/// As the device compares: cyclic.
fn reached(count: u32, number: u32) -> bool {
    count.wrapping_sub(number.wrapping_add(1)) as i32 >= 0
}

impl Drop for Signals {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: of malloc_host, freed once.
            if let Err(error) = unsafe { result::free_host(self.lines.as_ptr().cast()) } {
                log::debug!("freeing page-locked memory: {error:?}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_wrap() {
        assert!(!reached(0, 0) && reached(1, 0) && !reached(1, 1));
        assert!(!reached(u32::MAX, u32::MAX) && reached(0, u32::MAX) && reached(5, u32::MAX));
        // Released: all waits in flight pass.
        assert!(reached(7u32.wrapping_add(RELEASE), 7000));
    }
}
