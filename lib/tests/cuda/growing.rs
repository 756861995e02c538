//! Windows are small until a call needs more: an extension is allocated and mapped then, whatever call comes first,
//! also while a stream is captured. Without two GPUs every test says that it is skipped.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use cudarc::driver::{CudaContext, CudaStream, result, sys};
use tinynccl::comm::RawCall;
use tinynccl::cuda::{DeviceComm, Path};
use tinynccl::wire::Collective;
use tinynccl::{Call, Comm, Config, DType, Error, ReduceOp};

use crate::ranks::{contexts, in_processes, in_threads};

/// Elements of a call in lines of LL, and of one in slots.
const SMALL: usize = 100;
const LARGE: usize = 5 << 20;
/// Elements of the longest message in lines, and of one in slots.
const SHORT: usize = 8192;
const LONG: usize = SHORT + 1;
/// Most bytes of a window without its extension, for 8 ranks without LL128.
const MOST_AT_FIRST: usize = 40 << 20;

/// One rank: its communicator, a stream, and memory of `LARGE` `i32`.
struct Rank {
    device: DeviceComm,
    stream: Arc<CudaStream>,
    at: u64,
}

impl Rank {
    fn new(comm: &Comm, context: &Arc<CudaContext>) -> Rank {
        let device = DeviceComm::new(comm, context).unwrap();
        assert_eq!(device.path(), Path::Peer, "{}", device.path_reason());
        context.bind_to_thread().unwrap();
        // SAFETY: allocates; freed by `drop`.
        let at = unsafe { result::malloc_sync(4 * LARGE) }.unwrap();
        Rank { device, stream: context.new_stream().unwrap(), at }
    }

    /// Our rank's values: `factor` times our number from 1.
    fn fill(&self, count: usize, factor: i32) {
        self.device.context().bind_to_thread().unwrap();
        let values = vec![factor * (self.device.rank() as i32 + 1); count];
        // SAFETY: the memory is that long.
        unsafe { result::memcpy_htod_sync(self.at, &values) }.unwrap();
        // SAFETY: the default stream.
        unsafe { result::stream::synchronize(std::ptr::null_mut()) }.unwrap();
    }

    fn sum(&self, count: usize) -> RawCall {
        RawCall::on_device(Call::new(Collective::AllReduce, DType::I32, ReduceOp::Sum, 0, count), self.at, self.at)
    }

    fn enqueue(&self, call: &RawCall) {
        // SAFETY: memory of this rank, which lives until the stream is waited for.
        unsafe { self.device.enqueue(&self.stream, call) }.unwrap();
    }

    /// That the first `count` elements are `value`.
    fn expect(&self, count: usize, value: i32) {
        self.device.synchronize().unwrap();
        self.stream.synchronize().unwrap();
        self.device.context().bind_to_thread().unwrap();
        let mut got = vec![0i32; count];
        // SAFETY: the memory is that long.
        unsafe { result::memcpy_dtoh_sync(&mut got, self.at) }.unwrap();
        let wrong = got.iter().position(|&x| x != value);
        assert_eq!(wrong, None, "rank {} of {count}: expected {value}, got {:?}", self.device.rank(), &got[..4]);
    }

    fn total(&self, factor: i32) -> i32 {
        let size = self.device.size() as i32;
        factor * size * (size + 1) / 2
    }

    fn all_reduce(&self, count: usize, factor: i32) {
        self.fill(count, factor);
        self.enqueue(&self.sum(count));
        self.expect(count, self.total(factor));
    }

    /// To the next rank and from the one before.
    fn in_a_ring(&self, count: usize) {
        let (rank, size) = (self.device.rank(), self.device.size());
        let bytes = 4 * count;
        self.fill(count, 7);
        let from = self.at + 4 * LARGE as u64 / 2;
        let (to_rank, from_rank) = ((rank + 1) % size, (rank + size - 1) % size);
        // SAFETY: as in `enqueue`; the halves do not overlap.
        unsafe {
            self.device.enqueue_send_recv(&self.stream, Some((self.at, bytes, to_rank)), Some((from, bytes, from_rank)))
        }
        .unwrap();
        self.device.synchronize().unwrap();
        self.device.context().bind_to_thread().unwrap();
        let mut got = vec![0i32; count];
        // SAFETY: as in `expect`.
        unsafe { result::memcpy_dtoh_sync(&mut got, from) }.unwrap();
        assert!(got.iter().all(|&x| x == 7 * (from_rank as i32 + 1)), "rank {rank}: {:?}", &got[..4]);
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        self.device.context().bind_to_thread().unwrap();
        // SAFETY: of malloc_sync, freed once; calls were waited for.
        unsafe { result::free_sync(self.at) }.unwrap();
    }
}

