//! Ranks that make different calls get an error, on every path, and by the last call before `close` at the latest.

use std::time::Duration;

use crate::common::{FABRICS, Fabric, run};
use tinynccl::{Comm, Config, Error, ReduceOp, Result};

/// Deadlines that no test here may come to: a disagreement is found before.
pub(crate) fn patient() -> Config {
    let mut config = crate::common::config();
    config.timeout = Duration::from_secs(100);
    config
}

fn sum(comm: &Comm) -> Result<()> {
    comm.all_reduce_in_place(&mut [1.0f32; 8], ReduceOp::Sum)
}

/// Every rank has an error, one of them names both `calls` and two ranks.
#[track_caller]
pub(crate) fn told(fabric: Fabric, context: &str, outcomes: &[Result<()>], calls: [&str; 2]) {
    let texts: Vec<String> = outcomes
        .iter()
        .map(|outcome| match outcome {
            Err(e @ (Error::Mismatch { .. } | Error::Aborted { .. })) => e.to_string(),
            other => panic!("{fabric:?}, {context}: {other:?} among {outcomes:?}"),
        })
        .collect();
    let names = |text: &String| text.contains("disagree") && calls.iter().all(|call| text.contains(call));
    assert!(texts.iter().all(names), "{fabric:?}, {context}: expected {calls:?} in {texts:#?}");
}

/// Rank 0 names itself as the root, the others rank 1.
fn wrong_root(comm: &Comm, bytes: usize) -> Result<()> {
    comm.broadcast_in_place(&mut vec![comm.rank() as u8; bytes], comm.rank().min(1))
}

const ROOTS: [&str; 2] = ["root 0", "root 1"];

#[test]
fn other_roots_in_a_broadcast_before_other_calls() {
    for fabric in FABRICS {
        for ranks in [2, 3] {
            for bytes in [8, 32 << 10, 4 << 20] {
                let outcomes = run(fabric, ranks, &patient(), |comm: Comm| {
                    (0..200).try_for_each(|_| sum(&comm))?;
                    wrong_root(&comm, bytes)?;
                    (0..5).try_for_each(|_| sum(&comm))?;
                    comm.close()
                });
                told(fabric, &format!("{ranks} ranks, {bytes} bytes"), &outcomes, ROOTS);
            }
        }
    }
}

#[test]
fn other_roots_in_the_last_call() {
    last_call(&patient());
}

fn last_call(config: &Config) {
    for fabric in FABRICS {
        for ranks in [2, 3] {
            for bytes in [8, 32 << 10, 4 << 20] {
                let outcomes = run(fabric, ranks, config, |comm: Comm| {
                    sum(&comm)?;
                    wrong_root(&comm, bytes)?;
                    comm.close()
                });
                told(fabric, &format!("{ranks} ranks, {bytes} bytes"), &outcomes, ROOTS);
            }
        }
    }
}

/// Both ranks are roots all the time: neither reads what the other sends.
#[test]
fn other_roots_in_every_call() {
    for fabric in FABRICS {
        let outcomes = run(fabric, 2, &patient(), |comm: Comm| {
            (0..200).try_for_each(|_| wrong_root(&comm, 8))?;
            comm.close()
        });
        told(fabric, "200 calls", &outcomes, ["root 0", "root 1"]);
    }
}

#[test]
fn other_roots_in_scatter_gather_and_reduce() {
    type Wrong = fn(&Comm, usize) -> Result<()>;
    let scatter: Wrong = |comm, root| {
        comm.scatter_in_place(&mut vec![0u32; if comm.rank() == root { 6 } else { 6 / comm.size() }], root)
    };
    let gather: Wrong =
        |comm, root| comm.gather_in_place(&mut vec![0u32; if comm.rank() == root { 6 } else { 6 / comm.size() }], root);
    let reduce: Wrong = |comm, root| comm.reduce_in_place(&mut [0u32; 6], ReduceOp::Sum, root);
    for fabric in FABRICS {
        for ranks in [2, 3] {
            for (name, wrong) in [("scatter", scatter), ("gather", gather), ("reduce", reduce)] {
                let outcomes = run(fabric, ranks, &patient(), |comm: Comm| {
                    sum(&comm)?;
                    wrong(&comm, comm.rank().min(1))?;
                    sum(&comm)?;
                    comm.close()
                });
                told(fabric, &format!("{name} of {ranks}"), &outcomes, [&format!("{name} #2"), "root 1"]);
            }
        }
    }
}

