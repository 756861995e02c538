//! A rank's process is killed or stopped, or aborts, while all of them make calls one after the other. This test binary
//! runs itself again, once per rank; a rank reports by lines of its output that begin with `@`.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use cudarc::driver::{CudaContext, CudaStream, DevicePtr, sys};
use half::f16;
use rustix::process::{Pid, Signal, kill_process};
use tinynccl::bootstrap::Server;
use tinynccl::comm::RawCall;
use tinynccl::cuda::{DeviceComm, Path};
use tinynccl::wire::Collective;
use tinynccl::{Call, Comm, Config, DType, Error, ReduceOp};

use super::gpus;
use super::kernels::every_call;

const RANK: &str = "TINYNCCL_TEST_RANK";
const WORLD: &str = "TINYNCCL_TEST_WORLD";
const ID: &str = "TINYNCCL_TEST_ID";
const DEVICE: &str = "TINYNCCL_TEST_DEVICE";
/// Set for the rank that aborts.
const ABORTS: &str = "TINYNCCL_TEST_ABORTS";

/// Set for ranks that make every call once, and no more.
const ONCE: &str = "TINYNCCL_TEST_ONCE";

/// Set for ranks that hold calls: rank 1 makes no more calls after a while, and the others one that waits for it.
const HOLDS: &str = "TINYNCCL_TEST_HOLDS";

/// After which something hangs. Longer than the deadlines of calls here.
const LIMIT: Duration = Duration::from_secs(90);
/// Rounds after which a rank reports that it runs.
const ROUNDS: usize = 5;

fn say(what: &str) {
    println!("\n@{what}");
}

/// Waits of a stream for counts cannot be in a graph.
fn no_capture(device: &DeviceComm, stream: &Arc<CudaStream>) {
    let memory = stream.alloc_zeros::<f32>(100).unwrap();
    let at = memory.device_ptr(stream).0;
    let call = RawCall::on_device(Call::new(Collective::AllReduce, DType::F32, ReduceOp::Sum, 0, 100), at, at);
    stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    // SAFETY: it must not come to a launch.
    let error = unsafe { device.enqueue(stream, &call) }.unwrap_err().to_string();
    assert!(
        error.contains("capture into a graph by ranks of several processes on one GPU is not available"),
        "{error}"
    );
    let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    drop(stream.end_capture(flags).unwrap());
    device.check().unwrap();
}

/// Their sum would overflow.
fn large_averages(device: &DeviceComm, stream: &Arc<CudaStream>) {
    for count in [3, 5000, 1_000_003] {
        let mut buffer = stream.clone_htod(&vec![f16::from_f32(60_000.0); count]).unwrap();
        device.all_reduce_in_place(stream, &mut buffer, ReduceOp::Avg).unwrap();
        device.synchronize().unwrap();
        let wrong = stream.clone_dtoh(&buffer).unwrap().into_iter().find(|&x| x != f16::from_f32(60_000.0));
        assert_eq!(wrong, None, "the average of {count} f16 of 60000");
    }
}

/// One rank. It does nothing unless it is started for that.
#[test]
fn a_rank() {
    let variable = |name| std::env::var(name).ok();
    let (Some(rank), Some(world), Some(id)) = (variable(RANK), variable(WORLD), variable(ID)) else { return };
    let number = |text: String| text.parse().expect("a number");
    let comm =
        Comm::init(&id.parse().expect("an id"), number(rank), number(world), Config::from_env().unwrap()).unwrap();
    let context = CudaContext::new(number(variable(DEVICE).unwrap())).unwrap();
    let device = match DeviceComm::new(&comm, &context) {
        Ok(device) => device,
        Err(error) => return say(&format!("refused: {error}")),
    };
    let stream = context.new_stream().unwrap();
    if device.path() == Path::Phased {
        no_capture(&device, &stream);
    }
    if variable(ONCE).is_some() {
        large_averages(&device, &stream);
        every_call(&[(device, stream)]);
        return say("done");
    }
    // Below and above what goes by LL; several slots, and several areas of ranks that share a GPU.
    let mut small = stream.alloc_zeros::<f32>(500).unwrap();
    let mut large = stream.alloc_zeros::<f32>(24 << 20).unwrap();
    let mut round = |large_too: bool| {
        device.all_reduce_in_place(&stream, &mut small, ReduceOp::Sum)?;
        if large_too {
            device.all_reduce_in_place(&stream, &mut large, ReduceOp::Sum)?;
        }
        device.synchronize()
    };
    if variable(HOLDS).is_some() {
        (0..ROUNDS).for_each(|_| round(true).unwrap());
        return if comm.rank() == 1 { wait_to_be_killed() } else { hold(&device, &stream) };
    }
    let mut rounds = 0;
    let error = loop {
        if let Err(error) = round(rounds % 3 > 0) {
            break error;
        }
        rounds += 1;
        if rounds == ROUNDS {
            say("runs");
        }
        // A rank that has finished a round knows that the others have begun it.
        if rounds == ROUNDS + 1 && variable(ABORTS).is_some() {
            comm.abort("enough");
        }
    };
    let kind = match &error {
        Error::PeerLost { peer, .. } => format!("lost {peer}"),
        Error::Timeout { missing, .. } => format!("timeout {missing:?}"),
        Error::Aborted { .. } => "aborted".to_owned(),
        _ => "other".to_owned(),
    };
    say(&format!("{kind}: {error}"));
    let later = round(true).expect_err("a failed communicator stays so");
    assert_eq!(later.to_string(), error.to_string());
    // What the stream still holds comes to its end too.
    stream.synchronize().expect("a stream without errors");
    drop(device);
    drop(comm);
    let other = stream.clone_htod(&[1f32; 100]).unwrap();
    assert!(stream.clone_dtoh(&other).unwrap().iter().all(|&x| x == 1.0), "the device is of use no more");
    say("done");
}

