//! The programs of some ranks on a machine: the engine's input, which [`super::refine`] makes smaller.

use std::borrow::Cow;
use std::collections::HashMap;

use super::Cut;
pub(super) use super::machine::Translation;
use super::machine::{LinkId, Machine};
use crate::algorithm::Shape;
use crate::error::{Error, Result};
use crate::schedule::{Partition, Program, Step};
use crate::wire::{Algorithm, Collective};

/// Names of the kinds of steps.
pub const STEPS: [&str; 8] = [
    "send",
    "recv",
    "copy",
    "reduce",
    "recv_reduce_copy",
    "recv_copy_send",
    "recv_reduce_send",
    "recv_reduce_copy_send",
];

/// No FIFO, no reader.
pub(super) const NONE: u32 = u32::MAX;

/// Lengths of the parts of a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lengths {
    /// As the executor cuts them.
    Exact,
    /// All the same.
    Equal,
}

/// Equal steps that follow each other in a lane.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Run {
    /// Index of [`Step`]'s variant, see [`STEPS`].
    pub(super) kind: u8,
    /// Parts it works on: first and number.
    pub(super) parts: (u32, u32),
    /// Its receive: a reader, or [`NONE`].
    pub(super) recv: u32,
    /// Its send: a FIFO, or [`NONE`].
    pub(super) send: u32,
    /// Number of equal steps.
    pub(super) times: u32,
}

/// A rank that is simulated, for itself or for several.
#[derive(Debug, Clone, Default)]
pub(super) struct Rank {
    pub(super) lanes: Vec<Vec<Run>>,
}

/// Messages from one lane to another, in order.
#[derive(Debug, Clone)]
pub(super) struct Fifo {
    /// Rank and lane.
    pub(super) sender: (u32, u32),
    pub(super) latency: f64,
    /// Indices into [`System::links`], and how many messages of this FIFO's kind pass that link while this FIFO
    /// transfers one.
    pub(super) links: Vec<(u32, u32)>,
    pub(super) fastest: f64,
}

/// A step's view of a FIFO: it takes every message that arrives.
#[derive(Debug, Clone)]
pub(super) struct Reader {
    pub(super) fifo: u32,
}

#[derive(Debug, Clone)]
pub(super) struct Link {
    pub(super) id: LinkId,
    pub(super) bandwidth: f64,
}

#[derive(Debug, Clone)]
pub(super) struct System {
    pub(super) ranks: Vec<Rank>,
    pub(super) fifos: Vec<Fifo>,
    pub(super) readers: Vec<Reader>,
    pub(super) links: Vec<Link>,
    /// Number of times that the programs run.
    pub(super) windows: usize,
    /// Number of parts in one rank's window.
    pub(super) parts: usize,
    pub(super) partition: Partition,
    pub(super) lengths: Lengths,
    pub(super) costs: super::Costs,
    /// Bytes on each link before refining: id, bytes.
    pub(super) loads: Vec<(LinkId, f64)>,
}

impl Translation {
    /// The renumbering under which the programs of all ranks are the same, if there is one. It renumbers peers, and
    /// also parts, which makes no difference if all are equally long.
    pub(super) fn of(algorithm: Algorithm, shape: &Shape) -> Option<Translation> {
        let alike = matches!(
            shape.collective,
            Collective::AllReduce | Collective::Barrier | Collective::ReduceScatter | Collective::AllGather
        );
        match algorithm {
            Algorithm::Ring if alike => Some(Translation::Rotation),
            // Reductions go in rank order, which no renumbering preserves.
            Algorithm::Direct if matches!(shape.collective, Collective::AllGather | Collective::AllToAll) => {
                Some(Translation::Rotation)
            }
            Algorithm::HalvingDoubling | Algorithm::RecursiveDoubling if alike && shape.ranks.is_power_of_two() => {
                Some(Translation::Xor)
            }
            _ => None,
        }
    }

    /// The representative of a message from `from` to `to` if ranks modulo `block` represent all: the receiver, and the
    /// offset of the sender.
    fn canonical(self, from: usize, to: usize, ranks: usize, block: usize) -> (usize, usize) {
        let way = match self {
            Translation::Rotation => (from + ranks - to) % ranks,
            Translation::Xor => from ^ to,
        };
        (to % block, way)
    }

