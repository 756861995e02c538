//! Equal state on all ranks: what moves, who wins, and ranks that die meanwhile.
//!
//! Ranks as threads, and as processes where one dies. This test binary runs itself again, once per process.

use program_kit::again::{self, Process, hear, say};
use rustix::process::{Signal, getpid, kill_process};
use tinynccl::bootstrap::{Server, UniqueId};
use tinynccl::config::{TransportChoice, Tune};
use tinynccl::{Comm, Config, Error, Result, SharedState, Synchronized};

use crate::common::{FABRICS, Fabric, config, run, run_ok};
use crate::join::wait_for;
use crate::storm::numbers;
use crate::survive::HEARTBEAT;

const CHUNK: usize = 256 << 10;

/// State of a rank that trains: buffers whose lengths are no multiples of a chunk, and counters.
#[derive(Debug, Clone)]
struct State {
    revision: Option<u64>,
    weights: Vec<f32>,
    moments: Vec<f64>,
    counters: [u64; 2],
}

impl State {
    /// The state of a revision, which has `megabytes` MiB and a little more. Its floats are any bits, NaNs among them.
    fn of(revision: u64, megabytes: usize) -> State {
        let word = |i: usize| (i as u64 + revision).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        State {
            revision: Some(revision),
            weights: (0..(megabytes << 17) + 1).map(|i| f32::from_bits((word(i) >> 32) as u32)).collect(),
            moments: (0..(megabytes << 16) + 777).map(|i| f64::from_bits(word(i))).collect(),
            counters: [revision, 7],
        }
    }

    fn newcomer(megabytes: usize) -> State {
        let State { weights, moments, .. } = State::of(0, megabytes);
        State { revision: None, weights: vec![0.5; weights.len()], moments: vec![0.0; moments.len()], counters: [0; 2] }
    }

    fn synchronize(&mut self, comm: &Comm) -> Result<Synchronized> {
        let State { revision, weights, moments, counters } = self;
        let shared = SharedState::new(revision).buffer("weights", weights).buffer("moments", moments);
        shared.buffer("counters", counters).synchronize(comm)
    }

    /// Revision and contents, as bits.
    fn bits(&self) -> (Option<u64>, Vec<u32>, Vec<u64>, [u64; 2]) {
        let weights = self.weights.iter().map(|value| value.to_bits()).collect();
        (self.revision, weights, self.moments.iter().map(|value| value.to_bits()).collect(), self.counters)
    }

    fn bytes(&self) -> usize {
        4 * self.weights.len() + 8 * self.moments.len() + 16
    }
}

fn taken(outcome: &Synchronized) -> usize {
    outcome.taken.iter().map(|(_, bytes)| bytes).sum()
}

/// Synchronizes one state per rank, which must all be `right` then. Returns the outcome of each rank.
fn meet(fabric: Fabric, states: &[State], right: &State) -> Vec<Synchronized> {
    let outcomes = run_ok(fabric, states.len(), &config(), |comm| {
        let mut state = states[comm.rank()].clone();
        let outcome = state.synchronize(&comm)?;
        assert_eq!(Some(outcome.revision), right.revision);
        assert!(state.bits() == right.bits(), "{fabric:?}: rank {} of {}", comm.rank(), comm.size());
        Ok(outcome)
    });
    assert!(outcomes.iter().all(|one| one.digest == outcomes[0].digest));
    assert!(outcomes.iter().all(|one| one.differing == outcomes[0].differing));
    let [all_taken, sent] = [outcomes.iter().map(taken).sum::<usize>(), outcomes.iter().map(|one| one.sent).sum()];
    assert_eq!(all_taken, sent);
    outcomes
}

#[test]
fn what_is_there_does_not_move() {
    for fabric in FABRICS {
        for ranks in [1, 2, 5] {
            let right = State::of(3, 1);
            for one in meet(fabric, &vec![right.clone(); ranks], &right) {
                assert_eq!((one.taken, one.sent, one.differing), (vec![], 0, vec![]));
            }
            // One that had got all when another rank died, and a rank that counts otherwise.
            let mut states = vec![right.clone(); ranks + 2];
            (states[0].revision, states[1].revision) = (None, Some(1));
            assert!(meet(fabric, &states, &right).iter().all(|one| one.taken.is_empty() && one.sent == 0));
            // One that had got a part.
            states[0].weights[..CHUNK / 4 + 1].fill(0.5);
            assert_eq!(meet(fabric, &states, &right)[0].taken, [("weights".to_owned(), 2 * CHUNK)]);
        }
    }
}