/// The body of the tests with threads and processes; `mode`: of captures.
fn grows(comm: &Comm, context: &Arc<CudaContext>, mode: sys::CUstreamCaptureMode) {
    let one = Rank::new(comm, context);
    let at_first = one.device.window_bytes();
    assert!(at_first <= MOST_AT_FIRST, "{at_first} bytes");
    for factor in 1..4 {
        one.all_reduce(SMALL, factor);
    }
    assert_eq!(one.device.window_bytes(), at_first, "small calls need no more");
    for factor in 1..4 {
        one.all_reduce(LARGE, factor);
        one.all_reduce(SMALL, factor);
    }
    let grown = one.device.window_bytes();
    assert!(grown > at_first + (1 << 20), "{at_first} bytes, then {grown}");
    one.in_a_ring(LARGE / 2);
    assert_eq!(one.device.window_bytes(), grown, "it grows once");

    // Beside it: a message first.
    let two = Rank::new(comm, context);
    two.all_reduce(SMALL, 5);
    assert_eq!(two.device.window_bytes(), at_first);
    two.in_a_ring(SHORT);
    assert_eq!(two.device.window_bytes(), at_first, "short messages need no more");
    two.in_a_ring(LONG);
    assert_eq!(two.device.window_bytes(), grown);
    two.all_reduce(LARGE, 6);
    one.all_reduce(LARGE, 7);

    // While a stream is captured.
    let three = Rank::new(comm, context);
    three.all_reduce(SMALL, 8);
    assert_eq!(three.device.window_bytes(), at_first);
    let stream = three.stream.cu_stream();
    context.bind_to_thread().unwrap();
    // SAFETY: the stream and the memory outlive the graph.
    let (graph, executable) = unsafe {
        result::stream::begin_capture(stream, mode).unwrap();
        three.enqueue(&three.sum(LARGE));
        three.enqueue(&three.sum(SMALL));
        let graph = result::stream::end_capture(stream).unwrap();
        let mut executable = std::ptr::null_mut();
        sys::cuGraphInstantiateWithFlags(&mut executable, graph, 0).result().unwrap();
        (graph, executable)
    };
    assert_eq!(three.device.window_bytes(), grown);
    for factor in 1..4 {
        three.fill(LARGE, factor);
        comm.barrier().unwrap();
        // SAFETY: instantiated above.
        unsafe { sys::cuGraphLaunch(executable, stream) }.result().unwrap();
        three.expect(SMALL, three.total(factor) * three.device.size() as i32);
        comm.barrier().unwrap();
    }
    // SAFETY: nothing of them runs any more.
    unsafe {
        sys::cuGraphExecDestroy(executable).result().unwrap();
        sys::cuGraphDestroy(graph).result().unwrap();
    }
    three.all_reduce(LARGE, 9);
}

/// With a small limit everything still works, in fewer bytes.
fn stays_below(comm: &Comm, context: &Arc<CudaContext>, limit: usize) {
    let rank = Rank::new(comm, context);
    rank.all_reduce(LARGE, 1);
    rank.in_a_ring(LARGE / 2);
    rank.all_reduce(SMALL, 2);
    let bytes = rank.device.window_bytes();
    assert!(bytes <= limit, "{bytes} bytes");
}

const LIMIT: usize = 16 << 20;

fn config(patience: u64) -> Config {
    let mut config = Config::default();
    config.timeout = Duration::from_secs(patience);
    config
}

