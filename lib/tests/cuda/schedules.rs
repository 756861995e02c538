//! Schedules on GPUs, against the CPU executor: the same schedule, cut alike, gives the same bits. One GPU is enough
//! for any number of ranks. Without one every test says that it is skipped.

use std::sync::Arc;
use std::time::Duration;

use bytemuck::{Pod, bytes_of};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr, DeviceRepr, ValidAsZeroBits, sys};
use half::{bf16, f16};
use tinynccl::algorithm::{self, Shape};
use tinynccl::comm::RawCall;
use tinynccl::cuda::{self, Choice, DeviceComm, Framing, Protocol};
use tinynccl::schedule::{Partition, Program, Schedule};
use tinynccl::wire::{Algorithm, Collective};
use tinynccl::{Call, Comm, Config, Element, Error, ReduceOp};

/// Bytes of a slot.
const MESSAGE: usize = 4096;
const PATIENCE: Duration = Duration::from_secs(20);

const COLLECTIVES: [Collective; 9] = [
    Collective::AllReduce,
    Collective::AllGather,
    Collective::ReduceScatter,
    Collective::Broadcast,
    Collective::Reduce,
    Collective::AllToAll,
    Collective::Gather,
    Collective::Scatter,
    Collective::Scan,
];

fn contexts(ranks: usize) -> Option<Vec<Arc<CudaContext>>> {
    match cuda::device_count() {
        Ok(gpus) if gpus > 0 => {
            let all: Vec<_> = (0..gpus).map(|i| CudaContext::new(i).unwrap()).collect();
            Some((0..ranks).map(|rank| all[rank % gpus].clone()).collect())
        }
        Ok(_) => {
            eprintln!("SKIPPED: no GPU");
            None
        }
        Err(error) => {
            eprintln!("SKIPPED: no GPU: {error}");
            None
        }
    }
}

struct Rank {
    comm: DeviceComm,
    stream: Arc<CudaStream>,
}

/// `slot` of 0: as long as the library makes them.
fn ranks(size: usize, slot: usize, patience: Duration) -> Option<Vec<Rank>> {
    let contexts = contexts(size)?;
    let mut config = Config::default();
    config.timeout = patience;
    config.cuda_slot = slot;
    let comms = DeviceComm::local(&contexts, &config).unwrap();
    let rank = |(comm, context): (DeviceComm, &Arc<CudaContext>)| Rank { comm, stream: context.new_stream().unwrap() };
    Some(comms.into_iter().zip(&contexts).map(rank).collect())
}

/// Elements whose reductions round, or wrap.
trait Value: Element + DeviceRepr + ValidAsZeroBits + Pod {
    fn of(bits: u64) -> Self;
}
macro_rules! values {
    ($($t:ty: $of:expr;)*) => {$(impl Value for $t { fn of(bits: u64) -> Self { ($of)(bits) } })*};
}
/// Between -2 and 2, of very different sizes; zeroes of both signs among them.
fn real(bits: u64) -> f64 {
    let sign = if bits & 1 == 0 { 1.0 } else { -1.0 };
    if bits & 0x70 == 0 {
        0.0 * sign
    } else {
        sign * (1.0 + (bits >> 40) as f64 / 2f64.powi(24)) * 0.5f64.powi((bits >> 8 & 7) as i32)
    }
}
values! {
    f32: |b| real(b) as f32;
    f64: real;
    f16: |b| f16::from_f64(real(b));
    bf16: |b| bf16::from_f64(real(b));
    i8: |b| b as i8;
    u8: |b| b as u8;
    i32: |b| b as i32;
    u32: |b| b as u32;
    i64: |b| b as i64;
    u64: |b| b;
}

fn inputs<T: Value>(rank: usize, len: usize) -> Vec<T> {
    let mix = |i: usize| {
        let x = ((i as u64) << 4 | rank as u64).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (x ^ x >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9)
    };
    (0..len).map(|i| T::of(mix(i) ^ mix(i) >> 32)).collect()
}

/// Where a rank receives from one other only, in each channel, it has the slots of all senders for it, and among more
/// than two ranks those of a second step, too.
fn long_message(ranks: usize) -> usize {
    MESSAGE * (ranks - 1) * if ranks > 2 { 2 } else { 1 }
}

