//! Copies, and fills.

use std::ffi::{c_uchar, c_uint, c_ushort, c_void};
use std::sync::Arc;

use cudarc::driver::sys::{CUcontext, CUdeviceptr, CUresult, CUstream};

use super::Place;
use crate::calls::{Answer, ensure};
use crate::capture;
use crate::context::current;
use crate::stream::{Stream, stream};
use crate::work::{Pattern, Work};

/// One end of a copy, as the function's name has it.
#[derive(Clone, Copy)]
enum End {
    Device(CUdeviceptr),
    Host(*const c_void),
    /// Either.
    Any(CUdeviceptr),
}

impl End {
    fn place(self, bytes: usize) -> Answer<Place> {
        match self {
            End::Device(at) => Place::of_memory(at, bytes),
            End::Host(at) => {
                let place = Place::of_memory(at.addr() as u64, bytes);
                let place = place.unwrap_or_else(|_| Place::of_program(at.cast_mut().cast()));
                ensure(!place.is_of_device() && !at.is_null(), CUresult::CUDA_ERROR_INVALID_VALUE)?;
                Ok(place)
            }
            End::Any(at) => {
                let program = std::ptr::with_exposed_provenance_mut::<u8>(at as usize);
                ensure(!program.is_null(), CUresult::CUDA_ERROR_INVALID_VALUE)?;
                Ok(Place::of_memory(at, bytes).unwrap_or_else(|_| Place::of_program(program)))
            }
        }
    }
}

/// Enqueues work; `wait`: until it is done, unless it is captured.
fn enqueue(stream: &Arc<Stream>, work: Work, wait: bool) -> Answer {
    let Some(work) = capture::add(stream, work)? else { return Ok(()) };
    let point = stream.enqueue_live(work)?;
    if wait {
        point.wait();
        stream.context()?.check()?;
    }
    Ok(())
}

/// Copies in a stream, or, without one, in the default stream, and waits.
///
/// # Safety
/// Memory of the program must be as long.
unsafe fn copy(to: End, from: End, bytes: usize, handle: Option<CUstream>) -> Answer {
    current()?;
    let stream = match handle {
        Some(handle) => stream(handle)?,
        None => {
            capture::unsafe_call()?;
            current()?.legacy()
        }
    };
    if bytes == 0 {
        return Ok(());
    }
    let (to, mut from) = (to.place(bytes)?, from.place(bytes)?);
    if from.is_pageable() && handle.is_some() && !capture::is_captured(&stream) {
        // SAFETY: the program's memory, as the caller guarantees.
        from = unsafe { Place::held(from.at(), bytes) };
    }
    let wait = handle.is_none() || to.is_pageable();
    enqueue(&stream, Work::Copy { to, from, bytes }, wait)
}

/// Fills, as [`copy`].
fn fill(at: CUdeviceptr, pattern: Pattern, count: usize, handle: Option<CUstream>) -> Answer {
    current()?;
    let element = match pattern {
        Pattern::U8(_) => 1,
        Pattern::U16(_) => 2,
        Pattern::U32(_) => 4,
    };
    let stream = match handle {
        Some(handle) => stream(handle)?,
        None => {
            capture::unsafe_call()?;
            current()?.legacy()
        }
    };
    ensure(at.is_multiple_of(element), CUresult::CUDA_ERROR_INVALID_VALUE)?;
    if count == 0 {
        return Ok(());
    }
    let bytes = count.checked_mul(element as usize).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
    enqueue(&stream, Work::Fill { to: Place::of_memory(at, bytes)?, pattern, count }, handle.is_none())
}

calls! {
    fn cuMemcpy(to: CUdeviceptr, from: CUdeviceptr, bytes: usize) { copy(End::Any(to), End::Any(from), bytes, None) }

    fn cuMemcpyAsync(to: CUdeviceptr, from: CUdeviceptr, bytes: usize, handle: CUstream) {
        copy(End::Any(to), End::Any(from), bytes, Some(handle))
    }

    fn cuMemcpyPeer(to: CUdeviceptr, _: CUcontext, from: CUdeviceptr, _: CUcontext, bytes: usize) {
        copy(End::Device(to), End::Device(from), bytes, None)
    }

    fn cuMemcpyPeerAsync(
        to: CUdeviceptr,
        _: CUcontext,
        from: CUdeviceptr,
        _: CUcontext,
        bytes: usize,
        handle: CUstream,
    ) {
        copy(End::Device(to), End::Device(from), bytes, Some(handle))
    }

    fn cuMemcpyHtoD_v2(to: CUdeviceptr, from: *const c_void, bytes: usize) {
        copy(End::Device(to), End::Host(from), bytes, None)
    }

    fn cuMemcpyDtoH_v2(to: *mut c_void, from: CUdeviceptr, bytes: usize) {
        copy(End::Host(to), End::Device(from), bytes, None)
    }

    fn cuMemcpyDtoD_v2(to: CUdeviceptr, from: CUdeviceptr, bytes: usize) {
        copy(End::Device(to), End::Device(from), bytes, None)
    }

    fn cuMemcpyHtoDAsync_v2(to: CUdeviceptr, from: *const c_void, bytes: usize, handle: CUstream) {
        copy(End::Device(to), End::Host(from), bytes, Some(handle))
    }

    fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: CUdeviceptr, bytes: usize, handle: CUstream) {
        copy(End::Host(to), End::Device(from), bytes, Some(handle))
    }

    fn cuMemcpyDtoDAsync_v2(to: CUdeviceptr, from: CUdeviceptr, bytes: usize, handle: CUstream) {
        copy(End::Device(to), End::Device(from), bytes, Some(handle))
    }

    fn cuMemsetD8_v2(at: CUdeviceptr, value: c_uchar, count: usize) { fill(at, Pattern::U8(value), count, None) }

    fn cuMemsetD16_v2(at: CUdeviceptr, value: c_ushort, count: usize) { fill(at, Pattern::U16(value), count, None) }

    fn cuMemsetD32_v2(at: CUdeviceptr, value: c_uint, count: usize) { fill(at, Pattern::U32(value), count, None) }

    fn cuMemsetD8Async(at: CUdeviceptr, value: c_uchar, count: usize, handle: CUstream) {
        fill(at, Pattern::U8(value), count, Some(handle))
    }

    fn cuMemsetD16Async(at: CUdeviceptr, value: c_ushort, count: usize, handle: CUstream) {
        fill(at, Pattern::U16(value), count, Some(handle))
    }

    fn cuMemsetD32Async(at: CUdeviceptr, value: c_uint, count: usize, handle: CUstream) {
        fill(at, Pattern::U32(value), count, Some(handle))
    }
}
