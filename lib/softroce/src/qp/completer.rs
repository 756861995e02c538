//! The completer: answers become completions (InfiniBand specification, 9.7.5.1, 9.7.6).

use super::scatter::scatter;
use super::timers::Nanos;
use super::wqe::{Data, SendWqe};
use super::{Machine, Turn};
use crate::counters::COUNTING;
use crate::memory::Refusal;
use crate::psn::Psn;
use crate::queue::{SendOp, Status};
use crate::wire::{Nak, Operation, Packet, Syndrome};

/// A repetition count that is never used up.
const FOR_EVER: u8 = 7;
/// Answers that do not fit the oldest request, one after the other, after which the peer has none that does.
const MOST_STRANGE: u32 = 16;

impl Machine {
    /// Takes an acknowledgement, or an answer to a READ or an atomic operation.
    pub(super) fn take_answer(&mut self, packet: &Packet<'_>, turn: &mut Turn<'_>) {
        let psn = packet.headers.bth.psn;
        // Nothing with this number is under way: the answer came twice, or late.
        if psn.since(self.req.una) < 0 || psn.since(self.req.sent) >= 0 {
            return;
        }
        match (packet.opcode.operation, packet.headers.aeth.map(|aeth| aeth.syndrome)) {
            (Operation::Ack, Some(syndrome)) => self.take_ack(psn, syndrome, turn.now),
            (Operation::ReadResponse | Operation::AtomicAck, Some(Syndrome::Ack(_)) | None) => {
                self.take_response(packet, turn);
            }
            _ => self.drop_strange(psn),
        }
    }

    fn take_ack(&mut self, psn: Psn, syndrome: Syndrome, now: Nanos) {
        let upto = match syndrome {
            Syndrome::Ack(_) => psn.plus(1),
            Syndrome::Rnr(_) | Syndrome::Nak(_) => psn,
        };
        if !self.acknowledge(upto, now) {
            return;
        }
        match syndrome {
            Syndrome::Ack(_) => {}
            Syndrome::Rnr(code) => {
                COUNTING.rcvd_rnr_err.add(1);
                // It is waited for already: the same refusal came twice.
                if self.req.timers.rnr.is_some() {
                    return;
                }
                if self.req.rnr_retries == 0 {
                    return self.fail_oldest(Status::RnrRetriesExceeded);
                }
                if self.attr.rnr_retry != FOR_EVER {
                    self.req.rnr_retries -= 1;
                }
                self.req.go_back(psn);
                self.req.timers.await_receiver(now, code);
            }
            Syndrome::Nak(Nak::Sequence) => {
                COUNTING.rcvd_seq_err.add(1);
                // A responder sends it once for each gap; what comes again is left to the timer.
                if self.req.missed != Some(psn) {
                    self.repeat(psn, now);
                    self.req.missed = Some(psn);
                }
            }
            Syndrome::Nak(Nak::InvalidRequest) => self.fail_oldest(Status::RemoteInvalidRequest),
            Syndrome::Nak(Nak::RemoteAccess) => self.fail_oldest(Status::RemoteAccess),
            Syndrome::Nak(Nak::RemoteOperational) => self.fail_oldest(Status::RemoteOperation),
        }
    }

    /// All before `upto` is done, as far as no READ or atomic operation among it still lacks its answer; then that
    /// answer is lost (9.7.5.1.3, "implied NAK"), and the requester goes back to it: `false`.
    fn acknowledge(&mut self, upto: Psn, now: Nanos) -> bool {
        let Some(lost) = self.req.unanswered(upto) else {
            self.advance(upto, now);
            return true;
        };
        self.advance(lost, now);
        // Noticed once, and not where it is about to be asked for again anyway.
        if self.req.gap != Some(lost) && self.req.asked.front().is_some_and(|asked| asked.first.since(lost) <= 0) {
            self.repeat(lost, now);
            self.req.gap = Some(lost);
        }
        false
    }

    /// `una` moves to `to`, and what that completes is completed.
    fn advance(&mut self, to: Psn, now: Nanos) {
        let progress = to.since(self.req.una);
        if progress <= 0 {
            return;
        }
        let req = &mut self.req;
        req.una = to;
        (req.gap, req.missed, req.strange) = (None, None, 0);
        (req.retries, req.rnr_retries) = (self.attr.retry_cnt, self.attr.rnr_retry);
        while req.asked.front().is_some_and(|asked| asked.last.since(to) < 0) {
            req.asked.pop_front();
        }
        req.grow(progress as u32);
        req.skip_acknowledged();
        // Numbers that were sent before going back and are now skipped count as sent.
        if req.sent.since(to) < 0 {
            req.sent = to;
        }
        req.timers.ack = None;
        self.retire(now);
    }

