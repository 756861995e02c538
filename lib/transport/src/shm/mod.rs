//! Links between processes of one host: one ring of messages per direction in a memfd. `inproc` uses the same rings.
//!
//! The dialer makes the memfd and passes it with its doorbell over the acceptor's Unix socket (abstract namespace: no
//! file anywhere, nothing to clean up after a kill). The acceptor answers with its own doorbell. The socket then stays
//! open and carries nothing: when it hangs up, the other process is gone.
//!
//! Memory per link pair, shared by both processes: 2 pages at once, and `2 * (depth + 1) * max_message` as their
//! payload ring comes into use (1.25 MiB with the defaults); two descriptors in each process. Huge pages
//! (`MADV_HUGEPAGE`) are not asked for: a link of default size is smaller than one.
//!
//! # Layout of one direction
//! ```text
//! consumed        2 counters, written by the receiver: lines, and bytes of payload ring, that it has freed
//! receiver state  waiting for a message? gone?          written by the receiver, waiting taken back by the sender
//! sender state    waiting for credit? gone?             written by the sender, waiting taken back by the receiver
//! probe           the sender's nonce, and whether the receiver can pull: written while the link is made
//! lines           LINES (32, or depth) cache lines: { sequence u64, Header 32 B, 24 bytes of payload }
//! payload ring    depth + 1 times max_message bytes, for messages longer than 24 bytes, one after the other
//! ```
//! The sender fills the next line and stores its sequence number last (release). The receiver spins on that very word
//! (acquire), so a message of up to 24 bytes crosses from core to core in one cache line, without a shared head index.
//! (FastForward, Giacomoni et al., PPoPP 2008, has the idea.) Lines are many, because they are what keeps small
//! messages going: the sender reads `consumed`, the other line that has to cross, once per 32 of them.
//!
//! Payloads take as much of the ring as they are long, so that it is walked through from end to end whatever the length
//! of the messages. That is on purpose: a stretch that the receiver has read a moment ago is slower to write than one
//! that it read half a megabyte ago, probably because it is still in its second-level cache. (Two cores of a Zen 3, 256
//! KiB there and back in chunks of 32 KiB: 30 us when a slot is used again after 128 KiB, 23 us after 512 KiB.)
//!
//! The receiver may pull large payloads instead (zero copy), at one copy instead of two: see `single_copy.rs`.
//!
//! # Who trusts whom
//! The memory belongs to two processes of one user that share a token. Still, everything read from it that decides
//! about an address or a length is read once (atomically), checked, and an impossible value is
//! [`Error::Protocol`](tinynccl_plan::Error::Protocol).
//! Payload bytes are whatever the peer wrote.
//!
//! # What is proven
//! `model.rs` runs this very code under the model checker loom, with smaller rings: every order of steps and every
//! stale value that the orderings in `words.rs` allow. The command is in `scripts/loom.sh`.

mod connect;
mod fabric;
mod listen;
mod memory;
#[cfg(all(test, loom))]
mod model;
pub mod packet;
mod recv;
mod send;
mod single_copy;
#[cfg(all(test, not(loom)))]
mod tests;
mod words;

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use rustix::io::Errno;
use rustix::net::RecvFlags;

pub(crate) use fabric::bind;
pub(crate) use memory::Layout;
use recv::ShmRecv;
use send::ShmSend;
pub(crate) use single_copy::{SingleCopy, ZeroCopyFrom};
pub use words::Sequence;

use memory::Direction;

use super::memory::mapping::Mapping;
use super::{Interest, LinkPair, Peer};
use tinynccl_plan::error::Result;
use tinynccl_plan::wire::Header;
use tinynccl_sys::doorbell::Doorbell;
use tinynccl_sys::fork::{Kept, Origin};

/// Payload bytes that fit into a line.
pub const INLINE: usize = 24;

