//! The command line: the letters of nccl-tests, and long names for all other options.

use std::path::PathBuf;
use std::time::Duration;

use clap::builder::RangedU64ValueParser;
use clap::error::ErrorKind;
use clap::{ArgAction, CommandFactory as _, Parser};
use program_kit::size;
use replay::Replay;
use tinynccl::config::TransportChoice;
use tinynccl::wire::{Algorithm, Collective};
use tinynccl::{Config, DType, ReduceOp};

use crate::case::{self, Case, Size, Way};
use crate::measure::{Between, Effort};
use crate::memory::Buffers;
use crate::row::{Places, Settings};
use crate::split::Split;
use crate::sweep::{self, Increment};

/// Correctness and speed of every collective, with the flags and columns of nccl-tests.
///
/// Run alone it starts its own ranks on this machine; under torchrun, mpirun or srun it is one rank.
/// Exit code: 0 all values right, 1 an error or wrong values, 2 wrong usage, 3 cannot run here.
#[derive(Debug, Clone, Parser)]
#[command(version)]
pub(crate) struct Args {
    /// Smallest size in bytes; K, M or G may follow.
    #[arg(short = 'b', long = "minbytes", default_value = "8", value_parser = size::within(0..=1 << 40))]
    pub(crate) min: usize,
    /// Largest size in bytes.
    #[arg(short = 'e', long = "maxbytes", default_value = "32M", value_parser = size::within(0..=1 << 40))]
    pub(crate) max: usize,
    /// Factor from one size to the next.
    #[arg(
        short = 'f',
        long = "stepfactor",
        default_value = "4",
        value_parser = RangedU64ValueParser::<usize>::new().range(2..=1 << 30),
        conflicts_with = "step"
    )]
    factor: usize,
    /// Bytes from one size to the next.
    #[arg(short = 'i', long = "stepbytes", value_parser = size::within(0..=1 << 40))]
    step: Option<usize>,
    /// Calls per repetition; without it, as many as --budget allows.
    #[arg(short = 'n', long = "iters", value_parser = clap::value_parser!(u32).range(1..))]
    iterations: Option<u32>,
    /// Calls before the measurement.
    #[arg(short = 'w', long = "warmup_iters", default_value_t = 5)]
    warm_up: u32,
    /// Operator: sum, prod, min, max, avg, band, bor, bxor, a list of them, or all.
    #[arg(short = 'o', long = "op", default_value = "sum", value_delimiter = ',')]
    op: Vec<String>,
    /// Element type: f32 f64 f16 bf16 f8e4m3 f8e5m2 i8 u8 i16 u16 i32 u32 i64 u64 (or float, half, …), a list of them,
    /// or all.
    #[arg(short = 'd', long = "datatype", default_value = "f32", value_delimiter = ',')]
    dtype: Vec<String>,
    /// Root rank, or all (-1).
    #[arg(short = 'r', long = "root", default_value = "0", allow_negative_numbers = true)]
    root: String,
    /// Check every element: 0 or 1.
    #[arg(short = 'c', long = "check", default_value_t = 1, value_parser = clap::value_parser!(u8).range(0..=1))]
    check: u8,
    /// Collectives to run: all_reduce all_gather reduce_scatter broadcast reduce gather scatter all_to_all scan
    /// sendrecv barrier, a list of them, or all; pingpong: send and recv between ranks 0 and 1, there and back;
    /// neighbours: half of the message to the right, half to the left.
    #[arg(long, default_value = "all_reduce", value_delimiter = ',')]
    collective: Vec<String>,
    /// Ranks to start on this machine; under a launcher, the launcher's number counts instead.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) ranks: u32,
    /// Transport of the bytes: auto, tcp, shm, verbs (RDMA), or inproc (ranks are threads of one process).
    #[arg(long)]
    transport: Option<String>,
    /// Use this algorithm where it can do the collective: ring, tree, double-tree, direct, halving-doubling, all-pairs,
    /// recursive-doubling, hierarchical, one-shot, two-shot, staged or auto.
    #[arg(long)]
    algo: Option<String>,
    /// 1: calls run in the caller's thread. 0: they run on the progress thread, and the caller waits for each.
    #[arg(short = 'z', long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(0..=1))]
    blocking: u8,
    /// Make each call in a group, together with a message of 8 bytes round the ring.
    #[arg(long, conflicts_with = "explain")]
    group: bool,
    /// Split the ranks by their number modulo this one; several numbers separate these ranks from the others. All
    /// groups run at the same time; rank 0's group prints.
    #[arg(long, value_name = "PARTS|RANK,RANK...", conflicts_with = "explain")]
    pub(crate) split: Option<Split>,
    /// Repetitions of each measurement; the table shows their median.
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..))]
    repetitions: u32,
    /// Approximate seconds to measure each size and place (without -n).
    #[arg(long, default_value = "0.3", value_parser = size::seconds)]
    budget: Duration,
    /// Between the timed calls of a repetition: nothing, as in nccl-tests, or a barrier whose time does not count, as
    /// in OSU's benchmarks.
    #[arg(long, value_enum, default_value = "nothing")]
    between: Between,
    /// Meaning of a size where ranks hold parts (all_gather, reduce_scatter, gather, scatter, all_to_all): all ranks'
    /// bytes, as in nccl-tests, or one rank's, as in MPI's functions and OSU's benchmarks.
    #[arg(long = "size", value_enum, default_value = "total")]
    size: Size,
    /// Seconds without progress after which a call fails and names the ranks that have not arrived.
    #[arg(long, value_parser = size::seconds)]
    timeout: Option<Duration>,
    /// Seed of the values in the buffers.
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// Memory of the calls: the same every time, different every time (in no cache), allocated by the library for all
    /// ranks, or registered with the RDMA devices.
    #[arg(long, value_enum, default_value = "reused")]
    pub(crate) buffers: Buffers,
    /// Put that memory on huge pages.
    #[arg(long)]
    pub(crate) huge_pages: bool,
    /// Out of place, in place, both, or as MPI's functions are called (broadcast in place, the others not).
    #[arg(long = "place", value_enum, default_value = "both")]
    places: Places,
    /// Print comma-separated values instead of the table.
    #[arg(long)]
    pub(crate) csv: bool,
    /// Do not pin rank r to core r, modulo the number of cores.
    #[arg(long = "no-pin", action = ArgAction::SetFalse)]
    pub(crate) pin: bool,
    /// Instead of the table, print the library's choice for each size, the reasons, and the cost of the runner-up.
    #[arg(long, conflicts_with_all = ["json", "plot"])]
    pub(crate) explain: bool,
    /// With --explain: also run the choice and the runner-up, and compare.
    #[arg(long, requires = "explain")]
    pub(crate) measure: bool,
    /// Write all measurements to this file, as JSON.
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Draw time and bus bandwidth over the size into this file, as SVG.
    #[arg(long, value_name = "FILE.svg")]
    pub(crate) plot: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) replay: Replay,
}

