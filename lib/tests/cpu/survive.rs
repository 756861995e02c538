//! Groups that go on without ranks that are lost.
//!
//! Ranks as threads with connections of their own, where none dies; ranks as processes, which are killed and stopped.
//! This test binary runs itself again, once per rank.

use std::time::Duration;

use tinynccl::{Comm, Error, ReduceOp};

use crate::common::{Fabric, config, run};

/// The sum of the ranks' numbers.
fn sum(comm: &Comm) -> usize {
    let mut sum = [comm.rank() as u64];
    comm.all_reduce_in_place(&mut sum, ReduceOp::Sum).expect("no rank is lost");
    sum[0] as usize
}

#[test]
fn agreement_is_on_every_bit_and_on_all_ranks() {
    for fabric in [Fabric::Shm, Fabric::Tcp] {
        let agreed = run(fabric, 4, &config(), |comm| {
            let all: Vec<_> = (0..5).map(|round| comm.agree(!(1 << (comm.rank() + round))).expect("agreed")).collect();
            comm.barrier().expect("a communicator that has agreed works as before");
            all
        });
        for (round, one) in agreed[0].iter().enumerate() {
            assert_eq!((one.value, one.alive.as_slice()), (!(0b1111 << round), &[0, 1, 2, 3][..]));
        }
        assert!(agreed.iter().all(|one| *one == agreed[0]));
    }
}

#[test]
fn a_revoked_communicator_ends_calls_of_ranks_that_notice_nothing() {
    for fabric in [Fabric::Inproc, Fabric::Shm, Fabric::Tcp] {
        let errors = run(fabric, 3, &config(), |comm| {
            comm.barrier().expect("all are here");
            if comm.rank() == 1 {
                comm.revoke().expect("revoked");
            }
            comm.recv(&mut [0u8], (comm.rank() + 1) % 3).expect_err("no rank sends")
        });
        for error in errors {
            assert!(
                matches!(&error, Error::Aborted { reason, .. } if reason == "rank 1: revoked the communicator"),
                "{error}"
            );
        }
    }
}

#[test]
fn shrinking_a_whole_communicator_again_and_again_leaves_nothing_behind() {
    let open = || std::fs::read_dir("/proc/self/fd").expect("descriptors").count();
    let mut before = 0;
    for fabric in [Fabric::Shm, Fabric::Tcp] {
        run(fabric, 3, &config(), |mut comm| {
            for _ in 0..10 {
                assert_eq!(sum(&comm), 3);
                comm = comm.shrink().expect("shrunk");
                assert_eq!((comm.size(), sum(&comm)), (3, 3));
            }
            comm.close().expect("nothing has failed");
        });
        // The first world also makes what a process keeps.
        if before == 0 {
            before = open();
        }
    }
    // Other tests of this program run at the same time: a leak of one per shrink would show.
    assert!(open() < before + 60, "{before} descriptors, then {}", open());
}

#[test]
fn a_part_of_a_split_shrinks() {
    let sums = run(Fabric::Shm, 4, &config(), |comm| {
        let part = comm.split(Some(comm.rank() as u32 % 2), 0).expect("split").expect("a colour");
        let shrunk = part.shrink().expect("shrunk");
        drop(part);
        (shrunk.rank(), sum(&shrunk))
    });
    assert_eq!(sums, [(0, 1), (0, 1), (1, 1), (1, 1)]);
}

#[test]
fn a_rank_that_does_not_call_is_named() {
    let mut config = config();
    config.timeout = Duration::from_secs(1);
    let outcomes = run(Fabric::Tcp, 2, &config, |comm| {
        let outcome = if comm.rank() == 0 { Some(comm.agree(1).map(drop)) } else { None };
        comm.revoke().expect("revoked");
        (outcome, comm)
    });
    let error = outcomes[0].0.clone().expect("it called").expect_err("rank 1 has not");
    assert!(matches!(&error, Error::Timeout { missing, .. } if *missing == [1]), "{error}");
}

#[test]
fn threads_of_one_process_do_not_shrink() {
    let comm = Comm::threads(1, config()).expect("a communicator").remove(0);
    assert!(matches!(comm.shrink(), Err(Error::Unsupported { .. })));
}
