//! Links over RDMA verbs: reliable connected queue pairs, one or several per (peer, channel), each end writing into the other's
//! memory.
//!
//! # A message
//! The receiver's memory is two rings: lines of 512 bytes for small messages, slots of `max_message` for the others. The
//! sender writes header and payload with one RDMA WRITE WITH IMMEDIATE to the next place of the ring; the completion at the
//! receiver tells that it is there, and the immediate word which ring it is in and how many of *its* messages the writer has
//! freed in turn (its credit). The receiver reads in place. Small messages are posted inline: the device gets them with the
//! request. Freed messages are reported in a write of their own only when many are unreported; so a stream in one direction
//! costs one report per `depth / 2` messages. A sender without credit does not send, so no receive is ever missing at the
//! peer ("receiver not ready"), by construction and not by repetition: see `link`.
//!
//! # Several queue pairs
//! `TINYNCCL_VERBS_QPS` gives a link several of them, over all pairs of ports that the two ranks have on common subnets
//! (`rails`), or several over one. A long message is then several writes, one per queue pair: `stripes` says which bytes go
//! where, `reassembly` when all are there. Short messages, credit and the goodbye stay on the first queue pair, and with them
//! the order of messages. A failure of any of them ends the link.
//!
//! # Waiting
//! An executor that spins polls the completion queue. Before it sleeps, `arm` polls, asks for an event, and polls again, so
//! that what comes between is not slept through. The completion channel's descriptor and a TCP connection to the peer are in
//! one `epoll` set, whose descriptor the executor polls. The TCP connection carried the handshake and then says nothing:
//! when it ends, the peer's process is gone, which a queue pair that only receives would never find out.
//! Both halves of a link share its queue: they sleep in one thread, like the rest of an executor's links.
//!
//! # Who reaches whom
//! Ranks with ports on one subnet. The others meet through ranks that have ports on both: [`super::relay`].
//!
//! # Memory
//! Each end registers `2 * (lines * 512 + slots * (max_message + 64))` bytes, pinned: slots are one and a half times
//! `depth`, so with the defaults 3 MiB per peer and channel. They are mapped and registered with the link and freed with it:
//! no registration outlives its pages. There is no cache of registrations. Memory of a caller's is registered when it is handed
//! over to `Comm::register_persistent`, and until the owner that this returns is dropped; `registered.rs` keeps the table of
//! these. A message from such memory is one write of two pieces: the header from its slot of the staging memory, the payload
//! from where it is. Its further stripes are writes from where they are. It counts as flushed when the device says that it is sent.
//!
//! Sources: NCCL `src/transport/net_ib` for the life cycle; MVAPICH ("High performance RDMA-based MPI implementation over
//! InfiniBand", Liu et al., ICS 2003) for rings written with RDMA and credits that ride on messages.

mod address;
#[cfg(feature = "verbs")]
mod connect;
#[cfg(feature = "verbs")]
mod device;
#[cfg(feature = "verbs")]
mod ending;
#[cfg(feature = "verbs")]
mod exchange;
#[cfg(feature = "verbs")]
mod layout;
#[cfg(feature = "verbs")]
mod link;
#[cfg(feature = "verbs")]
mod listen;
#[cfg(feature = "verbs")]
mod memory;
#[cfg(feature = "verbs")]
mod options;
#[cfg(feature = "verbs")]
mod pace;
#[cfg(feature = "verbs")]
mod rails;
#[cfg(feature = "verbs")]
mod reassembly;
#[cfg(feature = "verbs")]
mod recv;
#[cfg(feature = "verbs")]
mod registered;
#[cfg(feature = "verbs")]
mod send;
#[cfg(feature = "verbs")]
mod setup;
#[cfg(feature = "verbs")]
mod status;
#[cfg(feature = "verbs")]
mod stripes;
#[cfg(not(feature = "verbs"))]
mod stub;
#[cfg(feature = "verbs")]
mod sys;
#[cfg(feature = "verbs")]
mod table;
#[cfg(all(test, feature = "verbs"))]
mod tests;

pub use address::VerbsAddress;

use crate::config::Config;
use crate::error::Result;

/// Most queue pairs of a link.
pub(crate) const MAX_QPS: usize = 16;

/// The ports of RDMA devices that `TINYNCCL_TRANSPORT=verbs` would use on this machine.
///
/// # Errors
/// [`Error::Unsupported`](crate::Error::Unsupported) in a build without the feature `verbs` and on a machine without a usable
/// device; [`Error::Config`](crate::Error::Config) when a setting names a device, port or GID that does not exist.
pub fn rdma_ports(config: &Config) -> Result<Vec<VerbsAddress>> {
    Ok(Rails::open(0, config)?.addresses())
}

#[cfg(not(feature = "verbs"))]
pub(crate) use stub::{Rails, Registration, connect, finish};
#[cfg(feature = "verbs")]
pub(crate) use {connect::connect, listen::finish, rails::Rails, registered::Registration};
