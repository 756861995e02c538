//! Collectives on GPUs over several hosts: inside each host, and over lanes between them. `TINYNCCL_HOST_ID` makes
//! hosts of the processes of one machine. Without kernels (over the stand-in for CUDA's driver) the path inside a host
//! is the one through its memory. On a machine with one GPU, kernels join ranks that are threads of a process.
//!
//! This test binary runs itself again, once per rank. Without a GPU every test says that it is skipped.

use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;

use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use cudarc::driver::{CudaContext, CudaStream, DevicePtr, DeviceRepr};
use program_kit::again::{self, Process, hear, say};
use program_kit::nodes::{cable, makes_nodes, node, run as run_in, sent_in};
use tinynccl::bootstrap::Server;
use tinynccl::comm::{RawCall, packed};
use tinynccl::cuda::{self, DeviceComm, Path};
use tinynccl::wire::Collective;
use tinynccl::{Call, Comm, Config, DType, Element, Error, ReduceOp};

use crate::hosted::{LOCKSTEP, gpu, same_bits, table, value};

const RANK: &str = "TINYNCCL_TEST_RANK";
const WORLD: &str = "TINYNCCL_TEST_WORLD";
const ID: &str = "TINYNCCL_TEST_ID";
const CASE: &str = "TINYNCCL_TEST_CASE";
/// Set where all ranks have the first GPU.
const SHARE: &str = "TINYNCCL_TEST_SHARE";
/// Ranks that a process runs, each by a thread.
const THREADS: &str = "TINYNCCL_TEST_THREADS";
const HOST: &str = "TINYNCCL_HOST_ID";
const PATH: &str = "TINYNCCL_CUDA_PATH";

/// Chunks of 64 KiB: calls have hundreds.
const SMALL: (&str, &str) = ("TINYNCCL_CUDA_CHUNK", "64K");

/// Starts a case on hosts with so many ranks each; gives the status of each process. The ranks of the first `together`
/// hosts are threads of a process for each host.
fn start(case: &str, hosts: &[usize], settings: &[(&str, &str)], together: usize) -> Vec<ExitStatus> {
    let world = hosts.iter().sum();
    let server = Server::start("127.0.0.1:0".parse().unwrap(), world, &Config::default()).expect("a rendezvous");
    let id = server.unique_id().to_string();
    let first = |host: usize| hosts[..host].iter().sum::<usize>();
    // The first rank of each process, their number, and their host.
    let processes: Vec<(usize, usize, usize)> = (0..hosts.len())
        .flat_map(|host| match host < together {
            true => vec![(first(host), hosts[host], host)],
            false => (0..hosts[host]).map(|rank| (first(host) + rank, 1, host)).collect(),
        })
        .collect();
    let start = |&(rank, threads, host): &(usize, usize, usize)| -> Child {
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "hosts::a_rank", "--nocapture", "--test-threads=1"])
            .envs([(RANK, rank.to_string()), (WORLD, world.to_string()), (ID, id.clone()), (CASE, case.to_owned())])
            .envs([(HOST, format!("host {host}")), (THREADS, threads.to_string())])
            // For the streams of several ranks.
            .env("CUDA_DEVICE_MAX_CONNECTIONS", "32")
            .envs([
                (PATH, "hosts"),
                ("TINYNCCL_CUDA_DIVIDE", "0"),
                ("TINYNCCL_TUNE", "off"),
                ("TINYNCCL_TIMEOUT", "30"),
            ])
            .envs(settings.iter().copied())
            .stdin(Stdio::null())
            .spawn()
            .unwrap()
    };
    let processes: Vec<Child> = processes.iter().map(start).collect();
    processes.into_iter().map(|mut process| process.wait().unwrap()).collect()
}

/// Runs a case whose ranks all succeed, each in a process.
fn run(case: &str, hosts: &[usize], settings: &[(&str, &str)]) {
    run_as(case, hosts, settings, 0);
}

/// [`run`] with a process for each host.
fn run_as_threads(case: &str, hosts: &[usize], settings: &[(&str, &str)]) {
    run_as(case, hosts, settings, hosts.len());
}

fn run_as(case: &str, hosts: &[usize], settings: &[(&str, &str)], together: usize) {
    if gpu().is_none() {
        return;
    }
    let failed = start(case, hosts, settings, together).iter().filter(|status| !status.success()).count();
    assert_eq!(failed, 0, "{case} on hosts of {hosts:?} ranks with {settings:?}: {failed} processes failed");
}

