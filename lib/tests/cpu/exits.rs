//! Ends of a rank, with each kind of call in flight: the other ranks name it, the launcher names it, and no rank waits
//! for a deadline.
//!
//! This test binary runs itself again, as a launcher and as its ranks. Deadlines are an hour: what is only noticed at a
//! deadline does not end by [`LIMIT`].

use std::process::Command;
use std::time::Duration;

use program_kit::process::{Outcome, run};
use rustix::process::{Signal, getpid, kill_process};
use tinynccl::config::Tune;
use tinynccl::launch::{self, Launcher};
use tinynccl::{Comm, Config, Error, ReduceOp, Result};

const ROLE: &str = "TINYNCCL_TEST_EXIT";
const RANKS: usize = 3;
/// The rank that ends.
const VICTIM: usize = 1;
const LIMIT: Duration = Duration::from_secs(60);
/// Calls that are queued when it ends.
const QUEUED: usize = 4;

/// Kind of end of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Return,
    ExitWell,
    Exit,
    ExitAtOnce,
    Kill,
    Abort,
    Panic,
    PanicInThread,
    ThreadEnds,
    ChildStays,
}

/// Calls that are in flight when the rank ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Flight {
    Nothing,
    Queued,
    Inside,
    Group,
    Opening,
}

const ENDS: [End; 10] = [
    End::Return,
    End::ExitWell,
    End::Exit,
    End::ExitAtOnce,
    End::Kill,
    End::Abort,
    End::Panic,
    End::PanicInThread,
    End::ThreadEnds,
    End::ChildStays,
];
const FLIGHTS: [Flight; 5] = [Flight::Nothing, Flight::Queued, Flight::Inside, Flight::Group, Flight::Opening];

fn named(role: &str) -> Option<(End, Flight)> {
    ENDS.into_iter().flat_map(|end| FLIGHTS.map(|flight| (end, flight))).find(|cell| format!("{cell:?}") == role)
}

fn config() -> Config {
    let mut config = Config::from_env().expect("settings");
    (config.timeout, config.connect_timeout) = (Duration::from_secs(3600), Duration::from_secs(60));
    config.heartbeat = Duration::from_millis(100);
    config.tune = Tune::Off;
    config
}

/// The launcher, or a rank. It does nothing unless it is started for that.
#[test]
fn job() {
    let Some((end, flight)) = std::env::var(ROLE).ok().and_then(|role| named(&role)) else { return };
    if !launch::is_rank() {
        let launcher = Launcher::new(RANKS).grace(Duration::from_secs(20));
        std::process::exit(launcher.run_self().expect("ranks that start"));
    }
    let comm = Comm::from_env_with(config()).expect("a communicator");
    let met = comm.barrier();
    if comm.rank() == VICTIM {
        met.expect("no other rank has ended");
        return victim(comm, end, flight);
    }
    // It may have ended before this rank has seen that all are here.
    let error = met.and_then(|()| survive(&comm, flight)).expect_err("a rank ends");
    println!("\nerror: {error}");
    drop(comm);
    std::process::exit(1);
}

/// The calls of the other ranks, which cannot all succeed.
fn survive(comm: &Comm, flight: Flight) -> Result<()> {
    let mut buffer = vec![1.0f32; 50_000];
    match flight {
        Flight::Queued => (0..QUEUED).try_for_each(|_| comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum))?,
        Flight::Inside => {
            comm.send(&[0u8], VICTIM)?;
            comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum)?;
        }
        Flight::Group => comm.group(|g| g.all_reduce_in_place(&mut buffer, ReduceOp::Sum))?,
        Flight::Opening => comm.recv(&mut buffer, VICTIM)?,
        Flight::Nothing => {}
    }
    comm.barrier()
}

fn victim(comm: Comm, end: End, flight: Flight) {
    let mut buffer = vec![1.0f32; 50_000];
    let mut works = Vec::new();
    if flight == Flight::Queued {
        works.extend(
            (0..QUEUED).map(|_| comm.all_reduce_in_place_async(vec![1.0f32; 50_000], ReduceOp::Sum).expect("queued")),
        );
    }
    if flight == Flight::Inside {
        // They are about to enter the call.
        (0..RANKS).filter(|&rank| rank != VICTIM).for_each(|rank| comm.recv(&mut [0u8], rank).expect("a message"));
    }
    let mut group = comm.group_start();
    if flight == Flight::Group {
        group.all_reduce_in_place(&mut buffer, ReduceOp::Sum).expect("a right call");
    }
    match end {
        End::Return => {}
        End::ExitWell => std::process::exit(0),
        End::Exit => std::process::exit(3),
        // SAFETY: ends the process.
        End::ExitAtOnce => unsafe { libc::_exit(0) },
        End::Kill => kill_process(getpid(), Signal::KILL).expect("a process may kill itself"),
        End::Abort => std::process::abort(),
        End::Panic => panic!("expected by the test"),
        End::PanicInThread | End::ThreadEnds => {
            drop(group);
            let thread = std::thread::spawn(move || {
                let (_works, _comm) = (works, comm);
                assert!(end == End::ThreadEnds, "expected by the test");
            });
            if thread.join().is_err() {
                std::process::exit(7);
            }
        }
        End::ChildStays => {
            // SAFETY: the child makes two system calls.
            unsafe {
                if libc::fork() == 0 {
                    libc::sleep(30);
                    libc::_exit(0);
                }
                libc::_exit(3);
            }
        }
    }
}

