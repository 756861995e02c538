//! Buffers that the other ranks' kernels reach: their owners and mappings.
//!
//! A rank numbers its registrations itself. Each rank's window has a table of its mappings of the other ranks'
//! registrations: the start of the *allocation*, because CUDA IPC maps whole allocations. A call then names a buffer by
//! number and offset from that start.
//!
//! A registration belongs to an allocation, not to an address. Memory that was freed and allocated again at the same
//! address has another `CU_POINTER_ATTRIBUTE_BUFFER_ID`, is not found here, and goes through slots.
//!
//! Memory that others have mapped must not be freed before they have unmapped it. A dropped registration is no longer
//! used, but its memory is freed only when all ranks next register a buffer, release, or leave.

use std::any::Any;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::{CudaContext, DriverError, result, sys};
use serde::{Deserialize, Serialize};

use crate::driver::cuda;
use crate::window::{Import, Layout, MAX_RANKS, REGISTRATIONS, Window};
use tinynccl_comm::Comm;
use tinynccl_plan::error::{Error, Result};

/// Bits of a buffer's name that hold the offset.
const DISTANCE_BITS: u32 = 48;

/// An allocation of the driver, and its registered parts.
#[derive(Debug, Clone, Copy)]
struct Range {
    id: u16,
    begin: u64,
    bytes: u64,
    /// Begin of the allocation.
    base: u64,
    /// The allocation's identity.
    buffer: u64,
    /// True if every rank reaches the range.
    reached: bool,
}

