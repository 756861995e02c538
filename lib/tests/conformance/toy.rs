//! A transport that is made by following "Adding a transport" in CONTRIBUTING.md, to prove that the text is enough: one
//! Unix stream socket per link, and every message through a vector. Nobody should use it.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};

use rustix::event::{PollFd, PollFlags};
use rustix::time::Timespec;
use tinynccl::error::{Error, Result};
use tinynccl::transport::{Accept, Conn, Dial, Dialed, EndpointInfo, Fabric, Interest, LinkOptions, LinkPair, Peer};
use tinynccl::transport::{Received, RecvLink, SendLink, StreamConn};
use tinynccl::wire::Header;

/// fabric.rs, listen.rs, connect.rs: a socket in a directory of its own.
#[derive(Debug)]
pub(crate) struct Toy(UnixListener, tempfile::TempDir);

impl Toy {
    pub(crate) fn bind() -> Toy {
        let place = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(place.path().join("toy")).unwrap();
        listener.set_nonblocking(true).unwrap();
        Toy(listener, place)
    }
}

impl Fabric for Toy {
    fn kind(&self) -> &'static str {
        "toy"
    }
    fn describe(&self, info: &mut EndpointInfo) {
        info.other.insert("toy".to_owned(), self.1.path().join("toy").to_str().unwrap().to_owned());
    }
    fn reaches(&self, ours: &EndpointInfo, theirs: &EndpointInfo) -> Result<&'static str, String> {
        let near = ours.host.same_machine(&theirs.host) && theirs.other.contains_key("toy");
        if near { Ok("same machine") } else { Err("they have no directory in common".to_owned()) }
    }
    fn dial(&self, dial: &Dial<'_>) -> Result<Dialed> {
        let path = &dial.info.other["toy"];
        let socket = UnixStream::connect(path).and_then(|s| s.set_nonblocking(true).map(|()| s));
        let mut socket = match socket {
            Ok(socket) => socket,
            Err(e) => return Ok(Dialed::NotPossible(e.to_string())),
        };
        let peer = dial.peer(path.clone());
        dial.greet(&mut socket, &peer)?;
        Ok(Dialed::Linked(pair(socket, peer, dial.options)))
    }
    fn listeners(&self) -> Vec<BorrowedFd<'_>> {
        vec![self.0.as_fd()]
    }
    fn incoming(&self) -> std::io::Result<Option<Box<dyn Conn>>> {
        match self.0.accept() {
            Ok((socket, _)) => {
                socket.set_nonblocking(true)?;
                Ok(Some(Box::new(StreamConn::new(socket, "a Unix socket".to_owned()))))
            }
            Err(e) if e.kind() == ErrorKind::WouldBlock => Ok(None),
            Err(e) => Err(e),
        }
    }
    fn accept(&self, mut conn: Box<dyn Conn>, accept: &Accept<'_>) -> Result<Result<LinkPair, String>> {
        let peer = accept.peer(conn.address());
        Ok(accept.welcome(&mut *conn).and_then(|()| {
            let socket = conn.downcast::<StreamConn<UnixStream>>()?.into_inner();
            Ok(pair(socket, peer, accept.options))
        }))
    }
}

fn pair(socket: UnixStream, peer: Peer, options: &LinkOptions) -> LinkPair {
    let max = options.max_message;
    let half = |socket| Half { socket, peer: peer.clone(), max, lost: None };
    let (slot, depth) = (vec![0; max + 64], options.depth);
    let send =
        ToySend { half: half(socket.try_clone().unwrap()), slot, reserved: false, out: vec![], sent: 0, full: false };
    let recv = ToyRecv { half: half(socket), head: [0; 32], body: vec![], got: 0, ready: [].into(), depth };
    LinkPair { send: Box::new(send), recv: Box::new(recv), kind: "toy", any_length: false }
}

/// mod.rs: what both halves have.
#[derive(Debug)]
struct Half {
    socket: UnixStream,
    peer: Peer,
    max: usize,
    lost: Option<String>,
}

impl Half {
    fn alive(&self, op: &str) -> Result<()> {
        self.lost.as_ref().map_or(Ok(()), |detail| Err(self.peer.lost(op, detail)))
    }
    /// What a system call has moved; 0 when it would block, and when the peer is gone.
    fn moved(&mut self, result: std::io::Result<usize>) -> usize {
        match result {
            Ok(n @ 1..) => return n,
            Ok(_) => self.lost = Some("it closed the link".to_owned()),
            Err(e) if e.kind() == ErrorKind::WouldBlock => {}
            Err(e) => self.lost = Some(e.to_string()),
        }
        0
    }
    fn interest(&self, readable: bool, writable: bool) -> Interest {
        Interest { fd: Some(self.socket.as_raw_fd()), readable, writable }
    }
}

/// send.rs: one message at a time, from the caller's memory or from the slot.
#[derive(Debug)]
struct ToySend {
    half: Half,
    slot: Vec<u8>,
    reserved: bool,
    /// A committed message, and how much of the current message the kernel has.
    out: Vec<u8>,
    sent: usize,
    full: bool,
}

impl ToySend {
    fn write(&mut self, message: &[u8]) -> Result<bool> {
        while self.sent < message.len() {
            let result = (&self.half.socket).write(&message[self.sent..]);
            let n = self.half.moved(result);
            self.half.alive("send")?;
            (self.sent, self.full) = (self.sent + n, n == 0);
            if self.full {
                return Ok(false);
            }
        }
        (self.sent, self.full) = (0, false);
        Ok(true)
    }
}

