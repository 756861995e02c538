//! A program bound to a call: link indices, partition, reduction functions. Cached, so that a repeated call
//! costs a comparison.

use std::collections::HashSet;
use std::ops::Range;

use crate::reduce::{self, Average, Combination, Exact, Kernels, Operand, Scale};
use tinynccl_plan::Call;
use tinynccl_plan::dtype::ReduceOp;
use tinynccl_plan::schedule::{Buf, Loc, Partition, Program, Step};
use tinynccl_plan::wire::{Collective, Header};

/// Bytes of output from which on non-temporal stores win: beside the input and the peers' data, the output would not
/// stay in the last-level cache until it is read.
const STREAM: usize = 8 << 20;

/// A buffer and an offset into it, in elements, that is added to the part's own.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    pub(super) buf: Buf,
    pub(super) segment_offset: usize,
}

impl Place {
    /// True if the place is in this rank's own contribution.
    #[inline]
    pub(super) fn is_input(self) -> bool {
        self.buf == Buf::Input
    }
}

/// A step with its links resolved.
#[derive(Debug, Clone)]
pub(super) struct Instruction {
    /// The step over links, by their indices.
    pub(super) step: Step<u32, Place>,
    pub(super) parts: Range<usize>,
    /// The lane's last use of the link within a window.
    pub(super) last_recv: bool,
    pub(super) last_send: bool,
    /// A send that is followed by one over the same link: the lane's next step, or its first in the next window.
    pub(super) followed: bool,
    /// The link may read the sent memory until `awaits` of the instructions that overwrite it, if any does.
    pub(super) may_zero_copy: bool,
    /// The link over which an earlier step sends what this one overwrites.
    pub(super) awaits: Option<u32>,
    /// Its message is a part of the sender's input, which is scaled here if the call wants that.
    pub(super) receives_input: bool,
    /// Operands of a reduction at once.
    pub(super) operands: Box<[Place]>,
}

impl Instruction {
    /// A step that is marked as nothing special.
    fn new(step: Step<u32, Place>, parts: Range<usize>) -> Instruction {
        Instruction {
            step,
            parts,
            last_recv: false,
            last_send: false,
            followed: false,
            may_zero_copy: false,
            awaits: None,
            receives_input: false,
            operands: Box::default(),
        }
    }

    /// Index of the link that it receives over.
    #[inline]
    pub(super) fn recv(&self) -> Option<usize> {
        self.step.from().map(|link| link as usize)
    }

    /// Index of the link that it sends over.
    #[inline]
    pub(super) fn send(&self) -> Option<usize> {
        self.step.to().map(|link| link as usize)
    }

    /// Its message as an operand.
    #[inline]
    pub(super) fn received(&self, payload: *const u8) -> Operand {
        Operand { at: payload, input: self.receives_input }
    }

    /// Link and location of the payload that it sends, unless the payload is computed in the link's memory.
    fn sent(&self) -> Option<(u32, Place)> {
        match self.step {
            Step::Send { to, src } => Some((to, src)),
            Step::RecvCopySend { to, dst, .. } | Step::RecvReduceCopySend { to, dst, .. } => Some((to, dst)),
            _ => None,
        }
    }
}

/// A thread of control: instructions in order, once per window.
#[derive(Debug, Clone)]
pub(super) struct PlanLane {
    /// Its range of [`Plan::instructions`].
    pub(super) instructions: Range<usize>,
    pub(super) partition: Partition,
    pub(super) windows: usize,
    /// Count in its messages' headers; `None`: that of the call.
    pub(super) count: Option<u64>,
}

/// Elements that a rank exchanges with each rank in a collective in which each pair of ranks has its own length. A list
/// has a range for each rank, or one for all.
#[derive(Debug, Clone)]
pub struct Ranges {
    /// Elements of the input.
    pub send: Vec<Range<usize>>,
    /// Elements of the output.
    pub recv: Vec<Range<usize>>,
}

