//! Unauthenticated connections that know everything but the secret: what is public, where ranks listen, what was sent.

use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Mutex;

use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketType,
};

use crate::harness::*;
use tinynccl::Secret;
use tinynccl::config::TransportChoice;
use tinynccl::transport::{ConnectTo, Doorbell, Endpoint, EndpointInfo, LinkPair};

const VERSION: u32 = 10;
const HELLO: usize = 80;
const PROOF: usize = 32;
/// Bytes of a reply before its reason.
const HEAD: usize = 16;
/// Statuses of replies.
const STRANGER: u32 = 3;
const PROVE: u32 = 4;

/// First message of rank 0's handshake to rank 1. Nothing in it is secret.
fn hello() -> Vec<u8> {
    let mut bytes = b"tinynccl".to_vec();
    bytes.extend([0; 16]);
    // Version, purpose (a link), attached bytes; communicator, from, to, channel, origin, target.
    for number in [VERSION, 1, 0, 1, 0, 1, 2, 0, 1] {
        bytes.extend(number.to_le_bytes());
    }
    // Flags, streams, stream.
    for number in [OPTIONS.max_message as u32, OPTIONS.depth as u32, 0, 1, 0] {
        bytes.extend(number.to_le_bytes());
    }
    assert_eq!(bytes.len(), HELLO);
    bytes
}

/// Status and reason of the next reply.
fn reply(stream: &mut TcpStream) -> (u32, Vec<u8>) {
    let mut head = [0; HEAD];
    stream.read_exact(&mut head).unwrap();
    let mut detail = vec![0; u32::from_le_bytes(head[12..16].try_into().unwrap()) as usize];
    stream.read_exact(&mut detail).unwrap();
    (u32::from_le_bytes(head[8..12].try_into().unwrap()), detail)
}

/// The unauthenticated connection gets this reply, and is then closed.
fn is_turned_away(stream: &mut TcpStream) {
    let (status, reason) = reply(stream);
    assert_eq!(status, STRANGER);
    assert!(String::from_utf8_lossy(&reason).contains("secret"), "{}", String::from_utf8_lossy(&reason));
    assert_eq!(stream.read(&mut [0; 1]).unwrap(), 0);
}

fn loopback(endpoint: &Endpoint) -> SocketAddr {
    *endpoint.info().tcp.iter().find(|a| a.ip().is_loopback()).unwrap()
}

fn connect(from: &Endpoint, peer_rank: usize, info: &EndpointInfo) -> LinkPair {
    let to = ConnectTo { comm: 1, peer_rank, info, channel: 2, options: OPTIONS };
    from.connect(&to, &Doorbell::new().unwrap(), &|| None, PATIENCE).unwrap()
}

/// Rank 0 and rank 1 make their link, and it carries something.
fn link(low: &Endpoint, high: &Endpoint, high_info: &EndpointInfo) {
    let (mut a, mut b) = std::thread::scope(|s| {
        let a = s.spawn(|| connect(low, 1, high_info));
        let b = connect(high, 0, &low.info());
        (a.join().unwrap(), b)
    });
    send_from(&mut a, 0, 100);
    recv_into(&mut b, 0, 100);
}

#[test]
fn what_is_public_makes_nobody_rank_0_over_tcp() {
    let [low, high] = [0, 1].map(|rank| Endpoint::new(rank, SECRET, &config(TransportChoice::Tcp)).unwrap());
    // Before rank 0 dials: sends other bytes, the acceptor's proof, or a proof for another secret; or goes on as if it
    // was accepted.
    let mut strangers = Vec::new();
    for show in 0..4 {
        let mut stream = TcpStream::connect(loopback(&high)).unwrap();
        stream.write_all(&hello()).unwrap();
        let (status, challenge) = reply(&mut stream);
        assert_eq!((status, challenge.len()), (PROVE, 16 + PROOF));
        match show {
            0 => stream.write_all(&[7; PROOF]).unwrap(),
            1 => stream.write_all(&challenge[16..]).unwrap(),
            2 => stream.write_all(&[0; PROOF]).unwrap(),
            _ => stream.write_all(&[1; 4096]).unwrap(),
        }
        strangers.push(stream);
    }
    link(&low, &high, &high.info());
    for mut stream in strangers.drain(..3) {
        is_turned_away(&mut stream);
    }
    // Closed with bytes unread, maybe with a reset.
    let mut rest = Vec::new();
    let _ = strangers[0].read_to_end(&mut rest);
    assert!(rest.is_empty() || rest[8] == STRANGER as u8, "{rest:?}");
}

