//! Groups that go on without ranks that are lost.
//!
//! Ranks as threads with connections of their own, where none dies; ranks as processes, which are killed and stopped.
//! This test binary runs itself again, once per rank.

use std::cell::Cell;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use program_kit::port::Port;
use rustix::process::{Pid, Signal, getpid, kill_process};
use tinynccl::config::Tune;
use tinynccl::{Comm, Config, Error, ReduceOp, interrupt};

use crate::common::{self, Fabric, run};
use crate::storm::numbers;

/// A rank is taken for gone after four of these: far more than a busy machine needs for a reply.
pub(crate) const HEARTBEAT: Duration = Duration::from_secs(1);

pub(crate) fn config() -> Config {
    let mut config = common::config();
    config.heartbeat = HEARTBEAT;
    config
}

/// The sum of the ranks' numbers.
pub(crate) fn sum(comm: &Comm) -> usize {
    let mut sum = [comm.rank() as u64];
    comm.all_reduce_in_place(&mut sum, ReduceOp::Sum).expect("no rank is lost");
    sum[0] as usize
}

#[test]
fn agreement_is_on_every_bit_and_on_all_ranks() {
    for fabric in [Fabric::Shm, Fabric::Tcp] {
        let agreed = run(fabric, 4, &config(), |comm| {
            let all: Vec<_> = (0..5).map(|round| comm.agree(!(1 << (comm.rank() + round))).expect("agreed")).collect();
            comm.barrier().expect("a communicator that has agreed works as before");
            all
        });
        for (round, one) in agreed[0].iter().enumerate() {
            assert_eq!((one.value, one.alive.as_slice()), (!(0b1111 << round), &[0, 1, 2, 3][..]));
        }
        assert!(agreed.iter().all(|one| *one == agreed[0]));
    }
}

#[test]
fn a_revoked_communicator_ends_calls_of_ranks_that_notice_nothing() {
    for fabric in [Fabric::Inproc, Fabric::Shm, Fabric::Tcp] {
        let errors = run(fabric, 3, &config(), |comm| {
            comm.barrier().expect("all are here");
            if comm.rank() == 1 {
                comm.revoke().expect("revoked");
            }
            comm.recv(&mut [0u8], (comm.rank() + 1) % 3).expect_err("no rank sends")
        });
        for error in errors {
            assert!(
                matches!(&error, Error::Aborted { reason, .. } if reason == "rank 1: revoked the communicator"),
                "{error}"
            );
        }
    }
}

/// Descriptors, threads and mappings of shared memory of this process.
pub(crate) fn possessions() -> [usize; 3] {
    let count = |folder: &str| std::fs::read_dir(folder).expect("procfs").count();
    let maps = std::fs::read_to_string("/proc/self/maps").expect("procfs");
    [count("/proc/self/fd"), count("/proc/self/task"), maps.lines().filter(|line| line.contains("memfd:")).count()]
}

/// Shrinks a whole communicator again and again, and ends. It does nothing unless it is started for that.
#[test]
fn shrinks() {
    if std::env::var(ROLE).is_err() {
        return;
    }
    for fabric in [Fabric::Shm, Fabric::Tcp] {
        let before = possessions();
        let barrier = std::sync::Barrier::new(3);
        run(fabric, 3, &config(), |mut comm| {
            let mut early = [0; 3];
            for round in 0..50 {
                assert_eq!(sum(&comm), 3);
                comm = comm.shrink().expect("shrunk");
                assert_eq!((comm.size(), sum(&comm)), (3, 3));
                // No thread opens or closes anything between the two, but those that send a last message.
                barrier.wait();
                match round {
                    1 => early = possessions(),
                    49 => {
                        let late = possessions();
                        assert!((0..3).all(|i| late[i] <= early[i] + 6), "{fabric:?}: {early:?}, then {late:?}");
                    }
                    _ => {}
                }
                barrier.wait();
            }
            comm.close().expect("nothing has failed");
        });
        let after = possessions();
        // The first world made the process's beacon, and what its descriptors' table needs.
        assert!((0..3).all(|i| after[i] <= before[i] + 4), "{fabric:?}: {before:?}, then {after:?}");
    }
}

#[test]
fn fifty_shrinks_leave_nothing_behind() {
    let mut command = program_kit::testing::program(std::env::current_exe().expect("this program"));
    command.args(["--exact", "survive::shrinks", "--nocapture", "--test-threads=1"]).env(ROLE, "shrinks");
    let outcome = program_kit::process::run(&mut command, LIMIT).expect("a process");
    assert!(outcome.success(), "{outcome:?}");
}

