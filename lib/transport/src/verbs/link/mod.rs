//! The queue pairs of a link with their memory and counts, shared by the two halves.
//!
//! # Why no receive is ever missing
//! A write with an immediate word takes a receive at the peer, and a sender that finds none is put off ("RNR"). Each
//! end posts [`Layout::receives`] of them on the first queue pair and posts a new one for each that was used when it
//! takes the completion. The peer can use no more before that: its messages need credit (lines + slots), and each
//! report of freed messages stands for messages that we sent before and that the peer cannot get more of until we take
//! its reports in. The other queue pairs carry one stripe per slot at most until the slot is freed: they have as many
//! receives as there are slots.
//!
//! # Why the send queue never overflows
//! Work is posted while fewer than `limit` requests are without completion; every 16th request asks for one, and so
//! does each that is sent from staging memory. On the other queue pairs there is one per slot at most: a slot is not
//! used again before its stripes have completed.
//!
//! # Order of arrival
//! Credit, messages of the lines, headers and the goodbye come over the first queue pair, in order. Stripes come when
//! they come: a message is shown when all of it is here ([`Reassembly`]), and those behind it wait. So the goodbye may
//! overtake stripes; only what ends a queue pair ends the hope for them.

pub(super) mod exchange;
mod incoming;
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
use std::sync::Arc;

use rustix::event::epoll;
use rustix::io::Errno;
use rustix::net::RecvFlags;

use super::stripes::Stripes;
use super::sys::{Cq, Timing, status};
use crate::{Interest, Peer};
use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::fork::Kept;

use incoming::Arrival;
use layout::{Layout, PerRing};
use memory::Region;
use pace::Pace;
use queue_pair::{QueuePair, QueuePairs, REPOST};
use reassembly::Reassembly;
pub(super) use setup::Draft;

/// State of the goodbye.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Goodbye {
    Unsaid,
    /// Not posted: the send queue was full.
    Due,
    /// Posted with this number.
    Posted(u64),
}

/// The parts of a [`Core`]. The order is the order of destruction.
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

/// Completion queue of all queue pairs on one device.
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
    /// TCP connection, which ends when the peer is gone.
    socket: Kept<TcpStream>,
    /// Readable when the completion channel or the socket is.
    poller: OwnedFd,
    pub(super) peer: Peer,
    /// Address of the peer's target memory.
    remote: u64,

    /// Messages sent, and how many of them the peer has freed.
    sent: PerRing<u64>,
    freed_there: PerRing<u64>,
    pub(super) zero_copies: u64,
    /// Rates of the queue pairs, by which stripes are weighed.
    pace: Pace,

    /// Messages whose header is here.
    arrived: VecDeque<Arrival>,
    reassembly: Reassembly,
    /// Messages received, freed, and reported as freed.
    received: PerRing<u64>,
    freed: PerRing<u64>,
    reported: PerRing<u64>,
    /// A report is due that found the send queue full.
    report_due: bool,

    goodbye: Goodbye,
    /// The peer sends no more, and takes no more.
    peer_said_goodbye: bool,
    /// Reason why nothing will come any more.
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

    #[cold]
    fn fail(&mut self, qp: usize, code: u32, vendor: u32) {
        // Later errors follow from the first one.
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
            // Messages from before the end are here.
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

    /// The error of a sender that has posted everything. A peer that said goodbye has received it, or wants it no more;
    /// its goodbye may overtake the last completions, which still come.
    pub(super) fn flushing(&self) -> Result<()> {
        let left = self.peer_said_goodbye && self.lost.is_none() && self.broken.is_none();
        if left && !self.has_sent() { Ok(()) } else { self.sending() }
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
            // Earlier completions ring nothing.
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
