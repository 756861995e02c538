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

mod traffic;
mod watch;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use cudarc::driver::{CudaContext, DriverError, sys};

use super::call::Call;
use super::driver::{cuda, is_capturing};
use super::kernels::{Kernel, Kernels};
use super::launch::{Team, launch};
use super::report::Report;
use super::window::{AREAS, Layout, MAX_RANKS};
use crate::comm::lock;
use crate::error::{Error, Result};
pub(super) use traffic::Traffic;
use watch::{Filled, Flag, Watch};

/// Blocks of a kernel: enough for the memory's bandwidth.
const BLOCKS: u32 = 264;
/// As `struct Counts` of `kernels/phased.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct Counts {
    of: [u32; MAX_RANKS],
    who: u32,
    pad: u32,
}

/// The phased path of one rank.
#[derive(Debug)]
pub(super) struct Phased {
    context: Arc<CudaContext>,
    kernels: Arc<Kernels>,
    report: Arc<Report>,
    layout: Layout,
    /// Our window's address.
    window: u64,
    filled: Mutex<Filled>,
    watch: Watch,
}

impl Phased {
    pub(super) fn new(
        context: &Arc<CudaContext>,
        kernels: &Arc<Kernels>,
        report: &Arc<Report>,
        layout: Layout,
        window: u64,
        patience: Duration,
    ) -> Result<Phased> {
        Ok(Phased {
            context: context.clone(),
            kernels: kernels.clone(),
            report: report.clone(),
            layout,
            window,
            filled: Mutex::default(),
            watch: Watch::start(context, report, layout, window, patience)?,
        })
    }

    /// Enqueues a call, as which `team` knows it.
    pub(super) fn enqueue(&self, stream: sys::CUstream, call: &Call, traffic: &Traffic, team: Team) -> Result<()> {
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
        unsafe { self.report.write(stream, team.number, false) }.map_err(failed)?;
        let area = self.layout.area_bytes() as u64;
        let types = traffic.reduces.map(|_| (call.dtype, call.op));
        let mut filled = lock(&self.filled);
        let mut done = 0;
        loop {
            self.phase(stream, &mut filled, traffic, (done, area), team, types).map_err(|e| match e {
                Phase::Driver(e) => failed(e),
                Phase::Other(e) => e,
            })?;
            done += area;
            if done >= traffic.lengths.0.max(traffic.lengths.1) {
                break;
            }
        }
        // SAFETY: as above.
        unsafe { self.report.write(stream, team.number, true) }.map_err(failed)?;
        self.watch.called(team.number, &filled);
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
        let each = |who: u32| (0..self.layout.ranks).filter(move |p| who >> p & 1 == 1);
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
        let at = self.window + self.layout.flag(flag as usize, peer) as u64;
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
