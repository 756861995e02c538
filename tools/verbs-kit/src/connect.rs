//! A queue pair from RESET to RTS in one call, with attributes that suit most programs. Milestone 02 takes the same
//! three steps one by one and explains each attribute.

use std::hash::{BuildHasher, RandomState};

use anyhow::{Context as _, Result, anyhow, bail};
use ffi::{ibv_qp_attr_mask as Mask, ibv_qp_state as state};

use crate::endpoint::Endpoint;
use crate::side::Side;
use crate::verbs::{Local, Qp, ffi};
use crate::words;

/// Answers of a QP to a receiver that has no RECV posted.
#[derive(Debug, Clone, Copy)]
pub struct Retries {
    /// Code of the pause that it asks of its peer.
    pub min_rnr_timer: u8,
    /// Times that it repeats its own message; 7 means forever.
    pub rnr_retry: u8,
}

impl Default for Retries {
    /// A pause of 0.64 ms, and an error soon after.
    fn default() -> Retries {
        Retries { min_rnr_timer: 12, rnr_retry: 6 }
    }
}

/// The address of `qp` for its peer, with a random first sequence number.
pub fn endpoint(qp: &Qp, local: &Local) -> Endpoint {
    let psn = RandomState::new().hash_one(qp.number()) as u32 & 0xff_ffff;
    Endpoint { qpn: qp.number(), psn, gid: local.gid.gid, lid: local.port.lid, mtu: local.mtu }
}

/// Exchanges addresses over `side` and takes `qp` to RTS. `access` limits the peer's rights to our memory; `program` is
/// the name of the program that the peer should be. The peer may not be in RTR yet: meet it before the first request.
///
/// # Errors
/// The peer is another program, or the device refuses a step.
pub fn over(side: &mut Side, qp: &mut Qp, local: &Local, access: u32, program: &str) -> Result<()> {
    let mine = endpoint(qp, local);
    side.send(&mine.to_string())?;
    let line = side.receive("endpoint")?;
    let peer: Endpoint = line.parse().map_err(|e| anyhow!("{} is no {program}: {e}", side.peer()))?;
    to_rts(qp, local, access, &mine, &peer, Retries::default())?;
    log::info!("connected to the peer's {peer}; it may do {}", words::access(access));
    Ok(())
}

/// Takes `qp`, whose address is `mine`, from RESET to RTS, connected to `peer`.
///
/// # Errors
/// The device refuses a step.
pub fn to_rts(
    qp: &mut Qp,
    local: &Local,
    access: u32,
    mine: &Endpoint,
    peer: &Endpoint,
    retries: Retries,
) -> Result<()> {
    let Some(path_mtu) = words::mtu_number(mine.mtu.min(peer.mtu)) else { bail!("an MTU of {} bytes", peer.mtu) };
    let init = ffi::ibv_qp_attr {
        qp_state: state::IBV_QPS_INIT,
        qp_access_flags: access,
        port_num: local.gid.port,
        ..Default::default()
    };
    let mask = Mask::IBV_QP_STATE | Mask::IBV_QP_ACCESS_FLAGS | Mask::IBV_QP_PKEY_INDEX | Mask::IBV_QP_PORT;
    qp.modify("RESET -> INIT", init, mask)?;

    let mut address = ffi::ibv_ah_attr { dlid: peer.lid, port_num: local.gid.port, ..Default::default() };
    if local.port.ethernet {
        address.is_global = 1;
        address.grh.dgid = ffi::ibv_gid { raw: peer.gid.0 };
        address.grh.sgid_index = u8::try_from(local.gid.index).context("GID index")?;
        address.grh.hop_limit = 64;
    }
    let rtr = ffi::ibv_qp_attr {
        qp_state: state::IBV_QPS_RTR,
        path_mtu,
        rq_psn: peer.psn,
        dest_qp_num: peer.qpn,
        ah_attr: address,
        max_dest_rd_atomic: 1,
        min_rnr_timer: retries.min_rnr_timer,
        ..Default::default()
    };
    let mask = Mask::IBV_QP_STATE
        | Mask::IBV_QP_PATH_MTU
        | Mask::IBV_QP_RQ_PSN
        | Mask::IBV_QP_DEST_QPN
        | Mask::IBV_QP_AV
        | Mask::IBV_QP_MAX_DEST_RD_ATOMIC
        | Mask::IBV_QP_MIN_RNR_TIMER;
    qp.modify("INIT -> RTR", rtr, mask)?;

    let rts = ffi::ibv_qp_attr {
        qp_state: state::IBV_QPS_RTS,
        sq_psn: mine.psn,
        max_rd_atomic: 1,
        // A dead peer is an error after about a second: 67 ms, seven times.
        timeout: 14,
        retry_cnt: 6,
        rnr_retry: retries.rnr_retry,
        ..Default::default()
    };
    let mask = Mask::IBV_QP_STATE
        | Mask::IBV_QP_SQ_PSN
        | Mask::IBV_QP_MAX_QP_RD_ATOMIC
        | Mask::IBV_QP_TIMEOUT
        | Mask::IBV_QP_RETRY_CNT
        | Mask::IBV_QP_RNR_RETRY;
    qp.modify("RTR -> RTS", rts, mask)
}
