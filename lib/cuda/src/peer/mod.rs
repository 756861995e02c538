//! Calls by kernels that access the other ranks' memory and wait for each other.
//!
//! | file | idea |
//! | --- | --- |
//! | this one | a call as the launch of a kernel |
//! | `select` | which kernel, and how many blocks of it, for which size |
//! | `decide` | the settings' overrides |
//! | `chooser` | both, for one communicator |
//! | `schedules`, `program` | collectives by the schedules that the CPU executes |
//! | `registry` | buffers that calls use without copies |
//! | `fused` | several calls as one launch |
//! | `scratch` | memory for partial sums |

mod chooser;
mod decide;
mod fused;
mod program;
mod registry;
mod schedules;
mod scratch;
mod select;

use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::sys;

pub(crate) use chooser::Chooser;
pub use decide::Reason;
pub(crate) use fused::{MOST as MOST_FUSED, types};
use program::Cut;
pub use registry::Registration;
pub(crate) use registry::{Registry, register_all};
pub(crate) use scratch::Scratch;
pub(crate) use select::needs_extension;

use super::checked::call::{self, End, Round, unsupported};
use super::checked::messages;
use super::driver::cuda;
use super::kernels::{Args, Family, Framing as KernelFraming, Function, Kernel, Kernels, Remote, Team, launch};
use super::path::report::Report;
use super::path::{DataPath, Progress, Turn};
use super::window::{Extension, Layout};
use tinynccl_comm::reduce::exact;
use tinynccl_comm::{Attached, Comm, RawCall};
use tinynccl_plan::device::{Choice, Path, Protocol};
use tinynccl_plan::dtype::DType;
use tinynccl_plan::error::{Error, Result};
use tinynccl_plan::wire::Collective;

/// The peer path of one rank.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) kernels: Arc<Kernels>,
    pub(crate) team: Team,
    pub(crate) report: Arc<Report>,
    pub(crate) chooser: Arc<Chooser>,
    /// Bytes of our window as it was at the start.
    pub(crate) window_bytes: usize,
    pub(crate) extension: Arc<Extension>,
    pub(crate) scratch: Scratch,
}

/// As `struct Message` of `kernels/send_recv.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Message {
    at: u64,
    bytes: u64,
    remote: u64,
    peer: u32,
    channels: u32,
    direct: u32,
    unused: u32,
}

/// As `struct Own` there.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Own {
    from: u64,
    to: u64,
    bytes: u64,
    blocks: u32,
    unused: u32,
}

/// As `struct Messages` there.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Messages {
    to: Message,
    from: Message,
    own: Own,
}

impl Peer {
    fn team(&self, call: &RawCall, turn: Turn) -> Team {
        Team { extensions: self.extension.addresses(), ..self.team.in_call(call, turn.number) }
    }

    /// Names by which other ranks' kernels find the buffers of a call.
    fn remote(&self, call: &RawCall) -> Remote {
        let bytes = call.bytes() as u64;
        let all = bytes * self.chooser.layout.ranks as u64;
        let (input, output) = match call.collective {
            Collective::AllGather => (bytes, all),
            Collective::ReduceScatter => (all, bytes),
            Collective::AllToAll => (all, all),
            _ => (bytes, bytes),
        };
        let registry = &self.chooser.registry;
        let at = call.device_addresses();
        Remote { input: registry.remote(at.0, input), output: registry.remote(at.1, output) }
    }

    /// The kernel of a collective, compiled and loaded if it is missing.
    fn function(&self, call: &RawCall, choice: Choice) -> Result<Function> {
        let kernel = select::kernel(call.collective, choice.protocol, self.chooser.layout.ranks)
            .ok_or_else(|| unsupported(call.collective))?;
        let types = call.op.filter(|_| kernel.reduces(call.collective)).map(|op| (call.dtype, op));
        let Layout { ranks, exact_sums, .. } = self.chooser.layout;
        if exact_sums
            && ranks > 2
            && matches!(choice.protocol, Protocol::Schedule(..))
            && types.is_some_and(|(dtype, op)| exact::covers(dtype, Some(op)))
        {
            return Err(Error::Unsupported {
                what: format!("TINYNCCL_SUM=exact for {} of {ranks} ranks by {}", call.collective, choice.protocol),
                detail:
                    "a schedule adds two values at a time and rounds each sum; a scan on GPUs has nothing else: take \
                         f64 or an integer type, or scan in the host's memory"
                        .to_owned(),
            });
        }
        self.kernels.function(kernel, types)
    }

    /// The kernel of messages, compiled and loaded if it is missing.
    fn message_function(&self) -> Result<Function> {
        self.kernels.function(Kernel::new(Family::SendRecv, KernelFraming::Simple), None)
    }

    fn message(&self, end: Option<End>) -> Message {
        let (at, bytes, peer) = end.unwrap_or((0, 0, self.chooser.layout.ranks));
        let (bytes, registry) = (bytes as u64, &self.chooser.registry);
        let direct = registry.is_used() && select::is_direct(&self.chooser.layout, bytes);
        let channels = end.map_or(0, |_| select::pair_channels(&self.chooser.layout, bytes));
        // The receiver's counts.
        let remote = if direct { registry.remote(at, bytes) } else { 0 };
        Message { at, bytes, remote, peer: peer as u32, channels, direct: direct.into(), unused: 0 }
    }

    fn own(&self, own: Option<call::Own>) -> Own {
        let call::Own { from, to, bytes } = own.unwrap_or(call::Own { from: 0, to: 0, bytes: 0 });
        let blocks = own.map_or(0, |_| select::own_blocks(&self.chooser.layout, bytes));
        Own { from, to, bytes, blocks, unused: 0 }
    }

