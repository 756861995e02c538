//! Unix sockets between ranks of a host, and who holds the other end.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};

/// A non-blocking socket.
pub fn socket(kind: SocketType) -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None)
}

/// Returns the user and the process at the other end, as the kernel knows them; the process is 0 when it is outside of
/// our process namespace.
fn credentials(socket: &impl AsFd) -> Result<(u32, i32), Errno> {
    let mut cred = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: SO_PEERCRED writes a `ucred` of the given length to memory of that type and length.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut cred).cast(),
            &raw mut len,
        )
    };
    if result == 0 {
        Ok((cred.uid, cred.pid))
    } else {
        Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::INVAL))
    }
}

/// Returns the process at the other end; an error unless it belongs to our user.
pub fn same_user(socket: &impl AsFd) -> Result<i32, String> {
    let (uid, pid) = credentials(socket).map_err(|e| format!("SO_PEERCRED: {e}"))?;
    let ours = rustix::process::geteuid().as_raw();
    if uid == ours { Ok(pid) } else { Err(format!("expected a process of user {ours}, got one of user {uid}")) }
}
