//! Names for the numbers of the verbs API. The numbers come from `infiniband/verbs.h`, the meanings from the InfiniBand
//! specification (volume 1, chapters 9 to 11) and the manual pages of libibverbs.

/// A completion's status: its name without `IBV_WC_`, and its meaning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Status {
    /// `SUCCESS`, `REM_ACCESS_ERR` and so on.
    pub name: &'static str,
    /// Description of the outcome, with the usual cause.
    pub meaning: &'static str,
}

/// All values of `enum ibv_wc_status`, by number.
const STATUS: [(&str, &str); 24] = [
    ("SUCCESS", "done"),
    ("LOC_LEN_ERR", "a message longer than the posted RECV's buffer, or a request longer than the port allows"),
    (
        "LOC_QP_OP_ERR",
        "the QP could not execute the request: malformed, or not allowed for this kind of QP (rxe: also a message longer than the RECV)",
    ),
    ("LOC_EEC_OP_ERR", "end-to-end context error (reliable datagram, which no device implements)"),
    ("LOC_PROT_ERR", "our own buffer is not covered by the lkey, or the MR lacks LOCAL_WRITE"),
    ("WR_FLUSH_ERR", "never executed: the QP was in state ERR; look at the first completion that failed"),
    ("MW_BIND_ERR", "binding a memory window failed"),
    ("BAD_RESP_ERR", "the peer's answer is invalid: another QP's packets, or sequence numbers that differ"),
    ("LOC_ACCESS_ERR", "a WRITE_WITH_IMM came to memory that the local MR does not allow"),
    ("REM_INV_REQ_ERR", "the peer refused the request: its RECV buffer was too short, or its QP does not allow this"),
    ("REM_ACCESS_ERR", "the peer refused access: wrong rkey, outside of the MR, or the MR or QP lacks the permission"),
    ("REM_OP_ERR", "the peer failed while it executed the request; its own completion says why (rxe: RECV too short)"),
    (
        "RETRY_EXC_ERR",
        "no answer after all retries: peer gone, QP not ready, or packets do not arrive (GID, route, MTU)",
    ),
    ("RNR_RETRY_EXC_ERR", "the peer had no RECV posted after all retries"),
    ("LOC_RDD_VIOL_ERR", "reliable datagram domains differ"),
    ("REM_INV_RD_REQ_ERR", "the peer refused a reliable datagram"),
    ("REM_ABORT_ERR", "the peer aborted the operation"),
    ("INV_EECN_ERR", "invalid end-to-end context number"),
    ("INV_EEC_STATE_ERR", "invalid end-to-end context state"),
    ("FATAL_ERR", "the device is broken: it needs a reset"),
    ("RESP_TIMEOUT_ERR", "the answer came too late"),
    ("GENERAL_ERR", "an error that fits no other status"),
    ("TM_ERR", "tag matching failed"),
    ("TM_RNDV_INCOMPLETE", "tag matching left the rendezvous to software"),
];

/// A completion's status in words.
pub fn wc_status(status: u32) -> Status {
    let (name, meaning) =
        STATUS.get(status as usize).copied().unwrap_or(("unknown", "a status newer than this program"));
    Status { name, meaning }
}

/// `enum ibv_wc_opcode`: the completed operation. Valid only when the status is SUCCESS.
pub fn wc_opcode(opcode: u32) -> &'static str {
    match opcode {
        0 => "SEND",
        1 => "RDMA_WRITE",
        2 => "RDMA_READ",
        3 => "COMP_SWAP",
        4 => "FETCH_ADD",
        5 => "BIND_MW",
        6 => "LOCAL_INV",
        7 => "TSO",
        128 => "RECV",
        129 => "RECV_RDMA_WITH_IMM",
        _ => "unknown",
    }
}

/// `enum ibv_qp_state`.
pub fn qp_state(state: u32) -> &'static str {
    ["RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR"].get(state as usize).copied().unwrap_or("unknown")
}

/// `enum ibv_event_type`.
pub fn async_event(event: u32) -> &'static str {
    const NAMES: [&str; 20] = [
        "CQ_ERR: a completion queue overflowed",
        "QP_FATAL: a QP broke",
        "QP_REQ_ERR: the peer sent an invalid request",
        "QP_ACCESS_ERR: the peer asked for access that it lacks",
        "COMM_EST: the peer's first packet came while in state RTR",
        "SQ_DRAINED: the send queue is drained",
        "PATH_MIG: moved to the alternate path",
        "PATH_MIG_ERR: the alternate path failed",
        "DEVICE_FATAL: the device broke or was removed",
        "PORT_ACTIVE: a port came up",
        "PORT_ERR: a port went down",
        "LID_CHANGE: a port's LID changed",
        "PKEY_CHANGE: a port's table of partition keys changed",
        "SM_CHANGE: another subnet manager",
        "SRQ_ERR: a shared receive queue broke",
        "SRQ_LIMIT_REACHED: a shared receive queue runs low",
        "QP_LAST_WQE_REACHED: a QP takes no more from its shared receive queue",
        "CLIENT_REREGISTER: the subnet manager asks to register again",
        "GID_CHANGE: a port's GID table changed",
        "WQ_FATAL: a work queue broke",
    ];
    NAMES.get(event as usize).copied().unwrap_or("unknown")
}

