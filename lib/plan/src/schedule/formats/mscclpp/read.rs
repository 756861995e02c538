//! From a plan's text to one-sided operations, whose buffers, channels and signals are resolved.

use std::collections::HashMap;
use std::ops::Range;

use super::super::threads::{Cell, Threads};
use super::file;
use super::one_sided::{self, Action, Block, Operand, What};
use super::{COLLECTIVES, NAME};
use crate::error::{Error, Result};
use crate::schedule::{Buf, Shape};
use crate::wire::Collective;

/// More chunks, ranks and shares of a threadblock group than any plan has.
const MOST: usize = 1 << 16;
/// More chunks in all operations together; each is some steps.
const MOST_PIECES: usize = 1 << 22;

/// The threadblocks of the plan, with messages in the place of what is one-sided.
pub(in super::super) fn read(text: &str) -> Result<Threads> {
    let plan: file::Plan =
        serde_json::from_str(text).map_err(|error| Error::invalid(NAME, format!("no execution plan: {error}")))?;
    let collective = super::super::collective(NAME, &COLLECTIVES, &plan.collective)?;
    let ranks = plan.gpus.len();
    let wrong = |detail: String| Error::invalid(NAME, detail);
    let Some(first) = plan.gpus.first().filter(|_| ranks <= MOST) else {
        return Err(wrong(format!("expected 1 to {MOST} gpus, got {ranks}")));
    };
    // A plan in place may leave the smaller of its buffers out.
    let chunks = first.input_chunks.max(first.output_chunks);
    let segments = if collective == Collective::AllReduce { 1 } else { ranks };
    if chunks == 0 || !chunks.is_multiple_of(segments) || chunks / segments > MOST {
        return Err(wrong(format!(
            "gpu 0 has {chunks} chunks, expected a multiple of {segments}, up to {MOST} times it"
        )));
    }
    for (rank, gpu) in plan.gpus.iter().enumerate() {
        if gpu.id != rank {
            return Err(wrong(format!("gpu {rank} in the list has id {}", gpu.id)));
        }
        if (gpu.input_chunks, gpu.output_chunks) != (first.input_chunks, first.output_chunks) {
            let (input, output) = (gpu.input_chunks, gpu.output_chunks);
            let expected = (first.input_chunks, first.output_chunks);
            return Err(wrong(format!(
                "gpu {rank} has {input} chunks of input and {output} of output, gpu 0 has {} and {}",
                expected.0, expected.1
            )));
        }
    }
    // Shares of threadblock groups become chunks of their own.
    let groups = plan.gpus.iter().flat_map(|gpu| &gpu.threadblocks).flat_map(|block| &block.ops);
    let groups = groups.flat_map(|op| std::iter::once(op).chain(&op.ops)).filter_map(|op| op.tbg_info);
    let mut shares = 1;
    for group in groups {
        if group.tb_id >= group.tbg_size || group.tbg_size > MOST {
            return Err(wrong(format!("threadblock {} of a group of {}", group.tb_id, group.tbg_size)));
        }
        shares = common_multiple(shares, group.tbg_size);
        if shares > MOST {
            return Err(wrong("the threadblock groups have no common size".to_owned()));
        }
    }
    let parts = chunks / segments * shares;
    let shape = Shape { collective, ranks, root: 0, channels: 1 };
    let threads = Threads {
        format: NAME,
        shape,
        parts,
        in_place: plan.inplace,
        scratch: plan.gpus.iter().map(|gpu| gpu.scratch_chunks.saturating_mul(shares)).collect(),
        ranks: vec![],
        conns: vec![],
    };
    let reader = Reader { plan: &plan, shares, ends: ends(&plan)? };
    let mut pieces = 0;
    let blocks = (0..ranks).map(|rank| reader.gpu(rank, &mut pieces)).collect::<Result<Vec<_>>>()?;
    let waiting = plan.gpus.iter().map(|gpu| gpu.semaphores.iter().map(|one| one.init_value).collect()).collect();
    one_sided::messages(threads, &blocks, waiting)
}

