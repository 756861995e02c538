//! A rank's membership in a group of ranks that drive GPUs.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cudarc::driver::{CudaContext, CudaEvent, sys};

use super::call::{Stream, Team};
use super::driver::{available, cuda};
use super::kernels::Kernels;
use super::peers::{Introduction, Peer, Place, enable};
use super::phased::{Filled, Watch};
use super::registry::{Registration, Registry};
use super::report::Report;
use super::select::{self, Choice};
use super::window::{Layout, MAX_RANKS, Window};
use crate::comm::Comm;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::wire::Collective;

/// One rank of a group of ranks that each drive a GPU of this host.
///
/// Calls only enqueue, in the order of the caller's stream; calls of one communicator run in the order in which they were
/// made, also when they go to different streams. They can be captured in a CUDA graph, whose replays then count as calls: all
/// ranks must make and replay the same calls in the same order.
///
/// Dropping it waits for its kernels and for the other ranks to drop theirs.
pub struct DeviceComm {
    rank: usize,
    size: usize,
    pub(super) layout: Layout,
    pub(super) kernels: Arc<Kernels>,
    pub(super) team: Team,
    report: Arc<Report>,
    /// Ranks of several processes have the same GPU: no kernel waits for another rank.
    pub(super) phased: bool,
    pub(super) watch: Option<Watch>,
    patience: Duration,
    order: Mutex<Order>,
    choices: Mutex<Option<Choice>>,
    registry: Arc<Registry>,
    context: Arc<CudaContext>,
    /// Where ranks of other processes meet.
    host: Option<Comm>,
    // The last fields: freed after all else.
    peers: Vec<Peer>,
    _windows: Arc<Vec<Window>>,
}

/// Calls so far.
#[derive(Debug)]
pub(super) struct Order {
    pub(super) number: u32,
    pub(super) filled: Filled,
    last: Option<Stream>,
    event: CudaEvent,
}

// SAFETY: a stream's handle may be used by any thread, and so may cudarc's stream.
unsafe impl Send for Order {}

impl DeviceComm {
    /// Joins the ranks of `comm`, each with the device of its `context`. Every rank must call it.
    ///
    /// # Errors
    /// [`Error::Unsupported`] when ranks are on different hosts, or when there are more than 8; [`Error::Cuda`] when the devices
    /// cannot reach each other.
    pub fn new(comm: &Comm, context: &Arc<CudaContext>) -> Result<DeviceComm> {
        available()?;
        let op = "DeviceComm::new";
        let (rank, size) = (comm.rank(), comm.size());
        limit(op, size)?;
        // Of its own, so that what it sends does not mix with the caller's calls.
        let host = comm.split(Some(0), 0)?.ok_or_else(|| Error::invalid(op, "no communicator came of the split"))?;
        if !host.is_one_host() {
            return Err(Error::Unsupported {
                what: "a device communicator across hosts".to_owned(),
                detail: "its kernels reach each other's memory by NVLink or PCIe: split the communicator by host"
                    .to_owned(),
            });
        }
        let place = Place::of(context)?;
        let places: Vec<Place> = host.exchange("DeviceComm: device", &place)?;
        let phased =
            places.iter().enumerate().any(|(i, a)| places[..i].iter().any(|b| a.same_device(b) && !a.same_process(b)));
        let most = |one: &Place| places.iter().filter(|other| one.same_device(other)).count();
        // In phases, nobody waits for another's blocks.
        let sharing = if phased { 1 } else { places.iter().map(most).max().unwrap_or(1) };
        let layout = Layout::new(size, sharing, host.config());
        let window = Window::new(context, layout.bytes(), "a window")?;
        let ours = Introduction::new(place, &window)?;
        let all: Vec<Introduction> = host.exchange("DeviceComm: window", &ours)?;
        let mut addresses = [0; MAX_RANKS];
        let mut peers = Vec::new();
        for (peer, theirs) in all.iter().enumerate() {
            if peer == rank {
                addresses[peer] = window.address;
                continue;
            }
            let opened = Peer::open(context, &layout, (rank, peer), &ours, theirs)?;
            addresses[peer] = opened.address;
            peers.push(opened);
        }
        let patience = host.config().timeout;
        let mut device = Self::assemble(
            (rank, size),
            context,
            layout,
            addresses,
            patience,
            Some(host),
            peers,
            Arc::new(vec![window]),
        )?;
        if phased {
            device.watch = Some(Watch::start(context, &device.report, layout, addresses[rank], size, patience)?);
            device.phased = true;
        }
        device.meet()?;
        Ok(device)
    }

