//! Every collective where receivers in shared memory read the senders' buffers, whatever their pages.

use crate::common::cells::{COLLECTIVES, Cell, check};
use crate::common::{Fabric, config, run_ok};
use tinynccl::config::SingleCopy;
use tinynccl::wire::Algorithm;
use tinynccl::{Config, DType, ReduceOp};

/// All messages over 32 KiB go by zero copy.
fn zero_copy() -> Config {
    let mut config = config();
    config.single_copy = SingleCopy::From(0);
    config
}

#[test]
fn every_collective_of_every_algorithm_in_place_and_not() {
    for algorithm in [None].into_iter().chain(Algorithm::ALL.map(Some)) {
        for ranks in [2, 3] {
            let mut config = zero_copy();
            config.algorithm = algorithm;
            let messages = run_ok(Fabric::Shm, ranks, &config, |comm| {
                for collective in COLLECTIVES {
                    // Shorter than what goes by zero copy, one message, several of them.
                    for count in [1000, 50_000, 400_001] {
                        let cell = Cell { collective, dtype: DType::U32, op: ReduceOp::Sum, root: 1, count };
                        check(&comm, cell, &format_args!("{algorithm:?}"))?;
                    }
                }
                Ok(comm.census().zero_copy_messages)
            });
            // Staged calls, and by default those of three ranks of one host, go over memory that all map.
            if algorithm == Some(Algorithm::Ring) || ranks == 2 && algorithm != Some(Algorithm::Staged) {
                assert!(messages.iter().sum::<u64>() > 0, "{algorithm:?}, {ranks} ranks: no zero copy");
            }
        }
    }
}

#[test]
fn messages_in_a_circle_and_both_ways_at_once() {
    for ranks in [2, 3, 4] {
        let messages = run_ok(Fabric::Shm, ranks, &zero_copy(), |comm| {
            let (rank, n) = (comm.rank(), comm.size());
            for len in [20_000, 300_000] {
                let mine: Vec<u32> = (0..len).map(|i| (rank * len + i) as u32).collect();
                let before = (rank + n - 1) % n;
                let mut theirs = vec![0u32; len];
                comm.send_recv(&mine, (rank + 1) % n, &mut theirs, before)?;
                assert!(theirs.iter().enumerate().all(|(i, &x)| x == (before * len + i) as u32), "{len}");
                // One after the other: the receiver is there sooner or later.
                if rank == 0 {
                    comm.send(&mine, 1)?;
                    comm.recv(&mut theirs, 1)?;
                    assert!(theirs.iter().enumerate().all(|(i, &x)| x == (len + i) as u32), "{len}");
                } else if rank == 1 {
                    comm.recv(&mut theirs, 0)?;
                    assert!(theirs.iter().enumerate().all(|(i, &x)| x == i as u32), "{len}");
                    comm.send(&mine, 0)?;
                }
            }
            Ok(comm.census().zero_copy_messages)
        });
        assert!(messages.iter().all(|&messages| messages > 0), "{messages:?}");
    }
}
