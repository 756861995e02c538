//! Properties of a communicator beyond single results: pipelining, groups, asynchronous calls, split, disagreement,
//! missing and leaving ranks. The results of every collective: `exhaustive.rs`.

use std::sync::Barrier;
use std::time::Duration;

use crate::common::cells::{COLLECTIVES, Cell, check};
use crate::common::{FABRICS, Fabric, config, run, run_ok};
use tinynccl::bootstrap::Server;
use tinynccl::wire::{Algorithm, Collective};
use tinynccl::{Call, Comm, DType, Error, ReduceOp, Result};

/// All collectives once, out of place and in place.
fn check_all(comm: &Comm, dtype: DType, count: usize, op: ReduceOp) -> Result<()> {
    let root = count % comm.size();
    COLLECTIVES
        .into_iter()
        .try_for_each(|collective| check(comm, Cell { collective, dtype, op, root, count }, &"all collectives"))
}

#[test]
fn messages_longer_than_a_slot_are_pipelined() {
    for fabric in FABRICS {
        for algorithm in Algorithm::ALL {
            for ranks in [2, 3, 4] {
                let mut config = config();
                config.algorithm = Some(algorithm);
                config.shm_chunk = 4 << 10;
                config.tcp_chunk = 4 << 10;
                config.fifo_depth = 2;
                run_ok(fabric, ranks, &config, |comm| {
                    check_all(&comm, DType::F32, 25_001, ReduceOp::Sum)?;
                    check_all(&comm, DType::Bf16, 9_999, ReduceOp::Max)
                });
            }
        }
    }
}

#[test]
fn groups_of_sends_and_receives_cannot_deadlock() {
    for fabric in FABRICS {
        let mut config = config();
        config.shm_chunk = 4 << 10;
        config.tcp_chunk = 4 << 10;
        run_ok(fabric, 4, &config, |comm| {
            let (rank, n) = (comm.rank(), comm.size());
            // Every rank sends 1 MiB to every rank (itself included) before it receives: far more than links hold.
            let out: Vec<Vec<u32>> = (0..n).map(|to| vec![(rank * 10 + to) as u32; 1 << 18]).collect();
            let mut into: Vec<Vec<u32>> = vec![vec![0; 1 << 18]; n];
            let mut sum = vec![1.0f32; 1000];
            comm.group(|g| {
                for (to, data) in out.iter().enumerate() {
                    g.send(data, to)?;
                }
                g.all_reduce_in_place(&mut sum, ReduceOp::Sum)?;
                for (from, data) in into.iter_mut().enumerate().rev() {
                    g.recv(data, from)?;
                }
                Ok(())
            })?;
            for (from, data) in into.iter().enumerate() {
                assert!(data.iter().all(|&x| x == (from * 10 + rank) as u32), "from {from}");
            }
            assert!(sum.iter().all(|&x| x == n as f32));
            // Several messages between the same two ranks keep their order.
            let (mut a, mut b) = ([0u8; 3], [0i64; 5]);
            if rank == 0 {
                comm.send(&[1u8, 2, 3], 1)?;
                comm.send(&[4i64; 5], 1)?;
            } else if rank == 1 {
                comm.group(|g| {
                    g.recv(&mut a, 0)?;
                    g.recv(&mut b, 0)
                })?;
                assert_eq!((a, b), ([1, 2, 3], [4; 5]));
            }
            comm.barrier()
        });
    }
}

#[test]
fn the_first_group_of_a_ring_opens_its_links_without_a_cycle_of_waits() {
    for fabric in FABRICS {
        // Rank r names r + 1 first: opened in that order, every rank would wait for the next one.
        let mut config = config();
        config.connect_timeout = std::time::Duration::from_secs(5);
        run_ok(fabric, 3, &config, |comm| {
            let (rank, n) = (comm.rank(), comm.size());
            let (mine, mut theirs) = ([rank as u32; 10], [9; 10]);
            comm.group(|g| {
                g.send(&mine, (rank + 1) % n)?;
                g.recv(&mut theirs, (rank + n - 1) % n)
            })?;
            assert_eq!(theirs, [((rank + n - 1) % n) as u32; 10]);
            Ok(())
        });
    }
}

