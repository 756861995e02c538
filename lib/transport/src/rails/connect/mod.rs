//! Establishing of connections: dialing, accepting, and dialing again where a rail was lost.
//!
//! Both sides of the handshake use the messages and proofs of [`transport`](crate). A connection is handed
//! over once all of its streams are authenticated.
//!
//! | file | idea |
//! |---|---|
//! | `dialer` | finds the routes to a handle, opens the streams and shakes hands, on a thread of its own |
//! | `acceptor` | one port for all listeners, and the connections that come there |
//! | `hello` | purposes of connections, for the handshake |
//! | `redial` | new streams in the positions of lost ones |

pub(super) mod acceptor;
pub(super) mod dialer;
mod hello;
pub(super) mod redial;

use std::sync::Arc;

use crate::bootstrap::interface::LocalAddress;
use crate::rails::address::handle::Handle;
use crate::rails::address::unresponsive::Unresponsive;
use crate::rails::connection::ends::Resources;
use crate::rails::health::monitor::Monitor;
use crate::rails::rdma::Devices;
use crate::rails::relay::Relays;
use crate::rails::worker::pool::Workers;
use crate::tcp::SocketOptions;
use tinynccl_sys::config::Config;
use tinynccl_sys::secret::Secret;

/// State of a process's network that dialing and accepting share.
#[derive(Debug)]
pub(super) struct Context {
    pub(super) config: Config,
    pub(super) ports: Vec<LocalAddress>,
    /// Addresses that carry no data; peers may still send an error there.
    pub(super) others: Vec<LocalAddress>,
    pub(super) host: u64,
    pub(super) sockets: SocketOptions,
    pub(super) workers: Workers,
    pub(super) monitor: Monitor,
    pub(super) unresponsive: Unresponsive,
    pub(super) relays: Arc<Relays>,
    pub(super) devices: Option<Arc<Devices>>,
    /// The secret that the settings name, which not all who see a handle have.
    pub(super) job: Option<Secret>,
}

impl Context {
    /// Returns the secret of a handle's connections.
    pub(super) fn key(&self, handle: &Handle) -> Secret {
        self.job.map_or(handle.key(), |job| job.derive("net connection", handle.key().bytes()))
    }

    /// Returns what a new connection needs.
    pub(super) fn resources(&self) -> Resources<'_> {
        Resources { config: &self.config, workers: &self.workers, devices: self.devices.as_ref() }
    }
}
