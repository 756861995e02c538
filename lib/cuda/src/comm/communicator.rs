//! A rank's membership in a group of ranks that drive GPUs.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;
use std::time::Duration;

use cudarc::driver::sys::{self, CUresult};
use cudarc::driver::{CudaContext, CudaEvent, DriverError};

use super::Ledger;
use crate::checked::call::Stream;
use crate::driver::{capture_of, cuda};
use crate::path::DataPath;
use crate::path::report::aborted;
use crate::peer::{Chooser, Reason, Registry};
use crate::verify::{Spoil, Verifier};
use crate::window::Windows;
use tinynccl_comm::Comm;
use tinynccl_comm::RawCall;
use tinynccl_plan::device::{Choice, Path};
use tinynccl_plan::error::{Error, Result};
use tinynccl_plan::schedule::Partition;
use tinynccl_plan::wire::Collective;
use tinynccl_sys::fork::Origin;

/// One rank of a group of ranks that each drive a GPU.
///
/// Calls only enqueue, in the order of the caller's stream; calls of one communicator run in the order in which they
/// were made, also when they go to different streams. They can be captured in a CUDA graph, whose replays then count as
/// calls: all ranks must make and replay the same calls in the same order.
///
/// cudarc allocates and copies elements that it knows, to which the 8-bit floats do not belong: their memory is allocated
/// as bytes, of which `CudaSlice::transmute` makes elements, or by [`DeviceComm::alloc`].
///
/// Dropping it waits for its kernels and for the other ranks to drop theirs, except after a failure.
pub struct DeviceComm {
    pub(crate) rank: usize,
    pub(crate) size: usize,
    pub(crate) path: Arc<dyn DataPath>,
    pub(crate) why: String,
    /// For calls on the peer path; other paths interpret choices in their own way.
    pub(crate) chooser: Arc<Chooser>,
    /// True if every buffer is checked with CUDA.
    pub(crate) checks_memory: bool,
    pub(crate) order: Mutex<Order>,
    pub(crate) ledger: Arc<Ledger>,
    /// Set if calls are verified.
    pub(crate) verifier: Option<Verifier>,
    /// A call has been refused.
    pub(crate) refused: AtomicBool,
    pub(crate) context: Arc<CudaContext>,
    pub(crate) origin: Origin,
    /// Communicator for the rendezvous with ranks of other processes; `None` for [`DeviceComm::local`].
    pub(crate) host: Option<Comm>,
    /// Memory that kernels of all ranks reach; `None` on the hosted path and for one rank. Last field: freed last.
    pub(crate) windows: Option<Windows>,
}

/// Explanation of how a call runs, with the reasons.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Explanation {
    /// The path of the data.
    pub path: Path,
    /// Why this path.
    pub path_reason: String,
    /// Protocol and blocks; `None` for a path without choices.
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
pub(crate) struct Order {
    pub(crate) number: u32,
    pub(crate) last: Option<Stream>,
    /// Thread of `last`, if that is the stream of a thread (`CU_STREAM_PER_THREAD`).
    pub(crate) thread: Option<ThreadId>,
    pub(crate) event: CudaEvent,
}

// SAFETY: a stream's handle may be used by any thread, and so may cudarc's stream.
unsafe impl Send for Order {}

impl DeviceComm {
    /// Our rank, in `0..size`.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Names the communicator in reports ([`tinynccl_comm::status`]); the first name stays.
    pub fn set_name(&self, name: &str) {
        if let Some(host) = &self.host {
            host.set_name(name);
        }
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.size
    }

    /// The path of the data; the same on all ranks.
    pub fn path(&self) -> Path {
        self.path.path()
    }

    /// The reason for this path, as text.
    pub fn path_reason(&self) -> &str {
        &self.why
    }

    /// Memory that the communicator takes on this rank now: of the device, or of the host on the hosted path. On the
    /// peer path between processes it grows once, when a call first needs more than the window for small calls.
    pub fn window_bytes(&self) -> usize {
        self.path.bytes()
    }

    /// Our device.
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    /// The choice for a collective of `bytes` bytes (of the whole buffer for all_reduce, broadcast and reduce, of one
    /// rank's segment for the others).
    pub fn choice(&self, collective: Collective, bytes: usize) -> Choice {
        let (choice, reason) = self.chooser.decide(collective, bytes);
        if reason == Reason::Refused && self.path().chooses() {
            self.chooser.warn_refused(collective, choice);
        }
        choice
    }

