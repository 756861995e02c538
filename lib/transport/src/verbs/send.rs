//! The sending half of a verbs link.

use std::sync::{Arc, Mutex};

use super::linger::leave;
use super::link::Core;
use super::link::layout::{Layout, Ring, SMALL};
use crate::linger::Linger;
use crate::{Interest, Peer, SendLink, ZeroCopy};
use tinynccl_plan::error::Result;
use tinynccl_plan::wire::Header;
use tinynccl_sys::threads::lock;

/// Least length in bytes of a message that goes from the caller's memory where it is registered. Shorter ones are
/// copied: then the call need not wait until the device is done with them.
const ZERO_COPY: usize = 4 << 10;

pub(super) struct VerbsSend {
    core: Arc<Mutex<Core>>,
    linger: Arc<Linger>,
    peer: Peer,
    layout: Layout,
    reserved: bool,
    /// The ring that had no free entry when the last message was refused.
    wants: Option<Ring>,
}

impl VerbsSend {
    pub(super) fn new(core: &Arc<Mutex<Core>>, linger: &Arc<Linger>) -> VerbsSend {
        let (peer, layout) = {
            let core = lock(core);
            (core.peer.clone(), *core.layout())
        };
        VerbsSend { core: core.clone(), linger: linger.clone(), peer, layout, reserved: false, wants: None }
    }
}

impl SendLink for VerbsSend {
    fn peer(&self) -> &Peer {
        &self.peer
    }

    fn reserve(&mut self) -> Result<Option<&mut [u8]>> {
        let mut core = lock(&self.core);
        if !self.reserved {
            if !core.room(Ring::Slots)? {
                self.wants = Some(Ring::Slots);
                return Ok(None);
            }
            self.wants = None;
            self.reserved = true;
        }
        let at = core.staging(Ring::Slots);
        // SAFETY: a slot has `max_message` bytes after its header; it is ours alone until `commit`, since the request
        // that last read it has completed, and the memory lives as long as the core, which we hold.
        Ok(Some(unsafe { std::slice::from_raw_parts_mut(at.add(Header::BYTES).as_ptr(), self.layout.max_message) }))
    }

    fn commit(&mut self, header: &Header) -> Result<()> {
        let max = self.layout.max_message;
        if !self.reserved || header.len as usize > max {
            return Err(self.peer.not_reserved(header, max));
        }
        self.reserved = false;
        let mut core = lock(&self.core);
        core.sending()?;
        core.send_slot(header)
    }

    fn send_from(&mut self, header: &Header, data: &[u8]) -> Result<bool> {
        let max = self.layout.max_message;
        if data.len() != header.len as usize || data.len() > max || self.reserved {
            return Err(self.peer.not_sendable(header, data, max));
        }
        let ring = if data.len() <= SMALL { Ring::Lines } else { Ring::Slots };
        let mut core = lock(&self.core);
        if !core.room(ring)? {
            self.wants = Some(ring);
            return Ok(false);
        }
        self.wants = None;
        match ring {
            Ring::Lines => core.send_line(header, data)?,
            Ring::Slots => {
                let at = core.staging(ring);
                // SAFETY: as in `reserve`; `data` has at most `max_message` bytes and is not registered memory of ours.
                unsafe { at.add(Header::BYTES).as_ptr().copy_from_nonoverlapping(data.as_ptr(), data.len()) };
                core.send_slot(header)?;
            }
        }
        Ok(true)
    }

    fn sends_from_caller(&self, bytes: usize) -> bool {
        bytes <= SMALL
    }

    fn zero_copy(&mut self) -> Option<&mut dyn ZeroCopy> {
        Some(self)
    }

    /// Nothing waits in this process, so there is nothing that a lost peer could keep from moving.
    fn progress(&mut self) -> Result<bool> {
        Ok(lock(&self.core).poll())
    }

    /// Returns true unless the device still reads a caller's memory. What was committed is the device's: see
    /// [`super::linger`] for what happens to it when the link is dropped.
    fn is_flushed(&self) -> bool {
        lock(&self.core).has_sent()
    }

    fn check_peer(&mut self) -> Result<()> {
        let mut core = lock(&self.core);
        core.poll();
        core.look_after_peer();
        if self.wants.is_some() { core.sending() } else { core.flushing() }
    }

    fn arm(&mut self) -> Result<bool> {
        let mut core = lock(&self.core);
        core.arm()?;
        match self.wants {
            Some(ring) => core.room(ring),
            None => core.flushing().map(|()| core.has_sent()),
        }
    }

    fn interest(&self) -> Interest {
        lock(&self.core).interest()
    }
}

impl ZeroCopy for VerbsSend {
    unsafe fn send(&mut self, header: &Header, data: &[u8], _two_way: bool) -> Result<bool> {
        let core = self.core.clone();
        let mut core = lock(&core);
        let keys = match core.lkeys(data) {
            Some(keys) if data.len() >= ZERO_COPY && data.len() == header.len as usize && !self.reserved => keys,
            _ => {
                drop(core);
                return self.send_from(header, data);
            }
        };
        if data.len() > self.layout.max_message {
            return Err(self.peer.not_sendable(header, data, self.layout.max_message));
        }
        if !core.room(Ring::Slots)? {
            self.wants = Some(Ring::Slots);
            return Ok(false);
        }
        self.wants = None;
        // SAFETY: by the caller.
        unsafe { core.send_zero_copy(header, data, &keys) }?;
        Ok(true)
    }

    fn takes(&self, data: &[u8]) -> bool {
        data.len() >= ZERO_COPY && lock(&self.core).lkeys(data).is_some()
    }

    fn receiver_pulls(&self) -> bool {
        false
    }

    fn messages(&self) -> u64 {
        lock(&self.core).zero_copies
    }

    fn revoke(&mut self) {
        lock(&self.core).revoke();
    }
}

impl Drop for VerbsSend {
    fn drop(&mut self) {
        // Not in a forked child: see `leave`.
        if self.linger.origin.is_here() {
            lock(&self.core).say_goodbye();
        }
        leave(&self.core, &self.linger);
    }
}
