//! Connections with posted sends and receives, as NVIDIA's NCCL wants them of a network (`bindings/nccl-net`).
//!
//! A [`Listener`] gives out a [`Handle`] of 128 bytes, which its owner sends to a peer out of band; the peer's
//! [`Net::connect`] makes a [`Sender`] of it, and [`Listener::accept`] the [`Receiver`] at the other end. Data goes in
//! that direction only. No call blocks: one thread shakes hands and another one accepts (`connect`), and separate
//! threads read and write the sockets (`worker`).
//!
//! # A message
//! The n-th message of a tag goes to the n-th receive that is posted with this tag. Messages over 32 KiB are cut into
//! *fragments*. A fragment is a frame of 40 bytes, which names message and offset, and its bytes; it goes over
//! whichever stream of the connection is free. So a faster stream carries more, and fragments need no order: the
//! receiver reads each one from the kernel straight into the posted buffer.
//!
//! A long fragment whose receive is not posted yet stays in the kernel for up to a millisecond, unless a receive of
//! another tag waits: then, like a short one, it is kept in memory of the receiver's. For each tag the sender counts
//! the bytes that the receiver has not reported as placed, and stops at a window. Therefore that memory is bounded, and
//! a tag without receives holds no other tag up. The receiver reports a quarter of the window at a time, so small
//! messages cause no traffic in the other direction.
//!
//! # Several rails
//! If two hosts have several subnets in common, or several paths through other hosts, a connection has streams over
//! each. Then the receiver acknowledges the fragments that it has read from a stream, and a send is over when that has
//! come (short fragments are copied, and do not wait). The sender gives each fragment to the stream over which it would
//! arrive first, by the rates that the acknowledgements show. When a stream is lost, the sender notifies the receiver
//! over another one, the receiver replies with the number of fragments that it had read from it, and the others are
//! sent again: each fragment arrives once, and no byte is written twice.
//!
//! # RDMA
//! If both NICs of a pair have an RDMA port, and memory is registered ([`Net::register`]), long messages are written
//! from it to that of their receives, by queue pairs beside the streams (`rdma`).
//!
//! # Rooms
//! Each imports only rooms below it (`lib/tests/cpu/arrows.rs`).
//!
//! | room | idea |
//! |---|---|
//! | `links` | links between ranks over such connections: [`endpoint`] |
//! | `connect` | dialing, accepting, and dialing again where a rail was lost |
//! | `relay` | routes through other nodes, and being such a node |
//! | `address` | handles, and which addresses of two hosts reach each other |
//! | `health` | which streams stand still, and when one is failed over |
//! | `connection` | a connection: its ends, how it loses streams, how it closes |
//! | `rdma` | queue pairs beside streams, for long messages |
//! | `data` | messages to fragments, fragments to posted buffers, and both to a stream and from it |
//! | `stream` | one TCP stream: its socket, its state, the rate of its rail |
//! | `failover` | the agreement of both ends on lost streams, without I/O |
//! | `worker` | threads that serve descriptors by epoll |

mod address;
mod connect;
mod connection;
mod data;
mod failover;
mod health;
mod links;
mod rdma;
mod relay;
mod stream;
#[cfg(test)]
mod tests;
mod worker;

use std::sync::Arc;

pub use address::handle::Handle;
pub use connect::acceptor::Listener;
pub use connect::dialer::Connecting;
pub use connection::ends::{Receiver, Sender};
pub use data::request::{MAX_GROUP, MAX_REQUESTS, Request};
pub use links::endpoint;
pub use rdma::Memory;
pub use tinynccl_sys::fork::forks;

use crate::bootstrap::interface::{LocalAddress, local_addresses};
use crate::bootstrap::{Host, given_secret};
use crate::seal;
use crate::tcp::SocketOptions;
use address::unresponsive::Unresponsive;
use connect::Context;
use connect::acceptor::Acceptor;
use connect::redial::Redialer;
use data::request::wrong_process;
use health::monitor::Monitor;
use rdma::Devices;
use relay::Relays;
use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::config::Config;
use tinynccl_sys::fork::Origin;
use worker::pool::Workers;

