//! The queue pair of a link with its memory and counts, shared by the two halves.
//!
//! # Why no receive is ever missing
//! A write with an immediate word takes a receive at the peer, and a sender that finds none is put off ("RNR"). Each end
//! posts [`Layout::receives`] of them and posts a new one for each that was used when it takes the completion. The peer can
//! use no more before that: its messages need credit (lines + slots), and each report of freed messages stands for messages
//! that we sent before and that the peer cannot get more of until we take its reports in.
//!
//! # Why the send queue never overflows
//! Work is posted while fewer than `limit` requests are without completion; every 16th request asks for one, and so does
//! each that is sent from staging memory.

mod outgoing;

use std::collections::VecDeque;
use std::fmt;
use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::event::epoll;
use rustix::io::Errno;
use rustix::net::RecvFlags;

use super::layout::{Kind, Layout, PerRing, Ring, read_word};
use super::memory::Region;
use super::rails::Device;
use super::status;
use super::sys::{Completion, Cq, Qp, Timing, What};
use crate::error::{Error, Result};
use crate::transport::{Interest, Peer};
use crate::wire::Header;

/// Requests between two that ask for a completion.
const SIGNAL: u64 = 16;
/// Receives that are posted again at once.
pub(super) const REPOST: usize = 8;

/// A message of the peer's that is here.
#[derive(Debug, Clone, Copy)]
pub(super) struct Arrival {
    pub(super) ring: Ring,
    /// Offset of its header in the target memory.
    pub(super) offset: usize,
    pub(super) header: Header,
}

/// How far the goodbye is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Goodbye {
    Unsaid,
    /// There was no room in the send queue.
    Due,
    /// Posted with this number.
    Posted(u64),
}

/// What a [`Core`] is made of. The order is the order of destruction.
#[derive(Debug)]
pub(super) struct Parts {
    pub(super) qp: Qp,
    pub(super) cq: Arc<Cq>,
    pub(super) staging: Region,
    pub(super) target: Region,
    pub(super) device: Arc<Device>,
    pub(super) layout: Layout,
    pub(super) timing: Timing,
    /// Requests that may be without completion.
    pub(super) limit: u64,
}

/// Where the peer's target memory is.
#[derive(Debug, Clone, Copy)]
pub(super) struct Remote {
    pub(super) address: u64,
    pub(super) rkey: u32,
}

pub(super) struct Core {
    parts: Parts,
    /// Tells that the peer is gone.
    socket: TcpStream,
    /// Readable when the completion channel or the socket is.
    poller: OwnedFd,
    pub(super) peer: Peer,
    remote: Remote,

    /// Messages sent, and how many of them the peer has freed.
    sent: PerRing<u64>,
    freed_there: PerRing<u64>,
    /// Requests posted and completed.
    posted: u64,
    completed: u64,
    unsignaled: u64,
    /// The last request that reads a caller's memory.
    lent_until: u64,
    pub(super) lent_messages: u64,
    /// The request that last read each place of the staging memory.
    used: PerRing<Vec<u64>>,

    arrived: VecDeque<Arrival>,
    /// Messages received, freed, and reported as freed.
    received: PerRing<u64>,
    freed: PerRing<u64>,
    reported: PerRing<u64>,
    /// A report is due that found no room in the send queue.
    report_due: bool,
    /// Receives used and not posted again.
    used_receives: usize,

    /// The next completion rings the channel.
    event_requested: bool,
    goodbye: Goodbye,
    peer_said_goodbye: bool,
    lost: Option<String>,
    broken: Option<Error>,
    /// Halves that still exist.
    pub(super) halves: u8,
}

impl Core {
    pub(super) fn new(parts: Parts, socket: TcpStream, peer: Peer, remote: Remote) -> Result<Core> {
        let poller = watch(&parts.cq, &socket)
            .map_err(|e| Error::errno("connect", "watching a completion channel and a socket", e))?;
        let layout = parts.layout;
        Ok(Core {
            parts,
            socket,
            poller,
            peer,
            remote,
            sent: PerRing::default(),
            freed_there: PerRing::default(),
            posted: 0,
            completed: 0,
            unsignaled: 0,
            lent_until: 0,
            lent_messages: 0,
            used: PerRing::new(vec![0; layout.lines], vec![0; layout.slots]),
            arrived: VecDeque::with_capacity(layout.lines + layout.slots),
            received: PerRing::default(),
            freed: PerRing::default(),
            reported: PerRing::default(),
            report_due: false,
            used_receives: 0,
            event_requested: false,
            goodbye: Goodbye::Unsaid,
            peer_said_goodbye: false,
            lost: None,
            broken: None,
            halves: 2,
        })
    }

