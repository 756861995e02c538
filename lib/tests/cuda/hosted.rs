//! Collectives on GPUs through the hosts' memory, between processes: over TCP and over shared memory, with more ranks
//! than kernels join, and with chunks so small that calls have many. All ranks share the first GPU. What does not need
//! processes is in `cuda.rs`, run with `TINYNCCL_CUDA_PATH=hosted`.
//!
//! This test binary runs itself again, once per rank. Without a GPU every test says that it is skipped.

use std::io::Write;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::sys::CUstreamCaptureMode;
use cudarc::driver::{CudaContext, CudaStream, DevicePtr};
use tinynccl::bootstrap::Server;
use tinynccl::comm::RawCall;
use tinynccl::config::CudaPath;
use tinynccl::cuda::{self, DeviceComm, Path};
use tinynccl::wire::Collective;
use tinynccl::{Call, Comm, Config, DType, Error, ReduceOp};

use crate::ranks::COLLECTIVES;

const RANK: &str = "TINYNCCL_TEST_RANK";
const WORLD: &str = "TINYNCCL_TEST_WORLD";
const ID: &str = "TINYNCCL_TEST_ID";
const CASE: &str = "TINYNCCL_TEST_CASE";
/// Set where no rank makes a call before the one before is over on all.
pub(crate) const LOCKSTEP: &str = "TINYNCCL_TEST_LOCKSTEP";

pub(crate) fn gpu() -> Option<Arc<CudaContext>> {
    match cuda::device_count() {
        Ok(1..) => Some(CudaContext::new(0).unwrap()),
        other => {
            // Not by a macro: the test harness would keep it to itself.
            let _ = writeln!(std::io::stderr(), "SKIPPED: no GPU: {other:?}");
            None
        }
    }
}

/// Runs a case on `world` processes, with settings.
fn run(case: &str, world: usize, settings: &[(&str, &str)]) {
    if gpu().is_none() {
        return;
    }
    let server = Server::start("127.0.0.1:0".parse().unwrap(), world, &Config::default()).expect("a rendezvous");
    let id = server.unique_id().to_string();
    let start = |rank: usize| {
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "hosted::a_rank", "--nocapture", "--test-threads=1"])
            .envs([(RANK, rank.to_string()), (WORLD, world.to_string()), (ID, id.clone()), (CASE, case.to_owned())])
            .envs([("TINYNCCL_CUDA_PATH", "hosted"), ("TINYNCCL_TUNE", "off"), ("TINYNCCL_TIMEOUT", "30")])
            .envs(settings.iter().copied())
            .spawn()
            .unwrap()
    };
    let ranks: Vec<_> = (0..world).map(start).collect();
    let failed = ranks.into_iter().map(|mut rank| rank.wait().unwrap().success()).filter(|&well| !well).count();
    assert_eq!(failed, 0, "{case} of {world} ranks with {settings:?}: {failed} ranks failed; see their output");
}

/// One rank among processes. It does nothing unless it is started for that.
#[test]
fn a_rank() {
    let variable = |name| std::env::var(name).ok();
    let (Some(rank), Some(world), Some(id)) = (variable(RANK), variable(WORLD), variable(ID)) else { return };
    let (rank, world): (usize, usize) = (rank.parse().unwrap(), world.parse().unwrap());
    let comm = Comm::init(&id.parse().unwrap(), rank, world, Config::from_env().unwrap()).unwrap();
    let context = CudaContext::new(0).unwrap();
    let device = DeviceComm::new(&comm, &context).unwrap();
    assert_eq!(device.path(), Path::Hosted);
    assert!(device.path_reason().contains("TINYNCCL_CUDA_PATH"), "{}", device.path_reason());
    let stream = context.new_stream().unwrap();
    match variable(CASE).as_deref() {
        Some("table") => table(&comm, &device, &stream),
        Some("same-bits") => same_bits(&comm, &device, &stream),
        Some("disagree") => disagree(&device, &stream),
        other => panic!("no case {other:?}"),
    }
    let kind = match variable("TINYNCCL_TCP_RAILS") {
        Some(_) => Some("rails"),
        None => variable("TINYNCCL_TRANSPORT").filter(|transport| transport == "verbs").map(|_| "verbs"),
    };
    if let Some(kind) = kind {
        // The device's communicators are split from this one, and open their links as it does.
        comm.all_reduce_in_place(&mut [1.0f32], ReduceOp::Sum).unwrap();
        let links = comm.census().links;
        assert!(matches!(links[..], [(opened, 1..)] if opened == kind), "{links:?}");
    }
}

/// Element `i` of rank `rank`'s input.
pub(crate) fn value(rank: usize, i: usize) -> i32 {
    (i as i32).wrapping_mul(31) ^ (rank as i32 * 1_000_003)
}