/// A rank's message to the others about its buffer.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
struct Offer {
    process: u32,
    buffer: Option<Export>,
    /// Ended registrations.
    gone: Vec<u16>,
    /// Why this rank has nothing to offer, if that is an error.
    failed: Option<String>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Export {
    id: u16,
    base: u64,
    begin: u64,
    bytes: u64,
    buffer: u64,
    /// `CUipcMemHandle` of the allocation.
    handle: Vec<u8>,
}

/// A rank's registrations, and its mappings of others.
#[derive(Debug)]
pub(crate) struct Registry {
    context: Arc<CudaContext>,
    rank: usize,
    /// True if other processes may map our memory.
    shared: bool,
    /// True once the ranks have registered a buffer: equal on all of them at the same call.
    used: AtomicBool,
    state: Mutex<State>,
}

/// Owner that frees a registered buffer when it is dropped; `None`: the buffer's user does.
pub(crate) type Owner = Option<Box<dyn Any + Send + Sync>>;

#[derive(Debug, Default)]
struct State {
    ranges: Vec<Range>,
    taken: Vec<bool>,
    /// Dropped, but others may still have them mapped.
    gone: Vec<(u16, Owner)>,
    /// By rank and registration.
    imports: HashMap<(usize, u16), Arc<Import>>,
    /// Exchanges of all ranks for registration so far.
    meetings: u32,
    /// The communicator is gone.
    closed: bool,
    /// The other ranks did not take part, so they may still have our memory mapped.
    lost: bool,
}

/// Part of an allocation that is registered, as long as this exists. Not its owner.
#[derive(Debug)]
pub struct Registration {
    registry: Arc<Registry>,
    id: Option<u16>,
    owner: Owner,
    /// By rank: address and bytes of what it registered in the same call, as our device reaches it.
    places: Vec<Option<(u64, u64)>>,
}

impl Registry {
    pub(crate) fn new(context: &Arc<CudaContext>, rank: usize, shared: bool) -> Arc<Registry> {
        let (context, used, state) = (context.clone(), AtomicBool::new(false), Mutex::default());
        Arc::new(Registry { context, rank, shared, used, state })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[inline]
    pub(crate) fn is_used(&self) -> bool {
        self.used.load(Ordering::Relaxed)
    }

    /// Name of a buffer for other ranks' kernels; 0 if they do not reach it.
    pub(crate) fn remote(&self, at: u64, bytes: u64) -> u64 {
        let state = self.state();
        let holds = |r: &&Range| r.reached && at >= r.begin && at + bytes <= r.begin + r.bytes;
        let mut holding = state.ranges.iter().rev().filter(holds).peekable();
        if holding.peek().is_none() {
            return 0;
        }
        let Ok(buffer) = attribute::<u64>(sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID, at) else {
            return 0;
        };
        let range = holding.find(|r| r.buffer == buffer);
        range.map_or(0, |r| (u64::from(r.id) + 1) << DISTANCE_BITS | (at - r.base))
    }

    /// Enters a buffer that no rank reaches yet. `Ok(None)`: others cannot reach this kind of memory.
    fn enter(&self, at: u64, bytes: u64) -> Result<Option<Range>> {
        let op = "register";
        let failed = |what: &str, e| cuda(op, format!("{what} of {at:#x}"), e);
        if bytes == 0 {
            return Ok(None);
        }
        self.context.bind_to_thread().map_err(|e| failed("the device", e))?;
        let of_device = attribute::<u32>(sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, at)
            .is_ok_and(|kind| kind == sys::CUmemorytype::CU_MEMORYTYPE_DEVICE as u32);
        if !of_device {
            return Err(Error::invalid(op, format!("{at:#x} is not device memory: register memory of cuMemAlloc")));
        }
        let exportable =
            attribute::<u32>(sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, at)
                .map_err(|e| failed("querying the kind", e))?;
        if exportable == 0 {
            log::info!(
                "rank {}: {bytes} bytes at {at:#x} are of a stream-ordered pool or mapped by cuMemMap, which others cannot map: calls \
                 copy them through slots",
                self.rank
            );
            return Ok(None);
        }
        let (mut base, mut length) = (0, 0);
        // SAFETY: writes the two places.
        unsafe { sys::cuMemGetAddressRange_v2(&mut base, &mut length, at) }
            .result()
            .map_err(|e| failed("querying the allocation", e))?;
        if at + bytes > base + length as u64 {
            return Err(Error::invalid(
                op,
                format!("{bytes} bytes at {at:#x} reach beyond their allocation, {length} bytes at {base:#x}"),
            ));
        }
        let buffer = attribute::<u64>(sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID, at)
            .map_err(|e| failed("querying the identity", e))?;
        let mut state = self.state();
        let free = state.taken.iter().position(|&taken| !taken).unwrap_or(state.taken.len());
        if free >= REGISTRATIONS {
            log::warn!("rank {}: {REGISTRATIONS} buffers are registered already: calls copy this one", self.rank);
            return Ok(None);
        }
        if free == state.taken.len() {
            state.taken.push(true);
        } else {
            state.taken[free] = true;
        }
        let range = Range { id: free as u16, begin: at, bytes, base, buffer, reached: false };
        state.ranges.push(range);
        Ok(Some(range))
    }

    fn export(&self, range: &Range) -> Result<Export> {
        let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
        // SAFETY: the begin of an allocation of cuMemAlloc; writes the handle.
        unsafe { sys::cuIpcGetMemHandle(&mut handle, range.base) }
            .result()
            .map_err(|e| cuda("register", format!("exporting the allocation at {:#x}", range.base), e))?;
        Ok(Export {
            id: range.id,
            base: range.base,
            begin: range.begin,
            bytes: range.bytes,
            buffer: range.buffer,
            handle: handle.reserved.iter().map(|&b| b as u8).collect(),
        })
    }

    /// Synchronises with all ranks: maps their new buffers, unmaps their ended ones, and frees ours that no rank maps
    /// any more. `ours`: a buffer to register, or why there is none.
    pub(crate) fn meet(
        self: &Arc<Registry>,
        host: &Comm,
        layout: &Layout,
        window: u64,
        ours: Result<Option<(u64, u64)>>,
    ) -> Result<Registration> {
        let mut failed = None;
        let mut registration = Registration::none(self);
        let entered = ours.and_then(|range| range.map_or(Ok(None), |(at, bytes)| self.enter(at, bytes)));
        let mut offer = Offer { process: std::process::id(), ..Offer::default() };
        if let Ok(Some(range)) = &entered {
            registration.id = Some(range.id);
        }
        match entered.and_then(|range| range.map(|r| self.export(&r)).transpose()) {
            Ok(export) => offer.buffer = export,
            Err(error) => {
                offer.failed = Some(error.to_string());
                failed = Some(error);
            }
        }
        let (released, meeting) = {
            let mut state = self.state();
            state.meetings += 1;
            (std::mem::take(&mut state.gone), state.meetings)
        };
        offer.gone = released.iter().map(|(id, _)| *id).collect();
        let exchanged = host.exchange(&format!("DeviceComm: register {meeting}"), &offer).and_then(|offers| {
            let mapped;
            (mapped, registration.places) = self.map(&offers, layout, window);
            Ok((offers, host.exchange(&format!("DeviceComm: registered {meeting}"), &mapped)?))
        });
        let (offers, all): (Vec<Offer>, Vec<u32>) = match exchanged {
            Ok(both) => both,
            Err(error) => {
                // Others may still have them mapped.
                self.state().gone.extend(released);
                return Err(error);
            }
        };
        // No rank has them mapped now.
        self.forget(released);
        if let Some(error) = failed {
            return Err(error);
        }
        if let Some((rank, text)) = offers.iter().enumerate().find_map(|(r, o)| Some((r, o.failed.as_ref()?))) {
            return Err(Error::invalid("register", format!("rank {rank} has nothing to register: {text}")));
        }
        let reached = all.iter().all(|who| who >> self.rank & 1 == 1);
        if let (Some(id), true) = (registration.id, reached) {
            self.reached(id);
        }
        self.used.store(true, Ordering::Relaxed);
        Ok(registration)
    }

    /// Makes the others' offers reachable. Returns a bit for each rank with which that succeeded, and the places of
    /// their buffers.
    fn map(&self, offers: &[Offer], layout: &Layout, window: u64) -> (u32, Vec<Option<(u64, u64)>>) {
        let mut well = 0u32;
        let mut places = vec![None; offers.len()];
        for (peer, offer) in offers.iter().enumerate() {
            for id in &offer.gone {
                self.state().imports.remove(&(peer, *id));
            }
            let Some(export) = offer.buffer.as_ref().filter(|e| usize::from(e.id) < REGISTRATIONS && e.begin >= e.base)
            else {
                continue;
            };
            let base = if offer.process == std::process::id() { Ok(export.base) } else { self.import(peer, export) };
            let entered = base.and_then(|base| self.write(layout, window, peer, export.id, base).map(|()| base));
            match entered {
                Ok(base) => {
                    well |= 1 << peer;
                    places[peer] = Some((base + (export.begin - export.base), export.bytes));
                }
                Err(error) => log::warn!(
                    "rank {}: a registered buffer of rank {peer} cannot be mapped ({error:?}): calls copy it",
                    self.rank
                ),
            }
        }
        (well, places)
    }

    fn import(&self, peer: usize, export: &Export) -> Result<u64, DriverError> {
        // One mapping per allocation, however many of its parts are registered.
        let same =
            self.state().imports.iter().find_map(|((rank, _), import)| {
                (*rank == peer && import.buffer == export.buffer).then(|| import.clone())
            });
        let import = match same {
            Some(import) => import,
            None => Arc::new(Import::open(&self.context, &export.handle, export.buffer)?),
        };
        let address = import.address;
        self.state().imports.insert((peer, export.id), import);
        Ok(address)
    }

    /// Writes the address of the allocation of `peer`'s registration `id` into the table in `window`.
    fn write(&self, layout: &Layout, window: u64, peer: usize, id: u16, base: u64) -> Result<(), DriverError> {
        self.context.bind_to_thread()?;
        // SAFETY: the place is in the table of a window. No kernel reads it now: no call names this registration before
        // all ranks have it.
        unsafe { result::memcpy_htod_sync(window + layout.registration(peer, id) as u64, &[base]) }?;
        // A copy from pageable memory may still be in progress.
        // SAFETY: the default stream.
        unsafe { result::stream::synchronize(std::ptr::null_mut()) }
    }

    fn reached(&self, id: u16) {
        if let Some(range) = self.state().ranges.iter_mut().find(|r| r.id == id) {
            range.reached = true;
        }
    }

    fn forget(&self, released: Vec<(u16, Owner)>) {
        let mut state = self.state();
        for (id, _) in &released {
            if let Some(taken) = state.taken.get_mut(usize::from(*id)) {
                *taken = false;
            }
        }
        drop(state);
        // Freeing waits for the device.
        drop(released);
    }

    /// Ends a registration; `owner` is dropped when no rank can have the memory mapped.
    fn end(&self, id: u16, owner: Owner) {
        let mut state = self.state();
        state.ranges.retain(|r| r.id != id);
        if state.lost {
            return std::mem::forget(owner);
        }
        state.gone.push((id, owner));
        if !self.shared || state.closed {
            let gone = std::mem::take(&mut state.gone);
            drop(state);
            self.forget(gone);
        }
    }

    /// Unmaps the others' buffers; the caller then synchronises with them before it calls [`Registry::closed`].
    pub(crate) fn leave(&self) {
        let imports = std::mem::take(&mut self.state().imports);
        drop(imports);
    }

    /// The communicator is gone. `met`: no rank has our memory mapped any more; otherwise it stays until the process
    /// ends.
    pub(crate) fn closed(&self, met: bool) {
        let mut state = self.state();
        state.closed = true;
        state.lost = !met;
        state.ranges.clear();
        let gone = std::mem::take(&mut state.gone);
        drop(state);
        match met {
            true => self.forget(gone),
            false => std::mem::forget(gone),
        }
    }
}

/// Registers one buffer of each rank of this process; nothing needs to be mapped. `ranks`: registry, window and buffer
/// of each.
pub(crate) fn register_all(
    layout: &Layout,
    windows: &[u64; MAX_RANKS],
    ranks: &[(&Arc<Registry>, (u64, u64))],
) -> Result<Vec<Registration>> {
    let mut registrations = Vec::new();
    for (registry, (at, bytes)) in ranks {
        let range = registry.enter(*at, *bytes)?;
        let places = ranks.iter().map(|(_, place)| Some(*place)).collect();
        let registration = Registration { registry: (*registry).clone(), id: range.map(|r| r.id), owner: None, places };
        for window in windows.iter().take(ranks.len()) {
            let Some(range) = range else { break };
            registry
                .write(layout, *window, registry.rank, range.id, range.base)
                .map_err(|e| cuda("register", format!("publishing the buffer at {at:#x}"), e))?;
        }
        registrations.push(registration);
    }
    for ((registry, _), registration) in ranks.iter().zip(&registrations) {
        if let Some(id) = registration.id {
            registry.reached(id);
        }
        registry.used.store(true, Ordering::Relaxed);
    }
    Ok(registrations)
}

impl Registration {
    /// A registration of no memory.
    pub(crate) fn none(registry: &Arc<Registry>) -> Registration {
        Registration { registry: registry.clone(), id: None, owner: None, places: Vec::new() }
    }

