//! The threads that carry chunks between the hosts.
//!
//! Each *worker* has its own thread, host communicators and slots; chunks of a call go to the workers round robin. One
//! thread copies and reduces at the speed of one core, far below that of the device's link to the host.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::reach::{Lanes, Reach};
use super::route::{Route, Side, Wire};
use super::signals::Signals;
use super::staging::{DEPTH, Staging};
use crate::path::DataPath;
use tinynccl_comm::executor::Buffers;
use tinynccl_comm::{Attached, RawCall};
use tinynccl_plan::Call;
use tinynccl_plan::dtype::DType;
use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::backoff::Backoff;
use tinynccl_sys::config::CudaFailure;
use tinynccl_sys::threads::lock;

/// State that all workers of a rank share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) signals: Signals,
    failed: AtomicBool,
    failure: Mutex<Option<(Error, Instant)>>,
    /// True if streams go on waiting after a failure ([`CudaFailure::Hold`]).
    hold: AtomicBool,
    closing: AtomicBool,
    /// Chunks of all calls made, and those that went through.
    pub(super) asked: AtomicU64,
    done: AtomicU64,
    /// The path of calls inside the host, whose data go through here, too.
    inside: OnceLock<Arc<dyn DataPath>>,
}

impl Shared {
    pub(super) fn new(signals: Signals, on_failure: CudaFailure) -> Shared {
        let (failed, failure, closing, inside) = Default::default();
        let hold = AtomicBool::new(on_failure == CudaFailure::Hold);
        let (asked, done) = (AtomicU64::new(0), AtomicU64::new(0));
        Shared { signals, failed, failure, hold, closing, asked, done, inside }
    }

    /// From here on `inside` hears of failures, and is asked for its own before data of its calls leave the host.
    pub(super) fn is_around(&self, inside: Arc<dyn DataPath>) {
        let _ = self.inside.set(inside);
    }

    /// Ends all calls of this rank and keeps the first cause. Streams that wait for the host continue, with undefined
    /// data in the slots, unless they are to be held.
    pub(super) fn fail(&self, error: Error) {
        let first = lock(&self.failure).get_or_insert_with(|| (error, Instant::now())).0.clone();
        if let Some(inside) = self.inside.get() {
            // Before streams go on: what did not come must not be passed on inside the host.
            inside.hear(&first);
        }
        self.failed.store(true, Ordering::SeqCst);
        // After `failed`, as `set_hold` looks at them in the other order: one of the two sees the other's store.
        if !self.hold.load(Ordering::SeqCst) {
            self.signals.release();
        }
    }

    /// As [`DataPath::set_hold`](crate::path::DataPath::set_hold).
    pub(super) fn set_hold(&self, hold: bool) -> bool {
        let before = self.hold.swap(hold, Ordering::SeqCst);
        if !hold && self.failed.load(Ordering::SeqCst) {
            self.signals.release();
        }
        before
    }

    /// Time since the failure; `None` without one.
    pub(super) fn failure_age(&self) -> Option<Duration> {
        lock(&self.failure).as_ref().map(|(_, at)| at.elapsed())
    }

    pub(super) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    /// The failure of an earlier call, or of a rank that is gone.
    #[inline]
    pub(super) fn check(&self) -> Result<()> {
        if !self.has_failed() {
            return Ok(());
        }
        lock(&self.failure).as_ref().map_or(Ok(()), |(error, _)| Err(error.clone()))
    }

    /// True if streams go on waiting after a failure.
    pub(super) fn holds(&self) -> bool {
        self.hold.load(Ordering::SeqCst)
    }

    /// True if a failure ended a call early.
    pub(super) fn cut_short(&self) -> bool {
        self.has_failed() && !self.holds() && self.done.load(Ordering::Acquire) != self.asked.load(Ordering::Acquire)
    }

    fn ends(&self) -> bool {
        self.has_failed() || self.closing.load(Ordering::Acquire)
    }
}

impl Attached for Shared {
    fn failed(&self, error: &Error) {
        self.fail(error.clone());
    }
}

/// A worker's share of a call.
#[derive(Debug, Clone, Copy)]
pub(super) struct Job {
    pub(super) route: Route,
    /// Number of the worker's first chunk of it.
    pub(super) first: u32,
    /// Number of the call on its communicator.
    pub(super) call: u32,
}