    /// The ranks of one process, rank `r` with the device of `contexts[r]`; one thread may drive them all. Ranks may share a
    /// GPU; each then needs a stream of its own, and their kernels have fewer blocks, so that all of them are resident.
    ///
    /// # Errors
    /// As [`DeviceComm::new`].
    pub fn local(contexts: &[Arc<CudaContext>], config: &Config) -> Result<Vec<DeviceComm>> {
        available()?;
        let patience = config.timeout;
        let size = contexts.len();
        limit("DeviceComm::local", size)?;
        let same = |one: &Arc<CudaContext>| contexts.iter().filter(|other| other.ordinal() == one.ordinal()).count();
        let layout = Layout::new(size, contexts.iter().map(same).max().unwrap_or(1), config);
        let windows = Arc::new(
            contexts.iter().map(|c| Window::new(c, layout.bytes(), "a window")).collect::<Result<Vec<Window>>>()?,
        );
        let mut addresses = [0; MAX_RANKS];
        for (address, window) in addresses.iter_mut().zip(windows.iter()) {
            *address = window.address;
        }
        for context in contexts {
            for other in contexts.iter().filter(|other| other.ordinal() != context.ordinal()) {
                enable(context, other.ordinal()).map_err(|e| {
                    let detail = format!("peer access, GPU {} to GPU {}", context.ordinal(), other.ordinal());
                    cuda("DeviceComm::local", detail, e)
                })?;
            }
        }
        contexts
            .iter()
            .enumerate()
            .map(|(rank, context)| {
                Self::assemble((rank, size), context, layout, addresses, patience, None, Vec::new(), windows.clone())
            })
            .collect()
    }

    #[expect(clippy::too_many_arguments, reason = "the parts of a communicator, put together in one place")]
    fn assemble(
        (rank, size): (usize, usize),
        context: &Arc<CudaContext>,
        layout: Layout,
        windows: [u64; MAX_RANKS],
        patience: Duration,
        host: Option<Comm>,
        peers: Vec<Peer>,
        memory: Arc<Vec<Window>>,
    ) -> Result<DeviceComm> {
        let report = Arc::new(Report::new(context)?);
        let event = context.new_event(None).map_err(|e| cuda("DeviceComm", "making an event", e))?;
        let team = Team {
            windows,
            report: report.address,
            patience: u64::try_from(patience.as_nanos()).unwrap_or(u64::MAX),
            call: 0,
            rank: rank as u32,
            number: 0,
        };
        Ok(DeviceComm {
            rank,
            size,
            layout,
            kernels: Kernels::shared(context, layout)?,
            team,
            report,
            phased: false,
            watch: None,
            patience,
            order: Mutex::new(Order { number: 0, filled: Filled::default(), last: None, event }),
            choices: Mutex::new(None),
            registry: Registry::new(context, rank, host.is_some()),
            context: context.clone(),
            host,
            peers,
            _windows: memory,
        })
    }

    /// Our rank, in `0..size`.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Whether ranks of several processes have the same GPU, so that calls are made in phases and cannot be captured.
    pub fn shares_gpu(&self) -> bool {
        self.phased
    }

    /// Device memory that the communicator takes on each rank.
    pub fn window_bytes(&self) -> usize {
        self.layout.bytes()
    }

    /// Our device.
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    /// How a collective of so many bytes (of the whole buffer for all_reduce, broadcast and reduce, of one rank's segment for the
    /// others) is carried out.
    pub fn choice(&self, collective: Collective, bytes: usize) -> Choice {
        let forced = *self.choices.lock().unwrap_or_else(PoisonError::into_inner);
        forced
            .filter(|&choice| select::fits(&self.layout, collective, choice, bytes))
            .unwrap_or_else(|| select::choose(&self.layout, collective, bytes, self.registry.is_used()))
    }

