//! `TINYNCCL_VERIFY` on GPUs. Without two GPUs every test says that it is skipped.

use std::collections::HashMap;
use std::sync::{Arc, Barrier, Mutex};
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
        let at = [input, output].map(|memory| memory.device_ptr(&self.stream).0);
        self.call_at(collective, count, at).unwrap();
    }

    fn call_at(&self, collective: Collective, count: usize, [input, output]: [u64; 2]) -> tinynccl::Result<()> {
        let call = Call::new(collective, DType::U32, ReduceOp::Sum, self.n - 1, count);
        // SAFETY: as long as the collective needs, and ours.
        unsafe { self.comm.enqueue(&self.stream, &RawCall::on_device(call, input, output)) }
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
                let at = [0, 1].map(|i| memory[i].device_ptr(&rank.stream).0);
                rank.comm.synchronize().unwrap();
                let graph = capture(&rank.stream, || rank.call_at(Collective::AllReduce, 5000, at).unwrap());
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

/// A bit flips on one rank: in the source between its sum and the call, in the result, or in a slot of the window
/// during the call. `TINYNCCL_TEST_FLIPS` is the number of flips, 25 without it. At least `share` percent name the
/// right place.
fn flips(place: Spoil, collectives: &[Collective], counts: &[usize], share: usize) {
    let Some(contexts) = contexts() else { return };
    let flips: usize = std::env::var("TINYNCCL_TEST_FLIPS").ok().and_then(|n| n.parse().ok()).unwrap_or(25);
    let met = Barrier::new(contexts.len());
    let shown: Mutex<Vec<(Option<Error>, bool)>> = Mutex::default();
    in_threads(&contexts, config(Verify::All), |comm, context| {
        let rank = Rank::new(&comm, context);
        let (mut found, mut right, mut unsure, mut harmless) = (0, 0, 0, 0);
        let mut kept = HashMap::new();
        for case in 0usize.. {
            let (collective, count) = (collectives[case % collectives.len()], counts[case / 7 % counts.len()]);
            let (victim, bit) = (case / 3 % rank.n, case.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 8);
            // A flip in a source stays there.
            if place == Spoil::Source {
                kept.clear();
            }
            let memory = kept.entry((collective, count)).or_insert_with(|| rank.memory(collective, count));
            // A first call makes the windows.
            if case > 0 && rank.rank == victim {
                rank.comm.spoil(place, bit);
            }
            rank.stream.synchronize().unwrap();
            met.wait();
            rank.call(collective, count, memory);
            rank.stream.synchronize().unwrap();
            context.synchronize().unwrap();
            let outcome = (rank.comm.take_finding(), rank.is_right(collective, count, &memory[1]));
            shown.lock().unwrap().push(outcome);
            met.wait();
            let outcomes = shown.lock().unwrap().clone();
            met.wait();
            shown.lock().unwrap().clear();
            met.wait();
            let suspect = outcomes.iter().find_map(|(error, _)| match error {
                Some(Error::Corrupt { suspect, .. }) => Some(suspect.clone()),
                _ => None,
            });
            match suspect.as_deref() {
                None => {
                    let all_right = outcomes.iter().all(|(_, right)| *right);
                    assert!(all_right, "case {case}: {collective} of {count}: {outcomes:?}");
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
            if found == flips || harmless > 100 * flips {
                break;
            }
        }
        if rank.rank == 0 {
            println!(
                "GPU, {place:?}, {collectives:?}: {found} flips found of {found}, {right} at the right place, \
                 {unsure} between several; {harmless} hit nothing"
            );
            assert!(found == flips && right * 100 >= found * share);
        }
    });
}

const MOVES: [Collective; 3] = [Collective::AllGather, Collective::Broadcast, Collective::AllToAll];

#[test]
fn a_bit_that_flips_in_a_source_is_found() {
    flips(Spoil::Source, &COLLECTIVES, &COUNTS, 99);
}

#[test]
fn a_bit_that_flips_in_a_result_is_found() {
    flips(Spoil::Result, &COLLECTIVES, &COUNTS, 99);
}

#[test]
#[ignore = "takes long: one flip in 28 hits a slot that is in use"]
fn a_bit_that_flips_in_a_window_is_found() {
    flips(Spoil::Window, &MOVES, &COUNTS[4..], 99);
}

/// Two ranks that both have the wrong sum: the repetition shows it, and not whose it is.
#[test]
#[ignore = "not seen to hit a slot that is in use"]
fn a_bit_that_flips_in_a_window_of_a_reduction_is_found() {
    flips(Spoil::Window, &[Collective::AllReduce, Collective::ReduceScatter], &COUNTS[4..], 0);
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
