//! Links between ranks over all NIC pairs that join their hosts (`TINYNCCL_TCP_RAILS`), in the place of TCP's.
//!
//! A link is two connections, one for each direction, so that every rule of this module holds for it: fragments over
//! rails by their measured speed, RDMA beside streams, lost rails and new ones. The ranks connect over TCP, as the
//! transport does, authenticate, and send each other the handles of listeners for this link alone.
//!
//! ```text
//! lower rank (dialer)                    higher rank
//! hello, proof, welcome     (as for every link)
//! handle                        <->      handle
//! connects to it, accepts       <->      connects to it, accepts
//! ready                         <->      ready
//! ```
//! A message is its header and its payload, in one of the link's slots: both ends have as many as the link has depth.
//! So a receive is posted before its message comes, and no thread of `rails` touches memory of a caller that has given
//! up. Each end copies a message once, at a multiple of the speed of any network.
//!
//! | file | idea |
//! |---|---|
//! | `fabric`, `connect` | the interface to an [`Endpoint`], and the making of a link between two ranks |
//! | `send`, `recv`, `slots` | the halves, and the memory of messages |
//! | `linger` | messages that a dropped link has not sent |

mod connect;
mod fabric;
mod linger;
mod recv;
mod send;
mod slots;

use crate::{Endpoint, tcp};
use tinynccl_plan::error::Result;
use tinynccl_sys::config::Config;
use tinynccl_sys::secret::Secret;

/// Makes an [`Endpoint`] as [`Endpoint::new`] does, over rails if `TINYNCCL_TCP_RAILS` is set.
///
/// # Errors
/// Errors of [`Endpoint::new`] and of [`Net::new`](super::Net::new).
pub fn endpoint(rank: usize, secret: Secret, config: &Config) -> Result<Endpoint> {
    let sockets = if config.tcp_rails { ("rails", fabric::bind as _) } else { tcp::BIND };
    Endpoint::over(rank, secret, config, sockets)
}