    /// Takes `choice` from now on wherever it fits; `None` goes by size again. Every rank must call it at the same place.
    pub fn set_choice(&self, choice: Option<Choice>) {
        *self.choices.lock().unwrap_or_else(PoisonError::into_inner) = choice;
    }

    /// Gives the failure of a call that ran before, if one has failed.
    ///
    /// # Errors
    /// [`Error::Timeout`] naming the rank that did not come, or the disagreement, or [`Error::Aborted`].
    #[inline]
    pub fn check(&self) -> Result<()> {
        if self.report.has_failed() { self.failure() } else { Ok(()) }
    }

    #[cold]
    fn failure(&self) -> Result<()> {
        // Being written: the rest of it comes within microseconds.
        for _ in 0..1000 {
            if let Some(error) = self.report.failure(self.rank, self.patience) {
                return Err(error);
            }
            std::thread::yield_now();
        }
        Err(Error::Aborted {
            op: "device".to_owned(),
            rank: self.rank,
            reason: "abort was called on the device's communicator".to_owned(),
        })
    }

    /// Makes kernels of this rank that wait for others leave, from any thread; later calls give [`Error::Aborted`]. The other
    /// ranks' kernels leave by their own deadline.
    pub fn abort(&self) {
        self.report.abort();
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

    /// How many calls of this rank, and messages sent and received, used registered buffers without slots so far. Waits for the
    /// calls made.
    ///
    /// # Errors
    /// As [`DeviceComm::synchronize`].
    pub fn direct_calls(&self) -> Result<u64> {
        let failed = |e| cuda("direct_calls", "reading the count", e);
        self.synchronize()?;
        self.context.bind_to_thread().map_err(failed)?;
        let mut count = [0u64];
        let at = self.team.windows[self.rank] + self.layout.direct_count() as u64;
        // SAFETY: 8 bytes of our own window.
        unsafe { cudarc::driver::result::memcpy_dtoh_sync(&mut count, at) }.map_err(failed)?;
        Ok(count[0])
    }

    pub(super) fn report(&self) -> &Report {
        &self.report
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
            let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
            // SAFETY: both are streams, by the contract of `enqueue`.
            unsafe { sys::cuStreamIsCapturing(one, &mut status) }.result()?;
            if status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE {
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
        &self.registry
    }

    /// Whether both came of one [`DeviceComm::local`].
    pub(super) fn is_beside(&self, other: &DeviceComm) -> bool {
        Arc::ptr_eq(&self._windows, &other._windows)
    }

    /// Meets the other ranks to register `ours`, or nothing.
    pub(super) fn meet_to_register(&self, ours: Result<Option<(u64, u64)>>) -> Result<Registration> {
        let host = self.host.as_ref().ok_or_else(|| Error::Unsupported {
            what: "registering one rank's buffer among the ranks of one process".to_owned(),
            detail: "one thread may drive them all: register those of all ranks at once, with DeviceComm::alloc_local"
                .to_owned(),
        })?;
        self.registry.meet(host, &self.layout, self.team.windows[self.rank], ours)
    }

    /// Nobody uses a window before all have mapped it.
    fn meet(&self) -> Result<()> {
        self.host.as_ref().map_or(Ok(()), Comm::barrier)
    }
}

fn limit(op: &str, size: usize) -> Result<()> {
    if (1..=MAX_RANKS).contains(&size) {
        return Ok(());
    }
    Err(Error::Unsupported {
        what: format!("a device communicator of {size} ranks"),
        detail: format!("{op} takes 1 to {MAX_RANKS}, the GPUs that one host's NVLink joins"),
    })
}

impl Drop for DeviceComm {
    fn drop(&mut self) {
        if let Err(error) = self.synchronize() {
            log::debug!("rank {} leaves after: {error}", self.rank);
        }
        // Another rank's kernel may still write into our window; then another rank may have our memory mapped yet.
        let mut met = self.meet();
        self.registry.leave();
        self.peers.clear();
        if met.is_ok() {
            met = self.meet();
        }
        if let Err(error) = met {
            log::debug!("rank {} does not wait for the others: {error}", self.rank);
        }
        self.registry.closed();
    }
}

impl fmt::Debug for DeviceComm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceComm (rank {} of {}, GPU {})", self.rank, self.size, self.context.ordinal())
    }
}
