//! Queries of the system about an interface of this network namespace. sysfs would answer for the namespace that it was
//! mounted in.

use std::io;
use std::os::fd::AsRawFd;

use socket2::{Domain, Socket, Type};

/// A request about the interface `name`, answered by the system.
fn ask(name: &str, request: libc::Ioctl) -> io::Result<libc::ifreq> {
    // SAFETY: all zeros are a request without a name.
    let mut ask: libc::ifreq = unsafe { std::mem::zeroed() };
    // The last byte stays 0.
    let Some((_, room)) = ask.ifr_name.split_last_mut().filter(|(_, room)| name.len() <= room.len()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    for (place, byte) in room.iter_mut().zip(name.bytes()) {
        *place = byte as libc::c_char;
    }
    let socket = Socket::new(Domain::UNIX, Type::DGRAM, None)?;
    // SAFETY: the requests of this file read and write an `ifreq`.
    match unsafe { libc::ioctl(socket.as_raw_fd(), request, &raw mut ask) } {
        0 => Ok(ask),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Returns true if the flags are those of an interface that was set up and has a carrier.
pub(crate) fn is_up(flags: u32) -> bool {
    let up = (libc::IFF_UP | libc::IFF_RUNNING) as u32;
    flags & up == up
}

/// Returns true if the interface is up. One that is not there is down.
pub(crate) fn up(name: &str) -> bool {
    // SAFETY: the request fills the flags.
    ask(name, libc::SIOCGIFFLAGS).is_ok_and(|answer| is_up(unsafe { answer.ifr_ifru.ifru_flags } as u16 as u32))
}

/// Bytes of a packet at most, IP header included; `None` if the system gives no value.
pub(crate) fn mtu(name: &str) -> Option<u32> {
    // SAFETY: the request fills the MTU.
    ask(name, libc::SIOCGIFMTU).ok().and_then(|answer| u32::try_from(unsafe { answer.ifr_ifru.ifru_mtu }).ok())
}

/// The MAC address; zeros where there is none.
pub(crate) fn mac(name: &str) -> [u8; 6] {
    let Ok(answer) = ask(name, libc::SIOCGIFHWADDR) else { return [0; 6] };
    // SAFETY: the request fills the hardware address.
    let bytes = unsafe { answer.ifr_ifru.ifru_hwaddr }.sa_data.map(|byte| byte as u8);
    bytes.first_chunk().copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loopback_interface_is_known() {
        assert!(up("lo") && mtu("lo").is_some_and(|mtu| mtu >= 1500));
        assert_eq!(mac("lo"), [0; 6]);
        assert!(!up("no-such") && mtu("a name that is longer than any").is_none());
    }
}