fn common_multiple(a: usize, b: usize) -> usize {
    let (mut x, mut y) = (a, b);
    while y > 0 {
        (x, y) = (y, x % y);
    }
    a / x.max(1) * b
}

/// By rank, type and number of a channel: the rank at the other end, and the place of this end's signals among all.
type Ends = HashMap<(usize, String, usize), (usize, usize, usize)>;

/// Pairs the channels of two ranks: each one's first of a type, and so on. An end is (rank, where its signals arrive,
/// where it waits).
fn ends(plan: &file::Plan) -> Result<Ends> {
    let mut ends = Ends::new();
    let mut numbered: HashMap<(usize, usize, &str, usize), usize> = HashMap::new();
    for (rank, gpu) in plan.gpus.iter().enumerate() {
        let mut next: HashMap<&str, usize> = HashMap::new();
        let mut order: HashMap<(&str, usize), usize> = HashMap::new();
        for list in gpu.channels.iter().filter(|list| list.channel_type != "switch") {
            let kind = list.channel_type.as_str();
            for &peer in &list.connected_to {
                if peer >= plan.gpus.len() || peer == rank {
                    return Err(Error::invalid(
                        NAME,
                        format!("rank {rank} has a channel to rank {peer}, no other gpu"),
                    ));
                }
                let number = next.entry(kind).or_default();
                let same = order.entry((kind, peer)).or_default();
                // Of a pair, one counter in each direction.
                let count = numbered.len();
                let arrives = *numbered.entry((rank, peer, kind, *same)).or_insert(count);
                let count = numbered.len();
                let waits = *numbered.entry((peer, rank, kind, *same)).or_insert(count);
                ends.insert((rank, kind.to_owned(), *number), (peer, arrives, waits));
                *number += 1;
                *same += 1;
            }
        }
    }
    Ok(ends)
}

struct Reader<'a> {
    plan: &'a file::Plan,
    shares: usize,
    ends: Ends,
}

/// Place of an operation, for errors.
#[derive(Clone, Copy)]
struct At<'a> {
    rank: usize,
    block: &'a file::Block,
    number: usize,
    op: &'a file::Op,
}

impl At<'_> {
    fn wrong(&self, detail: &str) -> Error {
        let At { rank, block, number, op } = self;
        Error::invalid(
            NAME,
            format!("rank {rank}, threadblock {}, operation {number} ({}): {detail}", block.id, op.name),
        )
    }
}