/// Every collective, at counts of no, one and many chunks, against what it must give; twenty of them in flight at a
/// time.
pub(crate) fn table(comm: &Comm, device: &DeviceComm, stream: &Arc<CudaStream>) {
    let (rank, n) = (comm.rank(), comm.size());
    for count in [0, 1, 5, 1000, 65_537, 700_001] {
        let mut under_way = Vec::new();
        for in_place in [false, true] {
            for collective in COLLECTIVES {
                let (from, to) = match collective {
                    Collective::AllGather => (1, n),
                    Collective::ReduceScatter => (n, 1),
                    Collective::AllToAll => (n, n),
                    _ => (1, 1),
                };
                let input: Vec<i32> = (0..from * count).map(|i| value(rank, i)).collect();
                let mut output = vec![-7; from.max(to) * count + 1];
                let skip = |segments: usize| if segments < from.max(to) { rank * count } else { 0 };
                if in_place {
                    output[skip(from)..][..input.len()].copy_from_slice(&input);
                }
                let (source, target) = (stream.clone_htod(&input).unwrap(), stream.clone_htod(&output).unwrap());
                let at = target.device_ptr(stream).0;
                let at = |segments: usize| at + 4 * if in_place { skip(segments) } else { 0 } as u64;
                let place = if in_place { at(from) } else { source.device_ptr(stream).0 };
                let root = count % n;
                let (dtype, op) = (DType::I32, ReduceOp::Sum);
                let call = RawCall::on_device(Call::new(collective, dtype, op, root, count), place, at(to));
                // SAFETY: the buffers have the lengths of the collective and live until the streams are waited for.
                unsafe { device.enqueue(stream, &call) }.unwrap();
                if std::env::var_os(LOCKSTEP).is_some() {
                    device.synchronize().unwrap();
                    comm.barrier().unwrap();
                }
                let skip = if in_place { skip(to) } else { 0 };
                under_way.push((collective, in_place, root, skip..skip + to * count, source, target));
            }
        }
        device.synchronize().unwrap();
        for (collective, in_place, root, range, _, target) in &under_way {
            let sum = |i: usize| (0..n).fold(0i32, |sum, rank| sum.wrapping_add(value(rank, i)));
            let got = stream.clone_dtoh(target).unwrap();
            let what = format!("{collective} of {count}, in place {in_place}, rank {rank} of {n}");
            assert_eq!(got.last(), Some(&-7), "{what}: wrote behind its output");
            for (i, &got) in got[range.clone()].iter().enumerate() {
                let expected = match collective {
                    Collective::AllReduce => sum(i),
                    Collective::ReduceScatter => sum(rank * count + i),
                    Collective::Reduce if rank == *root => sum(i),
                    Collective::Reduce if *in_place => value(rank, i),
                    Collective::Reduce => -7,
                    Collective::Broadcast => value(*root, i),
                    Collective::AllGather => value(i / count, i % count),
                    _ => value(i / count, rank * count + i % count),
                };
                assert_eq!(got, expected, "{what}, element {i}");
            }
        }
    }
    // Messages: to the next rank, of another length than from the one before.
    for round in [0, 1, 40_000, 300_000] {
        let count = |rank: usize| round * (rank + 1);
        let (to, from) = ((rank + 1) % n, (rank + n - 1) % n);
        let ours: Vec<i32> = (0..count(rank)).map(|i| value(rank, i)).collect();
        let input = stream.clone_htod(&ours).unwrap();
        let mut output = stream.alloc_zeros::<i32>(count(from)).unwrap();
        device.send_recv(stream, &input, to, &mut output, from).unwrap();
        device.synchronize().unwrap();
        let got = stream.clone_dtoh(&output).unwrap();
        assert!(got.iter().enumerate().all(|(i, &x)| x == value(from, i)), "{round} from {from}");
    }
}

/// Sums that depend on their order are the same bits on all ranks.
pub(crate) fn same_bits(comm: &Comm, device: &DeviceComm, stream: &Arc<CudaStream>) {
    for count in [3usize, 5000, 1_000_003] {
        let input: Vec<f32> = (0..count).map(|i| 1.0 / (1 + i % 977 + 13 * comm.rank()) as f32).collect();
        let mut buffer = stream.clone_htod(&input).unwrap();
        device.all_reduce_in_place(stream, &mut buffer, ReduceOp::Avg).unwrap();
        device.synchronize().unwrap();
        let bits: Vec<u32> = stream.clone_dtoh(&buffer).unwrap().iter().map(|x| x.to_bits()).collect();
        let mut first = bits.clone();
        comm.broadcast_in_place(&mut first, 0).unwrap();
        assert!(first == bits, "all_reduce of {count} f32: rank {} has other bits than rank 0", comm.rank());
        // The sum of these would overflow. Equal values of up to three ranks have one sum in any order.
        let (large, n) = (f32::MAX / 2.0, comm.size());
        let average = (0..n).map(|_| large * (1.0 / n as f32)).reduce(|a, b| a + b).unwrap();
        let mut buffer = stream.clone_htod(&vec![large; count]).unwrap();
        device.all_reduce_in_place(stream, &mut buffer, ReduceOp::Avg).unwrap();
        device.synchronize().unwrap();
        assert!(stream.clone_dtoh(&buffer).unwrap().iter().all(|&x| x == average), "the average of {count} f32");
    }
}

