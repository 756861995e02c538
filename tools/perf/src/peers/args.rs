//! The command line, and the parts of the comparison that it asks for.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, ValueEnum};
use program_kit::size;

use crate::table::word;

/// Runs the collectives of other libraries and ours in turn on this machine, and writes tables, raw values and plots.
///
/// Usually started by scripts/compare-peers, which installs and builds the prerequisites.
#[derive(Debug, Clone, Parser)]
pub(crate) struct Args {
    /// Only draw the plots of a comparison again, from its raw values.
    #[arg(long, value_name = "FILE.csv")]
    pub(crate) plot: Option<PathBuf>,
    /// Peers to run: openmpi, mpich, impi, gloo, a list of them, or all that are installed.
    #[arg(long, default_value = "all", value_delimiter = ',')]
    pub(crate) peers: Vec<String>,
    /// Operations: all_reduce all_gather reduce_scatter broadcast reduce all_to_all sendrecv pingpong barrier, a list,
    /// or all.
    #[arg(long, default_value = "all", value_delimiter = ',')]
    pub(crate) ops: Vec<String>,
    /// Numbers of ranks.
    #[arg(long, default_value = "2,4", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(2..=64))]
    ranks: Vec<u32>,
    /// Transports that carry the bytes.
    #[arg(long, value_enum, default_value = "shm,tcp", value_delimiter = ',')]
    transports: Vec<Transport>,
    /// Pages of the buffers.
    #[arg(long, value_enum, default_value = "4k,huge", value_delimiter = ',')]
    pages: Vec<Pages>,
    /// Buffers of the calls: the same at every call, or others at every call.
    #[arg(long, value_enum, default_value = "reused,fresh", value_delimiter = ',')]
    buffers: Vec<Buffers>,
    /// Element types; bf16 is ours alone, as no peer here can reduce it.
    #[arg(long, value_enum, default_value = "f32,bf16", value_delimiter = ',')]
    pub(crate) dtype: Vec<DType>,
    /// Huge pages and fresh buffers also for TCP, for more ranks than 2, and together.
    #[arg(long)]
    all_combinations: bool,
    /// Smallest size in bytes; K, M or G may follow.
    #[arg(short = 'b', long, default_value = "8", value_parser = size::within(4..=16 << 30))]
    pub(crate) min: usize,
    /// Largest size in bytes.
    #[arg(short = 'e', long, default_value = "128M", value_parser = size::within(4..=16 << 30))]
    pub(crate) max: usize,
    /// Factor from one size to the next.
    #[arg(short = 'f', long, default_value = "4", value_parser = clap::value_parser!(u32).range(2..))]
    pub(crate) factor: u32,
    /// Sizes are one rank's bytes in every operation, as in MPI's functions; otherwise all_gather, reduce_scatter and
    /// all_to_all take all ranks' together.
    #[arg(long)]
    pub(crate) per_rank: bool,
    /// A barrier after each call, and only the calls' own time counts, as in OSU's benchmarks.
    #[arg(long)]
    pub(crate) barriers: bool,
    /// Rounds; in each one every program runs once.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub(crate) rounds: u32,
    /// Minutes; no round begins that would probably end later, except for the first three.
    #[arg(long, default_value_t = 25.0)]
    pub(crate) minutes: f64,
    /// Approximate seconds to measure each size in each round.
    #[arg(long, default_value = "0.014", value_parser = size::seconds)]
    pub(crate) budget: Duration,
    /// A peer's operation ends at the size where one call takes longer than these seconds.
    #[arg(long, default_value = "0.5", value_parser = size::seconds)]
    pub(crate) cap: Duration,
    /// A program that runs for longer than these seconds is ended; its output so far counts.
    #[arg(long, default_value = "60", value_parser = size::seconds)]
    pub(crate) limit: Duration,
    /// A smoke test of under three minutes: one round, few sizes. Overrides sizes, rounds and parts.
    #[arg(long)]
    quick: bool,
    /// Do not compare a stream with iperf3.
    #[arg(long)]
    pub(crate) no_stream: bool,
    /// Folder with the peers' benchmarks, as scripts/compare-peers builds them.
    #[arg(long, default_value = "target/peers")]
    pub(crate) programs: PathBuf,
    /// Our benchmark.
    #[arg(long, default_value = "target/release/stress")]
    pub(crate) stress: PathBuf,
    /// Results: PREFIX.md, PREFIX.csv and PREFIX-PART.svg.
    #[arg(long, value_name = "PREFIX", default_value = "out/compare/peers")]
    pub(crate) output: PathBuf,
}

/// Transport that carries the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Transport {
    Shm,
    Tcp,
}

/// Pages of the buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Pages {
    #[value(name = "4k")]
    Small,
    Huge,
}

/// Buffers that the calls get: the same at every call, or others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Buffers {
    Reused,
    Fresh,
}

/// Element type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum DType {
    F32,
    Bf16,
}

/// The configuration of one set of tables: everything but the operation and the size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) transport: Transport,
    pub(crate) ranks: u32,
    pub(crate) pages: Pages,
    pub(crate) buffers: Buffers,
}

