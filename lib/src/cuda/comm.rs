//! A rank's membership in a group of ranks that drive GPUs.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use cudarc::driver::{CudaContext, CudaEvent, sys};

use super::call::{Stream, Team};
use super::driver::{available, cuda};
use super::hosted::{self, Hosted};
use super::kernels::Kernels;
use super::path::{self, Path};
use super::peers::{Mapped, Peer, Place, enable};
use super::phased::{Filled, Watch};
use super::registry::Registry;
use super::report::Report;
use super::schedules::Schedules;
use super::select::{self, Choice};
use super::window::{Layout, MAX_RANKS, Window};
use crate::comm::Comm;
use crate::config::{Config, CudaPath, PathCheck};
use crate::error::{Error, Result};
use crate::wire::Collective;

/// One rank of a group of ranks that each drive a GPU of this host.
///
/// Calls only enqueue, in the order of the caller's stream; calls of one communicator run in the order in which they were
/// made, also when they go to different streams. They can be captured in a CUDA graph, whose replays then count as calls: all
/// ranks must make and replay the same calls in the same order.
///
/// Dropping it waits for its kernels and for the other ranks to drop theirs, not after a failure.
pub struct DeviceComm {
    rank: usize,
    size: usize,
    pub(super) layout: Layout,
    pub(super) kernels: Arc<Kernels>,
    pub(super) team: Team,
    report: Arc<Report>,
    pub(super) carrier: Carrier,
    why: String,
    /// Whether CUDA is asked about every buffer.
    pub(super) checks_memory: bool,
    pub(super) path_check: PathCheck,
    patience: Duration,
    order: Mutex<Order>,
    choices: Mutex<Option<Choice>>,
    registry: Arc<Registry>,
    pub(super) schedules: Schedules,
    context: Arc<CudaContext>,
    /// Where ranks of other processes meet.
    host: Option<Comm>,
    // The last fields: freed after all else.
    peers: Vec<Peer>,
    _windows: Arc<Vec<Window>>,
}

