//! Wrong buffers, no memory, a path that does not work, replays after an error.

use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::{CudaContext, CudaStream, DevicePtr, result, sys};
use tinynccl::comm::RawCall;
use tinynccl::config::{CudaPath, PathCheck};
use tinynccl::cuda::{DeviceComm, Path};
use tinynccl::wire::Collective;
use tinynccl::{Call, Comm, Config, DType, Error, ReduceOp};

use super::{gpus, two_contexts};

fn config() -> Config {
    let mut config = Config::default();
    config.timeout = Duration::from_secs(20);
    config
}

/// Two ranks on the GPUs there are, with a stream each.
fn two(config: &Config) -> Option<Vec<(DeviceComm, Arc<CudaStream>)>> {
    let contexts = two_contexts()?;
    let comms = DeviceComm::local(&contexts, config).unwrap();
    Some(comms.into_iter().zip(&contexts).map(|(comm, context)| (comm, context.new_stream().unwrap())).collect())
}

fn call(count: usize, input: u64, output: u64) -> RawCall {
    RawCall::on_device(Call::new(Collective::AllReduce, DType::F32, ReduceOp::Sum, 0, count), input, output)
}

/// All ranks add up their number plus one.
fn still_work(ranks: &[(DeviceComm, Arc<CudaStream>)]) {
    let mut buffers: Vec<_> =
        ranks.iter().map(|(c, s)| s.clone_htod(&vec![1.0 + c.rank() as f32; 1000]).unwrap()).collect();
    for ((comm, stream), buffer) in ranks.iter().zip(&mut buffers) {
        comm.all_reduce_in_place(stream, buffer, ReduceOp::Sum).unwrap();
    }
    for ((comm, stream), buffer) in ranks.iter().zip(&buffers) {
        comm.synchronize().unwrap();
        assert!(stream.clone_dtoh(buffer).unwrap().iter().all(|&x| x == 3.0));
    }
}

/// Memory by an address, freed at the end.
struct Memory {
    context: Arc<CudaContext>,
    at: u64,
}

impl Memory {
    fn new(context: &Arc<CudaContext>, bytes: usize) -> Memory {
        context.bind_to_thread().unwrap();
        // SAFETY: freed once, by `drop`.
        Memory { context: context.clone(), at: unsafe { result::malloc_sync(bytes) }.unwrap() }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.context.bind_to_thread().unwrap();
        // SAFETY: of `new`; no kernel uses it any more.
        unsafe { result::free_sync(self.at) }.unwrap();
    }
}

#[test]
fn buffers_that_a_kernel_could_not_use_are_refused_and_named() {
    let Some(ranks) = two(&config()) else { return };
    let (comm, stream) = &ranks[0];
    let context = comm.context();
    let good = Memory::new(context, 1 << 20);
    let short = Memory::new(context, 4096);
    let freed = Memory::new(context, 64 << 20).at;
    let host = vec![0f32; 2000];
    let refused = |call: RawCall, words: &[&str]| {
        // SAFETY: it must not come to a launch: that is what is tested.
        let error = unsafe { comm.enqueue(stream, &call) }.unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
        println!("{error}");
        for word in words {
            assert!(error.to_string().contains(word), "no {word:?}: {error}");
        }
    };
    let address = |at: u64| format!("{at:#x}");
    let place = host.as_ptr() as u64;
    refused(
        call(1000, place, good.at),
        &["the input at", &address(place), "memory of the host", "4000 bytes", "GPU 0"],
    );
    refused(call(1000, good.at, place), &["the output at", &address(place), "memory of the host"]);
    refused(call(1000, good.at, freed), &["the output at", &address(freed), "freed, or never allocated"]);
    refused(call(1000, 4096, good.at), &["the input at 0x1000", "freed, or never allocated"]);
    refused(
        call(2000, short.at, good.at),
        &["the input at", "4096 bytes from the end of its allocation of 4096 bytes"],
    );
    refused(call(1000, short.at + 400, good.at), &["3696 bytes from the end of its allocation"]);
    refused(call(1000, good.at + 2, good.at + (1 << 19)), &["begins 2 bytes into an element of 4"]);
    refused(call(1000, good.at, good.at + 400), &["overlap"]);
    refused(call(usize::MAX / 2, good.at, good.at), &["more than memory holds"]);
    let gather = Call::of(Collective::AllGather).with_count(DType::F32, 1000);
    let gathered = RawCall::on_device(gather, good.at, short.at);
    refused(gathered, &["the output at", "expected 8000 bytes"]);
    // SAFETY: as above.
    let error = unsafe { comm.enqueue_send_recv(stream, Some((place, 100, 1)), None) }.unwrap_err().to_string();
    assert!(error.contains("the message sent at") && error.contains("memory of the host"), "{error}");
    // Nothing to send or receive is no call.
    // SAFETY: there are no buffers.
    unsafe { comm.enqueue_send_recv(stream, None, None) }.unwrap();
    still_work(&ranks);
}

