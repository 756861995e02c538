//! Processes that a rank forks (the workers of a data loader) live, make calls, drop what they inherited; and the rank
//! dies before them.
//!
//! This test binary runs itself again as the ranks. Deadlines are an hour: whatever is only noticed at a deadline ends
//! by [`LIMIT`].

use std::cell::Cell;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use rustix::process::{Pid, Signal, WaitOptions, kill_process, kill_process_group, waitpid};
use tinynccl::bootstrap::{Server, UniqueId};
use tinynccl::comm::Work;
use tinynccl::config::Tune;
use tinynccl::wire::Collective;
use tinynccl::{Call, Comm, Config, DType, Error, ReduceOp};

const ROLE: &str = "TINYNCCL_TEST_FORK";
const RANKS: usize = 3;
/// TCP with `TINYNCCL_ENCRYPT`.
const ENCRYPTED: &str = "encrypted";
/// The rank that forks.
const PARENT: usize = 1;
/// Longest time that the test's own process waits for a line of a rank.
const LIMIT: Duration = Duration::from_secs(120);

fn config() -> Config {
    let mut config = Config::from_env().expect("settings");
    config.timeout = Duration::from_secs(3600);
    config.connect_timeout = Duration::from_secs(60);
    config.heartbeat = Duration::from_millis(100);
    config.tune = Tune::Off;
    config
}

/// Forks. The child runs `f`, which returns true if all was well, and ends without running anything else of this
/// program.
fn fork(f: impl FnOnce() -> bool) -> Pid {
    // SAFETY: the child is single-threaded from here on. It takes locks that other threads of this process may hold at
    // this moment (of the allocator, which libc sees to, and those of what is tested), as children of real programs do.
    match unsafe { libc::fork() } {
        0 => {
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(f));
            // SAFETY: ends the process at once.
            unsafe { libc::_exit(i32::from(!matches!(outcome, Ok(true)))) }
        }
        pid => Pid::from_raw(pid).expect("a child"),
    }
}

fn ended_well(child: Pid) -> bool {
    let (_, status) = waitpid(Some(child), WaitOptions::empty()).expect("wait").expect("its end");
    status.exit_status() == Some(0)
}

/// Small and large collectives; the large one uses links between two ranks, the small one the shared region if any.
fn round(comm: &Comm, round: u64) -> tinynccl::Result<()> {
    let n = comm.size() as u64;
    let mut small = [round, comm.rank() as u64];
    comm.all_reduce_in_place(&mut small, ReduceOp::Sum)?;
    assert_eq!(small, [n * round, n * (n - 1) / 2]);
    let mut large = vec![round; 40_000];
    comm.all_reduce_in_place(&mut large, ReduceOp::Sum)?;
    assert!(large.iter().all(|&x| x == n * round));
    let (next, before) = ((comm.rank() + 1) % comm.size(), (comm.rank() + comm.size() - 1) % comm.size());
    let mut got = [0];
    comm.send_recv(&[round], next, &mut got, before)?;
    assert_eq!(got, [round]);
    Ok(())
}

/// Joins as `rank`; rank 0 brings the rendezvous along where it has a server.
fn join(rank: usize, id: &str) -> Comm {
    match id {
        "host" => {
            let bind = "127.0.0.1:0".parse().expect("an address");
            let server = Server::start(bind, RANKS, &config()).expect("server");
            println!("\nid {}", server.unique_id());
            Comm::init_with_server(server, rank, RANKS, config()).expect("init")
        }
        id => Comm::init(&id.parse::<UniqueId>().expect("an id"), rank, RANKS, config()).expect("init"),
    }
}