/// A process's end of the network: its addresses, its threads, and its acceptor.
#[derive(Debug)]
pub struct Net {
    inner: Arc<Context>,
    // Dropped before the workers, which serve what it accepts.
    acceptor: Acceptor,
    redialer: Arc<Redialer>,
    origin: Origin,
}

impl Net {
    /// Looks at the interfaces, listens, and starts the threads.
    ///
    /// # Errors
    /// [`Error::Config`] when `TINYNCCL_IFNAME` leaves no interface or all ports of `TINYNCCL_PORT_RANGE` are taken,
    /// [`Error::Os`] when sockets or threads cannot be made.
    pub fn new(config: &Config) -> Result<Net> {
        if config.encrypt {
            seal::is_possible()?;
        }
        let ports = local_addresses(config)?;
        if ports.is_empty() {
            return Err(Error::invalid(
                "net",
                "no interface is up and has an address: expected one at least (ip addr)",
            ));
        }
        let mut others = local_addresses(&config.clone().with(|c| c.interface = None))?;
        others.retain(|other| !other.loopback && !ports.contains(other));
        let sockets = SocketOptions::new(config);
        let workers = Workers::start(config)?;
        let host = address::handle::host(&Host::current());
        let relays = Arc::new(Relays::new(config, &ports, &sockets, host)?);
        let devices = Devices::open(config)?;
        if let Some(devices) = &devices {
            rdma::watch(devices, &workers.next(true, false));
        }
        let job = given_secret(config)?;
        let config = config.clone();
        let inner = Arc::new(Context {
            config,
            ports,
            others,
            host,
            sockets,
            workers,
            monitor: Monitor::default(),
            unresponsive: Unresponsive::default(),
            relays,
            devices,
            job,
        });
        let acceptor = Acceptor::open(&inner)?;
        Ok(Net { inner, acceptor, redialer: Arc::default(), origin: Origin::here() })
    }

    /// Addresses announced to peers, most useful first.
    pub fn ports(&self) -> &[LocalAddress] {
        &self.inner.ports
    }

    /// Returns the addresses of [`Net::ports`] as text, with interfaces and prefix lengths.
    pub fn describe(&self) -> String {
        address::ports::list(&self.inner.ports)
    }

    /// Registers memory for messages that go by RDMA. Without ports for that it does nothing; messages of memory that a
    /// device refuses, most often for the limit of locked memory, go over TCP.
    ///
    /// # Safety
    /// The memory stays mapped until what is returned is dropped.
    pub unsafe fn register(&self, base: *mut u8, bytes: usize) -> Memory {
        // SAFETY: by the caller.
        unsafe { rdma::register(self.inner.devices.as_deref(), base, bytes) }
    }

    /// Waits for connections to the returned handle, any number of them.
    ///
    /// # Errors
    /// [`Error::Os`] without random numbers.
    pub fn listen(&self) -> Result<(Handle, Listener)> {
        self.check("listen")?;
        self.acceptor.listen(&self.inner)
    }

    /// Begins to connect to a listener.
    ///
    /// # Errors
    /// [`Error::Os`] when no thread can be started.
    pub fn connect(&self, handle: &Handle) -> Result<Connecting> {
        self.check("connect")?;
        connect::dialer::start(&self.inner, &self.redialer, handle.clone())
    }
}

impl Net {
    fn check(&self, op: &str) -> Result<()> {
        if self.origin.is_here() { Ok(()) } else { Err(wrong_process(op)) }
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        if !self.origin.is_here() {
            // Its threads are the parent's, and so are the locks that they held when this process was forked.
            return std::mem::forget((self.inner.clone(), self.redialer.clone()));
        }
        self.inner.relays.shut_down();
        // Its threads have the rest of this, too, while they dial.
        self.inner.monitor.stop();
        self.redialer.stop();
    }
}
