//! Runs calls. [`run`] numbers a call and compares it with the other ranks', [`route`] decides its route (cached after
//! the first use), and the call runs in the shared region ([`board`]) or over links.

pub(in crate::comm) mod batch;
pub(in crate::comm) mod board;
pub(in crate::comm) mod choice;
mod compile;
pub(in crate::comm) mod message;
pub(in crate::comm) mod pack;
pub(in crate::comm) mod queue;
pub(in crate::comm) mod raw_call;
pub(in crate::comm) mod route;
pub(in crate::comm) mod run;
pub(in crate::comm) mod tuned;
pub(in crate::comm) mod wait_policy;

use std::sync::atomic::{AtomicBool, AtomicU32};
use std::sync::{Arc, Mutex};

use super::State;
use super::state::home::Home;
use crate::Call;
use crate::algorithm::Shape;
use crate::error::{Error, Result};
use crate::executor::{Links, Workspace};
use crate::schedule::Schedule;
use crate::symmetric::{Alarm, Registry};
use crate::trace::{Recorder, Tracer};
use crate::transport::LinkOptions;
use crate::wire::{Algorithm, Collective};
use board::BoardState;
use queue::Queue;
use route::Route;
use tuned::Tuned;

/// A communicator, shared by its handle and the calls under way.
pub(crate) struct Inner {
    pub(in crate::comm) state: Arc<State>,
    pub(in crate::comm) local_rank: usize,
    pub(in crate::comm) engine: Mutex<Engine>,
    pub(in crate::comm) queue: Arc<Queue>,
    /// Equal on all ranks: every rank knows every rank's host, and links refuse a peer whose options differ.
    pub(in crate::comm) options: LinkOptions,
    /// More ranks than cores on this host.
    pub(in crate::comm) oversubscribed: AtomicBool,
    /// Splits made so far, for keys of exchanges.
    pub(in crate::comm) splits: AtomicU32,
    /// Collectives, as bits, for which a refused algorithm was reported.
    pub(in crate::comm) warned: AtomicU32,
    /// Held for its lifetime by the communicators made from one rendezvous.
    pub(in crate::comm) _home: Option<Arc<Home>>,
}

/// State that a running call holds exclusively.
pub(in crate::comm) struct Engine {
    pub(in crate::comm) links: Links,
    pub(in crate::comm) workspace: Workspace,
    /// Memory of packed calls.
    packed: Vec<u64>,
    /// Routes of recent calls.
    routes: Vec<(Call, Route)>,
    /// Schedules of the caller's making that were used last.
    pub(in crate::comm) schedules: Vec<Schedule>,
    pub(in crate::comm) board: BoardState,
    /// Wakes a call that sleeps in the shared region when the communicator fails.
    alarm: Option<Arc<Alarm>>,
    pub(in crate::comm) registry: Registry,
    /// Calls started; the header's sequence number.
    pub(in crate::comm) seq: u32,
    /// Messages sent to and received from each rank, point to point.
    sent: Vec<u32>,
    pub(in crate::comm) received: Vec<u32>,
    /// The requested algorithm, taken for every collective that it supports.
    pub(in crate::comm) forced: Option<Algorithm>,
    pub(in crate::comm) tuned: Tuned,
}

impl Engine {
    pub(in crate::comm) fn new(state: &State, tuned: Tuned) -> Engine {
        let recorder = |trace: &Arc<Tracer>| Box::new(Recorder::new(trace.clone(), state.config.trace_events));
        let size = state.members.len();
        Engine {
            links: Links::default(),
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
        }
    }

    /// The next calls look up their routes again.
    pub(in crate::comm) fn forget_routes(&mut self) {
        self.routes.clear();
    }

    /// Point-to-point messages count per pair and direction, collectives per communicator.
    pub(in crate::comm) fn next_seq(&mut self, call: &Call, rank: usize) -> u32 {
        let counter = match call.collective {
            Collective::SendRecv if call.root == rank => &mut self.sent[call.peer],
            Collective::SendRecv => &mut self.received[call.root],
            _ => &mut self.seq,
        };
        *counter = counter.wrapping_add(1);
        *counter
    }
}

impl Inner {
    pub(crate) fn state(&self) -> &State {
        &self.state
    }

    /// Failure state, for objects that outlive a call.
    pub(crate) fn state_shared(&self) -> Arc<State> {
        self.state.clone()
    }

    pub(crate) fn size(&self) -> usize {
        self.state.members.len()
    }

    #[inline]
    pub(in crate::comm) fn shape(&self, collective: Collective, root: usize) -> Shape {
        Shape { collective, ranks: self.size(), root, channels: self.state.config.channels }
    }

    #[inline]
    pub(in crate::comm) fn peer_in_range(&self, op: &str, what: &str, rank: usize) -> Result<()> {
        if rank < self.size() { Ok(()) } else { Err(self.not_a_rank(op, what, rank)) }
    }

    #[cold]
    fn not_a_rank(&self, op: &str, what: &str, rank: usize) -> Error {
        Error::invalid(op, format!("{what} is {rank}, expected a rank below the world size {}", self.size()))
    }
}
