//! Admission of connections: unauthenticated ones are rejected, and do not keep others from being accepted.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::harness::*;
use tinynccl::Secret;
use tinynccl::config::TransportChoice;
use tinynccl::error::{Error, Result};
use tinynccl::transport::{ConnectTo, Doorbell, Endpoint, LinkOptions, LinkPair, inproc};

fn connect(from: &Endpoint, to: &Endpoint, peer_rank: usize, options: LinkOptions, time: Duration) -> Result<LinkPair> {
    let info = to.info();
    let to = ConnectTo { comm: 1, peer_rank, info: &info, channel: 2, options };
    from.connect(&to, &Doorbell::new().unwrap(), &|| None, time)
}

#[test]
fn strangers_are_turned_away_while_a_good_connection_succeeds() {
    for config in transports().into_iter().map(config).chain([sealed()]) {
        let [low, high] = [0, 1].map(|rank| Endpoint::new(rank, SECRET, &config).unwrap());
        let addr = *high.info().tcp.iter().find(|a| a.ip().is_loopback()).unwrap();
        // Silence and half a hello stay open all the time; garbage is closed on.
        let silent: Vec<TcpStream> = (0..20).map(|_| TcpStream::connect(addr).unwrap()).collect();
        let mut half = TcpStream::connect(addr).unwrap();
        half.write_all(b"tinynccl and then nothing").unwrap();
        let mut garbage = TcpStream::connect(addr).unwrap();
        garbage.write_all(&[b'G'; 4096]).unwrap();
        // Closed, maybe with a reset, without a reply.
        assert!(!matches!(garbage.read(&mut [0; 1]), Ok(n) if n > 0));
        // Another job's rank, and one that dials a rank that this is not.
        let other_job = Endpoint::new(0, Secret::new([1; 32]), &config).unwrap();
        let e = connect(&other_job, &high, 1, OPTIONS, PATIENCE).unwrap_err();
        assert!(e.to_string().contains("does not know this job's secret"), "{e}");
        let e = connect(&low, &high, 7, OPTIONS, PATIENCE).unwrap_err();
        assert!(e.to_string().contains("expected a connection to rank 1, got one to rank 7"), "{e}");

        let [a, b] = std::thread::scope(|s| {
            let a = s.spawn(|| connect(&low, &high, 1, OPTIONS, PATIENCE));
            let b = s.spawn(|| connect(&high, &low, 0, OPTIONS, PATIENCE));
            [a.join().unwrap().unwrap(), b.join().unwrap().unwrap()]
        });
        let (mut a, mut b) = (a, b);
        send_from(&mut a, 0, 100);
        recv_into(&mut b, 0, 100);
        drop((silent, half));
    }
}

#[test]
fn ranks_that_want_different_links_both_hear_it() {
    for transport in transports() {
        let endpoints = [0, 1].map(|rank| Endpoint::new(rank, SECRET, &config(transport)).unwrap());
        let errors = both(|rank| {
            let options = LinkOptions { depth: 4 + rank, ..OPTIONS };
            connect(&endpoints[rank], &endpoints[1 - rank], 1 - rank, options, PATIENCE).unwrap_err()
        });
        for e in errors {
            let text = e.to_string();
            assert!(matches!(e, Error::Protocol { .. }), "{text}");
            assert!(text.contains("rank 1 wants") && text.contains("depth 5") && text.contains("depth 4"), "{text}");
        }
    }
    let hub = inproc::Hub::new();
    let errors = both(|rank| {
        let options = LinkOptions { depth: 4 + rank, ..OPTIONS };
        let to = inproc::ConnectTo { comm: 0, rank, peer_rank: 1 - rank, channel: 0, options };
        hub.connect(&to, &Doorbell::new().unwrap(), &|| None, PATIENCE).unwrap_err().to_string()
    });
    assert!(errors.iter().all(|e| e.contains("depth: 4") && e.contains("depth: 5")), "{errors:?}");
}

/// The error of a call for a link that does not come about. The kernel may still be delivering the end of a connection
/// whose dialer has given up: then the acceptor has a link, to a rank that has left.
fn in_vain(connect: impl Fn() -> Result<LinkPair>) -> Error {
    loop {
        match connect() {
            Ok(mut link) => {
                let lost = until("the loss", || link.recv.check_peer().err());
                assert!(matches!(lost, Error::PeerLost { .. }), "{lost}");
            }
            Err(e) => return e,
        }
    }
}