fn wait_to_be_killed() {
    say("runs");
    std::thread::sleep(LIMIT);
}

/// A call that waits for rank 1, which dies: the error comes at once, and the stream still waits until an abort.
fn hold(device: &DeviceComm, stream: &Arc<CudaStream>) {
    let mut data = stream.alloc_zeros::<f32>(500).unwrap();
    device.all_reduce_in_place(stream, &mut data, ReduceOp::Sum).unwrap();
    say("runs");
    let busy = || {
        // SAFETY: the stream is alive.
        let state = unsafe { sys::cuStreamQuery(stream.cu_stream()) };
        state == sys::CUresult::CUDA_ERROR_NOT_READY
    };
    let error = loop {
        if let Err(error) = device.check() {
            break error;
        }
        assert!(busy(), "the call ended without rank 1");
        std::thread::yield_now();
    };
    // Kernels look for an abort every few milliseconds.
    while device.failure_age().expect("no call has ended early") < Duration::from_millis(300) {
        assert!(busy(), "the call ended after: {error}");
        std::thread::yield_now();
    }
    // Later calls wait behind it.
    device.all_reduce_in_place(stream, &mut data, ReduceOp::Sum).expect("a call that is held");
    assert!(busy(), "the call ended after: {error}");
    say(&error.to_string());
    device.abort();
    stream.synchronize().expect("a stream without errors");
    device.all_reduce_in_place(stream, &mut data, ReduceOp::Sum).expect_err("it was aborted");
    say("done");
}

/// The ranks of a test, ended with it.
struct Ranks {
    children: Vec<Child>,
    lines: Vec<Receiver<String>>,
    _server: Server,
}

impl Ranks {
    /// `devices`: the GPU of each.
    fn start(devices: &[usize], timeout: u32, settings: &[(&str, &str)], aborts: Option<usize>) -> Ranks {
        let bind = "127.0.0.1:0".parse().unwrap();
        let server = Server::start(bind, devices.len(), &Config::default()).unwrap();
        let id = server.unique_id().to_string();
        let start = |(rank, device): (usize, &usize)| {
            let mut command = Command::new(std::env::current_exe().unwrap());
            if aborts == Some(rank) {
                command.env(ABORTS, "1");
            }
            command
                .args(["--exact", "faults::processes::a_rank", "--nocapture", "--test-threads=1"])
                .env(RANK, rank.to_string())
                .env(WORLD, devices.len().to_string())
                .env(DEVICE, device.to_string())
                .env(ID, &id)
                .env("TINYNCCL_TIMEOUT", timeout.to_string())
                .env("TINYNCCL_TUNE", "off")
                .envs(settings.iter().copied())
                .stdout(Stdio::piped())
                .spawn()
                .unwrap()
        };
        let mut children: Vec<Child> = devices.iter().enumerate().map(start).collect();
        let lines = children.iter_mut().map(|child| listen(child.stdout.take().unwrap())).collect();
        Ranks { children, lines, _server: server }
    }

    /// The next line that a rank reports.
    fn hear(&self, rank: usize) -> String {
        self.lines[rank].recv_timeout(LIMIT).unwrap_or_else(|e| panic!("rank {rank} says nothing: {e}"))
    }

    fn all_run(&self) {
        for rank in 0..self.children.len() {
            assert_eq!(self.hear(rank), "runs", "rank {rank}");
        }
    }