    /// Enqueues a collective as messages.
    ///
    /// # Safety
    /// As [`DataPath::carry`].
    unsafe fn carry_as_messages(&self, turn: Turn, call: &RawCall) -> Result<()> {
        let (rank, ranks) = (self.team.rank as usize, self.chooser.layout.ranks);
        let mut messages = messages::Messages::default();
        if !messages.add(call, rank, ranks) {
            return Err(unsupported(call.collective));
        }
        let word = RawCall::on_device(call.with_count(DType::U8, call.bytes()), 0, 0);
        for round in messages.launches(rank, ranks)? {
            // SAFETY: forwarded from the caller.
            unsafe { self.carry_round(turn, &word, round) }?;
        }
        Ok(())
    }
}

impl DataPath for Peer {
    fn path(&self) -> Path {
        Path::Peer
    }

    fn bytes(&self) -> usize {
        self.window_bytes + self.extension.bytes() + self.scratch.bytes()
    }

    fn prepare(&self, call: &RawCall, choice: Choice) -> Result<()> {
        self.function(call, choice).map(drop)
    }

    fn prepare_messages(&self, _: &[usize]) -> Result<()> {
        self.message_function().map(drop)
    }

    unsafe fn carry(&self, turn: Turn, call: &RawCall, choice: Choice) -> Result<()> {
        let (op, layout) = (call.collective.name(), &self.chooser.layout);
        if select::is_messages(call.collective, choice.protocol, layout.ranks) {
            // SAFETY: forwarded from the caller.
            return unsafe { self.carry_as_messages(turn, call) };
        }
        let scheduled = match choice.protocol {
            Protocol::Schedule(algorithm, framing) => {
                Some(self.chooser.schedules.of(call, algorithm, framing, choice.blocks)?)
            }
            _ if select::fits(layout, call.collective, choice, call.bytes()) => None,
            _ => return Err(Error::invalid(op, format!("{} bytes do not fit {choice:?}", call.bytes()))),
        };
        let function = self.function(call, choice)?;
        let mut args = Args::new(self.team(call, turn), call);
        if choice.protocol == Protocol::Direct {
            args.remote = self.remote(call);
        }
        if scheduled.as_ref().is_some_and(|(compiled, _)| compiled.keeps_sums()) {
            args.scratch = self.scratch.address()?;
        }
        let blocks = scheduled.as_ref().map_or(choice.blocks, |(compiled, _)| compiled.channels as u32);
        // SAFETY: kernels of schedules declare a program and a cut, others nothing more; the buffers are the caller's
        // word.
        unsafe {
            match &scheduled {
                None => launch(function, blocks, turn.stream, &args, &[]),
                Some((compiled, partition)) => {
                    let shares = compiled.takes_shares(partition, layout);
                    let cut = Cut { shares: shares.into(), ..Cut::new(partition) };
                    let more = [(&raw const compiled.program).cast(), (&raw const cut).cast()];
                    launch(function, blocks, turn.stream, &args, &more)
                }
            }
        }
        .map_err(|e| cuda(op, format!("launching {blocks} blocks"), e))
    }

    fn fuses(&self, call: &RawCall, choice: Choice) -> bool {
        fused::can(call, choice) && select::fits(&self.chooser.layout, call.collective, choice, call.bytes())
    }

    fn prepare_fused(&self, calls: &[&RawCall]) -> Result<()> {
        self.load_fused(calls)
    }

    unsafe fn carry_fused(&self, turn: Turn, calls: &[(RawCall, Choice)]) -> Result<()> {
        match calls {
            // SAFETY: forwarded from the caller.
            [(call, choice)] => unsafe { self.carry(turn, call, *choice) },
            // SAFETY: see above.
            _ => unsafe { self.launch_fused(turn, calls) },
        }
    }

    unsafe fn carry_round(&self, turn: Turn, call: &RawCall, round: Round) -> Result<()> {
        let function = self.message_function()?;
        let args = Args { team: self.team(call, turn), ..Args::default() };
        let messages =
            Messages { to: self.message(round.to), from: self.message(round.from), own: self.own(round.own) };
        let blocks = messages.to.channels + messages.from.channels + messages.own.blocks;
        // SAFETY: the kernel declares `Messages`; the buffers are the caller's word.
        unsafe { launch(function, blocks, turn.stream, &args, &[(&raw const messages).cast()]) }
            .map_err(|e| cuda("send/recv", format!("launching {blocks} blocks"), e))
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

    unsafe fn guard(&self, stream: sys::CUstream) -> Result<()> {
        let own = self.team.windows[self.team.rank as usize];
        // SAFETY: a word of our own window, which lives as long as the streams' work with this path.
        unsafe { self.report.copy_abort(stream, own + self.chooser.layout.guard() as u64) }
            .map_err(|e| cuda("DeviceComm", "copying whether calls may begin", e))
    }

    fn set_hold(&self, hold: bool) -> bool {
        self.report.set_hold(hold)
    }

    fn failure_age(&self) -> Option<Duration> {
        self.report.failure_age()
    }

    fn progress(&self) -> Progress {
        let own = self.team.windows[self.team.rank as usize];
        self.report.copied(own + self.chooser.layout.progress() as u64)
    }
}

#[cfg(test)]
pub(super) fn layouts() -> Vec<(String, usize)> {
    program::layouts()
}

#[cfg(test)]
pub(super) fn fused_layouts() -> Vec<(String, usize)> {
    fused::layouts()
}

#[cfg(test)]
pub(super) fn pair_layouts() -> Vec<(String, usize)> {
    use super::kernels::mirrored;
    [
        mirrored!(Message as "Message" { at, bytes, remote, peer, channels, direct }),
        mirrored!(Own as "Own" { from, to, bytes, blocks }),
        mirrored!(Messages as "Messages" { to, from, own }),
    ]
    .concat()
}
