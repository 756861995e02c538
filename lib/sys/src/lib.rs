//! Base of every part of tinynccl, which knows no peer: threads, forks, doorbells, the secret, the settings.
//!
//! Programs use the crate `tinynccl`, which has what they need of this one under the same names.

// Modules are public for the crates above; their documentation also links what is private to them.
#![allow(rustdoc::private_intra_doc_links)]

pub mod backoff;
pub mod config;
pub mod doorbell;
pub mod fork;
pub mod half_open;
pub mod interrupt;
pub mod secret;
pub mod signal;
pub mod strangers;
pub mod sync;
pub mod threads;
pub mod ticks;
pub mod unix;

pub use config::Config;
pub use fork::Kept;
pub use secret::Secret;