#[test]
fn asynchronous_calls_run_in_order_and_give_their_buffers_back() {
    for fabric in FABRICS {
        run_ok(fabric, 3, &config(), |comm| {
            let works = (0..20)
                .map(|i| comm.all_reduce_in_place_async(vec![i as f64; 100 * i], ReduceOp::Sum))
                .collect::<Result<Vec<_>>>()?;
            // A blocking call comes after the queued ones.
            let mut x = [comm.rank() as i32];
            comm.all_reduce_in_place(&mut x, ReduceOp::Max)?;
            assert_eq!(x, [2]);
            for (i, work) in works.into_iter().enumerate() {
                assert!(work.is_done(), "the blocking call returned before a queued one");
                assert_eq!(work.wait()?, vec![3.0 * i as f64; 100 * i]);
            }
            let gathered = comm.all_gather_async(vec![comm.rank() as u8], vec![9; 3])?.wait()?;
            assert_eq!(gathered.1, [0, 1, 2]);
            drop(comm.all_reduce_in_place_async(vec![1u32; 1000], ReduceOp::Sum)?);
            comm.barrier()
        });
    }
}

#[test]
fn split_makes_independent_communicators() {
    for fabric in FABRICS {
        run_ok(fabric, 5, &config(), |comm| {
            let rank = comm.rank();
            let color = if rank == 4 { None } else { Some((rank % 2) as u32) };
            let Some(half) = comm.split(color, -(rank as i32))? else {
                assert_eq!(rank, 4);
                return comm.barrier();
            };
            assert_eq!(half.size(), 2);
            assert_eq!(half.rank(), usize::from(rank < 2), "ordered by key");
            let mut x = [rank as u64];
            half.all_reduce_in_place(&mut x, ReduceOp::Sum)?;
            assert_eq!(x, [(2 * (rank % 2) + 2) as u64]);
            let alone = half.split(Some(half.rank() as u32), 0)?.expect("a colour was given");
            assert_eq!(alone.size(), 1);
            check_all(&alone, DType::F32, 10, ReduceOp::Avg)?;
            comm.barrier()
        });
    }
}

#[test]
fn ranks_that_disagree_are_both_named() {
    type CallFn = fn(&Comm) -> Result<()>;
    let cases: [(&str, CallFn, CallFn); 6] = [
        (
            "count 10",
            |c| c.all_reduce_in_place(&mut [0f32; 10], ReduceOp::Sum),
            |c| c.all_reduce_in_place(&mut [0f32; 11], ReduceOp::Sum),
        ),
        (
            "count 0",
            |c| c.all_reduce_in_place::<f32>(&mut [], ReduceOp::Sum),
            |c| c.all_reduce_in_place(&mut [0f32; 11], ReduceOp::Sum),
        ),
        (
            "f32",
            |c| c.all_reduce_in_place(&mut [0f32; 10], ReduceOp::Sum),
            |c| c.all_reduce_in_place(&mut [0i32; 10], ReduceOp::Sum),
        ),
        (
            "max",
            |c| c.all_reduce_in_place(&mut [0f32; 10], ReduceOp::Max),
            |c| c.all_reduce_in_place(&mut [0f32; 10], ReduceOp::Sum),
        ),
        (
            "all_gather",
            |c| c.all_gather(&[0f32; 5], &mut [0.0; 10]),
            |c| c.all_reduce_in_place(&mut [0f32; 10], ReduceOp::Sum),
        ),
        ("send/recv", |c| c.send(&[0u8; 5], 1), |c| c.recv(&mut [0u8; 6], 0)),
    ];
    for fabric in FABRICS {
        for (word, first, second) in cases {
            let errors = run(fabric, 2, &config(), |comm| {
                let error = if comm.rank() == 0 { first(&comm) } else { second(&comm) };
                // A sender may be done before the receiver notices: its next call must fail.
                let error = error.and_then(|()| comm.barrier()).expect_err("the ranks disagree");
                let later = comm.barrier().expect_err("the communicator is dead");
                assert!(matches!(later, Error::Aborted { .. }), "{later}");
                error.to_string()
            });
            for error in errors {
                assert!(error.contains(word) && error.contains("rank 0") && error.contains("rank 1"), "{error}");
            }
        }
    }
}

