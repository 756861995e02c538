//! Watching of connections with several rails: one that carries nothing is failed over, and failed back
//! when it answers again.
//!
//! TCP itself waits for minutes. Here a stream is suspected when its kernel has bytes for a peer that would take them,
//! and within `TINYNCCL_NET_RAIL_TIMEOUT` none was acknowledged, nor within the time in which TCP sends a lost segment
//! again and receives its acknowledgement. That is a matter of the two kernels: a peer that is stopped, or that has no
//! receive posted, still acknowledges, or closes its window. It counts alike whether the network drops what was sent,
//! or this host what is to be sent (a full queue, a hole for long packets). A cut cable takes the interfaces at both of
//! its ends down; a stream of such an interface is suspected as soon as it stands still. A kernel without a route sends
//! nothing at all, as it does to a peer whose window is full; there the missing route shows it.
//!
//! A stream that is suspected carries nothing more while another one works, and is trusted again as soon as it moves.
//! The ends of a connection see different streams stand still, and neither may close what may be the last one of the
//! other. So the sender alone retires a stream, once another one works; the receiver requests that, and the socket is
//! closed when both know. Until then what comes over it counts. With no stream that works all of them stay, lost rails
//! are dialed again, and the connection ends when its owner gives up.
//!
//! A path through relays is a rail, too. Its first node acknowledges bytes that may get no further, so over a stream
//! that has brought nothing for a while each end probes the other one, as long as requests are open. A relay that goes
//! closes its streams as a peer does that has closed the connection; but the peer closes those of all paths.

use std::cell::LazyCell;
use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use crate::bootstrap::interface;
use crate::error;
use crate::net::Inner;
use crate::net::connect::dialer::Redial;
use crate::net::connect::redial::{self, Tries};
use crate::net::connection::Connection;
use crate::net::data::stream::{InFlight, Rail, State, Stream};
use crate::threads::{Thread, lock};

/// Factor by which a peer behind relays may take longer to answer.
const RELAYED_FACTOR: u32 = 10;
/// Checks of a stream within a short time limit; it is suspected only after more than half as many.
const CHECKS: u32 = 5;
/// Time between two control frames to the peer about a stream that stands still.
const REMIND: Duration = Duration::from_millis(500);
/// Time between two checks, at least and at most.
const BETWEEN: (Duration, Duration) = (Duration::from_millis(2), Duration::from_millis(20));
/// Longest wait with nothing to do.
const IDLE: Duration = Duration::from_secs(3600);

/// The threads that watch and redial rails, which start with the first connection that has several.
#[derive(Debug, Default)]
pub(in crate::net) struct Monitor {
    shared: Arc<Shared>,
    threads: Mutex<Vec<Thread>>,
}

#[derive(Debug, Default)]
struct Shared {
    watched: Mutex<Vec<Watched>>,
    changed: Condvar,
    stop: AtomicBool,
}

#[derive(Debug)]
struct Watched {
    connection: Weak<Connection>,
    /// Data by which the sender makes lost streams again; `None` at the receiver, which waits for them.
    redial: Option<Arc<Redial>>,
    seen: HashMap<(Sign, usize), Seen>,
    /// Time at which the peer was last notified of streams that stand still.
    reminded: Option<Instant>,
}

/// A reason for which a stream may be suspected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Sign {
    /// Bytes that the next node's kernel acknowledges.
    Kernel,
    /// Anything from the peer, behind relays: it is probed when nothing has come for a while, and the stream is
    /// suspected without a reply.
    Quiet,
    Pinged,
    /// The end of a stream that the next node has closed.
    Ended,
}

/// A stream at the last check at which all was well.
#[derive(Debug)]
struct Seen {
    acked: u64,
    at: Instant,
    checks: u32,
}

/// Time that a stream has stood still, and the number of checks that have seen it.
#[derive(Debug, Clone, Copy)]
struct Stood {
    time: Duration,
    checks: u32,
}

impl Stood {
    fn reaches(self, limit: Duration) -> bool {
        self.checks > CHECKS / 2 && self.time >= limit
    }
}

