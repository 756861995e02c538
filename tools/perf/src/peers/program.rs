//! The programs that run in turn: ours, and every peer in every variant that is worth a column.
//!
//! A variant exists because the default is not the fastest everywhere: Open MPI copies once through the kernel (CMA) by
//! default, which loses on small pages; and the C library gives large temporaries back to the system after each call,
//! so that they fault in again at the next one, unless it is told to keep them.

use std::path::PathBuf;
use std::process::Command;

use super::args::{Args, Buffers, DType, Pages, Part, Transport};
use crate::table::word;

/// The kind of a column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// Our library with ordinary buffers.
    Ours,
    /// Our library with buffers that it allocated for all ranks.
    Symmetric,
    /// Our library with the same number of bytes in bf16.
    Bf16,
    /// Another library.
    Peer,
}

impl Role {
    /// The role of the column with this name.
    pub(crate) fn of(name: &str) -> Role {
        match name {
            "tinynccl" => Role::Ours,
            "tinynccl alloc" => Role::Symmetric,
            "tinynccl bf16" => Role::Bf16,
            _ => Role::Peer,
        }
    }
}

/// One program of one part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Program {
    /// Heading of its column.
    pub(crate) name: &'static str,
    pub(crate) role: Role,
    /// Description, printed once under the tables.
    pub(crate) what: &'static str,
    path: PathBuf,
    arguments: Vec<String>,
    environment: Vec<(&'static str, String)>,
}

impl Program {
    /// The process to start. Two ranks probe through `probe`, a file with a page, how far apart their cores are.
    pub(crate) fn command(&self, probe: Option<&std::path::Path>) -> Command {
        let mut command = Command::new(&self.path);
        command.envs(probe.map(|file| ("PERF_PROBE", file)));
        command.args(&self.arguments).envs(self.environment.iter().map(|(k, v)| (k, v)));
        command
    }

    /// As one would type it.
    pub(crate) fn line(&self) -> String {
        let variables = self.environment.iter().map(|(name, value)| format!("{name}={value}"));
        let words = variables.chain([self.path.display().to_string()]).chain(self.arguments.iter().cloned());
        words.collect::<Vec<_>>().join(" ")
    }
}

/// From here on temporaries are so large that how they are allocated shows.
const LARGE: usize = 8 << 20;
/// Above, Gloo's polling ranks hang here: both write, and neither reads before it has written everything.
const POLLING_MOST: usize = 32 << 20;
/// Repetitions of each size in each run.
const REPETITIONS: &str = "7";
/// Keeps freed memory in the process instead of giving it back and faulting it in again.
const KEEP_MEMORY: [(&str, &str); 3] = [
    ("MALLOC_MMAP_THRESHOLD_", "4294967296"),
    ("MALLOC_TRIM_THRESHOLD_", "8589934592"),
    ("MALLOC_TOP_PAD_", "268435456"),
];
const ROOT_MAY: [(&str, &str); 2] = [("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")];
const NO_CMA: [&str; 3] = ["--mca", "btl_vader_single_copy_mechanism", "none"];
const UCX: [&str; 9] = ["--mca", "pml", "ucx", "--mca", "pml_ucx_tls", "any", "--mca", "pml_ucx_devices", "any"];

