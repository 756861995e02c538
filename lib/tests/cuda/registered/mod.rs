//! Collectives and messages between registered buffers, against a reference on the CPU. Each test also counts the calls
//! that used no slots: a silent way around would give the same bytes. Without two GPUs every test says that it is
//! skipped.

#![expect(clippy::needless_range_loop, reason = "a rank is a number, and has several things at its place")]

mod mapped;

use std::sync::Arc;
use std::time::Duration;

use crate::common::lengths;
use crate::ranks::{COLLECTIVES, contexts};
use cudarc::driver::{CudaContext, CudaStream, DevicePtr, DeviceRepr, result, sys};
use half::bf16;
use tinynccl::comm::RawCall;
use tinynccl::config::Ll128;
use tinynccl::cuda::{Choice, DeviceComm, Protocol, Registered};
use tinynccl::wire::Collective;
use tinynccl::{Call, Config, Element, Error, ReduceOp};

const PATIENCE: Duration = Duration::from_secs(20);
/// Elements around an output that must stay.
const GUARD: usize = 64;

struct Ranks {
    // Dropped first: its memory is freed while the communicators are there.
    comms: Vec<DeviceComm>,
    streams: Vec<Arc<CudaStream>>,
}

/// LL128 is as good as registered buffers for the first few MiB, and taken for them; here smaller calls show what
/// buffers do.
fn without_ll128() -> Config {
    let mut config = Config::default();
    config.cuda_ll128 = Ll128::Off;
    config
}

impl Ranks {
    fn new(contexts: &[Arc<CudaContext>], patience: Duration) -> Ranks {
        let mut config = without_ll128();
        config.timeout = patience;
        let comms = DeviceComm::local(contexts, &config).unwrap();
        Ranks { comms, streams: contexts.iter().map(|c| c.new_stream().unwrap()).collect() }
    }

    fn alloc<T: Element + DeviceRepr>(&self, len: usize) -> Vec<Registered<T>> {
        DeviceComm::alloc_local(&self.comms.iter().collect::<Vec<_>>(), &self.streams, len).unwrap()
    }

    fn direct_calls(&self) -> u64 {
        self.comms.iter().map(|c| c.direct_calls().unwrap()).sum()
    }
}

/// Small whole numbers: their reductions are exact.
trait Exact: Element + DeviceRepr {
    fn of(value: i64) -> Self;
}
macro_rules! exact {
    ($($t:ty: $of:expr;)*) => {$(impl Exact for $t { fn of(value: i64) -> Self { ($of)(value) } })*};
}
exact! {
    f32: |v| v as f32;
    f64: |v| v as f64;
    bf16: |v| bf16::from_f32(v as f32);
    i32: |v| v as i32;
    u8: |v| v as u8;
    i64: |v| v;
}

fn value(rank: usize, i: usize) -> i64 {
    1 + ((i * 7 + rank * 3 + i / 5 + (i * rank) / 3) % 2) as i64
}

/// Value of element `i` of a rank's output, `None` if the element stays as it was before.
fn expected<T: Exact>(collective: Collective, n: usize, root: usize, rank: usize, count: usize, i: usize) -> Option<T> {
    let sum = |i: usize| (0..n).map(|r| value(r, i)).sum::<i64>();
    Some(T::of(match collective {
        Collective::AllReduce => sum(i),
        Collective::ReduceScatter => sum(rank * count + i),
        Collective::Reduce if rank == root => sum(i),
        Collective::Reduce => return None,
        Collective::Broadcast => value(root, i),
        Collective::AllGather => value(i / count, i % count),
        _ => value(i / count, rank * count + i % count),
    }))
}

/// The address of element `at` of a rank's memory, which outlives the calls.
fn address<T>(buffer: &impl DevicePtr<T>, stream: &CudaStream, at: usize) -> u64 {
    buffer.device_ptr(stream).0 + (at * size_of::<T>()) as u64
}

#[derive(Debug, Clone, Copy)]
struct Case {
    collective: Collective,
    count: usize,
    /// Elements between the begin of the memory and that of the buffers.
    shift: usize,
    in_place: bool,
    choice: Option<Choice>,
}

