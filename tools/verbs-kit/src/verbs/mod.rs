//! The objects of libibverbs, one per file, each freed once when its last user is gone.
//!
//! ```text
//! Context ─┬─ Pd ─┬─ Mr
//!          │      └─ Qp ── Cq
//!          ├─ Channel ── Cq
//!          └─ (device list, GID table: gids)
//! ```
//! An object holds an `Arc` of each object it depends on, so the types enforce the destruction order of libibverbs
//! (MRs and QPs before their PD, everything before the context). Each constructor creates one object and nothing else:
//! when a later one fails, the earlier ones are dropped on the error path. No `drop` panics.
//!
//! The functions below are libibverbs' own ([`ffi`]). By default the crate `softroce-verbs` implements them: an RDMA
//! device in user space, over UDP. With the feature `verbs` they are the system's library, for adapters and for Linux'
//! own software device rdma_rxe. The two agree in names and structures, so this source does not differ.

mod channel;
mod context;
mod cq;
mod gids;
mod local;
mod mr;
mod pd;
mod qp;

pub use channel::Channel;
pub use context::{Context, Port};
pub use cq::Cq;
pub use gids::{Device, devices};
pub use local::Local;
pub use mr::Mr;
pub use pd::Pd;
pub use qp::{Depth, Qp};

#[cfg(feature = "verbs")]
pub use ibverbs_sys as ffi;
#[cfg(not(feature = "verbs"))]
pub use softroce_verbs as ffi;

use std::io;

/// Logs a failure to free an object. A `drop` can neither return an error nor panic.
fn complain(operation: &str, code: i32) {
    if code != 0 {
        // Verbs calls return errno, or -1 and set it.
        let cause = if code > 0 { io::Error::from_raw_os_error(code) } else { io::Error::last_os_error() };
        log::warn!("{operation}: {cause}");
    }
}
