//! The store and its clients together: ranks as threads, unauthenticated clients as raw sockets.

mod ending;
mod rejected;
mod resuming;
mod sealed;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use serde_json::{Value, json};

use super::wire::admission::Challenge;
use super::wire::connection::{Connection, encode};
use super::wire::frame::{Hello, MAGIC, MAX_FRAME};
use super::wire::message::{Bytes, ToRank, ToStore};
use super::wire::unique_id::PROTOCOL_VERSION;
use super::*;
use tinynccl_plan::Error;
use tinynccl_plan::wire::Header;
use tinynccl_sys::threads::{deadline_after, left};
use tinynccl_sys::{Config, Secret};

const SECRET: Secret = Secret::new([9; 32]);
/// Nothing here should ever take as long as this.
const LONG: Duration = Duration::from_secs(60);

fn config() -> Config {
    Config::default()
}

fn short() -> Config {
    Config::default().with(|c| c.connect_timeout = Duration::from_secs(1))
}

fn start(world_size: usize) -> Server {
    Server::start_with("127.0.0.1:0".parse().unwrap(), SECRET, world_size, &config(), server::LINGER).unwrap()
}

fn join(server: &Server, rank: usize, world_size: usize) -> tinynccl_plan::Result<Session> {
    Session::join(&server.unique_id(), rank, world_size, json!({ "rank": rank }), &config())
}

