//! Memory: `ncclMemAlloc`, which windows of all ranks can register, and `ncclCommRegister`, a hint.

use std::collections::{BTreeMap, HashMap};
use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use cudarc::driver::{CudaContext, DriverError, result};

use tinynccl::cuda::Uncaptured;

use crate::abi::error::{Error, Result};
use crate::abi::export::{export, out};
use crate::comm::gpu::{self, Current};
use crate::comm::handle::{Handle, handle};

/// An allocation is a multiple of this, so that it begins at one: the driver cuts smaller ones out of common blocks of
/// this size, at addresses that no window may have.
const GRANULARITY: usize = 2 << 20;

/// An allocation of `cuMemAlloc`, the kind that CUDA's inter-process handles can export. Freed when neither the caller
/// nor a window's registration needs it any more.
#[derive(Debug)]
pub(crate) struct Memory {
    context: Arc<CudaContext>,
    address: u64,
}

impl Drop for Memory {
    fn drop(&mut self) {
        let Ok(_current) = Current::enter(&self.context) else { return };
        let _uncaptured = Uncaptured::begin();
        // SAFETY: of `allocate`, freed once; its callers have given it back.
        if let Err(error) = unsafe { result::free_sync(self.address) } {
            log::debug!("freeing memory of ncclMemAlloc at {:#x}: {error:?}", self.address);
        }
    }
}

type Allocations = BTreeMap<u64, (usize, Arc<Memory>)>;

fn allocations() -> MutexGuard<'static, Allocations> {
    static ALL: Mutex<Allocations> = Mutex::new(BTreeMap::new());
    ALL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The allocation of `ncclMemAlloc` that an address is in.
pub(crate) fn owner(address: u64) -> Option<Arc<Memory>> {
    let all = allocations();
    let (begin, (bytes, memory)) = all.range(..=address).next_back()?;
    (address < begin + *bytes as u64).then(|| memory.clone())
}

fn allocate(bytes: usize) -> Result<u64> {
    let context = gpu::context(gpu::current()?)?;
    let rounded = bytes.checked_next_multiple_of(GRANULARITY);
    let rounded = rounded.ok_or_else(|| Error::argument(format!("size is {bytes}, more than memory holds")))?;
    let failed = |e: DriverError| Error::cuda(format!("allocating {rounded} bytes of GPU {}", context.ordinal()), e);
    let (_current, _uncaptured) = (Current::enter(&context)?, Uncaptured::begin());
    // SAFETY: allocates; freed by the memory's drop.
    let address = unsafe { result::malloc_sync(rounded) }.map_err(failed)?;
    let memory = Memory { context: context.clone(), address };
    allocations().insert(address, (rounded, Arc::new(memory)));
    Ok(address)
}

/// Buffers that `ncclCommRegister` has announced, by handle.
type Announced = HashMap<usize, (usize, u64, usize)>;

fn announced() -> MutexGuard<'static, Announced> {
    static ALL: LazyLock<Mutex<Announced>> = LazyLock::new(Mutex::default);
    ALL.lock().unwrap_or_else(PoisonError::into_inner)
}

export! {
    /// Allocates memory of the current GPU, which windows can register; `*ptr` begins at a multiple of 4096. It may be
    /// longer than `size`.
    fn ncclMemAlloc / pncclMemAlloc [] (ptr: *mut *mut c_void, size: usize) {
        // SAFETY: NULL or the caller's variable.
        let ptr = unsafe { out("ptr", ptr) }?;
        *ptr = if size == 0 { std::ptr::null_mut() } else { allocate(size)? as *mut c_void };
        Ok(())
    }

    /// Frees memory of `ncclMemAlloc`, at once or as soon as no rank has it mapped.
    fn ncclMemFree / pncclMemFree [] (ptr: *mut c_void) {
        let taken = allocations().remove(&(ptr as u64));
        match taken {
            // Outside of the lock: freeing waits for the device.
            Some(memory) => drop(memory),
            None if ptr.is_null() => {}
            None => return Err(Error::argument(format!(
                "ptr is {ptr:p}, expected an address that ncclMemAlloc returned and that is not freed"
            ))),
        }
        Ok(())
    }

    /// Announces a buffer that calls will use often. A hint: ranks need not agree, so no rank can map the others'
    /// buffers here. Calls use a window's memory without copies.
    fn ncclCommRegister / pncclCommRegister [comm] (
        comm: Handle, buff: *mut c_void, size: usize, registered: *mut *mut c_void
    ) {
        // SAFETY: NULL or the caller's variable.
        let registered = unsafe { out("handle", registered) }?;
        handle(comm)?;
        if buff.is_null() || size == 0 {
            return Err(Error::argument(format!("buff is {buff:p} of {size} bytes, expected memory of the GPU")));
        }
        static NEXT: AtomicUsize = AtomicUsize::new(1);
        // Not an address, and never one that was given out before.
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        announced().insert(number, (comm as usize, buff as u64, size));
        *registered = number as *mut c_void;
        Ok(())
    }

    /// Ends what `ncclCommRegister` began; NULL does nothing.
    fn ncclCommDeregister / pncclCommDeregister [comm] (comm: Handle, registered: *mut c_void) {
        handle(comm)?;
        let mut all = announced();
        match all.get(&(registered as usize)) {
            Some((owner, ..)) if *owner == comm as usize => {
                all.remove(&(registered as usize));
            }
            _ if registered.is_null() => {}
            _ => return Err(Error::usage(format!(
                "handle is {registered:p}, expected one that ncclCommRegister gave for this communicator and that is \
                 not ended"
            ))),
        }
        Ok(())
    }
}
