//! Runs calls. [`run`] numbers a call and compares it with the other ranks', [`route`] decides its route (cached after
//! the first use), and the call runs in the shared region ([`board`]) or over links.

pub(crate) mod batch;
pub(crate) mod board;
pub(crate) mod choice;
mod compile;
pub(crate) mod described;
pub(crate) mod message;
pub(crate) mod pack;
pub(crate) mod queue;
pub(crate) mod raw_call;
pub(crate) mod route;
pub(crate) mod run;
pub(crate) mod tuned;
mod verify;
pub(crate) mod wait_policy;

use std::sync::atomic::{AtomicBool, AtomicU32};
use std::sync::{Arc, Mutex};

use super::State;
use super::state::home::Home;
use super::status::Listed;
use crate::executor::{Links, Workspace};
use crate::symmetric::{Alarm, Registry};
use crate::trace::{Recorder, Tracer};
use crate::verify::{Audit, Chosen};
use board::BoardState;
use queue::Queue;
use route::Route;
use tinynccl_plan::Call;
use tinynccl_plan::algorithm::Shape;
use tinynccl_plan::error::{Error, Result};
use tinynccl_plan::schedule::Schedule;
use tinynccl_plan::simulate::machine::description::Description;
use tinynccl_plan::wire::{Algorithm, Collective};
use tinynccl_transport::LinkOptions;
use tuned::Tuned;

/// A communicator, shared by its handle and the calls under way.
pub struct Inner {
    pub(crate) state: Arc<State>,
    pub(crate) local_rank: usize,
    pub(crate) engine: Mutex<Engine>,
    pub(crate) queue: Arc<Queue>,
    /// Equal on all ranks: every rank knows every rank's host, and links refuse a peer whose options differ.
    pub(crate) options: LinkOptions,
    /// More ranks than cores on this host.
    pub(crate) oversubscribed: AtomicBool,
    /// Splits made so far, for keys of exchanges.
    pub(crate) splits: AtomicU32,
    /// Collectives, as bits, for which a refused algorithm was reported.
    pub(crate) warned: AtomicU32,
    /// Entry in the reports of this process.
    pub(crate) _listed: Option<Listed>,
    /// Held for its lifetime by the communicators made from one rendezvous.
    pub(crate) _home: Option<Arc<Home>>,
}

/// State that a running call holds exclusively.
pub(crate) struct Engine {
    pub(crate) links: Links,
    pub(crate) workspace: Workspace,
    /// Memory of packed calls.
    packed: Vec<u64>,
    /// Routes of recent calls.
    routes: Vec<(Call, Route)>,
    /// Schedules of the caller's making that were used last.
    pub(crate) schedules: Vec<Schedule>,
    pub(crate) board: BoardState,
    /// Wakes a call that sleeps in the shared region when the communicator fails.
    alarm: Option<Arc<Alarm>>,
    pub(crate) registry: Registry,
    /// Calls started; the header's sequence number.
    pub(crate) seq: u32,
    /// Messages sent to and received from each rank, point to point.
    sent: Vec<u32>,
    pub(crate) received: Vec<u32>,
    /// The requested algorithm, taken for every collective that it supports.
    pub(crate) forced: Option<Algorithm>,
    pub(crate) tuned: Tuned,
    /// Number of attempts to discover the machines, for keys of exchanges, and the result.
    pub(crate) discovered: (u32, Option<Description>),
}

impl Engine {
    pub(crate) fn new(state: &State, tuned: Tuned, options: &LinkOptions) -> Engine {
        let recorder = |trace: &Arc<Tracer>| Box::new(Recorder::new(trace.clone(), state.config.trace_events));
        let size = state.members.len();
        let mut links = Links::default();
        links.audit =
            Chosen::of(&state.config).map(|chosen| Box::new(Audit::new(state.rank, chosen, options.max_message)));
        Engine {
            links,
            workspace: Workspace::new(state.trace.as_ref().map(recorder)),
            packed: Vec::new(),
            routes: Vec::new(),
            schedules: Vec::new(),
            board: BoardState::default(),
            alarm: None,
            registry: Registry::default(),
            seq: 0,
            sent: vec![0; size],
            received: vec![0; size],
            forced: state.config.algorithm,
            tuned,
            discovered: (0, None),
        }
    }

    /// The next calls look up their routes again.
    pub(crate) fn forget_routes(&mut self) {
        self.routes.clear();
    }

    /// Point-to-point messages count per pair and direction, collectives per communicator.
    pub(crate) fn next_seq(&mut self, call: &Call, rank: usize) -> u32 {
        let counter = self.counter(call, rank);
        *counter = counter.wrapping_add(1);
        *counter
    }

    /// The last number of such a call was not used.
    fn return_seq(&mut self, call: &Call, rank: usize) {
        let counter = self.counter(call, rank);
        *counter = counter.wrapping_sub(1);
    }

    fn counter(&mut self, call: &Call, rank: usize) -> &mut u32 {
        match call.collective {
            Collective::SendRecv if call.root == rank => &mut self.sent[call.peer],
            Collective::SendRecv => &mut self.received[call.root],
            _ => &mut self.seq,
        }
    }
}

impl Inner {
    /// Returns the members, what they share, and the first failure.
    pub fn state(&self) -> &State {
        &self.state
    }

    /// Failure state, for objects that outlive a call.
    pub fn state_shared(&self) -> Arc<State> {
        self.state.clone()
    }

    /// Makes reports know the ages of a device's calls from now on.
    pub(crate) fn look_at_device(&self) {
        if self._listed.is_some() {
            Listed::wake();
        }
    }

    /// Returns the number of ranks.
    pub fn size(&self) -> usize {
        self.state.members.len()
    }

    #[inline]
    pub(crate) fn shape(&self, collective: Collective, root: usize) -> Shape {
        Shape { collective, ranks: self.size(), root, channels: self.state.config.channels }
    }

    #[inline]
    pub(crate) fn peer_in_range(&self, op: &str, what: &str, rank: usize) -> Result<()> {
        if rank < self.size() { Ok(()) } else { Err(self.not_a_rank(op, what, rank)) }
    }

    #[cold]
    fn not_a_rank(&self, op: &str, what: &str, rank: usize) -> Error {
        Error::invalid(op, format!("{what} is {rank}, expected a rank below the world size {}", self.size()))
    }
}
