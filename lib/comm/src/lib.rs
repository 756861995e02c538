//! Communicators: collectives, point to point, groups, asynchronous work.
//!
//! A [`Comm`] is one rank's membership in a group of ranks. Every rank makes the same collective calls in the same
//! order. Blocking calls run in the caller's thread; asynchronous ones ([`Work`]) run on a progress thread, in order.
//! After a failure the communicator is dead on every rank: each waiter gets the first cause, each later call an error.
//!
//! Eight modules, each of which uses those below it:
//!
//! | module | idea |
//! | --- | --- |
//! | `join` | joins a group that runs: tickets, newcomers |
//! | `survive` | goes on without ranks that are lost, and with newcomers: revoke, agree, shrink, grow |
//! | `start` | makes communicators: joining, splitting, measuring, sharing memory |
//! | `calls` | the forms of a call that users see, from arguments to a checked [`Call`] with its memory |
//! | `status` | shows a running job to a reader outside of it |
//! | `engine` | runs a call: numbers it, finds its route, runs it in the shared region or over links |
//! | `state` | the first failure, progress, and the known state of other ranks |
//! | `membership` | agreement of the ranks without the rendezvous store; newcomers that wait |

// Modules are public for the crates above; their documentation also links what is private to them.
#![allow(rustdoc::private_intra_doc_links)]

#[doc(hidden)]
pub mod calls;
#[doc(hidden)]
pub mod engine;
#[doc(hidden)]
pub mod executor;
mod join;
mod membership;
pub mod reduce;
mod start;
mod state;
pub mod status;
mod survive;
#[doc(hidden)]
pub mod symmetric;
pub mod topology;
pub mod trace;
#[doc(hidden)]
pub mod verify;

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::sync::{Arc, Mutex};

use crate::executor::Supervisor;
use crate::topology::CostModel;
use crate::trace::Tracer;
use tinynccl_plan::wire::Algorithm;
use tinynccl_sys::config::TransportChoice;
use tinynccl_sys::threads::lock;
use tinynccl_transport::LinkOptions;
use tinynccl_transport::relay::{Path, Traffic};

#[doc(hidden)]
pub use crate as comm;
pub use calls::group::Group;
pub use calls::p2p::Exchange;
pub use calls::persistent::{OwnedBuffer, Persistent};
pub use calls::uneven::packed;
pub use calls::work::Work;
use engine::Engine;
#[doc(hidden)]
pub use engine::Inner;
use engine::queue::Queue;
pub use engine::queue::{After, Queued};
pub use engine::raw_call::RawCall;
use engine::tuned::Tuned;
pub use engine::tuned::{Source, Tuning};
pub use join::Ticket;
pub use start::alloc::SymmetricBuffer;
#[doc(hidden)]
pub use start::init::on_threads;
#[doc(hidden)]
pub use state::State;
pub use state::control::Progress;
#[doc(hidden)]
pub use state::failure::Attached;
use state::home::Home;
#[doc(hidden)]
pub use state::shown::{DeviceCalls, Enqueued, OnDevice};
pub use survive::Agreed;
#[doc(no_inline)]
pub use tinynccl_plan::{Call, DType, Element, Error, ReduceOp, Result, schedule, wire};
#[doc(no_inline)]
pub use tinynccl_sys::Config;
#[doc(hidden)]
pub use tinynccl_transport::bootstrap::{RECORDED, Recorded, Ring};

/// One rank's membership in a group of ranks.
///
/// Calls from several threads are safe, but their order, which must be the same on all ranks, is then the callers'.
/// Dropping it leaves the group: it finishes asynchronous calls first and never panics. In a thread that panics, it
/// aborts instead ([`Comm::abort`]): the other ranks must not wait for calls that this one will not make.
///
/// It belongs to the process that made it. In a forked child every call of it is an error, and dropping it does
/// nothing.
pub struct Comm {
    inner: Arc<Inner>,
    /// State that a failed [`Comm::shrink`] or [`Comm::grow`] goes on with.
    change: Mutex<survive::Change>,
}

