//! A link over one TCP connection, in the fewest words: the contract of `tinynccl::transport`, both halves.
//!
//! ```text
//! push      the sending half:    header and payload to the socket, as much as it takes
//! take_in   the receiving half:  bytes of the socket to whole messages, no more than the link is deep
//! deliver   the receiving half:  the oldest message to the caller, if it is the one expected
//! ```
//! The library's own ([`transport/tcp`](../../../lib/transport/src/tcp)) adds what this one lacks: several connections
//! per link, payload that is received where it belongs, messages that travel together, and sockets of a process that
//! forks.

use std::collections::VecDeque;
use std::io::{ErrorKind, IoSlice, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::time::Timespec;
use tinynccl::error::{Error, Result};
use tinynccl::transport::{Interest, LinkOptions, LinkPair, Peer, Received, RecvLink, SendLink};
use tinynccl::wire::Header;

/// Time for the peer to take what a dropped link has sent.
const LINGER: Duration = Duration::from_secs(5);

/// Name of these links.
pub const KIND: &str = "a link of your own";

/// Both halves of a link over a connected socket.
///
/// # Errors
/// Those of the system.
pub fn pair(socket: TcpStream, peer: Peer, options: &LinkOptions) -> std::io::Result<LinkPair> {
    socket.set_nonblocking(true)?;
    socket.set_nodelay(true)?;
    let wire = Arc::new(Wire(socket));
    let (max, depth) = (options.max_message, options.depth);
    let half = || Half { wire: wire.clone(), peer: peer.clone(), max, lost: None };
    let send = Sender { half: half(), slot: vec![0; max + 64], reserved: false, ready: None, sent: 0, full: false };
    let recv = Receiver { half: half(), head: [0; Header::BYTES], body: Vec::new(), got: 0, ready: [].into(), depth };
    Ok(LinkPair { send: Box::new(send), recv: Box::new(recv), kind: KIND, any_length: false })
}

/// The socket. When both halves are dropped, what was sent still arrives: a socket that is closed with unread bytes in
/// it would reset the connection, so a thread reads them first.
#[derive(Debug)]
struct Wire(TcpStream);

impl Drop for Wire {
    fn drop(&mut self) {
        let _ = self.0.shutdown(Shutdown::Write);
        let Ok(mut socket) = self.0.try_clone() else { return };
        // No thread: then the peer may see a reset in place of the last messages.
        let _ = thread::Builder::new().spawn(move || {
            let (begin, mut sink) = (Instant::now(), [0; 4096]);
            if socket.set_nonblocking(false).and(socket.set_read_timeout(Some(LINGER))).is_ok() {
                while begin.elapsed() < LINGER && matches!(socket.read(&mut sink), Ok(1..)) {}
            }
        });
    }
}

/// State of either half of a link.
#[derive(Debug)]
struct Half {
    wire: Arc<Wire>,
    peer: Peer,
    max: usize,
    /// Why the peer is gone.
    lost: Option<String>,
}

impl Half {
    fn alive(&self, op: &str) -> Result<()> {
        self.lost.as_ref().map_or(Ok(()), |detail| Err(self.peer.lost(op, detail)))
    }

    /// The bytes that a system call has moved: 0 when it would block, and when the peer is gone.
    fn moved(&mut self, result: std::io::Result<usize>) -> usize {
        match result {
            Ok(n @ 1..) => return n,
            Ok(_) => self.lost = Some("it closed the connection".to_owned()),
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            Err(e) => self.lost = Some(e.to_string()),
        }
        0
    }

    fn interest(&self, readable: bool, writable: bool) -> Interest {
        Interest { fd: Some(self.wire.0.as_raw_fd()), readable, writable }
    }

    fn misuse(&self, op: &str, what: &str) -> Error {
        Error::invalid(op, format!("rank {}: expected {what}", self.peer.peer))
    }
}

/// The sending half: one message at a time, from the caller's memory or from the slot.
#[derive(Debug)]
struct Sender {
    half: Half,
    /// Memory for one message, and room to begin on a multiple of 64.
    slot: Vec<u8>,
    reserved: bool,
    /// Header of the message in the slot that is committed and not sent yet.
    ready: Option<Header>,
    /// Bytes of the current message, header included, that the kernel has.
    sent: usize,
    /// The socket took less than it was given.
    full: bool,
}

impl Sender {
    fn slot_at(&self) -> usize {
        self.slot.as_ptr().align_offset(64)
    }

    /// Gives the socket what it has not got yet of `head` and `body`; `true` once it has everything.
    // EXERCISE 4 (A link of your own): write what is left of both pieces in one `write_vectored`, again and again,
    // until all is written (`true`) or the socket takes nothing (`false`). `self.sent` counts, so that the next call
    // goes on there; `self.full` tells `arm`. `Half::moved` reads the outcome of a call.
    fn push(&mut self, head: &[u8], body: &[u8]) -> Result<bool> {
        while self.sent < head.len() + body.len() {
            let head_left = &head[self.sent.min(head.len())..];
            let body_left = &body[self.sent.saturating_sub(head.len())..];
            let result = (&self.half.wire.0).write_vectored(&[IoSlice::new(head_left), IoSlice::new(body_left)]);
            let n = self.half.moved(result);
            self.half.alive("send")?;
            self.sent += n;
            self.full = n == 0;
            if self.full {
                return Ok(false);
            }
        }
        (self.sent, self.full) = (0, false);
        Ok(true)
    }
}

impl SendLink for Sender {
    fn peer(&self) -> &Peer {
        &self.half.peer
    }

    fn reserve(&mut self) -> Result<Option<&mut [u8]>> {
        self.progress()?;
        if self.ready.is_some() {
            return Ok(None);
        }
        self.reserved = true;
        let (at, max) = (self.slot_at(), self.half.max);
        Ok(Some(&mut self.slot[at..at + max]))
    }

    fn commit(&mut self, header: &Header) -> Result<()> {
        if !self.reserved || header.len as usize > self.half.max {
            return Err(self.half.misuse("send", "a reserved message that fits"));
        }
        self.reserved = false;
        self.ready = Some(*header);
        self.progress().map(drop)
    }

    fn send_from(&mut self, header: &Header, data: &[u8]) -> Result<bool> {
        if data.len() != header.len as usize || data.len() > self.half.max || self.reserved {
            return Err(self.half.misuse("send", "a message of the header's length, and none reserved"));
        }
        self.progress()?;
        Ok(self.ready.is_none() && self.push(bytemuck::bytes_of(header), data)?)
    }

    fn sends_from_caller(&self, _bytes: usize) -> bool {
        true
    }

    fn progress(&mut self) -> Result<bool> {
        self.half.alive("send")?;
        let Some(header) = self.ready else { return Ok(false) };
        let (before, at) = (self.sent, self.slot_at());
        // Out of `self` for the call: it borrows the slot.
        let slot = std::mem::take(&mut self.slot);
        let done = self.push(bytemuck::bytes_of(&header), &slot[at..at + header.len as usize]);
        self.slot = slot;
        if done? {
            self.ready = None;
            return Ok(true);
        }
        Ok(self.sent > before)
    }

    fn is_flushed(&self) -> bool {
        self.ready.is_none()
    }

    fn check_peer(&mut self) -> Result<()> {
        let mut fds = [PollFd::new(&self.half.wire.0, PollFlags::RDHUP)];
        if matches!(rustix::event::poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })), Ok(1..)) {
            self.half.lost = Some("it closed the connection".to_owned());
        }
        self.half.alive("send")
    }

    fn arm(&mut self) -> Result<bool> {
        Ok(self.progress()? || !self.full)
    }

    fn interest(&self) -> Interest {
        self.half.interest(false, self.full)
    }
}