    /// Gives it what frees the memory: that is dropped when no rank can have the memory mapped any more.
    pub(crate) fn owned_by(mut self, owner: impl Any + Send + Sync) -> Registration {
        self.owner = Some(Box::new(owner));
        self
    }

    /// Address at which our device reaches the buffer that `rank` registered in the same call, and its bytes; `None` if
    /// it does not. It may be used until that rank drops its registration.
    pub fn place(&self, rank: usize) -> Option<(u64, u64)> {
        self.places.get(rank).copied().flatten()
    }

    /// Returns true if kernels of all ranks reach the buffer. If not, calls copy it through slots.
    pub fn is_registered(&self) -> bool {
        let state = self.registry.state();
        self.id.is_some_and(|id| state.ranges.iter().any(|r| r.id == id && r.reached))
    }

    /// Ends the registration of memory that we own. Kernels that use it are waited for.
    pub(crate) fn end(mut self, memory: Window) {
        if let Err(error) = self.registry.context.synchronize() {
            log::debug!("rank {}: a registered buffer is dropped after: {error:?}", self.registry.rank);
        }
        match self.id.take() {
            Some(id) => self.registry.end(id, Some(Box::new(memory))),
            None => drop(memory),
        }
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        if let Some(id) = self.id.take() {
            self.registry.end(id, self.owner.take());
        }
    }
}

/// The driver's information about an address.
fn attribute<T: Default>(which: sys::CUpointer_attribute, at: u64) -> Result<T, DriverError> {
    let mut value = T::default();
    // SAFETY: writes as many bytes as the attribute has; the callers chose `T` accordingly.
    unsafe { sys::cuPointerGetAttribute((&raw mut value).cast(), which, at) }.result()?;
    Ok(value)
}
