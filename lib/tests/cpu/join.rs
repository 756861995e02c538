//! Groups that newcomers join.
//!
//! Ranks and newcomers as threads with connections of their own, where none dies; as processes, which are killed. This
//! test binary runs itself again, once per process.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Barrier, OnceLock};
use std::time::Duration;

use program_kit::port::Port;
use rustix::process::{Pid, Signal, getpid, kill_process};
use tinynccl::config::{TransportChoice, Tune};
use tinynccl::{Comm, Config, Error, ReduceOp, Secret, Ticket, interrupt};

use crate::common::{Fabric, run};
use crate::survive::{HEARTBEAT, LIMIT, config, possessions, short_while, sum};

/// Newcomers that wait at any rank.
fn waiting(comm: &Comm) -> u64 {
    let mut waiting = [comm.waiting() as u64];
    comm.all_reduce_in_place(&mut waiting, ReduceOp::Sum).expect("no rank is lost");
    waiting[0]
}

pub(crate) fn wait_for(comm: &Comm, newcomers: u64) {
    while waiting(comm) != newcomers {}
}

/// Runs `member` on `ranks` ranks and `newcomer` on `newcomers` more, all of them threads; the newcomers get the ticket
/// of rank 0 and settings for the same transport.
fn meet<R: Send>(
    fabric: Fabric,
    (ranks, newcomers): (usize, usize),
    config: &Config,
    member: impl Fn(Comm) -> R + Sync,
    newcomer: impl Fn(&Ticket, Config) -> R + Sync,
) -> (Vec<R>, Vec<R>) {
    let ticket = OnceLock::new();
    let (ticket, newcomer) = (&ticket, &newcomer);
    let transport = if fabric == Fabric::Shm { TransportChoice::Shm } else { TransportChoice::Tcp };
    let theirs = config.clone().with(|c| c.transport = transport);
    std::thread::scope(|scope| {
        let come = |_| {
            let config = theirs.clone();
            scope.spawn(move || newcomer(ticket.wait(), config))
        };
        let come: Vec<_> = (0..newcomers).map(come).collect();
        let members = run(fabric, ranks, config, |comm| {
            if comm.rank() == 0 {
                ticket.set(comm.ticket().expect("a ticket")).expect("the first");
            }
            member(comm)
        });
        (members, come.into_iter().map(|one| one.join().expect("a newcomer panicked")).collect())
    })
}

#[test]
fn one_newcomer_joins_and_so_do_three_at_once() {
    for fabric in [Fabric::Shm, Fabric::Tcp] {
        for newcomers in [1, 3] {
            let size = 2 + newcomers;
            let work = |comm: &Comm| {
                assert_eq!((comm.size(), sum(comm)), (size, size * (size - 1) / 2));
                let mut state = [if comm.rank() == 0 { 7 } else { 0 }];
                comm.broadcast_in_place(&mut state, 0).expect("all live");
                comm.agree(u64::from(state[0] == 7)).expect("agreed");
                comm.barrier().expect("all are here");
                (comm.rank(), comm.local_rank())
            };
            let member = |comm: Comm| {
                wait_for(&comm, newcomers as u64);
                let grown = comm.grow(8).expect("grown");
                drop(comm);
                work(&grown)
            };
            let newcomer = |ticket: &Ticket, config| work(&Comm::from_ticket(ticket, config).expect("joined"));
            let (members, mut joined) = meet(fabric, (2, newcomers), &config(), member, newcomer);
            joined.sort_unstable();
            assert_eq!(members, [(0, 0), (1, 1)]);
            assert_eq!(joined, (2..size).map(|rank| (rank, rank)).collect::<Vec<_>>());
        }
    }
}