/// Nothing comes from the rank that does something else: long before the deadline.
#[test]
fn other_calls_that_wait_for_each_other() {
    type Wrong = fn(&Comm) -> Result<()>;
    let one_broadcasts: Wrong =
        |comm| if comm.rank() == 2 { comm.broadcast_in_place(&mut [0u8; 100], 0) } else { sum(comm) };
    let one_misses_a_broadcast: Wrong = |comm| {
        if comm.rank() != 1 {
            comm.broadcast_in_place(&mut [0u8; 100], 0)?;
        }
        sum(comm)?;
        comm.barrier()
    };
    let asynchronous: Wrong = |comm| {
        let broadcast = || comm.broadcast_in_place_async(vec![0u8; 100], 0);
        let reduce = || comm.all_reduce_in_place_async(vec![0u8; 100], ReduceOp::Sum);
        if comm.rank() == 0 {
            let (one, other) = (broadcast()?, reduce()?);
            one.wait().and(other.wait()).map(drop)
        } else {
            let (one, other) = (reduce()?, broadcast()?);
            one.wait().and(other.wait()).map(drop)
        }
    };
    let grouped: Wrong = |comm| {
        let (mut one, mut two) = ([0u8; 5000], [0u8; 5000]);
        comm.group(|g| {
            g.broadcast_in_place(&mut one, comm.rank().min(1))?;
            g.broadcast_in_place(&mut two, 0)
        })
    };
    for fabric in FABRICS {
        for ranks in [2, 3] {
            for (name, wrong, calls) in [
                ("one broadcasts", one_broadcasts, ["all_reduce #2", "broadcast #2"]),
                ("one misses a broadcast", one_misses_a_broadcast, ["broadcast #2", "all_reduce #2"]),
                ("asynchronous", asynchronous, ["broadcast #2", "all_reduce #2"]),
                ("grouped", grouped, ["root 0", "root 1"]),
            ] {
                if ranks == 2 && name == "one broadcasts" {
                    continue;
                }
                let outcomes = run(fabric, ranks, &patient(), |comm: Comm| {
                    sum(&comm)?;
                    wrong(&comm)?;
                    comm.close()
                });
                told(fabric, &format!("{name}, {ranks} ranks"), &outcomes, calls);
            }
        }
    }
}

/// Also where an earlier communicator of the same number has other members: split halves count for themselves.
#[test]
fn halves_that_do_different_things_do_not_disagree() {
    for fabric in FABRICS {
        let outcomes = run(fabric, 4, &patient(), |world: Comm| {
            let half = world.split(Some((world.rank() / 2) as u32), 0)?.expect("a colour");
            // Both halves make a communicator of the same number.
            let pair = half.split(Some(0), 0)?.expect("a colour");
            for _ in 0..50 {
                pair.broadcast_in_place(&mut [0u8; 8], world.rank() / 2)?;
            }
            pair.close()?;
            half.close()?;
            world.close()
        });
        assert!(outcomes.iter().all(Result::is_ok), "{fabric:?}: {outcomes:?}");
    }
}

/// A rank that closes early waits only for ranks that have not made its calls yet.
#[test]
fn one_thread_may_close_all_ranks_in_turn() {
    let comms = Comm::threads(3, patient()).unwrap();
    std::thread::scope(|scope| {
        for comm in &comms {
            scope.spawn(|| comm.broadcast_in_place(&mut [0u8; 8], 0).unwrap());
        }
    });
    comms.into_iter().for_each(|comm| comm.close().unwrap());
}
