//! Collectives over memory that all ranks map: one-shot slots and symmetric buffers.

use crate::common::values::Number;
use crate::common::{Fabric, config, run};
use tinynccl::comm::SymmetricBuffer;
use tinynccl::config::Verify;
use tinynccl::{Comm, Config, ReduceOp};

/// Fabrics over which ranks share memory.
const SHARED: [Fabric; 2] = [Fabric::Inproc, Fabric::Shm];

fn ranks<R: Send>(n: usize, config: &Config, body: impl Fn(&Comm) -> R + Sync) -> Vec<R> {
    let settings = [Verify::Off, Verify::All].map(|verify| config.clone().with(|c| c.verify = verify));
    let worlds = SHARED.into_iter().flat_map(|fabric| settings.iter().map(move |config| (fabric, config)));
    worlds.flat_map(|(fabric, config)| run(fabric, n, config, |comm| body(&comm))).collect()
}

/// Element `i` of rank `rank`'s buffer: small integers, exact in f32 also when summed.
fn value(rank: usize, i: usize) -> f32 {
    ((rank * 31 + i * 7) % 101) as f32
}

fn fill(buffer: &mut SymmetricBuffer<f32>, rank: usize) {
    for (i, x) in buffer.iter_mut().enumerate() {
        *x = value(rank, i);
    }
}

fn sum(n: usize, i: usize) -> f32 {
    (0..n).map(|r| value(r, i)).sum()
}

/// In the order of the ranks, as the shared region combines.
fn average(n: usize, i: usize) -> f32 {
    f32::average((0..n).map(|r| value(r, i)), n)
}

#[test]
fn every_collective_on_symmetric_buffers() {
    const COUNT: usize = 10_007;
    for n in [1, 2, 3, 4] {
        ranks(n, &config(), |comm| {
            let rank = comm.rank();
            let mut input = comm.alloc::<f32>(n * COUNT).expect("alloc");
            let mut output = comm.alloc::<f32>(n * COUNT).expect("alloc");
            assert_eq!(input.is_shared(), n > 1, "{input:?}");
            for round in 0..3 {
                fill(&mut input, rank);
                comm.all_reduce(&input, &mut output, ReduceOp::Sum).expect("all_reduce");
                for (i, &x) in output.iter().enumerate() {
                    assert_eq!(x, sum(n, i), "all_reduce, {n} ranks, rank {rank}, round {round}, element {i}");
                }
                comm.all_reduce_in_place(&mut input, ReduceOp::Avg).expect("in place");
                for (i, &x) in input.iter().enumerate() {
                    assert_eq!(x, average(n, i), "all_reduce in place, {n} ranks, element {i}");
                }
                fill(&mut input, rank);
                comm.reduce_scatter(&input, &mut output[..COUNT], ReduceOp::Sum).expect("reduce_scatter");
                for (i, &x) in output[..COUNT].iter().enumerate() {
                    assert_eq!(x, sum(n, rank * COUNT + i), "reduce_scatter, {n} ranks, element {i}");
                }
                comm.all_gather(&input[..COUNT], &mut output).expect("all_gather");
                for (i, &x) in output.iter().enumerate() {
                    assert_eq!(x, value(i / COUNT, i % COUNT), "all_gather, {n} ranks, element {i}");
                }
                comm.all_to_all(&input, &mut output).expect("all_to_all");
                for (i, &x) in output.iter().enumerate() {
                    assert_eq!(x, value(i / COUNT, rank * COUNT + i % COUNT), "all_to_all, {n} ranks, element {i}");
                }
                let root = n - 1;
                comm.reduce(&input, &mut output, ReduceOp::Max, root).expect("reduce");
                if rank == root {
                    for (i, &x) in output.iter().enumerate() {
                        let max = (0..n).map(|r| value(r, i)).fold(f32::MIN, f32::max);
                        assert_eq!(x, max, "reduce, {n} ranks, element {i}");
                    }
                }
                comm.broadcast_in_place(&mut input[5..], root).expect("broadcast");
                for (i, &x) in input.iter().enumerate().skip(5) {
                    assert_eq!(x, value(root, i), "broadcast, {n} ranks, element {i}");
                }
                fill(&mut input, rank);
                comm.gather(&input[..COUNT], &mut output, 0).expect("gather");
                if rank == 0 {
                    for (i, &x) in output.iter().enumerate() {
                        assert_eq!(x, value(i / COUNT, i % COUNT), "gather, {n} ranks, element {i}");
                    }
                }
            }
            assert!(n == 1 || comm.census().links.is_empty(), "nothing went over links: {:?}", comm.census());
        });
    }
}

