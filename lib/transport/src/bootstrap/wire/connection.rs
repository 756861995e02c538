//! A connection that carries frames over a non-blocking TCP stream; the store and the ranks use the same.
//!
//! It can go on over another stream: each side keeps the bytes that it queued until the other acknowledges them, and
//! counts those that it took itself.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::frame::{self, Decoder};
use crate::seal::{Keys, Socket};
use tinynccl_sys::fork::Kept;

/// Most bytes that may wait for a peer that does not take them.
const MAX_KEPT: usize = 64 << 20;
/// Number of bytes after which we acknowledge to the peer that we took them.
const MUCH: u64 = 64 << 10;
/// A peer whose kernel is silent for this long is lost, with its host or all paths to it.
pub(crate) const LOST: Duration = Duration::from_secs(30);
/// Interval of the kernel's keepalive probes to an idle peer.
const PROBE: Duration = Duration::from_secs(5);
/// The kernel's own limit must not end a connection that may go on over another stream: one that it gives up looks to
/// the peer like a process that ended. (Zero would leave it to the number of repetitions, which the host's settings
/// may make small.)
const NEVER: Duration = Duration::from_secs(10 * 24 * 3600);

/// A framed connection.
#[derive(Debug)]
pub(crate) struct Connection {
    stream: Kept<Socket>,
    pub(crate) decoder: Decoder,
    /// Queued bytes, from byte `took` of the connection on.
    kept: Vec<u8>,
    /// Number of bytes at the begin of `kept` that the kernel has taken.
    sent: usize,
    /// Bytes of ours that the peer has acknowledged.
    took: u64,
    /// Bytes of the peer's that we have acknowledged.
    told: u64,
    /// Bytes that this stream has sent.
    written: u64,
    /// Bytes of them that the peer's kernel has, and when that number last changed, or nothing was missing.
    arrived: (u64, Instant),
    /// Error of the first write that failed. The kernel reports it once, and after that only that the stream is over.
    broke: Option<io::ErrorKind>,
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
    /// `encrypt`: its handshake seals it ([`Connection::seal`]).
    pub(crate) fn new(stream: TcpStream, encrypt: bool) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        // For `silent_for`: so a peer whose host vanished is noticed, busy or idle.
        let socket = socket2::SockRef::from(&stream);
        socket.set_tcp_keepalive(&socket2::TcpKeepalive::new().with_time(PROBE).with_interval(PROBE))?;
        socket.set_tcp_user_timeout(Some(NEVER))?;
        let stream = Kept::new(Socket::new(stream, encrypt));
        Ok(Connection {
            stream,
            decoder: Decoder::default(),
            kept: Vec::new(),
            sent: 0,
            took: 0,
            told: 0,
            written: 0,
            arrived: (0, Instant::now()),
            broke: None,
        })
    }

    /// True if its handshake has to seal it.
    pub(crate) fn is_due(&self) -> bool {
        self.stream.is_due()
    }

    /// Seals what follows in both directions. What came and went before must have been in clear text.
    pub(crate) fn seal(&mut self, keys: Keys) -> Result<(), String> {
        if self.has_unsent() || !self.decoder.is_empty() {
            return Err("bytes in clear text came behind the handshake, or could not be sent".to_owned());
        }
        self.stream.seal(keys);
        Ok(())
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    /// Takes in what has arrived, up to 64 KiB.
    pub(crate) fn fill(&mut self) -> io::Result<Fill> {
        let mut chunk = [0; 64 << 10];
        loop {
            return match self.stream.read(&mut chunk) {
                Ok(0) => self.broke.map_or(Ok(Fill::End), |kind| Err(kind.into())),
                Ok(n) => {
                    self.decoder.extend(chunk.get(..n).unwrap_or_default());
                    // No poll shows what is opened already.
                    if self.stream.has_opened() {
                        continue;
                    }
                    Ok(Fill::Open)
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(Fill::Open),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                // Encrypted, and cut: without a goodbye every end is that of a process that is gone, or was cut off.
                Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => Ok(Fill::End),
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

    /// Returns the next message that is here whole; `Err` describes a violation of the protocol.
    pub(crate) fn next<T: DeserializeOwned>(&mut self, limit: usize) -> Result<Option<T>, String> {
        let Some(body) = self.decoder.frame(limit)? else { return Ok(None) };
        serde_json::from_slice(&body).map(Some).map_err(|e| format!("a message that this version does not know: {e}"))
    }

    /// Queues bytes as they are.
    pub(crate) fn queue_bytes(&mut self, bytes: &[u8]) -> Result<(), String> {
        if self.kept.len() + bytes.len() > MAX_KEPT {
            return Err(format!("it has not read its last {MAX_KEPT} bytes"));
        }
        self.kept.extend_from_slice(bytes);
        Ok(())
    }

    /// Queues a message.
    pub(crate) fn queue(&mut self, message: &impl Serialize) -> Result<(), String> {
        self.queue_bytes(&encode(message)?)
    }

    /// Sends what the kernel takes now; `true` when nothing is left.
    pub(crate) fn flush(&mut self) -> io::Result<bool> {
        while let Some(rest) = self.kept.get(self.sent..).filter(|r| !r.is_empty()) {
            match self.stream.write(rest) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(n) => {
                    if self.arrived.0 == self.written {
                        self.arrived.1 = Instant::now();
                    }
                    self.sent += n;
                    self.written += n as u64;
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => {
                    self.broke.get_or_insert(e.kind());
                    return Err(e);
                }
            }
        }
        Ok(true)
    }

    /// True when [`Connection::flush`] has something to do.
    pub(crate) fn has_unsent(&self) -> bool {
        self.sent < self.kept.len()
    }

    /// Returns the number of bytes that we have taken, which the caller must send to the peer.
    pub(crate) fn account(&mut self) -> u64 {
        self.told = self.decoder.taken();
        self.told
    }

    /// Returns [`Connection::account`], if the peer keeps more than 64 KiB that we have taken.
    pub(crate) fn due_account(&mut self) -> Option<u64> {
        (self.decoder.taken() - self.told > MUCH).then(|| self.account())
    }

    /// Drops the bytes that the peer has acknowledged: the first `taken` of the connection. An older number may come
    /// behind a newer one: after [`Connection::go_on`] the bytes sent before come once more.
    pub(crate) fn settle(&mut self, taken: u64) -> Result<(), String> {
        self.settle_to(taken.max(self.took))
    }

    fn settle_to(&mut self, taken: u64) -> Result<(), String> {
        let settled = taken.checked_sub(self.took).and_then(|n| usize::try_from(n).ok());
        let Some(settled) = settled.filter(|n| *n <= self.kept.len()) else {
            let (from, to) = (self.took, self.took + self.kept.len() as u64);
            return Err(format!("it says that it took {taken} bytes, where {from} to {to} are possible"));
        };
        // It expects those that came over the former stream, and are in flight again, from this one, too.
        let settled = settled.min(self.sent);
        self.kept.drain(..settled);
        self.sent -= settled;
        self.took += settled as u64;
        Ok(())
    }

    /// Returns the time for which the peer's kernel has acknowledged no byte in flight; about 0 while there is none.
    pub(crate) fn stuck_for(&mut self) -> Duration {
        let arrived = self.written.saturating_sub(unacknowledged(&*self.stream));
        if arrived != self.arrived.0 || arrived == self.written {
            self.arrived = (arrived, Instant::now());
        }
        self.arrived.1.elapsed()
    }

    /// Returns the time since the last segment from the peer's kernel, data or acknowledgement.
    pub(crate) fn silent_for(&self) -> Duration {
        // SAFETY: integers alone, for which zeros are values.
        let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
        let mut len = size_of_val(&info) as libc::socklen_t;
        let fd = self.stream.as_raw_fd();
        // SAFETY: the kernel writes at most `len` bytes, into a value of ours of this length.
        let status =
            unsafe { libc::getsockopt(fd, libc::IPPROTO_TCP, libc::TCP_INFO, (&raw mut info).cast(), &raw mut len) };
        let silence = if status == 0 { info.tcpi_last_data_recv.min(info.tcpi_last_ack_recv) } else { 0 };
        Duration::from_millis(silence.into())
    }

    /// Goes on over the stream of `other`, where the peer sends from byte `from` of this connection on, and has taken
    /// `taken` of our bytes. `other` gets the former stream.
    pub(crate) fn go_on(&mut self, other: &mut Connection, taken: u64, from: u64) -> Result<(), String> {
        // Nothing that the peer has taken goes over the new stream.
        let sent = std::mem::replace(&mut self.sent, self.kept.len());
        self.settle_to(taken).inspect_err(|_| self.sent = sent)?;
        self.decoder.go_on(&other.decoder, from)?;
        std::mem::swap(&mut self.stream, &mut other.stream);
        (self.sent, self.written, self.arrived, self.broke) = (0, 0, (0, Instant::now()), None);
        Ok(())
    }

    /// Ends our direction; what was flushed still arrives.
    pub(crate) fn end_of_stream(&self) {
        // It fails when the peer is gone already: nothing to end then.
        let _ = self.stream.shutdown(Shutdown::Write);
    }

    /// Returns the events to poll for.
    pub(crate) fn interest(&self) -> PollFlags {
        if self.has_unsent() { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN }
    }
}

/// Bytes that a TCP socket has sent, or has to, and the peer's kernel has not acknowledged.
pub(crate) fn unacknowledged(socket: impl AsFd) -> u64 {
    let mut bytes: libc::c_int = 0;
    // SAFETY: writes the number of bytes into a variable of ours.
    let status = unsafe { libc::ioctl(socket.as_fd().as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    if status == 0 { bytes.max(0) as u64 } else { 0 }
}

/// Text for a peer that is lost after [`LOST`].
pub(crate) const GONE_HOST: &str = "its host does not answer any more";

/// A message as a frame.
pub(crate) fn encode(message: &impl Serialize) -> Result<Vec<u8>, String> {
    let body = serde_json::to_vec(message).map_err(|e| e.to_string())?;
    let mut frame = Vec::with_capacity(body.len() + 4);
    frame::put_frame(&mut frame, &body)?;
    Ok(frame)
}

/// Returns true if an error of a connection is one of the path to the peer, and says nothing about its process.
pub(crate) fn is_of_the_path(error: &io::Error) -> bool {
    use io::ErrorKind::{HostUnreachable, NetworkDown, NetworkUnreachable, TimedOut};
    matches!(error.kind(), TimedOut | HostUnreachable | NetworkUnreachable | NetworkDown)
}

/// Returns a text for the error of a connection: its meaning for the peer.
pub(crate) fn broken(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
            "its connection to the store was reset: the process ended or was killed".to_owned()
        }
        _ if is_of_the_path(error) => GONE_HOST.to_owned(),
        _ => format!("its connection to the store failed: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use proptest::prelude::*;

    use super::*;

    fn pair(sealed: bool) -> [Connection; 2] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut both = [one, listener.accept().unwrap().0].map(|stream| Connection::new(stream, sealed).unwrap());
        if sealed {
            both.iter_mut().zip(crate::seal::keys()).for_each(|(end, keys)| end.seal(keys).unwrap());
        }
        both
    }

    #[derive(Debug, Clone)]
    enum Step {
        /// Queues a message of about this many bytes.
        Queue(usize),
        Flush,
        Fill,
        Take,
        /// Acknowledges to the other side the bytes that this one has taken.
        Settle,
    }

    fn step() -> impl Strategy<Value = Step> {
        use Step::*;
        prop_oneof![(0usize..40_000).prop_map(Queue), Just(Flush), Just(Fill), Just(Take), Just(Settle)]
    }

    /// Both sides, and the numbers of their messages that were queued and taken.
    struct Both {
        sides: [Connection; 2],
        queued: [u64; 2],
        taken: [u64; 2],
        sealed: bool,
    }

    impl Both {
        fn step(&mut self, side: usize, step: &Step) {
            match step {
                Step::Queue(bytes) => {
                    let message = (self.queued[side], "x".repeat(*bytes));
                    self.sides[side].queue(&message).unwrap();
                    self.queued[side] += 1;
                }
                Step::Flush => drop(self.sides[side].flush().unwrap()),
                Step::Fill => assert_eq!(self.sides[side].fill().unwrap(), Fill::Open),
                Step::Take => {
                    if let Some((number, _)) = self.sides[side].next::<(u64, String)>(frame::MAX_FRAME).unwrap() {
                        assert_eq!(number, self.taken[side]);
                        self.taken[side] += 1;
                    }
                }
                Step::Settle => {
                    let taken = self.sides[side].account();
                    self.sides[1 - side].settle(taken).unwrap();
                }
            }
        }

        /// Resumes as `resume.rs` does; side 1, the store, may do `meanwhile` over the former stream.
        fn go_on(&mut self, meanwhile: &[Step]) {
            let [mut rank, mut store] = pair(self.sealed);
            let told = self.sides[1].account();
            let took = self.sides[0].account();
            self.sides[0].go_on(&mut rank, told, took).unwrap();
            // Its stream ends when the rank receives more from the store: not yet.
            meanwhile.iter().for_each(|step| self.step(1, step));
            self.sides[1].go_on(&mut store, took, told).unwrap();
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]
        #[test]
        fn nothing_is_lost_or_doubled_over_any_streams(
            rounds in prop::collection::vec(
                (prop::collection::vec((0usize..2, step()), 0..60), prop::collection::vec(step(), 0..8)),
                1..5,
            ),
            sealed: bool,
        ) {
            let mut both = Both { sides: pair(sealed), queued: [0; 2], taken: [0; 2], sealed };
            for (steps, meanwhile) in &rounds {
                steps.iter().for_each(|(side, step)| both.step(*side, step));
                both.go_on(meanwhile);
            }
            let start = Instant::now();
            while both.taken != [both.queued[1], both.queued[0]] || both.sides.iter().any(|side| !side.kept.is_empty()) {
                assert!(start.elapsed() < Duration::from_secs(30), "{:?} of {:?}", both.taken, both.queued);
                for side in 0..2 {
                    [Step::Flush, Step::Fill, Step::Take, Step::Settle].iter().for_each(|step| both.step(side, step));
                }
            }
        }
    }

    #[test]
    fn nothing_in_clear_text_comes_behind_the_handshake_of_an_encrypted_connection() {
        for early in [true, false] {
            let [mut one, mut other] = pair(false);
            let [keys, _] = crate::seal::keys();
            one.queue(&"unsealed").unwrap();
            if early {
                // Bytes that are not sent yet.
                assert!(one.seal(keys).is_err());
                continue;
            }
            assert!(one.flush().unwrap());
            while other.decoder.is_empty() {
                other.fill().unwrap();
            }
            assert!(other.seal(keys).unwrap_err().contains("clear text"));
        }
    }

    #[test]
    fn counts_that_cannot_be_are_refused() {
        let [mut one, mut other] = pair(false);
        one.queue(&"four").unwrap();
        assert!(one.settle(11).unwrap_err().contains("where 0 to 10 are possible"));
        one.flush().unwrap();
        one.settle(10).unwrap();
        // An older count, which came behind a newer one, is none.
        one.settle(9).unwrap();
        assert!(one.settle(11).unwrap_err().contains("where 10 to 10 are possible"));
        let [mut new, _end] = pair(false);
        // Bytes that are not kept any more cannot be sent again.
        assert!(one.go_on(&mut new, 9, 0).unwrap_err().contains("where 10 to 10 are possible"));
        // Then all is as it was.
        one.queue(&"more").unwrap();
        assert!(one.go_on(&mut new, 99, 0).unwrap_err().contains("where 10 to 20 are possible"));
        assert!(one.has_unsent() && one.flush().unwrap());
        while other.decoder.frame(10).unwrap().is_none() {
            other.fill().unwrap();
        }
        assert!(other.go_on(&mut new, 0, 11).unwrap_err().contains("goes on at byte 11, after 10"));
    }
}