/// Runs one collective between parts of `inputs` and `outputs` and checks every element.
fn check<T: Exact>(ranks: &Ranks, inputs: &mut [Registered<T>], outputs: &mut [Registered<T>], case: Case) {
    let Case { collective, count, shift, in_place, choice } = case;
    let n = ranks.comms.len();
    let root = count % n;
    let (in_len, out_len) = lengths(collective, n, count);
    let own = |rank: usize| if collective == Collective::AllGather { rank * count } else { 0 };
    for rank in 0..n {
        let stream = &ranks.streams[rank];
        let data: Vec<T> = (0..in_len).map(|i| T::of(value(rank, i))).collect();
        let mut output = vec![T::of(5); out_len + 2 * GUARD];
        if in_place {
            output[GUARD + own(rank)..][..in_len].copy_from_slice(&data);
        }
        stream.memcpy_htod(&data, &mut inputs[rank].slice_mut(shift..shift + in_len)).unwrap();
        stream.memcpy_htod(&output, &mut outputs[rank].slice_mut(shift..shift + output.len())).unwrap();
    }
    for rank in 0..n {
        let stream = &ranks.streams[rank];
        let output = address(&outputs[rank], stream, shift + GUARD);
        let input = match in_place {
            true => output + (own(rank) * size_of::<T>()) as u64,
            false => address(&inputs[rank], stream, shift),
        };
        let call = RawCall::on_device(Call::new(collective, T::DTYPE, ReduceOp::Sum, root, count), input, output);
        let chosen = ranks.comms[rank].choice(collective, count * size_of::<T>());
        // SAFETY: the buffers have the lengths of the collective and outlive the calls.
        unsafe { ranks.comms[rank].enqueue_as(stream, &call, choice.unwrap_or(chosen)) }.unwrap();
    }
    for rank in 0..n {
        let stream = &ranks.streams[rank];
        ranks.comms[rank].synchronize().unwrap_or_else(|e| panic!("{case:?}, rank {rank}: {e}"));
        let got = stream.clone_dtoh(&outputs[rank].slice(shift..shift + out_len + 2 * GUARD)).unwrap();
        let (before, rest) = got.split_at(GUARD);
        let (got, behind) = rest.split_at(out_len);
        let kept = before.iter().chain(behind).all(|&x| x == T::of(5));
        assert!(kept, "{case:?}, rank {rank}: wrote beside its output");
        for (i, &got) in got.iter().enumerate() {
            let before = if in_place { T::of(value(rank, i)) } else { T::of(5) };
            let expected = expected::<T>(collective, n, root, rank, count, i).unwrap_or(before);
            assert_eq!(got, expected, "{} of {case:?}, rank {rank}, element {i}", T::DTYPE);
        }
    }
}

/// Returns true if a call needs no slots: every address that another rank uses is a multiple of 16.
fn is_direct(collective: Collective, count: usize, shift: usize, size: usize) -> bool {
    let whole_segments = (count * size).is_multiple_of(16);
    let segments = matches!(collective, Collective::AllGather | Collective::ReduceScatter | Collective::AllToAll);
    (shift * size).is_multiple_of(16) && (whole_segments || !segments)
}

/// Returns true if `n` ranks have a kernel of protocol Direct for this collective.
fn exists(collective: Collective, n: usize) -> bool {
    n == 2 || matches!(collective, Collective::AllGather | Collective::AllToAll)
}

fn every_way<T: Exact>(ranks: &Ranks, counts: &[usize], shifts: &[usize], blocks: &[u32]) {
    let n = ranks.comms.len();
    let most = counts.iter().max().unwrap() * n + 2 * GUARD + shifts.iter().max().unwrap();
    let (mut inputs, mut outputs) = (ranks.alloc::<T>(most), ranks.alloc::<T>(most));
    assert!(inputs.iter().chain(&outputs).all(Registered::is_registered));
    for collective in COLLECTIVES {
        for &count in counts {
            for &blocks in blocks {
                let choice = Choice { protocol: Protocol::Direct, blocks };
                let fits = ranks.comms[0].fits(collective, choice, count * size_of::<T>());
                assert_eq!(fits, exists(collective, n), "{collective}");
                if !fits {
                    continue;
                }
                for &shift in shifts {
                    for in_place in [false, true] {
                        if in_place && matches!(collective, Collective::AllToAll | Collective::ReduceScatter) {
                            continue;
                        }
                        let case = Case { collective, count, shift, in_place, choice: Some(choice) };
                        let before = ranks.direct_calls();
                        check(ranks, &mut inputs, &mut outputs, case);
                        let direct = if is_direct(collective, count, shift, size_of::<T>()) { n as u64 } else { 0 };
                        assert_eq!(ranks.direct_calls() - before, direct, "{} of {case:?}", T::DTYPE);
                    }
                }
            }
        }
    }
}

