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
//!
//! The driver has few queues per GPU (`CUDA_DEVICE_MAX_CONNECTIONS`, 8 if not set), and the streams of a process share
//! them. A rank's wait also holds up the other streams of its queue. A rank orders its own operations so that this does
//! no harm. Ranks of one process on one GPU may deadlock (8 of them did), so at most half as many ranks as queues are
//! admitted.
//!
//! Waits on this path end by the host communicator's deadline. Its error names the missing ranks, and the streams are
//! released. Results of an all_reduce have the same bits on all ranks, because the host computes them.
//!
//! # Not implemented: a hierarchy
//! All ranks of a host send all of their data through it. A *hierarchical* algorithm would first reduce inside each
//! host by kernels (reduce_scatter), then exchange each GPU's part between the hosts, and gather it inside the host by
//! kernels (all_gather). The hosts' links would then carry each byte once per host instead of once per rank. It would
//! need two communicators per rank (the host's ranks; the ranks of the same number on all hosts), the same number of
//! ranks on every host or an uneven cut, and both calls in the caller's stream, one after the other or chunk by chunk.
//! The three calls exist.

mod copies;
mod progress;
mod route;
mod signals;
mod staging;

use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use cudarc::driver::{CudaContext, DriverError};

use super::checked::call::{Round, unsupported};
use super::driver::{cuda, is_capturing};
use super::path::{DataPath, Progress, Turn};
use copies::Copies;
use progress::{Job, Shared, Worker};
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
    /// One communicator of the same ranks for each worker. Every rank calls it.
    pub(super) fn new(comms: Vec<Comm>, context: &Arc<CudaContext>) -> Result<Hosted> {
        let op = "DeviceComm";
        let Some(first) = comms.first() else { return Err(Error::invalid(op, "no communicators of the host")) };
        let (rank, ranks, config) = (first.rank(), first.size(), first.config().clone());
        // Every row of an all_to_all has a line at least.
        let slot = config.cuda_chunk.max(128 * ranks).next_multiple_of(4096);
        let count = comms.len();
        let grid = Grid { ranks, workers: count, slot: slot as u64, least: LEAST as u64 };
        let background = count * first.ranks_here() > cores();
        let failed = |e: DriverError| cuda(op, "making streams and events", e);
        let copies = Copies::new(context, count).map_err(failed)?;
        let shared = Arc::new(Shared::new(Signals::new(context, count)?, config.cuda_failure));
        let worker = |(index, comm): (usize, Comm)| {
            let staging = Staging::new(&comm, context, DEPTH, slot)?;
            Ok(Arc::new(Worker::new((index, count), comm, &shared, staging, background)))
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

    /// Enqueues a call on its streams and hands it to the workers.
    ///
    /// # Safety
    /// As `DeviceComm::enqueue`.
    unsafe fn enqueue(&self, op: &str, turn: Turn, route: &Route) -> Result<()> {
        let stream = turn.stream;
        let failed = |e: DriverError| cuda(op, "enqueueing a call through the host", e);
        // SAFETY: a stream, by the contract of `enqueue`.
        if unsafe { is_capturing(stream) }.map_err(failed)? {
            return Err(Error::Unsupported {
                what: "capture into a graph of a call that goes through the hosts' memory".to_owned(),
                detail: "the host takes part in every call, and does not know when a graph is launched; capture what is between \
                         the calls"
                    .to_owned(),
            });
        }
        self.context.bind_to_thread().map_err(failed)?;
        let mut copies = lock(&self.copies);
        self.shared.asked.fetch_add(route.chunks() as u64, Ordering::AcqRel);
        // Before the copies, so that the threads wake up meanwhile.
        for (worker, &first) in self.workers.iter().zip(copies.numbers()).take(route.chunks()) {
            worker.push(Job { route: *route, first, call: turn.number });
        }
        self.last.store(turn.number, Ordering::Release);
        // SAFETY: forwarded from the caller.
        unsafe { copies.put(stream, route, &self.workers, &self.shared.signals) }.map_err(|e| {
            let error = failed(e);
            // Half of it may be enqueued.
            self.shared.fail(error.clone());
            error
        })
    }
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
        unsafe { self.enqueue(call.collective.name(), turn, &route) }
    }

    unsafe fn carry_round(&self, turn: Turn, _: &RawCall, round: Round) -> Result<()> {
        let mut route = Route::pair(round.to, round.from, &self.grid);
        route.own = round.own;
        // SAFETY: forwarded from the caller.
        unsafe { self.enqueue("send/recv", turn, &route) }
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
