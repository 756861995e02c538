//! Failure reports of kernels to the host, and the host's request to give up: a few words of pinned host memory.

use std::mem::offset_of;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use cudarc::driver::result::stream;
use cudarc::driver::{CudaContext, DriverError, result, sys};

use super::data_path::Progress;
use super::names::Names;
use crate::checked::call::Signature;
use crate::driver::{Uncaptured, cuda};
use tinynccl_comm::{Attached, Comm};
use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::config::CudaFailure;

const WRITTEN: u32 = 2;
const MISMATCH: u32 = 4;
/// The stream waited, not a kernel.
const STREAM: u32 = 5;
const SIGNAL: u32 = 7;
/// Longest wait for a copy of two words, and the time between looks at it.
const COPY: Duration = Duration::from_millis(500);
const LOOK: Duration = Duration::from_micros(50);

/// As `struct Report` of `kernels/team.cuh`.
#[repr(C)]
struct Words {
    abort: AtomicU32,
    state: AtomicU32,
    kind: AtomicU32,
    channel: AtomicU32,
    peer: AtomicU32,
    expected: AtomicU32,
    got: AtomicU32,
    call: AtomicU32,
    ours: AtomicU64,
    theirs: AtomicU64,
    cut: AtomicU32,
    /// Numbers of the last calls that a stream has begun and finished, on the phased path; on the peer path those of
    /// the kernels, when they were last asked for.
    started: AtomicU32,
    finished: AtomicU32,
}

/// The words, reachable from host and device.
#[derive(Debug)]
pub(crate) struct Report {
    context: Arc<CudaContext>,
    words: NonNull<Words>,
    rank: usize,
    /// The ranks' numbers in the communicator that errors speak of, where this is one of its parts.
    names: Option<Names>,
    /// Longest wait of kernels.
    patience: Duration,
    /// The communicator's failure, once it is known.
    cause: Mutex<Option<Error>>,
    failed_at: OnceLock<Instant>,
    /// True if kernels go on waiting after a failure of another rank ([`CudaFailure::Hold`]).
    hold: AtomicBool,
    /// Another rank has failed while `hold` was set: no kernel was made to exit.
    held: AtomicBool,
    /// The stream of [`Report::copied`], from the first time on.
    reader: Mutex<Option<Reader>>,
    /// Address of the words as the device sees them.
    pub(crate) address: sys::CUdeviceptr,
}

/// A stream for copies to the host.
#[derive(Debug)]
struct Reader(sys::CUstream);

// SAFETY: streams belong to a context, not to a thread.
unsafe impl Send for Reader {}

// SAFETY: the words are atomics in memory that lives as long as this.
unsafe impl Send for Report {}
// SAFETY: as above.
unsafe impl Sync for Report {}

impl Report {
    pub(crate) fn new(
        context: &Arc<CudaContext>,
        rank: usize,
        names: Option<Names>,
        patience: Duration,
        on_failure: CudaFailure,
    ) -> Result<Report> {
        let failed = |e| cuda("DeviceComm", "allocating page-locked memory for reports", e);
        context.bind_to_thread().map_err(failed)?;
        let flags = sys::CU_MEMHOSTALLOC_DEVICEMAP | sys::CU_MEMHOSTALLOC_PORTABLE;
        // SAFETY: allocates; freed once, by `drop`.
        let memory = unsafe { result::malloc_host(size_of::<Words>(), flags) }.map_err(failed)?;
        let Some(words) = NonNull::new(memory.cast::<Words>()) else {
            return Err(Error::invalid("DeviceComm", "CUDA returned neither page-locked memory nor an error"));
        };
        // SAFETY: fresh, page-aligned memory of that size; zeroes are valid atomics.
        unsafe { words.write_bytes(0, 1) };
        let mut report = Report {
            context: context.clone(),
            words,
            rank: names.as_ref().map_or(rank, |names| names.of(rank)),
            names,
            patience,
            cause: Mutex::new(None),
            failed_at: OnceLock::new(),
            hold: AtomicBool::new(on_failure == CudaFailure::Hold),
            held: AtomicBool::new(false),
            reader: Mutex::new(None),
            address: 0,
        };
        // SAFETY: the memory is of malloc_host with DEVICEMAP; writes the address.
        unsafe { sys::cuMemHostGetDevicePointer_v2(&mut report.address, memory, 0) }.result().map_err(failed)?;
        Ok(report)
    }

