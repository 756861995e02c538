//! Detection from the environment: the launcher that started this process, its rank, and the rendezvous of the ranks.
//!
//! Pure: variables come through a lookup, so that every launcher can be tested without it.
//!
//! | launcher | rank, size, local rank | rendezvous |
//! |---|---|---|
//! | ours | `RANK` `WORLD_SIZE` `LOCAL_RANK` | `TINYNCCL_UNIQUE_ID` |
//! | torchrun | `RANK` `WORLD_SIZE` `LOCAL_RANK` | `MASTER_ADDR:MASTER_PORT`, or the next port when the agent holds that one |
//! | Open MPI | `OMPI_COMM_WORLD_{RANK,SIZE,LOCAL_RANK}` | `MASTER_ADDR:MASTER_PORT` if set; on one host an abstract Unix socket |
//! | MPICH, Intel MPI (Hydra) | `PMI_RANK` `PMI_SIZE` `MPI_LOCALRANKID` | the same |
//! | Slurm (srun) | `SLURM_PROCID` `SLURM_STEP_NUM_TASKS` `SLURM_LOCALID` | the same if set; else the step's first host, port 61440 + (job + step) mod 4096 |
//!
//! Jobs are distinguished by torchrun's run id, or by Slurm's job and step, where there are such.
//!
//! Launchers nest, and the inner one's ranks have the outer one's variables, too. The order above is that from the
//! inside to the outside: torchrun and `mpirun` are started in a step of Slurm's, once per host or in a shell (`srun
//! --pty`), and our launcher anywhere. The numbers show which cases do not fit that order:
//! - Where `PMI_RANK` and `PMI_SIZE` are Slurm's numbers, `srun --mpi=pmi2` has set them, and not a Hydra inside the
//!   step. (Hydra sets the local rank, too.)
//! - Of two MPIs one that started a single process started the other.
//! - `RANK=0` and `WORLD_SIZE=1` without a rendezvous do not count, where another launcher started several ranks.
//! - A step of one task is a shell to start ranks in, not a rank of others: it is a world of one only on request.

mod source;

pub(crate) use source::{Source, is_loopback_host};

use source::{is_loopback, source};
use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::config::Environment;

/// Slurm's pseudo steps (batch script, interactive shell, extern) have ids from here on: their processes are not ranks.
const SLURM_PSEUDO_STEPS: usize = 0xffff_fff0;

/// Torchrun sets it.
const RUN_ID: &str = "TORCHELASTIC_RUN_ID";
/// The variables by which torchrun's ranks know that it has started them. Other launchers' ranks must not have them.
pub const OF_TORCHRUN: [&str; 3] = [RUN_ID, "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE"];

/// Source of variables.
pub(crate) type Lookup<'a> = &'a dyn Fn(&str) -> Option<String>;

/// The launcher that started the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Launcher {
    Tinynccl,
    Torchrun,
    OpenMpi,
    Hydra,
    Slurm,
}

impl Launcher {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Launcher::Tinynccl => "tinynccl",
            Launcher::Torchrun => "torchrun",
            Launcher::OpenMpi => "Open MPI",
            Launcher::Hydra => "Hydra (MPICH, Intel MPI)",
            Launcher::Slurm => "Slurm",
        }
    }

    /// The variable that holds the rank.
    pub(crate) const fn rank_variable(self) -> &'static str {
        match self {
            Launcher::Tinynccl | Launcher::Torchrun => "RANK",
            Launcher::OpenMpi => "OMPI_COMM_WORLD_RANK",
            Launcher::Hydra => "PMI_RANK",
            Launcher::Slurm => "SLURM_PROCID",
        }
    }
}

/// Result of the detection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Plan {
    pub(crate) launcher: Launcher,
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
    pub(crate) local_rank: usize,
    pub(crate) source: Source,
}

/// True when some launcher started this process as one of its ranks:
/// [`rendezvous_from_env`](crate::bootstrap::rendezvous_from_env) will succeed, or say what is wrong with the
/// environment.
pub fn is_rank() -> bool {
    let environment = Environment::default();
    started_as_rank(&|name| environment.get(name))
}

pub(crate) fn started_as_rank(lookup: Lookup<'_>) -> bool {
    ["TINYNCCL_UNIQUE_ID", "RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_RANK"].iter().any(|n| lookup(n).is_some())
        || (slurm_step(lookup).is_some() && size(lookup, slurm_size(lookup)) != Some(1))
}

