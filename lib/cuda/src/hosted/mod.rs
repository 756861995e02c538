//! Collectives through the hosts' memory, for GPUs without peer access.
//!
//! A call is cut into chunks. Each chunk is copied into page-locked memory of the host, goes through the host
//! communicator's collective (over shared memory, TCP or RDMA), and is copied up. The three stages overlap:
//!
//! ```text
//! stream down    copy 0 | copy 1 | copy 2 | copy 3 |
//! worker's thread           wire 0 | wire 1 | wire 2 | wire 3 |
//! stream up                        copy 0 | copy 1 | copy 2 | copy 3 |
//! ```
//! Only streams wait for the host, by `cuStreamWaitValue32`, so the GPU is free meanwhile. A call of one chunk goes
//! down and up in the caller's stream, without other streams and events. Several *workers* (threads, each with its own
//! communicator and slots) take chunks round robin.
//!
//! | file | idea |
//! | --- | --- |
//! | `route` | the data of a call, cut into chunks |
//! | `staging` | the page-locked slots |
//! | `signals` | counts by which streams and threads synchronise |
//! | `copies` | the streams' part |
//! | `progress` | the threads' part |
//! | `reach` | their communicators |
//! | `shares` | a buffer that the ranks of a host share out |
//! | `around` | what a call enqueues around its chunks |
//!
//! The driver has few queues per GPU (`CUDA_DEVICE_MAX_CONNECTIONS`, 8 if not set), and the streams of a process share
//! them. A rank's wait also holds up the other streams of its queue. A rank orders its own operations so that this does
//! no harm. Ranks of one process on one GPU may deadlock (8 of them did), so at most half as many ranks as queues are
//! admitted.
//!
//! Waits on this path end by the host communicator's deadline. Its error names the missing ranks, and the streams are
//! released. Results of an all_reduce have the same bits on all ranks, because the host computes them.
//!
//! All ranks send all of their data through the host here. Where kernels join the ranks of each host, `hosts` uses this
//! path for what goes between the hosts alone: over a *lane*, the ranks of the same number on all hosts.

pub(crate) mod around;
mod copies;
mod progress;
pub(crate) mod reach;
pub(crate) mod route;
pub(crate) mod shares;
mod signals;
mod staging;

use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use cudarc::driver::{CudaContext, DriverError, sys};

use super::checked::call::{Round, unsupported};
use super::driver::{cuda, is_capturing};
use super::path::{DataPath, Progress, Turn};
use around::{Around, Nothing};
use copies::{Copies, Stopped};
use progress::{Job, Shared, Worker};
use reach::Lanes;
use route::{Grid, Route};
use signals::Signals;
use staging::{DEPTH, Staging};
use tinynccl_comm::Comm;
use tinynccl_comm::RawCall;
use tinynccl_plan::device::{Choice, Path};
use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::config::Config;
use tinynccl_sys::threads::lock;

/// Bytes that are not worth cutting: enqueueing a chunk takes some 40 us on an H200's host (256 chunks of 512 KiB: 10.8
/// ms for any number of workers from four on), as long as copying 2 MiB.
const LEAST: usize = 1 << 20;
/// Most workers by default: more cores do not make the host's memory faster.
const WORKERS: usize = 4;

/// Queues per GPU of a process by default, and the most that it can request.
const QUEUES: usize = 8;
const MOST_QUEUES: usize = 32;

/// The hosted path of one rank.
pub(super) struct Hosted {
    context: Arc<CudaContext>,
    shared: Arc<Shared>,
    workers: Vec<Arc<Worker>>,
    threads: Vec<JoinHandle<()>>,
    copies: Mutex<Copies>,
    grid: Grid,
    rank: usize,
    /// Ranks of a lane; 0 without lanes.
    lane: usize,
    /// Number of the last call that was handed to the workers.
    last: AtomicU32,
}

/// Workers that suit this host, whose cores `ranks` ranks share. All ranks take the smallest number of any.
pub(super) fn workers(config: &Config, ranks: usize) -> usize {
    match config.cuda_threads {
        // The program keeps half of the cores.
        0 => (cores() / ranks.max(1) / 2).clamp(1, WORKERS),
        set => set,
    }
}

