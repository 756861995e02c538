//! The client: connects, sends frames, and checks that each echo equals the frame it sent.

use std::net::{TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::framing::{read_frame, write_frame};

/// Socket settings of a client.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SocketOptions {
    /// Leave Nagle's algorithm on (TCP_NODELAY off).
    pub(crate) nagle: bool,
    /// Send header and payload in two calls instead of one.
    pub(crate) split: bool,
    /// Limit for connecting, and for the time without a byte moving.
    pub(crate) timeout: Duration,
}

/// A connection to an echo server.
#[derive(Debug)]
pub(crate) struct Client {
    stream: TcpStream,
    split: bool,
    sent: Vec<u8>,
    received: Vec<u8>,
    round: u64,
}

impl Client {
    /// Connects to `HOST:PORT`, trying each of the host's addresses.
    pub(crate) fn connect(address: &str, options: SocketOptions) -> Result<Client> {
        let candidates = address.to_socket_addrs().with_context(|| format!("cannot resolve {address}"))?;
        let mut failures = Vec::new();
        for candidate in candidates {
            log::debug!("trying {candidate}");
            match TcpStream::connect_timeout(&candidate, options.timeout) {
                Ok(stream) => {
                    stream.set_nodelay(!options.nagle).context("cannot set TCP_NODELAY")?;
                    stream.set_read_timeout(Some(options.timeout)).context("cannot set the read timeout")?;
                    stream.set_write_timeout(Some(options.timeout)).context("cannot set the write timeout")?;
                    let ours = stream.local_addr().context("cannot ask for our own address")?;
                    log::info!("connected: {ours} to {candidate}, {options:?}");
                    let (sent, received) = (Vec::new(), Vec::new());
                    return Ok(Client { stream, split: options.split, sent, received, round: 0 });
                }
                Err(error) => failures.push(format!("{candidate}: {error}")),
            }
        }
        if failures.is_empty() {
            bail!("cannot connect to {address}: the host has no address");
        }
        bail!("cannot connect to {address}: {}; is the server running there?", failures.join("; "));
    }

    /// Sends one frame of `length` bytes, waits for the echo, checks every byte, and returns the round-trip time, which
    /// excludes the check.
    pub(crate) fn round_trip(&mut self, length: usize) -> Result<Duration> {
        self.round += 1;
        fill(&mut self.sent, length, self.round);
        let start = Instant::now();
        write_frame(&mut self.stream, &self.sent, self.split)?;
        let came = read_frame(&mut self.stream, &mut self.received, length)?;
        let elapsed = start.elapsed();
        log::trace!("round trip {}: {length} bytes in {elapsed:?}", self.round);
        if !came {
            bail!("the server closed the connection instead of sending the frame back");
        }
        if let Some(difference) = difference(&self.sent, &self.received) {
            bail!("round trip {}: {difference}", self.round);
        }
        Ok(elapsed)
    }
}

/// Bytes that differ between rounds and between positions, so that the check finds a stale or shifted echo.
fn fill(buffer: &mut Vec<u8>, length: usize, round: u64) {
    buffer.clear();
    let mut state = round.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    while buffer.len() < length {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let bytes = (state >> 13).to_le_bytes();
        let take = bytes.len().min(length - buffer.len());
        buffer.extend_from_slice(&bytes[..take]);
    }
}

fn difference(sent: &[u8], received: &[u8]) -> Option<String> {
    if sent == received {
        return None;
    }
    if sent.len() != received.len() {
        return Some(format!("sent {} bytes, got {} back", sent.len(), received.len()));
    }
    let at = sent.iter().zip(received).position(|(a, b)| a != b)?;
    Some(format!("byte {at} of {} came back as {:#04x}, sent {:#04x}", sent.len(), received[at], sent[at]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pattern_depends_on_the_round() {
        let (mut a, mut b) = (Vec::new(), Vec::new());
        fill(&mut a, 21, 1);
        fill(&mut b, 21, 2);
        assert_eq!((a.len(), b.len()), (21, 21));
        assert_ne!(a, b);
        fill(&mut b, 21, 1);
        assert_eq!(a, b);
    }

    #[test]
    fn a_wrong_echo_is_described() {
        assert_eq!(difference(b"abc", b"abc"), None);
        assert_eq!(difference(b"abc", b"ab").as_deref(), Some("sent 3 bytes, got 2 back"));
        assert_eq!(difference(b"abc", b"abx").as_deref(), Some("byte 2 of 3 came back as 0x78, sent 0x63"));
    }
}
