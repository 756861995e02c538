//! Links between ranks that are threads of one process: the rings of `shm` in memory that they have in common.
//!
//! The rendezvous of the threads is a [`Hub`], so there is nothing to listen on and no handshake.

mod connect;

pub use connect::{ConnectTo, Hub};