impl Part {
    /// Short, for file names and the raw values: `shm-2-4k-reused`.
    pub(crate) fn key(&self) -> String {
        let Part { transport, ranks, pages, buffers } = *self;
        format!("{}-{ranks}-{}-{}", word(transport), word(pages), word(buffers))
    }

    /// The part with this [`key`](Part::key).
    pub(crate) fn from_key(key: &str) -> Option<Part> {
        let words: Vec<&str> = key.split('-').collect();
        let &[transport, ranks, pages, buffers] = words.as_slice() else { return None };
        Some(Part {
            transport: Transport::from_str(transport, false).ok()?,
            ranks: ranks.parse().ok()?,
            pages: Pages::from_str(pages, false).ok()?,
            buffers: Buffers::from_str(buffers, false).ok()?,
        })
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let transport = match self.transport {
            Transport::Shm => "shared memory",
            Transport::Tcp => "TCP on loopback",
        };
        let pages = match self.pages {
            Pages::Small => "4 KiB pages",
            Pages::Huge => "huge pages",
        };
        let buffers = match self.buffers {
            Buffers::Reused => "reused buffers",
            Buffers::Fresh => "fresh buffers",
        };
        write!(f, "{transport}, {} ranks, {pages}, {buffers}", self.ranks)
    }
}

impl Args {
    /// The options with what `--quick` changes.
    pub(crate) fn settled(mut self) -> Args {
        if self.quick {
            (self.min, self.max, self.factor, self.rounds) = (8, 2 << 20, 512, 1);
            self.budget = Duration::from_millis(7);
            self.limit = self.limit.min(Duration::from_secs(20));
            self.buffers.retain(|&b| b == Buffers::Reused);
            self.pages.retain(|&p| p == Pages::Small);
        }
        self
    }

    /// Every part that is asked for.
    pub(crate) fn parts(&self) -> Vec<Part> {
        let mut parts = Vec::new();
        for &ranks in &self.ranks {
            for &transport in &self.transports {
                for &buffers in &self.buffers {
                    for &pages in &self.pages {
                        let special = usize::from(pages == Pages::Huge) + usize::from(buffers == Buffers::Fresh);
                        let most = if ranks == 2 && transport == Transport::Shm { 1 } else { 0 };
                        // A kind that was requested alone gets all combinations.
                        let only = self.pages.len() == 1 && self.buffers.len() == 1;
                        let part = Part { transport, ranks, pages, buffers };
                        if (self.all_combinations || only || special <= most) && !parts.contains(&part) {
                            parts.push(part);
                        }
                    }
                }
            }
        }
        parts
    }

    /// Returns true if this family of peers is wanted.
    pub(crate) fn wants(&self, family: &str) -> bool {
        self.peers.iter().any(|p| p == "all" || p == family)
    }

    /// All operations that are asked for, or the word that is none.
    pub(crate) fn operations(&self) -> Result<Vec<&'static str>, String> {
        let mut found = Vec::new();
        for word in &self.ops {
            match OPERATIONS.iter().find(|&op| op == word) {
                Some(op) => found.push(*op),
                None if word == "all" => found.extend(OPERATIONS),
                None => return Err(format!("--ops {word}: expected {} or all", OPERATIONS.join(" "))),
            }
        }
        Ok(found)
    }
}

/// Every operation, in the order of the tables.
pub(crate) const OPERATIONS: [&str; 9] = [
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "all_to_all",
    "sendrecv",
    "pingpong",
    "barrier",
];

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Args {
        Args::try_parse_from(std::iter::once("compare-peers").chain(line.split_whitespace())).unwrap().settled()
    }

    fn keys(line: &str) -> Vec<String> {
        parse(line).parts().iter().map(Part::key).collect()
    }

    #[test]
    fn parts_of_the_default_and_of_choices() {
        let default = [
            "shm-2-4k-reused",
            "shm-2-huge-reused",
            "shm-2-4k-fresh",
            "tcp-2-4k-reused",
            "shm-4-4k-reused",
            "tcp-4-4k-reused",
        ];
        assert_eq!(keys(""), default);
        assert_eq!(keys("--ranks 4 --transports tcp --pages huge --buffers fresh"), ["tcp-4-huge-fresh"]);
        assert_eq!(keys("--all-combinations").len(), 16);
        for part in parse("--all-combinations").parts() {
            assert_eq!(Part::from_key(&part.key()), Some(part));
        }
        assert_eq!(keys("--quick").len(), 4);
        assert_eq!(keys("--ranks 2,2 --transports shm --pages 4k --buffers reused").len(), 1);
        assert_eq!(parse("").parts()[1].to_string(), "shared memory, 2 ranks, huge pages, reused buffers");
    }

    #[test]
    fn words() {
        let args = parse("--ops reduce,barrier --peers gloo -e 1M");
        assert_eq!(args.operations().unwrap(), ["reduce", "barrier"]);
        assert!(args.wants("gloo") && !args.wants("mpich"));
        assert_eq!((args.min, args.max), (8, 1 << 20));
        assert!(parse("--ops every").operations().unwrap_err().contains("all_reduce"));
        assert_eq!(parse("").operations().unwrap().len(), 9);
        assert!(size::seconds("0").is_err());
    }
}
