//! Connections with posted sends and receives, as NVIDIA's NCCL wants them of a network (`bindings/nccl-net`).
//!
//! A [`Listener`] gives out a [`Handle`] of 128 bytes, which its owner sends to a peer out of band; the peer's
//! [`Net::connect`] makes a [`Sender`] of it, and [`Listener::accept`] the [`Receiver`] at the other end. Data goes in
//! that direction only. No call blocks: a thread shakes hands (`dial`), another one accepts (`door`), and separate
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
//! | module | idea |
//! |---|---|
//! | `ports`, `handle` | this host's addresses, which pairs of two hosts' reach each other, the contents of a handle |
//! | `dial`, `door` | both sides of the handshake, with the messages and proofs of [`transport`](crate::transport) |
//! | `link`, `stream`, `leaving` | a connection: its streams, its requests, how it ends and how it loses streams |
//! | `links` | links between ranks over such connections: [`endpoint`] |
//! | `relay` | paths through other nodes, and being such a node |
//! | `rdma` | queue pairs beside streams, for long messages |
//! | `rails`, `redial` | streams that do not get through, and new ones in their place |
//! | `outgoing`, `incoming` | messages to fragments, fragments to posted memory |
//! | `output`, `input` | fragments and control frames to a stream, and from it |
//! | `frame`, `outbox` | the header of a fragment, and control frames that any stream takes |
//! | `request`, `worker` | posted sends and receives, and the threads |
//! | `load` | bytes in flight on a NIC pair, and its measured rate |
//! | `crowd` | detection of spinning threads that share a core |

mod crowd;
mod dial;
mod door;
mod ends;
mod frame;
mod handle;
mod incoming;
mod input;
mod leaving;
mod link;
mod links;
mod load;
mod outbox;
mod outgoing;
mod output;
mod ports;
mod rails;
mod rdma;
mod redial;
mod relay;
mod request;
mod stream;
#[cfg(test)]
mod tests;
mod worker;
mod workers;

use std::sync::Arc;

pub use crate::fork::forks;
pub use dial::Connecting;
pub use door::Listener;
pub use ends::{Receiver, Sender};
pub use handle::Handle;
pub use links::endpoint;
pub use rdma::Memory;
pub use request::{MAX_GROUP, MAX_REQUESTS, Request};

use crate::bootstrap::Host;
use crate::bootstrap::interface::{LocalAddress, local_addresses};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::fork::Origin;
use crate::transport::tcp::SocketOptions;
use dial::Silent;
use door::Door;
use rails::Rails;
use rdma::Devices;
use relay::Relays;
use worker::Task;
use workers::Workers;

/// A process's end of the network: its addresses, its threads, and its acceptor.
#[derive(Debug)]
pub struct Net {
    inner: Arc<Inner>,
    // Dropped before the workers, which serve what it accepts.
    door: Door,
    origin: Origin,
}

/// State shared by dialing and accepting.
#[derive(Debug)]
struct Inner {
    config: Config,
    ports: Vec<LocalAddress>,
    /// Addresses that carry no data; peers may still send an error there.
    others: Vec<LocalAddress>,
    host: u64,
    sockets: SocketOptions,
    workers: Workers,
    rails: Rails,
    silent: Silent,
    relays: Relays,
    devices: Option<Arc<Devices>>,
}

impl Net {
    /// Looks at the interfaces, listens, and starts the threads.
    ///
    /// # Errors
    /// [`Error::Config`] when `TINYNCCL_IFNAME` leaves no interface or all ports of `TINYNCCL_PORT_RANGE` are taken,
    /// [`Error::Os`] when sockets or threads cannot be made.
    pub fn new(config: &Config) -> Result<Net> {
        let ports = local_addresses(config)?;
        if ports.is_empty() {
            return Err(Error::invalid(
                "net",
                "no interface is up and has an address: expected one at least (ip addr)",
            ));
        }
        let mut others = local_addresses(&Config { interface: None, ..config.clone() })?;
        others.retain(|other| !other.loopback && !ports.contains(other));
        let sockets = SocketOptions::new(config.socket_buffer, config.congestion.clone());
        let workers = Workers::start(config)?;
        let host = handle::host(&Host::current());
        let relays = Relays::new(config, &ports, host)?;
        let devices = Devices::open(config)?;
        if let Some(devices) = &devices {
            workers.next(true, false).push(Task::Hear(devices.clone()));
        }
        let config = config.clone();
        let inner = Arc::new(Inner {
            config,
            ports,
            others,
            host,
            sockets,
            workers,
            rails: Rails::default(),
            silent: Silent::default(),
            relays,
            devices,
        });
        let door = Door::open(&inner)?;
        Ok(Net { inner, door, origin: Origin::here() })
    }

    /// Addresses announced to peers, most useful first.
    pub fn ports(&self) -> &[LocalAddress] {
        &self.inner.ports
    }

    /// Returns the addresses of [`Net::ports`] as text, with interfaces and prefix lengths.
    pub fn describe(&self) -> String {
        ports::list(&self.inner.ports)
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
        self.door.listen(&self.inner)
    }

    /// Begins to connect to a listener.
    ///
    /// # Errors
    /// [`Error::Os`] when no thread can be started.
    pub fn connect(&self, handle: &Handle) -> Result<Connecting> {
        self.check("connect")?;
        dial::start(&self.inner, handle.clone())
    }
}

impl Net {
    fn check(&self, op: &str) -> Result<()> {
        if self.origin.is_here() { Ok(()) } else { Err(elsewhere(op)) }
    }
}

/// The error of a call in a forked child.
#[cold]
fn elsewhere(op: &str) -> Error {
    let here = std::process::id();
    Error::invalid(
        op,
        format!(
            "process {here} was forked from the one that has the connection: make the call there, or run a new program here"
        ),
    )
}

impl Drop for Net {
    fn drop(&mut self) {
        if !self.origin.is_here() {
            // Its threads are the parent's, and so are the locks that they held when this process was forked.
            return std::mem::forget(self.inner.clone());
        }
        self.inner.relays.leave();
        // Its threads have the rest of this, too, while they dial.
        self.inner.rails.stop();
    }
}
