//! Collectives of ranks that share a GPU from several processes.
//!
//! Kernels of different processes run on a GPU in time slices of milliseconds. A kernel that waits for another
//! process's kernel wastes its slice, and the two may never run together. Here no kernel waits. A call is a few kernels
//! with *stream* waits in between (`cuStreamWaitValue32`), during which the other processes have the GPU:
//!
//! ```text
//! wait until our slots at the peers are free · push · signal · wait until their data is here · take or reduce · signal
//! ```
//! Such a wait itself has no deadline. A thread watches it, and releases the stream at the deadline.

mod traffic;
mod watch;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use cudarc::driver::{CudaContext, DriverError, sys};

use super::checked::call::{Own, Round, unsupported};
use super::driver::{copy, cuda, is_capturing};
use super::kernels::{Args, Family, Framing, Kernel, Kernels, Team, Types, launch};
use super::path::report::Report;
use super::path::{DataPath, Progress, Turn};
use super::window::{AREAS, Layout, MAX_RANKS};
use tinynccl_comm::RawCall;
use tinynccl_comm::{Attached, Comm};
use tinynccl_plan::device::{Choice, Path};
use tinynccl_plan::error::{Error, Result};
use tinynccl_plan::wire::Collective;
use tinynccl_sys::threads::lock;
use traffic::Traffic;
use watch::{Filled, Flag, Watch};

/// Blocks of a kernel: enough for the memory's bandwidth.
const BLOCKS: u32 = 264;
/// As `struct Counts` of `kernels/phased.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct Counts {
    of: [u32; MAX_RANKS],
    who: u32,
    flag: u32,
}

/// The phased path of one rank.
#[derive(Debug)]
pub(super) struct Phased {
    context: Arc<CudaContext>,
    kernels: Arc<Kernels>,
    report: Arc<Report>,
    layout: Layout,
    team: Team,
    filled: Mutex<Filled>,
    watch: Watch,
}

impl Phased {
    pub(super) fn new(
        context: &Arc<CudaContext>,
        kernels: Arc<Kernels>,
        report: Arc<Report>,
        layout: Layout,
        team: Team,
        patience: Duration,
    ) -> Result<Phased> {
        let window = team.windows[team.rank as usize];
        let watch = Watch::start(context, &report, layout, window, patience)?;
        Ok(Phased { context: context.clone(), kernels, report, layout, team, filled: Mutex::default(), watch })
    }

    fn enqueue(&self, turn: Turn, call: &RawCall, traffic: &Traffic) -> Result<()> {
        let Turn { stream, number } = turn;
        let op = call.collective.name();
        let failed = |e: DriverError| cuda(op, "enqueueing a phase", e);
        // SAFETY: a stream, by the contract of `DeviceComm::enqueue`.
        if unsafe { is_capturing(stream) }.map_err(failed)? {
            return Err(Error::Unsupported {
                what: "capture into a graph by ranks of several processes on one GPU".to_owned(),
                detail: "their calls wait for counts that a graph would repeat: give each rank a GPU of its own"
                    .to_owned(),
            });
        }
        self.context.bind_to_thread().map_err(failed)?;
        // SAFETY: the word is the report's.
        unsafe { self.report.write(stream, number, false) }.map_err(failed)?;
        let area = self.layout.area_bytes() as u64;
        let types = traffic.reduces.and(call.op).map(|op| (call.dtype, op));
        let args = Args { team: self.team.in_call(call, number), ..Args::default() };
        let mut filled = lock(&self.filled);
        let mut done = 0;
        loop {
            self.phase(stream, &mut filled, traffic, (done, area), args, types).map_err(|e| match e {
                Phase::Driver(e) => failed(e),
                Phase::Other(e) => e,
            })?;
            done += area;
            if done >= traffic.lengths.0.max(traffic.lengths.1) {
                break;
            }
        }
        // SAFETY: as above.
        unsafe { self.report.write(stream, number, true) }.map_err(failed)?;
        self.watch.called(number, &filled);
        Ok(())
    }

