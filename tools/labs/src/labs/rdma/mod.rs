//! Labs on queue pairs and registered memory themselves, with the objects of libibverbs.

pub(super) mod rnr_storm;
pub(super) mod stale_registration;

use anyhow::Result;
use verbs_kit::pair::Pair;
use verbs_kit::verbs::ffi::ibv_access_flags as Access;

/// Rank 0 sends, rank 1 receives: see [`Pair::new`].
fn pair(min_rnr_timer: u8, rnr_retry: u8) -> Result<Pair> {
    Pair::new(Access::IBV_ACCESS_LOCAL_WRITE.0, min_rnr_timer, rnr_retry)
}
