//! Communicators: collectives, point to point, groups, asynchronous work.
//!
//! A [`Comm`] is one rank's membership in a group of ranks. Every rank makes the same collective calls in the same
//! order. Blocking calls run in the caller's thread; asynchronous ones ([`Work`]) run on a progress thread, in order.
//! After a failure the communicator is dead on every rank: each waiter gets the first cause, each later call an error.

mod asynchronous;
mod collectives;
mod control;
mod group;
mod init;
mod local;
mod network;
mod p2p;
mod split;
mod state;
mod tune;
mod work;

use std::fmt;
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::algorithm::{self, Shape};
use crate::config::Config;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::executor::{self, Buffers, CallKey, Links, Patience, Plan, Supervisor, Task, Workspace};
use crate::topology::{Choice, CostModel, choose};
use crate::transport::LinkOptions;
use crate::wire::{Algorithm, Collective, Header};

pub use control::Progress;
pub use group::Group;
use state::{State, lock};
use work::Queue;
pub use work::Work;

/// Longest message of a collective that reduces on three or more ranks: what arrives whole is read again at once, and should
/// still be in the L2 cache. Two ranks combine what arrives piece by piece.
const REDUCED_MESSAGE: usize = 256 << 10;
/// Longest spinning where the core is wanted by others.
const SHARED_SPIN: Duration = Duration::from_micros(5);
/// Plans kept per communicator; the least recently used one goes first.
const PLANS: usize = 512;

/// One rank's membership in a group of ranks.
///
/// Calls from several threads are safe, but their order, which must be the same on all ranks, is then the callers'.
/// Dropping it leaves the group: it finishes asynchronous calls first and never panics.
pub struct Comm {
    inner: Arc<Inner>,
}

pub(crate) struct Inner {
    state: Arc<State>,
    local_rank: usize,
    engine: Mutex<Engine>,
    queue: Arc<Queue>,
    /// Equal on all ranks: every rank knows every rank's host, and links refuse a peer whose options differ.
    options: LinkOptions,
    /// More ranks than cores on this host.
    crowded: bool,
    /// Splits made so far, for keys of exchanges.
    splits: AtomicU32,
    /// Held for its lifetime by the communicators made from one rendezvous.
    _home: Option<Arc<init::Home>>,
}

/// What a running call needs exclusively.
struct Engine {
    links: Links,
    workspace: Workspace,
    plans: Vec<(CallKey, Arc<Plan>)>,
    /// Calls started; the header's sequence number.
    seq: u32,
    /// Messages sent to and received from each rank, point to point.
    sent: Vec<u32>,
    received: Vec<u32>,
    cost: CostModel,
}

/// Facts about a communicator, for reports.
#[derive(Debug, Clone)]
pub struct Census {
    /// Links opened so far, by kind.
    pub links: Vec<(&'static str, usize)>,
    /// Upper bound of the memory of one link's message slots, both directions, in bytes.
    pub bytes_per_link: usize,
}

impl Comm {
    fn assemble(state: Arc<State>, local_rank: usize, cost: Option<CostModel>, home: Option<Arc<init::Home>>) -> Comm {
        let size = state.members.len();
        let shared = state.members.iter().all(|&m| state.control.shares_memory(m));
        let config = &state.config;
        let options = LinkOptions {
            max_message: if shared { config.shm_chunk } else { config.tcp_chunk },
            depth: config.fifo_depth,
        };
        let (ranks, cores) = tune::crowd(&state);
        let crowded = ranks > cores;
        let engine = Engine {
            links: Links::default(),
            workspace: Workspace::default(),
            plans: Vec::new(),
            seq: 0,
            sent: vec![0; size],
            received: vec![0; size],
            cost: cost.unwrap_or_else(|| tune::built_in(&state, shared)),
        };
        Comm {
            inner: Arc::new(Inner {
                state,
                local_rank,
                engine: Mutex::new(engine),
                queue: Arc::default(),
                options,
                crowded,
                splits: AtomicU32::new(0),
                _home: home,
            }),
        }
    }

