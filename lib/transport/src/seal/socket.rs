//! A TCP connection whose bytes may be sealed: it sends and receives as the kernel's socket does, without blocking.

use std::fmt;
use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Mutex;

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags};

use super::noise::Keys;
use super::record::{Forged, Opener, Sealer, records};
use tinynccl_sys::threads::lock;

/// Reason for which a socket sends or receives nothing more, or not now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// Error of the kernel.
    Os(Errno),
    /// Something came that the peer has not sealed.
    Forged(Forged),
    /// The stream ended, and the peer has not sealed its end.
    Cut,
    /// The connection's numbers are used up.
    Spent(&'static str),
}

impl Fault {
    /// The socket has nothing, or takes nothing, now.
    pub(crate) const AGAIN: Fault = Fault::Os(Errno::AGAIN);
    /// A signal came: the call is made again.
    pub(crate) const INTR: Fault = Fault::Os(Errno::INTR);
    /// The peer does not receive any more.
    pub(crate) const PIPE: Fault = Fault::Os(Errno::PIPE);
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fault::Os(e) => e.fmt(f),
            Fault::Forged(forged) => forged.fmt(f),
            Fault::Cut => f.write_str(
                "it closed the connection without an encrypted end: its process ended or was killed, or something on the way cut it",
            ),
            Fault::Spent(why) => f.write_str(why),
        }
    }
}

impl From<Fault> for io::Error {
    fn from(fault: Fault) -> io::Error {
        match fault {
            Fault::Os(e) => e.into(),
            Fault::Cut => io::Error::new(ErrorKind::UnexpectedEof, fault.to_string()),
            Fault::Forged(_) | Fault::Spent(_) => io::Error::new(ErrorKind::InvalidData, fault.to_string()),
        }
    }
}

/// State of a connection's encryption.
#[derive(Debug)]
enum Seal {
    Off,
    /// Only the handshake that makes the keys goes in clear text.
    Due,
    /// The directions have locks of their own: two threads may use them.
    On(Box<Sealed>),
}

#[derive(Debug)]
struct Sealed {
    out: Mutex<Out>,
    into: Mutex<Opener>,
}

#[derive(Debug)]
struct Out {
    sealer: Sealer,
    ended: bool,
}

/// A connected socket that does not block.
#[derive(Debug)]
pub(crate) struct Socket {
    tcp: TcpStream,
    seal: Seal,
}

impl Socket {
    /// `encrypt`: it is sealed by its handshake ([`Socket::seal`]).
    pub(crate) fn new(tcp: TcpStream, encrypt: bool) -> Socket {
        Socket { tcp, seal: if encrypt { Seal::Due } else { Seal::Off } }
    }

    /// Seals what follows in both directions.
    pub(crate) fn seal(&mut self, keys: Keys) {
        let (sealer, opener) = records(keys);
        let out = Mutex::new(Out { sealer, ended: false });
        self.seal = Seal::On(Box::new(Sealed { out, into: Mutex::new(opener) }));
    }

    /// True if its handshake has to seal it.
    pub(crate) fn is_due(&self) -> bool {
        matches!(self.seal, Seal::Due)
    }

    /// The connection itself: for its addresses and settings, not for its bytes.
    pub(crate) fn tcp(&self) -> &TcpStream {
        &self.tcp
    }

    /// The connection, for bytes that are not ours to seal: those of others that it relays, and of RDMA links.
    pub(crate) fn into_plain(self) -> TcpStream {
        self.tcp
    }

    /// Sends both parts, one after the other, as far as the kernel takes them; how many bytes. Sealed, the last byte
    /// counts when the kernel has the whole record: a caller that goes on with what is left loses nothing.
    #[inline]
    pub(crate) fn send(&self, head: &[u8], data: &[u8], flags: SendFlags) -> Result<usize, Fault> {
        match &self.seal {
            Seal::Off | Seal::Due => write(&self.tcp, head, data, flags).map_err(Fault::Os),
            Seal::On(sealed) => lock(&sealed.out).offer(&self.tcp, (head, data), flags),
        }
    }

    /// Receives to `first`, then to `then`, what has come; how many bytes, 0 at the peer's end of the stream. If fewer
    /// than there is room for, there is nothing more at the moment.
    #[inline]
    pub(crate) fn recv(&self, first: &mut [u8], then: &mut [u8]) -> Result<usize, Fault> {
        match &self.seal {
            Seal::Off | Seal::Due => read(&self.tcp, first, then).map_err(Fault::Os),
            Seal::On(sealed) => lock(&sealed.into).recv(&self.tcp, first, then),
        }
    }