    pub(super) fn layout(&self) -> &Layout {
        &self.parts.layout
    }

    /// Takes in what the device has done; true when anything did.
    pub(super) fn poll(&mut self) -> bool {
        let mut moved = false;
        loop {
            let batch = match self.parts.cq.poll() {
                Ok(batch) => batch,
                Err(e) => {
                    self.lose(e.to_string());
                    break;
                }
            };
            moved |= !batch.is_empty();
            for completion in batch.iter() {
                self.take(completion);
            }
            if !batch.is_full() {
                break;
            }
        }
        if self.used_receives >= REPOST && self.lost.is_none() {
            match self.parts.qp.post_receives(self.used_receives) {
                Ok(()) => self.used_receives = 0,
                Err(e) => self.lose(e.to_string()),
            }
        }
        if moved && self.report_due {
            self.report();
        }
        moved
    }

    #[inline]
    fn take(&mut self, completion: Completion) {
        match completion.what {
            What::Sent => self.completed = self.completed.max(completion.id),
            What::Written { len, word } => {
                self.used_receives += 1;
                let outcome = self.credit(word).and_then(|kind| match kind {
                    Kind::Message(ring) => self.arrive(ring, len),
                    Kind::Report => Ok(()),
                    Kind::Goodbye => {
                        self.peer_said_goodbye = true;
                        self.lose("it closed the link".to_owned());
                        Ok(())
                    }
                });
                if let Err(detail) = outcome {
                    self.broken.get_or_insert(self.peer.protocol("receive", detail));
                }
            }
            What::Failed { status, vendor } => {
                // Receives have number 0. A request that failed reads no memory any more, nor do those before it.
                self.completed = self.completed.max(completion.id);
                self.fail(status, vendor);
            }
            What::Other(opcode) => {
                let detail = format!("expected completions of RDMA writes, got opcode {opcode}");
                self.broken.get_or_insert(self.peer.protocol("receive", detail));
            }
        }
    }

    /// The counts in an immediate word.
    #[inline]
    fn credit(&mut self, word: u32) -> Result<Kind, String> {
        let (kind, freed) = read_word(word, &self.freed_there);
        for ring in Ring::BOTH {
            let (sent, freed) = (*self.sent.of(ring), *freed.of(ring));
            if freed > sent {
                return Err(format!("expected that at most {sent} messages are freed, got {freed} ({ring:?})"));
            }
        }
        self.freed_there = freed;
        Ok(kind)
    }

    /// A message of `len` bytes with its header is in our memory.
    #[inline]
    fn arrive(&mut self, ring: Ring, len: usize) -> Result<(), String> {
        let layout = &self.parts.layout;
        let n = *self.received.of(ring);
        let held = n - *self.freed.of(ring);
        if held >= layout.size(ring) as u64 {
            return Err(format!("expected at most {held} messages that are not freed, got another one ({ring:?})"));
        }
        let offset = layout.offset(ring, layout.place(ring, n));
        // SAFETY: the offset is that of a header within the target memory; the peer has written it and, by the protocol,
        // leaves it alone until it is freed. A peer that does not changes the bytes of its own message.
        let header: Header = unsafe { self.parts.target.at(offset).cast::<Header>().read_unaligned() };
        if len < Header::BYTES
            || header.len as usize != len - Header::BYTES
            || header.len as usize > layout.longest(ring)
        {
            let longest = layout.longest(ring);
            return Err(format!("expected a message of up to {longest} bytes, got {header} in a write of {len} bytes"));
        }
        *self.received.of_mut(ring) += 1;
        self.arrived.push_back(Arrival { ring, offset, header });
        Ok(())
    }

    #[cold]
    fn fail(&mut self, code: u32, vendor: u32) {
        // What follows the first error tells nothing.
        if code == status::FLUSHED && self.lost.is_some() {
            return;
        }
        let text = status::completion(code, vendor, &self.parts.timing);
        match self.hung_up() {
            Some(end) => self.lose(format!("{end} ({text})")),
            None => self.lose(text),
        }
    }

    /// From now on there is no credit. The first cause stays.
    #[cold]
    fn lose(&mut self, detail: String) {
        log::debug!("rank {}: RDMA link with rank {}: {detail}", self.peer.rank, self.peer.peer);
        self.lost.get_or_insert(detail);
    }

