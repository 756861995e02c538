//! One call of a collective, blocking or asynchronous, in place or out of place.

use tinynccl::comm::Exchange;
use tinynccl::wire::Collective;
use tinynccl::{Comm, Error, ReduceOp, Result};

use crate::case::{Case, Place, Way};
use crate::memory::Memory;
use crate::pattern::Number;

/// Makes the call in the caller's thread.
// EXERCISE 3 (How it works): make the call: each collective of the library once, in place and out of place.
pub(crate) fn blocking<T: Number>(comm: &Comm, case: &Case, place: Place, memory: &mut Memory<'_, T>) -> Result<()> {
    let op = case.op.unwrap_or(ReduceOp::Sum);
    let root = case.root.unwrap_or(0);
    if place == Place::In {
        return match case.collective {
            Collective::AllReduce => comm.all_reduce_in_place(memory.output(), op),
            Collective::Scan => comm.scan_in_place(memory.output(), op),
            Collective::AllGather => comm.all_gather_in_place(memory.output()),
            Collective::ReduceScatter => comm.reduce_scatter_in_place(memory.input(), op),
            Collective::Broadcast => comm.broadcast_in_place(memory.output(), root),
            Collective::Reduce => comm.reduce_in_place(memory.output(), op, root),
            other => Err(not_offered(other, "in place")),
        };
    }
    let (input, output) = memory.both();
    match case.collective {
        Collective::AllReduce => comm.all_reduce(input, output, op),
        Collective::Scan => comm.scan(input, output, op),
        Collective::AllGather => comm.all_gather(input, output),
        Collective::ReduceScatter => comm.reduce_scatter(input, output, op),
        Collective::Broadcast => comm.broadcast(input, output, root),
        Collective::Reduce => comm.reduce(input, output, op, root),
        Collective::Gather => comm.gather(input, output, root),
        Collective::Scatter => comm.scatter(input, output, root),
        Collective::AllToAll => comm.all_to_all(input, output),
        Collective::Barrier => comm.barrier(),
        Collective::SendRecv => match (case.way, comm.rank()) {
            (Way::Ring, _) => {
                let (left, right) = neighbours(comm);
                comm.send_recv(input, right, output, left)
            }
            (Way::RoundTrip, 0) => comm.send(input, 1).and_then(|()| comm.recv(output, 1)),
            (Way::RoundTrip, 1) => comm.recv(output, 0).and_then(|()| comm.send(input, 0)),
            (Way::RoundTrip, _) => Ok(()),
            (Way::Neighbours, _) => comm.neighbour_exchange(halves(comm, input, output)),
        },
    }
}

/// Makes the call in a group, together with a message round the ring that holds the sender's rank.
pub(crate) fn grouped<T: Number>(comm: &Comm, case: &Case, place: Place, memory: &mut Memory<'_, T>) -> Result<()> {
    let op = case.op.unwrap_or(ReduceOp::Sum);
    let root = case.root.unwrap_or(0);
    let (left, right) = neighbours(comm);
    let (token, mut came) = ([comm.rank() as u64], [u64::MAX]);
    comm.group(|group| {
        // The call may use the same two ranks: messages keep their order.
        group.send_recv(&token, right, &mut came, left)?;
        if place == Place::In {
            return match case.collective {
                Collective::AllReduce => group.all_reduce_in_place(memory.output(), op),
                Collective::Scan => group.scan_in_place(memory.output(), op),
                Collective::AllGather => group.all_gather_in_place(memory.output()),
                Collective::ReduceScatter => group.reduce_scatter_in_place(memory.input(), op),
                Collective::Broadcast => group.broadcast_in_place(memory.output(), root),
                Collective::Reduce => group.reduce_in_place(memory.output(), op, root),
                other => Err(not_offered(other, "in place")),
            };
        }
        let (input, output) = memory.both();
        match case.collective {
            Collective::AllReduce => group.all_reduce(input, output, op),
            Collective::Scan => group.scan(input, output, op),
            Collective::AllGather => group.all_gather(input, output),
            Collective::ReduceScatter => group.reduce_scatter(input, output, op),
            Collective::Broadcast => group.broadcast(input, output, root),
            Collective::Reduce => group.reduce(input, output, op, root),
            Collective::Gather => group.gather(input, output, root),
            Collective::Scatter => group.scatter(input, output, root),
            Collective::AllToAll => group.all_to_all(input, output),
            Collective::Barrier => group.barrier(),
            Collective::SendRecv => match (case.way, comm.rank()) {
                (Way::Ring, _) => group.send_recv(input, right, output, left),
                (Way::RoundTrip, me @ (0 | 1)) => group.send_recv(input, 1 - me, output, 1 - me),
                (Way::RoundTrip, _) => Ok(()),
                (Way::Neighbours, _) => group.neighbour_exchange(halves(comm, input, output)),
            },
        }
    })?;
    if came == [left as u64] {
        return Ok(());
    }
    Err(Error::invalid("group", format!("round the ring came {} and not the rank {left} of the left one", came[0])))
}

