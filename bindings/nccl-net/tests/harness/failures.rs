//! Unauthenticated connections, peers that die, closing in flight.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::ptr;
use std::sync::Barrier;
use std::sync::atomic::Ordering;

use nccl_net_tinynccl::abi::Status;

use super::again::{self, hear, hex, say, unhex};
use super::api::*;

/// The port for IPv4, as it stands in a handle.
fn port(handle: &Handle) -> u16 {
    u16::from_le_bytes([handle[36], handle[37]])
}

#[test]
fn closing_with_requests_in_flight_touches_no_memory_afterwards() {
    for version in VERSIONS {
        let api = Api::init(version);
        for receiver_first in [true, false] {
            let pair = api.pair();
            let data = pattern(4 << 20, 1);
            let mut got = vec![vec![0u8; 4 << 20]; 3];
            for got in &mut got {
                api.irecv(pair.recv, &mut [(got, 0)]).unwrap();
                api.isend(pair.send, &data, 0).unwrap();
            }
            if receiver_first {
                api.close_recv(pair.recv);
                got.iter_mut().for_each(|g| g.fill(0x55));
                api.close_send(pair.send);
            } else {
                api.close_send(pair.send);
                api.close_recv(pair.recv);
                got.iter_mut().for_each(|g| g.fill(0x55));
            }
            // What is on its way would land while the next connection works.
            let next = api.pair();
            let mut small = vec![0; 100];
            let recv = api.irecv(next.recv, &mut [(&mut small, 0)]).unwrap();
            let send = api.isend(next.send, &data[..100], 0).unwrap();
            assert_eq!((api.wait(send, 1), api.wait(recv, 1)), (vec![100], vec![100]));
            next.close();
            assert!(got.iter().flatten().all(|b| *b == 0x55), "version {version}");
        }
        api.finalize();
    }
}

#[test]
fn what_was_sent_arrives_after_the_sender_has_closed() {
    let api = Api::init(12);
    let pair = api.pair();
    // Those before their receive are short: by RDMA a longer one waits for it.
    let (long, short) = (pattern(200_000, 3), pattern(32 << 10, 4));
    let mut got = vec![0; long.len()];
    let recv = api.irecv(pair.recv, &mut [(&mut got, 0)]).unwrap();
    let sends: Vec<Comm> =
        [&long].into_iter().chain([&short; 6]).map(|d| api.isend(pair.send, d, 0).unwrap()).collect();
    sends.into_iter().for_each(|send| drop(api.wait(send, 1)));
    api.close_send(pair.send);
    assert_eq!(api.wait(recv, 1), [long.len()]);
    assert!(got == long);
    for _ in 0..6 {
        let recv = api.irecv(pair.recv, &mut [(&mut got, 0)]).unwrap();
        assert_eq!(api.wait(recv, 1), [short.len()]);
        assert!(got[..short.len()] == short);
    }
    // Nothing more will come.
    let mut more = [0u8; 1];
    until("the end", || match api.irecv(pair.recv, &mut [(&mut more, 0)]) {
        Ok(request) => Some(api.fails(request)),
        Err(status) => Some(status),
    });
    api.close_recv(pair.recv);
    api.finalize();
}

/// The end comes right behind the last byte, while the receiver polls.
#[test]
fn a_message_is_received_however_soon_its_sender_closes() {
    let api = Api::init(12);
    let (data, mut got) = (pattern(1 << 20, 5), vec![0; 1 << 20]);
    for round in 0..200 {
        let pair = api.pair();
        let recv = api.irecv(pair.recv, &mut [(&mut got, 0)]).unwrap();
        let send = api.isend(pair.send, &data, 0).unwrap();
        std::thread::scope(|scope| {
            let (send, comm) = (send.expose_provenance(), pair.send.expose_provenance());
            scope.spawn(move || {
                api.wait(ptr::with_exposed_provenance_mut(send), 1);
                api.close_send(ptr::with_exposed_provenance_mut(comm));
            });
            assert_eq!(api.wait(recv, 1), [data.len()], "round {round}");
        });
        assert!(got == data, "round {round}");
        got.fill(0);
        api.close_recv(pair.recv);
    }
    api.finalize();
}

