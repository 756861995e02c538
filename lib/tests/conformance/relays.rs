//! Links through other ranks: what only goes wrong there, over TCP, so that it runs everywhere.

use std::sync::Arc;
use std::time::Duration;

use crate::harness::*;
use tinynccl::config::TransportChoice;
use tinynccl::error::{Error, Result};
use tinynccl::transport::relay::{Routes, Traffic};
use tinynccl::transport::{ConnectTo, Doorbell, Endpoint, EndpointInfo, LinkPair};

/// Endpoints of ranks on a line: each reaches the next one.
fn line(ranks: usize) -> (Vec<Arc<Endpoint>>, Vec<EndpointInfo>) {
    let config = config(TransportChoice::Tcp);
    let endpoints: Vec<_> = (0..ranks).map(|rank| Arc::new(Endpoint::new(rank, SECRET, &config).unwrap())).collect();
    let world: Vec<EndpointInfo> = endpoints.iter().map(|e| e.info()).collect();
    for endpoint in &endpoints {
        endpoint.introduce(world.clone(), Routes::new(ranks, |a, b| b == a + 1));
    }
    (endpoints, world)
}

fn connect(
    from: &Endpoint,
    world: &[EndpointInfo],
    peer_rank: usize,
    channel: u32,
    time: Duration,
) -> Result<LinkPair> {
    let to = ConnectTo { comm: 0, peer_rank, info: &world[peer_rank], channel, options: OPTIONS };
    from.connect(&to, &Doorbell::new().unwrap(), &|| None, time)
}

/// Both ends of a link between ranks `a` and `b`.
fn between(endpoints: &[Arc<Endpoint>], world: &[EndpointInfo], [a, b]: [usize; 2], channel: u32) -> [LinkPair; 2] {
    std::thread::scope(|s| {
        [(a, b), (b, a)]
            .map(|(rank, peer)| s.spawn(move || connect(&endpoints[rank], world, peer, channel, PATIENCE).unwrap()))
            .map(|t| t.join().unwrap())
    })
}

#[test]
fn every_pair_of_a_line_talks_and_every_relay_counts() {
    let (endpoints, world) = line(4);
    let lens = [8, 70_001, 0];
    for (a, b) in [(0, 1), (0, 2), (0, 3), (1, 3)] {
        let [mut low, mut high] = between(&endpoints, &world, [a, b], 0);
        for (seq, len) in lens.into_iter().enumerate() {
            std::thread::scope(|s| {
                s.spawn(|| send_from(&mut low, seq as u32, len));
                recv_into(&mut high, seq as u32, len);
            });
        }
        assert_eq!((low.send.peer().peer, high.recv.peer().peer), (b, a));
    }
    let [messages, bytes] = [3, lens.iter().sum::<usize>() as u64];
    // Rank 1 relays for 0-2 and 0-3, rank 2 for 0-3 and 1-3.
    for (rank, pairs) in [(0, 0), (1, 2), (2, 2), (3, 0)] {
        let expected = Traffic { links: 0, messages: pairs * messages, bytes: pairs * bytes };
        // The links were dropped at both ends, which the relay finds out.
        until("the end of its links", || (endpoints[rank].traffic() == expected).then_some(()));
    }
    let paths: Vec<String> = endpoints[3].paths(false).iter().map(ToString::to_string).collect();
    assert_eq!(
        paths,
        [
            "rank 0 ↔ rank 3: no common subnet, through ranks 1 and 2",
            "rank 1 ↔ rank 3: no common subnet, through rank 2"
        ]
    );
}

#[test]
fn a_relay_is_needed_until_one_rank_of_each_pair_is_gone() {
    let (endpoints, world) = line(4);
    let needed = |rank: usize, gone: &[usize]| endpoints[rank].is_needed(&|r| gone.contains(&r));
    assert!(!needed(0, &[]) && needed(1, &[]) && needed(2, &[]) && !needed(3, &[]));
    assert!(!needed(1, &[0]) && needed(1, &[2]) && !needed(1, &[2, 3]) && needed(2, &[0]));
    // And as long as there is a link.
    let links = between(&endpoints, &world, [0, 2], 0);
    // The relay counts it a moment after both ends have it. While these are there that makes no difference: see above.
    until("the link at the relay", || needed(1, &[0, 2]).then_some(()));
    drop(links);
    until("the end of the link", || (!needed(1, &[0, 2])).then_some(()));
}