#[test]
fn a_group_takes_as_many_as_it_wants_and_the_others_wait_on() {
    let member = |comm: Comm| {
        assert_eq!(comm.grow(2).expect("without room it is a shrink").size(), 2);
        wait_for(&comm, 3);
        let comm = comm.grow(3).expect("grown");
        assert_eq!((comm.size(), sum(&comm)), (3, 3));
        wait_for(&comm, 2);
        let comm = comm.grow(usize::MAX).expect("grown");
        sum(&comm)
    };
    let newcomer = |ticket: &Ticket, config| {
        let mut comm = Comm::from_ticket(ticket, config).expect("joined");
        if comm.size() == 3 {
            assert_eq!(sum(&comm), 3);
            wait_for(&comm, 2);
            comm = comm.grow(8).expect("grown");
        }
        sum(&comm)
    };
    let (members, newcomers) = meet(Fabric::Shm, (2, 3), &config(), member, newcomer);
    assert_eq!((members, newcomers), (vec![10; 2], vec![10; 3]));
}

#[test]
fn a_newcomer_with_another_secret_is_refused() {
    let done = Barrier::new(3);
    let member = |comm: Comm| {
        done.wait();
        assert_eq!((waiting(&comm), comm.grow(8).expect("a shrink").size()), (0, 2));
        String::new()
    };
    let newcomer = |ticket: &Ticket, config: Config| {
        let text = ticket.to_string();
        assert_eq!(text.parse::<Ticket>().expect("a ticket"), *ticket);
        let (head, addresses) = text.split_once('@').expect("addresses");
        let other: Ticket =
            format!("{}{}@{addresses}", &head[..head.len() - 64], "0f".repeat(32)).parse().expect("a ticket");
        let named = config.clone().with(|c| c.secret = Some(Secret::of_text("another job")));
        let errors = [(&other, config), (ticket, named)].map(|(ticket, config)| Comm::from_ticket(ticket, config));
        for error in errors {
            let error = error.expect_err("it does not belong");
            assert!(matches!(error, Error::Bootstrap { .. }), "{error}");
            let text = error.to_string();
            assert!(text.contains("does not know this job's secret") && text.contains("TINYNCCL_SECRET"), "{text}");
            assert!(!text.contains("0f0f"), "{text}");
        }
        done.wait();
        text
    };
    let (_, text) = meet(Fabric::Tcp, (2, 1), &config(), member, newcomer);
    let ticket: Ticket = text[0].parse().expect("a ticket");
    assert!(!text[0].contains(&format!("{ticket:?}")) && !format!("{ticket:?}").contains(&text[0][18..30]));
    assert!("tinynccl-4-00@1.2.3.4:5".parse::<Ticket>().expect_err("an id").to_string().contains("ticket-"));
}

#[test]
fn a_newcomer_with_other_settings_hears_which_and_does_not_hold_up_the_group() {
    let member = |comm: Comm| {
        wait_for(&comm, 1);
        let comm = comm.grow(8).expect("without the newcomer");
        (comm.size() == 2 && sum(&comm) == 1).then(String::new)
    };
    let newcomer = |ticket: &Ticket, config: Config| {
        let other = config.with(|c| c.verify = tinynccl::config::Verify::All);
        Some(Comm::from_ticket(ticket, other).expect_err("it cannot talk to them").to_string())
    };
    let (members, newcomers) = meet(Fabric::Tcp, (2, 1), &config(), member, newcomer);
    assert_eq!(members, [Some(String::new()), Some(String::new())]);
    assert!(newcomers[0].as_ref().is_some_and(|text| text.contains("TINYNCCL_VERIFY")), "{newcomers:?}");
}

#[test]
fn a_newcomer_of_a_group_that_ends_is_told_so() {
    let member = |comm: Comm| {
        wait_for(&comm, 1);
        comm.close().map(drop)
    };
    let newcomer = |ticket: &Ticket, config| Comm::from_ticket(ticket, config).map(drop);
    let (members, newcomers) = meet(Fabric::Shm, (2, 1), &config(), member, newcomer);
    assert!(members.iter().all(Result::is_ok), "{members:?}");
    assert!(
        matches!(&newcomers[0], Err(Error::Connection { detail, .. }) if detail.contains("has ended")),
        "{newcomers:?}"
    );
}

