//! A transport as an [`Endpoint`](super::Endpoint) sees it: it describes how it is reached, dials, and accepts.

use std::fmt;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use super::accept::conn::Conn;
use super::accept::handshake::{Caller, Reply};
use super::accept::link::LinkHello;
use super::accept::stream::{self, Stream};
use super::info::EndpointInfo;
use super::linger::Linger;
use super::wait::Wait;
use super::{LinkOptions, LinkPair, Peer};
use crate::bootstrap::interface::LocalAddress;
use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::config::Config;
use tinynccl_sys::doorbell::Doorbell;
use tinynccl_sys::secret::Secret;

/// Makes a transport listen; and its name.
pub(crate) type Bind = (&'static str, fn(&Site<'_>) -> Result<Box<dyn Fabric>>);

/// Parameters with which a transport listens.
pub(crate) struct Site<'a> {
    pub(crate) rank: usize,
    pub(crate) config: &'a Config,
    /// The addresses to listen on.
    pub(crate) locals: &'a [LocalAddress],
    /// Takes what dropped links leave behind.
    pub(crate) linger: &'a Arc<Linger>,
}

/// One transport of an endpoint.
///
/// An endpoint keeps its fabrics in order of preference. The lower rank of a link takes the first one that
/// [reaches](Fabric::reaches) the peer and [dials](Fabric::dial); at the higher one, the endpoint's thread takes the
/// connection ([`Fabric::incoming`]), checks that the dialer knows the secret of the job, and files it until the rank
/// asks for the link ([`Fabric::accept`]). No method but these last two, `dial` and `accept`, may block.
pub trait Fabric: Send + Sync + fmt::Debug {
    /// Name of the transport and of its links ([`LinkPair::kind`]).
    fn kind(&self) -> &'static str;

    /// Name of the transport in errors.
    fn name(&self) -> &'static str {
        self.kind()
    }

    /// Adds to `info` how other ranks reach this fabric.
    fn describe(&self, info: &mut EndpointInfo);

    /// Returns the reason why it reaches a peer, for the log. Both ends must come to the same result.
    ///
    /// # Errors
    /// The reason why it does not, for the log and for errors.
    fn reaches(&self, ours: &EndpointInfo, theirs: &EndpointInfo) -> Result<&'static str, String>;

    /// Connections of one link. Both ends must have the same number.
    fn streams(&self) -> usize {
        1
    }

    /// Makes our end of a link with the peer that accepts.
    ///
    /// # Errors
    /// Those that end the attempt over other fabrics, too. Otherwise [`Dialed::NotPossible`].
    fn dial(&self, dial: &Dial<'_>) -> Result<Dialed>;

    /// Descriptors that are readable when [`Fabric::incoming`] or [`Fabric::handle_events`] has something to do.
    fn listeners(&self) -> Vec<BorrowedFd<'_>>;

    /// The next connection of a dialer, if there is one.
    ///
    /// # Errors
    /// Those of the system.
    fn incoming(&self) -> std::io::Result<Option<Box<dyn Conn>>>;

    /// Makes our end of a link with the peer that has dialed, and answers with [`Accept::welcome`].
    ///
    /// # Errors
    /// Outer ones are final. After an inner one the dialer may come again.
    fn accept(&self, conn: Box<dyn Conn>, accept: &Accept<'_>) -> Result<Result<LinkPair, String>>;

    /// Handles the events of its devices.
    fn handle_events(&self) {}

    /// Returns true if a peer can be reached without another rank between, as far as this end can tell before it tries.
    fn leads_to(&self, ours: &EndpointInfo, theirs: &EndpointInfo) -> bool {
        self.reaches(ours, theirs).is_ok()
    }

    /// Sets the length in bytes from which zero copy of memory on ordinary pages is faster, by measuring.
    fn zero_copy_from(&self, _bytes: usize) {}

    /// Registers a caller's memory with its devices, if it has any.
    ///
    /// # Safety
    /// The memory must stay allocated, at its place, until the registration is dropped.
    ///
    /// # Errors
    /// Those of the device.
    unsafe fn register(&self, _base: NonNull<u8>, _bytes: usize) -> Result<Option<Registration>> {
        Ok(None)
    }
}

/// Memory that is registered with devices until this is dropped.
#[derive(Debug)]
pub struct Registration {
    _kept: Box<dyn fmt::Debug + Send + Sync>,
}

impl Registration {
    /// One that lasts as long as `kept`.
    pub fn new(kept: impl fmt::Debug + Send + Sync + 'static) -> Registration {
        Registration { _kept: Box::new(kept) }
    }
}

/// A link that is to be dialed.
pub struct Dial<'a> {
    /// Addresses of the peer.
    pub info: &'a EndpointInfo,
    /// Channel of the link.
    pub channel: u32,
    /// Equal at both ends.
    pub options: &'a LinkOptions,
    /// Doorbell that the peer rings when our thread sleeps, unless our thread polls a descriptor.
    pub bell: &'a Arc<Doorbell>,
    pub(crate) ours: &'a EndpointInfo,
    pub(crate) hello: LinkHello,
    pub(crate) secret: Secret,
    /// Our rank, and the peer's.
    pub(crate) ranks: (usize, usize),
    pub(crate) wait: &'a Wait<'a>,
}

