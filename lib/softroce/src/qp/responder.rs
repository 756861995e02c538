//! The responder: requests reach memory (InfiniBand specification, 9.7.4). `reply` answers them.

use std::collections::VecDeque;

use super::attr::QpAttr;
use super::lazy::Lazy;
use super::reply::{Reply, Served};
use super::scatter::scatter;
use super::{Machine, Turn};
use crate::counters::COUNTING;
use crate::memory::{Access, Refusal, atomic, copy_in};
use crate::psn::Psn;
use crate::queue::event::EventKind;
use crate::queue::request::RecvWqe;
use crate::queue::{Status, WcOpcode};
use crate::wire::aeth::NO_CREDITS;
use crate::wire::{AtomicEth, Nak, Operation, Packet, Position, Reth, Service, Syndrome};

/// The message that is being received.
#[derive(Debug)]
enum Message {
    /// By SEND: into `recv`, of which `len` bytes are there.
    Send { recv: RecvWqe, room: u64, len: u32 },
    /// By WRITE: to `va` next, `left` bytes of `total` are to come.
    Write { va: u64, rkey: u32, left: u32, total: u32 },
}

#[derive(Debug, Default)]
pub(super) struct Responder {
    /// The number that comes next.
    pub(super) expected: Psn,
    /// Messages completed, 24 bits.
    pub(super) msn: u32,
    message: Option<Message>,
    pub(super) replies: VecDeque<Reply>,
    /// True once the NAK for the missing expected number was sent: once for each gap (9.7.5.2.8), however much comes
    /// early, or an unauthenticated sender could use up the requester's repetitions.
    said_missing: bool,
    /// True if no receive was posted for the expected request: what follows it was sent before the sender knew, and is
    /// not refused.
    not_ready: bool,
    /// READs and atomic operations that may be asked for again, oldest first: as many as may be under way.
    pub(super) served: VecDeque<Served>,
    /// True if an unreliable connection has lost packets: it waits for the first one of a message.
    skipping: bool,
    established: bool,
    pub(super) lazy: Lazy,
    /// True if the next acknowledgement is of packets of a message that has several.
    pub(super) long: bool,
}

/// Reason why a request is not executed.
enum Refused {
    /// Not answered: an unreliable connection drops it, a reliable one repeats it.
    Dropped,
    /// No receive is posted.
    NotReady,
    /// Answered with a NAK; the receive in hand ends with a status, if there is one.
    Nak(Nak, Option<Status>),
}

impl From<Refusal> for Refused {
    fn from(_: Refusal) -> Refused {
        Refused::Nak(Nak::RemoteAccess, None)
    }
}

const INVALID: Refused = Refused::Nak(Nak::InvalidRequest, None);

impl Responder {
    pub(super) fn start(&mut self, attr: &QpAttr) {
        *self = Responder { expected: Psn::new(attr.rq_psn), ..Responder::default() };
    }

    /// The queue pair failed: the receive in hand goes back to the others, to be flushed first.
    pub(super) fn abandon(&mut self, rq: &mut VecDeque<RecvWqe>) {
        if let Some(Message::Send { recv, .. }) = self.message.take() {
            rq.push_front(recv);
        }
    }
}

impl Machine {
    /// Takes a request of a connected queue pair.
    pub(super) fn take_request(&mut self, packet: &Packet<'_>, turn: &mut Turn<'_>) {
        let bth = &packet.headers.bth;
        let distance = bth.psn.since(self.resp.expected);
        if self.parts.service == Service::Uc {
            self.establish();
            return self.take_unreliable(packet, turn, distance);
        }
        if distance > 0 {
            return self.too_early();
        }
        if distance < 0 {
            COUNTING.duplicate_request.add(1);
            return self.take_again(packet);
        }
        self.establish();
        match self.execute(packet, turn) {
            Ok(()) => (self.resp.said_missing, self.resp.not_ready) = (false, false),
            Err(Refused::Dropped) => {}
            Err(Refused::NotReady) => {
                self.resp.ack(Syndrome::Rnr(self.attr.min_rnr_timer), bth.psn);
                self.resp.not_ready = true;
            }
            Err(Refused::Nak(nak, status)) => self.refuse(nak, status, bth.psn),
        }
    }