    fn words(&self) -> &Words {
        // SAFETY: valid as long as self; only atomics are in it.
        unsafe { self.words.as_ref() }
    }

    /// Makes waiting kernels exit, because of `error`.
    pub(crate) fn abort(&self, error: Error) {
        self.settle(error);
        self.words().abort.store(1, Ordering::Release);
    }

    /// The failure of an earlier call, if one has failed. `host` notifies the other ranks.
    #[inline]
    pub(crate) fn check(&self, host: Option<&Comm>) -> Result<()> {
        if self.has_failed() { self.failure(host) } else { Ok(()) }
    }

    /// [`Report::check`] without a failure that only holds calls.
    #[inline]
    pub(crate) fn admit(&self, host: Option<&Comm>) -> Result<()> {
        if self.ends_calls() { self.failure(host) } else { Ok(()) }
    }

    #[cold]
    fn failure(&self, host: Option<&Comm>) -> Result<()> {
        if let Some(cause) = self.cause.lock().unwrap_or_else(PoisonError::into_inner).clone() {
            return Err(cause);
        }
        // Being written: the rest follows within microseconds.
        for _ in 0..1000 {
            if let Some(error) = self.given_up() {
                let cause = self.settle(explained(error, host));
                // The other ranks need not wait for their deadline.
                if let Some(host) = host {
                    host.fail_everywhere(cause.clone());
                }
                return Err(cause);
            }
            std::thread::yield_now();
        }
        Err(self.settle(aborted(self.rank, "a kernel gave up without a reason")))
    }

    /// Makes waiting kernels exit where another rank fails or has failed, until `hold` is set again. Returns whether it
    /// was set.
    pub(crate) fn set_hold(&self, hold: bool) -> bool {
        let before = self.hold.swap(hold, Ordering::SeqCst);
        if !hold && self.held.load(Ordering::SeqCst) {
            self.words().abort.store(1, Ordering::Release);
        }
        before
    }

    /// Time since the failure; `None` without one.
    pub(crate) fn failure_age(&self) -> Option<Duration> {
        self.failed_at.get().map(Instant::elapsed)
    }

