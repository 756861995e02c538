//! Calls of all ranks by a schedule, on GPUs and by the CPU executor.

use std::sync::Arc;
use std::time::Duration;

use bytemuck::{Pod, bytes_of};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr, DeviceRepr, ValidAsZeroBits};
use half::{bf16, f16};
use tinynccl::algorithm::{self, Shape};
use tinynccl::comm::RawCall;
use tinynccl::cuda::{self, Choice, DeviceComm, Framing, Protocol};
use tinynccl::schedule::{Partition, Program, Schedule};
use tinynccl::wire::{Algorithm, Collective};
use tinynccl::{Call, Comm, Config, Element, ReduceOp};

/// Bytes of a slot.
pub(super) const MESSAGE: usize = 4096;
pub(super) const PATIENCE: Duration = Duration::from_secs(20);

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

pub(super) struct Rank {
    pub(super) comm: DeviceComm,
    pub(super) stream: Arc<CudaStream>,
}

/// `slot` of 0: as long as the library makes them.
pub(super) fn ranks(size: usize, slot: usize, patience: Duration) -> Option<Vec<Rank>> {
    let contexts = contexts(size)?;
    let mut config = Config::default();
    config.timeout = patience;
    config.cuda_slot = slot;
    let comms = DeviceComm::local(&contexts, &config).unwrap();
    let rank = |(comm, context): (DeviceComm, &Arc<CudaContext>)| Rank { comm, stream: context.new_stream().unwrap() };
    Some(comms.into_iter().zip(&contexts).map(rank).collect())
}

/// Elements whose reductions round, or wrap.
pub(super) trait Value: Element + DeviceRepr + ValidAsZeroBits + Pod {
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

pub(super) fn inputs<T: Value>(rank: usize, len: usize) -> Vec<T> {
    let mix = |i: usize| {
        let x = ((i as u64) << 4 | rank as u64).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (x ^ x >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9)
    };
    (0..len).map(|i| T::of(mix(i) ^ mix(i) >> 32)).collect()
}

/// Bytes of the longest message if each rank receives from one other only, in each channel: it has the slots of all
/// senders for it, and among more than two ranks those of a second step, too.
fn long_message(ranks: usize) -> usize {
    MESSAGE * (ranks - 1) * if ranks > 2 { 2 } else { 1 }
}

/// One call of all ranks.
#[derive(Debug, Clone, Copy)]
pub(super) struct Case {
    pub(super) algorithm: Algorithm,
    pub(super) collective: Collective,
    pub(super) op: ReduceOp,
    pub(super) root: usize,
    pub(super) count: usize,
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

    /// Returns true if the order in which values are combined depends on how the segments are cut.
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

/// Elements around an output that nothing may write.
const GUARD: usize = 16;

pub(super) struct Run<'a> {
    pub(super) ranks: &'a [Rank],
    pub(super) choice: Choice,
    /// Elements by which buffers are off the alignment that CUDA gives them.
    pub(super) shift: usize,
    pub(super) in_place: bool,
}

impl Run<'_> {
    /// Every rank's output; `None` if the call does not fit, or is cut otherwise than `cut`.
    pub(super) fn outputs<T: Value>(&self, case: &Case, cut: Option<Partition>) -> Option<Vec<Vec<T>>> {
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
pub(super) fn compare<T: Value>(ranks: &[Rank], channels: usize, cases: &[Case], thorough: bool) -> usize {
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
pub(super) fn cases(ranks: usize, counts: &[usize], ops: &[ReduceOp]) -> Vec<Case> {
    let mut all = vec![];
    for algorithm in Algorithm::ALL {
        for collective in Collective::ALL {
            if matches!(collective, Collective::Barrier | Collective::SendRecv) {
                continue;
            }
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
