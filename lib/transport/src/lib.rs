//! Links between two ranks: bounded FIFOs of messages, one per direction, that never block.
//!
//! # Transports
//! Each is a directory with the same files, so that two of them can be read side by side.
//!
//! | | `tcp` | `shm` | `inproc` | `verbs` |
//! |---|---|---|---|---|
//! | carries links between | any hosts | processes of one host | threads of one process | RDMA ports of one subnet |
//! | `mod.rs`: what it is, and what both halves share | yes | yes | yes | yes |
//! | `fabric.rs`: what an [`Endpoint`] sees of it | yes | yes | – | yes |
//! | `connect.rs`: the rank that dials | yes | yes | both connect in a hub | yes |
//! | `listen.rs`: the rank that accepts | yes | yes | – | yes |
//! | `send.rs`, `recv.rs`: the halves of a link | yes | yes | those of `shm` | yes |
//! | `options.rs`: settings of sockets and ports | yes | – | – | yes |
//! | `stripes.rs`: one message over several connections | yes | – | – | yes |
//! | `linger.rs`: what a dropped link leaves to be done | yes | – | – | yes |
//! | the rest | `frame` (bytes to messages), `intake` (reads the streams), `fuzzing` | `memory`, `words` (the ring), `single_copy`, `packet` (descriptors over Unix sockets), `model` (of the ring, for loom) | – | `address`, `rails/` (devices and ports), `link/` (queue pairs and their memory), `sys/` (libibverbs) |
//!
//! An [`Endpoint`] keeps its transports in order of preference, each as a [`Fabric`], and makes links over the first
//! one that reaches the peer. [`faulty`] and [`paced`] (folder `wrap`) wrap a pair of any transport.
//! `beacon` proves that a process of this host is dead. [`relay`] joins links where two ranks do not reach each other.
//! [`rails`] has connections over several NIC pairs, for
//! NVIDIA's NCCL, and links over them, which take TCP's place. All transports share the rest: `accept` (the acceptor,
//! and the proofs of both ends), `memory` (mappings, large pages, and the fence between a sleeper and its waker),
//! `linger`, and `wait` (deadlines).
//!
//! # The contract of a link
//! Every backend keeps it, and one conformance suite (`tests/conformance`) runs over all of them.
//! - **Order.** Messages arrive in the order they were committed, each whole, each with its [`Header`].
//! - **No call blocks.** A call that cannot go on returns "not now" (`None`, `false`, [`Received::Pending`]) and is
//!   made again. A partly done [`SendLink::send_from`], [`RecvLink::recv_into`] or [`RecvLink::recv_chunks`] must be
//!   repeated with the same arguments until it is done, before any other sending (receiving) call except `progress`,
//!   `check_peer`, `arm` and `disarm`.
//! - **Credits.** A link holds at least [`LinkOptions::depth`] messages of up to [`LinkOptions::max_message`] bytes
//!   which the receiver's *executor* has not asked for yet, provided the receiver's process calls
//!   [`RecvLink::progress`] and the sender's calls [`SendLink::progress`]. A bounded number more fits; then the sender
//!   is refused, so memory per link is bounded.
//! - **Zero copy.** What is sent with [`SendLink::send_from`] is the caller's again when that returns `true`. What is
//!   sent with [`ZeroCopy::send`] may be read until the link is flushed.
//! - **Sleeping.** Before its thread sleeps, an executor calls `arm` on each link that it waits for, and does not sleep
//!   when one of them returns `true`. Then it polls the [`Doorbell`] and every descriptor in [`Interest`]; after waking
//!   it calls `disarm` on each and [`Doorbell::drain`] before it looks again. No wake-up is lost between. One armed
//!   link rings once.
//! - **Death.** When the peer closes the link, every receiving call gives [`Error::PeerLost`] once all messages that
//!   were complete before are received, and every sending call gives it as soon as the loss is known. A call that has
//!   handed over a message which the peer received before it closed the link is no failure.
//!   [`SendLink::check_peer`]/[`RecvLink::check_peer`] find out about a killed process even where no byte is awaited;
//!   `arm` finds out too, and the other calls know from then on.
//! - **Dropping** a link never panics and never blocks; messages which were committed and flushed still arrive. The
//!   halves of a pair belong together: who drops one half may be taken for gone by the peer's other half.
//! - **Broken** protocol ([`Error::Protocol`]) and misuse ([`Error::InvalidArgument`]) leave the link as it was; it
//!   gives the same error again.

