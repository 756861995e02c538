//! The graph of this machine, or of a job.

use anyhow::{Context as _, Result, bail};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use tinynccl::bootstrap::is_rank;
use tinynccl::topology::machine::Machine;
use tinynccl::{Comm, Config};
use tinynccl_plan::simulate::machine::description::Description;

/// Threads that stand for cores, at most.
const MOST: usize = 64;

/// The graph, with a remark; nothing for ranks that do not print.
///
/// # Errors
/// The ranks do not find each other, or a rank is lost.
pub(super) fn discovered() -> Result<Option<(Description, Option<String>)>> {
    let config = Config::from_env()?.with(|c| c.topology = None);
    let description = if is_rank() {
        let comm = Comm::from_env_with(config)?;
        let description = comm.discover()?;
        let prints = comm.rank() == 0;
        comm.close()?;
        if !prints {
            return Ok(None);
        }
        description
    } else {
        alone(&config)?
    };
    Ok(Some((description, remark())))
}

/// This machine, with a thread on each core that this process may use.
fn alone(config: &Config) -> Result<Description> {
    let allowed = sched_getaffinity(None).context("the cores of this process")?;
    let cores: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|&core| allowed.is_set(core)).take(MOST).collect();
    let comms = Comm::threads(cores.len().max(1), config.clone())?;
    std::thread::scope(|scope| {
        let ranks = comms.into_iter().enumerate().map(|(rank, comm)| {
            let core = cores.get(rank).copied();
            scope.spawn(move || {
                let mut own = CpuSet::new();
                core.into_iter().for_each(|core| own.set(core));
                if core.is_some() {
                    // Without, a rank counts for all NUMA nodes.
                    let _ = sched_setaffinity(None, &own);
                }
                let description = comm.discover()?;
                comm.close().map(|()| description)
            })
        });
        let ranks: Vec<_> = ranks.collect();
        let mut all = Vec::new();
        for rank in ranks {
            match rank.join() {
                Ok(description) => all.push(description?),
                Err(_) => bail!("a rank panicked"),
            }
        }
        all.into_iter().next().context("no rank")
    })
}

/// Reason why there are no GPUs, or no NVLinks of them.
fn remark() -> Option<String> {
    let machine = Machine::here();
    let why = machine.no_nvml?;
    Some(match machine.gpus.len() {
        0 => format!("GPUs: none ({why})"),
        count => format!("GPUs: {count} by sysfs; their NVLinks are not known ({why})"),
    })
}
