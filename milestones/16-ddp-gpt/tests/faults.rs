//! A rank is killed or stopped in the middle of training: the others end with an error that names it, or go on without
//! it if they are elastic.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use ddp_gpt::checkpoint;
use program_kit::port::Port;
use program_kit::testing;
use tinynccl::Config;
use tinynccl::bootstrap::{Server, UniqueId};

pub(crate) const RANKS: usize = 4;
/// `TINYNCCL_TIMEOUT` of the ranks: what a stopped rank is noticed by.
const DEADLINE: Duration = Duration::from_secs(3);
/// Far above what the machine needs; only a wait without end gets there.
const HANG: Duration = Duration::from_secs(90);

/// Rendezvous of the ranks.
pub(crate) enum Meeting<'a> {
    /// As under our launcher: this process hosts the store.
    Store(&'a UniqueId),
    /// As under torchrun: rank 0 hosts the store.
    Address(u16),
}

/// Ranks that are killed when the test ends, however it ends.
pub(crate) struct Job(pub(crate) Vec<Child>);

impl Drop for Job {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Job {
    /// `spares`: processes beside the ranks, the last ones.
    pub(crate) fn start(folder: &Path, meeting: &Meeting<'_>, transport: &str, spares: usize, args: &[&str]) -> Job {
        let text: String = (0..600).map(|i| ["to be ", "or not ", "to sum\n"][(i * i + i / 5) % 3]).collect();
        std::fs::write(folder.join("text.txt"), text).unwrap();
        // Those tests stop a rank for a moment, and it must not count as lost.
        let local = args.contains(&"--local-steps");
        let spawn = |rank: usize| {
            let mut command = Command::new(env!("CARGO_BIN_EXE_ddp-gpt"));
            command
                .current_dir(folder)
                .args(["--preset", "tiny", "--data", "text.txt", "--threads", "1"])
                .args(args)
                .args(["--log-every", "1", "--eval-every", "10000000", "--transport", transport])
                .env("RANK", rank.to_string())
                .env("WORLD_SIZE", (RANKS + spares).to_string())
                .env("LOCAL_RANK", rank.to_string())
                .env("TINYNCCL_TIMEOUT", if local { HANG } else { DEADLINE }.as_secs().to_string())
                .env_remove("RUST_LOG")
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped());
            if args.contains(&"--elastic") && !local {
                // Four of these without a sign of life, and the others go on without a rank: a busy machine needs less.
                command.env("TINYNCCL_HEARTBEAT", "1");
            }
            match meeting {
                Meeting::Store(id) => command.env("TINYNCCL_UNIQUE_ID", id.to_string()),
                Meeting::Address(port) => command
                    .env_remove("TINYNCCL_UNIQUE_ID")
                    .env("MASTER_ADDR", "127.0.0.1")
                    .env("MASTER_PORT", port.to_string()),
            };
            command.spawn().unwrap()
        };
        Job((0..RANKS + spares).map(spawn).collect())
    }

    /// Waits until the rank that reports has reported several steps: training is under way on all ranks.
    pub(crate) fn wait_for_training(&mut self, reporter: usize) -> BufReader<ChildStdout> {
        let mut out = BufReader::new(self.0[reporter].stdout.take().unwrap());
        let (mut seen, mut log) = (0, String::new());
        while seen < 20 {
            let mut line = String::new();
            assert!(out.read_line(&mut line).unwrap() > 0, "it ended before it trained: {log}");
            seen += usize::from(line.contains("loss"));
            log.push_str(&line);
        }
        out
    }

    pub(crate) fn signal(&self, rank: usize, signal: i32) {
        // SAFETY: a plain system call; the child is ours and has not been waited for.
        assert_eq!(unsafe { libc::kill(self.0[rank].id() as i32, signal) }, 0);
    }

    /// Exit code and error output of a rank that must end by itself.
    pub(crate) fn end_of(&mut self, rank: usize) -> (Option<i32>, String) {
        let start = Instant::now();
        let status = loop {
            match self.0[rank].try_wait().unwrap() {
                Some(status) => break status,
                None if start.elapsed() > HANG => panic!("rank {rank} still runs after {HANG:?}"),
                None => std::thread::yield_now(),
            }
        };
        let mut text = String::new();
        self.0[rank].stderr.take().unwrap().read_to_string(&mut text).unwrap();
        (status.code(), text)
    }
}