// Modules are public for the crates above; their documentation also links what is private to them.
#![allow(rustdoc::private_intra_doc_links)]

#[macro_use]
mod forward;

mod accept;
#[doc(hidden)]
pub mod beacon;
pub mod bootstrap;
pub(crate) mod endpoint;
#[cfg(loom)]
#[doc(hidden)]
pub mod explore;
pub(crate) mod fabric;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzzing;
mod info;
pub mod inproc;
pub(crate) mod linger;
mod memory;
pub mod rails;
pub mod relay;
mod seal;
#[doc(hidden)]
pub mod shm;
pub(crate) mod tcp;
pub(crate) mod verbs;
#[doc(hidden)]
pub mod wait;
mod wrap;

pub(crate) use accept::{acceptor, conn, handshake, stream};
#[doc(hidden)]
pub use memory::{fence, huge, mapping};
pub use wrap::{faulty, paced};

pub use accept::conn::Conn;
#[doc(hidden)]
pub use accept::stream::Failure;
pub use accept::stream::{Stream, StreamConn};
#[doc(hidden)]
pub use endpoint::newcomer::{JoinDialer, MemberConn, Newcomer};
pub use endpoint::{ConnectTo, Endpoint};
pub use fabric::{Accept, Dial, Dialed, Fabric, Registration};
pub use info::EndpointInfo;
pub use tinynccl_sys::doorbell::Doorbell;
pub use verbs::{VerbsAddress, rdma_ports};

use std::fmt;
use std::os::fd::RawFd;

use tinynccl_plan::error::{Error, Result};
use tinynccl_plan::wire::Header;

/// Fixed facts of a link, equal at both ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinkOptions {
    /// Largest payload of one message in bytes.
    pub max_message: usize,
    /// Messages that fit in one direction before the sender is refused; backends round it up.
    pub depth: usize,
}

impl LinkOptions {
    /// Largest [`LinkOptions::max_message`].
    pub const MAX_MESSAGE: usize = 1 << 30;
    /// Largest [`LinkOptions::depth`].
    pub const MAX_DEPTH: usize = 4096;

    fn check(&self) -> Result<()> {
        if (1..=Self::MAX_MESSAGE).contains(&self.max_message) && (1..=Self::MAX_DEPTH).contains(&self.depth) {
            return Ok(());
        }
        let (m, d) = (Self::MAX_MESSAGE, Self::MAX_DEPTH);
        Err(Error::invalid("connect", format!("expected 1 to {m} bytes per message and depth 1 to {d}, got {self:?}")))
    }
}

/// Names of a link's peer, for errors: both ranks, and the peer's address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    /// Our rank in the world.
    pub rank: usize,
    /// The peer's rank in the world.
    pub peer: usize,
    /// The peer's address in words: `127.0.0.1:4711`, `shared memory of process 12`, ….
    pub address: String,
}

impl Peer {
    /// The error of a call `op` after this peer is gone, for the reason `detail`.
    #[cold]
    pub fn lost(&self, op: &str, detail: &str) -> Error {
        let Peer { rank, peer, address } = self.clone();
        Error::PeerLost { op: op.to_owned(), rank, peer, address, detail: detail.to_owned() }
    }

    #[cold]
    pub(crate) fn protocol(&self, op: &str, detail: String) -> Error {
        let Peer { rank, peer, address } = self.clone();
        Error::Protocol { op: op.to_owned(), rank, peer, address, detail }
    }

    /// The error of a sending call that breaks the contract: what it should have been given.
    #[cold]
    fn misused_send(&self, detail: String) -> Error {
        Error::invalid("send", format!("to rank {}: {detail}", self.peer))
    }

    /// [`SendLink::commit`] without a reservation, or of too long a message.
    #[cold]
    pub(crate) fn not_reserved(&self, header: &Header, max: usize) -> Error {
        self.misused_send(format!("expected a reserved message of up to {max} bytes, got {header}"))
    }

    /// [`SendLink::send_from`] of another length, or while a message is reserved.
    #[cold]
    pub(crate) fn not_sendable(&self, header: &Header, data: &[u8], max: usize) -> Error {
        let got = data.len();
        self.misused_send(format!("expected {header} of up to {max} bytes and none reserved, got {got} bytes"))
    }

