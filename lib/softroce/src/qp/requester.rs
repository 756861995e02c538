//! The requester: posted work becomes packets (InfiniBand specification, 9.7.3, 9.7.7).
//!
//! Sequence numbers are given to a request when its first packet is sent. Everything from `una`, the oldest number that
//! was not acknowledged, can be sent again: going back is moving the cursor.
//!
//! *The window.* The specification limits a requester by credits for receives alone. A socket's buffer overflows
//! silently, and a lost packet costs all behind it, so there is a window in packets that shrinks with each loss and
//! grows again.
//!
//! *READs.* A responder sends a READ's answer as fast as it can. A long READ is therefore asked for in parts that fit
//! the window, each a separate READ request: its sequence numbers are those that one long request would have.

use std::collections::VecDeque;
use std::sync::Arc;

use super::attr::{QpAttr, State};
use super::outbox::{Body, Message};
use super::scatter::gather;
use super::timers::{Nanos, Timers};
use super::wqe::{Data, SendWqe};
use super::{Machine, Turn};
use crate::memory::{Access, Asker, Piece, Refusal, Table, copy_out};
use crate::path::Path;
use crate::psn::Psn;
use crate::queue::event::EventKind;
use crate::queue::request::SendOp;
use crate::queue::{Status, Wc};
use crate::wire::bth::DEFAULT_PKEY;
use crate::wire::{AtomicEth, Bth, Deth, Headers, Ieth, ImmDt, Opcode, Operation, Position, Reth, Service};

/// Bytes under way to one peer at most, and the fewest packets that the window shrinks to.
const WINDOW_BYTES: u32 = 1 << 20;
const MIN_WINDOW: u32 = 8;

/// A READ or atomic request under way: its first and its last sequence number.
#[derive(Debug, Clone, Copy)]
pub(super) struct Asked {
    pub(super) first: Psn,
    pub(super) last: Psn,
}

#[derive(Debug, Default)]
pub(super) struct Requester {
    /// Oldest first. Those before the cursor are sent.
    pub(super) queue: VecDeque<SendWqe>,
    /// Index of the request whose packet comes next, and the index of that packet in it.
    pub(super) cursor: usize,
    pub(super) packet: u32,
    /// The number that the next new request gets.
    next: Psn,
    /// The oldest number that was not acknowledged.
    pub(super) una: Psn,
    /// One past the newest number that was sent.
    pub(super) sent: Psn,
    /// READs and atomics under way, oldest first.
    pub(super) asked: VecDeque<Asked>,
    pub(super) timers: Timers,
    pub(super) retries: u8,
    pub(super) rnr_retries: u8,
    /// Sequence number of the last lost answer: noticed again before any progress, it counts once. `None` after
    /// progress.
    pub(super) gap: Option<Psn>,
    /// Sequence number that the responder last refused as missing, until there is progress or the timer ends.
    pub(super) missed: Option<Psn>,
    /// Answers since the last progress that fit the oldest request in nothing but their number.
    pub(super) strange: u32,
    /// Packets under way at most, now and ever.
    window: u32,
    max_window: u32,
    /// Acknowledged packets since the window grew.
    grown: u32,
}

impl Requester {
    pub(super) fn start(&mut self, attr: &QpAttr) {
        let psn = Psn::new(attr.sq_psn);
        (self.next, self.una, self.sent) = (psn, psn, psn);
        (self.retries, self.rnr_retries) = (attr.retry_cnt, attr.rnr_retry);
        self.max_window = (WINDOW_BYTES / attr.path_mtu).clamp(MIN_WINDOW, 1024);
        self.window = self.max_window;
    }

    /// Forgets everything under way.
    pub(super) fn stop(&mut self) {
        self.timers = Timers::default();
        self.asked.clear();
        (self.cursor, self.packet) = (0, 0);
        (self.una, self.sent) = (self.next, self.next);
    }

