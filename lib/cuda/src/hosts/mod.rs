//! Collectives of GPUs on several hosts: kernels inside each host, the network between.
//!
//! All hosts have as many ranks. A call is made of calls *inside* each host, which take the peer path, and of calls
//! over *lanes*: the ranks of the same number on all hosts, through the hosts' memory. A byte then crosses the network
//! once per host and not once per rank, and every rank's port is used.
//!
//! ```text
//!              host 0                             host 1
//!           GPU 0 == GPU 1                     GPU 2 == GPU 3
//!             |        |                         |        |
//!             +--------|------- lane 0 ----------+        |
//!                      +------- lane 1 -------------------+
//! ```
//! | Call | First inside | Over the lane | Last inside |
//! | --- | --- | --- | --- |
//! | all_reduce | reduce_scatter | all_reduce | all_gather |
//! | reduce | reduce_scatter | reduce | gather |
//! | broadcast | broadcast, at the root's host | broadcast | all_gather, at the others |
//! | reduce_scatter | reduce_scatter for each host | reduce_scatter | |
//! | all_gather | | all_gather | all_gather for each host |
//!
//! The first three are cut into pieces ([`Shares`](crate::hosted::shares::Shares)): while one is with the host, kernels
//! work on others. A message goes inside or outside, as its two ranks lie. Short calls and all_to_all are not divided:
//! they took longer so.
//!
//! Ranks that are threads of a process must not share a GPU unless each call waits for the one before on all of them: a
//! kernel that waits for the other rank's kernel, and copies of both in one queue of the driver, may wait for each
//! other until the deadline.
//!
//! # Failures
//! A lane that fails has not brought its data, and calls that follow inside the host must not pass on what is in the
//! buffer instead: the path inside hears of the failure before the stream goes on, and its calls then do not begin
//! ([`DataPath::guard`]). A call inside that fails is found before its data leave the host. Either way all ranks fail.
//!
//! | file | idea |
//! | --- | --- |
//! | this one | the path: which calls are divided, failures |
//! | `division` | the ranks by their hosts |
//! | `steps` | the calls that a call is made of |
//! | `counted` | progress of the calls |

mod counted;
pub(crate) mod division;
mod steps;

use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use cudarc::driver::result::{event, stream as streams};
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError, sys};

use crate::checked::call::Round;
use crate::comm::DeviceComm;
use crate::driver::cuda;
use crate::hosted::{Hosted, refuse_capture};
use crate::path::names::Names;
use crate::path::{DataPath, Progress, Turn};
use counted::Counted;
use division::Division;
use tinynccl_comm::reduce::exact;
use tinynccl_comm::{Comm, RawCall};
use tinynccl_plan::Call;
use tinynccl_plan::device::{Choice, Path};
use tinynccl_plan::dtype::ReduceOp;
use tinynccl_plan::error::{Error, Result};
use tinynccl_plan::wire::Collective;
use tinynccl_sys::config::{Config, Sums};
use tinynccl_sys::threads::lock;

/// The path of one rank.
#[derive(Debug)]
pub(crate) struct Hosts {
    context: Arc<CudaContext>,
    division: Division,
    outer: Hosted,
    /// Communicator of our host's ranks. After `outer`, whose threads ask it.
    inner: DeviceComm,
    limits: Limits,
    /// A message to another host runs here, beside one inside.
    beside: Mutex<Beside>,
    counted: Mutex<Counted>,
    cause: OnceLock<Error>,
}

/// A private stream, and the events that join it to a call's.
#[derive(Debug)]
struct Beside {
    stream: Arc<CudaStream>,
    begin: CudaEvent,
    end: CudaEvent,
}

/// Settings that leave calls undivided.
#[derive(Debug, Clone, Copy)]
struct Limits {
    /// The order of additions.
    fixed: bool,
    exact: bool,
    /// Bytes from which on calls are divided.
    least: usize,
}

impl Limits {
    /// Returns true if a call of `ranks` ranks is divided: it is long enough, and partial sums of hosts may be added.
    fn divides(self, call: &Call, ranks: usize) -> bool {
        use Collective::{AllGather, AllReduce, Broadcast, Reduce, ReduceScatter};
        let is_long = match call.collective {
            AllReduce | Broadcast | Reduce => call.bytes() >= self.least,
            AllGather | ReduceScatter => call.bytes().saturating_mul(ranks) >= self.least.saturating_mul(2),
            _ => false,
        };
        let Some(op) = call.op.filter(|_| call.collective.reduces()) else { return is_long };
        // An average of integers is divided once, behind the whole sum.
        let divided_late = op == ReduceOp::Avg && !call.dtype.is_float();
        is_long && !(self.fixed || divided_late || self.exact && exact::covers(call.dtype, Some(op)))
    }
}