/// One call of all ranks.
#[derive(Debug, Clone, Copy)]
struct Case {
    algorithm: Algorithm,
    collective: Collective,
    op: ReduceOp,
    root: usize,
    count: usize,
}

impl Case {
    fn shape(&self, ranks: usize, channels: usize) -> Shape {
        Shape { collective: self.collective, ranks, root: self.root, channels }
    }

    /// Every rank's.
    fn programs(&self, ranks: usize, channels: usize) -> Vec<Program> {
        let shape = self.shape(ranks, channels);
        (0..ranks).map(|rank| algorithm::program_by_switch(self.algorithm, &shape, rank).unwrap()).collect()
    }

    /// Bytes of the longest message: see [`long_message`].
    fn message(&self, ranks: usize, channels: usize) -> usize {
        let alone = self.programs(ranks, channels).iter().all(|program| program.most_sources() <= 1);
        if alone { long_message(ranks) } else { MESSAGE }
    }

    /// Whether the order in which values are combined depends on how the segments are cut.
    fn cut_matters(&self) -> bool {
        let by_part = self.collective == Collective::AllReduce || self.algorithm == Algorithm::DoubleTree;
        by_part && self.collective.reduces()
    }
}

/// Every rank's output by the CPU executor, of the kernels' programs; empty where it has none.
fn on_cpu<T: Value>(ranks: usize, channels: usize, cases: &[Case]) -> Vec<Vec<Vec<T>>> {
    let threads = |message| {
        let mut config = Config::default();
        (config.shm_chunk, config.tcp_chunk, config.channels) = (message, message, channels);
        config.timeout = PATIENCE;
        Comm::threads(ranks, config).unwrap()
    };
    let schedules: Vec<Schedule> = cases
        .iter()
        .map(|case| Schedule::new(case.shape(ranks, channels), case.programs(ranks, channels)).unwrap())
        .collect();
    let lengths: Vec<usize> = cases.iter().map(|case| case.message(ranks, channels)).collect();
    let (schedules, lengths) = (&schedules, &lengths);
    let mut results: Vec<Vec<Vec<T>>> = Vec::new();
    std::thread::scope(|scope| {
        let both = threads(MESSAGE).into_iter().zip(threads(long_message(ranks)));
        let threads: Vec<_> = both
            .map(|(short, long)| {
                scope.spawn(move || {
                    let of = |i: usize| if lengths[i] == MESSAGE { &short } else { &long };
                    (0..cases.len()).map(|i| one_on_cpu(of(i), &cases[i], &schedules[i])).collect::<Vec<_>>()
                })
            })
            .collect();
        results = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
    });
    results
}

fn one_on_cpu<T: Value>(comm: &Comm, case: &Case, schedule: &Schedule) -> Vec<T> {
    let shape = schedule.shape();
    let input: Vec<T> = inputs(comm.rank(), shape.input_segments(comm.rank()) * case.count);
    let mut output = vec![T::of(0); shape.output_segments(comm.rank()) * case.count];
    comm.run_program(schedule, &input, &mut output, case.op).unwrap_or_else(|e| panic!("{case:?}: {e}"));
    output
}

/// Elements around an output that nobody may write.
const GUARD: usize = 16;

struct Run<'a> {
    ranks: &'a [Rank],
    choice: Choice,
    /// Elements by which buffers are off the alignment that CUDA gives them.
    shift: usize,
    in_place: bool,
}

