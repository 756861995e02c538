//! The settings of NCCL's users, as settings of this library.

use std::sync::OnceLock;

/// The version that `ncclGetVersion` answers unless `TINYNCCL_NCCL_VERSION` says otherwise: 2.28.9.
pub(crate) const VERSION: i32 = 22_809;

/// NCCL's variables that mean something here, and their defaults.
pub(crate) const NCCL: [(&str, &str); 10] = [
    ("NCCL_DEBUG", ""),
    ("NCCL_DEBUG_FILE", ""),
    ("NCCL_SOCKET_IFNAME", ""),
    ("NCCL_COMM_ID", ""),
    ("NCCL_ALGO", ""),
    ("NCCL_PROTO", ""),
    ("NCCL_MIN_CTAS", ""),
    ("NCCL_MAX_CTAS", ""),
    ("NCCL_P2P_DISABLE", "0"),
    ("TINYNCCL_NCCL_VERSION", "22809"),
];

/// The version that `ncclGetVersion` answers.
pub(crate) fn version() -> i32 {
    static ASKED: OnceLock<i32> = OnceLock::new();
    *ASKED.get_or_init(|| {
        let asked = std::env::var("TINYNCCL_NCCL_VERSION").ok().and_then(|text| text.trim().parse().ok());
        asked.unwrap_or(VERSION)
    })
}
