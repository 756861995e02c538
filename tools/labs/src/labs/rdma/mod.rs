//! Labs on queue pairs and registered memory themselves, with the objects of milestone 02.

pub(super) mod rnr_storm;
pub(super) mod stale_registration;

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use verbs_hello::choice::Choice;
use verbs_hello::endpoint::Endpoint;
use verbs_hello::steps::{Init, Rtr, Rts};
use verbs_hello::verbs::{Cq, Depth, Local, Pd, Qp};

use verbs_hello::verbs::ffi::ibv_access_flags as Access;

/// Requests that a queue holds.
const DEPTH: u32 = 64;
/// Longest wait for a completion.
const PATIENCE: Duration = Duration::from_secs(30);

/// A queue pair and where its completions come.
struct End {
    qp: Qp,
    cq: Arc<Cq>,
}

impl End {
    fn new(pd: &Arc<Pd>, local: &Local) -> Result<End> {
        let cq = Cq::new(&local.context, 2 * DEPTH)?;
        let mut qp = Qp::new(pd, &cq, Depth { send: DEPTH, receive: DEPTH })?;
        qp.to_init(&Init { port_num: local.gid.port, pkey_index: 0, access: Access::IBV_ACCESS_LOCAL_WRITE.0 })?;
        Ok(End { qp, cq })
    }

    fn endpoint(&self, local: &Local) -> Endpoint {
        let Local { gid, port, mtu, .. } = local;
        Endpoint { qpn: self.qp.number(), psn: 7, gid: gid.gid, lid: port.lid, mtu: *mtu }
    }

    /// Waits for a request that must succeed.
    fn complete(&self) -> Result<()> {
        let completion = self.cq.spin(Instant::now() + PATIENCE)?.context("no completion came")?;
        ensure!(completion.ok(), "a request failed: {completion}");
        Ok(())
    }
}

/// Two connected queue pairs of one device: rank 0 sends, rank 1 receives. Both are in this process.
struct Pair {
    /// Names the device's counters where they are the kernel's.
    #[cfg_attr(not(feature = "verbs"), allow(dead_code))]
    local: Local,
    pd: Arc<Pd>,
    sender: End,
    receiver: End,
}

impl Pair {
    /// The receiver asks for a pause of `min_rnr_timer` when it has no RECV; the sender repeats `rnr_retry` times, 7
    /// for ever.
    fn new(min_rnr_timer: u8, rnr_retry: u8) -> Result<Pair> {
        let choice = Choice { device: None, port: 1, gid_index: None, mtu: None, timeout: PATIENCE, side: None };
        let local = Local::open(&choice)?;
        let pd = Pd::new(&local.context)?;
        let (mut sender, mut receiver) = (End::new(&pd, &local)?, End::new(&pd, &local)?);
        let ends = [sender.endpoint(&local), receiver.endpoint(&local)];
        let index = u8::try_from(local.gid.index).context("GID index")?;
        for (end, to) in [(&mut sender, ends[1]), (&mut receiver, ends[0])] {
            let rtr = Rtr::to(to, local.mtu, local.gid.port, index, local.port.ethernet);
            end.qp.to_rtr(&Rtr { min_rnr_timer, ..rtr })?;
            end.qp.to_rts(&Rts { rnr_retry, ..Rts::patient(7) })?;
        }
        Ok(Pair { local, pd, sender, receiver })
    }
}