impl Run<'_> {
    /// Every rank's output; `None` if the call does not fit, or is cut in another way than `cut`.
    fn outputs<T: Value>(&self, case: &Case, cut: Option<Partition>) -> Option<Vec<Vec<T>>> {
        let n = self.ranks.len();
        let shape = case.shape(n, self.choice.blocks as usize);
        let size = size_of::<T>();
        let mut memory: Vec<(CudaSlice<T>, CudaSlice<T>, RawCall)> = Vec::new();
        for (rank, r) in self.ranks.iter().enumerate() {
            let &Case { collective, op, root, count, .. } = case;
            let lengths = (shape.input_segments(rank) * count, shape.output_segments(rank) * count);
            let input: Vec<T> = inputs(rank, lengths.0);
            let place = shape.in_place(rank).filter(|_| self.in_place);
            // In place, one of the two is the larger, and the other lies in it.
            let (from, to, len) = match place {
                Some((i, o)) => {
                    let (i, o) = (o.saturating_sub(i) * count, i.saturating_sub(o) * count);
                    (i, o, (i + lengths.0).max(o + lengths.1))
                }
                None => (0, 0, lengths.1),
            };
            let before = GUARD + self.shift;
            let mut output = vec![T::of(77); before + len + GUARD];
            let apart: Vec<T> = match place {
                Some(_) => {
                    output[before + from..][..lengths.0].copy_from_slice(&input);
                    vec![T::of(0)]
                }
                None => vec![T::of(0); self.shift].into_iter().chain(input).chain([T::of(0)]).collect(),
            };
            let (apart, output) = (r.stream.clone_htod(&apart).unwrap(), r.stream.clone_htod(&output).unwrap());
            let base = output.device_ptr(&r.stream).0 + (before * size) as u64;
            let input = match place {
                Some(_) => base + (from * size) as u64,
                None => apart.device_ptr(&r.stream).0 + (self.shift * size) as u64,
            };
            let call =
                RawCall::on_device(Call::new(collective, T::DTYPE, op, root, count), input, base + (to * size) as u64);
            memory.push((apart, output, call));
        }
        let ours = self.ranks[0].comm.partition(&memory[0].2, self.choice)?;
        if cut.is_some_and(|cut| cut != ours) {
            return None;
        }
        for (r, (.., call)) in self.ranks.iter().zip(&memory) {
            // SAFETY: the buffers are as long as the collective needs and live until the streams are waited for.
            unsafe { r.comm.enqueue_as(&r.stream, call, self.choice) }.unwrap_or_else(|e| panic!("{case:?}: {e}"));
        }
        let outputs = self.ranks.iter().zip(&memory).enumerate().map(|(rank, (r, (_, output, call)))| {
            r.comm.synchronize().unwrap_or_else(|e| panic!("{case:?}, {:?}, rank {rank}: {e}", self.choice));
            let all = r.stream.clone_dtoh(output).unwrap();
            let first = (call.addresses().1 as u64 - output.device_ptr(&r.stream).0) as usize / size;
            let end = first + shape.output_segments(rank) * case.count;
            let untouched = &all[..GUARD + self.shift];
            assert!(untouched.iter().chain(&all[all.len() - GUARD..]).all(|x| bytes_of(x) == bytes_of(&T::of(77))));
            all[first..end].to_vec()
        });
        Some(outputs.collect())
    }
}

/// Every case in every framing, with a shift and in place, equal to the CPU's; how many calls that was.
fn compare<T: Value>(ranks: &[Rank], channels: usize, cases: &[Case], thorough: bool) -> usize {
    let n = ranks.len();
    let cpu = on_cpu::<T>(n, channels, cases);
    let mut compared = 0;
    for (index, case) in cases.iter().enumerate() {
        let message = case.message(n, channels);
        let cut = case.programs(n, channels)[0].partition(case.count, size_of::<T>(), message);
        let cut = case.cut_matters().then_some(cut);
        for framing in [Framing::Simple, Framing::Ll, Framing::Ll128] {
            let choice = Choice { protocol: Protocol::Schedule(case.algorithm, framing), blocks: channels as u32 };
            let ways: &[_] = if thorough { &[(0, false), (1, false), (0, true)] } else { &[(1, true)] };
            for &(shift, in_place) in ways {
                let run = Run { ranks, choice, shift, in_place };
                let Some(gpu) = run.outputs::<T>(case, cut) else {
                    // Long slots are not filled by a pipeline of short calls.
                    let in_long_slots = case.algorithm == Algorithm::DoubleTree && message > MESSAGE;
                    assert!(framing != Framing::Simple || in_long_slots, "{case:?} is cut in another way");
                    continue;
                };
                for rank in 0..n {
                    let (ours, theirs) = (&gpu[rank], &cpu[rank][index]);
                    assert_eq!(ours.len(), theirs.len());
                    let wrong = ours.iter().zip(theirs).position(|(a, b)| bytes_of(a) != bytes_of(b));
                    if let Some(at) = wrong {
                        panic!(
                            "{} ranks, {case:?} of {}, {choice:?}, shift {shift}, in place {in_place}, rank {rank}: element {at} is {:?}, \
                             on the CPU {:?}",
                            n,
                            T::DTYPE,
                            ours[at],
                            theirs[at]
                        );
                    }
                }
                compared += 1;
            }
        }
    }
    compared
}