impl Dial<'_> {
    /// The peer at this address, for errors.
    pub fn peer(&self, address: String) -> Peer {
        Peer { rank: self.ranks.0, peer: self.ranks.1, address }
    }

    pub(crate) fn caller(&self) -> Caller<'static> {
        Caller::new(&self.hello, self.secret, &[])
    }

    /// Goes through the handshake on a new non-blocking connection: it is the peer, and it wants the link.
    ///
    /// # Errors
    /// [`Error::Timeout`], the abort's error, [`Error::Protocol`] when the peer does not want the link,
    /// [`Error::PeerLost`] when another process than the peer answers.
    pub fn greet<S: Stream>(&self, socket: &mut S, peer: &Peer) -> Result<()> {
        stream::greet(socket, &self.caller(), self.wait).map_err(|failure| failure.of(peer))
    }
}

/// Outcome of a dial that did not end in an error.
#[derive(Debug)]
pub enum Dialed {
    /// The link stands.
    Linked(LinkPair),
    /// This fabric does not work between the two, for this reason; another one may.
    NotPossible(String),
    /// The peer does not listen any more, or has gone away: it may have ended, or be busy.
    Gone(String),
}

/// A link that is to be accepted.
pub struct Accept<'a> {
    /// Equal at both ends.
    pub options: &'a LinkOptions,
    /// Doorbell that the peer rings when our thread sleeps, unless our thread polls a descriptor.
    pub bell: &'a Arc<Doorbell>,
    /// Our rank, and the peer's.
    pub(crate) ranks: (usize, usize),
    pub(crate) wait: &'a Wait<'a>,
    pub(crate) further: &'a dyn Fn(usize) -> Result<Box<dyn Conn>>,
}

impl Accept<'_> {
    /// The peer at this address, for errors.
    pub fn peer(&self, address: String) -> Peer {
        Peer { rank: self.ranks.0, peer: self.ranks.1, address }
    }

    /// Answers the dialer that the link stands.
    ///
    /// # Errors
    /// It has gone away.
    pub fn welcome(&self, conn: &mut dyn Conn) -> Result<(), String> {
        conn.reply(&Reply::Welcome)
    }

    /// Waits for connection `stream` of the link, counted from 0.
    ///
    /// # Errors
    /// [`Error::Timeout`], the abort's error.
    pub fn further(&self, stream: usize) -> Result<Box<dyn Conn>> {
        (self.further)(stream)
    }
}

/// Returns the error for a fabric that does not reach a peer, for the reason `why`.
pub(crate) fn unreachable(name: &str, rank: usize, peer: usize, why: &str) -> Error {
    Error::Unsupported {
        what: format!("{name} between rank {rank} and rank {peer}"),
        detail: format!("{why}; or set TINYNCCL_TRANSPORT=auto"),
    }
}
