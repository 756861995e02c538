//! A rank's membership in a group of ranks that drive GPUs.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::{CudaContext, CudaEvent, sys};

use super::call::Stream;
use super::driver::{cuda, is_capturing};
use super::path::{DataPath, Path};
use super::peer::{Choice, Chooser, Reason, Registry};
use super::report::aborted;
use super::window::Windows;
use crate::comm::Comm;
use crate::comm::RawCall;
#[cfg(doc)]
use crate::error::Error;
use crate::error::Result;
use crate::fork::Origin;
use crate::schedule::Partition;
use crate::wire::Collective;

/// One rank of a group of ranks that each drive a GPU.
///
/// Calls only enqueue, in the order of the caller's stream; calls of one communicator run in the order in which they were
/// made, also when they go to different streams. They can be captured in a CUDA graph, whose replays then count as calls: all
/// ranks must make and replay the same calls in the same order.
///
/// Dropping it waits for its kernels and for the other ranks to drop theirs, not after a failure.
pub struct DeviceComm {
    pub(super) rank: usize,
    pub(super) size: usize,
    pub(super) path: Arc<dyn DataPath>,
    pub(super) why: String,
    /// Of calls on the peer path; others take their choices for what they are there.
    pub(super) chooser: Arc<Chooser>,
    /// Whether CUDA is asked about every buffer.
    pub(super) checks_memory: bool,
    pub(super) order: Mutex<Order>,
    pub(super) context: Arc<CudaContext>,
    pub(super) origin: Origin,
    /// Where ranks of other processes meet.
    pub(super) host: Option<Comm>,
    /// What kernels of all ranks reach; `None` where calls go through the hosts' memory. The last field: freed after all else.
    pub(super) windows: Option<Windows>,
}

/// How a call is carried out, in words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Explanation {
    /// Which way the data takes.
    pub path: Path,
    /// Why this way.
    pub path_reason: String,
    /// Protocol and blocks; `None` where the path has one way only.
    pub choice: Option<Choice>,
    /// Why this choice.
    pub reason: Reason,
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "path {} ({})", self.path, self.path_reason)?;
        if let Some(Choice { protocol, blocks }) = self.choice {
            write!(f, ", {protocol}, {blocks} blocks")?;
        }
        write!(f, ": {}", self.reason)
    }
}

/// Calls so far.
#[derive(Debug)]
pub(super) struct Order {
    pub(super) number: u32,
    pub(super) last: Option<Stream>,
    pub(super) event: CudaEvent,
}

// SAFETY: a stream's handle may be used by any thread, and so may cudarc's stream.
unsafe impl Send for Order {}

impl DeviceComm {
    /// Our rank, in `0..size`.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Which way the data takes; the same on all ranks.
    pub fn path(&self) -> Path {
        self.path.path()
    }

    /// Why it takes this way, in words.
    pub fn path_reason(&self) -> &str {
        &self.why
    }

    /// Memory that the communicator takes on each rank: of the device, or of the host where calls go through it.
    pub fn window_bytes(&self) -> usize {
        self.path.bytes()
    }

    /// Our device.
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    /// How a collective of so many bytes (of the whole buffer for all_reduce, broadcast and reduce, of one rank's segment for the
    /// others) is carried out.
    pub fn choice(&self, collective: Collective, bytes: usize) -> Choice {
        let (choice, reason) = self.chooser.decide(collective, bytes);
        if reason == Reason::Refused && self.path.chooser().is_some() {
            self.chooser.warn_refused(collective, choice);
        }
        choice
    }

    /// How such a call is carried out, and why. The same on all ranks.
    pub fn explain(&self, collective: Collective, bytes: usize) -> Explanation {
        let decided = self.path.chooser().map(|chooser| chooser.decide(collective, bytes));
        let (choice, reason) = decided.map_or((None, Reason::Path), |(choice, reason)| (Some(choice), reason));
        Explanation { path: self.path(), path_reason: self.why.clone(), choice, reason }
    }

    /// Whether a call of `bytes` (as in [`DeviceComm::choice`]) can be carried out so, whatever its element type.
    pub fn fits(&self, collective: Collective, choice: Choice, bytes: usize) -> bool {
        self.chooser.fits(collective, choice, bytes)
    }

    /// How the segments of `call` are cut when it is carried out by a schedule; `None` if `choice` is no schedule, or does not
    /// fit. Equal on all ranks. A communicator of the host whose messages are as long, and with as many channels, cuts and
    /// reduces alike: it gives the same bits.
    pub fn partition(&self, call: &RawCall, choice: Choice) -> Option<Partition> {
        self.chooser.partition(call, choice)
    }

    /// Takes `choice` from now on wherever it fits; `None` goes by size again. Every rank must call it at the same place.
    pub fn set_choice(&self, choice: Option<Choice>) {
        self.chooser.set(choice);
    }

