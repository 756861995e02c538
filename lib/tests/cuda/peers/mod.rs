//! Collectives on GPUs, against a reference on the CPU. Without two GPUs every test says that it is skipped.
//!
//! With `TINYNCCL_CUDA_PATH=hosted` the same cases go through the host's memory; one GPU is enough then.

mod check;
mod errors;
mod exact;
mod forms;

use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::{CudaContext, CudaStream, DevicePtr, sys};
use half::{bf16, f16};
use tinynccl::comm::RawCall;
use tinynccl::config::CudaPath;
use tinynccl::cuda::{self, Choice, DeviceComm, Framing, Path, Protocol};
use tinynccl::wire::{Algorithm, Collective};
use tinynccl::{Call, Comm, Config, DType, F8E4M3, F8E5M2, ReduceOp};

use crate::ranks::{COLLECTIVES, capture};
use check::{Exact, check, check_values, choices};

pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// Settings of the environment.
fn settings() -> Config {
    Config::from_env().unwrap()
}

/// Every GPU (8 at most), if there are two.
fn contexts() -> Option<Vec<Arc<CudaContext>>> {
    let count = match cuda::device_count() {
        Ok(count) => count,
        Err(error) => {
            skipped(&format!("no GPU: {error}"));
            return None;
        }
    };
    if count == 1 && settings().cuda_path == CudaPath::Hosted {
        return Some((0..2).map(|_| CudaContext::new(0).unwrap()).collect());
    }
    if count < 2 {
        skipped(&format!("needs two GPUs, this machine has {count}"));
        return None;
    }
    Some((0..count.min(8)).map(|i| CudaContext::new(i).unwrap()).collect())
}

/// Not by a macro: the test harness would keep it to itself.
fn skipped(why: &str) {
    use std::io::Write;
    let _ = writeln!(std::io::stderr(), "SKIPPED: a test of collectives on GPUs: {why}");
}

pub(crate) struct Rank {
    pub(crate) comm: DeviceComm,
    pub(crate) stream: Arc<CudaStream>,
}

pub(crate) fn ranks(patience: Duration) -> Option<Vec<Rank>> {
    Some(ranks_on(&contexts()?, patience))
}

/// `size` ranks, on the GPUs round-robin.
pub(crate) fn ranks_that_share(size: usize) -> Option<Vec<Rank>> {
    let contexts = contexts()?;
    let contexts: Vec<_> = (0..size).map(|rank| contexts[rank % contexts.len()].clone()).collect();
    Some(ranks_on(&contexts, PATIENCE))
}

fn ranks_on(contexts: &[Arc<CudaContext>], patience: Duration) -> Vec<Rank> {
    let mut config = settings();
    config.timeout = patience;
    let comms = DeviceComm::local(contexts, &config).unwrap();
    comms
        .into_iter()
        .zip(contexts)
        .map(|(comm, context)| Rank { comm, stream: context.new_stream().unwrap() })
        .collect()
}

#[test]
fn every_collective_every_way() {
    let Some(ranks) = ranks(PATIENCE) else { return };
    every_way(&ranks, &[1, 3, 64, 128], COUNTS);
}

/// More ranks than GPUs: two on each, from one process.
#[test]
fn every_collective_with_shared_gpus() {
    if contexts().is_none() {
        return;
    }
    let hosted = settings().cuda_path == CudaPath::Hosted;
    let gpus = cuda::device_count().unwrap();
    for size in [3_usize, 4, 8] {
        if hosted && size.div_ceil(gpus) > 4 {
            // Refused: hosted.rs.
            continue;
        }
        let Some(ranks) = ranks_that_share(size) else { return };
        // Eight ranks' results of the longest would be most of the time.
        let counts = if size == 8 { &COUNTS[..COUNTS.len() - 1] } else { COUNTS };
        every_way(&ranks, &[1, 3, 16], counts);
    }
}

const COUNTS: &[usize] = &[0, 1, 2, 3, 7, 64, 1000, 4097, 65_537, 600_011];