#[test]
fn a_part_of_a_split_shrinks() {
    let sums = run(Fabric::Shm, 4, &config(), |comm| {
        let part = comm.split(Some(comm.rank() as u32 % 2), 0).expect("split").expect("a colour");
        let shrunk = part.shrink().expect("shrunk");
        drop(part);
        (shrunk.rank(), sum(&shrunk))
    });
    assert_eq!(sums, [(0, 1), (0, 1), (1, 1), (1, 1)]);
}

thread_local! {
    /// Checks of this thread's call until one interrupts it, and whether later ones do so, too.
    static UNTIL: Cell<(usize, bool)> = const { Cell::new((0, false)) };
}

/// A check for [`interrupt::watched`] that follows [`UNTIL`].
fn interrupts() -> bool {
    let (left, stays) = UNTIL.get();
    UNTIL.set((left.saturating_sub(1), stays));
    left == 1 || left == 0 && stays
}

#[test]
fn a_shrink_that_is_interrupted_at_any_point_is_repeated() {
    for fabric in [Fabric::Shm, Fabric::Tcp] {
        let interrupted = run(fabric, 3, &config(), |mut comm| {
            let mut random = numbers(comm.rank() as u64);
            let mut interrupted = 0;
            for round in 0..40 {
                assert_eq!(sum(&comm), 3);
                let mut attempts = 0;
                comm = loop {
                    // Later attempts end.
                    let stays = attempts < 4 && random(2) == 0;
                    let most = 1 << random(6);
                    UNTIL.set((if attempts < 4 { 1 + random(most) } else { 0 }, stays));
                    match interrupt::watched(interrupts, || comm.shrink()) {
                        Ok(comm) => break comm,
                        Err(error) => assert!(attempts < 20, "round {round}: {error}"),
                    }
                    // Where this is not the call of the others it says so, and changes nothing.
                    if random(2) == 0
                        && let Err(error) = comm.agree(1)
                    {
                        assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
                    }
                    (attempts, interrupted) = (attempts + 1, interrupted + 1);
                };
            }
            (sum(&comm), interrupted)
        });
        assert!(interrupted.iter().all(|&(sum, interrupted)| sum == 3 && interrupted > 10), "{interrupted:?}");
    }
}

#[test]
fn a_rank_that_does_not_call_is_named() {
    let mut config = config();
    config.timeout = Duration::from_secs(1);
    let outcomes = run(Fabric::Tcp, 2, &config, |comm| {
        let outcome = if comm.rank() == 0 { Some(comm.agree(1).map(drop)) } else { None };
        comm.revoke().expect("revoked");
        (outcome, comm)
    });
    let error = outcomes[0].0.clone().expect("it called").expect_err("rank 1 has not");
    assert!(matches!(&error, Error::Timeout { missing, .. } if *missing == [1]), "{error}");
}

#[test]
fn threads_of_one_process_do_not_shrink() {
    let comm = Comm::threads(1, config()).expect("a communicator").remove(0);
    assert!(matches!(comm.shrink(), Err(Error::Unsupported { .. })));
}

/// Set for a process that is a rank: what it does.
const ROLE: &str = "TINYNCCL_TEST_SURVIVE";
/// Calls before a rank says that it is at work, and after the last change of the group.
const CALLS: usize = 30;
/// Exit code of a rank that cannot go on.
const EXCLUDED: i32 = 3;

pub(crate) fn now() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// A rank: sums in a loop, goes on without those that are lost, and ends when the group has had the expected size for
/// a number of calls. It does nothing unless it is started for that.
#[test]
fn job() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let words: Vec<usize> = role.split(' ').map(|word| word.parse().expect("a number")).collect();
    let [expected, count, dies_after, stays] = words[..] else { panic!("{role}") };
    let mut config = Config::from_env().expect("settings");
    (config.tune, config.heartbeat) = (Tune::Off, HEARTBEAT);
    let mut comm = Comm::from_env_with(config).expect("a communicator");
    let ours = 1u64 << comm.rank();
    let mut members = u64::MAX >> (64 - comm.size());
    let input = vec![ours; count];
    let (mut output, mut calls) = (vec![0; count], 0);
    while comm.size() > expected || calls < CALLS {
        match comm.all_reduce(&input, &mut output, ReduceOp::Sum) {
            Ok(()) => assert!(output.iter().all(|&sum| sum == members), "{members:b}: {output:?}"),
            Err(error) => {
                assert!(input.iter().all(|&value| value == ours), "an input is changed");
                println!("\nerror: {error}");
                if dies_after > 0 {
                    std::thread::spawn(move || {
                        std::thread::sleep(Duration::from_micros(dies_after as u64));
                        kill_process(getpid(), Signal::KILL)
                    });
                }
                comm.revoke().expect("revoked");
                comm = match comm.shrink() {
                    Ok(comm) => comm,
                    Err(error) => {
                        println!("\nexcluded: {error}");
                        std::process::exit(EXCLUDED);
                    }
                };
                let mut ranks = [ours];
                // Another rank may have died since.
                let Ok(()) = comm.all_reduce_in_place(&mut ranks, ReduceOp::Sum) else { continue };
                println!("\nshrunk {} {}", ranks[0], now());
                (members, calls) = (ranks[0], 0);
                continue;
            }
        }
        calls += 1;
        if calls == CALLS {
            println!("\nat work");
        }
    }
    if stays > 0 {
        std::io::stdin().read_line(&mut String::new()).expect("the end of the test");
    }
    comm.close().expect("nothing has failed");
}

