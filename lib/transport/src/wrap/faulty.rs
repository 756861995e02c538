//! A pair of links with a fault in it, to see what the layers above make of it. Deterministic: the seed decides.

use std::time::{Duration, Instant};

use crate::{Interest, LinkPair, Peer, Received, RecvLink, SendLink};
use tinynccl_plan::error::Result;
use tinynccl_plan::wire::Header;

/// Faults of a pair of links. The default is none.
///
/// Messages are counted per direction, from 0.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Faults {
    /// Seed of everything random.
    pub seed: u64,
    /// Before each message, up to this many calls are answered "not now".
    pub delay: u32,
    /// `send_from` and `recv_into` move a message in random parts, one per call.
    pub split: bool,
    /// The peer is lost before this message, once and for all.
    pub reset_at: Option<u64>,
    /// A bit of this message's payload is flipped while it is sent. (Without payload, nothing is.)
    pub corrupt_at: Option<u64>,
    /// A bit of this message's header is flipped while it is sent; not of its length, which says where the next one
    /// begins.
    pub corrupt_header_at: Option<u64>,
    /// Before this message everything stops, without an error.
    pub stall_at: Option<u64>,
    /// After each message that was received, the next one is kept back for this long: a slow link.
    pub rest: Duration,
}

/// Wraps both halves of a pair.
pub fn wrap(pair: LinkPair, faults: &Faults) -> LinkPair {
    let injector = |salt: u64| Injector {
        faults: faults.clone(),
        random: faults.seed.wrapping_mul(2).wrapping_add(salt),
        message: 0,
        calls: None,
        moved: 0,
        held: false,
        rests_until: None,
    };
    LinkPair {
        send: Box::new(FaultySend { inner: pair.send, injector: injector(0), reserved: false }),
        recv: Box::new(FaultyRecv { inner: pair.recv, injector: injector(1) }),
        kind: pair.kind,
        any_length: false,
    }
}

#[derive(Debug)]
struct Injector {
    faults: Faults,
    random: u64,
    /// The message that is next or under way.
    message: u64,
    /// "Not now" answers left for it; `None` before the first call.
    calls: Option<u32>,
    /// Bytes of it that a split call has moved.
    moved: usize,
    /// The last "not now" came from here, not from below: no one will ring for it.
    held: bool,
    /// Time before which the receiving end may not give the next message.
    rests_until: Option<Instant>,
}

impl Injector {
    /// SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).
    fn random(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn stalled(&self) -> bool {
        self.faults.stall_at.is_some_and(|at| self.message >= at)
    }

    fn reset(&self, op: &str, peer: &Peer) -> Result<()> {
        match self.faults.reset_at {
            Some(at) if self.message >= at => Err(peer.lost(op, "injected reset")),
            _ => Ok(()),
        }
    }

    /// Returns true if a call may go on; else its answer is "not now".
    fn goes_on(&mut self, op: &str, peer: &Peer) -> Result<bool> {
        self.reset(op, peer)?;
        if self.stalled() {
            return Ok(false);
        }
        if self.rests_until.is_some_and(|end| Instant::now() < end) {
            self.held = true;
            return Ok(false);
        }
        let left = match self.calls {
            Some(left) => left,
            None => (self.random() % (u64::from(self.faults.delay) + 1)) as u32,
        };
        self.calls = Some(left.saturating_sub(1));
        self.held = left > 0;
        Ok(left == 0)
    }

    /// Returns the offset in the message up to which a split call moves it this time.
    fn split(&mut self, len: usize) -> usize {
        let most = (len - self.moved.min(len)) as u64;
        self.moved + (self.random() % (most + 1)) as usize
    }

    fn next_message(&mut self) {
        self.message += 1;
        self.calls = None;
        self.moved = 0;
    }

    fn was_received(&mut self) {
        self.next_message();
        if !self.faults.rest.is_zero() {
            self.rests_until = Some(Instant::now() + self.faults.rest);
        }
    }
}

/// Methods that both halves have, unless the link is lost or stalled.
macro_rules! stalling {
    ($op:literal) => {
        fn progress(&mut self) -> Result<bool> {
            self.injector.reset($op, self.inner.peer())?;
            if self.injector.stalled() { Ok(false) } else { self.inner.progress() }
        }

        fn check_peer(&mut self) -> Result<()> {
            self.injector.reset($op, self.inner.peer())?;
            self.inner.check_peer()
        }

        fn arm(&mut self) -> Result<bool> {
            self.injector.reset($op, self.inner.peer())?;
            if self.injector.stalled() {
                return Ok(false);
            }
            Ok(self.inner.arm()? || self.injector.held)
        }

        fn interest(&self) -> Interest {
            if self.injector.stalled() { Interest::default() } else { self.inner.interest() }
        }
    };
}

#[derive(Debug)]
struct FaultySend {
    inner: Box<dyn SendLink>,
    injector: Injector,
    reserved: bool,
}

impl FaultySend {
    fn corrupts(&self) -> bool {
        self.injector.faults.corrupt_at == Some(self.injector.message)
    }

