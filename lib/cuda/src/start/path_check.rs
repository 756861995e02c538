//! The start-up check of the path between GPUs: data and the counts behind them, from every rank to every other.
//!
//! Peer access may be offered and still not work: an IOMMU or a virtual machine redirects peer writes, or a link is
//! broken.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::{CudaContext, CudaFunction, CudaModule, CudaStream, DriverError, result};
use serde::{Deserialize, Serialize};

use crate::driver::compile::compile;
use crate::driver::cuda;
use crate::kernels::{Args, Function, THREADS, Team, launch};
use crate::window::{Layout, Windows};
use tinynccl_comm::Comm;
use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::config::PathCheck;

const SOURCE: &str = concat!(
    include_str!("../kernels/types.cuh"),
    include_str!("../kernels/memory.cuh"),
    include_str!("../kernels/team.cuh"),
    include_str!("../kernels/args.cuh"),
    include_str!("../kernels/path_check.cu"),
);
/// Longest time for written data to arrive after all ranks have begun.
const LIMIT: Duration = Duration::from_secs(10);
/// As in `kernels/path_check.cu`.
const WRITES: u32 = 1;
const READS: u32 = 2;

/// The result of the check, the same on all ranks.
#[derive(Debug)]
pub(crate) enum Verdict {
    /// Every rank's writes reached every other rank.
    Sound,
    /// Some writes did not.
    Broken(Vec<Fault>),
}

/// A pair of ranks between which it does not work.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Fault {
    pub(crate) from: usize,
    pub(crate) to: usize,
    pub(crate) what: What,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum What {
    /// The count of `pieces` arrived, later ones did not in time.
    Silent { pieces: u32 },
    /// The count arrived, and this was found instead of the data.
    Wrong { word: u32, expected: u64, got: u64 },
}

impl fmt::Display for What {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            What::Silent { pieces } => write!(f, "{pieces} of 8 pieces arrived within {LIMIT:?}"),
            What::Wrong { word, expected, got } => {
                write!(f, "byte {} of the pattern: expected {expected:#018x}, got {got:#018x}", 8 * word)
            }
        }
    }
}

impl Verdict {
    fn of(faults: Vec<Fault>) -> Verdict {
        if faults.is_empty() { Verdict::Sound } else { Verdict::Broken(faults) }
    }

    /// The first failing pair of ranks, if any. `gpus`: the name of each rank's GPU.
    pub(crate) fn fault(self, gpus: &[String]) -> Option<String> {
        let Verdict::Broken(faults) = self else { return None };
        let Fault { from, to, what } = faults.first()?;
        let gpu = |rank: usize| gpus.get(rank).map_or("unknown GPU", String::as_str);
        Some(format!(
            "writes of rank {from} ({}) into the memory of rank {to} ({}) do not arrive: {what} ({} pairs of ranks fail; \
             look at `nvidia-smi topo -p2p w`, switch off PCIe ACS and the IOMMU, or restart the driver)",
            gpu(*from),
            gpu(*to),
            faults.len()
        ))
    }
}

/// As `struct Check` of `kernels/path_check.cu`.
#[repr(C)]
struct Asked {
    area: u64,
    limit: u64,
    parts: u32,
    spoil: u32,
}

/// The check of one rank under way.
struct Check<'a> {
    windows: &'a Windows,
    context: &'a Arc<CudaContext>,
    /// Writes other data than expected.
    spoils: bool,
    stream: Arc<CudaStream>,
    function: CudaFunction,
    _module: Arc<CudaModule>,
    area: u64,
}

/// Bytes of the lines' memory for each sender.
fn area(layout: &Layout) -> usize {
    layout.lines_of_all().len() / (layout.ranks - 1) / 256 * 256
}

fn failed(error: DriverError) -> Error {
    cuda("DeviceComm", "checking the path between the GPUs", error)
}

impl<'a> Check<'a> {
    /// Loads the kernel. Loading may wait for running kernels, so all ranks load before the first one launches.
    fn new(windows: &'a Windows, context: &'a Arc<CudaContext>, asked: PathCheck) -> Result<Check<'a>> {
        let mut defines = windows.layout.defines();
        defines.push(format!("-DTHREADS={THREADS}"));
        let ptx = compile("path_check.cu", SOURCE, &defines, context.compute_capability().map_err(failed)?)?;
        let module = context.load_module(ptx).map_err(failed)?;
        let function = module.load_function("path_check").map_err(failed)?;
        // A use, so that its code is loaded by now.
        function.num_regs().map_err(failed)?;
        let stream = context.new_stream().map_err(failed)?;
        let (spoils, area) = (asked == PathCheck::Fail, area(&windows.layout) as u64);
        Ok(Check { windows, context, spoils, stream, function, _module: module, area })
    }

    fn launch(&self, parts: u32, limit: Duration) -> Result<()> {
        let (rank, blocks) = (self.windows.rank as u32, 2 * self.windows.layout.ranks as u32);
        let team = Team { windows: self.windows.addresses, rank, ..Team::default() };
        let asked = Asked { area: self.area, limit: limit.as_nanos() as u64, parts, spoil: self.spoils.into() };
        let (function, stream) = (Function::late(self.function.cu_function()), self.stream.cu_stream());
        let more = [(&raw const asked).cast()];
        // SAFETY: the kernel declares a `Check`; it stays within the windows.
        unsafe { launch(function, blocks, stream, &Args { team, ..Args::default() }, &more) }.map_err(failed)
    }

    /// Waits for the kernels, and reads their findings.
    fn finish(&self) -> Result<Vec<Fault>> {
        self.stream.synchronize().map_err(failed)?;
        let (to, layout) = (self.windows.rank, &self.windows.layout);
        let lines = self.windows.own() + layout.lines_of_all().start as u64;
        let mut faults = Vec::new();
        for from in (0..layout.ranks).filter(|&from| from != to) {
            let mut found = [0u64; 3];
            let sender = (from - usize::from(from > to)) as u64;
            let at = lines + self.area * (sender + 1) - 64;
            self.context.bind_to_thread().map_err(failed)?;
            // SAFETY: reads `struct Finding`, in our own window.
            unsafe { result::memcpy_dtoh_sync(&mut found, at) }.map_err(failed)?;
            let [head, expected, got] = found;
            let (state, word) = (head as u32, (head >> 32) as u32);
            match state {
                1 => {}
                2 => faults.push(Fault { from, to, what: What::Silent { pieces: word } }),
                3 => faults.push(Fault { from, to, what: What::Wrong { word, expected, got } }),
                other => {
                    let detail = format!("rank {to} found {other} about rank {from}: the check did not run");
                    return Err(Error::invalid("DeviceComm", detail));
                }
            }
        }
        Ok(faults)
    }
}