/// A rank. It does nothing unless it is started as one.
#[test]
fn rank_process() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let [what, rank, parent, id] = role.split(' ').collect::<Vec<_>>().try_into().expect("four words");
    let (rank, parent): (usize, usize) = (rank.parse().expect("a rank"), parent.parse().expect("a rank"));
    let comm = join(rank, id);
    (0..20).for_each(|i| round(&comm, i).expect("nothing has failed"));
    match (what, rank == parent) {
        ("dies", true) => {
            let child = fork(|| {
                loop {
                    std::thread::sleep(Duration::from_secs(3600));
                }
            });
            println!("\nchild {}", child.as_raw_nonzero());
        }
        ("drops", true) => drops(&comm),
        ("calls", true) => calls(&comm),
        ("drops" | "calls", false) => {
            drop(in_flight(&comm).take().expect("a call").wait().expect("nothing has failed"))
        }
        _ => {}
    }
    if what == "dies" {
        let error = (20..).find_map(|i| round(&comm, i).err()).expect("it ends with an error");
        assert!(matches!(error, Error::PeerLost { peer, .. } if peer == parent), "{error:?}");
        println!("\nerror: {error}");
    } else {
        (20..40).for_each(|i| round(&comm, i).unwrap_or_else(|e| panic!("rank {rank}: {e}")));
        comm.close().expect("nothing has failed");
        println!("\nclosed");
    }
}

/// A call of all ranks that is under way when the parent forks.
fn in_flight(comm: &Comm) -> Cell<Option<Work<Vec<u8>>>> {
    Cell::new(Some(comm.all_reduce_in_place_async(vec![0u8; 8], ReduceOp::Sum).expect("a call")))
}

/// A child drops all that it has; so does the parent later.
fn drops(comm: &Comm) {
    let work = in_flight(comm);
    let child = fork(|| {
        drop(work.take());
        // SAFETY: the child ends without using the borrowed one again.
        drop(unsafe { std::ptr::read(comm) });
        true
    });
    assert!(ended_well(child), "the child that dropped the communicator");
    work.take().expect("ours").wait().expect("the call goes on here");
}

/// Every call of a child is an error that says why.
fn calls(comm: &Comm) {
    let pid = std::process::id().to_string();
    let [next, before] = [1, comm.size() - 1].map(|shift| (comm.rank() + shift) % comm.size());
    let work = in_flight(comm);
    let child = fork(|| {
        let mut data = [1.0f32; 3];
        let mut errors = vec![
            comm.barrier(),
            comm.all_reduce_in_place(&mut data, ReduceOp::Sum),
            comm.send(&data, next),
            comm.recv(&mut data, before),
            comm.probe(before, Duration::from_secs(1)).map(drop),
            comm.send_recv(&[1], next, &mut [0], before),
            comm.group(|g| g.barrier()),
            comm.split(Some(0), 0).map(drop),
            comm.alloc::<u8>(100).map(drop),
            comm.register_persistent(vec![0u8; 9]).map(drop),
            comm.all_reduce_in_place_async(vec![0u8; 8], ReduceOp::Sum).map(drop),
            comm.explain(&Call::new(Collective::AllReduce, DType::U8, ReduceOp::Sum, 0, 8)).map(drop),
            work.take().expect("a call").wait().map(drop),
        ];
        comm.abort("from a child");
        // SAFETY: the child ends without using it again.
        errors.push(unsafe { std::ptr::read(comm) }.close());
        errors.into_iter().enumerate().all(|(i, outcome)| {
            let said = outcome.as_ref().err().map(ToString::to_string).unwrap_or_default();
            let right = said.contains("fork") && said.contains(&pid);
            if !right {
                eprintln!("call {i} of the child gave {outcome:?}");
            }
            right
        })
    });
    assert!(ended_well(child), "a call of the child gave something else");
    work.take().expect("ours").wait().expect("the call goes on here");
}

struct Rank {
    process: Child,
    lines: Receiver<String>,
}

impl Rank {
    fn start(role: &str, transport: &str) -> Rank {
        let mut process = Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", "fork::rank_process", "--nocapture", "--test-threads=1"])
            // With its children.
            .process_group(0)
            .env(ROLE, role)
            .env("TINYNCCL_TRANSPORT", if transport == ENCRYPTED { "tcp" } else { transport })
            .env("TINYNCCL_ENCRYPT", u8::from(transport == ENCRYPTED).to_string())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a process");
        let stdout: BufReader<ChildStdout> = BufReader::new(process.stdout.take().expect("piped"));
        let (sender, lines) = channel();
        std::thread::spawn(move || stdout.lines().map_while(|line| line.ok()).all(|line| sender.send(line).is_ok()));
        Rank { process, lines }
    }

