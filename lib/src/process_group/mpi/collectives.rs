//! Collectives by MPI's own. None is in place: rsmpi has no `MPI_IN_PLACE`, so the input is copied if needed. MPI has
//! no average: inputs are scaled in that copy, or the sum is divided ([`Average`]).
//!
//! Once every rank has entered the call, MPI runs it without our deadline. If a rank dies during the call, `mpirun`
//! detects it and ends the job.

use std::ffi::{c_int, c_void};

use mpi::ffi;

use super::agree::agree;
use super::types::{data_type, operator};
use super::world::{Mpi, done};
use tinynccl_comm::Inner;
use tinynccl_comm::RawCall;
use tinynccl_comm::reduce::Average;
use tinynccl_comm::trace::{By, Span, recorded};
use tinynccl_plan::Call;
use tinynccl_plan::error::{Error, Result};
use tinynccl_plan::wire::Collective;

impl Mpi {
    /// # Safety
    /// As [`Backend::run`](crate::process_group::Backend::run).
    pub(super) unsafe fn call(&self, comm: &Inner, call: &RawCall, background: bool) -> Result<()> {
        let span = || Span::Carried {
            collective: call.collective as u8,
            calls: 1,
            bytes: (call.count * call.dtype.size()) as u64,
            by: By::Mpi,
        };
        // SAFETY: forwarded from the caller.
        recorded(comm.state().trace.as_deref(), span, || unsafe { self.carry(comm, call, background) })
    }

    /// # Safety
    /// As [`Mpi::call`].
    unsafe fn carry(&self, comm: &Inner, call: &RawCall, background: bool) -> Result<()> {
        comm.state().check(|| call.collective.name().to_owned())?;
        if call.collective == Collective::SendRecv {
            // SAFETY: forwarded from the caller.
            return unsafe {
                if call.root == self.rank {
                    let sending = self.begin_send(comm, call)?;
                    self.finish_send(comm, sending)
                } else {
                    self.recv(comm, call)
                }
            };
        }
        agree(comm, call, background)?;
        // SAFETY: forwarded from the caller.
        unsafe { self.collective(call) }
    }

    /// All sends begin first and are awaited last, so no order of the other calls can deadlock.
    ///
    /// # Safety
    /// As [`Backend::run_batch`](crate::process_group::Backend::run_batch).
    pub(super) unsafe fn calls(&self, comm: &Inner, calls: &[RawCall]) -> Result<()> {
        comm.state().check(|| "batch".to_owned())?;
        let is_send = |call: &RawCall| call.collective == Collective::SendRecv && call.root == self.rank;
        let mut sending = Vec::new();
        for send in calls.iter().filter(|call| is_send(call)) {
            // SAFETY: forwarded from the caller, here and below.
            sending.push(unsafe { self.begin_send(comm, send) }?);
        }
        let mut outcome = Ok(());
        for other in calls.iter().filter(|call| !is_send(call)) {
            if outcome.is_ok() {
                // SAFETY: see above.
                outcome = unsafe { self.call(comm, other, false) };
            }
        }
        for one in sending {
            // After a failure this gives up at once, and leaves the memory to MPI.
            let sent = self.finish_send(comm, one);
            outcome = outcome.and(sent);
        }
        outcome
    }

