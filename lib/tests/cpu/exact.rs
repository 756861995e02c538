//! `TINYNCCL_SUM=exact`: the exact sum, rounded once, whatever carries it.

use std::sync::Mutex;

use crate::common::exact::{Float, hard, nearest};
use crate::common::memory::Memory;
use crate::common::values::Number;
use crate::common::{FABRICS, Fabric, config, run_ok};
use crate::rdma::has_verbs;
use half::{bf16, f16};
use tinynccl::bootstrap::Server;
use tinynccl::config::{SingleCopy, Sums, TransportChoice};
use tinynccl::schedule::{Lane, Loc, Program, Schedule, Shape, Step};
use tinynccl::wire::{Algorithm, Collective};
use tinynccl::{Call, Comm, Config, DType, Error, ReduceOp, Result};

/// Inputs of all ranks and what is expected of them, made once for all paths.
struct Cases<T> {
    inputs: Vec<Vec<T>>,
    sums: Vec<u32>,
    averages: Vec<u32>,
    /// Sums of the first ranks, by their number.
    prefixes: Vec<Vec<u32>>,
}

impl<T: Float + Send + Sync> Cases<T> {
    /// On all cores; with the prefixes of a scan where there are few elements.
    fn new(seed: u64, ranks: usize, len: usize) -> Cases<T> {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let part = len.div_ceil(threads);
        let (mut inputs, mut sums, mut averages) = (vec![vec![]; ranks], vec![], vec![]);
        let mut prefixes = vec![vec![]; if len < 100_000 { ranks - 1 } else { 0 }];
        let prefixed = prefixes.len();
        std::thread::scope(|scope| {
            let of = |thread: usize| {
                move || {
                    let range = (thread * part).min(len)..((thread + 1) * part).min(len);
                    let rows = range.map(|i| hard::<T>(seed + ((i as u64) << 20), ranks));
                    let row = |row: Vec<T>| {
                        let prefixes: Vec<u32> = (2..2 + prefixed).map(|n| nearest(&row[..n], 1)).collect();
                        (nearest(&row, 1), nearest(&row, ranks as i64), prefixes, row)
                    };
                    rows.map(row).collect::<Vec<_>>()
                }
            };
            let threads: Vec<_> = (0..threads).map(|thread| scope.spawn(of(thread))).collect();
            for (sum, average, first, row) in threads.into_iter().flat_map(|thread| thread.join().unwrap()) {
                sums.push(sum);
                averages.push(average);
                inputs.iter_mut().zip(row).for_each(|(input, x)| input.push(x));
                prefixes.iter_mut().zip(first).for_each(|(prefix, x)| prefix.push(x));
            }
        });
        Cases { inputs, sums, averages, prefixes }
    }
}

