//! An open RDMA device, and the objects that are created from it.

use std::fmt;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;

use crate::device::{Device, PortInfo, is_link_local};
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::memory::{
    Access, Backing, GpuMemory, MAX_REGIONS, MAX_WINDOWS, Mapping, Region, WindowKind, is_accessible, is_dmabuf,
};
use crate::path::{Gid, Path};
use crate::qp::MAX_RD_ATOMIC;
use crate::queue::event::Events;
use crate::queue::{AsyncEvent, CompChannel, Cq, Srq};
use crate::sync::{read, write};

/// Limits of an RDMA device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Queue pairs.
    pub qps: u32,
    /// Requests in a queue.
    pub work_requests: u32,
    /// Elements of a request.
    pub sges: u32,
    /// Completions in a queue.
    pub completions: u32,
    /// Inline bytes of a request.
    pub inline: u32,
    /// READs and atomics under way in a queue pair, in either direction.
    pub rd_atomic: u8,
    /// Bytes of a message.
    pub message: u32,
    /// Memory regions.
    pub regions: u32,
    /// Memory windows.
    pub windows: u32,
}

/// The limits of every RDMA device.
pub const LIMITS: Limits = Limits {
    qps: 1 << crate::engine::slot::INDEX_BITS,
    work_requests: 1 << 16,
    sges: 32,
    completions: 1 << 22,
    inline: 1024,
    rd_atomic: MAX_RD_ATOMIC,
    message: 1 << 31,
    regions: MAX_REGIONS as u32,
    windows: MAX_WINDOWS as u32,
};

/// An open RDMA device. All contexts of a device in a process share its engine; each has its own events.
pub struct Context {
    device: Device,
    pub(crate) engine: Arc<Engine>,
    pub(crate) events: Arc<Events>,
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context").field("device", &self.device).finish_non_exhaustive()
    }
}

impl Device {
    /// Opens the RDMA device.
    ///
    /// # Errors
    /// `EADDRINUSE` where something else has UDP port 4791, `ENOSPC` where all RDMA devices of the host are taken, and
    /// what else the system refuses.
    pub fn open(&self) -> Result<Arc<Context>> {
        Context::open(self)
    }
}

impl Context {
    pub(crate) fn open(device: &Device) -> Result<Arc<Context>> {
        let addresses: Vec<_> = device.addresses().into_iter().flatten().collect();
        let engine = Engine::of(device.interface(), device.index, &addresses)?;
        let events = Arc::new(Events::new()?);
        engine.shared.tell(&events, device.gids.clone());
        Ok(Arc::new(Context { device: device.clone(), engine, events }))
    }

    /// Returns true in the process that opened it, and false in a child of that process.
    #[must_use]
    pub fn is_here(&self) -> bool {
        self.check_here().is_ok()
    }

    /// Fails with `EINVAL` in a child of the process that opened it, as most calls on what a child inherits do.
    ///
    /// # Errors
    /// See above.
    pub fn check_here(&self) -> Result<()> {
        self.engine.origin.check()
    }

    /// The RDMA device.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// State of the port.
    #[must_use]
    pub fn port(&self) -> PortInfo {
        self.device.port()
    }

    /// Readable while an asynchronous event waits.
    #[must_use]
    pub fn async_fd(&self) -> BorrowedFd<'_> {
        self.events.fd()
    }

    /// The oldest asynchronous event. Waits for one, unless the descriptor was set non-blocking.
    ///
    /// # Errors
    /// `EAGAIN` where there is none and the descriptor does not block.
    pub fn get_async_event(&self) -> Result<AsyncEvent> {
        self.events.pop()
    }

    /// A protection domain.
    pub fn alloc_pd(self: &Arc<Context>) -> Arc<Pd> {
        Arc::new(Pd { id: self.engine.shared.domain(), context: self.clone() })
    }

    /// A completion queue for at least `capacity` completions. `cookie` comes back from the channel.
    ///
    /// # Errors
    /// `EINVAL` for a capacity of 0 or more than in [`LIMITS`].
    pub fn create_cq(&self, capacity: usize, cookie: u64, channel: Option<Arc<CompChannel>>) -> Result<Arc<Cq>> {
        self.check_here()?;
        if capacity == 0 || capacity > LIMITS.completions as usize {
            return Err(Error::invalid(format!("a completion queue holds 1 to {} completions", LIMITS.completions)));
        }
        let driver = Arc::downgrade(&self.engine.shared);
        Ok(Cq::new(capacity, cookie, channel, Some(self.events.clone()), Some(driver)))
    }

    /// The path from our address `sgid_index` to a peer's. An address handle describes the same.
    ///
    /// # Errors
    /// `EINVAL` where there is no such index, or the two are not addresses of the same kind.
    pub fn path(&self, dgid: Gid, sgid_index: u8) -> Result<Path> {
        self.check_here()?;
        let addresses = self.device.addresses();
        let src = addresses.get(usize::from(sgid_index)).copied().flatten().ok_or_else(|| {
            let all = addresses.iter().flatten().count();
            Error::invalid(format!("{} has {all} GIDs, none with index {sgid_index}", self.device.name()))
        })?;
        let dst = dgid.ip();
        if src.is_ipv4() != dst.is_ipv4() {
            return Err(Error::invalid(format!(
                "GID {sgid_index} of {} is {src}, and the peer's is {dst}: choose one of the same kind",
                self.device.name()
            )));
        }
        // A link-local address is one of the same interface.
        let index = Some(self.device.interface_index()).filter(|_| is_link_local(&dst));
        let is = |i: &if_addrs::Interface| i.ip() == dst && (index.is_none() || i.index == index);
        let ours = || if_addrs::get_if_addrs().is_ok_and(|all| all.iter().any(is));
        let local = dst.is_loopback() || ours();
        Ok(Path { src, dst, sgid_index, traffic_class: 0, hop_limit: 64, flow_label: 0, local })
    }
}