/// The ranks of a process. It does nothing unless it is started for that.
#[test]
fn a_rank() {
    let number = |name| std::env::var(name).ok().map(|text| text.parse::<usize>().unwrap());
    let (Some(first), Some(world), Ok(id)) = (number(RANK), number(WORLD), std::env::var(ID)) else { return };
    std::thread::scope(|scope| {
        for rank in first..first + number(THREADS).unwrap() {
            let id = &id;
            scope.spawn(move || one(id, rank, world));
        }
    });
}

fn one(id: &str, rank: usize, world: usize) {
    let comm = Comm::init(&id.parse().unwrap(), rank, world, Config::from_env().unwrap()).unwrap();
    let gpus = if std::env::var_os(SHARE).is_some() { 1 } else { cuda::device_count().unwrap() };
    let context = CudaContext::new(rank % gpus).unwrap();
    let made = DeviceComm::new(&comm, &context);
    let case = std::env::var(CASE).unwrap();
    if let Some(words) = case.strip_prefix("refused: ") {
        let error = made.unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }) && error.to_string().contains(words), "{error}");
        return;
    }
    let device = made.unwrap();
    if let Some(words) = case.strip_prefix("undivided: ") {
        assert_eq!(device.path(), Path::Hosted);
        assert!(device.path_reason().contains(words), "{}", device.path_reason());
        return;
    }
    assert_eq!(device.path(), Path::Hosts, "{}", device.path_reason());
    let explained = device.explain(Collective::AllReduce, 1 << 20).to_string();
    assert!(explained.contains("inside each host, then between the hosts"), "{explained}");
    assert!(explained.contains("hosts of"), "{explained}");
    let stream = context.new_stream().unwrap();
    match case.as_str() {
        "table" => table(&comm, &device, &stream),
        "same-bits" => same_bits(&comm, &device, &stream),
        "messages" => messages(&device, &stream),
        "averages" => averages(&device, &stream),
        "rank-order" => rank_order(&device, &stream),
        "exact" => exact(&device, &stream),
        "rows" => many_in_a_row(&device, &stream),
        "disagree" => disagree(&device, &stream),
        "dies" => dies(&device, &stream),
        "aborts" => aborts(&device, &stream),
        "refusals" => refusals(&device, &stream),
        other => panic!("no case {other:?}"),
    }
}

fn in_place<T: Element + DeviceRepr>(
    device: &DeviceComm,
    stream: &Arc<CudaStream>,
    input: &[T],
    op: ReduceOp,
) -> Vec<T> {
    let mut buffer = stream.clone_htod(input).unwrap();
    device.all_reduce_in_place(stream, &mut buffer, op).unwrap();
    device.synchronize().unwrap();
    stream.clone_dtoh(&buffer).unwrap()
}

/// Gather, scatter, lengths per pair and messages to both neighbours, in one group: inside hosts and between them.
fn messages(device: &DeviceComm, stream: &Arc<CudaStream>) {
    let (rank, n) = (device.rank(), device.size());
    for count in [0usize, 1, 1000, 100_003] {
        let all: Vec<i32> = (0..n * count).map(|i| value(rank, i)).collect();
        let input = stream.clone_htod(&[all.as_slice(), &[0]].concat()).unwrap();
        let mut outputs = Vec::new();
        let root = count % n;
        let mut group = device.group(stream);
        let mut output = |len: usize| {
            outputs.push(stream.clone_htod(&vec![-7; len + 1]).unwrap());
            outputs.last().unwrap().device_ptr(stream).0
        };
        let at = input.device_ptr(stream).0;
        let call = |collective| Call::new(collective, DType::I32, ReduceOp::Sum, root, count);
        // Rank r sends (r + 1) * count / n elements to each.
        let length = |rank: usize| (rank + 1) * count / n;
        let lengths: Vec<usize> = (0..n).map(length).collect();
        let (from, to) = ((rank + n - 1) % n, (rank + 1) % n);
        let calls = [
            RawCall::on_device(call(Collective::Gather), at, output(if rank == root { n * count } else { 0 })),
            RawCall::on_device(call(Collective::Scatter), at, output(count)),
            RawCall::all_to_all_v(
                DType::I32,
                at as *const u8,
                packed(&vec![length(rank); n]),
                output(lengths.iter().sum()) as *mut u8,
                packed(&lengths),
            ),
            RawCall::on_device(Call::send(DType::I32, to, count), at, 0),
            RawCall::on_device(Call::recv(DType::I32, from, count), 0, output(count)),
            RawCall::on_device(Call::send(DType::I32, from, count), at, 0),
            RawCall::on_device(Call::recv(DType::I32, to, count), 0, output(count)),
        ];
        // SAFETY: the buffers have these lengths and live until the streams are waited for.
        calls.iter().for_each(|call| unsafe { group.add(call) }.unwrap());
        group.finish().unwrap();
        device.synchronize().unwrap();
        let got: Vec<Vec<i32>> = outputs.iter().map(|output| stream.clone_dtoh(output).unwrap()).collect();
        let of = |rank: usize, first: usize, count: usize| (first..first + count).map(move |i| value(rank, i));
        let all = || (0..n).flat_map(|other| of(other, 0, count));
        let gathered: Vec<i32> = if rank == root { all().collect() } else { Vec::new() };
        let wanted: [Vec<i32>; 5] = [
            gathered,
            of(root, rank * count, count).collect(),
            (0..n).flat_map(|other| of(other, rank * length(other), length(other))).collect(),
            of(from, 0, count).collect(),
            of(to, 0, count).collect(),
        ];
        for (i, (got, wanted)) in got.iter().zip(&wanted).enumerate() {
            assert_eq!(got.last(), Some(&-7), "call {i} of {count}, rank {rank}: wrote behind its output");
            assert!(got[..got.len() - 1] == wanted[..], "call {i} of {count}, rank {rank} of {n}");
        }
    }
}

