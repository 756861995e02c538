//! Messages between two ranks: rings, all pairs, to oneself, in order.

use super::functions::*;
use super::rank::{INVALID_ARGUMENT, Rank, all, group, ok, refused, threads};

/// Byte `i` of the message number `number` from a rank.
fn byte(from: usize, number: usize, i: usize) -> u8 {
    (from * 67 + number * 13 + i * 7 + i / 251) as u8
}

fn message(from: usize, number: usize, len: usize) -> Vec<u8> {
    (0..len).map(|i| byte(from, number, i)).collect()
}

const U8: i32 = 1;

fn send(rank: &Rank, memory: &super::rank::Memory, len: usize, to: usize) {
    ok(ncclSend(memory.at(0), len, U8, to as i32, rank.comm, rank.stream()));
}

fn recv(rank: &Rank, memory: &super::rank::Memory, len: usize, from: usize) {
    ok(ncclRecv(memory.at_mut(0), len, U8, from as i32, rank.comm, rank.stream()));
}

apart! {
    fn rings() {
        threads(3, |rank| {
            for (number, len) in [0, 1, 1000, 65_537, 3_000_001].into_iter().enumerate() {
                for step in 0..3 {
                    let (to, from) = ((rank.rank + step) % 3, (rank.rank + 3 - step) % 3);
                    let (out, into) = (rank.memory(&message(rank.rank, number, len)), rank.memory(&vec![0; len]));
                    group(|| {
                        send(rank, &out, len, to);
                        recv(rank, &into, len, from);
                    });
                    rank.wait();
                    assert!(into.read() == message(from, number, len), "{len} bytes over {step}, rank {}", rank.rank);
                }
            }
        });
    }

    // As MPI's Alltoallv: every pair has its own length, and the order of calls differs from rank to rank.
    fn all_pairs_in_one_group() {
        threads(4, |rank| {
            let len = |from: usize, to: usize| from * 5000 + to * 300 + 1;
            for round in 0..20 {
                let out: Vec<_> =
                    (0..4).map(|to| rank.memory(&message(rank.rank, round, len(rank.rank, to)))).collect();
                let into: Vec<_> = (0..4).map(|from| rank.memory(&vec![0; len(from, rank.rank)])).collect();
                group(|| {
                    for peer in (0..4).map(|i| (i + rank.rank * round) % 4) {
                        send(rank, &out[peer], len(rank.rank, peer), peer);
                        recv(rank, &into[peer], len(peer, rank.rank), peer);
                    }
                });
                rank.wait();
                for (from, into) in into.iter().enumerate() {
                    assert!(into.read() == message(from, round, len(from, rank.rank)), "round {round}, from {from}");
                }
            }
        });
    }

    fn messages_of_a_pair_keep_their_order() {
        threads(2, |rank| {
            let peer = 1 - rank.rank;
            let out: Vec<_> = (0..8).map(|number| rank.memory(&message(rank.rank, number, 1000))).collect();
            let into: Vec<_> = (0..8).map(|_| rank.memory(&[0; 1000])).collect();
            group(|| {
                out.iter().for_each(|out| send(rank, out, 1000, peer));
                into.iter().for_each(|into| recv(rank, into, 1000, peer));
            });
            rank.wait();
            for (number, into) in into.iter().enumerate() {
                assert!(into.read() == message(peer, number, 1000), "message {number}");
            }
        });
    }

    // A send alone waits in its stream, not in the call.
    fn without_groups() {
        threads(2, |rank| {
            let memory = rank.memory(&message(rank.rank, 0, 5000));
            if rank.rank == 0 { send(rank, &memory, 5000, 1) } else { recv(rank, &memory, 5000, 0) }
            rank.wait();
            assert!(memory.read() == message(0, 0, 5000));
        });
    }

    fn to_oneself() {
        threads(2, |rank| {
            let (out, into) = (rank.memory(&message(rank.rank, 0, 777)), rank.memory(&[0; 777]));
            group(|| {
                send(rank, &out, 777, rank.rank);
                recv(rank, &into, 777, rank.rank);
            });
            rank.wait();
            assert!(into.read() == message(rank.rank, 0, 777));
            rank.still_works();
        });
    }

    fn both_ends_in_one_thread() {
        let ranks = all(2);
        let memory: Vec<_> = ranks.iter().map(|rank| rank.memory(&message(rank.rank, 0, 100_000))).collect();
        let into: Vec<_> = ranks.iter().map(|rank| rank.memory(&vec![0; 100_000])).collect();
        group(|| {
            for (rank, (out, into)) in ranks.iter().zip(memory.iter().zip(&into)) {
                recv(rank, into, 100_000, 1 - rank.rank);
                send(rank, out, 100_000, 1 - rank.rank);
            }
        });
        for (rank, into) in ranks.iter().zip(&into) {
            rank.wait();
            assert!(into.read() == message(1 - rank.rank, 0, 100_000));
        }
        ranks.into_iter().for_each(Rank::destroy);
    }

    fn a_peer_that_is_not_there_is_refused() {
        threads(2, |rank| {
            let memory = rank.memory(&[0; 8]);
            for peer in [2, -1] {
                let status = ncclSend(memory.at(0), 8, U8, peer, rank.comm, rank.stream());
                refused(status, INVALID_ARGUMENT, &["ncclSend", &peer.to_string()]);
                let status = ncclRecv(memory.at_mut(0), 8, U8, peer, rank.comm, rank.stream());
                refused(status, INVALID_ARGUMENT, &["ncclRecv", &peer.to_string()]);
            }
            rank.still_works();
        });
    }
}
