//! Answers: acknowledgements, refusals, results of READs and atomics, and all of them again (InfiniBand specification,
//! 9.7.4.3, 9.7.5).

use super::outbox::{Body, Message};
use super::responder::Responder;
use super::{Machine, Turn};
use crate::counters::COUNTING;
use crate::memory::{Access, copy_out};
use crate::psn::Psn;
use crate::wire::aeth::NO_CREDITS;
use crate::wire::bth::DEFAULT_PKEY;
use crate::wire::{Aeth, AtomicAckEth, Bth, Headers, Nak, Opcode, Operation, Packet, Position, Reth, Syndrome};

/// An answer that is due.
#[derive(Debug, Clone, Copy)]
pub(super) enum Reply {
    /// An acknowledgement of all up to `psn`; or a refusal of `psn`.
    Ack { psn: Psn, aeth: Aeth },
    /// An answer to a READ: `left` bytes from `va` on, of which the next packet is number `psn`. Its distance from
    /// `first` gives its position. `again`: the same was requested before.
    Read { first: Psn, psn: Psn, end: Psn, va: u64, rkey: u32, left: u32, msn: u32, again: bool },
    /// The word before an atomic operation.
    Atomic { psn: Psn, original: u64, msn: u32, again: bool },
}

impl Reply {
    pub(super) fn read(reth: &Reth, psn: Psn, end: Psn, msn: u32, again: bool) -> Reply {
        let &Reth { va, rkey, len: left } = reth;
        Reply::Read { first: psn, psn, end, va, rkey, left, msn, again }
    }

    /// The numbers that the answer to a READ or an atomic operation still takes: from, and up to before.
    fn span(&self) -> Option<(Psn, Psn)> {
        match *self {
            Reply::Ack { .. } => None,
            Reply::Read { psn, end, .. } => Some((psn, end)),
            Reply::Atomic { psn, .. } => Some((psn, psn.plus(1))),
        }
    }
}

/// A READ or an atomic operation that was executed. No other one is answered a second time: an unauthenticated sender's
/// request with an old number would otherwise be executed without a check.
#[derive(Debug, Clone, Copy)]
pub(super) enum Served {
    /// Numbers `first` to before `end` are the answer.
    Read { first: Psn, end: Psn, reth: Reth },
    /// The result of an atomic operation: the word before it.
    Atomic { psn: Psn, original: u64 },
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

    /// Returns true if one acknowledgement and nothing else is due.
    pub(super) fn owes_only_an_ack(&self) -> bool {
        match self.replies.front() {
            Some(Reply::Ack { aeth, .. }) => self.replies.len() == 1 && matches!(aeth.syndrome, Syndrome::Ack(_)),
            _ => false,
        }
    }

    /// READs and atomics whose answer is not sent yet.
    fn answering(&self) -> usize {
        self.replies.iter().filter(|r| !matches!(r, Reply::Ack { .. })).count()
    }

    /// READs and atomics whose first answer is not sent yet.
    pub(super) fn first_answers(&self) -> usize {
        let first = |r: &&Reply| matches!(r, Reply::Read { again: false, .. } | Reply::Atomic { again: false, .. });
        self.replies.iter().filter(first).count()
    }

    /// The index in the queue for an answer that begins with `psn`, and the number that the answer there begins with,
    /// if there is one. `None` where that number's answer is due already.
    fn place_for(&self, psn: Psn) -> Option<(usize, Option<Psn>)> {
        for (i, reply) in self.replies.iter().enumerate() {
            match reply.span() {
                Some((from, _)) if from.since(psn) > 0 => return Some((i, Some(from))),
                Some((_, end)) if end.since(psn) > 0 => return None,
                _ => {}
            }
        }
        Some((self.replies.len(), None))
    }
}

impl Machine {
    pub(super) fn packets_of(&self, len: u32) -> u32 {
        len.div_ceil(self.attr.path_mtu).max(1)
    }