impl Ranges {
    /// The range for `peer` in a list.
    fn one(list: &[Range<usize>], peer: usize) -> Range<usize> {
        list[if list.len() == 1 { 0 } else { peer }].clone()
    }

    /// True if `from` sends to `to`.
    fn has(call: &Call, from: usize, to: usize) -> bool {
        match call.collective {
            Collective::Gather => to == call.root,
            Collective::Scatter => from == call.root,
            _ => true,
        }
    }

    /// Sends of `rank` to others, from the next rank on, so that ranks do not all begin with the same target.
    pub(crate) fn sends(&self, call: &Call, rank: usize, size: usize) -> impl Iterator<Item = (usize, Range<usize>)> {
        let peers = (1..size).map(move |k| (rank + k) % size).filter(move |&to| Ranges::has(call, rank, to));
        peers.map(|to| (to, Ranges::one(&self.send, to)))
    }

    /// Receives of `rank` from others, in the order in which their first messages come.
    pub(crate) fn recvs(&self, call: &Call, rank: usize, size: usize) -> impl Iterator<Item = (usize, Range<usize>)> {
        let peers = (1..size).map(move |k| (rank + size - k) % size).filter(move |&from| Ranges::has(call, from, rank));
        peers.map(|from| (from, Ranges::one(&self.recv, from)))
    }

    /// The copy from the input of `rank` to its output.
    pub(crate) fn own(&self, call: &Call, rank: usize) -> Option<(Range<usize>, Range<usize>)> {
        Ranges::has(call, rank, rank).then(|| (Ranges::one(&self.send, rank), Ranges::one(&self.recv, rank)))
    }
}

/// A compiled call.
#[derive(Debug)]
pub struct Plan {
    pub(super) instructions: Vec<Instruction>,
    pub(super) lanes: Vec<PlanLane>,
    pub(super) elem: usize,
    pub(super) kernels: Kernels,
    /// The output is too large to be worth caching: it is written by non-temporal stores, except over an operand, which
    /// the cache has already.
    pub(super) streams: bool,
    pub(super) average: Average,
    /// Adds the operands of reductions at once.
    pub(super) exact: Option<Exact>,
    pub(crate) scratch_bytes: usize,
    /// Elements of a window before the first part that scratch memory has.
    pub(super) scratch_first: usize,
    /// Some links may read sent memory after the send call returned (zero copy).
    pub(super) zero_copy: bool,
    /// It sends; it receives.
    pub(super) directions: (bool, bool),
    /// Bytes from the start of the output on that are written.
    pub(super) output_bytes: usize,
    /// Header template.
    pub(crate) header: Header,
}

impl Plan {
    /// The factor of what is copied: of a rank's input.
    #[inline]
    pub(super) fn scale(&self, input: bool) -> Option<&Scale> {
        self.average.scale.as_ref().filter(|_| input)
    }

