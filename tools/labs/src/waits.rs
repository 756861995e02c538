//! Reads a trace: the time of messages on each link, and the waits between ranks.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use program_kit::stats::median;
use serde_json::Value;

/// Links and waits of a trace; times in microseconds.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Waits {
    /// From the sending to the receiving rank: how long each message was under way.
    pub(crate) links: BTreeMap<(u64, u64), Vec<f64>>,
    /// Rank and the peer or event that it waited for: total time.
    pub(crate) waits: BTreeMap<(u64, String), f64>,
}

pub(crate) fn print(trace: &Path) -> Result<()> {
    let text = std::fs::read_to_string(trace).with_context(|| format!("reading {}", trace.display()))?;
    let waits = read(&text).with_context(|| format!("{} is no trace of ours", trace.display()))?;
    ensure!(!waits.links.is_empty(), "{}: no messages over links in it", trace.display());
    print!("{waits}");
    Ok(())
}

/// Reads an array of events, as TINYNCCL_TRACE writes it.
pub(crate) fn read(text: &str) -> Result<Waits> {
    let events: Vec<Value> = serde_json::from_str(text)?;
    let word = |event: &Value, key: &str| event[key].as_str().unwrap_or_default().to_owned();
    // A process of the trace is a rank; its place in the picture is the rank's number.
    let ranks: BTreeMap<u64, u64> = events
        .iter()
        .filter(|e| e["name"] == "process_sort_index")
        .filter_map(|e| Some((e["pid"].as_u64()?, e["args"]["sort_index"].as_u64()?)))
        .collect();
    let rank = |event: &Value| ranks.get(&event["pid"].as_u64()?).copied();
    let mut waits = Waits::default();
    let mut sent = BTreeMap::new();
    for event in events.iter().filter(|e| e["ph"] == "s") {
        sent.insert(word(event, "id"), (rank(event), event["ts"].as_f64()));
    }
    for event in &events {
        match (event["ph"].as_str(), event["cat"].as_str()) {
            (Some("f"), _) => {
                let Some(&(Some(from), Some(begin))) = sent.get(&word(event, "id")) else { continue };
                let (Some(to), Some(end)) = (rank(event), event["ts"].as_f64()) else { continue };
                waits.links.entry((from, to)).or_default().push(end - begin);
            }
            (Some("X"), Some("wait")) => {
                let (Some(rank), Some(time)) = (rank(event), event["dur"].as_f64()) else { continue };
                *waits.waits.entry((rank, word(event, "name"))).or_default() += time;
            }
            _ => {}
        }
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
        writeln!(out, "link        messages   under way: median us")?;
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
        let trace = r#"[
            {"ph":"M","pid":10,"name":"process_sort_index","args":{"sort_index":0}},
            {"ph":"M","pid":11,"name":"process_sort_index","args":{"sort_index":1}},
            {"ph":"s","pid":10,"tid":1,"ts":5.0,"cat":"message","name":"message","id":"0x1"},
            {"ph":"f","bp":"e","pid":11,"tid":1,"ts":7.5,"cat":"message","name":"message","id":"0x1"},
            {"ph":"f","bp":"e","pid":11,"tid":1,"ts":9.5,"cat":"message","name":"message","id":"0x2"},
            {"ph":"X","pid":11,"tid":1,"ts":1.0,"dur":6.0,"cat":"wait","name":"wait for rank 0","args":{}},
            {"ph":"X","pid":11,"tid":1,"ts":8.0,"dur":1.0,"cat":"wait","name":"wait for rank 0","args":{}}
        ]"#;
        let waits = read(trace).expect("a trace");
        assert_eq!(
            waits.links,
            BTreeMap::from([((0, 1), vec![2.5])]),
            "the other message's beginning was not recorded"
        );
        assert_eq!(waits.waits, BTreeMap::from([((1, "wait for rank 0".to_owned()), 7.0)]));
        assert_eq!(waits.slowest(), Some((0, 1)));
        assert!(read("{").is_err());
    }
}
