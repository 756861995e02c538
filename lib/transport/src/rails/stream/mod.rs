//! One TCP stream of a connection: its socket, its state, and the rail that it is on.
//!
//! | file | idea |
//! |---|---|
//! | `probe` | pings to the far end of a relayed stream |
//! | `rate` | bytes in flight on a rail and its measured rate: the scheduler's input |

mod probe;
pub(super) mod rate;

pub(super) use probe::{Due, Probe};

use std::fmt;
use std::io::ErrorKind;
use std::net::{IpAddr, Shutdown};
use std::ops::Deref;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use rustix::net::SendFlags;

use crate::bootstrap::interface;
use crate::rails::failover::slot::{Slot, State};
use crate::rails::stream::rate::Load;
use crate::rails::worker::thread::Worker;
use crate::seal::{Fault, Socket};
use tinynccl_sys::fork::Kept;

/// The addresses at a stream's ends, ours first. Streams with the same ones share a NIC pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::rails) struct Rail {
    pub(in crate::rails) ours: IpAddr,
    pub(in crate::rails) theirs: IpAddr,
}

impl Rail {
    /// Returns true unless this host lacks the address `ours` or a route from there.
    pub(in crate::rails) fn is_routed(self) -> bool {
        // Any port.
        let route = interface::route(self.ours, (self.theirs, 9).into());
        let gone = [ErrorKind::NetworkUnreachable, ErrorKind::HostUnreachable, ErrorKind::AddrNotAvailable];
        route.err().is_none_or(|error| !gone.contains(&error.kind()))
    }
}

impl fmt::Display for Rail {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} -> {}", self.ours, self.theirs)
    }
}

/// Bytes of a stream in the kernel.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(in crate::rails) struct InFlight {
    /// Some are sent and not acknowledged.
    pub(in crate::rails) unacked: bool,
    /// Some wait to be sent.
    pub(in crate::rails) unsent: bool,
    /// The peer's window has room for a whole segment.
    pub(in crate::rails) open: bool,
    /// Bytes acknowledged so far.
    pub(in crate::rails) acked: u64,
    /// Time after which the kernel first retransmits a segment.
    pub(in crate::rails) rto: Duration,
}

/// A stream of a connection.
#[derive(Debug)]
pub(in crate::rails) struct Stream {
    slot: Slot,
    socket: Kept<Socket>,
    pub(in crate::rails) rail: Option<Rail>,
    pub(in crate::rails) worker: Arc<Worker>,
    /// For long messages alone: its thread sleeps between them.
    pub(in crate::rails) bulk: bool,
    /// Key of the stream's position at its worker thread.
    pub(in crate::rails) key: u64,
    /// A job to write waits.
    pub(in crate::rails) queued: AtomicBool,
    /// The sender has retired the stream, and the thread that reads from it has not replied yet.
    pub(in crate::rails) retires: AtomicBool,
    /// Load of the NIC pair, shared by all streams of the connection on it.
    pub(in crate::rails) load: Arc<Load>,
    /// Count of fragments read from the stream that is to be acknowledged next; 0 if nothing is.
    pub(in crate::rails) acknowledge: AtomicU64,
    pub(in crate::rails) probe: Probe,
}