/// The receiving half.
#[derive(Debug)]
struct Receiver {
    half: Half,
    /// The message that is coming in: its header, its payload (of u64, so that it is aligned), and how many bytes of
    /// both are here.
    head: [u8; Header::BYTES],
    body: Vec<u64>,
    got: usize,
    /// Whole messages, the oldest first.
    ready: VecDeque<(Header, Vec<u64>)>,
    /// Limit on the messages in `ready`.
    depth: usize,
}

impl Receiver {
    /// Reads from the socket what completes the next messages; `true` when a byte came.
    // EXERCISE 5 (A link of your own): while fewer than `depth` messages are ready, read into the rest of the header,
    // then of the payload; `Half::moved` reads the outcome, and 0 ends the loop. A length above `half.max` loses the
    // link. A message with all its bytes goes behind the others in `ready`.
    fn take_in(&mut self) -> bool {
        let mut moved = false;
        while self.half.lost.is_none() && self.ready.len() < self.depth {
            let len = || bytemuck::cast::<_, Header>(self.head).len as usize;
            let rest = match self.got.checked_sub(Header::BYTES) {
                None => &mut self.head[self.got..],
                Some(got) => {
                    let len = len();
                    &mut bytemuck::cast_slice_mut(&mut self.body)[got..len]
                }
            };
            if !rest.is_empty() {
                let result = (&self.half.wire.0).read(rest);
                let n = self.half.moved(result);
                if n == 0 {
                    break;
                }
                (self.got, moved) = (self.got + n, true);
            }
            let header: Header = bytemuck::cast(self.head);
            let len = header.len as usize;
            if self.got == Header::BYTES {
                if len > self.half.max {
                    self.half.lost = Some(format!("it sent {header}, more than {} bytes", self.half.max));
                    break;
                }
                self.body = vec![0; len.div_ceil(8)];
            }
            if self.got == Header::BYTES + len {
                self.ready.push_back((header, std::mem::take(&mut self.body)));
                self.got = 0;
            }
        }
        moved
    }

