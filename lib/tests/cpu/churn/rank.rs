//! A process of the storm: trains in a group that loses and gains members, until the driver ends it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use program_kit::again::say;
use tinynccl::config::Tune;
use tinynccl::{Comm, Config, Error, ReduceOp, Result, SharedState};

use super::history::{WEIGHTS, hash, length, mix, part};
use super::{EXCLUDED, NUMBER, ROOM, TICKET, seconds};
use crate::survive::{HEARTBEAT, possessions};

/// Interval between two reports of progress.
const REPORT: Duration = Duration::from_millis(50);

/// Sends the library's lines to the driver.
struct Log;

impl log::Log for Log {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        eprintln!("{:.3} s: {}", seconds(), record.args());
    }

    fn flush(&self) {}
}

struct Rank {
    number: u64,
    comm: Comm,
    trained: bool,
    step: u64,
    weights: Vec<u64>,
    group: u64,
    ends: Arc<AtomicBool>,
}

/// Runs one process. It does nothing unless it is started for that.
#[test]
fn a_process() {
    let Ok(number) = std::env::var(NUMBER) else { return };
    // The lines of the library are shown when the storm fails.
    log::set_logger(&Log).expect("the first");
    log::set_max_level(log::LevelFilter::Debug);
    let ends = listen();
    let mut config = Config::from_env().expect("settings");
    (config.tune, config.heartbeat) = (Tune::Off, HEARTBEAT);
    let (comm, trained) = match std::env::var(TICKET) {
        Ok(ticket) => match Comm::from_ticket(&ticket.parse().expect("a ticket"), config) {
            Ok(comm) => (comm, false),
            Err(error) => leave("refused", &error),
        },
        Err(_) => (Comm::from_env_with(config).expect("a communicator"), true),
    };
    let number = number.parse().expect("a number");
    let mut rank = Rank { number, comm, trained, step: 0, weights: vec![0; WEIGHTS], group: 0, ends };
    loop {
        match rank.meet().and_then(|members| rank.train(&members)) {
            Ok(true) => break,
            Ok(false) => {}
            Err(error) => {
                say(&format!("error {error}"));
                rank.comm.revoke().expect("revoked");
            }
        }
        rank.comm = rank.comm.grow(ROOM).unwrap_or_else(|error| leave("excluded", &error));
    }
    rank.comm.close().expect("nothing has failed");
    say(&format!("ended {} {} {}", rank.group, rank.step, hash(&rank.weights)));
}

fn leave(word: &str, error: &Error) -> ! {
    say(&format!("{word} {error}"));
    std::process::exit(EXCLUDED);
}

/// True once the driver has sent a line. Ends the process when the driver is gone.
fn listen() -> Arc<AtomicBool> {
    let ends = Arc::new(AtomicBool::new(false));
    let theirs = ends.clone();
    std::thread::spawn(move || {
        while std::io::stdin().read_line(&mut String::new()).is_ok_and(|length| length > 0) {
            theirs.store(true, Ordering::Relaxed);
        }
        std::process::exit(1);
    });
    ends
}

impl Rank {
    /// The first calls in a group: who is here, and the weights of those that have come furthest. Returns the members.
    fn meet(&mut self) -> Result<Vec<u64>> {
        if let Ok(ticket) = self.comm.ticket() {
            say(&format!("ticket {ticket}"));
        }
        let mut random = [0; 8];
        rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty()).expect("random bytes");
        let random = u64::from_le_bytes(random);
        let ours = [self.number, random, self.trained.into(), self.step, self.group];
        let mut all = vec![0; ours.len() * self.comm.size()];
        self.comm.all_gather(&ours, &mut all)?;
        let (all, _) = all.as_chunks::<5>();
        // A rank may have finished a step in which others saw the failure.
        let trained = all.iter().filter(|[_, _, trained, ..]| *trained == 1);
        let &[.., step, from] = trained.clone().max_by_key(|[.., step, _]| step).expect("one with weights");
        assert!(trained.into_iter().all(|[.., one, _]| step - one <= 1), "more than a step apart: {all:?}");
        // A copy: if the rank that is a step ahead dies meanwhile, ours are still whole.
        let (mut weights, mut revision) = (self.weights.clone(), self.trained.then_some(self.step));
        let outcome = SharedState::new(&mut revision).buffer("weights", &mut weights).synchronize(&self.comm)?;
        assert_eq!((outcome.revision, outcome.differing), (step, vec![]), "{all:?}");
        (self.weights, self.step, self.trained) = (weights, step, true);
        self.group = all.iter().fold(1, |group, [_, random, ..]| mix(group ^ random)) | 1;
        let members: Vec<u64> = all.iter().map(|[number, ..]| *number).collect();
        let names = members.iter().map(u64::to_string).collect::<Vec<_>>().join(",");
        say(&format!("changed {} {step} {} {from} {names}", self.group, hash(&self.weights)));
        Ok(members)
    }

    /// Steps until the group is to change (false), or to end (true).
    fn train(&mut self, members: &[u64]) -> Result<bool> {
        let mut reported: Option<Instant> = None;
        loop {
            let length = length(self.step);
            let own = part(self.number, self.step);
            let values = |first: u64| (1..=length as u64).map(move |place| first * place);
            let facts = [self.comm.waiting() as u64, u64::from(self.ends.load(Ordering::Relaxed))];
            let input: Vec<u64> = values(own).chain(facts).collect();
            let mut output = vec![0; input.len()];
            let met = self.comm.all_reduce(&input, &mut output, ReduceOp::Sum);
            assert!(input.iter().copied().eq(values(own).chain(facts)), "an input is changed");
            met?;
            let sum = members.iter().map(|&member| part(member, self.step)).sum();
            let wrong = output.iter().zip(values(sum)).position(|(found, right)| *found != right);
            assert_eq!(wrong, None, "step {} of {members:?}", self.step);
            self.weights.iter_mut().zip(values(sum)).for_each(|(weight, sum)| *weight = weight.wrapping_add(sum));
            self.step += 1;
            if reported.is_none_or(|at| at.elapsed() >= REPORT) {
                reported = Some(Instant::now());
                let [descriptors, threads, mappings] = possessions();
                say(&format!("at {} {} {descriptors} {threads} {mappings}", self.group, self.step));
            }
            if output[length + 1] > 0 {
                return Ok(true);
            }
            if output[length] > 0 && self.comm.size() < ROOM {
                return Ok(false);
            }
            // A gradient takes time, too: some ranks are not in a call when another dies.
            if own.is_multiple_of(2) {
                std::thread::sleep(Duration::from_micros(own % 2000));
            }
        }
    }
}