#[test]
fn of_a_rank_that_differs_in_a_bit_one_chunk_moves() {
    for fabric in FABRICS {
        let right = State::of(9, 2);
        let mut states = vec![right.clone(); 3];
        states[1].weights[CHUNK / 4] = f32::from_bits(right.weights[CHUNK / 4].to_bits() ^ 1);
        let outcomes = meet(fabric, &states, &right);
        assert_eq!(outcomes[1].taken, [("weights".to_owned(), CHUNK)]);
        assert_eq!(outcomes.iter().map(|one| one.sent).sum::<usize>(), CHUNK);
        assert!(outcomes.iter().all(|one| one.differing == [1]));
    }
}

#[test]
fn newcomers_get_all_once_from_all_holders_and_from_each_other() {
    for fabric in FABRICS {
        for (holders, newcomers) in [(1, 1), (3, 1), (2, 2), (1, 4)] {
            let right = State::of(5, 3);
            let mut states = vec![State::newcomer(3); holders + newcomers];
            states[..holders].fill(right.clone());
            // Newcomers may come first.
            states.reverse();
            let outcomes = meet(fabric, &states, &right);
            let (new, old) = outcomes.split_at(newcomers);
            for one in new {
                let buffers: Vec<&str> = one.taken.iter().map(|(name, _)| name.as_str()).collect();
                assert_eq!((buffers, taken(one)), (vec!["weights", "moments", "counters"], right.bytes()));
            }
            assert!(old.iter().all(|one| one.taken.is_empty()));
            for side in [new, old] {
                let sent = side.iter().map(|one| one.sent);
                // The price of the short chunks at the ends of the buffers counts, too.
                assert!(sent.clone().max().unwrap() - sent.min().unwrap() <= 2 * CHUNK, "{outcomes:?}");
            }
            assert_eq!(old.iter().map(|one| one.sent).sum::<usize>(), right.bytes());
        }
    }
}

#[test]
fn the_rank_with_a_step_more_wins() {
    let (right, older) = (State::of(6, 1), State::of(5, 1));
    for fabric in FABRICS {
        let outcomes = meet(fabric, &[older.clone(), older.clone(), right.clone(), State::newcomer(1)], &right);
        assert!(outcomes.iter().all(|one| one.differing.is_empty()));
    }
}

/// Refuses with the same words on all ranks, of which none changes anything, and which go on.
fn refuse(
    ranks: usize,
    attempt: impl Fn(&Comm, &mut Option<u64>, &mut [f32]) -> Result<Synchronized> + Sync,
) -> String {
    let errors = run(Fabric::Tcp, ranks, &config(), |comm| {
        let (mut revision, mut weights) = (Some(3), vec![comm.rank() as f32; 5]);
        let error = attempt(&comm, &mut revision, &mut weights).expect_err("refused");
        assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
        assert_eq!((revision, &weights), (Some(3), &vec![comm.rank() as f32; 5]));
        // The way out: rank 0 is right.
        revision = revision.filter(|_| comm.rank() == 0);
        SharedState::new(&mut revision).buffer("weights", &mut weights).synchronize(&comm).expect("rank 0 wins");
        assert_eq!((revision, weights), (Some(3), vec![0.0; 5]));
        comm.close().expect("nothing has failed");
        error.to_string()
    });
    assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
    errors[0].clone()
}

#[test]
fn different_declarations_are_named_on_all_ranks() {
    let error = refuse(3, |comm, revision, weights| {
        let name = if comm.rank() == 2 { "wights" } else { "weights" };
        SharedState::new(revision).buffer(name, weights).synchronize(comm)
    });
    assert_eq!(error, "synchronize: buffer 0 differs: rank 0 has 'weights' of 5 f32, rank 2 has 'wights' of 5 f32");
    let error = refuse(2, |comm, revision, weights| {
        let (mut floats, mut words) = ([0f32; 3], [0u32; 3]);
        let state = SharedState::new(revision).buffer("weights", &mut weights[comm.rank()..]);
        let mut state = if comm.rank() == 0 { state.buffer("b", &mut floats) } else { state.buffer("b", &mut words) };
        state.synchronize(comm)
    });
    let expected = "buffer 0 differs: rank 0 has 'weights' of 5 f32, rank 1 has 'weights' of 4 f32";
    assert!(error.ends_with(expected), "{error}");
    let error = refuse(2, |comm, revision, weights| {
        let (mut floats, mut words) = ([0f32; 3], [0u32; 3]);
        let state = SharedState::new(revision).buffer("weights", weights);
        let mut state = if comm.rank() == 0 { state.buffer("b", &mut floats) } else { state.buffer("b", &mut words) };
        state.synchronize(comm)
    });
    assert!(error.ends_with("buffer 1 differs: rank 0 has 'b' of 3 f32, rank 1 has 'b' of 3 u32"), "{error}");
    let error = refuse(2, |comm, revision, weights| {
        let mut bytes = Vec::new();
        let state = SharedState::new(revision).buffer("weights", weights);
        if comm.rank() == 1 { state.vec("more", &mut bytes) } else { state }.synchronize(comm)
    });
    assert!(error.ends_with("rank 0 has no such buffer, rank 1 has 'more', a vector of u8"), "{error}");
}