impl Stream {
    /// `others`: streams of the connection that carry something already.
    pub(in crate::rails) fn new<'a>(
        number: usize,
        socket: Socket,
        state: State,
        (worker, bulk): (Arc<Worker>, bool),
        mut others: impl Iterator<Item = &'a Stream>,
    ) -> Stream {
        let rail = rail(&socket);
        let load = others.find(|other| other.rail == rail).map_or_else(Arc::default, |other| other.load.clone());
        Stream {
            slot: Slot::new(number, state),
            socket: Kept::new(socket),
            rail,
            key: worker.new_key(),
            worker,
            bulk,
            queued: AtomicBool::new(false),
            retires: AtomicBool::new(false),
            load,
            acknowledge: AtomicU64::new(0),
            probe: Probe::default(),
        }
    }

    /// Begins again under a new number: `socket`, on the same rail, takes the position of one that both ends have
    /// retired. Called with what reads and writes locked, as they look at the number.
    pub(in crate::rails) fn renew(&self, number: usize, socket: Socket, state: State) -> std::io::Result<()> {
        self.socket.replace(socket)?;
        self.acknowledge.store(0, Ordering::Release);
        self.retires.store(false, Ordering::Release);
        self.probe.reset();
        self.slot.renew(number, state);
        Ok(())
    }

    /// Sends ([`Socket::send`]).
    pub(in crate::rails) fn send(&self, head: &[u8], data: &[u8]) -> Result<usize, Fault> {
        self.socket.send(head, data, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)
    }

    /// Receives ([`Socket::recv`]).
    pub(in crate::rails) fn recv(&self, first: &mut [u8], then: &mut [u8]) -> Result<usize, Fault> {
        self.socket.recv(first, then)
    }

    /// Fails unless a socket is on this stream's rail.
    pub(in crate::rails) fn check_rail(&self, socket: &Socket) -> std::io::Result<()> {
        if rail(socket) == self.rail {
            return Ok(());
        }
        Err(std::io::Error::other(format!("expected a stream over {}", self.describe())))
    }

    /// Shuts down the socket for reading, writing or both, as `how` says.
    pub(in crate::rails) fn shut(&self, how: Shutdown) {
        // Fails when the peer was first.
        let _ = self.socket.shutdown(how);
    }

    /// Returns the stream's addresses as text.
    pub(in crate::rails) fn describe(&self) -> String {
        self.rail.map_or_else(|| "an unknown route".to_owned(), |rail| rail.to_string())
    }

    /// State of the stream's bytes in the kernel (`TCP_INFO`); `None` if that cannot be read.
    pub(in crate::rails) fn in_flight(&self) -> Option<InFlight> {
        // struct tcp_info, whose last field here came with Linux 5.4.
        let (retransmits, backoff) = (2, 4);
        let (rto, mss, unacked, acked, unsent, window) = (8, 16, 24, 120, 144, 228);
        let mut info = [0u8; 256];
        let mut len = info.len() as libc::socklen_t;
        // SAFETY: the kernel writes at most `len` bytes into an array of ours of this length.
        let status = unsafe {
            libc::getsockopt(
                self.socket.as_raw_fd(),
                libc::IPPROTO_TCP,
                libc::TCP_INFO,
                info.as_mut_ptr().cast(),
                &raw mut len,
            )
        };
        if status != 0 || (len as usize) < unsent + 4 {
            return None;
        }
        let number = |at: usize| info.get(at..at + 4).and_then(|b| b.try_into().ok()).map_or(0, u32::from_ne_bytes);
        // Twice as long each time that it was in vain.
        let doubled = if info[retransmits] > 0 { u32::from(info[backoff]) } else { 0 };
        Some(InFlight {
            unacked: number(unacked) > 0,
            unsent: number(unsent) > 0,
            // A receiver opens its window by whole segments. Older kernels do not report it.
            open: number(window) >= number(mss).max(1),
            acked: u64::from_ne_bytes(info.get(acked..acked + 8)?.try_into().ok()?),
            rto: Duration::from_micros(u64::from(number(rto).checked_shr(doubled).unwrap_or(0))),
        })
    }
}

/// The addresses at the ends of a socket, while it has some.
fn rail(socket: &Socket) -> Option<Rail> {
    let (ours, theirs) = socket.tcp().local_addr().ok().zip(socket.tcp().peer_addr().ok())?;
    Some(Rail { ours: ours.ip(), theirs: theirs.ip() })
}

impl Deref for Stream {
    type Target = Slot;

    #[inline]
    fn deref(&self) -> &Slot {
        &self.slot
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rail_without_its_address_is_not_routed() {
        let rail = |ours: &str, theirs: &str| Rail { ours: ours.parse().unwrap(), theirs: theirs.parse().unwrap() };
        assert!(rail("127.0.0.1", "127.0.0.2").is_routed());
        // An address for documentation, which no host has.
        assert!(!rail("192.0.2.1", "127.0.0.1").is_routed());
    }

    #[test]
    fn a_stream_describes_itself() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let socket = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let socket = Socket::new(socket, false);
        let workers = crate::rails::worker::pool::Workers::start(&tinynccl_sys::Config::default()).unwrap();
        let stream = Stream::new(0, socket, State::New, (workers.next(true, false), false), std::iter::empty());
        assert_eq!(stream.describe(), "127.0.0.1 -> 127.0.0.1");
        assert!(stream.in_flight().is_some_and(|flight| !flight.unacked && !flight.unsent));
    }
}