/// Processes of one job, killed when the test ends, however it ends.
struct Job {
    /// Held while rank 0 has yet to listen.
    _port: Port,
    ranks: Vec<Child>,
    lines: Vec<Receiver<String>>,
}

impl Drop for Job {
    fn drop(&mut self) {
        for child in &mut self.ranks {
            drop((child.kill(), child.wait()));
        }
    }
}

impl Job {
    /// `dies_after` of each rank: time in µs between its first failed call and its death; 0: it lives. `stops`: a rank
    /// will be stopped, and true if the others live until their input ends.
    fn start(
        transport: &str,
        ranks: usize,
        expected: usize,
        count: usize,
        dies_after: &[usize],
        stops: Option<bool>,
    ) -> Job {
        let port = Port::loopback();
        // A stopped rank is noticed at the deadline of a call.
        let (timeout, stays) = (if stops.is_some() { "10" } else { "60" }, stops == Some(true));
        let start = |rank: usize| {
            let dies_after = dies_after.get(rank).copied().unwrap_or(0);
            Command::new(std::env::current_exe().expect("this program"))
                .args(["--exact", "survive::job", "--nocapture", "--test-threads=1"])
                .env(ROLE, format!("{expected} {count} {dies_after} {}", u8::from(stays)))
                .envs(port.environment(rank, ranks))
                .env("TINYNCCL_TRANSPORT", transport)
                .env("TINYNCCL_TIMEOUT", timeout)
                .env_remove("TINYNCCL_UNIQUE_ID")
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .expect("a process")
        };
        let mut ranks: Vec<Child> = (0..ranks).map(start).collect();
        let lines = ranks.iter_mut().map(|child| {
            let (sender, receiver) = channel();
            let out = BufReader::new(child.stdout.take().expect("piped"));
            std::thread::spawn(move || out.lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
            receiver
        });
        Job { lines: lines.collect(), ranks, _port: port }
    }

    /// The rest of the next line of a rank that begins with `word`.
    fn line(&self, rank: usize, word: &str) -> String {
        loop {
            let line = self.lines[rank].recv_timeout(LIMIT).unwrap_or_else(|e| panic!("rank {rank}: no {word}: {e}"));
            if let Some(rest) = line.strip_prefix(word) {
                return rest.trim().to_owned();
            }
        }
    }

    /// All ranks are at work.
    fn begin(&self) {
        (0..self.ranks.len()).for_each(|rank| drop(self.line(rank, "at work")));
    }

    fn signal(&self, rank: usize, signal: Signal) {
        kill_process(Pid::from_child(&self.ranks[rank]), signal).expect("it is ours");
    }

    /// The survivors end well, and have summed over themselves alone.
    fn finish(&mut self, lost: &[usize]) {
        let survivors: Vec<usize> = (0..self.ranks.len()).filter(|rank| !lost.contains(rank)).collect();
        let members: u64 = survivors.iter().map(|rank| 1 << rank).sum();
        for &rank in &survivors {
            while self.line(rank, "shrunk").split(' ').next() != Some(members.to_string().as_str()) {}
            assert_eq!(self.end_of(rank), Some(0), "rank {rank}");
        }
    }

    fn end_of(&mut self, rank: usize) -> Option<i32> {
        self.ranks[rank].wait().expect("its end").code()
    }
}

pub(crate) const LIMIT: Duration = Duration::from_secs(120);

/// A different place in a call each time.
pub(crate) fn short_while(seed: usize) {
    let mut bytes = [0; 2];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()).expect("random bytes");
    std::thread::sleep(Duration::from_micros(u64::from(u16::from_le_bytes(bytes)) % 5000 + seed as u64));
}

