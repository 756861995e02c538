//! The control plane between processes: a rendezvous session and this rank's endpoint.

use std::net::{IpAddr, SocketAddr};
use std::ptr::NonNull;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::share;
use crate::membership::{Admission, Membership, World};
use crate::state::control::{Connect, Control, Liveness, Notice, PeerHealth, Progress, Sharing, Topology};
use crate::state::numbers::Numbers;
use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::config::Config;
use tinynccl_sys::secret::Secret;
use tinynccl_sys::threads::lock;
use tinynccl_transport::beacon;
use tinynccl_transport::bootstrap::{Event, Host, RankState, Session};
use tinynccl_transport::mapping::Mapping;
use tinynccl_transport::rails;
use tinynccl_transport::relay::{Path, Routes, Traffic};
use tinynccl_transport::{ConnectTo, Doorbell, Endpoint, EndpointInfo, LinkOptions, LinkPair, Registration};

/// Interval between checks whether a relay still has work.
const LOOK: Duration = Duration::from_millis(50);

/// The ranks that are gone: no rank may wait for a connection from them.
#[derive(Default)]
struct Gone {
    /// Left in order.
    left: Vec<usize>,
    /// Lost, and how.
    lost: Vec<(usize, String)>,
}

impl Gone {
    fn contains(&self, rank: usize) -> bool {
        self.left.contains(&rank) || self.lost.iter().any(|(lost, _)| *lost == rank)
    }
}

/// A rank's way into its group.
pub(super) enum Origin {
    /// Starts with the others.
    First,
    /// Comes from another communicator, whose membership this is.
    Survivor(Arc<Membership>),
    /// Comes with a ticket that holds this secret.
    Newcomer(Secret),
}

impl Origin {
    /// Adds what the other ranks need to know of it to its description.
    pub(super) fn describe(&self, info: &mut Value) {
        if let (Origin::Survivor(former), Some(fields)) = (self, info.as_object_mut()) {
            fields.insert(JOIN.to_owned(), serde_json::json!(former.admission().addresses()));
            fields.insert(WIDE.to_owned(), Value::Bool(former.is_wide()));
        }
    }
}

/// A rank among processes.
pub(super) struct Network {
    session: Arc<Session>,
    membership: Arc<Membership>,
    gone: Arc<(Mutex<Gone>, Condvar)>,
    /// The routes between us and ranks that we reach through relays.
    paths: Vec<Path>,
    /// The rank that hosts the store; `None` when the launcher does.
    store_host: Option<usize>,
    numbers: Numbers,
    config: Config,
}

impl Network {
    /// Listens for the other ranks, and publishes the addresses.
    pub(crate) fn new(session: Session, store_host: Option<usize>, origin: Origin, config: &Config) -> Result<Network> {
        let (endpoint, infos) = listen(&session, config)?;
        let endpoint = Arc::new(endpoint);
        let admission = match origin {
            Origin::First => Admission::open(&endpoint, session.secret().derive("newcomers", b""), config)?,
            Origin::Newcomer(secret) => Admission::open(&endpoint, secret, config)?,
            Origin::Survivor(former) => former.admission().clone(),
        };
        admission.list.set_addresses(&join_addresses(&session, &infos));
        endpoint.introduce(infos.clone(), routes(&session, &endpoint, &infos, config)?);
        let paths = endpoint.paths(false);
        let gone = Arc::new((Mutex::new(Gone::default()), Condvar::new()));
        let record = gone.clone();
        session.on_event(Box::new(move |event| {
            let mut gone = lock(&record.0);
            match event {
                Event::RankLeft { rank } => gone.left.push(*rank),
                Event::RankLost { rank, detail } => gone.lost.push((*rank, detail.clone())),
                _ => return,
            }
            record.1.notify_all();
        }));
        let (numbers, config) = (Numbers::new(session.rank(), session.world_size()), config.clone());
        let session = Arc::new(session);
        let weak = Arc::downgrade(&session);
        let revoked = move |from: usize, comm: u32, reason: String| {
            weak.upgrade().inspect(|session| session.aborted(from, comm, reason));
        };
        let world = World { rank: session.rank(), infos, secret: session.secret(), stopped: session.stopped() };
        let membership = Membership::new(endpoint, admission, world, &config, Box::new(revoked));
        Ok(Network { session, membership, gone, paths, store_host, numbers, config })
    }

