//! Every collective on every transport against values computed without communication.
//!
//! Inputs are small integers, which every dtype holds exactly and whose sums stay exact, so equality is exact.

mod common;

use common::{FABRICS, Fabric, config, run, run_ok};
use half::{bf16, f16};
use tinynccl::wire::{Algorithm, Collective};
use tinynccl::{Comm, DType, Element, Error, ReduceOp, Result};

/// Integers as elements.
trait Number: Element {
    fn of(value: u64) -> Self;
}
macro_rules! numbers {
    ($($t:ty),*) => {$(impl Number for $t { fn of(value: u64) -> Self { value as $t } })*};
}
numbers!(f32, f64, i8, u8, i32, u32, i64, u64);
impl Number for f16 {
    fn of(value: u64) -> Self {
        f16::from_f32(value as f32)
    }
}
impl Number for bf16 {
    fn of(value: u64) -> Self {
        bf16::from_f32(value as f32)
    }
}

/// Rank `rank`'s element `i`: 1 to 3, so that products stay small as well.
fn value(rank: usize, i: usize) -> u64 {
    ((rank * 7 + i * 3 + i / 5) % 3 + 1) as u64
}

fn input<T: Number>(rank: usize, len: usize) -> Vec<T> {
    (0..len).map(|i| T::of(value(rank, i))).collect()
}

fn reduced<T: Number>(ranks: usize, i: usize, op: ReduceOp) -> T {
    let values = (0..ranks).map(|r| value(r, i));
    match op {
        ReduceOp::Sum => T::of(values.sum()),
        ReduceOp::Prod => T::of(values.product()),
        ReduceOp::Min => T::of(values.min().unwrap_or(0)),
        ReduceOp::Max => T::of(values.max().unwrap_or(0)),
        ReduceOp::Avg if T::DTYPE.is_float() => average(values.sum(), ranks),
        ReduceOp::Avg => T::of(values.sum::<u64>() / ranks as u64),
    }
}

/// Sum over ranks, rounded once to the element type.
fn average<T: Number>(sum: u64, ranks: usize) -> T {
    let exact = sum as f64 / ranks as f64;
    let mut out = [T::of(0)];
    match T::DTYPE {
        DType::F64 => bytemuck::cast_slice_mut::<T, f64>(&mut out)[0] = exact,
        DType::F32 => bytemuck::cast_slice_mut::<T, f32>(&mut out)[0] = sum as f32 / ranks as f32,
        DType::F16 => bytemuck::cast_slice_mut::<T, f16>(&mut out)[0] = f16::from_f64(exact),
        DType::Bf16 => bytemuck::cast_slice_mut::<T, bf16>(&mut out)[0] = bf16::from_f64(exact),
        _ => {}
    }
    out[0]
}

/// All collectives once, out of place and in place.
fn check_all<T: Number>(comm: &Comm, count: usize, op: ReduceOp) -> Result<()> {
    let (rank, n) = (comm.rank(), comm.size());
    let root = count % n;
    let mine: Vec<T> = input(rank, count);
    let want: Vec<T> = (0..count).map(|i| reduced(n, i, op)).collect();
    let zero = T::of(0);

    let mut out = vec![zero; count];
    comm.all_reduce(&mine, &mut out, op)?;
    assert_eq!(out, want, "all_reduce");
    assert_eq!(mine, input::<T>(rank, count), "all_reduce wrote to its input");
    let mut buffer = mine.clone();
    comm.all_reduce_in_place(&mut buffer, op)?;
    assert_eq!(buffer, want, "all_reduce in place");

    let gathered: Vec<T> = (0..n).flat_map(|r| input::<T>(r, count)).collect();
    let mut out = vec![zero; n * count];
    comm.all_gather(&mine, &mut out)?;
    assert_eq!(out, gathered, "all_gather");
    let mut buffer = vec![zero; n * count];
    buffer[rank * count..(rank + 1) * count].copy_from_slice(&mine);
    comm.all_gather_in_place(&mut buffer)?;
    assert_eq!(buffer, gathered, "all_gather in place");

    let long: Vec<T> = input(rank, n * count);
    let want_segment: Vec<T> = (rank * count..(rank + 1) * count).map(|i| reduced(n, i, op)).collect();
    let mut out = vec![zero; count];
    comm.reduce_scatter(&long, &mut out, op)?;
    assert_eq!(out, want_segment, "reduce_scatter");
    assert_eq!(long, input::<T>(rank, n * count), "reduce_scatter wrote to its input");
    let mut buffer = long.clone();
    comm.reduce_scatter_in_place(&mut buffer, op)?;
    assert_eq!(buffer[rank * count..(rank + 1) * count], want_segment, "reduce_scatter in place");

    let mut buffer = mine.clone();
    comm.broadcast(&mut buffer, root)?;
    assert_eq!(buffer, input::<T>(root, count), "broadcast");
    let mut out = vec![zero; count];
    comm.broadcast_from(&mine, &mut out, root)?;
    assert_eq!(out, input::<T>(root, count), "broadcast_from");

    let mut out = vec![zero; if rank == root { count } else { 0 }];
    comm.reduce(&mine, &mut out, op, root)?;
    if rank == root {
        assert_eq!(out, want, "reduce");
    }
    let mut buffer = mine.clone();
    comm.reduce_in_place(&mut buffer, op, root)?;
    assert_eq!(buffer, if rank == root { want } else { mine.clone() }, "reduce in place");

    let mut out = vec![zero; if rank == root { n * count } else { 0 }];
    comm.gather(&mine, &mut out, root)?;
    if rank == root {
        assert_eq!(out, gathered, "gather");
    }

    let source = if rank == root { input::<T>(root, n * count) } else { Vec::new() };
    let mut out = vec![zero; count];
    comm.scatter(&source, &mut out, root)?;
    assert_eq!(out, input::<T>(root, n * count)[rank * count..(rank + 1) * count], "scatter");

    let mut out = vec![zero; n * count];
    comm.all_to_all(&long, &mut out)?;
    let want: Vec<T> =
        (0..n).flat_map(|s| input::<T>(s, n * count)[rank * count..(rank + 1) * count].to_vec()).collect();
    assert_eq!(out, want, "all_to_all");

    comm.barrier()
}

