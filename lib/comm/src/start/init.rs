//! Creates communicators: from the environment, from a unique id, or for threads.

use std::sync::Arc;

use serde_json::Value;

use super::local::{Local, Wrap};
use super::network::{HOST, Network, Origin};
use super::trace;
use super::tune;
use crate::Comm;
use crate::state::State;
use crate::state::control::Control;
use crate::state::home::Home;
use crate::status::Starting;
use crate::trace::Sink;
use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::config::Config;
use tinynccl_sys::secret::Secret;
use tinynccl_sys::threads::{lock, make_room_for_descriptors};
use tinynccl_transport::LinkPair;
use tinynccl_transport::bootstrap::{HOSTS_STORE, Host, Rendezvous, Server, Session, UniqueId, rendezvous_from_env};

/// Key of a survivor's local rank in its description.
const LOCAL: &str = "local";

/// Id of the communicator that spans the world.
const WORLD: u32 = 0;

impl Comm {
    /// Joins the job that a launcher started: our own (`tinynccl::launch`), torchrun, Open MPI, MPICH or Slurm.
    ///
    /// Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT or the launcher's own variables; see
    /// [`rendezvous_from_env`]. Settings come from [`Config::from_env`].
    pub fn from_env() -> Result<Comm> {
        Comm::from_env_with(Config::from_env()?)
    }

    /// [`Comm::from_env`] with given settings.
    pub fn from_env_with(config: Config) -> Result<Comm> {
        Comm::join(rendezvous_from_env(&config)?, config)
    }

    /// Takes a place in a job.
    pub fn join(job: Rendezvous, config: Config) -> Result<Comm> {
        log::debug!("rank {} of {}: started by {}", job.rank, job.world_size, job.launcher);
        Comm::network(&job.id, job.rank, job.world_size, job.local_rank, job.server, config)
    }

    /// Joins the job of `id` as `rank` of `world_size`; every rank calls it with the same id.
    ///
    /// The id comes from a [`Server`] that one process started; it must outlive the job.
    pub fn init(id: &UniqueId, rank: usize, world_size: usize, config: Config) -> Result<Comm> {
        Comm::network(id, rank, world_size, rank, None, config)
    }

    /// As [`Comm::init`] with `server`'s id, for the rank that hosts the server. The server lives as long as the
    /// communicator and those split from it. If it ends without a goodbye, the other ranks know which rank they have
    /// lost.
    pub fn init_with_server(server: Server, rank: usize, world_size: usize, config: Config) -> Result<Comm> {
        Comm::network(&server.unique_id(), rank, world_size, rank, Some(server), config)
    }

    fn network(
        id: &UniqueId,
        rank: usize,
        world_size: usize,
        local_rank: usize,
        server: Option<Server>,
        config: Config,
    ) -> Result<Comm> {
        make_room_for_descriptors();
        let _starting = Starting::new(store_of(id), rank, world_size, &config);
        let mut info = serde_json::json!({ HOST: Host::current() });
        trace::announce(&mut info, &config);
        let (network, infos) = meet(id, (rank, world_size), info, server.is_some(), Origin::First, &config)?;
        let tracers = trace::announced(&infos);
        let control: Arc<dyn Control> = Arc::new(network);
        let start = trace::open(&*control, tracers, &config)?;
        let sink = start.as_ref().map(trace::Start::sink);
        let comm = Comm::world(control, world_size, local_rank, server, config, sink)?;
        if let Some(start) = start {
            start.finish(&comm)?;
        }
        Ok(comm)
    }

    /// Makes a communicator of `survivors`, ranks of `old`, in this order, and of newcomers up to `size`, at a
    /// rendezvous that they have to themselves. Links, memory and store are new. It has the settings and the cost model
    /// of `old`, and is not traced.
    pub(crate) fn restart(
        old: &Comm,
        id: &UniqueId,
        (rank, size): (usize, usize),
        survivors: &[usize],
        server: &mut Option<Server>,
    ) -> Result<Comm> {
        let (inner, config) = (&old.inner, old.inner.state.config.clone());
        let Some(membership) = inner.state.control.membership() else {
            return Err(Error::invalid("restart", "threads of one process have no membership"));
        };
        let info = serde_json::json!({ HOST: Host::current(), LOCAL: inner.local_rank });
        let origin = Origin::Survivor(membership.clone());
        let (network, _) = meet(id, (rank, size), info, server.is_some(), origin, &config)?;
        let control: Arc<dyn Control> = Arc::new(network);
        let home = Home::new(control.clone(), server.take(), Some(membership.clone()));
        let tuned = lock(&inner.engine).tuned.among(survivors.iter().copied());
        let state = State::new(WORLD, rank, (0..size).collect(), config, control, None)?;
        let comm = Comm::assemble(state, inner.local_rank, Some(tuned), Some(Arc::new(home)));
        if size > survivors.len() {
            tune::take_over(&comm)?;
        }
        Ok(comm)
    }

