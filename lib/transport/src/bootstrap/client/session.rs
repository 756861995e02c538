//! One rank's connection to the store, for as long as the job lives.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::join;
use super::mailbox::{Answers, Handler, Mailbox};
use super::monitor::Monitor;
use crate::bootstrap::UniqueId;
use crate::bootstrap::ledger::progress::{Health, Progress};
use crate::bootstrap::wire::event::Event;
use crate::bootstrap::wire::frame::MAX_FRAME;
use crate::bootstrap::wire::message::{Bytes, Cause, ToStore};
use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::config::Config;
use tinynccl_sys::doorbell::Doorbell;
use tinynccl_sys::fork::Origin;
use tinynccl_sys::secret::Secret;
use tinynccl_sys::threads::{Thread, deadline_after, lock};

/// Limit for the store's reply that names the missing ranks, after an exchange timed out.
const LAST_ANSWER: Duration = Duration::from_secs(2);

/// A rank that is registered with the store. A thread (the monitor) reads the connection and sends the heartbeats.
/// Dropping it closes it ([`Session::close`]).
pub struct Session {
    rank: usize,
    world_size: usize,
    infos: Vec<Value>,
    address: String,
    secret: Secret,
    health_limit: Duration,
    mailbox: Arc<Mailbox>,
    thread: Thread,
    origin: Origin,
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Session { rank, world_size, address, .. } = self;
        write!(f, "Session {{ rank {rank} of {world_size}, store at {address} }}")
    }
}

impl Session {
    /// Registers `rank` with the store, with what the others need to know of it (`info`, opaque here), and blocks until
    /// all ranks are registered.
    ///
    /// Fails after `config.connect_timeout`, naming the ranks which are missing; at once when the store refuses us, or
    /// when a rank which was here leaves or dies.
    pub fn join(id: &UniqueId, rank: usize, world_size: usize, info: Value, config: &Config) -> Result<Session> {
        let joined = join::join(id, rank, world_size, info, config)?;
        let (address, secret) = (joined.ways.address.to_string(), joined.ways.links);
        let mailbox = Arc::new(Mailbox::new(Doorbell::new()?));
        let monitor = Monitor::new(joined.connection, joined.ways, Arc::clone(&mailbox), config.heartbeat);
        let what = format!("the monitor thread of rank {rank}");
        let thread = Thread::start("rendezvous", format!("tinynccl-mon-{rank}"), what, move || monitor.run())?;
        Ok(Session {
            rank,
            world_size,
            infos: joined.infos,
            address,
            secret,
            health_limit: config.heartbeat.saturating_mul(4).clamp(Duration::from_secs(1), Duration::from_secs(2)),
            mailbox,
            thread,
            origin: Origin::here(),
        })
    }