/// An average of integers divides the whole sum, once.
fn averages(device: &DeviceComm, stream: &Arc<CudaStream>) {
    let (rank, n) = (device.rank(), device.size());
    for count in [3usize, 5000, 70_001] {
        let term = |rank: usize, i: usize| -7 * i32::try_from(rank * i % 1000).unwrap() - 1;
        let input: Vec<i32> = (0..count).map(|i| term(rank, i)).collect();
        let got = in_place(device, stream, &input, ReduceOp::Avg);
        let wanted = (0..count).map(|i| (0..n).map(|rank| term(rank, i)).sum::<i32>() / n as i32);
        assert!(got.iter().copied().eq(wanted), "the average of {count} i32");
        // Their sum would overflow.
        let got = in_place(device, stream, &vec![f32::MAX; count], ReduceOp::Avg);
        assert!(got.iter().all(|&x| x == got[0] && (x / f32::MAX - 1.0).abs() < 1e-6), "the average of {count} f32");
    }
}

fn term(rank: usize, i: usize) -> f32 {
    let bits = ((rank * 1_000_003 + i) as u32).wrapping_mul(0x9e37_79b9).rotate_left(13).wrapping_mul(0x85eb_ca6b);
    // Of many magnitudes, so that every other order rounds otherwise somewhere.
    f32::from_bits(bits & 0x807f_ffff | (120 + bits % 13) << 23)
}

/// With `TINYNCCL_FIXED_ORDER` no host's sum is added before the others'.
fn rank_order(device: &DeviceComm, stream: &Arc<CudaStream>) {
    assert!(device.path_reason().contains("TINYNCCL_FIXED_ORDER"), "{}", device.path_reason());
    let (rank, n) = (device.rank(), device.size());
    for count in [1000usize, 70_001] {
        let input: Vec<f32> = (0..count).map(|i| term(rank, i)).collect();
        let got = in_place(device, stream, &input, ReduceOp::Sum);
        let in_order = |i: usize| (0..n).map(|rank| term(rank, i)).reduce(|a, b| a + b).unwrap();
        assert!((0..count).all(|i| got[i].to_bits() == in_order(i).to_bits()), "the sum of {count} in rank order");
        let by_host = |i: usize| (0..2).map(|h| term(2 * h, i) + term(2 * h + 1, i)).reduce(|a, b| a + b).unwrap();
        assert!((0..count).any(|i| by_host(i).to_bits() != in_order(i).to_bits()), "another order would not show");
    }
}

