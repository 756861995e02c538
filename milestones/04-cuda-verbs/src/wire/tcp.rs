//! Chunks over the TCP connection of the side channel, between its lines: both sides know the number of bytes.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::ops::Range;
use std::slice;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};

use super::Wire;
use crate::pinned::Pinned;

/// One side. The kernel copies to and from its own buffers, so a chunk has left our memory when `send` returns.
#[derive(Debug)]
pub struct Tcp {
    stream: TcpStream,
    peer: String,
    memory: Arc<Pinned>,
    posted: VecDeque<(usize, Range<usize>)>,
}

impl Tcp {
    /// A wire over `stream`, from and to `memory`.
    pub fn new(stream: &TcpStream, memory: Arc<Pinned>) -> Result<Tcp> {
        let peer = stream.peer_addr().context("TCP")?.to_string();
        Ok(Tcp { stream: stream.try_clone().context("TCP")?, peer, memory, posted: VecDeque::new() })
    }
}

/// The time left, for a socket's timeout; an error when there is none.
fn left(deadline: Instant, what: &str, peer: &str) -> Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    ensure!(!left.is_zero(), "TCP: {what} {peer}: no progress in time (--timeout)");
    Ok(left)
}

/// True when a socket's wait ended without an error, so that the caller checks the deadline and tries again.
fn again(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted)
}

impl Wire for Tcp {
    fn begin(&mut self) -> Result<()> {
        ensure!(self.posted.is_empty(), "TCP: chunks of the transfer before are missing");
        Ok(())
    }

    fn send(&mut self, index: usize, place: Range<usize>, deadline: Instant) -> Result<()> {
        let (len, start) = (place.len(), self.memory.at(place)?);
        // SAFETY: inside the memory, which is initialized. No one writes to this slot before `sent` (`Wire::send`).
        let mut rest = unsafe { slice::from_raw_parts(start.cast_const(), len) };
        while !rest.is_empty() {
            self.stream.set_write_timeout(Some(left(deadline, "send to", &self.peer)?)).context("TCP")?;
            match self.stream.write(rest) {
                Ok(0) => bail!("TCP: {} takes no more bytes of chunk {index}", self.peer),
                Ok(n) => rest = &rest[n..],
                Err(e) if again(e.kind()) => {}
                Err(e) => return Err(e).with_context(|| format!("TCP: send of chunk {index} to {}", self.peer)),
            }
        }
        Ok(())
    }

    fn sent(&mut self, _: usize, _: Instant) -> Result<()> {
        Ok(())
    }

    fn post(&mut self, index: usize, place: Range<usize>, _: Instant) -> Result<()> {
        self.posted.push_back((index, place));
        Ok(())
    }

    fn received(&mut self, index: usize, deadline: Instant) -> Result<()> {
        let (next, place) = self.posted.pop_front().context("TCP: nothing is posted")?;
        ensure!(next == index, "TCP: chunk {index} was asked for, {next} is next");
        let (len, start) = (place.len(), self.memory.at(place)?);
        // SAFETY: inside the memory, which is initialized. No one else uses a posted slot until the chunk is received.
        let mut rest = unsafe { slice::from_raw_parts_mut(start, len) };
        while !rest.is_empty() {
            self.stream.set_read_timeout(Some(left(deadline, "receive from", &self.peer)?)).context("TCP")?;
            match self.stream.read(rest) {
                Ok(0) => {
                    bail!("TCP: {} closed the connection in chunk {index}, {} bytes missing", self.peer, rest.len())
                }
                Ok(n) => rest = &mut rest[n..],
                Err(e) if again(e.kind()) => {}
                Err(e) => return Err(e).with_context(|| format!("TCP: receive of chunk {index} from {}", self.peer)),
            }
        }
        Ok(())
    }
}