/// All calls that add, in every form, over the first elements of `cases`: `count` for each rank's segment.
fn check<T: Float + Number>(comm: &Comm, cases: &Cases<T>, count: usize, context: &str) -> Result<()> {
    let (rank, n) = (comm.rank(), comm.size());
    let memory = Memory { comm, most: n * count };
    let own = &cases.inputs[rank];
    let input = || memory.vector::<T>(n * count, |i| own[i]);
    for (op, wanted) in [(ReduceOp::Sum, &cases.sums), (ReduceOp::Avg, &cases.averages)] {
        let same = |form: &str, at: usize, got: &[T]| {
            for (i, x) in got.iter().enumerate() {
                let (all, want) = (cases.inputs.iter().map(|input| input[at + i]), wanted[at + i]);
                assert!(
                    x.bits() == want,
                    "{context}: {form}, {op} of {count} {}, rank {rank} of {n}: element {i} is {x:?}, expected {:?}, of {:?}",
                    T::DTYPE,
                    <T as Float>::of(want),
                    all.collect::<Vec<_>>()
                );
            }
        };
        let (mut from, mut to) = (input(), memory.blank::<T>(n * count));
        comm.all_reduce(&from, &mut to, op)?;
        same("all_reduce", 0, &to);
        comm.all_reduce_in_place(&mut from, op)?;
        same("all_reduce in place", 0, &from);

        let root = count % n;
        let (mut from, mut to) = (input(), memory.blank(if rank == root { n * count } else { 0 }));
        comm.reduce(&from, &mut to, op, root)?;
        same("reduce", 0, &to);
        comm.reduce_in_place(&mut from, op, root)?;
        same("reduce in place", 0, if rank == root { &from } else { &[] });

        let (mut from, mut to) = (input(), memory.blank(count));
        comm.reduce_scatter(&from, &mut to, op)?;
        same("reduce_scatter", rank * count, &to);
        comm.reduce_scatter_in_place(&mut from, op)?;
        same("reduce_scatter in place", rank * count, &from[rank * count..][..count]);

        let work = comm.all_reduce_in_place_async(own[..count].to_vec(), op)?;
        same("all_reduce, asynchronous", 0, &work.wait()?);
        // Packed, in pieces.
        let mut buffer = own[..n * count].to_vec();
        comm.group(|g| buffer.chunks_mut(17).try_for_each(|piece| g.all_reduce_in_place(piece, op)))?;
        same("all_reduces of a group", 0, &buffer);
        let (mut all, mut part) = (own[..count].to_vec(), own[..count].to_vec());
        comm.group(|g| {
            g.all_reduce(&own[..count], &mut all, op)?;
            g.reduce_scatter(&own[..n * count], &mut part, op)
        })?;
        same("all_reduce of a group", 0, &all);
        same("reduce_scatter of a group", rank * count, &part);
    }
    let mut buffer = own[..count].to_vec();
    comm.scan_in_place(&mut buffer, ReduceOp::Sum)?;
    if let Some(wanted) = rank.checked_sub(1).and_then(|before| cases.prefixes.get(before)) {
        for (i, x) in buffer.iter().enumerate() {
            assert_eq!(x.bits(), wanted[i], "{context}: scan, rank {rank} of {n}, element {i} of {}", T::DTYPE);
        }
    }
    Ok(())
}

fn exact(algorithm: Option<Algorithm>, message: usize) -> Config {
    let mut config = config();
    (config.sum, config.algorithm) = (Sums::Exact, algorithm);
    (config.shm_chunk, config.tcp_chunk) = (message, message);
    config
}

#[test]
fn bits_depend_neither_on_algorithm_nor_on_transport_message_size_or_form() {
    for ranks in [2, 3, 5, 8] {
        let (singles, brains, halves) = (
            Cases::<f32>::new(1, ranks, 211 * ranks),
            Cases::<bf16>::new(2, ranks, 211 * ranks),
            Cases::<f16>::new(3, ranks, 211 * ranks),
        );
        for fabric in FABRICS {
            // Links carry the same steps over every transport.
            if ranks > 3 && fabric != (if ranks == 8 { Fabric::Shm } else { Fabric::Inproc }) {
                continue;
            }
            for algorithm in Algorithm::ALL.map(Some).into_iter().chain([None]) {
                for message in [256, 64 << 10] {
                    let context = format!("{fabric:?}, {algorithm:?}, messages of {message}");
                    run_ok(fabric, ranks, &exact(algorithm, message), |comm| {
                        for count in [1, 211] {
                            check(&comm, &singles, count, &context)?;
                            check(&comm, &brains, count, &context)?;
                            check(&comm, &halves, count, &context)?;
                        }
                        Ok(())
                    });
                }
            }
        }
    }
}

#[test]
fn where_large_messages_go_by_zero_copy_and_in_several_channels() {
    for ranks in [2, 3, 4] {
        let cases = Cases::<f32>::new(4, ranks, 40_000 * ranks);
        for algorithm in [Algorithm::Direct, Algorithm::AllPairs, Algorithm::Ring] {
            for channels in [1, 3] {
                let mut config = exact(Some(algorithm), 128 << 10);
                (config.single_copy, config.channels) = (SingleCopy::From(0), channels);
                run_ok(Fabric::Shm, ranks, &config, |comm| check(&comm, &cases, 40_000, "zero copy"));
            }
        }
    }
}