    /// Hands the oldest message over if it agrees with `expected`, and drops it.
    // EXERCISE 6 (A link of your own): without a message: `Pending`. A message whose header does not agree with the
    // expected one (`Header::agrees_with`) stays where it is: `Mismatch`. Otherwise copy it to `dst`, which has its
    // length, and free it: `Done`.
    fn deliver(&mut self, expected: &Header, dst: &mut [u8]) -> Received {
        match self.ready.front() {
            None => return Received::Pending,
            Some((header, _)) if !expected.agrees_with(header) => return Received::Mismatch(*header),
            Some((_, body)) => dst.copy_from_slice(&bytemuck::cast_slice(body)[..dst.len()]),
        }
        self.ready.pop_front();
        Received::Done
    }
}

impl RecvLink for Receiver {
    fn peer(&self) -> &Peer {
        &self.half.peer
    }

    fn peek(&mut self) -> Result<Option<(Header, &[u8])>> {
        self.progress()?;
        Ok(self.ready.front().map(|(header, body)| (*header, &bytemuck::cast_slice(body)[..header.len as usize])))
    }

    fn release(&mut self) -> Result<()> {
        self.ready.pop_front().map(drop).ok_or_else(|| self.half.misuse("receive", "a peeked message"))
    }

    fn recv_into(&mut self, expected: &Header, dst: &mut [u8]) -> Result<Received> {
        if dst.len() != expected.len as usize {
            return Err(self.half.misuse("receive", "memory of the message's length"));
        }
        self.progress()?;
        Ok(self.deliver(expected, dst))
    }

    fn progress(&mut self) -> Result<bool> {
        let moved = self.take_in();
        // The loss comes after the messages.
        if self.ready.is_empty() {
            self.half.alive("receive")?;
        }
        Ok(moved)
    }

    fn check_peer(&mut self) -> Result<()> {
        self.progress().map(drop)
    }

    fn arm(&mut self) -> Result<bool> {
        // Bytes that came before any thread waited for them would wake no thread.
        self.progress()?;
        Ok(!self.ready.is_empty())
    }

