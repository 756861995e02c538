//! Members that go on over another stream, and clients that must not.

use std::net::TcpListener;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;
use crate::bootstrap::client::resume::Ways;
use crate::bootstrap::wire::admission::link_secret;

/// Two members, each of which has the table.
fn two(server: &Server) -> (Raw, Raw, Ways) {
    let ((mut zero, _), (mut one, ways)) = (member(server, 0, 2), member(server, 1, 2));
    for raw in [&mut zero, &mut one] {
        while !matches!(raw.recv(), Some(ToRank::Table { .. })) {}
    }
    (zero, one, ways)
}

/// A member by hand, and its paths to the store.
fn member(server: &Server, rank: u32, world_size: u32) -> (Raw, Ways) {
    let address = address(server);
    let mut raw = Raw::connect(address);
    raw.hello(rank, world_size);
    let links = link_secret(&SECRET, &raw.welcomed());
    raw.tell(&ToStore::Register { info: Value::Null });
    let (rank, world_size) = (rank as usize, world_size as usize);
    (raw, Ways { rank, world_size, encrypt: false, secret: SECRET, links, addresses: vec![address], address, tries: 0 })
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

    /// Requests to go on as a member, with the number of the try.
    fn ask(ways: &Ways, number: u64) -> Raw {
        let mut raw = Raw::connect(ways.address);
        let hello = Hello { nonce: [7; 16], rank: ways.rank as u32, world_size: ways.world_size as u32 };
        raw.send(&hello.encode(false));
        let Some(ToRank::Challenge { nonce, proof, .. }) = raw.recv() else { panic!("no challenge") };
        let challenge = Challenge::received(&ways.secret, hello, (&nonce, &proof), None).unwrap();
        raw.tell(&ToStore::Resume { proof: challenge.answer_again(&ways.links), number });
        raw
    }
}

fn abort(comm: u32) -> ToStore {
    ToStore::Abort { comm, reason: String::new() }
}

fn abort_event(comm: u32, from: usize) -> ToRank {
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
    assert_eq!(heard, (0..40).map(|comm| abort_event(comm, 1)).collect::<Vec<_>>());
    // No rank was lost with the streams that were given up.
    drop(former);
    zero.tell(&ToStore::Bye { reason: String::new() });
    while let Some(message) = one.recv() {
        assert!(!matches!(message, ToRank::Lost { .. }), "{message:?}");
    }
}

#[test]
fn a_count_of_before_behind_a_newer_one_is_no_break() {
    let server = start(2);
    let (mut zero, mut one, mut ways) = two(&server);
    let mut former = Vec::new();
    for comm in 0..20 {
        // It waits in the stream that is given up, or was sent over it and has not arrived.
        let bytes = one.0.account();
        one.0.queue(&ToStore::Took { bytes }).unwrap();
        if comm % 2 == 0 {
            one.0.flush().unwrap();
        }
        zero.tell(&abort(comm));
        while one.recv() != Some(abort_event(comm, 0)) {}
        // That sends a newer count.
        former.push(ways.resume(&mut one.0, || false).expect("the store is there"));
        one.tell(&abort(comm));
    }
    one.tell(&ToStore::Bye { reason: String::new() });
    assert_eq!(zero.until_left(1), (0..20).map(|comm| abort_event(comm, 1)).collect::<Vec<_>>());
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
            while one.recv() != Some(abort_event(comm, 0)) {}
        }
        former.push(ways.resume(&mut one.0, || false).expect("the store is there"));
    }
    zero.tell(&ToStore::Bye { reason: String::new() });
    assert_eq!(one.until_left(0), [abort_event(19, 0)]);
}

#[test]
fn only_a_member_goes_on() {
    let server = start(3);
    let (mut one, ways) = member(&server, 1, 3);
    let of = |rank| Ways { rank, world_size: 3, addresses: ways.addresses.clone(), ..ways };
    // The job's secret alone, or that of an older start, is not enough.
    let older = Ways { links: SECRET, ..of(1) };
    assert!(Raw::ask(&older, 1).rejected().contains("wrong secret"));
    // No client has come with this rank, or with such a one.
    assert!(Raw::ask(&of(2), 1).rejected().contains("rank 2 is no member any more"));
    assert!(Raw::ask(&of(7), 1).rejected().contains("rank 7 is no member any more"));
    // Something else than the count of bytes, and a count that cannot be.
    let mut raw = Raw::ask(&of(1), 1);
    assert!(matches!(raw.recv(), Some(ToRank::Resumed { .. })));
    raw.tell(&abort(0));
    assert!(raw.rejected().contains("expected a count of bytes"));
    // It has tried again since: the first try is over, whatever is sent there.
    let mut first = Raw::ask(&of(1), 2);
    assert!(matches!(first.recv(), Some(ToRank::Resumed { .. })));
    let mut second = Ways { tries: 2, ..of(1) };
    let former = second.resume(&mut one.0, || false).expect("rank 1 is a member");
    first.0.queue(&ToStore::Took { bytes: 0 }).unwrap();
    // The store may have closed it.
    let _ = first.0.flush();
    assert_eq!(first.recv(), None);
    drop(former);
    one.tell(&ToStore::Bye { reason: "enough".to_owned() });
    while one.recv().is_some() {}
    assert!(Raw::ask(&of(1), 4).rejected().contains("rank 1 is no member any more"));
}