fn outcome(cell: (End, Flight)) -> Outcome {
    let mut command: Command = program_kit::testing::program(std::env::current_exe().expect("this program"));
    command.args(["--exact", "exits::job", "--nocapture", "--test-threads=1"]).env(ROLE, format!("{cell:?}"));
    run(&mut command, LIMIT).expect("a launcher")
}

/// The exit code of the launcher, and its message about the ranks.
fn expected(end: End) -> (i32, &'static str) {
    let without_a_word = "rank 1 failed first (its connection closed without a goodbye: the process ended or was killed; it exited with code 0), then rank ";
    match end {
        // It ended well, and the others have failed.
        End::Return | End::ThreadEnds => (1, " exited with code 1"),
        End::ExitWell | End::ExitAtOnce => (1, without_a_word),
        End::Exit | End::ChildStays => (3, "[launcher] rank 1 exited with code 3"),
        End::Kill => (128 + libc::SIGKILL, "[launcher] rank 1 was killed by signal 9 (SIGKILL)"),
        End::Abort => (128 + libc::SIGABRT, "[launcher] rank 1 was killed by signal 6 (SIGABRT)"),
        End::Panic => (101, "[launcher] rank 1 exited with code 101"),
        End::PanicInThread => (7, "[launcher] rank 1 exited with code 7"),
    }
}

fn check(cell: (End, Flight)) {
    let (end, _) = cell;
    let Outcome { code, late, stdout, stderr, .. } = outcome(cell);
    let all = format!("{cell:?}: {code:?}\n{stdout}{stderr}");
    assert!(!late, "{all}");
    let (expected_code, words) = expected(end);
    assert_eq!(code, Some(expected_code), "{all}");
    let said: Vec<&str> = stderr.lines().filter(|line| line.starts_with("[launcher] ")).collect();
    assert!(said.len() == 1 && said[0].contains(words), "{all}");
    for rank in [0, 2] {
        let error = stdout.lines().find(|line| line.starts_with(&format!("[rank {rank}] error: ")));
        let error = error.unwrap_or_else(|| panic!("{all}"));
        let panicked = matches!(end, End::Panic | End::PanicInThread);
        assert!(error.contains(if panicked { "rank 1: it panicked" } else { "rank 1" }), "{all}");
        let left = matches!(end, End::Return | End::ThreadEnds);
        assert!(!left || error.contains("it closed its communicator and left"), "{all}");
    }
}

/// Four jobs at a time, which mostly wait.
fn check_all(cells: &[(End, Flight)]) {
    for some in cells.chunks(4) {
        std::thread::scope(|scope| some.iter().for_each(|&cell| drop(scope.spawn(move || check(cell)))));
    }
}

#[test]
fn a_rank_that_ends_is_named_by_the_others_and_by_the_launcher() {
    let cells: Vec<_> = ENDS.into_iter().flat_map(|end| FLIGHTS.map(|flight| (end, flight))).collect();
    check_all(&cells);
}

/// Ranks that are threads.
#[test]
fn a_rank_that_panics_with_calls_in_flight_does_not_wait_for_them() {
    let mut config = crate::common::config();
    config.timeout = Duration::from_secs(3600);
    let outcomes = crate::common::run(crate::common::Fabric::Inproc, RANKS, &config, |comm| {
        if comm.rank() != VICTIM {
            return Some(comm.recv(&mut [0u8], VICTIM).expect_err("rank 1 panics"));
        }
        let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let comm = comm;
            let calls = [(); QUEUED].map(|()| comm.all_reduce_in_place_async(vec![1u8; 1000], ReduceOp::Sum));
            assert!(calls.iter().any(std::result::Result::is_err), "expected by the test");
        }));
        assert!(panic.is_err());
        None
    });
    for error in outcomes.into_iter().flatten() {
        assert!(matches!(&error, Error::Aborted { reason, .. } if reason.contains("rank 1: it panicked")), "{error}");
    }
}