    fn interest(&self) -> Interest {
        self.half.interest(true, false)
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    const MAX: usize = 1 << 20;

    fn header(len: usize) -> Header {
        Header { len: len as u32, ..Header::default() }
    }

    fn half(socket: TcpStream) -> Half {
        socket.set_nonblocking(true).unwrap();
        let peer = Peer { rank: 0, peer: 1, address: "loopback".to_owned() };
        Half { wire: Arc::new(Wire(socket)), peer, max: MAX, lost: None }
    }

    /// A half of a link, and the socket at the other end, which blocks.
    fn connected() -> (Half, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let theirs = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        theirs.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        (half(listener.accept().unwrap().0), theirs)
    }

    fn sender() -> (Sender, TcpStream) {
        let (half, theirs) = connected();
        (Sender { half, slot: Vec::new(), reserved: false, ready: None, sent: 0, full: false }, theirs)
    }

    fn receiver(depth: usize) -> (Receiver, TcpStream) {
        let (half, theirs) = connected();
        (Receiver { half, head: [0; Header::BYTES], body: Vec::new(), got: 0, ready: [].into(), depth }, theirs)
    }

    /// Calls `take_in` until `enough` holds.
    fn take_in_until(r: &mut Receiver, enough: impl Fn(&Receiver) -> bool) {
        let begin = Instant::now();
        while !enough(r) {
            r.take_in();
            assert!(
                begin.elapsed() < Duration::from_secs(10),
                "{} messages, {} bytes of the next",
                r.ready.len(),
                r.got
            );
            thread::yield_now();
        }
    }

    #[test]
    fn push_sends_header_and_payload() {
        let (mut s, mut theirs) = sender();
        for payload in [&b""[..], b"x", b"seventeen bytes.."] {
            assert!(s.push(b"header", payload).unwrap());
            assert_eq!((s.sent, s.full), (0, false), "ready for the next message");
            let mut got = vec![0; 6 + payload.len()];
            theirs.read_exact(&mut got).unwrap();
            assert_eq!(got, [b"header", payload].concat());
        }
    }

    #[test]
    fn push_goes_on_where_a_full_socket_stopped_it() {
        let (mut s, mut theirs) = sender();
        // More than the kernel takes while no one reads.
        let payload: Vec<u8> = (0..64 << 20).map(|i: u32| (i >> 3) as u8).collect();
        assert!(!s.push(b"header", &payload).unwrap(), "the socket took everything");
        assert!(s.full && s.sent > 0, "sent {}", s.sent);
        let expected = [b"header", &payload[..]].concat();
        let reader = thread::spawn(move || {
            let mut got = vec![0; expected.len()];
            theirs.read_exact(&mut got).map(|()| got == expected)
        });
        while !s.push(b"header", &payload).unwrap() {
            assert!(!reader.is_finished(), "the other end has stopped reading");
            thread::yield_now();
        }
        assert!(reader.join().unwrap().unwrap(), "other bytes came than were sent");
        assert_eq!((s.sent, s.full), (0, false));
    }

    #[test]
    fn push_fails_once_the_peer_is_gone() {
        let (mut s, theirs) = sender();
        drop(theirs);
        let begin = Instant::now();
        let lost = loop {
            // The first bytes may still be taken; then the connection is reset.
            match s.push(b"header", b"x") {
                Ok(_) => assert!(begin.elapsed() < Duration::from_secs(10), "no call failed"),
                Err(error) => break error,
            }
        };
        assert!(matches!(lost, Error::PeerLost { peer: 1, .. }), "{lost}");
    }

    #[test]
    fn take_in_makes_messages_of_bytes_however_they_come() {
        let (mut r, mut theirs) = receiver(8);
        theirs.set_nodelay(true).unwrap();
        let lens = [0, 1, 8, 100];
        let bytes: Vec<u8> =
            lens.iter().flat_map(|&len| [bytemuck::bytes_of(&header(len)), &vec![len as u8; len]].concat()).collect();
        for byte in bytes {
            theirs.write_all(&[byte]).unwrap();
            r.take_in();
        }
        take_in_until(&mut r, |r| r.ready.len() == lens.len());
        for (len, (header, body)) in lens.into_iter().zip(&r.ready) {
            assert_eq!(header.len as usize, len);
            assert!(bytemuck::cast_slice::<_, u8>(body)[..len].iter().all(|&byte| byte == len as u8), "{len} bytes");
        }
        assert!(!r.take_in(), "nothing more came");
    }

    #[test]
    fn take_in_stops_when_the_link_is_full() {
        let (mut r, mut theirs) = receiver(3);
        for _ in 0..5 {
            theirs.write_all(bytemuck::bytes_of(&header(0))).unwrap();
        }
        take_in_until(&mut r, |r| r.ready.len() == 3);
        for _ in 0..100 {
            assert!(!r.take_in() && r.ready.len() == 3, "{} messages", r.ready.len());
        }
        r.ready.pop_front();
        take_in_until(&mut r, |r| r.ready.len() == 3);
    }

    #[test]
    fn take_in_refuses_a_length_that_no_message_has() {
        let (mut r, mut theirs) = receiver(3);
        theirs.write_all(bytemuck::bytes_of(&header(MAX + 1))).unwrap();
        take_in_until(&mut r, |r| r.half.lost.is_some());
        assert!(r.ready.is_empty() && r.body.is_empty());
    }

    #[test]
    fn deliver_hands_over_only_the_expected_message() {
        let (mut r, _theirs) = receiver(3);
        let (first, second) = (header(3), Header { seq: 1, ..header(8) });
        assert_eq!(r.deliver(&first, &mut [0; 3]), Received::Pending);
        r.ready.push_back((first, vec![u64::from_ne_bytes(*b"abc.....")]));
        r.ready.push_back((second, vec![u64::from_ne_bytes(*b"12345678")]));
        let mut dst = [0xaa; 8];
        assert_eq!(r.deliver(&second, &mut dst), Received::Mismatch(first));
        assert_eq!((dst, r.ready.len()), ([0xaa; 8], 2), "nothing is written, and the message stays");
        assert_eq!(r.deliver(&first, &mut dst[..3]), Received::Done);
        assert_eq!(&dst[..4], b"abc\xaa");
        assert_eq!(r.deliver(&second, &mut dst), Received::Done);
        assert_eq!((&dst, r.ready.len()), (b"12345678", 0));
    }
}
