//! The sending side of a link: what may be posted now, and posting it.

use std::ptr::NonNull;
use std::time::{Duration, Instant};

use super::layout::{Ring, WriteKind, word};
use super::queue_pair::QueuePair;
use super::{Core, Goodbye, Parts};
use crate::verbs::sys::{Sge, Write};
use tinynccl_plan::error::Result;
use tinynccl_plan::wire::Header;
use tinynccl_sys::config::MAX_QPS;

/// Longest wait for requests of a queue pair that was stopped.
const FLUSH: Duration = Duration::from_secs(1);

/// Keys of a caller's memory: for each queue pair that sends from it, that of its device.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Keys([u32; MAX_QPS]);

impl Core {
    /// Reports to the peer what is freed, in a separate write.
    pub(super) fn report(&mut self) {
        if self.end().is_some() {
            return;
        }
        self.report_due = self.is_full();
        if self.report_due {
            // Completions may be waiting. Not `poll`, which may be what called us.
            for queue in 0..self.parts.queues.len() {
                self.take_some(queue);
            }
            self.repost();
            self.report_due = self.is_full();
        }
        if !self.report_due {
            // SAFETY: nothing is read for a write of 0 bytes.
            unsafe { self.post(WriteKind::Report, self.nothing(), 0, false, false, None) };
        }
    }

    /// The source of a write without bytes.
    fn nothing(&self) -> Sge {
        Sge { at: self.parts.staging.base(), len: 0, lkey: self.parts.qps.first.lkey }
    }

    /// No further request may be posted to the first queue pair now.
    fn is_full(&self) -> bool {
        self.parts.qps.first.in_flight() >= self.parts.limit
    }

    /// A message can go to this ring.
    #[inline]
    fn has_room(&self, ring: Ring) -> bool {
        let sent = *self.sent.of(ring);
        let staged = ring == Ring::Slots || !self.goes_inline();
        sent - *self.freed_there.of(ring) < self.parts.layout.size(ring) as u64
            && !self.is_full()
            && (!staged || self.is_unread(ring))
    }

    /// No request reads the staging place of the next message in this ring any more.
    #[inline]
    fn is_unread(&self, ring: Ring) -> bool {
        let place = self.parts.layout.place(ring, *self.sent.of(ring));
        let done = |qp: &QueuePair| qp.used.of(ring).get(place).is_none_or(|&number| qp.completed >= number);
        self.parts.qps.iter().all(done)
    }

    /// Lines are written inline.
    #[inline]
    fn goes_inline(&self) -> bool {
        self.parts.qps.first.handle.inline() as usize >= self.parts.layout.longest(Ring::Lines) + Header::BYTES
    }

    /// A message can go to this ring; asks the device when none could so far.
    #[inline]
    pub(crate) fn room(&mut self, ring: Ring) -> Result<bool> {
        self.sending()?;
        if self.has_room(ring) {
            return Ok(true);
        }
        self.poll();
        self.sending()?;
        Ok(self.has_room(ring))
    }

    /// The staging place of the next message in this ring: the address of its header. [`Core::room`] must have returned
    /// true.
    #[inline]
    pub(crate) fn staging(&self, ring: Ring) -> NonNull<u8> {
        let layout = &self.parts.layout;
        // SAFETY: a place of the ring lies within the staging memory.
        unsafe { self.parts.staging.at(layout.offset(ring, layout.place(ring, *self.sent.of(ring)))) }
    }

    /// Sends a message of at most [`Layout::longest`] bytes through the lines. [`Core::room`] must have returned true.
    #[inline]
    pub(crate) fn send_line(&mut self, header: &Header, data: &[u8]) -> Result<()> {
        let len = Header::BYTES + data.len();
        if self.goes_inline() {
            let mut line = [0u8; 512];
            let (head, body) = line.split_at_mut(Header::BYTES);
            head.copy_from_slice(bytemuck::bytes_of(header));
            if let Some(body) = body.get_mut(..data.len()) {
                body.copy_from_slice(data);
            }
            // SAFETY: the line outlives the call, and inline data is copied by it.
            unsafe { self.send(Ring::Lines, NonNull::from(&mut line).cast(), len, true, None) };
        } else {
            let at = self.staging(Ring::Lines);
            // SAFETY: the line has room for the header and `longest` bytes, and the request that last read it has
            // completed.
            unsafe {
                at.cast::<Header>().write_unaligned(*header);
                at.add(Header::BYTES).as_ptr().copy_from_nonoverlapping(data.as_ptr(), data.len());
                self.send(Ring::Lines, at, len, false, None);
            }
        }
        self.sending()
    }

