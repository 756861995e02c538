//! A relay between sockets of this process, and unauthenticated connections to its acceptor.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use socket2::SockRef;

use super::forwarder::Forwarder;
use super::hop::{RelayRequest, SourceRoute, relay_handshake};
use super::*;
use crate::handshake::{Caller, Hello};
use crate::rails::Net;
use crate::stream::{Failure, greet};
use crate::tcp::{SocketOptions, open};
use crate::wait::Wait;

const DEADLINE: Duration = Duration::from_secs(60);

/// Both ends of a connection; the first one is a relay's.
fn sockets() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let theirs = listener.accept().unwrap().0;
    ours.set_nonblocking(true).unwrap();
    theirs.set_read_timeout(Some(DEADLINE)).unwrap();
    (ours, theirs)
}

fn until(what: &str, mut is: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is() {
        assert!(start.elapsed() < DEADLINE, "{what}");
        std::thread::yield_now();
    }
}

#[test]
fn bytes_pass_both_ways_and_an_end_is_passed_when_they_have() {
    let forwarder = Forwarder::start(DEADLINE).unwrap();
    let ((near, mut dialer), (far, mut listener)) = (sockets(), sockets());
    forwarder.add("a test's".to_owned(), near, far);
    let data: Vec<u8> = (0..16u32 << 20).map(|i| (i >> 7) as u8 ^ i as u8).collect();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            dialer.write_all(&data).unwrap();
            dialer.shutdown(Shutdown::Write).unwrap();
            let mut back = Vec::new();
            dialer.read_to_end(&mut back).unwrap();
            assert_eq!(back, b"thanks");
        });
        let mut got = Vec::new();
        listener.read_to_end(&mut got).unwrap();
        assert!(got == data);
        // This half is still open.
        assert_eq!(forwarder.streams(), 1);
        listener.write_all(b"thanks").unwrap();
        listener.shutdown(Shutdown::Write).unwrap();
    });
    until("the end of the stream", || forwarder.streams() == 0);
}

#[test]
fn what_breaks_at_one_end_breaks_at_the_other() {
    let forwarder = Forwarder::start(DEADLINE).unwrap();
    let ((near, mut dialer), (far, listener)) = (sockets(), sockets());
    forwarder.add("a test's".to_owned(), near, far);
    SockRef::from(&listener).set_linger(Some(Duration::ZERO)).unwrap();
    drop(listener);
    let error = dialer.read(&mut [0]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    until("the end of the stream", || forwarder.streams() == 0);
}

#[test]
fn a_relay_that_leaves_waits_for_its_streams_and_not_for_ever() {
    let ((near, mut dialer), (far, mut listener)) = (sockets(), sockets());
    let forwarder = Forwarder::start(DEADLINE).unwrap();
    forwarder.add("a test's".to_owned(), near, far);
    std::thread::scope(|scope| {
        let shutting_down = scope.spawn(|| drop(forwarder));
        for _ in 0..100 {
            dialer.write_all(&[7; 1000]).unwrap();
            listener.read_exact(&mut [0; 1000]).unwrap();
        }
        assert!(!shutting_down.is_finished());
        drop((dialer, listener));
        shutting_down.join().unwrap();
    });
    let ((near, mut dialer), (far, _listener)) = (sockets(), sockets());
    let forwarder = Forwarder::start(Duration::ZERO).unwrap();
    forwarder.add("a test's".to_owned(), near, far);
    drop(forwarder);
    assert!(dialer.read(&mut [0]).is_err(), "reset, since it had not ended");
}

#[test]
fn an_unauthenticated_peer_gets_no_further_than_a_hello() {
    let never = || None;
    let wait = Wait::without_ranks(DEADLINE, &never);
    let hello = Caller::new(&RelayRequest, Secret::new([7; 32]), &[]).hello;
    for (hello, passed) in [(&[b'x'; Hello::BYTES][..], 0), (bytemuck::bytes_of(&hello), Hello::BYTES)] {
        let ((mut near, mut intruder), (mut far, mut server)) = (sockets(), sockets());
        intruder.write_all(hello).unwrap();
        intruder.write_all(&[b'x'; 10_000]).unwrap();
        server.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap();
        assert!(relay_handshake(&mut near, &mut far, &wait).is_err());
        drop((near, far));
        let mut got = Vec::new();
        // Reset, since the relay had not read all.
        let _ = server.read_to_end(&mut got);
        assert_eq!(got.len(), passed);
    }
}

#[test]
fn an_acceptor_relays_for_neighbours_of_the_job_alone() {
    let net = |change: fn(&mut Config)| {
        let mut config = Config::default().with(|c| c.interface = Some("lo".to_owned()));
        config.secret = Some(Secret::new([5; 32]));
        change(&mut config);
        Net::new(&config).unwrap()
    };
    let never = || None;
    let wait = Wait::without_ranks(DEADLINE, &never);
    let server: SocketAddr = "192.0.2.1:80".parse().unwrap();
    let dial = |net: &Net, secret: Secret, route: &[SocketAddr]| {
        let acceptor = net.listen().unwrap().0.acceptor_at(Ipv4Addr::LOCALHOST.into());
        let options = SocketOptions::for_messages(false);
        let mut socket = open(None, acceptor, &options, &wait).map_err(Failure::text)?;
        let route = SourceRoute::new(route);
        let caller = Caller::new(&RelayRequest, secret, bytemuck::bytes_of(&route));
        greet(&mut socket, &caller, &wait).map_err(Failure::text)
    };
    let relay = net(|_| ());
    let wrong = dial(&relay, Secret::new([6; 32]), &[server]).unwrap_err();
    assert!(wrong.contains("secret"), "{wrong}");
    let off = net(|config| config.net_relay_port = 0);
    assert!(dial(&off, off.inner.relays.key, &[server]).unwrap_err().contains("relays are off"));

    let key = relay.inner.relays.key;
    let refused = dial(&relay, key, &[server]).unwrap_err();
    assert!(refused.contains("for neighbours only"), "{refused}");
    let nowhere = dial(&relay, key, &[]).unwrap_err();
    assert!(nowhere.contains("expected 1 to 4 acceptors"), "{nowhere}");
}
