//! The driver's functions for streams.

use std::ffi::{c_int, c_uint, c_void};

use cudarc::driver::sys::{CUcontext, CUdeviceptr, CUhostFn, CUresult, CUstream, CUstreamCallback};

use crate::calls::{ensure, lock, put};
use crate::capture;
use crate::context::{GREATEST_PRIORITY, current};
use crate::handles;
use crate::stream::{Kind, STREAMS, Stream, stream};
use crate::work::{Data, Work};

unsafe fn create(to: *mut CUstream, flags: c_uint, priority: c_int) -> crate::calls::Answer {
    let kind = match flags {
        0 => Kind::Blocking,
        1 => Kind::NonBlocking,
        _ => return Err(CUresult::CUDA_ERROR_INVALID_VALUE),
    };
    let stream = Stream::new(&current()?, kind, priority.clamp(GREATEST_PRIORITY, 0));
    STREAMS.insert(stream.handle, stream.clone());
    // SAFETY: forwarded.
    unsafe { put(to, handles::pointer(stream.handle)) }
}

calls! {
    fn cuStreamCreate(to: *mut CUstream, flags: c_uint) { create(to, flags, 0) }

    fn cuStreamCreateWithPriority(to: *mut CUstream, flags: c_uint, priority: c_int) { create(to, flags, priority) }

    fn cuStreamDestroy_v2(handle: CUstream) {
        ensure(handle.addr() > 2, CUresult::CUDA_ERROR_INVALID_VALUE)?;
        let stream = STREAMS.remove(handle)?;
        if let Some(joined) = lock(&stream.capture).take() {
            joined.invalidate();
        }
        stream.close();
        Ok(())
    }

    fn cuStreamSynchronize(handle: CUstream) {
        let stream = stream(handle)?;
        capture::not_captured(&stream)?;
        capture::unsafe_call()?;
        stream.synchronize()
    }

    fn cuStreamQuery(handle: CUstream) {
        let stream = stream(handle)?;
        capture::not_captured(&stream)?;
        capture::unsafe_call()?;
        stream.query()
    }

    fn cuStreamGetFlags(handle: CUstream, to: *mut c_uint) {
        put(to, c_uint::from(stream(handle)?.kind == Kind::NonBlocking))
    }

    fn cuStreamGetPriority(handle: CUstream, to: *mut c_int) { put(to, stream(handle)?.priority) }

    fn cuStreamGetCtx(handle: CUstream, to: *mut CUcontext) {
        put(to, handles::pointer(stream(handle)?.context()?.handle))
    }

    fn cuStreamGetId(handle: CUstream, to: *mut u64) { put(to, stream(handle)?.handle as u64) }

    fn cuLaunchHostFunc(handle: CUstream, function: CUhostFn, data: *mut c_void) {
        current()?;
        let function = function.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        stream(handle)?.enqueue(Work::Host(function, Data(data)))
    }

    fn cuStreamAddCallback(handle: CUstream, function: CUstreamCallback, data: *mut c_void, flags: c_uint) {
        current()?;
        ensure(flags == 0, CUresult::CUDA_ERROR_INVALID_VALUE)?;
        let function = function.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        let stream = stream(handle)?;
        capture::not_captured(&stream)?;
        stream.enqueue(Work::Callback(function, handle.addr(), Data(data)))
    }

    // All memory is visible to all streams.
    fn cuStreamAttachMemAsync(handle: CUstream, _: CUdeviceptr, _: usize, _: c_uint) {
        stream(handle)?.enqueue(Work::Nothing)
    }
}