    /// The rest of the next line that begins with `mark`.
    fn line_with(&self, mark: &str) -> String {
        loop {
            match self.lines.recv_timeout(LIMIT) {
                Ok(line) => match line.strip_prefix(mark) {
                    Some(rest) => return rest.trim().to_owned(),
                    None => continue,
                },
                Err(RecvTimeoutError::Timeout) => panic!("no {mark:?} for {LIMIT:?}"),
                Err(RecvTimeoutError::Disconnected) => panic!("the rank ended without {mark:?}"),
            }
        }
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = kill_process_group(Pid::from_child(&self.process), Signal::KILL);
        let _ = self.process.wait();
    }
}

/// Starts the ranks, of which `parent` forks; with a host, rank 0 brings the rendezvous along.
fn start(what: &str, transport: &str, parent: usize, hosted: bool) -> (Vec<Rank>, Option<Server>) {
    let role = |rank: usize, id: &str| format!("{what} {rank} {parent} {id}");
    if hosted {
        let mut ranks = vec![Rank::start(&role(0, "host"), transport)];
        let id = ranks[0].line_with("id ");
        ranks.extend((1..RANKS).map(|rank| Rank::start(&role(rank, &id), transport)));
        return (ranks, None);
    }
    let bind = "127.0.0.1:0".parse().expect("an address");
    let server = Server::start(bind, RANKS, &config().with(|c| c.encrypt = transport == ENCRYPTED)).expect("server");
    let id = server.unique_id().to_string();
    ((0..RANKS).map(|rank| Rank::start(&role(rank, &id), transport)).collect(), Some(server))
}

/// The rank is killed while its child sleeps on.
fn dies(transport: &str, parent: usize, hosted: bool) {
    let (ranks, _server) = start("dies", transport, parent, hosted);
    let child = Pid::from_raw(ranks[parent].line_with("child ").parse().expect("a process id")).expect("not 0");
    kill_process(Pid::from_child(&ranks[parent].process), Signal::KILL).expect("kill");
    let heard = std::panic::catch_unwind(|| {
        for (rank, process) in ranks.iter().enumerate().filter(|(rank, _)| *rank != parent) {
            let error = process.line_with("error: ");
            assert!(error.contains(&format!("lost rank {parent}")), "rank {rank}: {error}");
        }
    });
    // Still there: it has held whatever it held until now.
    kill_process(child, Signal::KILL).expect("the child lives");
    if let Err(panic) = heard {
        std::panic::resume_unwind(panic);
    }
}

fn goes_on(what: &str, transport: &str, parent: usize, hosted: bool) {
    let (mut ranks, _server) = start(what, transport, parent, hosted);
    for rank in &mut ranks {
        rank.line_with("closed");
        assert!(rank.process.wait().expect("its end").success());
    }
}

#[test]
fn a_killed_rank_is_noticed_though_its_child_lives() {
    dies("shm", PARENT, false);
    dies("tcp", PARENT, false);
    dies(ENCRYPTED, PARENT, false);
}

#[test]
fn a_killed_host_of_the_rendezvous_is_noticed_though_its_child_lives() {
    dies("shm", 0, true);
    dies("tcp", 0, true);
}

#[test]
fn a_child_drops_what_it_has_and_nobody_notices() {
    goes_on("drops", "shm", PARENT, false);
    goes_on("drops", "tcp", PARENT, false);
    goes_on("drops", ENCRYPTED, PARENT, false);
    goes_on("drops", "shm", 0, true);
}

#[test]
fn a_call_of_a_child_is_an_error_and_nobody_else_notices() {
    goes_on("calls", "shm", PARENT, false);
    goes_on("calls", "tcp", 0, true);
}
