//! The collectives, and messages between two ranks.

use std::ffi::{c_int, c_void};

use cudarc::driver::sys::CUstream;
use tinynccl::comm::RawCall;
use tinynccl::wire::Collective;
use tinynccl::{Call as Kind, ReduceOp};

use super::pre_mul_sum;
use crate::abi;
use crate::abi::error::{Error, Result};
use crate::abi::export::export;
use crate::comm::communicator::Communicator;
use crate::comm::handle::{Handle, handle};
use crate::comm::operators::Scale;
use crate::submit::group;
use crate::submit::launch::{self, Call, Stream, Work};

/// The rank that an argument names.
fn rank(name: &str, value: c_int, size: usize) -> Result<usize> {
    let rank = usize::try_from(value).ok().filter(|&rank| rank < size);
    rank.ok_or_else(|| Error::argument(format!("{name} is {value}, expected a rank from 0 to {}", size - 1)))
}

/// Makes a call, or keeps it for the end of the group.
#[inline]
fn make(
    comm: Handle,
    buffers: (*const c_void, *mut c_void),
    stream: CUstream,
    kind: impl FnOnce(&Communicator, usize) -> Result<Kind>,
) -> Result<()> {
    make_scaled(comm, buffers, stream, |comm, size| Ok((kind(comm, size)?, None)))
}

/// [`make`] of a call whose input is multiplied first, perhaps.
#[inline]
fn make_scaled(
    comm: Handle,
    (input, output): (*const c_void, *mut c_void),
    stream: CUstream,
    kind: impl FnOnce(&Communicator, usize) -> Result<(Kind, Option<Scale>)>,
) -> Result<()> {
    group::recorded(handle(comm).and_then(|comm| {
        // Inside a group the communicator may not have started yet.
        let size = comm.size()?;
        let (kind, scale) = kind(&comm, size)?;
        let raw = RawCall::new(kind, input.cast(), output.cast());
        match scale {
            None if !group::is_open() => launch::plain(&comm, Stream(stream), &raw),
            None => group::call(Call { comm, stream: Stream(stream), work: Work::Plain(raw) }),
            // SAFETY: the program vouches for its buffers and its stream, as NCCL's interface requires.
            Some(scale) => group::enqueue(&comm, stream, Some(raw.clone()), move |comm, stream| unsafe {
                scale.enqueue(comm.device()?, stream, &raw)
            }),
        }
    }))
}

/// A collective that reduces.
#[inline]
fn reduces(
    comm: &Communicator,
    collective: Collective,
    (datatype, op): (c_int, c_int),
    root: usize,
    count: usize,
) -> Result<(Kind, Option<Scale>)> {
    let dtype = abi::dtype(datatype)?;
    let kind = |op| Kind::new(collective, dtype, op, root, count);
    match abi::operator(op) {
        Some(op) => Ok((kind(op), None)),
        None => Ok((kind(ReduceOp::Sum), Some(pre_mul_sum::operator(op, comm, dtype)?))),
    }
}

