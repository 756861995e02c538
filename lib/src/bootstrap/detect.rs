//! What the environment says: which launcher started this process, which rank it is, and where the ranks meet.
//!
//! Pure: variables come through a lookup, so that every launcher can be tested without it.
//!
//! | launcher | rank, size, local rank | meeting place |
//! |---|---|---|
//! | ours | `RANK` `WORLD_SIZE` `LOCAL_RANK` | `TINYNCCL_UNIQUE_ID` |
//! | torchrun | `RANK` `WORLD_SIZE` `LOCAL_RANK` | `MASTER_ADDR:MASTER_PORT`, or the next port when the agent holds that one |
//! | Open MPI | `OMPI_COMM_WORLD_{RANK,SIZE,LOCAL_RANK}` | `MASTER_ADDR:MASTER_PORT` if set; on one host an abstract Unix socket |
//! | MPICH, Intel MPI (Hydra) | `PMI_RANK` `PMI_SIZE` `MPI_LOCALRANKID` | the same |
//! | Slurm (srun) | `SLURM_PROCID` `SLURM_STEP_NUM_TASKS` `SLURM_LOCALID` | the same if set; else the step's first host, port 61440 + (job + step) mod 4096 |
//!
//! The token, which keeps strangers out, comes from `TINYNCCL_TOKEN` if set, from torchrun's run id and restart count, or from
//! Slurm's job and step; else it is a fixed, public value.

use sha2::{Digest, Sha256};

use super::UniqueId;
use crate::error::{Error, Result};

/// Slurm's pseudo steps (batch script, interactive shell, extern) have ids from here on: their processes are not ranks.
const SLURM_PSEUDO_STEPS: usize = 0xffff_fff0;

/// Source of variables.
pub(crate) type Lookup<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Who started the ranks.
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

/// Where the ranks meet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Meeting {
    /// A store runs already.
    Id(UniqueId),
    /// Rank 0 runs the store on this port of the first of these hosts that is known. Each with the variable that named it.
    Address { hosts: Vec<(&'static str, String)>, port: u16, port_source: String, token: [u8; 16] },
    /// All ranks are on this host, children of one launcher.
    ThisHost,
    /// There is only one rank.
    Alone,
}

/// All that the environment says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Plan {
    pub(crate) launcher: Launcher,
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
    pub(crate) local_rank: usize,
    pub(crate) meeting: Meeting,
}

/// True when some launcher started this process as one of its ranks: [`rendezvous_from_env`](super::rendezvous_from_env)
/// will succeed, or say what is wrong with the environment.
pub fn is_rank() -> bool {
    started_as_rank(&environment)
}

pub(crate) fn environment(name: &str) -> Option<String> {
    std::env::var_os(name).map(|v| v.to_string_lossy().into_owned())
}