    /// Reports the event of the peer's first packet, once.
    fn establish(&mut self) {
        if !std::mem::replace(&mut self.resp.established, true) && self.attr.state == super::State::Rtr {
            self.report(EventKind::CommEstablished);
        }
    }

    /// Packets between the last one and this are missing (9.7.5.2.8, "NAK sequence error").
    fn too_early(&mut self) {
        COUNTING.out_of_seq_request.add(1);
        if !self.resp.not_ready && !std::mem::replace(&mut self.resp.said_missing, true) {
            self.resp.ack(Syndrome::Nak(Nak::Sequence), self.resp.expected);
        }
    }

    /// A refusal that ends the queue pair (table "Responder error behavior", 9.9.3).
    pub(super) fn refuse(&mut self, nak: Nak, status: Option<Status>, psn: Psn) {
        self.resp.ack(Syndrome::Nak(nak), psn);
        if let (Some(status), Some(Message::Send { recv, .. })) = (status, &self.resp.message) {
            let wc = self.recv_completion(recv.id, status);
            self.parts.recv_cq.push(wc, false);
            self.resp.message = None;
        }
        self.report(match nak {
            Nak::RemoteAccess => EventKind::QpAccessError,
            Nak::RemoteOperational => EventKind::QpFatal,
            Nak::InvalidRequest | Nak::Sequence => EventKind::QpRequestError,
        });
        self.fail();
    }

    /// A request of an unreliable connection: one that misses a packet is dropped as a whole (9.8.2.2).
    fn take_unreliable(&mut self, packet: &Packet<'_>, turn: &mut Turn<'_>, distance: i32) {
        let begins = packet.opcode.position.begins();
        if distance != 0 || begins {
            // The receive in hand serves the next message.
            self.resp.skipping = distance != 0 && !begins;
            let srq = self.parts.srq.is_some();
            match self.resp.message.take() {
                Some(Message::Send { recv, .. }) if !srq => self.rq.push_front(recv),
                // A shared queue's receive cannot go back; it completes as what it is.
                Some(Message::Send { recv, .. }) => {
                    let wc = self.recv_completion(recv.id, Status::LocalLength);
                    self.parts.recv_cq.push(wc, false);
                }
                _ => {}
            }
        }
        if self.resp.skipping {
            self.resp.expected = packet.headers.bth.psn.plus(1);
            return;
        }
        self.resp.expected = packet.headers.bth.psn;
        match self.execute(packet, turn) {
            Ok(()) => {}
            Err(Refused::Nak(_, Some(status))) => {
                if let Some(Message::Send { recv, .. }) = self.resp.message.take() {
                    let wc = self.recv_completion(recv.id, status);
                    self.parts.recv_cq.push(wc, false);
                }
                self.fail();
            }
            Err(_) => {
                self.resp.skipping = true;
                self.resp.expected = packet.headers.bth.psn.plus(1);
            }
        }
    }

    /// Executes the expected request.
    fn execute(&mut self, packet: &Packet<'_>, turn: &mut Turn<'_>) -> Result<(), Refused> {
        let (opcode, bth) = (packet.opcode, &packet.headers.bth);
        self.check_length(packet)?;
        match opcode.operation {
            Operation::Send | Operation::SendImm | Operation::SendInv => self.execute_send(packet, turn)?,
            Operation::Write | Operation::WriteImm => self.execute_write(packet, turn)?,
            Operation::ReadRequest => {
                let reth = packet.headers.reth.ok_or(INVALID)?;
                return self.execute_read(&reth, bth.psn, turn);
            }
            Operation::CompareSwap | Operation::FetchAdd => {
                let request = packet.headers.atomic.ok_or(INVALID)?;
                return self.execute_atomic(&request, opcode.operation, bth.psn, turn);
            }
            Operation::ReadResponse | Operation::Ack | Operation::AtomicAck => return Err(Refused::Dropped),
        }
        let resp = &mut self.resp;
        resp.expected = bth.psn.plus(1);
        resp.long |= opcode.position != Position::Only;
        if opcode.position.ends() {
            resp.msn = resp.msn.wrapping_add(1) & 0xff_ffff;
        }
        if bth.ack_req && self.parts.service == Service::Rc {
            resp.ack(Syndrome::Ack(NO_CREDITS), bth.psn);
        }
        Ok(())
    }