#[test]
fn a_count_that_cannot_be_loses_the_member() {
    let server = start(2);
    let (mut zero, _one, ways) = two(&server);
    let mut raw = Raw::ask(&ways, 1);
    assert!(matches!(raw.recv(), Some(ToRank::Resumed { .. })));
    raw.tell(&ToStore::Took { bytes: 1 << 40 });
    match zero.recv() {
        Some(ToRank::Lost { rank: 1, detail }) => assert!(detail.contains("broke the protocol"), "{detail}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_try_of_before_does_not_end_one_of_later() {
    let server = start(2);
    let (mut zero, one, ways) = two(&server);
    let mut later = Raw::ask(&ways, 5);
    assert!(matches!(later.recv(), Some(ToRank::Resumed { .. })));
    // It was in flight longer than the one that came after it.
    assert_eq!(Raw::ask(&ways, 4).recv(), None);
    let bytes = one.0.decoder.taken();
    later.tell(&ToStore::Took { bytes });
    while !matches!(later.recv(), Some(ToRank::Took { .. })) {}
    later.tell(&ToStore::Bye { reason: String::new() });
    assert_eq!(zero.until_left(1), []);
}

/// A relay in the middle, which resets both ends of a connection after some bytes, and then takes another one.
struct Cable {
    address: SocketAddr,
    connections: Arc<AtomicUsize>,
}

impl Cable {
    /// Starts a relay to `store`; each connection may carry as many bytes as `budget` returns.
    fn to(store: SocketAddr, mut budget: impl FnMut() -> usize + Send + 'static) -> Cable {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let connections = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&connections);
        std::thread::spawn(move || {
            while let Ok((near, _)) = listener.accept() {
                let Ok(far) = TcpStream::connect(store) else { return };
                counted.fetch_add(1, Ordering::Relaxed);
                let left = budget();
                std::thread::spawn(move || carry([near, far], left));
            }
        });
        Cable { address, connections }
    }
}

/// Carries bytes in both directions until `left` of them have passed, or one side ends: then nothing more arrives.
fn carry(mut ends: [TcpStream; 2], mut left: usize) {
    for end in &ends {
        end.set_nonblocking(true).unwrap();
        socket2::SockRef::from(end).set_linger(Some(Duration::ZERO)).unwrap();
    }
    let mut bytes = [0; 256];
    loop {
        for (from, to) in [(0, 1), (1, 0)] {
            let most = bytes.len().min(left);
            match ends[from].read(&mut bytes[..most]) {
                // The end of a process is not to look like a reset.
                Ok(0) if left > 0 => {
                    let _ = ends[to].shutdown(std::net::Shutdown::Both);
                    return;
                }
                Ok(n) => {
                    left -= n;
                    ends[to].set_nonblocking(false).unwrap();
                    if ends[to].write_all(&bytes[..n]).is_err() || left == 0 {
                        return;
                    }
                    ends[to].set_nonblocking(true).unwrap();
                }
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(_) => return,
            }
        }
        std::thread::sleep(Duration::from_micros(50));
    }
}

/// A rank goes on whenever its connection is reset, and the store, too: no exchange is lost or doubled, no rank is
/// lost.
#[test]
fn a_connection_that_is_reset_again_and_again_costs_nothing() {
    for encrypt in [false, true] {
        is_reset_again_and_again(encrypt);
    }
}

fn is_reset_again_and_again(encrypt: bool) {
    let config = config().with(|c| (c.heartbeat, c.encrypt) = (Duration::from_millis(20), encrypt));
    let server = Server::start_with("127.0.0.1:0".parse().unwrap(), SECRET, 3, &config, server::LINGER).unwrap();
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let budget = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        // More than it takes to go on.
        2048 + (state % 6000) as usize
    };
    let cable = Cable::to(address(&server), budget);
    let (id, far) = (server.unique_id(), UniqueId::new(SECRET, vec![cable.address]));
    let ids = [&id, &far, &far];
    let call = |rank: usize| {
        let session = Session::join(ids[rank], rank, 3, Value::Null, &config).unwrap();
        let news = events(&session);
        for n in 0..400u32 {
            let ours = (n + rank as u32).to_le_bytes().to_vec();
            let all = session.exchange(&format!("{n}"), &[0, 1, 2], ours, LONG).unwrap();
            assert_eq!(all, (0..3).map(|r| (n + r).to_le_bytes().to_vec()).collect::<Vec<_>>());
        }
        assert_eq!(news.try_iter().collect::<Vec<_>>(), []);
        session
    };
    let sessions: Vec<Session> = std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..3).map(|rank| scope.spawn(move || call(rank))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    assert!(sessions[0].health(0).unwrap().iter().all(|h| h.state == RankState::Alive));
    let connections = cable.connections.load(Ordering::Relaxed);
    assert!(connections > 10, "{connections}");
}