    /// Explains how a collective of `bytes` (as in [`DeviceComm::choice`]) runs, and why. Equal on all ranks.
    pub fn explain(&self, collective: Collective, bytes: usize) -> Explanation {
        let path = self.path();
        let decided = path.chooses().then(|| self.chooser.decide(collective, bytes));
        let (choice, reason) = decided.map_or((None, Reason::Path), |(choice, reason)| (Some(choice), reason));
        Explanation { path, path_reason: self.why.clone(), choice, reason }
    }

    /// Returns true if `choice` can run a call of `bytes` (as in [`DeviceComm::choice`]) of any element type.
    pub fn fits(&self, collective: Collective, choice: Choice, bytes: usize) -> bool {
        self.chooser.fits(collective, choice, bytes)
    }

    /// The cut of `call`'s segments for a schedule; `None` if `choice` is no schedule, or does not fit. Equal on all
    /// ranks. A host communicator with the same message length and number of channels cuts and reduces alike, and gives
    /// the same bits.
    pub fn partition(&self, call: &RawCall, choice: Choice) -> Option<Partition> {
        self.chooser.partition(call, choice)
    }

    /// Takes `choice` from now on wherever it fits; `None` chooses by size again. Every rank must call it at the same
    /// position among its calls.
    pub fn set_choice(&self, choice: Option<Choice>) {
        self.chooser.set(choice);
    }

    /// Gives the failure of a call that ran before, if one has failed.
    ///
    /// # Errors
    /// [`Error::PeerLost`] when a rank's process has died: the host's communicator learns of it, and kernels exit at
    /// once. [`Error::Timeout`] naming the missing rank, the disagreement, or [`Error::Aborted`]. The error stays the
    /// same, and outputs of unfinished calls are undefined.
    #[inline]
    pub fn check(&self) -> Result<()> {
        self.origin.check(|| "DeviceComm".to_owned(), self.rank)?;
        self.verified()?;
        self.path.check(self.host.as_ref())
    }

    /// Fails if a verified call had wrong bits.
    #[inline]
    fn verified(&self) -> Result<()> {
        let Some(verifier) = &self.verifier else { return Ok(()) };
        verifier.check().map_err(|error| self.corrupt(error))
    }

    #[cold]
    fn corrupt(&self, error: Error) -> Error {
        self.path.abort(error.clone());
        if let Some(host) = &self.host {
            host.fail_everywhere(error.clone());
        }
        error
    }

    /// Flips a bit in the next verified call, for tests.
    #[doc(hidden)]
    pub fn spoil(&self, place: Spoil, bit: usize) {
        let slots = |windows: &Windows| {
            let (layout, at) = (&windows.layout, windows.extension.addresses()[self.rank]);
            (at != 0).then(|| (at + layout.slots_begin() as u64, layout.slot_memory()))
        };
        let window = self.windows.as_ref().filter(|_| place == Spoil::Window).and_then(slots);
        if let Some(verifier) = self.verifier.as_ref().filter(|_| place != Spoil::Window || window.is_some()) {
            verifier.spoil(place, bit, window);
        }
    }

    /// The difference that a verified call showed, which is forgotten, for tests: the communicator goes on.
    #[doc(hidden)]
    pub fn take_finding(&self) -> Option<Error> {
        self.verifier.as_ref().and_then(Verifier::take)
    }

    /// As [`DeviceComm::check`], for this rank's calls: that another one has aborted is no error as long as it has
    /// ended none of them, none was refused, and none waits for it. Ranks that are done leave in any order.
    ///
    /// # Errors
    /// As [`DeviceComm::check`].
    pub fn check_calls(&self) -> Result<()> {
        match self.check() {
            Err(Error::Aborted { .. })
                if !self.path.cut_short() && !self.refused.load(Ordering::Acquire) && !self.is_held() =>
            {
                Ok(())
            }
            checked => checked,
        }
    }

    /// [`DeviceComm::check`] before a call is made. A call that would be held waits as those before it do, so the
    /// failure of another rank is no error of it.
    #[inline]
    pub(crate) fn admit(&self) -> Result<()> {
        self.origin.check(|| "DeviceComm".to_owned(), self.rank)?;
        self.verified()?;
        self.path.admit(self.host.as_ref())
    }

