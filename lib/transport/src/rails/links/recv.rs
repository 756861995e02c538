//! The receiving end of a link over rails.

use std::collections::VecDeque;
use std::sync::Arc;

use super::send::lost;
use super::slots::{Slots, TAG};
use crate::linger::Linger;
use crate::rails::{MAX_GROUP, Net, Receiver};
use crate::{Interest, LinkOptions, Peer, Received, RecvLink};
use tinynccl_plan::error::Result;
use tinynccl_plan::wire::Header;
use tinynccl_sys::doorbell::Doorbell;

pub(super) struct RailsRecv {
    // Dropped before the memory that its threads write.
    receiver: Arc<Receiver>,
    slots: Arc<Slots>,
    peer: Peer,
    /// Slots with their requests, in the order in which they are filled.
    posted: VecDeque<(usize, Option<usize>)>,
    /// The slot of the oldest message, and its header, once it is here.
    oldest: Option<(usize, Header)>,
    /// Error text, if bytes came that are no message; `None` while all is well.
    broken: Option<String>,
    bell: Arc<Doorbell>,
    linger: Arc<Linger>,
}

impl RailsRecv {
    pub(super) fn new(
        net: &Arc<Net>,
        receiver: Receiver,
        who: Peer,
        options: &LinkOptions,
        (bell, linger): (&Arc<Doorbell>, &Arc<Linger>),
    ) -> Result<RailsRecv> {
        let mut link = RailsRecv {
            peer: Peer { address: receiver.connection.name().to_owned(), ..who },
            receiver: Arc::new(receiver),
            slots: Arc::new(Slots::new(net, options)?),
            posted: VecDeque::with_capacity(options.depth),
            oldest: None,
            broken: None,
            bell: bell.clone(),
            linger: linger.clone(),
        };
        (0..options.depth).for_each(|slot| link.post(slot));
        Ok(link)
    }

    /// Posts a receive for the next message into a slot without one.
    fn post(&mut self, slot: usize) {
        let (memory, len) = self.slots.message(slot);
        // SAFETY: nothing reads the slot before its request is done, and it is dropped after the connection.
        let request = unsafe { self.receiver.post(&[(memory, len, TAG)]) };
        self.posted.push_back((slot, request));
    }

    /// Takes the oldest message if it is here.
    #[inline]
    fn load(&mut self) -> Result<Option<(usize, Header)>> {
        if self.oldest.is_some() {
            return Ok(self.oldest);
        }
        if let Some(detail) = &self.broken {
            return Err(self.peer.protocol("receive", detail.clone()));
        }
        let Some(&(slot, request)) = self.posted.front() else { return Ok(None) };
        let connection = &self.receiver.connection;
        let request = request.and_then(|request| connection.requests.get(request));
        if !request.is_some_and(|r| r.is_done()) {
            connection.drive_progress();
        }
        if !request.is_some_and(|r| r.is_done()) {
            // What came before the end is still a message.
            let status = connection.status().check();
            if status.is_ok() || !request.is_some_and(|r| r.is_done()) {
                return status.map(|()| None).map_err(|e| lost(&self.peer, "receive", e));
            }
        }
        let mut sizes = [0; MAX_GROUP];
        if let Some(request) = request {
            request.test(&mut sizes)?;
        }
        let [bytes, ..] = sizes;
        // SAFETY: the request is done, so the slot is ours; a message that is too short leaves what was there.
        let header: Header = unsafe { self.slots.message(slot).0.cast::<Header>().read_unaligned() };
        if bytes != Header::BYTES + header.len as usize {
            self.broken = Some(format!("expected a header and its payload, got {bytes} bytes with {header}"));
            return self.load();
        }
        self.posted.pop_front();
        self.oldest = Some((slot, header));
        Ok(self.oldest)
    }

    fn payload(&self, slot: usize, header: &Header) -> &[u8] {
        // SAFETY: the slot of the oldest message has no request; `load` has compared the length with what came.
        unsafe { std::slice::from_raw_parts(self.slots.payload(slot), header.len as usize) }
    }
}

impl RecvLink for RailsRecv {
    fn peer(&self) -> &Peer {
        &self.peer
    }

    fn peek(&mut self) -> Result<Option<(Header, &[u8])>> {
        let Some((slot, header)) = self.load()? else { return Ok(None) };
        Ok(Some((header, self.payload(slot, &header))))
    }

    fn shows_in_place(&self) -> bool {
        true
    }

    fn release(&mut self) -> Result<()> {
        let Some((slot, _)) = self.oldest.take() else { return Err(self.peer.not_peeked()) };
        self.post(slot);
        Ok(())
    }

    fn recv_into(&mut self, expected: &Header, dst: &mut [u8]) -> Result<Received> {
        if dst.len() != expected.len as usize {
            return Err(self.peer.not_receivable(expected, dst));
        }
        let Some((slot, header)) = self.load()? else { return Ok(Received::Pending) };
        if !expected.agrees_with(&header) {
            return Ok(Received::Mismatch(header));
        }
        dst.copy_from_slice(self.payload(slot, &header));
        self.release()?;
        Ok(Received::Done)
    }

    fn progress(&mut self) -> Result<bool> {
        let before = self.oldest.is_some();
        // A loss is the concern of calls that want a message.
        let _ = self.load();
        Ok(self.oldest.is_some() && !before)
    }

    fn check_peer(&mut self) -> Result<()> {
        self.load().map(drop)
    }

    fn arm(&mut self) -> Result<bool> {
        self.receiver.connection.status().alarm(&self.bell).arm();
        Ok(self.load()?.is_some())
    }

    fn disarm(&mut self) {
        self.receiver.connection.status().alarm(&self.bell).disarm();
    }

    fn interest(&self) -> Interest {
        Interest { fd: self.receiver.connection.fd(), readable: true, writable: false }
    }
}

impl Drop for RailsRecv {
    fn drop(&mut self) {
        if !self.linger.origin.is_here() {
            // The connection, and the threads that write its memory, are its parent's.
            std::mem::forget((self.receiver.clone(), self.slots.clone()));
        }
    }
}
