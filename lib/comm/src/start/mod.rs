//! Makes communicators: over the network, of threads, or from others. Includes their measurements and shared memory.

mod agree;
pub(crate) mod alloc;
mod discover;
mod exchange;
pub(crate) mod init;
mod local;
mod network;
mod probe;
mod share;
mod split;
mod trace;
pub(crate) mod tune;