#[test]
fn a_newcomer_that_is_interrupted_goes_away() {
    static STOP: AtomicBool = AtomicBool::new(false);
    let member = |comm: Comm| {
        wait_for(&comm, 1);
        STOP.store(true, Ordering::Relaxed);
        wait_for(&comm, 0);
        None
    };
    let newcomer = |ticket: &Ticket, config| {
        let join = || Comm::from_ticket(ticket, config);
        Some(interrupt::watched(|| STOP.load(Ordering::Relaxed), join).expect_err("it is asked to stop"))
    };
    let (_, newcomers) = meet(Fabric::Tcp, (2, 1), &config(), member, newcomer);
    assert!(
        matches!(&newcomers[0], Some(Error::Aborted { reason, .. }) if reason.contains("interrupted")),
        "{newcomers:?}"
    );
}

#[test]
fn threads_of_one_process_give_no_tickets() {
    let comm = Comm::threads(1, config()).expect("a communicator").remove(0);
    assert!(matches!(comm.ticket(), Err(Error::Unsupported { .. })));
    assert!(matches!(comm.grow(1), Err(Error::Unsupported { .. })));
    assert_eq!(comm.waiting(), 0);
}

/// Grows and shrinks again and again, and ends. It does nothing unless it is started for that.
#[test]
fn changes() {
    if std::env::var(ROLE).is_err() {
        return;
    }
    const ROUNDS: usize = 30;
    for fabric in [Fabric::Shm, Fabric::Tcp] {
        let before = possessions();
        let barrier = Barrier::new(3);
        let member = |mut comm: Comm| {
            let mut early = [0; 3];
            for round in 0..ROUNDS {
                wait_for(&comm, 1);
                let grown = comm.grow(3).expect("grown");
                assert_eq!((grown.size(), sum(&grown)), (3, 3));
                // The newcomer goes again.
                let part = grown.split(Some(0), 0).expect("split").expect("a part");
                comm = part.shrink().expect("shrunk");
                assert_eq!((comm.size(), sum(&comm)), (2, 1));
                drop((part, grown));
                barrier.wait();
                let now = possessions();
                match round {
                    2 => early = now,
                    _ if round > 2 => assert!((0..3).all(|i| now[i] <= early[i] + 6), "{round}: {early:?}, {now:?}"),
                    _ => {}
                }
                barrier.wait();
            }
            comm.close().expect("nothing has failed");
        };
        let newcomer = |ticket: &Ticket, config: Config| {
            for _ in 0..ROUNDS {
                let comm = Comm::from_ticket(ticket, config.clone()).expect("joined");
                assert_eq!(sum(&comm), 3);
                assert!(comm.split(None, 0).expect("split").is_none());
                drop(comm);
                barrier.wait();
                barrier.wait();
            }
        };
        meet(fabric, (2, 1), &config(), member, newcomer);
        let after = possessions();
        // The first world made the process's beacon, and what its descriptors' table needs.
        assert!((0..3).all(|i| after[i] <= before[i] + 4), "{fabric:?}: {before:?}, then {after:?}");
    }
}

#[test]
fn thirty_rounds_of_grow_and_shrink_leave_nothing_behind() {
    let mut command = program_kit::testing::program(std::env::current_exe().expect("this program"));
    command.args(["--exact", "join::changes", "--nocapture", "--test-threads=1"]).env(ROLE, "changes");
    let outcome = program_kit::process::run(&mut command, LIMIT).expect("a process");
    assert!(outcome.success(), "{outcome:?}");
}

/// Set for a process that is a rank or a newcomer: what it does.
const ROLE: &str = "TINYNCCL_TEST_JOIN";
/// TCP with `TINYNCCL_ENCRYPT`.
const ENCRYPTED: &str = "encrypted";
/// Set for a newcomer: its ticket.
const TICKET: &str = "TINYNCCL_TEST_TICKET";
/// Calls before a rank says that it is at work, and after the last change of the group.
const CALLS: usize = 30;