    /// The error of a receiving call that breaks the contract.
    #[cold]
    fn misused_recv(&self, detail: String) -> Error {
        Error::invalid("receive", format!("from rank {}: {detail}", self.peer))
    }

    /// [`RecvLink::release`] without a message.
    #[cold]
    pub(crate) fn not_peeked(&self) -> Error {
        self.misused_recv("expected a peeked message to release, got none".to_owned())
    }

    /// [`RecvLink::recv_into`] with memory of another length.
    #[cold]
    pub(crate) fn not_receivable(&self, expected: &Header, dst: &[u8]) -> Error {
        self.misused_recv(format!("expected memory for {expected}, got {} bytes", dst.len()))
    }
}

/// Outcome of [`RecvLink::recv_into`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Received {
    /// Not (all) here yet: call again with the same arguments.
    Pending,
    /// The payload is in the caller's memory.
    Done,
    /// A message came that the caller does not expect. Nothing of it was written, and it stays the oldest message.
    Mismatch(Header),
}

/// Descriptor to poll before sleeping, and whether it should become readable or writable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Interest {
    /// Descriptor; `None` when the [`Doorbell`] rings for this link.
    pub fd: Option<RawFd>,
    /// Wake when readable (or hung up).
    pub readable: bool,
    /// Wake when writable.
    pub writable: bool,
}

/// The sending end of a link.
pub trait SendLink: Send {
    /// Returns the peer, which receives.
    fn peer(&self) -> &Peer;

    /// Memory for the next message (`max_message` bytes, 64-byte aligned), or `None` without credit.
    /// Again before [`SendLink::commit`], it is the same memory with the same contents.
    fn reserve(&mut self) -> Result<Option<&mut [u8]>>;

    /// Hands over the reserved message: its first `header.len` bytes.
    fn commit(&mut self, header: &Header) -> Result<()>;

    /// Sends from the caller's memory; `true` once `data` is no longer needed. `data.len() == header.len`, at most
    /// [`LinkOptions::max_message`] but where [`LinkPair::any_length`].
    fn send_from(&mut self, header: &Header, data: &[u8]) -> Result<bool>;

    /// Returns the link for messages that are not copied on the way out, if it can do that.
    fn zero_copy(&mut self) -> Option<&mut dyn ZeroCopy> {
        None
    }

    /// Another [`SendLink::send_from`] will follow the next one at once: a link may then hold the end of a message
    /// back, to send it together with the one that follows.
    fn expect_more(&mut self) {}

    /// True when [`SendLink::send_from`] is the faster way for messages of `bytes` bytes that could as well be computed
    /// into [`SendLink::reserve`]'s memory: the link takes them from where they are.
    fn sends_from_caller(&self, bytes: usize) -> bool;

    /// Moves what can be moved without blocking; `true` when something moved. A [`SendLink::send_from`] that is partly
    /// done moves only when it is repeated.
    fn progress(&mut self) -> Result<bool>;

    /// True when nothing committed is left in this process, and no memory of [`ZeroCopy::send`] is read: the link can
    /// be dropped without losing a message. [`SendLink::progress`] finds out.
    fn is_flushed(&self) -> bool;

    /// Fails when the peer is known to be gone. May cost a system call: for slow paths.
    fn check_peer(&mut self) -> Result<()>;

    /// Asks to be woken when what was refused last can go on. `true` when it already can.
    fn arm(&mut self) -> Result<bool>;

    /// Takes `arm` back.
    fn disarm(&mut self) {}

    /// Bytes that have passed, those of unfinished messages included: tells a slow message from a stuck one. Stays 0
    /// where messages come whole.
    fn bytes_moved(&self) -> u64 {
        0
    }

    /// Returns what to poll for while armed.
    fn interest(&self) -> Interest;
}

impl fmt::Debug for dyn SendLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "link to {:?}", self.peer())
    }
}

/// Sending from where the data is: a device reads it there, or the receiver does. See [`SendLink::zero_copy`].
pub trait ZeroCopy {
    /// As [`SendLink::send_from`], but `true` may come while `data` is still read. That is over when
    /// [`SendLink::is_flushed`] returns `true` or [`ZeroCopy::revoke`] has returned. `two_way`: the caller receives at
    /// the same time, so that a copy which the peer makes alone leaves no core idle.
    ///
    /// # Safety
    /// Until then `data` must stay allocated and must not be written to.
    unsafe fn send(&mut self, header: &Header, data: &[u8], two_way: bool) -> Result<bool>;

