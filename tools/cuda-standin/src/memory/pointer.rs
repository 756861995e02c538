//! Attributes of pointers: the memory that an address belongs to.

use std::ffi::{c_int, c_uint, c_void};

use cudarc::driver::sys::{CUdeviceptr, CUmemorytype, CUpointer_attribute as Attribute, CUresult};

use super::{Allocation, Kind, find};
use crate::calls::{Answer, ensure, put};
use crate::context::{Context, current};
use crate::handles;

/// Ordinal of the device of memory that CUDA does not know.
const NO_DEVICE: c_int = -2;

/// Writes an attribute of an address.
///
/// # Safety
/// `to` must hold the attribute's type.
unsafe fn tell(context: &Context, memory: &Allocation, attribute: Attribute, at: u64, to: *mut c_void) -> Answer {
    use Attribute as A;
    let of_host = matches!(memory.kind, Kind::Host | Kind::Registered);
    let invalid = Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    // SAFETY: of the attribute's type.
    unsafe {
        match attribute {
            A::CU_POINTER_ATTRIBUTE_CONTEXT => put(to.cast(), handles::pointer::<()>(memory.context)),
            A::CU_POINTER_ATTRIBUTE_MEMORY_TYPE => put(
                to.cast(),
                if of_host { CUmemorytype::CU_MEMORYTYPE_HOST } else { CUmemorytype::CU_MEMORYTYPE_DEVICE } as u32,
            ),
            A::CU_POINTER_ATTRIBUTE_DEVICE_POINTER => {
                let reached =
                    of_host || memory.kind == Kind::Managed || memory.device.ordinal == context.device.ordinal;
                if reached { put(to.cast(), at) } else { invalid }
            }
            A::CU_POINTER_ATTRIBUTE_HOST_POINTER => {
                if of_host || memory.kind == Kind::Managed {
                    put(to.cast(), at)
                } else {
                    invalid
                }
            }
            A::CU_POINTER_ATTRIBUTE_SYNC_MEMOPS => put(to.cast(), 0u32),
            A::CU_POINTER_ATTRIBUTE_BUFFER_ID => put(to.cast(), memory.id),
            A::CU_POINTER_ATTRIBUTE_IS_MANAGED => put(to.cast(), u32::from(memory.kind == Kind::Managed)),
            A::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL => put(to.cast(), memory.device.ordinal as c_int),
            // Booleans: the caller may have one byte for them, or four that are zero.
            A::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE | A::CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE => {
                put(to.cast(), 0u8)
            }
            A::CU_POINTER_ATTRIBUTE_MAPPED => put(to.cast(), 1u8),
            A::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR => put(to.cast(), memory.begin),
            A::CU_POINTER_ATTRIBUTE_RANGE_SIZE => put(to.cast(), memory.bytes),
            A::CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES => put(to.cast(), 0u64),
            A::CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE => {
                let pool = if let Kind::Pool(handle) = memory.kind { handle } else { 0 };
                put(to.cast(), handles::pointer::<()>(pool))
            }
            _ => Err(CUresult::CUDA_ERROR_NOT_SUPPORTED),
        }
    }
}

/// Writes the value that `cuPointerGetAttributes` has for an attribute that the address lacks.
///
/// # Safety
/// As [`tell`].
unsafe fn tell_nothing(attribute: Attribute, to: *mut c_void) -> Answer {
    use Attribute as A;
    // SAFETY: of the attribute's type.
    unsafe {
        match attribute {
            A::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL => put(to.cast(), NO_DEVICE),
            A::CU_POINTER_ATTRIBUTE_MEMORY_TYPE
            | A::CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
            | A::CU_POINTER_ATTRIBUTE_IS_MANAGED => put(to.cast(), 0u32),
            A::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
            | A::CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE
            | A::CU_POINTER_ATTRIBUTE_MAPPED => put(to.cast(), 0u8),
            _ => put(to.cast(), 0u64),
        }
    }
}

calls! {
    fn cuPointerGetAttribute(to: *mut c_void, attribute: Attribute, at: CUdeviceptr) {
        let context = current()?;
        let memory = find(at).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        tell(&context, &memory, attribute, at, to)
    }

    // Never fails because of the address.
    fn cuPointerGetAttributes(count: c_uint, attributes: *mut Attribute, to: *mut *mut c_void, at: CUdeviceptr) {
        let context = current()?;
        ensure(!attributes.is_null() && !to.is_null(), CUresult::CUDA_ERROR_INVALID_VALUE)?;
        let memory = find(at);
        for i in 0..count as usize {
            let (attribute, to) = (*attributes.add(i), *to.add(i));
            let told = memory.as_ref().is_some_and(|memory| tell(&context, memory, attribute, at, to).is_ok());
            if !told {
                tell_nothing(attribute, to)?;
            }
        }
        Ok(())
    }

    // Copies are synchronous enough: nothing reads the memory behind the driver's back.
    fn cuPointerSetAttribute(_: *const c_void, attribute: Attribute, at: CUdeviceptr) {
        current()?;
        find(at).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        ensure(attribute == Attribute::CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, CUresult::CUDA_ERROR_INVALID_VALUE)
    }
}
