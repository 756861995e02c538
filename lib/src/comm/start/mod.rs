//! Makes communicators: over the network, of threads, or from others. Includes their measurements and shared memory.

mod agree;
pub(in crate::comm) mod alloc;
mod exchange;
pub(in crate::comm) mod init;
mod local;
mod network;
mod probe;
mod share;
mod split;
mod trace;
pub(in crate::comm) mod tune;