#[test]
fn a_rank_of_an_older_start_is_a_stranger_on_both_sides() {
    for transport in [TransportChoice::Tcp, TransportChoice::Shm, TransportChoice::Auto] {
        let [low, high] = [0, 1].map(|rank| Endpoint::new(rank, SECRET, &config(transport)).unwrap());
        let older = [0, 1].map(|rank| Endpoint::new(rank, Secret::new([41; 32]), &config(transport)).unwrap());
        // As if it had the addresses of the new start; and the other way round, a new rank that finds an old one.
        for (from, to) in [(&older[0], &high), (&low, &older[1])] {
            let info = to.info();
            let to = ConnectTo { comm: 1, peer_rank: 1, info: &info, channel: 2, options: OPTIONS };
            let e = from.connect(&to, &Doorbell::new().unwrap(), &|| None, PATIENCE).unwrap_err().to_string();
            assert!(e.contains("does not know this job's secret"), "{transport}: {e}");
        }
        link(&low, &high, &high.info());
    }
}

#[test]
fn a_replayed_hello_and_proof_are_turned_away() {
    let [low, high] = [0, 1].map(|rank| Endpoint::new(rank, SECRET, &config(TransportChoice::Tcp)).unwrap());
    let (listener, target) = (TcpListener::bind("127.0.0.1:0").unwrap(), loopback(&high));
    let between = EndpointInfo { tcp: vec![listener.local_addr().unwrap()], ..high.info() };
    let heard = Mutex::new(Vec::new());
    std::thread::scope(|s| {
        // A proxy on the path, which records the handshake and changes nothing.
        s.spawn(|| {
            let (mut dialer, _) = listener.accept().unwrap();
            let mut acceptor = TcpStream::connect(target).unwrap();
            let (mut back_from, mut back_to) = (acceptor.try_clone().unwrap(), dialer.try_clone().unwrap());
            let back = std::thread::spawn(move || std::io::copy(&mut back_from, &mut back_to));
            let mut bytes = vec![0; HELLO + PROOF];
            let (first, second) = bytes.split_at_mut(HELLO);
            for part in [first, second] {
                dialer.read_exact(part).unwrap();
                acceptor.write_all(part).unwrap();
            }
            *heard.lock().unwrap() = bytes;
            let _ = std::io::copy(&mut dialer, &mut acceptor);
            let _ = acceptor.shutdown(std::net::Shutdown::Write);
            let _ = back.join();
        });
        link(&low, &high, &between);
    });
    let heard = heard.into_inner().unwrap();
    let mut replayed = TcpStream::connect(target).unwrap();
    replayed.write_all(&heard).unwrap();
    assert_eq!(reply(&mut replayed).0, PROVE);
    is_turned_away(&mut replayed);
    // It was the right one: with its own connection it was welcome.
    link(&low, &high, &high.info());
}

/// Sends a packet, with descriptors or without.
fn send(socket: &OwnedFd, bytes: &[u8], fds: &[&OwnedFd]) {
    let fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(fds.is_empty() || control.push(SendAncillaryMessage::ScmRights(&fds)));
    let sent = rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL).unwrap();
    assert_eq!(sent, bytes.len());
}

/// Status of the next reply; `None` at the end.
fn packet(socket: &OwnedFd) -> Option<u32> {
    let mut bytes = [0; 1024];
    let (n, _) = rustix::net::recv(socket, &mut bytes, RecvFlags::empty()).unwrap();
    (n > 0).then(|| u32::from_le_bytes(bytes[8..12].try_into().unwrap()))
}

#[test]
fn what_is_public_makes_nobody_rank_0_over_shared_memory() {
    let [low, high] = [0, 1].map(|rank| Endpoint::new(rank, SECRET, &config(TransportChoice::Shm)).unwrap());
    let name = high.info().unix.unwrap();
    let memory = rustix::fs::memfd_create("stranger", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&memory, 64 << 20).unwrap();
    let bell = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
    for fds in [&[][..], &[&memory, &bell][..]] {
        let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
        rustix::net::connect(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap()).unwrap();
        send(&socket, &hello(), &[]);
        assert_eq!(packet(&socket), Some(PROVE));
        send(&socket, &[7; PROOF], fds);
        // Without the memory it is not worth an answer.
        assert_eq!(packet(&socket), (!fds.is_empty()).then_some(STRANGER));
        assert!(fds.is_empty() || packet(&socket).is_none());
    }
    link(&low, &high, &high.info());
}

#[test]
fn an_address_that_floods_a_rank_crowds_out_itself_alone() {
    let [low, high] = [0, 1].map(|rank| Endpoint::new(rank, SECRET, &config(TransportChoice::Tcp)).unwrap());
    // Before the flood, and slow.
    let mut first = TcpStream::connect(loopback(&high)).unwrap();
    let flood: Vec<TcpStream> = (0..300)
        .map(|_| {
            let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
            socket.bind(&SocketAddr::from(([127, 0, 0, 9], 0)).into()).unwrap();
            socket.connect(&loopback(&high).into()).unwrap();
            socket.into()
        })
        .collect();
    // Too many: its oldest goes.
    flood[0].set_read_timeout(Some(PATIENCE)).unwrap();
    assert_eq!((&flood[0]).read(&mut [0; 1]).unwrap_or(0), 0);
    first.set_read_timeout(Some(PATIENCE)).unwrap();
    first.write_all(&hello()).unwrap();
    assert_eq!(reply(&mut first).0, PROVE);
    link(&low, &high, &high.info());
}
