//! `Comm::probe`: a message is seen before it is received, and a wait without one is no failure.

use std::time::Duration;

use crate::common::{FABRICS, config, run, run_ok};
use tinynccl::config::Verify;
use tinynccl::{Comm, Error, Result};

const LONG: Duration = Duration::from_secs(30);

/// Opens the link: afterwards nothing is under way.
fn meet(comm: &Comm, peer: usize) -> Result<()> {
    let (mine, mut theirs) = ([comm.rank() as u64], [0]);
    comm.send_recv(&mine, peer, &mut theirs, peer)
}

#[test]
fn a_message_is_seen_before_it_is_received() {
    for fabric in FABRICS {
        for verify in [Verify::Off, Verify::All] {
            let mut config = config();
            config.verify = verify;
            run_ok(fabric, 2, &config, |comm| {
                meet(&comm, 1 - comm.rank())?;
                for count in [0usize, 1, 1000, 3_000_000] {
                    let message: Vec<u32> = (0..count as u32).collect();
                    if comm.rank() == 0 {
                        // Sent when rank 1 has found nothing.
                        comm.recv(&mut [0u8], 1)?;
                        comm.send(&message, 1)?;
                        comm.send(&[count as u64], 1)?;
                        continue;
                    }
                    assert!(!comm.probe(0, Duration::ZERO)?, "{fabric:?}: nothing was sent");
                    assert!(!comm.probe(0, Duration::from_millis(2))?, "{fabric:?}: nothing was sent");
                    comm.send(&[1u8], 0)?;
                    for _ in 0..2 {
                        assert!(comm.probe(0, LONG)?, "{fabric:?}: {count} elements");
                    }
                    let mut got = vec![0u32; count];
                    comm.recv(&mut got, 0)?;
                    assert!(got == message, "{fabric:?}: {count} elements");
                    // The next one, which may have come with it.
                    assert!(comm.probe(0, LONG)?, "{fabric:?}: behind {count} elements");
                    let mut next = [0u64];
                    comm.recv(&mut next, 0)?;
                    assert_eq!(next, [count as u64]);
                }
                comm.barrier()
            });
        }
    }
}

#[test]
fn several_senders_are_taken_as_they_come() {
    for fabric in FABRICS {
        run_ok(fabric, 4, &config(), |comm| {
            let size = comm.size();
            if comm.rank() > 0 {
                meet(&comm, 0)?;
                if comm.rank() + 1 < size {
                    // Behind what the next rank has sent to rank 0 and rank 0 has received.
                    comm.recv(&mut [0u8], 0)?;
                }
                comm.send(&[comm.rank() as u64], 0)?;
                return comm.barrier();
            }
            for peer in 1..size {
                meet(&comm, peer)?;
            }
            let mut came = vec![];
            while came.len() + 1 < size {
                for peer in 1..size {
                    if comm.probe(peer, Duration::ZERO)? {
                        let mut who = [0u64];
                        comm.recv(&mut who, peer)?;
                        assert_eq!(who, [peer as u64]);
                        came.push(peer);
                        if peer > 1 {
                            comm.send(&[0u8], peer - 1)?;
                        }
                    }
                }
            }
            assert_eq!(came, [3, 2, 1], "{fabric:?}");
            comm.barrier()
        });
    }
}

#[test]
fn a_sender_that_leaves_or_an_abort_ends_the_wait() {
    for fabric in FABRICS {
        for abort in [false, true] {
            let errors = run(fabric, 2, &config(), |comm| {
                meet(&comm, 1 - comm.rank()).expect("both are here");
                if comm.rank() == 1 {
                    if abort {
                        comm.abort("a test wants it");
                    }
                    return None;
                }
                Some(comm.probe(1, LONG).expect_err("rank 1 sends nothing"))
            });
            match errors[0].as_ref() {
                Some(Error::PeerLost { rank: 0, peer: 1, .. }) => assert!(!abort, "{fabric:?}"),
                Some(Error::Aborted { reason, .. }) => assert!(abort && reason.contains("a test wants it"), "{reason}"),
                other => panic!("{fabric:?}: {other:?}"),
            }
        }
    }
}

#[test]
fn what_was_sent_by_a_rank_that_has_left_is_still_seen() {
    for fabric in FABRICS {
        run_ok(fabric, 2, &config(), |comm| {
            meet(&comm, 1 - comm.rank())?;
            if comm.rank() == 1 {
                return comm.send(&[7u8], 0);
            }
            assert!(comm.probe(1, LONG)?, "{fabric:?}");
            let mut got = [0u8];
            comm.recv(&mut got, 1)?;
            assert_eq!(got, [7]);
            Ok(())
        });
    }
}

#[test]
fn ranks_that_cannot_send_to_us_are_refused() {
    let comm = Comm::threads(1, config()).expect("one rank").remove(0);
    for (peer, words) in [(0, "cannot wait for itself"), (3, "peer is 3")] {
        let error = comm.probe(peer, LONG).expect_err("no such sender");
        assert!(error.to_string().starts_with("probe") && error.to_string().contains(words), "{error}");
    }
}