    /// True if there is something to receive which no poll shows: it has left the kernel.
    #[inline]
    pub(crate) fn has_opened(&self) -> bool {
        match &self.seal {
            Seal::Off | Seal::Due => false,
            Seal::On(sealed) => lock(&sealed.into).has_some(),
        }
    }

    /// Ends our direction, both or the other one. The peer sees a sealed end, unless the kernel has no room for it.
    pub(crate) fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        if let (Seal::On(sealed), Shutdown::Write) = (&self.seal, how) {
            lock(&sealed.out).end(&self.tcp);
        }
        self.tcp.shutdown(how)
    }

    /// Takes the place of another connection, which the kernel closes; its descriptor stays. Nothing may be in a call
    /// with either.
    pub(crate) fn replace(&self, by: Socket) -> io::Result<()> {
        if std::mem::discriminant(&self.seal) != std::mem::discriminant(&by.seal) {
            return Err(io::Error::other("one of two connections is encrypted"));
        }
        // SAFETY: a system call on two descriptors of ours; the number stays one of a TCP socket. Threads that are in
        // a call with the old one keep that until they are out of it.
        if unsafe { libc::dup3(by.tcp.as_raw_fd(), self.tcp.as_raw_fd(), libc::O_CLOEXEC) } < 0 {
            return Err(io::Error::last_os_error());
        }
        if let (Seal::On(old), Seal::On(new)) = (&self.seal, by.seal) {
            let Sealed { out, into } = *new;
            std::mem::swap(&mut *lock(&old.out), &mut *lock(&out));
            std::mem::swap(&mut *lock(&old.into), &mut *lock(&into));
        }
        Ok(())
    }
}

impl Out {
    /// Seals and sends, as [`Socket::send`].
    fn offer(&mut self, tcp: &TcpStream, (head, data): (&[u8], &[u8]), flags: SendFlags) -> Result<usize, Fault> {
        let mut taken = 0;
        if !self.sealer.rest().is_empty() {
            if !self.flush(tcp, flags)? {
                return Err(Fault::AGAIN);
            }
            // The byte that was left.
            taken = 1;
        }
        let all = head.len() + data.len();
        while taken < all {
            while taken < all && self.sealer.has_room() {
                let rest = head.get(taken..).unwrap_or_default();
                let then = data.get(taken.saturating_sub(head.len())..).unwrap_or_default();
                taken += self.sealer.seal(rest, then).map_err(Fault::Spent)?;
            }
            if !self.flush(tcp, flags)? {
                return if taken > 1 { Ok(taken - 1) } else { Err(Fault::AGAIN) };
            }
        }
        Ok(taken)
    }

    /// Sends what is left of the last records; true when nothing is.
    fn flush(&mut self, tcp: &TcpStream, flags: SendFlags) -> Result<bool, Fault> {
        loop {
            match write(tcp, self.sealer.rest(), &[], flags) {
                Ok(n) => self.sealer.advance(n),
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => return Ok(false),
                Err(e) => return Err(Fault::Os(e)),
            }
            return Ok(self.sealer.rest().is_empty());
        }
    }

    fn end(&mut self, tcp: &TcpStream) {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let clear = self.sealer.rest().is_empty() || matches!(self.flush(tcp, flags), Ok(true));
        if clear && !std::mem::replace(&mut self.ended, true) && self.sealer.seal(&[], &[]).is_ok() {
            // The peer has gone, or takes nothing: it sees a cut.
            let _ = self.flush(tcp, flags);
        }
    }
}