#[test]
fn memory_of_another_gpu_is_refused_where_there_is_no_access() {
    let Some(contexts) = gpus(2) else { return };
    let mut config = config();
    config.cuda_path = Config::from_env().unwrap().cuda_path;
    let comms = DeviceComm::local(&[contexts[0].clone(), contexts[0].clone()], &config).unwrap();
    let stream = contexts[0].new_stream().unwrap();
    // Of a pool: access to that is granted pool by pool.
    let (other, ours) = (contexts[1].new_stream().unwrap(), stream.alloc_zeros::<f32>(1000).unwrap());
    let theirs = other.alloc_zeros::<f32>(1000).unwrap();
    other.synchronize().unwrap();
    let call = call(1000, theirs.device_ptr(&other).0, ours.device_ptr(&stream).0);
    // SAFETY: it must not come to a launch.
    let error = unsafe { comms[0].enqueue(&stream, &call) }.unwrap_err().to_string();
    println!("{error}");
    assert!(
        error.contains("the input at") && error.contains("memory of GPU 1, to which GPU 0 has no access"),
        "{error}"
    );
}

#[test]
fn page_locked_memory_is_taken() {
    let Some(ranks) = two(&config()) else { return };
    let count = 1000;
    let memory: Vec<*mut f32> = ranks
        .iter()
        .map(|(comm, _)| {
            comm.context().bind_to_thread().unwrap();
            // SAFETY: freed once, below.
            unsafe { result::malloc_host(4 * count, sys::CU_MEMHOSTALLOC_PORTABLE) }.unwrap().cast()
        })
        .collect();
    for ((comm, stream), &at) in ranks.iter().zip(&memory) {
        // SAFETY: as long as that; no kernel uses it yet.
        let values = unsafe { std::slice::from_raw_parts_mut(at, count) };
        values.fill(1.0 + comm.rank() as f32);
        // SAFETY: page-locked memory, alive until the kernel is through.
        unsafe { comm.enqueue(stream, &call(count, at as u64, at as u64)) }.unwrap();
    }
    for ((comm, _), &at) in ranks.iter().zip(&memory) {
        comm.synchronize().unwrap();
        // SAFETY: the kernel is through.
        assert!(unsafe { std::slice::from_raw_parts(at, count) }.iter().all(|&x| x == 3.0));
    }
    for at in memory {
        // SAFETY: of malloc_host, freed once.
        unsafe { result::free_host(at.cast()) }.unwrap();
    }
}