    /// The newcomer's part of [`Comm::restart`]. `secret` is its ticket's.
    pub(crate) fn enter(id: &UniqueId, (rank, size): (usize, usize), secret: Secret, config: Config) -> Result<Comm> {
        let info = serde_json::json!({ HOST: Host::current() });
        let (network, infos) = meet(id, (rank, size), info, false, Origin::Newcomer(secret), &config)?;
        let local_rank = free_number(&infos, rank);
        let control: Arc<dyn Control> = Arc::new(network);
        let home = Home::new(control.clone(), None, None);
        let state = State::new(WORLD, rank, (0..size).collect(), config, control, None)?;
        let comm = Comm::assemble(state, local_rank, None, Some(Arc::new(home)));
        tune::take_over(&comm)?;
        Ok(comm)
    }

    /// A world of `world_size` ranks that are threads of this process; element `r` belongs to rank `r`.
    ///
    /// Use each from a separate thread: blocking calls wait for the others.
    pub fn threads(world_size: usize, config: Config) -> Result<Vec<Comm>> {
        Comm::in_process(world_size, config, None)
    }

    /// As [`Comm::threads`], with every pair of links wrapped by `wrap(our rank, the peer, the pair)`. A wrapper that
    /// breaks or slows down a link ([`tinynccl_transport::faulty`]) tests the layers above. Both ends of a link are
    /// wrapped by the same backend. Calls in the shared region use no link and are not affected.
    pub fn threads_with_links(
        world_size: usize,
        config: Config,
        wrap: impl Fn(usize, usize, LinkPair) -> LinkPair + Send + Sync + 'static,
    ) -> Result<Vec<Comm>> {
        Comm::in_process(world_size, config, Some(Box::new(wrap)))
    }

    fn in_process(world_size: usize, config: Config, wrap: Option<Wrap>) -> Result<Vec<Comm>> {
        if world_size == 0 {
            return Err(Error::invalid("Comm::threads", "world size 0, expected at least 1"));
        }
        let sinks = trace::open_in_process(world_size, &config)?;
        Local::world(world_size, &config, wrap)?
            .into_iter()
            .zip(sinks)
            .enumerate()
            .map(|(rank, (local, sink))| Comm::world(Arc::new(local), world_size, rank, None, config.clone(), sink))
            .collect()
    }

    fn world(
        control: Arc<dyn Control>,
        world_size: usize,
        local_rank: usize,
        server: Option<Server>,
        config: Config,
        sink: Option<Arc<Sink>>,
    ) -> Result<Comm> {
        let rank = control.rank();
        let home = Arc::new(Home::new(control.clone(), server, None));
        let state = State::new(WORLD, rank, (0..world_size).collect(), config, control, sink)?;
        let comm = Comm::assemble(state, local_rank, None, Some(home));
        tune::start(&comm)?;
        Ok(comm)
    }
}

/// Address of the store of `id`, for reports.
fn store_of(id: &UniqueId) -> String {
    id.addresses().first().map_or_else(|| "?".to_owned(), ToString::to_string)
}

/// Joins the rendezvous of `id`, and returns the control plane and the description of every rank.
fn meet(
    id: &UniqueId,
    (rank, world_size): (usize, usize),
    mut info: Value,
    hosts_store: bool,
    origin: Origin,
    config: &Config,
) -> Result<(Network, Vec<Value>)> {
    origin.describe(&mut info);
    if let (Some(fields), true) = (info.as_object_mut(), hosts_store) {
        fields.insert(HOSTS_STORE.to_owned(), Value::Bool(true));
    }
    let session = Session::join(id, rank, world_size, info, config)?;
    let infos = session.infos().to_vec();
    let store_host = infos.iter().position(|info| info.get(HOSTS_STORE).is_some());
    Ok((Network::new(session, store_host, origin, config)?, infos))
}

/// The local rank of newcomer `rank`: the lowest number that no other rank of its host has, such as a lost one's.
fn free_number(infos: &[Value], rank: usize) -> usize {
    let Some(host) = infos.get(rank).and_then(|info| info.get(HOST)) else { return 0 };
    let here = || infos.iter().enumerate().filter(|(_, info)| info.get(HOST) == Some(host));
    let taken: Vec<u64> = here().filter_map(|(_, info)| info.get(LOCAL)?.as_u64()).collect();
    // The newcomers of a host take the free numbers in their order.
    let before = here().filter(|(other, info)| *other < rank && info.get(LOCAL).is_none()).count();
    (0..).filter(|number| !taken.contains(number)).nth(before).unwrap_or(0) as usize
}

/// Runs `rank` on `ranks` threads with a communicator each: for the examples of this documentation.
///
/// # Errors
/// The first that a rank returns.
#[doc(hidden)]
pub fn on_threads(ranks: usize, rank: impl Fn(&Comm) -> Result<()> + Sync) -> Result<()> {
    let comms = Comm::threads(ranks, Config::default())?;
    let rank = &rank;
    std::thread::scope(|scope| {
        let threads: Vec<_> = comms.into_iter().map(|comm| scope.spawn(move || rank(&comm))).collect();
        // A failed assertion of the caller's goes on in the caller.
        threads.into_iter().try_for_each(|t| t.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })
}
