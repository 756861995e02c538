//! Links over RDMA verbs: reliable connected queue pairs, one or several per (peer, channel), each end writing into the
//! other's memory.
//!
//! The devices are RDMA devices in user space (`softroce`), one per network interface, or, with the feature `verbs`,
//! those of the system's libibverbs.
//!
//! # A message
//! The receiver's memory is two rings: lines of 512 bytes for small messages, slots of `max_message` for the others.
//! The sender writes header and payload with one RDMA WRITE WITH IMMEDIATE to the next entry of the ring; the
//! completion at the receiver shows that it is there, and the immediate word shows which ring it is in and how many of
//! the receiver's messages the writer has freed (the receiver's credit). The receiver reads in place. Small messages
//! are posted inline: the device gets them with the request. Freed messages are reported in a separate write only when
//! many are unreported; so a stream in one direction costs one report per `depth / 2` messages. A sender without credit
//! does not send, so no receive is ever missing at the peer ("receiver not ready"), by construction and not by
//! repetition: see `link`.
//!
//! # Several queue pairs
//! `TINYNCCL_VERBS_QPS` gives a link several of them, over all pairs of ports that the two ranks have on common subnets
//! ([`nics`]), or several over one. A long message is then several writes, one per queue pair: `stripes` says which
//! bytes go where, `link/reassembly.rs` when all are there. Short messages, credit and the goodbye stay on the first
//! queue pair, and with them the order of messages. A failure of any of them ends the link.
//!
//! # Waiting
//! An executor that spins polls the completion queue. Before it sleeps, `arm` polls, asks for an event, and polls
//! again, so that what comes between is not slept through. The completion channel's descriptor and a TCP connection to
//! the peer are in one `epoll` set, whose descriptor the executor polls. The TCP connection carried the handshake and
//! then carries nothing: when it ends, the peer's process is gone, which a queue pair that only receives would never
//! find out. Both halves of a link share its queue: they sleep in one thread, like the rest of an executor's links.
//!
//! # Who reaches whom
//! Ranks with ports on one subnet. The others are linked through ranks that have ports on both: [`super::relay`].
//!
//! # Memory
//! Each end registers `2 * (lines * 512 + slots * (max_message + 64))` bytes, pinned: slots are one and a half times
//! `depth`, so with the defaults 3 MiB per peer and channel. They are mapped and registered with the link and freed
//! with it: no registration outlives its pages. There is no cache of registrations. Memory of a caller's is registered
//! when it is handed over to `Comm::register_persistent`, and until the owner that this returns is dropped;
//! `nics/registered.rs` keeps the table of these. A message from such memory is one write of two parts: the header
//! from its slot of the staging memory, the payload from where it is. Its further stripes are writes from where they
//! are. It counts as flushed when the device reports that it is sent.
//!
//! Sources: NCCL `src/transport/net_ib` for the life cycle; MVAPICH ("High performance RDMA-based MPI implementation
//! over InfiniBand", Liu et al., ICS 2003) for rings written with RDMA and credits that ride on messages.

mod address;
mod connect;
mod fabric;
mod linger;
mod link;
mod listen;
pub(crate) mod nics;
mod options;
mod recv;
mod send;
mod stripes;
pub(crate) mod sys;
#[cfg(test)]
mod tests;

pub use address::VerbsAddress;
pub(crate) use fabric::bind;

use tinynccl_plan::error::Result;
use tinynccl_sys::config::Config;

/// The ports of RDMA devices that `TINYNCCL_TRANSPORT=verbs` would use on this machine.
///
/// # Errors
/// [`Error::Unsupported`](tinynccl_plan::Error::Unsupported) on a machine without a usable device;
/// [`Error::Config`](tinynccl_plan::Error::Config) when a setting names a device, port or GID that does not exist.
pub fn rdma_ports(config: &Config) -> Result<Vec<VerbsAddress>> {
    Ok(nics::Nics::open(0, config)?.addresses())
}