#[test]
fn a_tie_is_an_error_and_so_are_newcomers_alone() {
    let attempt = |comm: &Comm, revision: &mut _, weights: &mut [f32]| {
        SharedState::new(revision).buffer("weights", weights).synchronize(comm)
    };
    let error = refuse(2, attempt);
    assert!(error.contains("ranks [0] and ranks [1] have different contents of revision 3"), "{error}");
    let error = refuse(3, |comm, _, weights| SharedState::new(&mut None).buffer("weights", weights).synchronize(comm));
    assert!(error.contains("none of the 3 ranks has a whole state"), "{error}");
}

#[test]
fn vectors_take_the_length_of_the_state_that_wins() {
    for fabric in FABRICS {
        for (ours, theirs) in [(0, 5), (5, 0), (3 * CHUNK + 1, CHUNK), (CHUNK, 3 * CHUNK + 1), (10, 10)] {
            let taken = run_ok(fabric, 3, &config(), |comm| {
                let new = comm.rank() == 2;
                let (mut revision, mut text) = ((!new).then_some(1), vec![b'x'; if new { ours } else { theirs }]);
                let (mut before, mut after) = ([1u8, 2], [u64::from(!new)]);
                let state = SharedState::new(&mut revision).buffer("before", &mut before).vec("text", &mut text);
                let outcome = state.buffer("after", &mut after).synchronize(&comm)?;
                assert_eq!((revision, text, after), (Some(1), vec![b'x'; theirs], [1]));
                Ok(outcome.taken)
            });
            assert_eq!([&taken[0], &taken[1]], [&[], &[]]);
            let mut expected = vec![("text".to_owned(), theirs), ("after".to_owned(), 8)];
            match (ours, theirs) {
                // Whole chunks of the same bytes need not come.
                (_, CHUNK) => expected[0].1 = 0,
                (CHUNK, _) => expected[0].1 = theirs - CHUNK,
                (10, _) => drop(expected.remove(0)),
                _ => {}
            }
            assert_eq!(taken[2], expected);
        }
    }
}

#[test]
fn many_small_buffers_and_empty_ones() {
    for fabric in FABRICS {
        run_ok(fabric, 3, &config(), |comm| {
            let value = |new: bool, i: usize| vec![if new { 0 } else { i as i16 + 1 }; i % 5];
            let mut buffers: Vec<Vec<i16>> = (0..2000).map(|i| value(comm.rank() == 1, i)).collect();
            let mut revision = (comm.rank() != 1).then_some(u64::MAX);
            let state = SharedState::new(&mut revision).buffer::<f64>("nothing", &mut []);
            let numbered = buffers.iter_mut().enumerate();
            let mut state = numbered.fold(state, |state, (i, buffer)| state.buffer(&i.to_string(), buffer));
            let outcome = state.synchronize(&comm)?;
            assert_eq!(outcome.taken.len(), if comm.rank() == 1 { 1600 } else { 0 });
            assert!(buffers.iter().enumerate().all(|(i, buffer)| *buffer == value(false, i)));
            assert_eq!(SharedState::new(&mut revision).synchronize(&comm)?.revision, u64::MAX);
            Ok(())
        });
    }
}

#[test]
fn any_damage_is_mended() {
    let mut random = numbers(5);
    for round in 0..24 {
        let right = State::of(round, 1);
        let ranks = 1 + random(6);
        let mut states = vec![right.clone(); ranks];
        let whole = random(ranks);
        for (rank, state) in states.iter_mut().enumerate().filter(|(rank, _)| *rank != whole) {
            state.revision = [None, Some(round.saturating_sub(1)), Some(round)][random(3)];
            if state.revision == Some(round) {
                continue;
            }
            for _ in 0..random(4) {
                let (first, length) = (random(state.moments.len()), random(state.moments.len()));
                state.moments.iter_mut().skip(first).take(length).for_each(|value| *value = rank as f64);
            }
            if random(2) == 0 {
                state.weights.reverse();
            }
        }
        meet(FABRICS[random(3)], &states, &right);
    }
}

const TEST: &str = "shared_state::a_rank_that_dies_meanwhile_costs_no_bit";
/// Beginning of a line of the library in the middle of a transfer.
const MIDDLE: &str = "synchronize: wave 2 of";
const MEGABYTES: usize = 16;

/// Ends the process in the middle of a transfer.
struct Dies;

