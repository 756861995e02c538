//! A collective as data: for each rank, the primitive steps it takes, per lane, over parts of three buffers.
//!
//! An [`algorithm`](crate::algorithm) produces a [`Program`] per rank from a [`Shape`], without any I/O. The same value
//! is executed, verified ([`verify`]), costed and drawn. A [`Schedule`] has the programs of all ranks and the proof.
//!
//! # Shape
//! A buffer is one or several *segments* of `count` elements (all_gather's output has one per rank). The executor walks
//! over the segments in *windows*; a window is split into [`Program::parts`] *parts*, so small that
//! [`Program::span`] of them fit in one message ([`partition`]). A step names a part, or a span of neighbouring parts,
//! of a segment ([`Loc`]) and says what happens to it. Every lane runs its steps once per window; windows are the
//! pipeline: nothing makes a lane wait for another lane at their borders.
//!
//! # Lanes and channels
//! A *lane* is a thread of control: its steps run in order, lanes advance independently of each other (NCCL runs the
//! way up and the way down of a tree in different warps for the same reason). A *channel* is a set of links, one per
//! peer. Within a program at most one lane sends, and at most one lane receives, on a given (channel, peer), so
//! messages of a link have one order. The verifier checks this rule.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::convert::Infallible;
use std::ops::Range;

mod at_once;
pub mod draw;
mod formats;
mod joined;
mod parse;
pub mod partition;
mod proven;
pub mod rounds;
mod shape;
pub mod verify;

pub use at_once::AtOnce;
pub(crate) use joined::joined;
pub use partition::Partition;
pub use proven::Schedule;
pub use shape::Shape;

/// One of the three buffers of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Buf {
    /// The caller's send buffer (may be the same memory as the output).
    Input,
    /// The caller's receive buffer.
    Output,
    /// The executor's memory, [`Program::scratch_segments`] segments of one window each. Every part has a fixed offset
    /// in it, so a span of several parts is not one range there.
    Scratch,
}

/// A part of a segment of a buffer, or a span of neighbouring parts, within the current window.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Loc {
    /// Buffer that holds the part.
    pub buf: Buf,
    /// Segment index; 0 for buffers with one segment.
    pub segment: u32,
    /// Index of the first part, in `0..Program::parts`.
    pub part: u32,
    /// Number of parts, in `1..=Program::span`. They are neighbours, so they are one range of memory.
    pub span: u32,
}

impl Loc {
    /// A part of the caller's send buffer.
    pub const fn input(segment: usize, part: usize) -> Loc {
        Loc { buf: Buf::Input, segment: segment as u32, part: part as u32, span: 1 }
    }
    /// A part of the caller's receive buffer.
    pub const fn output(segment: usize, part: usize) -> Loc {
        Loc { buf: Buf::Output, segment: segment as u32, part: part as u32, span: 1 }
    }
    /// A part of the executor's scratch memory.
    pub const fn scratch(segment: usize, part: usize) -> Loc {
        Loc { buf: Buf::Scratch, segment: segment as u32, part: part as u32, span: 1 }
    }
    /// Returns this location, `span` parts long.
    pub const fn spanning(self, span: usize) -> Loc {
        Loc { span: span as u32, ..self }
    }
    /// The parts it covers.
    pub const fn parts(&self) -> Range<usize> {
        self.part as usize..self.part as usize + self.span as usize
    }
}

/// A primitive, with NCCL's names (`src/device/primitives.h`): `recv` is the received data.
///
/// One step moves at most one message in and one message out. An operand that is read from the input, or received as a
/// [`Step::Send`] took it from there, is a rank's own contribution: `avg` of floats multiplies it by 1/n as it is read.
///
/// `R` names another rank, `L` a location in memory: an executor has a link for the one and an offset for the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step<R = u32, L = Loc> {
    /// Send `src` to rank `to`.
    Send {
        /// Destination rank.
        to: R,
        /// The data to send.
        src: L,
    },
    /// `dst = recv`.
    Recv {
        /// Source rank.
        from: R,
        /// Location of the received data.
        dst: L,
    },
    /// `dst = src`, locally. Where both are the same memory (in-place calls) only a scaled input changes.
    Copy {
        /// From.
        src: L,
        /// To.
        dst: L,
    },
    /// `dst = dst op src`, locally.
    Reduce {
        /// Right operand.
        src: L,
        /// Left operand and result.
        dst: L,
        /// The result is the finished reduction over all ranks (`avg` of integers divides here).
        last: bool,
    },
    /// `dst = src op recv`.
    RecvReduceCopy {
        /// Source rank.
        from: R,
        /// Our own operand.
        src: L,
        /// Location of the result.
        dst: L,
        /// The result is the finished reduction over all ranks (`avg` of integers divides here).
        last: bool,
    },
    /// `dst = recv`, and forward it.
    RecvCopySend {
        /// Source rank.
        from: R,
        /// Destination rank.
        to: R,
        /// Location of our copy of the received data.
        dst: L,
    },
    /// Send `src op recv`.
    RecvReduceSend {
        /// Source rank.
        from: R,
        /// Destination rank.
        to: R,
        /// Our own operand.
        src: L,
    },
    /// `dst = src op recv`, and forward it.
    RecvReduceCopySend {
        /// Source rank.
        from: R,
        /// Destination rank.
        to: R,
        /// Our own operand.
        src: L,
        /// Location of our copy of the result.
        dst: L,
        /// The result is the finished reduction over all ranks (`avg` of integers divides here).
        last: bool,
    },
}

