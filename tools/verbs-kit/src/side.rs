//! The side channel: a TCP connection that exchanges addresses and keys before RDMA works, and "ready" messages. Each
//! message is one line of text, readable in a packet capture.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};

/// Longest accepted line, without its newline.
const LONGEST: usize = 256;

/// One connection to the peer.
#[derive(Debug)]
pub struct Side {
    stream: TcpStream,
    peer: SocketAddr,
    patience: Duration,
}

impl Side {
    /// Waits for one client on `listener`, at most `patience`.
    pub fn accept(listener: &TcpListener, patience: Duration) -> Result<Side> {
        // `TcpListener` has no timeout, so poll it in short steps.
        listener.set_nonblocking(true).context("side channel")?;
        let deadline = Instant::now() + patience;
        loop {
            match listener.accept() {
                Ok((stream, peer)) => return Side::new(stream, peer, patience),
                Err(e) if e.kind() == ErrorKind::WouldBlock => {
                    ensure!(Instant::now() < deadline, "no client came within {patience:?} (--timeout)");
                    std::thread::sleep(Duration::from_millis(5));
                }
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e).context("side channel: accept"),
            }
        }
    }

    /// Connects to a server at HOST:PORT.
    pub fn connect(address: &str, patience: Duration) -> Result<Side> {
        let candidates = address.to_socket_addrs().with_context(|| format!("cannot resolve {address}"))?;
        let mut last = anyhow!("{address} has no address");
        for peer in candidates {
            match TcpStream::connect_timeout(&peer, patience) {
                Ok(stream) => return Side::new(stream, peer, patience),
                Err(e) => last = anyhow!("cannot connect to {peer}: {e}; is the server running there?"),
            }
        }
        Err(last)
    }

    fn new(stream: TcpStream, peer: SocketAddr, patience: Duration) -> Result<Side> {
        stream.set_nonblocking(false).context("side channel")?;
        stream.set_nodelay(true).context("side channel")?;
        stream.set_write_timeout(Some(patience)).context("side channel")?;
        log::info!("side channel: connected to {peer}");
        Ok(Side { stream, peer, patience })
    }

    /// The peer's address.
    pub fn peer(&self) -> SocketAddr {
        self.peer
    }

    /// The connection itself, for programs that send bytes between the lines. Both sides must know how many.
    pub fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// Sends one line.
    pub fn send(&mut self, line: &str) -> Result<()> {
        debug_assert!(line.len() <= LONGEST && !line.contains('\n'));
        log::debug!("side channel: to {}: {line}", self.peer);
        let line = format!("{line}\n");
        self.stream.write_all(line.as_bytes()).with_context(|| format!("side channel: send to {}", self.peer))
    }

    /// Receives one line. `what` names the expected message in errors.
    pub fn receive(&mut self, what: &str) -> Result<String> {
        let deadline = Instant::now() + self.patience;
        let mut line = Vec::new();
        // Byte by byte, so as not to consume part of the next line. Lines are short and few.
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            ensure!(!left.is_zero(), "side channel: no {what} from {} within {:?}", self.peer, self.patience);
            self.stream.set_read_timeout(Some(left)).context("side channel")?;
            let mut byte = [0];
            match self.stream.read(&mut byte) {
                Ok(0) => bail!("side channel: {} closed the connection before its {what}", self.peer),
                Ok(_) if byte[0] == b'\n' => break,
                Ok(_) => line.push(byte[0]),
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted) => {}
                Err(e) => return Err(e).with_context(|| format!("side channel: {what} from {}", self.peer)),
            }
            ensure!(line.len() <= LONGEST, "side channel: a line of {} is longer than {LONGEST} bytes", self.peer);
        }
        String::from_utf8(line).map_err(|_| anyhow!("side channel: {what} from {} is not text", self.peer))
    }

    /// Both sides send `word`; afterwards each knows that the other has reached this point.
    pub fn meet(&mut self, word: &str) -> Result<()> {
        self.send(word)?;
        let answer = self.receive(&format!("'{word}'"))?;
        ensure!(answer == word, "side channel: expected '{word}' from {}, got '{answer}'", self.peer);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(20);

    /// A channel to a peer that calls `behave` on its end of the connection.
    fn against(patience: Duration, behave: impl FnOnce(TcpStream) + Send + 'static) -> (Side, impl FnOnce()) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let peer = std::thread::spawn(move || behave(TcpStream::connect(address).expect("connects")));
        let side = Side::accept(&listener, LONG).expect("a client");
        (Side { patience, ..side }, move || peer.join().expect("the peer ends"))
    }

    #[test]
    fn lines_come_one_by_one_and_both_sides_meet() {
        let (mut side, end) = against(LONG, |mut stream| {
            stream.write_all(b"first\nsec").expect("sends");
            stream.write_all(b"ond\nready\n").expect("sends");
            let mut word = [0; 6];
            stream.read_exact(&mut word).expect("our word");
            assert_eq!(&word, b"ready\n");
        });
        assert_eq!(side.receive("line").expect("a line"), "first");
        assert_eq!(side.receive("line").expect("a line"), "second");
        side.meet("ready").expect("both are ready");
        end();
    }

    #[test]
    fn a_peer_that_leaves_is_an_error() {
        let (mut side, end) = against(LONG, |mut stream| stream.write_all(b"half a li").expect("sends"));
        let error = side.receive("endpoint").expect_err("it left").to_string();
        assert!(error.contains("closed the connection before its endpoint"), "{error}");
        end();
    }

    #[test]
    fn a_silent_peer_is_an_error_at_the_deadline() {
        let (done, wait) = std::sync::mpsc::channel::<()>();
        let (mut side, end) = against(Duration::from_millis(50), move |stream| {
            let _ = wait.recv();
            drop(stream);
        });
        let error = side.receive("endpoint").expect_err("silence").to_string();
        assert!(error.contains("no endpoint from 127.0.0.1") && error.contains("within 50ms"), "{error}");
        drop(done);
        end();
    }

    #[test]
    fn a_line_without_end_and_bytes_that_are_no_text_are_refused() {
        let (mut side, end) = against(LONG, |mut stream| {
            let _ = stream.write_all(&[b'x'; 300]);
        });
        assert!(side.receive("endpoint").expect_err("too long").to_string().contains("longer than 256 bytes"));
        drop(side);
        end();
        let (mut side, end) = against(LONG, |mut stream| stream.write_all(b"\xff\xfe\n").expect("sends"));
        assert!(side.receive("endpoint").expect_err("no text").to_string().contains("is not text"));
        end();
    }

    #[test]
    fn nobody_comes_and_nobody_listens() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let error = Side::accept(&listener, Duration::from_millis(20)).expect_err("nobody").to_string();
        assert!(error.contains("no client came within 20ms"), "{error}");
        let address = "127.0.0.1:1";
        let error = Side::connect(address, LONG).expect_err("nobody listens").to_string();
        assert!(error.contains(address) && error.contains("is the server running"), "{error}");
        assert!(Side::connect("no-such-host.invalid:1", LONG).is_err());
    }
}
