//! The receiving side of a link: completions of the device, messages that arrive, and what is here of them.

use std::ptr::NonNull;

use super::Core;
use super::layout::{Ring, WriteKind, read_word};
use super::queue_pair::read_id;
use crate::verbs::sys::{Completion, Outcome};
use tinynccl_plan::error::Result;
use tinynccl_plan::wire::Header;

/// A message of the peer's that is here.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Arrival {
    pub(crate) ring: Ring,
    place: usize,
    /// Offset of its header in the target memory.
    pub(crate) offset: usize,
    pub(crate) header: Header,
}

impl Core {
    /// Takes in up to `Cq::BATCH` completions of a queue; how many.
    #[inline]
    pub(super) fn take_some(&mut self, queue: usize) -> usize {
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
    pub(super) fn repost(&mut self) {
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
            let detail = format!("the device completed a request that was not posted: {completion:?}");
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
            WriteKind::Message(ring) => self.arrive(ring, len),
            WriteKind::Report => Ok(()),
            WriteKind::Goodbye => {
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
    fn credit(&mut self, word: u32) -> Result<WriteKind, String> {
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
        // SAFETY: the offset is that of a header within the target memory; the peer has written it and, by the
        // protocol, leaves it alone until it is freed. A peer that does not changes the bytes of its own message.
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

    /// No message is here in part.
    pub(super) fn is_complete(&self) -> bool {
        self.arrived.iter().all(|arrival| self.is_whole(arrival))
    }

    #[inline]
    fn is_whole(&self, arrival: &Arrival) -> bool {
        arrival.ring == Ring::Lines || self.reassembly.is_whole(arrival.place)
    }

    /// The error of receiving calls, if there is one: not before all messages are received that are here, or will be.
    pub(crate) fn receiving(&self) -> Result<()> {
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
    pub(crate) fn front(&self) -> Option<&Arrival> {
        self.arrived.front().filter(|arrival| self.is_whole(arrival))
    }

    /// Address in the target memory.
    pub(crate) fn target(&self, offset: usize) -> NonNull<u8> {
        // SAFETY: offsets are those of arrivals, which lie within the target memory.
        unsafe { self.parts.target.at(offset) }
    }

    /// Frees the oldest message; false when there is none.
    pub(crate) fn free(&mut self) -> bool {
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
}