    /// Our rank, in `0..size`.
    #[inline]
    pub fn rank(&self) -> usize {
        self.inner.state.rank
    }

    /// Number of ranks (the world size of this communicator).
    #[inline]
    pub fn size(&self) -> usize {
        self.inner.state.members.len()
    }

    /// Our number among the ranks of this host, as the launcher counts; used to pick a core or a GPU.
    pub fn local_rank(&self) -> usize {
        self.inner.local_rank
    }

    /// The settings in force.
    pub fn config(&self) -> &Config {
        &self.inner.state.config
    }

    /// What the communicator holds.
    pub fn census(&self) -> Census {
        let options = self.inner.options;
        Census {
            links: lock(&self.inner.engine).links.census(),
            bytes_per_link: 2 * options.depth * (options.max_message + 64),
        }
    }

    /// The algorithm that a collective of `bytes` per segment would use, and what the others were estimated to cost.
    pub fn explain(&self, collective: Collective, bytes: usize) -> Result<Choice> {
        let engine = lock(&self.inner.engine);
        self.inner.choice(&engine.cost, collective, 0, bytes)
    }

    /// What the choice of algorithms is based on: measured when the communicator started, or built in.
    pub fn cost_model(&self) -> CostModel {
        lock(&self.inner.engine).cost.clone()
    }

    /// Ends the communicator on every rank from any thread: calls in flight and later ones give [`Error::Aborted`].
    pub fn abort(&self, reason: &str) {
        let state = &self.inner.state;
        let already = state.has_failed();
        let reason_here = format!("rank {}: {reason}", state.rank);
        state.fail(Error::Aborted { op: "abort".to_owned(), rank: state.rank, reason: reason_here });
        if !already {
            state.control.abort(state.id, reason);
        }
    }

    /// Finishes asynchronous calls and leaves. Gives the communicator's failure, if it has failed.
    pub fn close(self) -> Result<()> {
        self.inner.queue.drain();
        match self.inner.state.failure() {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }
}

impl Drop for Comm {
    fn drop(&mut self) {
        self.inner.queue.close();
    }
}

impl fmt::Debug for Comm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Comm {} (rank {} of {})", self.inner.state.id, self.rank(), self.size())
    }
}

impl Inner {
    fn size(&self) -> usize {
        self.state.members.len()
    }

    fn shape(&self, collective: Collective, root: usize) -> Shape {
        Shape { collective, ranks: self.size(), root, channels: self.state.config.channels }
    }

    fn choice(&self, cost: &CostModel, collective: Collective, root: usize, bytes: usize) -> Result<Choice> {
        let shape = self.shape(collective, root);
        let longest = match collective.reduces() && shape.ranks > 2 {
            true => self.options.max_message.min(REDUCED_MESSAGE),
            false => self.options.max_message,
        };
        choose(&shape, bytes, longest, cost, self.state.config.algorithm)
            .ok_or_else(|| Error::invalid(collective.name(), format!("no algorithm for {} ranks", shape.ranks)))
    }

    fn patience(&self, background: bool) -> Patience {
        let config = &self.state.config;
        // Who shares a core with the caller's computation, or with the very rank that is awaited, spins just long
        // enough for a peer that is in the same call already.
        let shares = background || self.crowded;
        let (spin, turns) = if shares { (config.spin.min(SHARED_SPIN), 2) } else { (config.spin, 32) };
        let yields = if background { Duration::from_micros(20) } else { Duration::from_micros(200) };
        Patience { turns, spin, yields, deadline: config.timeout }
    }

