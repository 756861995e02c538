//! Calls by a schedule of the caller's making.

use crate::RawCall;
use crate::{Comm, Engine, Inner};
use tinynccl_plan::Call;
use tinynccl_plan::dtype::{Element, ReduceOp};
use tinynccl_plan::error::{Error, Result};
use tinynccl_plan::schedule::Schedule;
use tinynccl_plan::wire::{Collective, Header};
use tinynccl_sys::threads::lock;

const OP: &str = "run_program";
/// Schedules that a communicator remembers: a plan is compiled when its call is first made, right behind.
const REMEMBERED: usize = 64;

impl Comm {
    /// Executes a collective by your own [`Schedule`], over this communicator's links and by the executor that
    /// runs the library's algorithms. Lengths, types and operators are those of the collective's own call; `op` is
    /// ignored where nothing is reduced, and so is a buffer that this rank does not have.
    ///
    /// The schedule is proved before it comes here. Its fingerprint is part of the call: ranks with different programs
    /// get [`Error::Mismatch`], which names both, before any of the data is used.
    ///
    /// ```
    /// # extern crate tinynccl_comm as tinynccl;
    /// # tinynccl::comm::on_threads(2, |comm| {
    /// use tinynccl::ReduceOp;
    /// use tinynccl::schedule::{Lane, Loc, Program, Schedule, Shape, Step};
    /// use tinynccl::wire::Collective;
    ///
    /// // Each of two ranks sends its whole input to the other, and adds what comes.
    /// let shape = Shape { collective: Collective::AllReduce, ranks: 2, root: 0, channels: 1 };
    /// let program = |peer| {
    ///     let (input, output) = (Loc::input(0, 0), Loc::output(0, 0));
    ///     let steps = vec![Step::send(peer, input), Step::recv_reduce_copy(peer, input, output, true)];
    ///     Program { parts: 1, span: 1, scratch_segments: 0, lanes: vec![Lane { channel: 0, steps }] }
    /// };
    /// let schedule = Schedule::new(shape, vec![program(1), program(0)])?;
    /// let mut sum = [0.0];
    /// comm.run_program(&schedule, &[comm.rank() as f64 + 1.0], &mut sum, ReduceOp::Sum)?;
    /// assert_eq!(sum, [3.0]);
    ///
    /// // The verifier refuses a rank that sends and does not receive.
    /// let mut wrong = vec![program(1), program(0)];
    /// wrong[0].lanes[0].steps.pop();
    /// let error = Schedule::new(shape, wrong).unwrap_err();
    /// assert_eq!(error.to_string(), "1 message(s) from rank 1 to rank 0 on channel 0 are left over");
    /// # Ok(())
    /// # }).unwrap();
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] before anything is sent: the schedule is for another number of ranks, or the lengths
    /// do not fit.
    pub fn run_program<T: Element>(
        &self,
        schedule: &Schedule,
        input: &[T],
        output: &mut [T],
        op: ReduceOp,
    ) -> Result<()> {
        let asked = self.inner.by_program(schedule, op)?;
        self.inner.run(self.inner.call(asked, input, output).and_then(in_range))
    }

    /// [`Comm::run_program`] with one buffer for input and output, as the in-place form of the collective's own call.
    ///
    /// # Errors
    /// As [`Comm::run_program`]; also if the verifier found the schedule wrong in place, with its text.
    pub fn run_program_in_place<T: Element>(&self, schedule: &Schedule, buffer: &mut [T], op: ReduceOp) -> Result<()> {
        schedule.in_place().map_err(|error| Error::invalid(OP, format!("in place the schedule is wrong: {error}")))?;
        let asked = self.inner.by_program(schedule, op)?;
        self.inner.run(self.inner.call_in_place(asked, buffer).and_then(in_range))
    }
}

/// A barrier has headers alone, and a header counts fewer elements where it has a fingerprint as well.
fn in_range(call: RawCall) -> Result<RawCall> {
    if call.collective == Collective::Barrier && call.count > 0 {
        return Err(Error::invalid(OP, format!("a barrier moves no data: expected 0 elements, got {}", call.count)));
    }
    if call.count as u64 >= Header::PROGRAM_LIMIT {
        let detail = format!("{} elements per segment, expected fewer than {}", call.count, Header::PROGRAM_LIMIT);
        return Err(Error::invalid(OP, detail));
    }
    Ok(call)
}

impl Engine {
    /// Keeps a schedule until its plan is compiled.
    pub(crate) fn remember(&mut self, schedule: Schedule) {
        self.schedules.truncate(REMEMBERED - 1);
        self.schedules.insert(0, schedule);
    }
}

impl Inner {
    /// The call that `schedule` executes, still without memory. The engine knows the schedule from here on.
    fn by_program(&self, schedule: &Schedule, op: ReduceOp) -> Result<Call> {
        self.state.check(|| OP.to_owned())?;
        let shape = schedule.shape();
        if shape.ranks != self.size() {
            let (rank, size, ranks) = (self.state.rank, self.size(), shape.ranks);
            let detail = format!("rank {rank}: the schedule is for {ranks} ranks, the communicator has {size}");
            return Err(Error::invalid(OP, detail));
        }
        let program = schedule.fingerprint();
        let mut engine = lock(&self.engine);
        let known = &mut engine.schedules;
        match known.iter().position(|known| known.fingerprint() == program) {
            Some(place) if known[place] == *schedule => known[..=place].rotate_right(1),
            Some(_) => {
                let detail =
                    format!("rank {}: another schedule has the same fingerprint, {program:014x}", self.state.rank);
                return Err(Error::invalid(OP, detail));
            }
            None => engine.remember(schedule.clone()),
        }
        let op = shape.collective.reduces().then_some(op);
        Ok(Call { op, root: shape.root, program, ..Call::of(shape.collective) })
    }
}
