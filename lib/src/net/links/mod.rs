//! Links between ranks over all cables that join their hosts (`TINYNCCL_TCP_RAILS`), in the place of TCP's.
//!
//! A link is two connections, one for each direction, so that every rule of this module holds for it: pieces over rails
//! by their measured speed, RDMA beside streams, lost rails and new ones. The ranks meet over TCP, as the transport
//! does, prove who they are, and tell each other the handles of listeners for this link alone.
//!
//! ```text
//! lower rank (dialer)                    higher rank
//! hello, proof, welcome     (as for every link)
//! handle                        <->      handle
//! connects to it, accepts       <->      connects to it, accepts
//! ready                         <->      ready
//! ```
//! A message is its header and its payload, in a slot of the link's own: both ends have as many as the link has depth.
//! So a receive is posted before its message comes, and no thread of `net` touches memory of a caller that has given
//! up. Each end copies a message once, at a multiple of the speed of any network.
//!
//! | file | idea |
//! |---|---|
//! | `fabric`, `connect` | what an [`Endpoint`] sees of it, and how two ranks make a link |
//! | `send`, `recv`, `slots` | the halves, and the memory of messages |
//! | `linger` | what a dropped link has not sent |

mod connect;
mod fabric;
mod linger;
mod recv;
mod send;
mod slots;

use crate::config::Config;
use crate::error::Result;
use crate::secret::Secret;
use crate::transport::{Endpoint, tcp};

/// All messages have one.
const TAG: i32 = 0;

/// An [`Endpoint`] as [`Endpoint::new`] makes it, where `TINYNCCL_TCP_RAILS` counts, too.
///
/// # Errors
/// As there, and those of [`Net::new`](super::Net::new).
pub fn endpoint(rank: usize, secret: Secret, config: &Config) -> Result<Endpoint> {
    let sockets = if config.tcp_rails { ("rails", fabric::bind as _) } else { tcp::BIND };
    Endpoint::over(rank, secret, config, sockets)
}
