//! Collectives of ranks that share a GPU from several processes.
//!
//! Kernels of different processes run on a GPU in turns of milliseconds, so a kernel that waits for another process's kernel
//! wastes its turn, and nothing promises that they ever run together. Here no kernel waits. A call is a few kernels with waits of
//! the *stream* in between (`cuStreamWaitValue32`), during which the GPU belongs to the others:
//!
//! ```text
//! wait until our areas at the peers are free · push · signal · wait until their data is here · take or reduce · signal
//! ```
//! Such a wait has no deadline of its own: a thread looks after it, and lets the stream go when nothing has come for too long.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use cudarc::driver::{CudaContext, CudaStream, DriverError, sys};

use super::call::{Call, Team, launch};
use super::comm::{Carrier, DeviceComm};
use super::driver::cuda;
use super::kernels::Kernel;
use super::report::Report;
use super::window::{Layout, MAX_RANKS};
use crate::error::{Error, Result};
use crate::wire::Collective;

/// Areas of a sender, used in turn.
pub(super) const AREAS: usize = 2;
/// Blocks of a kernel: enough for the memory's bandwidth.
const BLOCKS: u32 = 264;
/// What a flag is set to, beyond what is waited for, to let a stream go.
const RELEASE: u32 = 1 << 30;
/// How often the thread looks.
const PERIOD: Duration = Duration::from_millis(10);

/// As `struct Counts` of `kernels/phased.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct Counts {
    of: [u32; MAX_RANKS],
    who: u32,
    pad: u32,
}

/// Areas filled at and received from each rank so far.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Filled {
    sent: [u32; MAX_RANKS],
    received: [u32; MAX_RANKS],
}

/// What a call moves, in bytes: to whom, from whom, and how far apart their segments are.
#[derive(Debug, Clone, Copy)]
pub(super) struct Traffic {
    /// Of each message sent, and of each received.
    pub(super) lengths: (u64, u64),
    pub(super) input: u64,
    pub(super) output: u64,
    pub(super) targets: u32,
    pub(super) sources: u32,
    pub(super) input_stride: u64,
    pub(super) output_stride: u64,
    /// What is added to the sources' data, if anything is: the address of our own input.
    pub(super) reduces: Option<u64>,
    /// Whether both ends are the same call.
    pub(super) compares: bool,
}

impl Traffic {
    /// Of a message sent, a message received (each as address, bytes, peer), or both.
    pub(super) fn pair(to: Option<(u64, usize, usize)>, from: Option<(u64, usize, usize)>) -> Traffic {
        let (input, sent, target) = to.map_or((0, 0, 0), |(at, bytes, peer)| (at, bytes, 1 << peer));
        let (output, received, source) = from.map_or((0, 0, 0), |(at, bytes, peer)| (at, bytes, 1 << peer));
        Traffic {
            lengths: (sent as u64, received as u64),
            input,
            output,
            targets: target,
            sources: source,
            input_stride: 0,
            output_stride: 0,
            reduces: None,
            compares: false,
        }
    }

    /// Of a collective of `size` ranks, seen by `rank`.
    pub(super) fn of(call: &Call, rank: usize, size: usize) -> Option<Traffic> {
        let bytes = (call.count * call.dtype.size()) as u64;
        let others = ((1u32 << size) - 1) & !(1 << rank);
        let root = 1u32 << call.root;
        let at_root = call.root == rank;
        let own = rank as u64 * bytes;
        let whole = Traffic {
            lengths: (bytes, bytes),
            input: call.input,
            output: call.output,
            targets: others,
            sources: others,
            input_stride: 0,
            output_stride: 0,
            reduces: Some(call.input),
            compares: true,
        };
        Some(match call.collective {
            Collective::AllReduce => whole,
            Collective::ReduceScatter => Traffic { input_stride: bytes, reduces: Some(call.input + own), ..whole },
            Collective::Reduce if at_root => Traffic { targets: 0, ..whole },
            Collective::Reduce => Traffic { targets: root, sources: 0, reduces: None, ..whole },
            Collective::Broadcast if at_root => Traffic { sources: 0, reduces: None, ..whole },
            Collective::Broadcast => Traffic { targets: 0, sources: root, reduces: None, ..whole },
            Collective::AllGather => Traffic { output_stride: bytes, reduces: None, ..whole },
            Collective::AllToAll => Traffic { input_stride: bytes, output_stride: bytes, reduces: None, ..whole },
            _ => return None,
        })
    }
}

/// Bytes of an area.
pub(super) fn area_bytes(layout: &Layout) -> usize {
    layout.slot_memory() / (AREAS * layout.ranks) / 256 * 256
}