    /// Moves the cursor after a request was taken from the front.
    pub(super) fn retired(&mut self) {
        match self.cursor.checked_sub(1) {
            Some(cursor) => self.cursor = cursor,
            None => self.packet = 0,
        }
    }

    /// The number of the packet at the cursor.
    fn position(&self) -> Psn {
        match self.queue.get(self.cursor).and_then(|wqe| wqe.psn) {
            Some(psn) => psn.plus(self.packet),
            None => self.next,
        }
    }

    /// The first number before `upto` that only an answer to a READ or an atomic operation can complete.
    pub(super) fn unanswered(&self, upto: Psn) -> Option<Psn> {
        for wqe in &self.queue {
            let first = wqe.psn.filter(|first| first.since(upto) < 0)?;
            let next = if first.since(self.una) > 0 { first } else { self.una };
            if wqe.answered() && next.since(first.plus(wqe.packets)) < 0 && next.since(upto) < 0 {
                return Some(next);
            }
        }
        None
    }

    /// Sends next from `psn` on, which is not acknowledged.
    pub(super) fn go_back(&mut self, psn: Psn) {
        if self.position().since(psn) > 0 {
            self.move_to(psn);
        }
        self.asked.retain(|asked| asked.last.since(psn) < 0);
    }

    /// Moves the cursor forward to the oldest number that was not acknowledged.
    pub(super) fn skip_acknowledged(&mut self) {
        if self.position().since(self.una) < 0 {
            self.move_to(self.una);
        }
    }

    fn move_to(&mut self, psn: Psn) {
        for (i, wqe) in self.queue.iter().enumerate() {
            let Some(first) = wqe.psn else { break };
            let at = psn.since(first);
            if at >= 0 && (at as u32) < wqe.packets {
                (self.cursor, self.packet) = (i, at as u32);
                return;
            }
        }
        // Behind all that was begun.
        self.cursor = self.queue.iter().take_while(|wqe| wqe.psn.is_some()).count();
        self.packet = 0;
    }

    pub(super) fn grow(&mut self, acknowledged: u32) {
        self.grown += acknowledged;
        if self.grown >= self.window {
            self.grown = 0;
            self.window = (self.window + 1 + self.window / 8).min(self.max_window);
        }
    }

    pub(super) fn shrink(&mut self) {
        self.window = (self.window / 2).max(MIN_WINDOW.min(self.max_window));
        self.grown = 0;
    }
}

/// Reason why the requester stops for now.
enum Stop {
    /// An answer, a timer or a new request has to come first.
    Wait,
    /// The outbox is full.
    Full,
}

impl Machine {
    /// Sends requests as far as window, fences and the peer's depth allow. `true` where the outbox was too small.
    pub(super) fn transmit(&mut self, turn: &mut Turn<'_>) -> bool {
        if !matches!(self.attr.state, State::Rts | State::Sqd) || self.req.timers.rnr.is_some() {
            return false;
        }
        let before = self.req.sent;
        let stop = loop {
            if turn.out.is_full() {
                break Stop::Full;
            }
            let sent = match self.parts.service {
                Service::Ud => self.transmit_datagram(turn),
                Service::Rc | Service::Uc => self.transmit_packet(turn),
            };
            if let Err(stop) = sent {
                break stop;
            }
        };
        if self.req.sent != before {
            self.resp.lazy.requested(turn.now);
        }
        let waits = self.req.sent.since(self.req.una) > 0;
        if self.parts.service == Service::Rc && waits && (self.req.timers.ack.is_none() || before == self.req.una) {
            self.req.timers.await_ack(turn.now, self.attr.timeout);
        }
        self.retire(turn.now);
        matches!(stop, Stop::Full)
    }