    /// Gives the failure of a call that ran before, if one has failed.
    ///
    /// # Errors
    /// [`Error::PeerLost`] when a rank's process has died: the host's communicator learns of it, and kernels leave at once.
    /// [`Error::Timeout`] naming the rank that did not come, the disagreement, or [`Error::Aborted`]. It stays the same error,
    /// and outputs of calls that were not finished hold anything.
    #[inline]
    pub fn check(&self) -> Result<()> {
        self.origin.check(|| "DeviceComm".to_owned(), self.rank)?;
        self.path.check(self.host.as_ref())
    }

    /// Makes kernels that wait leave, from any thread; later calls give [`Error::Aborted`]. The other ranks' too, where a host
    /// communicator tells them; ranks of [`DeviceComm::local`] each have to be told.
    pub fn abort(&self) {
        let reason = "abort was called on the device's communicator";
        self.path.abort(aborted(self.rank, reason));
        if let Some(host) = &self.host {
            host.abort(reason);
        }
    }

    /// Waits for the calls made so far.
    ///
    /// # Errors
    /// As [`DeviceComm::check`]; [`Error::Cuda`] for errors of the device.
    pub fn synchronize(&self) -> Result<()> {
        let failed = |e| cuda("synchronize", "waiting for the device", e);
        let last = self.order.lock().unwrap_or_else(PoisonError::into_inner).last.clone();
        match last {
            Some(Stream::Kept(stream)) => stream.synchronize().map_err(failed)?,
            // The handle may be of a stream that is gone by now.
            Some(Stream::Handle(_)) => self.context.synchronize().map_err(failed)?,
            None => {}
        }
        self.check()
    }

    pub(super) fn host(&self) -> Option<&Comm> {
        self.host.as_ref()
    }

    /// Calls through different streams run one after the other: the windows are one.
    pub(super) fn order(&self, stream: Stream) -> Result<MutexGuard<'_, Order>> {
        let mut order = self.order.lock().unwrap_or_else(PoisonError::into_inner);
        let handle = stream.handle();
        match &order.last {
            Some(last) if last.handle() == handle => return Ok(order),
            Some(last) => {
                self.follow(&order, last.handle(), handle).map_err(|e| cuda("device", "ordering two streams", e))?
            }
            None => {}
        }
        order.last = Some(stream);
        Ok(order)
    }

    /// Makes `stream` wait for `last`, unless one of them is being captured: a graph runs when it is launched.
    fn follow(
        &self,
        order: &Order,
        last: sys::CUstream,
        stream: sys::CUstream,
    ) -> Result<(), cudarc::driver::DriverError> {
        use cudarc::driver::result::{event, stream as streams};
        for one in [last, stream] {
            // SAFETY: both are streams, by the contract of `enqueue`.
            if unsafe { is_capturing(one) }? {
                return Ok(());
            }
        }
        // SAFETY: as above; the event is ours.
        unsafe {
            event::record(order.event.cu_event(), last)?;
            streams::wait_event(stream, order.event.cu_event(), sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT)
        }
    }

    pub(super) fn registry(&self) -> &Arc<Registry> {
        &self.chooser.registry
    }

    /// Whether both came of one [`DeviceComm::local`].
    pub(super) fn is_beside(&self, other: &DeviceComm) -> bool {
        match (&self.windows, &other.windows) {
            (Some(ours), Some(theirs)) => Arc::ptr_eq(&ours.memory, &theirs.memory),
            (ours, theirs) => ours.is_none() && theirs.is_none(),
        }
    }

    /// Nobody uses a window before all have mapped it.
    pub(super) fn meet(&self) -> Result<()> {
        self.host.as_ref().map_or(Ok(()), Comm::barrier)
    }
}

impl Drop for DeviceComm {
    fn drop(&mut self) {
        if !self.origin.is_here() {
            // The driver does nothing for a forked child, and the threads are its parent's.
            return std::mem::forget((self.path.clone(), self.chooser.clone(), self.windows.take()));
        }
        if let Err(error) = self.synchronize() {
            log::debug!("rank {} leaves after: {error}", self.rank);
        }
        if self.windows.is_none() {
            // Nobody else uses memory of ours.
            return self.registry().closed(true);
        }
        // Another rank's kernel may still write into our window; then another rank may have our memory mapped yet.
        let mut met = self.meet();
        self.registry().leave();
        self.windows.iter_mut().for_each(Windows::unmap);
        if met.is_ok() {
            met = self.meet();
        }
        self.registry().closed(met.is_ok());
        if let (Err(error), Some(windows)) = (met, &self.windows) {
            let bytes = windows.layout.bytes() >> 20;
            log::debug!("rank {} keeps {bytes} MiB of its device until the process ends: {error}", self.rank);
            std::mem::forget(windows.memory.clone());
        }
    }
}

impl fmt::Debug for DeviceComm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceComm (rank {} of {}, GPU {})", self.rank, self.size, self.context.ordinal())
    }
}