/// All ranks of a job, as threads while they join.
fn form(server: &Server, world_size: usize) -> Vec<Session> {
    std::thread::scope(|s| {
        let ranks: Vec<_> =
            (0..world_size).map(|rank| s.spawn(move || join(server, rank, world_size).unwrap())).collect();
        ranks.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

/// The events of a session, as a channel.
fn events(session: &Session) -> Receiver<Event> {
    let (send, receive) = channel();
    session.on_event(Box::new(move |e| drop(send.send(e.clone()))));
    receive
}

/// A client that speaks the protocol by hand.
struct Raw(Connection);

impl Raw {
    fn connect(address: SocketAddr) -> Raw {
        Raw(Connection::new(TcpStream::connect(address).unwrap(), false).unwrap())
    }

    fn send(&mut self, bytes: &[u8]) {
        self.0.queue_bytes(bytes).unwrap();
        assert!(self.0.flush().unwrap());
    }

    /// Sends a hello, and proves that it knows the secret.
    fn hello(&mut self, rank: u32, world_size: u32) {
        let hello = Hello { nonce: [rank as u8; 16], rank, world_size };
        self.send(&hello.encode(false));
        match self.recv() {
            Some(ToRank::Challenge { nonce, proof, .. }) => {
                let challenge = Challenge::received(&SECRET, hello, (&nonce, &proof), None).unwrap();
                let proof = challenge.answer(&SECRET);
                self.send(&encode(&ToStore::Proof { proof }).unwrap());
            }
            other => panic!("{other:?}"),
        }
    }

    /// The generation.
    fn welcomed(&mut self) -> [u8; 32] {
        match self.recv() {
            Some(ToRank::Welcome { generation, .. }) => generation.0.try_into().unwrap(),
            other => panic!("{other:?}"),
        }
    }

    fn register(address: SocketAddr, rank: u32, world_size: u32) -> Raw {
        let mut raw = Raw::connect(address);
        raw.hello(rank, world_size);
        raw.welcomed();
        raw.send(&encode(&ToStore::Register { info: Value::Null }).unwrap());
        raw
    }

    /// The next message; `None` at the end of the connection.
    fn recv(&mut self) -> Option<ToRank> {
        let deadline = deadline_after(LONG);
        let mut ended = false;
        loop {
            if let Some(message) = self.0.next(MAX_FRAME).unwrap() {
                return Some(message);
            }
            assert!(!left(deadline).is_zero(), "the store says nothing");
            if ended {
                return None;
            }
            ended = !self.await_bytes();
        }
    }

    /// False at the end of the connection.
    fn await_bytes(&mut self) -> bool {
        let mut fds = [rustix::event::PollFd::from_borrowed_fd(self.0.fd(), rustix::event::PollFlags::IN)];
        tinynccl_sys::threads::poll(&mut fds, LONG).unwrap();
        matches!(self.0.fill(), Ok(super::wire::connection::Fill::Open))
    }

    fn rejected(mut self) -> String {
        match self.recv() {
            Some(ToRank::Rejected { reason, .. }) => reason,
            other => panic!("{other:?}"),
        }
    }
}

fn address(server: &Server) -> SocketAddr {
    server.unique_id().addresses()[0]
}

#[test]
fn the_first_rank_says_how_many_there_are() {
    let server = Server::open("127.0.0.1:0".parse().unwrap(), SECRET, &config()).unwrap();
    let out_of_range = Raw::connect(address(&server));
    let reason = {
        let mut raw = out_of_range;
        raw.hello(3, 3);
        raw.rejected()
    };
    assert!(reason.contains("rank 3 of 3"), "{reason}");
    let mut first = Raw::register(address(&server), 1, 2);
    assert!(matches!(first.recv(), Some(ToRank::Waiting { missing, .. }) if missing == [0]));
    let mut other = Raw::register(address(&server), 0, 2);
    assert!(matches!(other.recv(), Some(ToRank::Table { infos }) if infos.len() == 2));
}

/// Nothing else ends their wait: the first one is notified, too.
#[test]
fn ranks_that_do_not_fit_together_all_hear_it() {
    for (rank, size, word) in [(0, 3, "world size 3, the store with 2"), (1, 2, "rank 1 is here already")] {
        let server = Server::open("127.0.0.1:0".parse().unwrap(), SECRET, &config()).unwrap();
        let observer = server.observer();
        assert_eq!(observer.standing(), Standing::Empty);
        let mut first = Raw::register(address(&server), 1, 2);
        assert!(matches!(first.recv(), Some(ToRank::Waiting { missing, .. }) if missing == [0]));
        let mut second = Raw::connect(address(&server));
        second.hello(rank, size);
        let reason = second.rejected();
        assert!(reason.contains(word), "{reason}");
        let reason = loop {
            match first.recv() {
                Some(ToRank::Waiting { .. }) => {}
                Some(ToRank::NotFormed { reason, .. }) => break reason,
                other => panic!("{other:?}"),
            }
        };
        assert!(reason.contains(word), "{reason}");
        drop(server);
        assert_eq!(observer.standing(), Standing::Over);
    }
}

#[test]
fn a_rank_that_waits_for_others_stops_when_asked() {
    use std::sync::atomic::{AtomicBool, Ordering};
    static STOP: AtomicBool = AtomicBool::new(false);
    let server = &start(2);
    let waits = std::thread::scope(|s| {
        let rank =
            s.spawn(move || tinynccl_sys::interrupt::watched(|| STOP.load(Ordering::Acquire), || join(server, 0, 2)));
        STOP.store(true, Ordering::Release);
        rank.join().unwrap()
    });
    assert!(matches!(&waits, Err(Error::Aborted { op, .. }) if op == "rendezvous"), "{waits:?}");
}

#[test]
fn all_ranks_learn_all_endpoints() {
    let server = start(5);
    for (rank, session) in form(&server, 5).iter().enumerate() {
        assert_eq!((session.rank(), session.world_size()), (rank, 5));
        let infos: Vec<Value> = (0..5).map(|r| json!({ "rank": r })).collect();
        assert_eq!(session.infos(), infos);
    }
}

#[test]
fn sixty_four_clients_meet_and_exchange() {
    let server = start(64);
    let sessions = form(&server, 64);
    let members: Vec<usize> = (0..64).collect();
    std::thread::scope(|s| {
        for session in &sessions {
            let members = &members;
            s.spawn(move || {
                let values = session.exchange("all", members, vec![session.rank() as u8; 100], LONG).unwrap();
                assert!(values.iter().enumerate().all(|(r, v)| *v == vec![r as u8; 100]));
            });
        }
    });
    let health = sessions[63].health(0).unwrap();
    assert_eq!(health.len(), 64);
    assert!(health.iter().all(|h| h.state == RankState::Alive));
}

#[test]
fn one_rank_is_a_job() {
    let server = start(1);
    let session = join(&server, 0, 1).unwrap();
    assert_eq!(session.exchange("k", &[0], vec![7], LONG).unwrap(), [vec![7]]);
}

#[test]
fn no_store_and_another_service_are_told_apart() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let id = UniqueId::new(SECRET, vec![listener.local_addr().unwrap()]);
    let ssh = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(b"SSH-2.0-OpenSSH_9.9\r\n").unwrap();
        let _ = stream.read_to_end(&mut Vec::new());
    });
    let e = Session::join(&id, 0, 1, Value::Null, &config()).unwrap_err().to_string();
    assert!(e.contains("not a tinynccl store"), "{e}");
    ssh.join().unwrap();
    let e = Session::join(&id, 0, 1, Value::Null, &short()).unwrap_err().to_string();
    assert!(e.contains("found no store") && e.contains("refused"), "{e}");
}

