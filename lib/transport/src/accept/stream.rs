//! The handshake over a stream of bytes: what a dialer does, and the connection that an acceptor keeps.

use std::any::Any;
use std::fmt;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::RecvFlags;

use super::conn::Conn;
use super::handshake::{Caller, Reply};
use crate::Peer;
use crate::seal::{self, Socket};
use crate::wait::Wait;
use tinynccl_plan::error::Error;
use tinynccl_sys::fork::Kept;
use tinynccl_sys::secret::Proof;

/// Why a stream is at its end.
pub(crate) const CLOSED: &str = "it closed the connection";

/// A connected non-blocking socket that carries bytes.
pub trait Stream: Read + Write + AsFd + Send + fmt::Debug + 'static {}

impl<S: Read + Write + AsFd + Send + fmt::Debug + 'static> Stream for S {}

/// Why a dialed address did not do.
pub enum Failure {
    /// No process listens there, or not the one meant.
    Wrong(String),
    /// It may work later.
    Slow(String),
    /// The process meant, which has proven itself, does not want the connection.
    Refused(String),
    /// No use to go on.
    Final(Error),
}

impl Failure {
    /// Why, in words.
    pub fn text(self) -> String {
        match self {
            Failure::Wrong(text) | Failure::Slow(text) | Failure::Refused(text) => text,
            Failure::Final(e) => e.to_string(),
        }
    }

    /// The error of connecting to `peer`, which has no other address.
    pub(crate) fn of(self, peer: &Peer) -> Error {
        match self {
            Failure::Final(e) => e,
            Failure::Refused(detail) => peer.protocol("connect", detail),
            Failure::Wrong(detail) | Failure::Slow(detail) => peer.lost("connect", &detail),
        }
    }
}

impl From<Error> for Failure {
    fn from(e: Error) -> Self {
        Failure::Final(e)
    }
}

/// The socket whose handshake has to seal it, if the stream is one.
pub(crate) fn due(stream: &mut dyn Any) -> Option<&mut Socket> {
    stream.downcast_mut::<Socket>().filter(|socket| socket.is_due())
}

/// The socket of a connection, if [`due`].
pub(crate) fn due_of(conn: &mut dyn Conn) -> Option<&mut Socket> {
    let conn: &mut dyn Any = conn;
    due(&mut *conn.downcast_mut::<StreamConn<Socket>>()?.socket)
}

/// Sends the hello, proves that we know the secret once the acceptor has, and waits for its welcome.
pub(crate) fn greet<S: Stream>(socket: &mut S, caller: &Caller<'_>, wait: &Wait<'_>) -> Result<(), Failure> {
    let proof = hail(socket, caller, wait)?;
    enter(socket, &proof, caller, wait)
}

/// The first half: our proof, which the acceptor has not seen, so that it has taken nothing in.
pub(crate) fn hail<S: Stream>(socket: &mut S, caller: &Caller<'_>, wait: &Wait<'_>) -> Result<Proof, Failure> {
    let sealed = caller.sealable && due(socket).is_some();
    let caller = caller.fresh(sealed)?;
    let hello = bytemuck::bytes_of(&caller.hello);
    let opening = if sealed { Some(seal::begin(&caller.secret, hello)?) } else { None };
    let message = opening.as_ref().map_or(&[][..], |(_, message)| message);
    write(socket, &[hello, message].concat())?;
    match recv_reply(socket, wait)? {
        Reply::Prove(challenge, theirs) => {
            let mut binding = None;
            match (opening, theirs) {
                (None, None) => {}
                (Some((opening, _)), Some(theirs)) => {
                    let keys = opening.finish(&theirs).map_err(Failure::Wrong)?;
                    binding = Some(keys.binding);
                    if let Some(socket) = due(socket) {
                        socket.seal(keys);
                    }
                }
                // Something between the two has changed the answer: what is to be sealed is not sent in clear text.
                _ => return Err(Failure::Wrong("expected an answer that is encrypted as the hello was".to_owned())),
            }
            let binding = binding.as_ref().map_or(&[][..], |binding| binding);
            caller.answer(&challenge, binding).map_err(Failure::Wrong)
        }
        // A process that has not proven itself is not the peer: the next address may be.
        Reply::Stranger(detail) => Err(Failure::Wrong(format!("refused: {detail}"))),
        _ => Err(Failure::Wrong("expected a challenge".to_owned())),
    }
}