/// With `TINYNCCL_SUM=exact` the sum is rounded once; other types are divided by hosts all the same.
fn exact(device: &DeviceComm, stream: &Arc<CudaStream>) {
    let (rank, n) = (device.rank(), device.size());
    for count in [1000usize, 70_001] {
        let input: Vec<f32> = (0..count).map(|i| term(rank, i)).collect();
        let got = in_place(device, stream, &input, ReduceOp::Sum);
        // Exact in f64: the magnitudes are close.
        let sum = |i: usize| (0..n).map(|rank| f64::from(term(rank, i))).sum::<f64>() as f32;
        assert!((0..count).all(|i| got[i] == sum(i)), "the sum of {count}");
        let input: Vec<i32> = (0..count).map(|i| value(rank, i)).collect();
        let got = in_place(device, stream, &input, ReduceOp::Sum);
        let sum = |i: usize| (0..n).fold(0i32, |sum, rank| sum.wrapping_add(value(rank, i)));
        assert!((0..count).all(|i| got[i] == sum(i)), "the sum of {count} integers");
    }
}

/// Calls of all kinds behind each other, through two streams, without waiting in between.
fn many_in_a_row(device: &DeviceComm, stream: &Arc<CudaStream>) {
    let n = device.size();
    let other = device.context().new_stream().unwrap();
    let mut sum = stream.clone_htod(&vec![1i32; 150_001]).unwrap();
    let mut shares = stream.alloc_zeros::<i32>(n * 5000).unwrap();
    let parts = stream.clone_htod(&vec![device.rank() as i32; 5000]).unwrap();
    stream.synchronize().unwrap();
    for round in 0..8 {
        let stream = if round % 2 == 0 { stream } else { &other };
        device.all_reduce_in_place(stream, &mut sum, ReduceOp::Sum).unwrap();
        device.all_gather(stream, &parts, &mut shares).unwrap();
        device.broadcast_in_place(stream, &mut sum, round % n).unwrap();
    }
    device.synchronize().unwrap();
    let expected = (n as i32).wrapping_pow(8);
    assert!(stream.clone_dtoh(&sum).unwrap().iter().all(|&x| x == expected));
    let shares = stream.clone_dtoh(&shares).unwrap();
    assert!(shares.iter().enumerate().all(|(i, &x)| x == (i / 5000) as i32));
}

/// Ranks of different hosts make different calls.
fn disagree(device: &DeviceComm, stream: &Arc<CudaStream>) {
    let len = if device.rank() < device.size() / 2 { 20_000 } else { 30_000 };
    let mut buffer = stream.alloc_zeros::<f32>(len).unwrap();
    device.all_reduce_in_place(stream, &mut buffer, ReduceOp::Sum).unwrap();
    let error = device.synchronize().unwrap_err();
    let text = error.to_string();
    assert!(text.contains("disagree") && text.contains("20000") && text.contains("30000"), "{text}");
    stream.synchronize().unwrap();
    assert!(device.all_reduce_in_place(stream, &mut buffer, ReduceOp::Sum).is_err());
}

/// Calls until one fails: those before have the right data, all of it.
fn until_it_fails(device: &DeviceComm, stream: &Arc<CudaStream>, before: impl Fn(usize)) -> Error {
    let (rank, n) = (device.rank(), device.size());
    let input: Vec<i32> = (0..300_001).map(|i| value(rank, i)).collect();
    let wanted: Vec<i32> =
        (0..input.len()).map(|i| (0..n).fold(0i32, |sum, rank| sum.wrapping_add(value(rank, i)))).collect();
    for round in 0.. {
        let mut buffer = stream.clone_htod(&input).unwrap();
        let made = device.all_reduce_in_place(stream, &mut buffer, ReduceOp::Sum);
        before(round);
        if let Err(error) = made.and_then(|()| device.synchronize()) {
            return error;
        }
        assert!(
            stream.clone_dtoh(&buffer).unwrap() == wanted,
            "round {round} of rank {rank} has wrong data, and no error"
        );
    }
    unreachable!("it ends with an error")
}

/// Rank 2 dies in a call. All others find out, also those whose lane does not lead to it.
fn dies(device: &DeviceComm, stream: &Arc<CudaStream>) {
    let error = until_it_fails(device, stream, |round| {
        if device.rank() == 2 && round == 5 {
            std::process::abort();
        }
    });
    // The ranks of a process die together.
    assert!(matches!(error, Error::PeerLost { peer: 2 | 3, .. }), "rank {}: {error}", device.rank());
    let again = device.check().unwrap_err();
    assert_eq!(again.to_string(), error.to_string(), "the error stays the same");
    stream.synchronize().unwrap();
}

fn aborts(device: &DeviceComm, stream: &Arc<CudaStream>) {
    let error = until_it_fails(device, stream, |round| {
        if device.rank() == 1 && round == 5 {
            device.abort();
        }
    });
    assert!(matches!(error, Error::Aborted { .. }), "rank {}: {error}", device.rank());
    stream.synchronize().unwrap();
}