/// Ranks need not agree on where a buffer lies, nor whether it is symmetric: they find out and do what works for all.
#[test]
fn any_mix_of_buffers_gives_the_result() {
    const COUNT: usize = 20_000;
    let n = 3;
    ranks(n, &config(), |comm| {
        let rank = comm.rank();
        let mut one = comm.alloc::<f32>(2 * COUNT).expect("alloc");
        let mut two = comm.alloc::<f32>(2 * COUNT).expect("alloc");
        for mix in 0..9 {
            let skip = if mix == 8 { rank * 16 } else { 0 };
            fill(&mut one, rank);
            let source: Vec<f32> = one[skip..skip + COUNT].to_vec();
            let mut plain = vec![0.0f32; COUNT];
            match mix {
                // All in symmetric memory, at different places.
                8 => comm.all_reduce(&one[skip..skip + COUNT], &mut two[..COUNT], ReduceOp::Sum),
                // One rank's input, output or both are not.
                m if m % 3 == rank && m < 3 => comm.all_reduce(&source, &mut two[..COUNT], ReduceOp::Sum),
                m if m % 3 == rank && m < 6 => comm.all_reduce(&one[..COUNT], &mut plain, ReduceOp::Sum),
                m if m % 3 == rank => comm.all_reduce(&source, &mut plain, ReduceOp::Sum),
                _ => comm.all_reduce(&one[..COUNT], &mut two[..COUNT], ReduceOp::Sum),
            }
            .expect("all_reduce");
            let result = if mix != 8 && mix % 3 == rank && mix >= 3 { &plain[..] } else { &two[..COUNT] };
            for (i, &x) in result.iter().enumerate() {
                let expected: f32 = (0..n).map(|r| value(r, i + if mix == 8 { r * 16 } else { 0 })).sum();
                assert_eq!(x, expected, "mix {mix}, rank {rank}, element {i}");
            }
        }
        // Some drop a buffer that others keep: it is no longer common.
        if rank == 1 {
            drop(two);
            two = comm.alloc::<f32>(2 * COUNT).expect("alloc");
        } else {
            let _other = comm.alloc::<f32>(2 * COUNT).expect("alloc");
            comm.barrier().expect("barrier");
            comm.all_reduce(&one, &mut two, ReduceOp::Sum).expect("all_reduce");
            return;
        }
        comm.barrier().expect("barrier");
        comm.all_reduce(&one, &mut two, ReduceOp::Sum).expect("all_reduce");
    });
}

/// A rank whose result takes the place of its input must not write while another one reads that.
#[test]
fn in_place_beside_ordinary_memory() {
    const COUNT: usize = 300_000;
    let n = 3;
    ranks(n, &config(), |comm| {
        let mut one = comm.alloc::<f32>(COUNT).expect("alloc");
        let mut plain = vec![0.0f32; COUNT];
        for round in 0..12 {
            fill(&mut one, comm.rank());
            let in_place = round % n == comm.rank();
            match in_place {
                true => comm.all_reduce_in_place(&mut one, ReduceOp::Sum),
                false => comm.all_reduce(&one, &mut plain, ReduceOp::Sum),
            }
            .expect("all_reduce");
            let result = if in_place { &one[..] } else { &plain[..] };
            for (i, &x) in result.iter().enumerate() {
                assert_eq!(x, sum(n, i), "round {round}, rank {}, element {i}", comm.rank());
            }
        }
    });
}

#[test]
fn sizes_around_the_slot_and_the_line() {
    let mut config = config();
    config.one_shot = 4096;
    for n in [2, 3, 5] {
        ranks(n, &config, |comm| {
            for count in [0usize, 1, 2, 5, 6, 7, 15, 16, 17, 255, 1023, 1024, 1025, 5000] {
                for round in 0..6 {
                    let mine: Vec<f32> = (0..count * n).map(|i| value(comm.rank() + round, i)).collect();
                    let mut all = vec![0.0f32; count * n];
                    comm.all_gather(&mine[..count], &mut all).expect("all_gather");
                    for (i, &x) in all.iter().enumerate() {
                        assert_eq!(x, value(i / count + round, i % count), "all_gather of {count}, element {i}");
                    }
                    let root = round % n;
                    let mut part = vec![0.0f32; count];
                    comm.scatter(&mine, &mut part, root).expect("scatter");
                    for (i, &x) in part.iter().enumerate() {
                        assert_eq!(x, value(root + round, comm.rank() * count + i), "scatter of {count}, element {i}");
                    }
                    let mut total = mine[..count].to_vec();
                    comm.reduce_in_place(&mut total, ReduceOp::Sum, root).expect("reduce");
                    for (i, &x) in total.iter().enumerate() {
                        let sum: f32 = (0..n).map(|r| value(r + round, i)).sum();
                        let expected = if comm.rank() == root { sum } else { mine[i] };
                        assert_eq!(x, expected, "reduce of {count}, element {i}");
                    }
                }
            }
        });
    }
}

