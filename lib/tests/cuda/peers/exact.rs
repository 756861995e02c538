//! `TINYNCCL_SUM=exact` on GPUs: bit for bit what the definition says, by every kernel, eager and in a graph.

use cudarc::driver::{DevicePtr, sys};
use half::{bf16, f16};
use tinynccl::comm::RawCall;
use tinynccl::config::{CudaPath, Sums};
use tinynccl::cuda::{Choice, DeviceComm, Framing, Path, Protocol};
use tinynccl::wire::{Algorithm, Collective};
use tinynccl::{Call, DType, Element, ReduceOp};

use super::check::{Exact, check_values, choices};
use super::{PATIENCE, Rank, contexts, settings};
use crate::common::exact::{Float, hard, nearest};
use crate::ranks::capture;

/// Bits of all ranks' inputs, and of what is expected of them.
struct Cases {
    inputs: Vec<Vec<u32>>,
    sums: Vec<u32>,
    averages: Vec<u32>,
}

fn cases<T: Float>(seed: u64, ranks: usize, len: usize) -> Cases {
    let rows: Vec<Vec<T>> = (0..len).map(|i| hard(seed + ((i as u64) << 20), ranks)).collect();
    Cases {
        inputs: (0..ranks).map(|rank| rows.iter().map(|row| row[rank].bits()).collect()).collect(),
        sums: rows.iter().map(|row| nearest(row, 1)).collect(),
        averages: rows.iter().map(|row| nearest(row, ranks as i64)).collect(),
    }
}

/// `size` ranks, on the GPUs round-robin.
fn ranks(size: usize, path: CudaPath) -> Option<Vec<Rank>> {
    let contexts = contexts()?;
    let contexts: Vec<_> = (0..size).map(|rank| contexts[rank % contexts.len()].clone()).collect();
    let mut config = settings();
    (config.timeout, config.sum, config.cuda_path) = (PATIENCE, Sums::Exact, path);
    let comms = DeviceComm::local(&contexts, &config).unwrap();
    let with_stream = |(comm, context): (DeviceComm, &std::sync::Arc<cudarc::driver::CudaContext>)| Rank {
        comm,
        stream: context.new_stream().unwrap(),
    };
    Some(comms.into_iter().zip(&contexts).map(with_stream).collect())
}

/// All three types, by every choice; `B` has the bits of `T`.
fn every_way<T: Float + Element, B: Exact + TryFrom<u32>>(ranks: &[Rank], counts: &[usize]) {
    let n = ranks.len();
    let cases = cases::<T>(11 + n as u64, n, 20_011);
    let bits = |x: u32| B::try_from(x).unwrap_or_else(|_| panic!("{x:x}"));
    for op in [ReduceOp::Sum, ReduceOp::Avg] {
        let wanted = if op == ReduceOp::Sum { &cases.sums } else { &cases.averages };
        for collective in [Collective::AllReduce, Collective::ReduceScatter, Collective::Reduce] {
            for &count in counts {
                let bytes = count * size_of::<B>();
                let mut ways = choices(ranks, collective, bytes, &[1, 16]);
                if n == 2 && ranks[0].comm.path() != Path::Hosted {
                    for framing in [Framing::Simple, Framing::Ll] {
                        let choice = Choice { protocol: Protocol::Schedule(Algorithm::Ring, framing), blocks: 8 };
                        ways.extend(ranks[0].comm.fits(collective, choice, bytes).then_some(choice));
                    }
                }
                for choice in ways {
                    for in_place in [false, true] {
                        if in_place && collective == Collective::ReduceScatter {
                            continue;
                        }
                        let call = Call::new(collective, T::DTYPE, op, count % n, count);
                        let input = |rank: usize, i: usize| bits(cases.inputs[rank][i % 20_011]);
                        let reduced = |i: usize| bits(wanted[i % 20_011]);
                        check_values::<B>(ranks, call, count % 2, choice, in_place, input, reduced);
                    }
                }
            }
        }
    }
}

const COUNTS: &[usize] = &[1, 3, 1000, 20_011, 300_007];

#[test]
fn every_kernel_gives_the_bits_of_the_exact_sum() {
    for size in [2, 3, 4, 8] {
        let Some(ranks) = ranks(size, settings().cuda_path) else { return };
        every_way::<f32, u32>(&ranks, COUNTS);
        every_way::<bf16, u16>(&ranks, COUNTS);
        every_way::<f16, u16>(&ranks, COUNTS);
    }
}

#[test]
fn through_the_hosts_memory_too() {
    for size in [2, 3] {
        let Some(ranks) = ranks(size, CudaPath::Hosted) else { return };
        assert_eq!(ranks[0].comm.path(), Path::Hosted);
        every_way::<f32, u32>(&ranks, &[1, 20_011, 600_007]);
        every_way::<bf16, u16>(&ranks, &[1, 20_011]);
        every_way::<f16, u16>(&ranks, &[1, 20_011]);
    }
}

