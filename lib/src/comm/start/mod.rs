//! Makes communicators: over the network or of threads, from others, with what they measure and share at their start.

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