/// A root that broadcasts runs ahead of the others, but never over slots that another rank still reads.
#[test]
fn a_root_that_runs_ahead_waits_for_the_slowest() {
    ranks(3, &config(), |comm| {
        for call in 0..2000u64 {
            let mut data = [0u64; 100];
            if comm.rank() == 0 {
                data = [call; 100];
            } else if comm.rank() == 2 && call % 97 == 0 {
                std::thread::yield_now();
            }
            comm.broadcast_in_place(&mut data, 0).expect("broadcast");
            assert_eq!(data, [call; 100]);
        }
    });
}

#[test]
fn ranks_that_take_different_ways_are_both_named() {
    let mut config = config();
    config.timeout = std::time::Duration::from_secs(20);
    let errors = ranks(2, &config, |comm| {
        // One fits into a slot, the other one goes over links.
        let mut data = vec![1.0f32; if comm.rank() == 0 { 4 } else { 400_000 }];
        comm.all_reduce_in_place(&mut data, ReduceOp::Sum).expect_err("the counts differ").to_string()
    });
    for world in errors.chunks(2) {
        assert!(world.iter().any(|e| e.contains("400000") && e.contains("rank 1") && e.contains(" 4")), "{world:?}");
    }
}

#[test]
fn ranks_that_ask_for_different_sizes_are_told() {
    let errors = ranks(2, &config(), |comm| {
        comm.alloc::<u8>(1 + comm.rank() * 100_000).expect_err("the sizes differ").to_string()
    });
    for e in errors {
        assert!(e.contains("rank 1 wants"), "{e}");
    }
}

/// Between hosts, or where ranks do not share memory, `alloc` gives ordinary memory and everything goes on.
#[test]
fn without_shared_memory_a_symmetric_buffer_is_an_ordinary_one() {
    run(Fabric::Tcp, 2, &config(), |comm| {
        let mut buffer = comm.alloc::<f32>(50_000).expect("alloc");
        assert!(!buffer.is_shared());
        fill(&mut buffer, comm.rank());
        comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum).expect("all_reduce");
        for (i, &x) in buffer.iter().enumerate() {
            assert_eq!(x, sum(2, i), "element {i}");
        }
    });
}

/// Outputs too large for the cache are written around it, by links and in symmetric memory.
#[test]
fn large_outputs() {
    const COUNT: usize = 3 << 20;
    run(Fabric::Inproc, 3, &config(), |comm| {
        let (n, rank) = (comm.size(), comm.rank());
        let mut symmetric = comm.alloc::<f32>(COUNT).expect("alloc");
        fill(&mut symmetric, rank);
        let input = symmetric.to_vec();
        let mut output = vec![0.0f32; COUNT];
        let check = |name: &str, got: &[f32], expected: &dyn Fn(usize) -> f32| {
            for (i, &x) in got.iter().enumerate() {
                assert_eq!(x, expected(i), "{name}, rank {rank}, element {i}");
            }
        };
        comm.all_reduce(&input, &mut output, ReduceOp::Sum).expect("all_reduce");
        check("all_reduce", &output, &|i| sum(n, i));
        comm.all_reduce(&input, &mut output, ReduceOp::Avg).expect("all_reduce");
        check("average", &output, &|i| average(n, i));
        comm.all_reduce_in_place(&mut symmetric, ReduceOp::Sum).expect("all_reduce");
        check("symmetric all_reduce", &symmetric, &|i| sum(n, i));
        output.copy_from_slice(&input);
        comm.broadcast_in_place(&mut output, 1).expect("broadcast");
        check("broadcast", &output, &|i| value(1, i));
        let part = COUNT / n;
        comm.all_gather(&input[..part], &mut output[..part * n]).expect("all_gather");
        check("all_gather", &output[..part * n], &|i| value(i / part, i % part));
        comm.reduce(&input, &mut output, ReduceOp::Sum, 2).expect("reduce");
        if rank == 2 {
            check("reduce", &output, &|i| sum(n, i));
        }
    });
}
