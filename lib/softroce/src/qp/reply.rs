//! Answers: acknowledgements, refusals, what READs and atomics asked for, and all of them again (InfiniBand
//! specification, 9.7.4.3, 9.7.5).

use super::outbox::{Body, Message};
use super::responder::Responder;
use super::{Machine, Turn};
use crate::memory::{Access, copy_out};
use crate::psn::Psn;
use crate::wire::aeth::NO_CREDITS;
use crate::wire::bth::DEFAULT_PKEY;
use crate::wire::{Aeth, AtomicAckEth, Bth, Headers, Nak, Opcode, Operation, Packet, Position, Reth, Syndrome};

/// An answer that is due.
#[derive(Debug, Clone, Copy)]
pub(super) enum Reply {
    /// All up to here arrived; or a refusal of this one.
    Ack { psn: Psn, aeth: Aeth },
    /// What a READ asked for: `left` bytes from `va` on, the next packet is number `psn`. Of `first` to know its
    /// position.
    Read { first: Psn, psn: Psn, end: Psn, va: u64, rkey: u32, left: u32, msn: u32 },
    /// The word before an atomic operation.
    Atomic { psn: Psn, original: u64, msn: u32 },
}

impl Reply {
    fn psn(&self) -> Psn {
        match self {
            Reply::Ack { psn, .. } | Reply::Read { psn, .. } | Reply::Atomic { psn, .. } => *psn,
        }
    }
}

impl Responder {
    pub(super) fn ack(&mut self, syndrome: Syndrome, psn: Psn) {
        let aeth = Aeth { syndrome, msn: self.msn };
        if let (Some(Reply::Ack { psn: last, aeth: old }), Syndrome::Ack(_)) = (self.replies.back_mut(), syndrome)
            && matches!(old.syndrome, Syndrome::Ack(_))
        {
            (*last, *old) = (psn, aeth);
            return;
        }
        self.replies.push_back(Reply::Ack { psn, aeth });
    }

    /// One acknowledgement and nothing else is due.
    pub(super) fn owes_only_an_ack(&self) -> bool {
        match self.replies.front() {
            Some(Reply::Ack { aeth, .. }) => self.replies.len() == 1 && matches!(aeth.syndrome, Syndrome::Ack(_)),
            _ => false,
        }
    }

    /// READs and atomics whose answer is not sent yet.
    pub(super) fn answering(&self) -> usize {
        self.replies.iter().filter(|r| !matches!(r, Reply::Ack { .. })).count()
    }
}

impl Machine {
    pub(super) fn packets_of(&self, len: u32) -> u32 {
        len.div_ceil(self.attr.path_mtu).max(1)
    }

    pub(super) fn answer_read(&mut self, reth: &Reth, psn: Psn, end: Psn) {
        let msn = self.resp.msn;
        let &Reth { va, rkey, len: left } = reth;
        self.resp.replies.push_back(Reply::Read { first: psn, psn, end, va, rkey, left, msn });
    }

    /// A request that was carried out before comes again: its answer was lost, or is late (9.7.4.3, "duplicate
    /// requests").
    pub(super) fn take_again(&mut self, packet: &Packet<'_>) {
        let psn = packet.headers.bth.psn;
        match packet.opcode.operation {
            Operation::ReadRequest => {
                let Some(reth) = packet.headers.reth else { return };
                let end = psn.plus(self.packets_of(reth.len));
                if end.since(self.resp.expected) > 0 || !self.attr.access.contains(Access::REMOTE_READ) {
                    return;
                }
                self.forget_answers(psn);
                if self.resp.answering() >= usize::from(self.attr.max_dest_rd_atomic) {
                    return;
                }
                self.answer_read(&reth, psn, end);
            }
            Operation::CompareSwap | Operation::FetchAdd => {
                let Some(&(_, original)) = self.resp.atomics.iter().find(|(at, _)| *at == psn) else { return };
                self.forget_answers(psn);
                if self.resp.answering() >= usize::from(self.attr.max_dest_rd_atomic) {
                    return;
                }
                let msn = self.resp.msn;
                self.resp.replies.push_back(Reply::Atomic { psn, original, msn });
            }
            _ => {
                // Answers to later READs are still due, and say it as well.
                let last = self.resp.expected.previous();
                if self.resp.answering() == 0 {
                    self.resp.ack(Syndrome::Ack(NO_CREDITS), last);
                }
            }
        }
    }

