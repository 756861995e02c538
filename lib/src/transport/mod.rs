//! Links between two ranks: bounded FIFOs of messages, one per direction, that never block.
//!
//! # The contract of a link
//! Every backend keeps it, and one conformance suite (`tests/conformance`) runs over all of them.
//! - **Order.** Messages arrive in the order they were committed, each whole, each with its [`Header`].
//! - **No call blocks.** A call that cannot go on returns "not now" (`None`, `false`, [`Received::Pending`]) and is made again.
//!   A partly done [`SendLink::send_from`] or [`RecvLink::recv_into`] must be repeated with the same arguments until it is done.
//! - **Credits.** A link holds at least [`LinkOptions::depth`] messages of up to [`LinkOptions::max_message`] bytes which the
//!   receiver's *executor* has not asked for yet, provided the receiver's process calls [`RecvLink::progress`].
//!   More are refused at the sender, so memory per link is bounded.
//! - **Sleeping.** Before its thread sleeps, an executor calls `arm` on each link that it waits for, looks once more, and then
//!   polls the [`Doorbell`] and every descriptor in [`Interest`]; after waking it calls `disarm`. No wake-up is lost between.
//! - **Death.** When the peer's process is gone, every call gives [`Error::PeerLost`](crate::Error::PeerLost) once all messages that were complete
//!   before are received; [`SendLink::check_peer`]/[`RecvLink::check_peer`] find out even where no byte is awaited.
//! - **Dropping** a link never panics and never blocks; messages which were committed and flushed still arrive.

use std::fmt;
use std::os::fd::RawFd;

use crate::error::Result;
use crate::wire::Header;

/// Fixed facts of a link, equal at both ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinkOptions {
    /// Largest payload of one message in bytes.
    pub max_message: usize,
    /// Messages that fit in one direction before the sender is refused.
    pub depth: usize,
}

/// Who is at the other end, for errors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    /// Our rank in the world.
    pub rank: usize,
    /// The peer's rank in the world.
    pub peer: usize,
    /// The peer's address in words: `127.0.0.1:4711`, `shared memory of process 12`, ….
    pub address: String,
}

/// Outcome of [`RecvLink::recv_into`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Received {
    /// Not (all) here yet: call again with the same arguments.
    Pending,
    /// The payload is in the caller's memory.
    Done,
    /// A message came that the caller does not expect; nothing of it was written.
    Mismatch(Header),
}

/// What to poll for before sleeping: a descriptor and whether it should become readable or writable.
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
pub trait SendLink: Send + fmt::Debug {
    /// Who receives.
    fn peer(&self) -> &Peer;

    /// Memory for the next message (`max_message` bytes, 64-byte aligned), or `None` without credit.
    fn reserve(&mut self) -> Result<Option<&mut [u8]>>;

    /// Hands over the reserved message: its first `header.len` bytes.
    fn commit(&mut self, header: &Header) -> Result<()>;

    /// Sends from the caller's memory; `true` once `data` is no longer needed. `data.len() == header.len`.
    fn send_from(&mut self, header: &Header, data: &[u8]) -> Result<bool>;

    /// Moves what can be moved without blocking; `true` when something moved.
    fn progress(&mut self) -> Result<bool>;

    /// True when nothing committed is left in this process: it can be dropped without losing a message.
    fn is_flushed(&self) -> bool;

    /// Fails when the peer is known to be gone. May cost a system call: for slow paths.
    fn check_peer(&mut self) -> Result<()>;

    /// Asks to be woken when credit comes. `true` when there already is something to do.
    fn arm(&mut self) -> Result<bool>;

    /// Takes `arm` back.
    fn disarm(&mut self);

    /// What to poll for while armed.
    fn interest(&self) -> Interest;
}

/// The receiving end of a link.
pub trait RecvLink: Send + fmt::Debug {
    /// Who sends.
    fn peer(&self) -> &Peer;

    /// The oldest message, if it is here whole.
    fn peek(&mut self) -> Result<Option<(Header, &[u8])>>;

    /// Frees the message last returned by [`RecvLink::peek`].
    fn release(&mut self) -> Result<()>;

    /// Receives the oldest message into the caller's memory if it agrees with `expected`. `dst.len() == expected.len`.
    fn recv_into(&mut self, expected: &Header, dst: &mut [u8]) -> Result<Received>;

    /// Takes in what has arrived, within the link's bound, without being asked for it; `true` when something moved.
    fn progress(&mut self) -> Result<bool>;

    /// Fails when the peer is known to be gone and no whole message is left. May cost a system call: for slow paths.
    fn check_peer(&mut self) -> Result<()>;

    /// Asks to be woken when a message comes. `true` when there already is something to do.
    fn arm(&mut self) -> Result<bool>;

    /// Takes `arm` back.
    fn disarm(&mut self);

    /// What to poll for while armed.
    fn interest(&self) -> Interest;
}

/// Both ends that one rank holds of the links with one peer.
#[derive(Debug)]
pub struct LinkPair {
    /// To the peer.
    pub send: Box<dyn SendLink>,
    /// From the peer.
    pub recv: Box<dyn RecvLink>,
    /// Name of the backend: `tcp`, `shm`, `inproc`.
    pub kind: &'static str,
}