    /// The sender of a canonical message to `to`.
    fn sender(self, to: usize, way: usize, ranks: usize) -> usize {
        match self {
            Translation::Rotation => (to + way) % ranks,
            Translation::Xor => to ^ way,
        }
    }
}

impl System {
    /// The programs of all ranks, or of those that represent all; `read` gives them.
    pub(super) fn build<'a>(
        ranks: usize,
        read: impl Fn(usize) -> Result<Cow<'a, Program>>,
        Cut { count, elem_size, max_message }: Cut,
        machine: &dyn Machine,
        fold: Option<(Translation, usize)>,
        lengths: Lengths,
    ) -> Result<System> {
        let (translation, block) = fold.unwrap_or((Translation::Rotation, ranks));
        let mut builder = Builder { machine, translation, block, ranks, ..Builder::new(machine) };
        let mut system = None;
        for rank in 0..block {
            let program = read(rank)?;
            let partition = program.partition(count, elem_size, max_message);
            let system = system.get_or_insert_with(|| System {
                ranks: Vec::with_capacity(block),
                fifos: vec![],
                readers: vec![],
                links: vec![],
                windows: partition.windows(),
                parts: program.parts,
                partition,
                lengths,
                costs: machine.costs(),
                loads: vec![],
            });
            let mut lanes = Vec::with_capacity(program.lanes.len());
            for (l, lane) in program.lanes.iter().enumerate() {
                let mut runs: Vec<Run> = vec![];
                for step in &lane.steps {
                    builder.add(&mut runs, step, (rank, l, lane.channel), lengths == Lengths::Equal);
                }
                lanes.push(runs);
            }
            system.ranks.push(Rank { lanes });
        }
        let Some(mut system) = system else {
            return Err(Error::invalid("simulate", "expected at least one rank"));
        };
        let Builder { fifos, readers, links, .. } = builder;
        for fifo in &fifos {
            if fifo.sender.0 == NONE {
                return Err(Error::invalid(
                    "simulate",
                    "a message is received that no rank sends: a fault in the library",
                ));
            }
        }
        (system.fifos, system.readers, system.links) = (fifos, readers, links);
        system.loads = system.count_bytes();
        Ok(system)
    }

    /// Bytes of a step in a window.
    pub(super) fn bytes(&self, run: &Run, window: usize) -> f64 {
        let (first, parts) = (run.parts.0 as usize, run.parts.1 as usize);
        match self.lengths {
            Lengths::Exact => {
                (self.partition.parts(window, first..first + parts).len() * self.partition.elem_size()) as f64
            }
            Lengths::Equal => self.mean_part() * parts as f64,
        }
    }

    fn mean_part(&self) -> f64 {
        let cut = self.parts as f64 * self.partition.windows() as f64;
        self.partition.count() as f64 * self.partition.elem_size() as f64 / cut
    }

    /// Bytes of a step in all windows.
    fn total_bytes(&self, run: &Run) -> f64 {
        let (first, parts) = (run.parts.0 as usize, run.parts.1 as usize);
        let once = match self.lengths {
            Lengths::Exact => self.partition.total_bytes(first..first + parts) as f64,
            Lengths::Equal => self.mean_part() * parts as f64 * self.windows as f64,
        };
        once * f64::from(run.times)
    }

    /// Seconds that a step takes its rank's processor.
    pub(super) fn work(&self, run: &Run, bytes: f64) -> f64 {
        let ends = u32::from(run.recv != NONE) + u32::from(run.send != NONE);
        f64::from(ends) * self.costs.overhead + self.reduce_time(run, bytes) + self.copy_time(run, bytes)
    }

    pub(super) fn reduce_time(&self, run: &Run, bytes: f64) -> f64 {
        if matches!(run.kind, 3 | 4 | 6 | 7) { bytes * self.costs.reduce } else { 0.0 }
    }

    pub(super) fn copy_time(&self, run: &Run, bytes: f64) -> f64 {
        if run.kind == 2 { bytes * self.costs.copy } else { 0.0 }
    }

    /// Messages that the engine would handle.
    pub(super) fn messages(&self) -> u64 {
        let runs = self.ranks.iter().flat_map(|r| &r.lanes).flatten();
        runs.filter(|r| r.send != NONE).map(|r| u64::from(r.times)).sum::<u64>() * self.windows as u64
    }

    fn count_bytes(&self) -> Vec<(LinkId, f64)> {
        let mut on = vec![0.0; self.links.len()];
        for run in self.ranks.iter().flat_map(|r| &r.lanes).flatten().filter(|r| r.send != NONE) {
            let bytes = self.total_bytes(run);
            for &(link, times) in &self.fifos[run.send as usize].links {
                on[link as usize] += bytes * f64::from(times);
            }
        }
        self.links.iter().zip(on).map(|(link, bytes)| (link.id, bytes)).collect()
    }
}

