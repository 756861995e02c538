//! `status` on jobs of processes that hang.
//!
//! This test binary runs itself again, once per rank.

use std::io::{Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use program_kit::process::Outcome;
use program_kit::testing;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;
use tinynccl::bootstrap::Server;
use tinynccl::{Comm, Config, ReduceOp, Result};

use crate::hangs;

const RANK: &str = "TINYNCCL_TEST_RANK";
const ID: &str = "TINYNCCL_TEST_ID";
const SCRIPT: &str = "TINYNCCL_TEST_SCRIPT";
const SOCKET: &str = "TINYNCCL_TEST_SOCKET";
/// Longest wait for a job to show what is expected.
pub(crate) const LONG: Duration = Duration::from_secs(90);

/// Waits until the test closes the pipe.
pub(crate) fn hold() {
    let _ = std::io::stdin().read(&mut [0]);
}

/// One rank. It does nothing unless it is started for that.
#[test]
fn a_rank() {
    let variable = |name| std::env::var(name).ok();
    let (Some(rank), Some(id), Some(script)) = (variable(RANK), variable(ID), variable(SCRIPT)) else { return };
    let (rank, world) = rank.split_once('/').expect("RANK/WORLD");
    let (rank, world) = (rank.parse().expect("a rank"), world.parse().expect("a number"));
    if script == "ignore" {
        // SAFETY: no handler is installed.
        unsafe { libc::signal(libc::SIGUSR1, libc::SIG_IGN) };
    }
    if script == "late" && rank == world - 1 {
        hold();
    }
    let comm = Comm::init(&id.parse().expect("an id"), rank, world, Config::from_env().expect("settings"));
    // Ends with the test's pipe: a failed call must not end the process before it was seen.
    let outcome = comm.and_then(|comm| {
        let outcome = play(&comm, &script);
        // The others have the failure that they show.
        let kept = (script != "closed" || rank != world - 1).then_some(comm);
        hold();
        drop(kept);
        outcome
    });
    println!("rank {rank}: {outcome:?}");
}

fn play(comm: &Comm, script: &str) -> Result<()> {
    let all_reduce = |comm: &Comm, count: usize| comm.all_reduce_in_place(&mut vec![1f32; count], ReduceOp::Sum);
    let last = comm.rank() == comm.size() - 1;
    match script {
        "absent" | "ignore" => {
            comm.broadcast_in_place(&mut [1f32], 0)?;
            if last { Ok(()) } else { all_reduce(comm, 8) }
        }
        "count" => all_reduce(comm, if last { 9 } else { 8 }),
        "order" => {
            let two = [(); 2].map(|()| comm.split(Some(0), 0).expect("split").expect("a colour"));
            two.iter().try_for_each(|part| all_reduce(part, 8))?;
            let first = usize::from(last);
            all_reduce(&two[first], 8).and_then(|()| all_reduce(&two[1 - first], 8))
        }
        // Rank 0 waits for a second message, which rank 1 does not send.
        "messages" => {
            let one = [1f32; 8];
            match comm.rank() {
                0 => comm.send(&one, 1).and_then(|()| (0..2).try_for_each(|_| comm.recv(&mut [0f32; 8], 1))),
                _ => comm.recv(&mut [0f32; 8], 0).and_then(|()| comm.send(&one, 0)),
            }
        }
        other => hangs::play(comm, other),
    }
}

/// The ranks of a job, which end with it, and the folder of their sockets.
pub(crate) struct Job {
    pub(crate) ranks: Vec<Child>,
    pub(crate) folder: TempDir,
    _server: Server,
}

impl Job {
    pub(crate) fn start(world: usize, script: &str) -> Job {
        Job::with(world, script, &[])
    }

    /// With these settings, too.
    pub(crate) fn with(world: usize, script: &str, settings: &[(&str, &str)]) -> Job {
        let server = Server::start((std::net::Ipv4Addr::LOCALHOST, 0).into(), world, &Config::default()).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let start = |rank: usize| {
            testing::program(std::env::current_exe().unwrap())
                .args(["--exact", "status::a_rank", "--nocapture", "--test-threads=1"])
                .env(RANK, format!("{rank}/{world}"))
                .env(ID, server.unique_id().to_string())
                .env(SCRIPT, script)
                .env("TINYNCCL_STATUS", folder.path())
                .env("TINYNCCL_TUNE", "off")
                .env("TINYNCCL_TIMEOUT", "600")
                .env("TINYNCCL_CONNECT_TIMEOUT", "600")
                .envs(settings.iter().copied())
                .stdin(Stdio::piped())
                .stdout(Stdio::null())
                .spawn()
                .unwrap()
        };
        Job { ranks: (0..world).map(start).collect(), folder, _server: server }
    }

    pub(crate) fn pid(&self, rank: usize) -> u32 {
        self.ranks[rank].id()
    }

    pub(crate) fn signal(&self, rank: usize, signal: Signal) {
        kill_process(Pid::from_child(&self.ranks[rank]), signal).unwrap();
    }

    pub(crate) fn status(&self, arguments: &[&str]) -> Outcome {
        status(self.folder.path(), arguments)
    }

    /// [`finding`] of this job.
    pub(crate) fn finding(&self, is: impl Fn(&Value) -> bool) -> Value {
        finding(self.folder.path(), is)
    }
}

/// Looks again until a finding of the jobs with sockets in a folder satisfies `is`, and gives it.
pub(crate) fn finding(folder: &Path, is: impl Fn(&Value) -> bool) -> Value {
    let begin = Instant::now();
    loop {
        let outcome = status(folder, &["--json", "--after", "0"]);
        let document: Value = serde_json::from_str(&outcome.stdout).unwrap_or_else(|e| panic!("{e}: {outcome:?}"));
        let found = document["findings"].as_array().unwrap().iter().find(|finding| is(finding)).cloned();
        if let Some(found) = found {
            assert_eq!((outcome.code, &document["ok"]), (Some(1), &Value::Bool(false)));
            return found;
        }
        assert!(begin.elapsed() < LONG, "{document:#}");
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        for rank in &mut self.ranks {
            let _ = rank.kill();
            let _ = rank.wait();
        }
    }
}

pub(crate) fn status(folder: &Path, arguments: &[&str]) -> Outcome {
    let mut command = testing::program(env!("CARGO_BIN_EXE_tinynccl-cli"));
    // Machines are busy, and a process that answers need not be quick.
    testing::run(command.args(["status", "--timeout", "20"]).args(arguments).env("TINYNCCL_STATUS", folder))
}

pub(crate) fn text(finding: &Value) -> &str {
    finding["text"].as_str().unwrap()
}

#[test]
fn the_rank_that_is_absent_is_named_with_its_last_call() {
    let job = Job::start(3, "absent");
    // Rank 2 may still be in the broadcast while the others wait already.
    let words = ["ranks 0, 1 wait in all_reduce #2 (f32, sum, count 8)", "its last call was broadcast #1"];
    let found = job.finding(|finding| words.iter().all(|words| text(finding).contains(words)));
    assert_eq!(found["missing"], serde_json::json!([2]), "{found}");
    assert!(text(&found).contains(&format!("rank 2 (process {} on", job.pid(2))), "{found}");
    // The same as text, of one process of the job, and with more of it.
    let page = job.status(&["--after", "0", "--verbose", &job.pid(1).to_string()]);
    assert_eq!(page.code, Some(1));
    for words in
        ["ranks 0, 1 wait in all_reduce #2", "after broadcast #1 (f32, count 1, root 0)", "(rank 1 of 3) was made"]
    {
        assert!(page.stdout.contains(words), "{words:?}: {}", page.stdout);
    }
    let other = job.status(&[&std::process::id().to_string()]);
    assert_eq!(other.code, Some(3), "{other:?}");
    // Short waits are nothing odd.
    let calm = job.status(&["--after", "3600"]);
    assert!(calm.code == Some(0) && calm.stdout.starts_with("nothing odd\n"), "{calm:?}");
}

#[test]
fn a_watch_into_a_pipe_prints_what_has_changed() {
    let job = Job::start(3, "absent");
    let waits = |finding: &Value| {
        ["ranks 0, 1 wait in all_reduce #2", "its last call was broadcast #1"].iter().all(|w| text(finding).contains(w))
    };
    job.finding(waits);
    let watch = |count: &str| {
        let mut command = testing::program(env!("CARGO_BIN_EXE_tinynccl-cli"));
        command.args(["watch", "--timeout", "20", "--after", "0", "--every", "0.01", "--count", count]);
        testing::run(command.env("TINYNCCL_STATUS", job.folder.path()))
    };
    let pages = |outcome: &Outcome| outcome.stdout.matches("ranks 0, 1 wait in all_reduce #2").count();
    let several = watch("5");
    assert_eq!((several.code, pages(&several)), (Some(1), 1), "{several:?}");
    // The row of the missing rank stands out, and no other.
    let marked: Vec<&str> = several.stdout.lines().filter(|line| line.starts_with("> ")).collect();
    assert!(marked.len() == 1 && marked[0].starts_with("> 2 ") && marked[0].contains("idle"), "{several:?}");
    assert!(!several.stdout.contains('\x1b'), "{several:?}");
    let none = tempfile::tempdir().unwrap();
    let mut command = testing::program(env!("CARGO_BIN_EXE_tinynccl-cli"));
    let calm = testing::run(command.args(["watch", "--count", "1"]).env("TINYNCCL_STATUS", none.path()));
    assert!(calm.code == Some(3) && calm.stdout.starts_with("no job: "), "{calm:?}");
}

#[test]
fn a_rank_that_is_stopped_is_named_as_such() {
    let job = Job::start(3, "absent");
    job.finding(|finding| text(finding).contains("ranks 0, 1 wait in all_reduce #2"));
    job.signal(2, Signal::STOP);
    // The signal is on its way for a moment. Then the system says that the process cannot answer.
    let words = format!("rank 2 (process {} on", job.pid(2));
    let found = job.finding(|finding| text(finding).contains(&words) && text(finding).contains("is stopped"));
    assert_eq!(found["missing"], serde_json::json!([2]), "{found}");
    job.signal(2, Signal::CONT);
}

#[test]
fn a_rank_that_is_killed_is_named_as_lost() {
    let job = Job::start(3, "absent");
    job.finding(|finding| text(finding).contains("ranks 0, 1 wait in all_reduce #2"));
    job.signal(2, Signal::KILL);
    let found = job.finding(|finding| text(finding).contains("it has failed on"));
    assert_eq!(found["missing"], serde_json::json!([2]), "{found}");
    assert!(text(&found).contains("rank 2"), "{found}");
}

#[test]
fn a_rank_that_dies_before_the_start_is_missed_by_the_others() {
    let job = Job::start(3, "late");
    job.signal(2, Signal::KILL);
    let found = job.finding(|finding| {
        text(finding).contains("start of 3 ranks at 127.0.0.1:") && text(finding).contains("ranks 0, 1 wait")
    });
    assert_eq!(found["missing"], serde_json::json!([2]));
    assert!(text(&found).contains("no process has come as rank 2"), "{found}");
}

#[test]
fn communicators_in_different_orders_are_shown_as_such() {
    let job = Job::start(2, "order");
    let elsewhere = |finding: &Value| text(finding).contains("and it is in all_reduce #2 of communicator");
    let found = job.finding(elsewhere);
    assert!(found["missing"].as_array().unwrap().len() == 1, "{found}");
}

#[test]
fn ranks_that_disagree_are_shown_with_the_error() {
    let job = Job::start(2, "count");
    let found = job.finding(|finding| text(finding).contains("it has failed on"));
    assert!(text(&found).contains("count 8") && text(&found).contains("count 9"), "{found}");
}

#[test]
fn without_a_job_the_status_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let none = status(&folder.path().join("sockets"), &[]);
    assert!(none.code == Some(3) && none.stdout.starts_with("no job: "), "{none:?}");
    let off = status(Path::new("off"), &[]);
    assert!(off.code == Some(2) && off.stderr.contains("TINYNCCL_STATUS=off"), "{off:?}");
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
    let open = status(folder.path(), &[]);
    assert!(open.code == Some(1) && open.stderr.contains("no other user can write to"), "{open:?}");
    assert_eq!(status(folder.path(), &["soon"]).code, Some(2));
}

