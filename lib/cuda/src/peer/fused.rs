//! Several calls in one launch, as `kernels/fused.cu` runs them. That costs the host one launch and the device the gaps
//! between kernels; for the ranks it is the same as a launch each.

use super::super::kernels::{Args, Family, Framing as KernelFraming, Kernel, Team, Types, launch_with};
use super::Peer;
use crate::driver::cuda;
use crate::path::Turn;
use tinynccl_comm::RawCall;
use tinynccl_plan::device::{Choice, Protocol};
use tinynccl_plan::error::{Error, Result};
use tinynccl_plan::wire::Collective;

/// Calls of a launch at most: the driver copies the room for all of them at each launch.
pub(crate) const MOST: usize = 8;

const SCATTER: u32 = 0;
const ROOT: u32 = 1;
const BROADCAST: u32 = 2;
const EXCHANGE: u32 = 3;
const LL128: u32 = 4;
const FLOW: u32 = 8;

const KERNEL: fn() -> Kernel = || Kernel::new(Family::Fused, KernelFraming::Ll);

/// As `struct FusedCall` of `kernels/fused.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct FusedCall {
    input: u64,
    output: u64,
    bytes: u64,
    stride: u64,
    call: u64,
    number: u32,
    root: u32,
    blocks: u32,
    part: u32,
}

/// As `struct Fused` there.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct Fused {
    team: Team,
    calls: [FusedCall; MOST],
    count: u32,
    unused: u32,
}

/// Part of the kernel that a block executes for such a call; `None` for calls that are launched alone: others than
/// those in lines and one step.
fn part_of(collective: Collective, protocol: Protocol) -> Option<u32> {
    let framing = match protocol {
        Protocol::OneShot => 0,
        Protocol::OneShot128 => LL128,
        _ => return None,
    };
    let part = match collective {
        Collective::AllReduce | Collective::ReduceScatter => SCATTER,
        Collective::Reduce => ROOT,
        Collective::Broadcast => BROADCAST,
        Collective::AllGather | Collective::AllToAll | Collective::Gather | Collective::Scatter => EXCHANGE,
        _ => return None,
    };
    Some(part | framing)
}

/// Returns true if a launch may carry such a call and others.
pub(crate) fn can(call: &RawCall, choice: Choice) -> bool {
    part_of(call.collective, choice.protocol).is_some()
}

/// The types that a call is reduced with.
pub(crate) fn types(call: &RawCall) -> Types {
    call.op.filter(|_| call.collective.reduces()).map(|op| (call.dtype, op))
}

impl Peer {
    /// Compiles and loads what launches of some of these calls may need.
    pub(super) fn load_fused(&self, calls: &[&RawCall]) -> Result<()> {
        if calls.len() < 2 {
            return Ok(());
        }
        let mut loaded: Vec<Types> = Vec::new();
        for types in calls.iter().map(|call| types(call)) {
            if !loaded.contains(&types) {
                self.kernels.function(KERNEL(), types)?;
                loaded.push(types);
            }
        }
        Ok(())
    }

    /// Enqueues calls that [`can`] be in a launch, [`MOST`] at most, and of one type and operator where they reduce.
    ///
    /// # Safety
    /// As [`DataPath::carry_fused`](crate::path::DataPath::carry_fused).
    pub(super) unsafe fn launch_fused(&self, turn: Turn, calls: &[(RawCall, Choice)]) -> Result<()> {
        let op = calls.first().map_or("group", |(call, _)| call.collective.name());
        let team = Team { extensions: self.extension.addresses(), ..self.team };
        let mut fused = Fused { team, count: calls.len() as u32, ..Fused::default() };
        if calls.len() > MOST {
            return Err(Error::invalid(op, format!("{} calls in a launch, expected {MOST} at most", calls.len())));
        }
        for ((place, (call, choice)), i) in fused.calls.iter_mut().zip(calls).zip(0..) {
            let part = part_of(call.collective, choice.protocol)
                .ok_or_else(|| Error::invalid(op, format!("{choice:?} is launched alone")))?;
            let args = Args::new(Team::default().in_call(call, turn.after(i).number), call);
            let Args { team: Team { call, number, .. }, input, output, bytes, stride, root, flow, .. } = args;
            let part = part | (FLOW * flow);
            *place = FusedCall { input, output, bytes, stride, call, number, root, blocks: choice.blocks, part };
        }
        let function = self.kernels.function(KERNEL(), calls.iter().find_map(|(call, _)| types(call)))?;
        let blocks = calls.iter().map(|(_, choice)| choice.blocks).max().unwrap_or(1);
        // SAFETY: the kernel declares `Fused`; the buffers are the caller's word.
        unsafe { launch_with(function, blocks, turn.stream, [(&raw const fused).cast()]) }
            .map_err(|e| cuda(op, format!("launching {} calls by {blocks} blocks", calls.len()), e))
    }
}

#[cfg(test)]
pub(crate) fn layouts() -> Vec<(String, usize)> {
    use crate::kernels::mirrored;
    let constants = [
        ("FUSED", MOST),
        ("FUSED_SCATTER", SCATTER as usize),
        ("FUSED_ROOT", ROOT as usize),
        ("FUSED_BROADCAST", BROADCAST as usize),
        ("FUSED_EXCHANGE", EXCHANGE as usize),
        ("FUSED_LL128", LL128 as usize),
        ("FUSED_FLOW", FLOW as usize),
    ];
    [
        mirrored!(FusedCall as "FusedCall" { input, output, bytes, stride, call, number, root, blocks, part }),
        mirrored!(Fused as "Fused" { team, calls, count }),
        constants.map(|(name, value)| (name.to_owned(), value)).to_vec(),
    ]
    .concat()
}
