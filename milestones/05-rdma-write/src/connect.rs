//! The objects of a side, and its connected queue pairs.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use verbs_kit::completion::Completion;
use verbs_kit::connect;
use verbs_kit::say;
use verbs_kit::side::Side;
use verbs_kit::verbs::{Channel, Cq, Depth, Local, Pd, Qp};

pub(crate) use verbs_kit::verbs::ffi::ibv_access_flags as Access;

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
        let mut qp = Qp::new(&self.pd, &self.cq, Depth { send: 4, receive: 4 })?;
        connect::over(&mut self.side, &mut qp, self.local, access.0, "rdma-write")?;
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