    /// Why the TCP connection is at its end, if it is.
    fn hung_up(&self) -> Option<String> {
        let mut byte = [0u8; 1];
        match rustix::net::recv(&self.socket, &mut byte, RecvFlags::PEEK | RecvFlags::DONTWAIT) {
            Ok((_, 0)) => Some("its process ended or closed the link".to_owned()),
            Ok(_) => Some("it sent bytes that it should not send after the handshake".to_owned()),
            Err(Errno::AGAIN | Errno::INTR) => None,
            Err(e) => Some(e.to_string()),
        }
    }

    /// Asks the operating system and the device whether the peer is still there.
    pub(super) fn look_after_peer(&mut self) {
        if self.lost.is_some() {
            return;
        }
        if let Some(text) = self.parts.device.failure() {
            self.lose(text);
        } else if let Some(end) = self.hung_up() {
            // What came before the end is here.
            self.poll();
            self.lose(end);
        }
    }

    /// The error of sending calls, if there is one.
    pub(super) fn sending(&self) -> Result<()> {
        match (&self.lost, &self.broken) {
            (_, Some(e)) => Err(e.clone()),
            (Some(detail), None) => Err(self.peer.lost("send", detail)),
            (None, None) => Ok(()),
        }
    }

    /// The error of receiving calls, if there is one: not before all messages are received.
    pub(super) fn receiving(&self) -> Result<()> {
        match (self.arrived.front(), &self.broken, &self.lost) {
            (Some(_), ..) | (None, None, None) => Ok(()),
            (None, Some(e), _) => Err(e.clone()),
            (None, None, Some(detail)) => Err(self.peer.lost("receive", detail)),
        }
    }

    /// The oldest message.
    pub(super) fn front(&self) -> Option<&Arrival> {
        self.arrived.front()
    }

    /// Address in the target memory.
    pub(super) fn target(&self, offset: usize) -> NonNull<u8> {
        // SAFETY: offsets are those of arrivals, which lie within the target memory.
        unsafe { self.parts.target.at(offset) }
    }

    /// Frees the oldest message; false when there is none.
    pub(super) fn free(&mut self) -> bool {
        let Some(arrival) = self.arrived.pop_front() else { return false };
        *self.freed.of_mut(arrival.ring) += 1;
        let unreported = *self.freed.of(arrival.ring) - *self.reported.of(arrival.ring);
        if unreported >= self.parts.layout.report(arrival.ring) {
            self.report();
        }
        true
    }

    /// Gets ready to sleep: afterwards the next completion makes [`Core::interest`] readable.
    pub(super) fn arm(&mut self) -> Result<()> {
        if self.parts.cq.drain_events()? {
            self.event_requested = false;
        }
        self.poll();
        if !self.event_requested {
            self.parts.cq.request_event()?;
            self.event_requested = true;
            // What came before the request rings nothing.
            self.poll();
        }
        self.look_after_peer();
        Ok(())
    }

    pub(super) fn interest(&self) -> Interest {
        Interest { fd: Some(self.poller.as_raw_fd()), readable: true, writable: false }
    }

    pub(super) fn poller(&self) -> &OwnedFd {
        &self.poller
    }

    /// Both halves are gone: true once the peer has everything, or wants nothing any more.
    pub(super) fn is_over(&mut self) -> bool {
        // An error is in `lost`, or the same again.
        let armed = self.arm();
        self.say_goodbye();
        let delivered = matches!(self.goodbye, Goodbye::Posted(id) if self.completed >= id);
        delivered || armed.is_err() || self.lost.is_some() || self.broken.is_some()
    }

    /// Whether all that was posted has arrived, as far as is known.
    pub(super) fn in_flight(&self) -> u64 {
        self.posted - self.completed
    }
}

impl fmt::Debug for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Core")
            .field("peer", &self.peer)
            .field("device", &self.parts.qp.context().name())
            .field("sent", &self.sent)
            .field("received", &self.received)
            .finish_non_exhaustive()
    }
}

/// One descriptor for both: an executor polls one per link.
fn watch(cq: &Cq, socket: &TcpStream) -> Result<OwnedFd, Errno> {
    let poller = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    epoll::add(&poller, cq.as_fd(), epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
    let ends = epoll::EventFlags::IN | epoll::EventFlags::RDHUP;
    epoll::add(&poller, socket.as_fd(), epoll::EventData::new_u64(1), ends)?;
    Ok(poller)
}

/// The core, for one call.
#[inline]
pub(super) fn lock(core: &Mutex<Core>) -> MutexGuard<'_, Core> {
    core.lock().unwrap_or_else(PoisonError::into_inner)
}
