//! A queue pair: state machines that do no I/O and read no clock.
//!
//! Input: packets, posted work, changes of state, and the time. Output: packets for the wire (`Outbox`), completions,
//! events, and the time at which the machine wants to be called again. So the same code runs behind a socket, and in
//! tests on a wire that loses, doubles and reorders under its own clock.
//!
//! | file | idea |
//! | --- | --- |
//! | `attr` | states, attributes, which change is allowed |
//! | `outbox` | packets on their way out |
//! | `scatter` | parts of a message in lists of memory |
//! | `timers` | waits |
//! | `wqe` | a posted request |
//! | `requester` | posted work to packets: PSNs, windows, going back |
//! | `completer` | answers to completions: ACK, NAK, READ responses |
//! | `responder` | requests to memory |
//! | `reply` | answers: ACK, NAK, what READs and atomics get; and again |
//! | `lazy` | acknowledgements that travel with requests |
//! | `stranger` | the fuzzer at a queue pair: packets of an unauthenticated sender |
//! | `datagram` | UD, which has neither connection nor answers |

mod attr;
mod completer;
mod datagram;
mod lazy;
mod outbox;
mod reply;
mod requester;
mod responder;
mod scatter;
#[cfg(any(test, fuzzing))]
pub(crate) mod stranger;
#[cfg(test)]
mod tests;
mod timers;
mod wqe;

use std::collections::VecDeque;
use std::sync::Arc;

pub use attr::{AttrMask, MAX_RD_ATOMIC, QpAttr, State};
pub(crate) use outbox::{Body, OutPacket, Outbox};
pub(crate) use timers::Nanos;

use crate::counters::COUNTING;
use crate::error::{Error, Result};
use crate::memory::{Asker, Table};
use crate::queue::event::{Affected, EventKind, Events};
use crate::queue::request::{RecvRequest, RecvWqe, SendRequest};
use crate::queue::{Cq, Srq, Status, Wc, WcOpcode};
use crate::wire::bth::is_of_our_partition;
use crate::wire::icrc::Route;
use crate::wire::{Packet, Service};
use requester::Requester;
use responder::Responder;

/// Capacity of a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capacity {
    /// Requests in the send queue.
    pub sends: u32,
    /// Receives in the receive queue.
    pub recvs: u32,
    /// Elements of a send.
    pub send_sges: u32,
    /// Elements of a receive.
    pub recv_sges: u32,
    /// Bytes that are copied when they are posted.
    pub inline: u32,
}

/// Context of one call of a queue pair: the time, registered memory, and the outbox of its packets.
pub(crate) struct Turn<'a> {
    pub(crate) now: Nanos,
    pub(crate) memory: &'a Table,
    pub(crate) out: &'a mut Outbox,
}

/// Parts of a queue pair that do not change.
pub(crate) struct Parts {
    pub(crate) qpn: u32,
    pub(crate) pd: u32,
    pub(crate) service: Service,
    /// Bytes of payload that the port's packets hold: the longest datagram.
    pub(crate) mtu: u32,
    pub(crate) capacity: Capacity,
    /// True if every send gives a completion, signaled or not.
    pub(crate) signal_all: bool,
    pub(crate) send_cq: Arc<Cq>,
    pub(crate) recv_cq: Arc<Cq>,
    pub(crate) srq: Option<Arc<Srq>>,
    pub(crate) events: Arc<Events>,
}

/// A queue pair.
pub(crate) struct Machine {
    pub(crate) parts: Parts,
    pub(crate) attr: QpAttr,
    req: Requester,
    resp: Responder,
    rq: VecDeque<RecvWqe>,
    /// True while the event of a drained send queue is due.
    draining: bool,
}

impl Machine {
    pub(crate) fn new(parts: Parts) -> Machine {
        Machine {
            parts,
            attr: QpAttr::default(),
            req: Requester::default(),
            resp: Responder::default(),
            rq: VecDeque::new(),
            draining: false,
        }
    }

    /// Changes attributes and state (verb "Modify Queue Pair", 11.2.5.2).
    pub(crate) fn modify(&mut self, new: &QpAttr, mask: AttrMask) -> Result<()> {
        let from = self.attr.state;
        let next = self.attr.changed(self.parts.service, new, mask)?;
        let to = next.state;
        self.attr = next;
        match (from, to) {
            (_, State::Reset) => {
                self.req = Requester::default();
                self.resp = Responder::default();
                self.rq.clear();
                self.draining = false;
                self.attr = QpAttr::default();
                self.parts.send_cq.forget(self.parts.qpn);
                self.parts.recv_cq.forget(self.parts.qpn);
            }
            (State::Err, State::Err) => {}
            (_, State::Err) => self.enter_error(),
            (State::Init, State::Rtr) => self.resp.start(&self.attr),
            (State::Rtr, State::Rts) => self.req.start(&self.attr),
            (State::Rts, State::Sqd) => {
                self.draining = self.attr.sqd_notify;
                self.check_drained();
            }
            _ => {}
        }
        Ok(())
    }