fn every_way(ranks: &[Rank], blocks: &[u32], counts: &[usize]) {
    for collective in COLLECTIVES {
        for &count in counts {
            for choice in choices(ranks, collective, 4 * count, blocks) {
                for shift in [0, 1] {
                    check::<f32>(ranks, collective, ReduceOp::Sum, count, shift, choice, false);
                }
                use Collective::{AllReduce, AllToAll, Broadcast, Reduce};
                if matches!(collective, AllReduce | Broadcast | Reduce | AllToAll) {
                    check::<f32>(ranks, collective, ReduceOp::Sum, count, 0, choice, true);
                }
            }
        }
    }
}

#[test]
fn every_type_and_operator() {
    let Some(ranks) = ranks(PATIENCE) else { return };
    fn of<T: Exact>(ranks: &[Rank], ops: &[ReduceOp]) {
        for &op in ops {
            for collective in [Collective::AllReduce, Collective::ReduceScatter, Collective::Reduce] {
                for count in [5, 3001] {
                    for choice in choices(ranks, collective, count * size_of::<T>(), &[1, 3, 64, 128]) {
                        check::<T>(ranks, collective, op, count, 1, choice, false);
                    }
                }
            }
        }
    }
    let (floats, bits): (Vec<_>, Vec<_>) = ReduceOp::ALL.into_iter().partition(|op| op.applies_to(DType::F32));
    of::<f32>(&ranks, &floats);
    of::<bf16>(&ranks, &floats);
    of::<i16>(&ranks, &ReduceOp::ALL);
    of::<u16>(&ranks, &[ReduceOp::Avg, ReduceOp::BitXor]);
    of::<i8>(&ranks, &bits);
    of::<i64>(&ranks, &bits);
    of::<F8E4M3>(&ranks, &[ReduceOp::Prod, ReduceOp::Min, ReduceOp::Max]);
    of::<F8E5M2>(&ranks, &[ReduceOp::Prod, ReduceOp::Min, ReduceOp::Max]);
    // Of few ranks sums are exact.
    if ranks.len() <= 4 && ranks[0].comm.path() != Path::Hosted {
        of::<F8E4M3>(&ranks, &[ReduceOp::Sum, ReduceOp::Avg]);
        of::<F8E5M2>(&ranks, &[ReduceOp::Sum, ReduceOp::Avg]);
    }
    of::<i32>(&ranks, &[ReduceOp::Prod, ReduceOp::Avg]);
    of::<f16>(&ranks, &[ReduceOp::Sum, ReduceOp::Max]);
    of::<f64>(&ranks, &[ReduceOp::Avg, ReduceOp::Min]);
    of::<i8>(&ranks, &[ReduceOp::Prod, ReduceOp::Avg]);
    of::<u8>(&ranks, &[ReduceOp::Sum]);
    of::<u32>(&ranks, &[ReduceOp::Max]);
    of::<i64>(&ranks, &[ReduceOp::Avg]);
    of::<u64>(&ranks, &[ReduceOp::Prod]);
}