/// The only socket in a folder.
fn socket(folder: &Path) -> PathBuf {
    let all: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(all.len(), 1, "{all:?}");
    all[0].clone()
}

#[test]
fn clients_that_ask_nonsense_slowly_or_at_length_do_not_end_it() {
    let job = Job::start(1, "absent");
    job.finding_after_start();
    let path = socket(job.folder.path());
    let reply = |bytes: &[u8]| {
        let mut stream = UnixStream::connect(&path).unwrap();
        // It may have closed the connection before the end of what is too long.
        let _ = stream.write_all(bytes);
        let mut text = String::new();
        let _ = stream.read_to_string(&mut text);
        text
    };
    assert!(reply(b"shutdown\n").starts_with("error: unknown request \"shutdown\""));
    assert_eq!(reply(&[b'x'; 100_000]), "");
    assert!(reply(b"\xff\xfe\n").starts_with("error: unknown request"));
    assert!(reply(b"status heard\r\nmore\n").starts_with("{\"version\":2,"));
    // One that sends nothing, and one that takes nothing.
    let _silent = UnixStream::connect(&path).unwrap();
    let mut deaf = UnixStream::connect(&path).unwrap();
    deaf.write_all(b"status\n").unwrap();
    assert_eq!(job.status(&[]).code, Some(0));
}

