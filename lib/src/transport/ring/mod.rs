//! A bounded FIFO of messages in shared memory, for one sender and one receiver: what `shm` and `inproc` are made of.
//!
//! # Layout of one direction
//! ```text
//! consumed        2 counters, written by the receiver: lines and payload areas it has freed
//! receiver state  waiting for a message? gone?          written by the receiver, waiting taken back by the sender
//! sender state    waiting for credit? gone?             written by the sender, waiting taken back by the receiver
//! lines           LINES (32, or depth) cache lines: { sequence u64, Header 32 B, 24 bytes of payload }
//! payload areas   depth areas of max_message bytes, for messages longer than 24 bytes
//! ```
//! The sender fills the next line and stores its sequence number last (release). The receiver spins on that very word
//! (acquire), so a message of up to 24 bytes crosses from core to core in one cache line, without a shared head index.
//! (FastForward, Giacomoni et al., PPoPP 2008, has the idea.) Lines are more than payload areas, because they are what
//! keeps small messages going: the sender reads `consumed`, the other line that has to cross, once per 32 of them.
//!
//! # Who trusts whom
//! The memory belongs to two processes of one user that share a token. Still, everything read from it that decides about
//! an address or a length is read once (atomically), checked, and an impossible value is [`Error::Protocol`]. Payload
//! bytes are whatever the peer wrote.

mod recv;
mod send;
#[cfg(test)]
mod tests;

use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64};

use rustix::io::Errno;
use rustix::net::RecvFlags;

pub(crate) use recv::RingRecv;
pub(crate) use send::RingSend;

use super::doorbell::Doorbell;
use super::fence::Fence;
use super::mapping::Mapping;
use super::{Interest, LinkOptions, LinkPair, Peer};
use crate::error::{Error, Result};
use crate::wire::Header;

/// Payload bytes that fit into a line.
pub(crate) const INLINE: usize = 24;
/// Lines per direction, unless `depth` is larger.
pub(crate) const LINES: usize = 32;
/// State bit: asleep, ring the doorbell.
const WAITING: u32 = 1;
/// State bit: this end was dropped.
const CLOSED: u32 = 2;
/// Words that different sides write are this far apart: two cache lines, because some cores prefetch lines in pairs.
const APART: usize = 128;
const PAGE: usize = 4096;

/// A message's line. The words are atomics because a misbehaving peer may write them at any time.
#[repr(C, align(64))]
struct Line {
    /// Number of the message, from 1, once it is complete; before, that of the message `lines` earlier.
    sequence: AtomicU64,
    header: [AtomicU64; 4],
    inline: [AtomicU64; 3],
}
const _: () = assert!(size_of::<Line>() == 64);

/// What the receiver has freed, as running counts.
#[repr(C, align(64))]
struct Consumed {
    lines: AtomicU64,
    areas: AtomicU64,
}

/// Sizes and offsets; both ends compute the same from the same [`LinkOptions`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Layout {
    lines: usize,
    depth: usize,
    max_message: usize,
    stride: usize,
}

impl Layout {
    /// Depth is rounded up to a power of two, at least 2.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when the options are out of range.
    pub(crate) fn new(options: &LinkOptions) -> Result<Layout> {
        options.check()?;
        let depth = options.depth.next_power_of_two().max(2);
        // One line more than the payload: areas do not all start in the same cache set.
        let stride = options.max_message.next_multiple_of(64) + 64;
        Ok(Layout { lines: depth.max(LINES), depth, max_message: options.max_message, stride })
    }

    fn head(&self) -> usize {
        3 * APART + self.lines * size_of::<Line>()
    }

    fn heads(&self) -> usize {
        (2 * self.head()).next_multiple_of(PAGE)
    }

    /// Bytes of both directions. Address space: the heads (2 pages with default options) are touched at once, a page of a
    /// payload area when a message first covers it.
    pub(crate) fn bytes(&self) -> usize {
        (self.heads() + 2 * self.depth * self.stride).next_multiple_of(PAGE)
    }
}

/// One direction within a mapping: pointers that stay valid while `_memory` lives.
#[derive(Debug)]
struct Direction {
    consumed: NonNull<Consumed>,
    receiver: NonNull<AtomicU32>,
    sender: NonNull<AtomicU32>,
    lines: NonNull<Line>,
    areas: NonNull<u8>,
    layout: Layout,
    _memory: Arc<Mapping>,
}

// SAFETY: the pointers lead into a mapping that is valid from every thread; one `RingSend` and one `RingRecv` use it by the protocol.
unsafe impl Send for Direction {}

impl Direction {
    /// Direction 0 or 1 of `memory`, whose length is checked against the layout.
    fn new(memory: &Arc<Mapping>, layout: Layout, index: usize) -> Result<Direction> {
        if memory.len() < layout.bytes() || index > 1 {
            let detail = format!("shared memory of a link: expected {} bytes, got {}", layout.bytes(), memory.len());
            return Err(Error::invalid("connect", detail));
        }
        let head = index * layout.head();
        let areas = layout.heads() + index * layout.depth * layout.stride;
        let base = memory.base();
        // SAFETY: all offsets are below `layout.bytes()`, which is within the mapping; the mapping is page-aligned and the
        // offsets are multiples of 64, as the types require.
        unsafe {
            Ok(Direction {
                consumed: base.add(head).cast(),
                receiver: base.add(head + APART).cast(),
                sender: base.add(head + 2 * APART).cast(),
                lines: base.add(head + 3 * APART).cast(),
                areas: base.add(areas),
                layout,
                _memory: memory.clone(),
            })
        }
    }