/// Floats are multiplied by 1/n before the sum, which would overflow otherwise; integers are divided behind it, towards
/// zero. Lines, slots, schedules, and the host's memory.
#[test]
fn averages_of_large_values_do_not_overflow() {
    let Some(ranks) = ranks(PATIENCE) else { return };
    if !ranks.len().is_power_of_two() {
        return skipped("two, four or eight GPUs: 1/n is exact for them");
    }
    fn of<T: Exact>(ranks: &[Rank], value: impl Fn(usize, usize) -> T + Copy) {
        let n = ranks.len();
        for collective in [Collective::AllReduce, Collective::ReduceScatter, Collective::Reduce] {
            for count in [1, 3001, 150_001] {
                let mut ways = choices(ranks, collective, count * size_of::<T>(), &[1, 16]);
                for framing in [Framing::Simple, Framing::Ll, Framing::Ll128] {
                    let choice = Choice { protocol: Protocol::Schedule(Algorithm::Ring, framing), blocks: 8 };
                    if ranks[0].comm.path() != Path::Hosted
                        && ranks[0].comm.fits(collective, choice, count * size_of::<T>())
                    {
                        ways.push(choice);
                    }
                }
                for choice in ways {
                    for in_place in [false, true] {
                        if in_place && collective == Collective::ReduceScatter {
                            continue;
                        }
                        let call = Call::new(collective, T::DTYPE, ReduceOp::Avg, count % n, count);
                        let average = |i: usize| T::average((0..n).map(|rank| value(rank, i)), n);
                        check_values(ranks, call, 0, choice, in_place, value, average);
                    }
                }
            }
        }
    }
    // The same at all ranks; every other element negative.
    fn sign(i: usize) -> f32 {
        if i.is_multiple_of(2) { 1.0 } else { -1.0 }
    }
    of::<f16>(&ranks, |_, i| f16::from_f32(60_000.0 * sign(i)));
    of::<bf16>(&ranks, |_, i| bf16::from_f32(bf16::MAX.to_f32() * sign(i)));
    of::<F8E4M3>(&ranks, |_, i| F8E4M3::from_f32(448.0 * sign(i)));
    of::<F8E5M2>(&ranks, |_, i| F8E5M2::from_f32(57_344.0 * sign(i)));
    of::<f32>(&ranks, |_, i| f32::MAX * sign(i));
    of::<f64>(&ranks, |_, i| f64::MAX * f64::from(sign(i)));
    of::<i32>(&ranks, |rank, i| if rank == 0 { -5 - i as i32 } else { -2 });
    of::<i64>(&ranks, |rank, i| if i.is_multiple_of(2) { i64::MAX - rank as i64 } else { -7 });
    of::<u8>(&ranks, |rank, i| (200 + rank + i % 50) as u8);
}

/// With a fixed order the sum of floats is `((x0 + x1) + x2) + ...` at every size, also where by size a ring would
/// carry it.
#[test]
fn a_fixed_order_gives_the_bits_of_a_sum_in_rank_order() {
    let Some(mut contexts) = contexts() else { return };
    // Two values have one order: three ranks at least, that share GPUs if need be.
    if contexts.len() == 2 {
        contexts = (0..3).map(|rank| contexts[rank % 2].clone()).collect();
    }
    let mut config = settings();
    (config.timeout, config.fixed_order) = (PATIENCE, true);
    let comms = DeviceComm::local(&contexts, &config).unwrap();
    let streams: Vec<_> = contexts.iter().map(|context| context.new_stream().unwrap()).collect();
    let n = comms.len();
    let term = |rank: usize, i: usize| {
        let bits = ((rank * 1_000_003 + i) as u32).wrapping_mul(0x9e37_79b9).rotate_left(13).wrapping_mul(0x85eb_ca6b);
        // Of many magnitudes, so that every other order rounds otherwise somewhere.
        f32::from_bits(bits & 0x807f_ffff | (120 + bits % 13) << 23)
    };
    for bytes in [4usize, 4 << 10, 300 << 10, 5 << 20, 50 << 20, (64 << 20) + 12] {
        let len = bytes / 4 / n * n;
        let terms: Vec<Vec<f32>> = (0..n).map(|rank| (0..len).map(|i| term(rank, i)).collect()).collect();
        let in_order = |order: &[usize]| -> Vec<u32> {
            (0..len).map(|i| order.iter().map(|&r| terms[r][i]).reduce(|a, b| a + b).unwrap().to_bits()).collect()
        };
        let ranks: Vec<usize> = (0..n).collect();
        let want = in_order(&ranks);
        if len > 1000 {
            let turned: Vec<usize> = (1..=n).map(|r| r % n).collect();
            assert_ne!(want, in_order(&turned), "another order would not show");
        }
        for collective in [Collective::AllReduce, Collective::Reduce, Collective::ReduceScatter] {
            let root = n - 1;
            let count = if collective == Collective::ReduceScatter { len / n } else { len };
            let mut memory = Vec::new();
            for (stream, terms) in streams.iter().zip(&terms) {
                memory.push((stream.clone_htod(terms).unwrap(), stream.alloc_zeros::<f32>(count.max(1)).unwrap()));
            }
            for ((comm, stream), (input, output)) in comms.iter().zip(&streams).zip(&memory) {
                let (input, output) = (input.device_ptr(stream).0, output.device_ptr(stream).0);
                let (dtype, op) = (DType::F32, ReduceOp::Sum);
                let call = RawCall::on_device(Call::new(collective, dtype, op, root, count), input, output);
                // SAFETY: the buffers have the lengths of the collective and live until the streams are waited for.
                unsafe { comm.enqueue(stream, &call) }.unwrap();
            }
            let why = comms[0].explain(collective, 4 * count);
            for (rank, ((comm, stream), (_, output))) in comms.iter().zip(&streams).zip(&memory).enumerate() {
                comm.synchronize().unwrap_or_else(|e| panic!("{collective} of {bytes} bytes, rank {rank}: {e}"));
                if collective == Collective::Reduce && rank != root {
                    continue;
                }
                let first = if collective == Collective::ReduceScatter { rank * count } else { 0 };
                let got: Vec<u32> =
                    stream.clone_dtoh(output).unwrap().iter().take(count).map(|x| x.to_bits()).collect();
                let wrong = (0..count).find(|&i| got[i] != want[first + i]);
                assert_eq!(wrong, None, "{collective} of {bytes} bytes, rank {rank} of {n}: {why}");
            }
        }
    }
}