impl Step {
    /// A [`Step::Send`].
    pub const fn send(to: usize, src: Loc) -> Step {
        Step::Send { to: to as u32, src }
    }
    /// A [`Step::Recv`].
    pub const fn recv(from: usize, dst: Loc) -> Step {
        Step::Recv { from: from as u32, dst }
    }
    /// A [`Step::RecvReduceCopy`].
    pub const fn recv_reduce_copy(from: usize, src: Loc, dst: Loc, last: bool) -> Step {
        Step::RecvReduceCopy { from: from as u32, src, dst, last }
    }
    /// A [`Step::RecvCopySend`].
    pub const fn recv_copy_send(from: usize, to: usize, dst: Loc) -> Step {
        Step::RecvCopySend { from: from as u32, to: to as u32, dst }
    }
    /// A [`Step::RecvReduceSend`].
    pub const fn recv_reduce_send(from: usize, to: usize, src: Loc) -> Step {
        Step::RecvReduceSend { from: from as u32, to: to as u32, src }
    }
    /// A [`Step::RecvReduceCopySend`].
    pub const fn recv_reduce_copy_send(from: usize, to: usize, src: Loc, dst: Loc, last: bool) -> Step {
        Step::RecvReduceCopySend { from: from as u32, to: to as u32, src, dst, last }
    }

    /// The rank this step receives from.
    #[inline]
    pub fn source(&self) -> Option<usize> {
        self.from().map(|rank| rank as usize)
    }

    /// The rank this step sends to.
    #[inline]
    pub fn destination(&self) -> Option<usize> {
        self.to().map(|rank| rank as usize)
    }

    /// The parts this step works on (the same for all its locations): [`Partition::parts`] gives their elements.
    #[inline]
    pub fn parts(&self) -> Range<usize> {
        self.read().or(self.write()).map_or(0..0, |loc| loc.parts())
    }
}

impl<R: Copy, L: Copy> Step<R, L> {
    /// The source of its message.
    #[inline]
    pub fn from(&self) -> Option<R> {
        match *self {
            Step::Send { .. } | Step::Copy { .. } | Step::Reduce { .. } => None,
            Step::Recv { from, .. }
            | Step::RecvReduceCopy { from, .. }
            | Step::RecvCopySend { from, .. }
            | Step::RecvReduceSend { from, .. }
            | Step::RecvReduceCopySend { from, .. } => Some(from),
        }
    }

    /// The destination of its message.
    #[inline]
    pub fn to(&self) -> Option<R> {
        match *self {
            Step::Recv { .. } | Step::Copy { .. } | Step::Reduce { .. } | Step::RecvReduceCopy { .. } => None,
            Step::Send { to, .. }
            | Step::RecvCopySend { to, .. }
            | Step::RecvReduceSend { to, .. }
            | Step::RecvReduceCopySend { to, .. } => Some(to),
        }
    }

    /// The location that this step reads in our memory.
    #[inline]
    pub fn read(&self) -> Option<L> {
        match *self {
            Step::Recv { .. } | Step::RecvCopySend { .. } => None,
            Step::Send { src, .. }
            | Step::Copy { src, .. }
            | Step::Reduce { src, .. }
            | Step::RecvReduceCopy { src, .. }
            | Step::RecvReduceSend { src, .. }
            | Step::RecvReduceCopySend { src, .. } => Some(src),
        }
    }

    /// The location that this step writes in our memory ([`Step::Reduce`] also reads it).
    #[inline]
    pub fn write(&self) -> Option<L> {
        match *self {
            Step::Send { .. } | Step::RecvReduceSend { .. } => None,
            Step::Recv { dst, .. }
            | Step::Copy { dst, .. }
            | Step::Reduce { dst, .. }
            | Step::RecvReduceCopy { dst, .. }
            | Step::RecvCopySend { dst, .. }
            | Step::RecvReduceCopySend { dst, .. } => Some(dst),
        }
    }

