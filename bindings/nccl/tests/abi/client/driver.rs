//! Calls in random order with random arguments, right and wrong ones, in groups, beside threads, signals and forks; and a
//! small model of what must come out: the class of an error, the values of sums, and that every call ends.
//!
//! It runs for 20 seconds. `SECONDS=3600 SEED=7 cargo test -p tinynccl-nccl --test abi driver` runs longer, and the same
//! calls again.

use std::ffi::{c_int, c_void};
use std::time::{Duration, Instant};

use nccl::abi::{Config, UniqueId};

use super::functions::*;
use super::random::Random;
use super::rank::{
    IN_PROGRESS, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR, Rank, SUCCESS, async_error, gpu, group, ok, unique_id,
};
use super::types::{I32, SUM};

const RANKS: usize = 3;
/// Worlds at once.
const MOST: usize = 5;
const NULL: *mut c_void = std::ptr::null_mut();

/// A communicator, all of its ranks in this thread. Its ranks are in the order of their numbers.
struct World {
    ranks: Vec<Rank>,
}

struct Driver {
    random: Random,
    seed: u64,
    step: usize,
    worlds: Vec<World>,
    /// Handles that name nothing any more, and ids that were used.
    dead: Vec<Comm>,
    used: Vec<UniqueId>,
}