/// Calls whose first chunks are alike.
fn disagree(device: &DeviceComm, stream: &Arc<CudaStream>) {
    let len = (64 << 10) / 4 * if device.rank() == 0 { 20 } else { 30 };
    let mut buffer = stream.alloc_zeros::<f32>(len).unwrap();
    device.all_reduce_in_place(stream, &mut buffer, ReduceOp::Sum).unwrap();
    let error = device.synchronize().unwrap_err();
    let text = error.to_string();
    assert!(text.contains("count 327680") && text.contains("count 491520"), "{text}");
    stream.synchronize().unwrap();
    assert!(device.all_reduce_in_place(stream, &mut buffer, ReduceOp::Sum).is_err());
}

/// Chunks of 64 KiB: calls have hundreds.
const SMALL: (&str, &str) = ("TINYNCCL_CUDA_CHUNK", "64K");

#[test]
fn over_tcp() {
    run("table", 2, &[("TINYNCCL_TRANSPORT", "tcp"), SMALL]);
    run("table", 3, &[("TINYNCCL_TRANSPORT", "tcp"), ("TINYNCCL_CUDA_THREADS", "1")]);
}

#[test]
fn over_rails() {
    run("table", 2, &[("TINYNCCL_TRANSPORT", "tcp"), ("TINYNCCL_TCP_RAILS", "1"), SMALL]);
    run("table", 3, &[("TINYNCCL_TRANSPORT", "tcp"), ("TINYNCCL_TCP_RAILS", "1")]);
}

/// By the RDMA device in user space.
#[test]
fn over_rdma() {
    let card = [("TINYNCCL_TRANSPORT", "verbs"), ("TINYROCE_DEVICES", "lo")];
    run("table", 2, &[card[0], card[1], SMALL]);
    run("table", 3, &[card[0], card[1], ("TINYNCCL_CUDA_THREADS", "1")]);
    run("same-bits", 3, &card);
}

#[test]
fn over_shared_memory() {
    run("table", 2, &[("TINYNCCL_CUDA_THREADS", "3"), SMALL]);
    run("table", 4, &[]);
}

#[test]
fn with_more_ranks_than_kernels_join() {
    run("table", 9, &[SMALL]);
}

#[test]
fn all_ranks_have_the_same_bits() {
    for transport in ["tcp", "shm"] {
        run("same-bits", 3, &[("TINYNCCL_TRANSPORT", transport), SMALL]);
    }
}

#[test]
fn ranks_that_disagree_about_the_length_find_out_in_the_first_chunk() {
    run("disagree", 2, &[SMALL]);
}

/// More ranks than kernels join go through the host; of one process on one GPU, more than half of its queues are
/// refused there.
#[test]
fn too_many_ranks_for_kernels_or_queues() {
    let Some(context) = gpu() else { return };
    let mut config = Config::default();
    (config.timeout, config.cuda_threads) = (Duration::from_secs(20), 1);
    let error = DeviceComm::local(&vec![context.clone(); 9], &config).unwrap_err().to_string();
    assert!(error.contains("kernels join 8") && error.contains("expected at most 4 ranks"), "{error}");
    config.cuda_path = CudaPath::Peer;
    let error = DeviceComm::local(&vec![context.clone(); 9], &config).unwrap_err().to_string();
    assert!(error.contains("9 ranks") && error.contains("TINYNCCL_CUDA_PATH"), "{error}");
    config.cuda_path = CudaPath::Hosted;
    let device = DeviceComm::local(&vec![context; 4], &config).unwrap();
    assert!(device.iter().all(|rank| rank.path() == Path::Hosted));
}

#[test]
fn capture_is_refused() {
    let Some(context) = gpu() else { return };
    let mut config = Config::default();
    config.cuda_path = CudaPath::Hosted;
    let ranks = DeviceComm::local(&[context.clone(), context.clone()], &config).unwrap();
    let stream = context.new_stream().unwrap();
    let mut buffer = stream.alloc_zeros::<f32>(10).unwrap();
    stream.synchronize().unwrap();
    // SAFETY: used in one stream alone.
    unsafe { context.disable_event_tracking() };
    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    let error = ranks[0].all_reduce_in_place(&stream, &mut buffer, ReduceOp::Sum).unwrap_err();
    let _ = stream
        .end_capture(cudarc::driver::sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH);
    assert!(matches!(&error, Error::Unsupported { what, .. } if what.contains("the hosts' memory")), "{error}");
    ranks[0].check().unwrap();
}