    /// Puts the plan of a call in front, compiled on first use: chooses the algorithm and opens the links it needs.
    #[inline]
    fn prepare(&self, engine: &mut Engine, key: &CallKey) -> Result<()> {
        // Most recently used first: the common case is the same call again.
        if engine.plans.first().is_some_and(|(k, _)| k == key) {
            return Ok(());
        }
        if let Some(position) = engine.plans.iter().position(|(k, _)| k == key) {
            engine.plans[..=position].rotate_right(1);
            return Ok(());
        }
        let plan = Arc::new(self.compile(engine, key)?);
        engine.plans.truncate(PLANS - 1);
        engine.plans.insert(0, (*key, plan));
        Ok(())
    }

    fn compile(&self, engine: &mut Engine, key: &CallKey) -> Result<Plan> {
        let op = || key.collective.to_string();
        let options = self.options;
        let (algorithm, message, program) = match key.collective {
            Collective::SendRecv => {
                (Algorithm::Direct, options.max_message, p2p::program(self.state.rank, key.root, key.peer))
            }
            collective => {
                let bytes = key.count.saturating_mul(key.dtype.size());
                let choice = self.choice(&engine.cost, collective, key.root, bytes)?;
                let shape = self.shape(collective, key.root);
                let program = algorithm::program(choice.algorithm, &shape, self.state.rank).ok_or_else(|| {
                    Error::invalid(op(), format!("no {} program for {} ranks", choice.algorithm, shape.ranks))
                })?;
                log::debug!("rank {}: {key:?}: {}", self.state.rank, choice.algorithm);
                (choice.algorithm, choice.message, program)
            }
        };
        self.open(engine, program.links())?;
        let header = key.header(self.state.id, algorithm);
        let Engine { links, .. } = engine;
        Plan::compile(key, header, &program, self.size(), message, |c, p| links.get(c, p))
            .ok_or_else(|| Error::invalid(op(), "the schedule names a rank without a link"))
    }

    /// Opens the links that are not open yet. It waits for the peer at each, so every rank must open its links in the order
    /// of (channel, peer): then the pair that is first in the order of (channel, lower rank, higher rank) can always go on.
    fn open(&self, engine: &mut Engine, links: Vec<(u32, usize)>) -> Result<()> {
        debug_assert!(links.is_sorted());
        let state = &self.state;
        for (channel, peer) in links {
            if engine.links.get(channel, peer).is_none() {
                let pair = state
                    .control
                    .connect(state.id, state.members[peer], channel, self.options, &state.doorbell, &|| state.failure())
                    .map_err(|e| state.fail_everywhere(e))?;
                engine.links.insert(channel, peer, pair);
            }
        }
        Ok(())
    }

    /// Runs one collective in the caller's thread.
    ///
    /// # Safety
    /// As [`executor::run`]: `buffers` must be as large as the collective and `key.count` say.
    unsafe fn collective(&self, key: &CallKey, buffers: Buffers, background: bool) -> Result<()> {
        self.state.check(|| key.collective.to_string())?;
        let mut engine = lock(&self.engine);
        engine.seq = engine.seq.wrapping_add(1);
        self.state.progress.start(u64::from(engine.seq), key.collective as u8);
        self.prepare(&mut engine, key)?;
        let Engine { links, workspace, plans, seq, .. } = &mut *engine;
        let plan = &plans[0].1;
        let header = Header { seq: *seq, ..plan.header };
        let task = Task { plan, buffers, header, after: None };
        // SAFETY: forwarded from the caller.
        unsafe { executor::run(&[task], links, workspace, &*self.state, &self.patience(background)) }?;
        self.state.progress.done(u64::from(*seq));
        Ok(())
    }

    fn peer_in_range(&self, op: &str, what: &str, rank: usize) -> Result<()> {
        if rank < self.size() {
            return Ok(());
        }
        Err(Error::invalid(op, format!("{what} is {rank}, expected a rank below the world size {}", self.size())))
    }
}

/// The key of a collective.
fn key(collective: Collective, dtype: DType, op: Option<crate::ReduceOp>, root: usize, count: usize) -> CallKey {
    CallKey { collective, dtype, op, root, count, peer: 0 }
}