/// Everything that has a schedule.
fn cases(ranks: usize, counts: &[usize], ops: &[ReduceOp]) -> Vec<Case> {
    let mut all = vec![];
    for algorithm in Algorithm::ALL {
        for collective in COLLECTIVES {
            let root = if collective.has_root() { ranks - 1 } else { 0 };
            if algorithm::supports(algorithm, &Shape { collective, ranks, root, channels: 1 }) {
                for &count in counts {
                    for &op in if collective.reduces() { ops } else { &ops[..1] } {
                        all.push(Case { algorithm, collective, op, root, count });
                    }
                }
            }
        }
    }
    all
}

#[test]
fn every_schedule_gives_the_bits_of_the_cpu() {
    for size in [2, 3, 4, 8] {
        let Some(ranks) = ranks(size, MESSAGE, PATIENCE) else { return };
        for channels in [1, 3, 16] {
            let counts: &[usize] = if channels == 3 { &[1, 1001, 50_003] } else { &[7, 4096, 20_011] };
            let compared = compare::<f32>(&ranks, channels, &cases(size, counts, &[ReduceOp::Sum]), true);
            eprintln!("{size} ranks, {channels} channels: {compared} calls equal");
            assert!(compared > 100);
        }
    }
}

#[test]
fn every_type_and_operator() {
    use ReduceOp::{Avg, Max, Min, Prod, Sum};
    for size in [2, 3] {
        let Some(ranks) = ranks(size, MESSAGE, PATIENCE) else { return };
        let of_reductions = |op: ReduceOp| {
            let mut all = cases(size, &[5, 3001], &[op]);
            all.retain(|c| {
                c.collective == Collective::AllReduce && c.algorithm != Algorithm::Direct
                    || c.algorithm == Algorithm::Ring
            });
            all
        };
        let mut compared = 0;
        for op in [Avg, Min, Max] {
            compared += compare::<f32>(&ranks, 2, &of_reductions(op), false);
        }
        for op in [Sum, Avg, Min] {
            compared += compare::<bf16>(&ranks, 2, &of_reductions(op), false);
        }
        for op in [Sum, Avg, Prod, Max] {
            compared += compare::<f16>(&ranks, 2, &of_reductions(op), false);
        }
        compared += compare::<f64>(&ranks, 2, &of_reductions(Avg), false);
        compared += compare::<f64>(&ranks, 2, &of_reductions(Max), false);
        compared += compare::<i8>(&ranks, 2, &of_reductions(Avg), false);
        compared += compare::<u8>(&ranks, 2, &of_reductions(Sum), false);
        compared += compare::<i32>(&ranks, 2, &of_reductions(Prod), false);
        compared += compare::<u32>(&ranks, 2, &of_reductions(Avg), false);
        compared += compare::<i64>(&ranks, 2, &of_reductions(Avg), false);
        compared += compare::<u64>(&ranks, 2, &of_reductions(Min), false);
        eprintln!("{size} ranks: {compared} calls equal");
    }
}

