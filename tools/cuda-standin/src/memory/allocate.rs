//! The driver's functions that allocate, free and lock memory.

use std::ffi::{c_uint, c_void};
use std::sync::atomic::Ordering;

use cudarc::driver::sys::{CUdeviceptr, CUmemoryPool, CUresult, CUstream};

use super::pool::{POOLS, Pool};
use super::{Allocation, Kind, allocations, beginning, find, release};
use crate::calls::{Answer, ensure, lock, put, put_if_asked};
use crate::capture;
use crate::context::{CONTEXTS, current};
use crate::handles;
use crate::settings;
use crate::stream::stream;
use crate::work::Work;

/// Frees memory when the context's streams are done.
fn free(allocation: &Allocation) -> Answer {
    capture::unsafe_call()?;
    let done = CONTEXTS.get(handles::pointer::<()>(allocation.context)).map_or(Ok(()), |context| context.synchronize());
    release(allocation);
    done
}

fn host(bytes: usize, flags: c_uint) -> Answer<*mut c_void> {
    let context = current()?;
    capture::unsafe_call()?;
    ensure(flags < 8, CUresult::CUDA_ERROR_INVALID_VALUE)?;
    Ok(Allocation::new(&context, Kind::Host, bytes, flags, false)?.content.cast())
}

/// Nothing is at address 0.
fn from_pool(pool: &Pool, bytes: usize, handle: CUstream) -> Answer<CUdeviceptr> {
    let context = current()?;
    let stream = stream(handle)?;
    if bytes == 0 {
        return Ok(0);
    }
    let captured = capture::is_captured(&stream);
    let kind = Kind::Pool(pool.handle);
    ensure(pool.ordinal == context.device.ordinal, CUresult::CUDA_ERROR_INVALID_DEVICE)?;
    Ok(Allocation::new(&context, kind, bytes, 0, captured)?.begin)
}

calls! {
    fn cuMemAlloc_v2(to: *mut CUdeviceptr, bytes: usize) {
        let context = current()?;
        capture::unsafe_call()?;
        put(to, Allocation::new(&context, Kind::Device, bytes, 0, false)?.begin)
    }

    fn cuMemAllocPitch_v2(to: *mut CUdeviceptr, pitch: *mut usize, width: usize, height: usize, element: c_uint) {
        let context = current()?;
        capture::unsafe_call()?;
        ensure(matches!(element, 4 | 8 | 16), CUresult::CUDA_ERROR_INVALID_VALUE)?;
        let row = width.checked_next_multiple_of(512).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        let bytes = row.checked_mul(height).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        put(pitch, row)?;
        put(to, Allocation::new(&context, Kind::Device, bytes, 0, false)?.begin)
    }

    fn cuMemAllocManaged(to: *mut CUdeviceptr, bytes: usize, flags: c_uint) {
        let context = current()?;
        capture::unsafe_call()?;
        ensure(matches!(flags, 1 | 2), CUresult::CUDA_ERROR_INVALID_VALUE)?;
        put(to, Allocation::new(&context, Kind::Managed, bytes, flags, false)?.begin)
    }

    fn cuMemFree_v2(at: CUdeviceptr) {
        current()?;
        if at == 0 {
            return Ok(());
        }
        let allocation = beginning(at)?;
        ensure(allocation.is_of_device(), CUresult::CUDA_ERROR_INVALID_VALUE)?;
        free(&allocation)
    }

    fn cuMemHostAlloc(to: *mut *mut c_void, bytes: usize, flags: c_uint) { put(to, host(bytes, flags)?) }

    fn cuMemAllocHost_v2(to: *mut *mut c_void, bytes: usize) { put(to, host(bytes, 0)?) }

    fn cuMemFreeHost(at: *mut c_void) {
        current()?;
        let allocation = beginning(at.addr() as u64)?;
        ensure(allocation.kind == Kind::Host, CUresult::CUDA_ERROR_INVALID_VALUE)?;
        free(&allocation)
    }

    fn cuMemHostRegister_v2(at: *mut c_void, bytes: usize, flags: c_uint) {
        let context = current()?;
        capture::unsafe_call()?;
        ensure(!at.is_null() && bytes > 0 && flags < 16, CUresult::CUDA_ERROR_INVALID_VALUE)?;
        let begin = at.addr() as u64;
        let end = begin.checked_add(bytes as u64).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        // The last that begins before our end is the only one that can reach into our range or begin in it.
        let before = allocations().range(..end).next_back().map(|(_, one)| one.begin + one.bytes as u64);
        ensure(before.is_none_or(|last| last <= begin), CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED)?;
        Allocation::of_program(&context, at.cast(), bytes, flags);
        Ok(())
    }

    fn cuMemHostUnregister(at: *mut c_void) {
        current()?;
        let unknown = CUresult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
        let allocation = beginning(at.addr() as u64).map_err(|_| unknown)?;
        ensure(allocation.kind == Kind::Registered, unknown)?;
        free(&allocation)
    }

    fn cuMemHostGetDevicePointer_v2(to: *mut CUdeviceptr, at: *mut c_void, flags: c_uint) {
        current()?;
        ensure(flags == 0, CUresult::CUDA_ERROR_INVALID_VALUE)?;
        let at = at.addr() as u64;
        let allocation = find(at).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        ensure(matches!(allocation.kind, Kind::Host | Kind::Registered), CUresult::CUDA_ERROR_INVALID_VALUE)?;
        put(to, at)
    }

    fn cuMemHostGetFlags(to: *mut c_uint, at: *mut c_void) {
        let allocation = find(at.addr() as u64).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        ensure(allocation.kind == Kind::Host, CUresult::CUDA_ERROR_INVALID_VALUE)?;
        put(to, allocation.flags)
    }

    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        let used = current()?.device.used.load(Ordering::Acquire);
        put_if_asked(total, *settings::MEMORY);
        put(free, *settings::MEMORY - used)
    }

    fn cuMemGetAddressRange_v2(begin: *mut CUdeviceptr, bytes: *mut usize, at: CUdeviceptr) {
        current()?;
        let found = find(at).filter(|found| found.is_of_device()).ok_or(CUresult::CUDA_ERROR_NOT_FOUND)?;
        put_if_asked(begin, found.begin);
        put_if_asked(bytes, found.bytes);
        Ok(())
    }

    fn cuMemAllocAsync(to: *mut CUdeviceptr, bytes: usize, handle: CUstream) {
        let pool = lock(&current()?.device.current_pool).clone();
        put(to, from_pool(&pool, bytes, handle)?)
    }

    fn cuMemAllocFromPoolAsync(to: *mut CUdeviceptr, bytes: usize, pool: CUmemoryPool, handle: CUstream) {
        put(to, from_pool(&*POOLS.get(pool)?, bytes, handle)?)
    }

    // Freed when the stream comes there, also if it was not allocated by a stream.
    fn cuMemFreeAsync(at: CUdeviceptr, handle: CUstream) {
        current()?;
        let stream = stream(handle)?;
        if at == 0 {
            return Ok(());
        }
        let allocation = beginning(at)?;
        ensure(allocation.is_of_device(), CUresult::CUDA_ERROR_INVALID_VALUE)?;
        stream.enqueue(if allocation.of_graph { Work::Nothing } else { Work::Free(allocation) })
    }
}