#[test]
fn missing_ranks_are_named_at_the_deadline_and_to_those_who_wait_longer() {
    let server = start(4);
    std::thread::scope(|s| {
        let patient = s.spawn(|| join(&server, 1, 4).unwrap_err());
        let mut seen = Raw::register(address(&server), 3, 4);
        while !matches!(seen.recv(), Some(ToRank::Waiting { missing, .. }) if missing == [0, 2]) {}
        drop(seen);
        let e = patient.join().unwrap().to_string();
        assert!(e.contains("rank 3 was lost") && e.contains("never came: ranks 0, 2"), "{e}");
    });
    let server = start(3);
    let id = server.unique_id();
    std::thread::scope(|s| {
        let patient = s.spawn(|| join(&server, 1, 3).unwrap_err());
        // A rank that was started wrongly is reported to those that wait for it.
        let mut misled = Raw::connect(id.addresses()[0]);
        misled.hello(2, 5);
        misled.rejected();
        let hasty = Session::join(&id, 0, 3, Value::Null, &short()).unwrap_err();
        assert!(matches!(&hasty, Error::Timeout { rank: 0, missing, .. } if missing.contains(&2)), "{hasty}");
        assert!(hasty.to_string().contains("started with world size 5"), "{hasty}");
        let e = patient.join().unwrap().to_string();
        assert!(e.contains("rank 0 has left") && e.contains("it waited") && e.contains("rank 2"), "{e}");
    });
}

#[test]
fn a_dropped_connection_is_a_lost_rank_and_a_goodbye_is_not() {
    let server = start(4);
    let address = address(&server);
    let (mut sessions, mut raw) = std::thread::scope(|s| {
        let server = &server;
        let ranks: Vec<_> = (0..3).map(|rank| s.spawn(move || join(server, rank, 4).unwrap())).collect();
        let raw = Raw::register(address, 3, 4);
        (ranks.into_iter().map(|t| t.join().unwrap()).collect::<Vec<_>>(), raw)
    });
    while !matches!(raw.recv(), Some(ToRank::Table { .. })) {}
    let (zero, one) = (events(&sessions[0]), events(&sessions[1]));
    drop(sessions.pop());
    for receiver in [&zero, &one] {
        assert_eq!(receiver.recv_timeout(LONG).unwrap(), Event::RankLeft { rank: 2 });
    }
    drop(raw);
    for receiver in [&zero, &one] {
        match receiver.recv_timeout(LONG).unwrap() {
            Event::RankLost { rank: 3, detail } => {
                assert!(detail.contains("goodbye") || detail.contains("reset"), "{detail}")
            }
            other => panic!("{other:?}"),
        }
    }
    // A handler that is added later gets the same events.
    let late = events(&sessions[0]);
    assert_eq!(late.recv_timeout(LONG).unwrap(), Event::RankLeft { rank: 2 });
    assert!(matches!(late.recv_timeout(LONG).unwrap(), Event::RankLost { rank: 3, .. }));
    let states: Vec<RankState> = sessions[0].health(0).unwrap().into_iter().map(|h| h.state).collect();
    assert_eq!(states[..3], [RankState::Alive, RankState::Alive, RankState::Left]);
    assert!(matches!(states[3], RankState::Lost(_)));
    let e = sessions[0].exchange("k", &[0, 3], vec![], LONG).unwrap_err();
    assert!(matches!(e, Error::PeerLost { rank: 0, peer: 3, .. }), "{e}");
}