/// Slots of their usual length: sums of whole numbers are the same in any order.
#[test]
fn large_buffers_through_large_slots() {
    for size in [2, 4, 8] {
        let Some(ranks) = ranks(size, 0, PATIENCE) else { return };
        let count = 700_001;
        let run = |algorithm, framing, collective| {
            let choice = Choice { protocol: Protocol::Schedule(algorithm, framing), blocks: 16 };
            let run = Run { ranks: &ranks, choice, shift: 0, in_place: false };
            run.outputs::<i32>(&Case { algorithm, collective, op: ReduceOp::Sum, root: 1, count }, None)
        };
        let all: Vec<Vec<i32>> = (0..size).map(|rank| inputs(rank, count * size)).collect();
        for Case { algorithm, collective, .. } in cases(size, &[count], &[ReduceOp::Sum]) {
            let shape = Shape { collective, ranks: size, root: 1, channels: 1 };
            let what = format!("{size} ranks, {algorithm}, {collective}");
            assert!(run(algorithm, Framing::Ll, collective).is_none(), "{what}: cannot fit lines");
            let in_slots = run(algorithm, Framing::Simple, collective);
            let in_lines = run(algorithm, Framing::Ll128, collective);
            for (framing, got) in [("Simple", in_slots), ("LL128", in_lines)] {
                let got = got.unwrap_or_else(|| panic!("{what}, {framing}: does not fit"));
                for (rank, got) in got.iter().enumerate() {
                    for (i, &got) in got.iter().enumerate() {
                        let (segment, from) = shape.result(rank, i / count).unwrap();
                        let expected = from.fold(0i32, |sum, r| sum.wrapping_add(all[r][segment * count + i % count]));
                        assert_eq!(got, expected, "{what}, {framing}, rank {rank}, element {i}");
                    }
                }
            }
        }
    }
}

/// Schedules and the other kernels use the same slots and lines in turn.
#[test]
fn schedules_and_other_kernels_in_a_row_and_in_graphs() {
    const COUNT: usize = 30_000;
    const SHORT: usize = 2000;
    // Powers of odd numbers are never 0.
    for size in [3, 5] {
        let Some(ranks) = ranks(size, 0, PATIENCE) else { return };
        let memory: Vec<_> = ranks.iter().map(|r| r.stream.clone_htod(&vec![1u32; COUNT]).unwrap()).collect();
        // Asking for an address may make the stream wait for an event, which cannot be captured.
        let addresses: Vec<u64> = ranks.iter().zip(&memory).map(|(r, m)| m.device_ptr(&r.stream).0).collect();
        let protocols = [
            (Protocol::Schedule(Algorithm::Ring, Framing::Simple), 16),
            (Protocol::OneShot, 16),
            (Protocol::Schedule(Algorithm::Ring, Framing::Ll), 8),
            (Protocol::Simple, 5),
            (Protocol::Schedule(Algorithm::Tree, Framing::Simple), 16),
            (Protocol::Schedule(Algorithm::DoubleTree, Framing::Ll), 12),
            (Protocol::Schedule(Algorithm::HalvingDoubling, Framing::Ll), 16),
            (Protocol::Schedule(Algorithm::Ring, Framing::Ll128), 8),
            // Of several windows.
            (Protocol::Schedule(Algorithm::Tree, Framing::Ll128), 1),
        ];
        // Each call multiplies by the number of ranks.
        let call = |rank: usize, at: usize| {
            let (protocol, blocks) = protocols[at];
            let in_slots = matches!(protocol, Protocol::Simple | Protocol::Schedule(_, Framing::Simple));
            let long = in_slots || blocks == 1;
            let at = addresses[rank];
            let call = RawCall::on_device(
                Call::new(
                    Collective::AllReduce,
                    tinynccl::DType::U32,
                    ReduceOp::Sum,
                    0,
                    if long { COUNT } else { SHORT },
                ),
                at,
                at,
            );
            // SAFETY: the buffer lives until the streams are waited for.
            unsafe { ranks[rank].comm.enqueue_as(&ranks[rank].stream, &call, Choice { protocol, blocks }) }.unwrap();
        };
        // Code is loaded before anybody waits: loading waits for kernels that run.
        let calls = |rank: usize| (0..protocols.len()).for_each(|at| call(rank, at));
        for at in 0..protocols.len() {
            (0..size).for_each(|rank| call(rank, at));
            ranks.iter().for_each(|r| r.comm.synchronize().unwrap());
        }
        let rounds = 20;
        for _ in 1..rounds {
            (0..size).for_each(calls);
        }
        let graphs: Vec<_> = ranks.iter().enumerate().map(|(rank, r)| capture(&r.stream, || calls(rank))).collect();
        for _ in 0..rounds {
            for (r, graph) in ranks.iter().zip(&graphs) {
                // SAFETY: the graph is of this stream's device; its buffers are alive.
                unsafe { sys::cuGraphLaunch(*graph, r.stream.cu_stream()) }.result().unwrap();
            }
        }
        for (r, memory) in ranks.iter().zip(&memory) {
            r.comm.synchronize().unwrap();
            let got = r.stream.clone_dtoh(memory).unwrap();
            for (i, &got) in got.iter().enumerate() {
                let calls = if i < SHORT { 9 } else { 4 };
                assert_eq!(got, (size as u32).wrapping_pow(2 * rounds * calls), "{size} ranks, element {i}");
            }
        }
    }
}

