//! From MSCCL's XML to threadblocks.

use std::collections::HashMap;

use roxmltree::{Document, Node};

use super::super::threads::{Cell, Conn, Op, Thread, Threads};
use super::{COLLECTIVES, NAME};
use crate::error::{Error, Result};
use crate::schedule::{Buf, Shape, Step};
use crate::wire::Collective;

/// More ranks and chunks of a segment than any file has.
const MOST: i64 = 1 << 16;

/// A link as the file names it: channel, sender, receiver.
type Link = (i64, usize, usize);

/// The threadblocks, and the root if the file has one.
pub(in super::super) fn read(text: &str) -> Result<(Threads, Option<usize>)> {
    let document = Document::parse(text).map_err(|error| Error::invalid(NAME, format!("no XML: {error}")))?;
    let file = File { document: &document };
    let algo = document.root_element();
    if !algo.has_tag_name("algo") {
        return Err(file.wrong(algo, &format!("expected <algo>, got <{}>", algo.tag_name().name())));
    }
    let collective = super::super::collective(NAME, &COLLECTIVES, file.word(algo, "coll")?)?;
    let ranks = file.number(algo, "ngpus", 1, MOST)? as usize;
    let chunks = file.number(algo, "nchunksperloop", 1, MOST * MOST)? as usize;
    let segments = match collective {
        Collective::AllGather | Collective::ReduceScatter | Collective::AllToAll => ranks,
        _ => 1,
    };
    if !chunks.is_multiple_of(segments) || chunks / segments > MOST as usize {
        let detail = format!("nchunksperloop is {chunks}, expected a multiple of {segments}, up to {MOST} times it");
        return Err(file.wrong(algo, &detail));
    }
    let root = file.optional(algo, "root", 0, ranks as i64 - 1)?.map(|root| root as usize);
    // Right for both: then it is right with memory of its own.
    let in_place =
        file.number(algo, "inplace", 0, 1)? == 1 && file.optional(algo, "outofplace", 0, 1)?.unwrap_or(0) == 0;
    let mut gpus: Vec<Option<Node<'_, '_>>> = vec![None; ranks];
    for gpu in children(algo, "gpu") {
        let id = file.number(gpu, "id", 0, ranks as i64 - 1)? as usize;
        match gpus.get_mut(id) {
            Some(place @ None) => *place = Some(gpu),
            _ => return Err(file.wrong(gpu, &format!("a second gpu with id {id}"))),
        }
    }
    if let Some(missing) = gpus.iter().position(Option::is_none) {
        return Err(file.wrong(algo, &format!("expected {ranks} gpus, that with id {missing} is missing")));
    }
    let shape = Shape { collective, ranks, root: 0, channels: 1 };
    let mut plan = Threads {
        format: NAME,
        shape,
        parts: chunks / segments,
        in_place,
        scratch: vec![],
        ranks: vec![],
        conns: vec![],
    };
    let mut links = HashMap::new();
    for (rank, gpu) in gpus.into_iter().flatten().enumerate() {
        plan.scratch.push(file.number(gpu, "s_chunks", 0, MOST * MOST)? as usize);
        let threads = file.gpu(gpu, rank, ranks, &mut plan.conns, &mut links)?;
        plan.ranks.push(threads);
    }
    // Without an end, nothing is known of the threadblock there.
    let lost = links.iter().filter(|(_, ends)| ends.from.is_none() || ends.to.is_none());
    if let Some(((channel, from, to), ends)) = lost.min_by_key(|(link, _)| **link) {
        let (missing, verb) = if ends.from.is_none() { (from, "sends") } else { (to, "receives") };
        let detail =
            format!("channel {channel}, rank {from} to rank {to}: no threadblock of rank {missing} {verb} there");
        return Err(Error::invalid(NAME, detail));
    }
    for ends in links.values() {
        if let (Some(from), Some(to)) = (ends.from, ends.to) {
            plan.conns[ends.conn] = Conn { from, to };
        }
    }
    Ok((plan, root))
}

