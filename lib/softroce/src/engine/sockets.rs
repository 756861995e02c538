//! The sockets of an RDMA device.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};

use socket2::{Domain, Protocol, SockAddr, Socket, Type};

use crate::error::{Error, Result};
use crate::fork::Own;
use crate::wire::UDP_PORT;

/// Bytes that wait in a socket at most, if the system allows.
const BUFFER: usize = 8 << 20;

/// A socket that packets come in by, and the address that they were sent to.
#[derive(Debug)]
pub(super) struct Listener {
    socket: Own<Socket>,
    pub(super) local: SocketAddr,
    /// Index of the receive queue, whose receiving side takes the packets.
    pub(super) lane: usize,
    /// True if the address is the slot's, so that RDMA devices of this host alone send to it.
    pub(super) own: bool,
}

impl Listener {
    /// Listens on port 4791 of `ip`; with `shared` beside other RDMA devices.
    pub(super) fn open(ip: IpAddr, scope: u32, shared: bool) -> Result<Listener> {
        let local = with_scope(ip, UDP_PORT, scope);
        let socket = udp(ip).and_then(|socket| {
            socket.set_reuse_port(shared)?;
            grow(&socket);
            set(&socket, libc::SOL_UDP, libc::UDP_GRO, 1)?;
            socket.set_nonblocking(true)?;
            socket.bind(&SockAddr::from(local))?;
            Ok(socket)
        });
        match socket {
            Ok(socket) => Ok(Listener { socket, local, lane: 0, own: !shared }),
            Err(e) if e.kind() == io::ErrorKind::AddrInUse => Err(Error::new(
                libc::EADDRINUSE,
                format!(
                    "{local} is taken by something other than a card of this user: the kernel's rdma_rxe (`rdma link`), or \
                     another user's program (`ss -ulpn`)"
                ),
            )),
            Err(e) => Err(Error::system(format_args!("listening on {local}"), &e)),
        }
    }

    pub(super) fn raw(&self) -> RawFd {
        self.socket.as_raw_fd()
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// A socket that packets of one of our addresses leave by.
#[derive(Debug)]
pub(super) struct Sender {
    socket: Own<Socket>,
    pub(super) local: SocketAddr,
}

/// Source ports of RoCEv2: the dynamic range, so that switches and adapters spread flows by them (annex A17.3.2).
const SOURCE_PORTS: std::ops::RangeInclusive<u16> = 0xc000..=0xffff;

impl Sender {
    /// Sends from `ip` and a free source port.
    pub(super) fn open(ip: IpAddr, scope: u32) -> Result<Sender> {
        let fail = |e: io::Error| Error::system(format_args!("opening a socket to send from {ip}"), &e);
        let socket = udp(ip).map_err(fail)?;
        let start = rustix::process::getpid().as_raw_nonzero().get() as u16 & 0x3fff;
        let mut refused = None;
        for i in 0..=0x3fffu16 {
            let port = SOURCE_PORTS.start() + (start.wrapping_mul(61).wrapping_add(i) & 0x3fff);
            let local = with_scope(ip, port, scope);
            match socket.bind(&SockAddr::from(local)) {
                Ok(()) => return Ok(Sender { socket, local }),
                Err(e) if e.kind() == io::ErrorKind::AddrInUse => refused = Some(e),
                Err(e) => return Err(fail(e)),
            }
        }
        Err(fail(refused.unwrap_or_else(|| io::ErrorKind::AddrInUse.into())))
    }

    pub(super) fn raw(&self) -> RawFd {
        self.socket.as_raw_fd()
    }
}

/// A socket that packets are handed on by to the addresses of slots, in datagrams of any length.
pub(super) fn carrier() -> Result<Own<Socket>> {
    let socket = Socket::new(Domain::IPV4, Type::DGRAM, Some(Protocol::UDP)).map(Own::new).and_then(|socket| {
        set(&socket, libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_DONT)?;
        socket.bind(&SockAddr::from(SocketAddr::from(([127, 0, 0, 1], 0))))?;
        Ok(socket)
    });
    socket.map_err(|e| Error::system("opening a socket to hand packets on by", &e))
}

/// An address with the interface's number where it is needed: link-local IPv6.
pub(super) fn with_scope(ip: IpAddr, port: u16, scope: u32) -> SocketAddr {
    match ip {
        IpAddr::V6(ip) if ip.is_unicast_link_local() => std::net::SocketAddrV6::new(ip, port, 0, scope).into(),
        ip => SocketAddr::new(ip, port),
    }
}

/// A socket whose packets are never fragmented: with DF their identification is 0, which the ICRC needs (see
/// [`crate::wire::icrc`]).
fn udp(ip: IpAddr) -> io::Result<Own<Socket>> {
    let v4 = ip.is_ipv4();
    // Before it is bound: no child has one that is.
    let socket = Own::new(Socket::new(if v4 { Domain::IPV4 } else { Domain::IPV6 }, Type::DGRAM, Some(Protocol::UDP))?);
    if v4 {
        set(&socket, libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_DO)?;
    } else {
        set(&socket, libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER, libc::IPV6_PMTUDISC_DO)?;
        socket.set_only_v6(true)?;
    }
    Ok(socket)
}

/// As much buffer as there is: with the privilege for it all that is wanted, otherwise up to `net.core.rmem_max`.
fn grow(socket: &Socket) {
    if set(socket, libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, BUFFER as i32).is_err() {
        // A small buffer loses packets, which are sent again.
        let _ = socket.set_recv_buffer_size(BUFFER);
    }
}

fn set(socket: &Socket, level: i32, option: i32, value: i32) -> io::Result<()> {
    // SAFETY: the option's value is an int that lives until the call returns.
    let rc = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            option,
            (&raw const value).cast(),
            size_of::<i32>() as libc::socklen_t,
        )
    };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