/// Calls that take all slots for one sender, and calls that have some for each, one behind the other: the ranks are not
/// in the same call, and data of the call before may be unread.
#[test]
fn slots_are_cut_otherwise_from_call_to_call() {
    const SEGMENT: usize = 1 << 20;
    const ROUNDS: usize = 12;
    for size in [3, 4] {
        let Some(ranks) = ranks(size, 0, PATIENCE) else { return };
        let whole = size * SEGMENT;
        let value = |i: usize| (i as u64).wrapping_mul(0x9e37_79b9) >> 12;
        let first: Vec<u64> = (0..whole).map(value).collect();
        let memory: Vec<[CudaSlice<u64>; 3]> = ranks
            .iter()
            .map(|r| {
                let zeros = |len| r.stream.alloc_zeros::<u64>(len).unwrap();
                [r.stream.clone_htod(&first).unwrap(), zeros(SEGMENT), zeros(whole)]
            })
            .collect();
        let at = |rank: usize, buffer: usize| memory[rank][buffer].device_ptr(&ranks[rank].stream).0;
        let ring = Protocol::Schedule(Algorithm::Ring, Framing::Simple);
        for round in 0..ROUNDS {
            // The second call takes both forms. The third multiplies by the number of ranks.
            let second = if round % 2 == 0 { Protocol::Simple } else { ring };
            let calls = [
                (Collective::Scatter, Protocol::Simple, SEGMENT, 0, 1),
                (Collective::AllGather, second, SEGMENT, 1, 2),
                (Collective::AllReduce, ring, whole, 2, 0),
            ];
            for (collective, protocol, count, input, output) in calls {
                for (rank, r) in ranks.iter().enumerate() {
                    let call = Call::new(collective, tinynccl::DType::U64, ReduceOp::Sum, round % size, count);
                    let call = RawCall::on_device(call, at(rank, input), at(rank, output));
                    // SAFETY: the buffers have the lengths of the calls and live until the streams are waited for.
                    unsafe { r.comm.enqueue_as(&r.stream, &call, Choice { protocol, blocks: 16 }) }.unwrap();
                }
                // Code is loaded before anybody waits for another rank.
                if round < 2 {
                    ranks.iter().for_each(|r| r.comm.synchronize().unwrap());
                }
            }
        }
        for (r, buffers) in ranks.iter().zip(&memory) {
            r.comm.synchronize().unwrap();
            let got = r.stream.clone_dtoh(&buffers[0]).unwrap();
            let wrong =
                got.iter().zip(&first).position(|(&got, &first)| got != first * (size as u64).pow(ROUNDS as u32));
            assert_eq!(wrong, None, "{size} ranks");
        }
    }
}

pub(crate) fn capture(stream: &Arc<CudaStream>, work: impl FnOnce()) -> sys::CUgraphExec {
    use cudarc::driver::result::stream as streams;
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    let mut executable = std::ptr::null_mut();
    // SAFETY: the stream is alive; the graph is the one captured, and stays until the process ends.
    unsafe {
        streams::begin_capture(stream.cu_stream(), mode).unwrap();
        work();
        let graph = streams::end_capture(stream.cu_stream()).unwrap();
        sys::cuGraphInstantiateWithFlags(&mut executable, graph, 0).result().unwrap();
    }
    executable
}