    /// This step with other names of its ranks and locations.
    pub fn map<S, M, E>(self, rank: impl Fn(R) -> Result<S, E>, loc: impl Fn(L) -> M) -> Result<Step<S, M>, E> {
        Ok(match self {
            Step::Send { to, src } => Step::Send { to: rank(to)?, src: loc(src) },
            Step::Recv { from, dst } => Step::Recv { from: rank(from)?, dst: loc(dst) },
            Step::Copy { src, dst } => Step::Copy { src: loc(src), dst: loc(dst) },
            Step::Reduce { src, dst, last } => Step::Reduce { src: loc(src), dst: loc(dst), last },
            Step::RecvReduceCopy { from, src, dst, last } => {
                Step::RecvReduceCopy { from: rank(from)?, src: loc(src), dst: loc(dst), last }
            }
            Step::RecvCopySend { from, to, dst } => {
                Step::RecvCopySend { from: rank(from)?, to: rank(to)?, dst: loc(dst) }
            }
            Step::RecvReduceSend { from, to, src } => {
                Step::RecvReduceSend { from: rank(from)?, to: rank(to)?, src: loc(src) }
            }
            Step::RecvReduceCopySend { from, to, src, dst, last } => {
                Step::RecvReduceCopySend { from: rank(from)?, to: rank(to)?, src: loc(src), dst: loc(dst), last }
            }
        })
    }

    /// The primitive without its operands.
    #[inline]
    pub fn kind(self) -> Step<(), ()> {
        let Ok(kind) = self.map(|_| Ok::<_, Infallible>(()), |_| ());
        kind
    }

    /// NCCL's name of the primitive.
    pub const fn name(&self) -> &'static str {
        match self {
            Step::Send { .. } => "send",
            Step::Recv { .. } => "recv",
            Step::Copy { .. } => "copy",
            Step::Reduce { .. } => "reduce",
            Step::RecvReduceCopy { .. } => "recv_reduce_copy",
            Step::RecvCopySend { .. } => "recv_copy_send",
            Step::RecvReduceSend { .. } => "recv_reduce_send",
            Step::RecvReduceCopySend { .. } => "recv_reduce_copy_send",
        }
    }
}

/// A thread of control: steps in order, once per window.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lane {
    /// The set of links its messages travel on.
    pub channel: u32,
    /// Steps of one window, in order.
    pub steps: Vec<Step>,
}

/// One rank's part of a collective.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Program {
    /// Parts per window; equal on all ranks.
    pub parts: usize,
    /// Most parts that travel in one message; equal on all ranks. 1 for most algorithms.
    pub span: usize,
    /// Segments of scratch memory needed.
    pub scratch_segments: usize,
    /// Independent threads of control.
    pub lanes: Vec<Lane>,
}

impl Program {
    /// The cut of a call's segments for this program: no message is longer than `max_message` bytes
    /// (as long as `max_message` holds [`Program::span`] elements).
    #[inline]
    pub fn partition(&self, count: usize, elem_size: usize, max_message: usize) -> Partition {
        let max_part = if self.span <= 1 { max_message } else { max_message / self.span };
        Partition::new(count, elem_size, self.parts, max_part)
    }

    /// The ranks this program sends to or receives from, per channel, sorted and without repetition.
    pub fn links(&self) -> Vec<(u32, usize)> {
        let mut links: Vec<(u32, usize)> = self
            .lanes
            .iter()
            .flat_map(|lane| {
                lane.steps.iter().flat_map(|s| [s.source(), s.destination()]).flatten().map(|peer| (lane.channel, peer))
            })
            .collect();
        links.sort_unstable();
        links.dedup();
        links
    }

    /// By step, in the order of the lanes: whether what it receives is a part of the sender's input, as
    /// [`Step::Send`] took it from there. `programs` gives those of the other ranks. None: one is missing, or they
    /// do not fit together.
    pub fn received_inputs(&self, rank: usize, programs: impl Fn(usize) -> Option<Program>) -> Option<Vec<bool>> {
        let mut messages: BTreeMap<(u32, usize), VecDeque<bool>> = BTreeMap::new();
        let sources: BTreeSet<usize> = self.lanes.iter().flat_map(|l| &l.steps).filter_map(Step::source).collect();
        for source in sources {
            for lane in programs(source)?.lanes {
                let ours = lane.steps.iter().filter(|step| step.destination() == Some(rank));
                let inputs = ours.map(|step| matches!(step, Step::Send { src, .. } if src.buf == Buf::Input));
                messages.entry((lane.channel, source)).or_default().extend(inputs);
            }
        }
        let mut received = |channel, step: &Step| match step.source() {
            Some(source) => messages.get_mut(&(channel, source))?.pop_front(),
            None => Some(false),
        };
        let steps = self.lanes.iter().flat_map(|lane| lane.steps.iter().map(|step| (lane.channel, step)));
        steps.map(|(channel, step)| received(channel, step)).collect()
    }

    /// The number of ranks that this one receives from in a channel, at most.
    pub fn most_sources(&self) -> usize {
        let mut sources: BTreeMap<u32, BTreeSet<usize>> = BTreeMap::new();
        for lane in &self.lanes {
            sources.entry(lane.channel).or_default().extend(lane.steps.iter().filter_map(Step::source));
        }
        sources.values().map(BTreeSet::len).max().unwrap_or(0)
    }
}
