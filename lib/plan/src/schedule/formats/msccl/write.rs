//! From a schedule to MSCCL's XML.

use std::collections::HashMap;
use std::fmt::Write as _;

use super::super::order;
use super::super::threads::{Cell, Conn, Op, Thread, Threads};
use super::{COLLECTIVES, NAME};
use crate::error::Result;
use crate::schedule::{Buf, Lane, Loc, Schedule, Shape, Step};

/// A threadblock's peers and channel.
#[derive(Debug, Clone, Copy)]
struct Peers {
    to: Option<usize>,
    from: Option<usize>,
    channel: u32,
}

/// The threadblocks that a lane becomes.
#[derive(Debug, Default)]
struct Split {
    /// Place of the threadblock that sends to, or receives from, a peer.
    to: HashMap<usize, usize>,
    from: HashMap<usize, usize>,
    /// Threadblock of the step before.
    last: usize,
}

/// Threadblocks of all ranks, as they are made.
struct Writer<'a> {
    schedule: &'a Schedule,
    plan: Threads,
    peers: Vec<Vec<Peers>>,
    splits: Vec<Vec<Split>>,
    conns: HashMap<(u32, usize, usize), usize>,
    sequence: Vec<(usize, usize, usize)>,
}

pub(in super::super) fn write(schedule: &Schedule, in_place: bool) -> Result<String> {
    let shape = *schedule.shape();
    let name = super::super::name_of(NAME, &COLLECTIVES, shape.collective)?;
    let parts = schedule.programs().first().map_or(1, |program| program.parts);
    let plan = Threads {
        format: NAME,
        shape,
        parts,
        in_place,
        scratch: schedule.programs().iter().map(|program| program.scratch_segments * parts).collect(),
        ranks: vec![vec![]; shape.ranks],
        conns: vec![],
    };
    let (peers, splits, conns, sequence) = (vec![vec![]; shape.ranks], vec![], HashMap::new(), vec![]);
    let mut writer = Writer { schedule, plan, peers, splits, conns, sequence };
    writer.split();
    for (rank, lane, step) in order::played(schedule.programs()) {
        writer.step(rank, lane, step);
    }
    order::depend(&mut writer.plan, &writer.sequence)?;
    Ok(writer.text(name))
}

