//! The deadline of waiting streams: a thread detects that nothing moves, reports the missing rank, and releases the
//! stream.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use cudarc::driver::{CudaContext, CudaStream, DriverError};

use super::super::window::{AREAS, Layout, MAX_RANKS};
use crate::driver::cuda;
use crate::path::report::Report;
use tinynccl_plan::error::{Error, Result};

/// Added to an awaited flag to release a stream.
const RELEASE: u32 = 1 << 30;
/// Interval of the thread's checks.
const PERIOD: Duration = Duration::from_millis(10);

/// Slots filled at and received from each rank so far.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Filled {
    pub(super) sent: [u32; MAX_RANKS],
    pub(super) received: [u32; MAX_RANKS],
}

/// Kind of a pair's two counts: as in `kernels/fifo.cuh`.
#[derive(Debug, Clone, Copy)]
pub(super) enum Flag {
    Tail = 0,
    Head = 1,
}

/// The thread that ends a stream's wait.
#[derive(Debug)]
pub(super) struct Watch {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    /// The last call enqueued, and the counts it waits for.
    last: Mutex<(u32, Filled)>,
    changed: Condvar,
    ends: AtomicBool,
}

impl Watch {
    pub(super) fn start(
        context: &Arc<CudaContext>,
        report: &Arc<Report>,
        layout: Layout,
        window: u64,
        patience: Duration,
    ) -> Result<Watch> {
        let shared = Arc::new(Shared { last: Mutex::default(), changed: Condvar::new(), ends: AtomicBool::new(false) });
        // A private stream: it must run while the caller's streams wait.
        let stream = context.new_stream().map_err(|e| cuda("DeviceComm", "making a stream", e))?;
        let (theirs, report) = (shared.clone(), report.clone());
        let thread = std::thread::Builder::new()
            .name("tinynccl-watch".to_owned())
            .spawn(move || theirs.run(&report, &stream, &layout, window, patience))
            .map_err(|e| Error::io("DeviceComm", "starting a thread", &e))?;
        Ok(Watch { shared, thread: Some(thread) })
    }

    pub(super) fn called(&self, number: u32, filled: &Filled) {
        *self.shared.last.lock().unwrap_or_else(PoisonError::into_inner) = (number, *filled);
        self.shared.changed.notify_one();
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.shared.ends.store(true, Ordering::Release);
        self.shared.changed.notify_one();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn run(&self, report: &Report, stream: &CudaStream, layout: &Layout, window: u64, patience: Duration) {
        let mut moved = ((0, 0), Instant::now());
        let mut released = false;
        while !self.ends.load(Ordering::Acquire) {
            let (started, finished) = report.progress();
            // Not held over a sleep: callers take it for each call.
            let (number, filled) = {
                let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
                if last.0 == finished {
                    // Nothing under way.
                    drop(self.changed.wait_timeout(last, Duration::from_millis(200)));
                    moved.1 = Instant::now();
                    continue;
                }
                *last
            };
            if moved.0 != (started, finished) || started == finished {
                // It moved, or the stream now runs other work.
                moved = ((started, finished), Instant::now());
            } else if released || moved.1.elapsed() > patience || report.ends_calls() {
                // Again until all have run: a late signal of another rank undoes it.
                released = true;
                if let Err(error) = self.release(report, stream, layout, window, &filled) {
                    log::warn!("call {number}: a stream that waits for other ranks cannot be released: {error:?}");
                    return;
                }
            }
            std::thread::sleep(PERIOD);
        }
    }

    /// Names the missing rank, then releases the stream.
    fn release(
        &self,
        report: &Report,
        stream: &CudaStream,
        layout: &Layout,
        window: u64,
        filled: &Filled,
    ) -> Result<(), DriverError> {
        use cudarc::driver::result;
        stream.context().bind_to_thread()?;
        let mut flags = Vec::new();
        let mut late = None;
        for peer in 0..layout.ranks {
            for (flag, expected) in [(Flag::Tail, filled.received[peer]), (Flag::Head, filled.sent[peer])] {
                let at = window + layout.flag(flag as usize, peer) as u64;
                let mut got = [0u32];
                // SAFETY: reads a flag of our own window; the buffer lives until the stream is waited for.
                unsafe {
                    result::memcpy_dtoh_async(&mut got, at, stream.cu_stream())?;
                    result::stream::synchronize(stream.cu_stream())?;
                }
                let free = [expected.wrapping_add(RELEASE)];
                let expected = if matches!(flag, Flag::Head) { expected.wrapping_sub(AREAS as u32) } else { expected };
                if expected.wrapping_sub(got[0]) as i32 > 0 {
                    late.get_or_insert((peer, expected, got[0]));
                }
                flags.push((at, free));
            }
        }
        // Before any stream moves on, so that its caller sees the reason.
        report.give_up(late.unwrap_or_default());
        for (at, free) in &flags {
            // SAFETY: writes a flag of our own window, from memory that lives until the stream is waited for.
            unsafe {
                result::memcpy_htod_async(*at, free, stream.cu_stream())?;
                result::stream::synchronize(stream.cu_stream())?;
            }
        }
        Ok(())
    }
}