pub(crate) fn started_as_rank(lookup: Lookup<'_>) -> bool {
    ["TINYNCCL_UNIQUE_ID", "RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_RANK"].iter().any(|n| lookup(n).is_some())
        || slurm_step(lookup).is_some()
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
        return Err(wrong(
            ranks.size_variable,
            ranks.world_size.to_string(),
            "a world has at least one rank, and fewer than 2^32",
        ));
    }
    if ranks.rank >= ranks.world_size {
        let detail =
            format!("out of range: {}={} allows 0 to {}", ranks.size_variable, ranks.world_size, ranks.world_size - 1);
        return Err(wrong(ranks.launcher.rank_variable(), ranks.rank.to_string(), &detail));
    }
    let meeting = meeting(lookup, &ranks)?;
    let local_rank = match ranks.local_rank {
        Some(local) => local,
        None if ranks.one_host || is_loopback(&meeting) => ranks.rank,
        None => {
            log::warn!("rank {}: no variable gives the local rank (LOCAL_RANK is missing); taking 0", ranks.rank);
            0
        }
    };
    Ok(Plan { launcher: ranks.launcher, rank: ranks.rank, world_size: ranks.world_size, local_rank, meeting })
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
    let set = |launcher: Launcher, size_variable: &'static str, local: &str, local_size: &str| -> Result<Ranks> {
        let rank = required(lookup, launcher.rank_variable(), size_variable)?;
        let world_size = required(lookup, size_variable, launcher.rank_variable())?;
        let one_host = world_size == 1 || number(lookup, local_size)? == Some(world_size);
        Ok(Ranks { launcher, rank, world_size, size_variable, local_rank: number(lookup, local)?, one_host })
    };
    if here("RANK") {
        let launcher = if here("TINYNCCL_UNIQUE_ID") { Launcher::Tinynccl } else { Launcher::Torchrun };
        return set(launcher, "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE");
    }
    if here("OMPI_COMM_WORLD_RANK") || here("OMPI_COMM_WORLD_SIZE") {
        let local_size = "OMPI_COMM_WORLD_LOCAL_SIZE";
        return set(Launcher::OpenMpi, "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", local_size);
    }
    let step = slurm_step(lookup);
    // srun --mpi=pmi2 sets PMI_RANK too, but only Slurm's own variables tell where the ranks are.
    let srun_pmi = step.is_some() && lookup("PMI_RANK") == lookup("SLURM_PROCID");
    if (here("PMI_RANK") || here("PMI_SIZE")) && !srun_pmi {
        return set(Launcher::Hydra, "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS");
    }
    if step.is_some() {
        let size = if here("SLURM_STEP_NUM_TASKS") { "SLURM_STEP_NUM_TASKS" } else { "SLURM_NTASKS" };
        let mut ranks = set(Launcher::Slurm, size, "SLURM_LOCALID", "")?;
        ranks.one_host |= number(lookup, "SLURM_STEP_NUM_NODES")? == Some(1);
        return Ok(ranks);
    }
    // None, or half a set: the error says what is missing and what is there.
    let found = ["WORLD_SIZE", "TINYNCCL_UNIQUE_ID"].into_iter().find(|n| here(n));
    let because = match found {
        Some(name) => format!("missing, but {name} is set"),
        None => "missing, and no other launcher's variables are set".to_owned(),
    };
    let detail = format!(
        "{because}: start the ranks with this program's own launcher, torchrun, mpirun or srun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
    );
    Err(wrong("RANK", String::new(), &detail))
}

fn meeting(lookup: Lookup<'_>, ranks: &Ranks) -> Result<Meeting> {
    if let Some(text) = lookup("TINYNCCL_UNIQUE_ID") {
        let id = text.parse::<UniqueId>().map_err(|e| match e {
            Error::Config { value, detail, .. } => {
                Error::Config { name: "TINYNCCL_UNIQUE_ID".to_owned(), value, detail }
            }
            other => other,
        })?;
        return Ok(Meeting::Id(id));
    }
    let missing = |name: &str, other: &str| {
        wrong(
            name,
            String::new(),
            &format!(
                "missing, but {other} is set: set both, MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port there"
            ),
        )
    };
    match (lookup("MASTER_ADDR"), lookup("MASTER_PORT")) {
        (Some(host), Some(port)) => return master(lookup, ranks, host, &port),
        (Some(_), None) => return Err(missing("MASTER_PORT", "MASTER_ADDR")),
        (None, Some(_)) => return Err(missing("MASTER_ADDR", "MASTER_PORT")),
        (None, None) => {}
    }
    match ranks.launcher {
        Launcher::Tinynccl | Launcher::Torchrun if ranks.world_size > 1 => Err(missing("MASTER_ADDR", "RANK")),
        Launcher::Slurm if ranks.world_size > 1 => slurm(lookup),
        _ if ranks.world_size == 1 => Ok(Meeting::Alone),
        _ if ranks.one_host => Ok(Meeting::ThisHost),
        launcher => {
            let detail = format!(
                "missing: {} started ranks on several hosts and says nowhere to meet; set MASTER_ADDR to the host of rank 0 and \
                 MASTER_PORT to a free port there, for all ranks (mpirun -x MASTER_ADDR=... -x MASTER_PORT=..., mpiexec -genv)",
                launcher.name()
            );
            Err(wrong("MASTER_ADDR", String::new(), &detail))
        }
    }
}