/// `TINYNCCL_ALGO` and `TINYNCCL_CUDA_PROTO` choose among the kernels; results stay right.
#[test]
fn algorithm_and_protocol_are_taken_as_asked() {
    use tinynccl::config::CudaProto;
    use tinynccl::cuda::Reason;
    use tinynccl::wire::Algorithm;
    let Some(contexts) = contexts() else { return };
    for (algorithm, proto) in [
        (Some(Algorithm::Ring), CudaProto::Auto),
        (Some(Algorithm::Tree), CudaProto::Simple),
        (Some(Algorithm::Direct), CudaProto::Ll),
        (Some(Algorithm::OneShot), CudaProto::Auto),
        (Some(Algorithm::TwoShot), CudaProto::Ll),
        (Some(Algorithm::Staged), CudaProto::Auto),
        (None, CudaProto::Ll),
        (None, CudaProto::Ll128),
        (None, CudaProto::Simple),
        (None, CudaProto::Schedule),
    ] {
        let mut config = settings();
        (config.timeout, config.algorithm, config.cuda_proto) = (PATIENCE, algorithm, proto);
        let comms = DeviceComm::local(&contexts, &config).unwrap();
        let ranks: Vec<Rank> = comms
            .into_iter()
            .zip(&contexts)
            .map(|(comm, context)| Rank { comm, stream: context.new_stream().unwrap() })
            .collect();
        for count in [1000, 600_011] {
            let why = ranks[0].comm.explain(Collective::AllReduce, 4 * count);
            if let Some(Choice { protocol, .. }) = why.choice {
                let met = match algorithm {
                    Some(Algorithm::Ring | Algorithm::Tree | Algorithm::Direct) => {
                        matches!(protocol, Protocol::Schedule(taken, _) if Some(taken) == algorithm)
                    }
                    None if proto == CudaProto::Simple => protocol == Protocol::Simple,
                    None if proto == CudaProto::Schedule => matches!(protocol, Protocol::Schedule(..)),
                    _ => true,
                };
                assert!(met || why.reason == Reason::Refused, "{algorithm:?} {proto}, {count} elements: {why}");
                if algorithm == Some(Algorithm::Staged) {
                    assert_eq!(why.reason, Reason::Refused, "{why}");
                }
            }
            let choice = ranks[0].comm.choice(Collective::AllReduce, 4 * count);
            check::<f32>(&ranks, Collective::AllReduce, ReduceOp::Sum, count, 0, choice, false);
        }
    }
}

