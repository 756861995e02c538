//! `TINYNCCL_VERIFY` on GPUs. Without two GPUs every test says that it is skipped.

use std::sync::Arc;
use std::time::Instant;

use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr, sys};
use tinynccl::comm::RawCall;
use tinynccl::config::Verify;
use tinynccl::cuda::{DeviceComm, Spoil};
use tinynccl::error::Suspect;
use tinynccl::wire::Collective;
use tinynccl::{Call, Comm, Config, DType, Error, ReduceOp};

use crate::common::lengths;
use crate::ranks::{COLLECTIVES, capture, contexts, in_threads};

fn config(verify: Verify) -> Config {
    Config::default().with(|c| (c.verify, c.verify_every) = (verify, 64))
}

struct Rank {
    comm: DeviceComm,
    stream: Arc<CudaStream>,
    rank: usize,
    n: usize,
}

impl Rank {
    fn new(comm: &Comm, context: &Arc<CudaContext>) -> Rank {
        let device = DeviceComm::new(comm, context).unwrap();
        Rank { rank: device.rank(), n: device.size(), comm: device, stream: context.new_stream().unwrap() }
    }

    fn value(&self, rank: usize, i: usize) -> u32 {
        (rank * 1_000_003 + i * 7) as u32
    }

    /// Device memory for a call of `count` elements per segment, with this rank's input in it.
    fn memory(&self, collective: Collective, count: usize) -> [CudaSlice<u32>; 2] {
        let (from, to) = lengths(collective, self.n, count);
        let input: Vec<u32> = (0..from).map(|i| self.value(self.rank, i)).collect();
        [self.stream.clone_htod(&input).unwrap(), self.stream.clone_htod(&vec![0u32; to]).unwrap()]
    }

    fn call(&self, collective: Collective, count: usize, [input, output]: &[CudaSlice<u32>; 2]) {
        let call = Call::new(collective, DType::U32, ReduceOp::Sum, self.n - 1, count);
        let call = RawCall::on_device(call, input.device_ptr(&self.stream).0, output.device_ptr(&self.stream).0);
        // SAFETY: as long as the collective needs, and ours.
        // A difference that an earlier call has shown by now is read behind this one.
        let _ = unsafe { self.comm.enqueue(&self.stream, &call) };
    }

    fn is_right(&self, collective: Collective, count: usize, output: &CudaSlice<u32>) -> bool {
        let output = self.stream.clone_dtoh(output).unwrap();
        let sum = |i: usize| (0..self.n).map(|r| self.value(r, i)).fold(0, u32::wrapping_add);
        output.iter().enumerate().all(|(i, got)| {
            let (segment, element) = (i / count, i % count);
            *got == match collective {
                Collective::AllReduce => sum(i),
                Collective::Reduce if self.rank != self.n - 1 => 0,
                Collective::Reduce => sum(i),
                Collective::ReduceScatter => sum(self.rank * count + i),
                Collective::Broadcast => self.value(self.n - 1, i),
                Collective::AllGather => self.value(segment, element),
                _ => self.value(segment, self.rank * count + element),
            }
        })
    }
}

const COUNTS: [usize; 5] = [1, 1000, 20_000, 300_001, 3_000_000];

#[test]
fn verified_calls_have_their_results() {
    let Some(contexts) = contexts() else { return };
    for verify in [Verify::All, Verify::Sample] {
        in_threads(&contexts, config(verify), |comm, context| {
            let rank = Rank::new(&comm, context);
            for count in COUNTS {
                for collective in COLLECTIVES {
                    let memory = rank.memory(collective, count);
                    rank.call(collective, count, &memory);
                    rank.comm.synchronize().unwrap();
                    assert!(rank.is_right(collective, count, &memory[1]), "{collective} of {count}");
                }
            }
            // In a graph, which verifies each replay.
            let memory = rank.memory(Collective::AllReduce, 5000);
            rank.call(Collective::AllReduce, 5000, &memory);
            rank.comm.synchronize().unwrap();
            if rank.comm.path().chooses() {
                let graph = capture(&rank.stream, || rank.call(Collective::AllReduce, 5000, &memory));
                for _ in 0..10 {
                    // SAFETY: a graph of calls that all ranks replay.
                    unsafe { sys::cuGraphLaunch(graph, rank.stream.cu_stream()) }.result().unwrap();
                }
                rank.comm.synchronize().unwrap();
                assert!(rank.is_right(Collective::AllReduce, 5000, &memory[1]));
            }
        });
    }
}