fn master(lookup: Lookup<'_>, ranks: &Ranks, host: String, port: &str) -> Result<Meeting> {
    let host = host.trim().to_owned();
    if host.is_empty() {
        return Err(wrong("MASTER_ADDR", host, "expected the host name or address of rank 0"));
    }
    let expected = || wrong("MASTER_PORT", port.to_owned(), "expected a port, 1 to 65535");
    let mut number = port.trim().parse::<u16>().ok().filter(|&p| p > 0).ok_or_else(expected)?;
    let mut port_source = "MASTER_PORT".to_owned();
    if lookup("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|v| v.trim().eq_ignore_ascii_case("true")) {
        number = number.checked_add(1).ok_or_else(|| {
            wrong(
                "MASTER_PORT",
                port.to_owned(),
                "torchrun's agent holds it and there is no next port: choose a lower one",
            )
        })?;
        port_source = format!("MASTER_PORT + 1, since torchrun's agent holds {port}");
    }
    let token = token(lookup, ranks.launcher);
    Ok(Meeting::Address { hosts: vec![("MASTER_ADDR", host)], port: number, port_source, token })
}

fn slurm(lookup: Lookup<'_>) -> Result<Meeting> {
    let job = required(lookup, "SLURM_JOB_ID", "SLURM_PROCID")?;
    let step = slurm_step(lookup).unwrap_or(0);
    let mut hosts = Vec::new();
    for name in ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"] {
        // Task 0 runs on the first node of the step.
        if let Some(first) = lookup(name).and_then(|list| first_host(&list)) {
            hosts.push((name, first));
            break;
        }
    }
    let launch_node = lookup("SLURM_LAUNCH_NODE_IPADDR").map(|ip| ip.trim().to_owned()).filter(|ip| !ip.is_empty());
    hosts.extend(launch_node.map(|ip| ("SLURM_LAUNCH_NODE_IPADDR", ip)));
    if hosts.is_empty() {
        let detail = "missing, and SLURM_LAUNCH_NODE_IPADDR too: set MASTER_ADDR and MASTER_PORT for all ranks";
        return Err(wrong("SLURM_STEP_NODELIST", String::new(), detail));
    }
    // Above the ports that Linux gives to outgoing connections; two steps of a job differ.
    let port = 61440 + (job.wrapping_add(step) % 4096) as u16;
    let port_source = format!("61440 + (job {job} + step {step}) mod 4096");
    Ok(Meeting::Address { hosts, port, port_source, token: token(lookup, Launcher::Slurm) })
}

/// First host of a Slurm node list: `node[003-005,9],gpu1` gives `node003`.
fn first_host(list: &str) -> Option<String> {
    let mut host = String::new();
    let mut rest = list.trim();
    while let Some(at) = rest.find(['[', ',']) {
        let (text, tail) = rest.split_at(at);
        host.push_str(text);
        if tail.starts_with(',') {
            rest = "";
            break;
        }
        let (range, after) = tail.strip_prefix('[')?.split_once(']')?;
        host.push_str(range.split(['-', ',']).next()?);
        rest = after;
    }
    host.push_str(rest);
    (!host.is_empty()).then_some(host)
}

/// The job's token, from what all its ranks and nobody else has.
fn token(lookup: Lookup<'_>, launcher: Launcher) -> [u8; 16] {
    let get = |name: &str| lookup(name).unwrap_or_default();
    let parts = if let Some(secret) = lookup("TINYNCCL_TOKEN") {
        ["secret".to_owned(), secret, String::new()]
    } else if lookup("TORCHELASTIC_RUN_ID").is_some() {
        ["torchelastic".to_owned(), get("TORCHELASTIC_RUN_ID"), get("TORCHELASTIC_RESTART_COUNT")]
    } else if launcher == Launcher::Slurm {
        let step = slurm_step(lookup).map(|s| s.to_string()).unwrap_or_default();
        ["slurm".to_owned(), get("SLURM_JOB_ID"), step]
    } else {
        ["public".to_owned(), String::new(), String::new()]
    };
    let mut hash = Sha256::new_with_prefix(b"tinynccl token");
    for part in parts {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part.as_bytes());
    }
    let digest: [u8; 32] = hash.finalize().into();
    let (token, _) = digest.split_first_chunk::<16>().unwrap_or((&[0; 16], &[]));
    *token
}

