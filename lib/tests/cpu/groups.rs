//! Groups: random mixtures of collectives and messages in one pass, packing, and ranks whose lists differ.

use crate::common::values::{Number, blank, datum, operand, reduced, vector};
use crate::common::{FABRICS, Fabric, config, run, run_ok};
use half::bf16;
use proptest::prelude::*;
use tinynccl::comm::{Exchange, Group, packed};
use tinynccl::wire::Algorithm;
use tinynccl::{Comm, Config, DType, Error, ReduceOp, Result};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    AllReduce,
    AllReduceInPlace,
    AllGather,
    AllGatherInPlace,
    AllGatherV,
    ReduceScatter,
    ReduceScatterInPlace,
    Broadcast,
    BroadcastFrom,
    Reduce,
    ReduceInPlace,
    Gather,
    GatherInPlace,
    GatherV,
    Scatter,
    ScatterInPlace,
    ScatterV,
    AllToAll,
    AllToAllV,
    Barrier,
    /// From one rank to another.
    Message,
    /// Round the ring.
    Shift,
}

const KINDS: [Kind; 22] = {
    use Kind::*;
    [
        AllReduce,
        AllReduceInPlace,
        AllGather,
        AllGatherInPlace,
        AllGatherV,
        ReduceScatter,
        ReduceScatterInPlace,
        Broadcast,
        BroadcastFrom,
        Reduce,
        ReduceInPlace,
        Gather,
        GatherInPlace,
        GatherV,
        Scatter,
        ScatterInPlace,
        ScatterV,
        AllToAll,
        AllToAllV,
        Barrier,
        Message,
        Shift,
    ]
};

/// One call, the same on all ranks.
#[derive(Debug, Clone, Copy)]
struct Op {
    kind: Kind,
    /// True for `bf16` elements, false for `i32`.
    short: bool,
    op: ReduceOp,
    /// Root, or sender.
    root: usize,
    /// Receiver.
    to: usize,
    count: usize,
}

/// The two buffers of a call; one of them holds both where it is in place.
type Pair<T> = (Vec<T>, Vec<T>);

/// Contents of a rank's buffers before the call, and of its output after it.
fn buffers<T: Number>(op: &Op, rank: usize, n: usize) -> (Pair<T>, Vec<T>) {
    let Op { kind, op: reduction, root, to, count, .. } = *op;
    let is_root = rank == root;
    let own = |i: usize| operand::<T>(reduction, n, rank, i);
    let sum = |i: usize| reduced::<T>(reduction, n, i);
    let data = |i: usize| datum(rank, i);
    let of_root = |i: usize| datum(root, i);
    let gathered = |i: usize| datum(i / count, i % count);
    let mine = rank * count..(rank + 1) * count;
    let start = mine.start;
    let at_root = |len: usize| if is_root { len } else { 0 };
    match kind {
        Kind::AllReduce => ((vector(count, own), blank(count)), vector(count, sum)),
        Kind::AllReduceInPlace => ((vec![], vector(count, own)), vector(count, sum)),
        Kind::AllGather | Kind::AllGatherV => ((vector(count, data), blank(n * count)), vector(n * count, gathered)),
        Kind::AllGatherInPlace => {
            let mut buffer = blank::<T>(n * count);
            buffer[mine].copy_from_slice(&vector::<T>(count, data));
            ((vec![], buffer), vector(n * count, gathered))
        }
        Kind::ReduceScatter => ((vector(n * count, own), blank(count)), vector(count, |i| sum(start + i))),
        Kind::ReduceScatterInPlace => {
            let want = vector(n * count, |i| if mine.contains(&i) { sum(i) } else { own(i) });
            ((vec![], vector(n * count, own)), want)
        }
        Kind::Broadcast => ((vec![], vector(count, data)), vector(count, of_root)),
        Kind::BroadcastFrom => ((vector(at_root(count), data), blank(count)), vector(count, of_root)),
        Kind::Reduce => ((vector(count, own), blank(at_root(count))), vector(at_root(count), sum)),
        Kind::ReduceInPlace => ((vec![], vector(count, own)), vector(count, |i| if is_root { sum(i) } else { own(i) })),
        Kind::Gather | Kind::GatherV => {
            ((vector(count, data), blank(at_root(n * count))), vector(at_root(n * count), gathered))
        }
        Kind::GatherInPlace if is_root => {
            let mut buffer = blank::<T>(n * count);
            buffer[mine].copy_from_slice(&vector::<T>(count, data));
            ((vec![], buffer), vector(n * count, gathered))
        }
        Kind::GatherInPlace => ((vec![], vector(count, data)), vector(count, data)),
        Kind::Scatter | Kind::ScatterV => {
            ((vector(at_root(n * count), data), blank(count)), vector(count, |i| of_root(start + i)))
        }
        Kind::ScatterInPlace if is_root => ((vec![], vector(n * count, data)), vector(n * count, data)),
        Kind::ScatterInPlace => ((vec![], blank(count)), vector(count, |i| of_root(start + i))),
        Kind::AllToAll | Kind::AllToAllV => {
            let want = vector(n * count, |i| datum(i / count, start + i % count));
            ((vector(n * count, data), blank(n * count)), want)
        }
        Kind::Barrier => ((vec![], vec![]), vec![]),
        Kind::Message => {
            let len = |is: bool| if is { count } else { 0 };
            let (sent, received) = (len(is_root), len(rank == to));
            ((vector(sent, data), blank(received)), vector(received, of_root))
        }
        Kind::Shift => {
            let left = (rank + n - 1) % n;
            ((vector(count, data), blank(count)), vector(count, |i| datum(left, i)))
        }
    }
}

