//! Buffers that calls use without copies.

use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DeviceSlice, SyncOnDrop, sys};

use crate::comm::DeviceComm;
use crate::driver::cuda;
use crate::peer::{Registration, register_all};
use crate::window::Window;
use tinynccl_plan::dtype::Element;
use tinynccl_plan::error::{Error, Result};

/// A device buffer that the kernels of all ranks of a [`DeviceComm`] reach: large calls read and write it directly.
///
/// It is used as a `CudaSlice`, also in parts (`slice`, [`Registered::slice_mut`]). It owns its memory, because memory
/// that other ranks have mapped must not be freed. Dropping it ends the registration at once; the memory is freed when
/// all ranks next register a buffer, call [`DeviceComm::release`], or leave.
///
/// ```no_run
/// # use tinynccl_cuda::DeviceComm;
/// # use tinynccl_plan::{ReduceOp, Result};
/// # fn f(comm: &DeviceComm, stream: &std::sync::Arc<cudarc::driver::CudaStream>) -> Result<()> {
/// let mut gradients = comm.alloc::<f32>(stream, 1 << 24)?;
/// comm.all_reduce_in_place(stream, &mut gradients, ReduceOp::Sum)?;
/// # Ok(()) }
/// ```
pub struct Registered<T> {
    /// Never dropped: the memory is not its own.
    elements: ManuallyDrop<CudaSlice<T>>,
    parts: Option<(Registration, Window)>,
}

impl<T> Registered<T> {
    /// Returns true if kernels of all ranks reach the buffer. If not, it is an ordinary buffer.
    pub fn is_registered(&self) -> bool {
        self.parts.as_ref().is_some_and(|(registration, _)| registration.is_registered())
    }

    /// As [`Registration::place`].
    pub fn place(&self, rank: usize) -> Option<(u64, u64)> {
        self.parts.as_ref().and_then(|(registration, _)| registration.place(rank))
    }

    /// A part of it.
    ///
    /// # Panics
    /// As `CudaSlice::slice_mut`: when the part is out of bounds.
    pub fn slice_mut(&mut self, part: impl std::ops::RangeBounds<usize>) -> cudarc::driver::CudaViewMut<'_, T> {
        self.elements.slice_mut(part)
    }

    /// All of it.
    pub fn as_view_mut(&mut self) -> cudarc::driver::CudaViewMut<'_, T> {
        self.elements.as_view_mut()
    }

    fn new(stream: &Arc<CudaStream>, len: usize, memory: Window, registration: Registration) -> Registered<T> {
        // SAFETY: the memory has `len` elements of zeroes or more, and outlives this: `elements` is never dropped.
        let elements = unsafe { stream.upgrade_device_ptr(memory.address, len) };
        Registered { elements: ManuallyDrop::new(elements), parts: Some((registration, memory)) }
    }
}

// Shared access only: replacing the slice would free the memory.
impl<T> Deref for Registered<T> {
    type Target = CudaSlice<T>;
    fn deref(&self) -> &CudaSlice<T> {
        &self.elements
    }
}

impl<T> DeviceSlice<T> for Registered<T> {
    fn len(&self) -> usize {
        self.elements.len()
    }
    fn stream(&self) -> &Arc<CudaStream> {
        self.elements.stream()
    }
}

impl<T> DevicePtr<T> for Registered<T> {
    fn device_ptr<'a>(&'a self, stream: &'a CudaStream) -> (sys::CUdeviceptr, SyncOnDrop<'a>) {
        self.elements.device_ptr(stream)
    }
}

impl<T> DevicePtrMut<T> for Registered<T> {
    fn device_ptr_mut<'a>(&'a mut self, stream: &'a CudaStream) -> (sys::CUdeviceptr, SyncOnDrop<'a>) {
        self.elements.device_ptr_mut(stream)
    }
}

impl<T> fmt::Debug for Registered<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Registered of {} elements (registered: {})", self.elements.len(), self.is_registered())
    }
}

impl<T> Drop for Registered<T> {
    fn drop(&mut self) {
        if let Some((registration, memory)) = self.parts.take() {
            registration.end(memory);
        }
    }
}

impl DeviceComm {
    /// Zeroed memory of `len` elements that the kernels of all ranks reach. Every rank must call it, at the same place
    /// among its calls; lengths may differ. For ranks of [`DeviceComm::local`]: [`DeviceComm::alloc_local`].
    ///
    /// It is a set-up step: it synchronises with the other ranks and may wait for the device. After the first
    /// registration, large calls of this communicator begin with an agreement on registered buffers. On the hosted and
    /// phased paths it is ordinary memory.
    ///
    /// # Errors
    /// [`Error::Cuda`] when this rank's allocation fails, [`Error::InvalidArgument`] when another rank's does.
    pub fn alloc<T: Element>(&self, stream: &Arc<CudaStream>, len: usize) -> Result<Registered<T>> {
        let memory = self.memory::<T>(len);
        let ours = memory.as_ref().map(|m| Some((m.address, m.bytes as u64))).map_err(Clone::clone);
        let registration = self.meet_to_register(ours)?;
        Ok(Registered::new(stream, len, memory?, registration))
    }

