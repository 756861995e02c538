//! From a schedule to mscclpp's JSON.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::file::{Block, BlockChannels, Buffer, BufferRefs, Channels, Gpu, Op, Plan, RemoteBuffer};
use super::{COLLECTIVES, NAME};
use crate::error::{Error, Result};
use crate::schedule::{Buf, Lane, Loc, Program, Schedule, Shape, Step};

/// A direction between two ranks: channel, sender, receiver. It has a channel of mscclpp's of its own, over which the
/// sender signals that data is there, and the receiver that it has begun.
type Link = (u32, usize, usize);

/// Type of all channels.
const MEMORY: &str = "memory";

pub(in super::super) fn write(schedule: &Schedule, in_place: bool) -> Result<String> {
    let shape = schedule.shape();
    let collective = super::super::name_of(NAME, &COLLECTIVES, shape.collective)?;
    let writer = Writer::new(schedule, in_place);
    let plan = Plan {
        name: format!("tinynccl_{}_{:014x}", shape.collective, schedule.fingerprint()),
        collective: collective.to_owned(),
        protocol: "Simple".to_owned(),
        inplace: in_place,
        reuse_resources: false,
        gpus: (0..shape.ranks).map(|rank| writer.gpu(rank)).collect(),
        num_threads_per_block: 1024,
        use_double_scratch_buffer: false,
        buffer_alignment: 16,
        min_message_size: 0,
        max_message_size: u64::MAX,
    };
    let text = serde_json::to_string(&plan).map_err(|error| Error::invalid(NAME, error.to_string()))?;
    Ok(text + "\n")
}

struct Writer<'a> {
    shape: &'a Shape,
    programs: &'a [Program],
    in_place: bool,
    /// Chunks of scratch memory, by rank.
    scratch: Vec<usize>,
    /// Place of each message of a link in the receiver's scratch memory.
    slots: HashMap<Link, Vec<usize>>,
    /// Numbers of each rank's channels.
    channels: Vec<BTreeMap<Link, usize>>,
}

