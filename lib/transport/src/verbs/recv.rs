//! The receiving half of a verbs link.

use std::sync::{Arc, Mutex};

use super::linger::leave;
use super::link::Core;
use crate::linger::Linger;
use crate::{Interest, Peer, Received, RecvLink};
use tinynccl_plan::error::Result;
use tinynccl_plan::wire::Header;
use tinynccl_sys::threads::lock;

pub(super) struct VerbsRecv {
    core: Arc<Mutex<Core>>,
    linger: Arc<Linger>,
    peer: Peer,
}

impl VerbsRecv {
    pub(super) fn new(core: &Arc<Mutex<Core>>, linger: &Arc<Linger>) -> VerbsRecv {
        let peer = lock(core).peer.clone();
        VerbsRecv { core: core.clone(), linger: linger.clone(), peer }
    }
}

/// The oldest message's header and the address of its payload.
#[inline]
fn oldest(core: &mut Core) -> Result<Option<(Header, *const u8)>> {
    if core.front().is_none() {
        core.poll();
        core.receiving()?;
    }
    Ok(core.front().map(|a| (a.header, core.target(a.offset + Header::BYTES).as_ptr().cast_const())))
}

impl RecvLink for VerbsRecv {
    fn peer(&self) -> &Peer {
        &self.peer
    }

    fn peek(&mut self) -> Result<Option<(Header, &[u8])>> {
        let mut core = lock(&self.core);
        let Some((header, at)) = oldest(&mut core)? else { return Ok(None) };
        // SAFETY: the header's length was checked when the message arrived; the peer leaves the place alone until it is
        // freed, for which `self` is needed mutably; the memory lives as long as the core, which we hold.
        Ok(Some((header, unsafe { std::slice::from_raw_parts(at, header.len as usize) })))
    }

    fn shows_in_place(&self) -> bool {
        true
    }

    fn release(&mut self) -> Result<()> {
        if lock(&self.core).free() { Ok(()) } else { Err(self.peer.not_peeked()) }
    }

    fn recv_into(&mut self, expected: &Header, dst: &mut [u8]) -> Result<Received> {
        if dst.len() != expected.len as usize {
            return Err(self.peer.not_receivable(expected, dst));
        }
        let mut core = lock(&self.core);
        let Some((header, at)) = oldest(&mut core)? else { return Ok(Received::Pending) };
        if !expected.agrees_with(&header) {
            return Ok(Received::Mismatch(header));
        }
        // SAFETY: as in `peek`; `dst` has as many bytes as the message, since the headers agree.
        unsafe { std::ptr::copy_nonoverlapping(at, dst.as_mut_ptr(), dst.len()) };
        core.free();
        Ok(Received::Done)
    }

    fn progress(&mut self) -> Result<bool> {
        let mut core = lock(&self.core);
        let moved = core.poll();
        core.receiving()?;
        Ok(moved)
    }

    fn check_peer(&mut self) -> Result<()> {
        let mut core = lock(&self.core);
        core.poll();
        core.look_after_peer();
        core.receiving()
    }

    fn arm(&mut self) -> Result<bool> {
        let mut core = lock(&self.core);
        core.arm()?;
        core.receiving()?;
        Ok(core.front().is_some())
    }

    fn interest(&self) -> Interest {
        lock(&self.core).interest()
    }
}

impl Drop for VerbsRecv {
    fn drop(&mut self) {
        leave(&self.core, &self.linger);
    }
}
