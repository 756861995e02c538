//! Groups of short collectives, which are launched together where they do not depend on each other. Without two GPUs
//! every test says that it is skipped.

use std::time::Duration;

use cudarc::driver::{CudaSlice, DevicePtr, sys};
use tinynccl::comm::RawCall;
use tinynccl::cuda::DeviceComm;
use tinynccl::wire::Collective;
use tinynccl::{Call, DType, Error, ReduceOp};

use crate::common::lengths;
use crate::peers::{PATIENCE, Rank, ranks, ranks_that_share};
use crate::ranks::COLLECTIVES;
use crate::ranks::capture;

/// Few, so that calls of a group often use what others write.
const REGIONS: usize = 10;
/// Elements of a region: also of calls in lines of 128 bytes, and of some that are too long for lines.
const REGION: usize = 800_000;

/// As good as any for a test: SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ x >> 31) % end as u64) as usize
    }
}

/// A call, and where its input and output begin in every rank's memory.
#[derive(Debug, Clone, Copy)]
struct Planned {
    call: Call,
    input: usize,
    output: usize,
}

fn planned(random: &mut Random, ranks: usize) -> Planned {
    let rooted = [Collective::Gather, Collective::Scatter];
    let which = random.below(COLLECTIVES.len() + rooted.len());
    let collective = COLLECTIVES.iter().chain(&rooted).copied().nth(which).unwrap();
    let most = [8, 500, 5000, 100_000, REGION / ranks - 8][[0, 0, 0, 1, 1, 1, 2, 2, 3, 4][random.below(10)]];
    let op = [ReduceOp::Sum, ReduceOp::Sum, ReduceOp::Sum, ReduceOp::Max][random.below(4)];
    let call = Call::new(collective, DType::I32, op, random.below(ranks), 1 + random.below(most));
    let (from, other) = (random.below(REGIONS), 1 + random.below(REGIONS - 1));
    let shift = [0, 0, 0, 1, 2, 3][random.below(6)];
    let in_place = matches!(collective, Collective::AllReduce | Collective::Broadcast | Collective::Reduce);
    let to = if in_place && random.below(3) == 0 { from } else { (from + other) % REGIONS };
    Planned { call, input: from * REGION + shift, output: to * REGION + shift }
}

/// Does a call with the memory of all ranks.
fn model(plan: &Planned, memory: &mut [Vec<i32>]) {
    let (n, Planned { call, input, output }) = (memory.len(), *plan);
    let (from, to) = lengths(call.collective, n, call.count);
    let inputs: Vec<Vec<i32>> = memory.iter().map(|all| all[input..input + from].to_vec()).collect();
    let reduced = |i: usize| {
        let values = inputs.iter().map(|one| one[i]);
        if call.op == Some(ReduceOp::Max) { values.max() } else { values.reduce(i32::wrapping_add) }.unwrap()
    };
    for (rank, all) in memory.iter_mut().enumerate() {
        if matches!(call.collective, Collective::Reduce | Collective::Gather) && rank != call.root {
            continue;
        }
        for (i, out) in all[output..output + to].iter_mut().enumerate() {
            let (segment, element) = (i / call.count, i % call.count);
            *out = match call.collective {
                Collective::AllReduce | Collective::Reduce => reduced(i),
                Collective::ReduceScatter => reduced(rank * call.count + i),
                Collective::Broadcast => inputs[call.root][i],
                Collective::AllGather | Collective::Gather => inputs[segment][element],
                Collective::Scatter => inputs[call.root][rank * call.count + element],
                _ => inputs[segment][rank * call.count + element],
            };
        }
    }
}

fn enqueue(rank: &Rank, calls: &[RawCall], together: bool) {
    // SAFETY: the memory is as long as the calls need, and lives until the stream has been waited for.
    let enqueued = unsafe {
        match together {
            true => rank.comm.enqueue_group(&rank.stream, calls),
            false => calls.iter().try_for_each(|call| rank.comm.enqueue(&rank.stream, call)),
        }
    };
    enqueued.unwrap_or_else(|e| panic!("rank {}: {e}", rank.comm.rank()));
}

