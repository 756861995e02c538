//! Collectives of a group that are launched together.
//!
//! A rank alone decides how its calls are split into launches: for the other ranks one launch of several calls is the
//! same as a launch each.

use crate::checked::buffers::Buffer;
use crate::checked::call::Stream;
use crate::comm::DeviceComm;
use crate::kernels::Types;
use crate::peer::{self, MOST_FUSED, needs_extension};
use tinynccl_comm::RawCall;
use tinynccl_comm::trace::{By, Span, recorded};
use tinynccl_plan::device::Choice;
use tinynccl_plan::error::Result;
use tinynccl_plan::wire::Collective;

/// Calls that follow each other and wait for their launch.
#[derive(Default)]
pub(crate) struct Run {
    calls: Vec<(RawCall, Choice)>,
    /// The input and the output of each.
    buffers: Vec<[Option<Buffer>; 2]>,
    /// Element type and operator of the calls that reduce; `None` if none does.
    types: Types,
}

impl Run {
    /// True if a call may be launched with those of this run: there is space, none of them writes what it uses or uses
    /// what it writes, and it reduces as they do if it reduces.
    fn takes(&self, types: Types, used: &[Option<Buffer>; 2]) -> bool {
        let meet = |one: Option<Buffer>, other: Option<Buffer>| one.zip(other).is_some_and(|(a, b)| a.overlaps(&b));
        let [input, output] = *used;
        self.calls.len() < MOST_FUSED
            && (types.is_none() || self.types.is_none() || types == self.types)
            && self.buffers.iter().all(|&[from, to]| !meet(input, to) && !meet(output, from) && !meet(output, to))
    }
}

impl DeviceComm {
    /// Enqueues a collective, or keeps it in `run`, which is enqueued before if the call does not go with it.
    ///
    /// # Safety
    /// As [`DeviceComm::enqueue`].
    pub(crate) unsafe fn enqueue_in_run(&self, stream: &Stream, call: &RawCall, run: &mut Run) -> Result<()> {
        let choice = self.choice(call.collective, call.bytes());
        let (input, output) = call.device_addresses();
        // The input of an all_to_all in place moves away first.
        let moves = call.collective == Collective::AllToAll && input == output;
        if moves || !self.path.fuses(call, choice) {
            // SAFETY: forwarded from the caller, as all of this function.
            unsafe { self.enqueue_run(stream, run) }?;
            // SAFETY: see above.
            return unsafe { self.enqueue_as(stream.clone(), call, choice) };
        }
        // SAFETY: see above.
        let used = unsafe { self.validated(stream.handle(), call) }?;
        let types = peer::types(call);
        if !run.takes(types, &used) {
            // SAFETY: see above.
            unsafe { self.enqueue_run(stream, run) }?;
        }
        run.types = types.or(run.types);
        run.calls.push((call.clone(), choice));
        run.buffers.push(used);
        Ok(())
    }

    /// Enqueues what `run` has, which has nothing then.
    ///
    /// # Safety
    /// As [`DeviceComm::enqueue`].
    pub(crate) unsafe fn enqueue_run(&self, stream: &Stream, run: &mut Run) -> Result<()> {
        let Run { calls, .. } = std::mem::take(run);
        let Some((first, choice)) = calls.first() else { return Ok(()) };
        let span = || Span::Carried {
            collective: first.collective as u8,
            calls: calls.len() as u32,
            bytes: calls.iter().map(|(call, _)| call.bytes() as u64).sum(),
            by: By::Kernels(*choice),
        };
        let made = recorded(self.trace(), span, || {
            self.admit()?;
            for (call, choice) in &calls {
                if let Some(host) = self.host() {
                    host.note(call);
                }
                if needs_extension(choice.protocol) {
                    self.extend(0..self.size())?;
                }
            }
            let (turn, _order) = self.turns(stream.clone(), calls.len() as u32)?;
            for ((call, _), i) in calls.iter().zip(0..) {
                self.ledger.note(turn.after(i).number, call);
            }
            // SAFETY: forwarded from the caller; `Run::takes` has compared the buffers.
            unsafe { self.path.carry_fused(turn, &calls) }
        });
        self.made(made)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tinynccl_plan::device::Protocol;
    use tinynccl_plan::{Call, DType, ReduceOp};

    const CHOICE: Choice = Choice { protocol: Protocol::OneShot, blocks: 1 };
    const BYTES: u64 = 4 * 64;

    fn used(input: u64, output: u64) -> [Option<Buffer>; 2] {
        [input, output].map(|at| (at > 0).then_some(Buffer { name: "", at, bytes: BYTES, element: 4 }))
    }

    fn sum(dtype: DType, op: ReduceOp) -> Types {
        Some((dtype, op))
    }

    #[test]
    fn a_run_takes_calls_that_do_not_depend_on_each_other() {
        let call = RawCall::on_device(Call::new(Collective::AllReduce, DType::F32, ReduceOp::Sum, 0, 64), 0, 0);
        let (at, f32s) = (|i: u64| (1 << 20) + i * BYTES, sum(DType::F32, ReduceOp::Sum));
        let mut run = Run::default();
        let mut add = |types: Types, buffers: [Option<Buffer>; 2]| {
            let takes = run.takes(types, &buffers);
            if takes {
                run.types = types.or(run.types);
                run.calls.push((call.clone(), CHOICE));
                run.buffers.push(buffers);
            }
            takes
        };
        // One that moves data, then sums; an input may be that of another.
        assert!(add(None, used(at(0), at(1))));
        assert!(add(f32s, used(at(0), at(2))));
        assert!(add(f32s, used(at(3), at(3))));
        // Another type, another operator.
        assert!(!add(sum(DType::I32, ReduceOp::Sum), used(at(8), at(9))));
        assert!(!add(sum(DType::F32, ReduceOp::Max), used(at(8), at(9))));
        // It reads what another writes, writes what another reads, writes what another writes.
        assert!(!add(f32s, used(at(2), at(9))));
        assert!(!add(f32s, used(at(9), at(0))));
        assert!(!add(f32s, used(at(9), at(1) + BYTES - 1)));
        assert!(!add(f32s, used(at(3), at(3))));
        // A reduce without an output, a broadcast without an input, and room for no more.
        assert!(add(f32s, used(at(4), 0)) && add(None, used(0, at(5))));
        for more in 5..MOST_FUSED as u64 {
            assert!(add(f32s, used(at(10 + more), at(10 + more))));
        }
        assert!(!add(f32s, used(at(30), at(30))));
    }
}