/// The addresses of interfaces that are up, listed when they are needed; `None` where they cannot be listed.
pub(in crate::net) type Up = LazyCell<Option<Vec<IpAddr>>>;

/// A stream that stands still.
struct Stuck {
    index: usize,
    rail: Option<Rail>,
    why: String,
}

impl Monitor {
    /// Watches a new connection until it ends.
    pub(in crate::net) fn watch(
        &self,
        inner: &Arc<Inner>,
        connection: &Arc<Connection>,
        redial: Option<Redial>,
    ) -> error::Result<()> {
        {
            let mut watched = lock(&self.shared.watched);
            let redial = redial.map(Arc::new);
            watched.push(Watched {
                connection: Arc::downgrade(connection),
                redial,
                seen: HashMap::new(),
                reminded: None,
            });
        }
        let mut threads = lock(&self.threads);
        if threads.is_empty() {
            let (shared, limit) = (self.shared.clone(), inner.config.net_rail_timeout);
            let what = "the thread that monitors rails".to_owned();
            threads.push(Thread::start("net", "tinynccl-monitor".to_owned(), what, move || shared.check(limit))?);
            let (shared, inner) = (self.shared.clone(), Arc::downgrade(inner));
            let what = "the thread that redials rails".to_owned();
            threads.push(Thread::start("net", "tinynccl-redial".to_owned(), what, move || shared.redial(&inner))?);
        }
        self.shared.changed.notify_all();
        Ok(())
    }

    /// Ends its threads; one that dials stops.
    pub(in crate::net) fn stop(&self) {
        {
            // With the lock: a thread that has just checked sees it, or waits already.
            let _watched = lock(&self.shared.watched);
            self.shared.stop.store(true, Ordering::Release);
        }
        self.shared.changed.notify_all();
        let threads = std::mem::take(&mut *lock(&self.threads));
        drop(threads);
    }
}

impl Shared {
    fn stopped(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    /// Waits for `time`, or for [`IDLE`] while nothing is watched; returns the connections that are.
    fn wait(&self, time: Duration) -> MutexGuard<'_, Vec<Watched>> {
        let mut watched = lock(&self.watched);
        if !self.stopped() {
            let time = if watched.is_empty() { IDLE } else { time };
            watched = self.changed.wait_timeout(watched, time).unwrap_or_else(PoisonError::into_inner).0;
        }
        watched.retain(|w| w.connection.upgrade().is_some_and(|connection| !connection.is_over()));
        watched
    }

    fn check(&self, limit: Duration) {
        let tick = (limit / CHECKS).clamp(BETWEEN.0, BETWEEN.1);
        while !self.stopped() {
            let mut watched = self.wait(tick);
            let up = Up::new(interface::up);
            for Watched { connection, seen, reminded, .. } in watched.iter_mut() {
                if let Some(connection) = connection.upgrade() {
                    check(&connection, (seen, reminded), limit, &up);
                }
            }
        }
    }

    fn redial(&self, inner: &Weak<Inner>) {
        let mut tries = Tries::default();
        while !self.stopped() {
            let watched: Vec<(Weak<Connection>, Arc<Redial>)> = {
                let watched = self.wait(redial::INTERVAL);
                watched.iter().filter_map(|w| Some((w.connection.clone(), w.redial.clone()?))).collect()
            };
            tries.keep(watched.iter().map(|(_, redial)| &**redial));
            let up = Up::new(interface::up);
            for (connection, redial) in &watched {
                let (Some(connection), Some(inner)) = (connection.upgrade(), inner.upgrade()) else { continue };
                tries.redial_lost(&inner, (&connection, redial), &up, &|| self.stopped());
            }
        }
    }
}