#[test]
fn a_graph_gives_the_bits_of_eager_calls() {
    for size in [2, 3] {
        let Some(ranks) = ranks(size, settings().cuda_path) else { return };
        for count in [1000, 20_011, 3 << 20] {
            let cases = cases::<f32>(23, size, 20_011);
            let mut memory = Vec::new();
            let mut graphs = Vec::new();
            for (rank, r) in ranks.iter().enumerate() {
                let input: Vec<u32> = (0..count).map(|i| cases.inputs[rank][i % 20_011]).collect();
                let (input, output) =
                    (r.stream.clone_htod(&input).unwrap(), r.stream.alloc_zeros::<u32>(count).unwrap());
                let call = Call::new(Collective::AllReduce, DType::F32, ReduceOp::Sum, 0, count);
                let (from, to) = (input.device_ptr(&r.stream).0, output.device_ptr(&r.stream).0);
                // SAFETY: the buffers have `count` elements and outlive the graph's launches.
                graphs.push(capture(&r.stream, || unsafe {
                    r.comm.enqueue(&r.stream, &RawCall::on_device(call, from, to)).unwrap();
                }));
                memory.push((input, output));
            }
            for _ in 0..3 {
                for (r, graph) in ranks.iter().zip(&graphs) {
                    r.comm.context().bind_to_thread().unwrap();
                    // SAFETY: the graph and its memory are alive.
                    unsafe { sys::cuGraphLaunch(*graph, r.stream.cu_stream()) }.result().unwrap();
                }
            }
            for (r, (_, output)) in ranks.iter().zip(&memory) {
                r.comm.synchronize().unwrap();
                let got = r.stream.clone_dtoh(output).unwrap();
                let wrong = (0..count).find(|&i| got[i] != cases.sums[i % 20_011]);
                assert_eq!(wrong, None, "{count} elements, {size} ranks");
            }
        }
    }
}

/// Its only kernel adds two values at a time.
#[test]
fn a_scan_of_more_than_two_ranks_is_refused() {
    let Some(ranks) = ranks(3, CudaPath::Peer) else { return };
    let buffer = ranks[0].stream.alloc_zeros::<f32>(8).unwrap();
    let at = buffer.device_ptr(&ranks[0].stream).0;
    let scan = |dtype| RawCall::on_device(Call::new(Collective::Scan, dtype, ReduceOp::Sum, 0, 8), at, at);
    // SAFETY: the buffer has 8 elements; a refused call enqueues nothing.
    let refused = unsafe { ranks[0].comm.enqueue(&ranks[0].stream, &scan(DType::F32)) }.unwrap_err().to_string();
    assert!(refused.contains("TINYNCCL_SUM=exact") && refused.contains("scan"), "{refused}");
}

/// 2^24 hard elements of each type on every kernel: `cuda.test exact -- --ignored`.
#[test]
#[ignore = "takes minutes"]
fn sixteen_million_hard_elements() {
    fn blocks<T: Float + Element, B: Exact + TryFrom<u32>>(ranks: &[Rank]) {
        let n = ranks.len();
        let elements = std::env::var("ELEMENTS").map_or(1 << 24, |text| text.parse().expect("ELEMENTS is a number"));
        let (block, parts) = (1usize << 20, std::thread::available_parallelism().map_or(1, usize::from));
        let part = block.div_ceil(parts);
        for number in 0..usize::div_ceil(elements, block) {
            // The definition takes most of the time.
            let cases: Vec<Cases> = std::thread::scope(|scope| {
                let one = |i: usize| move || cases::<T>(((number * parts + i) as u64) << 40 | 1, n, part);
                let threads: Vec<_> = (0..parts).map(|i| scope.spawn(one(i))).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            let bits = |x: u32| B::try_from(x).unwrap_or_else(|_| panic!("{x:x}"));
            let of = |i: usize| (&cases[i / part], i % part);
            for op in [ReduceOp::Sum, ReduceOp::Avg] {
                let choice = ranks[0].comm.choice(Collective::AllReduce, block * size_of::<B>());
                let call = Call::new(Collective::AllReduce, T::DTYPE, op, 0, block);
                let input = |rank: usize, i: usize| {
                    let (part, i) = of(i);
                    bits(part.inputs[rank][i])
                };
                let reduced = |i: usize| {
                    let (part, i) = of(i);
                    bits(if op == ReduceOp::Sum { part.sums[i] } else { part.averages[i] })
                };
                check_values::<B>(ranks, call, 0, choice, false, input, reduced);
            }
        }
        println!("{elements} elements of {}, {n} ranks", T::DTYPE);
    }
    for size in [2, 3, 4, 8] {
        let Some(ranks) = ranks(size, settings().cuda_path) else { return };
        blocks::<f32, u32>(&ranks);
        blocks::<bf16, u16>(&ranks);
        blocks::<f16, u16>(&ranks);
    }
}
