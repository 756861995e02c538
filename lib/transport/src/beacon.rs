//! Proof that a process of this host is dead: the socket that only it listens on refuses connections.
//!
//! A process that is stopped, slow or cut off still has its socket, which takes a connection (or has a full backlog)
//! whatever the process does. The kernel closes the socket when the process ends, however it ends. The name is in the
//! abstract namespace, which processes of one network namespace share; elsewhere there is no such proof.

use std::os::fd::OwnedFd;
use std::sync::Mutex;

use rustix::io::Errno;
use rustix::net::{SocketAddrUnix, SocketType};

use tinynccl_sys::fork::{Kept, Origin};
use tinynccl_sys::secret;
use tinynccl_sys::threads::lock;
use tinynccl_sys::unix;

/// This process's socket, whose connections no one accepts.
struct Beacon {
    name: String,
    origin: Origin,
    _listener: Kept<OwnedFd>,
}

/// Lives until the process ends: a communicator that is gone says nothing about the process.
static BEACON: Mutex<Option<Beacon>> = Mutex::new(None);

/// Returns the name of this process's beacon, which is lit by the first call; `None` where the system refuses.
pub(crate) fn ours() -> Option<String> {
    let mut beacon = lock(&BEACON);
    // A forked child is another process.
    if beacon.as_ref().is_none_or(|beacon| !beacon.origin.is_here()) {
        *beacon = light().inspect_err(|e| log::debug!("no proof of this process's death: {e}")).ok();
    }
    beacon.as_ref().map(|beacon| beacon.name.clone())
}

fn light() -> tinynccl_plan::error::Result<Beacon> {
    let os = |e| tinynccl_plan::Error::errno("listen", "on an abstract Unix socket", e);
    let random: [u8; 8] = secret::random()?;
    let name = format!("tinynccl-alive-{}-{:016x}", std::process::id(), u64::from_le_bytes(random));
    let listener = unix::socket(SocketType::STREAM).map_err(os)?;
    rustix::net::bind(&listener, &address(&name).map_err(os)?).map_err(os)?;
    // Whoever connects takes a place for good: a short backlog is full soon, and says the same.
    rustix::net::listen(&listener, 1).map_err(os)?;
    Ok(Beacon { name, origin: Origin::here(), _listener: Kept::new(listener) })
}

fn address(name: &str) -> Result<SocketAddrUnix, Errno> {
    SocketAddrUnix::new_abstract_name(name.as_bytes())
}

/// Returns true if the process whose beacon has this name is dead. It must have lit it in our network namespace.
pub fn is_out(name: &str) -> bool {
    let dialed = address(name).and_then(|address| rustix::net::connect(&unix::socket(SocketType::STREAM)?, &address));
    dialed == Err(Errno::CONNREFUSED)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_beacon_burns_however_often_it_is_looked_at_and_is_out_when_closed() {
        let name = ours().unwrap();
        assert_eq!(ours(), Some(name.clone()));
        assert!((0..100).all(|_| !is_out(&name)));
        let other = light().unwrap();
        let gone = other.name.clone();
        assert!(!is_out(&gone));
        drop(other);
        assert!(is_out(&gone) && !is_out(&name));
    }
}