struct Builder<'a> {
    machine: &'a dyn Machine,
    translation: Translation,
    block: usize,
    ranks: usize,
    fifos: Vec<Fifo>,
    readers: Vec<Reader>,
    links: Vec<Link>,
    /// FIFOs by channel, receiver and `way` ([`Translation::canonical`]).
    fifo_at: HashMap<(u32, u32, u32), u32>,
    link_at: HashMap<LinkId, u32>,
    route: Vec<LinkId>,
    /// Peers of the step before.
    last: (Option<usize>, Option<usize>),
}

impl<'a> Builder<'a> {
    fn new(machine: &'a dyn Machine) -> Builder<'a> {
        Builder {
            machine,
            translation: Translation::Rotation,
            block: 0,
            ranks: 0,
            fifos: vec![],
            readers: vec![],
            links: vec![],
            fifo_at: HashMap::new(),
            link_at: HashMap::new(),
            route: vec![],
            last: (None, None),
        }
    }

    fn add(&mut self, runs: &mut Vec<Run>, step: &Step, (rank, lane, channel): (usize, usize, u32), join: bool) {
        let peers = (step.source(), step.destination());
        let last = runs.last_mut().filter(|_| join && self.last == peers);
        // Most steps of a ring equal the one before.
        if let Some(last) = last.filter(|last| (last.kind, last.parts.1) == (kind(step), parts(step).1)) {
            last.times += 1;
            return;
        }
        self.last = peers;
        let mut run = Run { kind: kind(step), parts: parts(step), recv: NONE, send: NONE, times: 1 };
        if let Some(from) = step.source() {
            // Readers and FIFOs are one to one here.
            run.recv = self.fifo(channel, from, rank);
        }
        if let Some(to) = step.destination() {
            run.send = self.fifo(channel, rank, to);
            self.fifos[run.send as usize].sender = (rank as u32, lane as u32);
        }
        runs.push(run);
    }

    fn fifo(&mut self, channel: u32, from: usize, to: usize) -> u32 {
        let (to, way) = self.translation.canonical(from, to, self.ranks, self.block);
        if let Some(&at) = self.fifo_at.get(&(channel, to as u32, way as u32)) {
            return at;
        }
        let from = self.translation.sender(to, way, self.ranks);
        self.route.clear();
        let latency = self.machine.route(from, to, &mut self.route);
        let mut links: Vec<(u32, u32)> = vec![];
        for &LinkId { kind, at } in &self.route {
            let id = LinkId { kind, at: if self.block < self.ranks { at % self.block as u32 } else { at } };
            let index = *self.link_at.entry(id).or_insert_with(|| {
                self.links.push(Link { id, bandwidth: self.machine.bandwidth(id) });
                self.links.len() as u32 - 1
            });
            // Messages of other ranks pass the same link, as many as there are such links on this route.
            match links.iter_mut().find(|(link, _)| *link == index) {
                Some((_, times)) => *times += 1,
                None => links.push((index, 1)),
            }
        }
        links.sort_unstable();
        let at = self.fifos.len() as u32;
        self.fifos.push(Fifo { sender: (NONE, NONE), latency, links, fastest: self.machine.fastest() });
        self.readers.push(Reader { fifo: at });
        self.fifo_at.insert((channel, to as u32, way as u32), at);
        at
    }
}

fn kind(step: &Step) -> u8 {
    match step {
        Step::Send { .. } => 0,
        Step::Recv { .. } => 1,
        Step::Copy { .. } => 2,
        Step::Reduce { .. } => 3,
        Step::RecvReduceCopy { .. } => 4,
        Step::RecvCopySend { .. } => 5,
        Step::RecvReduceSend { .. } => 6,
        Step::RecvReduceCopySend { .. } => 7,
    }
}

fn parts(step: &Step) -> (u32, u32) {
    let parts = step.parts();
    (parts.start as u32, parts.len() as u32)
}
