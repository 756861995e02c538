//! Reads a trace: the time of messages on each link, and the waits between ranks.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Result, ensure};
use program_kit::stats::median;
use replay::{Cause, Kind, Recording};

/// Links and waits of a trace; times in microseconds.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Waits {
    /// From the sending to the receiving rank: how long each message was under way.
    pub(crate) links: BTreeMap<(u64, u64), Vec<f64>>,
    /// Rank and the peer or event that it waited for: total time.
    pub(crate) waits: BTreeMap<(u64, String), f64>,
}

pub(crate) fn print(trace: &Path) -> Result<()> {
    let waits = read(trace)?;
    let empty = waits.links.is_empty() && waits.waits.is_empty();
    ensure!(!empty, "{}: neither messages over links nor waits in it", trace.display());
    print!("{waits}");
    Ok(())
}

/// Reads a trace, as TINYNCCL_TRACE writes it.
fn read(trace: &Path) -> Result<Waits> {
    let run = Recording::read(trace, usize::MAX)?;
    let rank = |slice: usize| run.ranks[run.tracks[run.slices[slice].track].rank].rank;
    let mut waits = Waits::default();
    for message in &run.messages {
        let link = (rank(message.from), rank(message.to));
        waits.links.entry(link).or_default().push((message.there - message.left) as f64 / 1e3);
    }
    let lanes = [Cause::Message, Cause::Room, Cause::Departure, Cause::LostWake].map(Kind::Wait);
    for (index, slice) in run.slices.iter().enumerate().filter(|(_, slice)| lanes.contains(&slice.kind)) {
        let time = (slice.end - slice.begin) as f64 / 1e3;
        *waits.waits.entry((rank(index), run.names[slice.name].clone())).or_default() += time;
    }
    Ok(waits)
}

impl Waits {
    /// The link whose messages were under way the longest, by their median.
    #[cfg(test)]
    fn slowest(&self) -> Option<(u64, u64)> {
        self.links
            .iter()
            .max_by(|a, b| median(a.1).unwrap_or(0.0).total_cmp(&median(b.1).unwrap_or(0.0)))
            .map(|(&link, _)| link)
    }
}

impl std::fmt::Display for Waits {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut out = String::new();
        // Ranks that share memory need no links.
        if !self.links.is_empty() {
            writeln!(out, "link        messages   under way: median us")?;
        }
        for ((from, to), times) in &self.links {
            writeln!(out, "{from} -> {to}      {:>8}   {:>20.1}", times.len(), median(times).unwrap_or(0.0))?;
        }
        writeln!(out, "rank        waited us, in all")?;
        for ((rank, what), time) in &self.waits {
            writeln!(out, "{rank:<10} {time:>18.1}   {what}")?;
        }
        f.write_str(&out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_under_way_from_its_arrows_tail_to_its_head() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("t.json");
        let trace = r#"[
            {"ph":"M","pid":10,"name":"process_sort_index","args":{"sort_index":0}},
            {"ph":"M","pid":11,"name":"process_sort_index","args":{"sort_index":1}},
            {"ph":"M","pid":10,"tid":1,"name":"thread_name","args":{"name":"lane 0"}},
            {"ph":"M","pid":11,"tid":2,"name":"thread_name","args":{"name":"lane 0"}},
            {"ph":"X","pid":10,"tid":1,"ts":4.0,"dur":2.0,"cat":"step","name":"send","args":{"to":1}},
            {"ph":"s","pid":10,"tid":1,"ts":5.0,"cat":"message","name":"message","id":"0x1"},
            {"ph":"X","pid":11,"tid":2,"ts":1.0,"dur":7.0,"cat":"step","name":"recv","args":{"from":0}},
            {"ph":"f","bp":"e","pid":11,"tid":2,"ts":7.5,"cat":"message","name":"message","id":"0x1"},
            {"ph":"X","pid":11,"tid":2,"ts":8.0,"dur":2.0,"cat":"step","name":"recv","args":{"from":0}},
            {"ph":"f","bp":"e","pid":11,"tid":2,"ts":9.5,"cat":"message","name":"message","id":"0x2"},
            {"ph":"X","pid":11,"tid":2,"ts":1.0,"dur":6.0,"cat":"wait","name":"wait for rank 0","args":{}},
            {"ph":"X","pid":11,"tid":2,"ts":1.0,"dur":6.0,"cat":"spin","name":"spin for rank 0","args":{}},
            {"ph":"X","pid":11,"tid":2,"ts":8.0,"dur":1.0,"cat":"wait","name":"wait for rank 0","args":{}}
        ]"#;
        std::fs::write(&path, trace).expect("a file");
        let waits = read(&path).expect("a trace");
        assert_eq!(
            waits.links,
            BTreeMap::from([((0, 1), vec![2.5])]),
            "the other message's beginning was not recorded"
        );
        assert_eq!(waits.waits, BTreeMap::from([((1, "wait for rank 0".to_owned()), 7.0)]));
        assert_eq!(waits.slowest(), Some((0, 1)));
        std::fs::write(&path, "{").expect("a file");
        assert!(read(&path).is_err());
    }
}