/// Random groups; what each leaves in all memory is what its calls leave one after the other.
fn groups(ranks: &[Rank], count: usize, seed: u64) {
    let (n, mut random) = (ranks.len(), Random(seed));
    let mut expected: Vec<Vec<i32>> =
        (0..n).map(|rank| (0..REGIONS * REGION).map(|i| (i * 7 + rank * 31 + i / 97) as i32).collect()).collect();
    let memory: Vec<CudaSlice<i32>> =
        ranks.iter().zip(&expected).map(|(r, all)| r.stream.clone_htod(all).unwrap()).collect();
    for round in 0..count {
        let plans: Vec<Planned> = (0..2 + random.below(24)).map(|_| planned(&mut random, n)).collect();
        let calls: Vec<Vec<RawCall>> = ranks
            .iter()
            .zip(&memory)
            .map(|(r, memory)| {
                let at = |element: usize| memory.device_ptr(&r.stream).0 + 4 * element as u64;
                plans.iter().map(|p| RawCall::on_device(p.call, at(p.input), at(p.output))).collect()
            })
            .collect();
        // One thread drives all of them.
        ranks.iter().zip(&calls).for_each(|(r, calls)| r.comm.prepare(calls).unwrap());
        // Also where one rank makes the calls one by one, and in graphs.
        let alone = random.below(2 * n);
        let in_graph = round % 3 == 2;
        let work = |rank: usize| enqueue(&ranks[rank], &calls[rank], rank != alone);
        let replays = if in_graph { 3 } else { 1 };
        if in_graph {
            let graphs: Vec<_> = (0..n).map(|rank| capture(&ranks[rank].stream, || work(rank))).collect();
            for _ in 0..replays {
                for (r, graph) in ranks.iter().zip(&graphs) {
                    // SAFETY: of this stream's device; its memory is alive.
                    unsafe { sys::cuGraphLaunch(*graph, r.stream.cu_stream()) }.result().unwrap();
                }
            }
        } else {
            (0..n).for_each(work);
        }
        for _ in 0..replays {
            plans.iter().for_each(|plan| model(plan, &mut expected));
        }
        for (rank, (r, memory)) in ranks.iter().zip(&memory).enumerate() {
            r.comm.synchronize().unwrap_or_else(|e| panic!("{n} ranks, round {round}, rank {rank}: {e}"));
            let got = r.stream.clone_dtoh(memory).unwrap();
            let wrong = (0..got.len()).find(|&i| got[i] != expected[rank][i]);
            let wrong = wrong.map(|i| (i / REGION, i % REGION, got[i], expected[rank][i]));
            assert_eq!(
                wrong, None,
                "seed {seed}, {n} ranks, round {round}, rank {rank}, alone {alone}, in a graph {in_graph}: region, \
                 element, got, expected, of {plans:#?}"
            );
        }
    }
}

#[test]
fn groups_are_what_their_calls_are_one_by_one() {
    let Some(ranks) = ranks(PATIENCE) else { return };
    groups(&ranks, 60, 1);
}

#[test]
fn groups_of_more_ranks() {
    for n in [3, 4] {
        let Some(ranks) = ranks_that_share(n) else { return };
        groups(&ranks, 15, n as u64);
    }
}

/// Sums of `counts` elements, in place.
fn sums(rank: &Rank, memory: &CudaSlice<i32>, counts: [usize; 4]) -> Vec<RawCall> {
    let at = memory.device_ptr(&rank.stream).0;
    let sum = |(i, count): (u64, usize)| {
        let at = at + 1024 * i;
        RawCall::on_device(Call::new(Collective::AllReduce, DType::I32, ReduceOp::Sum, 0, count), at, at)
    };
    (0..).zip(counts).map(sum).collect()
}

#[test]
fn a_call_of_a_group_about_which_ranks_disagree_is_named() {
    // Far from the deadline.
    let Some(ranks) = ranks(Duration::from_secs(600)) else { return };
    let memory: Vec<_> = ranks.iter().map(|r| r.stream.alloc_zeros::<i32>(1024).unwrap()).collect();
    let counts = |rank: usize| if rank == 1 { [16, 16, 17, 16] } else { [16; 4] };
    let calls = |rank: usize| sums(&ranks[rank], &memory[rank], counts(rank));
    (0..ranks.len()).for_each(|rank| ranks[rank].comm.prepare(&calls(rank)).unwrap());
    (0..ranks.len()).for_each(|rank| enqueue(&ranks[rank], &calls(rank), true));
    let errors: Vec<String> = ranks.iter().filter_map(|r| r.comm.synchronize().err()).map(|e| e.to_string()).collect();
    let named =
        |e: &String| ["disagree", "all_reduce of 16 i32", "all_reduce of 17 i32"].iter().all(|word| e.contains(word));
    assert!(errors.iter().any(named), "{errors:?}");
}

#[test]
fn groups_end_with_their_deadline_and_with_an_abort() {
    let abort = |comm: &DeviceComm| comm.abort();
    for (patience, act) in [(Duration::from_secs(1), None), (Duration::from_secs(600), Some(abort))] {
        let Some(ranks) = ranks(patience) else { return };
        let memory = ranks[0].stream.alloc_zeros::<i32>(1024).unwrap();
        // The others never make the calls.
        enqueue(&ranks[0], &sums(&ranks[0], &memory, [16; 4]), true);
        if let Some(act) = act {
            ranks.iter().for_each(|r| act(&r.comm));
        }
        let error = ranks[0].comm.synchronize().unwrap_err();
        match act {
            None => assert!(matches!(error, Error::Timeout { .. }), "{error}"),
            Some(_) => assert!(matches!(error, Error::Aborted { .. }), "{error}"),
        }
    }
}