#[test]
fn a_window_that_does_not_fit_says_how_much_is_free_and_what_makes_it_smaller() {
    let Some(contexts) = gpus(1) else { return };
    contexts[0].bind_to_thread().unwrap();
    let mut taken = Vec::new();
    for part in [1usize << 34, 1 << 31, 1 << 28, 1 << 26] {
        while result::mem_get_info().unwrap().0 > part + (100 << 20) {
            // SAFETY: freed once, below.
            let Ok(at) = (unsafe { result::malloc_sync(part) }) else { break };
            taken.push(at);
        }
    }
    // Windows as they are by default would fit into what is left.
    let mut large = config();
    large.cuda_slot = 1 << 20;
    let made = DeviceComm::local(&[contexts[0].clone(), contexts[0].clone()], &large);
    for at in taken {
        // SAFETY: of malloc_sync, freed once.
        unsafe { result::free_sync(at) }.unwrap();
    }
    let error = made.unwrap_err().to_string();
    println!("{error}");
    for words in ["MiB of GPU 0 for a window", "MiB are free", "TINYNCCL_CUDA_BLOCKS", "CUDA_ERROR_OUT_OF_MEMORY"] {
        assert!(error.contains(words), "no {words:?}: {error}");
    }
    DeviceComm::local(&[contexts[0].clone(), contexts[0].clone()], &config()).unwrap();
}

#[test]
fn a_path_that_spoils_data_is_found_at_the_start_and_not_taken() {
    let Some(contexts) = two_contexts() else { return };
    let mut broken = config();
    broken.cuda_path_check = PathCheck::Fail;
    let mut peer = broken.clone();
    peer.cuda_path = CudaPath::Peer;
    let shared = [contexts[0].clone(), contexts[0].clone()];
    let error = DeviceComm::local(&shared, &peer).unwrap_err().to_string();
    println!("{error}");
    for words in [
        "writes of rank 1 (GPU 0, ",
        " into the memory of rank 0 (GPU 0, ",
        "expected 0x",
        "(2 pairs",
        "TINYNCCL_CUDA_PATH",
    ] {
        assert!(error.contains(words), "no {words:?}: {error}");
    }
    let ranks: Vec<_> = DeviceComm::local(&contexts, &broken)
        .unwrap()
        .into_iter()
        .zip(&contexts)
        .map(|(comm, context)| (comm, context.new_stream().unwrap()))
        .collect();
    for (comm, _) in &ranks {
        assert_eq!(comm.path(), Path::Hosted);
        assert!(comm.path_reason().contains("writes of rank 1 (GPU "), "{}", comm.path_reason());
    }
    still_work(&ranks);
    // Ranks with a common host communicator all take the other path.
    std::thread::scope(|scope| {
        for (comm, context) in Comm::threads(2, broken).unwrap().into_iter().zip(&contexts) {
            scope.spawn(move || {
                let device = DeviceComm::new(&comm, context).unwrap();
                assert_eq!(device.path(), Path::Hosted);
                let stream = context.new_stream().unwrap();
                let mut buffer = stream.clone_htod(&vec![1.0 + comm.rank() as f32; 1000]).unwrap();
                device.all_reduce_in_place(&stream, &mut buffer, ReduceOp::Sum).unwrap();
                device.synchronize().unwrap();
                assert!(stream.clone_dtoh(&buffer).unwrap().iter().all(|&x| x == 3.0));
            });
        }
    });
    let mut unchecked = config();
    unchecked.cuda_path_check = PathCheck::Off;
    for config in [config(), unchecked.clone(), config(), unchecked] {
        let begin = Instant::now();
        let ranks = DeviceComm::local(&contexts, &config).unwrap();
        println!("two ranks ready in {:.1?} (check {})", begin.elapsed(), config.cuda_path_check);
        assert_eq!(ranks[0].path(), Path::Peer);
    }
}