    /// Sends the packet at the cursor, or returns why not.
    fn transmit_packet(&mut self, turn: &mut Turn<'_>) -> Result<(), Stop> {
        let by = self.asker();
        let Machine { parts, attr, req, .. } = self;
        let under_way = req.position().since(req.una).max(0) as u32;
        let rc = parts.service == Service::Rc;
        let drained = attr.state == State::Sqd;
        let fenced = req.queue.get(req.cursor).is_some_and(|wqe| wqe.flags.fence && wqe.psn.is_none())
            && req.queue.iter().take(req.cursor).any(SendWqe::answered);
        let position = req.position();
        let wqe = req.queue.get_mut(req.cursor).ok_or(Stop::Wait)?;
        if wqe.failed.is_some() {
            return Err(Stop::Wait);
        }
        let first_time = wqe.psn.is_none();
        if first_time {
            if drained || fenced {
                return Err(Stop::Wait);
            }
            wqe.psn = Some(position);
            req.next = position.plus(wqe.packets);
        }
        if wqe.packets == 0 {
            if first_time && let Err((status, refusal)) = carry_out(wqe.op, by, turn.memory) {
                log::debug!("queue pair {:#x}: {:?}: {refusal}", parts.qpn, wqe.op);
                wqe.failed = Some(status);
                return Err(Stop::Wait);
            }
            (req.cursor, req.packet) = (req.cursor + 1, 0);
            return Ok(());
        }
        if wqe.answered() && req.asked.len() >= usize::from(attr.max_rd_atomic) {
            if attr.max_rd_atomic == 0 {
                // It could never be sent (9.7.3.1: the depth is the consumer's to set).
                wqe.failed = Some(Status::LocalQpOperation);
            }
            return Err(Stop::Wait);
        }
        // Numbers that this packet takes: a READ request takes those of its answer. Parts begin at fixed positions, as
        // one that is asked for again must not reach beyond what was asked for before (9.7.4.1.2).
        let part = (req.max_window / 4).max(1);
        let takes = match wqe.op {
            SendOp::Read(_) => (wqe.packets - req.packet).min(part - req.packet % part),
            _ => 1,
        };
        if rc && under_way > 0 && under_way + takes > req.window {
            return Err(Stop::Wait);
        }
        let offset = req.packet * attr.path_mtu;
        let ends = req.packet + takes >= wqe.packets;
        let every = (req.window / 4).max(1);
        let bth = Bth {
            opcode: 0,
            solicited: ends && wqe.flags.solicited,
            pad: 0,
            pkey: DEFAULT_PKEY,
            dest_qpn: attr.dest_qpn,
            ack_req: rc && (ends || (req.packet + 1).is_multiple_of(every)),
            psn: position,
        };
        let mut headers = Headers::new(bth);
        let place = Position::of(req.packet == 0, ends);
        let len = (wqe.len - offset).min(attr.path_mtu);
        let operation = match wqe.op {
            SendOp::Send => Operation::Send,
            SendOp::SendImm(imm) => {
                headers.imm = ends.then_some(ImmDt(imm));
                Operation::SendImm
            }
            SendOp::SendInv(rkey) => {
                headers.ieth = ends.then_some(Ieth { rkey });
                Operation::SendInv
            }
            SendOp::Write(to) | SendOp::WriteImm(to, _) => {
                headers.reth = place.begins().then_some(Reth { va: to.addr, rkey: to.rkey, len: wqe.len });
                if let SendOp::WriteImm(_, imm) = wqe.op {
                    headers.imm = ends.then_some(ImmDt(imm));
                    Operation::WriteImm
                } else {
                    Operation::Write
                }
            }
            SendOp::Read(from) => {
                let va = from.addr.wrapping_add(u64::from(offset));
                let bytes = (wqe.len - offset).min(takes.saturating_mul(attr.path_mtu));
                headers.reth = Some(Reth { va, rkey: from.rkey, len: bytes });
                Operation::ReadRequest
            }
            SendOp::CompareSwap { remote, compare, swap } => {
                headers.atomic = Some(AtomicEth { va: remote.addr, rkey: remote.rkey, swap_or_add: swap, compare });
                Operation::CompareSwap
            }
            SendOp::FetchAdd { remote, add } => {
                headers.atomic = Some(AtomicEth { va: remote.addr, rkey: remote.rkey, swap_or_add: add, compare: 0 });
                Operation::FetchAdd
            }
            // Executed above.
            SendOp::Bind(_) | SendOp::LocalInv(_) => return Err(Stop::Wait),
        };
        let place = if wqe.answered() { Position::Only } else { place };
        headers.bth.opcode = Opcode::code(parts.service, operation, place);
        if wqe.answered() {
            turn.out.bare(&headers);
            req.asked.push_back(Asked { first: position, last: position.plus(takes - 1) });
        } else {
            // Unreliable sends complete at once, and those that are repeated may complete before they have left: their
            // bytes must not be needed any more.
            let repeated = position.since(req.sent) < 0;
            let copied = !rc || repeated || matches!(wqe.data, Data::Inline(_));
            let room = if rc { req.window.saturating_sub(under_way).max(1) } else { u32::MAX };
            if let Err(refusal) = put(turn, parts.pd, &headers, wqe, copied, offset, len, room, None) {
                log::debug!("queue pair {:#x}: a send's memory: {refusal}", parts.qpn);
                wqe.failed = Some(Status::LocalProtection);
                return Err(Stop::Wait);
            }
        }
        req.packet += takes;
        let end = position.plus(takes);
        if end.since(req.sent) > 0 {
            req.sent = end;
        }
        if ends {
            req.cursor += 1;
            req.packet = 0;
        }
        if !rc {
            req.una = req.sent;
        }
        Ok(())
    }

