//! A call in symmetric memory: its plan, and the task that carries it out.

use super::board::Board;
use super::turn::{Message, Turn, Wait};
use crate::executor::Buffers;
use crate::reduce::{Average, Exact, Kernels};
use tinynccl_plan::algorithm::Shape;
use tinynccl_plan::error::Result;
use tinynccl_plan::wire::Header;

/// A compiled call, which repeated calls share.
#[derive(Debug, Clone)]
pub struct Plan {
    pub(crate) shape: Shape,
    /// Elements per segment, and bytes of one.
    pub(crate) count: usize,
    pub(crate) elem: usize,
    pub(crate) kernels: Kernels,
    pub(crate) average: Average,
    /// Adds all operands of an element at once.
    pub(crate) exact: Option<Exact>,
    /// Header without sequence number; it names the algorithm.
    pub(crate) header: Header,
}

impl Plan {
    /// Bytes per segment.
    pub(super) fn bytes(&self) -> usize {
        self.count * self.elem
    }
}

/// One call to run.
pub(super) struct Task<'a> {
    pub(super) plan: &'a Plan,
    pub(super) header: Header,
    pub(super) buffers: Buffers,
    /// Number of the call, or of its current step, in the shared region.
    pub(super) number: u64,
}

impl Task<'_> {
    /// `rank`'s message of this call if it has arrived: blocked until then, mismatch when it is of another call.
    #[inline(always)]
    pub(super) fn message(&self, board: &Board, rank: usize) -> Result<Message, Turn> {
        if !board.has_arrived(rank, self.number) {
            return Err(Turn::Blocked(rank, Wait::Arrival(self.number)));
        }
        // A copy of its own for the sums, so that the message of other calls stays in registers.
        if board.verifies(&self.header) {
            board.verify(rank, self.number, board.read(rank, self.number))?;
        }
        let message = board.read(rank, self.number);
        if message.agrees_with(&self.header) { Ok(message) } else { Err(Turn::Mismatch(rank, message.header())) }
    }
}