fn check_dtype(comm: &Comm, dtype: DType, count: usize, op: ReduceOp) -> Result<()> {
    match dtype {
        DType::F32 => check_all::<f32>(comm, count, op),
        DType::F64 => check_all::<f64>(comm, count, op),
        DType::F16 => check_all::<f16>(comm, count, op),
        DType::Bf16 => check_all::<bf16>(comm, count, op),
        DType::I8 => check_all::<i8>(comm, count, op),
        DType::U8 => check_all::<u8>(comm, count, op),
        DType::I32 => check_all::<i32>(comm, count, op),
        DType::U32 => check_all::<u32>(comm, count, op),
        DType::I64 => check_all::<i64>(comm, count, op),
        DType::U64 => check_all::<u64>(comm, count, op),
    }
}

#[test]
fn every_dtype_and_operator() {
    for fabric in FABRICS {
        run_ok(fabric, 3, &config(), |comm| {
            for dtype in DType::ALL {
                for op in ReduceOp::ALL {
                    check_dtype(&comm, dtype, 37, op)?;
                }
            }
            Ok(())
        });
    }
}

#[test]
fn every_algorithm_and_world_size() {
    for fabric in FABRICS {
        for ranks in 1..=if fabric == Fabric::Inproc { 9 } else { 5 } {
            for algorithm in Algorithm::ALL {
                let mut config = config();
                config.algorithm = Some(algorithm);
                config.channels = 1 + ranks % 2;
                run_ok(fabric, ranks, &config, |comm| {
                    for count in [0, 1, 2, 7, 64, 1023] {
                        check_all::<i64>(&comm, count, ReduceOp::Sum)?;
                    }
                    Ok(())
                });
            }
        }
    }
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
                    check_all::<f32>(&comm, 25_001, ReduceOp::Sum)?;
                    check_all::<bf16>(&comm, 9_999, ReduceOp::Max)
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
                .map(|i| comm.all_reduce_async(vec![i as f64; 100 * i], ReduceOp::Sum))
                .collect::<Result<Vec<_>>>()?;
            // A blocking call comes after the queued ones.
            let mut x = [comm.rank() as i32];
            comm.all_reduce_in_place(&mut x, ReduceOp::Max)?;
            assert_eq!(x, [2]);
            for (i, work) in works.into_iter().enumerate() {
                assert!(work.test(), "the blocking call returned before a queued one");
                assert_eq!(work.wait()?, vec![3.0 * i as f64; 100 * i]);
            }
            let gathered = comm.all_gather_async(vec![comm.rank() as u8], vec![9; 3])?.wait()?;
            assert_eq!(gathered.1, [0, 1, 2]);
            drop(comm.all_reduce_async(vec![1u32; 1000], ReduceOp::Sum)?);
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
            check_all::<f32>(&alone, 10, ReduceOp::Avg)?;
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

#[test]
fn wrong_lengths_are_refused_before_anything_is_sent() {
    run_ok(Fabric::Inproc, 2, &config(), |comm| {
        let refused = [
            comm.all_reduce(&[1u8; 2], &mut [0; 3], ReduceOp::Sum),
            comm.all_gather(&[1u8; 2], &mut [0; 5]),
            comm.reduce_scatter(&[1u8; 5], &mut [0; 2], ReduceOp::Sum),
            comm.all_to_all(&[1u8; 3], &mut [0; 3]),
            comm.broadcast(&mut [1u8], 2),
            comm.send(&[1u8], comm.rank()),
            comm.recv(&mut [1u8], 7),
            comm.group(|g| g.send(&[1u8], comm.rank())),
        ];
        for result in refused {
            assert!(matches!(result, Err(Error::InvalidArgument { .. })), "{result:?}");
        }
        // The communicator is still good.
        check_all::<f32>(&comm, 5, ReduceOp::Sum)
    });
}

#[test]
fn explain_gives_the_same_choice_on_all_ranks() {
    let choices = run_ok(Fabric::Shm, 3, &config(), |comm| {
        (0..28).map(|k| Ok(comm.explain(Collective::AllReduce, 1 << k)?.algorithm)).collect::<Result<Vec<_>>>()
    });
    assert_eq!(choices[0], choices[1]);
    assert_eq!(choices[0], choices[2]);
}
