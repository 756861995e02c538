//! One description of a call, from the API down to the plan that is compiled for it.

use crate::dtype::{DType, ReduceOp};
use crate::wire::{Algorithm, Collective, Header};

/// A collective or a message, without its memory. Everything that a compiled plan depends on is here, so that equal
/// calls share one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Call {
    /// The operation.
    pub collective: Collective,
    /// Type of the elements.
    pub dtype: DType,
    /// The operator; `None` where nothing is reduced.
    pub op: Option<ReduceOp>,
    /// The root, or the sender of a message; 0 where there is none.
    pub root: usize,
    /// The receiver of a message; 0 for collectives.
    pub peer: usize,
    /// Fingerprint of the caller's program that carries it out; 0: the library chooses an algorithm.
    pub program: u64,
    /// Elements per segment: of the whole buffer for all_reduce, broadcast and reduce, of one rank's segment for the
    /// others.
    pub count: usize,
    /// Elements per segment of the whole call if this is a chunk of one. The headers carry this count, so the first
    /// chunk detects ranks whose calls differ. Equal to `count` for a call that is not a chunk.
    pub whole: usize,
}

impl Call {
    /// Stands for the calling rank's own number in [`Call::send`] and [`Call::recv`].
    pub const OWN: usize = usize::MAX;

    /// A collective of no elements, to be filled in.
    #[inline]
    pub const fn of(collective: Collective) -> Call {
        Call { collective, dtype: DType::U8, op: None, root: 0, peer: 0, program: 0, count: 0, whole: 0 }
    }

    /// A collective. An operator or a root that the collective does not have is ignored.
    pub fn new(collective: Collective, dtype: DType, op: ReduceOp, root: usize, count: usize) -> Call {
        let op = collective.reduces().then_some(op);
        let root = if collective.has_root() { root } else { 0 };
        Call { collective, dtype, op, root, peer: 0, program: 0, count, whole: count }
    }

    /// A message from the calling rank to `peer`.
    pub const fn send(dtype: DType, peer: usize, count: usize) -> Call {
        Call::message(dtype, Call::OWN, peer, count)
    }

    /// A message from `peer` to the calling rank.
    pub const fn recv(dtype: DType, peer: usize, count: usize) -> Call {
        Call::message(dtype, peer, Call::OWN, count)
    }

    /// A message between two ranks.
    pub const fn message(dtype: DType, sender: usize, receiver: usize, count: usize) -> Call {
        Call { dtype, root: sender, peer: receiver, count, whole: count, ..Call::of(Collective::SendRecv) }
    }

    /// Returns this call with `count` elements of `dtype` per segment, as a whole and not a chunk.
    #[inline]
    pub const fn with_count(self, dtype: DType, count: usize) -> Call {
        Call { dtype, count, whole: count, ..self }
    }

    /// A chunk of the call: `count` elements per segment.
    #[inline]
    pub const fn chunk(self, count: usize) -> Call {
        Call { count, ..self }
    }

    /// Bytes per segment.
    #[inline]
    pub fn bytes(&self) -> usize {
        self.count.saturating_mul(self.dtype.size())
    }

    /// The receiver of a message that `rank` sends; `None` if it receives the message from [`Call::root`].
    #[inline]
    pub const fn receiver(&self, rank: usize) -> Option<usize> {
        let sends = self.root == Call::OWN || self.peer != Call::OWN && self.root == rank;
        if sends { Some(self.peer) } else { None }
    }

    /// The other rank of a message that `rank` sends or receives.
    #[inline]
    pub const fn partner(&self, rank: usize) -> usize {
        if self.root == rank { self.peer } else { self.root }
    }

    /// Header of the call's messages, without sequence number and length.
    #[inline]
    pub fn header(&self, comm: u32, algorithm: Algorithm) -> Header {
        let header = Header {
            count: self.whole as u64,
            comm,
            seq: 0,
            root: if self.collective.has_root() { self.root as u32 } else { Header::NO_ROOT },
            len: 0,
            check: 0,
            collective: self.collective as u8,
            dtype: self.dtype as u8,
            op: self.op.map_or(Header::NO_OP, |op| op as u8),
            algorithm: algorithm as u8,
        };
        if self.program == 0 { header } else { header.by_program(self.program) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_has_nothing_that_its_collective_lacks() {
        let call = |collective| Call::new(collective, DType::F32, ReduceOp::Max, 3, 5);
        let named = |c: Call| (c.op, c.root, c.count, c.whole);
        assert_eq!(named(call(Collective::Reduce)), (Some(ReduceOp::Max), 3, 5, 5));
        assert_eq!(named(call(Collective::AllReduce)), (Some(ReduceOp::Max), 0, 5, 5));
        assert_eq!(named(call(Collective::Broadcast)), (None, 3, 5, 5));
        assert_eq!(named(call(Collective::AllGather)), (None, 0, 5, 5));
    }

    #[test]
    fn headers_carry_the_count_of_the_whole_call() {
        let call = Call::new(Collective::Broadcast, DType::Bf16, ReduceOp::Sum, 2, 100).chunk(7);
        let header = call.header(4, Algorithm::Ring);
        assert_eq!((call.bytes(), header.count, header.comm, header.root), (14, 100, 4, 2));
        assert_eq!((header.op, header.seq, header.len), (Header::NO_OP, 0, 0));
        assert_eq!(Call::of(Collective::Barrier).header(0, Algorithm::Ring).root, Header::NO_ROOT);
    }

    #[test]
    fn a_message_has_two_ends() {
        let call = Call::message(DType::U8, 1, 4, 9);
        assert_eq!((call.partner(1), call.partner(4)), (4, 1));
        assert_eq!((call.receiver(1), call.receiver(4)), (Some(4), None));
        assert_eq!((Call::send(DType::U8, 2, 9).receiver(1), Call::recv(DType::U8, 2, 9).receiver(1)), (Some(2), None));
        assert_eq!((Call::send(DType::U8, 1, 9).receiver(1), Call::recv(DType::U8, 1, 9).receiver(1)), (Some(1), None));
        assert_eq!((Call::send(DType::U8, 2, 9).root, Call::recv(DType::U8, 2, 9).peer), (Call::OWN, Call::OWN));
    }
}