/// RDMA, by the card in user space where the machine has no other, and buffers that links read without a copy.
#[test]
fn from_registered_buffers_and_over_rdma() {
    let cases = Cases::<f32>::new(8, 3, 30_000);
    let transports = [TransportChoice::Tcp, TransportChoice::Shm, TransportChoice::Verbs];
    for transport in transports.into_iter().filter(|&t| t != TransportChoice::Verbs || has_verbs()) {
        let mut config = exact(Some(Algorithm::AllPairs), 16 << 10);
        (config.transport, config.verbs_chunk) = (transport, 16 << 10);
        let server = Server::start("127.0.0.1:0".parse().unwrap(), 3, &config).unwrap();
        std::thread::scope(|scope| {
            for rank in 0..3 {
                let (id, config, cases) = (server.unique_id(), config.clone(), &cases);
                scope.spawn(move || {
                    let comm = Comm::init(&id, rank, 3, config).unwrap();
                    for _ in 0..3 {
                        let mut buffer = comm.register_persistent(cases.inputs[rank].clone()).unwrap();
                        comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum).unwrap();
                        let got: Vec<u32> = buffer.iter().map(|x| x.to_bits()).collect();
                        assert!(got == cases.sums, "{transport}");
                    }
                });
            }
        });
    }
}

/// Or else the tests above would prove nothing.
#[test]
fn without_it_sums_differ_from_the_exact_ones_and_from_each_other() {
    let cases = Cases::<f32>::new(5, 4, 500);
    let sums = |algorithm| {
        let mut config = config();
        config.algorithm = Some(algorithm);
        let sums = run_ok(Fabric::Inproc, 4, &config, |comm| {
            let mut buffer = cases.inputs[comm.rank()].clone();
            comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum)?;
            Ok(buffer.iter().map(|x| x.to_bits()).collect::<Vec<_>>())
        });
        sums[0].clone()
    };
    let (ring, direct) = (sums(Algorithm::Ring), sums(Algorithm::Direct));
    let differ = |a: &[u32], b: &[u32]| a.iter().zip(b).filter(|(a, b)| a != b).count();
    assert!(differ(&ring, &direct) > 10 && differ(&ring, &cases.sums) > 10 && differ(&direct, &cases.sums) > 10);
}

/// Equal numbers on other ranks, and more of them with zeros between.
#[test]
fn neither_the_order_of_the_ranks_nor_their_number_matters() {
    let rows: Vec<Vec<f32>> = (0..300).map(|i| hard(6 + (i << 20), 3)).collect();
    let sums = |order: &[Option<usize>]| {
        run_ok(Fabric::Inproc, order.len(), &exact(None, 4096), |comm| {
            let zero = |rank: Option<usize>, row: &Vec<f32>| rank.map_or(0.0, |rank| row[rank]);
            let mut buffer: Vec<f32> = rows.iter().map(|row| zero(order[comm.rank()], row) + 0.0).collect();
            comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum)?;
            Ok(buffer.iter().map(|x| x.to_bits()).collect::<Vec<_>>())
        })
        .swap_remove(0)
    };
    let first = sums(&[Some(0), Some(1), Some(2)]);
    assert_eq!(first, sums(&[Some(2), Some(0), Some(1)]));
    assert_eq!(first, sums(&[Some(1), None, Some(2), None, None, Some(0)]));
}

#[test]
fn partial_sums_are_not_passed_on() {
    let choices = run_ok(Fabric::Inproc, 4, &exact(Some(Algorithm::Ring), 4096), |comm| {
        let asked = |dtype, op| {
            let choice = comm.explain(&Call::new(Collective::AllReduce, dtype, op, 0, 1 << 20))?;
            Ok::<_, Error>((choice.algorithm, choice.refused))
        };
        Ok([asked(DType::F32, ReduceOp::Sum)?, asked(DType::F32, ReduceOp::Max)?, asked(DType::I32, ReduceOp::Sum)?])
    });
    let ring = (Algorithm::Ring, None);
    assert_eq!(choices[0], [(Algorithm::AllPairs, Some(Algorithm::Ring)), ring, ring]);
}