/// The parsed command line.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    sizes: Vec<usize>,
    size: Size,
    pub(crate) settings: Settings,
    collectives: Vec<(Collective, Way)>,
    dtypes: Vec<DType>,
    ops: Vec<ReduceOp>,
    /// `None`: every rank is root in turn.
    root: Option<usize>,
    transport: Option<TransportChoice>,
    /// True if the ranks are threads of this process.
    pub(crate) threads: bool,
    algorithm: Option<Option<Algorithm>>,
    timeout: Option<Duration>,
}

impl Args {
    /// Parses all values, or fails with the first one that it does not know (exit code 2).
    pub(crate) fn plan(&self) -> Result<Plan, clap::Error> {
        self.understand().map_err(|detail| Args::command().error(ErrorKind::ValueValidation, detail))
    }

    fn understand(&self) -> Result<Plan, String> {
        if self.min > self.max {
            return Err(format!("-b {} is more than -e {}", self.min, self.max));
        }
        if self.blocking == 0 && (self.buffers != Buffers::Reused || self.huge_pages) {
            return Err(
                "-z 0: asynchronous calls own their buffers, so --buffers and --huge-pages do not apply".to_owned()
            );
        }
        if self.blocking == 0 && self.group {
            return Err("-z 0: the calls of a --group run in the caller's thread".to_owned());
        }
        let increment = match self.step {
            Some(0) => return Err("-i 0: expected at least 1 byte".to_owned()),
            Some(step) => Increment::Step(step),
            None => Increment::Factor(self.factor),
        };
        let threads = self.transport.as_deref() == Some("inproc");
        let transport = match self.transport.as_deref() {
            None | Some("inproc") => None,
            Some(name) => Some(
                name.parse().map_err(|_| format!("--transport {name}: expected auto, tcp, shm, verbs or inproc"))?,
            ),
        };
        let algorithm = match self.algo.as_deref() {
            None => None,
            Some("auto") => Some(None),
            Some(name) => Some(Some(name.parse().map_err(|e| format!("--algo: {e}"))?)),
        };
        let root = match self.root.as_str() {
            "all" | "-1" => None,
            text => Some(text.parse().map_err(|_| format!("-r {text}: expected a rank or all"))?),
        };
        let collective = |s: &str| {
            case::parse(s).ok_or_else(|| {
                format!("--collective {s}: expected {} or all", Collective::ALL.map(case::name).join(" "))
            })
        };
        Ok(Plan {
            sizes: sweep::sweep(self.min, self.max, increment),
            size: self.size,
            settings: Settings {
                effort: Effort {
                    warm_up: self.warm_up as usize,
                    iterations: self.iterations.map(|n| n as usize),
                    repetitions: self.repetitions as usize,
                    between: self.between,
                    budget: self.budget,
                    crowded: false,
                },
                places: self.places,
                check: self.check == 1,
                asynchronous: self.blocking == 0,
                grouped: self.group,
            },
            collectives: list(&self.collective, &Collective::ALL.map(|c| (c, Way::Ring)), collective)?,
            dtypes: list(&self.dtype, &DType::ALL, |s| dtype(s).map_err(|e| format!("-d: {e}")))?,
            ops: list(&self.op, &ReduceOp::ALL, |s| s.parse().map_err(|e| format!("-o: {e}")))?,
            root,
            transport,
            threads,
            algorithm,
            timeout: self.timeout,
        })
    }
}

