//! A completion queue as an object of C, and completions as its structures.

use std::cell::UnsafeCell;
use std::sync::Arc;

use softroce::Wc;

use crate::constants::{ibv_wc_flags, ibv_wc_opcode, ibv_wc_status};
use crate::extended::ibv_cq_ex;
use crate::types::ibv_wc;
use crate::uses::Uses;

/// A completion queue.
#[repr(C)]
pub(crate) struct Cq {
    pub(crate) base: ibv_cq_ex,
    pub(crate) inner: Arc<softroce::Cq>,
    /// The completion that `ibv_start_poll` or `ibv_next_poll` found last.
    pub(crate) current: UnsafeCell<ibv_wc>,
    /// Queue pairs that complete into it: one counts twice where both of its queues do.
    pub(crate) uses: Uses,
}

pub(crate) fn completion(wc: &Wc) -> ibv_wc {
    let mut flags = ibv_wc_flags(0);
    let (mut word, mut sl) = (0, 0);
    if wc.grh {
        // verbs.h has no field for the kind of header. ConnectX puts it into the service level, where UCX looks for it:
        // 8 for RoCEv2, 1 for IPv6, 2 for IPv4.
        sl = if wc.ipv4 { 8 | 2 } else { 8 | 1 };
        flags |= ibv_wc_flags::IBV_WC_GRH;
    }
    if let Some(imm) = wc.imm {
        flags |= ibv_wc_flags::IBV_WC_WITH_IMM;
        word = u32::from_ne_bytes(imm);
    }
    if let Some(rkey) = wc.invalidated {
        flags |= ibv_wc_flags::IBV_WC_WITH_INV;
        word = rkey;
    }
    ibv_wc {
        wr_id: wc.id,
        status: wc.status as ibv_wc_status::Type,
        opcode: wc.opcode as ibv_wc_opcode::Type,
        byte_len: wc.byte_len,
        imm_data: word,
        qp_num: wc.qpn,
        src_qp: wc.src_qpn,
        wc_flags: flags,
        sl,
        ..ibv_wc::default()
    }
}