    /// Sends the message of `header.len` bytes that is in the staging slot. [`Core::room`] must have returned true.
    #[inline]
    pub(crate) fn send_slot(&mut self, header: &Header) -> Result<()> {
        let at = self.staging(Ring::Slots);
        let len = header.len as usize;
        let first = self.parts.stripes.range(len, 0).len();
        // SAFETY: a header fits before the payload; the requests that last read the slot have completed (`room`).
        unsafe {
            at.cast::<Header>().write_unaligned(*header);
            if first < len {
                self.send_stripes(len, at.add(Header::BYTES), None);
            }
            self.send(Ring::Slots, at, Header::BYTES + first, false, None);
        }
        self.measure(len);
        self.sending()
    }

    /// The keys of a caller's memory if it is registered.
    #[inline]
    pub(crate) fn lkeys(&self, data: &[u8]) -> Option<Keys> {
        let mut keys = Keys([0; MAX_QPS]);
        let qps = self.parts.qps.iter().take(self.parts.stripes.count(data.len()));
        for (key, qp) in keys.0.iter_mut().zip(qps) {
            *key = qp.device.registered.lkey(data)?;
        }
        Some(keys)
    }

    /// Sends a message of `header.len` bytes from the caller's memory, registered under `keys`. [`Core::room`] must
    /// have returned true for the slots, and `data` must not be empty.
    ///
    /// # Safety
    /// `data` must not be written to until [`Core::has_sent`] returns true or [`Core::revoke`] has returned.
    #[inline]
    pub(crate) unsafe fn send_zero_copy(&mut self, header: &Header, data: &[u8], keys: &Keys) -> Result<()> {
        let at = self.staging(Ring::Slots);
        let first = self.parts.stripes.range(data.len(), 0).len();
        let from = NonNull::from(data).cast();
        let [key, ..] = keys.0;
        let stripe = Sge { at: from, len: first as u32, lkey: key };
        // SAFETY: as in `send_slot`; the data by the caller.
        unsafe {
            at.cast::<Header>().write_unaligned(*header);
            if first < data.len() {
                self.send_stripes(data.len(), from, Some(keys));
            }
            self.send(Ring::Slots, at, Header::BYTES, false, Some(stripe));
        }
        let first = &mut self.parts.qps.first;
        first.zero_copy_until = first.posted;
        self.zero_copies += 1;
        self.measure(data.len());
        self.sending()
    }

    /// Sends the stripes but the first of the next message in the slots: of `len` bytes from `from`, which is the
    /// staging slot, or a caller's memory with these keys.
    ///
    /// # Safety
    /// As [`Core::post`].
    unsafe fn send_stripes(&mut self, len: usize, from: NonNull<u8>, keys: Option<&Keys>) {
        let layout = &self.parts.layout;
        let slot = layout.place(Ring::Slots, *self.sent.of(Ring::Slots));
        let payload = layout.offset(Ring::Slots, slot) + Header::BYTES;
        let stripes = self.parts.stripes;
        let mut failed = None;
        for (index, qp) in (1..stripes.count(len)).zip(&mut self.parts.qps.others) {
            let stripe = stripes.range(len, index);
            let lkey = keys.and_then(|keys| keys.0.get(index)).copied().unwrap_or(qp.lkey);
            // SAFETY: the stripe lies within the payload.
            let at = unsafe { from.add(stripe.start) };
            let write = Write {
                from: Sge { at, len: stripe.len() as u32, lkey },
                then: None,
                remote: self.remote + (payload + stripe.start) as u64,
                word: slot as u32,
                signaled: true,
                inline: false,
            };
            // SAFETY: by the caller.
            match unsafe { qp.post(write) } {
                Ok(number) => {
                    if let Some(used) = qp.used.of_mut(Ring::Slots).get_mut(slot) {
                        *used = number;
                    }
                    if keys.is_some() {
                        qp.zero_copy_until = number;
                    }
                }
                Err(e) => failed = Some(e),
            }
        }
        if let Some(e) = failed {
            self.lose(e.to_string());
        }
    }