/// A protection domain: memory and queue pairs that belong together.
#[derive(Debug)]
pub struct Pd {
    pub(crate) id: u32,
    pub(crate) context: Arc<Context>,
}

impl Pd {
    /// The open RDMA device.
    #[must_use]
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Registers memory: the RDMA device may use it with the rights `access`, under the address `iova` for its first
    /// byte.
    ///
    /// # Errors
    /// `EINVAL` for remote writing or atomics without local writing, a null or overflowing range; `EFAULT` for memory
    /// that neither the processor nor the driver of a GPU can access.
    ///
    /// # Safety
    /// The memory is readable, with `LOCAL_WRITE` also writable, until the region is dropped. What peers write
    /// meanwhile is not looked at through references.
    pub unsafe fn reg_mr(self: &Arc<Pd>, at: *mut u8, len: usize, iova: u64, access: Access) -> Result<Mr> {
        let region = self.region(at, len, iova, access, || backing(at, len, access))?;
        self.insert(region)
    }

    fn region(
        &self,
        at: *mut u8,
        len: usize,
        iova: u64,
        access: Access,
        backing: impl FnOnce() -> Result<Backing>,
    ) -> Result<Region> {
        self.context.check_here()?;
        let writes = Access::REMOTE_WRITE.bits() | Access::REMOTE_ATOMIC.bits();
        if access.bits() & writes != 0 && !access.contains(Access::LOCAL_WRITE) {
            return Err(Error::invalid("remote writing and atomics need local writing"));
        }
        if at.is_null() && len > 0 || (at as usize).checked_add(len).is_none() || iova.checked_add(len as u64).is_none()
        {
            return Err(Error::invalid("no such range of memory"));
        }
        let backing = backing()?;
        let iova = if access.contains(Access::ZERO_BASED) { 0 } else { iova };
        Ok(Region { pd: self.id, at, len, iova, access, backing })
    }

    /// Registers memory of another driver: `len` bytes from `offset` on of the dma-buf `fd`, which may be closed then.
    /// Of a GPU's memory, which cannot be mapped, `iova` is the address that the GPU has for the first byte.
    ///
    /// # Errors
    /// `EBADF` and `EINVAL` where `fd` is no descriptor or no dma-buf, or has fewer bytes; the exporter's error where
    /// it does not let its memory be mapped and `iova` is no GPU's address; otherwise as [`Pd::reg_mr`].
    ///
    /// # Safety
    /// As [`Pd::reg_mr`], where the memory is a GPU's.
    pub unsafe fn reg_dmabuf_mr(
        self: &Arc<Pd>,
        offset: u64,
        len: usize,
        iova: u64,
        fd: BorrowedFd<'_>,
        access: Access,
    ) -> Result<Mr> {
        let what = || format!("registering {len} bytes of dma-buf {}", fd.as_raw_fd());
        if !is_dmabuf(fd).map_err(|e| Error::system(what(), &e))? {
            return Err(Error::invalid(format!("{}: the descriptor is no dma-buf", what())));
        }
        let region = match Mapping::new(fd, offset, len, access.contains(Access::LOCAL_WRITE)) {
            Ok(mapping) => self.region(mapping.at(), len, iova, access, || Ok(Backing::Dmabuf(mapping)))?,
            Err(unmapped) => match GpuMemory::new(iova, len) {
                Ok(gpu) => self.region(iova as *mut u8, len, iova, access, || Ok(Backing::Gpu(gpu)))?,
                Err(why) => return Err(Error::system(format!("{}: {why}, and to map it", what()), &unmapped)),
            },
        };
        self.insert(region)
    }

