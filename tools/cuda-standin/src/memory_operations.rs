//! Stream memory operations: waits for words of memory, and writes of them.

use std::ffi::c_uint;

use cudarc::driver::sys::{
    CUdeviceptr, CUflushGPUDirectRDMAWritesScope, CUflushGPUDirectRDMAWritesTarget, CUresult, CUstream,
    CUstreamBatchMemOpParams, CUstreamBatchMemOpType,
};

use crate::calls::{Answer, ensure};
use crate::context::current;
use crate::memory::Place;
use crate::stream::stream;
use crate::work::{Comparison, Word, Work};

/// `CU_STREAM_WAIT_VALUE_FLUSH`: nothing to flush, as no writes of RDMA are under way here.
const FLUSH: c_uint = 1 << 30;

fn place(at: CUdeviceptr, word: Word) -> Answer<Place> {
    ensure(at.is_multiple_of(word.bytes() as u64), CUresult::CUDA_ERROR_INVALID_VALUE)?;
    Place::of_memory(at, word.bytes())
}

fn wait(at: CUdeviceptr, word: Word, flags: c_uint) -> Answer<Work> {
    let until = match flags & !FLUSH {
        0 => Comparison::GreaterOrEqual,
        1 => Comparison::Equal,
        2 => Comparison::And,
        3 => Comparison::Nor,
        _ => return Err(CUresult::CUDA_ERROR_INVALID_VALUE),
    };
    Ok(Work::Wait { at: place(at, word)?, word, until })
}

/// Without the memory barrier (flag 1) it has one all the same.
fn write(at: CUdeviceptr, word: Word, flags: c_uint) -> Answer<Work> {
    ensure(flags <= 1, CUresult::CUDA_ERROR_INVALID_VALUE)?;
    Ok(Work::Write { at: place(at, word)?, word })
}

/// # Safety
/// The parameters must be those of the operation that `one.operation` names.
unsafe fn operation(one: &CUstreamBatchMemOpParams) -> Answer<Work> {
    use CUstreamBatchMemOpType as T;
    // SAFETY: every member begins with the operation, which selects the member.
    unsafe {
        match one.operation {
            T::CU_STREAM_MEM_OP_WAIT_VALUE_32 => {
                let wait32 = one.waitValue;
                wait(wait32.address, Word::U32(wait32.__bindgen_anon_1.value), wait32.flags)
            }
            T::CU_STREAM_MEM_OP_WAIT_VALUE_64 => {
                let wait64 = one.waitValue;
                wait(wait64.address, Word::U64(wait64.__bindgen_anon_1.value64), wait64.flags)
            }
            T::CU_STREAM_MEM_OP_WRITE_VALUE_32 => {
                let write32 = one.writeValue;
                write(write32.address, Word::U32(write32.__bindgen_anon_1.value), write32.flags)
            }
            T::CU_STREAM_MEM_OP_WRITE_VALUE_64 => {
                let write64 = one.writeValue;
                write(write64.address, Word::U64(write64.__bindgen_anon_1.value64), write64.flags)
            }
            T::CU_STREAM_MEM_OP_BARRIER => Ok(Work::Nothing),
            _ => Err(CUresult::CUDA_ERROR_NOT_SUPPORTED),
        }
    }
}

calls! {
    fn cuStreamWaitValue32_v2(handle: CUstream, at: CUdeviceptr, value: u32, flags: c_uint) {
        current()?;
        stream(handle)?.enqueue(wait(at, Word::U32(value), flags)?)
    }

    fn cuStreamWaitValue64_v2(handle: CUstream, at: CUdeviceptr, value: u64, flags: c_uint) {
        current()?;
        stream(handle)?.enqueue(wait(at, Word::U64(value), flags)?)
    }

    fn cuStreamWriteValue32_v2(handle: CUstream, at: CUdeviceptr, value: u32, flags: c_uint) {
        current()?;
        stream(handle)?.enqueue(write(at, Word::U32(value), flags)?)
    }

    fn cuStreamWriteValue64_v2(handle: CUstream, at: CUdeviceptr, value: u64, flags: c_uint) {
        current()?;
        stream(handle)?.enqueue(write(at, Word::U64(value), flags)?)
    }

    fn cuStreamBatchMemOp_v2(handle: CUstream, count: c_uint, list: *mut CUstreamBatchMemOpParams, flags: c_uint) {
        current()?;
        ensure(flags == 0 && count <= 256 && !list.is_null(), CUresult::CUDA_ERROR_INVALID_VALUE)?;
        let stream = stream(handle)?;
        // All or none.
        let work: Vec<Work> =
            std::slice::from_raw_parts(list, count as usize).iter().map(|one| operation(one)).collect::<Answer<_>>()?;
        work.into_iter().try_for_each(|one| stream.enqueue(one))
    }

    fn cuFlushGPUDirectRDMAWrites(_: CUflushGPUDirectRDMAWritesTarget, _: CUflushGPUDirectRDMAWritesScope) {
        Err(cudarc::driver::sys::CUresult::CUDA_ERROR_NOT_SUPPORTED)
    }
}
