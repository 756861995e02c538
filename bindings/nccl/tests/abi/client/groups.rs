//! Groups: nothing happens before the outermost one ends, errors are returned there, streams keep their order.

use std::sync::atomic::{AtomicU32, Ordering};

use cudarc::driver::sys::{self, CUstreamCaptureMode};
use cudarc::driver::{CudaStream, result};
use nccl::abi::SimInfo;

use super::functions::*;
use super::rank::{
    INVALID_ARGUMENT, INVALID_USAGE, Memory, Rank, all, each, gpu, group, ok, refused, threads, unique_id,
};
use super::types::{I32, SUM};

fn numbers(value: i64, count: usize) -> Vec<u8> {
    I32.bytes(std::iter::repeat_n(value, count))
}

/// An all_reduce of `count` numbers in place.
fn sum(rank: &Rank, memory: &Memory, count: usize) -> i32 {
    ncclAllReduce(memory.at(0), memory.at_mut(0), count, I32.code, SUM, rank.comm, rank.stream())
}

/// A page-locked word for which a stream waits.
struct Gate(&'static AtomicU32);

impl Gate {
    /// Allocates a closed gate, which is never freed.
    fn new() -> Gate {
        // SAFETY: allocates; never freed.
        let at = unsafe { result::malloc_host(4, sys::CU_MEMHOSTALLOC_DEVICEMAP) }.unwrap().cast::<AtomicU32>();
        // SAFETY: fresh and aligned.
        unsafe { at.write(AtomicU32::new(0)) };
        // SAFETY: as above, and it is never freed.
        Gate(unsafe { &*at })
    }

    fn hold(&self, stream: &CudaStream) {
        // SAFETY: page-locked memory, which the device sees at the same address.
        unsafe { sys::cuStreamWaitValue32_v2(stream.cu_stream(), self.0.as_ptr() as u64, 1, 0) }.result().unwrap();
    }

    fn open(&self) {
        self.0.store(1, Ordering::Release);
    }

    /// Sends a stream through it once.
    fn pass(&self, stream: &CudaStream) {
        self.open();
        self.hold(stream);
        stream.synchronize().unwrap();
    }
}

apart! {
    fn nothing_happens_before_the_outermost_group_ends() {
        let ranks = all(2);
        let memory: Vec<_> = ranks.iter().map(|rank| rank.memory(&numbers(3, 100))).collect();
        ok(ncclGroupStart());
        for (rank, memory) in ranks.iter().zip(&memory) {
            ok(ncclGroupStart());
            ok(ncclGroupStart());
            ok(sum(rank, memory, 100));
            ok(ncclGroupEnd());
            ok(ncclGroupEnd());
            rank.stream.synchronize().unwrap();
            assert_eq!(memory.read(), numbers(3, 100));
        }
        ok(ncclGroupEnd());
        for (rank, memory) in ranks.iter().zip(&memory) {
            rank.wait();
            assert_eq!(memory.read(), numbers(6, 100));
        }
        ranks.into_iter().for_each(Rank::destroy);
    }

    fn an_empty_group_is_fine_and_an_end_without_a_beginning_is_not() {
        group(|| {});
        refused(ncclGroupEnd(), INVALID_USAGE, &["ncclGroupEnd", "ncclGroupStart"]);
        group(|| group(|| {}));
    }

    fn a_wrong_call_inside_ends_the_group_and_the_communicator_lives() {
        threads(2, |rank| {
            let memory = rank.memory(&numbers(3, 100));
            ok(ncclGroupStart());
            ok(sum(rank, &memory, 100));
            let wrong = ncclBroadcast(memory.at(0), memory.at_mut(0), 10, I32.code, 7, rank.comm, rank.stream());
            refused(wrong, INVALID_ARGUMENT, &["root is 7"]);
            ok(sum(rank, &memory, 50));
            refused(ncclGroupEnd(), INVALID_ARGUMENT, &["root is 7", "nothing"]);
            rank.wait();
            assert_eq!(memory.read(), numbers(3, 100), "a call of the group was made");
            rank.still_works();
        });
    }

    fn several_communicators_of_one_thread() {
        // Two communicators of the same ranks, two of halves: all in one group.
        let (first, second) = (all(4), all(4));
        let mut halves = vec![std::ptr::null_mut(); 4];
        group(|| {
            for (rank, half) in first.iter().zip(&mut halves) {
                ok(ncclCommSplit(rank.comm, rank.rank as i32 / 2, 0, half, std::ptr::null()));
            }
        });
        let halves: Vec<Rank> =
            halves.into_iter().enumerate().map(|(i, half)| Rank::of(half, i % 2, 2, gpu(i))).collect();
        for round in 0..10 {
            let memory: Vec<Vec<_>> = [&first, &second, &halves]
                .iter()
                .map(|ranks| ranks.iter().map(|rank| rank.memory(&numbers(round, 1000))).collect())
                .collect();
            group(|| {
                for (ranks, memory) in [&first, &second, &halves].iter().zip(&memory) {
                    for (rank, memory) in ranks.iter().zip(memory) {
                        ok(sum(rank, memory, 1000));
                    }
                }
            });
            for (ranks, memory) in [&first, &second, &halves].iter().zip(&memory) {
                for (rank, memory) in ranks.iter().zip(memory) {
                    rank.wait();
                    assert_eq!(memory.read(), numbers(round * rank.size as i64, 1000));
                }
            }
        }
        first.into_iter().chain(second).chain(halves).for_each(Rank::destroy);
    }

    // More operations than a stream takes: the thread would wait for the first rank, which waits for the second.
    fn long_calls_of_several_ranks_of_one_thread() with [("TINYNCCL_CUDA_CHUNK", "64K"), ("TINYNCCL_CUDA_THREADS", "1")] {
        const COUNT: usize = 16 << 20;
        let ranks = all(2);
        let memory: Vec<_> = ranks.iter().map(|rank| rank.memory(&numbers(3, COUNT))).collect();
        group(|| ranks.iter().zip(&memory).for_each(|(rank, memory)| ok(sum(rank, memory, COUNT))));
        for (rank, memory) in ranks.iter().zip(&memory) {
            rank.wait();
            assert_eq!(memory.read(), numbers(6, COUNT));
        }
        ranks.into_iter().for_each(Rank::destroy);
    }

    fn communicators_are_made_in_a_group() {
        let id = unique_id();
        let mut comms = [std::ptr::null_mut(); 3];
        ok(ncclGroupStart());
        for (rank, comm) in comms.iter_mut().enumerate() {
            let _gpu = gpu(rank);
            ok(ncclCommInitRank(comm, 3, id, rank as i32));
        }
        ok(ncclGroupEnd());
        let ranks: Vec<Rank> =
            comms.into_iter().enumerate().map(|(rank, comm)| Rank::of(comm, rank, 3, gpu(rank))).collect();
        let memory: Vec<_> = ranks.iter().map(|rank| rank.memory(&numbers(5, 10))).collect();
        group(|| ranks.iter().zip(&memory).for_each(|(rank, memory)| ok(sum(rank, memory, 10))));
        for (rank, memory) in ranks.iter().zip(&memory) {
            rank.wait();
            assert_eq!(memory.read(), numbers(15, 10));
        }
        ranks.into_iter().for_each(Rank::destroy);
    }

    // Each stream's work before the group is done before the group's calls, and what comes after sees them.
    fn several_streams_of_one_communicator() {
        threads(2, |rank| {
            let (other, third) = (rank.context.new_stream().unwrap(), rank.context.new_stream().unwrap());
            for round in 1..20 {
                let (one, two) = (rank.memory(&numbers(0, 50_000)), rank.memory(&numbers(0, 50_000)));
                rank.stream.synchronize().unwrap();
                let fill = |memory: &Memory, stream: &CudaStream| {
                    // SAFETY: memory of at least that many words, in use by nothing else.
                    unsafe { sys::cuMemsetD32Async(memory.at(0) as u64, round, 50_000, stream.cu_stream()) }.result().unwrap();
                };
                // One of the two streams is held up before it has what the group sums.
                let gate = Gate::new();
                gate.hold(if round % 2 == 0 { &rank.stream } else { &other });
                fill(&one, &rank.stream);
                fill(&two, &other);
                group(|| {
                    ok(sum(rank, &one, 50_000));
                    let stream = other.cu_stream().cast();
                    ok(ncclAllReduce(two.at(0), two.at_mut(0), 50_000, I32.code, SUM, rank.comm, stream));
                });
                // Time for what must not happen: both streams are behind both calls.
                for _ in 0..200 {
                    Gate::new().pass(&third);
                }
                for stream in [&rank.stream, &other] {
                    // SAFETY: a stream that lives.
                    let state = unsafe { sys::cuStreamQuery(stream.cu_stream()) };
                    assert_eq!(state, sys::CUresult::CUDA_ERROR_NOT_READY, "round {round}");
                }
                gate.open();
                other.synchronize().unwrap();
                rank.wait();
                assert_eq!(one.read(), numbers(2 * i64::from(round), 50_000));
                assert_eq!(two.read(), numbers(2 * i64::from(round), 50_000));
            }
        });
    }

    fn a_simulated_group_does_nothing() {
        threads(2, |rank| {
            let memory = rank.memory(&numbers(3, 100));
            let mut info = SimInfo { size: size_of::<SimInfo>(), magic: nccl::abi::SIM_INFO_MAGIC, version: 23_007, estimated_time: 7.0 };
            ok(ncclGroupStart());
            ok(sum(rank, &memory, 100));
            ok(ncclGroupSimulateEnd(&mut info));
            assert!(info.estimated_time == -1.0 || info.estimated_time > 0.0, "{}", info.estimated_time);
            rank.wait();
            assert_eq!(memory.read(), numbers(3, 100));
            refused(ncclGroupEnd(), INVALID_USAGE, &["ncclGroupStart"]);
            rank.still_works();
        });
    }

    // The host takes part in calls on this path, so it cannot be in a graph: an error says so, and nothing breaks.
    fn capture_is_refused_in_words() {
        threads(2, |rank| {
            let memory = rank.memory(&numbers(3, 100));
            rank.stream.synchronize().unwrap();
            rank.stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
            refused(sum(rank, &memory, 100), INVALID_USAGE, &["capture", "hosts' memory"]);
            let mut graph = std::ptr::null_mut();
            // SAFETY: ends the capture of our stream; writes the graph.
            unsafe { sys::cuStreamEndCapture(rank.stream.cu_stream(), &mut graph) }.result().unwrap();
            rank.still_works();
        });
    }

    // A single rank only copies: that can be in a graph, from several streams too.
    fn one_rank_is_captured_with_several_streams() {
        each(1, unique_id(), |rank| {
            let other = rank.context.new_stream().unwrap();
            let (a, b, c) = (rank.memory(&numbers(1, 100)), rank.memory(&numbers(0, 100)), rank.memory(&numbers(0, 100)));
            rank.stream.synchronize().unwrap();
            rank.stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
            let event = rank.context.new_event(None).unwrap();
            event.record(&rank.stream).unwrap();
            other.wait(&event).unwrap();
            group(|| {
                ok(ncclAllReduce(a.at(0), b.at_mut(0), 100, I32.code, SUM, rank.comm, rank.stream()));
                ok(ncclAllReduce(a.at(0), c.at_mut(0), 100, I32.code, SUM, rank.comm, other.cu_stream().cast()));
            });
            event.record(&other).unwrap();
            rank.stream.wait(&event).unwrap();
            let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
            let graph = rank.stream.end_capture(flags).unwrap().expect("a graph");
            for value in 2..5u32 {
                // SAFETY: memory of at least that many words, in use by nothing else.
                unsafe { sys::cuMemsetD32Async(a.at(0) as u64, value, 100, rank.stream.cu_stream()) }
                    .result()
                    .unwrap();
                graph.launch().unwrap();
                rank.wait();
                assert_eq!((b.read(), c.read()), (numbers(value.into(), 100), numbers(value.into(), 100)));
            }
            drop(graph);
            rank.destroy();
        });
    }
}