    fn phase(
        &self,
        stream: sys::CUstream,
        filled: &mut Filled,
        traffic: &Traffic,
        (offset, area): (u64, u64),
        args: Args,
        types: Types,
    ) -> std::result::Result<(), Phase> {
        let each = |who: u32| (0..self.layout.ranks).filter(move |p| who >> p & 1 == 1);
        // An empty message is one phase too.
        let part = |length: u64| (offset == 0 || offset < length).then(|| length.saturating_sub(offset).min(area));
        let blocks = |bytes: u64| bytes.div_ceil(16 << 10).clamp(1, u64::from(BLOCKS)) as u32;
        if let Some(bytes) = part(traffic.lengths.0).filter(|_| traffic.targets != 0) {
            for peer in each(traffic.targets) {
                self.wait(stream, Flag::Head, peer, filled.sent[peer].wrapping_add(1).wrapping_sub(AREAS as u32))?;
            }
            let counts = Counts { of: filled.sent, who: traffic.targets, flag: 0 };
            let (input, stride) = (traffic.input + offset, traffic.input_stride);
            self.launch(
                Family::PhasedPush,
                None,
                stream,
                blocks(bytes),
                Args { input, bytes, stride, ..args },
                counts,
            )?;
            for peer in each(traffic.targets) {
                filled.sent[peer] = filled.sent[peer].wrapping_add(1);
            }
            self.signal(stream, Flag::Tail, filled.sent, traffic.targets, args)?;
        }
        let Some(bytes) = part(traffic.lengths.1).filter(|_| traffic.sources != 0) else { return Ok(()) };
        for peer in each(traffic.sources) {
            self.wait(stream, Flag::Tail, peer, filled.received[peer].wrapping_add(1))?;
        }
        let counts = Counts { of: filled.received, who: traffic.sources, flag: 0 };
        if traffic.compares {
            self.launch(Family::PhasedCompare, None, stream, 1, args, counts)?;
        }
        let output = traffic.output + offset;
        match traffic.reduces {
            Some(own) => {
                let args = Args { input: own + offset, output, bytes, ..args };
                self.launch(Family::PhasedReduce, types, stream, blocks(bytes), args, counts)?;
            }
            None => {
                let args = Args { output, bytes, stride: traffic.output_stride, ..args };
                self.launch(Family::PhasedTake, None, stream, blocks(bytes), args, counts)?;
            }
        }
        for peer in each(traffic.sources) {
            filled.received[peer] = filled.received[peer].wrapping_add(1);
        }
        self.signal(stream, Flag::Head, filled.received, traffic.sources, args)
    }

    fn wait(&self, stream: sys::CUstream, flag: Flag, peer: usize, count: u32) -> std::result::Result<(), Phase> {
        let at = self.team.windows[self.team.rank as usize] + self.layout.flag(flag as usize, peer) as u64;
        let geq = sys::CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_GEQ as u32;
        // SAFETY: the flag is in our window.
        Ok(unsafe { sys::cuStreamWaitValue32_v2(stream, at, count, geq) }.result()?)
    }

    fn signal(
        &self,
        stream: sys::CUstream,
        flag: Flag,
        of: [u32; MAX_RANKS],
        who: u32,
        args: Args,
    ) -> std::result::Result<(), Phase> {
        self.launch(Family::PhasedSignal, None, stream, 1, args, Counts { of, who, flag: flag as u32 })
    }

    fn launch(
        &self,
        family: Family,
        types: Types,
        stream: sys::CUstream,
        blocks: u32,
        args: Args,
        counts: Counts,
    ) -> std::result::Result<(), Phase> {
        let function = self.kernels.function(Kernel::new(family, Framing::Simple), types)?;
        // SAFETY: each of these kernels declares `Counts`; the buffers are the caller's word.
        Ok(unsafe { launch(function, blocks, stream, &args, &[(&raw const counts).cast()]) }?)
    }
}

impl DataPath for Phased {
    fn path(&self) -> Path {
        Path::Phased
    }

    fn bytes(&self) -> usize {
        self.layout.bytes()
    }

    unsafe fn carry(&self, turn: Turn, call: &RawCall, _: Choice) -> Result<()> {
        let rank = self.team.rank as usize;
        let traffic = Traffic::of(call, rank, self.layout.ranks).ok_or_else(|| unsupported(call.collective))?;
        if traffic.reduces.is_none() && traffic.targets != 0 && call.collective != Collective::Reduce {
            // Our own part.
            let from = traffic.input + rank as u64 * traffic.input_stride;
            let to = traffic.output + rank as u64 * traffic.output_stride;
            // SAFETY: the caller vouches for both buffers.
            unsafe { copy(call.collective.name(), &self.context, turn.stream, from, to, traffic.lengths.0 as usize) }?;
        }
        self.enqueue(turn, call, &traffic)
    }

    unsafe fn carry_round(&self, turn: Turn, call: &RawCall, round: Round) -> Result<()> {
        if let Some(Own { from, to, bytes }) = round.own {
            // SAFETY: the caller vouches for both buffers.
            unsafe { copy("send/recv", &self.context, turn.stream, from, to, bytes as usize) }?;
        }
        self.enqueue(turn, call, &Traffic::pair(round.to, round.from))
    }

    fn kernels(&self) -> Option<(&Kernels, &Team)> {
        Some((&self.kernels, &self.team))
    }

    fn check(&self, host: Option<&Comm>) -> Result<()> {
        self.report.check(host)
    }

    fn admit(&self, host: Option<&Comm>) -> Result<()> {
        self.report.admit(host)
    }

    fn cut_short(&self) -> bool {
        self.report.cut_short()
    }

    fn abort(&self, error: Error) {
        self.report.abort(error);
    }

    fn hear(&self, error: &Error) {
        self.report.failed(error);
    }

    fn set_hold(&self, hold: bool) -> bool {
        self.report.set_hold(hold)
    }

    fn failure_age(&self) -> Option<Duration> {
        self.report.failure_age()
    }

    fn progress(&self) -> Progress {
        self.report.calls()
    }
}

#[cfg(test)]
pub(super) fn layouts() -> Vec<(String, usize)> {
    super::kernels::mirrored!(Counts as "Counts" { of, who, flag })
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