    /// The header as it is sent.
    fn spoil(&mut self, header: &Header) -> Header {
        let mut spoiled = *header;
        if self.injector.faults.corrupt_header_at == Some(self.injector.message) {
            let bit = self.injector.random() as usize % (8 * Header::BYTES);
            if let Some(byte) = bytemuck::bytes_of_mut(&mut spoiled).get_mut(bit / 8) {
                *byte ^= 1 << (bit % 8);
            }
            if spoiled.len != header.len {
                spoiled = Header { count: header.count ^ 1, len: header.len, ..spoiled };
            }
        }
        spoiled
    }
}

impl SendLink for FaultySend {
    forward!(peer, expect_more, sends_from_caller, is_flushed, disarm, bytes_moved);
    stalling!("send");

    fn reserve(&mut self) -> Result<Option<&mut [u8]>> {
        if !self.reserved && !self.injector.goes_on("send", self.inner.peer())? {
            return Ok(None);
        }
        let memory = self.inner.reserve()?;
        self.reserved = memory.is_some();
        Ok(memory)
    }

    fn commit(&mut self, header: &Header) -> Result<()> {
        if std::mem::take(&mut self.reserved) && self.corrupts() {
            let bit = self.injector.random();
            let memory = self.inner.reserve()?.and_then(|m| m.get_mut(..header.len as usize));
            if let Some(payload) = memory.filter(|p| !p.is_empty()) {
                let at = (bit >> 3) as usize % payload.len();
                if let Some(byte) = payload.get_mut(at) {
                    *byte ^= 1 << (bit & 7);
                }
            }
        }
        let header = self.spoil(header);
        self.inner.commit(&header)?;
        self.injector.next_message();
        Ok(())
    }

    fn send_from(&mut self, header: &Header, data: &[u8]) -> Result<bool> {
        if !self.injector.goes_on("send", self.inner.peer())? {
            return Ok(false);
        }
        if !self.injector.faults.split
            && !self.corrupts()
            && self.injector.faults.corrupt_header_at != Some(self.injector.message)
        {
            let done = self.inner.send_from(header, data)?;
            if done {
                self.injector.next_message();
            }
            return Ok(done);
        }
        let upto = if self.injector.faults.split { self.injector.split(data.len()) } else { data.len() };
        let Some(memory) = self.inner.reserve()? else { return Ok(false) };
        let range = self.injector.moved..upto;
        if let (Some(to), Some(from)) = (memory.get_mut(range.clone()), data.get(range)) {
            to.copy_from_slice(from);
        }
        self.injector.moved = upto;
        if upto < data.len() {
            self.injector.held = true;
            return Ok(false);
        }
        self.reserved = true;
        self.commit(header)?;
        Ok(true)
    }
}

#[derive(Debug)]
struct FaultyRecv {
    inner: Box<dyn RecvLink>,
    injector: Injector,
}

impl RecvLink for FaultyRecv {
    forward!(peer, disarm, bytes_moved);
    stalling!("receive");

    fn peek(&mut self) -> Result<Option<(Header, &[u8])>> {
        if self.injector.goes_on("receive", self.inner.peer())? { self.inner.peek() } else { Ok(None) }
    }

    fn release(&mut self) -> Result<()> {
        self.inner.release()?;
        self.injector.was_received();
        Ok(())
    }

    fn recv_into(&mut self, expected: &Header, dst: &mut [u8]) -> Result<Received> {
        if !self.injector.goes_on("receive", self.inner.peer())? {
            return Ok(Received::Pending);
        }
        if !self.injector.faults.split {
            let received = self.inner.recv_into(expected, dst)?;
            if received == Received::Done {
                self.injector.was_received();
            }
            return Ok(received);
        }
        let Some((header, payload)) = self.inner.peek()? else { return Ok(Received::Pending) };
        if !expected.agrees_with(&header) {
            return Ok(Received::Mismatch(header));
        }
        let range = self.injector.moved..self.injector.split(dst.len());
        let upto = range.end;
        if let (Some(to), Some(from)) = (dst.get_mut(range.clone()), payload.get(range)) {
            to.copy_from_slice(from);
        }
        self.injector.moved = upto;
        if upto < dst.len() {
            self.injector.held = true;
            return Ok(Received::Pending);
        }
        self.release()?;
        Ok(Received::Done)
    }
}