#[test]
fn messages_between_all_pairs() {
    let Some(ranks) = ranks(PATIENCE) else { return };
    let n = ranks.len();
    for count in [0, 1, 1000, 300_001] {
        for distance in 1..n {
            let mut outputs = Vec::new();
            for (rank, r) in ranks.iter().enumerate() {
                let values: Vec<u32> = (0..count).map(|i| (rank * 1_000_003 + i) as u32).collect();
                let input = r.stream.clone_htod(&values).unwrap();
                let mut output = r.stream.alloc_zeros::<u32>(count).unwrap();
                let (to, from) = ((rank + distance) % n, (rank + n - distance) % n);
                r.comm.send_recv(&r.stream, &input, to, &mut output, from).unwrap();
                outputs.push((input, output, from));
            }
            for (r, (_, output, from)) in ranks.iter().zip(&outputs) {
                r.comm.synchronize().unwrap();
                let got = r.stream.clone_dtoh(output).unwrap();
                assert!((0..count).all(|i| got[i] == (from * 1_000_003 + i) as u32), "{count} from {from}");
            }
        }
    }
    // One direction alone.
    let input = ranks[0].stream.clone_htod(&vec![7u8; 100_000]).unwrap();
    let mut output = ranks[1].stream.alloc_zeros::<u8>(100_000).unwrap();
    ranks[0].comm.send(&ranks[0].stream, &input, 1).unwrap();
    ranks[1].comm.recv(&ranks[1].stream, &mut output, 0).unwrap();
    ranks[1].comm.synchronize().unwrap();
    assert!(ranks[1].stream.clone_dtoh(&output).unwrap().iter().all(|&x| x == 7));
    ranks[0].comm.synchronize().unwrap();
}

/// Many calls of all kinds and sizes behind each other, without waiting in between: sets of lines and slots are used
/// again.
#[test]
fn thousands_of_calls_in_a_row() {
    let Some(ranks) = ranks(PATIENCE) else { return };
    let n = ranks.len();
    let sizes = [1usize, 1000, 40_000, 150_000, 300_000, 3];
    let mut memory = Vec::new();
    for (rank, r) in ranks.iter().enumerate() {
        let make = |len: usize| r.stream.clone_htod(&vec![(rank + 1) as u32; len]).unwrap();
        memory.push((make(1_200_000), r.stream.alloc_zeros::<u32>(1_200_000 * n).unwrap()));
    }
    let calls = 3000;
    for call in 0..calls {
        let count = sizes[call % sizes.len()];
        let collective = COLLECTIVES[(call / 5) % COLLECTIVES.len()];
        for (r, (input, output)) in ranks.iter().zip(&memory) {
            let (input, output) = (input.device_ptr(&r.stream).0, output.device_ptr(&r.stream).0);
            let count = if collective == Collective::ReduceScatter || collective == Collective::AllToAll {
                count / n
            } else {
                count
            };
            let call = RawCall::on_device(
                Call::new(collective, tinynccl::DType::U32, ReduceOp::Sum, call % n, count),
                input,
                output,
            );
            // SAFETY: as in `check`.
            unsafe { r.comm.enqueue(&r.stream, &call) }.unwrap();
        }
    }
    for r in &ranks {
        r.comm.synchronize().unwrap();
    }
    for (rank, (r, (input, mut output))) in ranks.iter().zip(memory).enumerate() {
        r.comm.all_reduce(&r.stream, &input.slice(..777), &mut output.slice_mut(..777), ReduceOp::Sum).unwrap();
        if rank + 1 == n {
            for r in &ranks {
                r.comm.synchronize().unwrap();
            }
            let sum = (n * (n + 1) / 2) as u32;
            assert!(r.stream.clone_dtoh(&output.slice(..777)).unwrap().iter().all(|&x| x == sum));
        }
    }
}