    /// True when [`ZeroCopy::send`] is sure to take this memory without a copy.
    fn takes(&self, _data: &[u8]) -> bool {
        false
    }

    /// True when the receiver reads the memory, not a device. Then the link is done with it only after the peer has
    /// received the message, and a call must not wait for that before it has received what the peer waits to send. Nor
    /// does zero copy save anything where the receiver reduces a message: it would have to fetch it to its own memory
    /// first.
    fn receiver_pulls(&self) -> bool;

    /// Messages sent without a copy so far.
    fn messages(&self) -> u64;

    /// Ends what still reads memory given to [`ZeroCopy::send`], after a call has failed; the link may be lost by it.
    /// Takes a moment at most.
    fn revoke(&mut self);
}

/// The receiving end of a link.
pub trait RecvLink: Send {
    /// Returns the peer, which sends.
    fn peer(&self) -> &Peer;

    /// The oldest message, if it is here whole: its header and its payload, 8-byte aligned or better.
    fn peek(&mut self) -> Result<Option<(Header, &[u8])>>;

    /// True when [`RecvLink::peek`] shows messages where they came in, so that copying from there is as good as
    /// [`RecvLink::recv_into`], and how to copy is the caller's choice.
    fn shows_in_place(&self) -> bool {
        false
    }

    /// True when the oldest message is here and would have to be fetched from the sender's memory, which
    /// [`RecvLink::recv_into`] does with one copy less than [`RecvLink::peek`].
    fn must_pull(&mut self) -> bool {
        false
    }

    /// Frees the message last returned by [`RecvLink::peek`].
    fn release(&mut self) -> Result<()>;

    /// Receives the oldest message into the caller's memory if it agrees with `expected`. `dst.len() == expected.len`.
    fn recv_into(&mut self, expected: &Header, dst: &mut [u8]) -> Result<Received>;

    /// As [`RecvLink::recv_into`], but the payload goes to `sink`: each call gets the offset of a chunk and its bytes,
    /// in order. Offsets are multiples of 64 and chunks 8-byte aligned or better. A link that receives long messages
    /// bit by bit passes them on while the rest is on its way; others wait for the whole message.
    fn recv_chunks(&mut self, expected: &Header, sink: &mut dyn FnMut(usize, &[u8])) -> Result<Received> {
        match self.peek()? {
            None => return Ok(Received::Pending),
            Some((header, _)) if !expected.agrees_with(&header) => return Ok(Received::Mismatch(header)),
            Some((_, payload)) => sink(0, payload),
        }
        self.release()?;
        Ok(Received::Done)
    }

    /// Takes in what has arrived, within the link's bound, without being asked for it; `true` when something moved.
    fn progress(&mut self) -> Result<bool>;

    /// Fails when the peer is known to be gone and no whole message is left. May cost a system call: for slow paths.
    fn check_peer(&mut self) -> Result<()>;

    /// Asks to be woken when (more of) a message comes. `true` when one is here.
    fn arm(&mut self) -> Result<bool>;

    /// Takes `arm` back.
    fn disarm(&mut self) {}

    /// Bytes that have passed, those of unfinished messages included: tells a slow message from a stuck one. Stays 0
    /// where messages come whole.
    fn bytes_moved(&self) -> u64 {
        0
    }

    /// Returns what to poll for while armed.
    fn interest(&self) -> Interest;
}

impl fmt::Debug for dyn RecvLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "link from {:?}", self.peer())
    }
}

/// Both ends that one rank holds of the links with one peer.
#[derive(Debug)]
pub struct LinkPair {
    /// To the peer.
    pub send: Box<dyn SendLink>,
    /// From the peer.
    pub recv: Box<dyn RecvLink>,
    /// Name of the transport: `tcp`, `shm`, `inproc`, `verbs`; with `, relayed` behind it where other ranks are
    /// between.
    pub kind: &'static str,
    /// Messages of any length can be sent from the caller's memory. The receiver takes those that are longer than
    /// [`LinkOptions::max_message`] by [`RecvLink::recv_into`] or [`RecvLink::recv_chunks`]; [`RecvLink::peek`] shows
    /// nothing but their header. Equal at both ends.
    pub any_length: bool,
}