    /// Takes a request that was executed before: its answer was lost, or is late (9.7.4.3, "duplicate requests"). Or it
    /// is an unauthenticated sender's, with an old number: no harm comes of it, whatever it requests.
    pub(super) fn take_again(&mut self, packet: &Packet<'_>) {
        let psn = packet.headers.bth.psn;
        match packet.opcode.operation {
            Operation::ReadRequest | Operation::CompareSwap | Operation::FetchAdd => {
                if self.answer_again(packet, psn).is_none() {
                    log::debug!("queue pair {:#x}: {psn} was never asked for like this", self.parts.qpn);
                    COUNTING.dropped_strange.add(1);
                }
            }
            _ => {
                // Answers to later READs are still due, and acknowledge it as well.
                let last = self.resp.expected.previous();
                if self.resp.answering() == 0 {
                    self.resp.ack(Syndrome::Ack(NO_CREDITS), last);
                }
            }
        }
    }

    /// Answers a request again, or leaves it to the answer that is due. `None` where no such request was executed.
    fn answer_again(&mut self, packet: &Packet<'_>, psn: Psn) -> Option<()> {
        let (mtu, msn) = (self.attr.path_mtu, self.resp.msn);
        let mut again = match packet.headers.reth {
            Some(reth) => {
                let end = psn.plus(self.packets_of(reth.len));
                let fits = |served: &Served| match *served {
                    Served::Read { first, end: last, reth: old } => {
                        let before = psn.since(first);
                        let offset = u64::from(before.max(0) as u32) * u64::from(mtu);
                        let asked = reth.va == old.va.wrapping_add(offset)
                            && offset + u64::from(reth.len) <= u64::from(old.len)
                            && reth.rkey == old.rkey;
                        before >= 0 && last.since(end) >= 0 && asked
                    }
                    Served::Atomic { .. } => false,
                };
                self.resp.served.iter().find(|served| fits(served))?;
                Reply::read(&reth, psn, end, msn, true)
            }
            None => {
                let found = |served: &Served| match *served {
                    Served::Atomic { psn: at, original } if at == psn => Some(original),
                    _ => None,
                };
                Reply::Atomic { psn, original: self.resp.served.iter().find_map(found)?, msn, again: true }
            }
        };
        // What is due already is sent anyway.
        let Some((at, next)) = self.resp.place_for(psn) else { return Some(()) };
        if self.resp.answering() >= 2 * usize::from(self.attr.max_dest_rd_atomic) {
            return Some(());
        }
        if let (Reply::Read { end, left, .. }, Some(next)) = (&mut again, next)
            && end.since(next) > 0
        {
            (*end, *left) = (next, (*left).min((next.since(psn) as u32).saturating_mul(mtu)));
        }
        self.resp.replies.insert(at, again);
        Some(())
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
                Reply::Atomic { psn, original, msn, .. } => {
                    let headers = Headers {
                        aeth: Some(Aeth { syndrome: Syndrome::Ack(NO_CREDITS), msn }),
                        atomic_ack: Some(AtomicAckEth { original }),
                        ..self.answer(Operation::AtomicAck, Position::Only, psn)
                    };
                    turn.out.bare(&headers);
                }
                Reply::Read { first, psn, end, va, rkey, left, msn, again } => {
                    let len = left.min(self.attr.path_mtu);
                    let next = psn.plus(1);
                    let place = Position::of(psn == first, next == end);
                    let mut headers = self.answer(Operation::ReadResponse, place, psn);
                    headers.aeth =
                        (place != Position::Middle).then_some(Aeth { syndrome: Syndrome::Ack(NO_CREDITS), msn });
                    let (memory, by) = (turn.memory, self.asker());
                    // Copied before its CRC is made: the program may write to memory that a peer reads.
                    // SAFETY: `turn`'s reference to the table is the lock.
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
                    if sent.is_err() && again {
                        // It was answered before: the sender that requests it now gets nothing, and ends nothing.
                        COUNTING.dropped_strange.add(1);
                        self.resp.replies.pop_front();
                        continue;
                    }
                    if sent.is_err() {
                        // Deregistered or invalidated meanwhile.
                        self.resp.replies.clear();
                        self.refuse(Nak::RemoteAccess, None, psn);
                        continue;
                    }
                    if next != end {
                        let (va, left) = (va.wrapping_add(u64::from(len)), left - len);
                        if let Some(front) = self.resp.replies.front_mut() {
                            *front = Reply::Read { first, psn: next, end, va, rkey, left, msn, again };
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
