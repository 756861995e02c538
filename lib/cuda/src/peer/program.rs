//! A rank's schedule as a kernel takes it: steps of 8 bytes, passed by value with the launch.
//!
//! The schedule is one that the CPU can execute, too: [`algorithm::program_by_switch`], with as many channels as the
//! kernel has blocks. Channels do the same on different parts, the odd ones possibly with another tree (double tree),
//! so two channels represent all: block `b` runs the steps of channel `b % 2` with shifted parts. Nothing here depends
//! on the count. The cut of the segments ([`Cut`]) is passed beside the steps, so the kernel needs no division.
//!
//! `kernels/primitives.cuh` has the same structs.

use crate::window::Layout;
use tinynccl_plan::algorithm::{self, Shape};
use tinynccl_plan::schedule::{Buf, Loc, Partition, Program, Step};
use tinynccl_plan::wire::{Algorithm, Collective};

/// Steps of two channels at most, as in `kernels/primitives.cuh`: a program is far below the 4 KiB that a launch may
/// pass.
pub(crate) const MAX_STEPS: usize = 96;
/// Lanes of a channel at most: a tree has two, one for each direction.
pub(crate) const MAX_LANES: usize = 2;
/// Channels whose steps are stored.
const VARIANTS: usize = 2;
/// Stands for "no rank".
const NOBODY: u8 = 255;

/// Encodes the location of a part: the buffer in the two upper bits, the segment below.
fn place(loc: Loc) -> Option<u8> {
    let buf = match loc.buf {
        Buf::Input => 0,
        Buf::Output => 1,
        Buf::Scratch => 2,
    };
    (loc.segment < 64).then_some(buf << 6 | loc.segment as u8)
}

/// Operands of a step. They determine its operation: a step with a sender and a `src` reduces, one with a `dst` stores,
/// one with a receiver sends.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DeviceStep {
    /// One of the constants below.
    pub(crate) flags: u8,
    /// The rank that it receives from, or 255.
    pub(crate) from: u8,
    /// The rank that it sends to, or 255.
    pub(crate) to: u8,
    /// Locations in memory; valid if the flags say so.
    pub(crate) src: u8,
    pub(crate) dst: u8,
    /// First part, counted from the channel's first, and number of parts.
    pub(crate) part: u8,
    pub(crate) span: u8,
    pub(crate) unused: u8,
}

impl DeviceStep {
    /// It reads `src`.
    pub(crate) const READS: u8 = 1;
    /// It writes `dst`.
    pub(crate) const WRITES: u8 = 2;
    /// Its result is finished: `avg` of integers divides.
    pub(crate) const LAST: u8 = 4;
    /// It reads `dst` too, instead of a message: a local reduction.
    pub(crate) const LOCAL: u8 = 8;

    const NONE: DeviceStep =
        DeviceStep { flags: 0, from: NOBODY, to: NOBODY, src: 0, dst: 0, part: 0, span: 0, unused: 0 };

    /// `base`: the channel's first part.
    fn new(step: &Step, base: usize) -> Option<DeviceStep> {
        let rank = |peer: Option<usize>| peer.map_or(Some(NOBODY), |rank| u8::try_from(rank).ok());
        let (last, local) = match *step {
            Step::Reduce { last, .. } => (last, true),
            Step::RecvReduceCopy { last, .. } | Step::RecvReduceCopySend { last, .. } => (last, false),
            _ => (false, false),
        };
        let flag = |yes: bool, flag: u8| if yes { flag } else { 0 };
        let parts = step.parts();
        Some(DeviceStep {
            flags: flag(step.read().is_some(), Self::READS)
                | flag(step.write().is_some(), Self::WRITES)
                | flag(last, Self::LAST)
                | flag(local, Self::LOCAL),
            from: rank(step.source())?,
            to: rank(step.destination())?,
            src: step.read().map_or(Some(0), place)?,
            dst: step.write().map_or(Some(0), place)?,
            part: u8::try_from(parts.start.checked_sub(base)?).ok()?,
            span: u8::try_from(parts.len()).ok()?,
            unused: 0,
        })
    }
}

/// As `struct Program` of `kernels/primitives.cuh`.
#[repr(C)]
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DeviceProgram {
    pub(crate) steps: [DeviceStep; MAX_STEPS],
    /// For even and for odd channels, and for each of their lanes: the first step, and the first that is not of it.
    pub(crate) lanes: [[[u16; 2]; MAX_LANES]; VARIANTS],
    /// Lanes of even and of odd channels.
    pub(crate) lane_count: [u32; VARIANTS],
    /// Parts of a channel.
    pub(crate) parts: u32,
    /// Ranks at most of which one rank, of all, receives in a channel.
    pub(crate) sources: u32,
}

/// As `struct Cut` of `kernels/primitives.cuh`: a [`Partition`] in numbers.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cut {
    pub(crate) count: u64,
    pub(crate) windows: u64,
    pub(crate) unit: u64,
    pub(crate) base: u64,
    pub(crate) extra: u64,
    /// Units of every part, and how many parts have one more: in the first `extra` windows, and in the others.
    pub(crate) large: [u64; 2],
    pub(crate) small: [u64; 2],
    /// Elements of a segment of scratch memory.
    pub(crate) scratch: u64,
    pub(crate) elem: u64,
    /// In LL128: not 0 where messages take shares of the lines.
    pub(crate) shares: u64,
}

