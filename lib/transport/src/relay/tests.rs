//! Junctions moved by hand, where the order of events is ours, and a forwarder with its thread.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::junction::Junction;
use super::{Forwarder, Traffic, wrap};
use crate::{Doorbell, LinkOptions, LinkPair, Received, inproc};
use tinynccl_plan::error::Error;
use tinynccl_plan::wire::Header;

const OPTIONS: LinkOptions = LinkOptions { max_message: 3000, depth: 4 };
const LIMIT: Duration = Duration::from_secs(60);
/// Rank of the relay; the ends are 0 and 2.
const RELAY: usize = 1;

/// A link between `rank` and the relay: both ends of it.
fn hop(rank: usize, bell: &Arc<Doorbell>) -> (LinkPair, LinkPair) {
    let hub = inproc::Hub::new();
    let to =
        |rank: usize, peer_rank: usize| inproc::ConnectTo { comm: 0, rank, peer_rank, channel: 0, options: OPTIONS };
    std::thread::scope(|s| {
        let end = s.spawn(|| hub.connect(&to(rank, RELAY), &Doorbell::new().unwrap(), &|| None, LIMIT).unwrap());
        let relay = hub.connect(&to(RELAY, rank), bell, &|| None, LIMIT).unwrap();
        (end.join().unwrap(), relay)
    })
}

/// The two ends of a relayed link, and the junction between them.
fn joined(bell: &Arc<Doorbell>) -> ([LinkPair; 2], Junction) {
    let ((low, from_low), (high, from_high)) = (hop(0, bell), hop(2, bell));
    let ends = [wrap(low, 2, RELAY, "rank 1"), wrap(high, 0, RELAY, "rank 1")];
    (ends, Junction::new(RELAY, [0, 2], [from_low, from_high], OPTIONS.max_message))
}

fn header(seq: u32, len: usize) -> Header {
    Header { seq, len: len as u32, ..Header::default() }
}

fn payload(seq: u32, len: usize) -> Vec<u8> {
    (0..len).map(|i| (i as u32 * 7 + seq * 13) as u8).collect()
}

fn send(link: &mut LinkPair, seq: u32, len: usize) -> Result<bool, Error> {
    link.send.send_from(&header(seq, len), &payload(seq, len))
}

/// Receives a message if it is here, and checks it.
fn recv(link: &mut LinkPair, seq: u32, len: usize) -> Result<bool, Error> {
    let mut dst = vec![0; len];
    match link.recv.recv_into(&header(seq, len), &mut dst)? {
        Received::Pending => return Ok(false),
        Received::Done => assert_eq!(dst, payload(seq, len)),
        Received::Mismatch(other) => panic!("expected message {seq}, got {other}"),
    }
    Ok(true)
}

/// Advances until nothing moves; what was forwarded.
fn settle(junction: &mut Junction) -> (u64, u64) {
    let mut sum = (0, 0);
    loop {
        let moved = junction.advance();
        sum = (sum.0 + moved.messages, sum.1 + moved.bytes);
        if !moved.any {
            return sum;
        }
    }
}

/// The detail of a loss that rank `rank` sees, of rank `peer`.
fn lost<T>(result: Result<T, Error>, rank: usize, peer: usize) -> String {
    match result.map(drop) {
        Err(Error::PeerLost { rank: r, peer: p, detail, .. }) if (r, p) == (rank, peer) => detail,
        other => panic!("expected the loss of rank {peer} at rank {rank}, got {other:?}"),
    }
}

fn until(what: &str, mut step: impl FnMut() -> bool) {
    let start = Instant::now();
    while !step() {
        assert!(start.elapsed() < LIMIT, "{what} did not come about");
        std::thread::yield_now();
    }
}

