//! Records in the format of PyTorch's flight recorder, which `torch.distributed.flight_recorder.fr_trace` reads
//! (`torchfrtrace`): a pickle for each rank.
//!
//! The analyser pairs calls by the name of the group and a number that counts in it. A collective's number is that of
//! its communicator. Messages are in a group of two for each pair and direction, where they have numbers of their own:
//! a message that has no other end is then a call that one of two ranks has not made.

use std::collections::BTreeMap;

use tinynccl::status::record::{CallRecord, Record, Stage};

/// Version of the format, as PyTorch 2.15 writes it.
const VERSION: &str = "2.10";

/// The files of one job: those of each rank, in the order of `records`.
pub(super) fn pickles(records: &[&Record]) -> Vec<Vec<u8>> {
    let all: Vec<Rank<'_>> = records.iter().map(|record| Rank::of(record)).collect();
    // A ring that has gone round has lost its first calls. Those that another rank still has would look as if they were
    // missing here.
    let mut first: BTreeMap<&str, u64> = BTreeMap::new();
    for group in all.iter().flat_map(|rank| rank.groups.iter()) {
        let (name, number) = (group.name.as_str(), group.calls.first().map_or(0, |(number, _)| *number));
        let known = first.entry(name).or_default();
        *known = number.max(*known);
    }
    all.iter().map(|rank| rank.pickle(&first)).collect()
}

/// Calls of one rank, by group.
struct Rank<'a> {
    groups: Vec<Group<'a>>,
}

/// A communicator, or the messages from one rank to another.
struct Group<'a> {
    name: String,
    desc: String,
    /// Ranks of the world.
    ranks: Vec<usize>,
    /// With their numbers, in order.
    calls: Vec<(u64, &'a CallRecord)>,
    /// For a group of messages: true at the sender.
    sends: Option<bool>,
}

impl<'a> Rank<'a> {
    fn of(record: &'a Record) -> Rank<'a> {
        let mut groups = Vec::new();
        for (member, calls) in record.report.comms.iter().zip(&record.calls) {
            let desc = member.name.clone().unwrap_or_else(|| "undefined".to_owned());
            let collectives = calls.iter().filter_map(|call| Some((call.collective?.into(), call)));
            groups.push(Group {
                name: member.comm.to_string(),
                desc: desc.clone(),
                ranks: member.members.clone(),
                calls: collectives.collect(),
                sends: None,
            });
            let mut pairs: BTreeMap<(usize, usize), Group<'_>> = BTreeMap::new();
            for call in calls {
                let (Some(number), Some(peer)) = (call.message, call.to.or(call.from)) else { continue };
                let sends = call.to.is_some();
                let (from, to) = if sends { (member.rank, peer) } else { (peer, member.rank) };
                let world = |rank: usize| member.members.get(rank).copied().unwrap_or(rank);
                if from == to {
                    continue;
                }
                let pair = pairs.entry((from, to)).or_insert_with(|| Group {
                    name: format!("{} from {} to {}", member.comm, world(from), world(to)),
                    desc: desc.clone(),
                    ranks: vec![world(from), world(to)],
                    calls: Vec::new(),
                    sends: Some(sends),
                });
                pair.calls.push((number.into(), call));
            }
            groups.extend(pairs.into_values());
        }
        Rank { groups }
    }

    fn pickle(&self, first: &BTreeMap<&str, u64>) -> Vec<u8> {
        let mut p = Pickle::new();
        p.dict(|p| {
            p.text("version").text(VERSION);
            p.text("comm_lib_version").text(concat!("tinynccl ", env!("CARGO_PKG_VERSION")));
            p.text("pg_config").dict(|p| {
                for group in &self.groups {
                    let ranks: Vec<String> = group.ranks.iter().map(usize::to_string).collect();
                    p.text(&group.name).dict(|p| {
                        p.text("name").text(&group.name);
                        p.text("desc").text(&group.desc);
                        p.text("ranks").text(&format!("[{}]", ranks.join(", ")));
                    });
                }
            });
            p.text("entries").list(|p| {
                let whole = |group: &Group<'_>| first.get(group.name.as_str()).copied().unwrap_or(0);
                let kept = self.groups.iter().flat_map(|group| {
                    group.calls.iter().filter(|(number, _)| *number >= whole(group)).map(move |call| (group, call))
                });
                for (record, (group, (number, call))) in kept.enumerate() {
                    p.dict(|p| group.entry(p, record, *number, call));
                }
            });
        });
        p.finish()
    }
}

impl Group<'_> {
    /// The fields of one call, the `record`-th of the file.
    fn entry(&self, p: &mut Pickle, record: usize, number: u64, call: &CallRecord) {
        let n = self.ranks.len() as u64;
        let (one, all) = (Some(call.count), Some(call.count.saturating_mul(n)));
        // The names are those of the analyser, which stops at others; sizes that it does not compare are left out.
        let name = call.call.name.as_str();
        let (input, output) = match name {
            "all_gather" => (one, all),
            "reduce_scatter" => (all, one),
            "gather" => (one, all),
            "scatter" => (all, one),
            "all_to_all" => (all, all),
            _ => (one, one),
        };
        let packed = call.call.arguments.contains(" calls of lengths with hash ");
        let known = [
            "all_reduce",
            "broadcast",
            "reduce",
            "all_gather",
            "reduce_scatter",
            "gather",
            "scatter",
            "all_to_all",
            "barrier",
        ];
        let name = match self.sends {
            // Ranks of the group, sorted.
            Some(sends) => {
                let (from, to) = if self.ranks[0] < self.ranks[1] { (0, 1) } else { (1, 0) };
                if sends { format!("nccl:send {from}->{to}") } else { format!("nccl:recv {to}<-{from}") }
            }
            None if known.contains(&name) && !packed => format!("nccl:{name}"),
            None => format!("nccl:coalesced {}", if packed { "all_reduces" } else { name }),
        };
        // From 0 on all ranks: the analyser leaves out the entries before the latest first one.
        p.text("record_id").int(record as i64);
        p.text("process_group").pair(|p| {
            p.text(&self.name).text(&self.desc);
        });
        p.text("collective_seq_id").int(number as i64);
        p.text("p2p_seq_id").int(if self.sends.is_some() { number as i64 } else { 0 });
        p.text("op_id").int(i64::from(call.call.number));
        p.text("profiling_name").text(&name);
        p.text("time_created_ns").int(call.begun_ns as i64);
        for (field, size) in [("input", input), ("output", output)] {
            p.text(&format!("{field}_sizes")).list(|p| {
                p.list(|p| size.into_iter().for_each(|size| p.int(size as i64)));
            });
            p.text(&format!("{field}_dtypes")).list(|p| {
                p.text(torch_name(&call.dtype));
            });
        }
        p.text("state").text(match call.state {
            Stage::Enqueued => "scheduled",
            Stage::Begun => "started",
            Stage::Over => "completed",
        });
        let begun = (call.state != Stage::Enqueued).then_some(call.begun_ns);
        p.text("time_discovered_started_ns").option(begun);
        p.text("time_discovered_completed_ns").option(call.over_ns);
        if let (Stage::Over, Some(over)) = (call.state, call.over_ns) {
            p.text("duration_ms").float(over.saturating_sub(call.begun_ns) as f64 / 1e6);
        }
        p.text("retired").bool(call.state == Stage::Over);
        p.text("timeout_ms").int(0);
        p.text("is_p2p").bool(self.sends.is_some());
        p.text("frames").list(|_| ());
    }
}