impl Cut {
    pub(crate) fn new(partition: &Partition) -> Cut {
        let pair = |cut: tinynccl_plan::schedule::partition::Cut| [cut.each as u64, cut.more as u64];
        Cut {
            count: partition.count() as u64,
            windows: partition.windows() as u64,
            unit: partition.unit as u64,
            base: partition.base as u64,
            extra: partition.extra as u64,
            large: pair(partition.large),
            small: pair(partition.small),
            scratch: partition.largest_window() as u64,
            elem: partition.elem_size() as u64,
            shares: 0,
        }
    }
}

/// A rank's schedule for a kernel, and the figures of all ranks' schedules that the host needs to cut it.
#[derive(Debug)]
pub(crate) struct Compiled {
    pub(crate) program: DeviceProgram,
    /// Blocks of the kernel.
    pub(crate) channels: usize,
    algorithm: Algorithm,
    collective: Collective,
    ranks: usize,
    /// Parts of a window.
    parts: usize,
    span: usize,
    /// Scratch segments of the rank that needs most, so that all ranks cut alike.
    scratch_segments: usize,
    /// Parts, and messages, that pass through one FIFO per window at most.
    link: (usize, usize),
}

impl Compiled {
    /// `None` where the algorithm has no schedule for this call, or none that fits a kernel.
    pub(crate) fn new(algorithm: Algorithm, shape: &Shape, rank: usize) -> Option<Compiled> {
        let all: Vec<Program> =
            (0..shape.ranks).map(|r| algorithm::program_by_switch(algorithm, shape, r)).collect::<Option<_>>()?;
        let ours = all.get(rank)?;
        let channels = all.iter().flat_map(|p| &p.lanes).map(|lane| lane.channel as usize + 1).max()?;
        let sources = all.iter().map(Program::most_sources).max()?;
        Some(Compiled {
            program: DeviceProgram { sources: sources as u32, ..encode(ours, channels)? },
            channels,
            algorithm,
            collective: shape.collective,
            ranks: shape.ranks,
            parts: ours.parts,
            span: ours.span,
            scratch_segments: all.iter().map(|p| p.scratch_segments).max()?,
            link: all.iter().map(busiest).fold((0, 0), |a, b| (a.0.max(b.0), a.1.max(b.1))),
        })
    }

    /// Returns true if the program needs scratch memory, on the rank that needs most.
    pub(crate) fn keeps_sums(&self) -> bool {
        self.scratch_segments > 0
    }

    fn partition(&self, count: usize, elem: usize, message: usize) -> Partition {
        Partition::new(count, elem, self.parts, message / self.span.max(1))
    }

    /// The cut for slots, with `scratch` bytes of scratch memory; `None` if it cannot be cut so.
    pub(crate) fn for_slots(&self, count: usize, elem: usize, layout: &Layout, scratch: usize) -> Option<Partition> {
        let slot = if self.program.sources == 1 { layout.long_slot_bytes() } else { layout.slot_bytes };
        let mut message = slot;
        if self.is_pipeline() {
            // Whole lines of the cache, so that borders stay aligned.
            let share = (count.saturating_mul(elem) / (self.parts * PIPELINE * (self.ranks - 1))) & !63;
            message = message.min(share.max(LEAST_MESSAGE));
        }
        if let Some(room) = scratch.checked_div(self.scratch_segments * self.parts) {
            message = message.min(room & !63);
            if message == 0 {
                return None;
            }
        }
        let partition = self.partition(count, elem, message);
        let fits = |bytes: usize, room: usize| bytes.saturating_mul(elem) <= room;
        let longest = partition.parts(0, 0..self.span).len();
        (fits(longest, slot) && fits(self.scratch_segments * partition.largest_window(), scratch)).then_some(partition)
    }

    /// The cut for `lines` lines per FIFO, each used once: one window. `None` if that is too little.
    pub(crate) fn for_lines(&self, count: usize, elem: usize, lines: usize, scratch: usize) -> Option<Partition> {
        let partition = self.partition(count, elem, usize::MAX);
        let (parts, messages) = self.link;
        // Part 0 is a longest one; a message ends with a separate line.
        let words = (partition.part(0, 0).len().checked_mul(elem)?.checked_mul(parts)? / 8).checked_add(messages)?;
        let scratched = self.scratch_segments.checked_mul(partition.largest_window())?.checked_mul(elem)?;
        (partition.windows() == 1 && words <= lines && scratched <= scratch).then_some(partition)
    }

