//! One non-blocking TCP connection that carries frames; the store and the ranks use the same.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use rustix::event::PollFlags;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::frame::{self, Decoder};
use crate::fork::Kept;

/// Most bytes that may wait for a peer that does not read.
const MAX_UNSENT: usize = 64 << 20;

/// A framed connection.
#[derive(Debug)]
pub(crate) struct Connection {
    stream: Kept<TcpStream>,
    pub(crate) decoder: Decoder,
    unsent: Vec<u8>,
    sent: usize,
}

/// Outcome of [`Connection::fill`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fill {
    /// Still open.
    Open,
    /// The peer will send no more.
    End,
}

impl Connection {
    pub(crate) fn new(stream: TcpStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        // A peer whose host vanished is noticed within half a minute, busy or idle.
        let socket = socket2::SockRef::from(&stream);
        let keepalive = socket2::TcpKeepalive::new()
            .with_time(Duration::from_secs(10))
            .with_interval(Duration::from_secs(5))
            .with_retries(3);
        socket.set_tcp_keepalive(&keepalive)?;
        #[cfg(target_os = "linux")]
        socket.set_tcp_user_timeout(Some(Duration::from_secs(30)))?;
        let stream = Kept::new(stream);
        Ok(Connection { stream, decoder: Decoder::default(), unsent: Vec::new(), sent: 0 })
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    /// Takes in what has arrived, up to 64 KiB.
    pub(crate) fn fill(&mut self) -> io::Result<Fill> {
        let mut chunk = [0; 64 << 10];
        loop {
            return match self.stream.read(&mut chunk) {
                Ok(0) => Ok(Fill::End),
                Ok(n) => {
                    self.decoder.extend(chunk.get(..n).unwrap_or_default());
                    Ok(Fill::Open)
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(Fill::Open),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) => Err(e),
            };
        }
    }

    /// Throws away what has arrived; the number of bytes, or `None` when the peer will send no more.
    pub(crate) fn discard(&mut self) -> io::Result<Option<usize>> {
        let mut chunk = [0; 4 << 10];
        match self.stream.read(&mut chunk) {
            Ok(0) => Ok(None),
            Ok(n) => Ok(Some(n)),
            Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => Ok(Some(0)),
            Err(e) => Err(e),
        }
    }

    /// The next message that is here whole; `Err` says how it breaks the protocol.
    pub(crate) fn next<T: DeserializeOwned>(&mut self, limit: usize) -> Result<Option<T>, String> {
        let Some(body) = self.decoder.frame(limit)? else { return Ok(None) };
        serde_json::from_slice(&body).map(Some).map_err(|e| format!("a message that this version does not know: {e}"))
    }

    /// Queues bytes as they are.
    pub(crate) fn queue_bytes(&mut self, bytes: &[u8]) -> Result<(), String> {
        if self.unsent.len() - self.sent + bytes.len() > MAX_UNSENT {
            return Err(format!("it has not read its last {MAX_UNSENT} bytes"));
        }
        self.unsent.extend_from_slice(bytes);
        Ok(())
    }

    /// Queues a message.
    pub(crate) fn queue(&mut self, message: &impl Serialize) -> Result<(), String> {
        self.queue_bytes(&encode(message)?)
    }

    /// Sends what the kernel takes now; `true` when nothing is left.
    pub(crate) fn flush(&mut self) -> io::Result<bool> {
        while let Some(rest) = self.unsent.get(self.sent..).filter(|r| !r.is_empty()) {
            match self.stream.write(rest) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(n) => self.sent += n,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        self.unsent.clear();
        self.sent = 0;
        Ok(true)
    }

    /// True when [`Connection::flush`] has something to do.
    pub(crate) fn has_unsent(&self) -> bool {
        self.sent < self.unsent.len()
    }

    /// Ends our direction; what was flushed still arrives.
    pub(crate) fn end_of_stream(&self) {
        // It fails when the peer is gone already: nothing to end then.
        let _ = self.stream.shutdown(Shutdown::Write);
    }

    /// What to poll for.
    pub(crate) fn interest(&self) -> PollFlags {
        if self.has_unsent() { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN }
    }
}

/// A message as a frame.
pub(crate) fn encode(message: &impl Serialize) -> Result<Vec<u8>, String> {
    let body = serde_json::to_vec(message).map_err(|e| e.to_string())?;
    let mut frame = Vec::with_capacity(body.len() + 4);
    frame::put_frame(&mut frame, &body)?;
    Ok(frame)
}

/// What an error of a connection means for the peer, in words.
pub(crate) fn broken(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
            "its connection to the store was reset: the process ended or was killed".to_owned()
        }
        io::ErrorKind::TimedOut => "its host does not answer any more".to_owned(),
        _ => format!("its connection to the store failed: {error}"),
    }
}
