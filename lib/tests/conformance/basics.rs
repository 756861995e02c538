//! Order, sizes, every method to send with every method to receive; idle links, misuse, mismatch.

use crate::harness::*;
use tinynccl::error::Error;
use tinynccl::transport::{LinkPair, Received};
use tinynccl::wire::Header;

const SIZES: [usize; 14] = [0, 1, 4, 8, 9, 23, 24, 25, 64, 65, 4096, 4097, 70_000, 70_001];

pub(crate) fn pairings(backend: Backend) {
    type Call = fn(&mut LinkPair, u32, usize);
    let sends: [Call; 2] = [send_from, send_reserved];
    let recvs: [Call; 3] = [recv_into, recv_peeked, recv_chunks];
    // Every pairing in sequence, message by message too: no state of one is left over for the other.
    let plan: Vec<(Call, Call, usize)> = (0..6)
        .flat_map(|i| SIZES.map(|len| (sends[i % 2], recvs[i / 2], len)))
        .chain((0..300).map(|i| (sends[i / 3 % 2], recvs[i / 5 % 3], SIZES[i * 5 % SIZES.len()])))
        .collect();
    let plan = &plan;
    // Both directions at once.
    let side = |mut end: End| {
        for (seq, (send, recv, len)) in plan.iter().enumerate() {
            send(&mut end.link, seq as u32, *len);
            recv(&mut end.link, seq as u32, *len);
        }
        flush(&mut end.link);
        end
    };
    run(ends(backend), side, side);
}

pub(crate) fn announced(backend: Backend) {
    let messages = 100;
    let len = |i: u32| SIZES[i as usize * 3 % SIZES.len()];
    let sender = |mut end: End| {
        for i in 0..messages {
            if i + 1 < messages {
                end.link.send.expect_more();
            }
            send_from(&mut end.link, i, len(i));
        }
        flush(&mut end.link);
        end
    };
    let receiver = |mut end: End| {
        (0..messages).for_each(|i| recv_into(&mut end.link, i, len(i)));
        end
    };
    run(ends(backend), sender, receiver);
}

pub(crate) fn idle(backend: Backend) {
    let [mut a, _b] = ends(backend);
    for _ in 0..10 {
        assert!(a.link.recv.peek().unwrap().is_none());
        assert_eq!(a.link.recv.recv_into(&header(0, 8), &mut [0; 8]).unwrap(), Received::Pending);
        assert!(!a.link.recv.progress().unwrap());
        assert!(!a.link.send.progress().unwrap());
        a.link.recv.check_peer().unwrap();
        a.link.send.check_peer().unwrap();
        assert!(a.link.send.is_flushed());
    }
    // Reserving again gives the same memory with the same contents.
    let at = until("reserve", || {
        a.link.send.reserve().unwrap().map(|m| {
            m[..3].copy_from_slice(b"abc");
            m.as_ptr() as usize
        })
    });
    let again = a.link.send.reserve().unwrap().unwrap();
    assert_eq!((again.as_ptr() as usize, &again[..3]), (at, &b"abc"[..]));
    assert_eq!(a.link.send.peer().peer, 1);
    assert_eq!(a.link.recv.peer().rank, 0);
    assert!(!format!("{a:?}").is_empty());
}

pub(crate) fn misuse(backend: Backend) {
    let [mut a, mut b] = ends(backend);
    let invalid = |r: Result<(), Error>| assert!(matches!(r, Err(Error::InvalidArgument { .. })), "{r:?}");
    let max = OPTIONS.max_message;
    let sent = |a: &mut End, len: usize, data: &[u8]| {
        until("an answer", || match a.link.send.send_from(&header(0, len), data) {
            Ok(false) => None,
            other => Some(other.map(drop)),
        })
    };
    invalid(a.link.send.commit(&header(0, 8)));
    invalid(a.link.recv.release());
    if backend.looks_at_arguments() {
        invalid(sent(&mut a, 8, &[0; 7]));
        invalid(sent(&mut a, max + 1, &vec![0; max + 1]));
        invalid(until("an answer", || match a.link.recv.recv_into(&header(0, 8), &mut [0; 7]) {
            Ok(_) => backend.looks_for_a_message_first().then_some(Err(Error::invalid("", ""))),
            Err(e) => Some(Err(e)),
        }));
    }
    until("reserve", || a.link.send.reserve().unwrap().map(drop));
    invalid(a.link.send.commit(&header(0, max + 1)));
    // The link is as good as before.
    until("reserve", || a.link.send.reserve().unwrap().map(|m| m[..100].copy_from_slice(&payload(0, 100))));
    a.link.send.commit(&header(0, 100)).unwrap();
    recv_into(&mut b.link, 0, 100);
}

pub(crate) fn mismatch(backend: Backend) {
    for len in [0, 8, 24, 3000, 70_001] {
        let [mut a, mut b] = ends(backend);
        std::thread::scope(|s| {
            s.spawn(|| {
                send_from(&mut a.link, 5, len);
                send_from(&mut a.link, 6, len);
            });
            let theirs = header(5, len);
            for other in [
                header(4, len),
                Header { count: 8, ..theirs },
                Header { dtype: 9, ..theirs },
                header(5, len + 16),
                header(5, len / 2 + 1),
            ] {
                let mut dst = vec![0xaa; other.len as usize];
                let got = until("a message", || match b.link.recv.recv_into(&other, &mut dst).unwrap() {
                    Received::Pending => None,
                    Received::Done => panic!("took {theirs} for {other}"),
                    Received::Mismatch(h) => Some(h),
                });
                assert!(got.agrees_with(&theirs), "{got}");
                let mut never = |_: usize, _: &[u8]| panic!("a chunk of another message");
                let again = until("a message", || match b.link.recv.recv_chunks(&other, &mut never).unwrap() {
                    Received::Pending => None,
                    answer => Some(answer),
                });
                assert_eq!(again, Received::Mismatch(got));
                assert!(dst.iter().all(|b| *b == 0xaa), "nothing is written");
            }
            recv_into(&mut b.link, 5, len);
            recv_peeked(&mut b.link, 6, len);
        });
    }
}
