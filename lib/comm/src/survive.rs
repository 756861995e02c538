//! Going on without ranks that are lost, and with newcomers: revoke, agree, shrink, grow.
//!
//! The semantics are those of MPI's User Level Failure Mitigation (Bland et al., "Post-failure recovery of MPI
//! communication capability", IJHPCA 2013). Agreement is [`membership`](super::membership)'s.

use std::cell::RefCell;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::Comm;
use super::membership::agreement::{Outcome, Vote};
use super::membership::waiting_list::Attempt;
use super::membership::{self, Asked, Membership};
use super::state::control::{decode, encode};
use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::interrupt::{self, Check, watched};
use tinynccl_sys::secret;
use tinynccl_sys::threads::lock;
use tinynccl_transport::bootstrap::{Server, UniqueId};

/// Result of [`Comm::agree`], equal on all ranks that get one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Agreed {
    /// Bitwise AND of the values of the `alive` ranks.
    pub value: u64,
    /// Ranks of this communicator that took part, in order. One of them may have died since.
    pub alive: Vec<usize>,
}

impl Comm {
    /// Ends this communicator on every rank, from any thread: calls in flight and later ones give [`Error::Aborted`],
    /// also on ranks that have not noticed a failure. [`Comm::agree`] and [`Comm::shrink`] still work.
    ///
    /// A rank that has noticed a failure calls it before [`Comm::shrink`], so that no other rank goes on waiting for it
    /// in an older call. It needs no rendezvous store, whose host may have died, and does not wait.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] in a forked child.
    pub fn revoke(&self) -> Result<()> {
        let state = &self.inner.state;
        state.origin.check(|| "revoke".to_owned(), state.rank)?;
        self.abort(REVOKED);
        match state.control.membership() {
            Some(membership) => membership.revoke(state.id, &state.members, REVOKED),
            None => Ok(()),
        }
    }

    /// Agrees with the other ranks on a value and on the ranks that live, although ranks die meanwhile and before.
    ///
    /// Every rank that lives must call it, the same number of times. All ranks that get a result get the same one, also
    /// those that die afterwards. Works after a failure and after [`Comm::revoke`], and does not use the rendezvous
    /// store. Costs five messages one after another, and as many again for each rank that leads and dies. Asynchronous
    /// calls made before are finished first.
    ///
    /// A rank whose death is not proven counts as gone after four heartbeats (`TINYNCCL_HEARTBEAT`) of silence.
    ///
    /// # Errors
    /// - [`Error::Timeout`] names the missing ranks: the ranks that take part do not outnumber those that are silent
    ///   and not proven dead (a network that fell apart), or a rank that lives has not made the call in time
    ///   (`TINYNCCL_TIMEOUT`). The call may be repeated.
    /// - [`Error::Aborted`]: the other ranks have gone on without this one.
    /// - [`Error::Unsupported`] on communicators of [`Comm::threads`], whose ranks die together.
    pub fn agree(&self, value: u64) -> Result<Agreed> {
        let vote = Vote { value, newcomers: Vec::new() };
        if lock(&self.change).unsealed.is_some() {
            return Err(Error::invalid(
                "agree",
                "an earlier shrink or grow failed before its end: call it again first",
            ));
        }
        let outcome = self.ask("agree", self.membership("agree")?, vote, None)?;
        Ok(Agreed { value: outcome.value, alive: outcome.alive })
    }

    /// Makes a communicator of the ranks that live, in their order here, numbered from 0.
    ///
    /// Every rank that lives must call it. It has new links, new memory and a new rendezvous store, hosted by the
    /// rank that led the agreement, as a rule the lowest one; nothing of this communicator is used any more, which can
    /// be dropped. The settings are the same; it is not traced. Either all ranks that live get the communicator, or all
    /// try again without those that died meanwhile.
    ///
    /// A collective that a failure interrupts leaves its input as it was, so the retry is exact; a call in place leaves
    /// its buffer undefined.
    ///
    /// ```no_run
    /// # extern crate tinynccl_comm as tinynccl;
    /// # use tinynccl::{Comm, ReduceOp, Result};
    /// # fn step(mut comm: Comm, input: &[f32], sum: &mut [f32]) -> Result<Comm> {
    /// while let Err(error) = comm.all_reduce(input, sum, ReduceOp::Sum) {
    ///     eprintln!("rank {}: {error}", comm.rank());
    ///     comm.revoke()?;
    ///     comm = comm.shrink()?;
    /// }
    /// # Ok(comm)
    /// # }
    /// ```
    ///
    /// # Errors
    /// Errors of [`Comm::agree`], and those of a start that failed although no rank died. The call may be repeated after
    /// either; each rank goes on where it was, and gets the communicator that the others may have by now.
    pub fn shrink(&self) -> Result<Comm> {
        self.change(SHRINK, 0)
    }