/// A program of the caller's runs if it adds at once, and is refused if it does not.
#[test]
fn a_program_of_the_callers_is_looked_at() {
    let shape = Shape { collective: Collective::AllReduce, ranks: 3, root: 0, channels: 1 };
    let of = |at_once| {
        let program = |rank: usize| {
            let (input, output) = (Loc::input(0, 0), Loc::output(0, 0));
            let others = || (0..3usize).filter(move |&r| r != rank);
            let mut steps: Vec<Step> = others().map(|to| Step::send(to, input)).collect();
            if at_once {
                steps.extend(others().enumerate().map(|(i, from)| Step::recv(from, Loc::scratch(i, 0))));
                // In rank order, so that the verifier sees one result on all ranks.
                let operands: Vec<Loc> = (0..3)
                    .map(|r| if r == rank { input } else { Loc::scratch(r - usize::from(r > rank), 0) })
                    .collect();
                let (sum, first, last) = if rank == 0 {
                    (operands[1], operands[0], operands[2])
                } else {
                    (operands[0], operands[1], operands[2])
                };
                steps.push(Step::Reduce { src: first, dst: sum, last: false });
                steps.push(Step::Reduce { src: last, dst: sum, last: true });
                steps.push(Step::Copy { src: sum, dst: output });
            } else {
                let chain = tinynccl::algorithm::program(Algorithm::Direct, &shape, rank).unwrap();
                return chain;
            }
            Program { parts: 1, span: 1, scratch_segments: 2, lanes: vec![Lane { channel: 0, steps }] }
        };
        Schedule::new(shape, (0..3).map(program).collect()).unwrap()
    };
    let cases = Cases::<f32>::new(7, 3, 300);
    let refusals = Mutex::new(vec![]);
    run_ok(Fabric::Inproc, 3, &exact(None, 4096), |comm| {
        let input = &cases.inputs[comm.rank()];
        let mut output = vec![0.0; 300];
        comm.run_program(&of(true), input, &mut output, ReduceOp::Sum)?;
        assert_eq!(output.iter().map(|x| x.to_bits()).collect::<Vec<_>>(), cases.sums);
        let refused = comm.run_program(&of(false), input, &mut output, ReduceOp::Sum).unwrap_err();
        refusals.lock().unwrap().push(refused.to_string());
        Ok(())
    });
    for refusal in refusals.into_inner().unwrap() {
        assert!(refusal.contains("TINYNCCL_SUM=exact") && refusal.contains("recv_reduce_copy"), "{refusal}");
    }
}

/// Every path with 2^24 hard elements of each type among 2 to 8 ranks: `cargo test --release -p tinynccl --test cpu
/// exact -- --ignored --nocapture`; ELEMENTS and RANKS (as 2,3) make it shorter.
#[test]
#[ignore = "takes an hour on two cores"]
fn sixteen_million_hard_elements_on_every_path() {
    const BLOCK: usize = 1 << 20;
    let set = |name: &str| std::env::var(name).ok();
    let elements = set("ELEMENTS").map_or(1 << 24, |text| text.parse().expect("ELEMENTS is a number"));
    let ranks = set("RANKS").unwrap_or_else(|| "2,3,4,5,6,7,8".to_owned());
    fn paths<T: Float + Number>(ranks: usize, elements: usize) {
        for block in 0..elements.div_ceil(BLOCK) {
            let cases = Cases::<T>::new((block as u64) << 44 | 1, ranks, BLOCK.min(elements).next_multiple_of(ranks));
            let seen = |fabric, algorithm| {
                let context = format!("{fabric:?}, {algorithm:?}, block {block}");
                run_ok(fabric, ranks, &exact(algorithm, 64 << 10), |comm| {
                    check(&comm, &cases, cases.sums.len() / ranks, &context)
                });
            };
            for algorithm in [Algorithm::Direct, Algorithm::AllPairs, Algorithm::TwoShot, Algorithm::Staged] {
                seen(Fabric::Shm, Some(algorithm));
            }
            seen(Fabric::Tcp, None);
        }
        println!("{elements} elements of {}, {ranks} ranks", T::DTYPE);
    }
    for ranks in ranks.split(',').map(|text| text.parse().expect("RANKS are numbers")) {
        paths::<f32>(ranks, elements);
        paths::<bf16>(ranks, elements);
        paths::<f16>(ranks, elements);
    }
}