#[test]
fn waiting_for_a_rank_that_does_not_come_is_finite_and_can_be_aborted() {
    let short = Duration::from_millis(60);
    for transport in transports() {
        let endpoints = [0, 1].map(|rank| Endpoint::new(rank, SECRET, &config(transport)).unwrap());
        for rank in [0, 1] {
            let (me, peer) = (&endpoints[rank], &endpoints[1 - rank]);
            let e = in_vain(|| connect(me, peer, 1 - rank, OPTIONS, short));
            assert!(matches!(&e, Error::Timeout { missing, .. } if *missing == [1 - rank]), "{e}");
            let asked = AtomicBool::new(false);
            let abort = || {
                // Not at once: in the middle of the wait.
                asked.swap(true, Ordering::Relaxed).then(|| Error::Aborted {
                    op: "connect".into(),
                    rank,
                    reason: "enough".into(),
                })
            };
            let info = peer.info();
            let to = ConnectTo { comm: 9, peer_rank: 1 - rank, info: &info, channel: 0, options: OPTIONS };
            let e = in_vain(|| me.connect(&to, &Doorbell::new().unwrap(), &abort, PATIENCE));
            assert!(matches!(e, Error::Aborted { .. }), "{e}");
        }
        // The dialers that gave up do not come back to haunt the ones that come later.
        let links = both(|rank| connect(&endpoints[rank], &endpoints[1 - rank], 1 - rank, OPTIONS, PATIENCE).unwrap());
        let [mut a, mut b] = links;
        send_from(&mut a, 0, 8);
        recv_into(&mut b, 0, 8);
    }
    let hub = inproc::Hub::new();
    let to = inproc::ConnectTo { comm: 0, rank: 0, peer_rank: 1, channel: 0, options: OPTIONS };
    let e = hub.connect(&to, &Doorbell::new().unwrap(), &|| None, short).unwrap_err();
    assert!(matches!(&e, Error::Timeout { missing, .. } if *missing == [1]), "{e}");
}

#[test]
fn nobody_at_the_address_is_a_lost_peer() {
    for transport in [TransportChoice::Tcp, TransportChoice::Shm, TransportChoice::Auto] {
        let low = Endpoint::new(0, SECRET, &config(transport)).unwrap();
        let gone = Endpoint::new(1, SECRET, &config(transport)).unwrap();
        let info = gone.info();
        drop(gone);
        let to = ConnectTo { comm: 0, peer_rank: 1, info: &info, channel: 0, options: OPTIONS };
        let e = low.connect(&to, &Doorbell::new().unwrap(), &|| None, PATIENCE).unwrap_err();
        assert!(matches!(e, Error::PeerLost { peer: 1, .. }) && e.to_string().contains("refused"), "{transport}: {e}");
    }
}

#[test]
fn both_ends_choose_alike_and_shared_memory_falls_back_to_tcp() {
    let auto = config(TransportChoice::Auto);
    let endpoints = [0, 1].map(|rank| Endpoint::new(rank, SECRET, &auto).unwrap());
    let [low, high] = &endpoints;
    assert_eq!(low.choose(&high.info()).0, "shm");
    assert_eq!(high.choose(&low.info()).0, "shm");
    let tcp = Endpoint::new(2, SECRET, &config(TransportChoice::Tcp)).unwrap();
    assert_eq!(low.choose(&tcp.info()).0, "tcp");
    assert_eq!(tcp.choose(&low.info()).0, "tcp");
    let mut far = high.info();
    far.host.boot_id = "another machine".into();
    assert_eq!(low.choose(&far), ("tcp", "they run on different machines".into()));
    let forced = Endpoint::new(0, SECRET, &config(TransportChoice::Shm)).unwrap();
    let to = ConnectTo { comm: 0, peer_rank: 1, info: &far, channel: 0, options: OPTIONS };
    let e = forced.connect(&to, &Doorbell::new().unwrap(), &|| None, PATIENCE).unwrap_err();
    assert!(matches!(e, Error::Unsupported { .. }), "{e}");

    // A Unix socket that is not there: the dialer falls back to TCP, and the acceptor takes what comes.
    let [a, b] = both(|rank| {
        let mut info = endpoints[1 - rank].info();
        info.unix = info.unix.map(|name| format!("{name}-nobody"));
        let to = ConnectTo { comm: 0, peer_rank: 1 - rank, info: &info, channel: 0, options: OPTIONS };
        endpoints[rank].connect(&to, &Doorbell::new().unwrap(), &|| None, PATIENCE).unwrap()
    });
    assert_eq!((a.kind, b.kind), ("tcp", "tcp"));
}

#[test]
fn many_links_at_once_go_to_the_right_ends() {
    let endpoints = [0, 1, 2].map(|rank| Endpoint::new(rank, SECRET, &config(TransportChoice::Auto)).unwrap());
    let endpoints = &endpoints;
    std::thread::scope(|s| {
        for rank in 0..3usize {
            for peer in (0..3usize).filter(|p| *p != rank) {
                for channel in 0..4u32 {
                    s.spawn(move || {
                        let info = endpoints[peer].info();
                        let to = ConnectTo { comm: 5, peer_rank: peer, info: &info, channel, options: OPTIONS };
                        let mut link =
                            endpoints[rank].connect(&to, &Doorbell::new().unwrap(), &|| None, PATIENCE).unwrap();
                        let id = |from: usize, to: usize| (from * 100 + to * 10) as u32 + channel;
                        send_from(&mut link, id(rank, peer), 50);
                        recv_into(&mut link, id(peer, rank), 50);
                    });
                }
            }
        }
    });
}