fn lose(victim: usize, signal: i32, transport: &str, rank0_hosts: bool) {
    let folder = tempfile::tempdir().unwrap();
    let server =
        (!rank0_hosts).then(|| Server::start("127.0.0.1:0".parse().unwrap(), RANKS, &Config::default()).unwrap());
    let port = Port::loopback();
    let id = server.as_ref().map(Server::unique_id);
    let meeting = id.as_ref().map_or(Meeting::Address(port.at.port()), Meeting::Store);
    let mut job = Job::start(folder.path(), &meeting, transport, 0, &["--steps", "10000000", "--out", "o"]);
    let mut out = job.wait_for_training(0);
    // No rank may block on a full pipe.
    let drain = std::thread::spawn(move || std::io::copy(&mut out, &mut std::io::sink()));
    job.signal(victim, signal);
    for rank in (0..RANKS).filter(|&r| r != victim) {
        let (code, text) = job.end_of(rank);
        assert_eq!(code, Some(1), "rank {rank}: {text}");
        let errors: Vec<&str> = text.lines().filter(|l| l.starts_with("error: ")).collect();
        assert_eq!(errors.len(), 1, "rank {rank}: one error line expected: {text}");
        assert!(
            errors[0].contains(&format!("lost rank {victim}"))
                || errors[0].contains(&format!("arrived: rank {victim};")),
            "{transport}, signal {signal}: rank {rank} does not name rank {victim}: {text}"
        );
    }
    drop(job);
    drain.join().unwrap().unwrap();
}

#[test]
fn a_killed_rank_is_named_on_tcp() {
    lose(2, libc::SIGKILL, "tcp", false);
}

#[test]
fn a_killed_rank_is_named_on_shm() {
    lose(2, libc::SIGKILL, "shm", false);
}

#[test]
fn a_stopped_rank_is_named_on_tcp() {
    lose(2, libc::SIGSTOP, "tcp", false);
}

#[test]
fn a_stopped_rank_is_named_on_shm() {
    lose(2, libc::SIGSTOP, "shm", false);
}

#[test]
fn the_rank_that_hosts_the_store_is_named_when_killed() {
    lose(0, libc::SIGKILL, "shm", true);
}

#[test]
fn the_rank_that_hosts_the_store_is_named_when_stopped() {
    lose(0, libc::SIGSTOP, "tcp", true);
}

/// Trains with `steps` in `folder` (its `o`), where `kill` kills `victim`: all others end well, with equal parameters.
pub(crate) fn train_on_without(
    folder: &Path,
    steps: &[&str],
    victim: usize,
    transport: &str,
    spares: usize,
    kill: impl FnOnce(&Job),
) {
    let port = Port::loopback();
    let spare = spares.to_string();
    let args: Vec<&str> = steps.iter().copied().chain(["--elastic", "--spare", &spare, "--out", "o"]).collect();
    let mut job = Job::start(folder, &Meeting::Address(port.at.port()), transport, spares, &args);
    let mut out = job.wait_for_training(0);
    let drain = std::thread::spawn(move || {
        let mut text = String::new();
        out.read_to_string(&mut text).unwrap();
        text
    });
    kill(&job);
    let survivors: Vec<usize> = (0..RANKS + spares).filter(|rank| *rank != victim).collect();
    for &rank in &survivors {
        let (code, text) = job.end_of(rank);
        assert_eq!(code, Some(0), "rank {rank}: {text}");
    }
    let mut all = drain.join().unwrap();
    for out in job.0.iter_mut().filter_map(|child| child.stdout.as_mut()) {
        out.read_to_string(&mut all).unwrap();
    }
    let left = survivors.len().min(RANKS);
    assert!(all.contains(&format!("{left} ranks go on with parameters")), "{all}");
    let last = format!("all {left} ranks");
    assert!(all.lines().any(|line| line.starts_with("parameters ") && line.ends_with(&last)), "{all}");
}

/// Trains, kills `victim`, and compares the losses with those of a run that nothing happened to.
fn go_on_without(victim: usize, transport: &str, spares: usize) {
    const STEPS: [&str; 8] = ["--steps", "200", "--batch", "12", "--lr", "0.003", "--sample-chars", "10"];
    let folder = tempfile::tempdir().unwrap();
    train_on_without(folder.path(), &STEPS, victim, transport, spares, |job| job.signal(victim, libc::SIGKILL));

    let mut alone = testing::program(env!("CARGO_BIN_EXE_ddp-gpt"));
    alone.current_dir(folder.path()).args(["--preset", "tiny", "--data", "text.txt", "--threads", "1", "--ranks", "1"]);
    testing::output(alone.args(STEPS).args(["--eval-every", "10000000", "--out", "alone"]));
    let history = |out: &str| checkpoint::load(&folder.path().join(out).join("checkpoint.bin")).unwrap().header.history;
    let (expected, got) = (history("alone"), history("o"));
    assert_eq!(
        expected.iter().map(|point| point.step).collect::<Vec<_>>(),
        got.iter().map(|point| point.step).collect::<Vec<_>>()
    );
    for (a, b) in expected.iter().zip(&got) {
        assert!(approx::abs_diff_eq!(a.train.unwrap(), b.train.unwrap(), epsilon = 2e-4), "{a:?} {b:?}");
    }
}

#[test]
fn training_goes_on_without_a_rank_with_the_same_losses() {
    go_on_without(2, "tcp", 0);
}

#[test]
fn training_goes_on_without_rank_0_with_the_same_losses() {
    go_on_without(0, "shm", 0);
}

#[test]
fn a_spare_takes_the_place_of_a_rank_with_the_same_losses() {
    go_on_without(2, "tcp", 1);
}

/// The other spare is dismissed.
#[test]
fn a_spare_takes_the_place_of_rank_0_with_the_same_losses() {
    go_on_without(0, "shm", 2);
}
