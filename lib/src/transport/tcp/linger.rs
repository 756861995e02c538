//! Closing a connection without losing what was sent on it.
//!
//! Closing a socket that has unread bytes, or that gets some afterwards, resets the connection, and the peer may lose what
//! is still on its way to it. So a dropped link's socket says that nothing more will come, and is read until the peer says
//! the same (or for [`LINGER`]), by the endpoint's thread. When the endpoint is gone the socket is closed at once.

use std::net::{Shutdown, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::RecvFlags;

use crate::transport::doorbell::Doorbell;

/// Longest time a dropped link's socket stays open.
const LINGER: Duration = Duration::from_secs(10);

/// Sockets of dropped links.
#[derive(Debug)]
pub(crate) struct Linger {
    /// `None` once nobody reads them any more.
    sockets: Mutex<Option<Vec<Closing>>>,
    bell: Arc<Doorbell>,
}

/// A socket to be read until its end.
#[derive(Debug)]
pub(crate) struct Closing {
    pub(crate) socket: OwnedFd,
    until: Instant,
}

impl Linger {
    /// `bell` wakes the thread that reads them.
    pub(crate) fn new(bell: Arc<Doorbell>) -> Arc<Linger> {
        Arc::new(Linger { sockets: Mutex::new(Some(Vec::new())), bell })
    }

    pub(super) fn take(&self, socket: TcpStream) {
        if socket.shutdown(Shutdown::Write).is_err() {
            return;
        }
        let mut closing = Closing { socket: socket.into(), until: Instant::now() + LINGER };
        if closing.is_done() {
            return;
        }
        if let Some(sockets) = &mut *self.sockets.lock().unwrap_or_else(PoisonError::into_inner) {
            sockets.push(closing);
            self.bell.ring();
        }
    }

    /// The sockets that came since the last call.
    pub(crate) fn collect(&self) -> Vec<Closing> {
        self.sockets.lock().unwrap_or_else(PoisonError::into_inner).as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// From now on sockets are closed at once.
    pub(crate) fn stop(&self) {
        *self.sockets.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

impl Closing {
    /// Reads what has come; true when the peer has finished too, or the time is over.
    pub(crate) fn is_done(&mut self) -> bool {
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