#[test]
fn every_collective_between_registered_buffers() {
    let Some(contexts) = contexts() else { return };
    let ranks = Ranks::new(&contexts, PATIENCE);
    every_way::<f32>(&ranks, &[0, 1, 3, 4, 1000, 65_537, 300_016], &[0, 1, 4], &[1, 3, 64, 128]);
}

#[test]
fn several_types() {
    let Some(contexts) = contexts() else { return };
    let ranks = Ranks::new(&contexts, PATIENCE);
    every_way::<bf16>(&ranks, &[5, 8, 40_001], &[0, 1], &[16]);
    every_way::<f64>(&ranks, &[2, 30_001], &[0, 1], &[16]);
    every_way::<i32>(&ranks, &[4, 30_001], &[0], &[128]);
    every_way::<u8>(&ranks, &[16, 1_000_003], &[0, 1, 16], &[128]);
    every_way::<i64>(&ranks, &[30_002], &[0], &[3]);
}

/// More ranks than GPUs: among more than two, reductions and broadcasts take other paths.
#[test]
fn several_ranks_on_a_gpu() {
    let Some(contexts) = contexts() else { return };
    for size in [3, 4, 8] {
        let contexts: Vec<_> = (0..size).map(|rank| contexts[rank % contexts.len()].clone()).collect();
        every_way::<f32>(&Ranks::new(&contexts, PATIENCE), &[1, 1000, 50_003, 100_000], &[0, 1], &[1, 16]);
    }
}

/// Choice by the library itself: Direct for large calls, once something is registered, where that is faster than slots.
#[test]
fn large_calls_are_direct_by_themselves() {
    let Some(contexts) = contexts() else { return };
    let ranks = Ranks::new(&contexts, PATIENCE);
    let n = ranks.comms.len();
    let count = 3 << 20;
    assert_ne!(ranks.comms[0].choice(Collective::AllReduce, 4 * count).protocol, Protocol::Direct);
    let (mut inputs, mut outputs) = (ranks.alloc::<f32>(n * count + 128), ranks.alloc::<f32>(n * count + 128));
    for collective in COLLECTIVES {
        let before = ranks.direct_calls();
        let case = Case { collective, count, shift: 0, in_place: false, choice: None };
        check(&ranks, &mut inputs, &mut outputs, case);
        let direct = if exists(collective, n) { n as u64 } else { 0 };
        assert_eq!(ranks.direct_calls() - before, direct, "{collective}");
    }
}

/// One rank's buffer is not registered: all take the slots, and the result is the same.
#[test]
fn registered_on_some_ranks_alone() {
    let Some(contexts) = contexts() else { return };
    let ranks = Ranks::new(&contexts, PATIENCE);
    let n = ranks.comms.len();
    let count = 300_000;
    let registered = ranks.alloc::<i32>(n * count);
    for odd in 0..n {
        let plain = ranks.streams[odd].clone_htod(&vec![odd as i32; n * count]).unwrap();
        for rank in 0..n {
            let stream = &ranks.streams[rank];
            let at = if rank == odd { address(&plain, stream, 0) } else { address(&registered[rank], stream, 0) };
            // SAFETY: as long as all segments, ours.
            unsafe { result::memcpy_htod_async(at, &vec![rank as i32; n * count], stream.cu_stream()) }.unwrap();
            stream.synchronize().unwrap();
            let choice = Choice { protocol: Protocol::Direct, blocks: 64 };
            // SAFETY: as above; the buffers outlive the calls.
            unsafe { ranks.comms[rank].enqueue_as(stream, &gather_in_place(rank, count, at), choice) }.unwrap();
        }
        assert_eq!(ranks.direct_calls(), 0);
        for rank in 0..n {
            let stream = &ranks.streams[rank];
            let got = match rank == odd {
                true => stream.clone_dtoh(&plain).unwrap(),
                false => stream.clone_dtoh(&*registered[rank]).unwrap(),
            };
            assert!((0..n * count).all(|i| got[i] == (i / count) as i32), "without rank {odd}: rank {rank}");
        }
    }
}

