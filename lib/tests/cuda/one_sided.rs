//! Copies into other ranks' buffers, and signals. Without two GPUs every test says that it is skipped.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use cudarc::driver::{CudaContext, CudaStream, result, sys};
use tinynccl::cuda::{DeviceComm, Path, Registration, Signals};
use tinynccl::{Comm, Config, Error};

use super::ranks::{contexts, in_processes, in_threads};

/// Elements that a rank writes to each other one.
const COUNT: usize = 100_003;

/// Memory that frees itself and counts that.
struct Memory {
    context: Arc<CudaContext>,
    at: u64,
    freed: Arc<AtomicUsize>,
}

impl Memory {
    fn new(context: &Arc<CudaContext>, elements: usize, freed: &Arc<AtomicUsize>) -> Memory {
        context.bind_to_thread().unwrap();
        // SAFETY: allocates; freed by `drop`.
        let at = unsafe { result::malloc_sync(4 * elements) }.unwrap();
        Memory { context: context.clone(), at, freed: freed.clone() }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.context.bind_to_thread().unwrap();
        // SAFETY: of malloc_sync, freed once.
        unsafe { result::free_sync(self.at) }.unwrap();
        self.freed.fetch_add(1, Ordering::Relaxed);
    }
}

fn write(at: u64, data: &[u32]) {
    // SAFETY: memory of at least `data.len()` elements.
    unsafe { result::memcpy_htod_sync(at, data) }.unwrap();
    // SAFETY: the default stream: the copy may be from pageable memory.
    unsafe { result::stream::synchronize(std::ptr::null_mut()) }.unwrap();
}

fn read(at: u64, elements: usize) -> Vec<u32> {
    let mut data = vec![0; elements];
    // SAFETY: memory of at least `elements` elements.
    unsafe { result::memcpy_dtoh_sync(&mut data, at) }.unwrap();
    data
}

fn value(from: usize, to: usize, round: usize, i: usize) -> u32 {
    (((from * 8 + to) * 64 + round) * COUNT + i) as u32
}

/// One rank's memory: a source per rank, and a window with a region per rank.
struct Sides<'a> {
    device: &'a DeviceComm,
    stream: &'a Arc<CudaStream>,
    signals: &'a Signals,
    window: &'a Registration,
    source: u64,
    own: u64,
}

impl Sides<'_> {
    fn fill(&self, round: usize) {
        let (rank, n) = (self.device.rank(), self.device.size());
        let data: Vec<u32> = (0..n * COUNT).map(|i| value(rank, i / COUNT, round, i % COUNT)).collect();
        write(self.source, &data);
    }

    /// To every rank, ourselves too: what is for it, behind it a signal; then waits for all.
    fn exchange(&self) {
        let (rank, n) = (self.device.rank(), self.device.size());
        for peer in 0..n {
            let from = self.source + (4 * peer * COUNT) as u64;
            // SAFETY: the caller's memory; the others keep their windows until all have waited.
            unsafe {
                self.device.put(self.stream, from, 4 * COUNT, self.window, peer, 4 * rank * COUNT).unwrap();
                self.device.signal(self.stream, self.signals, peer).unwrap();
            }
        }
        // In two waits: the second one is of the last rank alone.
        let others: Vec<(usize, u32)> = (0..n - 1).map(|peer| (peer, 1)).collect();
        // SAFETY: as above.
        unsafe {
            self.device.wait_signals(self.stream, self.signals, &others).unwrap();
            self.device.wait_signals(self.stream, self.signals, &[(n - 1, 1)]).unwrap();
        }
    }

    fn check(&self, round: usize) {
        let (rank, n) = (self.device.rank(), self.device.size());
        self.device.context().synchronize().unwrap();
        self.device.check().unwrap();
        let got = read(self.own, n * COUNT);
        let wrong = (0..n * COUNT).find(|&i| got[i] != value(i / COUNT, rank, round, i % COUNT));
        assert_eq!(wrong, None, "rank {rank}, round {round}");
    }
}

