//! Memory: allocations of all kinds, by address.
//!
//! The addresses of device memory are reserved in this process and not accessible. The bytes are elsewhere, and only
//! streams get at them. Page-locked and managed memory lies where programs see it.

mod allocate;
mod copies;
mod pointer;
mod pool;

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use cudarc::driver::sys::{CUdeviceptr, CUresult};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use crate::calls::{Answer, ensure};
use crate::context::Context;
use crate::device::Device;

pub(crate) use pool::Pool;

/// Bytes of addresses behind device memory that belong to no allocation, so that an access past its end is found out.
const GUARD: usize = 2 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Device,
    /// Device memory of a pool, by its handle.
    Pool(usize),
    Managed,
    /// Page-locked by us.
    Host,
    /// The program's, page-locked.
    Registered,
}

/// Memory that CUDA knows of.
pub(crate) struct Allocation {
    kind: Kind,
    device: &'static Device,
    context: usize,
    begin: u64,
    bytes: usize,
    /// Never that of another allocation.
    id: u64,
    flags: u32,
    /// True for memory that was allocated in a capture, which `cuMemFreeAsync` does not free.
    of_graph: bool,
    /// Address of the first byte.
    content: *mut u8,
    freed: AtomicBool,
    _mappings: Vec<Mapping>,
}

// SAFETY: `content` is memory that only streams and the owner access.
unsafe impl Send for Allocation {}
// SAFETY: as above.
unsafe impl Sync for Allocation {}

/// Pages of this process.
struct Mapping {
    at: *mut c_void,
    bytes: usize,
}

