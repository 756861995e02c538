//! Connections with several rails: a rail that carries nothing is given up, and taken back when it answers again.
//!
//! TCP itself waits for minutes. Here a stream is lost when its kernel has sent bytes, and within
//! `TINYNCCL_NET_RAIL_TIMEOUT` none of them was acknowledged although another rail works. That is a matter of the two
//! kernels: a peer that is stopped, or that has no receive posted, still acknowledges. Where an interface of this host
//! is gone its kernel sends nothing at all, as it does to a peer whose window is full; then the missing route tells.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::Inner;
use super::dial::Redial;
use super::link::Link;
use super::ports::Way;
use super::stream::{InFlight, Rail, State, Stream};
use crate::error;
use crate::threads::{Thread, lock};

/// Looks at a stream before it counts as lost.
const LOOKS: u32 = 5;
/// Between two looks at least.
const SHORTEST: Duration = Duration::from_millis(2);
/// Before a lost rail is dialed, and at most between two tries.
const AGAIN: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(5));
/// With nothing to do.
const IDLE: Duration = Duration::from_secs(3600);

/// The threads, which start with the first such connection.
#[derive(Debug, Default)]
pub(super) struct Rails {
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
    link: Weak<Link>,
    /// How the sender makes a stream; the receiver waits for it.
    redial: Option<Arc<Redial>>,
    seen: HashMap<usize, Seen>,
}

/// A stream at the last look at which all was well.
#[derive(Debug)]
struct Seen {
    acked: u64,
    at: Instant,
    looks: u32,
}

/// A stream that stands still.
struct Stuck {
    index: usize,
    rail: Option<Rail>,
    /// Its kernel has sent nothing that could be acknowledged.
    unsent: bool,
}

impl Rails {
    /// Watches a new connection until it ends.
    pub(super) fn watch(&self, inner: &Arc<Inner>, link: &Arc<Link>, redial: Option<Redial>) -> error::Result<()> {
        {
            let mut watched = lock(&self.shared.watched);
            let redial = redial.map(Arc::new);
            watched.push(Watched { link: Arc::downgrade(link), redial, seen: HashMap::new() });
        }
        let mut threads = lock(&self.threads);
        if threads.is_empty() {
            let (shared, limit) = (self.shared.clone(), inner.config.net_rail_timeout);
            let what = "a thread that watches rails".to_owned();
            threads.push(Thread::start("net", "tinynccl-rails".to_owned(), what, move || shared.look(limit))?);
            let (shared, inner) = (self.shared.clone(), Arc::downgrade(inner));
            let what = "a thread that dials lost rails".to_owned();
            threads.push(Thread::start("net", "tinynccl-redial".to_owned(), what, move || shared.redial(&inner))?);
        }
        self.shared.changed.notify_all();
        Ok(())
    }
}

impl Drop for Rails {
    fn drop(&mut self) {
        // With the lock: a thread that has just looked sees it, or waits already.
        let watched = lock(&self.shared.watched);
        self.shared.stop.store(true, Ordering::Release);
        drop(watched);
        self.shared.changed.notify_all();
    }
}

impl Shared {
    fn stopped(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    /// Waits so long, or for ever while nothing is watched; returns what is.
    fn wait(&self, time: Duration) -> MutexGuard<'_, Vec<Watched>> {
        let mut watched = lock(&self.watched);
        if !self.stopped() {
            let time = if watched.is_empty() { IDLE } else { time };
            watched = self.changed.wait_timeout(watched, time).unwrap_or_else(PoisonError::into_inner).0;
        }
        watched.retain(|w| w.link.upgrade().is_some_and(|link| !link.is_over()));
        watched
    }

    fn look(&self, limit: Duration) {
        let tick = (limit / LOOKS).max(SHORTEST);
        while !self.stopped() {
            for Watched { link, seen, .. } in self.wait(tick).iter_mut() {
                if let Some(link) = link.upgrade() {
                    look(&link, seen, limit);
                }
            }
        }
    }