export! {
    /// Reduces `count` elements of all ranks into `recvbuff` of all ranks. In place: `sendbuff == recvbuff`.
    fn ncclAllReduce / pncclAllReduce [comm] (
        sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: c_int, op: c_int, comm: Handle,
        stream: CUstream,
    ) {
        make_scaled(comm, (sendbuff, recvbuff), stream, |comm, _| {
            reduces(comm, Collective::AllReduce, (datatype, op), 0, count)
        })
    }

    /// Reduces `count` elements of all ranks into `recvbuff` of the root; `recvbuff` of the others is ignored.
    fn ncclReduce / pncclReduce [comm] (
        sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: c_int, op: c_int, root: c_int,
        comm: Handle, stream: CUstream,
    ) {
        make_scaled(comm, (sendbuff, recvbuff), stream, |comm, size| {
            reduces(comm, Collective::Reduce, (datatype, op), rank("root", root, size)?, count)
        })
    }

    /// Copies `count` elements of the root's `sendbuff` into `recvbuff` of all ranks; `sendbuff` of the others is
    /// ignored.
    fn ncclBroadcast / pncclBroadcast [comm] (
        sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: c_int, root: c_int, comm: Handle,
        stream: CUstream,
    ) {
        make(comm, (sendbuff, recvbuff), stream, |_, size| broadcast(datatype, root, size, count))
    }

    /// `ncclBroadcast` in place.
    fn ncclBcast / pncclBcast [comm] (
        buff: *mut c_void, count: usize, datatype: c_int, root: c_int, comm: Handle, stream: CUstream,
    ) {
        make(comm, (buff, buff), stream, |_, size| broadcast(datatype, root, size, count))
    }

    /// Gathers `sendcount` elements of every rank, in rank order, into `recvbuff` of all ranks. In place: `sendbuff` is
    /// our segment of `recvbuff`.
    fn ncclAllGather / pncclAllGather [comm] (
        sendbuff: *const c_void, recvbuff: *mut c_void, sendcount: usize, datatype: c_int, comm: Handle,
        stream: CUstream,
    ) {
        make(comm, (sendbuff, recvbuff), stream, |_, _| moves(Collective::AllGather, datatype, 0, sendcount))
    }

    /// Reduces all ranks' inputs, and gives every rank its part of `recvcount` elements. In place: `recvbuff` is our
    /// segment of `sendbuff`.
    fn ncclReduceScatter / pncclReduceScatter [comm] (
        sendbuff: *const c_void, recvbuff: *mut c_void, recvcount: usize, datatype: c_int, op: c_int, comm: Handle,
        stream: CUstream,
    ) {
        make_scaled(comm, (sendbuff, recvbuff), stream, |comm, _| {
            reduces(comm, Collective::ReduceScatter, (datatype, op), 0, recvcount)
        })
    }

    /// Sends `count` elements of `sendbuff` to every rank, in rank order, and receives as many of each. In place:
    /// `sendbuff == recvbuff`, which takes as much memory again while the call runs.
    fn ncclAlltoAll / pncclAlltoAll [comm] (
        sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: c_int, comm: Handle, stream: CUstream,
    ) {
        make(comm, (sendbuff, recvbuff), stream, |_, _| moves(Collective::AllToAll, datatype, 0, count))
    }

    /// Gathers `count` elements of every rank into `recvbuff` of the root; `recvbuff` of the others is ignored.
    fn ncclGather / pncclGather [comm] (
        sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: c_int, root: c_int, comm: Handle,
        stream: CUstream,
    ) {
        make(comm, (sendbuff, recvbuff), stream, |_, size| {
            moves(Collective::Gather, datatype, rank("root", root, size)?, count)
        })
    }

    /// Gives every rank its `count` elements of the root's `sendbuff`; `sendbuff` of the others is ignored.
    fn ncclScatter / pncclScatter [comm] (
        sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: c_int, root: c_int, comm: Handle,
        stream: CUstream,
    ) {
        make(comm, (sendbuff, recvbuff), stream, |_, size| {
            moves(Collective::Scatter, datatype, rank("root", root, size)?, count)
        })
    }

    /// Sends `count` elements to `peer`, which receives as many. Messages that must make progress together belong into
    /// one group.
    fn ncclSend / pncclSend [comm] (
        sendbuff: *const c_void, count: usize, datatype: c_int, peer: c_int, comm: Handle, stream: CUstream,
    ) {
        make(comm, (sendbuff, std::ptr::null_mut()), stream, |_, size| {
            Ok(Kind::send(abi::dtype(datatype)?, rank("peer", peer, size)?, count))
        })
    }

    /// Receives `count` elements of `peer`.
    fn ncclRecv / pncclRecv [comm] (
        recvbuff: *mut c_void, count: usize, datatype: c_int, peer: c_int, comm: Handle, stream: CUstream,
    ) {
        make(comm, (std::ptr::null(), recvbuff), stream, |_, size| {
            Ok(Kind::recv(abi::dtype(datatype)?, rank("peer", peer, size)?, count))
        })
    }
}

/// A call that only moves data.
fn moves(collective: Collective, datatype: c_int, root: usize, count: usize) -> Result<Kind> {
    Ok(Kind::new(collective, abi::dtype(datatype)?, ReduceOp::Sum, root, count))
}

fn broadcast(datatype: c_int, root: c_int, size: usize, count: usize) -> Result<Kind> {
    moves(Collective::Broadcast, datatype, rank("root", root, size)?, count)
}
