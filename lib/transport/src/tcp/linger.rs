//! Closing a connection without losing what was sent on it.
//!
//! Closing a socket that has unread bytes, or that gets some afterwards, resets the connection, and the peer may lose
//! what is still on its way to it. So a dropped link's socket signals that nothing more will come, and is read until
//! the peer signals the same (or for [`LINGER`]), by the endpoint's thread. When the endpoint is gone the socket is
//! closed at once.

use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::RecvFlags;

use crate::linger::{Closing, Linger};
use crate::seal::Socket;

/// Longest time a dropped link's socket stays open.
const LINGER: Duration = Duration::from_secs(10);

/// A socket to be read until its end.
#[derive(Debug)]
struct Draining {
    socket: OwnedFd,
    until: Instant,
}

/// Ends a dropped link's socket.
pub(super) fn close(socket: Socket, linger: &Linger) {
    if socket.shutdown(Shutdown::Write).is_err() {
        return;
    }
    let mut draining = Draining { socket: socket.into_plain().into(), until: Instant::now() + LINGER };
    if !draining.is_done() {
        linger.take(Box::new(draining));
    }
}

impl Closing for Draining {
    fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Reads what has come; true when the peer has finished too, or the time is over.
    fn is_done(&mut self) -> bool {
        let mut waste = [0u8; 16 << 10];
        // A bounded number of reads: the thread has others to serve.
        for _ in 0..64 {
            match rustix::net::recv(&self.socket, &mut waste, RecvFlags::DONTWAIT) {
                Ok((_, 0)) => return true,
                Ok(_) | Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                Err(_) => return true,
            }
        }
        Instant::now() >= self.until
    }
}