impl Mapping {
    fn new(bytes: usize, access: ProtFlags) -> Answer<Mapping> {
        let bytes = bytes.checked_next_multiple_of(4096).ok_or(CUresult::CUDA_ERROR_OUT_OF_MEMORY)?;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: new pages, where nothing is mapped.
        let at = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, access, flags) };
        Ok(Mapping { at: at.map_err(|_| CUresult::CUDA_ERROR_OUT_OF_MEMORY)?, bytes })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`. Work that uses it holds the allocation, and so this.
        let _ = unsafe { munmap(self.at, self.bytes) };
    }
}

/// All allocations, by their first address.
static ALLOCATIONS: RwLock<BTreeMap<u64, Arc<Allocation>>> = RwLock::new(BTreeMap::new());

fn allocations() -> RwLockReadGuard<'static, BTreeMap<u64, Arc<Allocation>>> {
    ALLOCATIONS.read().unwrap_or_else(PoisonError::into_inner)
}

fn allocations_mut() -> RwLockWriteGuard<'static, BTreeMap<u64, Arc<Allocation>>> {
    ALLOCATIONS.write().unwrap_or_else(PoisonError::into_inner)
}

/// The allocation around an address.
fn find(at: u64) -> Option<Arc<Allocation>> {
    let allocations = allocations();
    let (_, found) = allocations.range(..=at).next_back()?;
    (at - found.begin < found.bytes as u64).then(|| found.clone())
}

/// The allocation that begins there.
fn beginning(at: u64) -> Answer<Arc<Allocation>> {
    allocations().get(&at).cloned().ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)
}

impl Allocation {
    /// New memory of a context's device.
    fn new(context: &Context, kind: Kind, bytes: usize, flags: u32, of_graph: bool) -> Answer<Arc<Allocation>> {
        ensure(bytes > 0, CUresult::CUDA_ERROR_INVALID_VALUE)?;
        let content = Mapping::new(bytes, ProtFlags::READ | ProtFlags::WRITE)?;
        let at = content.at.cast::<u8>();
        let (begin, mappings) = match kind {
            Kind::Device | Kind::Pool(_) => {
                let guarded = bytes.checked_add(GUARD).ok_or(CUresult::CUDA_ERROR_OUT_OF_MEMORY)?;
                let reserved = Mapping::new(guarded, ProtFlags::empty())?;
                (reserved.at.addr(), vec![content, reserved])
            }
            _ => (at.addr(), vec![content]),
        };
        let made = Self::of(context, kind, (begin as u64, at), bytes, flags, of_graph, mappings);
        if made.is_of_device() {
            context.device.take(bytes)?;
        }
        Ok(made.enter())
    }

    /// The program's memory.
    fn of_program(context: &Context, at: *mut u8, bytes: usize, flags: u32) -> Arc<Allocation> {
        Self::of(context, Kind::Registered, (at.addr() as u64, at), bytes, flags, false, Vec::new()).enter()
    }

    fn of(
        context: &Context,
        kind: Kind,
        (begin, content): (u64, *mut u8),
        bytes: usize,
        flags: u32,
        of_graph: bool,
        mappings: Vec<Mapping>,
    ) -> Allocation {
        static NUMBER: AtomicU64 = AtomicU64::new(1);
        let (id, freed) = (NUMBER.fetch_add(1, Ordering::Relaxed), AtomicBool::new(false));
        let (device, context) = (context.device, context.handle);
        Allocation { kind, device, context, begin, bytes, id, flags, of_graph, content, freed, _mappings: mappings }
    }

    fn enter(self) -> Arc<Allocation> {
        let made = Arc::new(self);
        allocations_mut().insert(made.begin, made.clone());
        made
    }

    fn is_of_device(&self) -> bool {
        matches!(self.kind, Kind::Device | Kind::Pool(_) | Kind::Managed)
    }
}

/// Frees it. Work that holds it keeps the pages, and finds out.
pub(crate) fn release(allocation: &Allocation) {
    if allocation.freed.swap(true, Ordering::AcqRel) {
        return;
    }
    // The pages go without the lock.
    let _entry = allocations_mut().remove(&allocation.begin);
    if allocation.is_of_device() {
        allocation.device.used.fetch_sub(allocation.bytes, Ordering::AcqRel);
    }
}

/// Frees what is left of a context.
pub(crate) fn forget(context: &Context) {
    let left: Vec<_> = allocations().values().filter(|one| one.context == context.handle).cloned().collect();
    left.iter().for_each(|one| release(one));
}

/// Memory that an operation reads or writes, with its owner.
#[derive(Clone)]
pub(crate) struct Place {
    at: *mut u8,
    owner: Owner,
}

#[derive(Clone)]
enum Owner {
    /// Memory that CUDA knows.
    Memory(Arc<Allocation>),
    /// Bytes that were the program's.
    Held(#[expect(dead_code, reason = "keeps them")] Arc<[u8]>),
    /// Pageable memory of the program.
    Program,
}

// SAFETY: an address, used by the stream's thread as the program asked.
unsafe impl Send for Place {}
// SAFETY: as above.
unsafe impl Sync for Place {}

impl Place {
    /// `bytes` from an address on, of memory that CUDA knows.
    pub(crate) fn of_memory(at: CUdeviceptr, bytes: usize) -> Answer<Place> {
        let allocation = find(at).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        let offset = (at - allocation.begin) as usize;
        ensure(bytes <= allocation.bytes - offset, CUresult::CUDA_ERROR_INVALID_VALUE)?;
        Ok(Place { at: allocation.content.wrapping_add(offset), owner: Owner::Memory(allocation) })
    }

    fn of_program(at: *mut u8) -> Place {
        Place { at, owner: Owner::Program }
    }

    /// A copy of the program's memory.
    ///
    /// # Safety
    /// `at` must be readable for `bytes`.
    unsafe fn held(at: *const u8, bytes: usize) -> Place {
        // SAFETY: readable, as the caller guarantees.
        let held: Arc<[u8]> = unsafe { std::slice::from_raw_parts(at, bytes) }.into();
        Place { at: held.as_ptr().cast_mut(), owner: Owner::Held(held) }
    }

    fn is_pageable(&self) -> bool {
        matches!(self.owner, Owner::Program)
    }

    fn is_of_device(&self) -> bool {
        matches!(&self.owner, Owner::Memory(memory) if matches!(memory.kind, Kind::Device | Kind::Pool(_)))
    }

    pub(crate) fn at(&self) -> *mut u8 {
        self.at
    }

    /// An error if it was freed meanwhile.
    pub(crate) fn check(&self) -> Answer {
        match &self.owner {
            Owner::Memory(memory) => {
                ensure(!memory.freed.load(Ordering::Acquire), CUresult::CUDA_ERROR_ILLEGAL_ADDRESS)
            }
            _ => Ok(()),
        }
    }
}