#[test]
fn a_message_goes_on_alone_in_both_directions() {
    let ([mut low, mut high], mut junction) = joined(&Doorbell::new().unwrap());
    assert_eq!((low.send.peer().peer, low.recv.peer().rank, low.kind), (2, 0, "relayed"));
    for (seq, len) in [0, 1, 24, 25, 2999, 3000].into_iter().enumerate() {
        let seq = seq as u32;
        // Cut-through: each is there before the next one is sent.
        assert!(send(&mut low, seq, len).unwrap());
        assert!(!recv(&mut high, seq, len).unwrap());
        assert_eq!(settle(&mut junction), (1, len as u64));
        assert!(recv(&mut high, seq, len).unwrap());
        assert!(send(&mut high, seq, len).unwrap());
        assert_eq!(settle(&mut junction), (1, len as u64));
        assert!(recv(&mut low, seq, len).unwrap());
    }
    assert!(!junction.is_over());
}

#[test]
fn a_slow_receiver_stops_the_sender_and_not_the_other_direction() {
    let ([mut low, mut high], mut junction) = joined(&Doorbell::new().unwrap());
    let fill = |low: &mut LinkPair, junction: &mut Junction, first: u32| {
        let mut seq = first;
        loop {
            if send(low, seq, 3000).unwrap() {
                seq += 1;
            } else if settle(junction) == (0, 0) {
                return seq;
            }
        }
    };
    let all = fill(&mut low, &mut junction, 0);
    // What one link holds, twice: the junction itself holds nothing.
    let (mut alone, _other) = hop(0, &Doorbell::new().unwrap());
    let one = (0..).take_while(|&seq| send(&mut alone, seq, 3000).unwrap()).count() as u32;
    assert_eq!(all, 2 * one);
    assert!(send(&mut high, 0, 3000).unwrap());
    assert_eq!(settle(&mut junction), (1, 3000));
    assert!(recv(&mut low, 0, 3000).unwrap());
    // One is taken, and one more fits.
    assert!(recv(&mut high, 0, 3000).unwrap());
    let mut sent = fill(&mut low, &mut junction, all);
    assert!(sent > all);
    for seq in 1..sent {
        until("a message", || {
            settle(&mut junction);
            recv(&mut high, seq, 3000).unwrap()
        });
    }
    sent = fill(&mut low, &mut junction, sent) - sent;
    assert_eq!(sent, all, "all room is there again");
}

#[test]
fn the_death_of_an_end_comes_after_its_messages_with_the_reason() {
    for (gone, stays) in [(0, 2), (2, 0)] {
        let (ends, mut junction) = joined(&Doorbell::new().unwrap());
        let [low, high] = ends;
        let (mut dies, mut lives) = if gone == 0 { (low, high) } else { (high, low) };
        assert!(send(&mut dies, 0, 3000).unwrap() && send(&mut dies, 1, 8).unwrap());
        drop(dies);
        settle(&mut junction);
        assert!(recv(&mut lives, 0, 3000).unwrap() && recv(&mut lives, 1, 8).unwrap());
        settle(&mut junction);
        let detail = lost(recv(&mut lives, 2, 8), stays, gone);
        let words =
            ["rank 1 of the world, which relays between its ranks 0 and 2".to_owned(), format!("lost rank {gone}")];
        assert!(words.iter().all(|w| detail.contains(w)), "{detail}");
        // The same from every call, of both halves.
        assert_eq!(lost(lives.recv.peek().map(drop), stays, gone), detail);
        assert_eq!(lost(lives.recv.check_peer(), stays, gone), detail);
        assert_eq!(lost(send(&mut lives, 0, 8), stays, gone), detail);
        assert_eq!(lost(lives.send.check_peer(), stays, gone), detail);
        assert_eq!(lost(lives.send.arm(), stays, gone), detail);
        assert!(junction.is_over());
    }
}

#[test]
fn who_only_sends_learns_of_the_death_too() {
    let ([mut low, high], mut junction) = joined(&Doorbell::new().unwrap());
    drop(high);
    settle(&mut junction);
    assert!(junction.is_over());
    drop(junction);
    let detail = lost(low.send.check_peer(), 0, 2);
    assert!(detail.contains("rank 2 is and rank 1 closed the link"), "{detail}");
}