impl Plan {
    /// Bytes of the largest row of these cases.
    pub(crate) fn largest(&self, cases: &[Case], ranks: usize) -> usize {
        cases.iter().flat_map(|case| self.rows_of(case, ranks)).max().unwrap_or(0)
    }

    /// Bytes of a case's rows: one row, where there is nothing to size.
    pub(crate) fn rows_of(&self, case: &Case, ranks: usize) -> Vec<usize> {
        match case.collective {
            Collective::Barrier => vec![0],
            _ => self.sizes.iter().map(|&size| case.total(size, self.size, ranks)).collect(),
        }
    }

    /// The library's settings: the environment, then the flags.
    pub(crate) fn config(&self) -> tinynccl::Result<Config> {
        let mut config = Config::from_env()?;
        config.transport = self.transport.unwrap_or(config.transport);
        config.algorithm = self.algorithm.unwrap_or(config.algorithm);
        config.timeout = self.timeout.unwrap_or(config.timeout);
        Ok(config)
    }

    /// The blocks of the table: each collective with the types, operators and roots that matter to it.
    pub(crate) fn cases(&self, ranks: usize) -> Result<Vec<Case>, String> {
        if let Some(root) = self.root.filter(|&root| root >= ranks) {
            return Err(format!("-r {root}: expected a rank below {ranks}"));
        }
        let mut cases = Vec::new();
        for &(collective, way) in &self.collectives {
            if way == Way::RoundTrip && ranks < 2 {
                return Err("--collective pingpong: expected 2 ranks or more".to_owned());
            }
            let dtypes = if collective == Collective::Barrier { &self.dtypes[..1] } else { &self.dtypes[..] };
            let ops: Vec<_> = match collective.reduces() {
                true => self.ops.iter().copied().map(Some).collect(),
                false => vec![None],
            };
            let roots: Vec<_> = match (collective.has_root() && collective != Collective::SendRecv, self.root) {
                (false, _) => vec![None],
                (true, Some(root)) => vec![Some(root)],
                (true, None) => (0..ranks).map(Some).collect(),
            };
            for &dtype in dtypes {
                for &op in ops.iter().filter(|op| op.is_none_or(|op| op.check(collective, 0, dtype).is_ok())) {
                    cases.extend(roots.iter().map(|&root| Case { collective, way, dtype, op, root }));
                }
            }
        }
        Ok(cases)
    }
}

/// A comma-separated list, or `all`, without repetitions.
fn list<T: Copy + PartialEq>(
    words: &[String],
    all: &[T],
    parse: impl Fn(&str) -> Result<T, String>,
) -> Result<Vec<T>, String> {
    let mut found = Vec::new();
    for word in words {
        let values = if word == "all" { all.to_vec() } else { vec![parse(word)?] };
        for value in values {
            if !found.contains(&value) {
                found.push(value);
            }
        }
    }
    if found.is_empty() { Err("expected at least one value".to_owned()) } else { Ok(found) }
}

