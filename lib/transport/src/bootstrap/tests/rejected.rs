//! Clients that do not belong to the job, and ranks whose settings differ.

use super::*;

#[test]
fn strangers_are_told_why_while_a_good_job_forms() {
    let server = start(3);
    let address = address(&server);
    let zero = std::thread::scope(|s| {
        let zero = s.spawn(|| join(&server, 0, 3).unwrap());
        // Until rank 0 is in, a second one would take its place.
        let mut probe = Raw::register(address, 1, 3);
        while !matches!(probe.recv(), Some(ToRank::Waiting { missing, .. }) if missing == [2]) {}

        // Unauthenticated connections, some with half a message: they stay open until the end.
        let mut silent: Vec<Raw> = (0..20).map(|_| Raw::connect(address)).collect();
        silent[0].send(&MAGIC);
        silent[1].hello(2, 3);
        silent[2].hello(2, 3);
        silent[2].send(&[200, 0, 0, 0, b'{']);

        let mut stranger = Raw::connect(address);
        stranger.send(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n");
        assert!(stranger.rejected().contains("not a tinynccl hello"));
        // Few bytes, then nothing: noticed by the first wrong one.
        let mut stranger = Raw::connect(address);
        stranger.send(b"SSH");
        assert!(stranger.rejected().contains("not a tinynccl hello"));
        let mut version = Hello { nonce: [2; 16], rank: 2, world_size: 3 }.encode(false);
        version[8] = 77;
        let mut raw = Raw::connect(address);
        raw.send(&version);
        let reason = raw.rejected();
        assert!(reason.contains("version 77") && reason.contains(&format!("version {PROTOCOL_VERSION}")), "{reason}");
        // All that is public, and no secret.
        let mut raw = Raw::connect(address);
        raw.send(&Hello { nonce: [1; 16], rank: 2, world_size: 3 }.encode(false));
        assert!(matches!(raw.recv(), Some(ToRank::Challenge { .. })));
        raw.send(&encode(&ToStore::Proof { proof: Bytes(vec![7; 32]) }).unwrap());
        assert!(raw.rejected().contains("wrong secret"));
        // No proof at all.
        let mut raw = Raw::connect(address);
        raw.send(&Hello { nonce: [1; 16], rank: 2, world_size: 3 }.encode(false));
        raw.send(&encode(&ToStore::Register { info: Value::Null }).unwrap());
        assert!(matches!(raw.recv(), Some(ToRank::Challenge { .. })));
        assert!(raw.rejected().contains("expected a proof"));
        for (rank, world, why) in [
            (0, 3, "rank 0 is here already"),
            (3, 3, "out of range: world size 3 has ranks 0 to 2"),
            (u32::MAX, 3, "out of range"),
            (2, 4, "world size 4, the store with 3"),
        ] {
            let mut raw = Raw::connect(address);
            raw.hello(rank, world);
            let reason = raw.rejected();
            assert!(reason.contains(why), "{reason}");
        }
        for body in [b"[1,2".as_slice(), b"\"Nonsense\"", b"{\"Bye\":{\"reason\":\"\"}}"] {
            let mut raw = Raw::connect(address);
            raw.hello(2, 3);
            raw.welcomed();
            let mut frame = Vec::new();
            super::super::wire::frame::put_frame(&mut frame, body).unwrap();
            raw.send(&frame);
            raw.rejected();
        }
        // A length that would be 4 GiB.
        let mut raw = Raw::connect(address);
        raw.hello(2, 3);
        raw.welcomed();
        raw.send(&u32::MAX.to_le_bytes());
        assert!(raw.rejected().contains("exceeds the limit"));

        let _two = join(&server, 2, 3).unwrap();
        while !matches!(probe.recv(), Some(ToRank::Table { infos }) if infos.len() == 3) {}
        zero.join().unwrap()
    });
    assert_eq!(zero.infos().len(), 3);
}

#[test]
fn a_rank_with_another_secret_is_named_to_those_who_wait() {
    let server = start(2);
    let id = server.unique_id();
    let stranger = UniqueId::new(Secret::new([1; 32]), id.addresses().to_vec());
    let config = config().with(|c| c.connect_timeout = Duration::from_millis(2500));
    std::thread::scope(|s| {
        let zero = s.spawn(|| Session::join(&id, 0, 2, Value::Null, &config).unwrap_err());
        let e = Session::join(&stranger, 1, 2, Value::Null, &config).unwrap_err().to_string();
        assert!(e.contains("rank 1 was refused: wrong secret"), "{e}");
        let e = zero.join().unwrap();
        assert!(matches!(&e, Error::Timeout { missing, .. } if *missing == [1]), "{e}");
        assert!(e.to_string().contains("a client from 127.0.0.1 was refused: wrong secret"), "{e}");
    });
}

#[test]
fn a_new_start_of_a_job_has_another_secret_for_its_links() {
    let secrets: Vec<Secret> = [start(2), start(2)]
        .iter()
        .map(|server| {
            let sessions = form(server, 2);
            assert_eq!(sessions[0].secret(), sessions[1].secret());
            sessions[0].secret()
        })
        .collect();
    assert!(secrets[0] != secrets[1] && !secrets.contains(&SECRET));
}

#[test]
fn a_session_says_why_it_was_refused() {
    let server = start(2);
    let _here = Raw::register(address(&server), 0, 2);
    let wrong = UniqueId::new(Secret::new([0; 32]), server.unique_id().addresses().to_vec());
    let refuse = |id: &UniqueId, rank, world| {
        let config = config().with(|c| c.connect_timeout = Duration::from_millis(2500));
        Session::join(id, rank, world, Value::Null, &config).unwrap_err().to_string()
    };
    let id = server.unique_id();
    let e = refuse(&id, 0, 2);
    assert!(e.contains("rank 0 was refused: rank 0 is here already"), "{e}");
    let e = refuse(&id, 1, 3);
    assert!(e.contains("started with world size 3, the store with 2"), "{e}");
    let e = refuse(&wrong, 1, 2);
    assert!(e.contains("wrong secret") && e.contains("TINYNCCL_SECRET"), "{e}");
    let e = refuse(&id, 2, 2);
    assert!(e.contains("rank 2 of world size 2"), "{e}");
    let other: UniqueId = id.to_string().replacen("-4-", "-1-", 1).parse().unwrap();
    let e = refuse(&other, 1, 2);
    assert!(e.contains("protocol version 1, this build speaks 4"), "{e}");
}

/// A connection from another address of this host.
fn from(source: [u8; 4], to: SocketAddr) -> TcpStream {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    socket.bind(&SocketAddr::from((source, 0)).into()).unwrap();
    socket.connect(&to.into()).unwrap();
    socket.into()
}

#[test]
fn an_address_that_floods_the_store_crowds_out_itself_alone() {
    let server = start(1);
    let slow = Raw::connect(address(&server));
    let mut slow_and_known = Raw::connect(address(&server));
    slow_and_known.send(&Hello { nonce: [1; 16], rank: 0, world_size: 1 }.encode(false));
    assert!(matches!(slow_and_known.recv(), Some(ToRank::Challenge { .. })));
    let flood: Vec<TcpStream> = (0..160).map(|_| from([127, 0, 0, 9], address(&server))).collect();
    // Too many: its oldest goes.
    flood[0].set_read_timeout(Some(LONG)).unwrap();
    let ended =
        (&flood[0]).read(&mut [0; 1]).map_or_else(|e| e.kind() == std::io::ErrorKind::ConnectionReset, |n| n == 0);
    assert!(ended);
    // Others are still served.
    slow_and_known.send(&encode(&ToStore::Proof { proof: Bytes(vec![7; 32]) }).unwrap());
    assert!(slow_and_known.rejected().contains("wrong secret"));
    let mut slow = slow;
    slow.hello(0, 1);
    slow.welcomed();
    slow.send(&encode(&ToStore::Register { info: Value::Null }).unwrap());
    assert!(matches!(slow.recv(), Some(ToRank::Table { .. })));
}