/// A number of the environment.
fn given(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// Time for which the driver runs.
pub(super) fn duration() -> Duration {
    Duration::from_secs(given("SECONDS").unwrap_or(20))
}

impl Driver {
    fn below(&mut self, end: usize) -> usize {
        self.random.below(end)
    }

    fn coin(&mut self) -> bool {
        self.below(2) == 0
    }

    /// A number that is far from all that have a meaning, or near.
    fn odd(&mut self) -> c_int {
        [i32::MIN, -1_000_000, -2, 99, 4096, 1 << 24, i32::MAX][self.below(7)]
    }

    #[track_caller]
    fn expect(&self, what: &str, got: c_int, expected: c_int) {
        let text = last_error(NULL);
        assert_eq!(got, expected, "seed {}, step {}: {what}: {text}", self.seed, self.step);
        let error = !matches!(expected, SUCCESS | IN_PROGRESS);
        assert!(!error || !text.is_empty(), "seed {}, step {}: {what}: an error without words", self.seed, self.step);
    }

    fn world(&mut self) -> Option<usize> {
        let worlds = self.worlds.len();
        (worlds > 0).then(|| self.below(worlds))
    }

    /// Sums over a world: the values must be right, whatever went wrong before.
    fn sum(&mut self, world: usize) {
        let (count, in_group) = (self.below(300), self.coin());
        let ranks = &self.worlds[world].ranks;
        let value = |rank: usize| (rank * 7 + count) as i64;
        let memory: Vec<_> = ranks
            .iter()
            .map(|one| one.memory(&I32.bytes(std::iter::repeat_n(value(one.rank), count.max(1)))))
            .collect();
        let calls = || {
            for (one, memory) in ranks.iter().zip(&memory) {
                let (at, to) = (memory.at(0), memory.at_mut(0));
                ok(ncclAllReduce(at, to, count, I32.code, SUM, one.comm, one.stream()));
            }
        };
        if in_group {
            group(calls)
        } else {
            calls()
        }
        let sum = (0..ranks.len()).map(value).sum();
        for (one, memory) in ranks.iter().zip(&memory) {
            one.wait();
            if count > 0 {
                assert_eq!(memory.read(), I32.bytes(std::iter::repeat_n(sum, count)), "step {}", self.step);
            }
        }
    }

    /// A call with one thing wrong: the error's class, and nothing happens.
    fn wrong_call(&mut self) {
        let Some(world) = self.world() else { return };
        let (what, odd, root) = (self.below(9), self.odd(), self.odd());
        let dead = self.dead.len().checked_sub(1).map_or(NULL, |last| self.dead[self.random.below(last + 1)]);
        let (size, at) = (self.worlds[world].ranks.len(), self.below(self.worlds[world].ranks.len()));
        let in_group = self.coin();
        let one = &self.worlds[world].ranks[at];
        let memory = one.memory(&[0; 1024]);
        let (buffer, stream, comm) = (memory.at_mut(0), one.stream(), one.comm);
        if in_group {
            ok(ncclGroupStart());
            // A right one before it is not done either.
            ok(ncclAllReduce(buffer, buffer, 4, I32.code, SUM, comm, stream));
        }
        let root = if (0..size as c_int).contains(&root) { -1 } else { root };
        let got = match what {
            0 => ncclBcast(buffer, 4, I32.code, root, comm, stream),
            1 => ncclAllGather(buffer, buffer, 4, if (0..12).contains(&odd) { 12 } else { odd }, comm, stream),
            2 => ncclAllReduce(buffer, buffer, 4, I32.code, if (0..5).contains(&odd) { 5 } else { odd }, comm, stream),
            3 => ncclSend(buffer, 4, I32.code, root, comm, stream),
            4 => ncclRecv(buffer, 4, I32.code, 0, NULL, stream),
            5 => ncclReduce(buffer, buffer, 4, I32.code, SUM, 0, dead, stream),
            6 => ncclAllReduce(buffer, buffer, usize::MAX / 2 - odd as usize % 7, I32.code, SUM, comm, stream),
            7 => ncclReduceScatter(memory.at(1), memory.at_mut(513), 4, I32.code, SUM, comm, stream),
            _ => ncclScatter(buffer, buffer, 1, 99, root, comm, stream),
        };
        if in_group && !matches!(what, 6 | 7) {
            self.expect(&format!("wrong call {what}"), got, INVALID_ARGUMENT);
        }
        // Lengths and addresses are checked when the group ends.
        let status = if in_group { ncclGroupEnd() } else { got };
        self.expect(&format!("wrong call {what}, in a group: {in_group}"), status, INVALID_ARGUMENT);
        if in_group && matches!(what, 6 | 7) {
            // The calls before it in the group may have been enqueued by this rank alone.
            return self.close(world, true);
        }
        self.sum(world);
    }

    /// Other functions with one thing wrong.
    fn wrong_function(&mut self) {
        let (odd, what) = (self.odd(), self.below(16));
        let mut comm = NULL;
        let mut bytes = UniqueId { internal: [0; 128] };
        for byte in &mut bytes.internal {
            *byte = self.random.below(256) as u8;
        }
        let used = self.used.len().checked_sub(1).map(|last| self.used[self.random.below(last + 1)]);
        let one = self.world().map_or(NULL, |world| self.worlds[world].ranks[0].comm);
        let argument = INVALID_ARGUMENT;
        let mut config = Config { version: 23_007, ..Config::NOTHING };
        match odd % 5 {
            0 => config.magic ^= 1,
            1 => config.blocking = 2,
            2 => config.cta_policy = 77,
            3 => config.nvls_ctas = -3,
            _ => config.max_ctas = 0,
        }
        let (got, expected) = match what {
            0 => (ncclGroupEnd(), INVALID_USAGE),
            1 => (ncclMemFree(16 as *mut c_void), argument),
            2 => (
                ncclCommDeregister(one, 0x77_7777 as *mut c_void),
                if one.is_null() { argument } else { INVALID_USAGE },
            ),
            3 => (ncclCommRevoke(one, odd), if one.is_null() { SUCCESS } else { argument }),
            4 => (ncclCommInitRank(&mut comm, odd.min(0), unique_id(), 0), argument),
            5 => (ncclCommInitRank(&mut comm, 2, unique_id(), 2 + odd.unsigned_abs() as c_int / 2), argument),
            6 => (ncclCommInitRank(&mut comm, 2, bytes, 0), argument),
            7 => match used {
                Some(used) => (ncclCommInitRank(&mut comm, 2, used, 0), INVALID_USAGE),
                None => return,
            },
            8 => (ncclCommInitRankConfig(&mut comm, 1, unique_id(), 0, &config), argument),
            9 => (ncclCommGetAsyncError(one, std::ptr::null_mut()), argument),
            10 => (ncclCommShrink(one, std::ptr::null(), odd, &mut comm, std::ptr::null(), 0), argument),
            11 => (ncclCommWindowRegister(one, 0x1001 as *mut c_void, 64, &mut comm, 0), argument),
            12 => (ncclRedOpDestroy(odd, one), argument),
            13 => (ncclCommSuspend(one, odd), argument),
            14 => (ncclCommInitAll(&mut comm, -odd.saturating_abs(), std::ptr::null()), argument),
            _ => (ncclGetUniqueId(std::ptr::null_mut()), argument),
        };
        self.expect(&format!("wrong function {what}"), got, expected);
        assert!(comm.is_null());
    }

    /// A new communicator.
    fn open(&mut self) {
        if self.worlds.len() >= MOST {
            return;
        }
        let size = 1 + self.below(RANKS);
        let mut comms = vec![NULL; size];
        let how = self.below(4);
        match how {
            0 => ok(ncclCommInitAll(comms.as_mut_ptr(), size as c_int, std::ptr::null())),
            1 | 2 => {
                let id = unique_id();
                let blocking = c_int::from(how == 1);
                let config = Config { version: 23_007, blocking, ..Config::NOTHING };
                ok(ncclGroupStart());
                for (rank, comm) in comms.iter_mut().enumerate() {
                    let _gpu = gpu(rank);
                    let status = ncclCommInitRankConfig(comm, size as c_int, id, rank as c_int, &config);
                    assert!(status == SUCCESS || status == IN_PROGRESS);
                }
                let status = ncclGroupEnd();
                assert!(status == SUCCESS || blocking == 0 && status == IN_PROGRESS, "{}", last_error(NULL));
                self.used.push(id);
            }
            _ => return self.split(),
        }
        for &comm in &comms {
            self.settle(comm);
        }
        let ranks = comms.into_iter().enumerate().map(|(rank, comm)| Rank::of(comm, rank, size, gpu(rank)));
        self.worlds.push(World { ranks: ranks.collect() });
    }

    fn settle(&self, comm: Comm) {
        while async_error(comm) == IN_PROGRESS {
            std::thread::yield_now();
        }
        self.expect("a new communicator", async_error(comm), SUCCESS);
    }

    /// Parts of a world, perhaps with a colour that is none: then there are no parts, and the world goes on.
    fn split(&mut self) {
        let Some(world) = self.world() else { return };
        let size = self.worlds[world].ranks.len();
        let refuses = if self.below(3) == 0 { self.below(size) } else { size };
        let colors: Vec<c_int> = (0..size).map(|_| self.below(3) as c_int - 1).collect();
        let mut comms = vec![NULL; size];
        ok(ncclGroupStart());
        for (rank, one) in self.worlds[world].ranks.iter().enumerate() {
            let color = if rank == refuses { i32::MIN + rank as c_int } else { colors[rank] };
            let status = ncclCommSplit(one.comm, color, 0, &mut comms[rank], std::ptr::null());
            let expected = if rank == refuses { INVALID_ARGUMENT } else { SUCCESS };
            self.expect("a part of a split", status, expected);
        }
        let status = ncclGroupEnd();
        if refuses < size {
            self.expect("a split that a rank refuses", status, INVALID_ARGUMENT);
            for &comm in comms.iter().filter(|comm| !comm.is_null()) {
                self.expect("a part that was not made", async_error(comm), INVALID_ARGUMENT);
                ok(ncclCommAbort(comm));
                self.dead.push(comm);
            }
            return self.sum(world);
        }
        assert!(status == SUCCESS || status == IN_PROGRESS, "{}", last_error(NULL));
        let parents: Vec<Comm> = self.worlds[world].ranks.iter().map(|one| one.comm).collect();
        parents.into_iter().for_each(|comm| self.settle(comm));
        for color in [0, 1] {
            let members: Vec<usize> = (0..size).filter(|&rank| colors[rank] == color).collect();
            let ranks = members.iter().enumerate().map(|(place, &rank)| {
                let context = self.worlds[world].ranks[rank].context.clone();
                self.settle(comms[rank]);
                Rank::of(comms[rank], place, members.len(), context)
            });
            let ranks: Vec<Rank> = ranks.collect();
            if !ranks.is_empty() {
                self.worlds.push(World { ranks });
            }
        }
        while self.worlds.len() > MOST {
            let world = self.below(self.worlds.len());
            self.close(world, false);
        }
    }

    /// Ends a world, rank by rank in random order: in good order, or by aborts.
    fn close(&mut self, world: usize, abort: bool) {
        let mut ranks = self.worlds.swap_remove(world).ranks;
        let how = self.below(3);
        while !ranks.is_empty() {
            let one = ranks.swap_remove(self.random.below(ranks.len()));
            if abort || how == 0 {
                ok(ncclCommAbort(one.comm));
            } else {
                if how == 1 {
                    let status = ncclCommFinalize(one.comm);
                    assert!(status == SUCCESS || status == IN_PROGRESS, "{}", last_error(one.comm));
                    self.settle(one.comm);
                }
                ok(ncclCommDestroy(one.comm));
            }
            self.expect("the handle of a communicator that has gone", ncclCommDestroy(one.comm), INVALID_ARGUMENT);
            self.dead.push(one.comm);
        }
    }

    /// Ranks that disagree: all have an error, and can be destroyed.
    fn disagree(&mut self) {
        let Some(world) = self.world().filter(|&world| self.worlds[world].ranks.len() > 1) else { return };
        let counts = [self.below(3), 3 + self.below(3)];
        let ranks = &self.worlds[world].ranks;
        let memory: Vec<_> = ranks.iter().map(|one| one.memory(&[0; 64])).collect();
        ok(ncclGroupStart());
        for (one, memory) in ranks.iter().zip(&memory) {
            let count = counts[usize::from(one.rank == 0)];
            ok(ncclAllReduce(memory.at(0), memory.at_mut(0), count, I32.code, SUM, one.comm, one.stream()));
        }
        let ended = ncclGroupEnd();
        assert!(matches!(ended, SUCCESS | INVALID_USAGE | REMOTE_ERROR), "{}", last_error(NULL));
        for one in ranks {
            while async_error(one.comm) == SUCCESS {
                std::thread::yield_now();
            }
            let status = async_error(one.comm);
            assert!(matches!(status, INVALID_USAGE | REMOTE_ERROR), "{status}: {}", last_error(one.comm));
        }
        // Those of non-blocking communicators wait until the abort.
        let streams: Vec<_> = ranks.iter().map(|one| one.stream.clone()).collect();
        self.close(world, true);
        streams.iter().for_each(|stream| stream.synchronize().unwrap());
    }

    /// A start whose other rank never comes is ended by an abort, or by the end of its group.
    fn alone(&mut self) {
        let config = Config { version: 23_007, blocking: 0, ..Config::NOTHING };
        let (fault, mut comm) = (self.coin(), NULL);
        let _gpu = gpu(0);
        ok(ncclGroupStart());
        let begun = ncclCommInitRankConfig(&mut comm, 2, unique_id(), 0, &config);
        assert!(matches!(begun, SUCCESS | IN_PROGRESS));
        if fault {
            self.expect("a call in its group", ncclBcast(NULL, 1, I32.code, 0, NULL, NULL), INVALID_ARGUMENT);
        }
        let expected = if fault { INVALID_ARGUMENT } else { IN_PROGRESS };
        self.expect("the group", ncclGroupEnd(), expected);
        self.expect("the communicator", async_error(comm), expected);
        ok(if fault { ncclCommDestroy(comm) } else { ncclCommAbort(comm) });
        self.dead.push(comm);
    }

    /// Threads that only query, beside sums.
    fn beside(&mut self) {
        let Some(world) = self.world() else { return };
        let comms: Vec<usize> =
            self.worlds.iter().flat_map(|world| &world.ranks).map(|one| one.comm as usize).collect();
        let dead = self.dead.last().map_or(0, |comm| *comm as usize);
        std::thread::scope(|scope| {
            for first in 0..3 {
                let comms = &comms;
                scope.spawn(move || {
                    for round in 0..20 {
                        let comm = comms[(first + round) % comms.len()] as Comm;
                        let (mut number, mut version) = (-1, 0);
                        ok(ncclCommCount(comm, &mut number));
                        assert!(number > 0 && async_error(comm) == SUCCESS);
                        ok(ncclGetVersion(&mut version));
                        assert_ne!(ncclCommCount(dead as Comm, &mut number), SUCCESS);
                        assert!(!last_error(NULL).is_empty());
                        unique_id();
                    }
                });
            }
            self.sum(world);
        });
    }

    /// A forked child has separate ids and may make queries; its end is not the parent's.
    fn fork(&mut self) {
        // SAFETY: no other thread of the program runs; the child makes calls of the library and ends.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            // SAFETY: ends the child, should a call hang.
            unsafe { libc::alarm(60) };
            let (mut version, mut id) = (0, UniqueId { internal: [0; 128] });
            let well = ncclGetVersion(&mut version) == SUCCESS
                && ncclGetUniqueId(&mut id) == SUCCESS
                && ncclCommInitRank(&mut std::ptr::null_mut(), 0, id, 0) == INVALID_ARGUMENT
                && ncclGroupEnd() == INVALID_USAGE;
            // SAFETY: ends the process.
            unsafe { libc::_exit(if well { 0 } else { 1 }) };
        }
        assert!(pid > 0);
        let mut status = -1;
        loop {
            // SAFETY: our own child; writes its status.
            let waited = unsafe { libc::waitpid(pid, &raw mut status, 0) };
            if waited == pid {
                break;
            }
            assert_eq!(std::io::Error::last_os_error().kind(), std::io::ErrorKind::Interrupted);
        }
        assert_eq!(status, 0, "seed {}, step {}: the child ended with {status:#x}", self.seed, self.step);
    }

    fn step(&mut self) {
        self.step += 1;
        match self.below(20) {
            0..4 => self.open(),
            4..8 => self.wrong_call(),
            8..12 => self.wrong_function(),
            12 => self.split(),
            13 => self.disagree(),
            14 => self.alone(),
            15 => self.beside(),
            16 if self.below(4) == 0 => self.fork(),
            17 => {
                if let Some(world) = self.world() {
                    self.close(world, false);
                }
            }
            _ => {
                if let Some(world) = self.world() {
                    self.sum(world);
                }
            }
        }
    }
}