    /// Keeps the first cause, and returns it.
    fn settle(&self, error: Error) -> Error {
        self.failed_at.get_or_init(Instant::now);
        self.cause.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error).clone()
    }

    /// True once a kernel or the host has reported a failure.
    #[inline]
    pub(crate) fn has_failed(&self) -> bool {
        self.ends_calls() || self.held.load(Ordering::Relaxed)
    }

    /// True once kernels and streams that wait must give up.
    #[inline]
    pub(crate) fn ends_calls(&self) -> bool {
        let words = self.words();
        words.state.load(Ordering::Relaxed) != 0 || words.abort.load(Ordering::Relaxed) != 0
    }

    /// Returns true if a kernel or a stream has left a call before its end.
    pub(crate) fn cut_short(&self) -> bool {
        let words = self.words();
        words.state.load(Ordering::Acquire) != 0 || words.cut.load(Ordering::Acquire) != 0
    }

    /// Makes the stream copy, in order, whether waiting kernels must exit to `to`, a word of the device's memory.
    ///
    /// # Safety
    /// `stream` must be a stream of this context, and `to` stay until it has passed the copy.
    pub(crate) unsafe fn copy_abort(&self, stream: sys::CUstream, to: sys::CUdeviceptr) -> Result<(), DriverError> {
        let word: *const AtomicU32 = &raw const self.words().abort;
        // SAFETY: a word of page-locked memory that lives as long as this; the rest is the caller's word.
        unsafe { sys::cuMemcpyHtoDAsync_v2(to, word.cast(), size_of::<u32>(), stream) }.result()
    }

    /// Makes the stream record, in order, that it has begun or finished call `number`.
    ///
    /// # Safety
    /// `stream` must be a stream of this context.
    pub(crate) unsafe fn write(&self, stream: sys::CUstream, number: u32, finished: bool) -> Result<(), DriverError> {
        let place = if finished { offset_of!(Words, finished) } else { offset_of!(Words, started) };
        // SAFETY: the address is in our words; the caller vouches for the stream.
        unsafe { sys::cuStreamWriteValue32_v2(stream, self.address + place as u64, number, 0) }.result()
    }

    /// The numbers last begun and finished.
    pub(crate) fn progress(&self) -> (u32, u32) {
        let words = self.words();
        (words.started.load(Ordering::Acquire), words.finished.load(Ordering::Acquire))
    }

    /// [`Report::progress`], as [`DataPath::progress`](super::DataPath::progress).
    pub(crate) fn calls(&self) -> Progress {
        let (begun, finished) = self.progress();
        Progress { begun: Some(begun), finished: Some(finished) }
    }

    /// [`Report::calls`], of two such numbers at `from` in the device's memory, beside running kernels.
    pub(crate) fn copied(&self, from: sys::CUdeviceptr) -> Progress {
        let mut reader = self.reader.lock().unwrap_or_else(PoisonError::into_inner);
        match self.copy(&mut reader, from) {
            Ok(true) => self.calls(),
            Ok(false) => Progress::default(),
            Err(error) => {
                log::debug!("reading the numbers of calls: {error:?}");
                Progress::default()
            }
        }
    }

    /// Copies them; false if that is not over in time.
    fn copy(&self, reader: &mut Option<Reader>, from: sys::CUdeviceptr) -> Result<bool, DriverError> {
        self.context.bind_to_thread()?;
        let _uncaptured = Uncaptured::begin();
        let stream = match reader {
            Some(reader) => reader.0,
            None => reader.insert(Reader(stream::create(stream::StreamKind::NonBlocking)?)).0,
        };
        // SAFETY: our own stream, which the caller's lock keeps.
        let query = || unsafe { sys::cuStreamQuery(stream) }.result();
        let is_over = || match query() {
            Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            other => other.map(|()| true),
        };
        if is_over()? {
            let words: *const AtomicU32 = &raw const self.words().started;
            // SAFETY: two words of page-locked memory, which `drop` frees after the copy; `from` is in our own window,
            // which lives as long as the path whose report this is.
            unsafe { sys::cuMemcpyDtoHAsync_v2(words.cast_mut().cast(), from, 8, stream) }.result()?;
        }
        let began = Instant::now();
        while !is_over()? {
            if began.elapsed() > COPY {
                return Ok(false);
            }
            std::thread::sleep(LOOK);
        }
        Ok(true)
    }

    /// As in a kernel, the first failure is kept.
    pub(crate) fn give_up(&self, (peer, expected, got): (usize, u32, u32)) {
        let words = self.words();
        if words.state.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            return;
        }
        let to = |word: &AtomicU32, value: u32| word.store(value, Ordering::Relaxed);
        to(&words.kind, STREAM);
        to(&words.peer, peer as u32);
        to(&words.expected, expected);
        to(&words.got, got);
        to(&words.call, words.started.load(Ordering::Relaxed));
        words.state.store(WRITTEN, Ordering::Release);
    }

    /// Why a kernel or a stream gave up, if one has.
    fn given_up(&self) -> Option<Error> {
        let (words, rank, patience) = (self.words(), self.rank, self.patience);
        if words.state.load(Ordering::Acquire) != WRITTEN {
            return None;
        }
        let of = |word: &AtomicU32| word.load(Ordering::Relaxed);
        let (peer, call) = (of(&words.peer) as usize, of(&words.call));
        let peer = self.names.as_ref().map_or(peer, |names| names.of(peer));
        let ours = Signature(words.ours.load(Ordering::Relaxed));
        if of(&words.kind) == MISMATCH {
            let theirs = Signature(words.theirs.load(Ordering::Relaxed));
            return Some(Error::invalid(
                format!("{ours} (call {call} on the device)"),
                format!(
                    "rank {rank} and rank {peer} disagree: rank {rank} is in {ours}, rank {peer} in {theirs}; every rank must \
                     make the same calls in the same order with the same dtype, op, count and root"
                ),
            ));
        }
        if of(&words.kind) == STREAM {
            return Some(Error::Timeout {
                op: format!("call {call} on the device"),
                rank,
                waited: patience,
                missing: vec![peer],
                detail: format!(
                    "the stream waited for message {} of rank {peer}, which has sent {}; check that rank {peer} makes the same \
                     calls, and look at its output for the first error",
                    of(&words.expected),
                    of(&words.got)
                ),
            });
        }
        if of(&words.kind) == SIGNAL {
            return Some(Error::Timeout {
                op: "waiting for signals".to_owned(),
                rank,
                waited: patience,
                missing: vec![peer],
                detail: format!(
                    "expected {} signals of rank {peer} so far, got {}; check that rank {peer} signals as often, and look at its \
                     output for the first error",
                    of(&words.expected),
                    of(&words.got)
                ),
            });
        }
        Some(Error::Timeout {
            op: format!("{ours} (call {call} on the device)"),
            rank,
            waited: patience,
            missing: vec![peer],
            detail: format!(
                "block {} waited for {} of rank {peer}: expected {}, got {}; check that rank {peer} makes the same calls, and look at \
                 its output for the first error",
                of(&words.channel),
                match of(&words.kind) {
                    1 => "a line",
                    2 => "a filled slot",
                    6 => "the end of the call",
                    _ => "a free slot",
                },
                of(&words.expected),
                of(&words.got)
            ),
        })
    }
}