/// A variant of a peer: name of its column, explanation, arguments of its launcher, variables, smallest size.
type Variant = (&'static str, &'static str, Vec<&'static str>, Vec<(&'static str, &'static str)>, usize);

/// Everything that runs in a part, ours first. `there` says which files exist.
pub(crate) fn programs(
    args: &Args,
    part: &Part,
    ops: &[&str],
    cores: usize,
    there: impl Fn(&std::path::Path) -> bool,
) -> Vec<Program> {
    let ops: Vec<&str> = ops.iter().copied().filter(|&op| op != "pingpong" || part.ranks == 2).collect();
    let crowded = part.ranks as usize > cores;
    let mut programs = ours(args, part, &ops);
    let at = |name: &str| args.programs.join(name);
    let bound = if crowded { vec!["--oversubscribe", "--bind-to", "none"] } else { vec!["--bind-to", "core"] };
    let impi = std::path::absolute(at("impi")).unwrap_or_else(|_| at("impi"));
    let fabric = Some(at("libfabric.so.1")).filter(|file| there(file));
    let intels = [
        ("I_MPI_ROOT", Some(impi.clone())),
        ("LD_LIBRARY_PATH", Some(impi.join("lib"))),
        ("I_MPI_OFI_LIBRARY", fabric),
    ];
    let intels = intels.into_iter().filter_map(|(name, path)| Some((name, path?.display().to_string()))).collect();
    // Family, launcher with its arguments and variables, variants.
    let families = [
        ("openmpi", "mpirun.openmpi".into(), bound, owned(ROOT_MAY), worth(part, open_mpi(part.transport))),
        ("mpich", "mpirun.mpich".into(), vec!["-launcher", "fork"], Vec::new(), worth(part, mpich(part.transport))),
        ("impi", impi.join("bin/mpiexec.hydra"), vec!["-bootstrap", "fork"], intels, intel(part.transport, crowded)),
    ];
    for (family, launcher, always, variables, variants) in families {
        let program = at(&format!("mpi_perf.{family}"));
        if !args.wants(family) || !there(&program) {
            continue;
        }
        for (name, what, more, extra, from) in variants {
            let Some(from) = from_size(args, from) else { continue };
            let mut arguments: Vec<String> = always.iter().chain(&more).map(|&word| word.to_owned()).collect();
            arguments.extend(["-n".to_owned(), part.ranks.to_string(), program.display().to_string()]);
            arguments.extend(benchmark(args, part, &ops, from, args.max));
            let environment = variables.iter().cloned().chain(owned(extra)).collect();
            programs.push(Program { name, what, role: Role::Peer, path: launcher.clone(), arguments, environment });
        }
    }
    if part.transport == Transport::Tcp && args.wants("gloo") && there(&at("gloo_perf")) {
        let polling = "its older algorithms with busy-polling, called in place; up to 32 MiB, above it hangs";
        for (name, what, more, most) in [
            ("Gloo", "its default: a thread of its own moves the bytes", None, args.max),
            ("Gloo polling", polling, Some("-B"), args.max.min(POLLING_MOST)),
        ] {
            let mut arguments = vec!["-n".to_owned(), part.ranks.to_string(), "-a".to_owned()];
            arguments.extend(more.map(str::to_owned));
            arguments.extend(benchmark(args, part, &ops, args.min, most));
            let path = at("gloo_perf");
            programs.push(Program { name, what, role: Role::Peer, path, arguments, environment: Vec::new() });
        }
    }
    programs
}

fn ours(args: &Args, part: &Part, ops: &[&str]) -> Vec<Program> {
    let program = |name, what, buffers: &str, dtype: &str| {
        let line = format!(
            "--csv --place mpi -w 0 --repetitions {REPETITIONS} --ranks {} --transport {} --collective {} -b {} -e {} -f {} \
             --budget {} --buffers {buffers} -d {dtype}",
            part.ranks,
            word(part.transport),
            ops.join(","),
            args.min,
            args.max,
            args.factor,
            args.budget.as_secs_f64()
        );
        let huge = (part.pages == Pages::Huge).then_some("--huge-pages");
        let per_rank = args.per_rank.then_some(["--size", "rank"]).into_iter().flatten();
        let barriers = args.barriers.then_some(["--between", "barrier"]).into_iter().flatten();
        let arguments = line.split(' ').chain(huge).chain(per_rank).chain(barriers).map(str::to_owned).collect();
        Program { name, what, role: Role::of(name), path: args.stress.clone(), arguments, environment: Vec::new() }
    };
    let fresh = part.buffers == Buffers::Fresh;
    let mut programs = Vec::new();
    if args.dtype.contains(&DType::F32) {
        programs.push(program("tinynccl", "ordinary buffers", &word(part.buffers), "f32"));
        if part.transport == Transport::Shm && !fresh {
            let what = "buffers from comm.alloc(), which all ranks can reach";
            programs.push(program("tinynccl alloc", what, "symmetric", "f32"));
        }
    }
    // Once for each transport is enough.
    if args.dtype.contains(&DType::Bf16) && part.ranks == 2 && !fresh && part.pages == Pages::Small {
        let what = "the same bytes as bf16, twice as many elements";
        programs.push(program("tinynccl bf16", what, "reused", "bf16"));
    }
    programs
}

fn open_mpi(transport: Transport) -> Vec<Variant> {
    match transport {
        Transport::Shm => vec![
            ("Open MPI", "default: single copy through the kernel (CMA)", vec![], vec![], 0),
            ("Open MPI no CMA", "copies through shared memory", NO_CMA.into(), vec![], 0),
            ("Open MPI UCX", "its UCX layer", UCX.into(), vec![], 0),
            ("Open MPI malloc", "default, freed memory kept (MALLOC_ variables)", vec![], KEEP_MEMORY.into(), LARGE),
            ("Open MPI no CMA malloc", "both", NO_CMA.into(), KEEP_MEMORY.into(), LARGE),
        ],
        Transport::Tcp => {
            let tcp = vec!["--mca", "pml", "ob1", "--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", "lo"];
            vec![
                ("Open MPI", "TCP alone", tcp.clone(), vec![], 0),
                ("Open MPI malloc", "TCP alone, freed memory kept", tcp, KEEP_MEMORY.into(), LARGE),
            ]
        }
    }
}

/// Keeps variants of the allocation of temporaries only in the part with small pages and reused buffers.
fn worth(part: &Part, mut variants: Vec<Variant>) -> Vec<Variant> {
    let plain = part.pages == Pages::Small && part.buffers == Buffers::Reused;
    variants.retain(|&(.., from)| plain || from == 0);
    variants
}

fn mpich(transport: Transport) -> Vec<Variant> {
    match transport {
        Transport::Shm => vec![
            ("MPICH", "default", vec![], vec![], 0),
            ("MPICH malloc", "freed memory kept", vec![], KEEP_MEMORY.into(), LARGE),
        ],
        Transport::Tcp => {
            let tcp = [("MPIR_CVAR_NOLOCAL", "1"), ("UCX_TLS", "tcp,self"), ("UCX_NET_DEVICES", "lo")];
            vec![("MPICH", "UCX over TCP alone", vec![], tcp.into(), 0)]
        }
    }
}

fn intel(transport: Transport, crowded: bool) -> Vec<Variant> {
    let mut variables = match transport {
        Transport::Shm => vec![("I_MPI_FABRICS", "shm")],
        // Without the last one its collectives go through shared memory all the same.
        Transport::Tcp => vec![
            ("I_MPI_FABRICS", "ofi"),
            ("I_MPI_OFI_PROVIDER", "tcp"),
            ("FI_PROVIDER", "tcp"),
            ("FI_TCP_IFACE", "lo"),
            ("I_MPI_COLL_INTRANODE", "pt2pt"),
        ],
    };
    if crowded {
        variables.extend([("I_MPI_WAIT_MODE", "1"), ("I_MPI_PIN", "0")]);
    }
    let what = if crowded { "I_MPI_WAIT_MODE=1: waiting ranks give their core away" } else { "default" };
    vec![("Intel MPI", what, vec![], variables, 0)]
}

/// Arguments of the peers' benchmark.
fn benchmark(args: &Args, part: &Part, ops: &[&str], from: usize, most: usize) -> Vec<String> {
    let line = format!(
        "-o {} -b {from} -e {most} -f {} -t {} -r {REPETITIONS} -c {} -T {}",
        ops.join(","),
        args.factor,
        args.budget.as_secs_f64(),
        args.cap.as_secs_f64(),
        // A little later than our own limit, which keeps the output.
        args.limit.as_secs() + 5
    );
    let huge = (part.pages == Pages::Huge).then_some("-H");
    let fresh = (part.buffers == Buffers::Fresh).then_some("-F");
    let per_rank = args.per_rank.then_some("-E");
    let barriers = args.barriers.then_some("-S");
    line.split(' ').chain(huge).chain(fresh).chain(per_rank).chain(barriers).map(str::to_owned).collect()
}

/// The first size of the sweep that is not below `floor`, if there is one.
fn from_size(args: &Args, floor: usize) -> Option<usize> {
    let next = |&n: &usize| n.checked_mul(args.factor as usize);
    std::iter::successors(Some(args.min), next).take_while(|&n| n <= args.max).find(|&n| n >= floor)
}

fn owned<'a>(variables: impl IntoIterator<Item = (&'static str, &'a str)>) -> Vec<(&'static str, String)> {
    variables.into_iter().map(|(name, value)| (name, value.to_owned())).collect()
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    fn all(line: &str, part: usize) -> Vec<Program> {
        let args = Args::parse_from(std::iter::once("compare-peers").chain(line.split_whitespace())).settled();
        let ops = args.operations().unwrap();
        programs(&args, &args.parts()[part], &ops, 2, |_| true)
    }

    fn names(programs: &[Program]) -> Vec<&str> {
        programs.iter().map(|p| p.name).collect()
    }

    #[test]
    fn who_runs_in_which_part() {
        let shm = all("", 0);
        let expected = [
            "tinynccl",
            "tinynccl alloc",
            "tinynccl bf16",
            "Open MPI",
            "Open MPI no CMA",
            "Open MPI UCX",
            "Open MPI malloc",
            "Open MPI no CMA malloc",
            "MPICH",
            "MPICH malloc",
            "Intel MPI",
        ];
        assert_eq!(names(&shm), expected);
        let tcp = all("--transports tcp --ranks 4 --peers mpich,gloo", 0);
        assert_eq!(names(&tcp), ["tinynccl", "MPICH", "Gloo", "Gloo polling"]);
        let large = shm.iter().find(|p| p.name == "Open MPI malloc").unwrap().line();
        assert!(large.contains(" -b 8388608 ") && large.contains("MALLOC_TOP_PAD_="), "{large}");
        assert!(!names(&all("--pages huge --buffers reused", 0)).contains(&"Open MPI malloc"), "once is enough");
        assert!(!names(&all("-e 1M", 0)).contains(&"Open MPI malloc"), "no size is large");
        assert_eq!(names(&all("--buffers fresh --pages 4k --peers impi", 0)), ["tinynccl", "Intel MPI"]);
    }

    #[test]
    fn sizes_effort_and_memory_are_the_same_for_all() {
        let options = "-b 8 -e 128M --ops all_reduce,pingpong --pages huge --buffers fresh --per-rank --barriers";
        let special = all(options, 0);
        assert!(special.len() > 4);
        for program in special {
            let line = program.line();
            let own: &[&str] = match program.role {
                Role::Peer => &[" -H", " -F", " -E", " -S"],
                _ => &[" --huge-pages", " --buffers fresh", " --size rank", " --between barrier"],
            };
            for word in
                [" -b 8 ", " -e 134217728 ", " -f 4 ", " 0.014", " 7", " all_reduce,pingpong "].iter().chain(own)
            {
                assert!(line.contains(word), "{word} in {line}");
            }
        }
    }

    #[test]
    fn four_ranks_on_two_cores() {
        for program in all("--ranks 4 --transports shm", 0) {
            let line = program.line();
            assert!(!line.contains("pingpong"), "{line}");
            match program.name {
                "Intel MPI" => assert!(line.contains("I_MPI_WAIT_MODE=1"), "{line}"),
                "Open MPI" => assert!(line.contains("--oversubscribe --bind-to none -n 4"), "{line}"),
                _ => {}
            }
        }
    }
}