    fn transmit_datagram(&mut self, turn: &mut Turn<'_>) -> Result<(), Stop> {
        let Machine { parts, attr, req, .. } = self;
        let drained = attr.state == State::Sqd;
        let psn = req.next;
        let wqe = req.queue.get_mut(req.cursor).filter(|wqe| wqe.failed.is_none() && !drained).ok_or(Stop::Wait)?;
        let Some((path, qpn, qkey)) = &wqe.to else { return Err(Stop::Wait) };
        if wqe.len > parts.mtu {
            wqe.failed = Some(Status::LocalLength);
            return Err(Stop::Wait);
        }
        let (operation, imm) = match wqe.op {
            SendOp::SendImm(imm) => (Operation::SendImm, Some(ImmDt(imm))),
            _ => (Operation::Send, None),
        };
        let bth = Bth {
            opcode: Opcode::code(Service::Ud, operation, Position::Only),
            solicited: wqe.flags.solicited,
            pad: 0,
            pkey: DEFAULT_PKEY,
            dest_qpn: *qpn,
            ack_req: false,
            psn,
        };
        let deth = Some(Deth { qkey: *qkey, src_qpn: parts.qpn });
        let headers = Headers { deth, imm, ..Headers::new(bth) };
        let path = path.clone();
        if put(turn, parts.pd, &headers, wqe, true, 0, wqe.len, 1, Some(&path)).is_err() {
            wqe.failed = Some(Status::LocalProtection);
            return Err(Stop::Wait);
        }
        wqe.psn = Some(psn);
        req.next = psn.plus(1);
        (req.sent, req.una) = (req.next, req.next);
        req.cursor += 1;
        Ok(())
    }

    /// Completes what is done, in order, and the oldest if it failed.
    pub(super) fn retire(&mut self, now: Nanos) {
        while let Some(front) = self.req.queue.front() {
            let status = match (front.failed, front.psn) {
                (Some(status), _) => status,
                (None, Some(psn)) if psn.plus(front.packets).since(self.req.una) <= 0 => Status::Success,
                _ => break,
            };
            let Some(wqe) = self.req.queue.pop_front() else { break };
            self.req.retired();
            self.complete_send(&wqe, status);
            if status != Status::Success {
                self.send_failed();
                return;
            }
        }
        if self.req.sent.since(self.req.una) <= 0 {
            self.req.timers.ack = None;
        } else if self.req.timers.ack.is_none() && self.req.timers.rnr.is_none() {
            self.req.timers.await_ack(now, self.attr.timeout);
        }
        self.check_drained();
    }