    fn endpoint(&self) -> &Endpoint {
        self.membership.endpoint()
    }

    /// Why `peer` cannot be reached, if known.
    fn is_out_of_reach(&self, peer: usize) -> Option<Error> {
        let gone = lock(&self.gone.0);
        let lost = |detail: String| Error::PeerLost {
            op: "connect".to_owned(),
            rank: self.rank(),
            peer,
            address: format!("process {}", self.membership.infos()[peer].pid),
            detail,
        };
        if gone.left.contains(&peer) {
            return Some(lost("it closed its communicator and left".to_owned()));
        }
        // A relay may be outside the communicator, which would then not learn of its end.
        let path = self.paths.iter().find(|path| path.ends.contains(&peer))?;
        let (relay, detail) = gone.lost.iter().find(|(rank, _)| path.through.contains(rank))?;
        Some(lost(format!("{path}, and rank {relay} is gone: {detail}")))
    }

    /// Relays between others until no pair needs us any more, or nothing has passed for as long as any wait may take.
    fn relay_on(&self) {
        let (mutex, changed) = &*self.gone;
        let mut gone = lock(mutex);
        let needed = |gone: &Gone| match self.session.is_over() {
            // The ranks that remain are not notified any more.
            true => self.endpoint().traffic().links > 0,
            false => self.endpoint().is_needed(&|rank| gone.contains(rank)),
        };
        if !needed(&gone) {
            return;
        }
        log::info!("rank {}: done; it relays between other ranks until they are done", self.rank());
        self.session.leave();
        let (mut moved, mut since) = (self.endpoint().traffic(), Instant::now());
        while needed(&gone) {
            let now = self.endpoint().traffic();
            if std::mem::replace(&mut moved, now) != now {
                since = Instant::now();
            } else if since.elapsed() >= self.config.timeout {
                let idle = self.config.timeout;
                log::warn!(
                    "rank {}: has relayed nothing for {idle:?} and leaves, though others may need it",
                    self.rank()
                );
                return;
            }
            gone = changed.wait_timeout(gone, LOOK).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The error of an exchange. This rank may know that the store is lost before the store's notice arrives.
    fn or_store_lost(&self, key: &str, error: Error) -> Error {
        match (error, self.store_host) {
            (Error::Bootstrap { address, detail }, Some(peer)) if self.session.is_over() => {
                Error::PeerLost { op: format!("exchange {key:?}"), rank: self.session.rank(), peer, address, detail }
            }
            (other, _) => other,
        }
    }
}

/// Keys of a rank's description: its host name; the addresses for newcomers, if not its endpoint's; whether others
/// than those of its host reach that.
pub(super) const HOST: &str = "host";
const JOIN: &str = "join";
const WIDE: &str = "wide";

/// Each rank's addresses for newcomers.
fn join_addresses(session: &Session, infos: &[EndpointInfo]) -> Vec<Vec<SocketAddr>> {
    let own = |info: &Value| serde_json::from_value(info.get(JOIN)?.clone()).ok();
    session
        .infos()
        .iter()
        .zip(infos)
        .map(|(info, endpoint)| own(info).unwrap_or_else(|| endpoint.tcp.clone()))
        .collect()
}

/// Opens this rank's endpoint and publishes it: on loopback alone if all ranks are on one host, unless one of them
/// comes from a group that others reach, and may get newcomers from there. Returns the endpoint and the descriptions of
/// all ranks, by rank.
fn listen(session: &Session, config: &Config) -> Result<(Endpoint, Vec<EndpointInfo>)> {
    let infos = session.infos().iter().enumerate();
    let hosts: Vec<Host> = infos
        .map(|(rank, info)| {
            let host = info.get(HOST).cloned().unwrap_or_default();
            serde_json::from_value(host).map_err(|e| unreadable(rank, &e))
        })
        .collect::<Result<_>>()?;
    let one_host = hosts.iter().all(|host| host.same_network(&hosts[0]));
    if !one_host && session.rank() == 0 {
        let how = if config.encrypt { "encrypted" } else { "in clear text: TINYNCCL_ENCRYPT=1 encrypts them" };
        log::info!("rank 0: the ranks are on several hosts, with links {how}");
    }
    let wide = session.infos().iter().any(|info| info.get(WIDE) == Some(&Value::Bool(true)));
    let open = if one_host && !wide && !config.tcp_rails { Endpoint::local } else { rails::endpoint };
    let opened = open(session.rank(), session.secret(), config);
    // The others must not wait for an unreachable rank, and must learn the reason.
    let ours: Result<EndpointInfo, String> = opened.as_ref().map(Endpoint::info).map_err(ToString::to_string);
    let ours = serde_json::to_vec(&ours).map_err(|e| Error::invalid("rendezvous", e.to_string()))?;
    let members: Vec<usize> = (0..session.world_size()).collect();
    let all = session.exchange("endpoints", &members, ours, config.connect_timeout);
    let (endpoint, all) = (opened?, all?);
    let read = |(rank, bytes): (usize, &Vec<u8>)| match serde_json::from_slice::<Result<EndpointInfo, String>>(bytes) {
        Ok(Ok(info)) => Ok(info),
        Ok(Err(detail)) => Err(Error::Bootstrap { address: format!("rank {rank}"), detail }),
        Err(e) => Err(unreadable(rank, &e)),
    };
    Ok((endpoint, all.iter().enumerate().map(read).collect::<Result<_>>()?))
}

/// Pairs of ranks that reach each other, as both ends see it. Only a rank's own kernel knows the networks that its
/// interfaces and routes lead to.
fn routes(session: &Session, endpoint: &Endpoint, infos: &[EndpointInfo], config: &Config) -> Result<Routes> {
    // All ranks find this, or none.
    if infos.iter().all(|info| info.host.same_network(&infos[0].host) && info.verbs.is_empty()) {
        return Ok(Routes::direct());
    }
    let ours = serde_json::to_vec(&endpoint.far(infos)).map_err(|e| Error::invalid("rendezvous", e.to_string()))?;
    let members: Vec<usize> = (0..session.world_size()).collect();
    let all = session.exchange("far ranks", &members, ours, config.connect_timeout)?;
    let read = |(rank, bytes): (usize, &Vec<u8>)| serde_json::from_slice(bytes).map_err(|e| unreadable(rank, &e));
    let far: Vec<Vec<usize>> = all.iter().enumerate().map(read).collect::<Result<_>>()?;
    let near = |a: usize, b: usize| far[a].binary_search(&b).is_err();
    Ok(Routes::new(far.len(), |a, b| near(a, b) && near(b, a)))
}

fn unreadable(rank: usize, error: &serde_json::Error) -> Error {
    let detail = format!("its description does not parse ({error}): do all ranks run the same version?");
    Error::Bootstrap { address: format!("rank {rank}"), detail }
}

impl Topology for Network {
    fn rank(&self) -> usize {
        self.session.rank()
    }

    fn job(&self) -> u64 {
        self.session.secret().name()
    }

    fn world_size(&self) -> usize {
        self.session.world_size()
    }

    fn process(&self, peer: usize) -> u32 {
        self.membership.infos()[peer].pid
    }

    fn address(&self, peer: usize) -> Option<IpAddr> {
        let mut all = self.membership.infos()[peer].tcp.iter().map(SocketAddr::ip);
        all.find(|ip| !ip.is_loopback())
    }

    fn loss(&self, peer: usize) -> Option<String> {
        lock(&self.gone.0).lost.iter().find(|(rank, _)| *rank == peer).map(|(_, detail)| detail.clone())
    }

    fn has_ended(&self, peer: usize) -> bool {
        let [ours, theirs] = [self.rank(), peer].map(|rank| &self.membership.infos()[rank]);
        ours.host.same_network(&theirs.host) && theirs.beacon.as_deref().is_some_and(beacon::is_out)
    }

    fn one_process(&self) -> bool {
        false
    }

    fn shares_memory(&self, peer: usize) -> bool {
        peer == self.rank() || self.endpoint().choose(&self.membership.infos()[peer]).0 == "shm"
    }

    fn same_host(&self, a: usize, b: usize) -> bool {
        self.membership.infos()[a].host.same_host(&self.membership.infos()[b].host)
    }

    fn hostname(&self, peer: usize) -> String {
        self.membership.infos()[peer].host.hostname.clone()
    }

    fn store_host(&self) -> Option<usize> {
        self.store_host
    }

    fn paths(&self) -> Vec<Path> {
        self.endpoint().paths(true)
    }

    fn traffic(&self) -> Traffic {
        self.endpoint().traffic()
    }
}

impl Sharing for Network {
    fn offer(&self, key: &str, members: &[usize], value: Vec<u8>) -> Result<()> {
        self.session.offer(key, members, value).map_err(|error| self.or_store_lost(key, error))
    }

    fn collect(&self, key: &str, _members: &[usize], ended: &dyn Fn() -> bool) -> Result<Vec<Vec<u8>>> {
        self.session.collect(key, self.config.timeout, ended).map_err(|error| self.or_store_lost(key, error))
    }

    fn share(
        &self,
        key: &str,
        members: &[usize],
        bytes: usize,
        ended: &dyn Fn() -> bool,
    ) -> Result<Option<Arc<Mapping>>> {
        share::between_processes(self, key, members, bytes, ended)
    }
}

impl Liveness for Network {
    fn track(&self, comm: u32) -> Arc<Progress> {
        self.session.track(comm)
    }

    fn tell_progress(&self) {
        self.session.beat();
    }

    fn health(&self, comm: u32) -> Result<Vec<PeerHealth>> {
        let health = self.session.health(comm)?;
        Ok(health
            .into_iter()
            .map(|h| PeerHealth {
                silent_for: h.age,
                progress: h.progress,
                gone: match h.state {
                    RankState::Alive => None,
                    RankState::Left => Some("it closed its communicator and left".to_owned()),
                    RankState::Lost(reason) => Some(reason),
                },
            })
            .collect())
    }

    fn has_left(&self, rank: usize) -> bool {
        lock(&self.gone.0).left.contains(&rank)
    }

    fn silence_limit(&self) -> Duration {
        self.config.heartbeat.saturating_mul(4)
    }

    fn abort(&self, comm: u32, reason: &str) {
        self.session.abort(comm, reason);
    }

    fn subscribe(&self, comm: u32, listener: Box<dyn Fn(&Notice) + Send + Sync>) {
        let hear = Box::new(move |event: &Event| {
            listener(&match event {
                Event::RankLost { rank, detail } => Notice::Lost { rank: *rank, detail: detail.clone() },
                Event::Abort { from, comm, reason } => {
                    Notice::Abort { from: *from, comm: *comm, reason: reason.clone() }
                }
                Event::Disagree(disagreement) => Notice::Disagree(disagreement.clone()),
                Event::StoreLost { detail } => Notice::StoreLost { detail: detail.clone() },
                Event::RankLeft { .. } => Notice::Left,
            });
        });
        self.session.on_event_of(comm, hear);
    }

    fn forget(&self, comm: u32, _members: &[usize]) {
        self.session.forget(comm);
    }
}

impl Connect for Network {
    fn connect(
        &self,
        comm: u32,
        peer: usize,
        channel: u32,
        options: LinkOptions,
        doorbell: &Arc<Doorbell>,
        abort: &dyn Fn() -> Option<Error>,
    ) -> Result<LinkPair> {
        let to = ConnectTo { comm, peer_rank: peer, info: &self.membership.infos()[peer], channel, options };
        let or_gone = || abort().or_else(|| self.is_out_of_reach(peer));
        self.endpoint().connect(&to, doorbell, &or_gone, self.config.connect_timeout.min(self.config.timeout))
    }

    unsafe fn register(&self, base: NonNull<u8>, bytes: usize) -> Result<Option<Registration>> {
        // SAFETY: by the caller.
        unsafe { self.endpoint().register(base, bytes) }
    }

    fn zero_copy_from(&self, bytes: usize) {
        self.endpoint().zero_copy_from(bytes);
    }
}

impl Control for Network {
    fn numbers(&self) -> &Numbers {
        &self.numbers
    }

    fn membership(&self) -> Option<&Arc<Membership>> {
        Some(&self.membership)
    }

    fn close(&self) {
        // After a panic the ranks that it relays between end as well.
        if !std::thread::panicking() {
            self.relay_on();
        }
        self.session.close();
    }
}