impl Writer<'_> {
    /// Makes the threadblocks of all lanes. One that receives from a rank keeps the rank that it sends on to.
    fn split(&mut self) {
        for (rank, program) in self.schedule.programs().iter().enumerate() {
            let mut splits = Vec::new();
            for lane in &program.lanes {
                splits.push(self.lane(rank, lane));
            }
            self.splits.push(splits);
        }
    }

    fn lane(&mut self, rank: usize, lane: &Lane) -> Split {
        let mut split = Split::default();
        let mut made: Vec<Peers> = Vec::new();
        let channel = lane.channel;
        let first = self.peers[rank].len();
        let both = |step: &Step| Some((step.source()?, step.destination()?));
        for (from, to) in lane.steps.iter().filter_map(both) {
            if !split.from.contains_key(&from) && !split.to.contains_key(&to) {
                split.from.insert(from, first + made.len());
                split.to.insert(to, first + made.len());
                made.push(Peers { to: Some(to), from: Some(from), channel });
            }
        }
        for step in &lane.steps {
            if let Some(from) = step.source().filter(|from| !split.from.contains_key(from)) {
                let free = made.iter().position(|peers| peers.from.is_none()).unwrap_or_else(|| {
                    made.push(Peers { to: None, from: None, channel });
                    made.len() - 1
                });
                made[free].from = Some(from);
                split.from.insert(from, first + free);
            }
            if let Some(to) = step.destination().filter(|to| !split.to.contains_key(to)) {
                let free = made.iter().position(|peers| peers.to.is_none()).unwrap_or_else(|| {
                    made.push(Peers { to: None, from: None, channel });
                    made.len() - 1
                });
                made[free].to = Some(to);
                split.to.insert(to, first + free);
            }
        }
        if made.is_empty() && !lane.steps.is_empty() {
            made.push(Peers { to: None, from: None, channel });
        }
        let blocks = (first..first + made.len()).map(|id| Thread { id, ops: vec![] });
        self.plan.ranks[rank].extend(blocks);
        self.peers[rank].extend(made);
        split.last = first;
        split
    }

    fn step(&mut self, rank: usize, lane: usize, step: Step) {
        let parts = self.plan.parts;
        let cell = |loc: Loc| Cell { buf: loc.buf, chunk: loc.segment as usize * parts + loc.part as usize };
        let count = step.parts().len();
        let (from, to) = (step.source(), step.destination());
        let split = &self.splits[rank][lane];
        let [takes, gives] = [from.map(|peer| split.from[&peer]), to.map(|peer| split.to[&peer])];
        let before = split.last;
        let channel = self.schedule.programs()[rank].lanes[lane].channel;
        let take = from.map(|from| self.conn(channel, from, rank)).unwrap_or_default();
        let give = to.map(|to| self.conn(channel, rank, to)).unwrap_or_default();
        let one_block = takes.is_none() || gives.is_none() || takes == gives;
        let last = false;
        let block = takes.or(gives).unwrap_or(before);
        match step {
            // What two threadblocks share goes through memory.
            Step::RecvCopySend { dst, .. } if !one_block => {
                let dst = cell(dst);
                self.put(rank, lane, block, "r", count, Step::Recv { from: take, dst });
                self.send(rank, lane, gives, count, give, dst);
            }
            Step::RecvReduceCopySend { src, dst, .. } if !one_block => {
                let dst = cell(dst);
                let reduced = Step::RecvReduceCopy { from: take, src: cell(src), dst, last };
                self.put(rank, lane, block, "rrc", count, reduced);
                self.send(rank, lane, gives, count, give, dst);
            }
            Step::RecvReduceSend { src, .. } if !one_block => {
                let dst = Cell { buf: Buf::Scratch, chunk: self.plan.scratch[rank] };
                self.plan.scratch[rank] += count;
                let reduced = Step::RecvReduceCopy { from: take, src: cell(src), dst, last };
                self.put(rank, lane, block, "rrc", count, reduced);
                self.send(rank, lane, gives, count, give, dst);
            }
            // In place there is nothing to copy.
            Step::Copy { src, dst } if self.plan.place(rank, cell(src)) == self.plan.place(rank, cell(dst)) => {}
            _ => {
                let (kind, named) = match step {
                    Step::Send { src, .. } => ("s", Step::Send { to: give, src: cell(src) }),
                    Step::Recv { dst, .. } => ("r", Step::Recv { from: take, dst: cell(dst) }),
                    Step::Copy { src, dst } => ("cpy", Step::Copy { src: cell(src), dst: cell(dst) }),
                    Step::Reduce { src, dst, .. } => ("re", Step::Reduce { src: cell(src), dst: cell(dst), last }),
                    Step::RecvReduceCopy { src, dst, .. } => {
                        ("rrc", Step::RecvReduceCopy { from: take, src: cell(src), dst: cell(dst), last })
                    }
                    Step::RecvCopySend { dst, .. } => {
                        ("rcs", Step::RecvCopySend { from: take, to: give, dst: cell(dst) })
                    }
                    Step::RecvReduceSend { src, .. } => {
                        ("rrs", Step::RecvReduceSend { from: take, to: give, src: cell(src) })
                    }
                    Step::RecvReduceCopySend { src, dst, .. } => {
                        let (src, dst) = (cell(src), cell(dst));
                        ("rrcs", Step::RecvReduceCopySend { from: take, to: give, src, dst, last })
                    }
                };
                self.put(rank, lane, block, kind, count, named);
            }
        }
    }

    fn send(&mut self, rank: usize, lane: usize, block: Option<usize>, count: usize, to: usize, src: Cell) {
        self.put(rank, lane, block.unwrap_or_default(), "s", count, Step::Send { to, src });
    }

    fn put(
        &mut self,
        rank: usize,
        lane: usize,
        block: usize,
        kind: &'static str,
        count: usize,
        step: Step<usize, Cell>,
    ) {
        if let Some(conn) = step.from() {
            self.plan.conns[conn].to = (rank, block);
        }
        if let Some(conn) = step.to() {
            self.plan.conns[conn].from = (rank, block);
        }
        self.splits[rank][lane].last = block;
        let ops = &mut self.plan.ranks[rank][block].ops;
        self.sequence.push((rank, block, ops.len()));
        ops.push(Op { number: ops.len(), kind, step: Some(step), count, after: vec![] });
    }

    fn conn(&mut self, channel: u32, from: usize, to: usize) -> usize {
        *self.conns.entry((channel, from, to)).or_insert_with(|| {
            self.plan.conns.push(Conn { from: (from, 0), to: (to, 0) });
            self.plan.conns.len() - 1
        })
    }

    fn text(&self, collective: &str) -> String {
        let plan = &self.plan;
        let Shape { ranks, root, .. } = plan.shape;
        let chunks = |rank: usize| {
            let segments = plan.shape.input_segments(rank).max(plan.shape.output_segments(rank));
            segments * plan.parts
        };
        let channels = self.peers.iter().flatten().map(|peers| peers.channel + 1).max().unwrap_or(1);
        let loop_chunks = (0..ranks).map(chunks).max().unwrap_or(1);
        let name = format!("tinynccl_{}_{:014x}", plan.shape.collective, self.schedule.fingerprint());
        let place = i32::from(plan.in_place);
        let rooted = if plan.shape.collective.has_root() { format!(" root=\"{root}\"") } else { String::new() };
        let mut text = format!(
            "<algo name=\"{name}\" proto=\"Simple\" nchannels=\"{channels}\" nchunksperloop=\"{loop_chunks}\" \
             ngpus=\"{ranks}\" coll=\"{collective}\" inplace=\"{place}\" outofplace=\"{}\"{rooted}>\n",
            1 - place
        );
        for (rank, threads) in plan.ranks.iter().enumerate() {
            let segments = [plan.shape.input_segments(rank), plan.shape.output_segments(rank)];
            let [inputs, outputs] = segments.map(|segments| segments * plan.parts);
            let scratch = plan.scratch[rank];
            let _ = writeln!(
                text,
                "  <gpu id=\"{rank}\" i_chunks=\"{inputs}\" o_chunks=\"{outputs}\" s_chunks=\"{scratch}\">"
            );
            let (numbers, waited) = numbers(threads);
            for (at, (thread, peers)) in threads.iter().zip(&self.peers[rank]).enumerate() {
                let peer = |peer: Option<usize>| peer.map_or("-1".to_owned(), |peer| peer.to_string());
                let (to, from) = (peer(peers.to), peer(peers.from));
                let _ = writeln!(text, "    <tb id=\"{at}\" send=\"{to}\" recv=\"{from}\" chan=\"{}\">", peers.channel);
                for (o, op) in thread.ops.iter().enumerate() {
                    // A step has one dependency, so a `nop` before it has each other one.
                    let (own, others) =
                        op.after.split_last().map_or((None, &[][..]), |(own, others)| (Some(own), others));
                    let number = numbers[at][o];
                    for (before, wait) in others.iter().enumerate() {
                        line(&mut text, number - others.len() + before, "nop", None, 0, named(&numbers, wait), false);
                    }
                    let wait = own.map_or((-1, -1), |wait| named(&numbers, wait));
                    line(&mut text, number, op.kind, op.step.as_ref(), op.count, wait, waited[at][o]);
                }
                text.push_str("    </tb>\n");
            }
            text.push_str("  </gpu>\n");
        }
        text.push_str("</algo>\n");
        text
    }
}