impl Hosts {
    pub(crate) fn new(
        context: &Arc<CudaContext>,
        division: Division,
        inner: DeviceComm,
        outer: Hosted,
        config: &Config,
    ) -> Result<Hosts> {
        let beside = || {
            let (begin, end) = (context.new_event(None)?, context.new_event(None)?);
            Ok(Mutex::new(Beside { stream: context.new_stream()?, begin, end }))
        };
        let beside = beside().map_err(|e: DriverError| cuda("DeviceComm", "making a stream", e))?;
        outer.is_around(inner.path.clone());
        let limits = Limits { fixed: config.fixed_order, exact: config.sum == Sums::Exact, least: config.cuda_divide };
        let (context, counted, cause) = (context.clone(), Mutex::default(), OnceLock::new());
        Ok(Hosts { context, division, outer, inner, limits, beside, counted, cause })
    }

    /// Reductions that these settings leave undivided, in words.
    pub(crate) fn undivided(config: &Config) -> Option<&'static str> {
        match config {
            Config { fixed_order: true, .. } => Some("TINYNCCL_FIXED_ORDER leaves reductions to the hosts' memory"),
            Config { sum: Sums::Exact, .. } => Some("TINYNCCL_SUM=exact leaves sums to the hosts' memory"),
            _ => None,
        }
    }

    fn divides(&self, call: &Call) -> bool {
        self.limits.divides(call, self.division.hosts * self.division.each)
    }

    /// The first failure stays.
    fn settle(&self, result: Result<()>) -> Result<()> {
        match self.cause.get() {
            Some(cause) => Err(cause.clone()),
            None => result.map_err(|error| self.cause.get_or_init(|| error).clone()),
        }
    }

    /// Remembers which calls of the two paths belong to call `number`, behind which they were enqueued.
    fn count(&self, number: u32) {
        lock(&self.counted).note(number, self.inner.last_number());
    }

    /// A call that waited in vain for a rank of our host ends the communicator on all hosts, whose ranks wait for the
    /// rest of the call.
    fn inside(&self, result: Result<()>) -> Result<()> {
        result.map_err(|error| match error {
            error @ (Error::Timeout { .. } | Error::PeerLost { .. }) => {
                if let Err(cause) = self.outer.check(None) {
                    return cause;
                }
                let error = Names::new(self.division.inside()).error(error);
                self.outer.fail_everywhere(error.clone());
                error
            }
            other => other,
        })
    }
}

impl DataPath for Hosts {
    fn path(&self) -> Path {
        Path::Hosts
    }

    /// Memory of the device alone: what goes between the hosts takes theirs.
    fn bytes(&self) -> usize {
        if self.inner.path() == Path::Hosted { 0 } else { self.inner.window_bytes() }
    }

    fn prepare(&self, call: &RawCall, _: Choice) -> Result<()> {
        if !self.divides(call) {
            return Ok(());
        }
        let calls = steps::inside(call, &self.division, &self.outer.lane_grid());
        let calls: Vec<RawCall> = calls.into_iter().map(|call| RawCall::on_device(call, 0, 0)).collect();
        self.inner.prepare(&calls)
    }

    fn prepare_messages(&self, long: &[usize]) -> Result<()> {
        let inside: Vec<usize> = long.iter().filter_map(|&rank| self.division.number_inside(rank)).collect();
        self.inner.offer_extension(inside.iter().copied())?;
        self.inner.path.prepare_messages(&inside)
    }

    unsafe fn carry(&self, turn: Turn, call: &RawCall, choice: Choice) -> Result<()> {
        // SAFETY: forwarded from the caller.
        unsafe { refuse_capture(call.collective.name(), turn.stream) }?;
        let carried = match self.divides(call) {
            // SAFETY: see above.
            true => self.inside(unsafe { self.divided(turn, call) }),
            // SAFETY: see above.
            false => unsafe { self.outer.carry(turn, call, choice) },
        };
        self.count(turn.number);
        carried
    }