/// A replay passes no check of ours: its kernels must see for themselves that the communicator has failed.
#[test]
fn a_graph_that_is_replayed_after_an_error_ends_and_changes_nothing() {
    let mut config = config();
    config.timeout = Duration::from_millis(500);
    let Some(ranks) = two(&config) else { return };
    still_work(&ranks);
    let (comm, stream) = &ranks[0];
    for count in [1000, 4 << 20] {
        let memory = Memory::new(comm.context(), 4 * count);
        stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
        // SAFETY: the memory lives until the stream has been waited for.
        let captured = unsafe { comm.enqueue(stream, &call(count, memory.at, memory.at)) };
        let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        let graph = stream.end_capture(flags).unwrap();
        if count == 1000 {
            captured.unwrap();
            let graph = graph.unwrap();
            graph.launch().unwrap();
            let first = comm.synchronize().unwrap_err();
            assert!(matches!(&first, Error::Timeout { missing, .. } if missing == &[1]), "{first}");
            for _ in 0..3 {
                graph.launch().unwrap();
                stream.synchronize().unwrap();
                assert_eq!(comm.check().unwrap_err().to_string(), first.to_string());
            }
        } else {
            assert!(matches!(captured, Err(Error::Timeout { .. })), "a failed communicator takes no further call");
        }
        stream.synchronize().unwrap();
    }
}

#[test]
fn a_gpu_that_is_not_there_is_named() {
    if gpus(1).is_none() {
        return;
    }
    let error = tinynccl::cuda::open(99).unwrap_err().to_string();
    assert!(error.contains("there is no GPU 99: the driver sees"), "{error}");
    assert_eq!(tinynccl::cuda::open(0).unwrap().ordinal(), 0);
}

/// Its peers have given up by then, and wrote over what it had not read: it must not take that for a result.
#[test]
fn a_rank_that_comes_too_late_has_an_error_or_the_right_result() {
    let mut config = config();
    config.timeout = Duration::from_millis(300);
    for (collective, count) in [
        (Collective::AllReduce, 500),
        (Collective::AllReduce, 8 << 20),
        (Collective::AllGather, 4 << 20),
        (Collective::Broadcast, 8 << 20),
        (Collective::SendRecv, 500),
        (Collective::SendRecv, 2000),
        (Collective::SendRecv, 8 << 20),
    ] {
        let Some(ranks) = two(&config) else { return };
        let n = ranks.len();
        still_work(&ranks);
        let memory: Vec<_> = ranks
            .iter()
            .map(|(comm, stream)| {
                let values: Vec<f32> = (0..count).map(|i| (i % 1000 + comm.rank()) as f32).collect();
                (stream.clone_htod(&values).unwrap(), stream.alloc_zeros::<f32>(n * count).unwrap())
            })
            .collect();
        let begin = |rank: usize| {
            let (comm, stream) = &ranks[rank];
            let (input, output) = (memory[rank].0.device_ptr(stream).0, memory[rank].1.device_ptr(stream).0);
            // SAFETY: the buffers are long enough and live until the streams have been waited for.
            unsafe {
                match (collective, rank) {
                    (Collective::SendRecv, 0) => comm.enqueue_send_recv(stream, Some((input, 4 * count, 1)), None),
                    (Collective::SendRecv, _) => comm.enqueue_send_recv(stream, None, Some((output, 4 * count, 0))),
                    _ => {
                        let call = Call::new(collective, DType::F32, ReduceOp::Sum, 0, count);
                        comm.enqueue(stream, &RawCall::on_device(call, input, output))
                    }
                }
            }
            .and_then(|()| comm.synchronize())
        };
        let first = begin(0);
        let second = begin(1);
        println!("{collective} of {count}: first {:?}, second {:?}", first.map_err(|e| e.to_string()), second.is_ok());
        if second.is_ok() {
            let got = ranks[1].1.clone_dtoh(&memory[1].1).unwrap();
            let right = |i: usize| match collective {
                Collective::AllReduce => (2 * (i % 1000) + 1) as f32,
                Collective::AllGather => (i % count % 1000 + i / count) as f32,
                _ => (i % 1000) as f32,
            };
            let length = if collective == Collective::AllGather { n * count } else { count };
            assert!((0..length).all(|i| got[i] == right(i)), "{collective} of {count}");
        }
    }
}