    /// # Safety
    /// As [`Mpi::call`]; every rank is in the same call.
    unsafe fn collective(&self, call: &RawCall) -> Result<()> {
        let Call { collective, dtype, op, root, count, .. } = call.call;
        let what = || format!("{collective} by backend mpi");
        let elements = c_int::try_from(count)
            .map_err(|_| Error::invalid(what(), format!("{count} elements: MPI counts in 32 bits, split the call")))?;
        let bytes = count * dtype.size();
        let at_root = self.rank == root;
        // Elements that a rank reads and writes, in segments.
        let (reads, writes) = match collective {
            Collective::AllReduce | Collective::Scan => (1, 1),
            Collective::AllGather => (1, self.size),
            Collective::ReduceScatter => (self.size, 1),
            Collective::AllToAll => (self.size, self.size),
            Collective::Broadcast => (usize::from(at_root), 1),
            Collective::Reduce => (1, usize::from(at_root)),
            Collective::Gather => (1, if at_root { self.size } else { 0 }),
            Collective::Scatter => (if at_root { self.size } else { 0 }, 1),
            Collective::Barrier | Collective::SendRecv => (0, 0),
        };
        let (reads, writes) = (reads * bytes, writes * bytes);
        let (mut input, output) = (call.buffers.input, call.buffers.output);
        // In words, which are aligned for any element.
        let mut copy: Vec<u64>;
        let overlap = reads > 0
            && writes > 0
            && (input as usize) < output as usize + writes
            && (output as usize) < input as usize + reads;
        let average = Average::new(dtype, op, self.size);
        if let Some(scale) = &average.scale {
            copy = vec![0u64; reads.div_ceil(8)];
            // SAFETY: by the caller; the copy is as long and is aligned for any element.
            unsafe { scale.apply(input, copy.as_mut_ptr().cast(), reads / dtype.size()) };
            input = copy.as_ptr().cast();
        } else if overlap && collective != Collective::Broadcast {
            copy = vec![0u64; reads.div_ceil(8)];
            // SAFETY: by the caller; the copy is as long.
            unsafe { copy.as_mut_ptr().cast::<u8>().copy_from_nonoverlapping(input, reads) };
            input = copy.as_ptr().cast();
        }
        // Empty slices have addresses with a meaning in MPI: 1 is Open MPI's MPI_IN_PLACE.
        let mut nothing = 0u64;
        let nothing = (&raw mut nothing).cast::<c_void>();
        let from = if reads == 0 { nothing.cast_const() } else { input.cast() };
        let to = if writes == 0 { nothing } else { output.cast() };
        let (mpi_type, comm, root) = (data_type(dtype), self.comm, root as c_int);
        let operator = op.map(|op| operator(dtype, op)).transpose()?;
        let reduces = || operator.ok_or_else(|| Error::invalid(what(), "without an operator"));
        // SAFETY: the buffers are as long as the collective needs; every rank makes the same call.
        let status = unsafe {
            match collective {
                Collective::AllReduce => ffi::MPI_Allreduce(from, to, elements, mpi_type, reduces()?, comm),
                Collective::Scan => ffi::MPI_Scan(from, to, elements, mpi_type, reduces()?, comm),
                Collective::Reduce => ffi::MPI_Reduce(from, to, elements, mpi_type, reduces()?, root, comm),
                Collective::ReduceScatter => {
                    ffi::MPI_Reduce_scatter_block(from, to, elements, mpi_type, reduces()?, comm)
                }
                Collective::Broadcast => {
                    if at_root && input != output.cast_const() {
                        std::ptr::copy(input, output, bytes);
                    }
                    ffi::MPI_Bcast(to, elements, mpi_type, root, comm)
                }
                Collective::AllGather => ffi::MPI_Allgather(from, elements, mpi_type, to, elements, mpi_type, comm),
                Collective::Gather => ffi::MPI_Gather(from, elements, mpi_type, to, elements, mpi_type, root, comm),
                Collective::Scatter => ffi::MPI_Scatter(from, elements, mpi_type, to, elements, mpi_type, root, comm),
                Collective::AllToAll => ffi::MPI_Alltoall(from, elements, mpi_type, to, elements, mpi_type, comm),
                Collective::Barrier => ffi::MPI_Barrier(comm),
                Collective::SendRecv => return Err(Error::invalid(what(), "not a collective")),
            }
        };
        done(&what(), status)?;
        if let Some(division) = average.division.filter(|_| writes > 0) {
            // SAFETY: the output holds `count` elements.
            unsafe { division.apply(output, count) };
        }
        Ok(())
    }
}