#[test]
fn ranks_as_threads() {
    let Some(contexts) = contexts() else { return };
    in_threads(&contexts, config(20), |comm, context| {
        grows(&comm, context, sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
        comm.barrier().unwrap();
    });
    let mut limited = config(20);
    limited.cuda_memory = LIMIT;
    in_threads(&contexts, limited, |comm, context| {
        stays_below(&comm, context, LIMIT);
        comm.barrier().unwrap();
    });
}

/// With four blocks two carry each message: those in lines in several pieces, after longer and shorter ones.
#[test]
fn few_blocks_carry_messages_in_several_pieces() {
    let Some(contexts) = contexts() else { return };
    let mut few = config(20);
    few.cuda_blocks = 4;
    in_threads(&contexts, few, |comm, context| {
        let rank = Rank::new(&comm, context);
        for count in [SHORT, 1, 3000, LONG, 1025, SHORT, 50_000, 5000].repeat(3) {
            rank.in_a_ring(count);
        }
        comm.barrier().unwrap();
    });
}

#[test]
fn ranks_as_processes() {
    let limit = LIMIT.to_string();
    let environments = [
        &[("TINYNCCL_TIMEOUT", "20"), ("TINYNCCL_CUDA_MEMORY", "0")][..],
        &[("TINYNCCL_TIMEOUT", "20"), ("TINYNCCL_CUDA_MEMORY", &limit)],
    ];
    in_processes("growing::ranks_as_processes", &environments, |comm, context| {
        match comm.config().cuda_memory {
            0 => grows(comm, context, sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL),
            limit => stays_below(comm, context, limit),
        }
        comm.barrier().unwrap();
    });
}

/// Each rank's first larger call waits for the others: one thread prepares all of them first.
#[test]
fn ranks_of_one_thread() {
    let Some(contexts) = contexts() else { return };
    let made = in_threads(&contexts, config(20), |comm, context| (Rank::new(&comm, context), comm));
    let (ranks, comms): (Vec<Rank>, Vec<Comm>) = made.into_iter().unzip();
    let at_first = ranks[0].device.window_bytes();
    // Messages around the ring, then a collective.
    let ring = |rank: &Rank| {
        let (own, size) = (rank.device.rank(), rank.device.size());
        let half = (rank.at + 4 * LARGE as u64 / 2) as *mut u8;
        [
            RawCall::new(Call::send(DType::I32, (own + 1) % size, LONG), rank.at as *const u8, std::ptr::null_mut()),
            RawCall::new(Call::recv(DType::I32, (own + size - 1) % size, LONG), std::ptr::null(), half),
        ]
    };
    for rank in &ranks {
        rank.fill(LARGE, 1);
        rank.device.prepare(&ring(rank)).unwrap();
    }
    for rank in &ranks {
        // SAFETY: memory of the rank; waited for below.
        unsafe { rank.device.enqueue_group(&rank.stream, &ring(rank)) }.unwrap();
    }
    for rank in &ranks {
        rank.device.prepare(&[rank.sum(LARGE)]).unwrap();
    }
    for rank in &ranks {
        rank.enqueue(&rank.sum(SMALL));
        rank.enqueue(&rank.sum(LARGE));
    }
    for rank in &ranks {
        let size = ranks.len() as i32;
        rank.expect(SMALL, rank.total(1) * size);
        assert!(rank.device.window_bytes() > at_first);
    }
    // The communicators wait for each other when they are dropped.
    std::thread::scope(|scope| {
        for (rank, comm) in ranks.into_iter().zip(comms) {
            scope.spawn(|| {
                drop(rank);
                drop(comm);
            });
        }
    });
}

#[test]
fn a_rank_that_does_not_make_the_call_is_named() {
    let Some(contexts) = contexts() else { return };
    let last = contexts.len() - 1;
    let errors = in_threads(&contexts, config(3), |comm, context| {
        let rank = Rank::new(&comm, context);
        if rank.device.rank() == last {
            // It is notified of the failure.
            return loop {
                if let Err(error) = rank.device.check() {
                    break error;
                }
                std::thread::yield_now();
            };
        }
        // SAFETY: it must not come to a launch.
        unsafe { rank.device.enqueue(&rank.stream, &rank.sum(LARGE)) }.unwrap_err()
    });
    let named = |error: &Error| matches!(error, Error::Timeout { missing, .. } if *missing == [last]);
    assert!(errors.iter().any(named), "{errors:?}");
    // The others are notified of it.
    for error in errors {
        assert!(error.to_string().contains("did not offer the memory"), "{error}");
    }
}

#[test]
fn an_abort_ends_the_wait_for_the_others() {
    let Some(contexts) = contexts() else { return };
    let made = in_threads(&contexts, config(20), |comm, context| (Rank::new(&comm, context), comm));
    let (began, begins) = channel();
    std::thread::scope(|scope| {
        let (rank, _) = &made[0];
        let device = &rank.device;
        let waiter = scope.spawn(move || {
            began.send(()).unwrap();
            // SAFETY: it must not come to a launch.
            unsafe { rank.device.enqueue(&rank.stream, &rank.sum(LARGE)) }.unwrap_err()
        });
        begins.recv().unwrap();
        device.abort();
        let error = waiter.join().unwrap();
        assert!(matches!(error, Error::Aborted { .. }), "{error}");
    });
    drop(made);
}