/// Ranks of one process that may share a GPU here.
pub(super) fn most_sharing() -> usize {
    let set = std::env::var("CUDA_DEVICE_MAX_CONNECTIONS").ok().and_then(|text| text.trim().parse().ok());
    (set.unwrap_or(QUEUES).clamp(1, MOST_QUEUES) / 2).max(1)
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

impl Hosted {
    /// Communicators of the same ranks for each worker. Every rank calls it.
    pub(super) fn new(comms: Vec<Lanes>, context: &Arc<CudaContext>) -> Result<Hosted> {
        let op = "DeviceComm";
        let none = || Error::invalid(op, "no communicators of the host");
        let first = &comms.first().ok_or_else(none)?.all.comm;
        let lane = comms.first().and_then(|lanes| lanes.lane.as_ref()).map_or(0, |lane| lane.comm.size());
        let (rank, ranks, config) = (first.rank(), first.size(), first.config().clone());
        // Every row of an all_to_all has a line at least.
        let slot = config.cuda_chunk.max(128 * ranks).next_multiple_of(4096);
        let count = comms.len();
        let grid = Grid { ranks, workers: count, slot: slot as u64, least: LEAST as u64 };
        let background = count * first.ranks_here() > cores();
        let failed = |e: DriverError| cuda(op, "making streams and events", e);
        let copies = Copies::new(context, count).map_err(failed)?;
        let shared = Arc::new(Shared::new(Signals::new(context, count)?, config.cuda_failure));
        let worker = |(index, lanes): (usize, Lanes)| {
            let staging = Staging::new(&lanes.all.comm, context, DEPTH, slot)?;
            Ok(Arc::new(Worker::new((index, count), lanes, &shared, staging, background)))
        };
        let workers = comms.into_iter().enumerate().map(worker).collect::<Result<Vec<Arc<Worker>>>>()?;
        let context = context.clone();
        let mut hosted = Hosted {
            context,
            shared,
            workers,
            threads: Vec::new(),
            copies: Mutex::new(copies),
            grid,
            rank,
            lane,
            last: AtomicU32::new(0),
        };
        for (index, worker) in hosted.workers.iter().enumerate() {
            let worker = worker.clone();
            let thread = std::thread::Builder::new()
                .name(format!("tinynccl-worker-{index}"))
                .spawn(move || worker.run())
                .map_err(|e| Error::io(op, "starting a thread", &e))?;
            hosted.threads.push(thread);
        }
        Ok(hosted)
    }

    /// The cut of what goes over a lane.
    pub(super) fn lane_grid(&self) -> Grid {
        Grid { ranks: self.lane, ..self.grid }
    }

    /// Calls inside the host go along `inside`; each of the two hears of the other's failure.
    pub(super) fn is_around(&self, inside: Arc<dyn DataPath>) {
        self.shared.is_around(inside);
    }

    /// Number of the last call that was handed to the workers.
    pub(super) fn last(&self) -> u32 {
        self.last.load(Ordering::Acquire)
    }

    /// A failure that the ranks of all hosts must know of.
    pub(super) fn fail_everywhere(&self, error: Error) {
        if let Some(worker) = self.workers.first() {
            worker.fail_everywhere(error.clone());
        }
        self.shared.fail(error);
    }

    /// Enqueues a call on its streams and hands it to the workers.
    ///
    /// # Safety
    /// As `DeviceComm::enqueue`.
    pub(super) unsafe fn enqueue(&self, op: &str, turn: Turn, route: &Route, around: &mut dyn Around) -> Result<()> {
        let stream = turn.stream;
        let failed = |e: DriverError| cuda(op, "enqueueing a call through the host", e);
        // SAFETY: a stream, by the contract of `enqueue`.
        unsafe { refuse_capture(op, stream) }?;
        self.context.bind_to_thread().map_err(failed)?;
        let mut copies = lock(&self.copies);
        self.shared.asked.fetch_add(route.chunks() as u64, Ordering::AcqRel);
        // Before the copies, so that the threads wake up meanwhile.
        for (worker, &first) in self.workers.iter().zip(copies.numbers()).take(route.chunks()) {
            worker.push(Job { route: *route, first, call: turn.number });
        }
        self.last.store(turn.number, Ordering::Release);
        // SAFETY: forwarded from the caller.
        unsafe { copies.put(stream, route, &self.workers, &self.shared.signals, around) }.map_err(|stopped| {
            let error = match stopped {
                Stopped::Driver(error) => failed(error),
                Stopped::Around(error) => error,
            };
            // Half of it may be enqueued.
            self.shared.fail(error.clone());
            error
        })
    }
}

/// Fails where the stream is being captured.
///
/// # Safety
/// `stream` must be one, or the default one.
pub(super) unsafe fn refuse_capture(op: &str, stream: sys::CUstream) -> Result<()> {
    // SAFETY: by the caller.
    if unsafe { is_capturing(stream) }.map_err(|e| cuda(op, "asking for the stream's capture", e))? {
        return Err(Error::Unsupported {
            what: "capture into a graph of a call that goes through the hosts' memory".to_owned(),
            detail: "the host takes part in every call, and does not know when a graph is launched; capture what is \
                     between the calls"
                .to_owned(),
        });
    }
    Ok(())
}

impl DataPath for Hosted {
    fn path(&self) -> Path {
        Path::Hosted
    }

    fn bytes(&self) -> usize {
        self.workers.len() * DEPTH * self.grid.slot as usize
    }

    unsafe fn carry(&self, turn: Turn, call: &RawCall, _: Choice) -> Result<()> {
        let route = Route::of(call, self.rank, &self.grid).ok_or_else(|| unsupported(call.collective))?;
        // SAFETY: forwarded from the caller.
        unsafe { self.enqueue(call.collective.name(), turn, &route, &mut Nothing) }
    }

    unsafe fn carry_round(&self, turn: Turn, _: &RawCall, round: Round) -> Result<()> {
        let mut route = Route::pair(round.to, round.from, &self.grid);
        route.own = round.own;
        // SAFETY: forwarded from the caller.
        unsafe { self.enqueue("send/recv", turn, &route, &mut Nothing) }
    }

    /// Each worker's communicator notifies the other ranks.
    fn check(&self, _: Option<&Comm>) -> Result<()> {
        self.shared.check()
    }

    fn admit(&self, _: Option<&Comm>) -> Result<()> {
        if self.shared.holds() { Ok(()) } else { self.shared.check() }
    }

    fn cut_short(&self) -> bool {
        self.shared.cut_short()
    }

    fn abort(&self, error: Error) {
        let reason = error.to_string();
        self.shared.fail(error);
        self.shared.set_hold(false);
        self.workers.iter().for_each(|worker| worker.abort(&reason));
    }

    fn hear(&self, error: &Error) {
        self.shared.fail(error.clone());
    }

    fn set_hold(&self, hold: bool) -> bool {
        self.shared.set_hold(hold)
    }

    fn failure_age(&self) -> Option<Duration> {
        self.shared.failure_age()
    }

    /// A call is over here once its data has come: the copy to the device may still run.
    fn progress(&self) -> Progress {
        let last = self.last.load(Ordering::Acquire);
        // Numbers that begin again are in order by their distance from the last one.
        let behind = |number: &u32| last.wrapping_sub(*number);
        let unfinished = self.workers.iter().filter_map(|worker| worker.oldest()).max_by_key(behind);
        let finished = unfinished.map_or(last, |number| number.wrapping_sub(1));
        let begun = self.workers.iter().filter_map(|worker| worker.begun()).min_by_key(behind);
        Progress { begun: Some(begun.unwrap_or(finished)), finished: Some(finished) }
    }
}

impl Drop for Hosted {
    fn drop(&mut self) {
        if let Err(error) = self.shared.check() {
            // Workers that have not failed may wait for ranks whose workers are gone.
            self.workers.iter().for_each(|worker| worker.abort(&error.to_string()));
        }
        self.workers.iter().for_each(|worker| worker.close());
        for thread in self.threads.drain(..) {
            // A panic has been reported by its own thread; there is nothing to add here.
            let _ = thread.join();
        }
        self.shared.signals.release();
        if let Err(error) = lock(&self.copies).synchronize() {
            log::debug!("rank {}: the copies did not end: {error:?}", self.rank);
        }
    }
}

impl fmt::Debug for Hosted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Hosted ({} workers, {} KiB each slot)", self.workers.len(), self.grid.slot >> 10)
    }
}
