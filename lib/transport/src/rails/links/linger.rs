//! Messages that are committed and not sent yet; a link that is dropped hands them to the endpoint's thread.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::slots::{Slots, TAG};
use crate::linger::{Closing, Linger};
use crate::rails::{MAX_GROUP, Sender};
use tinynccl_plan::error::Result;
use tinynccl_plan::wire::Header;
use tinynccl_sys::doorbell::Doorbell;

/// Longest time that a dropped link's messages are sent.
const LINGER: Duration = Duration::from_secs(10);

/// A connection, the slots of its messages, and those that are under way.
#[derive(Debug)]
pub(super) struct Unsent {
    // Dropped before the memory that its threads read.
    pub(super) sender: Arc<Sender>,
    pub(super) slots: Arc<Slots>,
    /// Slots whose messages are being sent, each with its request.
    open: Vec<(usize, usize)>,
}

impl Unsent {
    pub(super) fn new(sender: Sender, slots: Slots) -> Unsent {
        Unsent { sender: Arc::new(sender), slots: Arc::new(slots), open: Vec::new() }
    }

    /// Sends the message in a slot that is not under way; false if the connection has no request left.
    pub(super) fn send(&mut self, slot: usize, header: &Header) -> Result<bool> {
        let (message, _) = self.slots.message(slot);
        // SAFETY: within the slot, which nothing else uses before it is under way.
        unsafe { message.cast::<Header>().write_unaligned(*header) };
        // SAFETY: the slot is not written to before its request is done, and is dropped after the connection.
        let request = unsafe { self.sender.post(message, Header::BYTES + header.len as usize, TAG) }?;
        self.open.extend(request.map(|request| (slot, request)));
        Ok(request.is_some())
    }

    /// Returns the slots whose messages were sent since the last call.
    pub(super) fn collect(&mut self) -> Vec<usize> {
        let connection = &self.sender.connection;
        let is_done = |request: usize| {
            let done = |r: &crate::rails::Request| r.is_done() && r.test(&mut [0; MAX_GROUP]).is_ok();
            connection.requests.get(request).is_some_and(done)
        };
        self.open.extract_if(.., |(_, request)| is_done(*request)).map(|(slot, _)| slot).collect()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.open.is_empty()
    }
}

/// Messages that a dropped link has not sent yet; the endpoint's thread holds them.
#[derive(Debug)]
struct Ending {
    unsent: Unsent,
    bell: Arc<Doorbell>,
    until: Instant,
}

impl Closing for Ending {
    fn fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    fn is_done(&mut self) -> bool {
        self.bell.drain();
        self.unsent.sender.connection.status().alarm(&self.bell).arm();
        self.unsent.collect();
        self.unsent.is_empty() || self.unsent.sender.connection.is_over() || Instant::now() >= self.until
    }

    fn needs_this_process(&self) -> bool {
        true
    }
}

/// Hands the unsent messages of a dropped link to the endpoint's thread.
pub(super) fn hand_over(unsent: &mut Unsent, linger: &Linger) {
    let Unsent { sender, slots, open } = unsent;
    let left = Unsent { sender: sender.clone(), slots: slots.clone(), open: std::mem::take(open) };
    if !linger.origin.is_here() {
        // The connection, and the threads that read its memory, are its parent's.
        return std::mem::forget(left);
    }
    if left.is_empty() || left.sender.connection.is_over() {
        return;
    }
    match Doorbell::new() {
        Ok(bell) => {
            left.sender.connection.status().alarm(&bell).move_to(bell.clone());
            linger.take(Box::new(Ending { unsent: left, bell, until: Instant::now() + LINGER }));
        }
        Err(e) => log::warn!("a link over rails is closed at once: {e}"),
    }
}