impl SendLink for ToySend {
    fn peer(&self) -> &Peer {
        &self.half.peer
    }
    fn reserve(&mut self) -> Result<Option<&mut [u8]>> {
        self.progress()?;
        if !self.out.is_empty() {
            return Ok(None);
        }
        self.reserved = true;
        let (at, max) = (self.slot.as_ptr().align_offset(64), self.half.max);
        Ok(Some(&mut self.slot[at..at + max]))
    }
    fn commit(&mut self, header: &Header) -> Result<()> {
        let len = header.len as usize;
        if !self.reserved || len > self.half.max {
            return Err(Error::invalid("send", "expected a reserved message"));
        }
        let at = self.slot.as_ptr().align_offset(64);
        self.out = [bytemuck::bytes_of(header), &self.slot[at..at + len]].concat();
        self.reserved = false;
        self.progress().map(drop)
    }
    fn send_from(&mut self, header: &Header, data: &[u8]) -> Result<bool> {
        if data.len() != header.len as usize || data.len() > self.half.max || self.reserved {
            return Err(Error::invalid("send", "expected a message that fits, and none reserved"));
        }
        self.progress()?;
        Ok(self.out.is_empty() && self.write(&[bytemuck::bytes_of(header), data].concat())?)
    }
    fn sends_from_caller(&self, _bytes: usize) -> bool {
        true
    }
    fn progress(&mut self) -> Result<bool> {
        self.half.alive("send")?;
        let (out, before) = (std::mem::take(&mut self.out), self.sent);
        if out.is_empty() || self.write(&out)? {
            return Ok(!out.is_empty());
        }
        self.out = out;
        Ok(self.sent > before)
    }
    fn is_flushed(&self) -> bool {
        self.out.is_empty()
    }
    fn check_peer(&mut self) -> Result<()> {
        let mut fds = [PollFd::new(&self.half.socket, PollFlags::RDHUP)];
        if matches!(rustix::event::poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })), Ok(1..)) {
            self.half.lost = Some("it closed the link".to_owned());
        }
        self.half.alive("send")
    }
    fn arm(&mut self) -> Result<bool> {
        self.progress().map(|moved| moved || !self.full)
    }
    fn interest(&self) -> Interest {
        self.half.interest(false, self.full)
    }
}

/// recv.rs: takes in as many messages as the link is deep.
#[derive(Debug)]
struct ToyRecv {
    half: Half,
    /// The message that comes, and how much of it is here.
    head: [u8; 32],
    body: Vec<u64>,
    got: usize,
    ready: VecDeque<(Header, Vec<u64>)>,
    depth: usize,
}

impl RecvLink for ToyRecv {
    fn peer(&self) -> &Peer {
        &self.half.peer
    }
    fn peek(&mut self) -> Result<Option<(Header, &[u8])>> {
        self.progress()?;
        Ok(self.ready.front().map(|(header, body)| (*header, &bytemuck::cast_slice(body)[..header.len as usize])))
    }
    fn release(&mut self) -> Result<()> {
        self.ready.pop_front().map(drop).ok_or_else(|| Error::invalid("receive", "expected a peeked message"))
    }
    fn recv_into(&mut self, expected: &Header, dst: &mut [u8]) -> Result<Received> {
        if dst.len() != expected.len as usize {
            return Err(Error::invalid("receive", "expected memory for the message"));
        }
        match self.peek()? {
            None => return Ok(Received::Pending),
            Some((header, _)) if !expected.agrees_with(&header) => return Ok(Received::Mismatch(header)),
            Some((_, payload)) => dst.copy_from_slice(payload),
        }
        self.release().map(|()| Received::Done)
    }
    fn progress(&mut self) -> Result<bool> {
        let mut moved = false;
        while self.half.lost.is_none() && self.ready.len() < self.depth {
            let header: Header = bytemuck::cast(self.head);
            let rest = match self.got.checked_sub(Header::BYTES) {
                None => &mut self.head[self.got..],
                Some(got) => &mut bytemuck::cast_slice_mut(&mut self.body)[got..header.len as usize],
            };
            if !rest.is_empty() {
                let result = (&self.half.socket).read(rest);
                let n = self.half.moved(result);
                (self.got, moved) = (self.got + n, moved || n > 0);
                if n == 0 {
                    break;
                }
            }
            let header: Header = bytemuck::cast(self.head);
            if self.got == Header::BYTES {
                if header.len as usize > self.half.max {
                    self.half.lost = Some(format!("it sent {header}"));
                    break;
                }
                self.body = vec![0; (header.len as usize).div_ceil(8)];
            }
            if self.got == Header::BYTES + header.len as usize {
                self.ready.push_back((header, std::mem::take(&mut self.body)));
                self.got = 0;
            }
        }
        if self.ready.is_empty() { self.half.alive("receive").map(|()| moved) } else { Ok(moved) }
    }
    fn check_peer(&mut self) -> Result<()> {
        self.progress().map(drop)
    }
    fn arm(&mut self) -> Result<bool> {
        self.progress()?;
        Ok(!self.ready.is_empty())
    }
    fn interest(&self) -> Interest {
        self.half.interest(true, false)
    }
}