    #[inline(always)]
    fn consumed(&self) -> &Consumed {
        // SAFETY: within the mapping (see `new`), aligned; atomics may be shared with anyone.
        unsafe { self.consumed.as_ref() }
    }

    #[inline(always)]
    fn receiver(&self) -> &AtomicU32 {
        // SAFETY: as `consumed`.
        unsafe { self.receiver.as_ref() }
    }

    #[inline(always)]
    fn sender(&self) -> &AtomicU32 {
        // SAFETY: as `consumed`.
        unsafe { self.sender.as_ref() }
    }

    #[inline(always)]
    fn line(&self, message: u64) -> &Line {
        // SAFETY: `lines` is a power of two and the index is masked to it; otherwise as `consumed`.
        unsafe { self.lines.add(message as usize & (self.layout.lines - 1)).as_ref() }
    }

    /// The payload area of the `n`th long message: `max_message` bytes, 64-byte aligned.
    #[inline(always)]
    fn area(&self, n: u64) -> *mut u8 {
        // SAFETY: `depth` is a power of two and the index is masked to it; areas are `stride` apart and within the mapping.
        unsafe { self.areas.add((n as usize & (self.layout.depth - 1)) * self.layout.stride).as_ptr() }
    }
}

/// What tells that the other process is gone: a connected socket that it keeps open.
#[derive(Debug, Clone)]
pub(crate) struct Lifeline(Arc<OwnedFd>);

impl Lifeline {
    pub(crate) fn new(socket: OwnedFd) -> Lifeline {
        Lifeline(Arc::new(socket))
    }

    /// Why the peer is gone, if it is.
    fn broken(&self) -> Option<String> {
        let mut byte = [0u8; 1];
        match rustix::net::recv(&*self.0, &mut byte, RecvFlags::PEEK | RecvFlags::DONTWAIT) {
            Ok((_, 0)) => Some("its process ended or closed the link".to_owned()),
            Ok(_) | Err(Errno::AGAIN | Errno::INTR) => None,
            Err(e) => Some(e.to_string()),
        }
    }

    fn interest(&self) -> Interest {
        Interest { fd: Some(self.0.as_raw_fd()), readable: true, writable: false }
    }
}

/// What both halves of a link share, besides memory.
#[derive(Debug, Clone)]
pub(crate) struct Ends {
    /// Who is there.
    pub(crate) peer: Peer,
    /// Wakes the peer.
    pub(crate) bell: Arc<Doorbell>,
    /// How both ends order their flags.
    pub(crate) fence: Fence,
    /// Between processes.
    pub(crate) lifeline: Option<Lifeline>,
}

/// Both halves of one end. `side` is 0 at one end and 1 at the other.
pub(crate) fn pair(
    memory: &Arc<Mapping>,
    layout: Layout,
    side: usize,
    ends: Ends,
    kind: &'static str,
) -> Result<LinkPair> {
    Ok(LinkPair {
        send: Box::new(RingSend::new(Direction::new(memory, layout, side)?, ends.clone())),
        recv: Box::new(RingRecv::new(Direction::new(memory, layout, 1 - side)?, ends)),
        kind,
    })
}

/// The first 24 bytes at most of `data` as words; the common lengths without a call to `memcpy`.
#[inline(always)]
pub(crate) fn pack(data: &[u8]) -> [u64; 3] {
    let mut words = [0u64; 3];
    if let Ok(bytes) = <[u8; 8]>::try_from(data) {
        words[0] = u64::from_ne_bytes(bytes);
    } else if let Ok(bytes) = <[u8; 4]>::try_from(data) {
        words[0] = u64::from(u32::from_ne_bytes(bytes));
    } else {
        for (to, from) in bytemuck::bytes_of_mut(&mut words).iter_mut().zip(data) {
            *to = *from;
        }
    }
    words
}

/// The reverse of [`pack`].
#[inline(always)]
pub(crate) fn unpack(words: &[u64; 3], dst: &mut [u8]) {
    if let Ok(bytes) = <&mut [u8; 8]>::try_from(&mut *dst) {
        *bytes = words[0].to_ne_bytes();
    } else if let Ok(bytes) = <&mut [u8; 4]>::try_from(&mut *dst) {
        *bytes = (words[0] as u32).to_ne_bytes();
    } else {
        for (to, from) in dst.iter_mut().zip(bytemuck::bytes_of(words)) {
            *to = *from;
        }
    }
}

#[inline(always)]
pub(crate) fn to_words(header: &Header) -> [u64; 4] {
    bytemuck::cast(*header)
}

/// [`Header::agrees_with`] on words: everything but the checksum, the lower half of the last word.
#[inline(always)]
pub(crate) fn agree(a: &[u64; 4], b: &[u64; 4]) -> bool {
    const CRC: u64 = 0xffff_ffff;
    ((a[0] ^ b[0]) | (a[1] ^ b[1]) | (a[2] ^ b[2]) | ((a[3] ^ b[3]) & !CRC)) == 0
}
const _: () = assert!(std::mem::offset_of!(Header, crc) == 24 && cfg!(target_endian = "little"));