    /// Time since another rank failed, while it has ended no call of this rank; `None` without a failure, and once a
    /// call has ended early. With [`CudaFailure::Hold`](tinynccl_sys::config::CudaFailure) calls that wait for that
    /// rank do so until the communicator is aborted.
    pub fn failure_age(&self) -> Option<Duration> {
        if self.path.cut_short() { None } else { self.path.failure_age() }
    }

    /// True while a call waits for a rank that has failed: one that does not wait for it is over sooner.
    fn is_held(&self) -> bool {
        const OVER: Duration = Duration::from_millis(500);
        if self.path.failure_age().is_none_or(|age| age < OVER) {
            return false;
        }
        let last = self.order.lock().unwrap_or_else(PoisonError::into_inner).last.clone();
        let Some(handle) = last.as_ref().map(Stream::handle) else { return false };
        // SAFETY: a stream, by the contract of `enqueue`; a handle that names none any more gives an error. A
        // stream that is being captured must not be queried.
        unsafe {
            capture_of(handle) == Ok(None)
                && sys::cuStreamQuery(handle).result() == Err(DriverError(CUresult::CUDA_ERROR_NOT_READY))
        }
    }

    /// Records a call that was refused: it has failed as one that ends early has. Returns `result`.
    #[inline]
    pub(crate) fn made(&self, result: Result<()>) -> Result<()> {
        result.inspect_err(|_| self.refused.store(true, Ordering::Release))
    }

    /// Makes waiting kernels exit, from any thread; later calls give [`Error::Aborted`]. A host communicator also
    /// notifies the other ranks; for ranks of [`DeviceComm::local`] call it on each.
    pub fn abort(&self) {
        self.abort_because("abort was called on the device's communicator");
    }

    fn abort_because(&self, reason: &str) {
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
        self.wait()?;
        self.check()
    }

    /// Waits for the calls made so far. If all were executed it is no error that another rank has failed or left
    /// since.
    ///
    /// # Errors
    /// As [`DeviceComm::synchronize`], where a call ended early.
    pub fn finish(&self) -> Result<()> {
        self.wait()?;
        if self.path.cut_short() { self.check() } else { Ok(()) }
    }