    /// The oldest request ends with an error, and with it the send queue: of a connected reliable queue pair all of it
    /// (table "Completion error handling", 10.10.2.3).
    pub(super) fn fail_oldest(&mut self, status: Status) {
        if self.attr.state == State::Err {
            return;
        }
        if let Some(wqe) = self.req.queue.pop_front() {
            self.complete_send(&wqe, status);
        }
        self.send_failed();
    }

    fn send_failed(&mut self) {
        if self.parts.service == Service::Rc {
            self.fail();
        } else {
            (self.attr.state, self.attr.cur_state) = (State::Sqe, State::Sqe);
            self.flush_sends();
        }
    }

    pub(super) fn complete_send(&self, wqe: &SendWqe, status: Status) {
        if status == Status::Success && !wqe.flags.signaled && !self.parts.signal_all {
            return;
        }
        let (opcode, qpn) = (wqe.opcode(), self.parts.qpn);
        let wc = Wc { id: wqe.id, status, opcode, byte_len: wqe.len, qpn, ..Wc::EMPTY };
        self.parts.send_cq.push(wc, false);
    }

    pub(super) fn check_drained(&mut self) {
        let idle = self.req.queue.front().is_none_or(|wqe| wqe.psn.is_none());
        if self.draining && idle && self.attr.state == State::Sqd {
            self.draining = false;
            self.report(EventKind::SqDrained);
        }
    }
}

/// Executes a request of which nothing is sent to the peer.
fn carry_out(op: SendOp, by: Asker, memory: &Table) -> Result<(), (Status, Refusal)> {
    match op {
        SendOp::Bind(to) => memory.bind(by, to).map_err(|e| (Status::WindowBind, e)),
        SendOp::LocalInv(key) => memory.invalidate(key, by).map_err(|e| (Status::LocalQpOperation, e)),
        _ => Ok(()),
    }
}

/// Adds a packet with bytes `offset` to `offset + len` of a request. `room`: packets that may leave now, this one
/// included.
#[allow(clippy::too_many_arguments, reason = "one packet is all of these")]
fn put(
    turn: &mut Turn<'_>,
    pd: u32,
    headers: &Headers,
    wqe: &SendWqe,
    copied: bool,
    offset: u32,
    len: u32,
    room: u32,
    path: Option<&Arc<Path>>,
) -> Result<(), Refusal> {
    let memory = turn.memory;
    turn.out.packet(headers, path, |out| {
        let (first, start) = (out.pieces.len(), out.bytes.len());
        let list = match &wqe.data {
            Data::Inline(bytes) => {
                out.bytes.extend_from_slice(bytes.get(offset as usize..(offset + len) as usize).unwrap_or_default());
                return Ok(Body::Copied(start, out.bytes.len()));
            }
            Data::Memory(list) => list.as_slice(),
        };
        let copy = |bytes: &mut Vec<u8>, len: u32| {
            gather(memory, pd, list, offset, len as usize, Access::LOCAL_READ, |piece| {
                // SAFETY: `turn`'s reference to the table is the lock.
                unsafe { copy_out(piece, bytes) }
            })
        };
        if copied {
            copy(&mut out.bytes, len)?;
            return Ok(Body::Copied(start, out.bytes.len()));
        }
        gather(memory, pd, list, offset, len as usize, Access::LOCAL_READ, |piece| {
            out.pieces.push(piece);
            piece.check(false)
        })?;
        if !out.pieces.get(first..).unwrap_or_default().iter().any(Piece::is_of_gpu) {
            return Ok(Body::Memory(first, out.pieces.len()));
        }
        out.pieces.truncate(first);
        let most = (wqe.len - offset).min(room.saturating_mul(len));
        out.of_gpu(Message::Request(wqe.psn.unwrap_or(headers.bth.psn)), offset, len, most, copy)
    })
}