    /// The requester has gone back to `psn`, and asks for everything from there on again.
    fn forget_answers(&mut self, psn: Psn) {
        self.resp.replies.retain_mut(|reply| {
            if let Reply::Read { psn: at, end, left, .. } = reply {
                let mtu = self.attr.path_mtu;
                let before = psn.since(*at);
                if before > 0 && end.since(psn) > 0 {
                    *left = (*left).min((before as u32).saturating_mul(mtu));
                    *end = psn;
                }
            }
            reply.psn().since(psn) < 0
        });
    }

    /// Sends the answers that are due. `true` where the outbox was too small for all.
    pub(super) fn respond(&mut self, turn: &mut Turn<'_>) -> bool {
        while let Some(reply) = self.resp.replies.front().copied() {
            if turn.out.is_full() {
                return true;
            }
            self.resp.lazy.sent(turn.now);
            self.resp.long = false;
            match reply {
                Reply::Ack { psn, aeth } => {
                    let headers = Headers { aeth: Some(aeth), ..self.answer(Operation::Ack, Position::Only, psn) };
                    turn.out.bare(&headers);
                }
                Reply::Atomic { psn, original, msn } => {
                    let headers = Headers {
                        aeth: Some(Aeth { syndrome: Syndrome::Ack(NO_CREDITS), msn }),
                        atomic_ack: Some(AtomicAckEth { original }),
                        ..self.answer(Operation::AtomicAck, Position::Only, psn)
                    };
                    turn.out.bare(&headers);
                }
                Reply::Read { first, psn, end, va, rkey, left, msn } => {
                    let len = left.min(self.attr.path_mtu);
                    let next = psn.plus(1);
                    let place = Position::of(psn == first, next == end);
                    let mut headers = self.answer(Operation::ReadResponse, place, psn);
                    headers.aeth =
                        (place != Position::Middle).then_some(Aeth { syndrome: Syndrome::Ack(NO_CREDITS), msn });
                    let (memory, by) = (turn.memory, self.asker());
                    // Copied before its CRC is made: the program may write to memory that a peer reads.
                    // SAFETY: the turn's reference to the table is the lock.
                    let copy = |piece, bytes: &mut Vec<u8>| unsafe { copy_out(piece, bytes) };
                    let sent = turn.out.packet(&headers, None, |out| {
                        let start = out.bytes.len();
                        let of_gpu = memory.remote(rkey, by, va, len as usize, Access::REMOTE_READ, |piece| {
                            if piece.is_of_gpu() { Ok(true) } else { copy(piece, &mut out.bytes).map(|()| false) }
                        })??;
                        if !of_gpu {
                            return Ok(Body::Copied(start, out.bytes.len()));
                        }
                        let from = psn.since(first).max(0) as u32 * self.attr.path_mtu;
                        out.of_gpu(Message::Answer(first), from, len, left, |bytes, len| {
                            memory.remote(rkey, by, va, len as usize, Access::REMOTE_READ, |p| copy(p, bytes))?
                        })
                    });
                    if sent.is_err() {
                        // Deregistered or invalidated meanwhile.
                        self.resp.replies.clear();
                        self.refuse(Nak::RemoteAccess, None, psn);
                        continue;
                    }
                    if next != end {
                        let (va, left) = (va.wrapping_add(u64::from(len)), left - len);
                        if let Some(front) = self.resp.replies.front_mut() {
                            *front = Reply::Read { first, psn: next, end, va, rkey, left, msn };
                        }
                        continue;
                    }
                }
            }
            self.resp.replies.pop_front();
        }
        false
    }

    fn answer(&self, operation: Operation, place: Position, psn: Psn) -> Headers {
        Headers::new(Bth {
            opcode: Opcode::code(self.parts.service, operation, place),
            solicited: false,
            pad: 0,
            pkey: DEFAULT_PKEY,
            dest_qpn: self.attr.dest_qpn,
            ack_req: false,
            psn,
        })
    }
}