#[test]
fn abort_wakes_every_waiter() {
    for fabric in FABRICS {
        let errors = run(fabric, 3, &config(), |comm| {
            if comm.rank() == 2 {
                comm.abort("told to");
                return comm.barrier().expect_err("aborted").to_string();
            }
            comm.barrier().expect_err("aborted").to_string()
        });
        for error in errors {
            assert!(error.contains("rank 2: told to"), "{error}");
        }
    }
}

#[test]
fn missing_ranks_are_named_at_the_deadline() {
    for fabric in FABRICS {
        let mut config = config();
        config.timeout = std::time::Duration::from_millis(800);
        let (tx, rx) = std::sync::mpsc::channel::<()>();
        let rx = std::sync::Mutex::new(rx);
        let errors = run(fabric, 3, &config, |comm| {
            comm.barrier().expect("all are here");
            if comm.rank() == 1 {
                // Alive, but never makes the call: waits until both others have failed.
                let rx = rx.lock().expect("one user");
                rx.recv().expect("rank 0");
                rx.recv().expect("rank 2");
                return String::new();
            }
            let error = comm.all_reduce_in_place(&mut [1.0f32], ReduceOp::Sum).expect_err("rank 1 is missing");
            tx.clone().send(()).expect("rank 1 waits");
            error.to_string()
        });
        for error in [&errors[0], &errors[2]] {
            assert!(error.contains("not arrived: rank 1;"), "{fabric:?}: {error}");
        }
    }
}

#[test]
fn a_rank_that_has_left_is_named() {
    for fabric in FABRICS {
        let errors = run(fabric, 3, &config(), |comm| match comm.rank() {
            0 => String::new(),
            _ => comm.barrier().expect_err("rank 0 has left").to_string(),
        });
        for error in &errors[1..] {
            assert!(error.contains("lost rank 0"), "{fabric:?}: {error}");
        }
    }
}

/// Opens the links between all.
fn meet(comm: &Comm) -> Result<()> {
    let (rank, n) = (comm.rank(), comm.size());
    for shift in 1..n {
        comm.send_recv(&[0u8], (rank + shift) % n, &mut [0u8], (rank + n - shift) % n)?;
    }
    Ok(())
}

#[test]
fn a_rank_that_closes_is_said_to_have_left_and_one_that_panics_to_have_panicked() {
    for fabric in FABRICS {
        for panics in [false, true] {
            let errors = run(fabric, 2, &config(), |comm| {
                meet(&comm).expect("both are here");
                if comm.rank() == 1 {
                    return Some(comm.recv(&mut [0u8], 0).expect_err("rank 0 has left"));
                }
                let end = move || {
                    let _comm = comm;
                    assert!(!panics, "expected by the test");
                };
                assert_eq!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(end)).is_err(), panics);
                None
            });
            let error = errors[1].as_ref().expect("of rank 1");
            let (right, words) = match panics {
                false => {
                    (matches!(error, Error::PeerLost { rank: 1, peer: 0, .. }), "it closed its communicator and left")
                }
                true => (matches!(error, Error::Aborted { rank: 1, .. }), "rank 0: it panicked"),
            };
            assert!(right && error.to_string().contains(words), "{fabric:?}: {error}");
        }
    }
}

