//! Ports for programs that a test starts.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
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
    /// A free one of an address of this host. It is held at every address, for a program that listens at all of them:
    /// held at one, it could be given to a listener of another test at the other.
    pub fn new(ip: IpAddr) -> Port {
        let (family, every): (_, IpAddr) = match ip {
            IpAddr::V4(_) => (AddressFamily::INET, Ipv4Addr::UNSPECIFIED.into()),
            IpAddr::V6(_) => (AddressFamily::INET6, Ipv6Addr::UNSPECIFIED.into()),
        };
        let held = socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None).expect("a socket");
        sockopt::set_socket_reuseaddr(&held, true).expect("an option that every socket has");
        bind(&held, &SocketAddr::new(every, 0)).expect("a free port");
        let bound: SocketAddr = getsockname(&held).ok().and_then(|at| at.try_into().ok()).expect("bound above");
        Port { at: SocketAddr::new(ip, bound.port()), _held: held }
    }

    /// One of 127.0.0.1.
    pub fn loopback() -> Port {
        Port::new(Ipv4Addr::LOCALHOST.into())
    }

    /// The environment of rank `rank` of `size` on this host that meets the others here, as torchrun sets it.
    pub fn environment(&self, rank: usize, size: usize) -> [(&'static str, String); 5] {
        environment(self.at, rank, size)
    }
}

/// As [`Port::environment`], for an address that need not be a held port's.
pub fn environment(at: SocketAddr, rank: usize, size: usize) -> [(&'static str, String); 5] {
    [
        ("RANK", rank.to_string()),
        ("WORLD_SIZE", size.to_string()),
        ("LOCAL_RANK", rank.to_string()),
        ("MASTER_ADDR", at.ip().to_string()),
        ("MASTER_PORT", at.port().to_string()),
    ]
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn a_held_port_is_given_to_no_listener_at_another_address() {
        let port = Port::loopback();
        // Who asks for any port of another address gets one by the same rule: without it, this one as well.
        let other = SocketAddr::from(([127, 0, 0, 2], port.at.port()));
        let held = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None).expect("a socket");
        assert_eq!(bind(&held, &other), Err(rustix::io::Errno::ADDRINUSE));
        // The program takes it at one address or at all.
        drop(TcpListener::bind(port.at).expect("free for who asks for it"));
        TcpListener::bind((Ipv4Addr::UNSPECIFIED, port.at.port())).expect("free for who asks for it");
    }
}