#[test]
fn a_rank_that_leaves_as_a_relay_still_hears_of_the_others() {
    let server = start(3);
    let mut sessions = form(&server, 3);
    let last = sessions.pop().unwrap();
    let relay = sessions.pop().unwrap();
    let (zero, one) = (events(&sessions[0]), events(&relay));
    relay.leave();
    relay.leave();
    assert_eq!(zero.recv_timeout(LONG).unwrap(), Event::RankLeft { rank: 1 });
    let states = |session: &Session| session.health(0).unwrap().into_iter().map(|h| h.state).collect::<Vec<_>>();
    assert_eq!(states(&sessions[0]), [RankState::Alive, RankState::Left, RankState::Alive]);
    let e = sessions[0].exchange("k", &[0, 1], vec![], LONG).unwrap_err();
    assert!(matches!(e, Error::PeerLost { peer: 1, .. }) && e.to_string().contains("left"), "{e}");
    drop(last);
    assert_eq!(one.recv_timeout(LONG).unwrap(), Event::RankLeft { rank: 2 });
    assert_eq!(zero.recv_timeout(LONG).unwrap(), Event::RankLeft { rank: 2 });
    assert!(!relay.is_over());
    // The goodbye is no event any more.
    drop(relay);
    assert_eq!(states(&sessions[0]), [RankState::Alive, RankState::Left, RankState::Left]);
    assert!(zero.try_recv().is_err());
}