    /// Puts a request into the send queue; [`Machine::service`] sends it. See [`crate::Qp::post_send`].
    pub(crate) fn post_send(&mut self, request: &SendRequest<'_>) -> Result<()> {
        match self.attr.state {
            State::Rts | State::Sqd | State::Sqe | State::Err => {}
            state => return Err(Error::invalid(format!("sends cannot be posted in {state:?}"))),
        }
        let wqe = wqe::SendWqe::new(&self.parts, &self.attr, request)?;
        if self.req.queue.len() >= self.parts.capacity.sends as usize {
            return Err(Error::full("the send queue is full"));
        }
        self.req.queue.push_back(wqe);
        if matches!(self.attr.state, State::Err | State::Sqe) {
            self.flush_sends();
        }
        Ok(())
    }

    /// Puts several requests into the send queue, or none of them where one is refused. See
    /// [`crate::Qp::post_send_all`].
    pub(crate) fn post_send_all(&mut self, requests: &[SendRequest<'_>]) -> Result<(), (usize, Error)> {
        // In these states a request leaves the queue at once: it cannot be taken back, and needs no room.
        let leaves = matches!(self.attr.state, State::Err | State::Sqe);
        let before = self.req.queue.len();
        for (i, request) in requests.iter().enumerate() {
            let refused = match leaves {
                true => wqe::SendWqe::new(&self.parts, &self.attr, request).err(),
                false => self.post_send(request).err(),
            };
            if let Some(e) = refused {
                self.req.queue.truncate(before);
                return Err((i, e));
            }
        }
        if leaves {
            requests.iter().enumerate().try_for_each(|(i, request)| self.post_send(request).map_err(|e| (i, e)))?;
        }
        Ok(())
    }

    /// Puts a receive into the receive queue. See [`crate::Qp::post_recv`].
    pub(crate) fn post_recv(&mut self, request: &RecvRequest<'_>) -> Result<()> {
        if self.parts.srq.is_some() {
            return Err(Error::invalid("the queue pair takes its receives from a shared receive queue"));
        }
        if self.attr.state == State::Reset {
            return Err(Error::invalid("receives cannot be posted in Reset"));
        }
        if request.sges.len() > self.parts.capacity.recv_sges as usize {
            return Err(Error::invalid("more scatter-gather elements than the receive queue was made for"));
        }
        if self.rq.len() >= self.parts.capacity.recvs as usize {
            return Err(Error::full("the receive queue is full"));
        }
        self.rq.push_back(RecvWqe::new(request));
        if self.attr.state == State::Err {
            self.flush_recvs();
        }
        Ok(())
    }

    /// Takes a packet that came for this queue pair by `route`.
    pub(crate) fn receive(&mut self, packet: &Packet<'_>, route: &Route, turn: &mut Turn<'_>) {
        if packet.opcode.service != self.parts.service {
            return;
        }
        if !is_of_our_partition(packet.headers.bth.pkey) {
            COUNTING.bad_pkey_cntr.add(1);
            return;
        }
        match self.attr.state {
            State::Rtr | State::Rts | State::Sqd | State::Sqe => {}
            State::Reset | State::Init | State::Err => return,
        }
        match (self.parts.service, packet.opcode.is_request()) {
            (Service::Ud, _) => self.take_datagram(packet, route, turn),
            (_, true) => self.take_request(packet, turn),
            (_, false) if self.attr.state != State::Rtr => self.take_answer(packet, turn),
            (_, false) => {}
        }
        self.check_queues();
    }

    /// Ends the queue pair if one of its completion queues had no room for a completion, of any queue pair (C10-9).
    fn check_queues(&mut self) {
        let overran = self.parts.send_cq.has_overrun() || self.parts.recv_cq.has_overrun();
        if overran && !matches!(self.attr.state, State::Reset | State::Init | State::Err) {
            self.report(EventKind::QpFatal);
            self.fail();
        }
    }

    /// Sends what there is to send: answers, then requests. `true` where the outbox was too small for all.
    pub(crate) fn service(&mut self, turn: &mut Turn<'_>) -> bool {
        self.check_queues();
        let more = self.service_all(turn);
        self.check_queues();
        more
    }

    fn service_all(&mut self, turn: &mut Turn<'_>) -> bool {
        self.expire(turn.now);
        if !self.resp.owes_only_an_ack() || self.resp.long {
            let answers = self.respond(turn);
            let requests = self.transmit(turn);
            return answers || requests;
        }
        let before = turn.out.packets.len();
        let requests = self.transmit(turn);
        let (sent, wait) = (turn.out.packets.len() > before, self.ack_wait());
        let answers = if self.resp.lazy.may_send(sent, wait, turn.now) { self.respond(turn) } else { false };
        answers || requests
    }

    /// Sends answers alone, and leaves requests to a later call. `true` where the outbox was too small for all.
    pub(crate) fn service_answers(&mut self, turn: &mut Turn<'_>) -> bool {
        self.expire(turn.now);
        let may_wait = self.resp.owes_only_an_ack() && !self.resp.long;
        let wait = self.ack_wait();
        (!may_wait || self.resp.lazy.may_send(false, wait, turn.now)) && self.respond(turn)
    }

    /// Returns true if nothing is under way on this reliable connection, and a message of at least `bytes` comes next.
    pub(crate) fn begins(&self, bytes: u32) -> bool {
        let next = self.req.queue.get(self.req.cursor);
        self.parts.service == Service::Rc && self.req.una == self.req.sent && next.is_some_and(|wqe| wqe.len >= bytes)
    }

    /// Returns true if there are requests that were not sent yet, though they may have to wait.
    pub(crate) fn has_requests(&self) -> bool {
        self.req.cursor < self.req.queue.len()
    }

    /// Makes the next call send the acknowledgement that is owed, if one is. A program has the completion of a message
    /// before the thread that received it begins to acknowledge it: it may wait in no timer yet.
    pub(crate) fn hurry(&mut self) {
        if self.resp.owes_only_an_ack() {
            self.resp.lazy.hurry();
        }
    }

    /// The time at which the machine wants to be called although nothing came; `None` for never.
    pub(crate) fn next_timer(&self) -> Option<Nanos> {
        [self.req.timers.next(), self.resp.lazy.due()].into_iter().flatten().min()
    }

    /// To ERR: what is posted is flushed (10.3.1.5).
    fn fail(&mut self) {
        if self.attr.state != State::Err {
            self.enter_error();
        }
    }

    fn enter_error(&mut self) {
        self.attr.state = State::Err;
        self.attr.cur_state = State::Err;
        self.flush_sends();
        self.resp.abandon(&mut self.rq);
        self.flush_recvs();
        if self.parts.srq.is_some() {
            self.report(EventKind::LastWqeReached);
        }
    }

    fn flush_sends(&mut self) {
        while let Some(wqe) = self.req.queue.pop_front() {
            self.complete_send(&wqe, Status::Flushed);
        }
        self.req.stop();
    }

    fn flush_recvs(&mut self) {
        while let Some(wqe) = self.rq.pop_front() {
            let wc = self.recv_completion(wqe.id, Status::Flushed);
            self.parts.recv_cq.push(wc, false);
        }
    }

    fn recv_completion(&self, id: u64, status: Status) -> Wc {
        let (qpn, src_qpn) = (self.parts.qpn, self.attr.dest_qpn);
        Wc { id, status, opcode: WcOpcode::Recv, qpn, src_qpn, ..Wc::EMPTY }
    }

    fn report(&self, kind: EventKind) {
        self.parts.events.report(kind, Affected::Qp(self.parts.qpn));
    }

    /// Nanoseconds for which an acknowledgement may wait: the peer's timeout, which is most likely ours, is not to be
    /// missed.
    fn ack_wait(&self) -> Nanos {
        timers::ack_timeout(self.attr.timeout).map_or(lazy::LONGEST, |timeout| (timeout / 8).min(lazy::LONGEST))
    }

    fn take_recv(&mut self) -> Option<RecvWqe> {
        match &self.parts.srq {
            Some(srq) => srq.take(),
            None => self.rq.pop_front(),
        }
    }

    /// The queue pair, with its domain, for which a peer's requests access memory.
    fn asker(&self) -> Asker {
        Asker { pd: self.parts.pd, qpn: self.parts.qpn }
    }

    /// The domain that receives' keys are checked in: an SRQ has its own.
    fn recv_pd(&self) -> u32 {
        self.parts.srq.as_ref().map_or(self.parts.pd, |srq| srq.pd())
    }
}