impl DeviceComm {
    /// Enqueues a call in phases.
    pub(super) fn in_phases(
        &self,
        stream: sys::CUstream,
        filled: &mut Filled,
        number: u32,
        call: &Call,
        traffic: &Traffic,
        team: Team,
    ) -> Result<()> {
        let op = call.collective.name();
        let failed = |e: DriverError| cuda(op, "enqueueing a phase", e);
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: a stream, by the contract of `enqueue`.
        unsafe { sys::cuStreamIsCapturing(stream, &mut status) }.result().map_err(failed)?;
        if status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE {
            return Err(Error::Unsupported {
                what: "capture into a graph by ranks of several processes on one GPU".to_owned(),
                detail: "their calls wait for counts that a graph would repeat: give each rank a GPU of its own"
                    .to_owned(),
            });
        }
        self.context().bind_to_thread().map_err(failed)?;
        // SAFETY: the word is the report's.
        unsafe { self.report().write(stream, number, false) }.map_err(failed)?;
        let area = area_bytes(&self.layout) as u64;
        let types = traffic.reduces.map(|_| (call.dtype, call.op));
        let mut done = 0;
        loop {
            self.phase(stream, filled, traffic, (done, area), team, types).map_err(|e| match e {
                Phase::Driver(e) => failed(e),
                Phase::Other(e) => e,
            })?;
            done += area;
            if done >= traffic.lengths.0.max(traffic.lengths.1) {
                break;
            }
        }
        // SAFETY: as above.
        unsafe { self.report().write(stream, number, true) }.map_err(failed)?;
        if let Carrier::Phased(watch) = &self.carrier {
            watch.called(number, filled);
        }
        Ok(())
    }

    fn phase(
        &self,
        stream: sys::CUstream,
        filled: &mut Filled,
        traffic: &Traffic,
        (offset, area): (u64, u64),
        team: Team,
        types: Option<(crate::DType, crate::ReduceOp)>,
    ) -> std::result::Result<(), Phase> {
        let mut team = team;
        let each = |who: u32| (0..self.size()).filter(move |p| who >> p & 1 == 1);
        // An empty message is one phase too.
        let part = |length: u64| (offset == 0 || offset < length).then(|| length.saturating_sub(offset).min(area));
        let blocks = |bytes: u64| bytes.div_ceil(16 << 10).clamp(1, u64::from(BLOCKS)) as u32;
        if let Some(mut bytes) = part(traffic.lengths.0).filter(|_| traffic.targets != 0) {
            for peer in each(traffic.targets) {
                self.wait(stream, Flag::Head, peer, filled.sent[peer].wrapping_add(1).wrapping_sub(AREAS as u32))?;
            }
            let mut numbers = Counts { of: filled.sent, who: traffic.targets, pad: 0 };
            let push = self.kernels.function(Kernel::PhasedPush, None)?;
            let mut input = traffic.input + offset;
            let mut stride = traffic.input_stride;
            // SAFETY: parameters as the kernel declares them; the buffers are the caller's word.
            unsafe {
                launch(
                    push,
                    blocks(bytes),
                    stream,
                    &mut [
                        (&raw mut team).cast(),
                        (&raw mut input).cast(),
                        (&raw mut bytes).cast(),
                        (&raw mut stride).cast(),
                        (&raw mut numbers).cast(),
                    ],
                )
            }?;
            for peer in each(traffic.targets) {
                filled.sent[peer] = filled.sent[peer].wrapping_add(1);
            }
            self.signal(stream, Flag::Tail, Counts { of: filled.sent, who: traffic.targets, pad: 0 }, team)?;
        }
        let Some(mut bytes) = part(traffic.lengths.1).filter(|_| traffic.sources != 0) else { return Ok(()) };
        for peer in each(traffic.sources) {
            self.wait(stream, Flag::Tail, peer, filled.received[peer].wrapping_add(1))?;
        }
        let mut numbers = Counts { of: filled.received, who: traffic.sources, pad: 0 };
        if traffic.compares {
            let compare = self.kernels.function(Kernel::PhasedCompare, None)?;
            // SAFETY: as above.
            unsafe { launch(compare, 1, stream, &mut [(&raw mut team).cast(), (&raw mut numbers).cast()]) }?;
        }
        let mut output = traffic.output + offset;
        match traffic.reduces {
            Some(own) => {
                let reduce = self.kernels.function(Kernel::PhasedReduce, types)?;
                let mut own = own + offset;
                // SAFETY: as above.
                unsafe {
                    launch(
                        reduce,
                        blocks(bytes),
                        stream,
                        &mut [
                            (&raw mut team).cast(),
                            (&raw mut own).cast(),
                            (&raw mut output).cast(),
                            (&raw mut bytes).cast(),
                            (&raw mut numbers).cast(),
                        ],
                    )
                }?;
            }
            None => {
                let take = self.kernels.function(Kernel::PhasedTake, None)?;
                let mut stride = traffic.output_stride;
                // SAFETY: as above.
                unsafe {
                    launch(
                        take,
                        blocks(bytes),
                        stream,
                        &mut [
                            (&raw mut team).cast(),
                            (&raw mut output).cast(),
                            (&raw mut bytes).cast(),
                            (&raw mut stride).cast(),
                            (&raw mut numbers).cast(),
                        ],
                    )
                }?;
            }
        }
        for peer in each(traffic.sources) {
            filled.received[peer] = filled.received[peer].wrapping_add(1);
        }
        self.signal(stream, Flag::Head, Counts { of: filled.received, who: traffic.sources, pad: 0 }, team)
    }