    /// [`Comm::shrink`] that also takes in newcomers that wait ([`Comm::from_ticket`]), up to a size of `size`
    /// ranks, at most 64 newcomers at once.
    ///
    /// Every rank that lives must call it with the same `size`; the leader's counts. The ranks that live come first, in
    /// their order here, then the newcomers, in an order equal on all ranks. With none waiting the result is that of
    /// [`Comm::shrink`]; the call does not wait for any, see [`Comm::waiting`]. A newcomer that dies meanwhile is left
    /// out; those that are not taken go on waiting.
    ///
    /// Newcomers have no state of the program's: the ranks that were here send it, by `tinynccl::SharedState`, or by a
    /// broadcast from rank 0, which is one of them.
    ///
    /// ```no_run
    /// # extern crate tinynccl_comm as tinynccl;
    /// # use tinynccl::{Comm, ReduceOp, Result};
    /// # fn between_steps(mut comm: Comm, state: &mut [f32]) -> Result<Comm> {
    /// // Each newcomer waits at one rank: all ranks must take the same decision.
    /// let mut waiting = [comm.waiting() as u64];
    /// comm.all_reduce_in_place(&mut waiting, ReduceOp::Sum)?;
    /// if waiting[0] > 0 {
    ///     comm = comm.grow(8)?;
    ///     comm.broadcast_in_place(state, 0)?;
    /// }
    /// # Ok(comm)
    /// # }
    /// ```
    ///
    /// # Errors
    /// Errors of [`Comm::shrink`]. Newcomers that cannot start with the group are left out after the first failure.
    pub fn grow(&self, size: usize) -> Result<Comm> {
        self.change("grow", size)
    }

    /// Makes a communicator of the ranks that live, and of newcomers up to `size` ranks. Goes on where a call that
    /// failed has stopped.
    fn change(&self, op: &'static str, size: usize) -> Result<Comm> {
        let membership = self.membership(op)?;
        let list = &membership.admission().list;
        self.inner.drain();
        let mut failures = 0;
        loop {
            let unsealed = lock(&self.change).unsealed.take();
            let unsealed = match unsealed {
                Some(unsealed) => *unsealed,
                // A newcomer may be what keeps the others from starting.
                None => self.begin(op, membership, if failures == 0 { size } else { 0 })?,
            };
            // All of them have it, or none of them uses it.
            let vote = Vote { value: u64::from(unsealed.started.is_ok()), newcomers: list.lost(unsealed.attempt) };
            let seal = match self.ask(op, membership, vote, None) {
                Ok(seal) => seal,
                Err(error) => {
                    // The others may have agreed without telling us in time.
                    if let Error::Timeout { .. } = error {
                        lock(&self.change).unsealed = Some(Box::new(unsealed));
                    }
                    return Err(error);
                }
            };
            let whole = seal.alive == unsealed.alive && seal.newcomers.is_empty();
            let sealed = whole && seal.value & 1 == 1;
            list.conclude(unsealed.attempt, sealed);
            let error = match unsealed.started {
                Ok(comm) if sealed => return Ok(comm),
                Ok(_) => Error::bootstrap("the new group's store", "another rank could not start, see its output"),
                Err(error) => error,
            };
            log::info!("rank {}: {op}: {error}", self.rank());
            // The same on all ranks. A rank may die right after it has sealed, so one failure without a loss is none.
            failures += usize::from(whole);
            if failures == FAILURES {
                return Err(error);
            }
        }
    }

    /// Agrees on the ranks of a new communicator, and starts it.
    fn begin(&self, op: &'static str, membership: &Membership, size: usize) -> Result<Unsealed> {
        let list = &membership.admission().list;
        let named = if size > 0 { list.waiting() } else { Vec::new() };
        let offer = || {
            let mut change = lock(&self.change);
            let (attempt, server) = match change.offered.take() {
                Some(before) => *before,
                None => (u64::from_le_bytes(secret::random()?), self.host(membership)?),
            };
            let offer = Offer { attempt, size, store: server.unique_id().addresses().to_vec() };
            change.offered = Some(Box::new((attempt, server)));
            encode(op, &offer)
        };
        let vote = Vote { value: 0, newcomers: named.clone() };
        let mut outcome = self.ask(op, membership, vote, Some(&offer))?;
        let server = lock(&self.change).offered.take().map(|offered| offered.1);
        let Offer { attempt, size, store } = decode(op, &outcome.offer)?;
        outcome.newcomers.truncate(size.saturating_sub(outcome.alive.len()));
        let id = UniqueId::new(membership.secret(&self.inner.state.key(SHRINK)), store);
        if !outcome.newcomers.is_empty() {
            let (members, newcomers) = (outcome.alive.len(), outcome.newcomers.clone());
            list.begin(Attempt { number: attempt, store: id.to_string(), members, newcomers }, &named);
        }
        // One of an attempt whose leader was followed by another has another id.
        let mut server = server.filter(|server| server.unique_id() == id);
        let started = self.start_anew(op, membership, &outcome, attempt, &id, &mut server);
        if started.is_err() {
            membership.give_up(&self.inner.state.members, attempt)?;
        }
        Ok(Unsealed { alive: outcome.alive, attempt, started, _server: server })
    }