    /// Binds `program`, whose messages are cut into ones of at most `max_message` bytes; those of `received_inputs`
    /// ([`Program::received_inputs`]) carry inputs. `link` gives the index of the links with (channel, peer), which
    /// must be open; `zero_copy` says whether some of them read a message's memory after the send call returned (zero
    /// copy); `exact`: sums are rounded once, and `program` adds [at once](Program::pairwise) among more than two
    /// ranks. None: a link is missing.
    #[expect(clippy::too_many_arguments, reason = "a call, its place among the ranks, and the cut of its messages")]
    pub(crate) fn compile(
        call: &Call,
        header: Header,
        program: &Program,
        ranks: usize,
        received_inputs: &[bool],
        max_message: usize,
        zero_copy: bool,
        exact: bool,
        link: impl Fn(u32, usize) -> Option<u32>,
    ) -> Option<Plan> {
        let elem = call.dtype.size();
        let Combination { kernels, average, exact } = Combination::new(call.dtype, call.op, ranks, exact);
        let partition = program.partition(call.count, elem, max_message);
        // Scratch memory has those parts of a window that the program keeps there.
        let kept = kept_in_scratch(program);
        let scratch_first = partition.scratch_start(kept.start);
        let window = partition.scratch_start(kept.end) - scratch_first;
        let output_segments = match call.collective {
            Collective::AllGather | Collective::AllToAll | Collective::Gather => ranks,
            _ => 1,
        };
        let place = |loc: Loc| Place {
            buf: loc.buf,
            segment_offset: loc.segment as usize * if loc.buf == Buf::Scratch { window } else { call.count },
        };
        let mut instructions = Vec::with_capacity(program.lanes.iter().map(|lane| lane.steps.len()).sum());
        let mut lanes = Vec::with_capacity(program.lanes.len());
        for lane in &program.lanes {
            let first = instructions.len();
            let mut at = 0;
            while let Some(step) = lane.steps.get(at) {
                let link = |peer: u32| link(lane.channel, peer as usize).ok_or(());
                let mut instruction = Instruction::new(step.map(link, place).ok()?, step.parts());
                at += 1;
                if exact.is_some()
                    && let Step::Reduce { src, .. } = instruction.step
                    && let Some(reduction) = lane.at_once(at - 1)
                {
                    instruction.step = Step::Reduce { src, dst: place(reduction.dst), last: true };
                    instruction.operands = reduction.operands.iter().map(|&loc| place(loc)).collect();
                    at += reduction.steps - 1;
                }
                instructions.push(instruction);
            }
            mark_last_uses(&mut instructions[first..]);
            mark_followed(&mut instructions[first..]);
            let windows = partition.windows();
            lanes.push(PlanLane { instructions: first..instructions.len(), partition, windows, count: None });
        }
        instructions.iter_mut().zip(received_inputs).for_each(|(instruction, &is)| instruction.receives_input = is);
        if zero_copy {
            mark_zero_copy(&mut instructions, &lanes);
        }
        let directions =
            (instructions.iter().any(|i| i.send().is_some()), instructions.iter().any(|i| i.recv().is_some()));
        let output_bytes = output_segments.saturating_mul(call.count).saturating_mul(elem);
        Some(Plan {
            instructions,
            lanes,
            elem,
            zero_copy,
            directions,
            output_bytes,
            streams: output_bytes >= STREAM,
            kernels,
            average,
            exact,
            scratch_bytes: program.scratch_segments * window * elem,
            scratch_first,
            header,
        })
    }

    /// One lane per transfer, so that a slow peer does not hold up the others. `link` gives the index of the links with
    /// a peer, which must be open. An empty transfer sends a header alone, so a disagreement about it is detected.
    pub(crate) fn of_ranges(
        call: &Call,
        header: Header,
        ranges: &Ranges,
        (rank, size): (usize, usize),
        max_message: usize,
        zero_copy: bool,
        link: impl Fn(usize) -> Option<u32>,
    ) -> Option<Plan> {
        let elem = call.dtype.size();
        let sends: Vec<_> = ranges.sends(call, rank, size).collect();
        let recvs: Vec<_> = ranges.recvs(call, rank, size).collect();
        let own = ranges.own(call, rank);
        let lanes = sends.len() + recvs.len() + 1;
        let mut plan = Plan {
            instructions: Vec::with_capacity(lanes),
            lanes: Vec::with_capacity(lanes),
            elem,
            streams: recvs.iter().map(|(_, range)| range.len()).sum::<usize>().saturating_mul(elem) >= STREAM,
            kernels: reduce::kernels(call.dtype, ReduceOp::Sum),
            average: Average::default(),
            exact: None,
            scratch_bytes: 0,
            scratch_first: 0,
            zero_copy,
            directions: (!sends.is_empty(), !recvs.is_empty()),
            output_bytes: recvs
                .iter()
                .map(|(_, range)| range)
                .chain(own.iter().map(|(_, to)| to))
                .map(|r| r.end)
                .max()
                .unwrap_or(0)
                .saturating_mul(elem),
            header,
        };
        let mut lane = |step: Step<u32, Place>, count, longest| {
            let at = plan.instructions.len();
            plan.instructions.push(Instruction {
                last_recv: step.from().is_some(),
                last_send: step.to().is_some(),
                followed: matches!(step, Step::Send { .. }),
                ..Instruction::new(step, 0..1)
            });
            let partition = Partition::new(count, elem, 1, longest);
            let (windows, count) = (partition.windows(), Some(count as u64));
            plan.lanes.push(PlanLane { instructions: at..at + 1, partition, windows, count });
        };
        let place = |buf, range: &Range<usize>| Place { buf, segment_offset: range.start };
        for (peer, range) in &sends {
            lane(Step::Send { to: link(*peer)?, src: place(Buf::Input, range) }, range.len(), max_message);
        }
        if let Some((from, to)) = &own {
            let step = Step::Copy { src: place(Buf::Input, from), dst: place(Buf::Output, to) };
            lane(step, to.len(), usize::MAX);
        }
        for (peer, range) in &recvs {
            lane(Step::Recv { from: link(*peer)?, dst: place(Buf::Output, range) }, range.len(), max_message);
        }
        Some(plan)
    }
}

