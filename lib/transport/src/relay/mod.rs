//! Links between two ranks that do not reach each other, through a rank that reaches both.
//!
//! # Design
//! - **Who relays.** Every rank reports which others are [far](super::Endpoint::far), so every rank computes the same
//!   [`Routes`]: the shortest path over the graph "not far", the lowest ranks among equals. A path may have more than
//!   one relay.
//! - **What a relayed link is.** One ordinary link per hop, each with its own handshake, queues and credits. The ends
//!   hold the links of the first and of the last hop, wrapped (`ends.rs`) so that `peer` is the far rank. The lower end
//!   dials the first relay; its hello names both ends (`handshake.rs`). A relay dials the next hop and only then sends
//!   its welcome, so the answer comes from the far end, and so does a refusal.
//! - **Who moves the data.** A thread of the relay rank's endpoint (`forwarder.rs`), started with its first relayed
//!   link: the rank itself may be computing, in another call or in none. It sleeps in `poll` when nothing moves, as an
//!   executor does.
//! - **Cut-through.** A message, which is at most one slot of a link, goes on as soon as it is here whole; a call's
//!   data is many messages. It is copied once, from the slot where it came in to one where it goes out. Headers are not
//!   looked at: order and lengths are the ends' affair.
//! - **Bound.** A message stays in its slot until the next hop has taken it. So credit goes hop by hop, the relay holds
//!   nothing but the slots of its two links, and a slow receiver stops the sender.
//! - **Ends.** An end that closes or dies: what it sent is delivered, then a notice (`notice.rs`) that names the rank
//!   that is gone, and the reason, then the other end's link closes. What is sent to the dead end is thrown away, so
//!   that its peer does not wait for credit. A relay that dies closes both its links without a notice: each end's error
//!   names the relay and the other end.
//! - **Leaving.** A relay whose own work is done announces it, and goes on until one rank of each pair that may need it
//!   has left: [`Endpoint::is_needed`](super::Endpoint::is_needed).
//! - **Waiting** has the deadlines it has over any link: a stopped relay is a link on which nothing moves.
//!
//! Sources: cut-through switching (Kermani and Kleinrock, 1979), with messages in place of flits; NCCL's network proxy
//! thread for moving data outside the callers' threads.

mod ends;
mod forwarder;
mod junction;
mod notice;
mod setups;
#[cfg(test)]
mod tests;

pub use forwarder::Traffic;
pub use tinynccl_plan::topology::{Path, Routes};

pub(crate) use ends::wrap;
pub(crate) use forwarder::Forwarder;
pub(crate) use junction::Junction;
pub(crate) use setups::Setups;