    /// The cut for LL128's lines; `None` if they do not suffice. Each message has its own lines, or a share of its
    /// FIFO's ([`Compiled::takes_shares`]).
    pub(crate) fn for_lines128(&self, count: usize, elem: usize, layout: &Layout, scratch: usize) -> Option<Partition> {
        let holds_sums = |partition: &Partition| {
            self.scratch_segments.saturating_mul(partition.largest_window()).saturating_mul(elem) <= scratch
        };
        let whole = self.partition(count, elem, usize::MAX);
        if !self.takes_shares(&whole, layout) && holds_sums(&whole) {
            return Some(whole);
        }
        let share = self.lines128(layout) / layout.slots / 8 * 8 * 8 * LINE_WORDS;
        let partition = self.partition(count, elem, (share & !63).max(1));
        let longest = partition.parts(0, 0..self.span).len();
        (longest.saturating_mul(elem) <= share && holds_sums(&partition)).then_some(partition)
    }

    /// Returns true if the messages of a call in LL128 have more lines than their FIFO, and so use it one share after
    /// the other.
    pub(crate) fn takes_shares(&self, partition: &Partition, layout: &Layout) -> bool {
        let (parts, messages) = self.link;
        let words = partition.part(0, 0).len().saturating_mul(partition.elem_size()).div_ceil(8).saturating_mul(parts);
        // Each message ends with four lines that may not be full.
        partition.windows() > 1 || words.div_ceil(LINE_WORDS) + 4 * messages > self.lines128(layout)
    }

    /// Lines of LL128 of a FIFO. A rank that receives from one other only has those of all senders for it.
    fn lines128(&self, layout: &Layout) -> usize {
        layout.lines128 * if self.program.sources == 1 { layout.senders() } else { 1 }
    }

    /// Returns true if a channel works on one part of a window, which passes through several ranks one after the other:
    /// then only several windows keep them all busy. The segments of all_gather and reduce_scatter do that in one
    /// window.
    fn is_pipeline(&self) -> bool {
        let one_way = matches!(self.collective, Collective::Broadcast | Collective::Reduce);
        match self.algorithm {
            Algorithm::Tree | Algorithm::DoubleTree => one_way || self.collective == Collective::AllReduce,
            Algorithm::Ring => one_way,
            _ => false,
        }
    }
}

/// Words of data in a line of LL128.
const LINE_WORDS: usize = 15;
/// Windows that a pipeline should have at least for each of its hops.
const PIPELINE: usize = 4;
/// Messages that are shorter cost more than they gain.
const LEAST_MESSAGE: usize = 8 << 10;

/// The steps of the first two channels; `None` if the others are not the same, or if there are too many.
fn encode(program: &Program, channels: usize) -> Option<DeviceProgram> {
    if channels == 0 || !program.parts.is_multiple_of(channels) {
        return None;
    }
    let parts = program.parts / channels;
    let channel = |c: usize| -> Option<Vec<Vec<DeviceStep>>> {
        let lanes = program.lanes.iter().filter(|lane| lane.channel as usize == c);
        let inside = |step: &DeviceStep| (step.part as usize + step.span as usize <= parts).then_some(*step);
        lanes.map(|lane| lane.steps.iter().map(|s| inside(&DeviceStep::new(s, c * parts)?)).collect()).collect()
    };
    let mut encoded = DeviceProgram {
        steps: [DeviceStep::NONE; MAX_STEPS],
        lanes: [[[0; 2]; MAX_LANES]; VARIANTS],
        lane_count: [0; VARIANTS],
        parts: u32::try_from(parts).ok()?,
        sources: 0,
    };
    let variants = [channel(0)?, if channels > 1 { channel(1)? } else { vec![] }];
    for c in 2..channels {
        if channel(c)? != variants[c % VARIANTS] {
            return None;
        }
    }
    let mut used = 0;
    for (v, lanes) in variants.iter().enumerate() {
        if lanes.len() > MAX_LANES {
            return None;
        }
        encoded.lane_count[v] = lanes.len() as u32;
        for (l, steps) in lanes.iter().enumerate() {
            encoded.steps.get_mut(used..used + steps.len())?.copy_from_slice(steps);
            encoded.lanes[v][l] = [used as u16, (used + steps.len()) as u16];
            used += steps.len();
        }
    }
    Some(encoded)
}

/// Parts and messages that a program sends over one of its FIFOs, of the busiest.
fn busiest(program: &Program) -> (usize, usize) {
    let mut links = std::collections::HashMap::<(u32, usize), (usize, usize)>::new();
    for lane in &program.lanes {
        for step in &lane.steps {
            if let Some(to) = step.destination() {
                let link = links.entry((lane.channel, to)).or_default();
                link.0 += step.parts().len();
                link.1 += 1;
            }
        }
    }
    links.values().fold((0, 0), |a, b| (a.0.max(b.0), a.1.max(b.1)))
}

#[cfg(test)]
pub(super) fn layouts() -> Vec<(String, usize)> {
    use crate::kernels::mirrored;
    [
        mirrored!(DeviceStep as "Step" { flags, from, to, src, dst, part, span }),
        mirrored!(DeviceProgram as "Program" { steps, lanes, lane_count, parts, sources }),
        mirrored!(Cut as "Cut" { count, windows, unit, base, extra, large, small, scratch, elem, shares }),
    ]
    .concat()
}

#[cfg(test)]
mod tests;