/// Requests, as many as there are: what fails is the test of each.
#[test]
fn what_is_posted_after_the_peer_has_closed_is_a_request_that_fails() {
    const MANY: usize = 256;
    let api = Api::init(12);
    let data = pattern(1 << 20, 6);
    for sends in [true, false] {
        let Pair { send, recv, .. } = api.pair();
        let mut got = vec![0; 8];
        let mut post = || if sends { api.isend(send, &data, 0) } else { api.irecv(recv, &mut [(&mut got, 0)]) };
        let mut posted = vec![post().unwrap()];
        if sends {
            api.close_recv(recv)
        } else {
            api.close_send(send)
        }
        posted.extend((1..MANY).map(|_| post().unwrap()));
        assert!(posted.iter().all(|request| !request.is_null()));
        posted.iter().for_each(|request| assert_eq!(api.fails(*request), Status::RemoteError));
        // None is left, and none comes back.
        assert_eq!(post(), Err(Status::RemoteError));
        if sends { api.close_send(send) } else { api.close_recv(recv) }
    }
    api.finalize();
}

/// Runs a test in its own process: elsewhere other tests use the plugin, too. True in that process.
fn alone(test: &str) -> bool {
    if again::role().is_some() {
        return true;
    }
    again::start(&[], test, "alone", &[]).finish();
    false
}

#[test]
fn what_is_open_when_the_plugin_is_finalized_fails() {
    if !alone("failures::what_is_open_when_the_plugin_is_finalized_fails") {
        return;
    }
    for version in [11, 12] {
        let api = Api::init(version);
        let pair = api.pair();
        let (data, mut got) = (pattern(64 << 20, 7), vec![0; 100]);
        let recv = api.irecv(pair.recv, &mut [(&mut got, 0)]).unwrap();
        // Of another tag: more than its window stays open.
        let send = api.isend(pair.send, &data, 1).unwrap();
        api.finalize();
        assert_eq!((api.fails(recv), api.fails(send)), (Status::RemoteError, Status::RemoteError));
        pair.close();
    }
    say("done");
}

/// Every entry fails or does nothing, and the parent's connections go on.
#[test]
fn a_forked_child_has_no_part_in_the_plugin() {
    if !alone("failures::a_forked_child_has_no_part_in_the_plugin") {
        return;
    }
    let api = Api::init(12);
    let pair = api.pair();
    let (listening, listen) = api.listen();
    let (data, mut got) = (pattern(1 << 20, 8), vec![0; 1 << 20]);
    let recv = api.irecv(pair.recv, &mut [(&mut got, 0)]).unwrap();
    let child = || {
        IS_CHILD.store(true, Ordering::Relaxed);
        let refused = Status::InvalidUsage;
        let mut more = [0; 8];
        assert_eq!(api.isend(pair.send, &data, 0), Err(refused));
        assert_eq!(api.irecv(pair.recv, &mut [(&mut more, 0)]), Err(refused));
        assert_eq!(api.test(recv, 1), Err(refused));
        assert_eq!(api.try_accept(listen), Err(refused));
        assert_eq!(api.try_connect(&mut { listening }), Err(refused));
        assert!(api.properties(0).is_err());
        api.close_send(pair.send);
        api.close_recv(pair.recv);
        api.close_listen(listen);
        api.finalize();
        api.finalize();
    };
    for _ in 0..20 {
        // SAFETY: the child makes the calls above, as one of a program with threads may, and ends at once.
        match unsafe { libc::fork() } {
            0 => {
                let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(child));
                // SAFETY: ends the process at once.
                unsafe { libc::_exit(i32::from(outcome.is_err())) }
            }
            pid => {
                let mut status = -1;
                let wait = || {
                    // SAFETY: waits for our own child.
                    (unsafe { libc::waitpid(pid, &raw mut status, libc::WNOHANG) } == pid).then_some(())
                };
                until("the child's end", wait);
                assert_eq!(status, 0);
            }
        }
    }
    let send = api.isend(pair.send, &data, 0).unwrap();
    assert_eq!((api.wait(send, 1), api.wait(recv, 1)), (vec![data.len()], vec![data.len()]));
    assert!(got == data);
    let (more, last) = api.meet(listening, listen);
    Pair { api, send: more, recv: last }.close();
    api.close_listen(listen);
    pair.close();
    api.finalize();
    // And a child of a process that has finalized it uses it like any other.
    // SAFETY: as above.
    match unsafe { libc::fork() } {
        0 => {
            let works = std::panic::catch_unwind(|| {
                let api = Api::init(12);
                api.pair().close();
                api.finalize();
            });
            // SAFETY: ends the process at once.
            unsafe { libc::_exit(i32::from(works.is_err())) }
        }
        pid => {
            let mut status = -1;
            // SAFETY: waits for our own child.
            until("its end", || (unsafe { libc::waitpid(pid, &raw mut status, libc::WNOHANG) } == pid).then_some(()));
            assert_eq!(status, 0);
        }
    }
    say("done");
}