/// True for names and addresses that reach only this host.
pub(crate) fn is_loopback_host(host: &str) -> bool {
    host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

fn is_loopback(meeting: &Meeting) -> bool {
    match meeting {
        Meeting::Id(id) => id.addresses().iter().all(|a| a.ip().is_loopback()),
        Meeting::Address { hosts, .. } => hosts.iter().all(|(_, host)| is_loopback_host(host)),
        Meeting::ThisHost | Meeting::Alone => true,
    }
}

fn number(lookup: Lookup<'_>, name: &str) -> Result<Option<usize>> {
    match lookup(name) {
        None => Ok(None),
        Some(text) => match text.trim().parse() {
            Ok(n) => Ok(Some(n)),
            Err(_) => Err(wrong(name, text, "expected a whole number")),
        },
    }
}

fn required(lookup: Lookup<'_>, name: &str, other: &str) -> Result<usize> {
    number(lookup, name)?
        .ok_or_else(|| wrong(name, String::new(), &format!("missing, but {other} is set: a launcher sets both")))
}

fn wrong(name: &str, value: String, detail: &str) -> Error {
    Error::Config { name: name.to_owned(), value, detail: detail.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    fn env(text: &str) -> Result<Plan> {
        let map: HashMap<&str, &str> = text.split_whitespace().map(|kv| kv.split_once('=').unwrap()).collect();
        plan(&|name| map.get(name).map(|v| (*v).to_owned()))
    }

    fn is_rank(text: &str) -> bool {
        let map: HashMap<&str, &str> = text.split_whitespace().map(|kv| kv.split_once('=').unwrap()).collect();
        started_as_rank(&|name| map.get(name).map(|v| (*v).to_owned()))
    }

    fn numbers(text: &str) -> (&'static str, usize, usize, usize) {
        let plan = env(text).unwrap();
        (plan.launcher.name(), plan.rank, plan.world_size, plan.local_rank)
    }

    const MASTER: &str = "MASTER_ADDR=10.0.0.1 MASTER_PORT=29500";
    const ID: &str = "TINYNCCL_UNIQUE_ID=tinynccl-1-00000000000000000000000000000007@127.0.0.1:99";
    const SRUN: &str = "SLURM_PROCID=5 SLURM_STEP_NUM_TASKS=8 SLURM_LOCALID=1 SLURM_STEP_ID=2 SLURM_JOB_ID=70000 SLURM_STEP_NODELIST=n[07-08]";

    #[test]
    fn each_launcher_is_read() {
        for (text, expected) in [
            (format!("{ID} RANK=1 WORLD_SIZE=4 LOCAL_RANK=1"), ("tinynccl", 1, 4, 1)),
            (format!("{MASTER} RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4"), ("torchrun", 5, 8, 1)),
            ("OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=3 OMPI_COMM_WORLD_LOCAL_SIZE=4".into(),
                ("Open MPI", 3, 4, 3)),
            ("PMI_RANK=3 PMI_SIZE=4 MPI_LOCALRANKID=3 MPI_LOCALNRANKS=4".into(), ("Hydra (MPICH, Intel MPI)", 3, 4, 3)),
            (SRUN.into(), ("Slurm", 5, 8, 1)),
            // srun --mpi=pmi2
            (format!("{SRUN} PMI_RANK=5 PMI_SIZE=8"), ("Slurm", 5, 8, 1)),
            // mpirun inside an allocation: Slurm's variables are those of the proxy.
            (format!("{SRUN} PMI_RANK=6 PMI_SIZE=8 MPI_LOCALRANKID=2 MPI_LOCALNRANKS=8"), ("Hydra (MPICH, Intel MPI)", 6, 8, 2)),
            // A batch script that sets torch's variables for srun, but for the rank.
            (format!("{SRUN} {MASTER} WORLD_SIZE=8"), ("Slurm", 5, 8, 1)),
            // By hand on one host.
            ("MASTER_ADDR=localhost MASTER_PORT=1 RANK=2 WORLD_SIZE=3".into(), ("torchrun", 2, 3, 2)),
        ] {
            assert_eq!(numbers(&text), expected, "{text}");
            assert!(is_rank(&text), "{text}");
        }
    }

    #[test]
    fn ours_goes_before_torchrun_before_mpi_before_slurm() {
        let mpi = "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=2 PMI_RANK=0 PMI_SIZE=3";
        assert_eq!(numbers(&format!("{SRUN} {mpi} {MASTER} RANK=1 WORLD_SIZE=9")).0, "torchrun");
        assert_eq!(numbers(&format!("{SRUN} {mpi} {MASTER} {ID} RANK=1 WORLD_SIZE=9")).0, "tinynccl");
        assert_eq!(numbers(&format!("{SRUN} {mpi}")).0, "Open MPI");
    }

    #[test]
    fn meeting_places() {
        let one_host = "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=2";
        assert_eq!(env(one_host).unwrap().meeting, Meeting::ThisHost);
        assert_eq!(env("PMI_RANK=0 PMI_SIZE=2 MPI_LOCALNRANKS=2").unwrap().meeting, Meeting::ThisHost);
        assert_eq!(env("PMI_RANK=0 PMI_SIZE=1").unwrap().meeting, Meeting::Alone);
        assert_eq!(env("RANK=0 WORLD_SIZE=1").unwrap().meeting, Meeting::Alone);
        assert!(matches!(env(&format!("{ID} {one_host}")).unwrap().meeting, Meeting::Id(_)));
        let address = |text: &str| match env(text).unwrap().meeting {
            Meeting::Address { hosts, port, .. } => (hosts, port),
            other => panic!("{other:?}"),
        };
        let master = vec![("MASTER_ADDR", "10.0.0.1".to_owned())];
        assert_eq!(address(&format!("{MASTER} {one_host}")), (master.clone(), 29500));
        assert_eq!(address(&format!("{MASTER} RANK=0 WORLD_SIZE=2")), (master.clone(), 29500));
        assert_eq!(address(&format!("{MASTER} RANK=0 WORLD_SIZE=2 TORCHELASTIC_USE_AGENT_STORE=False")).1, 29500);
        assert_eq!(address(&format!("{MASTER} RANK=0 WORLD_SIZE=2 TORCHELASTIC_USE_AGENT_STORE=True")).1, 29501);
        let (hosts, port) = address(&format!("{SRUN} SLURM_LAUNCH_NODE_IPADDR=10.9.9.9"));
        assert_eq!(hosts[0], ("SLURM_STEP_NODELIST", "n07".to_owned()));
        assert_eq!(hosts[1].1, "10.9.9.9");
        assert_eq!(port, 61440 + (70002 % 4096) as u16);
    }

    #[test]
    fn tokens_differ_between_jobs_only() {
        let token = |text: &str| match env(text).unwrap().meeting {
            Meeting::Address { token, .. } => token,
            other => panic!("{other:?}"),
        };
        let by_hand = format!("{MASTER} RANK=0 WORLD_SIZE=2");
        let same = format!("{MASTER} RANK=1 WORLD_SIZE=2");
        assert_eq!(token(&by_hand), token(&same));
        let all = [
            by_hand.clone(),
            format!("{by_hand} TINYNCCL_TOKEN=a"),
            format!("{by_hand} TINYNCCL_TOKEN=b"),
            format!("{by_hand} TORCHELASTIC_RUN_ID=a"),
            format!("{by_hand} TORCHELASTIC_RUN_ID=a TORCHELASTIC_RESTART_COUNT=1"),
            SRUN.to_owned(),
            SRUN.replace("STEP_ID=2", "STEP_ID=3"),
        ];
        let tokens: std::collections::HashSet<_> = all.iter().map(|t| token(t)).collect();
        assert_eq!(tokens.len(), all.len());
    }

    #[test]
    fn what_is_wrong_is_named() {
        let id = format!("{ID} RANK=0");
        for (text, words) in [
            ("", vec!["RANK=\"\"", "missing", "torchrun, mpirun or srun"]),
            ("WORLD_SIZE=2", vec!["RANK=\"\"", "WORLD_SIZE is set"]),
            ("RANK=1", vec!["WORLD_SIZE=\"\"", "RANK is set"]),
            (id.as_str(), vec!["WORLD_SIZE=\"\"", "missing"]),
            ("RANK=one WORLD_SIZE=2", vec!["RANK=\"one\"", "whole number"]),
            ("RANK=-1 WORLD_SIZE=2", vec!["RANK=\"-1\"", "whole number"]),
            ("SLURM_PROCID=0 SLURM_STEP_ID=0 SLURM_NTASKS=2 SLURM_JOB_ID=1 SLURM_LAUNCH_NODE_IPADDR=", vec!["too"]),
            (
                "RANK=2 WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=1",
                vec!["RANK=\"2\"", "out of range", "WORLD_SIZE=2 allows 0 to 1"],
            ),
            ("RANK=0 WORLD_SIZE=0", vec!["WORLD_SIZE=\"0\"", "at least one"]),
            ("RANK=0 WORLD_SIZE=2", vec!["MASTER_ADDR=\"\"", "missing"]),
            ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=h", vec!["MASTER_PORT=\"\"", "MASTER_ADDR is set"]),
            ("RANK=0 WORLD_SIZE=2 MASTER_PORT=1", vec!["MASTER_ADDR=\"\"", "MASTER_PORT is set"]),
            ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=http", vec!["MASTER_PORT=\"http\"", "1 to 65535"]),
            ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=0", vec!["MASTER_PORT=\"0\"", "1 to 65535"]),
            ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=70000", vec!["MASTER_PORT=\"70000\"", "1 to 65535"]),
            (
                "RANK=0 WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=65535 TORCHELASTIC_USE_AGENT_STORE=True",
                vec!["MASTER_PORT=\"65535\"", "no next port"],
            ),
            ("RANK=0 WORLD_SIZE=2 TINYNCCL_UNIQUE_ID=x", vec!["TINYNCCL_UNIQUE_ID=\"x\"", "expected tinynccl-1-"]),
            ("RANK=0 WORLD_SIZE=2 LOCAL_RANK=x MASTER_ADDR=h MASTER_PORT=1", vec!["LOCAL_RANK=\"x\"", "whole number"]),
            ("OMPI_COMM_WORLD_RANK=0", vec!["OMPI_COMM_WORLD_SIZE=\"\"", "OMPI_COMM_WORLD_RANK is set"]),
            ("OMPI_COMM_WORLD_SIZE=2", vec!["OMPI_COMM_WORLD_RANK=\"\"", "OMPI_COMM_WORLD_SIZE is set"]),
            (
                "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_SIZE=2",
                vec!["MASTER_ADDR=\"\"", "Open MPI", "-x"],
            ),
            ("PMI_RANK=0", vec!["PMI_SIZE=\"\"", "PMI_RANK is set"]),
            ("PMI_RANK=4 PMI_SIZE=4", vec!["PMI_RANK=\"4\"", "out of range"]),
            ("SLURM_PROCID=0 SLURM_STEP_ID=0 SLURM_JOB_ID=3", vec!["SLURM_NTASKS=\"\"", "SLURM_PROCID is set"]),
            (
                "SLURM_PROCID=0 SLURM_STEP_ID=0 SLURM_NTASKS=2 SLURM_JOB_ID=3",
                vec!["SLURM_STEP_NODELIST=\"\"", "MASTER_ADDR"],
            ),
        ] {
            let e = env(text).unwrap_err().to_string();
            for word in words {
                assert!(e.contains(word), "{text}: {word:?} not in: {e}");
            }
        }
    }

    #[test]
    fn a_batch_script_or_an_interactive_step_is_not_a_rank() {
        assert!(!is_rank(""));
        assert!(!is_rank("SLURM_PROCID=0 SLURM_NTASKS=4"));
        assert!(!is_rank("SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_STEP_ID=4294967291"));
        assert!(is_rank("WORLD_SIZE=2"), "half a set is an error to be told, not a reason to launch");
    }

    #[test]
    fn first_hosts_of_node_lists() {
        for (list, first) in [
            ("n1", Some("n1")),
            ("n1,n2", Some("n1")),
            ("node[003-005,9],gpu1", Some("node003")),
            ("rack[0-1]n[2,5].x", Some("rack0n2.x")),
            ("a[7]b,c", Some("a7b")),
            ("", None),
            ("n[1", None),
        ] {
            assert_eq!(first_host(list).as_deref(), first, "{list}");
        }
    }
}