/// A process: sums in a loop, goes on without those that are lost and with newcomers, and ends when the group has been
/// the expected one for a number of calls. It does nothing unless it is started for that.
#[test]
fn job() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let words: Vec<u64> = role.split(' ').map(|word| word.parse().expect("a number")).collect();
    let [number, expected, room, dies_after] = words[..] else { panic!("{role}") };
    let mut config = Config::from_env().expect("settings");
    (config.tune, config.heartbeat) = (Tune::Off, HEARTBEAT);
    let die = || {
        if dies_after > 0 {
            std::thread::spawn(move || {
                std::thread::sleep(Duration::from_micros(dies_after));
                kill_process(getpid(), Signal::KILL)
            });
        }
    };
    let mut comm = match std::env::var(TICKET) {
        Ok(ticket) => {
            die();
            let comm = Comm::from_ticket(&ticket.parse().expect("a ticket"), config).expect("joined");
            println!("\njoined {}", comm.local_rank());
            comm
        }
        Err(_) => Comm::from_env_with(config).expect("a communicator"),
    };
    if let Ok(ticket) = comm.ticket() {
        println!("\nticket {ticket}");
    }
    let room = room as usize;
    let (mut calls, mut seen) = (0, 0);
    while calls < CALLS {
        let mut facts = [1 << number, comm.waiting() as u64];
        let met = comm.all_reduce_in_place(&mut facts, ReduceOp::Sum);
        let [members, waiting] = facts;
        calls = if members == expected { calls + 1 } else { 0 };
        match met {
            Ok(()) => {
                if std::mem::replace(&mut seen, waiting) != waiting {
                    println!("\nwaiting {waiting}");
                }
                if waiting == 0 || comm.size() >= room {
                    continue;
                }
            }
            Err(error) => {
                println!("\nerror: {error}");
                die();
                comm.revoke().expect("revoked");
            }
        }
        calls = 0;
        comm = comm.grow(room).expect("it goes on");
        println!("\nof {}", comm.size());
    }
    comm.close().expect("nothing has failed");
    println!("\nended");
}

/// Processes of one group, killed when the test ends, however it ends.
struct Job {
    /// Held while rank 0 has yet to listen.
    _port: Port,
    transport: &'static str,
    expected: u64,
    room: usize,
    all: Vec<(Child, Receiver<String>)>,
}

impl Drop for Job {
    fn drop(&mut self) {
        for (child, _) in &mut self.all {
            drop((child.kill(), child.wait()));
        }
    }
}

impl Job {
    /// Starts `ranks` ranks, which end when the group consists of the processes `expected`, and take in newcomers up to
    /// a size of `room`. `dies_after`: a rank, and the time in µs between its first failed call and its death.
    fn start(
        transport: &'static str,
        ranks: usize,
        expected: &[usize],
        room: usize,
        dies_after: Option<(usize, u64)>,
    ) -> Job {
        let port = Port::loopback();
        let expected = expected.iter().map(|number| 1 << number).sum();
        let mut job = Job { _port: port, transport, expected, room, all: Vec::new() };
        for rank in 0..ranks {
            let dies_after = dies_after.filter(|(dies, _)| *dies == rank).map_or(0, |(_, after)| after);
            let environment = job._port.environment(rank, ranks);
            job.add(dies_after, |command| command.envs(environment));
        }
        job
    }

