//! The other end goes away: after its messages, to every thread that polls or sleeps, and without a panic.

use crate::harness::*;
use tinynccl::error::Error;
use tinynccl::transport::Received;

pub(crate) fn drained(backend: Backend) {
    let [mut a, mut b] = ends(backend);
    let lens = [8, 60_000, 0];
    for (seq, len) in lens.into_iter().enumerate() {
        // The receiver's process makes progress, as the credits require.
        let data = payload(seq as u32, len);
        until("credit", || {
            b.link.recv.progress().unwrap();
            a.link.send.send_from(&header(seq as u32, len), &data).unwrap().then_some(())
        });
    }
    drop(a);
    recv_into(&mut b.link, 0, lens[0]);
    recv_peeked(&mut b.link, 1, lens[1]);
    recv_into(&mut b.link, 2, lens[2]);
    let lost = until("the loss", || match b.link.recv.recv_into(&header(3, 8), &mut [0; 8]) {
        Ok(Received::Pending) => None,
        other => Some(other),
    });
    assert!(is_peer_lost(&lost, 1), "{lost:?}");
    // And again, from every call.
    assert!(is_peer_lost(&until("the loss", || b.link.recv.peek().map(|m| m.map(drop)).transpose()), 1));
    assert!(is_peer_lost(&b.link.recv.check_peer(), 1));
    let lost = until("the loss", || b.link.send.check_peer().err());
    assert!(matches!(lost, Error::PeerLost { .. }), "{lost}");
    let lost = until("the loss", || match b.link.send.send_from(&header(0, 8), &payload(0, 8)) {
        Ok(false) => None,
        other => Some(other),
    });
    assert!(is_peer_lost(&lost, 1), "{lost:?}");
}

pub(crate) fn wakes(backend: Backend) {
    let [a, mut b] = ends(backend);
    std::thread::scope(|s| {
        let sleeper = s.spawn(move || recv_sleeping(&mut b, 0, 8));
        drop(a);
        let result = sleeper.join().unwrap();
        assert!(is_peer_lost(&result, 1), "{result:?}");
    });
    // A sender that waits for credit, and sleeps before or after the other end goes.
    let [mut a, b] = ends(backend);
    std::thread::scope(|s| {
        let sleeper = s.spawn(move || {
            // As an executor, which checks in between: an end that is dropped in good order is read for a while.
            let mut send = |i| send_sleeping(&mut a, i, OPTIONS.max_message).and_then(|()| a.link.send.check_peer());
            (0u32..).map(&mut send).find(Result::is_err).unwrap()
        });
        drop(b);
        let result = sleeper.join().unwrap();
        assert!(is_peer_lost(&result, 0), "{result:?}");
    });
}

/// Messages that were committed and flushed arrive although their sender closed the link with unread messages in it,
/// and although more are sent to it afterwards: on TCP, both would reset the connection if the socket was just closed.
pub(crate) fn flushed(backend: Backend) {
    let [End { link: mut a, endpoints: _keep, .. }, mut b] = ends(backend);
    let max = OPTIONS.max_message;
    let mut theirs = 0;
    for _ in 0..500 {
        theirs += u32::from(b.link.send.send_from(&header(theirs, max), &payload(theirs, max)).unwrap());
    }
    let depth = OPTIONS.depth as u32;
    for seq in 0..depth {
        until("credit", || {
            b.link.recv.progress().unwrap();
            a.send.send_from(&header(seq, max), &payload(seq, max)).unwrap().then_some(())
        });
    }
    drop(a);
    // Fails or not, as the loss is known or not.
    let _ = b.link.send.send_from(&header(theirs, max), &payload(theirs, max));
    for seq in 0..depth {
        let mut dst = vec![0; max];
        until("a message", || {
            let _ = b.link.send.progress();
            (b.link.recv.recv_into(&header(seq, max), &mut dst).unwrap() == Received::Done).then_some(())
        });
        assert!(dst == payload(seq, max));
    }
    let lost = until("the loss", || b.link.recv.peek().map(|m| m.map(drop)).transpose());
    assert!(is_peer_lost(&lost, 1), "{lost:?}");
}

pub(crate) fn in_flight(backend: Backend) {
    // Messages in flight in both directions, reserved memory, one half sent: all ends dropped in some order.
    for order in 0..4 {
        let [mut a, mut b] = ends(backend);
        let max = OPTIONS.max_message;
        for end in [&mut a, &mut b] {
            let mut seq = 0;
            for _ in 0..200 {
                if end.link.send.send_from(&header(seq, max), &payload(seq, max)).unwrap() {
                    seq += 1;
                }
            }
        }
        let mut dst = vec![0; max];
        let _ = b.link.recv.recv_into(&header(0, max), &mut dst).unwrap();
        match order {
            0 => drop((a, b)),
            1 => drop((b, a)),
            2 => {
                drop(a.link.recv);
                drop(b.link.send);
                drop(b.link.recv);
                drop(a.link.send);
            }
            _ => {
                let _ = b.link.recv.arm();
                drop(b);
                let _ = a.link.send.arm();
            }
        }
    }
}