/// The numbers of all steps, and whether others wait for them.
fn numbers(threads: &[Thread]) -> (Vec<Vec<usize>>, Vec<Vec<bool>>) {
    let mut waited: Vec<Vec<bool>> = threads.iter().map(|thread| vec![false; thread.ops.len()]).collect();
    threads.iter().flat_map(|t| &t.ops).flat_map(|op| &op.after).for_each(|&(block, op)| waited[block][op] = true);
    let numbers = threads.iter().map(|thread| {
        let mut next = 0;
        let number = |op: &Op| {
            next += op.after.len().max(1);
            next - 1
        };
        thread.ops.iter().map(number).collect()
    });
    (numbers.collect(), waited)
}

/// A dependency as the file names it.
fn named(numbers: &[Vec<usize>], &(block, op): &(usize, usize)) -> (i64, i64) {
    (block as i64, numbers[block][op] as i64)
}

fn line(
    text: &mut String,
    number: usize,
    kind: &str,
    step: Option<&Step<usize, Cell>>,
    count: usize,
    (depid, deps): (i64, i64),
    hasdep: bool,
) {
    let cell = |cell: Option<Cell>, none: &'static str| {
        cell.map_or((none, "-1".to_owned()), |cell| {
            let buf = match cell.buf {
                Buf::Input => "i",
                Buf::Output => "o",
                Buf::Scratch => "s",
            };
            (buf, cell.chunk.to_string())
        })
    };
    let (srcbuf, srcoff) = cell(step.and_then(Step::read), "i");
    let (dstbuf, dstoff) = cell(step.and_then(Step::write), "o");
    let hasdep = i32::from(hasdep);
    let _ = writeln!(
        text,
        "      <step s=\"{number}\" type=\"{kind}\" srcbuf=\"{srcbuf}\" srcoff=\"{srcoff}\" dstbuf=\"{dstbuf}\" \
         dstoff=\"{dstoff}\" cnt=\"{count}\" depid=\"{depid}\" deps=\"{deps}\" hasdep=\"{hasdep}\"/>"
    );
}