impl Opener {
    fn recv(&mut self, tcp: &TcpStream, first: &mut [u8], then: &mut [u8]) -> Result<usize, Fault> {
        let room = first.len() + then.len();
        let mut got = 0;
        let mut dry = false;
        loop {
            let rest = match first.get_mut(got..) {
                Some(rest) if !rest.is_empty() => rest,
                _ => then.get_mut(got - first.len().min(got)..).unwrap_or_default(),
            };
            match self.read(rest) {
                Ok(n) => got += n,
                Err(_) if got > 0 => return Ok(got),
                Err(e) => return Err(Fault::Forged(e)),
            }
            if got == room || self.has_some() {
                if got == room {
                    return Ok(got);
                }
                continue;
            }
            if dry || self.is_over() {
                break;
            }
            let space = self.space();
            let most = space.len();
            match read(tcp, space, &mut []) {
                Ok(0) if got > 0 => return Ok(got),
                Ok(0) => return Err(Fault::Cut),
                Ok(n) => {
                    self.filled(n);
                    dry = n < most;
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                Err(e) if got == 0 => return Err(Fault::Os(e)),
                Err(_) => return Ok(got),
            }
        }
        if got > 0 || self.is_over() { Ok(got) } else { Err(Fault::AGAIN) }
    }
}

/// One buffer costs the kernel less than two.
fn write(tcp: &TcpStream, head: &[u8], data: &[u8], flags: SendFlags) -> Result<usize, Errno> {
    match (head.is_empty(), data.is_empty()) {
        (true, _) => rustix::net::send(tcp, data, flags),
        (_, true) => rustix::net::send(tcp, head, flags),
        _ => {
            let parts = [IoSlice::new(head), IoSlice::new(data)];
            rustix::net::sendmsg(tcp, &parts, &mut SendAncillaryBuffer::default(), flags)
        }
    }
}

fn read(tcp: &TcpStream, first: &mut [u8], then: &mut [u8]) -> Result<usize, Errno> {
    match (first.is_empty(), then.is_empty()) {
        (true, _) => rustix::net::recv(tcp, then, RecvFlags::DONTWAIT).map(|(n, _)| n),
        (_, true) => rustix::net::recv(tcp, first, RecvFlags::DONTWAIT).map(|(n, _)| n),
        _ => rustix::io::readv(tcp, &mut [IoSliceMut::new(first), IoSliceMut::new(then)]),
    }
}

impl Read for Socket {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        (&*self).read(bytes)
    }
}

impl Read for &Socket {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        if bytes.is_empty() { Ok(0) } else { self.recv(bytes, &mut []).map_err(io::Error::from) }
    }
}

impl Write for Socket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.send(bytes, &[], SendFlags::NOSIGNAL | SendFlags::DONTWAIT).map_err(io::Error::from)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// For polls. What is read from and written to the descriptor itself is not sealed.
impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.tcp.as_fd()
    }
}