fn add<'a, T: Number>(g: &mut Group<'a>, op: &Op, comm: &Comm, pair: &'a mut Pair<T>) -> Result<()> {
    let (rank, n) = (comm.rank(), comm.size());
    let Op { kind, op: reduction, root, to, count, .. } = *op;
    let even = packed(&vec![count; n]);
    let (input, output) = pair;
    match kind {
        Kind::AllReduce => g.all_reduce(input, output, reduction),
        Kind::AllReduceInPlace => g.all_reduce_in_place(output, reduction),
        Kind::AllGather => g.all_gather(input, output),
        Kind::AllGatherInPlace => g.all_gather_in_place(output),
        Kind::AllGatherV => g.all_gather_v(input, output, &even),
        Kind::ReduceScatter => g.reduce_scatter(input, output, reduction),
        Kind::ReduceScatterInPlace => g.reduce_scatter_in_place(output, reduction),
        Kind::Broadcast => g.broadcast_in_place(output, root),
        Kind::BroadcastFrom => g.broadcast(input, output, root),
        Kind::Reduce => g.reduce(input, output, reduction, root),
        Kind::ReduceInPlace => g.reduce_in_place(output, reduction, root),
        Kind::Gather => g.gather(input, output, root),
        Kind::GatherInPlace => g.gather_in_place(output, root),
        Kind::GatherV => g.gather_v(input, output, &even, root),
        Kind::Scatter => g.scatter(input, output, root),
        Kind::ScatterInPlace => g.scatter_in_place(output, root),
        Kind::ScatterV => g.scatter_v(input, &even, output, root),
        Kind::AllToAll => g.all_to_all(input, output),
        Kind::AllToAllV => g.all_to_all_v(input, &even, output, &even),
        Kind::Barrier => g.barrier(),
        Kind::Message => {
            if rank == root {
                g.send(input, to)?;
            }
            if rank == to {
                g.recv(output, root)?;
            }
            Ok(())
        }
        Kind::Shift => g.neighbour_exchange([Exchange {
            to: Some((rank + 1) % n),
            send: input,
            from: Some((rank + n - 1) % n),
            recv: output,
        }]),
    }
}

/// Runs the calls as one group and checks every output.
fn check_group(comm: &Comm, ops: &[Op]) -> Result<()> {
    let (rank, n) = (comm.rank(), comm.size());
    let ops: Vec<Op> = ops.iter().map(|op| Op { root: op.root % n, to: op.to % n, ..*op }).collect();
    let (mut long, mut short): (Vec<Pair<i32>>, Vec<Pair<bf16>>) =
        ops.iter().map(|op| (buffers(op, rank, n).0, buffers(op, rank, n).0)).unzip();
    comm.group(|g| {
        ops.iter()
            .zip(long.iter_mut().zip(&mut short))
            .try_for_each(|(op, (long, short))| if op.short { add(g, op, comm, short) } else { add(g, op, comm, long) })
    })?;
    for (index, op) in ops.iter().enumerate() {
        if op.short {
            assert_eq!(short[index].1, buffers::<bf16>(op, rank, n).1, "rank {rank} of {n}, call {index}: {op:?}");
        } else {
            assert_eq!(long[index].1, buffers::<i32>(op, rank, n).1, "rank {rank} of {n}, call {index}: {op:?}");
        }
    }
    Ok(())
}