impl Job {
    /// Waits until a heartbeat of the last rank has told the store of a call.
    pub(crate) fn hears_of_last(&self) {
        let begin = Instant::now();
        loop {
            let sockets = std::fs::read_dir(self.folder.path()).unwrap().map(|entry| entry.unwrap().path());
            let ours = format!("/{}-", self.pid(0));
            let stream = sockets.into_iter().find(|path| path.to_str().unwrap().contains(&ours));
            if let Some(Ok(mut stream)) = stream.map(UnixStream::connect) {
                let mut report = String::new();
                stream.write_all(b"status heard\n").and_then(|()| stream.read_to_string(&mut report)).unwrap();
                let report: Value = serde_json::from_str(&report).unwrap();
                if !report["comms"][0]["heard"][self.ranks.len() - 1]["standing"]["call"].is_null() {
                    return;
                }
            }
            assert!(begin.elapsed() < LONG);
        }
    }

    /// Waits until its communicator is shown.
    fn finding_after_start(&self) {
        self.shows("communicator 0 of job");
    }

    /// Waits until the page has these words.
    pub(crate) fn shows(&self, words: &str) {
        let begin = Instant::now();
        while !self.status(&[]).stdout.contains(words) {
            assert!(begin.elapsed() < LONG);
        }
    }
}

/// A client of another user. It does nothing unless it is started for that.
#[test]
fn a_client_of_another_user() {
    let Ok(path) = std::env::var(SOCKET) else { return };
    let mut stream = UnixStream::connect(path).unwrap();
    stream.write_all(b"status\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    println!("{text}");
}

#[test]
fn another_user_is_refused() {
    if !rustix::process::geteuid().is_root() {
        return testing::skipped("another user at the status socket", "only root can become another user");
    }
    let job = Job::start(1, "absent");
    job.finding_after_start();
    let path = socket(job.folder.path());
    // As if the folder were open.
    std::fs::set_permissions(job.folder.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o777)).unwrap();
    let program = job.folder.path().join("client");
    // By another process: a child that this one forks meanwhile would hold the file open for writing.
    testing::output(Command::new("cp").arg(std::env::current_exe().unwrap()).arg(&program));
    let mut command: Command = testing::program(&program);
    command
        .args(["--exact", "status::a_client_of_another_user", "--nocapture"])
        .env(SOCKET, &path)
        .uid(65534)
        .gid(65534);
    let text = testing::output(command.current_dir("/"));
    assert!(text.contains("error: expected a process of user 0, got one of user 65534"), "{text}");
    assert!(!text.contains("version"), "{text}");
}