/// A bit flips on one rank, in the source between its sum and the call, or in the result. `TINYNCCL_TEST_FLIPS` is the
/// number of flips, 25 without it.
fn flips(place: Spoil) {
    let Some(contexts) = contexts() else { return };
    let flips = std::env::var("TINYNCCL_TEST_FLIPS").ok().and_then(|n| n.parse().ok()).unwrap_or(25);
    let (mut found, mut right, mut harmless, mut unsure) = (0, 0, 0, 0);
    for case in 0.. {
        let collective = COLLECTIVES[case % COLLECTIVES.len()];
        let (count, victim, bit) = (COUNTS[case / 7 % 4], case / 3 % contexts.len(), case.wrapping_mul(40_503));
        let outcomes = in_threads(&contexts, config(Verify::All), |comm, context| {
            let rank = Rank::new(&comm, context);
            let memory = rank.memory(collective, count);
            if rank.rank == victim {
                rank.comm.spoil(place, bit);
            }
            rank.call(collective, count, &memory);
            let outcome = rank.comm.synchronize();
            (outcome, rank.is_right(collective, count, &memory[1]))
        });
        let errors: Vec<&Error> = outcomes.iter().filter_map(|(outcome, _)| outcome.as_ref().err()).collect();
        let suspect = errors.iter().find_map(|error| match error {
            Error::Corrupt { suspect, .. } => Some(&**suspect),
            _ => None,
        });
        match suspect {
            None => {
                assert!(
                    errors.is_empty() && outcomes.iter().all(|(_, right)| *right),
                    "case {case}: {collective}: {outcomes:?}"
                );
                harmless += 1;
            }
            Some(suspect) => {
                found += 1;
                right += usize::from(match suspect {
                    Suspect::Memory { rank } => *rank == victim,
                    Suspect::Link { from, to, .. } => [*from, *to].contains(&victim),
                    Suspect::Ranks(_) => false,
                });
                unsure += usize::from(matches!(suspect, Suspect::Ranks(_)));
            }
        }
        if found == flips {
            break;
        }
    }
    println!(
        "GPU, {place:?}: {found} flips found of {found}, {right} at the right place, {unsure} between several; {harmless} hit nothing"
    );
    assert!(right * 100 >= found * 99);
}

#[test]
fn a_bit_that_flips_in_a_source_is_found() {
    flips(Spoil::Source);
}

#[test]
fn a_bit_that_flips_in_a_result_is_found() {
    flips(Spoil::Result);
}

/// Microseconds per all_reduce without verification, with `sample` and with `all`, in turn.
#[test]
#[ignore = "measures"]
fn price() {
    let Some(contexts) = contexts() else { return };
    for bytes in [8, 64 << 10, 1 << 20, 64 << 20] {
        let mut times = [(); 3].map(|()| Vec::new());
        for _ in 0..5 {
            for (times, verify) in times.iter_mut().zip([Verify::Off, Verify::Sample, Verify::All]) {
                let of_ranks = in_threads(&contexts, config(verify), |comm, context| {
                    let rank = Rank::new(&comm, context);
                    let memory = rank.memory(Collective::AllReduce, bytes / 4);
                    let calls = if bytes > 1 << 20 { 640 } else { 6400 };
                    (0..64).for_each(|_| rank.call(Collective::AllReduce, bytes / 4, &memory));
                    rank.comm.synchronize().unwrap();
                    comm.barrier().unwrap();
                    let begin = Instant::now();
                    (0..calls).for_each(|_| rank.call(Collective::AllReduce, bytes / 4, &memory));
                    rank.comm.synchronize().unwrap();
                    begin.elapsed().as_secs_f64() * 1e6 / f64::from(calls)
                });
                times.push(of_ranks.into_iter().fold(0.0, f64::max));
            }
        }
        let [off, sample, all] = times.map(|mut times| {
            times.sort_by(f64::total_cmp);
            times[2]
        });
        println!(
            "{bytes:>10} B: {off:>9.2} us, sample {sample:>9.2} (x {:.3}), all {all:>9.2} (x {:.2})",
            sample / off,
            all / off
        );
    }
}