#[test]
fn who_sends_to_the_dead_is_not_stopped_by_what_it_has_not_received() {
    let ([mut low, mut high], mut junction) = joined(&Doorbell::new().unwrap());
    // The link to `low` is full, so the notice does not fit.
    let mut unread = 0;
    until("no room", || {
        let full = !send(&mut high, unread, 3000).unwrap();
        unread += u32::from(!full);
        settle(&mut junction) == (0, 0) && full
    });
    drop(high);
    for seq in 0..200 {
        until("room", || {
            settle(&mut junction);
            send(&mut low, seq, 3000).unwrap()
        });
    }
    assert!(!junction.is_over());
    for seq in 0..unread {
        settle(&mut junction);
        assert!(recv(&mut low, seq, 3000).unwrap());
    }
    settle(&mut junction);
    lost(recv(&mut low, unread, 8), 0, 2);
    assert!(junction.is_over());
}

#[test]
fn the_death_of_the_relay_names_it_and_the_other_end() {
    let ([mut low, mut high], mut junction) = joined(&Doorbell::new().unwrap());
    assert!(send(&mut low, 0, 100).unwrap());
    settle(&mut junction);
    drop(junction);
    assert!(recv(&mut high, 0, 100).unwrap());
    for (end, rank, peer) in [(&mut low, 0, 2), (&mut high, 2, 0)] {
        let detail = lost(recv(end, 1, 8), rank, peer);
        let words = format!("rank 1 of the world, which relays between its ranks {rank} and {peer}");
        assert!(detail.contains(&words) && detail.contains("rank 1 is gone"), "{detail}");
        assert_eq!(end.recv.peer().address, "through rank 1: rank 1 at ".to_owned() + &here());
    }
}

fn here() -> String {
    format!("thread of process {}", std::process::id())
}

#[test]
fn a_relay_that_leaves_says_so_to_both_ends() {
    let forwarder = Forwarder::start(RELAY).unwrap();
    let ([mut low, mut high], junction) = joined(forwarder.bell());
    forwarder.add(junction);
    assert!(send(&mut low, 0, 3000).unwrap());
    until("a message", || recv(&mut high, 0, 3000).unwrap());
    drop(forwarder);
    for (end, rank, peer) in [(&mut low, 0, 2), (&mut high, 2, 0)] {
        let detail = lost(recv(end, 1, 8), rank, peer);
        assert!(detail.ends_with("closed its communicator and left"), "{detail}");
    }
}

#[test]
fn the_thread_serves_many_links_counts_and_sleeps_when_idle() {
    let forwarder = Forwarder::start(RELAY).unwrap();
    let turns_settle = || {
        let mut before = forwarder.turns();
        // A busy thread iterates far more than once in this time.
        until("sleep", || {
            std::thread::sleep(Duration::from_millis(20));
            let now = forwarder.turns();
            std::mem::replace(&mut before, now) == now
        });
    };
    turns_settle();
    let links: Vec<[LinkPair; 2]> = (0..5)
        .map(|_| {
            let (ends, junction) = joined(forwarder.bell());
            forwarder.add(junction);
            ends
        })
        .collect();
    turns_settle();
    let (messages, len) = (300u32, |seq: u32| [0, 24, 1000, 3000][seq as usize % 4]);
    std::thread::scope(|s| {
        for end in links.into_iter().flatten() {
            s.spawn(move || {
                let mut end = end;
                let (mut sent, mut received) = (0, 0);
                until("all messages", || {
                    if sent < messages && send(&mut end, sent, len(sent)).unwrap() {
                        sent += 1;
                    }
                    if received < messages && recv(&mut end, received, len(received)).unwrap() {
                        received += 1;
                    }
                    sent == messages && received == messages
                });
                // Both have all before one of them goes.
                assert!(send(&mut end, sent, 0).unwrap());
                until("the last one", || recv(&mut end, received, 0).unwrap());
            });
        }
    });
    let bytes = 10 * (0..messages).map(len).sum::<usize>() as u64;
    until("the end of all links", || forwarder.traffic().links == 0);
    assert_eq!(forwarder.traffic(), Traffic { links: 0, messages: 10 * (u64::from(messages) + 1), bytes });
    turns_settle();
}