    fn wait(&self, stream: sys::CUstream, flag: Flag, peer: usize, count: u32) -> std::result::Result<(), Phase> {
        let at = self.team.windows[self.rank()] + self.layout.flag(flag as usize, peer) as u64;
        let geq = sys::CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_GEQ as u32;
        // SAFETY: the flag is in our window.
        Ok(unsafe { sys::cuStreamWaitValue32_v2(stream, at, count, geq) }.result()?)
    }

    fn signal(&self, stream: sys::CUstream, flag: Flag, counts: Counts, team: Team) -> std::result::Result<(), Phase> {
        let signal = self.kernels.function(Kernel::PhasedSignal, None)?;
        let (mut team, mut which, mut counts) = (team, flag as u32, counts);
        // SAFETY: parameters as the kernel declares them.
        Ok(unsafe {
            launch(signal, 1, stream, &mut [(&raw mut team).cast(), (&raw mut which).cast(), (&raw mut counts).cast()])
        }?)
    }
}

/// Which of a pair's two counts: as in `kernels/fifo.cuh`.
#[derive(Debug, Clone, Copy)]
enum Flag {
    Tail = 0,
    Head = 1,
}

enum Phase {
    Driver(DriverError),
    Other(Error),
}

impl From<DriverError> for Phase {
    fn from(error: DriverError) -> Phase {
        Phase::Driver(error)
    }
}

impl From<Error> for Phase {
    fn from(error: Error) -> Phase {
        Phase::Other(error)
    }
}

/// The thread that gives up for a stream.
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
        size: usize,
        patience: Duration,
    ) -> Result<Watch> {
        let shared = Arc::new(Shared { last: Mutex::default(), changed: Condvar::new(), ends: AtomicBool::new(false) });
        // Of its own: it must get through while the caller's streams wait.
        let stream = context.new_stream().map_err(|e| cuda("DeviceComm", "making a stream", e))?;
        let (theirs, report) = (shared.clone(), report.clone());
        let thread = std::thread::Builder::new()
            .name("tinynccl-watch".to_owned())
            .spawn(move || theirs.run(&report, &stream, &layout, window, size, patience))
            .map_err(|e| Error::io("DeviceComm", "starting a thread", &e))?;
        Ok(Watch { shared, thread: Some(thread) })
    }

    fn called(&self, number: u32, filled: &Filled) {
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
    fn run(&self, report: &Report, stream: &CudaStream, layout: &Layout, window: u64, size: usize, patience: Duration) {
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
                // It moved, or what the stream does now is not ours.
                moved = ((started, finished), Instant::now());
            } else if released || moved.1.elapsed() > patience || report.has_failed() {
                // Again until all have run: a late signal of another rank undoes it.
                released = true;
                if let Err(error) = self.release(report, stream, layout, window, size, &filled) {
                    log::warn!("call {number}: a stream that waits for other ranks cannot be let go: {error:?}");
                    return;
                }
            }
            std::thread::sleep(PERIOD);
        }
    }

    /// Names the rank that did not come, then lets the stream go.
    fn release(
        &self,
        report: &Report,
        stream: &CudaStream,
        layout: &Layout,
        window: u64,
        size: usize,
        filled: &Filled,
    ) -> Result<(), DriverError> {
        use cudarc::driver::result;
        stream.context().bind_to_thread()?;
        let mut flags = Vec::new();
        let mut late = None;
        for peer in 0..size {
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
        // Before any stream moves on, so that its caller sees why.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, ReduceOp};

    #[test]
    fn every_message_has_a_sender_and_a_receiver() {
        for size in 2..=MAX_RANKS {
            for root in 0..size {
                for collective in Collective::ALL {
                    let call = Call {
                        collective,
                        dtype: DType::F32,
                        op: ReduceOp::Sum,
                        root,
                        count: 10,
                        input: 0,
                        output: 1 << 20,
                    };
                    let all: Option<Vec<Traffic>> = (0..size).map(|rank| Traffic::of(&call, rank, size)).collect();
                    let Some(all) = all else { continue };
                    for (from, ours) in all.iter().enumerate() {
                        assert_eq!(ours.targets >> from & 1, 0);
                        for (to, theirs) in all.iter().enumerate() {
                            assert_eq!(ours.targets >> to & 1, theirs.sources >> from & 1, "{collective} {from} {to}");
                        }
                    }
                }
            }
        }
    }
}