#[test]
fn a_stranger_at_the_port_is_turned_away() {
    let api = Api::init(12);
    let (handle, listen) = api.listen();
    // One that sends something else, one that sends nothing, one that closes at once.
    let mut web = TcpStream::connect((Ipv4Addr::LOCALHOST, port(&handle))).unwrap();
    web.write_all(
        b"GET / HTTP/1.1\r\nHost: example.org\r\nAccept: everything, for as long as it takes to be long\r\n\r\n",
    )
    .unwrap();
    let silent = TcpStream::connect((Ipv4Addr::LOCALHOST, port(&handle))).unwrap();
    drop(TcpStream::connect((Ipv4Addr::LOCALHOST, port(&handle))).unwrap());
    let mut answer = Vec::new();
    web.set_read_timeout(Some(LIMIT)).unwrap();
    // Closed, or reset because it had sent more than was read.
    let _ = web.read_to_end(&mut answer);
    assert!(answer.is_empty(), "nothing is told to strangers");
    // One with another secret.
    let mut wrong = handle;
    wrong[8] ^= 1;
    let refused = until("a refusal", || api.try_connect(&mut wrong).err());
    assert_eq!(refused, Status::RemoteError);
    assert!(LOG.lock().unwrap().contains("does not know this job's secret"), "{}", LOG.lock().unwrap());
    // The right one still gets in.
    let (send, recv) = api.meet(handle, listen);
    drop(silent);
    Pair { api, send, recv }.close();
    api.close_listen(listen);
    api.finalize();
}

#[test]
fn a_text_that_is_no_handle_is_refused() {
    let api = Api::init(12);
    assert_eq!(api.try_connect(&mut [7; 128]), Err(Status::InvalidUsage));
    assert!(LOG.lock().unwrap().contains("expected a handle of this plugin"));
    api.finalize();
}

/// The log of a communicator that is made while the last one ends goes to NCCL.
#[test]
fn a_communicator_that_comes_while_the_last_one_goes_is_logged() {
    const TIMES: usize = 100;
    for _ in 0..TIMES {
        let (first, both) = (Api::init(12), Barrier::new(2));
        let second = std::thread::scope(|scope| {
            scope.spawn(|| {
                both.wait();
                first.finalize();
            });
            both.wait();
            Api::init(12)
        });
        assert_eq!(second.try_accept(ptr::null_mut()), Err(Status::InvalidArgument));
        second.finalize();
    }
    let log = LOG.lock().unwrap().clone();
    assert_eq!(log.matches("listenComm is NULL").count(), TIMES);
}

#[test]
fn a_killed_peer_is_an_error_with_its_address() {
    if again::role().is_some() {
        let api = Api::init(12);
        let (handle, listen) = api.listen();
        say(&hex(&handle));
        api.meet(unhex(&hear()), listen);
        say("connected");
        // Until it is killed.
        hear();
        return;
    }
    let api = Api::init(12);
    let mut peer = again::start(&[], "failures::a_killed_peer_is_an_error_with_its_address", "peer", &[]);
    let (handle, listen) = api.listen();
    let theirs = unhex(&peer.line());
    peer.tell(&hex(&handle));
    let (send, recv) = api.meet(theirs, listen);
    assert_eq!(peer.line(), "connected");
    // The peer does not receive: more than its window and the kernel take stays open.
    let data = pattern(64 << 20, 0);
    let mut got = [0u8; 8];
    let (sending, receiving) = (api.isend(send, &data, 0).unwrap(), api.irecv(recv, &mut [(&mut got, 0)]).unwrap());
    assert_eq!((api.test(sending, 1), api.test(receiving, 1)), (Ok(None), Ok(None)));
    peer.kill();
    assert_eq!((api.fails(sending), api.fails(receiving)), (Status::RemoteError, Status::RemoteError));
    let log = LOG.lock().unwrap().clone();
    assert!(log.contains("look at that rank's output") && log.contains("connection between"), "{log}");
    let later = api.isend(send, &data[..1], 0).unwrap();
    assert_eq!(api.fails(later), Status::RemoteError, "and so does what comes later");
    api.close_send(send);
    api.close_recv(recv);
    api.close_listen(listen);
    api.finalize();
}