/// The parts of a window between which all of those lie that the program keeps in scratch memory.
fn kept_in_scratch(program: &Program) -> Range<usize> {
    let steps = program.lanes.iter().flat_map(|lane| &lane.steps);
    let places = steps.flat_map(|step| [step.read(), step.write()]).flatten();
    let kept = places.filter(|loc| loc.buf == Buf::Scratch).map(|loc| loc.parts());
    kept.reduce(|all, parts| all.start.min(parts.start)..all.end.max(parts.end)).unwrap_or(0..0)
}

/// Finds the sends which another one follows.
fn mark_followed(instructions: &mut [Instruction]) {
    let link = |i: &Instruction| if let Step::Send { to, .. } = i.step { Some(to) } else { None };
    for at in 0..instructions.len() {
        let next = link(&instructions[(at + 1) % instructions.len()]);
        instructions[at].followed = link(&instructions[at]).is_some_and(|link| next == Some(link));
    }
}

/// Finds the sends whose memory no step of the plan overwrites before it can check that the link is done with it. Input
/// and output count as the same memory. Windows have no element in common, so one stands for all.
fn mark_zero_copy(instructions: &mut [Instruction], lanes: &[PlanLane]) {
    let overlap = |a: &Range<usize>, b: &Range<usize>| a.start < b.end && b.start < a.end;
    for lane in lanes {
        for at in lane.instructions.clone() {
            let stays = |(_, from): &(u32, Place)| from.buf != Buf::Scratch;
            let Some((link, from)) = instructions[at].sent().filter(stays) else { continue };
            let parts = instructions[at].parts.clone();
            let hits = |i: &Instruction| {
                let same = |to: Place| to.buf == Buf::Output && to.segment_offset == from.segment_offset;
                i.step.write().is_some_and(same) && overlap(&i.parts, &parts)
            };
            let later = at + 1..lane.instructions.end;
            let elsewhere = (0..instructions.len()).filter(|i| !lane.instructions.contains(i));
            let free = elsewhere.into_iter().all(|i| !hits(&instructions[i]))
                && later
                    .clone()
                    .all(|i| !hits(&instructions[i]) || instructions[i].awaits.is_none_or(|other| other == link));
            instructions[at].may_zero_copy = free;
            if free {
                for i in later {
                    if hits(&instructions[i]) {
                        instructions[i].awaits = Some(link);
                    }
                }
            }
        }
    }
}

/// Marks each link's last use by a lane.
fn mark_last_uses(lane: &mut [Instruction]) {
    let (mut recvs, mut sends) = (HashSet::new(), HashSet::new());
    for instruction in lane.iter_mut().rev() {
        instruction.last_recv = instruction.recv().is_some_and(|link| recvs.insert(link));
        instruction.last_send = instruction.send().is_some_and(|link| sends.insert(link));
    }
}
