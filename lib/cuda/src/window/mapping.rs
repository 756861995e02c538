//! Device memory that is created and mapped explicitly (`cuMemCreate`): another process maps it by a file descriptor.
//!
//! It is the newer of CUDA's two interfaces. The older one, `cuIpcGetMemHandle`, needs no descriptor passing, but some
//! virtual machines and integrated GPUs lack it.

use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use cudarc::driver::{CudaContext, DriverError, sys};

use crate::driver::{devices, reaches};

const DESCRIPTOR: sys::CUmemAllocationHandleType =
    sys::CUmemAllocationHandleType_enum::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// Memory of a device, and its address in this process. Each mapping keeps it alive.
#[derive(Debug)]
pub(crate) struct Mapping {
    context: Arc<CudaContext>,
    pub(crate) address: sys::CUdeviceptr,
    bytes: usize,
    handle: sys::CUmemGenericAllocationHandle,
}

impl Mapping {
    /// At least `bytes` bytes of the context's device, for all devices of this process that can reach it.
    pub(crate) fn create(context: &Arc<CudaContext>, bytes: usize) -> Result<Mapping, DriverError> {
        context.bind_to_thread()?;
        let own = context.cu_device();
        // SAFETY: a structure of numbers and a pointer that may be null.
        let mut wanted: sys::CUmemAllocationProp = unsafe { std::mem::zeroed() };
        wanted.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        wanted.requestedHandleTypes = DESCRIPTOR;
        wanted.location = location(own);
        let bytes = bytes.next_multiple_of(granularity(&wanted)?);
        let mut handle = 0;
        // SAFETY: writes the handle.
        unsafe { sys::cuMemCreate(&mut handle, bytes, &wanted, 0) }.result()?;
        let mut users = vec![own];
        for other in devices()? {
            if other != own && reaches(other, own)? {
                users.push(other);
            }
        }
        Self::map(context, handle, bytes, &users)
    }

    /// The memory behind a descriptor of another process; `bytes` as its owner requested.
    pub(crate) fn import(
        context: &Arc<CudaContext>,
        descriptor: BorrowedFd<'_>,
        bytes: usize,
    ) -> Result<Mapping, DriverError> {
        context.bind_to_thread()?;
        let mut handle = 0;
        let os = descriptor.as_raw_fd() as usize as *mut std::ffi::c_void;
        // SAFETY: the driver takes the number of a descriptor as a pointer, and checks it; writes the handle.
        unsafe { sys::cuMemImportFromShareableHandle(&mut handle, os, DESCRIPTOR) }.result()?;
        // SAFETY: as in `create`.
        let mut theirs: sys::CUmemAllocationProp = unsafe { std::mem::zeroed() };
        // SAFETY: writes the properties, of the device that has the memory.
        let known = unsafe { sys::cuMemGetAllocationPropertiesFromHandle(&mut theirs, handle) }.result();
        match known.and_then(|()| granularity(&theirs)) {
            Ok(granularity) => Self::map(context, handle, bytes.next_multiple_of(granularity), &[context.cu_device()]),
            Err(error) => {
                release(handle);
                Err(error)
            }
        }
    }

    /// For another process.
    pub(crate) fn export(&self) -> Result<OwnedFd, DriverError> {
        let mut descriptor: std::ffi::c_int = -1;
        // SAFETY: writes a descriptor, which we then own.
        unsafe { sys::cuMemExportToShareableHandle((&raw mut descriptor).cast(), self.handle, DESCRIPTOR, 0) }
            .result()?;
        // SAFETY: just made, and owned by no one else.
        Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
    }

    /// Takes `handle` over, also when it fails.
    fn map(
        context: &Arc<CudaContext>,
        handle: sys::CUmemGenericAllocationHandle,
        bytes: usize,
        users: &[sys::CUdevice],
    ) -> Result<Mapping, DriverError> {
        let mut address = 0;
        // SAFETY: reserves addresses and writes their begin.
        if let Err(error) = unsafe { sys::cuMemAddressReserve(&mut address, bytes, 0, 0, 0) }.result() {
            release(handle);
            return Err(error);
        }
        // SAFETY: into addresses that were just reserved.
        if let Err(error) = unsafe { sys::cuMemMap(address, bytes, 0, handle, 0) }.result() {
            // SAFETY: reserved above; nothing is mapped there.
            if let Err(other) = unsafe { sys::cuMemAddressFree(address, bytes) }.result() {
                log::debug!("giving back addresses: {other:?}");
            }
            release(handle);
            return Err(error);
        }
        let mapping = Mapping { context: context.clone(), address, bytes, handle };
        let flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        let access: Vec<_> =
            users.iter().map(|&user| sys::CUmemAccessDesc { location: location(user), flags }).collect();
        // SAFETY: reads the list; the addresses are mapped.
        unsafe { sys::cuMemSetAccess(address, bytes, access.as_ptr(), access.len()) }.result()?;
        Ok(mapping)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_err() {
            return;
        }
        // SAFETY: mapped and reserved by `map`. The owner drops this only when no kernel uses it any more.
        let gone = unsafe {
            sys::cuMemUnmap(self.address, self.bytes)
                .result()
                .and_then(|()| sys::cuMemAddressFree(self.address, self.bytes).result())
        };
        if let Err(error) = gone {
            log::debug!("unmapping memory of a device: {error:?}");
        }
        release(self.handle);
    }
}

fn release(handle: sys::CUmemGenericAllocationHandle) {
    // SAFETY: a handle of `create` or `import`, given back once.
    if let Err(error) = unsafe { sys::cuMemRelease(handle) }.result() {
        log::debug!("giving back memory of a device: {error:?}");
    }
}

fn location(device: sys::CUdevice) -> sys::CUmemLocation {
    sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: device }
}

fn granularity(of: &sys::CUmemAllocationProp) -> Result<usize, DriverError> {
    let mut bytes = 0;
    let which = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
    // SAFETY: writes the number.
    unsafe { sys::cuMemGetAllocationGranularity(&mut bytes, of, which) }.result()?;
    Ok(bytes.max(1))
}