    unsafe fn carry_round(&self, turn: Turn, call: &RawCall, round: Round) -> Result<()> {
        // SAFETY: forwarded from the caller; below, streams and events are of our context.
        unsafe { refuse_capture("send/recv", turn.stream) }?;
        let is_inside = |peer: usize| self.division.number_inside(peer).is_some();
        let inside = |(at, bytes, peer)| Some((at, bytes, self.division.number_inside(peer)?));
        let outside = |end: &(u64, usize, usize)| !is_inside(end.2);
        let there = Round { to: round.to.filter(outside), from: round.from.filter(outside), own: None };
        let here = Round { to: round.to.and_then(inside), from: round.from.and_then(inside), own: round.own };
        let carried = match (here == Round::default(), there == Round::default()) {
            // SAFETY: see above.
            (true, _) => unsafe { self.outer.carry_round(turn, call, there) },
            // SAFETY: see above.
            (_, true) => self.inside(unsafe { self.inner.carry_round_inside(turn.stream, here) }),
            _ => {
                // Both at the same time: each may wait for a rank that waits for the other.
                let failed = |e| cuda("send/recv", "joining two streams", e);
                let beside = lock(&self.beside);
                let (side, wait) = (beside.stream.cu_stream(), sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT);
                self.context.bind_to_thread().map_err(failed)?;
                // SAFETY: see above.
                unsafe {
                    event::record(beside.begin.cu_event(), turn.stream).map_err(failed)?;
                    streams::wait_event(side, beside.begin.cu_event(), wait).map_err(failed)?;
                    let outer = self.outer.carry_round(Turn { stream: side, ..turn }, call, there);
                    event::record(beside.end.cu_event(), side).map_err(failed)?;
                    let inner = self.inside(self.inner.carry_round_inside(turn.stream, here));
                    streams::wait_event(turn.stream, beside.end.cu_event(), wait).map_err(failed)?;
                    outer.and(inner)
                }
            }
        };
        self.count(turn.number);
        carried
    }

    fn check(&self, host: Option<&Comm>) -> Result<()> {
        // Both find the ranks' failures by their communicators, and each hears of the other's.
        self.settle(self.outer.check(host).and_then(|()| self.inner.path.check(host)))
    }

    fn admit(&self, host: Option<&Comm>) -> Result<()> {
        self.outer.admit(host).and_then(|()| self.inner.path.admit(host)).map_err(|error| {
            let settled = self.settle(Err(error.clone()));
            settled.err().unwrap_or(error)
        })
    }

    fn cut_short(&self) -> bool {
        self.outer.cut_short() || self.inner.path.cut_short()
    }

    fn abort(&self, error: Error) {
        let _ = self.cause.set(error.clone());
        // First inside: a stream that the other releases must not pass on what did not come.
        self.inner.path.abort(error.clone());
        self.outer.abort(error);
    }

    fn hear(&self, error: &Error) {
        self.outer.hear(error);
    }

    fn set_hold(&self, hold: bool) -> bool {
        let inner = self.inner.path.set_hold(hold);
        self.outer.set_hold(hold) || inner
    }

    fn failure_age(&self) -> Option<Duration> {
        self.outer.failure_age().max(self.inner.path.failure_age())
    }

    fn progress(&self) -> Progress {
        lock(&self.counted).progress(self.inner.path.progress(), (self.outer.progress(), self.outer.last()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tinynccl_plan::DType;

    #[test]
    fn reductions_that_partial_sums_would_change_are_not_divided() {
        let call = |collective, dtype, op| Call::new(collective, dtype, op, 0, 10);
        let divides = |fixed, exact, call: Call| Limits { fixed, exact, least: 0 }.divides(&call, 4);
        let sum = call(Collective::AllReduce, DType::F32, ReduceOp::Sum);
        assert!(divides(false, false, sum) && !divides(true, false, sum) && !divides(false, true, sum));
        assert!(divides(false, true, call(Collective::Reduce, DType::I32, ReduceOp::Sum)));
        assert!(divides(false, false, call(Collective::ReduceScatter, DType::Bf16, ReduceOp::Avg)));
        assert!(!divides(false, false, call(Collective::ReduceScatter, DType::I64, ReduceOp::Avg)));
        assert!(divides(true, true, call(Collective::AllGather, DType::F32, ReduceOp::Sum)));
    }

    #[test]
    fn short_calls_are_not_divided() {
        let limits = Limits { fixed: false, exact: false, least: 1 << 20 };
        let divides = |collective, bytes| limits.divides(&Call::new(collective, DType::U8, ReduceOp::Sum, 0, bytes), 4);
        for collective in [Collective::AllReduce, Collective::Broadcast, Collective::Reduce] {
            assert!(divides(collective, 1 << 20) && !divides(collective, (1 << 20) - 1), "{collective}");
        }
        // Of a segment.
        for collective in [Collective::AllGather, Collective::ReduceScatter] {
            assert!(divides(collective, 1 << 19) && !divides(collective, (1 << 19) - 1), "{collective}");
        }
        assert!(!divides(Collective::AllToAll, 1 << 30));
    }
}
