//! The two ends of a connection, as its owner has them: posting, and closing by dropping.

use std::net::TcpStream;
use std::sync::Arc;

use super::Inner;
use super::incoming::Incoming;
use super::link::{Link, Side, Ways};
use super::outgoing::Outgoing;
use super::request::{MAX_GROUP, Request};
use crate::error::{Error, Result};

/// The sending end of a connection. Dropping it closes the connection; what was done before still arrives.
#[derive(Debug)]
pub struct Sender {
    pub(super) link: Arc<Link>,
}

impl Sender {
    /// Sends `len` bytes under a tag; the request is done when they are not needed any more. `None`: too many requests
    /// are open, try again later. A connection that has failed takes the message, too: [`Request::test`] says why.
    ///
    /// # Safety
    /// `data` is valid for reads of `len` bytes, and no thread writes to it, until the request is done or this is
    /// dropped.
    ///
    /// # Errors
    /// The error of the failed connection, once no request of it is free any more.
    pub unsafe fn send(&self, data: *const u8, len: usize, tag: i32) -> Result<Option<&Request>> {
        // SAFETY: by the caller.
        let slot = unsafe { self.post(data, len, tag) }?;
        Ok(slot.and_then(|slot| self.link.requests.get(slot)))
    }

    /// Posts a send as [`Sender::send`] does, and returns the number of the request.
    ///
    /// # Safety
    /// Contract of the public method above.
    pub(super) unsafe fn post(&self, data: *const u8, len: usize, tag: i32) -> Result<Option<usize>> {
        self.link.check_here("send")?;
        let Side::Out(outgoing) = &self.link.side else { return Ok(None) };
        // An empty message is open, too: until its frame is sent.
        let Some(slot) = self.link.requests.take(len.max(1), 1, len) else {
            return self.link.fate().check().map(|()| None);
        };
        outgoing.post(&self.link, slot, data, len, tag);
        Ok(Some(slot))
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        self.link.close();
    }
}

/// The receiving end of a connection. Dropping it closes the connection.
#[derive(Debug)]
pub struct Receiver {
    pub(super) link: Arc<Link>,
}

impl Receiver {
    /// Posts up to [`MAX_GROUP`] receives, each with its memory, its length and its tag; the request is done when all
    /// of them are. A message may be shorter than its memory. `None`: too many requests are open, try again later. A
    /// connection that has failed takes them, too: [`Request::test`] says why.
    ///
    /// # Safety
    /// The memory is valid for writes, and nothing else uses it, until the request is done or this is dropped.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a group of another size; the error of the failed connection, once no request of
    /// it is free any more.
    pub unsafe fn receive(&self, group: &[(*mut u8, usize, i32)]) -> Result<Option<&Request>> {
        if group.is_empty() || group.len() > MAX_GROUP {
            return Err(Error::invalid(
                "receive",
                format!("expected 1 to {MAX_GROUP} in a group, got {}", group.len()),
            ));
        }
        self.link.check_here("receive")?;
        // SAFETY: by the caller.
        match unsafe { self.post(group) } {
            Some(slot) => Ok(self.link.requests.get(slot)),
            None => self.link.fate().check().map(|()| None),
        }
    }

    /// Posts receives as [`Receiver::receive`] does, also on a connection that has failed, and returns the number of
    /// the request.
    ///
    /// # Safety
    /// Contract of the public method above.
    pub(super) unsafe fn post(&self, group: &[(*mut u8, usize, i32)]) -> Option<usize> {
        let Side::In(incoming) = &self.link.side else { return None };
        let slot = self.link.requests.take(group.len(), group.len(), 0)?;
        incoming.post(&self.link, slot, group);
        Some(slot)
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.link.close();
    }
}

/// Makes the sending end of a new link.
pub(super) fn sender(name: String, (sockets, ways): (Vec<TcpStream>, Ways), inner: &Inner) -> Result<Sender> {
    let side = Side::Out(Outgoing::new(&inner.config));
    Ok(Sender { link: Link::new(name, sockets, ways, side, (&inner.workers, inner.devices.clone()))? })
}

/// Makes the receiving end of a new link.
pub(super) fn receiver(name: String, (sockets, ways): (Vec<TcpStream>, Ways), inner: &Inner) -> Result<Receiver> {
    let side = Side::In(Incoming::new(&inner.config));
    Ok(Receiver { link: Link::new(name, sockets, ways, side, (&inner.workers, inner.devices.clone()))? })
}