/// Checks a connection once: what has stood still for too long is suspected, and failed over if another path works.
fn check(
    connection: &Arc<Connection>,
    (seen, reminded): (&mut HashMap<(Sign, usize), Seen>, &mut Option<Instant>),
    limit: Duration,
    up: &Up,
) {
    let now = Instant::now();
    // What is gone does not come back.
    seen.retain(|(_, index), _| connection.stream(*index).is_some_and(|stream| !stream.is(State::Retired)));
    let mut stands = |count: Sign, index: usize, flight: InFlight| {
        let InFlight { unacked, unsent, acked, .. } = flight;
        let seen = seen.entry((count, index)).or_insert(Seen { acked, at: now, checks: 0 });
        if !(unacked || unsent) || acked != seen.acked {
            *seen = Seen { acked, at: now, checks: 0 };
        }
        seen.checks += 1;
        Stood { time: now - seen.at, checks: seen.checks }
    };
    let is_down = |rail: Rail| up.as_ref().is_some_and(|all| !all.contains(&rail.ours));
    let mut stuck: Vec<Stuck> = Vec::new();
    for (index, stream) in connection.alive() {
        let flight = stream.in_flight().unwrap_or_default();
        let stood = stands(Sign::Kernel, index, flight);
        let patience = limit.max(patience(flight.rto));
        let stands_still = stood.reaches(patience);
        let why = if stood.checks > 1 && stream.rail.is_some_and(is_down) {
            "its interface is down".to_owned()
        } else if stands_still && flight.unacked {
            format!("the peer's kernel has acknowledged nothing for {patience:?}")
        } else if stands_still && flight.open {
            format!("this host has sent nothing of it for {patience:?}, and the peer's kernel would take it")
        } else if stands_still && stream.rail.is_some_and(|rail| !rail.is_routed()) {
            "this host has no route over it any more".to_owned()
        } else if connection.relayed() {
            let received = |pinged| InFlight { unacked: pinged, acked: stream.probe.received(), ..InFlight::default() };
            if stands(Sign::Quiet, index, received(true)).reaches(limit)
                && !stream.probe.is_pinged()
                && connection.requests.any()
            {
                stream.probe.ping();
                connection.wake(index);
            }
            if !stands(Sign::Pinged, index, received(stream.probe.is_pinged())).reaches(limit * RELAYED_FACTOR) {
                connection.suspect(index, false);
                continue;
            }
            format!("no reply through its relays for {:?}", limit * RELAYED_FACTOR)
        } else {
            if stood.checks <= 1 {
                connection.suspect(index, false);
            }
            continue;
        };
        stuck.push(Stuck { index, rail: stream.rail, why });
    }
    // The peer closes all streams at once, a relay that goes only its own.
    let ended = connection.streams().filter(|(_, stream)| connection.relayed() && stream.is(State::Ended));
    for (index, _) in ended {
        let closed = InFlight { unacked: true, ..InFlight::default() };
        if stands(Sign::Ended, index, closed).reaches(limit) && connection.alive().next().is_some() {
            connection.fail_stream(index, "a relay has closed it".to_owned());
        }
    }
    let fresh: Vec<usize> = stuck.iter().map(|of| of.index).filter(|index| connection.suspect(*index, true)).collect();
    let due = reminded.is_none_or(|at| now - at >= REMIND);
    if due && connection.streams().any(|(_, of)| of.is(State::Retiring) || (of.is(State::Alive) && of.is_suspect())) {
        // It may not have been received.
        connection.resend_control();
        *reminded = Some(now);
    }
    for Stuck { index, rail, why } in &stuck {
        let works = |(other, stream): (usize, &Stream)| stream.rail != *rail && stuck.iter().all(|s| s.index != other);
        if connection.alive().any(works) {
            if fresh.contains(index) || !connection.side.receives() {
                connection.retire(*index, why);
            }
        } else if connection.streams().any(|(_, stream)| stream.is(State::Ended)) {
            // The peer has closed the connection, and this stream cannot show it.
            connection.end_of_stream(*index);
        }
    }
}

/// Returns the time in which TCP sends a lost segment again and receives its acknowledgement: at most 1.5 times its
/// retransmission timeout.
fn patience(rto: Duration) -> Duration {
    rto + rto / 2
}
