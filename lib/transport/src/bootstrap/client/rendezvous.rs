//! From the environment to a rank in a job: starts the store if we are the rank that hosts it.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::bootstrap::environment::detect::{self, Lookup, Source};
use crate::bootstrap::environment::local_rendezvous::{self, HandOut};
use crate::bootstrap::server::LINGER;
use crate::bootstrap::{Server, UniqueId};
use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::config::{Config, Environment};
use tinynccl_sys::secret::Secret;

/// Rendezvous on this host so far in this process: all ranks have equally many, and each has its own name.
static MEETINGS: AtomicU32 = AtomicU32::new(0);

/// A rank's position in the job, as the launcher gave it, ready for [`Session::join`](crate::bootstrap::Session::join).
#[derive(Debug)]
pub struct Rendezvous {
    /// Our rank.
    pub rank: usize,
    /// Number of ranks.
    pub world_size: usize,
    /// Our number among the ranks of this host.
    pub local_rank: usize,
    /// Id of the job: addresses of the store, and the secret.
    pub id: UniqueId,
    /// The store, if this rank hosts it. It must outlive this rank's session; dropping it waits for the other ranks'
    /// goodbye.
    pub server: Option<Server>,
    /// Name of the launcher.
    pub launcher: String,
}

/// Reads the environment of our launcher, torchrun, Open MPI, MPICH or Slurm (in this order) and, on the rank that
/// hosts it, starts the store.
///
/// | launcher | rank, size, local rank | rendezvous |
/// |---|---|---|
/// | ours | `RANK` `WORLD_SIZE` `LOCAL_RANK` | `TINYNCCL_UNIQUE_ID` |
/// | torchrun | `RANK` `WORLD_SIZE` `LOCAL_RANK` | `MASTER_ADDR:MASTER_PORT` |
/// | Open MPI | `OMPI_COMM_WORLD_{RANK,SIZE,LOCAL_RANK}` | `MASTER_ADDR:MASTER_PORT` if set, else this host |
/// | MPICH, Intel MPI (Hydra) | `PMI_RANK` `PMI_SIZE` `MPI_LOCALRANKID` | `MASTER_ADDR:MASTER_PORT` if set, else this host |
/// | Slurm (srun) | `SLURM_PROCID` `SLURM_STEP_NUM_TASKS` `SLURM_LOCALID` | `MASTER_ADDR:MASTER_PORT` if set, else first host of the step |
///
/// - `TORCHELASTIC_USE_AGENT_STORE=True` means that torchrun's agent holds `MASTER_PORT`; the next port is taken.
/// - Where launchers nest, the innermost one that fits counts: `mpirun` in a step of Slurm's, torchrun in one of
///   `mpirun`'s.
/// - "This host" is an abstract Unix socket named by user and launcher; it leaves no file behind. Ranks on several
///   hosts without `MASTER_ADDR` are an error.
/// - With `MASTER_ADDR` the ranks prove to each other that they know `config.secret` (or what `config.secret_file`
///   holds), and that torchrun's run id or Slurm's job and step are the same. Without a secret any client that
///   reaches the port can take a rank's place; rank 0 logs that in one line, unless the port is on loopback. The
///   other kinds of rendezvous have their own random secret.
///
/// # Errors
/// [`Error::Config`] names the variable, its value and what was expected: missing, not a number, rank out of range,
/// unknown host, port in use.
pub fn rendezvous_from_env(config: &Config) -> Result<Rendezvous> {
    let environment = Environment::default();
    let place = from_lookup(&|name| environment.get(name), config);
    environment.check().and(place)
}

/// As [`rendezvous_from_env`] over any source of variables.
pub fn from_lookup(lookup: Lookup<'_>, config: &Config) -> Result<Rendezvous> {
    let plan = detect::plan(lookup)?;
    let (rank, world_size) = (plan.rank, plan.world_size);
    log::debug!("rank {rank} of {world_size}, started by {}: {:?}", plan.launcher.name(), plan.source);
    let loopback = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let mut server = None;
    let id = match plan.source {
        Source::Id(id) => id,
        Source::Alone => server.insert(Server::start(loopback, world_size, config)?).unique_id(),
        Source::ThisHost => {
            let name = local_rendezvous::name(plan.launcher.rank_variable(), MEETINGS.fetch_add(1, Ordering::Relaxed));
            if rank == 0 {
                let started = server.insert(Server::start(loopback, world_size, config)?);
                let id = started.unique_id();
                started.hand_out = Some(HandOut::start(&name, &id)?);
                id
            } else {
                local_rendezvous::fetch(&name, rank, config.connect_timeout)?
            }
        }
        Source::Address { hosts, port, port_source, job } => {
            if world_size > 1 {
                config.check_key("a rendezvous at MASTER_ADDR")?;
            }
            let secret = PUBLIC.derive("job", job.as_bytes());
            if rank == 0 {
                let bind = SocketAddr::new(bind_address(&hosts)?, port);
                let started = Server::start_with(bind, secret, world_size, config, LINGER).map_err(|e| match e {
                    Error::Bootstrap { detail, .. } => {
                        Error::config("MASTER_PORT", port, format!("{detail} (port: {port_source})"))
                    }
                    other => other,
                })?;
                if !config.has_secret() && !bind.ip().is_loopback() && world_size > 1 {
                    log::warn!(
                        "rank 0: this job has no secret, so whoever reaches port {port} can take a rank's place: set TINYNCCL_SECRET \
                         (or TINYNCCL_SECRET_FILE) to the same random text for all ranks, as `openssl rand -hex 32` makes it"
                    );
                }
                server.insert(started).unique_id()
            } else {
                UniqueId::new(secret, resolve(&hosts, port)?)
            }
        }
    };
    Ok(Rendezvous {
        rank,
        world_size,
        local_rank: plan.local_rank,
        id,
        server,
        launcher: plan.launcher.name().to_owned(),
    })
}