/// The operator, or a sum where bits of floats would be combined: short calls are of bf16.
fn fitting(short: bool, op: ReduceOp) -> ReduceOp {
    if short && !op.applies_to(DType::Bf16) { ReduceOp::Sum } else { op }
}

fn any_op() -> impl Strategy<Value = Op> {
    // Twice as often what packs.
    let kind = prop_oneof![4 => prop::sample::select(&KINDS[..]), 1 => prop::sample::select(&KINDS[..2])];
    let count = prop_oneof![Just(0usize), 1usize..40, 200usize..400];
    (kind, any::<bool>(), prop::sample::select(&ReduceOp::ALL[..]), 0usize..8, 0usize..8, count)
        .prop_map(|(kind, short, op, root, to, count)| Op { kind, short, op: fitting(short, op), root, to, count })
}

fn any_config() -> impl Strategy<Value = Config> {
    let algorithm = prop::option::of(prop::sample::select(&Algorithm::ALL[..]));
    (algorithm, 1usize..3, prop::sample::select(&[64usize, 256, 4096][..]), any::<bool>()).prop_map(
        |(algorithm, channels, message, fixed_order)| {
            let mut config = config();
            (config.algorithm, config.channels, config.fixed_order) = (algorithm, channels, fixed_order);
            (config.shm_chunk, config.tcp_chunk, config.fifo_depth) = (message, message, 2);
            config
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_mixture_of_calls(ops in prop::collection::vec(any_op(), 0..25), ranks in 1usize..6, config in any_config()) {
        run_ok(Fabric::Inproc, ranks, &config, |comm| {
            check_group(&comm, &ops)?;
            // The same again, with links open and plans cached, and a separate call after it.
            check_group(&comm, &ops)?;
            comm.barrier()
        });
    }
}

/// Every kind of call, several times, in an order without a pattern.
fn all_kinds(count: usize) -> Vec<Op> {
    (0..3 * KINDS.len())
        .map(|i| Op {
            kind: KINDS[(i * 13 + i / 22) % KINDS.len()],
            short: i % 3 == 0,
            op: fitting(i % 3 == 0, ReduceOp::ALL[i % ReduceOp::ALL.len()]),
            root: i % 4,
            to: (i / 4 + 1) % 4,
            count: count * (i % 4) / 3,
        })
        .collect()
}

#[test]
fn all_kinds_of_calls_over_every_transport() {
    for fabric in FABRICS {
        for count in [9, 12_000] {
            let ops = all_kinds(count);
            let mut config = config();
            (config.shm_chunk, config.tcp_chunk) = (4 << 10, 4 << 10);
            run_ok(fabric, 4, &config, |comm| check_group(&comm, &ops));
        }
    }
}

#[test]
fn many_small_all_reduces_of_different_types() {
    for fabric in FABRICS {
        run_ok(fabric, 3, &config(), |comm| {
            let mut floats: Vec<Vec<f32>> =
                (0..500).map(|i| vector(i % 50, |j| operand(ReduceOp::Sum, 3, comm.rank(), i + j))).collect();
            let mut longs: Vec<Vec<i64>> =
                (0..500).map(|i| vector(i % 700, |j| operand(ReduceOp::Max, 3, comm.rank(), i + j))).collect();
            comm.group(|g| {
                floats.iter_mut().zip(&mut longs).try_for_each(|(a, b)| {
                    g.all_reduce_in_place(a, ReduceOp::Sum)?;
                    g.all_reduce_in_place(b, ReduceOp::Max)
                })
            })?;
            for (i, (a, b)) in floats.iter().zip(&longs).enumerate() {
                assert_eq!(*a, vector::<f32>(i % 50, |j| reduced(ReduceOp::Sum, 3, i + j)));
                assert_eq!(*b, vector::<i64>(i % 700, |j| reduced(ReduceOp::Max, 3, i + j)));
            }
            Ok(())
        });
    }
}

#[test]
fn lists_that_differ_are_a_mismatch() {
    type Build = fn(&mut Group<'_>, &'static mut [f32]) -> Result<()>;
    fn leak(len: usize) -> &'static mut [f32] {
        Vec::leak(vec![1.0; len])
    }
    let cases: [(&str, Build, Build); 4] = [
        (
            "2 calls of lengths with hash",
            |g, _| {
                g.all_reduce_in_place(leak(10), ReduceOp::Sum)?;
                g.all_reduce_in_place(leak(20), ReduceOp::Sum)
            },
            |g, _| {
                g.all_reduce_in_place(leak(20), ReduceOp::Sum)?;
                g.all_reduce_in_place(leak(10), ReduceOp::Sum)
            },
        ),
        (
            "count 30 in 2 calls",
            |g, _| {
                g.all_reduce_in_place(leak(10), ReduceOp::Sum)?;
                g.all_reduce_in_place(leak(20), ReduceOp::Sum)
            },
            |g, _| g.all_reduce_in_place(leak(30), ReduceOp::Sum),
        ),
        (
            "all_reduce #",
            |g, data| {
                g.all_reduce_in_place(data, ReduceOp::Sum)?;
                g.broadcast_in_place(leak(5), 0)
            },
            |g, data| {
                g.broadcast_in_place(leak(5), 0)?;
                g.all_reduce_in_place(data, ReduceOp::Sum)
            },
        ),
        (
            "send/recv",
            |g, _| {
                g.send(leak(4), 1)?;
                g.barrier()
            },
            |g, _| {
                g.recv(leak(5), 0)?;
                g.barrier()
            },
        ),
    ];
    for fabric in FABRICS {
        for (word, first, second) in cases {
            let errors = run(fabric, 2, &config(), |comm| {
                let mut group = comm.group_start();
                let build = if comm.rank() == 0 { first } else { second };
                build(&mut group, leak(3)).expect("arguments that can be right");
                let outcome = group.end().and_then(|()| comm.barrier());
                let error = outcome.expect_err("the lists differ");
                assert!(matches!(error, Error::Mismatch { .. } | Error::Aborted { .. }), "{error}");
                error.to_string()
            });
            for error in errors {
                assert!(error.contains(word) && error.contains("rank 0") && error.contains("rank 1"), "{error}");
            }
        }
    }
}

/// The lists of two calls that a hash of 20 bits (FNV-1a of the lengths, folded) cannot tell apart, by their sum.
fn lists_of_one_short_hash(sums: std::ops::Range<usize>) -> Vec<[[usize; 2]; 2]> {
    let hash = |list: [usize; 2]| {
        let bytes = list.iter().flat_map(|&count| (count as u64).to_le_bytes());
        let whole =
            bytes.fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
        (whole >> 44 ^ whole) & 0xf_ffff
    };
    let mut found = Vec::new();
    for sum in sums {
        let mut seen = std::collections::HashMap::new();
        for list in (1..sum).map(|first| [first, sum - first]) {
            found.extend(seen.insert(hash(list), list).map(|other| [other, list]));
        }
    }
    found
}

#[test]
fn lists_that_a_short_hash_cannot_tell_apart_are_a_mismatch() {
    let found = lists_of_one_short_hash(2..400);
    assert!(found.len() > 5 && found.contains(&[[3, 57], [52, 8]]), "{found:?}");
    for fabric in FABRICS {
        for lists in &found {
            let errors = run(fabric, 2, &config(), |comm| {
                let [mut first, mut second] = lists[comm.rank()].map(|count| vec![1.0f32; count]);
                let mut group = comm.group_start();
                group.all_reduce_in_place(&mut first, ReduceOp::Sum).expect("a right call");
                group.all_reduce_in_place(&mut second, ReduceOp::Sum).expect("a right call");
                group.end().and_then(|()| comm.close()).expect_err("the lists differ")
            });
            for error in errors {
                let text = error.to_string();
                assert!(matches!(error, Error::Mismatch { .. } | Error::Aborted { .. }), "{text}");
                assert!(text.contains("rank 0") && text.contains("rank 1"), "{text}");
            }
        }
    }
}

/// Hashes of lists cannot be known beforehand: they differ from job to job.
#[test]
fn lists_are_told_by_a_hash_of_this_job_alone() {
    let told = || {
        let errors = run(Fabric::Inproc, 2, &config(), |comm| {
            let [mut first, mut second] = [1 + comm.rank(), 2 - comm.rank()].map(|count| vec![1.0f32; count]);
            let mut group = comm.group_start();
            group.all_reduce_in_place(&mut first, ReduceOp::Sum).expect("a right call");
            group.all_reduce_in_place(&mut second, ReduceOp::Sum).expect("a right call");
            group.end().expect_err("the lists differ").to_string()
        });
        let text = errors.iter().find(|text| text.contains("in 2 calls of lengths with hash")).expect("a mismatch");
        text.split("hash ").nth(1).expect("its digits")[..16].to_owned()
    };
    assert_ne!(told(), told());
}