impl Reader<'_> {
    fn gpu(&self, rank: usize, pieces: &mut usize) -> Result<Vec<Block>> {
        let mut blocks = Vec::new();
        for block in &self.plan.gpus[rank].threadblocks {
            let mut actions = Vec::new();
            for (number, op) in block.ops.iter().enumerate() {
                // The steps of a pipeline, once.
                let inner = if op.name == "pipeline" { &op.ops[..] } else { std::slice::from_ref(op) };
                for op in inner {
                    let at = At { rank, block, number, op };
                    self.op(at, &mut actions)?;
                    let own =
                        op.src_buff.iter().chain(&op.dst_buff).map(|buffer| buffer.size.saturating_mul(self.shares));
                    *pieces = own.fold(*pieces, usize::saturating_add);
                    if *pieces > MOST_PIECES {
                        return Err(at.wrong(&format!("expected at most {MOST_PIECES} chunks in all operations")));
                    }
                }
            }
            blocks.push(Block { id: block.id, actions });
        }
        Ok(blocks)
    }

    fn op(&self, at: At<'_>, actions: &mut Vec<Action>) -> Result<()> {
        let At { rank, number, op, .. } = at;
        let kind = KINDS.iter().find(|kind| **kind == op.name).copied();
        let Some(kind) = kind else {
            return Err(match op.name.as_str() {
                "glres" | "gstore" | "gstorepkt" => {
                    at.wrong("a switch combines or multiplies the data, which no message between two ranks expresses")
                }
                "pipeline" => at.wrong("a pipeline inside a pipeline"),
                _ => at.wrong("no such operation is known"),
            });
        };
        let act = |actions: &mut Vec<Action>, what: What| actions.push(Action { number, kind, what });
        let sources = || op.src_buff.iter().map(|buffer| self.operand(at, buffer)).collect::<Result<Vec<_>>>();
        let targets = || op.dst_buff.iter().map(|buffer| self.operand(at, buffer)).collect::<Result<Vec<_>>>();
        let relaxed = kind.starts_with("rlx");
        match kind {
            "nop" | "flush" => {}
            "signal" | "rlxsignal" => act(actions, What::Signal { ends: self.signals(at, true)?, relaxed }),
            "wait" | "rlxwait" => act(actions, What::Wait { ends: self.signals(at, false)?, relaxed }),
            "barrier" => {
                let (Some(id), Some(blocks)) = (op.barrier_id, op.num_threadblocks) else {
                    return Err(at.wrong("expected barrier_id and num_threadblocks"));
                };
                act(actions, What::Barrier { id, blocks });
            }
            "sem_release" | "sem_acquire" => {
                let known = self.plan.gpus[rank].semaphores.len();
                if let Some(id) = op.semaphore_ids.iter().find(|id| **id >= known) {
                    return Err(at.wrong(&format!("semaphore {id} of {known}")));
                }
                let ids = op.semaphore_ids.clone();
                act(actions, if kind == "sem_release" { What::Release(ids) } else { What::Acquire(ids) });
            }
            "copy" | "get" | "upkt" | "cpkt" | "put" | "pws" | "pwsf" | "ppkt" => {
                let (sources, targets) = (sources()?, targets()?);
                if sources.is_empty() || targets.is_empty() || (sources.len() != targets.len() && sources.len() != 1) {
                    return Err(at.wrong(&format!("{} sources and {} targets", sources.len(), targets.len())));
                }
                let one = |yes: bool| 0..usize::from(yes);
                let (packets, as_packets) = (one(kind == "upkt"), one(matches!(kind, "cpkt" | "ppkt")));
                for (index, &target) in targets.iter().enumerate() {
                    let source = *sources.get(index).unwrap_or(&sources[0]);
                    self.combine(at, kind, [&[source], &[target]], [&packets, &as_packets], actions)?;
                }
                if matches!(kind, "pws" | "pwsf") {
                    act(actions, What::Signal { ends: self.signals(at, true)?, relaxed });
                }
            }
            "rppkt" => {
                let (sources, targets) = (sources()?, targets()?);
                let all = 0..targets.len();
                self.combine(at, kind, [&sources[..sources.len().min(1)], &targets], [&(0..1), &all], actions)?;
            }
            // Our own operand is the first, and the last that is added to packets.
            "re" | "res" | "rre" | "rres" | "repkt" | "respkt" | "recpkt" | "recspkt" => {
                let (mut sources, targets) = (sources()?, targets()?);
                let (mut packets, mut as_packets) = (0..0, 0..0);
                if kind.ends_with("pkt") && !sources.is_empty() {
                    sources.rotate_left(1);
                    (packets, as_packets) = (0..sources.len() - 1, 1..targets.len());
                }
                self.combine(at, kind, [&sources, &targets], [&packets, &as_packets], actions)?;
            }
            _ => return Err(at.wrong("no such operation is known")),
        }
        Ok(())
    }

    /// The ends of an operation's channels: where its signals arrive, or where it waits.
    fn signals(&self, at: At<'_>, sends: bool) -> Result<Vec<usize>> {
        let kind = at.op.channel_type.as_deref().unwrap_or("memory");
        let list = at.block.channels.iter().filter(|list| list.channel_type == kind);
        let known: Vec<usize> = list.flat_map(|list| &list.channel_ids).copied().collect();
        let end = |&id: &usize| {
            let number = known.get(id).copied();
            let end = number.and_then(|number| self.ends.get(&(at.rank, kind.to_owned(), number)));
            let &(_, arrives, waits) =
                end.ok_or_else(|| at.wrong(&format!("channel {id} of type {kind} is not there")))?;
            Ok(if sends { arrives } else { waits })
        };
        at.op.channel_ids.iter().map(end).collect()
    }

    /// The rank and the first chunk of a buffer, and its chunks.
    fn operand(&self, at: At<'_>, buffer: &file::Buffer) -> Result<(Operand, usize)> {
        if buffer.switch_channel_id.is_some() {
            return Err(
                at.wrong("a switch combines or multiplies the data, which no message between two ranks expresses")
            );
        }
        let named = |kind: &str| match kind {
            "i" => Ok(Buf::Input),
            "o" => Ok(Buf::Output),
            "s" => Ok(Buf::Scratch),
            other => Err(at.wrong(&format!("the buffer is {other:?}, expected i, o or s"))),
        };
        let (rank, buf) = match (&buffer.kind, buffer.buffer_id) {
            (_, Some(id)) => {
                let kind = at.op.channel_type.as_deref().unwrap_or("memory");
                let refs = at.block.remote_buffer_refs.iter().filter(|refs| refs.access_channel_type == kind);
                let number = refs.flat_map(|refs| &refs.remote_buffer_ids).nth(id);
                let remote = number.and_then(|&number| self.plan.gpus[at.rank].remote_buffers.get(number));
                let remote =
                    remote.ok_or_else(|| at.wrong(&format!("remote buffer {id} of type {kind} is not there")))?;
                if remote.rank >= self.plan.gpus.len() || remote.rank == at.rank {
                    return Err(at.wrong(&format!("remote buffer {id} is of rank {}, no other gpu", remote.rank)));
                }
                (remote.rank, named(&remote.kind)?)
            }
            (Some(kind), None) => (at.rank, named(kind)?),
            (None, None) => return Err(at.wrong("a buffer has neither type nor buffer_id")),
        };
        let chunk = buffer.index.saturating_mul(self.shares);
        let size = buffer.size.saturating_mul(self.shares);
        // A threadblock of a group has an equal share of each buffer.
        let (first, count) = match at.op.tbg_info {
            Some(group) => {
                let share = size / group.tbg_size.max(1);
                (chunk.saturating_add(share * group.tb_id), share)
            }
            None => (chunk, size),
        };
        Ok((Operand { rank, cell: Cell { buf, chunk: first } }, count))
    }

    /// Adds an operation on all its chunks; on each chunk by itself where they are packets, which are read one by one.
    fn combine(
        &self,
        at: At<'_>,
        kind: &'static str,
        [sources, targets]: [&[(Operand, usize)]; 2],
        [packets, as_packets]: [&Range<usize>; 2],
        actions: &mut Vec<Action>,
    ) -> Result<()> {
        let (Some(&(_, count)), false) = (sources.first(), targets.is_empty()) else {
            return Err(at.wrong("expected at least a source and a target"));
        };
        if let Some(&(_, other)) = sources.iter().chain(targets).find(|(_, other)| *other != count) {
            return Err(at.wrong(&format!("works on buffers of {count} and of {other} chunks")));
        }
        if count > MOST_PIECES {
            return Err(at.wrong(&format!("works on {count} chunks")));
        }
        let single = !packets.is_empty() || !as_packets.is_empty();
        let (pieces, count) = if single { (count, 1) } else { (count.min(1), count) };
        for chunk in 0..pieces {
            let moved = |&(Operand { rank, cell }, _): &(Operand, usize)| Operand {
                rank,
                cell: Cell { chunk: cell.chunk.saturating_add(chunk), ..cell },
            };
            let (operands, to) = (sources.iter().map(moved).collect(), targets.iter().map(moved).collect());
            let (packets, as_packets) = (packets.clone(), as_packets.clone());
            let what = What::Combine { operands, packets, to, as_packets, count };
            actions.push(Action { number: at.number, kind, what });
        }
        Ok(())
    }
}

/// The operations that messages can express.
const KINDS: [&str; 26] = [
    "nop",
    "flush",
    "signal",
    "wait",
    "rlxsignal",
    "rlxwait",
    "barrier",
    "sem_release",
    "sem_acquire",
    "copy",
    "get",
    "put",
    "pws",
    "pwsf",
    "re",
    "res",
    "rre",
    "rres",
    "ppkt",
    "rppkt",
    "upkt",
    "cpkt",
    "repkt",
    "respkt",
    "recpkt",
    "recspkt",
];