impl<'a> Writer<'a> {
    fn new(schedule: &'a Schedule, in_place: bool) -> Writer<'a> {
        let (shape, programs) = (schedule.shape(), schedule.programs());
        let mut slots: HashMap<Link, Vec<usize>> = HashMap::new();
        let mut scratch = Vec::new();
        let mut links = BTreeSet::new();
        for (rank, program) in programs.iter().enumerate() {
            let mut next = program.scratch_segments * program.parts;
            for lane in &program.lanes {
                for step in &lane.steps {
                    if let Some(from) = step.source() {
                        slots.entry((lane.channel, from, rank)).or_default().push(next);
                        links.insert((lane.channel, from, rank));
                        next += step.parts().len();
                    }
                }
            }
            scratch.push(next);
        }
        // Both ranks of a pair number their channels in one order, which is how mscclpp pairs them.
        let channels = (0..shape.ranks).map(|rank| {
            let ours = links.iter().filter(|link| link.1 == rank || link.2 == rank);
            ours.enumerate().map(|(number, &link)| (link, number)).collect()
        });
        Writer { shape, programs, in_place, scratch, slots, channels: channels.collect() }
    }

    /// Ranks that this one writes to.
    fn targets(&self, rank: usize) -> Vec<usize> {
        let targets: BTreeSet<usize> = self.channels[rank].keys().filter(|link| link.1 == rank).map(|l| l.2).collect();
        targets.into_iter().collect()
    }

    fn gpu(&self, rank: usize) -> Gpu {
        let program = &self.programs[rank];
        let peers = self.channels[rank].keys().map(|&(_, from, to)| if from == rank { to } else { from });
        let targets = self.targets(rank);
        Gpu {
            id: rank,
            input_chunks: self.shape.input_segments(rank) * program.parts,
            output_chunks: self.shape.output_segments(rank) * program.parts,
            scratch_chunks: self.scratch[rank],
            threadblocks: program
                .lanes
                .iter()
                .enumerate()
                .map(|(id, lane)| self.block(rank, id, lane, &targets))
                .collect(),
            channels: vec![Channels { channel_type: MEMORY.to_owned(), connected_to: peers.collect() }],
            remote_buffers: targets
                .iter()
                .map(|&rank| RemoteBuffer { rank, kind: "s".to_owned(), access_channel_types: vec![MEMORY.to_owned()] })
                .collect(),
            semaphores: vec![],
        }
    }

    fn block(&self, rank: usize, id: usize, lane: &Lane, targets: &[usize]) -> Block {
        let links = lane.steps.iter().flat_map(|step| {
            let from = step.source().map(|from| (lane.channel, from, rank));
            from.into_iter().chain(step.destination().map(|to| (lane.channel, rank, to)))
        });
        let links: BTreeSet<Link> = links.collect();
        let number: BTreeMap<Link, usize> = links.iter().enumerate().map(|(number, &link)| (link, number)).collect();
        let peers: Vec<usize> = links.iter().filter(|link| link.1 == rank).map(|link| link.2).collect();
        let remote = |to: usize| targets.iter().position(|&target| target == to).unwrap_or_default();
        let begins = |sends: bool| links.iter().filter(move |link| (link.1 == rank) == sends).map(|link| number[link]);
        let mut ops = Ops { parts: self.programs[rank].parts, all: vec![] };
        // A message is put where nothing is read any more once the receiver has begun this call.
        ops.synchronize("rlxsignal", begins(false).collect());
        ops.synchronize("rlxwait", begins(true).collect());
        let mut taken: HashMap<Link, usize> = HashMap::new();
        let mut slot = |link: Link| {
            let next = taken.entry(link).or_default();
            *next += 1;
            self.slots.get(&link).and_then(|slots| slots.get(*next - 1)).copied().unwrap_or_default()
        };
        for step in &lane.steps {
            let size = step.parts().len();
            let mut came = Buffer::default();
            if let Some(from) = step.source() {
                let link = (lane.channel, from, rank);
                ops.synchronize("wait", vec![number[&link]]);
                ops.nop();
                came = Buffer { kind: Some("s".to_owned()), index: slot(link), size, ..Buffer::default() };
            }
            // What is sent on.
            let sent = match *step {
                Step::Send { src, .. } => Some(ops.buffer(src)),
                Step::Copy { src, dst } if self.is_same(rank, src, dst) => None,
                Step::Copy { src, dst } => {
                    let src = ops.buffer(src);
                    Some(ops.local("copy", vec![src], dst))
                }
                Step::Recv { dst, .. } | Step::RecvCopySend { dst, .. } => Some(ops.local("copy", vec![came], dst)),
                Step::Reduce { src, dst, .. } => {
                    let both = vec![ops.buffer(dst), ops.buffer(src)];
                    Some(ops.local("re", both, dst))
                }
                Step::RecvReduceCopy { src, dst, .. } | Step::RecvReduceCopySend { src, dst, .. } => {
                    let both = vec![ops.buffer(src), came];
                    Some(ops.local("re", both, dst))
                }
                Step::RecvReduceSend { src, .. } => {
                    let (index, kind) = (came.index, came.kind.clone());
                    let both = vec![ops.buffer(src), came];
                    let there = || Buffer { kind: kind.clone(), index, size, ..Buffer::default() };
                    ops.reduce(both, there());
                    Some(there())
                }
            };
            if let (Some(to), Some(src)) = (step.destination(), sent) {
                let link = (lane.channel, rank, to);
                let id = peers.iter().position(|&peer| peer == to).unwrap_or_default();
                let dst = Buffer { buffer_id: Some(id), index: slot(link), size, ..Buffer::default() };
                ops.put(src, dst, number[&link]);
            }
        }
        let channel_ids = links.iter().map(|link| self.channels[rank][link]).collect();
        Block {
            id,
            ops: ops.all,
            channels: vec![BlockChannels { channel_type: MEMORY.to_owned(), channel_ids }],
            remote_buffer_refs: vec![BufferRefs {
                access_channel_type: MEMORY.to_owned(),
                remote_buffer_ids: peers.iter().map(|&peer| remote(peer)).collect(),
            }],
        }
    }

    /// Returns true if both are the same memory in place.
    fn is_same(&self, rank: usize, src: Loc, dst: Loc) -> bool {
        let pair = (src.segment as usize, dst.segment as usize);
        self.in_place
            && (src.buf, dst.buf) == (Buf::Input, Buf::Output)
            && src.part == dst.part
            && self.shape.in_place(rank) == Some(pair)
    }
}

/// The operations of a threadblock.
struct Ops {
    parts: usize,
    all: Vec<Op>,
}

impl Ops {
    fn buffer(&self, loc: Loc) -> Buffer {
        let kind = match loc.buf {
            Buf::Input => "i",
            Buf::Output => "o",
            Buf::Scratch => "s",
        };
        let index = loc.segment as usize * self.parts + loc.part as usize;
        Buffer { kind: Some(kind.to_owned()), index, size: loc.span as usize, ..Buffer::default() }
    }

    fn push(&mut self, name: &str, op: Op) {
        self.all.push(Op { name: name.to_owned(), ..op });
    }

    /// Lets the threads of the block wait for each other.
    fn nop(&mut self) {
        self.push("nop", Op::default());
    }

    fn synchronize(&mut self, name: &str, channel_ids: Vec<usize>) {
        if !channel_ids.is_empty() {
            self.push(name, Op { channel_ids, channel_type: Some(MEMORY.to_owned()), ..Op::default() });
        }
    }

    /// An operation in our own memory; returns where its result is.
    fn local(&mut self, name: &str, src_buff: Vec<Buffer>, dst: Loc) -> Buffer {
        let there = self.buffer(dst);
        match name {
            "re" => self.reduce(src_buff, there),
            _ => {
                self.push(name, Op { src_buff, dst_buff: vec![there], ..Op::default() });
                self.nop();
            }
        }
        self.buffer(dst)
    }

    fn reduce(&mut self, src_buff: Vec<Buffer>, dst: Buffer) {
        let reduce_op = Some("sum".to_owned());
        self.push("re", Op { src_buff, dst_buff: vec![dst], reduce_op, ..Op::default() });
        self.nop();
    }

    fn put(&mut self, src: Buffer, dst: Buffer, channel: usize) {
        let (src_buff, dst_buff) = (vec![src], vec![dst]);
        self.push("put", Op { src_buff, dst_buff, channel_type: Some(MEMORY.to_owned()), ..Op::default() });
        self.nop();
        self.synchronize("signal", vec![channel]);
    }
}
