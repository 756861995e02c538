//! The two ends of a connection, as its owner has them: posting, and closing by dropping.

use std::sync::Arc;

use crate::rails::connection::Connection;
use crate::rails::data::receiver::ReceiveQueue;
use crate::rails::data::request::{MAX_GROUP, Request};
use crate::rails::data::sender::SendQueue;
use crate::rails::data::session::Paths;
use crate::rails::data::side::Side;
use crate::rails::rdma::Devices;
use crate::rails::worker::pool::Workers;
use crate::seal::Socket;
use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::config::Config;

/// Settings, threads and RDMA ports for a new connection.
#[derive(Debug, Clone, Copy)]
pub(in crate::rails) struct Resources<'a> {
    pub(in crate::rails) config: &'a Config,
    pub(in crate::rails) workers: &'a Workers,
    pub(in crate::rails) devices: Option<&'a Arc<Devices>>,
}

/// The sending end of a connection. Dropping it closes the connection; what was done before still arrives.
#[derive(Debug)]
pub struct Sender {
    pub(in crate::rails) connection: Arc<Connection>,
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
        Ok(slot.and_then(|slot| self.connection.requests.get(slot)))
    }

    /// Posts a send as [`Sender::send`] does, and returns the number of the request.
    ///
    /// # Safety
    /// Contract of the public method above.
    pub(in crate::rails) unsafe fn post(&self, data: *const u8, len: usize, tag: i32) -> Result<Option<usize>> {
        self.connection.check_here("send")?;
        let Side::Out(sender) = &self.connection.side else { return Ok(None) };
        // An empty message is open, too: until its frame is sent.
        let Some(slot) = self.connection.requests.take(len.max(1), 1, len) else {
            return self.connection.status().check().map(|()| None);
        };
        sender.post(&*self.connection, slot, data, len, tag);
        Ok(Some(slot))
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        self.connection.close();
    }
}

/// The receiving end of a connection. Dropping it closes the connection.
#[derive(Debug)]
pub struct Receiver {
    pub(in crate::rails) connection: Arc<Connection>,
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
        self.connection.check_here("receive")?;
        // SAFETY: by the caller.
        match unsafe { self.post(group) } {
            Some(slot) => Ok(self.connection.requests.get(slot)),
            None => self.connection.status().check().map(|()| None),
        }
    }

    /// Posts receives as [`Receiver::receive`] does, also on a connection that has failed, and returns the number of
    /// the request.
    ///
    /// # Safety
    /// Contract of the public method above.
    pub(in crate::rails) unsafe fn post(&self, group: &[(*mut u8, usize, i32)]) -> Option<usize> {
        let Side::In(receiver) = &self.connection.side else { return None };
        let slot = self.connection.requests.take(group.len(), group.len(), 0)?;
        receiver.post(&*self.connection, slot, group);
        Some(slot)
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.connection.close();
    }
}

/// Makes the sending end of a new connection.
pub(in crate::rails) fn sender(
    name: String,
    (sockets, paths): (Vec<Socket>, Paths),
    resources: &Resources<'_>,
) -> Result<Sender> {
    let side = Side::Out(SendQueue::new(resources.config));
    Ok(Sender {
        connection: Connection::new(name, sockets, paths, side, (resources.workers, resources.devices.cloned()))?,
    })
}

/// Makes the receiving end of a new connection.
pub(in crate::rails) fn receiver(
    name: String,
    (sockets, paths): (Vec<Socket>, Paths),
    resources: &Resources<'_>,
) -> Result<Receiver> {
    let side = Side::In(ReceiveQueue::new(resources.config));
    Ok(Receiver {
        connection: Connection::new(name, sockets, paths, side, (resources.workers, resources.devices.cloned()))?,
    })
}
