//! Injected faults show as what they are.

use std::time::Duration;

use crate::harness::*;
use tinynccl::error::{Error, Result};
use tinynccl::transport::Received;
use tinynccl::transport::faulty::{self, Faults};
use tinynccl::wire::Algorithm;
use tinynccl::{Comm, Config, ReduceOp};

fn faulty_ends(faults: Faults) -> [End; 2] {
    let [a, b] = in_process();
    [End { link: faulty::wrap(a.link, &faults), ..a }, b]
}

/// Links do not look at payloads: `TINYNCCL_VERIFY` does.
#[test]
fn a_flipped_bit_of_a_payload_passes() {
    for reserved in [false, true] {
        let [mut a, mut b] = faulty_ends(Faults { seed: 9, corrupt_at: Some(1), ..Faults::default() });
        for seq in 0..3 {
            if reserved { send_reserved(&mut a.link, seq, 500) } else { send_from(&mut a.link, seq, 500) }
        }
        recv_into(&mut b.link, 0, 500);
        let mut dst = vec![0; 500];
        assert_eq!(b.link.recv.recv_into(&header(1, 500), &mut dst).unwrap(), Received::Done);
        let flipped: u32 = dst.iter().zip(payload(1, 500)).map(|(x, y)| (x ^ y).count_ones()).sum();
        assert_eq!(flipped, 1);
        recv_into(&mut b.link, 2, 500);
    }
}

/// In any field: some look like another rank's other call.
#[test]
fn a_flipped_bit_of_a_header_is_no_message_that_is_expected() {
    for seed in 0..40 {
        for len in [0, 500] {
            let [mut a, mut b] = faulty_ends(Faults { seed, corrupt_header_at: Some(1), ..Faults::default() });
            (0..3).for_each(|message| send_from(&mut a.link, message, len));
            recv_into(&mut b.link, 0, len);
            // These messages have no digest.
            if b.link.recv.peek().unwrap().is_none_or(|(theirs, _)| theirs.check != 0) {
                continue;
            }
            let received = b.link.recv.recv_into(&header(1, len), &mut vec![0; len]).unwrap();
            assert!(matches!(received, Received::Mismatch(_)), "seed {seed}: {received:?}");
        }
    }
}

#[test]
fn a_reset_loses_the_peer_for_good() {
    let [mut a, _b] = faulty_ends(Faults { reset_at: Some(2), ..Faults::default() });
    send_from(&mut a.link, 0, 8);
    send_from(&mut a.link, 1, 8);
    for _ in 0..3 {
        let result: Result<bool> = a.link.send.send_from(&header(2, 8), &payload(2, 8));
        assert!(is_peer_lost(&result, 0), "{result:?}");
        assert!(is_peer_lost(&a.link.send.check_peer(), 0));
        assert!(is_peer_lost(&a.link.send.arm(), 0));
    }
}

#[test]
fn a_stall_is_silent() {
    let [a, mut b] = in_process();
    let [mut a, mut stalled] =
        [a, End { link: faulty::wrap(b.link, &Faults { stall_at: Some(1), ..Faults::default() }), ..b }];
    send_from(&mut a.link, 0, 8);
    send_from(&mut a.link, 1, 8);
    recv_into(&mut stalled.link, 0, 8);
    for _ in 0..100 {
        assert_eq!(stalled.link.recv.recv_into(&header(1, 8), &mut [0; 8]).unwrap(), Received::Pending);
        assert!(stalled.link.recv.peek().unwrap().is_none());
    }
    assert!(!stalled.link.recv.arm().unwrap());
    assert_eq!(stalled.link.recv.interest().fd, None);
    b = stalled;
    drop((a, b));
}

#[test]
fn the_seed_decides() {
    let refusals = |seed| {
        let [mut a, mut b] = faulty_ends(Faults { seed, delay: 5, ..Faults::default() });
        let mut pattern = Vec::new();
        for seq in 0..50 {
            let mut refused = 0;
            while !a.link.send.send_from(&header(seq, 8), &payload(seq, 8)).unwrap() {
                refused += 1;
            }
            pattern.push(refused);
            recv_into(&mut b.link, seq, 8);
        }
        pattern
    };
    assert_eq!(refusals(1), refusals(1));
    assert_ne!(refusals(1), refusals(2));
    assert!(refusals(3).iter().all(|r| *r <= 5));
}

#[test]
fn a_link_that_rests_keeps_the_next_message_back() {
    let resting = |rest| {
        let [mut a, b] = in_process();
        let mut b = End { link: faulty::wrap(b.link, &Faults { rest, ..Faults::default() }), ..b };
        send_from(&mut a.link, 0, 8);
        send_from(&mut a.link, 1, 8);
        recv_into(&mut b.link, 0, 8);
        let held = b.link.recv.peek().unwrap().is_none();
        // Nothing rings the doorbell when the rest is over.
        assert_eq!(b.link.recv.arm().unwrap(), held || b.link.recv.peek().unwrap().is_some());
        b.link.recv.disarm();
        held
    };
    assert!(resting(Duration::from_secs(3600)));
    assert!(!resting(Duration::ZERO));
}

#[test]
fn a_fault_reaches_the_communicator() {
    let lost = |rank, peer, pair| {
        let reset_at = ((rank, peer) == (1, 0)).then_some(0);
        faulty::wrap(pair, &Faults { reset_at, ..Faults::default() })
    };
    let mut config = Config::default();
    (config.algorithm, config.timeout) = (Some(Algorithm::Ring), Duration::from_secs(30));
    let comms = Comm::threads_with_links(2, config, lost).unwrap();
    std::thread::scope(|scope| {
        let ranks: Vec<_> = comms
            .into_iter()
            .map(|comm| scope.spawn(move || comm.all_reduce_in_place(&mut [1.0f32; 64], ReduceOp::Sum)))
            .collect();
        let errors: Vec<Error> = ranks.into_iter().map(|rank| rank.join().unwrap().unwrap_err()).collect();
        assert!(matches!(&errors[1], Error::PeerLost { rank: 1, peer: 0, .. }), "{}", errors[1]);
        assert!(errors[0].to_string().contains("injected reset"), "{}", errors[0]);
    });
}