/// The variable that holds the number of a step's tasks.
fn slurm_size(lookup: Lookup<'_>) -> &'static str {
    if lookup("SLURM_STEP_NUM_TASKS").is_some() { "SLURM_STEP_NUM_TASKS" } else { "SLURM_NTASKS" }
}

/// The number in a variable, if it is one.
fn size(lookup: Lookup<'_>, name: &str) -> Option<usize> {
    number(lookup, name).ok().flatten()
}

/// The step's number, when this process is a task of an `srun` (and not the batch script or an interactive shell).
fn slurm_step(lookup: Lookup<'_>) -> Option<usize> {
    lookup("SLURM_PROCID")?;
    let step: usize = lookup("SLURM_STEP_ID").or_else(|| lookup("SLURM_STEPID"))?.trim().parse().ok()?;
    (step < SLURM_PSEUDO_STEPS).then_some(step)
}

/// Reads the environment.
pub(crate) fn plan(lookup: Lookup<'_>) -> Result<Plan> {
    let ranks = ranks(lookup)?;
    if ranks.world_size == 0 || ranks.world_size > u32::MAX as usize {
        let detail = "a world has at least one rank, and fewer than 2^32";
        return Err(Error::config(ranks.size_variable, ranks.world_size, detail));
    }
    if ranks.rank >= ranks.world_size {
        let detail =
            format!("out of range: {}={} allows 0 to {}", ranks.size_variable, ranks.world_size, ranks.world_size - 1);
        return Err(Error::config(ranks.launcher.rank_variable(), ranks.rank, detail));
    }
    let source = source(lookup, &ranks)?;
    let local_rank = match ranks.local_rank {
        Some(local) => local,
        None if ranks.one_host || is_loopback(&source) => ranks.rank,
        None => {
            log::warn!("rank {}: no variable gives the local rank (LOCAL_RANK is missing); taking 0", ranks.rank);
            0
        }
    };
    Ok(Plan { launcher: ranks.launcher, rank: ranks.rank, world_size: ranks.world_size, local_rank, source })
}

struct Ranks {
    launcher: Launcher,
    rank: usize,
    world_size: usize,
    size_variable: &'static str,
    local_rank: Option<usize>,
    one_host: bool,
}

fn ranks(lookup: Lookup<'_>) -> Result<Ranks> {
    let here = |name: &str| lookup(name).is_some();
    let several = |name: &str| size(lookup, name).is_some_and(|size| size > 1);
    let set = |launcher: Launcher, size_variable: &'static str, local: &str, local_size: &str| -> Result<Ranks> {
        let rank = required(lookup, launcher.rank_variable(), size_variable)?;
        let world_size = required(lookup, size_variable, launcher.rank_variable())?;
        // An MPI that does not set the number of ranks here is taken for one of this host: other variables do not help
        // where it is not, and rank 0 names the missing ranks.
        let unknown = matches!(launcher, Launcher::OpenMpi | Launcher::Hydra) && !several("SLURM_JOB_NUM_NODES");
        let one_host = world_size == 1 || number(lookup, local_size)?.map_or(unknown, |here| here == world_size);
        Ok(Ranks { launcher, rank, world_size, size_variable, local_rank: number(lookup, local)?, one_host })
    };
    let step = slurm_step(lookup);
    let pmi = (here("PMI_RANK") || here("PMI_SIZE")) && !(step.is_some() && is_sruns_pmi(lookup));
    let open_mpi = here("OMPI_COMM_WORLD_RANK") || here("OMPI_COMM_WORLD_SIZE");
    let others = (open_mpi && several("OMPI_COMM_WORLD_SIZE"))
        || (pmi && several("PMI_SIZE"))
        || (step.is_some() && several(slurm_size(lookup)));
    let nowhere = ["TINYNCCL_UNIQUE_ID", "MASTER_ADDR", RUN_ID].iter().all(|name| !here(name));
    let left_over = others && nowhere && size(lookup, "WORLD_SIZE") == Some(1);
    if here("RANK") && !left_over {
        let launcher = if is_ours(lookup) { Launcher::Tinynccl } else { Launcher::Torchrun };
        return set(launcher, "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE");
    }
    let started_hydra = pmi && several("PMI_SIZE") && size(lookup, "OMPI_COMM_WORLD_SIZE") == Some(1);
    if open_mpi && !started_hydra {
        let local_size = "OMPI_COMM_WORLD_LOCAL_SIZE";
        return set(Launcher::OpenMpi, "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", local_size);
    }
    if pmi {
        return set(Launcher::Hydra, "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS");
    }
    if step.is_some() {
        let mut ranks = set(Launcher::Slurm, slurm_size(lookup), "SLURM_LOCALID", "")?;
        ranks.one_host |= number(lookup, "SLURM_STEP_NUM_NODES")? == Some(1);
        return Ok(ranks);
    }
    // None, or half a set: the error names the variables that are missing and those that are there.
    let found = ["WORLD_SIZE", "TINYNCCL_UNIQUE_ID"].into_iter().find(|n| here(n));
    let because = match found {
        Some(name) => format!("missing, but {name} is set"),
        None => "missing, and no other launcher's variables are set".to_owned(),
    };
    let detail = format!(
        "{because}: start the ranks with this program's own launcher, torchrun, mpirun or srun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
    );
    Err(Error::config("RANK", "", detail))
}

/// Returns true if `srun --mpi=pmi2` has set the PMI variables. Then only Slurm's own show which ranks are on this
/// host.
fn is_sruns_pmi(lookup: Lookup<'_>) -> bool {
    let same = |one, other| size(lookup, one).is_some_and(|n| size(lookup, other) == Some(n));
    lookup("MPI_LOCALRANKID").is_none() && same("PMI_RANK", "SLURM_PROCID") && same("PMI_SIZE", slurm_size(lookup))
}

/// Returns true if `RANK` is our launcher's. It takes torchrun's variables from its ranks: both are there where one of
/// its ranks started torchrun.
fn is_ours(lookup: Lookup<'_>) -> bool {
    lookup("TINYNCCL_UNIQUE_ID").is_some() && lookup(RUN_ID).is_none()
}

fn number(lookup: Lookup<'_>, name: &str) -> Result<Option<usize>> {
    match lookup(name) {
        None => Ok(None),
        Some(text) => match text.trim().parse() {
            Ok(n) => Ok(Some(n)),
            Err(_) => Err(Error::config(name, text, "expected a whole number")),
        },
    }
}

fn required(lookup: Lookup<'_>, name: &str, other: &str) -> Result<usize> {
    number(lookup, name)?
        .ok_or_else(|| Error::config(name, "", format!("missing, but {other} is set: a launcher sets both")))
}

#[cfg(test)]
mod tests;