impl log::Log for Dies {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        if record.args().to_string().contains(MIDDLE) {
            kill_process(getpid(), Signal::KILL).expect("it is ours");
        }
    }

    fn flush(&self) {}
}

/// A process: synchronizes, goes on without one that dies meanwhile, and synchronizes again.
fn process(role: &str) {
    let words: Vec<&str> = role.split(' ').collect();
    let [transport, place, key, revision, dies] = words[..] else { panic!("{role}") };
    let mut config = Config::default().with(|c| c.tune = Tune::Off);
    config.heartbeat = HEARTBEAT;
    config.transport = if transport == "shm" { TransportChoice::Shm } else { TransportChoice::Tcp };
    let mut state = revision.parse().map_or_else(|_| State::newcomer(MEGABYTES), |step| State::of(step, MEGABYTES));
    let comm = match place.parse() {
        Ok(rank) => {
            let id: UniqueId = key.parse().expect("an id");
            let comm = Comm::init(&id, rank, 3, config).expect("a communicator");
            if rank == 0 {
                say(&comm.ticket().expect("a ticket").to_string());
            }
            wait_for(&comm, 1);
            comm.grow(4).expect("grown")
        }
        Err(_) => Comm::from_ticket(&key.parse().expect("a ticket"), config).expect("joined"),
    };
    if dies == "dies" {
        log::set_logger(&Dies).expect("the first");
        log::set_max_level(log::LevelFilter::Trace);
    }
    let before = state.revision;
    let first = state.synchronize(&comm);
    say(&format!("{first:?}"));
    let comm = match first {
        Ok(_) => comm,
        Err(_) => {
            // A rank that others take from is as it was, any other one has no vote.
            assert!(state.revision.is_none_or(|revision| Some(revision) == before));
            assert_eq!(state.revision.is_some(), state.bits() == State::of(before.unwrap_or(0), MEGABYTES).bits());
            comm.revoke().expect("revoked");
            comm.shrink().expect("shrunk")
        }
    };
    match state.synchronize(&comm) {
        Ok(outcome) => {
            assert!(state.bits() == State::of(outcome.revision, MEGABYTES).bits());
            say(&format!("{} {}", outcome.revision, taken(&outcome)));
        }
        Err(error) => say(&error.to_string()),
    }
    hear();
    say("done");
}

/// Runs three ranks with these revisions and a newcomer, of which `victim` dies in the middle of the transfer. Returns
/// the last words of the others.
fn lose(transport: &str, revisions: [u64; 3], victim: Option<usize>) -> Vec<String> {
    let server = Server::start("127.0.0.1:0".parse().expect("an address"), 3, &Config::default()).expect("a store");
    let start = |number: usize, place: &str, key: &str| {
        let revision = revisions.get(number).map_or("none".to_owned(), u64::to_string);
        let dies = if victim == Some(number) { "dies" } else { "lives" };
        again::start(&[], TEST, &format!("{transport} {place} {key} {revision} {dies}"), &[])
    };
    let id = server.unique_id().to_string();
    let mut all: Vec<Process> = (0..3).map(|rank| start(rank, &rank.to_string(), &id)).collect();
    let ticket = all[0].line();
    all.push(start(3, "newcomer", &ticket));
    // Dropped, it would be killed at once.
    let _dies = victim.map(|victim| all.remove(victim));
    for process in &mut all {
        assert_eq!(process.line().starts_with("Ok"), victim.is_none());
    }
    let words = all.iter_mut().map(Process::line).collect();
    // The one that hosts the store waits for the others' goodbyes.
    all.iter_mut().for_each(|process| process.tell("end"));
    all.into_iter().for_each(Process::finish);
    words
}

#[test]
fn a_rank_that_dies_meanwhile_costs_no_bit() {
    if let Some(role) = again::role() {
        return process(&role);
    }
    let whole = State::of(0, MEGABYTES).bytes();
    for transport in ["shm", "tcp"] {
        assert_eq!(lose(transport, [5, 5, 4], None), ["5 0"; 4]);
        for victim in 0..4 {
            let words = lose(transport, [5, 5, 4], Some(victim));
            for (number, words) in (0..4).filter(|number| *number != victim).zip(words) {
                let (revision, taken) = words.split_once(' ').expect("two numbers");
                assert_eq!(revision, "5");
                let taken: usize = taken.parse().expect("a number");
                // Some waves have not come to any rank.
                let right = if number < 2 { taken == 0 } else { 0 < taken && taken <= whole };
                assert!(right, "process {number} took {taken} bytes of {whole}");
            }
        }
        // The one that has the newest state: the others were a step behind, and have parts of two now.
        for words in lose(transport, [4, 4, 5], Some(2)) {
            assert!(words.contains("none of the 3 ranks has a whole state"), "{words}");
        }
    }
}