#[test]
fn messages_into_registered_buffers() {
    let Some(contexts) = contexts() else { return };
    let ranks = Ranks::new(&contexts, PATIENCE);
    let n = ranks.comms.len();
    // Long ones are longer than the slots hold.
    let most = 8_500_003;
    let memory: Vec<Registered<u32>> = ranks.alloc(most + 1);
    // Short and long ones alternately: slots are used again after a message without.
    for (round, count) in [1000, most, 80_000, 8 << 20, most, 3, 8_400_000].into_iter().enumerate() {
        for shift in [0, 1] {
            let before = ranks.direct_calls();
            let mut inputs = Vec::new();
            for rank in 0..n {
                let stream = &ranks.streams[rank];
                let values: Vec<u32> = (0..count).map(|i| (round * 7919 + rank * 1_000_003 + i) as u32).collect();
                let input = stream.clone_htod(&values).unwrap();
                let (to, from) = ((rank + 1) % n, (rank + n - 1) % n);
                let (out, into) = (address(&input, stream, 0), address(&memory[rank], stream, shift));
                let (to, from) = (Some((out, 4 * count, to)), Some((into, 4 * count, from)));
                // SAFETY: both are of `count` elements and outlive the call.
                unsafe { ranks.comms[rank].enqueue_send_recv(stream, to, from) }.unwrap();
                inputs.push(input);
            }
            for rank in 0..n {
                ranks.comms[rank].synchronize().unwrap();
                let from = (rank + n - 1) % n;
                let got = ranks.streams[rank].clone_dtoh(&memory[rank].slice(shift..shift + count)).unwrap();
                let right = |i: usize| (round * 7919 + from * 1_000_003 + i) as u32;
                assert!((0..count).all(|i| got[i] == right(i)), "{count} from {from}, shift {shift}");
            }
            let direct = if shift == 0 && count >= 8 << 20 { 2 * n as u64 } else { 0 };
            assert_eq!(ranks.direct_calls() - before, direct, "{count}, shift {shift}");
        }
    }
}

/// As without registered buffers: what the slots hold waits for no receiver.
#[test]
fn ranks_send_to_each_other_before_they_receive() {
    let Some(contexts) = contexts() else { return };
    let ranks = Ranks::new(&contexts, PATIENCE);
    let bytes = 4 << 20;
    let memory: Vec<Registered<u8>> = ranks.alloc(2 * bytes);
    for rank in 0..2 {
        let (comm, stream) = (&ranks.comms[rank], &ranks.streams[rank]);
        let at = |shift| address(&memory[rank], stream, shift);
        // SAFETY: both halves are within the memory.
        unsafe {
            comm.enqueue_send_recv(stream, Some((at(0), bytes, 1 - rank)), None).unwrap();
            comm.enqueue_send_recv(stream, None, Some((at(bytes), bytes, 1 - rank))).unwrap();
        }
    }
    ranks.comms[..2].iter().for_each(|comm| comm.synchronize().unwrap());
}

#[test]
fn a_message_of_another_length_is_named_and_not_written() {
    let Some(contexts) = contexts() else { return };
    let ranks = Ranks::new(&contexts, Duration::from_millis(500));
    let memory: Vec<Registered<u8>> = ranks.alloc(64 << 20);
    let at = |rank: usize| address(&memory[rank], &ranks.streams[rank], 0);
    // SAFETY: both are within the memory.
    unsafe {
        ranks.comms[0].enqueue_send_recv(&ranks.streams[0], Some((at(0), 64 << 20, 1)), None).unwrap();
        ranks.comms[1].enqueue_send_recv(&ranks.streams[1], None, Some((at(1), 32 << 20, 0))).unwrap();
    }
    let error = ranks.comms[0].synchronize().unwrap_err().to_string();
    assert!(error.contains("67108864 u8") && error.contains("33554432 u8"), "{error}");
    assert!(ranks.comms[1].synchronize().is_err());
}

/// Nothing is written into another's buffer before all agree on the call.
#[test]
fn ranks_that_disagree_write_nothing() {
    let Some(contexts) = contexts() else { return };
    let ranks = Ranks::new(&contexts, PATIENCE);
    let memory: Vec<Registered<u8>> = ranks.alloc(1 << 20);
    for rank in 0..ranks.comms.len() {
        let stream = &ranks.streams[rank];
        let at = address(&memory[rank], stream, 0);
        let count = if rank == 1 { 5008 } else { 6000 };
        let choice = Choice { protocol: Protocol::Direct, blocks: 4 };
        // SAFETY: within the memory.
        unsafe { ranks.comms[rank].enqueue_as(stream, &gather_in_place(rank, count, at), choice) }.unwrap();
    }
    let error = ranks.comms[0].synchronize().unwrap_err().to_string();
    assert!(error.contains("rank 0 and rank 1 disagree"), "{error}");
    assert!(ranks.comms[1].synchronize().is_err());
    assert!(ranks.streams[1].clone_dtoh(&*memory[1]).unwrap().iter().all(|&x| x == 0));
}