/// Checks that each rank's writes into the others' windows arrive, flags after data. Every rank calls it before the
/// first call, and all get the same result. `in_turns`: kernels of processes that share a GPU run in time slices, and
/// none waits for another.
pub(crate) fn check(
    windows: &Windows,
    context: &Arc<CudaContext>,
    host: &Comm,
    asked: PathCheck,
    in_turns: bool,
) -> Result<Verdict> {
    if asked == PathCheck::Off || windows.layout.ranks == 1 {
        return Ok(Verdict::Sound);
    }
    let check = Check::new(windows, context, asked)?;
    host.barrier()?;
    if in_turns {
        check.launch(WRITES, LIMIT)?;
        check.stream.synchronize().map_err(failed)?;
        host.barrier()?;
        check.launch(READS, Duration::ZERO)?;
    } else {
        check.launch(WRITES | READS, LIMIT)?;
    }
    let faults = check.finish()?;
    // No rank writes into a window that another still reads. The caller synchronises once more before the first call.
    let all: Vec<Vec<Fault>> = host.exchange("DeviceComm: path", &faults)?;
    windows.clear_lines()?;
    Ok(Verdict::of(all.into_iter().flatten().collect()))
}

/// [`check`] by one thread for all ranks of a process.
pub(crate) fn check_within_process(
    ranks: &[Windows],
    contexts: &[Arc<CudaContext>],
    asked: PathCheck,
) -> Result<Verdict> {
    if ranks.len() == 1 || asked == PathCheck::Off {
        return Ok(Verdict::Sound);
    }
    let checks = ranks.iter().zip(contexts).map(|(windows, context)| Check::new(windows, context, asked));
    let checks = checks.collect::<Result<Vec<_>>>()?;
    for check in &checks {
        check.launch(WRITES | READS, LIMIT)?;
    }
    let faults = checks.iter().map(Check::finish).collect::<Result<Vec<_>>>()?;
    ranks.iter().try_for_each(Windows::clear_lines)?;
    Ok(Verdict::of(faults.concat()))
}

#[cfg(test)]
pub(crate) fn layouts() -> Vec<(String, usize)> {
    crate::kernels::mirrored!(Asked as "Check" { area, limit, parts, spoil })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::window::MAX_RANKS;
    use tinynccl_sys::Config;

    #[test]
    fn the_pattern_fits_the_smallest_window() {
        for ranks in 2..=MAX_RANKS {
            let config = Config::default().with(|c| {
                c.cuda_blocks = 2;
                c.cuda_slot = 4 << 10;
            });
            for layout in [Layout::new(ranks, 1, &config), Layout::new(ranks, 1, &Config::default())] {
                for layout in [layout, layout.without_ll128()] {
                    let rounds = (area(&layout) - 128) / 8 / 16 * 16;
                    assert!(rounds >= 16 * THREADS as usize, "{layout:?}");
                }
            }
        }
    }

    #[test]
    fn a_broken_path_names_both_gpus_and_what_came() {
        let what = What::Wrong { word: 5, expected: 0xab, got: 0xa9 };
        let verdict = Verdict::of(vec![Fault { from: 1, to: 0, what }]);
        let fault = verdict.fault(&["GPU 0, A".to_owned(), "GPU 1, B".to_owned()]).unwrap();
        for words in [
            "writes of rank 1 (GPU 1, B) into the memory of rank 0 (GPU 0, A) do not arrive",
            "byte 40 of the pattern: expected 0x00000000000000ab, got 0x00000000000000a9",
            "nvidia-smi topo",
        ] {
            assert!(fault.contains(words), "{fault}");
        }
        assert_eq!(Verdict::of(Vec::new()).fault(&[]), None);
    }

    /// NVRTC needs no GPU.
    #[test]
    fn its_kernel_compiles() {
        let mut defines = Layout::new(3, 1, &Config::default()).defines();
        defines.push(format!("-DTHREADS={THREADS}"));
        match compile("path_check.cu", SOURCE, &defines, (9, 0)) {
            Ok(_) => {}
            Err(error @ Error::Unsupported { .. }) => eprintln!("SKIPPED its_kernel_compiles: {error}"),
            Err(error) => panic!("{error}"),
        }
    }
}
