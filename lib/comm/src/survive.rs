//! Going on without ranks that are lost: revoke, agree, shrink.
//!
//! The semantics are those of MPI's User Level Failure Mitigation (Bland et al., "Post-failure recovery of MPI
//! communication capability", IJHPCA 2013). Agreement is [`membership`](super::membership)'s.

use std::cell::RefCell;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use super::Comm;
use super::membership::{self, Asked, Membership};
use super::state::control::{decode, encode};
use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::interrupt::{self, Check, watched};
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
        let outcome = self.ask("agree", self.membership("agree")?, value, &|| Ok(Vec::new()))?;
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
    /// Errors of [`Comm::agree`], and those of a start that failed although no rank died.
    pub fn shrink(&self) -> Result<Comm> {
        let membership = self.membership(SHRINK)?;
        self.inner.drain();
        let mut failures = 0;
        loop {
            let server = RefCell::new(None);
            let outcome = self.ask(SHRINK, membership, u64::MAX, &|| {
                let hosted = self.host(membership)?;
                let addresses = encode(SHRINK, &hosted.unique_id().addresses())?;
                *server.borrow_mut() = Some(hosted);
                Ok(addresses)
            })?;
            let started = self.start_anew(membership, &outcome.alive, &outcome.offer, server.into_inner());
            // All of them have it, or none of them uses it.
            let whole = u64::from(started.is_ok());
            let seal = self.ask(SHRINK, membership, whole, &|| Ok(Vec::new()))?;
            let error = match started {
                Ok(comm) if seal.value & 1 == 1 && seal.alive == outcome.alive => return Ok(comm),
                Ok(_) => Error::bootstrap("the survivors' store", "another rank could not start, see its output"),
                Err(error) => error,
            };
            log::info!("rank {}: shrink: {error}", self.rank());
            // The same on all ranks. A rank may die right after it has sealed, so one failure without a loss is none.
            failures += usize::from(seal.alive == outcome.alive);
            if failures == FAILURES {
                return Err(error);
            }
        }
    }

    fn membership(&self, op: &str) -> Result<&Arc<Membership>> {
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
        value: u64,
        offer: &dyn Fn() -> Result<Vec<u8>>,
    ) -> Result<membership::agreement::Outcome> {
        self.inner.drain();
        let state = &self.inner.state;
        membership.agree(&Asked { op, comm: state.id, members: &state.members, value, offer })
    }

    /// Opens a store for the ranks that live.
    fn host(&self, membership: &Membership) -> Result<Server> {
        let any = if self.is_one_host() { Ipv4Addr::LOCALHOST } else { Ipv4Addr::UNSPECIFIED };
        let state = &self.inner.state;
        Server::start_unsized((any, 0).into(), membership.secret(&state.key(SHRINK)), &state.config)
    }

    /// Starts a communicator of the ranks `alive` at the store whose addresses are `offer`. A death ends the wait.
    fn start_anew(
        &self,
        membership: &Membership,
        alive: &[usize],
        offer: &[u8],
        server: Option<Server>,
    ) -> Result<Comm> {
        let state = &self.inner.state;
        let addresses: Vec<SocketAddr> = decode(SHRINK, offer)?;
        let id = UniqueId::new(membership.secret(&state.key(SHRINK)), addresses);
        // One of an attempt whose leader was followed by another.
        let server = server.filter(|server| server.unique_id() == id);
        let rank = alive.iter().position(|&rank| rank == state.rank);
        let rank = rank.ok_or_else(|| Error::invalid(SHRINK, "this rank is not among those that live"))?;
        let worlds: Vec<usize> = alive.iter().filter_map(|&rank| state.members.get(rank).copied()).collect();
        WATCHED.set((membership.beacons(&worlds), interrupt::check()));
        let started = watched(is_over, || Comm::restart(self, &id, rank, alive, server));
        WATCHED.take();
        started
    }
}

const SHRINK: &str = "shrink";
/// Starts that may fail although all ranks live.
const FAILURES: usize = 3;
const REVOKED: &str = "revoked the communicator";

thread_local! {
    /// Beacons of the processes that this thread starts a communicator with, and the check of its call.
    static WATCHED: RefCell<(Vec<String>, Option<Check>)> = const { RefCell::new((Vec::new(), None)) };
}

/// Ends the start of a communicator when one of its ranks dies.
fn is_over() -> bool {
    WATCHED.with_borrow(|(beacons, check)| check.is_some_and(|check| check()) || membership::any_dead(beacons))
}
