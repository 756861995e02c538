//! The end of a store, in good order or not, and the ranks that it waits for.

use super::*;

#[test]
fn a_store_that_closes_in_order_is_not_lost_but_gives_no_answers() {
    let server = start(1);
    let session = join(&server, 0, 1).unwrap();
    let receiver = events(&session);
    drop(server);
    let e = loop {
        // The last messages may still be in flight.
        if let Err(e) = session.health(0) {
            break e.to_string();
        }
    };
    assert!(e.contains("closed in good order"), "{e}");
    drop(session);
    assert!(receiver.try_recv().is_err(), "no event");
}

/// Ranks whose number it did not know: the store stays with those that remain, and ends with the last of them.
#[test]
fn an_open_store_goes_on_without_its_owner() {
    let bind = "127.0.0.1:0".parse().unwrap();
    let server = Server::listen(bind, SECRET, None, true, &config(), Duration::ZERO).unwrap();
    let at = address(&server);
    let mut sessions = form(&server, 3);
    let ended = server.watch();
    sessions.remove(0).leave();
    drop(server);
    std::thread::scope(|s| {
        for (index, session) in sessions.iter().enumerate() {
            s.spawn(move || {
                let values = session.exchange("k", &[1, 2], vec![index as u8], LONG).unwrap();
                assert_eq!(values, [vec![0], vec![1]]);
            });
        }
    });
    drop(sessions);
    ended();
    assert!(TcpStream::connect(at).is_err(), "nobody listens any more");
}

/// A store of the test's own, as far as the welcome. It does not look at the proof.
fn let_in(listener: &std::net::TcpListener) -> Connection {
    let mut client = Raw(Connection::new(listener.accept().unwrap().0, false).unwrap());
    let hello = loop {
        if let Some(bytes) = client.0.decoder.hello().unwrap() {
            break Hello::decode(&bytes).unwrap().0;
        }
        client.await_bytes();
    };
    let mut connection = client.0;
    connection.queue(&Challenge::to(hello, &SECRET, None).unwrap().1).unwrap();
    connection.queue(&ToRank::Welcome { generation: Bytes(vec![0; 32]), addresses: Vec::new() }).unwrap();
    connection
}

/// A store that ends (or falls silent) at the will of the test.
fn fake_store(then: impl FnOnce(Connection) + Send + 'static) -> (UniqueId, std::thread::JoinHandle<()>) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let id = UniqueId::new(SECRET, vec![listener.local_addr().unwrap()]);
    let thread = std::thread::spawn(move || {
        let mut connection = let_in(&listener);
        connection.queue(&ToRank::Table { infos: vec![Value::Null] }).unwrap();
        // Came with the table: it must not wait for the next bytes.
        connection.queue(&ToRank::Left { rank: 4 }).unwrap();
        assert!(connection.flush().unwrap());
        then(connection);
    });
    (id, thread)
}

#[test]
fn a_store_that_dies_is_lost() {
    let (id, thread) = fake_store(drop);
    let session = Session::join(&id, 0, 1, Value::Null, &config()).unwrap();
    let receiver = events(&session);
    assert_eq!(receiver.recv_timeout(LONG).unwrap(), Event::RankLeft { rank: 4 });
    assert!(matches!(receiver.recv_timeout(LONG).unwrap(), Event::StoreLost { .. }));
    let e = session.health(0).unwrap_err().to_string();
    assert!(e.contains("the connection to the store is lost"), "{e}");
    assert!(session.exchange("k", &[0], vec![], LONG).is_ok(), "alone, it needs no store");
    thread.join().unwrap();
}

#[test]
fn a_store_that_is_stopped_makes_health_fail() {
    let (end, ended) = channel::<()>();
    let (id, thread) = fake_store(move |connection| {
        let _ = ended.recv();
        drop(connection);
    });
    let session = Session::join(&id, 0, 1, Value::Null, &config()).unwrap();
    let e = session.health(0).unwrap_err().to_string();
    assert!(e.contains("does not answer") && e.contains("stopped"), "{e}");
    drop(session);
    drop(end);
    thread.join().unwrap();
}

#[test]
fn a_new_job_takes_the_place_of_one_that_ends() {
    let first = start(1);
    let bind = address(&first);
    let session = join(&first, 0, 1).unwrap();
    session.close();
    session.close();
    // The old store is still there and replies that rank 0 has left; the new one follows.
    let id = first.unique_id();
    std::thread::scope(|s| {
        let again = s.spawn(|| Session::join(&id, 0, 1, json!("second"), &config()).unwrap());
        drop(first);
        let _second = Server::start_with(bind, SECRET, 1, &config(), server::LINGER).unwrap();
        assert_eq!(again.join().unwrap().infos(), [json!("second")]);
    });
}

#[test]
fn who_hosts_the_store_is_named_when_it_ends_before_all_have_come() {
    let server = start(3);
    let mut host = Raw::connect(address(&server));
    host.hello(1, 3);
    host.welcomed();
    host.send(&encode(&ToStore::Register { info: json!({ HOSTS_STORE: true }) }).unwrap());
    let waiting = host.recv().unwrap();
    assert!(matches!(waiting, ToRank::Waiting { host: Some(1), .. }), "{waiting:?}");

    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let id = UniqueId::new(SECRET, vec![listener.local_addr().unwrap()]);
    let store = std::thread::spawn(move || {
        let mut connection = let_in(&listener);
        connection.queue(&waiting).unwrap();
        assert!(connection.flush().unwrap());
    });
    let e = Session::join(&id, 0, 3, Value::Null, &config()).unwrap_err();
    assert!(matches!(e, Error::PeerLost { rank: 0, peer: 1, .. }), "{e}");
    store.join().unwrap();
}

/// A store that waits very long for goodbyes.
fn patient(world_size: usize) -> Server {
    let bind = "127.0.0.1:0".parse().unwrap();
    Server::start_with(bind, SECRET, world_size, &config(), Duration::from_secs(3600)).unwrap()
}

/// Dropping it ends, though sessions are open.
fn ends_at_once(server: Server) {
    let (done, ended) = channel();
    std::thread::spawn(move || {
        drop(server);
        done.send(()).unwrap();
    });
    ended.recv_timeout(LONG).expect("nobody is waited for");
}

#[test]
fn after_an_abort_of_all_the_store_waits_for_nobody() {
    let server = patient(3);
    let sessions = form(&server, 3);
    let receivers: Vec<_> = sessions.iter().map(events).collect();
    sessions[1].abort(0, "enough");
    assert!(matches!(receivers[0].recv_timeout(LONG).unwrap(), Event::Abort { .. }));
    ends_at_once(server);
    assert!(matches!(receivers[2].recv_timeout(LONG).unwrap(), Event::Abort { .. }), "all are told");
}

#[test]
fn after_a_loss_the_store_waits_for_nobody() {
    let server = patient(2);
    let lost = Raw::register(address(&server), 1, 2);
    let session = join(&server, 0, 2).unwrap();
    let receiver = events(&session);
    drop(lost);
    assert!(matches!(receiver.recv_timeout(LONG).unwrap(), Event::RankLost { rank: 1, .. }));
    ends_at_once(server);
}