#[test]
fn a_rank_that_does_not_come_is_named() {
    let Some(contexts) = contexts() else { return };
    let ranks = Ranks::new(&contexts, Duration::from_millis(300));
    let mut memory: Vec<Registered<f32>> = ranks.alloc(4 << 20);
    ranks.comms[0].all_reduce_in_place(&ranks.streams[0], &mut memory[0], ReduceOp::Sum).unwrap();
    match ranks.comms[0].synchronize().unwrap_err() {
        Error::Timeout { rank: 0, .. } => {}
        other => panic!("{other}"),
    }
}

#[test]
fn a_captured_call_is_direct_at_each_replay() {
    let Some(contexts) = contexts() else { return };
    let ranks = Ranks::new(&contexts, PATIENCE);
    let n = ranks.comms.len();
    // Among more than two ranks a ring would be chosen.
    let direct = Choice { protocol: Protocol::Direct, blocks: 64 };
    ranks.comms.iter().for_each(|comm| comm.set_choice(Some(direct)));
    let count = 2_000_000;
    let mut memory: Vec<Registered<i32>> = ranks.alloc(n * count);
    let mut graphs = Vec::new();
    for rank in 0..n {
        let stream = &ranks.streams[rank];
        stream.memcpy_htod(&vec![1; n * count], &mut memory[rank].as_view_mut()).unwrap();
        let call = gather_in_place(rank, count, address(&memory[rank], stream, 0));
        // Compiled and loaded before the capture.
        // SAFETY: the memory outlives the call.
        unsafe { ranks.comms[rank].enqueue(stream, &call) }.unwrap();
    }
    let before = ranks.direct_calls();
    for rank in 0..n {
        let stream = &ranks.streams[rank];
        let at = address(&memory[rank], stream, 0);
        stream.context().bind_to_thread().unwrap();
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream and the memory outlive the graph.
        unsafe {
            result::stream::begin_capture(stream.cu_stream(), mode).unwrap();
            ranks.comms[rank].enqueue(stream, &gather_in_place(rank, count, at)).unwrap();
            let graph = result::stream::end_capture(stream.cu_stream()).unwrap();
            let mut executable = std::ptr::null_mut();
            sys::cuGraphInstantiateWithFlags(&mut executable, graph, 0).result().unwrap();
            graphs.push((graph, executable));
        }
    }
    for round in 1..=3 {
        for rank in 0..n {
            let stream = &ranks.streams[rank];
            let values = vec![(10 * round + rank) as i32; n * count];
            stream.memcpy_htod(&values, &mut memory[rank].as_view_mut()).unwrap();
            stream.context().bind_to_thread().unwrap();
            // SAFETY: instantiated above.
            unsafe { sys::cuGraphLaunch(graphs[rank].1, stream.cu_stream()) }.result().unwrap();
        }
        for rank in 0..n {
            ranks.streams[rank].synchronize().unwrap();
            let got = ranks.streams[rank].clone_dtoh(&*memory[rank]).unwrap();
            let right = |i: usize| (10 * round + i / count) as i32;
            assert!((0..n * count).all(|i| got[i] == right(i)), "round {round}, rank {rank}");
        }
    }
    assert_eq!(ranks.direct_calls() - before, 3 * n as u64);
    for (graph, executable) in graphs {
        // SAFETY: nothing of them runs any more.
        unsafe {
            sys::cuGraphExecDestroy(executable).result().unwrap();
            sys::cuGraphDestroy(graph).result().unwrap();
        }
    }
}

/// All_gather of segments of `count` elements, each at its offset in the output at `at`.
fn gather_in_place(rank: usize, count: usize, at: u64) -> RawCall {
    let call = Call::new(Collective::AllGather, i32::DTYPE, ReduceOp::Sum, 0, count);
    RawCall::on_device(call, at + (4 * rank * count) as u64, at)
}

#[test]
fn what_is_no_set_of_ranks_is_refused() {
    let Some(contexts) = contexts() else { return };
    let ranks = Ranks::new(&contexts, PATIENCE);
    let reversed: Vec<&DeviceComm> = ranks.comms.iter().rev().collect();
    let error = DeviceComm::alloc_local::<f32>(&reversed, &ranks.streams, 10).unwrap_err();
    assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
    let error = ranks.comms[0].alloc::<f32>(&ranks.streams[0], 10).unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }), "{error}");
}