/// Connected socket that the other process keeps open: it hangs up when that process is gone.
#[derive(Debug, Clone)]
pub(crate) struct Lifeline {
    socket: Arc<Kept<OwnedFd>>,
    origin: Origin,
}

impl Lifeline {
    pub(crate) fn new(socket: Kept<OwnedFd>) -> Lifeline {
        Lifeline { socket: Arc::new(socket), origin: Origin::here() }
    }

    /// Why the peer is gone, if it is.
    fn broken(&self) -> Option<String> {
        let mut byte = [0u8; 1];
        match rustix::net::recv(&**self.socket, &mut byte, RecvFlags::PEEK | RecvFlags::DONTWAIT) {
            Ok((_, 0)) => Some("its process ended or closed the link".to_owned()),
            Ok(_) | Err(Errno::AGAIN | Errno::INTR) => None,
            Err(e) => Some(e.to_string()),
        }
    }

    fn interest(&self) -> Interest {
        Interest { fd: Some(self.socket.as_raw_fd()), readable: true, writable: false }
    }
}

/// State shared by both halves of a link, besides memory.
#[derive(Debug, Clone)]
pub(crate) struct Ends {
    /// The peer, for errors.
    pub(crate) peer: Peer,
    /// Wakes the peer.
    pub(crate) bell: Arc<Doorbell>,
    /// Between processes.
    pub(crate) lifeline: Option<Lifeline>,
    /// Settings for fetching large payloads from the sender's memory.
    pub(crate) single_copy: SingleCopy,
}

impl Ends {
    /// Why the peer is gone, if it is.
    fn broken(&self) -> Option<String> {
        self.lifeline.as_ref().and_then(Lifeline::broken)
    }

    /// Descriptor that becomes readable when the peer is gone; none within a process.
    fn interest(&self) -> Interest {
        self.lifeline.as_ref().map(Lifeline::interest).unwrap_or_default()
    }

    /// Returns true if the link is this process's to close: its memory is also a forked child's.
    fn are_ours(&self) -> bool {
        self.lifeline.as_ref().is_none_or(|l| l.origin.is_here())
    }
}

/// Writes our nonce into the memory of a link, for the peer to probe. Before the peer makes its [`pair`].
pub(crate) fn introduce(memory: &Arc<Mapping>, layout: Layout, side: usize) -> Result<()> {
    Direction::new(memory, layout, side)?.head().probe.introduce();
    Ok(())
}

/// Both halves of one end. `side` is 0 at one end and 1 at the other.
pub(crate) fn pair(
    memory: &Arc<Mapping>,
    layout: Layout,
    side: usize,
    ends: Ends,
    kind: &'static str,
) -> Result<LinkPair> {
    let any_length = ends.single_copy.is_on();
    Ok(LinkPair {
        send: Box::new(ShmSend::new(Direction::new(memory, layout, side)?, ends.clone())),
        recv: Box::new(ShmRecv::new(Direction::new(memory, layout, 1 - side)?, ends)),
        kind,
        any_length,
    })
}

/// The first 24 bytes at most of `data` as words; the common lengths without a call to `memcpy`.
#[inline(always)]
pub fn pack(data: &[u8]) -> [u64; 3] {
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

/// Returns a header as the words of which a line consists.
#[inline(always)]
pub fn to_words(header: &Header) -> [u64; 4] {
    bytemuck::cast(*header)
}

/// [`Header::agrees_with`] on words; the digest is the lower half of the last word.
#[inline(always)]
pub fn agree(a: &[u64; 4], b: &[u64; 4]) -> bool {
    const CRC: u64 = 0xffff_ffff;
    let (rest, last) = ((a[0] ^ b[0]) | (a[1] ^ b[1]) | (a[2] ^ b[2]), a[3] ^ b[3]);
    rest | last == 0 || rest | (last & !CRC) == 0 && (a[3] & CRC == 0 || b[3] & CRC == 0)
}
const _: () = assert!(std::mem::offset_of!(Header, check) == 24 && cfg!(target_endian = "little"));
