//! The objects of libibverbs, one per file, each freed once when the last user is gone.
//!
//! ```text
//! Context ─┬─ Pd ─┬─ Mr
//!          │      └─ Qp ── Cq
//!          ├─ Channel ── Cq
//!          └─ (device list, GID table: gids)
//! ```
//! An object keeps those it hangs on alive by an `Arc`, so the order of destruction that libibverbs asks for
//! (MRs and QPs before their PD, everything before the context) follows from the types. Each constructor makes one
//! object and nothing else: when a later one fails, those made before are freed on the way out. No `drop` panics.

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

use std::io;

/// Says that freeing something failed. A `drop` can neither return an error nor panic.
fn complain(operation: &str, code: i32) {
    if code != 0 {
        // Verbs calls return errno, or -1 and set it.
        let cause = if code > 0 { io::Error::from_raw_os_error(code) } else { io::Error::last_os_error() };
        log::warn!("{operation}: {cause}");
    }
}