/// Calls that this path does not have are errors, and break nothing.
fn refusals(device: &DeviceComm, stream: &Arc<CudaStream>) {
    let memory = stream.clone_htod(&vec![1i32; 100_000]).unwrap();
    let at = memory.device_ptr(stream).0;
    let call = RawCall::on_device(Call::new(Collective::AllReduce, DType::I32, ReduceOp::Sum, 0, 100_000), at, at);
    stream.synchronize().unwrap();
    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    // SAFETY: the memory lives until the end; it must not come to a launch.
    let error = unsafe { device.enqueue(stream, &call) }.unwrap_err();
    assert!(matches!(&error, Error::Unsupported { what, .. } if what.contains("the hosts' memory")), "{error}");
    // SAFETY: as above.
    let message =
        unsafe { device.enqueue_send_recv(stream, Some((at, 100, (device.rank() + 1) % device.size())), None) };
    assert!(message.unwrap_err().to_string().contains("capture"));
    let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    let _ = stream.end_capture(flags);
    let scan = RawCall::on_device(Call::new(Collective::Scan, DType::I32, ReduceOp::Sum, 0, 100_000), at, at);
    // SAFETY: as above.
    let error = unsafe { device.enqueue(stream, &scan) }.unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }), "{error}");
    let registered = device.alloc::<i32>(stream, 1000).unwrap();
    assert!(!registered.is_registered());
    // SAFETY: the memory has 100,000 elements.
    unsafe { device.enqueue(stream, &call) }.unwrap();
    device.synchronize().unwrap();
    assert!(stream.clone_dtoh(&memory).unwrap().iter().all(|&x| x == device.size() as i32));
}

#[test]
fn every_collective() {
    run("table", &[2, 2], &[]);
    run("table", &[2, 2], &[SMALL]);
    // Some calls are divided, and others not.
    run("table", &[2, 2], &[("TINYNCCL_CUDA_DIVIDE", "1M")]);
}

#[test]
fn every_collective_of_more_ranks() {
    run("table", &[3, 3], &[SMALL, ("TINYNCCL_CUDA_THREADS", "2")]);
    run("table", &[2, 2, 2], &[("TINYNCCL_CUDA_THREADS", "1")]);
}

/// Ranks of a host share a GPU.
#[test]
fn every_collective_with_one_gpu() {
    run("table", &[2, 2], &[(SHARE, "1"), SMALL]);
}

#[test]
fn every_collective_of_threads() {
    let lockstep = (LOCKSTEP, "1");
    run_as_threads("table", &[2, 2], &[(SHARE, "1"), lockstep]);
    run_as_threads("table", &[2, 2], &[(SHARE, "1"), lockstep, SMALL]);
    run_as_threads("table", &[3, 3], &[(SHARE, "1"), lockstep, ("TINYNCCL_CUDA_THREADS", "2")]);
    run_as_threads("same-bits", &[2, 2], &[(SHARE, "1")]);
    run_as_threads("messages", &[2, 2], &[(SHARE, "1")]);
}

/// A rank in a network namespace.
fn in_a_namespace(_: &str) {
    say("here");
    assert_eq!(hear(), "cabled");
    let comm = Comm::from_env().expect("a communicator");
    let context = CudaContext::new(comm.local_rank() % cuda::device_count().unwrap()).unwrap();
    let device = DeviceComm::new(&comm, &context).unwrap();
    assert_eq!(device.path(), Path::Hosts, "{}", device.path_reason());
    let stream = context.new_stream().unwrap();
    table(&comm, &device, &stream);
    // Nothing is sent before both ranks of the host have made the call.
    let before = sent_by_all();
    let mut buffer = stream.clone_htod(&vec![1i32; 1 << 20]).unwrap();
    device.all_reduce_in_place(&stream, &mut buffer, ReduceOp::Sum).unwrap();
    device.synchronize().unwrap();
    assert!(stream.clone_dtoh(&buffer).unwrap().iter().all(|&x| x == 4));
    comm.barrier().unwrap();
    say(&(sent_by_all() - before).to_string());
    say("done");
}

/// Bytes that this host has sent over the cable.
fn sent_by_all() -> u64 {
    sent_in(&std::fs::read_to_string("/proc/net/dev").unwrap(), "net")
}