/// What carries the calls.
#[derive(Debug)]
pub(super) enum Carrier {
    Peer,
    /// No kernel waits for another rank; a thread looks after the waits of the streams.
    Phased(Watch),
    /// Through the hosts' memory; windows and kernels are not used.
    Hosted(Hosted),
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
    /// Calls go through the peers' memory where all ranks reach each other's, else through the memory of the hosts: see
    /// [`DeviceComm::path`].
    ///
    /// # Errors
    /// [`Error::Unsupported`] when the peers' memory is asked for (`TINYNCCL_CUDA_PATH=peer`) and cannot be reached.
    pub fn new(comm: &Comm, context: &Arc<CudaContext>) -> Result<DeviceComm> {
        available()?;
        let op = "DeviceComm::new";
        let (rank, size) = (comm.rank(), comm.size());
        // Of its own, so that what it sends does not mix with the caller's calls.
        let host = comm.split(Some(0), 0)?.ok_or_else(|| Error::invalid(op, "no communicator came of the split"))?;
        comm.attach_child(&host);
        let asked = host.config().cuda_path;
        let mapped = match path::obstacle(asked, host.is_one_host(), size) {
            Some(why) => Err(why),
            None => Mapped::open(&host, context)?,
        };
        let Mapped { layout, shares_gpu, gpus, addresses, peers, window } = match mapped {
            Ok(mapped) => mapped,
            Err(why) if asked == CudaPath::Peer => return Err(refused(why)),
            Err(why) => return Self::hosted(host, context, why),
        };
        let config = host.config().clone();
        let mut device = Self::assemble(
            (rank, size),
            context,
            layout,
            addresses,
            &config,
            Some(host),
            peers,
            Arc::new(vec![window]),
        )?;
        if shares_gpu {
            let watch = Watch::start(context, &device.report, layout, addresses[rank], size, config.timeout)?;
            device.carrier = Carrier::Phased(watch);
            device.why = "ranks of several processes have one GPU".to_owned();
        }
        if let Some(why) = device.check_path()?.fault(&gpus) {
            return match device.host.take() {
                Some(host) if asked != CudaPath::Peer => {
                    drop(device);
                    Self::hosted(host, context, why)
                }
                _ => Err(refused(why)),
            };
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
        let size = contexts.len();
        if size == 0 {
            return Err(Error::invalid("DeviceComm::local", "no contexts, expected one for each rank"));
        }
        let reached = match path::obstacle(config.cuda_path, true, size) {
            Some(why) => Err(why),
            None => Self::over_peers(contexts, config)?,
        };
        match reached {
            Ok(ranks) => Ok(ranks),
            Err(why) if config.cuda_path == CudaPath::Peer => Err(refused(why)),
            Err(why) => Self::hosted_within_process(contexts, config, &why),
        }
    }

    /// The ranks of one process by kernels. The inner error says why that does not work.
    fn over_peers(contexts: &[Arc<CudaContext>], config: &Config) -> Result<Result<Vec<DeviceComm>, String>> {
        let size = contexts.len();
        let places = contexts.iter().map(Place::of).collect::<Result<Vec<Place>>>()?;
        let layout = reach_within_process(contexts)
            .and_then(|()| Place::layout(&places, false, config).map_err(|error| error.to_string()));
        let layout = match layout {
            Ok(layout) => layout,
            Err(why) => return Ok(Err(why)),
        };
        let windows =
            Arc::new(contexts.iter().map(|c| Window::new(c, layout.bytes())).collect::<Result<Vec<Window>>>()?);
        let mut addresses = [0; MAX_RANKS];
        for (address, window) in addresses.iter_mut().zip(windows.iter()) {
            *address = window.address;
        }
        let one = |(rank, context): (usize, &Arc<CudaContext>)| {
            let ranks = (rank, size);
            Self::assemble(ranks, context, layout, addresses, config, None, Vec::new(), windows.clone())
        };
        let ranks = contexts.iter().enumerate().map(one).collect::<Result<Vec<DeviceComm>>>()?;
        let gpus: Vec<String> = places.iter().map(Place::gpu).collect();
        Ok(match Self::check_paths(&ranks)?.fault(&gpus) {
            None => Ok(ranks),
            Some(why) => Err(why),
        })
    }

    /// Through the hosts' memory, because of `why`.
    fn hosted(host: Comm, context: &Arc<CudaContext>, why: String) -> Result<DeviceComm> {
        let wanted = hosted::lanes(host.config(), host.ranks_here());
        let lanes: Vec<usize> = host.exchange("DeviceComm: lanes", &wanted)?;
        let lane = |_| {
            let lane = host.split(Some(0), 0)?.ok_or_else(|| Error::invalid("DeviceComm", "a split gave nothing"))?;
            host.attach_child(&lane);
            Ok(lane)
        };
        let comms = (0..lanes.into_iter().min().unwrap_or(1)).map(lane).collect::<Result<_>>()?;
        let device = Self::over_hosts(comms, context, Some(host), why)?;
        device.meet()?;
        Ok(device)
    }

    /// As [`DeviceComm::hosted`] for ranks that one thread may drive, and make: each is made by a thread, because they meet.
    fn hosted_within_process(contexts: &[Arc<CudaContext>], config: &Config, why: &str) -> Result<Vec<DeviceComm>> {
        let size = contexts.len();
        let mut comms: Vec<Vec<Comm>> = (0..size).map(|_| Vec::new()).collect();
        for _ in 0..hosted::lanes(config, size) {
            for (rank, comm) in Comm::threads(size, config.clone())?.into_iter().enumerate() {
                comms[rank].push(comm);
            }
        }
        std::thread::scope(|scope| {
            let make = |(comms, context)| scope.spawn(move || Self::over_hosts(comms, context, None, why.to_owned()));
            let threads: Vec<_> = comms.into_iter().zip(contexts).map(make).collect();
            let lost = || Err(Error::invalid("DeviceComm::local", "a thread that made a rank panicked"));
            threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| lost())).collect()
        })
    }

    fn over_hosts(comms: Vec<Comm>, context: &Arc<CudaContext>, host: Option<Comm>, why: String) -> Result<DeviceComm> {
        let Some(first) = comms.first() else { return Err(Error::invalid("DeviceComm", "no lanes")) };
        let (rank, size, config) = (first.rank(), first.size(), first.config().clone());
        if rank == 0 {
            let level = if config.cuda_path == CudaPath::Hosted { log::Level::Info } else { log::Level::Warn };
            log::log!(level, "collectives on GPUs go through the hosts' memory: {why}");
        }
        let layout = Layout::new(size.min(MAX_RANKS), 1, &config);
        let hosted = Hosted::new(comms, context)?;
        let (none, memory) = (Vec::new(), Arc::default());
        let ranks = (rank, size);
        let mut device = Self::assemble(ranks, context, layout, [0; MAX_RANKS], &config, host, none, memory)?;
        device.carrier = Carrier::Hosted(hosted);
        device.why = why;
        Ok(device)
    }

    #[expect(clippy::too_many_arguments, reason = "the parts of a communicator, put together in one place")]
    fn assemble(
        (rank, size): (usize, usize),
        context: &Arc<CudaContext>,
        layout: Layout,
        windows: [u64; MAX_RANKS],
        config: &Config,
        host: Option<Comm>,
        peers: Vec<Peer>,
        memory: Arc<Vec<Window>>,
    ) -> Result<DeviceComm> {
        let report = Arc::new(Report::new(context)?);
        let patience = config.timeout;
        let event = context.new_event(None).map_err(|e| cuda("DeviceComm", "making an event", e))?;
        let team = Team {
            windows,
            report: report.address,
            patience: u64::try_from(patience.as_nanos()).unwrap_or(u64::MAX),
            call: 0,
            rank: rank as u32,
            number: 0,
        };
        if let Some(host) = &host {
            let weak: Weak<Report> = Arc::downgrade(&report);
            host.attach(weak);
        }
        Ok(DeviceComm {
            rank,
            size,
            layout,
            kernels: Kernels::shared(context, layout)?,
            team,
            report,
            carrier: Carrier::Peer,
            why: "all ranks reach each other's memory".to_owned(),
            checks_memory: config.cuda_check,
            path_check: config.cuda_path_check,
            patience,
            order: Mutex::new(Order { number: 0, filled: Filled::default(), last: None, event }),
            choices: Mutex::new(None),
            registry: Registry::new(context, rank, host.is_some()),
            schedules: Schedules::default(),
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

    /// Which way the data takes; the same on all ranks.
    pub fn path(&self) -> Path {
        match self.carrier {
            Carrier::Peer => Path::Peer,
            Carrier::Phased(_) => Path::Phased,
            Carrier::Hosted(_) => Path::Hosted,
        }
    }

    /// Why it takes this way, in words.
    pub fn path_reason(&self) -> &str {
        &self.why
    }

    /// Memory that the communicator takes on each rank: of the device, or of the host where calls go through it.
    pub fn window_bytes(&self) -> usize {
        match &self.carrier {
            Carrier::Peer | Carrier::Phased(_) => self.layout.bytes(),
            Carrier::Hosted(hosted) => hosted.bytes(),
        }
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
            .filter(|&choice| self.fits(collective, choice, bytes))
            .unwrap_or_else(|| select::choose(&self.layout, collective, bytes, self.registry.is_used()))
    }

    /// Takes `choice` from now on wherever it fits; `None` goes by size again. Every rank must call it at the same place.
    pub fn set_choice(&self, choice: Option<Choice>) {
        *self.choices.lock().unwrap_or_else(PoisonError::into_inner) = choice;
    }

    /// Gives the failure of a call that ran before, if one has failed.
    ///
    /// # Errors
    /// [`Error::PeerLost`] when a rank's process has died: the host's communicator learns of it, and kernels leave at once.
    /// [`Error::Timeout`] naming the rank that did not come, the disagreement, or [`Error::Aborted`]. It stays the same error,
    /// and outputs of calls that were not finished hold anything.
    #[inline]
    pub fn check(&self) -> Result<()> {
        if let Carrier::Hosted(hosted) = &self.carrier {
            return hosted.check();
        }
        if self.report.has_failed() { self.failure() } else { Ok(()) }
    }

    #[cold]
    fn failure(&self) -> Result<()> {
        if let Some(cause) = self.report.cause() {
            return Err(cause);
        }
        // Being written: the rest of it comes within microseconds.
        for _ in 0..1000 {
            if let Some(error) = self.report.given_up(self.rank, self.patience) {
                let cause = self.report.settle(self.explained(error));
                // The other ranks need not wait for their deadline.
                if let Some(host) = &self.host {
                    host.fail_everywhere(cause.clone());
                }
                return Err(cause);
            }
            std::thread::yield_now();
        }
        Err(self.report.settle(self.aborted("a kernel gave up and did not say why")))
    }

    /// A wait that ended in vain, with what the host knows of the rank: it may be another's fault that this one did not come.
    fn explained(&self, error: Error) -> Error {
        let Error::Timeout { op, rank, waited, missing, detail } = error else { return error };
        match self.host.as_ref().and_then(|host| host.find_absent(&missing)) {
            Some((missing, why)) => Error::Timeout { op, rank, waited, missing, detail: format!("{why}; {detail}") },
            None => Error::Timeout { op, rank, waited, missing, detail },
        }
    }

    fn aborted(&self, reason: &str) -> Error {
        Error::Aborted { op: "a call on the device".to_owned(), rank: self.rank, reason: reason.to_owned() }
    }

    /// Makes kernels that wait leave, from any thread; later calls give [`Error::Aborted`]. The other ranks' too, where a host
    /// communicator tells them; ranks of [`DeviceComm::local`] each have to be told.
    pub fn abort(&self) {
        let reason = "abort was called on the device's communicator";
        match &self.carrier {
            Carrier::Peer | Carrier::Phased(_) => self.report.abort(self.aborted(reason)),
            Carrier::Hosted(hosted) => hosted.abort(self.aborted(reason)),
        }
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

    /// Whether calls go through the hosts' memory, where registering is of no use.
    pub(super) fn is_hosted(&self) -> bool {
        matches!(self.carrier, Carrier::Hosted(_))
    }

    /// Whether both came of one [`DeviceComm::local`].
    pub(super) fn is_beside(&self, other: &DeviceComm) -> bool {
        Arc::ptr_eq(&self._windows, &other._windows) || self.is_hosted() && other.is_hosted()
    }

    /// Nobody uses a window before all have mapped it.
    pub(super) fn meet(&self) -> Result<()> {
        self.host.as_ref().map_or(Ok(()), Comm::barrier)
    }
}

/// Lets every device of this process reach the others' memory, or says which one does not.
fn reach_within_process(contexts: &[Arc<CudaContext>]) -> Result<(), String> {
    for context in contexts {
        for other in contexts.iter().filter(|other| other.ordinal() != context.ordinal()) {
            enable(context, other.ordinal()).map_err(|e| {
                let detail = format!("peer access, GPU {} to GPU {}", context.ordinal(), other.ordinal());
                cuda("DeviceComm::local", detail, e).to_string()
            })?;
        }
    }
    Ok(())
}

fn refused(why: String) -> Error {
    Error::Unsupported {
        what: "a device communicator over the peers' memory".to_owned(),
        detail: format!("{why}: leave TINYNCCL_CUDA_PATH at auto to go through the hosts' memory then"),
    }
}

impl Drop for DeviceComm {
    fn drop(&mut self) {
        if let Err(error) = self.synchronize() {
            log::debug!("rank {} leaves after: {error}", self.rank);
        }
        if let Carrier::Hosted(_) = self.carrier {
            // Nobody else uses memory of ours.
            return self.registry.closed(true);
        }
        // Another rank's kernel may still write into our window; then another rank may have our memory mapped yet.
        let mut met = self.meet();
        self.registry.leave();
        self.peers.clear();
        if met.is_ok() {
            met = self.meet();
        }
        self.registry.closed(met.is_ok());
        if let Err(error) = met {
            let bytes = self.layout.bytes() >> 20;
            log::debug!("rank {} keeps {bytes} MiB of its device until the process ends: {error}", self.rank);
            std::mem::forget(self._windows.clone());
        }
    }
}

impl fmt::Debug for DeviceComm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceComm (rank {} of {}, GPU {})", self.rank, self.size, self.context.ordinal())
    }
}