    /// A failure ends what it waits for: the caller gets the error.
    fn wait(&self) -> Result<()> {
        /// Holds calls again as before.
        struct Restore<'a>(&'a dyn DataPath, bool);
        impl Drop for Restore<'_> {
            fn drop(&mut self) {
                if self.1 {
                    self.0.set_hold(true);
                }
            }
        }
        let failed = |e| cuda("synchronize", "waiting for the device", e);
        let last = self.order.lock().unwrap_or_else(PoisonError::into_inner).last.clone();
        let _restore = Restore(&*self.path, self.path.set_hold(false));
        match last {
            Some(Stream::Kept(stream)) => stream.synchronize().map_err(failed),
            // The handle may be of a stream that is gone by now.
            Some(Stream::Handle(_)) => self.context.synchronize().map_err(failed),
            None => Ok(()),
        }
    }

    pub(crate) fn host(&self) -> Option<&Comm> {
        self.host.as_ref()
    }

    /// Number for a call that is a part of another communicator's.
    pub(crate) fn next_number(&self) -> u32 {
        let mut order = self.order.lock().unwrap_or_else(PoisonError::into_inner);
        order.number = order.number.wrapping_add(1);
        order.number
    }

    /// Number of the last call.
    pub(crate) fn last_number(&self) -> u32 {
        self.order.lock().unwrap_or_else(PoisonError::into_inner).number
    }

    /// Calls through different streams run one after the other, because they share the windows.
    pub(crate) fn order(&self, stream: Stream) -> Result<MutexGuard<'_, Order>> {
        let mut order = self.order.lock().unwrap_or_else(PoisonError::into_inner);
        let handle = stream.handle();
        // `CU_STREAM_PER_THREAD`: another stream for each thread.
        let thread = (handle.addr() == 2).then(|| std::thread::current().id());
        match &order.last {
            Some(last) if last.handle() == handle && order.thread == thread => return Ok(order),
            Some(last) => {
                self.follow(&order, last.handle(), handle).map_err(|e| cuda("device", "ordering two streams", e))?
            }
            None => {}
        }
        (order.last, order.thread) = (Some(stream), thread);
        Ok(order)
    }

    /// Makes `stream` wait for `last`, unless only one of them is being captured, or each for a separate graph: a
    /// graph runs when it is launched.
    fn follow(&self, order: &Order, last: sys::CUstream, stream: sys::CUstream) -> Result<(), DriverError> {
        use cudarc::driver::result::{event, stream as streams};
        // SAFETY: a stream, by the contract of `enqueue`.
        let capture = unsafe { capture_of(stream) }?;
        // Where `last` names nothing any more, and its work may still run.
        let all = || if capture.is_none() { self.context.synchronize() } else { Ok(()) };
        if order.thread.is_some_and(|thread| thread != std::thread::current().id()) {
            // Its handle is another stream here.
            return all();
        }
        // SAFETY: as above. A program that has destroyed its stream against the contract gets an error here.
        match unsafe { capture_of(last) } {
            Ok(other) if other == capture => {}
            Ok(_) => return Ok(()),
            Err(DriverError(CUresult::CUDA_ERROR_INVALID_HANDLE | CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED)) => {
                return all();
            }
            Err(error) => return Err(error),
        }
        // SAFETY: as above; the event is ours.
        unsafe {
            event::record(order.event.cu_event(), last)?;
            streams::wait_event(stream, order.event.cu_event(), sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT)
        }
    }

    pub(crate) fn registry(&self) -> &Arc<Registry> {
        &self.chooser.registry
    }

    /// Returns true if both have the windows of one [`DeviceComm::local`], or neither has windows.
    pub(crate) fn is_beside(&self, other: &DeviceComm) -> bool {
        match (&self.windows, &other.windows) {
            (Some(ours), Some(theirs)) => Arc::ptr_eq(&ours.memory, &theirs.memory),
            (ours, theirs) => ours.is_none() && theirs.is_none(),
        }
    }

    /// Makes the extensions of the windows of `peers` reachable, who make the same call; waits until they do.
    #[inline]
    pub(crate) fn extend(&self, peers: impl IntoIterator<Item = usize> + Clone) -> Result<()> {
        self.windows.as_ref().map_or(Ok(()), |windows| windows.extension.reach(self.host(), peers))
    }

    /// The first half of [`DeviceComm::extend`], which does not wait.
    #[inline]
    pub(crate) fn offer_extension(&self, peers: impl IntoIterator<Item = usize> + Clone) -> Result<()> {
        self.windows.as_ref().map_or(Ok(()), |windows| windows.extension.offer(self.host(), peers))
    }

    /// No rank uses a window before all have mapped it.
    pub(crate) fn meet(&self) -> Result<()> {
        self.host.as_ref().map_or(Ok(()), Comm::barrier)
    }
}

impl Drop for DeviceComm {
    fn drop(&mut self) {
        if !self.origin.is_here() {
            // The driver does not work in a forked child, and the threads are its parent's.
            return std::mem::forget((self.path.clone(), self.chooser.clone(), self.windows.take()));
        }
        if std::thread::panicking() {
            // Calls in the streams, and the other ranks, may wait for calls that we will not make.
            self.abort_because("it panicked, and its communicator on the device was dropped by that");
        }
        if let Err(error) = self.synchronize() {
            log::debug!("rank {} leaves after: {error}", self.rank);
        }
        if self.windows.is_none() {
            // No other rank uses our memory.
            return self.registry().closed(true);
        }
        // Another rank's kernel may still write into our window, or another rank may still have our memory mapped.
        let mut met = self.meet();
        self.registry().leave();
        self.windows.iter_mut().for_each(Windows::unmap);
        if met.is_ok() {
            met = self.meet();
        }
        self.registry().closed(met.is_ok());
        if let (Err(error), Some(windows)) = (met, &self.windows) {
            let bytes = self.path.bytes() >> 20;
            log::debug!("rank {} keeps {bytes} MiB of its device until the process ends: {error}", self.rank);
            windows.keep();
        }
    }
}

impl fmt::Debug for DeviceComm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceComm (rank {} of {}, GPU {})", self.rank, self.size, self.context.ordinal())
    }
}
