//! The queue pairs of a link with their memory and counts, shared by the two halves.
//!
//! # Why no receive is ever missing
//! A write with an immediate word takes a receive at the peer, and a sender that finds none is put off ("RNR"). Each end
//! posts [`Layout::receives`] of them on the first queue pair and posts a new one for each that was used when it takes the
//! completion. The peer can use no more before that: its messages need credit (lines + slots), and each report of freed
//! messages stands for messages that we sent before and that the peer cannot get more of until we take its reports in.
//! The other queue pairs carry one stripe per slot at most until the slot is freed: they have as many receives as there are
//! slots.
//!
//! # Why the send queue never overflows
//! Work is posted while fewer than `limit` requests are without completion; every 16th request asks for one, and so does
//! each that is sent from staging memory. On the other queue pairs there is one per slot at most: a slot is not used again
//! before its stripes have completed.
//!
//! # Outcome comes in which order
//! Credit, messages of the lines, headers and the goodbye come over the first queue pair, in order. Stripes come when they
//! come: a message is shown when all of it is here ([`Reassembly`]), and those behind it wait. So the goodbye may overtake
//! stripes; only what ends a queue pair ends the hope for them.

pub(super) mod exchange;
pub(super) mod layout;
pub(super) mod memory;
mod outgoing;
mod pace;
mod queue_pair;
mod reassembly;
mod setup;

use std::collections::VecDeque;
use std::fmt;
use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::event::epoll;
use rustix::io::Errno;
use rustix::net::RecvFlags;

use super::stripes::Stripes;
use super::sys::{Completion, Cq, Outcome, Timing, status};
use crate::error::{Error, Result};
use crate::fork::Kept;
use crate::transport::{Interest, Peer};
use crate::wire::Header;

use layout::{Kind, Layout, PerRing, Ring, read_word};
use memory::Region;
use pace::Pace;
use queue_pair::read_id;
use queue_pair::{QueuePair, QueuePairs, REPOST};
use reassembly::Reassembly;
pub(super) use setup::Draft;

/// A message of the peer's that is here.
#[derive(Debug, Clone, Copy)]
pub(super) struct Arrival {
    pub(super) ring: Ring,
    place: usize,
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

/// Outcome a [`Core`] is made of. The order is the order of destruction.
#[derive(Debug)]
pub(super) struct Parts {
    pub(super) qps: QueuePairs,
    /// One per device.
    pub(super) queues: Vec<Queue>,
    pub(super) staging: Region,
    pub(super) target: Region,
    pub(super) layout: Layout,
    pub(super) stripes: Stripes,
    pub(super) timing: Timing,
    /// Requests that may be without completion on the first queue pair.
    pub(super) limit: u64,
}

/// Where the completions of all queue pairs on one device come.
#[derive(Debug)]
pub(super) struct Queue {
    pub(super) cq: Arc<Cq>,
    /// The next completion rings the channel.
    event_requested: bool,
}

impl Queue {
    pub(super) fn new(cq: Arc<Cq>) -> Queue {
        Queue { cq, event_requested: false }
    }
}

pub(super) struct Core {
    parts: Parts,
    /// Tells that the peer is gone.
    socket: Kept<TcpStream>,
    /// Readable when the completion channel or the socket is.
    poller: OwnedFd,
    pub(super) peer: Peer,
    /// Where the peer's target memory is.
    remote: u64,

    /// Messages sent, and how many of them the peer has freed.
    sent: PerRing<u64>,
    freed_there: PerRing<u64>,
    pub(super) zero_copies: u64,
    /// Outcome the stripes are weighed by.
    pace: Pace,

    /// Messages whose header is here.
    arrived: VecDeque<Arrival>,
    reassembly: Reassembly,
    /// Messages received, freed, and reported as freed.
    received: PerRing<u64>,
    freed: PerRing<u64>,
    reported: PerRing<u64>,
    /// A report is due that found no room in the send queue.
    report_due: bool,