    /// [`DeviceComm::alloc`] for the ranks of one process, which [`DeviceComm::local`] made: `len` elements on each,
    /// for the streams of each.
    ///
    /// # Errors
    /// As [`DeviceComm::alloc`]; [`Error::InvalidArgument`] when these are not all ranks in order.
    pub fn alloc_local<T: Element>(
        comms: &[&DeviceComm],
        streams: &[Arc<CudaStream>],
        len: usize,
    ) -> Result<Vec<Registered<T>>> {
        let op = "alloc_local";
        let Some(first) = comms.first() else { return Ok(Vec::new()) };
        let in_order = comms.iter().enumerate().all(|(rank, c)| c.rank() == rank && c.is_beside(first));
        if comms.len() != first.size() || streams.len() != comms.len() || !in_order {
            return Err(Error::invalid(
                op,
                format!(
                    "{} communicators and {} streams, expected those of all {} ranks of one DeviceComm::local, in their order",
                    comms.len(),
                    streams.len(),
                    first.size()
                ),
            ));
        }
        let memory = comms.iter().map(|comm| comm.memory::<T>(len)).collect::<Result<Vec<Window>>>()?;
        let buffers = comms.iter().zip(&memory).map(|(c, m)| (c.registry(), (m.address, m.bytes as u64)));
        let Some(windows) = &first.windows else {
            let none = comms.iter().map(|comm| Registration::none(comm.registry()));
            let all = memory.into_iter().zip(none).zip(streams);
            return Ok(all.map(|((memory, none), stream)| Registered::new(stream, len, memory, none)).collect());
        };
        let registrations = register_all(&windows.layout, &windows.addresses, &buffers.collect::<Vec<_>>())?;
        let all = memory.into_iter().zip(registrations).zip(streams);
        Ok(all.map(|((memory, registration), stream)| Registered::new(stream, len, memory, registration)).collect())
    }

    /// Registers memory of another owner, by address: an allocation of `cuMemAlloc` (`cudaMalloc`), or a part of one.
    /// Others cannot reach memory of a stream-ordered pool (`cuMemAllocAsync`) or mapped by `cuMemMap`: it is not
    /// registered, and calls copy it. Every rank must call it, as [`DeviceComm::alloc`].
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when this is not device memory.
    ///
    /// # Safety
    /// The memory must stay allocated until the registration was dropped on this rank and [`DeviceComm::release`] was
    /// called on all, or the communicator dropped.
    pub unsafe fn register(&self, address: u64, bytes: usize) -> Result<Registration> {
        self.meet_to_register(Ok(Some((address, bytes as u64))))
    }

    /// [`DeviceComm::register`] of memory that `owner` frees when it is dropped. The registration keeps `owner` until
    /// no rank can have the memory mapped: after its own drop until all ranks next register a buffer, call
    /// [`DeviceComm::release`], or leave.
    ///
    /// # Errors
    /// As [`DeviceComm::register`].
    ///
    /// # Safety
    /// The memory must stay allocated as long as `owner` exists.
    pub unsafe fn register_owned(
        &self,
        address: u64,
        bytes: usize,
        owner: impl std::any::Any + Send + Sync,
    ) -> Result<Registration> {
        Ok(self.meet_to_register(Ok(Some((address, bytes as u64))))?.owned_by(owner))
    }

    /// Unmaps buffers of other ranks that were dropped, and frees those of this rank. Every rank must call it, at the
    /// same place among its calls.
    ///
    /// # Errors
    /// As any call that synchronises with the other ranks.
    pub fn release(&self) -> Result<()> {
        self.meet_to_register(Ok(None)).map(drop)
    }

    /// Calls of this rank, and messages sent and received, that used registered buffers without slots so far. Waits for
    /// the calls made.
    ///
    /// # Errors
    /// As [`DeviceComm::synchronize`].
    pub fn direct_calls(&self) -> Result<u64> {
        let failed = |e| cuda("direct_calls", "reading the count", e);
        self.synchronize()?;
        let Some(windows) = &self.windows else { return Ok(0) };
        self.context().bind_to_thread().map_err(failed)?;
        let mut count = [0u64];
        let at = windows.own() + windows.layout.direct_count() as u64;
        // SAFETY: 8 bytes of our own window.
        unsafe { cudarc::driver::result::memcpy_dtoh_sync(&mut count, at) }.map_err(failed)?;
        Ok(count[0])
    }

    /// Synchronises with the other ranks to register `ours`, or nothing.
    fn meet_to_register(&self, ours: Result<Option<(u64, u64)>>) -> Result<Registration> {
        let host = self.host().ok_or_else(|| Error::Unsupported {
            what: "registering one rank's buffer among the ranks of one process".to_owned(),
            detail: "one thread may drive them all: register those of all ranks at once, with DeviceComm::alloc_local"
                .to_owned(),
        })?;
        match &self.windows {
            Some(windows) => self.registry().meet(host, &windows.layout, windows.own(), ours),
            None => ours.map(|_| Registration::none(self.registry())),
        }
    }

    fn memory<T>(&self, len: usize) -> Result<Window> {
        // Not zero bytes: CUDA refuses that.
        Window::sized(self.context(), (len * size_of::<T>()).max(16), "a registered buffer")
    }
}
