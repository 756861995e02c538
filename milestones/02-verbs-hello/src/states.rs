//! The steps of a queue pair's life: each one's attributes, handed to the device.

use anyhow::{Result, bail};
use ffi::{ibv_qp_attr_mask as Mask, ibv_qp_state as state};
use verbs_kit::verbs::{Qp, ffi};
use verbs_kit::words;

use crate::steps::{Init, Rtr, Rts};

/// Takes `qp` from RESET to INIT.
pub(crate) fn to_init(qp: &mut Qp, init: &Init) -> Result<()> {
    let attributes = ffi::ibv_qp_attr {
        qp_state: state::IBV_QPS_INIT,
        qp_access_flags: init.access,
        pkey_index: init.pkey_index,
        port_num: init.port_num,
        ..Default::default()
    };
    let mask = Mask::IBV_QP_STATE | Mask::IBV_QP_ACCESS_FLAGS | Mask::IBV_QP_PKEY_INDEX | Mask::IBV_QP_PORT;
    qp.modify("RESET -> INIT", attributes, mask)
}

/// Takes `qp` from INIT to RTR.
// EXERCISE 3 (The attributes of each step): INIT to RTR: fill in the peer's address and the attributes
// of this step, name each of them in the mask, and call `modify`.
pub(crate) fn to_rtr(qp: &mut Qp, rtr: &Rtr) -> Result<()> {
    let Some(path_mtu) = words::mtu_number(rtr.path_mtu) else { bail!("an MTU of {} bytes", rtr.path_mtu) };
    let mut address = ffi::ibv_ah_attr {
        dlid: rtr.peer.lid,
        is_global: u8::from(rtr.is_global),
        port_num: rtr.port_num,
        ..Default::default()
    };
    if rtr.is_global {
        address.grh.dgid = ffi::ibv_gid { raw: rtr.peer.gid.0 };
        address.grh.sgid_index = rtr.sgid_index;
        address.grh.hop_limit = rtr.hop_limit;
    }
    let attributes = ffi::ibv_qp_attr {
        qp_state: state::IBV_QPS_RTR,
        path_mtu,
        rq_psn: rtr.peer.psn,
        dest_qp_num: rtr.peer.qpn,
        ah_attr: address,
        max_dest_rd_atomic: rtr.max_dest_rd_atomic,
        min_rnr_timer: rtr.min_rnr_timer,
        ..Default::default()
    };
    let mask = Mask::IBV_QP_STATE
        | Mask::IBV_QP_PATH_MTU
        | Mask::IBV_QP_RQ_PSN
        | Mask::IBV_QP_DEST_QPN
        | Mask::IBV_QP_AV
        | Mask::IBV_QP_MAX_DEST_RD_ATOMIC
        | Mask::IBV_QP_MIN_RNR_TIMER;
    qp.modify("INIT -> RTR", attributes, mask)
}

/// Takes `qp` from RTR to RTS.
pub(crate) fn to_rts(qp: &mut Qp, rts: &Rts) -> Result<()> {
    let attributes = ffi::ibv_qp_attr {
        qp_state: state::IBV_QPS_RTS,
        sq_psn: rts.sq_psn,
        max_rd_atomic: rts.max_rd_atomic,
        timeout: rts.timeout,
        retry_cnt: rts.retry_cnt,
        rnr_retry: rts.rnr_retry,
        ..Default::default()
    };
    let mask = Mask::IBV_QP_STATE
        | Mask::IBV_QP_SQ_PSN
        | Mask::IBV_QP_MAX_QP_RD_ATOMIC
        | Mask::IBV_QP_TIMEOUT
        | Mask::IBV_QP_RETRY_CNT
        | Mask::IBV_QP_RNR_RETRY;
    qp.modify("RTR -> RTS", attributes, mask)
}
