//! The control plane between processes: a rendezvous session and this rank's endpoint.

use std::ptr::NonNull;
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::control::{Control, Notice, PeerHealth, Progress, Shared};
use super::share;
use super::state::lock;
use crate::bootstrap::{Event, RankState, Session};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::transport::{ConnectTo, Doorbell, Endpoint, EndpointInfo, Kind, LinkOptions, LinkPair, Registration};

/// A rank among processes.
pub(super) struct Network {
    session: Session,
    endpoint: Endpoint,
    infos: Vec<EndpointInfo>,
    /// The ranks that have said goodbye: nobody may wait for a connection from them.
    left: Arc<Mutex<Vec<usize>>>,
    /// The rank that hosts the store; `None` when the launcher does.
    store_host: Option<usize>,
    ids: AtomicU32,
    config: Config,
}

impl Network {
    /// Parses what the other ranks told the rendezvous about themselves.
    pub(super) fn new(
        session: Session,
        endpoint: Endpoint,
        store_host: Option<usize>,
        config: &Config,
    ) -> Result<Network> {
        let infos = session
            .infos()
            .iter()
            .enumerate()
            .map(|(rank, value)| {
                serde_json::from_value(value.clone()).map_err(|e| Error::Bootstrap {
                    address: format!("rank {rank}"),
                    detail: format!(
                        "its endpoint description does not parse ({e}): do all ranks run the same version?"
                    ),
                })
            })
            .collect::<Result<Vec<EndpointInfo>>>()?;
        let left = Arc::new(Mutex::new(Vec::new()));
        let record = left.clone();
        session.on_event(Box::new(move |event| {
            if let Event::RankLeft { rank } = event {
                lock(&record).push(*rank);
            }
        }));
        Ok(Network { session, endpoint, infos, left, store_host, ids: AtomicU32::new(1), config: config.clone() })
    }
}

impl Control for Network {
    fn rank(&self) -> usize {
        self.session.rank()
    }

    fn connect(
        &self,
        comm: u32,
        peer: usize,
        channel: u32,
        options: LinkOptions,
        doorbell: &Arc<Doorbell>,
        abort: &dyn Fn() -> Option<Error>,
    ) -> Result<LinkPair> {
        let to = ConnectTo { comm, peer_rank: peer, info: &self.infos[peer], channel, options };
        let or_left = || {
            abort().or_else(|| {
                self.has_left(peer).then(|| Error::PeerLost {
                    op: "connect".to_owned(),
                    rank: self.rank(),
                    peer,
                    address: format!("process {}", self.infos[peer].pid),
                    detail: "it closed its communicator and left".to_owned(),
                })
            })
        };
        self.endpoint.connect(&to, doorbell, &or_left, self.config.connect_timeout.min(self.config.timeout))
    }

    fn shares_memory(&self, peer: usize) -> bool {
        peer == self.rank() || self.endpoint.choose(&self.infos[peer]).0 == Kind::Shm
    }

    fn shares_host(&self, peer: usize) -> bool {
        self.infos[peer].host.same_machine(&self.infos[self.rank()].host)
    }

    fn same_host(&self, a: usize, b: usize) -> bool {
        self.infos[a].host.same_machine(&self.infos[b].host)
    }

    fn hostname(&self, peer: usize) -> String {
        self.infos[peer].host.hostname.clone()
    }

    fn exchange(&self, key: &str, members: &[usize], value: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        self.session.exchange(key, members, value, self.config.timeout)
    }

    fn share(&self, key: &str, members: &[usize], bytes: usize) -> Result<Option<Shared>> {
        share::between_processes(self, key, members, bytes)
    }

    unsafe fn register(&self, base: NonNull<u8>, bytes: usize) -> Result<Option<Registration>> {
        // SAFETY: by the caller.
        unsafe { self.endpoint.register(base, bytes) }
    }

    fn track(&self, comm: u32) -> Arc<Progress> {
        self.session.track(comm)
    }

    fn health(&self, comm: u32) -> Result<Vec<PeerHealth>> {
        let health = self.session.health(comm)?;
        Ok(health
            .into_iter()
            .map(|h| PeerHealth {
                silent_for: h.age,
                seq_started: h.progress.map(|p| p.seq_started),
                gone: match h.state {
                    RankState::Alive => None,
                    RankState::Left => Some("it closed its communicator and left".to_owned()),
                    RankState::Lost(reason) => Some(reason),
                },
            })
            .collect())
    }

    fn one_process(&self) -> bool {
        false
    }

    fn store_host(&self) -> Option<usize> {
        self.store_host
    }

    fn has_left(&self, rank: usize) -> bool {
        lock(&self.left).contains(&rank)
    }

    fn abort(&self, comm: u32, reason: &str) {
        self.session.abort(comm, reason);
    }

    fn subscribe(&self, listener: Box<dyn Fn(&Notice) + Send + Sync>) {
        self.session.on_event(Box::new(move |event| {
            listener(&match event {
                Event::RankLost { rank, detail } => Notice::Lost { rank: *rank, detail: detail.clone() },
                Event::Abort { from, comm, reason } => {
                    Notice::Abort { from: *from, comm: *comm, reason: reason.clone() }
                }
                Event::StoreLost { detail } => Notice::StoreLost { detail: detail.clone() },
                // A rank that has left is only missed by those who still wait for it: their links say so.
                Event::RankLeft { .. } => return,
            });
        }));
    }

    fn silence_limit(&self) -> Duration {
        self.config.heartbeat * 4
    }

    fn ids(&self) -> &AtomicU32 {
        &self.ids
    }

    fn close(&self) {
        self.session.close();
    }
}