/// An element type by our name or by NCCL's.
fn dtype(text: &str) -> Result<DType, String> {
    match text {
        "float" => Ok(DType::F32),
        "double" => Ok(DType::F64),
        "half" => Ok(DType::F16),
        "bfloat16" => Ok(DType::Bf16),
        "int8" => Ok(DType::I8),
        "uint8" => Ok(DType::U8),
        "int32" => Ok(DType::I32),
        "uint32" => Ok(DType::U32),
        "int64" => Ok(DType::I64),
        "uint64" => Ok(DType::U64),
        "int16" => Ok(DType::I16),
        "uint16" => Ok(DType::U16),
        "fp8e4m3" => Ok(DType::F8E4M3),
        "fp8e5m2" => Ok(DType::F8E5M2),
        other => other.parse(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<(Args, Plan), String> {
        let args = Args::try_parse_from(std::iter::once("stress").chain(line.split_whitespace()));
        let args = args.map_err(|e| e.to_string())?;
        let plan = args.plan().map_err(|e| e.to_string())?;
        Ok((args, plan))
    }

    #[test]
    fn the_command_line_is_consistent() {
        Args::command().debug_assert();
    }

    #[test]
    fn flags_of_nccl_tests() {
        let (args, plan) = parse("-b 8 -e 128M -f 4 -n 20 -w 3 -o all -d all -r all -c 0").unwrap();
        assert_eq!(plan.sizes.first(), Some(&8));
        assert_eq!(plan.sizes.len(), 13);
        assert_eq!((plan.settings.effort.iterations, plan.settings.effort.warm_up), (Some(20), 3));
        assert!(!plan.settings.check && args.pin);
        // Five operators of every type, and three on bits of integers.
        assert_eq!(plan.cases(3).unwrap().len(), 14 * 5 + 8 * 3, "all_reduce has no root");
        let (args, plan) = parse("-b 8 -e 24 -i 8 --collective reduce,barrier -r -1 --no-pin -d float,f32").unwrap();
        assert_eq!(plan.sizes, [8, 16, 24]);
        assert_eq!(plan.cases(3).unwrap().len(), 3 + 1);
        assert!(!args.pin);
    }

    #[test]
    fn flags_override_the_environment() {
        let (_, plan) = parse("--transport tcp --algo tree --timeout 2").unwrap();
        let config = plan.config().unwrap();
        assert_eq!(config.transport, TransportChoice::Tcp);
        assert_eq!(config.algorithm, Some(Algorithm::Tree));
        assert_eq!(config.timeout, Duration::from_secs(2));
        assert!(parse("--transport inproc").unwrap().1.threads);
    }

    #[test]
    fn wrong_flags_say_what_was_expected() {
        for (line, word) in [
            ("-b 16 -e 8", "-e 8"),
            ("-b x", "a whole number of bytes"),
            ("-i 0", "at least 1 byte"),
            ("-i 8 -f 2", "cannot be used with"),
            ("-f 1", "2..="),
            ("-o average", "sum prod min max avg"),
            ("-d f31", "f32 f64"),
            ("-r first", "a rank or all"),
            ("-c 2", "2"),
            ("--collective reduce_all", "all_reduce"),
            ("--transport rdma", "auto, tcp, shm, verbs or inproc"),
            ("--algo rings", "ring tree"),
            ("--budget 0", "more than 0"),
            ("--timeout inf", "seconds"),
            ("--measure", "--explain"),
            ("--group -z 0", "-z 0"),
            ("--split 2 --explain", "cannot be used with"),
            ("--explain --json a", "cannot be used with"),
            ("-z 0 --buffers fresh", "own their buffers"),
            ("--buffers stale", "fresh"),
            ("--place here", "mpi"),
            ("--size each", "rank"),
            ("--between calls", "barrier"),
            ("--ranks 0", "0"),
            ("-n 0", "0"),
        ] {
            let error = parse(line).map(|_| ()).unwrap_err();
            assert!(error.contains(word), "{line}: {error}");
        }
        let (_, plan) = parse("--collective pingpong").unwrap();
        assert!(plan.cases(1).unwrap_err().contains("2 ranks or more"));
        assert_eq!(plan.cases(2).unwrap()[0].way, Way::RoundTrip);
        let (_, plan) = parse("-r 2 --collective broadcast").unwrap();
        assert!(plan.cases(2).unwrap_err().contains("below 2"));
    }
}