/// Marks of [`Worker::carried`] above the call's number: there is a call, and its stream has come to it.
const CARRIED: u64 = 1 << 32;
const BEGUN: u64 = 1 << 33;

/// One thread's part.
#[derive(Debug)]
pub(super) struct Worker {
    index: usize,
    /// Number of workers of the rank.
    of: usize,
    lanes: Lanes,
    shared: Arc<Shared>,
    staging: Staging,
    /// Other ranks need the core.
    background: bool,
    waiting: AtomicUsize,
    /// The call that the thread carries, with [`CARRIED`] and [`BEGUN`]; 0: none. After a failure it stays.
    carried: AtomicU64,
    jobs: Mutex<VecDeque<Job>>,
    changed: Condvar,
}

impl Worker {
    /// Worker `index` of `of`.
    pub(super) fn new(
        (index, of): (usize, usize),
        mut lanes: Lanes,
        shared: &Arc<Shared>,
        staging: Staging,
        background: bool,
    ) -> Worker {
        for reach in std::iter::once(&mut lanes.all).chain(&mut lanes.lane) {
            let weak: Weak<Shared> = Arc::downgrade(shared);
            reach.attach(weak);
        }
        let (shared, (waiting, carried, jobs, changed)) = (shared.clone(), Default::default());
        Worker { index, of, lanes, shared, staging, background, waiting, carried, jobs, changed }
    }

    /// Ends the worker's calls on all ranks.
    pub(super) fn abort(&self, reason: &str) {
        std::iter::once(&self.lanes.all).chain(&self.lanes.lane).for_each(|reach| reach.comm.abort(reason));
    }

    /// Fails on all ranks.
    pub(super) fn fail_everywhere(&self, error: Error) {
        self.lanes.all.comm.fail_everywhere(error);
    }

    /// The first byte of a slot.
    pub(super) fn slot(&self, index: usize) -> *mut u8 {
        self.staging.slot(index)
    }

    pub(super) fn push(&self, job: Job) {
        let mut jobs = lock(&self.jobs);
        jobs.push_back(job);
        self.waiting.store(jobs.len(), Ordering::Release);
        drop(jobs);
        self.changed.notify_one();
    }

    /// Makes the thread exit after the calls that it can still complete.
    pub(super) fn close(&self) {
        self.shared.closing.store(true, Ordering::Release);
        // Under the lock, so that the thread does not miss it between looking and sleeping.
        drop(lock(&self.jobs));
        self.changed.notify_one();
    }

    /// Number of the oldest call that the worker has not finished.
    pub(super) fn oldest(&self) -> Option<u32> {
        let jobs = lock(&self.jobs);
        match self.carried.load(Ordering::Acquire) {
            0 => jobs.front().map(|job| job.call),
            carried => Some(carried as u32),
        }
    }

    /// Number of the call under way, once its stream has come to it.
    pub(super) fn begun(&self) -> Option<u32> {
        Some(self.carried.load(Ordering::Acquire)).filter(|carried| carried & BEGUN != 0).map(|carried| carried as u32)
    }

    /// The thread.
    pub(super) fn run(&self) {
        while let Some(job) = self.next() {
            let carried = self.carry(&job);
            if !self.shared.has_failed() && carried.is_ok() {
                self.carried.store(0, Ordering::Release);
            }
            if let Err(error) = carried {
                self.shared.fail(error);
            }
        }
    }

