//! The tasks. Each computes its answer by doing what it describes, with the figures of the command line.

mod buckets;
mod bytes;
mod model;
mod order;
mod ring;
mod strides;

use anyhow::Result;
use clap::Subcommand;
use program_kit::size;
use tinynccl_plan::wire::Collective;

use crate::table;

#[derive(Debug, Clone, PartialEq, Subcommand)]
pub(crate) enum Task {
    /// Frames that are complete after each read of a stream: READ COMPLETE KEPT.
    Frames {
        #[arg(long, value_delimiter = ',', required = true)]
        payloads: Vec<u16>,
        #[arg(long, value_delimiter = ',', required = true)]
        reads: Vec<u16>,
    },
    /// Packets of a message, and their sequence numbers.
    Packets {
        #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1 << 31))]
        bytes: u32,
        #[arg(long, value_parser = clap::value_parser!(u32).range(256..=4096))]
        mtu: u32,
        #[arg(long, value_parser = clap::value_parser!(u32).range(..1 << 24))]
        psn: u32,
    },
    /// Sectors that a warp's load touches: OFFSET STRIDE SECTORS.
    Sectors {
        /// OFFSET:STRIDE, in bytes and elements.
        #[arg(required = true, value_parser = pair::<u32>)]
        loads: Vec<(u32, u32)>,
    },
    /// An order of blocking sends and receives round a ring that does not hang: `0: send 1, recv 4`.
    Order {
        #[arg(long, value_parser = few)]
        ranks: usize,
    },
    /// A ring's schedule for all_reduce: ROUND SENDER->RECEIVER PART.
    Ring {
        #[arg(long, value_parser = few)]
        ranks: usize,
    },
    /// Time of an all_reduce by ring and by tree in the alpha-beta model: ring|tree SIZE MICROSECONDS.
    Cost {
        #[arg(long, value_parser = few)]
        ranks: usize,
        #[arg(long)]
        alpha: f64,
        #[arg(long)]
        bandwidth: f64,
        /// Sizes in bytes.
        #[arg(required = true, value_parser = size::within(1..=1 << 30))]
        sizes: Vec<usize>,
    },
    /// Bus bandwidth of a call: COLLECTIVE RANKS GB/S.
    Busbw {
        #[arg(long)]
        bytes: u64,
        #[arg(long)]
        seconds: f64,
        /// COLLECTIVE:RANKS.
        #[arg(required = true, value_parser = call)]
        calls: Vec<(Collective, usize)>,
    },
    /// Strides of an array's views: VIEW STRIDE… yes|no.
    Strides {
        #[arg(long, value_delimiter = ',', required = true)]
        shape: Vec<i64>,
        #[arg(long)]
        size: i64,
        /// The array `a`, `a.T`, or slices as `a[1:3,::2]`.
        #[arg(required = true, value_parser = strides::View::parse)]
        views: Vec<strides::View>,
    },
    /// All-reduces of gradient buckets beside backward: BUCKET START END, then `exposed MS`.
    Buckets(buckets::Buckets),
}

fn few(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|n| (2..=64).contains(n)).ok_or_else(|| "expected 2 to 64 ranks".to_owned())
}

fn pair<T: std::str::FromStr>(text: &str) -> Result<(T, T), String> {
    let both = text.split_once(':').and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
    both.ok_or_else(|| "expected two numbers, like 0:8".to_owned())
}

fn call(text: &str) -> Result<(Collective, usize), String> {
    let (name, ranks) = text.split_once(':').ok_or("expected a collective and ranks, like all-reduce:8")?;
    let wanted = name.replace('-', "_");
    let collective = Collective::ALL.into_iter().find(|c| c.name() == wanted);
    Ok((collective.ok_or_else(|| format!("there is no collective '{name}'"))?, few(ranks)?))
}

impl Task {
    /// Lines that are right.
    pub(crate) fn ours(&self) -> Result<Vec<String>> {
        Ok(match self {
            Task::Frames { payloads, reads } => bytes::frames(payloads, reads)?,
            Task::Packets { bytes, mtu, psn } => bytes::packets(*bytes, *mtu, *psn),
            Task::Sectors { loads } => bytes::sectors(loads),
            Task::Order { ranks } => order::ours(*ranks),
            Task::Ring { ranks } => ring::ours(*ranks),
            Task::Cost { ranks, alpha, bandwidth, sizes } => model::cost(*ranks, *alpha, *bandwidth, sizes)?,
            Task::Busbw { bytes, seconds, calls } => model::busbw(*bytes, *seconds, calls)?,
            Task::Strides { shape, size, views } => strides::lines(shape, *size, views)?,
            Task::Buckets(buckets) => buckets.lines()?,
        })
    }

    /// Lists the errors in a learner's lines; empty if they are right.
    pub(crate) fn faults(&self, lines: &[&str]) -> Result<Vec<String>> {
        Ok(match self {
            Task::Order { ranks } => order::faults(*ranks, lines),
            Task::Ring { ranks } => ring::faults(*ranks, lines),
            figures => table::faults(&figures.ours()?, lines),
        })
    }

    /// Describes the check that the lines passed.
    pub(crate) fn proof(&self) -> &'static str {
        match self {
            Task::Frames { .. } => "a reader was given these pieces",
            Task::Packets { .. } => "the message was cut",
            Task::Sectors { .. } => "the sectors were counted",
            Task::Order { .. } => "all calls return",
            Task::Ring { .. } => "the verifier accepts the schedule, and it is a ring's",
            Task::Cost { .. } => "the simulator ran both schedules",
            Task::Busbw { .. } => "the verifier counted the bytes of each schedule",
            Task::Strides { .. } => "the views were made",
            Task::Buckets(_) => "the all-reduces were played",
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    /// The tasks of the READMEs.
    fn asked() -> Vec<Task> {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../milestones");
        let mut found = Vec::new();
        for folder in std::fs::read_dir(root).unwrap() {
            let readme = std::fs::read_to_string(folder.unwrap().path().join("README.md")).unwrap();
            for line in readme.lines().filter_map(|l| l.strip_prefix("cargo run -q -p whiteboard -- ")) {
                // The quotes are the shell's.
                let words = line.split_whitespace().map(|w| w.trim_matches('\''));
                found.push(crate::Options::try_parse_from(["whiteboard"].into_iter().chain(words)).unwrap().task);
            }
        }
        found
    }

    #[test]
    fn what_the_readmes_ask_has_an_answer_and_a_mistake_is_found() {
        let asked = asked();
        assert!(asked.len() >= 8, "{} tasks", asked.len());
        for task in asked {
            let ours = task.ours().unwrap();
            let lines: Vec<&str> = ours.iter().map(String::as_str).collect();
            assert_eq!(task.faults(&lines).unwrap(), [""; 0], "{task:?}");
            for at in 0..lines.len() {
                let mut fewer = lines.clone();
                fewer.remove(at);
                assert!(!task.faults(&fewer).unwrap().is_empty(), "{task:?} without line {at}");
                let mut other = lines.clone();
                let changed = lines[at].replace(|c: char| c.is_ascii_digit(), "9");
                other[at] = &changed;
                if changed != lines[at] {
                    assert!(!task.faults(&other).unwrap().is_empty(), "{task:?} with '{changed}'");
                }
            }
            assert!(!task.faults(&[]).unwrap().is_empty(), "{task:?} without lines");
        }
    }
}
