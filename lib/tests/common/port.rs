//! Ports for ranks that a test starts.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use socket2::{Domain, Socket, Type};

/// A port for a rank that will listen there. A socket of ours is bound to it and does not listen, so the system gives
/// the port to nobody else, and a rank that asks for it by number has it.
#[derive(Debug)]
pub struct Port {
    pub at: SocketAddr,
    _held: Socket,
}

impl Port {
    pub fn new(ip: IpAddr) -> Port {
        let any = SocketAddr::new(ip, 0);
        let held = Socket::new(Domain::for_address(any), Type::STREAM, None).expect("a socket");
        held.set_reuse_address(true).expect("an option that every socket has");
        held.bind(&any.into()).expect("a free port");
        let at = held.local_addr().ok().and_then(|at| at.as_socket()).expect("bound above");
        Port { at, _held: held }
    }

    pub fn loopback() -> Port {
        Port::new(Ipv4Addr::LOCALHOST.into())
    }
}
