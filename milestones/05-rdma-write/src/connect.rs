//! A device, its objects, and connected queue pairs: milestone 02 in one call.

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, ensure};
use verbs_hello::completion::Completion;
use verbs_hello::endpoint::Endpoint;
use verbs_hello::say;
use verbs_hello::side::Side;
use verbs_hello::steps::{Init, Rtr, Rts};
use verbs_hello::verbs::{Channel, Cq, Depth, Local, Pd, Qp};

pub(crate) use verbs_hello::verbs::ffi::ibv_access_flags as Access;

/// The objects that each side keeps for the whole run.
pub(crate) struct Node<'a> {
    pub(crate) local: &'a Local,
    pub(crate) side: Side,
    pub(crate) pd: Arc<Pd>,
    pub(crate) cq: Arc<Cq>,
    pub(crate) patience: Duration,
}

impl<'a> Node<'a> {
    pub(crate) fn new(local: &'a Local, side: Side, patience: Duration) -> Result<Node<'a>> {
        let pd = Pd::new(&local.context)?;
        let channel = Channel::new(&local.context)?;
        let cq = Cq::with_channel(&local.context, 16, &channel)?;
        Ok(Node { local, side, pd, cq, patience })
    }

    /// A new queue pair, connected to the peer's. `access` limits the peer's rights to our memory.
    pub(crate) fn connect(&mut self, access: Access) -> Result<Qp> {
        let Local { gid, port, mtu, .. } = self.local;
        let mut qp = Qp::new(&self.pd, &self.cq, Depth { send: 4, receive: 4 })?;
        qp.to_init(&Init { port_num: gid.port, pkey_index: 0, access: access.0 })?;
        let psn = RandomState::new().hash_one(qp.number()) as u32 & 0xff_ffff;
        let mine = Endpoint { qpn: qp.number(), psn, gid: gid.gid, lid: port.lid, mtu: *mtu };
        self.side.send(&mine.to_string())?;
        let line = self.side.receive("endpoint")?;
        let peer: Endpoint = line.parse().map_err(|e| anyhow!("{} is no rdma-write: {e}", self.side.peer()))?;
        let sgid_index = u8::try_from(gid.index).context("GID index")?;
        qp.to_rtr(&Rtr::to(peer, peer.mtu.min(*mtu), gid.port, sgid_index, port.ethernet))?;
        qp.to_rts(&Rts::patient(psn))?;
        log::info!("connected to the peer's {peer}; it may do {}", verbs_hello::words::access(access.0));
        Ok(qp)
    }

    /// Sleeps until the next completion and prints it.
    pub(crate) fn completion(&self) -> Result<Completion> {
        let completion = self.cq.wait(Instant::now() + self.patience)?;
        let completion = completion.with_context(|| format!("no completion within {:?} (--timeout)", self.patience))?;
        say!("  completion: {completion}");
        Ok(completion)
    }

    /// Sleeps until the next completion and prints it; it must be successful and belong to request `wr_id`.
    pub(crate) fn success(&self, wr_id: u64) -> Result<Completion> {
        let completion = self.completion()?;
        ensure!(completion.wr_id == wr_id, "a completion of wr_id {}, expected {wr_id}", completion.wr_id);
        ensure!(completion.ok(), "the request failed: {completion}");
        Ok(completion)
    }
}