    fn signal(&self, rank: usize, signal: Signal) {
        kill_process(Pid::from_child(&self.children[rank]), signal).unwrap();
    }

    /// Failure that `rank` reports. The rank must then end in good order.
    fn failure(&mut self, rank: usize) -> String {
        let failure = self.hear(rank);
        assert_eq!(self.hear(rank), "done", "rank {rank}");
        // It has nothing left to do but to exit.
        assert!(self.children[rank].wait().unwrap().success(), "rank {rank}");
        println!("rank {rank}: {failure}");
        failure
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn listen(output: impl std::io::Read + Send + 'static) -> Receiver<String> {
    let (to, lines) = channel();
    std::thread::spawn(move || {
        for line in BufReader::new(output).lines().map_while(Result::ok) {
            if let Some(line) = line.strip_prefix('@') {
                let _ = to.send(line.to_owned());
            }
        }
    });
    lines
}

/// Ranks with a GPU each, where kernels wait for one another, and ranks that share one, where streams do.
fn setups() -> Vec<Vec<usize>> {
    let alone = gpus(2).map(|_| vec![0, 1]);
    let shared = gpus(1).map(|_| vec![0, 0, 0]);
    alone.into_iter().chain(shared).collect()
}

/// The deadline is far: that a survivor's error is not a timeout shows that it was notified.
#[test]
fn survivors_of_a_killed_rank_leave_at_once_and_name_it() {
    for devices in setups() {
        let mut ranks = Ranks::start(&devices, 60, &[], None);
        ranks.all_run();
        ranks.signal(1, Signal::KILL);
        for rank in (0..devices.len()).filter(|&rank| rank != 1) {
            let failure = ranks.failure(rank);
            assert!(failure.starts_with("lost 1: ") && failure.contains("lost rank 1"), "{failure}");
        }
    }
}

/// Nothing behind a call on its stream may use what the call has not written.
#[test]
fn calls_that_are_held_wait_for_a_killed_rank_until_an_abort() {
    for devices in setups() {
        let settings = [("TINYNCCL_CUDA_FAILURE", "hold"), (HOLDS, "1")];
        let mut ranks = Ranks::start(&devices, 60, &settings, None);
        ranks.all_run();
        ranks.signal(1, Signal::KILL);
        for rank in (0..devices.len()).filter(|&rank| rank != 1) {
            let failure = ranks.failure(rank);
            assert!(failure.contains("lost rank 1"), "{failure}");
        }
    }
}

/// No rank notifies them: the deadline does, or another rank whose deadline has come.
#[test]
fn ranks_that_wait_for_a_stopped_one_name_it_by_the_deadline() {
    for devices in setups() {
        let mut ranks = Ranks::start(&devices, 5, &[], None);
        ranks.all_run();
        ranks.signal(1, Signal::STOP);
        for rank in (0..devices.len()).filter(|&rank| rank != 1) {
            let failure = ranks.failure(rank);
            let own = failure.starts_with("timeout [1]: ");
            assert!(own || (devices.len() > 2 && failure.starts_with("aborted: ")), "{failure}");
            assert!(failure.contains("not arrived: rank 1; no heartbeat for"), "{failure}");
        }
    }
}

#[test]
fn an_abort_of_the_host_communicator_ends_the_waits_of_every_device() {
    for devices in setups() {
        let mut ranks = Ranks::start(&devices, 60, &[], Some(1));
        ranks.all_run();
        for rank in 0..devices.len() {
            let failure = ranks.failure(rank);
            assert!(failure.starts_with("aborted: ") && failure.contains("rank 1: enough"), "{failure}");
        }
    }
}

#[test]
fn ranks_without_a_path_are_refused_at_the_start() {
    let settings = [("TINYNCCL_CUDA_PATH_CHECK", "fail"), ("TINYNCCL_CUDA_PATH", "peer")];
    for devices in setups() {
        let ranks = Ranks::start(&devices, 60, &settings, None);
        for rank in 0..devices.len() {
            let refused = ranks.hear(rank);
            assert!(refused.contains("writes of rank 1 (GPU"), "{refused}");
        }
    }
}

/// In phases: for compute-sanitizer, as `kernels.rs`.
#[test]
fn every_kernel_of_processes_that_share_a_gpu() {
    if gpus(1).is_none() {
        return;
    }
    let ranks = Ranks::start(&[0, 0], 120, &[(ONCE, "1")], None);
    for rank in 0..2 {
        assert_eq!(ranks.hear(rank), "done", "rank {rank}");
    }
}