    /// Something was lost: sends again from `psn` on, if the count allows.
    fn repeat(&mut self, psn: Psn, now: Nanos) {
        if self.req.retries == 0 {
            return self.fail_oldest(Status::RetriesExceeded);
        }
        if self.attr.retry_cnt != FOR_EVER {
            self.req.retries -= 1;
        }
        self.req.shrink();
        self.req.go_back(psn);
        self.req.timers.await_ack(now, self.attr.timeout);
    }

    /// Takes a packet of a READ's answer, or the answer of an atomic operation.
    fn take_response(&mut self, packet: &Packet<'_>, turn: &mut Turn<'_>) {
        let psn = packet.headers.bth.psn;
        if !self.fits(psn, packet) {
            return self.drop_strange(psn);
        }
        // Everything before it is done, as answers come in order.
        if !self.acknowledge(psn, turn.now) {
            return;
        }
        let Some(wqe) = self.req.queue.front() else { return };
        let Some(first) = wqe.psn else { return };
        // An answer that was asked for before going back, and is asked for again, is as good as the new one. One to a
        // request that has none is no answer.
        let asked = self.req.asked.front().is_some_and(|asked| asked.first.since(psn) <= 0);
        if !wqe.answered() || !asked {
            return;
        }
        let at = psn.since(first).max(0) as u32;
        match self.place(wqe, at, packet, turn) {
            Ok(()) => self.advance(psn.plus(1), turn.now),
            Err(refusal) => {
                log::debug!("queue pair {:#x}: where an answer goes: {refusal}", self.parts.qpn);
                self.fail_oldest(Status::LocalProtection);
            }
        }
    }

    /// Returns true if the answer is one to the request that has its number: of its kind, and as long as that packet of
    /// it must be.
    fn fits(&self, psn: Psn, packet: &Packet<'_>) -> bool {
        for wqe in &self.req.queue {
            let Some(first) = wqe.psn else { return false };
            let at = psn.since(first);
            if at < 0 || at as u32 >= wqe.packets {
                continue;
            }
            let left = wqe.len.saturating_sub((at as u32).saturating_mul(self.attr.path_mtu));
            return match (wqe.op, packet.opcode.operation) {
                (SendOp::Read(_), Operation::ReadResponse) => {
                    packet.payload.len() == left.min(self.attr.path_mtu) as usize
                }
                (SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. }, Operation::AtomicAck) => true,
                _ => false,
            };
        }
        false
    }

    /// Drops an answer that fits no request: it is of an unauthenticated sender, and no reason to end. A peer that has
    /// no other answer to the request that is waited for is one.
    fn drop_strange(&mut self, psn: Psn) {
        log::debug!("queue pair {:#x}: an answer with number {psn} that fits no request", self.parts.qpn);
        COUNTING.dropped_strange.add(1);
        if psn == self.req.una {
            self.req.strange += 1;
            if self.req.strange > MOST_STRANGE {
                self.fail_oldest(Status::BadResponse);
            }
        }
    }

    /// Writes packet `at` of a request's answer to its memory.
    fn place(&self, wqe: &SendWqe, at: u32, packet: &Packet<'_>, turn: &Turn<'_>) -> Result<(), Refusal> {
        let Data::Memory(list) = &wqe.data else { return Ok(()) };
        let (pd, sges) = (self.parts.pd, list.as_slice());
        match packet.headers.atomic_ack {
            Some(ack) => scatter(turn.memory, pd, sges, 0, &ack.original.to_ne_bytes(), true),
            None => scatter(turn.memory, pd, sges, at * self.attr.path_mtu, packet.payload, at + 1 == wqe.packets),
        }
    }

    /// Looks at the waits that have ended.
    pub(super) fn expire(&mut self, now: Nanos) {
        if self.req.timers.rnr.is_some_and(|at| at <= now) {
            self.req.timers.rnr = None;
        }
        if self.req.timers.ack.is_some_and(|at| at <= now) {
            log::debug!("queue pair {:#x}: no acknowledgement of {} in time", self.parts.qpn, self.req.una);
            COUNTING.completer_retry_err.add(1);
            self.req.missed = None;
            self.repeat(self.req.una, now);
        }
    }
}