/// The ranks on the left and on the right in the ring.
fn neighbours(comm: &Comm) -> (usize, usize) {
    let (rank, ranks) = (comm.rank(), comm.size());
    ((rank + ranks - 1) % ranks, (rank + 1) % ranks)
}

/// The first half goes to the right neighbour, the second to the left one; received halves lie in the same order.
fn halves<'a, T>(comm: &Comm, input: &'a [T], output: &'a mut [T]) -> [Exchange<'a, T>; 2] {
    let (left, right) = neighbours(comm);
    let (first, second) = input.split_at(input.len() / 2);
    let (from_left, from_right) = output.split_at_mut(output.len() / 2);
    [
        Exchange { to: Some(right), send: first, from: Some(left), recv: from_left },
        Exchange { to: Some(left), send: second, from: Some(right), recv: from_right },
    ]
}

/// Returns true if the library offers the call asynchronously: all but those without memory, and messages.
pub(crate) fn has_async(collective: Collective) -> bool {
    !matches!(collective, Collective::Barrier | Collective::SendRecv)
}

/// Buffers of an asynchronous call: the library owns them while it runs.
#[derive(Debug, Default)]
pub(crate) struct Owned<T> {
    pub(crate) input: Vec<T>,
    pub(crate) output: Vec<T>,
}

impl<T> Owned<T> {
    /// The buffer that the call writes.
    pub(crate) fn written(&mut self, case: &Case, place: Place) -> &mut Vec<T> {
        if place == Place::In && case.in_place_uses_input() { &mut self.input } else { &mut self.output }
    }
}

/// Makes the call on the communicator's progress thread, and waits for it.
pub(crate) fn asynchronous<T: Number>(comm: &Comm, case: &Case, place: Place, owned: &mut Owned<T>) -> Result<()> {
    let op = case.op.unwrap_or(ReduceOp::Sum);
    let root = case.root.unwrap_or(0);
    if place == Place::In {
        let written = owned.written(case, place);
        let buffer = std::mem::take(written);
        *written = match case.collective {
            Collective::AllReduce => comm.all_reduce_in_place_async(buffer, op)?.wait()?,
            Collective::Scan => comm.scan_in_place_async(buffer, op)?.wait()?,
            Collective::AllGather => comm.all_gather_in_place_async(buffer)?.wait()?,
            Collective::ReduceScatter => comm.reduce_scatter_in_place_async(buffer, op)?.wait()?,
            Collective::Broadcast => comm.broadcast_in_place_async(buffer, root)?.wait()?,
            Collective::Reduce => comm.reduce_in_place_async(buffer, op, root)?.wait()?,
            other => return Err(not_offered(other, "asynchronously in place")),
        };
        return Ok(());
    }
    let input = std::mem::take(&mut owned.input);
    let output = std::mem::take(&mut owned.output);
    (owned.input, owned.output) = match case.collective {
        Collective::AllReduce => comm.all_reduce_async(input, output, op)?.wait()?,
        Collective::Scan => comm.scan_async(input, output, op)?.wait()?,
        Collective::AllGather => comm.all_gather_async(input, output)?.wait()?,
        Collective::ReduceScatter => comm.reduce_scatter_async(input, output, op)?.wait()?,
        Collective::Broadcast => comm.broadcast_async(input, output, root)?.wait()?,
        Collective::Reduce => comm.reduce_async(input, output, op, root)?.wait()?,
        Collective::Gather => comm.gather_async(input, output, root)?.wait()?,
        Collective::Scatter => comm.scatter_async(input, output, root)?.wait()?,
        Collective::AllToAll => comm.all_to_all_async(input, output)?.wait()?,
        other => return Err(not_offered(other, "asynchronously")),
    };
    Ok(())
}

fn not_offered(collective: Collective, how: &str) -> Error {
    Error::Unsupported { what: format!("{collective} {how}"), detail: "the library does not offer it".to_owned() }
}