    /// The requests that were posted last are the stripes of a message of `len` bytes.
    #[inline]
    fn measure(&mut self, len: usize) {
        let Parts { stripes, qps, .. } = &self.parts;
        if stripes.uses_all(len) {
            let now = Instant::now();
            for (index, qp) in qps.iter().enumerate() {
                self.pace.posted(index, qp.posted, stripes.range(len, index).len(), now);
            }
        }
    }

    /// A request behind which a stripe was measured has completed: the next messages may be cut in another way.
    pub(super) fn weigh(&mut self, qp: usize, number: u64) {
        if let Some(weights) = self.pace.completed(qp, number, Instant::now()) {
            self.parts.stripes.weigh(weights);
            let (rank, peer) = (self.peer.rank, self.peer.peer);
            log::debug!("rank {rank}: RDMA link with rank {peer}: stripes are cut {weights:?} from now on");
        }
    }

    /// No request reads a caller's memory any more, as far as is known.
    #[inline]
    pub(crate) fn has_sent(&self) -> bool {
        self.parts.qps.iter().all(QueuePair::has_sent)
    }

    /// Ends what still reads a caller's memory, and with it the link.
    pub(crate) fn revoke(&mut self) {
        self.poll();
        if self.has_sent() {
            return;
        }
        self.lose("a call over it failed while it was sending".to_owned());
        for qp in self.parts.qps.iter() {
            if let Err(e) = qp.handle.stop() {
                log::error!("rank {}: RDMA link with rank {}: {e}", self.peer.rank, self.peer.peer);
            }
        }
        // The device gives back what was posted at once.
        let end = Instant::now() + FLUSH;
        while !self.has_sent() {
            self.poll();
            if Instant::now() >= end {
                log::error!(
                    "rank {}: RDMA link with rank {}: the device has not given back {} requests; it may still read memory that \
                     was sent from",
                    self.peer.rank,
                    self.peer.peer,
                    self.in_flight()
                );
                return;
            }
            std::thread::yield_now();
        }
    }

    /// Sends a message, or what goes with its header, over the first queue pair.
    ///
    /// # Safety
    /// As [`Core::post`].
    #[inline]
    unsafe fn send(&mut self, ring: Ring, at: NonNull<u8>, len: usize, inline: bool, then: Option<Sge>) {
        let layout = &self.parts.layout;
        let place = layout.place(ring, *self.sent.of(ring));
        let offset = layout.offset(ring, place);
        *self.sent.of_mut(ring) += 1;
        let from = Sge { at, len: len as u32, lkey: self.parts.qps.first.lkey };
        // SAFETY: by the caller.
        let number = unsafe { self.post(WriteKind::Message(ring), from, offset, inline, !inline, then) };
        if !inline && let Some(used) = self.parts.qps.first.used.of_mut(ring).get_mut(place) {
            *used = number;
        }
    }

    /// Posts a write to the first queue pair, with all that the peer should know; its number.
    ///
    /// # Safety
    /// `from` must be staging memory, which must not change until the request has completed; or, inline, any memory.
    /// The data sent `then` must be registered, and must not change either.
    #[inline]
    unsafe fn post(
        &mut self,
        kind: WriteKind,
        from: Sge,
        offset: usize,
        inline: bool,
        signaled: bool,
        then: Option<Sge>,
    ) -> u64 {
        let remote = self.remote + offset as u64;
        let write = Write { from, then, remote, word: word(kind, &self.freed), signaled, inline };
        self.reported = self.freed;
        self.report_due = false;
        let first = &mut self.parts.qps.first;
        // SAFETY: by the caller.
        if let Err(e) = unsafe { first.post(write) } {
            self.lose(e.to_string());
        }
        self.parts.qps.first.posted
    }

    /// Nothing will be sent any more.
    pub(crate) fn say_goodbye(&mut self) {
        if self.goodbye == Goodbye::Unsaid {
            self.goodbye = Goodbye::Due;
        }
        if self.goodbye == Goodbye::Due && self.end().is_none() && !self.is_full() {
            // SAFETY: nothing is read for a write of 0 bytes.
            let number = unsafe { self.post(WriteKind::Goodbye, self.nothing(), 0, false, true, None) };
            self.goodbye = Goodbye::Posted(number);
        }
    }
}
