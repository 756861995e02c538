//! Schedules on GPUs, against the CPU executor: the same schedule, cut alike, gives the same bits. One GPU is enough
//! for any number of ranks. Without one every test says that it is skipped.

mod calls;

use std::time::Duration;

use cudarc::driver::{CudaSlice, DevicePtr, sys};
use half::{bf16, f16};
use tinynccl::algorithm::Shape;
use tinynccl::comm::RawCall;
use tinynccl::cuda::{Choice, Framing, Protocol};
use tinynccl::wire::{Algorithm, Collective};
use tinynccl::{Call, Error, ReduceOp};

use crate::ranks::capture;
use calls::*;

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

/// Schedules and the other kernels use the same slots and lines alternately.
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
        // Code is loaded before any rank waits: loading waits for kernels that run.
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
                // Code is loaded before any rank waits for another one.
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
        // A rank that sees it fails; the others wait for it until they are aborted.
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
    // SAFETY: no call is executed.
    let refused = |collective, algorithm, framing, blocks, count| {
        let call = Call::new(collective, tinynccl::DType::F32, ReduceOp::Sum, 0, count);
        let call = RawCall::on_device(call, at, at);
        let choice = Choice { protocol: Protocol::Schedule(algorithm, framing), blocks };
        assert!(comm.partition(&call, choice).is_none());
        // SAFETY: no call is executed.
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