    fn add(&mut self, dies_after: u64, set: impl FnOnce(&mut Command) -> &mut Command) {
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        command
            .args(["--exact", "join::job", "--nocapture", "--test-threads=1"])
            .env(ROLE, format!("{} {} {} {dies_after}", self.all.len(), self.expected, self.room))
            .env("TINYNCCL_TRANSPORT", if self.transport == ENCRYPTED { "tcp" } else { self.transport })
            .env("TINYNCCL_TIMEOUT", "60")
            .env_remove("TINYNCCL_UNIQUE_ID")
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        if self.transport == ENCRYPTED {
            command.env("TINYNCCL_ENCRYPT", "1").env("TINYNCCL_SECRET", "the secret of this job");
        }
        let mut child = set(&mut command).spawn().expect("a process");
        let (sender, receiver) = channel();
        let out = BufReader::new(child.stdout.take().expect("piped"));
        std::thread::spawn(move || out.lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
        self.all.push((child, receiver));
    }

    /// A newcomer, the next number, which dies so many µs after it has begun to join (0: it lives).
    fn newcomer(&mut self, ticket: &str, dies_after: u64) {
        self.add(dies_after, |command| command.env(TICKET, ticket));
    }

    /// The rest of the next line of a process that begins with `word`.
    fn line(&self, number: usize, word: &str) -> String {
        loop {
            let line = self.all[number].1.recv_timeout(LIMIT);
            let line = line.unwrap_or_else(|e| panic!("process {number}: no {word}: {e}"));
            if let Some(rest) = line.strip_prefix(word) {
                return rest.trim().to_owned();
            }
        }
    }

    fn kill(&self, number: usize) {
        kill_process(Pid::from_child(&self.all[number].0), Signal::KILL).expect("it is ours");
    }

    /// The expected processes end well.
    fn finish(&mut self) {
        for number in (0..self.all.len()).filter(|number| self.expected >> number & 1 == 1) {
            self.line(number, "ended");
            assert_eq!(self.all[number].0.wait().expect("its end").code(), Some(0), "process {number}");
        }
    }
}

#[test]
fn a_spare_takes_the_place_of_a_killed_rank_whichever_it_is() {
    for transport in ["shm", "tcp"] {
        for victim in 0..3 {
            let expected: Vec<usize> = (0..4).filter(|number| *number != victim).collect();
            let mut job = Job::start(transport, 3, &expected, 3, None);
            let ticket = job.line(0, "ticket");
            job.newcomer(&ticket, 0);
            (0..3).for_each(|rank| drop(job.line(rank, "waiting 1")));
            short_while(victim);
            job.kill(victim);
            // Its local rank, too.
            assert_eq!(job.line(3, "joined"), victim.to_string());
            job.finish();
        }
    }
}

#[test]
fn a_newcomer_that_dies_does_not_hold_up_the_group() {
    for (transport, after) in [
        ("shm", 1000),
        ("tcp", 3000),
        ("shm", 6000),
        ("tcp", 10_000),
        ("shm", 15_000),
        ("tcp", 25_000),
        ("shm", 50_000),
    ] {
        let mut job = Job::start(transport, 2, &[0, 1, 3], 8, None);
        let ticket = job.line(0, "ticket");
        job.newcomer(&ticket, after);
        job.newcomer(&ticket, 0);
        job.finish();
    }
}

#[test]
fn a_rank_that_dies_while_the_group_grows_is_left_out() {
    for (transport, first, second, after) in
        [("shm", 2, 0, 300), ("tcp", 0, 1, 3000), ("shm", 1, 0, 6000), ("tcp", 2, 1, 10_000), ("shm", 1, 2, 20_000)]
    {
        let expected: Vec<usize> = (0..5).filter(|number| ![first, second].contains(number)).collect();
        let mut job = Job::start(transport, 3, &expected, 3, Some((second, after)));
        let ticket = job.line(0, "ticket");
        job.newcomer(&ticket, 0);
        job.newcomer(&ticket, 0);
        (0..3).for_each(|rank| drop(job.line(rank, "waiting 2")));
        job.kill(first);
        job.finish();
    }
}

#[test]
fn a_ticket_is_good_while_one_rank_named_in_it_lives() {
    for (transport, last) in [("shm", 2), ("tcp", 0), (ENCRYPTED, 1)] {
        let mut job = Job::start(transport, 4, &[last, 4], 2, None);
        let ticket = job.line(0, "ticket");
        (1..4).for_each(|rank| drop(job.line(rank, "ticket")));
        let mut size = 4;
        for victim in (0..4).filter(|rank| *rank != last) {
            job.kill(victim);
            size -= 1;
            job.line(last, &format!("of {size}"));
        }
        job.newcomer(&ticket, 0);
        job.finish();
    }
}