fn with_device(comm: &Comm, context: &Arc<CudaContext>) {
    let device = DeviceComm::new(comm, context).unwrap();
    if device.path() == Path::Hosted {
        let error = device.signals().unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }), "{error}");
        println!("SKIPPED one-sided messages, rank {}: {error}", comm.rank());
        return;
    }
    let (stream, n) = (context.new_stream().unwrap(), comm.size());
    let freed = Arc::new(AtomicUsize::new(0));
    let (source, memory) = (Memory::new(context, n * COUNT, &freed), Memory::new(context, n * COUNT, &freed));
    let own = memory.at;
    // SAFETY: the memory lives as long as its owner.
    let window = unsafe { device.register_owned(own, 4 * n * COUNT, memory) }.unwrap();
    assert!(window.is_registered());
    let signals = device.signals().unwrap();
    let sides = Sides { device: &device, stream: &stream, signals: &signals, window: &window, source: source.at, own };
    for round in 0..20 {
        sides.fill(round);
        sides.exchange();
        sides.check(round);
        // No rank writes the next round before all have read this one.
        comm.barrier().unwrap();
    }
    if device.path() == Path::Peer {
        replays(comm, &sides);
    }
    what_cannot_be(&sides);
    comm.barrier().unwrap();
    drop(window);
    assert_eq!(freed.load(Ordering::Relaxed), 0, "others may still have it mapped");
    device.release().unwrap();
    assert_eq!(freed.load(Ordering::Relaxed), 1);
    nobody_signals(comm, &device, &stream, &signals);
}

fn replays(comm: &Comm, sides: &Sides<'_>) {
    let stream = sides.stream.cu_stream();
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    // SAFETY: a stream of ours; what is captured lives until the graph is destroyed.
    let (graph, executable) = unsafe {
        result::stream::begin_capture(stream, mode).unwrap();
        sides.exchange();
        let graph = result::stream::end_capture(stream).unwrap();
        let mut executable = std::ptr::null_mut();
        sys::cuGraphInstantiateWithFlags(&mut executable, graph, 0).result().unwrap();
        (graph, executable)
    };
    for round in 20..30 {
        sides.fill(round);
        // SAFETY: see above.
        unsafe { sys::cuGraphLaunch(executable, stream) }.result().unwrap();
        sides.check(round);
        comm.barrier().unwrap();
    }
    // SAFETY: nothing of it runs any more.
    unsafe {
        sys::cuGraphExecDestroy(executable).result().unwrap();
        sys::cuGraphDestroy(graph).result().unwrap();
    }
}

fn what_cannot_be(sides: &Sides<'_>) {
    let n = sides.device.size();
    let put = |bytes, peer, offset| {
        // SAFETY: refused.
        unsafe { sides.device.put(sides.stream, sides.source, bytes, sides.window, peer, offset) }
            .unwrap_err()
            .to_string()
    };
    assert!(put(4, n, 0).contains(&format!("peer is {n}")), "{}", put(4, n, 0));
    assert!(put(8, 0, 4 * n * COUNT - 4).contains("reach beyond the buffer of rank 0"));
    assert!(put(8, 0, usize::MAX).contains("reach beyond the buffer of rank 0"));
    // SAFETY: refused.
    let error = unsafe { sides.device.wait_signals(sides.stream, sides.signals, &[(0, u32::MAX)]) };
    assert!(matches!(error, Err(Error::InvalidArgument { .. })));
}

/// A wait for a signal that does not come ends at the deadline, and names the rank.
fn nobody_signals(comm: &Comm, device: &DeviceComm, stream: &Arc<CudaStream>, signals: &Signals) {
    if comm.rank() != 0 {
        // The others learn of it. They wait in no call, whose deadline could come first.
        let begin = Instant::now();
        while device.check().is_ok() {
            assert!(begin.elapsed() < Duration::from_secs(60), "rank {}: rank 0's failure is not known", comm.rank());
            std::thread::yield_now();
        }
        return;
    }
    // SAFETY: the stream is of this device; `signals` is kept.
    unsafe { device.wait_signals(stream, signals, &[(1, 3)]) }.unwrap();
    device.context().synchronize().unwrap();
    let error = device.check().unwrap_err();
    assert!(matches!(&error, Error::Timeout { missing, .. } if missing[..] == [1]), "{error}");
    assert!(error.to_string().contains("waiting for signals: rank 0 made no progress"), "{error}");
}

/// Short: one wait is to reach its end.
fn config() -> Config {
    let mut config = Config::default();
    config.timeout = Duration::from_secs(10);
    config
}

#[test]
fn ranks_as_threads() {
    let Some(contexts) = contexts() else { return };
    in_threads(&contexts, config(), |comm, context| with_device(&comm, context));
}

#[test]
fn ranks_as_processes() {
    in_processes("one_sided::ranks_as_processes", &[&[("TINYNCCL_TIMEOUT", "10")]], with_device);
}