    /// Our rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.world_size
    }

    /// Returns the endpoints with which each rank registered, by rank.
    pub fn infos(&self) -> &[Value] {
        &self.infos
    }

    /// Returns the secret of the links, which only the ranks of this start of the job know.
    pub fn secret(&self) -> Secret {
        self.secret
    }

    /// Address of the store, for errors.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// A small all-gather among `members` (world ranks, the same list at each, ourselves in it): the values in the
    /// order of `members`. `key` names this one use; all members give the same.
    ///
    /// Fails when a member is lost or has left ([`Error::PeerLost`]), when one has not come by the `deadline`
    /// ([`Error::Timeout`], with their numbers; the others then fail too), or when the ranks name different members.
    pub fn exchange(&self, key: &str, members: &[usize], value: Vec<u8>, deadline: Duration) -> Result<Vec<Vec<u8>>> {
        self.offer(key, members, value)?;
        self.collect(key, deadline, &|| false)
    }

    /// The first half of [`Session::exchange`]: makes our value known and does not wait.
    pub fn offer(&self, key: &str, members: &[usize], value: Vec<u8>) -> Result<()> {
        let op = || format!("exchange {key:?}");
        self.origin.check(op, self.rank)?;
        let mut sorted = members.to_vec();
        sorted.sort_unstable();
        sorted.dedup();
        if sorted.len() != members.len() || !sorted.contains(&self.rank) || sorted.last() >= Some(&self.world_size) {
            let detail = format!(
                "members {members:?} must be different ranks below {}, rank {} among them",
                self.world_size, self.rank
            );
            return Err(Error::invalid(op(), detail));
        }
        // The answer holds every member's value as hexadecimal text.
        let longest = (MAX_FRAME / 2 - key.len().min(MAX_FRAME / 4)) / members.len() / 2;
        if value.len() > longest {
            let detail = format!("a value of {} bytes; {} members may send {longest} each", value.len(), members.len());
            return Err(Error::invalid(op(), detail));
        }
        // Alone it needs no store.
        let alone = (members.len() == 1).then(|| Ok(vec![value.clone()]));
        {
            let mut answers = lock(&self.mailbox.answers);
            if alone.is_none() {
                self.check_open(&answers)?;
            }
            if answers.exchanges.contains_key(key) {
                return Err(Error::invalid(op(), "this key is in use by another thread"));
            }
            answers.exchanges.insert(key.to_owned(), alone);
        }
        if members.len() > 1 {
            self.mailbox.send(&ToStore::Put { key: key.to_owned(), members: members.to_vec(), value: Bytes(value) });
        }
        Ok(())
    }

    /// The second half: waits for the other members' values. When `ended` becomes true it stops waiting within a
    /// fraction of a second, with [`Error::Aborted`].
    pub fn collect(&self, key: &str, deadline: Duration, ended: &dyn Fn() -> bool) -> Result<Vec<Vec<u8>>> {
        let op = || format!("exchange {key:?}");
        let started = Instant::now();
        let ready = |a: &Answers| a.over.is_some() || a.exchanges.get(key).is_none_or(Option::is_some) || ended();
        if !self.mailbox.wait_for(deadline_after(deadline), ready) {
            self.mailbox.send(&ToStore::GiveUp { key: key.to_owned(), waited: started.elapsed() });
            self.mailbox.wait_for(deadline_after(LAST_ANSWER), ready);
        }
        let late =
            |missing, detail| Error::Timeout { op: op(), rank: self.rank, waited: started.elapsed(), missing, detail };
        let mut answers = lock(&self.mailbox.answers);
        match answers.exchanges.remove(key).flatten() {
            Some(Ok(values)) => Ok(values),
            Some(Err(failure)) => Err(match failure.cause {
                Cause::Timeout => late(failure.missing, failure.reason),
                Cause::Gone => Error::PeerLost {
                    op: op(),
                    rank: self.rank,
                    peer: failure.missing.first().copied().unwrap_or_default(),
                    address: format!("as the store at {} saw it", self.address),
                    detail: failure.reason,
                },
                Cause::Mismatch => Error::invalid(op(), failure.reason),
            }),
            None => {
                self.check_open(&answers)?;
                if ended() {
                    let reason = "the communicator failed while this rank waited".to_owned();
                    return Err(Error::Aborted { op: op(), rank: self.rank, reason });
                }
                Err(late(Vec::new(), self.silent()))
            }
        }
    }

    /// Calls `f` for every event, from the monitor thread; for the events which came before, at once from this one.
    ///
    /// `f` must not block: no other message is received meanwhile.
    pub fn on_event(&self, f: Box<dyn Fn(&Event) + Send + Sync>) {
        self.handle_events(None, f);
    }

    /// [`Session::on_event`] for communicator `comm`, until [`Session::forget`].
    pub fn on_event_of(&self, comm: u32, f: Box<dyn Fn(&Event) + Send + Sync>) {
        self.handle_events(Some(comm), f);
    }

    /// Removes the handlers of events for communicator `comm`.
    pub fn forget(&self, comm: u32) {
        lock(&self.mailbox.events).handlers.retain(|(of, _)| *of != Some(comm));
    }

    fn handle_events(&self, of: Option<u32>, f: Box<dyn Fn(&Event) + Send + Sync>) {
        let handler: Handler = Arc::from(f);
        let before = {
            let mut events = lock(&self.mailbox.events);
            events.handlers.push((of, Arc::clone(&handler)));
            events.list.clone()
        };
        for event in &before {
            handler(event);
        }
    }

    /// Makes the heartbeats carry the progress of communicator `comm`, until the last user of the value is gone.
    pub fn track(&self, comm: u32) -> Arc<Progress> {
        let mut tracked = lock(&self.mailbox.tracked);
        if let Some((_, progress)) = tracked.iter().find(|(c, _)| *c == comm) {
            return Arc::clone(progress);
        }
        let progress = Arc::new(Progress::new(&self.secret, comm));
        tracked.push((comm, Arc::clone(&progress)));
        progress
    }

    /// Sends a heartbeat at once: the others are to know of our last call. Does not wait.
    pub fn beat(&self) {
        lock(&self.mailbox.outbox).beat = true;
        self.mailbox.bell.ring();
    }

    /// Requests from the store the health of every rank, by rank. Waits two seconds at most: a store that does not
    /// answer is an error, which means that the process which runs it is stopped, overloaded or gone.
    pub fn health(&self, comm: u32) -> Result<Vec<Health>> {
        self.origin.check(|| "health".to_owned(), self.rank)?;
        let ticket = {
            let mut answers = lock(&self.mailbox.answers);
            self.check_open(&answers)?;
            answers.next_ticket += 1;
            let ticket = answers.next_ticket;
            answers.healths.insert(ticket, None);
            ticket
        };
        self.mailbox.send(&ToStore::Health { ticket, comm });
        self.mailbox.wait_for(deadline_after(self.health_limit), |a| {
            a.over.is_some() || a.healths.get(&ticket).is_none_or(Option::is_some)
        });
        let mut answers = lock(&self.mailbox.answers);
        match answers.healths.remove(&ticket).flatten() {
            Some(ranks) => Ok(ranks),
            None => {
                self.check_open(&answers)?;
                Err(Error::bootstrap(&self.address, self.silent()))
            }
        }
    }

    /// Notifies every other rank that `comm` is aborted. Does not wait.
    pub fn abort(&self, comm: u32, reason: &str) {
        // Long reasons are cut: they must fit a message.
        let reason = reason.chars().take(4096).collect();
        self.mailbox.send(&ToStore::Abort { comm, reason });
    }

    /// Returns a flag that is true once this process has not run for several heartbeats.
    pub fn stopped(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.mailbox.stopped)
    }

    /// Handles rank `from`'s abort of `comm`, which has come without the store.
    pub fn aborted(&self, from: usize, comm: u32, reason: String) {
        self.mailbox.dispatch(Event::Abort { from, comm, reason });
    }

    /// Notifies every other rank that this one has left, and still receives their events. [`Session::close`] must
    /// follow.
    pub fn leave(&self) {
        self.mailbox.send(&ToStore::Leave);
    }

    /// Returns true once nothing more will be received: the store has closed, or is lost.
    pub fn is_over(&self) -> bool {
        lock(&self.mailbox.answers).over.is_some()
    }

    /// Says goodbye to the store and ends the monitor. Takes one second at most, three where nothing gets through to
    /// the store; later calls do nothing.
    pub fn close(&self) {
        lock(&self.mailbox.outbox).bye = true;
        self.mailbox.bell.ring();
        // An event handler may drop the last user of this session: the monitor does not wait for itself.
        self.thread.join();
    }

    fn check_open(&self, answers: &Answers) -> Result<()> {
        match &answers.over {
            None => Ok(()),
            Some(why) => Err(Error::bootstrap(&self.address, format!("rank {}: {why}", self.rank))),
        }
    }

    fn silent(&self) -> String {
        format!(
            "rank {}: the store at {} does not answer: the process that runs it (rank 0 or the launcher) is stopped, overloaded or gone",
            self.rank, self.address
        )
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if self.origin.is_here() {
            self.close();
        }
    }
}