/// Two hosts of two ranks, whose only network is a cable. An all_reduce of 4 MiB crosses it once in each direction.
#[test]
fn hosts_in_network_namespaces() {
    const TEST: &str = "hosts::hosts_in_network_namespaces";
    if gpu().is_none() || !makes_nodes(TEST, in_a_namespace) {
        return;
    }
    let settings = |rank: &'static str, local: &'static str, host: &'static str| {
        let place = [("RANK", rank), ("WORLD_SIZE", "4"), ("LOCAL_RANK", local), (HOST, host), (PATH, "hosts")];
        let meet = [
            ("TINYNCCL_CUDA_DIVIDE", "0"),
            ("MASTER_ADDR", "10.0.1.1"),
            ("MASTER_PORT", "29513"),
            ("TINYNCCL_TUNE", "off"),
        ];
        [&place[..], &meet].concat()
    };
    let beside = |node: &Process, rank: &'static str, host| {
        let id = node.id().to_string();
        let mut one = again::start(&["nsenter", "-t", &id, "-n"], TEST, rank, &settings(rank, "1", host));
        assert_eq!(one.line(), "here");
        one
    };
    let [a, b] = [("0", "a"), ("2", "b")].map(|(rank, host)| node(TEST, rank, &settings(rank, "0", host)));
    cable(("net", &a), ("net", &b), 1);
    [&a, &b].into_iter().for_each(|node| run_in(node, "ip link set lo up"));
    let others = [beside(&a, "1", "a"), beside(&b, "3", "b")];
    let mut ranks: Vec<Process> = [a, b].into_iter().chain(others).collect();
    ranks.iter_mut().for_each(|rank| rank.tell("cabled"));
    for rank in &mut ranks {
        let sent: u64 = rank.line().parse().unwrap();
        // 4 MiB, and headers, acknowledgements, and what TCP repeats on a busy machine; through the hosts' memory
        // alone a ring sends 6 MiB without those.
        assert!((4 << 20..6 << 20).contains(&sent), "a host sent {sent} bytes");
    }
    ranks.into_iter().for_each(Process::finish);
    say("done");
}

#[test]
fn every_collective_over_rdma() {
    run("table", &[2, 2], &[("TINYNCCL_TRANSPORT", "verbs"), ("TINYROCE_DEVICES", "lo")]);
}

#[test]
fn all_ranks_have_the_same_bits() {
    run("same-bits", &[2, 2], &[SMALL]);
    run("averages", &[2, 2], &[]);
    run("averages", &[3, 3], &[]);
}

#[test]
fn sums_that_no_host_may_begin_are_not_divided() {
    run("rank-order", &[2, 2], &[("TINYNCCL_FIXED_ORDER", "1")]);
    run("exact", &[2, 2], &[("TINYNCCL_SUM", "exact")]);
}

#[test]
fn calls_are_verified_as_a_whole() {
    run_as_threads("table", &[2, 2], &[("TINYNCCL_VERIFY", "all"), (LOCKSTEP, "1")]);
}

#[test]
fn messages_go_inside_and_between() {
    run("messages", &[2, 2], &[]);
    run("messages", &[2, 2, 2], &[SMALL]);
    run("rows", &[2, 2], &[]);
}

#[test]
fn what_is_not_there_is_refused() {
    run("refusals", &[2, 2], &[]);
    run("refused: rank 0 has 2 ranks, that of rank 2 has 1", &[2, 1], &[]);
    run("refused: every host has one rank", &[1, 1], &[]);
}

#[test]
fn hosts_are_divided_on_request_alone() {
    run("undivided: the ranks are on several hosts", &[1, 2], &[(PATH, "auto")]);
    run("undivided: the ranks are on several hosts", &[2, 2], &[(PATH, "auto")]);
    run("undivided: TINYNCCL_CUDA_PATH=hosted", &[2, 2], &[(PATH, "hosted")]);
}

#[test]
fn ranks_that_disagree_find_out() {
    run("disagree", &[2, 2], &[]);
}

#[test]
fn a_rank_that_dies_or_aborts_ends_all_others_calls() {
    if gpu().is_none() {
        return;
    }
    let well =
        |together| -> Vec<bool> { start("dies", &[2, 2], &[], together).iter().map(ExitStatus::success).collect() };
    assert_eq!(well(0), [true, true, false, true]);
    assert_eq!(well(1), [true, false, true]);
    assert_eq!(well(2), [true, false]);
    run("aborts", &[2, 2], &[]);
    run_as_threads("aborts", &[2, 2], &[]);
}