/// Name of a type in PyTorch.
fn torch_name(dtype: &str) -> &str {
    match dtype {
        "f32" => "Float",
        "f64" => "Double",
        "f16" => "Half",
        "bf16" => "BFloat16",
        "i8" => "Char",
        "u8" => "Byte",
        "i32" => "Int",
        "i64" => "Long",
        "u32" => "UInt32",
        "u64" => "UInt64",
        other => other,
    }
}

/// A pickle of protocol 2 (PEP 307): a program of a stack machine that builds dicts, lists, tuples, texts and numbers.
struct Pickle(Vec<u8>);

impl Pickle {
    fn new() -> Pickle {
        Pickle(vec![0x80, 2])
    }

    fn finish(mut self) -> Vec<u8> {
        self.0.push(b'.');
        self.0
    }

    /// An empty container, and what `fill` puts into it.
    fn container(&mut self, empty: u8, fill: impl FnOnce(&mut Pickle), put: u8) {
        self.0.extend([empty, b'(']);
        fill(self);
        self.0.push(put);
    }

    /// Keys and values in turn.
    fn dict(&mut self, fill: impl FnOnce(&mut Pickle)) {
        self.container(b'}', fill, b'u');
    }

    fn list(&mut self, fill: impl FnOnce(&mut Pickle)) {
        self.container(b']', fill, b'e');
    }

    fn pair(&mut self, fill: impl FnOnce(&mut Pickle)) {
        fill(self);
        self.0.push(0x86);
    }

    fn text(&mut self, text: &str) -> &mut Pickle {
        self.0.push(b'X');
        self.0.extend((text.len() as u32).to_le_bytes());
        self.0.extend(text.as_bytes());
        self
    }

    fn int(&mut self, value: i64) {
        self.0.extend([0x8a, 8]);
        self.0.extend(value.to_le_bytes());
    }

    fn float(&mut self, value: f64) {
        self.0.push(b'G');
        self.0.extend(value.to_be_bytes());
    }

    fn bool(&mut self, value: bool) {
        self.0.push(if value { 0x88 } else { 0x89 });
    }

    fn option(&mut self, value: Option<u64>) {
        match value {
            Some(value) => self.int(value as i64),
            None => self.0.push(b'N'),
        }
    }
}
