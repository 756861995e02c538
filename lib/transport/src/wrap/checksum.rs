//! A CRC-32 on every message, over any backend: it tells corrupted memory or a broken network card from a broken
//! program.

use crate::{Interest, LinkPair, Peer, Received, RecvLink, SendLink};
use tinynccl_plan::error::Result;
use tinynccl_plan::wire::Header;

/// CRC-32 of a message: of its header, without the field of the checksum, and its payload.
fn sum(header: &Header, payload: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(bytemuck::bytes_of(&Header { check: 0, ..*header }));
    hasher.update(payload);
    hasher.finalize()
}

/// Wraps both halves: the sender fills [`Header::check`], the receiver checks it. Both ends must do it.
///
/// The receiver gives [`Error::Protocol`](tinynccl_plan::Error::Protocol) for a message that does not match.
/// `recv_into` then copies from the backend's memory instead of receiving straight into the caller's, because nothing
/// may be written before it is checked.
pub fn wrap(pair: LinkPair) -> LinkPair {
    LinkPair {
        send: Box::new(ChecksumSend { inner: pair.send, reserved: false, partial: None }),
        recv: Box::new(ChecksumRecv { inner: pair.recv, checked: false }),
        kind: pair.kind,
        any_length: false,
    }
}

#[derive(Debug)]
struct ChecksumSend {
    inner: Box<dyn SendLink>,
    reserved: bool,
    /// Checksum of the message that `send_from` has begun.
    partial: Option<u32>,
}

impl SendLink for ChecksumSend {
    forward!(
        peer,
        progress,
        expect_more,
        sends_from_caller,
        is_flushed,
        check_peer,
        arm,
        disarm,
        bytes_moved,
        interest
    );

    fn reserve(&mut self) -> Result<Option<&mut [u8]>> {
        let memory = self.inner.reserve()?;
        self.reserved = memory.is_some();
        Ok(memory)
    }
    fn commit(&mut self, header: &Header) -> Result<()> {
        let mut crc = 0;
        // Without a reservation or with a wrong length, the inner commit says what is wrong.
        if std::mem::take(&mut self.reserved)
            && let Some(payload) = self.inner.reserve()?.and_then(|memory| memory.get(..header.len as usize))
        {
            crc = sum(header, payload);
        }
        self.inner.commit(&Header { check: crc, ..*header })
    }
    fn send_from(&mut self, header: &Header, data: &[u8]) -> Result<bool> {
        let crc = *self.partial.get_or_insert_with(|| sum(header, data));
        let done = self.inner.send_from(&Header { check: crc, ..*header }, data)?;
        if done {
            self.partial = None;
        }
        Ok(done)
    }
}

#[derive(Debug)]
struct ChecksumRecv {
    inner: Box<dyn RecvLink>,
    /// The oldest message was checked.
    checked: bool,
}

impl ChecksumRecv {
    fn check(&mut self) -> Result<bool> {
        if self.checked {
            return Ok(true);
        }
        let Some((header, payload)) = self.inner.peek()? else { return Ok(false) };
        let crc = sum(&header, payload);
        if crc != header.check {
            let detail = format!("expected a message with CRC-32 {:08x}, got {crc:08x}, in {header}", header.check);
            return Err(self.inner.peer().protocol("receive", detail));
        }
        self.checked = true;
        Ok(true)
    }
}

impl RecvLink for ChecksumRecv {
    forward!(peer, progress, check_peer, arm, disarm, bytes_moved, interest);

    fn peek(&mut self) -> Result<Option<(Header, &[u8])>> {
        if !self.check()? {
            return Ok(None);
        }
        // The checksum has the place of the digest, which is not shown.
        Ok(self.inner.peek()?.map(|(header, payload)| (Header { check: 0, ..header }, payload)))
    }
    fn release(&mut self) -> Result<()> {
        self.inner.release()?;
        self.checked = false;
        Ok(())
    }
    fn recv_into(&mut self, expected: &Header, dst: &mut [u8]) -> Result<Received> {
        if !self.check()? {
            return Ok(Received::Pending);
        }
        match self.inner.recv_into(&Header { check: 0, ..*expected }, dst)? {
            Received::Mismatch(theirs) => Ok(Received::Mismatch(Header { check: 0, ..theirs })),
            received => {
                self.checked &= received != Received::Done;
                Ok(received)
            }
        }
    }
}
