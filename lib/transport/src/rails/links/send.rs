//! The sending end of a link over rails.

use std::sync::Arc;

use super::linger::{self, Unsent};
use super::slots::Slots;
use crate::linger::Linger;
use crate::rails::{Net, Sender};
use crate::{Interest, LinkOptions, Peer, SendLink};
use tinynccl_plan::error::{Error, Result};
use tinynccl_plan::wire::Header;
use tinynccl_sys::doorbell::Doorbell;

pub(super) struct RailsSend {
    unsent: Unsent,
    peer: Peer,
    /// Slots without a message.
    free: Vec<usize>,
    reserved: Option<usize>,
    /// True if the last request for a slot got none.
    refused: bool,
    bell: Arc<Doorbell>,
    linger: Arc<Linger>,
}

impl RailsSend {
    pub(super) fn new(
        net: &Arc<Net>,
        sender: Sender,
        who: Peer,
        options: &LinkOptions,
        (bell, linger): (&Arc<Doorbell>, &Arc<Linger>),
    ) -> Result<RailsSend> {
        Ok(RailsSend {
            peer: Peer { address: sender.connection.name().to_owned(), ..who },
            unsent: Unsent::new(sender, Slots::new(net, options)?),
            free: (0..options.depth).collect(),
            reserved: None,
            refused: false,
            bell: bell.clone(),
            linger: linger.clone(),
        })
    }

    fn alive(&self) -> Result<()> {
        self.unsent.sender.connection.status().check().map_err(|e| lost(&self.peer, "send", e))
    }

    /// Collects the slots whose messages are sent, and returns the connection's error, if it had failed before that:
    /// once the peer has taken everything it may leave.
    fn look(&mut self) -> Result<()> {
        let alive = self.alive();
        self.free.extend(self.unsent.collect());
        alive
    }

    /// Reserves a slot, if one is free.
    fn slot(&mut self) -> Option<usize> {
        if self.reserved.is_none() {
            if self.free.is_empty() {
                self.unsent.sender.connection.drive_progress();
                self.free.extend(self.unsent.collect());
            }
            self.reserved = self.free.pop();
            self.refused = self.reserved.is_none();
        }
        self.reserved
    }

    fn max_message(&self) -> usize {
        self.unsent.slots.max_message
    }

    /// The memory of the reserved slot.
    fn memory(&mut self, slot: usize) -> &mut [u8] {
        // SAFETY: a reserved slot is not under way, so it is ours alone; its memory is zeroed at first, and has room
        // for `max_message` bytes.
        unsafe { std::slice::from_raw_parts_mut(self.unsent.slots.payload(slot), self.max_message()) }
    }

    /// Sends what is in the reserved slot.
    fn post(&mut self, slot: usize, header: &Header) -> Result<()> {
        self.reserved = None;
        match self.unsent.send(slot, header) {
            Ok(true) => Ok(()),
            // There are no more slots than requests.
            Ok(false) => Err(self.peer.lost("send", "its connection has no request left")),
            Err(e) => Err(lost(&self.peer, "send", e)),
        }
    }
}

/// Turns a connection's error into one of the link with a peer.
pub(super) fn lost(peer: &Peer, op: &str, error: Error) -> Error {
    match error {
        Error::Connection { detail, .. } => peer.lost(op, &detail),
        other => other,
    }
}

impl SendLink for RailsSend {
    fn peer(&self) -> &Peer {
        &self.peer
    }

    fn reserve(&mut self) -> Result<Option<&mut [u8]>> {
        self.alive()?;
        let Some(slot) = self.slot() else { return Ok(None) };
        Ok(Some(self.memory(slot)))
    }

    fn commit(&mut self, header: &Header) -> Result<()> {
        self.alive()?;
        let max = self.max_message();
        match self.reserved {
            Some(slot) if header.len as usize <= max => self.post(slot, header),
            _ => Err(self.peer.not_reserved(header, max)),
        }
    }

    fn send_from(&mut self, header: &Header, data: &[u8]) -> Result<bool> {
        self.alive()?;
        let max = self.max_message();
        if data.len() != header.len as usize || data.len() > max || self.reserved.is_some() {
            return Err(self.peer.not_sendable(header, data, max));
        }
        let Some(slot) = self.slot() else { return Ok(false) };
        if let Some(memory) = self.memory(slot).get_mut(..data.len()) {
            memory.copy_from_slice(data);
        }
        self.post(slot, header)?;
        Ok(true)
    }

    fn sends_from_caller(&self, _bytes: usize) -> bool {
        false
    }

    fn progress(&mut self) -> Result<bool> {
        if self.unsent.is_empty() {
            return Ok(false);
        }
        self.unsent.sender.connection.drive_progress();
        let before = self.free.len();
        let alive = self.look();
        if !self.unsent.is_empty() {
            alive?;
        }
        Ok(self.free.len() > before)
    }

    fn is_flushed(&self) -> bool {
        self.unsent.is_empty()
    }

    fn check_peer(&mut self) -> Result<()> {
        self.look()
    }

    fn arm(&mut self) -> Result<bool> {
        self.unsent.sender.connection.status().alarm(&self.bell).arm();
        let alive = self.alive();
        let moved = self.progress()?;
        alive?;
        Ok(moved || self.unsent.is_empty() || (self.refused && !self.free.is_empty()))
    }

    fn disarm(&mut self) {
        self.unsent.sender.connection.status().alarm(&self.bell).disarm();
    }

    fn interest(&self) -> Interest {
        Interest { fd: self.unsent.sender.connection.fd(), readable: true, writable: false }
    }
}

impl Drop for RailsSend {
    fn drop(&mut self) {
        linger::hand_over(&mut self.unsent, &self.linger);
    }
}