#[test]
fn ranks_that_disagree_are_told_so_at_once() {
    for (framing, counts) in [(Framing::Ll, [60, 50, 60]), (Framing::Simple, [2_000_000, 2_000_000, 1_000_000])] {
        // Far from the deadline.
        let Some(ranks) = ranks(3, 0, Duration::from_secs(600)) else { return };
        let choice = Choice { protocol: Protocol::Schedule(Algorithm::Ring, framing), blocks: 4 };
        let mut buffers: Vec<_> = ranks.iter().map(|r| r.stream.alloc_zeros::<f32>(2_000_000).unwrap()).collect();
        for ((r, buffer), count) in ranks.iter().zip(&mut buffers).zip(counts) {
            r.comm.set_choice(Some(choice));
            r.comm.all_reduce_in_place(&r.stream, &mut buffer.slice_mut(..count), ReduceOp::Sum).unwrap();
        }
        // Who sees it leaves; the others wait for it and are let go.
        let seen = loop {
            if let Some(error) = ranks.iter().find_map(|r| r.comm.check().err()) {
                break error.to_string();
            }
            std::thread::yield_now();
        };
        ranks.iter().for_each(|r| r.comm.abort());
        let count = |c: usize| seen.contains(&format!("all_reduce of {c} f32, sum"));
        assert!(seen.contains("disagree") && counts.iter().all(|&c| count(c)), "{seen}");
    }
}

#[test]
fn a_rank_that_does_not_come_is_named_and_abort_ends_a_wait() {
    for (framing, len) in [(Framing::Ll, 8), (Framing::Simple, 4_000_000)] {
        for abort in [false, true] {
            let patience = if abort { Duration::from_secs(600) } else { Duration::from_millis(300) };
            let Some(ranks) = ranks(2, 0, patience) else { return };
            let mut buffer = ranks[0].stream.alloc_zeros::<f32>(len).unwrap();
            ranks[0]
                .comm
                .set_choice(Some(Choice { protocol: Protocol::Schedule(Algorithm::Tree, framing), blocks: 4 }));
            ranks[0].comm.all_reduce_in_place(&ranks[0].stream, &mut buffer, ReduceOp::Sum).unwrap();
            if abort {
                ranks[0].comm.abort();
            }
            match ranks[0].comm.synchronize().unwrap_err() {
                Error::Aborted { rank: 0, .. } if abort => {}
                Error::Timeout { rank: 0, missing, op, .. } if !abort => {
                    assert_eq!(missing, [1]);
                    assert!(op.starts_with("all_reduce of"), "{op}");
                }
                other => panic!("{other}"),
            }
        }
    }
}

#[test]
fn what_has_no_schedule_or_does_not_fit_is_refused() {
    let Some(ranks) = ranks(3, 0, PATIENCE) else { return };
    let Rank { comm, stream } = &ranks[0];
    let buffer = stream.alloc_zeros::<f32>(3_000_000).unwrap();
    let at = buffer.device_ptr(stream).0;
    // SAFETY: no call is carried out.
    let refused = |collective, algorithm, framing, blocks, count| {
        let call = Call::new(collective, tinynccl::DType::F32, ReduceOp::Sum, 0, count);
        let call = RawCall::on_device(call, at, at);
        let choice = Choice { protocol: Protocol::Schedule(algorithm, framing), blocks };
        assert!(comm.partition(&call, choice).is_none());
        // SAFETY: no call is carried out.
        let error = unsafe { comm.enqueue_as(stream, &call, choice) }.unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
        // Where it is only wished for, something else is taken.
        comm.set_choice(Some(choice));
        assert_ne!(comm.choice(collective, 4 * count).protocol, choice.protocol);
        comm.set_choice(None);
    };
    refused(Collective::AllToAll, Algorithm::Ring, Framing::Simple, 4, 10);
    refused(Collective::AllReduce, Algorithm::Staged, Framing::Simple, 4, 10);
    refused(Collective::AllReduce, Algorithm::Ring, Framing::Simple, 1000, 10);
    refused(Collective::AllReduce, Algorithm::Ring, Framing::Simple, 0, 10);
    refused(Collective::AllReduce, Algorithm::Ring, Framing::Ll, 4, 1_000_000);
    comm.check().unwrap();
}
