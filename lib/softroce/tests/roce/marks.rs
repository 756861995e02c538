//! Traffic class and hop limit of a path, as a socket of the test finds them on packets.

use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Duration;

use softroce::wire::icrc::{Icrc, Route};
use softroce::wire::{Packet, UDP_PORT};
use softroce::{DELAY_VARIABLE, Datagram, Gid, Path, SendFlags, SendOp, SendRequest, Service};

use crate::end::{Card, End, loopback};
use crate::services::datagram_end;

const CHILD: &str = "SOFTROCE_TEST_MARKS";

/// A socket in place of an RDMA device of another host, at an address of the loopback network that no other process
/// has.
fn elsewhere() -> UdpSocket {
    let [_, _, high, low] = std::process::id().to_be_bytes();
    let socket = UdpSocket::bind((Ipv4Addr::new(127, 88, high, low), UDP_PORT)).expect("bound");
    socket.set_read_timeout(Some(Duration::from_secs(60))).expect("set");
    for option in [libc::IP_RECVTOS, libc::IP_RECVTTL] {
        let on = 1i32;
        // SAFETY: the option's value is an int that lives until the call returns.
        let rc = unsafe {
            libc::setsockopt(
                socket.as_raw_fd(),
                libc::IPPROTO_IP,
                option,
                (&raw const on).cast(),
                size_of::<i32>() as _,
            )
        };
        assert_eq!(rc, 0);
    }
    socket
}

/// Type of service and TTL of the next packet, and how many bytes of payload it has.
fn next(socket: &UdpSocket) -> (u8, u8, usize) {
    let (mut bytes, mut control) = ([0u8; 5000], [0u64; 16]);
    // SAFETY: all zeros are an address and a header without anything.
    let (mut from, mut header): (libc::sockaddr_in, libc::msghdr) = unsafe { std::mem::zeroed() };
    let mut vector = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    (header.msg_name, header.msg_namelen) = ((&raw mut from).cast(), size_of::<libc::sockaddr_in>() as _);
    (header.msg_iov, header.msg_iovlen) = (&raw mut vector, 1);
    (header.msg_control, header.msg_controllen) = (control.as_mut_ptr().cast(), size_of_val(&control) as _);
    // SAFETY: all that the header names is here.
    let n = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut header, 0) };
    assert!(n > 0, "no packet: {}", std::io::Error::last_os_error());
    let (mut class, mut hops) = (0, 0);
    // SAFETY: the kernel filled the control messages: a byte, and an int.
    unsafe {
        let mut message = libc::CMSG_FIRSTHDR(&raw const header);
        while !message.is_null() {
            match ((*message).cmsg_level, (*message).cmsg_type) {
                (libc::IPPROTO_IP, libc::IP_TOS) => class = *libc::CMSG_DATA(message),
                (libc::IPPROTO_IP, libc::IP_TTL) => {
                    hops = libc::CMSG_DATA(message).cast::<i32>().read_unaligned() as u8
                }
                _ => {}
            }
            message = libc::CMSG_NXTHDR(&raw const header, message);
        }
    }
    let packet = &bytes[..n as usize];
    let src = SocketAddr::from((from.sin_addr.s_addr.to_ne_bytes(), u16::from_be(from.sin_port)));
    let route = Route { src, dst: socket.local_addr().expect("an address") };
    assert!(Icrc::new(route).check(packet, 0), "the ICRC covers neither");
    (class, hops, Packet::parse(packet).expect("a packet").payload.len())
}

fn marks_arrive() {
    let there = elsewhere();
    let gid = Gid::from(there.local_addr().expect("an address").ip());
    let marked = |path: Path| Path { traffic_class: 0x68, hop_limit: 9, local: false, ..path };
    // A connection: several segments in a datagram.
    let end = End::new(&loopback(), Service::Uc);
    let card = Card { qpn: 5, gid, ..end.card() };
    end.connect_with(&card, |attr| (attr.path, attr.path_mtu) = (attr.path.map(marked), 1024));
    end.send(1, SendOp::Send, 0, 2500);
    assert_eq!([next(&there), next(&there), next(&there)], [(0x68, 9, 1024), (0x68, 9, 1024), (0x68, 9, 452)]);
    // A datagram with marks, and one of the system's.
    let end = datagram_end(end.gid_index);
    let plain = Path { local: false, hop_limit: 1, ..end.pd.context().path(gid, end.gid_index).expect("a way") };
    for (path, class) in [(marked(plain), 0x68), (plain, 0)] {
        let sges = [end.sge(0, 300)];
        let to = Some(Datagram { path: Arc::new(path), qpn: 5, qkey: 1 });
        let request = SendRequest { id: 3, op: SendOp::Send, sges: &sges, flags: SendFlags::default(), to };
        // SAFETY: the memory is never freed.
        unsafe { end.qp.post_send(&[request]) }.expect("posted");
        let (came, hops, len) = next(&there);
        assert_eq!((came, hops == 9, len), (class, class != 0, 300));
        assert_ne!(hops, 1);
    }
}

#[test]
fn packets_have_the_marks_of_their_path() {
    marks_arrive();
}

/// Runs in a separate process, whose packets are held back.
#[test]
fn a_process_that_marks() {
    if std::env::var_os(CHILD).is_some() {
        marks_arrive();
    }
}

#[test]
fn packets_that_are_held_back_have_them_too() {
    let status = std::process::Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", "marks::a_process_that_marks"])
        .env(CHILD, "1")
        .env(DELAY_VARIABLE, "100")
        .status()
        .expect("started");
    assert!(status.success());
}
