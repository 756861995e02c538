//! A program bound to a call: link indices, partition, reduction functions. Cached, so that a repeated call
//! costs a comparison.

use std::ops::Range;

use crate::dtype::{DType, ReduceOp};
use crate::reduce::{self, Kernels};
use crate::schedule::{Buf, Loc, Partition, Program, Step};
use crate::wire::{Algorithm, Collective, Header};

/// Everything a plan depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct CallKey {
    pub(crate) collective: Collective,
    pub(crate) dtype: DType,
    /// `None` where nothing is reduced.
    pub(crate) op: Option<ReduceOp>,
    /// Root, or the sender of a point-to-point message; 0 where there is none.
    pub(crate) root: usize,
    /// Elements per segment.
    pub(crate) count: usize,
    /// The other side of a point-to-point message; 0 for collectives.
    pub(crate) peer: usize,
}

impl CallKey {
    /// Header of the call's messages, without sequence number and length.
    pub(crate) fn header(&self, comm: u32, algorithm: Algorithm) -> Header {
        Header {
            count: self.count as u64,
            comm,
            seq: 0,
            root: if self.collective.has_root() { self.root as u32 } else { Header::NO_ROOT },
            len: 0,
            crc: 0,
            collective: self.collective as u8,
            dtype: self.dtype as u8,
            op: self.op.map_or(Header::NO_OP, |op| op as u8),
            algorithm: algorithm as u8,
        }
    }
}

/// A buffer and an offset into it, in elements, that is added to the part's own.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    pub(super) buf: Buf,
    pub(super) segment_offset: usize,
}

/// What an instruction does once its message is there; the names are those of [`Step`].
#[derive(Debug, Clone, Copy)]
pub(super) enum Action {
    Send { src: Place },
    Recv { dst: Place },
    Copy { src: Place, dst: Place },
    Reduce { src: Place, dst: Place, last: bool },
    RecvReduceCopy { src: Place, dst: Place, last: bool },
    RecvCopySend { dst: Place },
    RecvReduceSend { src: Place },
    RecvReduceCopySend { src: Place, dst: Place, last: bool },
}

/// A step with its links resolved.
#[derive(Debug, Clone)]
pub(super) struct Instruction {
    pub(super) action: Action,
    pub(super) parts: Range<usize>,
    /// Link indices; unused ones are `usize::MAX`.
    pub(super) recv: usize,
    pub(super) send: usize,
    /// A send that is followed by one over the same link: the lane's next step, or its first in the next window.
    pub(super) streams: bool,
}

/// A compiled call.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(super) lanes: Vec<Vec<Instruction>>,
    pub(super) partition: Partition,
    pub(super) windows: usize,
    pub(super) elem: usize,
    pub(super) kernels: Kernels,
    /// World size for `avg`, else 1.
    pub(super) divisor: usize,
    pub(crate) scratch_bytes: usize,
    /// Header template.
    pub(crate) header: Header,
}

impl Plan {
    /// Binds `program`, cut into messages of at most `max_message` bytes. `link` gives the index of the links with (channel, peer), which must be open.
    pub(crate) fn compile(
        key: &CallKey,
        header: Header,
        program: &Program,
        ranks: usize,
        max_message: usize,
        link: impl Fn(u32, usize) -> Option<u32>,
    ) -> Option<Plan> {
        let elem = key.dtype.size();
        let partition = program.partition(key.count, elem, max_message);
        let window = partition.largest_window();
        let place = |loc: Loc| Place {
            buf: loc.buf,
            segment_offset: loc.segment as usize * if loc.buf == Buf::Scratch { window } else { key.count },
        };
        let mut lanes = Vec::with_capacity(program.lanes.len());
        for lane in &program.lanes {
            let mut instructions = Vec::with_capacity(lane.steps.len());
            for step in &lane.steps {
                let index = |peer: Option<usize>| match peer {
                    Some(peer) => link(lane.channel, peer).map(|i| i as usize),
                    None => Some(usize::MAX),
                };
                let action = match *step {
                    Step::Send { src, .. } => Action::Send { src: place(src) },
                    Step::Recv { dst, .. } => Action::Recv { dst: place(dst) },
                    Step::Copy { src, dst } => Action::Copy { src: place(src), dst: place(dst) },
                    Step::Reduce { src, dst, last } => Action::Reduce { src: place(src), dst: place(dst), last },
                    Step::RecvReduceCopy { src, dst, last, .. } => {
                        Action::RecvReduceCopy { src: place(src), dst: place(dst), last }
                    }
                    Step::RecvCopySend { dst, .. } => Action::RecvCopySend { dst: place(dst) },
                    Step::RecvReduceSend { src, .. } => Action::RecvReduceSend { src: place(src) },
                    Step::RecvReduceCopySend { src, dst, last, .. } => {
                        Action::RecvReduceCopySend { src: place(src), dst: place(dst), last }
                    }
                };
                instructions.push(Instruction {
                    action,
                    parts: step.parts(),
                    recv: index(step.source())?,
                    send: index(step.destination())?,
                    streams: false,
                });
            }
            let sends = |i: &Instruction| matches!(i.action, Action::Send { .. }).then_some(i.send);
            for at in 0..instructions.len() {
                let next = (at + 1) % instructions.len();
                instructions[at].streams =
                    sends(&instructions[at]).is_some_and(|link| sends(&instructions[next]) == Some(link));
            }
            lanes.push(instructions);
        }
        Some(Plan {
            lanes,
            windows: partition.windows(),
            elem,
            kernels: reduce::kernels(key.dtype, key.op.unwrap_or(ReduceOp::Sum)),
            divisor: if key.op == Some(ReduceOp::Avg) { ranks } else { 1 },
            scratch_bytes: program.scratch_segments * window * elem,
            partition,
            header,
        })
    }
}