    /// Packets come in the order of their message, each as long as its position asks (9.7.4.1.3, 9.7.4.1.6).
    fn check_length(&self, packet: &Packet<'_>) -> Result<(), Refused> {
        let (opcode, len, mtu) = (packet.opcode, packet.payload.len(), self.attr.path_mtu as usize);
        let fits = match opcode.position {
            Position::First | Position::Middle => len == mtu,
            Position::Last => (1..=mtu).contains(&len),
            Position::Only => len <= mtu,
        };
        let goes_on = match (&self.resp.message, opcode.operation) {
            (None, _) => opcode.position.begins(),
            (Some(Message::Send { .. }), Operation::Send | Operation::SendImm | Operation::SendInv)
            | (Some(Message::Write { .. }), Operation::Write | Operation::WriteImm) => !opcode.position.begins(),
            _ => false,
        };
        if fits && goes_on { Ok(()) } else { Err(INVALID) }
    }

    fn execute_send(&mut self, packet: &Packet<'_>, turn: &mut Turn<'_>) -> Result<(), Refused> {
        if self.resp.message.is_none() {
            let recv = self.take_recv().ok_or(Refused::NotReady)?;
            let room = recv.sges.len();
            self.resp.message = Some(Message::Send { recv, room, len: 0 });
        }
        let (pd, by) = (self.recv_pd(), self.asker());
        let Some(Message::Send { recv, room, len }) = &mut self.resp.message else { return Err(INVALID) };
        let bytes = packet.payload;
        if u64::from(*len) + bytes.len() as u64 > *room {
            return Err(Refused::Nak(Nak::InvalidRequest, Some(Status::LocalLength)));
        }
        scatter(turn.memory, pd, recv.sges.as_slice(), *len, bytes, packet.opcode.position.ends())
            .map_err(|_| Refused::Nak(Nak::RemoteOperational, Some(Status::LocalProtection)))?;
        *len += bytes.len() as u32;
        if packet.opcode.position.ends() {
            // At last, and so once: a packet that finds no receive comes again.
            if let Some(ieth) = packet.headers.ieth {
                turn.memory.invalidate(ieth.rkey, by)?;
            }
            let (id, len) = (recv.id, *len);
            self.resp.message = None;
            let mut wc = self.recv_completion(id, Status::Success);
            wc.byte_len = len;
            wc.imm = packet.headers.imm.map(|imm| imm.0);
            wc.invalidated = packet.headers.ieth.map(|ieth| ieth.rkey);
            self.parts.recv_cq.push(wc, packet.headers.bth.solicited);
        }
        Ok(())
    }