/// A wait without success, with the host's information about the rank: another rank may be the cause.
fn explained(error: Error, host: Option<&Comm>) -> Error {
    let Error::Timeout { op, rank, waited, missing, detail } = error else { return error };
    match host.and_then(|host| host.find_absent(&missing)) {
        Some((missing, why)) => Error::Timeout { op, rank, waited, missing, detail: format!("{why}; {detail}") },
        None => Error::Timeout { op, rank, waited, missing, detail },
    }
}

/// [`Error::Aborted`], of calls on a device.
pub(crate) fn aborted(rank: usize, reason: &str) -> Error {
    Error::Aborted { op: "a call on the device".to_owned(), rank, reason: reason.to_owned() }
}

impl Attached for Report {
    /// The host's communicator has learned of a death or an abort, so kernels need not wait for their deadline.
    fn failed(&self, error: &Error) {
        let op = "a call on the device".to_owned();
        self.settle(match error.clone() {
            Error::PeerLost { rank, peer, address, detail, .. } => Error::PeerLost { op, rank, peer, address, detail },
            Error::Timeout { rank, waited, missing, detail, .. } => {
                Error::Timeout { op, rank, waited, missing, detail }
            }
            Error::Aborted { rank, reason, .. } => Error::Aborted { op, rank, reason },
            other => other,
        });
        self.held.store(true, Ordering::SeqCst);
        // After `held`, as `set_hold` looks at them in the other order: one of the two sees the other's store.
        if !self.hold.load(Ordering::SeqCst) {
            self.words().abort.store(1, Ordering::Release);
        }
    }
}

impl Drop for Report {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            if let Some(reader) = self.reader.lock().unwrap_or_else(PoisonError::into_inner).take() {
                // SAFETY: ours, destroyed once; a copy that is under way ends before the words are freed.
                let ended = unsafe { stream::synchronize(reader.0).and_then(|()| stream::destroy(reader.0)) };
                if let Err(error) = ended {
                    log::debug!("ending the stream of reports: {error:?}");
                }
            }
            // SAFETY: of malloc_host, freed once.
            if let Err(error) = unsafe { result::free_host(self.words.as_ptr().cast()) } {
                log::debug!("freeing page-locked memory: {error:?}");
            }
        }
    }
}

#[cfg(test)]
pub(crate) fn layouts() -> Vec<(String, usize)> {
    crate::kernels::mirrored!(Words as "Report" {
        abort, state, kind, channel, peer, expected, got, call, ours, theirs, cut,
    })
    .split_off(1)
}
