//! Members that go on over another stream, and clients that must not.

use super::*;
use crate::bootstrap::admission::{answer_again, link_secret};
use crate::bootstrap::resume::Ways;

/// Two members, each of which has the table.
fn two(server: &Server) -> (Raw, Raw, Ways) {
    let ((mut zero, _), (mut one, ways)) = (member(server, 0, 2), member(server, 1, 2));
    for raw in [&mut zero, &mut one] {
        while !matches!(raw.recv(), Some(ToRank::Table { .. })) {}
    }
    (zero, one, ways)
}

/// A member by hand, and what it knows of the ways to its store.
fn member(server: &Server, rank: u32, world_size: u32) -> (Raw, Ways) {
    let address = address(server);
    let mut raw = Raw::connect(address);
    raw.hello(rank, world_size);
    let links = link_secret(&SECRET, &raw.welcomed());
    raw.tell(&ToStore::Register { info: Value::Null });
    let (rank, world_size) = (rank as usize, world_size as usize);
    (raw, Ways { rank, world_size, secret: SECRET, links, addresses: vec![address], address })
}

impl Raw {
    fn tell(&mut self, message: &ToStore) {
        self.send(&encode(message).unwrap());
    }

    /// Everything up to a goodbye of `rank`'s, without the counts of bytes.
    fn until_left(&mut self, rank: usize) -> Vec<ToRank> {
        let mut heard = Vec::new();
        loop {
            match self.recv().expect("the store is there") {
                ToRank::Left { rank: left } if left == rank => return heard,
                ToRank::Took { .. } => {}
                message => heard.push(message),
            }
        }
    }

    /// Asks to go on as a member.
    fn ask(ways: &Ways) -> Raw {
        let mut raw = Raw::connect(ways.address);
        let hello = Hello { nonce: [7; 16], rank: ways.rank as u32, world_size: ways.world_size as u32 };
        raw.send(&hello.encode());
        let Some(ToRank::Challenge { nonce, .. }) = raw.recv() else { panic!("no challenge") };
        raw.tell(&ToStore::Resume { proof: answer_again(&ways.links, &hello, &nonce) });
        raw
    }
}

fn abort(comm: u32) -> ToStore {
    ToStore::Abort { comm, reason: String::new() }
}

fn heard_abort(comm: u32, from: usize) -> ToRank {
    ToRank::Abort { from, comm, reason: String::new() }
}

#[test]
fn every_message_arrives_once_over_all_streams_of_a_member() {
    let server = start(2);
    let (mut zero, mut one, mut ways) = two(&server);
    let mut former = Vec::new();
    for comm in 0..20 {
        // Some are in the stream that is given up, some were never in it.
        one.0.queue(&abort(2 * comm)).unwrap();
        if comm % 2 == 0 {
            one.0.flush().unwrap();
        }
        one.0.queue(&abort(2 * comm + 1)).unwrap();
        zero.tell(&abort(comm));
        former.push(ways.resume(&mut one.0, || false).expect("the store is there"));
        if comm % 3 == 0 {
            one.0.flush().unwrap();
        }
    }
    one.tell(&ToStore::Bye { reason: String::new() });
    let heard = zero.until_left(1);
    assert_eq!(heard, (0..40).map(|comm| heard_abort(comm, 1)).collect::<Vec<_>>());
    // Nobody was lost with the streams that were given up.
    drop(former);
    zero.tell(&ToStore::Bye { reason: String::new() });
    while let Some(message) = one.recv() {
        assert!(!matches!(message, ToRank::Lost { .. }), "{message:?}");
    }
}

#[test]
fn the_store_goes_on_too() {
    let server = start(2);
    let (mut zero, mut one, mut ways) = two(&server);
    let mut former = Vec::new();
    for comm in 0..20 {
        zero.tell(&abort(comm));
        // What it has read of the stream that it gives up stays read.
        if comm % 2 == 0 {
            while one.recv() != Some(heard_abort(comm, 0)) {}
        }
        former.push(ways.resume(&mut one.0, || false).expect("the store is there"));
    }
    zero.tell(&ToStore::Bye { reason: String::new() });
    assert_eq!(one.until_left(0), [heard_abort(19, 0)]);
}

#[test]
fn only_a_member_goes_on() {
    let server = start(3);
    let (mut one, ways) = member(&server, 1, 3);
    let of = |rank| Ways { rank, world_size: 3, addresses: ways.addresses.clone(), ..ways };
    // The job's secret alone, or that of an older start, is not enough.
    let older = Ways { links: SECRET, ..of(1) };
    assert!(Raw::ask(&older).rejected().contains("wrong secret"));
    // Nobody has come with this rank, or with such a one.
    assert!(Raw::ask(&of(2)).rejected().contains("rank 2 is no member any more"));
    assert!(Raw::ask(&of(7)).rejected().contains("rank 7 is no member any more"));
    // Something else than the count of bytes, and a count that cannot be.
    let mut raw = Raw::ask(&of(1));
    assert!(matches!(raw.recv(), Some(ToRank::Resumed { .. })));
    raw.tell(&abort(0));
    assert!(raw.rejected().contains("expected a count of bytes"));
    // It has asked again since: the first try is over, whatever is said there.
    let mut first = Raw::ask(&of(1));
    assert!(matches!(first.recv(), Some(ToRank::Resumed { .. })));
    let mut second = of(1);
    let former = second.resume(&mut one.0, || false).expect("rank 1 is a member");
    first.0.queue(&ToStore::Took { bytes: 0 }).unwrap();
    // The store may have closed it.
    let _ = first.0.flush();
    assert_eq!(first.recv(), None);
    drop(former);
    one.tell(&ToStore::Bye { reason: "enough".to_owned() });
    while one.recv().is_some() {}
    assert!(Raw::ask(&of(1)).rejected().contains("rank 1 is no member any more"));
}

#[test]
fn a_count_that_cannot_be_loses_the_member() {
    let server = start(2);
    let (mut zero, _one, ways) = two(&server);
    let mut raw = Raw::ask(&ways);
    assert!(matches!(raw.recv(), Some(ToRank::Resumed { .. })));
    raw.tell(&ToStore::Took { bytes: 1 << 40 });
    match zero.recv() {
        Some(ToRank::Lost { rank: 1, detail }) => assert!(detail.contains("broke the protocol"), "{detail}"),
        other => panic!("{other:?}"),
    }
}