/// One communicator, two streams: calls keep their order.
#[test]
fn calls_through_two_streams() {
    let Some(ranks) = ranks(PATIENCE) else { return };
    let n = ranks.len() as i32;
    let mut buffers: Vec<_> = ranks.iter().map(|r| r.stream.clone_htod(&vec![1i32; 100_000]).unwrap()).collect();
    let second: Vec<_> = ranks.iter().map(|r| r.comm.context().new_stream().unwrap()).collect();
    for round in 0..6 {
        for ((r, buffer), other) in ranks.iter().zip(&mut buffers).zip(&second) {
            let stream = if round % 2 == 0 { &r.stream } else { other };
            r.comm.all_reduce_in_place(stream, buffer, ReduceOp::Sum).unwrap();
        }
    }
    for (r, buffer) in ranks.iter().zip(&buffers) {
        r.comm.synchronize().unwrap();
        assert!(r.stream.clone_dtoh(buffer).unwrap().iter().all(|&x| x == n.wrapping_pow(6)));
    }
}

/// Two streams within one graph, whose branches would run side by side: calls keep their order.
#[test]
fn calls_through_two_streams_of_a_graph() {
    let Some(ranks) = ranks(PATIENCE) else { return };
    if ranks[0].comm.path() != Path::Peer {
        // Refused there: `hosted::capture_is_refused`.
        return;
    }
    let n = ranks.len() as i32;
    let make = || ranks.iter().map(|r| r.stream.clone_htod(&vec![1i32; 3_000_000]).unwrap()).collect::<Vec<_>>();
    let (first, second) = (make(), make());
    let (mut graphs, mut streams) = (Vec::new(), Vec::new());
    let enqueue = |r: &Rank, stream: &Arc<CudaStream>, at| {
        let call = Call::new(Collective::AllReduce, DType::I32, ReduceOp::Sum, 0, 3_000_000);
        // SAFETY: the memory outlives the call and its graph.
        unsafe { r.comm.enqueue(stream, &RawCall::on_device(call, at, at)) }.unwrap();
    };
    for (r, second) in ranks.iter().zip(&second) {
        // Compiled and loaded before the capture.
        enqueue(r, &r.stream, second.device_ptr(&r.stream).0);
    }
    for r in &ranks {
        r.comm.synchronize().unwrap();
    }
    for (r, (first, second)) in ranks.iter().zip(first.iter().zip(&second)) {
        let (first, second) = (first.device_ptr(&r.stream).0, second.device_ptr(&r.stream).0);
        let other = r.comm.context().new_stream().unwrap();
        graphs.push(capture(&r.stream, || {
            other.join(&r.stream).unwrap();
            enqueue(r, &r.stream, first);
            enqueue(r, &other, second);
            r.stream.join(&other).unwrap();
        }));
        streams.push(other);
    }
    for _ in 0..5 {
        for (r, graph) in ranks.iter().zip(&graphs) {
            r.comm.context().bind_to_thread().unwrap();
            // SAFETY: the graph and its memory are alive.
            unsafe { sys::cuGraphLaunch(*graph, r.stream.cu_stream()) }.result().unwrap();
        }
    }
    for (r, buffers) in ranks.iter().zip(first.iter().zip(&second)) {
        r.comm.synchronize().unwrap();
        for (buffer, calls) in [(buffers.0, 5), (buffers.1, 6)] {
            assert!(r.stream.clone_dtoh(buffer).unwrap().iter().all(|&x| x == n.pow(calls)));
        }
    }
}

/// Ranks as threads with a host communicator, as processes would be.
#[test]
fn ranks_that_meet_through_a_host_communicator() {
    let Some(contexts) = contexts() else { return };
    let comms = Comm::threads(contexts.len(), settings()).unwrap();
    std::thread::scope(|scope| {
        for (comm, context) in comms.into_iter().zip(&contexts) {
            scope.spawn(move || {
                let device = DeviceComm::new(&comm, context).unwrap();
                let stream = context.new_stream().unwrap();
                let mut buffer = stream.clone_htod(&vec![comm.rank() as f32; 5000]).unwrap();
                device.all_reduce_in_place(&stream, &mut buffer, ReduceOp::Max).unwrap();
                device.synchronize().unwrap();
                let expected = (comm.size() - 1) as f32;
                assert!(stream.clone_dtoh(&buffer).unwrap().iter().all(|&x| x == expected));
            });
        }
    });
}