    pub(crate) fn membership(&self, op: &str) -> Result<&Arc<Membership>> {
        let state = &self.inner.state;
        state.origin.check(|| op.to_owned(), state.rank)?;
        state.control.membership().ok_or_else(|| Error::Unsupported {
            what: format!("{op} between threads of one process"),
            detail: "threads die with their process; give ranks that may die processes of their own".to_owned(),
        })
    }

    fn ask(
        &self,
        op: &'static str,
        membership: &Membership,
        vote: Vote,
        offer: Option<&dyn Fn() -> Result<Vec<u8>>>,
    ) -> Result<Outcome> {
        self.inner.drain();
        let state = &self.inner.state;
        let _meets = state.shown.meets(op);
        membership.agree(&Asked { op, comm: state.id, members: &state.members, vote, offer })
    }

    /// Opens a store for the ranks that live.
    fn host(&self, membership: &Membership) -> Result<Server> {
        let any = if self.is_one_host() && !membership.is_wide() { Ipv4Addr::LOCALHOST } else { Ipv4Addr::UNSPECIFIED };
        let state = &self.inner.state;
        Server::start_unsized((any, 0).into(), membership.secret(&state.key(SHRINK)), &state.config)
    }

    /// Starts a communicator of the ranks and newcomers of `outcome` at the store `id`. A death ends the wait.
    fn start_anew(
        &self,
        op: &'static str,
        membership: &Membership,
        outcome: &Outcome,
        attempt: u64,
        id: &UniqueId,
        server: &mut Option<Server>,
    ) -> Result<Comm> {
        let state = &self.inner.state;
        let alive = &outcome.alive;
        let rank = alive.iter().position(|&rank| rank == state.rank);
        let rank = rank.ok_or_else(|| Error::invalid(op, "this rank is not among those that live"))?;
        let worlds: Vec<usize> = alive.iter().filter_map(|&rank| state.members.get(rank).copied()).collect();
        let (beacons, list) = (membership.beacons(&worlds), membership.admission().list.clone());
        let is_over = move || membership::any_dead(&beacons) || list.is_void(attempt);
        let size = alive.len() + outcome.newcomers.len();
        until(is_over, || Comm::restart(self, id, (rank, size), alive, server))
    }
}

/// State of a change of members that a failed call has left, and the next one goes on with.
#[derive(Default)]
pub(crate) struct Change {
    /// Attempt and store that this rank has offered as the leader: the others may have accepted them.
    offered: Option<Box<(u64, Server)>>,
    unsealed: Option<Box<Unsealed>>,
}

/// A communicator that this rank has started, or could not start, before all have agreed to use it.
struct Unsealed {
    /// Ranks of the old one that take part.
    alive: Vec<usize>,
    attempt: u64,
    started: Result<Comm>,
    /// A store that no communicator has taken. Its end waits until its ranks have left, so that it comes after all have
    /// heard that the attempt failed.
    _server: Option<Server>,
}

/// The leader's part of an outcome.
#[derive(Serialize, Deserialize)]
struct Offer {
    attempt: u64,
    /// Most ranks of the new group.
    size: usize,
    /// Addresses of the new store.
    store: Vec<SocketAddr>,
}

const SHRINK: &str = "shrink";
/// Starts that may fail although all ranks live.
const FAILURES: usize = 3;
const REVOKED: &str = "revoked the communicator";

type Watch = (Box<dyn Fn() -> bool>, Option<Check>);

thread_local! {
    /// The condition that ends the start of a communicator in this thread, and the check of its call.
    static WATCHED: RefCell<Option<Watch>> = const { RefCell::new(None) };
}

/// Runs `start`, whose waits end when `is_over` or when the check of the running call says so.
pub(crate) fn until<R>(is_over: impl Fn() -> bool + 'static, start: impl FnOnce() -> R) -> R {
    WATCHED.set(Some((Box::new(is_over), interrupt::check())));
    let started = watched(stop, start);
    WATCHED.take();
    started
}

fn stop() -> bool {
    WATCHED.with_borrow(|watch| watch.as_ref().is_some_and(|(is_over, check)| check.is_some_and(|c| c()) || is_over()))
}