#[test]
fn when_an_end_goes_the_relay_goes_on_for_others() {
    let (endpoints, world) = line(3);
    let [first, mut left] = between(&endpoints, &world, [0, 2], 0);
    let [mut low, mut high] = between(&endpoints, &world, [0, 2], 1);
    drop(first);
    let e = until("the loss", || left.recv.peek().map(drop).err()).to_string();
    for words in [
        "rank 2 lost rank 0",
        "through rank 1",
        "rank 1 of the world, which relays between its ranks 0 and 2, lost rank 0",
    ] {
        assert!(e.contains(words), "{e}");
    }
    send_from(&mut high, 0, 70_001);
    recv_into(&mut low, 0, 70_001);
}

#[test]
fn when_the_relay_goes_both_ends_name_it_and_each_other() {
    let (mut endpoints, world) = line(3);
    let links = between(&endpoints, &world, [0, 2], 0);
    drop(endpoints.remove(1));
    for (mut link, [rank, peer]) in links.into_iter().zip([[0, 2], [2, 0]]) {
        let e = until("the loss", || link.recv.peek().map(drop).err());
        let text = e.to_string();
        assert!(matches!(e, Error::PeerLost { rank: r, peer: p, .. } if (r, p) == (rank, peer)), "{text}");
        assert!(text.contains("rank 1 of the world") && text.contains("closed its communicator and left"), "{text}");
    }
    // A rank that wants a link now gets the error, too.
    let e = connect(&endpoints[0], &world, 2, 1, PATIENCE).unwrap_err();
    let text = e.to_string();
    assert!(matches!(e, Error::PeerLost { rank: 0, peer: 2, .. }) && text.contains("through rank 1"), "{text}");
}

#[test]
fn a_far_end_that_does_not_come_ends_the_wait_and_the_next_one_works() {
    let (endpoints, world) = line(3);
    let short = Duration::from_millis(100);
    for (rank, peer) in [(2, 0), (0, 2)] {
        let e = connect(&endpoints[rank], &world, peer, 0, short).unwrap_err();
        let text = e.to_string();
        assert!(matches!(&e, Error::Timeout { missing, .. } if *missing == [peer]), "{text}");
        assert!(text.contains("rank 0 ↔ rank 2: no common subnet, through rank 1"), "{text}");
    }
    // The relay may not have seen yet that rank 0 gave the first one up.
    let [mut low, mut high] = between(&endpoints, &world, [0, 2], 1);
    send_from(&mut low, 0, 8);
    recv_into(&mut high, 0, 8);
    // A relay that is dropped while it makes a link does not wait for it.
    let asking = endpoints[0].clone();
    std::thread::scope(|s| {
        let end = s.spawn(|| connect(&asking, &world, 2, 5, PATIENCE).unwrap_err());
        until("the request", || (Arc::strong_count(&endpoints[0]) == 2).then_some(()));
        drop(endpoints);
        let text = end.join().unwrap().to_string();
        assert!(text.contains("rank 1"), "{text}");
    });
}

#[test]
fn ends_that_want_different_links_both_hear_it() {
    let (endpoints, world) = line(3);
    let errors = [(0, 2), (2, 0)];
    let errors = std::thread::scope(|s| {
        errors
            .map(|(rank, peer_rank)| {
                let (endpoint, info) = (&endpoints[rank], &world[peer_rank]);
                s.spawn(move || {
                    let options = tinynccl::transport::LinkOptions { depth: 4 + rank, ..OPTIONS };
                    let to = ConnectTo { comm: 0, peer_rank, info, channel: 0, options };
                    endpoint.connect(&to, &Doorbell::new().unwrap(), &|| None, PATIENCE).unwrap_err().to_string()
                })
            })
            .map(|t| t.join().unwrap())
    });
    for e in errors {
        assert!(e.contains("depth 4") && e.contains("depth 6") && e.contains("same configuration"), "{e}");
    }
}

#[test]
fn a_rank_that_is_not_on_the_way_does_not_relay() {
    let (endpoints, world) = line(4);
    // A rank that believes in other subnets than the others do.
    let strange = Endpoint::new(0, SECRET, &config(TransportChoice::Tcp)).unwrap();
    strange.introduce(world.clone(), Routes::new(4, |a, b| (a, b) == (0, 3) || (a, b) == (1, 3)));
    let e = connect(&strange, &world, 1, 0, PATIENCE).unwrap_err().to_string();
    assert!(e.contains("rank 3 cannot relay") && e.contains("do not need rank 3"), "{e}");
    drop(endpoints);
}