impl AsRawFd for Socket {
    fn as_raw_fd(&self) -> RawFd {
        self.tcp.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::time::{Duration, Instant};

    use super::*;
    use crate::seal;

    const FLAGS: SendFlags = SendFlags::NOSIGNAL.union(SendFlags::DONTWAIT);
    const LONG: Duration = Duration::from_secs(60);

    /// Two ends of a connection, with small buffers.
    fn tcp() -> [TcpStream; 2] {
        let listener = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
        // Accepted sockets inherit them.
        listener.set_recv_buffer_size(8 << 10).unwrap();
        listener.bind(&std::net::SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
        listener.listen(1).unwrap();
        let listener = TcpListener::from(listener);
        let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        socket2::SockRef::from(&one).set_send_buffer_size(8 << 10).unwrap();
        let other = listener.accept().unwrap().0;
        one.set_nonblocking(true).unwrap();
        other.set_nonblocking(true).unwrap();
        [one, other]
    }

    fn sealed() -> [Socket; 2] {
        let mut ends = tcp().map(|tcp| Socket::new(tcp, true));
        seal::pair(&mut ends);
        ends
    }

    fn until<T>(mut f: impl FnMut() -> Result<T, Fault>) -> Result<T, Fault> {
        let start = Instant::now();
        loop {
            match f() {
                Err(Fault::AGAIN) => assert!(start.elapsed() < LONG, "nothing comes"),
                other => return other,
            }
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_full_buffer_loses_and_repeats_nothing() {
        for len in [1, 40, 4096, 65_519, 65_520, 1_000_000] {
            let [one, other] = sealed();
            let bytes: Vec<u8> = (0..len).map(|i| (i * 31 + i / 251) as u8).collect();
            let (mut sent, mut got, mut blocked) = (0, Vec::<u8>::new(), 0);
            let start = Instant::now();
            while got.len() < len {
                assert!(start.elapsed() < LONG, "{} of {len} bytes", got.len());
                // What is refused is offered again, as it was: a header and data behind it.
                let (head, data) = bytes[sent..].split_at(bytes[sent..].len().min(32));
                if sent < len {
                    match one.send(head, data, FLAGS) {
                        Ok(n) => sent += n,
                        Err(Fault::AGAIN) => blocked += 1,
                        Err(e) => panic!("{e}"),
                    }
                }
                let (mut first, mut then) = (vec![0; 100], vec![0; 3000]);
                match other.recv(&mut first, &mut then) {
                    Ok(0) => panic!("an end"),
                    Ok(n) => got.extend([first, then].concat().iter().take(n)),
                    Err(Fault::AGAIN) => {}
                    Err(e) => panic!("{e}"),
                }
                // A byte counts as sent when its record has left: then nothing else is needed for it to arrive.
                assert!(sent >= got.len() || sent + 1 == got.len());
            }
            assert!(got == bytes && sent == len);
            assert!(blocked > 0 || len < 1_000_000, "the buffers hold all");
        }
    }

    #[test]
    fn an_end_is_told_from_a_cut() {
        let plain = tcp().map(|tcp| Socket::new(tcp, false));
        plain[0].shutdown(Shutdown::Write).unwrap();
        assert_eq!(until(|| plain[1].recv(&mut [0; 9], &mut [])), Ok(0));
        // With an end of its own.
        let [one, other] = sealed();
        one.send(b"bye", &[], FLAGS).unwrap();
        one.shutdown(Shutdown::Write).unwrap();
        let mut bytes = [0; 9];
        assert_eq!(until(|| other.recv(&mut bytes, &mut [])), Ok(3));
        assert_eq!(until(|| other.recv(&mut bytes, &mut [])), Ok(0));
        assert_eq!(other.recv(&mut bytes, &mut []), Ok(0));
        // Its process is gone, or somebody cut it; between records and within one.
        for within in [false, true] {
            let [one, other] = sealed();
            one.send(b"bye", &[], FLAGS).unwrap();
            if within {
                (&one.tcp).write_all(&[3]).unwrap();
            }
            one.tcp.shutdown(Shutdown::Write).unwrap();
            assert_eq!(until(|| other.recv(&mut bytes, &mut [])), Ok(3));
            assert_eq!(until(|| other.recv(&mut bytes, &mut [])), Err(Fault::Cut));
            assert_eq!(other.recv(&mut bytes, &mut []), Err(Fault::Cut));
            assert!(Fault::Cut.to_string().contains("without an encrypted end"));
        }
    }

    #[test]
    fn bytes_in_clear_text_are_no_records() {
        let [one, other] = sealed();
        (&one.tcp).write_all(&[7; 4000]).unwrap();
        let fault = until(|| other.recv(&mut [0; 9], &mut [])).unwrap_err();
        assert!(matches!(fault, Fault::Forged(_)) && fault.to_string().contains("record 0"), "{fault}");
        assert!(other.has_opened(), "a caller that polls is told");
        let error = io::Error::from(fault);
        assert_eq!(error.kind(), ErrorKind::InvalidData);
    }

    #[test]
    fn both_directions_are_used_by_threads_of_their_own() {
        let ends = sealed();
        std::thread::scope(|s| {
            for (from, to) in [(0, 1), (1, 0)] {
                let [from, to] = [&ends[from], &ends[to]];
                s.spawn(move || {
                    let bytes = vec![5; 300_000];
                    let mut sent = 0;
                    while sent < bytes.len() {
                        sent += until(|| from.send(&bytes[sent..], &[], FLAGS)).unwrap();
                    }
                });
                s.spawn(move || {
                    let (mut got, mut bytes) = (0, vec![0; 10_000]);
                    while got < 300_000 {
                        let n = until(|| to.recv(&mut bytes, &mut [])).unwrap();
                        assert!(n > 0 && bytes[..n].iter().all(|b| *b == 5));
                        got += n;
                    }
                });
            }
        });
    }

    #[test]
    fn a_connection_takes_the_place_of_another() {
        let [one, other] = sealed();
        one.send(b"lost", &[], FLAGS).unwrap();
        let [new_one, new_other] = sealed();
        one.replace(new_one).unwrap();
        other.replace(new_other).unwrap();
        one.send(b"after", &[], FLAGS).unwrap();
        let mut bytes = [0; 9];
        assert_eq!(until(|| other.recv(&mut bytes, &mut [])), Ok(5));
        assert_eq!(&bytes[..5], b"after");
        let [plain, _end] = tcp().map(|tcp| Socket::new(tcp, false));
        assert!(one.replace(plain).unwrap_err().to_string().contains("encrypted"));
    }
}