/// Facts about a communicator, for reports.
#[derive(Debug, Clone)]
pub struct Census {
    /// Links opened so far, by kind.
    pub links: Vec<(&'static str, usize)>,
    /// Upper bound of the memory of one link's message slots, both directions, in bytes.
    pub bytes_per_link: usize,
    /// Messages that this rank has forwarded between others, for all communicators of its process.
    pub relayed: Traffic,
    /// Zero-copy messages so far: sent from the caller's memory without a copy of ours ([`Comm::register_persistent`],
    /// or `TINYNCCL_SHM_SINGLE_COPY`).
    pub zero_copy_messages: u64,
    /// Sleeps that lasted their whole slice (50 ms) although a peer had sent something: lost wake-ups. Expected: 0.
    pub late_wakes: u64,
}

impl Comm {
    fn assemble(state: Arc<State>, local_rank: usize, tuned: Option<Tuned>, home: Option<Arc<Home>>) -> Comm {
        let shared = state.members.iter().all(|&m| state.control.shares_memory(m));
        let config = &state.config;
        let options = LinkOptions {
            max_message: match (shared, config.transport) {
                (true, _) => config.shm_chunk,
                (false, TransportChoice::Verbs) => config.verbs_chunk,
                (false, _) => config.tcp_chunk,
            },
            depth: config.fifo_depth,
        };
        let tuned = tuned.unwrap_or_else(|| Tuned::built_in(&state)).relayed(&state);
        let oversubscribed = AtomicBool::new(tuned.is_oversubscribed(state.rank));
        let engine = Engine::new(&state, tuned, &options);
        let queue = Queue::new(state.rank);
        let listed = status::Listed::new(&state);
        Comm {
            inner: Arc::new(Inner {
                state,
                local_rank,
                engine: Mutex::new(engine),
                queue,
                options,
                oversubscribed,
                splits: AtomicU32::new(0),
                warned: AtomicU32::new(0),
                _listed: listed,
                _home: home,
            }),
            change: Mutex::default(),
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

    /// Internals used by `process_group` and `cuda`.
    #[inline]
    #[doc(hidden)]
    pub fn inner(&self) -> &Inner {
        &self.inner
    }

    /// Records for the trace, if there is one.
    #[doc(hidden)]
    pub fn trace(&self) -> Option<&Tracer> {
        self.inner.state.trace.as_deref()
    }

    /// The settings in force.
    pub fn config(&self) -> &Config {
        &self.inner.state.config
    }

    /// The communicator's links and messages so far.
    pub fn census(&self) -> Census {
        let options = self.inner.options;
        let mut engine = lock(&self.inner.engine);
        Census {
            links: engine.links.census(),
            zero_copy_messages: engine.links.zero_copy_messages(),
            bytes_per_link: 2 * (options.depth + 1) * options.max_message.next_multiple_of(64),
            relayed: self.inner.state.control.traffic(),
            late_wakes: self.inner.state.late_wakes(),
        }
    }

    /// The pairs of ranks that have no common subnet, and the ranks that forward their messages over RDMA, over rails,
    /// or over TCP between hosts. The numbers are those of the world, whose ranks outside this communicator may be
    /// relays.
    pub fn relayed(&self) -> Vec<Path> {
        let state = &self.inner.state;
        let mut paths = state.control.paths();
        paths.retain(|path| path.ends.iter().all(|end| state.members.contains(end)));
        paths
    }

    /// Takes `algorithm` from now on for every collective that it supports; `None` returns to the cost model.
    ///
    /// Every rank must call it at the same position among its collective calls.
    pub fn set_algorithm(&self, algorithm: Option<Algorithm>) {
        if !self.inner.state.origin.is_here() {
            return;
        }
        self.inner.queue.drain();
        let mut engine = lock(&self.inner.engine);
        engine.forced = algorithm;
        engine.forget_routes();
    }

    /// Plans calls as if ranks of different `labels` shared no memory: tests of several hosts on one. Every rank must
    /// call it with the same labels at the same position among its collective calls.
    #[doc(hidden)]
    pub fn assume_hosts(&self, labels: &[usize]) {
        self.inner.queue.drain();
        let mut engine = lock(&self.inner.engine);
        engine.tuned.assume(labels);
        engine.forget_routes();
    }

    /// The basis for choosing algorithms: measured, read from the cache, or built in; the same on all ranks.
    pub fn cost_model(&self) -> CostModel {
        lock(&self.inner.engine).tuned.model.clone()
    }

    /// The source of [`Comm::cost_model`], and its cost when the world's communicator started.
    pub fn tuning(&self) -> Tuning {
        lock(&self.inner.engine).tuned.tuning.clone()
    }

    /// The communicator's failure, if it has failed. Waits for nothing.
    pub fn failure(&self) -> Option<Error> {
        self.inner.state.failure()
    }

    /// True when `rank` has left in order: a wait for it cannot succeed.
    pub fn has_left(&self, rank: usize) -> bool {
        rank < self.size() && self.inner.state.has_left(rank)
    }

    /// Ends the communicator on every rank from any thread: calls in flight and later ones give [`Error::Aborted`].
    pub fn abort(&self, reason: &str) {
        let state = &self.inner.state;
        if !state.origin.is_here() {
            return;
        }
        let already = state.has_failed();
        let reason_here = format!("rank {}: {reason}", state.rank);
        state.fail(Error::Aborted { op: "abort".to_owned(), rank: state.rank, reason: reason_here });
        if !already {
            state.control.abort(state.id, reason);
        }
    }

    /// Finishes asynchronous calls, waits until all ranks have made the same collective calls, and leaves.
    ///
    /// # Errors
    /// The communicator's failure, if it has failed; [`Error::Mismatch`] for ranks that made different calls which no
    /// call has detected so far.
    pub fn close(self) -> Result<()> {
        self.inner.state.origin.check(|| "close".to_owned(), self.rank())?;
        self.inner.queue.drain();
        self.inner.state.settle()
    }
}

impl Drop for Comm {
    fn drop(&mut self) {
        if !self.inner.state.origin.is_here() {
            // Its threads are in another process, and a goodbye from here would count as that process's.
            return std::mem::forget(self.inner.clone());
        }
        if std::thread::panicking() {
            self.abort("it panicked, and its communicator was dropped by that");
        }
        self.inner.queue.close();
        self.inner.state.say_last_call();
    }
}

impl fmt::Debug for Comm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Comm {} (rank {} of {})", self.inner.state.id, self.rank(), self.size())
    }
}