/// `enum ibv_port_state`.
pub fn port_state(state: u32) -> &'static str {
    ["NOP", "DOWN", "INIT", "ARMED", "ACTIVE", "ACTIVE_DEFER"].get(state as usize).copied().unwrap_or("unknown")
}

/// Bytes of `enum ibv_mtu`: 1 is 256, 5 is 4096.
pub fn mtu_bytes(mtu: u32) -> Option<u32> {
    (1..=5).contains(&mtu).then(|| 128 << mtu)
}

/// The number of `enum ibv_mtu` for 256, 512, 1024, 2048 or 4096 bytes.
pub fn mtu_number(bytes: u32) -> Option<u32> {
    (1..=5).find(|n| 128 << n == bytes)
}

/// Permission bits of an MR or a QP (`enum ibv_access_flags`), joined by ` | `.
pub fn access(flags: u32) -> String {
    const NAMES: [&str; 8] = [
        "LOCAL_WRITE",
        "REMOTE_WRITE",
        "REMOTE_READ",
        "REMOTE_ATOMIC",
        "MW_BIND",
        "ZERO_BASED",
        "ON_DEMAND",
        "HUGETLB",
    ];
    let mut names: Vec<String> =
        (0..NAMES.len()).filter(|bit| flags >> bit & 1 == 1).map(|bit| NAMES[bit].to_owned()).collect();
    let rest = flags >> NAMES.len() << NAMES.len();
    if rest != 0 {
        names.push(format!("{rest:#x}"));
    }
    if names.is_empty() { "none".to_owned() } else { names.join(" | ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_numbers() {
        assert_eq!(wc_status(0).name, "SUCCESS");
        assert_eq!(wc_status(5).name, "WR_FLUSH_ERR");
        assert_eq!(wc_status(10).name, "REM_ACCESS_ERR");
        assert_eq!(wc_status(12).name, "RETRY_EXC_ERR");
        assert_eq!(wc_status(13).name, "RNR_RETRY_EXC_ERR");
        assert_eq!(wc_status(24).name, "unknown");
        assert_eq!((wc_opcode(129), wc_opcode(127)), ("RECV_RDMA_WITH_IMM", "unknown"));
        assert_eq!((qp_state(3), qp_state(6), qp_state(7)), ("RTS", "ERR", "unknown"));
        assert_eq!(port_state(4), "ACTIVE");
    }

    #[test]
    fn mtus_are_powers_of_two_from_256_to_4096() {
        assert_eq!([1, 2, 3, 4, 5].map(mtu_bytes), [256, 512, 1024, 2048, 4096].map(Some));
        assert_eq!([0, 6, 200].map(mtu_bytes), [None; 3]);
        assert_eq!(mtu_number(1024), Some(3));
        assert_eq!([0, 128, 1000, 1500, 8192].map(mtu_number), [None; 5]);
    }

    #[test]
    fn permissions() {
        assert_eq!(access(0), "none");
        assert_eq!(access(1 | 4), "LOCAL_WRITE | REMOTE_READ");
        assert_eq!(access(2 | 1 << 20), "REMOTE_WRITE | 0x100000");
    }

    /// Compares the tables with verbs.h, ours or that of this build.
    #[test]
    fn numbers_are_those_of_the_header() {
        use crate::verbs::ffi::{self, ibv_qp_state, ibv_wc_opcode, ibv_wc_status};
        assert_eq!(wc_status(ibv_wc_status::IBV_WC_REM_ACCESS_ERR).name, "REM_ACCESS_ERR");
        assert_eq!(wc_status(ibv_wc_status::IBV_WC_RNR_RETRY_EXC_ERR).name, "RNR_RETRY_EXC_ERR");
        assert_eq!(wc_status(ibv_wc_status::IBV_WC_TM_RNDV_INCOMPLETE).name, "TM_RNDV_INCOMPLETE");
        assert_eq!(wc_opcode(ibv_wc_opcode::IBV_WC_RECV), "RECV");
        assert_eq!(wc_opcode(ibv_wc_opcode::IBV_WC_RECV_RDMA_WITH_IMM), "RECV_RDMA_WITH_IMM");
        assert_eq!(qp_state(ibv_qp_state::IBV_QPS_ERR), "ERR");
        assert_eq!(mtu_bytes(ffi::IBV_MTU_4096), Some(4096));
        assert!(async_event(ffi::IBV_EVENT_GID_CHANGE).starts_with("GID_CHANGE"));
        assert!(async_event(ffi::IBV_EVENT_QP_ACCESS_ERR).starts_with("QP_ACCESS_ERR"));
        assert_eq!(access(ffi::ibv_access_flags::IBV_ACCESS_REMOTE_ATOMIC.0), "REMOTE_ATOMIC");
    }
}