/// The second half: sends the proof and the attachment, and waits for the acceptor's welcome.
pub(crate) fn enter<S: Stream>(
    socket: &mut S,
    proof: &Proof,
    caller: &Caller<'_>,
    wait: &Wait<'_>,
) -> Result<(), Failure> {
    write(socket, &[proof, caller.attached].concat())?;
    match recv_reply(socket, wait)? {
        Reply::Welcome => Ok(()),
        Reply::Stranger(detail) => Err(Failure::Wrong(format!("refused: {detail}"))),
        Reply::Refused(detail) => Err(Failure::Refused(detail)),
        Reply::Prove(..) => Err(Failure::Wrong("expected a welcome".to_owned())),
    }
}

/// Writes `bytes` at once: a new connection's send buffer holds a hello, a proof and an attachment.
fn write<S: Stream>(socket: &mut S, bytes: &[u8]) -> Result<(), Failure> {
    socket.write_all(bytes).map_err(|e| Failure::Slow(e.to_string()))
}

/// Receives the next reply. A process that does not speak our protocol is not the peer.
pub(crate) fn recv_reply<S: Stream>(socket: &mut S, wait: &Wait<'_>) -> Result<Reply, Failure> {
    // The peer answers once its own thread asks for the link.
    let late = "it took the connection and has not asked for this link yet";
    let mut bytes = vec![0; Reply::HEAD];
    read_exact(socket, &mut bytes, wait, late)?;
    let mut detail = vec![0; Reply::detail_len(&bytes).map_err(Failure::Wrong)?];
    read_exact(socket, &mut detail, wait, late)?;
    bytes.extend(detail);
    Reply::parse(&bytes).map_err(Failure::Wrong)
}

/// Fills `bytes`, for as long as the whole wait lasts; `late` says what has not come when that is over.
pub(crate) fn read_exact<S: Stream>(
    socket: &mut S,
    bytes: &mut [u8],
    wait: &Wait<'_>,
    late: &str,
) -> Result<(), Failure> {
    let mut got = 0;
    while let Some(rest) = bytes.get_mut(got..).filter(|r| !r.is_empty()) {
        match socket.read(rest) {
            Ok(0) => return Err(Failure::Wrong(CLOSED.to_owned())),
            Ok(n) => got += n,
            Err(e) if e.kind() == ErrorKind::WouldBlock => {
                wait.ready(socket, PollFlags::IN, wait.left(), || late.to_owned())?;
            }
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) if e.kind() == ErrorKind::UnexpectedEof => return Err(Failure::Wrong(e.to_string())),
            // Not what the peer has sealed: it has proven itself, and takes this connection for the one that it wants.
            Err(e) if e.kind() == ErrorKind::InvalidData => return Err(Failure::Refused(e.to_string())),
            Err(e) => return Err(Failure::Slow(e.to_string())),
        }
    }
    Ok(())
}

/// A connection over a stream of bytes that waits for its link.
#[derive(Debug)]
pub struct StreamConn<S> {
    socket: Kept<S>,
    address: String,
    /// Bytes being read, of which `got` have come.
    bytes: Vec<u8>,
    got: usize,
}

impl<S: Stream> StreamConn<S> {
    /// `socket` must not block; `address` is the dialer's, in words.
    pub fn new(socket: S, address: String) -> StreamConn<S> {
        StreamConn { socket: Kept::new(socket), address, bytes: Vec::new(), got: 0 }
    }

    /// The stream, once the handshake is over.
    pub fn into_inner(self) -> S {
        self.socket.into_inner()
    }
}

impl<S: Stream> Conn for StreamConn<S> {
    fn read(&mut self, bytes: &mut [u8]) -> Result<bool, String> {
        self.bytes.resize(bytes.len(), 0);
        while let Some(rest) = self.bytes.get_mut(self.got..).filter(|r| !r.is_empty()) {
            match self.socket.read(rest) {
                Ok(0) => return Err(format!("closed after {} bytes", self.got)),
                Ok(n) => self.got += n,
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e.to_string()),
            }
        }
        self.got = 0;
        bytes.iter_mut().zip(&self.bytes).for_each(|(to, from)| *to = *from);
        Ok(true)
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), String> {
        self.socket.write_all(bytes).map_err(|e| e.to_string())
    }

    fn address(&self) -> String {
        self.address.clone()
    }

    fn is_gone(&self) -> bool {
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        !matches!(rustix::net::recv(&*self.socket, &mut [0u8; 1], flags), Err(Errno::AGAIN))
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