    fn execute_write(&mut self, packet: &Packet<'_>, turn: &mut Turn<'_>) -> Result<(), Refused> {
        if !self.attr.access.contains(Access::REMOTE_WRITE) {
            return Err(INVALID);
        }
        let (by, bytes, ends) = (self.asker(), packet.payload, packet.opcode.position.ends());
        if let Some(Reth { va, rkey, len }) = packet.headers.reth {
            // The whole range before the first byte (9.7.4.1.5).
            turn.memory.remote(rkey, by, va, len as usize, Access::REMOTE_WRITE, |_| ())?;
            self.resp.message = Some(Message::Write { va, rkey, left: len, total: len });
        }
        let Some(Message::Write { va, rkey, left, total }) = &mut self.resp.message else { return Err(INVALID) };
        let (at, key, all) = (*va, *rkey, *total);
        let rest = left.checked_sub(bytes.len() as u32).ok_or(INVALID)?;
        if ends != (rest == 0) {
            return Err(INVALID);
        }
        let recv = turn.memory.remote(key, by, at, bytes.len(), Access::REMOTE_WRITE, |piece| {
            let recv = if packet.headers.imm.is_some() { Some(self.take_recv()?) } else { None };
            // SAFETY: `turn`'s reference to the table is the lock; the piece was checked for writing.
            Some((recv, unsafe { copy_in(piece, bytes, ends) }))
        })?;
        let Some((recv, copied)) = recv else {
            if packet.opcode.position.begins() {
                self.resp.message = None;
            }
            return Err(Refused::NotReady);
        };
        if let Err(refusal) = copied {
            log::debug!("queue pair {:#x}: a peer's WRITE: {refusal}", self.parts.qpn);
            if let Some(recv) = recv {
                let wc = self.recv_completion(recv.id, Status::LocalProtection);
                self.parts.recv_cq.push(wc, false);
            }
            return Err(Refused::Nak(Nak::RemoteOperational, Some(Status::LocalProtection)));
        }
        if let Some(Message::Write { va, left, .. }) = &mut self.resp.message {
            (*va, *left) = (at.wrapping_add(bytes.len() as u64), rest);
        }
        if ends {
            self.resp.message = None;
        }
        if let Some(recv) = recv {
            let mut wc = self.recv_completion(recv.id, Status::Success);
            wc.opcode = WcOpcode::RecvWriteImm;
            wc.byte_len = all;
            wc.imm = packet.headers.imm.map(|imm| imm.0);
            self.parts.recv_cq.push(wc, packet.headers.bth.solicited);
        }
        Ok(())
    }

    fn execute_read(&mut self, reth: &Reth, psn: Psn, turn: &Turn<'_>) -> Result<(), Refused> {
        if !self.attr.access.contains(Access::REMOTE_READ) || reth.len > super::wqe::MAX_MESSAGE {
            return Err(INVALID);
        }
        if self.resp.first_answers() >= usize::from(self.attr.max_dest_rd_atomic) {
            return Err(INVALID);
        }
        turn.memory.remote(reth.rkey, self.asker(), reth.va, reth.len as usize, Access::REMOTE_READ, |_| ())?;
        self.resp.msn = self.resp.msn.wrapping_add(1) & 0xff_ffff;
        let end = psn.plus(self.packets_of(reth.len));
        self.resp.expected = end;
        self.serve(Served::Read { first: psn, end, reth: *reth });
        self.resp.replies.push_back(Reply::read(reth, psn, end, self.resp.msn, false));
        Ok(())
    }

    fn execute_atomic(
        &mut self,
        request: &AtomicEth,
        operation: Operation,
        psn: Psn,
        turn: &Turn<'_>,
    ) -> Result<(), Refused> {
        if !self.attr.access.contains(Access::REMOTE_ATOMIC) || !request.va.is_multiple_of(8) {
            return Err(INVALID);
        }
        if self.resp.first_answers() >= usize::from(self.attr.max_dest_rd_atomic) {
            return Err(INVALID);
        }
        let change = |old: u64| match operation {
            Operation::FetchAdd => Some(old.wrapping_add(request.swap_or_add)),
            _ => (old == request.compare).then_some(request.swap_or_add),
        };
        let original =
            turn.memory.remote(request.rkey, self.asker(), request.va, 8, Access::REMOTE_ATOMIC, |piece| {
                // SAFETY: `turn`'s reference to the table is the lock; the piece was checked for atomic operations.
                unsafe { atomic(piece, change) }
            })??;
        let resp = &mut self.resp;
        resp.expected = psn.plus(1);
        resp.msn = resp.msn.wrapping_add(1) & 0xff_ffff;
        resp.replies.push_back(Reply::Atomic { psn, original, msn: resp.msn, again: false });
        self.serve(Served::Atomic { psn, original });
        Ok(())
    }

    /// Keeps what may be asked for again.
    fn serve(&mut self, served: Served) {
        if self.resp.served.len() >= usize::from(self.attr.max_dest_rd_atomic) {
            self.resp.served.pop_front();
        }
        self.resp.served.push_back(served);
    }
}