    fn redial(&self, inner: &Weak<Inner>) {
        let mut tries: HashMap<(u32, usize), Try> = HashMap::new();
        while !self.stopped() {
            let watched: Vec<(Weak<Link>, Arc<Redial>)> = {
                let watched = self.wait(AGAIN.0 / 2);
                watched.iter().filter_map(|w| Some((w.link.clone(), w.redial.clone()?))).collect()
            };
            tries.retain(|(link, _), _| watched.iter().any(|(_, redial)| redial.link == *link));
            for (link, redial) in watched {
                for (number, way) in redial.ways.iter().enumerate() {
                    let (Some(link), Some(inner)) = (link.upgrade(), inner.upgrade()) else { break };
                    let alive = link.alive().filter(|(_, s)| s.rail.is_some_and(|r| r.theirs == way.to)).count();
                    if alive >= redial.streams_of(number) {
                        tries.remove(&(redial.link, number));
                        continue;
                    }
                    let first = || Try { at: Instant::now() + AGAIN.0, pause: AGAIN.0 };
                    let next = tries.entry((redial.link, number)).or_insert_with(first);
                    if Instant::now() < next.at {
                        continue;
                    }
                    match self.mend(&inner, &link, &redial, way) {
                        Ok(index) => {
                            log::info!("net: {}: {way} is back, as stream {index}", link.name());
                            next.pause = AGAIN.0;
                        }
                        Err(detail) => {
                            log::debug!("net: {}: {way} is not back: {detail}", link.name());
                            next.at = Instant::now() + next.pause;
                            next.pause = (2 * next.pause).min(AGAIN.1);
                        }
                    }
                }
            }
        }
    }

    /// Makes a stream in the place of a lost one; its number.
    fn mend(&self, inner: &Inner, link: &Arc<Link>, redial: &Redial, way: &Way) -> Result<usize, String> {
        let (index, socket) = redial.stream(inner, way, || self.stopped())?;
        let added = link.add(index, socket, &inner.workers);
        added.then_some(index).ok_or_else(|| format!("there is no room for a stream {index}"))
    }
}

/// When a rail is dialed next, and how long after that if it does not answer.
struct Try {
    at: Instant,
    pause: Duration,
}

/// One look at a connection: what has stood still for too long is lost, if another rail works.
fn look(link: &Arc<Link>, seen: &mut HashMap<usize, Seen>, limit: Duration) {
    let now = Instant::now();
    let stuck: Vec<Stuck> = {
        let mut stands = |index: usize, stream: &Stream| {
            let InFlight { unacked, unsent, acked } = stream.in_flight().unwrap_or_default();
            let seen = seen.entry(index).or_insert(Seen { acked, at: now, looks: 0 });
            if !(unacked || unsent) || acked != seen.acked {
                *seen = Seen { acked, at: now, looks: 0 };
            }
            seen.looks += 1;
            let stands = seen.looks > LOOKS / 2 && now - seen.at >= limit;
            let stuck = Stuck { index, rail: stream.rail, unsent: !unacked };
            (stands && (unacked || stream.rail.is_some_and(|rail| !rail.is_routed()))).then_some(stuck)
        };
        link.alive().filter_map(|(index, stream)| stands(index, stream)).collect()
    };
    for Stuck { index, rail, unsent } in &stuck {
        let works = |(other, stream): (usize, &Stream)| stream.rail != *rail && stuck.iter().all(|s| s.index != other);
        if link.alive().any(works) {
            let why = if *unsent {
                "this host has no route over it any more".to_owned()
            } else {
                format!("the peer's kernel has acknowledged nothing for {limit:?}")
            };
            link.lose(*index, why);
        } else if link.streams().any(|(_, stream)| stream.is(State::Ended)) {
            // The peer has closed the connection, and this stream cannot tell it.
            link.end_of_stream(*index);
        }
    }
}
