//! Both ends of a connection in one process: for labs and exercises that are about what passes between them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

use crate::choice::Choice;
use crate::connect::{self, Retries};
use crate::verbs::{Cq, Depth, Local, Pd, Qp};

/// Requests that a queue holds.
const DEPTH: u32 = 64;
/// Longest wait for a completion.
const PATIENCE: Duration = Duration::from_secs(30);

/// A queue pair and where its completions come.
#[derive(Debug)]
pub struct End {
    /// The queue pair.
    pub qp: Qp,
    /// Completions of both of its queues.
    pub cq: Arc<Cq>,
}

impl End {
    fn new(pd: &Arc<Pd>, local: &Local) -> Result<End> {
        let cq = Cq::new(&local.context, 2 * DEPTH)?;
        let qp = Qp::new(pd, &cq, Depth { send: DEPTH, receive: DEPTH })?;
        Ok(End { qp, cq })
    }

    /// Waits for a request that must succeed.
    ///
    /// # Errors
    /// It fails, or does not come within half a minute.
    pub fn complete(&self) -> Result<()> {
        let completion = self.cq.spin(Instant::now() + PATIENCE)?.context("no completion came")?;
        ensure!(completion.ok(), "a request failed: {completion}");
        Ok(())
    }
}

/// Two connected queue pairs of one device. Both are in this process.
#[derive(Debug)]
pub struct Pair {
    /// The device, its port and the rest of our address.
    pub local: Local,
    /// Protection domain of both queue pairs, and of the memory that they use.
    pub pd: Arc<Pd>,
    /// One end.
    pub sender: End,
    /// The other end.
    pub receiver: End,
}

impl Pair {
    /// Either end allows the peer `access` (`enum ibv_access_flags`). It requests a pause of `min_rnr_timer` when it
    /// has no RECV, and repeats a message `rnr_retry` times when the peer has none; 7 is forever.
    ///
    /// # Errors
    /// No device; a step that the driver refuses.
    pub fn new(access: u32, min_rnr_timer: u8, rnr_retry: u8) -> Result<Pair> {
        let choice = Choice { device: None, port: 1, gid_index: None, mtu: None, timeout: PATIENCE, side: None };
        let local = Local::open(&choice)?;
        let pd = Pd::new(&local.context)?;
        let (mut sender, mut receiver) = (End::new(&pd, &local)?, End::new(&pd, &local)?);
        let [from, to] = [&sender, &receiver].map(|end| connect::endpoint(&end.qp, &local));
        let retries = Retries { min_rnr_timer, rnr_retry };
        connect::to_rts(&mut sender.qp, &local, access, &from, &to, retries)?;
        connect::to_rts(&mut receiver.qp, &local, access, &to, &from, retries)?;
        Ok(Pair { local, pd, sender, receiver })
    }
}