/// The threadblocks at both ends of a link.
#[derive(Debug)]
struct Ends {
    conn: usize,
    from: Option<(usize, usize)>,
    to: Option<(usize, usize)>,
}

fn children<'a, 'b>(node: Node<'a, 'b>, tag: &'static str) -> impl Iterator<Item = Node<'a, 'b>> {
    node.children().filter(move |child| child.has_tag_name(tag))
}

struct File<'a> {
    document: &'a Document<'a>,
}

impl File<'_> {
    fn wrong(&self, node: Node<'_, '_>, detail: &str) -> Error {
        let line = self.document.text_pos_at(node.range().start).row;
        Error::invalid(NAME, format!("line {line}: <{}>: {detail}", node.tag_name().name()))
    }

    fn word<'n>(&self, node: Node<'n, '_>, name: &str) -> Result<&'n str> {
        node.attribute(name).ok_or_else(|| self.wrong(node, &format!("the attribute {name} is missing")))
    }

    fn optional(&self, node: Node<'_, '_>, name: &str, least: i64, most: i64) -> Result<Option<i64>> {
        let Some(text) = node.attribute(name) else { return Ok(None) };
        match text.trim().parse() {
            Ok(number) if (least..=most).contains(&number) => Ok(Some(number)),
            _ => Err(self.wrong(node, &format!("{name} is {text:?}, expected a number from {least} to {most}"))),
        }
    }

    fn number(&self, node: Node<'_, '_>, name: &str, least: i64, most: i64) -> Result<i64> {
        let number = self.optional(node, name, least, most)?;
        number.ok_or_else(|| self.wrong(node, &format!("the attribute {name} is missing")))
    }

    fn gpu(
        &self,
        gpu: Node<'_, '_>,
        rank: usize,
        ranks: usize,
        conns: &mut Vec<Conn>,
        links: &mut HashMap<Link, Ends>,
    ) -> Result<Vec<Thread>> {
        let blocks: Vec<Node<'_, '_>> = children(gpu, "tb").collect();
        let mut places: HashMap<usize, usize> = HashMap::new();
        for (place, &tb) in blocks.iter().enumerate() {
            let id = self.number(tb, "id", 0, MOST)? as usize;
            if places.insert(id, place).is_some() {
                return Err(self.wrong(tb, &format!("rank {rank} has a second threadblock with id {id}")));
            }
        }
        let mut threads = Vec::new();
        // The numbers of each threadblock's steps, and where each waits for another.
        let mut numbers: Vec<HashMap<i64, usize>> = Vec::new();
        let mut waits = Vec::new();
        for (place, &tb) in blocks.iter().enumerate() {
            let id = self.number(tb, "id", 0, MOST)? as usize;
            let channel = self.number(tb, "chan", 0, MOST)?;
            let peer = |name: &str| match self.number(tb, name, -1, ranks as i64 - 1)? {
                -1 => Ok(None),
                peer if peer as usize == rank => Err(self.wrong(tb, &format!("{name} is {peer}, the rank itself"))),
                peer => Ok(Some(peer as usize)),
            };
            let (to, from) = (peer("send")?, peer("recv")?);
            let mut thread = Thread { id, ops: vec![] };
            let mut known = HashMap::new();
            for step in children(tb, "step") {
                let number = self.number(step, "s", 0, i64::from(u32::MAX))?;
                if thread.ops.last().is_some_and(|last: &Op| last.number as i64 >= number) {
                    return Err(self.wrong(step, &format!("s is {number}, expected more than the step before")));
                }
                known.insert(number, thread.ops.len());
                let depid = self.number(step, "depid", -1, MOST)?;
                if depid >= 0 {
                    let deps = self.number(step, "deps", 0, i64::from(u32::MAX))?;
                    waits.push((step, place, thread.ops.len(), depid as usize, deps));
                }
                let mut end = |sends: bool, peer: Option<usize>| -> Result<usize> {
                    let verb = if sends { "send" } else { "recv" };
                    let other = peer.ok_or_else(|| self.wrong(step, &format!("the threadblock has no {verb}")))?;
                    let link = if sends { (channel, rank, other) } else { (channel, other, rank) };
                    let ends = links.entry(link).or_insert_with(|| {
                        conns.push(Conn { from: (0, 0), to: (0, 0) });
                        Ends { conn: conns.len() - 1, from: None, to: None }
                    });
                    let owner = if sends { &mut ends.from } else { &mut ends.to };
                    match *owner.get_or_insert((rank, place)) {
                        known if known == (rank, place) => Ok(ends.conn),
                        (_, first) => {
                            let first = blocks.get(first).and_then(|tb| tb.attribute("id")).unwrap_or_default();
                            let detail = format!(
                                "rank {rank}: threadblocks {first} and {id} both {verb} with rank {other} on channel \
                                 {channel}, so that its messages have no order"
                            );
                            Err(self.wrong(step, &detail))
                        }
                    }
                };
                let src = || self.cell(step, "srcbuf", "srcoff");
                let dst = || self.cell(step, "dstbuf", "dstoff");
                let last = false;
                let (kind, step_is) = match self.word(step, "type")? {
                    "nop" => ("nop", None),
                    "s" => ("s", Some(Step::Send { to: end(true, to)?, src: src()? })),
                    "r" => ("r", Some(Step::Recv { from: end(false, from)?, dst: dst()? })),
                    "cpy" => ("cpy", Some(Step::Copy { src: src()?, dst: dst()? })),
                    "re" => ("re", Some(Step::Reduce { src: src()?, dst: dst()?, last })),
                    "rcs" => {
                        let from = end(false, from)?;
                        ("rcs", Some(Step::RecvCopySend { from, to: end(true, to)?, dst: dst()? }))
                    }
                    "rrs" => {
                        let from = end(false, from)?;
                        ("rrs", Some(Step::RecvReduceSend { from, to: end(true, to)?, src: src()? }))
                    }
                    "rrc" => {
                        let from = end(false, from)?;
                        ("rrc", Some(Step::RecvReduceCopy { from, src: src()?, dst: dst()?, last }))
                    }
                    "rrcs" => {
                        let (from, to) = (end(false, from)?, end(true, to)?);
                        ("rrcs", Some(Step::RecvReduceCopySend { from, to, src: src()?, dst: dst()?, last }))
                    }
                    other => {
                        let detail = format!("type is {other:?}, expected s, r, rcs, rrs, rrc, rrcs, cpy, re or nop");
                        return Err(self.wrong(step, &detail));
                    }
                };
                let count = match step_is {
                    Some(_) => self.number(step, "cnt", 1, MOST)? as usize,
                    None => 1,
                };
                thread.ops.push(Op { number: number as usize, kind, step: step_is, count, after: vec![] });
            }
            threads.push(thread);
            numbers.push(known);
        }
        for (step, place, op, depid, deps) in waits {
            let other = places.get(&depid).and_then(|&other| Some((other, *numbers.get(other)?.get(&deps)?)));
            match other {
                Some((other, before)) if other == place && before < op => {}
                Some((other, _)) if other == place => {
                    return Err(self.wrong(step, "waits for a later step of its own threadblock"));
                }
                Some(other) => threads[place].ops[op].after.push(other),
                None => {
                    let detail =
                        format!("waits for step {deps} of threadblock {depid}, which rank {rank} does not have");
                    return Err(self.wrong(step, &detail));
                }
            }
        }
        Ok(threads)
    }

    fn cell(&self, step: Node<'_, '_>, buffer: &str, offset: &str) -> Result<Cell> {
        let buf = match self.word(step, buffer)? {
            "i" => Buf::Input,
            "o" => Buf::Output,
            "s" => Buf::Scratch,
            other => return Err(self.wrong(step, &format!("{buffer} is {other:?}, expected i, o or s"))),
        };
        Ok(Cell { buf, chunk: self.number(step, offset, 0, MOST * MOST)? as usize })
    }
}