extern "C" fn nothing(_: c_int) {}

/// Signals that interrupt system calls, until it is dropped.
struct Signals(std::sync::Arc<std::sync::atomic::AtomicBool>, Option<std::thread::JoinHandle<()>>);

impl Signals {
    fn start() -> Signals {
        // SAFETY: a handler that does nothing; without SA_RESTART.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = nothing as extern "C" fn(c_int) as usize;
            assert_eq!(libc::sigaction(libc::SIGUSR1, &raw const action, std::ptr::null_mut()), 0);
        }
        let over = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
        let seen = over.clone();
        // SAFETY: the handle of this thread, which lives until this is dropped.
        let target = unsafe { libc::pthread_self() };
        let send = move || {
            while !seen.load(std::sync::atomic::Ordering::Acquire) {
                // SAFETY: a thread that lives, a signal that has a handler.
                unsafe { libc::pthread_kill(target, libc::SIGUSR1) };
                std::thread::sleep(Duration::from_millis(3));
            }
        };
        Signals(over, Some(std::thread::spawn(send)))
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        self.0.store(true, std::sync::atomic::Ordering::Release);
        let _ = self.1.take().map(std::thread::JoinHandle::join);
    }
}

apart! {
    fn calls_in_random_order() {
        let seed = given("SEED").unwrap_or(1);
        println!("SEED={seed}");
        let random = Random::new(seed);
        let mut driver = Driver { random, seed, step: 0, worlds: Vec::new(), dead: Vec::new(), used: Vec::new() };
        let (begin, _signals) = (Instant::now(), Signals::start());
        while begin.elapsed() < duration() {
            driver.step();
            // Handles are small, and never freed.
            driver.dead.truncate(1000);
        }
        println!("{} steps", driver.step);
        while !driver.worlds.is_empty() {
            driver.close(0, false);
        }
    }
}
