//! Two contexts of one process.

use std::time::{Duration, Instant};

use softroce::{Remote, SendOp, Service, Status, WcOpcode};

use crate::end::{End, loopback, pattern};

fn pair(service: Service) -> (End, End) {
    let (a, b) = (End::new(&loopback(), service), End::new(&loopback(), service));
    a.connect(&b.card());
    b.connect(&a.card());
    (a, b)
}

#[test]
fn sends_writes_reads_and_atomics() {
    let (a, b) = pair(Service::Rc);
    let remote = |at: u64| Remote { addr: b.card().remote.addr + at, rkey: b.card().remote.rkey };
    for len in [0usize, 1, 4096, 4097, 1 << 20] {
        let bytes = pattern(len, 3);
        a.write(0, &bytes);
        b.recv(5, 0, 2 << 20);
        a.send(1, SendOp::SendImm([1, 2, 3, 4]), 0, len);
        let wc = b.wait();
        assert_eq!((wc.status, wc.byte_len, wc.imm), (Status::Success, len as u32, Some([1, 2, 3, 4])));
        assert_eq!(b.read(0, len), bytes);
        assert_eq!(a.wait().status, Status::Success);

        b.recv(6, 0, 0);
        a.send(2, SendOp::WriteImm(remote(2 << 20), [9; 4]), 0, len);
        let wc = b.wait();
        assert_eq!((wc.opcode, wc.byte_len, wc.imm), (WcOpcode::RecvWriteImm, len as u32, Some([9; 4])));
        assert_eq!(b.read(2 << 20, len), bytes);
        assert_eq!(a.wait().status, Status::Success);

        a.send(3, SendOp::Read(remote(2 << 20)), 1 << 20, len);
        let wc = a.wait();
        assert_eq!((wc.status, wc.opcode, wc.byte_len), (Status::Success, WcOpcode::Read, len as u32));
        assert_eq!(a.read(1 << 20, len), bytes);
    }
    b.write(8, &7u64.to_ne_bytes());
    a.send(4, SendOp::FetchAdd { remote: remote(8), add: 5 }, 64, 8);
    assert_eq!((a.wait().status, a.read(64, 8)), (Status::Success, 7u64.to_ne_bytes().to_vec()));
    a.send(4, SendOp::CompareSwap { remote: remote(8), compare: 12, swap: 99 }, 64, 8);
    assert_eq!((a.wait().status, a.read(64, 8)), (Status::Success, 12u64.to_ne_bytes().to_vec()));
    assert_eq!(b.read(8, 8), 99u64.to_ne_bytes().to_vec());
}

/// A program that polls has the sockets to itself under core contention. Packets that come when it polls no more are
/// taken as well.
#[test]
fn what_comes_when_the_program_stops_polling_is_taken() {
    let (a, b) = pair(Service::Rc);
    let remote = Remote { addr: b.card().remote.addr + 64, rkey: b.card().remote.rkey };
    for round in 1..=50u64 {
        for id in 0..40 {
            b.recv(id, 0, 8);
            a.send(id, SendOp::Send, 0, 8);
            assert_eq!((b.wait().status, a.wait().status), (Status::Success, Status::Success));
        }
        a.write(0, &round.to_ne_bytes());
        a.send(round, SendOp::Write(remote), 0, 8);
        let start = Instant::now();
        while b.read(64, 8) != round.to_ne_bytes() {
            assert!(start.elapsed() < Duration::from_secs(60), "round {round}: the bytes do not come");
            std::hint::spin_loop();
        }
        assert_eq!(a.wait().status, Status::Success);
    }
}

#[test]
fn many_requests_are_done_in_order() {
    let (a, b) = pair(Service::Rc);
    let remote = b.card().remote;
    let mut done = 0;
    for id in 0..2000u64 {
        let at = (id % 64) as usize * 8192;
        a.send(id, SendOp::Write(Remote { addr: remote.addr + at as u64, ..remote }), at, 8192);
        while id - done >= 200 {
            let wc = a.wait();
            assert_eq!((wc.id, wc.status), (done, Status::Success));
            done += 1;
        }
    }
    while done < 2000 {
        let wc = a.wait();
        assert_eq!((wc.id, wc.status), (done, Status::Success));
        done += 1;
    }
}

#[test]
fn a_wrong_key_ends_both_queue_pairs() {
    let (a, b) = pair(Service::Rc);
    let remote = Remote { rkey: b.card().remote.rkey ^ 1, ..b.card().remote };
    b.recv(1, 0, 10);
    a.send(1, SendOp::Write(remote), 0, 100);
    assert_eq!(a.wait().status, Status::RemoteAccess);
    assert_eq!(b.wait().status, Status::Flushed);
}

#[test]
fn a_peer_that_goes_is_noticed() {
    let (a, b) = pair(Service::Rc);
    a.connect_with_retries(&b);
    drop(b);
    a.send(1, SendOp::Send, 0, 100);
    assert_eq!(a.wait().status, Status::RetriesExceeded);
}

/// An acknowledgement waits for a request to travel with, but not beyond its queue pair's end: the peer would repeat
/// its request forever.
#[test]
fn one_that_goes_acknowledges_what_it_received() {
    const ROUNDS: usize = 30;
    for _ in 0..10 {
        let (a, b) = pair(Service::Rc);
        let mut sent = 0;
        let mut received = |end: &End| loop {
            let wc = end.wait();
            assert_eq!(wc.status, Status::Success);
            if wc.opcode == WcOpcode::Recv {
                break;
            }
            sent += usize::from(std::ptr::eq(end, &a));
        };
        for _ in 0..ROUNDS {
            a.recv(1, 0, 100);
            b.recv(1, 0, 100);
            a.send(2, SendOp::Send, 100, 100);
            received(&b);
            b.send(2, SendOp::Send, 100, 100);
            received(&a);
        }
        b.recv(1, 0, 100);
        a.send(2, SendOp::Send, 100, 100);
        received(&b);
        drop(b);
        while sent <= ROUNDS {
            let wc = a.wait();
            assert_eq!((wc.status, wc.opcode), (Status::Success, WcOpcode::Send));
            sent += 1;
        }
    }
}

impl End {
    /// Connects again, and gives up soon.
    fn connect_with_retries(&self, to: &End) {
        let reset = softroce::QpAttr::default();
        self.qp.modify(&reset, softroce::AttrMask::STATE).expect("reset");
        self.connect_with(&to.card(), |attr| (attr.timeout, attr.retry_cnt) = (8, 3));
    }
}
