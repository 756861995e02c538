//! The version of NCCL that this library stands for.

use std::sync::OnceLock;

/// 2.28.9, unless `TINYNCCL_NCCL_VERSION` says otherwise.
const VERSION: i32 = 22_809;

/// The version that `ncclGetVersion` answers, in NCCL's coding: 10000 times the major number, 100 times the minor one.
pub(crate) fn version() -> i32 {
    static ASKED: OnceLock<i32> = OnceLock::new();
    *ASKED.get_or_init(|| {
        let asked = std::env::var("TINYNCCL_NCCL_VERSION").ok().and_then(|text| text.trim().parse().ok());
        asked.unwrap_or(VERSION)
    })
}