/// Public value in place of a random secret, where the launcher gives the ranks none: `config.secret` makes it one.
const PUBLIC: Secret = Secret::new([0; 32]);

/// Returns the address to which rank 0 binds. A name may mean another address here than elsewhere (`127.0.1.1` on
/// Debian's own host name), so only a name that is loopback on every host is taken literally.
fn bind_address(hosts: &[(&'static str, String)]) -> Result<IpAddr> {
    let any = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
    match hosts.first() {
        Some((_, host)) if detect::is_loopback_host(host) => {
            Ok(host.parse().unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST)))
        }
        Some(("MASTER_ADDR", _)) => {
            let ipv4 = resolve(hosts, 1)?.iter().any(SocketAddr::is_ipv4);
            Ok(if ipv4 { any } else { IpAddr::V6(Ipv6Addr::UNSPECIFIED) })
        }
        _ => Ok(any),
    }
}

/// The addresses of the first host that is known, IPv4 first.
fn resolve(hosts: &[(&'static str, String)], port: u16) -> Result<Vec<SocketAddr>> {
    let mut failure = Error::invalid("rendezvous", "no host to meet at");
    for (variable, host) in hosts {
        match (host.as_str(), port).to_socket_addrs() {
            Ok(found) => {
                let mut addresses: Vec<SocketAddr> = found.collect();
                addresses.sort_by_key(SocketAddr::is_ipv6);
                addresses.dedup();
                if !addresses.is_empty() {
                    return Ok(addresses);
                }
            }
            Err(e) => {
                let expected = "expected a name or address of the host of rank 0 that resolves here";
                failure = Error::config(*variable, host, format!("unknown host ({e}): {expected}"));
            }
        }
    }
    Err(failure)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::net::SocketAddr;

    use socket2::{Domain, Socket, Type};

    use super::*;

    fn from(text: &str) -> Result<Rendezvous> {
        let map: HashMap<&str, &str> = text.split_whitespace().map(|kv| kv.split_once('=').unwrap()).collect();
        from_lookup(&|name| map.get(name).map(|v| (*v).to_owned()), &Config::default())
    }

    /// A socket that holds a port: rank 0 may listen there as long as the socket does not.
    fn held_port() -> (Socket, u16) {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        socket.set_reuse_address(true).unwrap();
        socket.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
        let port = socket.local_addr().unwrap().as_socket().unwrap().port();
        (socket, port)
    }

    #[test]
    fn rank_0_hosts_the_store_and_the_others_know_where() {
        let (_held, port) = held_port();
        let zero = from(&format!("RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT={port}")).unwrap();
        let one = from(&format!("RANK=1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT={port}")).unwrap();
        assert!(zero.server.is_some() && one.server.is_none());
        assert_eq!(zero.id, one.id);
    }

    #[test]
    fn a_port_in_use_and_an_unknown_host_name_their_variables() {
        let (socket, port) = held_port();
        socket.listen(1).unwrap();
        let e = from(&format!("RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT={port}")).unwrap_err().to_string();
        assert!(e.contains(&format!("MASTER_PORT=\"{port}\"")) && e.contains("in use"), "{e}");
        for rank in [0, 1] {
            let text = format!("RANK={rank} WORLD_SIZE=2 MASTER_ADDR=no-such-host.invalid MASTER_PORT=1");
            let e = from(&text).unwrap_err().to_string();
            assert!(e.contains("MASTER_ADDR=\"no-such-host.invalid\"") && e.contains("unknown host"), "{e}");
        }
    }

    #[test]
    fn a_rank_alone_needs_no_address() {
        let alone = from("OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1").unwrap();
        assert_eq!((alone.rank, alone.world_size, alone.launcher.as_str()), (0, 1, "Open MPI"));
        assert!(alone.server.is_some());
    }
}