    /// The next call; `None` at the end. Calls often come one after the other, and waking up takes longer than a short
    /// one.
    fn next(&self) -> Option<Job> {
        let pause = Pause::new(self);
        while self.waiting.load(Ordering::Acquire) == 0 && !self.shared.ends() && pause.spin() {}
        let mut jobs = lock(&self.jobs);
        loop {
            if let Some(job) = jobs.pop_front() {
                // Under the lock: a reader finds each call that is not over in one of the two.
                self.carried.store(CARRIED | u64::from(job.call), Ordering::Release);
                self.waiting.store(jobs.len(), Ordering::Release);
                return Some(job);
            }
            if self.shared.closing.load(Ordering::Acquire) {
                return None;
            }
            jobs = self.changed.wait(jobs).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Carries our chunks of a call; ends early, without an error, where another worker has failed.
    fn carry(&self, job: &Job) -> Result<()> {
        let chunks = (self.index..job.route.chunks()).step_by(self.of);
        for (turn, chunk) in chunks.enumerate() {
            let number = job.first.wrapping_add(turn as u32);
            if !self.arrived(number)? || self.shared.has_failed() {
                return Ok(());
            }
            if let Some(inside) = self.shared.inside.get() {
                // A call inside the host that failed has left no data.
                inside.check(Some(&self.lanes.all.comm))?;
            }
            self.carried.store(CARRIED | BEGUN | u64::from(job.call), Ordering::Release);
            // SAFETY: the stream has filled the slot and leaves it to us until we signal completion.
            unsafe { self.exchange(&job.route, chunk, self.slot(turn % DEPTH)) }?;
            if self.shared.has_failed() {
                return Ok(());
            }
            // Before the stream goes on, which may be waited for.
            self.shared.done.fetch_add(1, Ordering::AcqRel);
            self.shared.signals.finish(self.index, number);
        }
        Ok(())
    }

    /// Waits until our stream has filled a slot. It has no deadline, because earlier work in the stream is the
    /// caller's; the other ranks' waits have one.
    fn arrived(&self, number: u32) -> Result<bool> {
        let pause = Pause::new(self);
        while !self.shared.signals.has_arrived(self.index, number) {
            if self.shared.ends() {
                return Ok(false);
            }
            pause.wait();
        }
        Ok(true)
    }

    /// # Safety
    /// The slot must be filled, and nothing else may access it.
    unsafe fn exchange(&self, route: &Route, chunk: usize, slot: *mut u8) -> Result<()> {
        let Lanes { all, lane } = &self.lanes;
        let reach = lane.as_ref().filter(|_| route.in_lane).unwrap_or(all);
        // SAFETY: forwarded from the caller.
        let error = match unsafe { self.carry_over(reach, route, chunk, slot) } {
            Ok(()) => return Ok(()),
            Err(error) => reach.error(error),
        };
        if route.in_lane {
            // The ranks of the other lanes need what ours do not get.
            all.comm.fail_everywhere(error.clone());
        }
        Err(error)
    }

    /// # Safety
    /// As [`Worker::exchange`].
    unsafe fn carry_over(&self, reach: &Reach, route: &Route, chunk: usize, slot: *mut u8) -> Result<()> {
        let comm = &reach.comm;
        match route.wire {
            Wire::Collective { call, input, output } => {
                let row = route.row_bytes(chunk) as usize;
                let call = call.chunk(row / call.dtype.size());
                let (input, output) = (slot.wrapping_add(input * row), slot.wrapping_add(output * row));
                // SAFETY: forwarded from the caller; the route keeps all rows within the slot.
                unsafe { comm.inner().collective(&call, Buffers { input, output }, self.background) }
            }
            Wire::Messages { to, from } => {
                let rank = comm.rank();
                let message = |side: Option<Side>, ends: Option<(usize, usize)>| {
                    let (side, (sender, receiver)) = side.zip(ends)?;
                    let (_, len) = side.part(chunk)?;
                    let at = slot.wrapping_add(side.place(0, len) as usize);
                    let call = Call::message(DType::U8, sender, receiver, side.bytes as usize).chunk(len as usize);
                    Some(RawCall::over(call, Buffers { input: at, output: at }))
                };
                let both =
                    [message(route.down, to.map(|to| (rank, to))), message(route.up, from.map(|from| (from, rank)))];
                let calls: Vec<RawCall> = both.into_iter().flatten().collect();
                // SAFETY: as above.
                unsafe { comm.inner().run_checked("send/recv", &calls, self.background) }
            }
        }
    }
}

/// Longest sleep of a wait without a wake-up.
const LONGEST: Duration = Duration::from_millis(1);

/// A wait without a wake-up.
#[derive(Debug)]
struct Pause {
    begin: Instant,
    backoff: Backoff,
}

impl Pause {
    fn new(worker: &Worker) -> Pause {
        Pause { begin: Instant::now(), backoff: worker.lanes.all.comm.inner().wait_policy(worker.background).backoff }
    }

    /// False once enough time was spent with spinning.
    fn spin(&self) -> bool {
        std::hint::spin_loop();
        self.begin.elapsed() < self.backoff.spin
    }

    fn wait(&self) {
        self.backoff.nap(self.begin.elapsed(), LONGEST);
    }
}