    fn insert(self: &Arc<Pd>, region: Region) -> Result<Mr> {
        let (at, len) = (region.at as usize, region.len);
        let key = write(&self.context.engine.shared.memory).insert(region)?;
        Ok(Mr { key, at, len, pd: self.clone() })
    }

    /// A memory window that is bound to nothing.
    ///
    /// # Errors
    /// `ENOMEM` where the RDMA device has no more of them.
    pub fn alloc_mw(self: &Arc<Pd>, kind: WindowKind) -> Result<Mw> {
        self.context.check_here()?;
        let key = write(&self.context.engine.shared.memory).add_window(self.id, kind)?;
        Ok(Mw { key, pd: self.clone() })
    }

    /// A shared receive queue.
    ///
    /// # Errors
    /// `EINVAL` for more than in [`LIMITS`].
    pub fn create_srq(&self, capacity: usize, sges: usize, cookie: u64) -> Result<Arc<Srq>> {
        self.context.check_here()?;
        if capacity == 0 || capacity > LIMITS.work_requests as usize || sges > LIMITS.sges as usize {
            return Err(Error::invalid("a shared receive queue of more receives or elements than the card has"));
        }
        Ok(Srq::new(self.id, capacity, sges, cookie, Some(self.context.events.clone())))
    }
}

/// The kind of memory that an address of the program's is in.
fn backing(at: *mut u8, len: usize, access: Access) -> Result<Backing> {
    if is_accessible(at as usize, len, access.contains(Access::LOCAL_WRITE)) {
        return Ok(Backing::Host);
    }
    GpuMemory::new(at as u64, len).map(Backing::Gpu).map_err(|why| {
        let what = "not all of it is memory that the processor can access";
        Error::new(libc::EFAULT, format!("registering {len} bytes at {at:p}: {what}, and {why}"))
    })
}

/// Registered memory. Dropping it deregisters: after that the RDMA device does not touch the memory any more.
#[derive(Debug)]
pub struct Mr {
    key: u32,
    at: usize,
    len: usize,
    pd: Arc<Pd>,
}

impl Mr {
    /// Registers other memory, with other rights or for another domain of the RDMA device, under the same keys. Where
    /// it fails all stays as it is.
    ///
    /// # Errors
    /// As [`Pd::reg_mr`], and `EINVAL` for a domain of another RDMA device.
    ///
    /// # Safety
    /// As [`Pd::reg_mr`]; the old memory is not touched any more after this.
    pub unsafe fn change(&mut self, pd: &Arc<Pd>, at: *mut u8, len: usize, iova: u64, access: Access) -> Result<()> {
        let region = pd.region(at, len, iova, access, || backing(at, len, access))?;
        let same = Arc::ptr_eq(&pd.context, &self.pd.context);
        if !same || !write(&pd.context.engine.shared.memory).replace(self.key, region) {
            return Err(Error::invalid("a domain of another card than the region's"));
        }
        (self.at, self.len, self.pd) = (at as usize, len, pd.clone());
        Ok(())
    }

    /// The key for our own requests.
    #[must_use]
    pub fn lkey(&self) -> u32 {
        self.key
    }

    /// The key for the peer's requests.
    #[must_use]
    pub fn rkey(&self) -> u32 {
        self.key
    }

    /// Returns true while a window is bound to it. Where the region is dropped all the same, no peer gets at its bytes
    /// any more.
    #[must_use]
    pub fn has_windows(&self) -> bool {
        read(&self.pd.context.engine.shared.memory).has_windows(self.key)
    }

    /// Address of its first byte.
    #[must_use]
    pub fn addr(&self) -> usize {
        self.at
    }

    /// Bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true for a region of 0 bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        // Waits for every thread that works with pieces of it. A child has no such threads, and perhaps their locks.
        if self.pd.context.is_here() {
            write(&self.pd.context.engine.shared.memory).remove(self.key);
        }
    }
}

/// A memory window: a part of a region that peers reach under a separate key, with separate rights. Requests bind it
/// and take it back ([`crate::SendOp::Bind`], [`crate::SendOp::LocalInv`]). Dropping it unbinds it.
#[derive(Debug)]
pub struct Mw {
    key: u32,
    pd: Arc<Pd>,
}

impl Mw {
    /// The key that it began with: those that it is bound under differ in the low byte.
    #[must_use]
    pub fn rkey(&self) -> u32 {
        self.key
    }
}

impl Drop for Mw {
    fn drop(&mut self) {
        if self.pd.context.is_here() {
            write(&self.pd.context.engine.shared.memory).remove_window(self.key);
        }
    }
}