#[test]
fn a_killed_rank_is_left_behind_whichever_it_is() {
    for transport in ["shm", "tcp"] {
        for victim in 0..3 {
            let mut job = Job::start(transport, 3, 2, 1000, &[], None);
            job.begin();
            short_while(victim);
            job.signal(victim, Signal::KILL);
            job.finish(&[victim]);
        }
    }
}

#[test]
fn one_of_two_goes_on_alone() {
    for victim in 0..2 {
        let mut job = Job::start("auto", 2, 1, 10, &[], None);
        job.begin();
        job.signal(victim, Signal::KILL);
        job.finish(&[victim]);
    }
}

#[test]
fn two_that_die_at_once_are_left_behind() {
    for (transport, victims) in [("shm", [0, 1]), ("tcp", [0, 3]), ("shm", [1, 2])] {
        let mut job = Job::start(transport, 4, 2, 5000, &[], None);
        job.begin();
        short_while(0);
        victims.iter().for_each(|&victim| job.signal(victim, Signal::KILL));
        job.finish(&victims);
    }
}

#[test]
fn a_rank_that_dies_while_the_group_shrinks_is_left_behind_too() {
    for (transport, first, second, after) in
        [("shm", 3, 0, 300), ("tcp", 0, 1, 3000), ("shm", 1, 0, 1000), ("tcp", 2, 3, 6000), ("shm", 0, 1, 10_000)]
    {
        let mut dies_after = [0; 4];
        dies_after[second] = after;
        let mut job = Job::start(transport, 4, 2, 100, &dies_after, None);
        job.begin();
        job.signal(first, Signal::KILL);
        job.finish(&[first, second]);
    }
}

/// The others' calls end at their deadline. The victim continues while they live, or after they have ended.
#[test]
fn a_stopped_rank_is_left_behind_and_does_not_come_back() {
    let cells = [("shm", 2, true), ("tcp", 1, true), ("shm", 0, true), ("shm", 1, false)];
    std::thread::scope(|scope| {
        cells.iter().for_each(|&(transport, victim, stays)| drop(scope.spawn(move || stop(transport, victim, stays))));
    });
}

fn stop(transport: &str, victim: usize, stays: bool) {
    let mut job = Job::start(transport, 3, 2, 1000, &[], Some(stays));
    job.begin();
    job.signal(victim, Signal::STOP);
    let survivors: Vec<usize> = (0..3).filter(|&rank| rank != victim).collect();
    survivors.iter().for_each(|&rank| drop(job.line(rank, "shrunk")));
    if !stays {
        survivors.iter().for_each(|&rank| assert_eq!(job.end_of(rank), Some(0)));
    }
    job.signal(victim, Signal::CONT);
    assert!(!job.line(victim, "excluded").is_empty());
    assert_eq!(job.end_of(victim), Some(EXCLUDED));
    // Their input ends.
    survivors.iter().for_each(|&rank| assert_eq!(job.end_of(rank), Some(0)));
}

/// Prints the time from the death of a rank to the next finished all_reduce of the others, of rounds of `length`.
fn measure(ranks: usize, victim: usize, length: Duration) {
    let (mut times, begin) = (Vec::new(), std::time::Instant::now());
    while begin.elapsed() < length {
        let job = Job::start("auto", ranks, ranks - 1, 1000, &[], None);
        job.begin();
        short_while(0);
        let killed = now();
        job.signal(victim, Signal::KILL);
        let done = |rank: usize| job.line(rank, "shrunk").split(' ').nth(1).and_then(|at| at.parse::<u64>().ok());
        let done = (0..ranks).filter(|&rank| rank != victim).filter_map(done).max().expect("other ranks");
        times.push((done - killed) as f64 * 1e-6);
    }
    times.sort_by(f64::total_cmp);
    let at = |share: f64| times[((times.len() - 1) as f64 * share).round() as usize];
    let (count, [half, most, all]) = (times.len(), [0.5, 0.99, 1.0].map(at));
    eprintln!("{ranks} ranks, rank {victim}: {count} times, p50 {half:.1} ms, p99 {most:.1} ms, longest {all:.1} ms");
}

#[test]
#[ignore = "measures"]
fn time_to_go_on() {
    [5, 0].into_iter().for_each(|victim| measure(8, victim, Duration::from_secs(30)));
}

#[test]
#[ignore = "measures"]
fn time_to_go_on_by_size() {
    [2, 4, 8, 16, 32, 64].into_iter().for_each(|ranks| measure(ranks, 1, Duration::from_secs(20)));
}