/// Rank 0 leaves, rank 1 does not come, rank 2 waits for it.
fn waits_for_rank_1(comm: Comm, steps: &[Barrier; 2]) -> Option<Error> {
    meet(&comm).expect("all are here");
    let rank = comm.rank();
    if rank == 0 {
        drop(comm);
        steps[0].wait();
        return None;
    }
    steps[0].wait();
    let error = (rank == 2).then(|| comm.recv(&mut [0u8], 1).expect_err("rank 1 does not send"));
    steps[1].wait();
    error
}

fn blames_rank_1(errors: &[Option<Error>], context: &str) {
    let error = errors[2].as_ref().expect("of rank 2");
    assert!(matches!(error, Error::Timeout { missing, .. } if *missing == [1]), "{context}: {error}");
}

#[test]
fn a_rank_that_left_in_good_order_is_not_blamed_for_one_that_does_not_come() {
    let mut config = config();
    config.timeout = Duration::from_secs(2);
    for fabric in FABRICS {
        let steps = [Barrier::new(3), Barrier::new(2)];
        blames_rank_1(&run(fabric, 3, &config, |comm| waits_for_rank_1(comm, &steps)), &format!("{fabric:?}"));
    }
    // The rendezvous ends with rank 0, which has waited for the others for a while.
    let server = Server::start("127.0.0.1:0".parse().expect("an address"), 3, &config).expect("server");
    let (id, steps) = (server.unique_id(), [Barrier::new(3), Barrier::new(2)]);
    let (mut server, config) = (Some(server), &config);
    let errors: Vec<_> = std::thread::scope(|scope| {
        let ranks = [0, 1, 2].map(|rank| {
            let (id, steps, server) = (&id, &steps, server.take());
            scope.spawn(move || {
                let comm = match server {
                    Some(server) => Comm::init_with_server(server, rank, 3, config.clone()),
                    None => Comm::init(id, rank, 3, config.clone()),
                };
                waits_for_rank_1(comm.expect("init"), steps)
            })
        });
        ranks.into_iter().map(|rank| rank.join().expect("no panic")).collect()
    });
    blames_rank_1(&errors, "rank 0 hosted the rendezvous");
}

#[test]
fn a_lost_rank_is_lost_to_later_calls_too() {
    for fabric in FABRICS {
        let errors = run(fabric, 2, &config(), |comm| match comm.rank() {
            0 => vec![],
            _ => (0..3).map(|_| comm.barrier().expect_err("rank 0 has left")).collect(),
        });
        for error in &errors[1] {
            assert!(matches!(error, Error::PeerLost { rank: 1, peer: 0, .. }), "{fabric:?}: {error}");
        }
    }
}

#[test]
fn wrong_lengths_are_refused_before_anything_is_sent() {
    run_ok(Fabric::Inproc, 2, &config(), |comm| {
        let refused = [
            comm.all_reduce(&[1u8; 2], &mut [0; 3], ReduceOp::Sum),
            comm.all_gather(&[1u8; 2], &mut [0; 5]),
            comm.reduce_scatter(&[1u8; 5], &mut [0; 2], ReduceOp::Sum),
            comm.all_to_all(&[1u8; 3], &mut [0; 3]),
            comm.broadcast_in_place(&mut [1u8], 2),
            comm.send(&[1u8], comm.rank()),
            comm.recv(&mut [1u8], 7),
            comm.group(|g| g.send(&[1u8], comm.rank())),
        ];
        for result in refused {
            assert!(matches!(result, Err(Error::InvalidArgument { .. })), "{result:?}");
        }
        // The communicator is still good.
        check_all(&comm, DType::F32, 5, ReduceOp::Sum)
    });
}

#[test]
fn explain_gives_the_same_choice_on_all_ranks() {
    let choices = run_ok(Fabric::Shm, 3, &config(), |comm| {
        (0..28)
            .map(|k| {
                Ok(comm.explain(&Call::new(Collective::AllReduce, DType::U8, ReduceOp::Sum, 0, 1 << k))?.algorithm)
            })
            .collect::<Result<Vec<_>>>()
    });
    assert_eq!(choices[0], choices[1]);
    assert_eq!(choices[0], choices[2]);
}
