//! The rendezvous of the ranks, and the text that distinguishes their job from others.

use super::{Launcher, Lookup, RUN_ID, Ranks, required, slurm_step};
use crate::bootstrap::UniqueId;
use tinynccl_plan::error::{Error, Result};

/// Rendezvous of the ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Source {
    /// A store runs already.
    Id(UniqueId),
    /// Rank 0 runs the store on this port of the first of these hosts that is known. Each with the variable that named
    /// it.
    Address { hosts: Vec<(&'static str, String)>, port: u16, port_source: String, job: String },
    /// All ranks are on this host, children of one launcher.
    ThisHost,
    /// There is only one rank.
    Alone,
}

pub(super) fn source(lookup: Lookup<'_>, ranks: &Ranks) -> Result<Source> {
    // Where one of our launcher's ranks has started torchrun, the variable is that rank's.
    let id = lookup("TINYNCCL_UNIQUE_ID").filter(|_| ranks.launcher != Launcher::Torchrun);
    if let Some(text) = id {
        let id = text.parse::<UniqueId>().map_err(|e| match e {
            Error::Config { value, detail, .. } => Error::config("TINYNCCL_UNIQUE_ID", value, detail),
            other => other,
        })?;
        return Ok(Source::Id(id));
    }
    let missing = |name: &str, other: &str| {
        let both = "set both, MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port there";
        Error::config(name, "", format!("missing, but {other} is set: {both}"))
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
        _ if ranks.world_size == 1 => Ok(Source::Alone),
        _ if ranks.one_host => Ok(Source::ThisHost),
        launcher => {
            let detail = format!(
                "missing: {} started ranks on several hosts and says nowhere to meet; set MASTER_ADDR to the host of rank 0 and \
                 MASTER_PORT to a free port there, for all ranks (mpirun -x MASTER_ADDR=... -x MASTER_PORT=..., mpiexec -genv)",
                launcher.name()
            );
            Err(Error::config("MASTER_ADDR", "", detail))
        }
    }
}

fn master(lookup: Lookup<'_>, ranks: &Ranks, host: String, port: &str) -> Result<Source> {
    let host = host.trim().to_owned();
    if host.is_empty() {
        return Err(Error::config("MASTER_ADDR", host, "expected the host name or address of rank 0"));
    }
    let expected = || Error::config("MASTER_PORT", port, "expected a port, 1 to 65535");
    let mut number = port.trim().parse::<u16>().ok().filter(|&p| p > 0).ok_or_else(expected)?;
    let mut port_source = "MASTER_PORT".to_owned();
    if lookup("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|v| v.trim().eq_ignore_ascii_case("true")) {
        let detail = "torchrun's agent holds it and there is no next port: choose a lower one";
        number = number.checked_add(1).ok_or_else(|| Error::config("MASTER_PORT", port, detail))?;
        port_source = format!("MASTER_PORT + 1, since torchrun's agent holds {port}");
    }
    let job = job(lookup, ranks.launcher);
    Ok(Source::Address { hosts: vec![("MASTER_ADDR", host)], port: number, port_source, job })
}

fn slurm(lookup: Lookup<'_>) -> Result<Source> {
    let number = required(lookup, "SLURM_JOB_ID", "SLURM_PROCID")?;
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
        return Err(Error::config("SLURM_STEP_NODELIST", "", detail));
    }
    // Above the ports that Linux gives to outgoing connections; two steps of a job differ.
    let port = 61440 + (number.wrapping_add(step) % 4096) as u16;
    let port_source = format!("61440 + (job {number} + step {step}) mod 4096");
    Ok(Source::Address { hosts, port, port_source, job: job(lookup, Launcher::Slurm) })
}

/// First host of a Slurm node list: `node[003-005,9],gpu1` gives `node003`.
pub(super) fn first_host(list: &str) -> Option<String> {
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

/// Returns the job's name that the launcher gives to all ranks; it is no secret. The number of restarts is no part of
/// it: torchrun's agents count restarts each for itself, so that hosts of one world may differ in that.
fn job(lookup: Lookup<'_>, launcher: Launcher) -> String {
    let get = |name: &str| lookup(name).unwrap_or_default();
    if lookup(RUN_ID).is_some() {
        format!("torchelastic {:?}", get(RUN_ID))
    } else if launcher == Launcher::Slurm {
        let step = slurm_step(lookup).map(|s| s.to_string()).unwrap_or_default();
        format!("slurm {:?} {step}", get("SLURM_JOB_ID"))
    } else {
        String::new()
    }
}

/// True for names and addresses that reach only this host.
pub(crate) fn is_loopback_host(host: &str) -> bool {
    host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

pub(super) fn is_loopback(source: &Source) -> bool {
    match source {
        Source::Id(id) => id.addresses().iter().all(|a| a.ip().is_loopback()),
        Source::Address { hosts, .. } => hosts.iter().all(|(_, host)| is_loopback_host(host)),
        Source::ThisHost | Source::Alone => true,
    }
}