    goodbye: Goodbye,
    /// It sends no more, and takes no more.
    peer_said_goodbye: bool,
    /// Nothing will come any more.
    lost: Option<String>,
    broken: Option<Error>,
    /// Halves that still exist.
    pub(super) halves: u8,
}

impl Core {
    pub(super) fn new(parts: Parts, socket: TcpStream, peer: Peer, remote: u64) -> Result<Core> {
        let poller = watch(&parts.queues, &socket)
            .map_err(|e| Error::errno("connect", "watching a completion channel and a socket", e))?;
        let layout = parts.layout;
        Ok(Core {
            reassembly: Reassembly::new(layout.slots),
            pace: Pace::new(parts.qps.len()),
            parts,
            socket: Kept::new(socket),
            poller,
            peer,
            remote,
            sent: PerRing::default(),
            freed_there: PerRing::default(),
            zero_copies: 0,
            arrived: VecDeque::with_capacity(layout.lines + layout.slots),
            received: PerRing::default(),
            freed: PerRing::default(),
            reported: PerRing::default(),
            report_due: false,
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

    /// Takes in what the devices have done; true when anything did.
    pub(super) fn poll(&mut self) -> bool {
        let mut moved = false;
        let mut queue = 0;
        while queue < self.parts.queues.len() {
            let taken = self.take_some(queue);
            moved |= taken > 0;
            // There may be more in it when so many came at once.
            if taken < Cq::BATCH {
                queue += 1;
            }
        }
        self.repost();
        if moved && self.report_due {
            self.report();
        }
        moved
    }

    /// Takes in up to [`Cq::BATCH`] completions of a queue; how many.
    #[inline]
    fn take_some(&mut self, queue: usize) -> usize {
        let Some(queue) = self.parts.queues.get(queue) else { return 0 };
        match queue.cq.poll() {
            Ok(batch) => {
                batch.iter().for_each(|completion| self.take(completion));
                batch.len()
            }
            Err(e) => {
                self.lose(e.to_string());
                0
            }
        }
    }

    /// Posts new receives for those that were used.
    #[inline]
    fn repost(&mut self) {
        if self.lost.is_some() {
            return;
        }
        let failed = self.parts.qps.iter_mut().find_map(|qp| qp.repost().err());
        if let Some(e) = failed {
            self.lose(e.to_string());
        }
    }

    #[inline]
    fn take(&mut self, completion: Completion) {
        let (number, index) = read_id(completion.id);
        let Some(qp) = self.parts.qps.get_mut(index) else {
            let detail = format!("the device completed a request that nobody has posted: {completion:?}");
            return self.lose(detail);
        };
        match completion.outcome {
            Outcome::Sent => {
                qp.complete(number);
                if self.pace.is_open(index) {
                    self.weigh(index, number);
                }
            }
            Outcome::Written { len, word } => {
                qp.used_receives += 1;
                let outcome =
                    if index == 0 { self.written(word, len) } else { self.striped(word as usize, index, len) };
                if let Err(detail) = outcome {
                    self.broken.get_or_insert(self.peer.protocol("receive", detail));
                }
            }
            Outcome::Failed { status, vendor } => {
                // Receives have number 0. A request that failed reads no memory any more, nor do those before it.
                qp.complete(number);
                self.fail(index, status, vendor);
            }
            Outcome::Other(opcode) => {
                let detail = format!("expected completions of RDMA writes, got opcode {opcode}");
                self.broken.get_or_insert(self.peer.protocol("receive", detail));
            }
        }
    }

    /// The peer has written over the first queue pair.
    #[inline]
    fn written(&mut self, word: u32, len: usize) -> Result<(), String> {
        match self.credit(word)? {
            Kind::Message(ring) => self.arrive(ring, len),
            Kind::Report => Ok(()),
            Kind::Goodbye => {
                log::debug!("rank {}: RDMA link with rank {}: it said goodbye", self.peer.rank, self.peer.peer);
                self.peer_said_goodbye = self.lost.is_none();
                Ok(())
            }
        }
    }

    /// The peer has written a stripe over another queue pair.
    fn striped(&mut self, slot: usize, qp: usize, len: usize) -> Result<(), String> {
        self.reassembly.stripe(slot, qp, len)
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
        let place = layout.place(ring, n);
        let offset = layout.offset(ring, place);
        // SAFETY: the offset is that of a header within the target memory; the peer has written it and, by the protocol,
        // leaves it alone until it is freed. A peer that does not changes the bytes of its own message.
        let header: Header = unsafe { self.parts.target.at(offset).cast::<Header>().read_unaligned() };
        let payload = header.len as usize;
        // With the header come all of a line's bytes, and of a slot's as many as its first stripe has.
        let first = len.checked_sub(Header::BYTES).filter(|&first| ring == Ring::Slots || first == payload);
        let Some(first) = first.filter(|_| payload <= layout.longest(ring)) else {
            let longest = layout.longest(ring);
            return Err(format!("expected a message of up to {longest} bytes, got {header} in a write of {len} bytes"));
        };
        if ring == Ring::Slots {
            self.reassembly.head(place, payload, first)?;
        }
        *self.received.of_mut(ring) += 1;
        self.arrived.push_back(Arrival { ring, place, offset, header });
        Ok(())
    }

    #[cold]
    fn fail(&mut self, qp: usize, code: u32, vendor: u32) {
        // Outcome follows the first error tells nothing.
        if code == status::FLUSHED && self.lost.is_some() {
            return;
        }
        let mut text = status::completion(code, vendor, &self.parts.timing);
        let qps = &self.parts.qps;
        if let (Some(failed), 2..) = (qps.get(qp), qps.len()) {
            text = format!("queue pair {} of {} ({}): {text}", qp + 1, qps.len(), failed.ports);
        }
        match self.hung_up() {
            Some(end) => self.lose(format!("{end} ({text})")),
            None => self.lose(text),
        }
    }

    /// From now on there is no credit, and nothing comes. The first cause stays.
    #[cold]
    fn lose(&mut self, detail: String) {
        // Its queue pairs go when it has closed the link.
        if self.peer_said_goodbye && self.is_complete() {
            return;
        }
        log::debug!("rank {}: RDMA link with rank {}: {detail}", self.peer.rank, self.peer.peer);
        self.lost.get_or_insert(detail);
    }

    /// No message is here in part.
    fn is_complete(&self) -> bool {
        self.arrived.iter().all(|arrival| self.is_whole(arrival))
    }

    #[inline]
    fn is_whole(&self, arrival: &Arrival) -> bool {
        arrival.ring == Ring::Lines || self.reassembly.is_whole(arrival.place)
    }

    /// Nothing can be sent any more: why.
    fn end(&self) -> Option<&str> {
        const CLOSED: Option<&str> = Some("it closed the link");
        if self.peer_said_goodbye { CLOSED } else { self.lost.as_deref() }
    }

    /// Why the TCP connection is at its end, if it is.
    fn hung_up(&self) -> Option<String> {
        let mut byte = [0u8; 1];
        match rustix::net::recv(&*self.socket, &mut byte, RecvFlags::PEEK | RecvFlags::DONTWAIT) {
            Ok((_, 0)) => Some("its process ended or closed the link".to_owned()),
            Ok(_) => Some("it sent bytes that it should not send after the handshake".to_owned()),
            Err(Errno::AGAIN | Errno::INTR) => None,
            Err(e) => Some(e.to_string()),
        }
    }

    /// Asks the operating system and the device whether the peer is still there.
    pub(super) fn look_after_peer(&mut self) {
        if self.lost.is_some() || self.peer_said_goodbye && self.is_complete() {
            return;
        }
        let failure = self.parts.qps.iter().find_map(|qp| qp.device.failure());
        if let Some(text) = failure {
            self.lose(text);
        } else if let Some(end) = self.hung_up() {
            // Outcome came before the end is here.
            self.poll();
            self.lose(end);
        }
    }

    /// The error of sending calls, if there is one.
    pub(super) fn sending(&self) -> Result<()> {
        match (&self.broken, self.end()) {
            (Some(e), _) => Err(e.clone()),
            (None, Some(detail)) => Err(self.peer.lost("send", detail)),
            (None, None) => Ok(()),
        }
    }

    /// The error of receiving calls, if there is one: not before all messages are received that are here, or will be.
    pub(super) fn receiving(&self) -> Result<()> {
        if self.front().is_some() {
            return Ok(());
        }
        if let Some(e) = &self.broken {
            return Err(e.clone());
        }
        // The goodbye may have overtaken the rest of a message.
        let detail = if self.arrived.is_empty() { self.end() } else { self.lost.as_deref() };
        detail.map_or(Ok(()), |detail| Err(self.peer.lost("receive", detail)))
    }

    /// The oldest message, if it is here whole.
    #[inline]
    pub(super) fn front(&self) -> Option<&Arrival> {
        self.arrived.front().filter(|arrival| self.is_whole(arrival))
    }

    /// Address in the target memory.
    pub(super) fn target(&self, offset: usize) -> NonNull<u8> {
        // SAFETY: offsets are those of arrivals, which lie within the target memory.
        unsafe { self.parts.target.at(offset) }
    }

    /// Frees the oldest message; false when there is none.
    pub(super) fn free(&mut self) -> bool {
        let Some(arrival) = self.front().copied() else { return false };
        self.arrived.pop_front();
        if arrival.ring == Ring::Slots {
            self.reassembly.free(arrival.place);
        }
        *self.freed.of_mut(arrival.ring) += 1;
        let unreported = *self.freed.of(arrival.ring) - *self.reported.of(arrival.ring);
        if unreported >= self.parts.layout.report(arrival.ring) {
            self.report();
        }
        true
    }

    /// Gets ready to sleep: afterwards the next completion makes [`Core::interest`] readable.
    pub(super) fn arm(&mut self) -> Result<()> {
        for queue in &mut self.parts.queues {
            if queue.cq.drain_events()? {
                queue.event_requested = false;
            }
        }
        self.poll();
        let mut asked = false;
        for queue in self.parts.queues.iter_mut().filter(|queue| !queue.event_requested) {
            queue.cq.request_event()?;
            queue.event_requested = true;
            asked = true;
        }
        if asked {
            // Outcome came before the request rings nothing.
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
        let QueuePairs { first, others } = &self.parts.qps;
        let delivered = matches!(self.goodbye, Goodbye::Posted(number) if first.completed >= number)
            && others.iter().all(|qp| qp.in_flight() == 0);
        delivered || armed.is_err() || self.end().is_some() || self.broken.is_some()
    }

    /// Requests of which is not known whether they have arrived.
    pub(super) fn in_flight(&self) -> u64 {
        self.parts.qps.iter().map(QueuePair::in_flight).sum()
    }
}

impl fmt::Debug for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Core")
            .field("peer", &self.peer)
            .field("ports", &self.parts.qps.iter().map(|qp| &qp.ports).collect::<Vec<_>>())
            .field("sent", &self.sent)
            .field("received", &self.received)
            .finish_non_exhaustive()
    }
}

/// One descriptor for both: an executor polls one per link.
fn watch(queues: &[Queue], socket: &TcpStream) -> Result<OwnedFd, Errno> {
    let poller = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    for queue in queues {
        epoll::add(&poller, queue.cq.as_fd(), epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
    }
    let ends = epoll::EventFlags::IN | epoll::EventFlags::RDHUP;
    epoll::add(&poller, socket.as_fd(), epoll::EventData::new_u64(1), ends)?;
    Ok(poller)
}