#[test]
fn a_rank_that_breaks_the_protocol_is_lost() {
    let server = start(2);
    let mut raw = Raw::register(address(&server), 1, 2);
    let session = join(&server, 0, 2).unwrap();
    let receiver = events(&session);
    raw.send(&[1, 0, 0, 0, b'?']);
    match receiver.recv_timeout(LONG).unwrap() {
        Event::RankLost { rank: 1, detail } => assert!(detail.contains("broke the protocol"), "{detail}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn exchanges_among_some_members_complete_in_their_order() {
    let server = start(4);
    let sessions = form(&server, 4);
    std::thread::scope(|s| {
        for session in &sessions {
            s.spawn(move || {
                let members: &[usize] = if session.rank() % 2 == 0 { &[2, 0] } else { &[1, 3] };
                for round in 0..20 {
                    let key = format!("{}-{round}", session.rank() % 2);
                    let values = session.exchange(&key, members, vec![session.rank() as u8, round], LONG).unwrap();
                    let expected: Vec<Vec<u8>> = members.iter().map(|&m| vec![m as u8, round]).collect();
                    assert_eq!(values, expected);
                }
            });
        }
    });
}

#[test]
fn an_exchange_names_who_did_not_come_and_wakes_the_others() {
    let server = start(4);
    let sessions = form(&server, 4);
    let all = [0, 1, 2, 3];
    std::thread::scope(|s| {
        let patient = s.spawn(|| sessions[1].exchange("k", &all, vec![1], LONG).unwrap_err());
        let hasty = sessions[0].exchange("k", &all, vec![0], Duration::from_millis(100)).unwrap_err();
        let missing = |e: &Error| match e {
            Error::Timeout { missing, .. } => missing.clone(),
            other => panic!("{other}"),
        };
        assert!(missing(&hasty).ends_with(&[2, 3]), "{hasty}");
        assert_eq!(missing(&patient.join().unwrap()), missing(&hasty));
        // Late, and notified at once.
        let late = sessions[2].exchange("k", &all, vec![2], LONG).unwrap_err();
        assert!(late.to_string().contains("rank 0 waited") && late.to_string().contains("gave up"), "{late}");
    });
}

#[test]
fn an_exchange_fails_when_a_member_goes_or_names_others() {
    let server = start(3);
    let mut sessions = form(&server, 3);
    let last = sessions.pop().unwrap();
    std::thread::scope(|s| {
        let waiting = s.spawn(|| sessions[0].exchange("k", &[0, 2], vec![], LONG).unwrap_err());
        drop(last);
        let e = waiting.join().unwrap();
        assert!(matches!(e, Error::PeerLost { peer: 2, .. }) && e.to_string().contains("left"), "{e}");
        let one = s.spawn(|| sessions[1].exchange("m", &[1, 0], vec![], LONG).unwrap_err());
        let zero = sessions[0].exchange("m", &[0, 1], vec![], LONG).unwrap_err();
        for e in [zero, one.join().unwrap()] {
            assert!(e.to_string().contains("[0, 1]") && e.to_string().contains("[1, 0]"), "{e}");
        }
    });
    for members in [vec![], vec![1], vec![0, 0], vec![0, 3]] {
        let e = sessions[0].exchange("x", &members, vec![], LONG).unwrap_err();
        assert!(matches!(e, Error::InvalidArgument { .. }), "{e}");
    }
    let e = sessions[0].exchange("x", &[0, 1], vec![0; 8 << 20], LONG).unwrap_err();
    assert!(e.to_string().contains("may send"), "{e}");
}

#[test]
fn abort_reaches_every_other_rank() {
    let server = start(3);
    let sessions = form(&server, 3);
    let receivers: Vec<_> = sessions.iter().map(events).collect();
    sessions[1].abort(7, "no more");
    for rank in [0, 2] {
        let expected = Event::Abort { from: 1, comm: 7, reason: "no more".into() };
        assert_eq!(receivers[rank].recv_timeout(LONG).unwrap(), expected);
    }
    sessions[0].abort(8, &"x".repeat(100_000));
    assert!(matches!(receivers[1].recv_timeout(LONG).unwrap(), Event::Abort { from: 0, comm: 8, .. }));
}

#[test]
fn health_shows_progress() {
    let server = start(2);
    let sessions = form(&server, 2);
    let progress = sessions[1].track(5);
    assert!(Arc::ptr_eq(&progress, &sessions[1].track(5)));
    progress.start(&Header { seq: 3, ..Header::default() });
    progress.wait_on(Some(0));
    let expected = progress.snapshot();
    let deadline = deadline_after(LONG);
    loop {
        let health = sessions[0].health(5).unwrap();
        assert_eq!((health[0].rank, health[1].rank, health[0].progress), (0, 1, None));
        if health[1].progress == Some(expected) {
            break;
        }
        assert!(!left(deadline).is_zero(), "{health:?}");
    }
    drop(progress);
    while sessions[0].health(5).unwrap()[1].progress.is_some() {
        assert!(!left(deadline).is_zero(), "a communicator that nobody uses is forgotten");
    }
}

#[test]
fn a_panicking_handler_does_not_stop_the_news() {
    let server = start(2);
    let mut sessions = form(&server, 2);
    sessions[0].on_event(Box::new(|_| panic!("expected by the test")));
    let receiver = events(&sessions[0]);
    sessions[1].abort(0, "a");
    drop(sessions.pop());
    assert!(matches!(receiver.recv_timeout(LONG).unwrap(), Event::Abort { .. }));
    assert_eq!(receiver.recv_timeout(LONG).unwrap(), Event::RankLeft { rank: 1 });
    assert!(sessions[0].health(0).is_ok());
}

#[test]
fn a_rank_that_fails_before_it_joins_is_named_at_once() {
    let server = start(3);
    let id = server.unique_id();
    let waiting = Config::default().with(|c| c.connect_timeout = Duration::from_secs(3600));
    let join = |rank| Session::join(&id, rank, 3, Value::Null, &waiting).unwrap_err().to_string();
    std::thread::scope(|s| {
        let zero = s.spawn(|| join(0));
        server.rank_failed(2, "was killed by signal 9 (SIGKILL)".to_owned());
        // Rank 1 comes later, and need not try again.
        for e in [zero.join().unwrap(), join(1)] {
            assert!(e.contains("rank 2 was killed by signal 9 (SIGKILL) before it had joined"), "{e}");
        }
    });
    let mut late = Raw::connect(address(&server));
    late.hello(1, 3);
    assert!(matches!(late.recv(), Some(ToRank::Rejected { again: false, .. })));
}

#[test]
fn a_failure_after_all_have_joined_is_the_connections_to_tell() {
    let server = start(2);
    let sessions = form(&server, 2);
    server.rank_failed(1, "exited with code 1".to_owned());
    assert_eq!(sessions[0].exchange("k", &[0], vec![7], LONG).unwrap(), [vec![7]]);
    assert!(sessions[0].health(0).unwrap().iter().all(|h| h.state == RankState::Alive));
}

#[test]
fn a_rank_that_goes_between_its_hello_and_its_registration_is_mentioned() {
    let server = start(2);
    let mut gone = Raw::connect(address(&server));
    gone.hello(1, 2);
    gone.welcomed();
    drop(gone);
    // The store looks at those that it has before it takes another one.
    let mut later = Raw::connect(address(&server));
    later.hello(1, 2);
    later.welcomed();
    let e = Session::join(&server.unique_id(), 0, 2, Value::Null, &short()).unwrap_err();
    assert!(matches!(&e, Error::Timeout { missing, .. } if *missing == [1]), "{e}");
    assert!(e.to_string().contains("rank 1 came from 127.0.0.1:"), "{e}");
}
