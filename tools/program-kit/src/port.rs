//! Ports for programs that a test starts.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::OwnedFd;

use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, getsockname, socket_with, sockopt};

/// A port for a program that will listen there, with `SO_REUSEADDR` as is usual. A socket of ours is bound to it and
/// does not listen, so the system gives the port to no one else, and until then connecting to it is refused.
#[derive(Debug)]
pub struct Port {
    /// Address of the port.
    pub at: SocketAddr,
    _held: OwnedFd,
}

impl Port {
    /// A free one of an address of this host.
    pub fn new(ip: IpAddr) -> Port {
        let family = if ip.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let held = socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None).expect("a socket");
        sockopt::set_socket_reuseaddr(&held, true).expect("an option that every socket has");
        bind(&held, &SocketAddr::new(ip, 0)).expect("a free port");
        let at = getsockname(&held).ok().and_then(|at| at.try_into().ok()).expect("bound above");
        Port { at, _held: held }
    }

    /// One of 127.0.0.1.
    pub fn loopback() -> Port {
        Port::new(Ipv4Addr::LOCALHOST.into())
    }
}
