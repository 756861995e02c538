//! Watching of connections with several rails: one that carries nothing is failed over, and failed back
//! when it answers again.
//!
//! TCP itself waits for minutes. Here a stream is suspected when its kernel has bytes for a peer that would take them,
//! and within `TINYNCCL_NET_RAIL_TIMEOUT` none was acknowledged, nor within the time in which TCP sends a lost segment
//! again and receives its acknowledgement. That is a matter of the two kernels: a peer that is stopped, or that has no
//! receive posted, still acknowledges, or closes its window. It counts alike whether the network drops what was sent,
//! or this host what is to be sent (a full queue, a hole for long packets). A cut cable takes the interfaces at both of
//! its ends down; a stream of such an interface is suspected as soon as it is stalled. A kernel without a route sends
//! nothing at all, as it does to a peer whose window is full; there the missing route shows it.
//!
//! A stream that is suspected carries nothing more while another one works, and is trusted again as soon as it moves.
//! The ends of a connection see different streams stall, and neither may close what may be the last one of the
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
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::bootstrap::interface;
use crate::rails::connection::Connection;
use crate::rails::connection::core::DataStream;
use crate::rails::failover::slot::State;
use crate::rails::health::watch::{Watch, WatchList, Watched};
use crate::rails::stream::{InFlight, Rail};
use tinynccl_plan::error::Result;
use tinynccl_sys::config::Config;
use tinynccl_sys::threads::Thread;

/// Factor by which a peer behind relays may take longer to answer.
const RELAYED_FACTOR: u32 = 10;
/// Checks of a stream within a short time limit; it is suspected only after more than half as many.
const CHECKS: u32 = 5;
/// Time between two control frames to the peer about a stream that is stalled.
const REMIND: Duration = Duration::from_millis(500);
/// Time between two checks, at least and at most.
const BETWEEN: (Duration, Duration) = (Duration::from_millis(2), Duration::from_millis(20));

/// The thread that checks the streams of connections with several rails.
#[derive(Debug, Default)]
pub(in crate::rails) struct Monitor(Watch<History>);

/// State of a connection's streams at earlier checks.
#[derive(Debug, Default)]
struct History {
    seen: HashMap<(Sign, usize), Seen>,
    /// Time at which the peer was last notified of streams that stall.
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

/// Time that a stream has stalled, and the number of checks that have seen it.
#[derive(Debug, Clone, Copy)]
struct Stall {
    time: Duration,
    checks: u32,
}

impl Stall {
    fn reaches(self, limit: Duration) -> bool {
        self.checks > CHECKS / 2 && self.time >= limit
    }
}

/// The addresses of interfaces that are up, listed when they are needed; `None` where they cannot be listed.
pub(in crate::rails) type Up = LazyCell<Option<Vec<IpAddr>>>;

/// A stream that is stalled.
struct Stuck {
    index: usize,
    rail: Option<Rail>,
    why: String,
}

impl Monitor {
    /// Watches a new connection until it ends.
    pub(in crate::rails) fn watch(&self, config: &Config, connection: &Arc<Connection>) -> Result<()> {
        let limit = config.net_rail_timeout;
        self.0.add(connection, History::default(), |list| {
            let what = "the thread that monitors rails".to_owned();
            Thread::start("net", "tinynccl-health".to_owned(), what, move || run(&list, limit))
        })
    }

    /// Ends its thread.
    pub(in crate::rails) fn stop(&self) {
        self.0.stop();
    }
}

/// Checks all connections in turn until the monitor is stopped.
fn run(list: &WatchList<History>, limit: Duration) {
    let tick = (limit / CHECKS).clamp(BETWEEN.0, BETWEEN.1);
    while !list.is_stopped() {
        let mut watched = list.wait(tick);
        let up = Up::new(interface::up);
        for Watched { connection, state } in watched.iter_mut() {
            if let Some(connection) = connection.upgrade() {
                check(&connection, state, limit, &up);
            }
        }
    }
}

/// Checks a connection once: what has stalled for too long is suspected, and failed over if another path works.
fn check(connection: &Arc<Connection>, History { seen, reminded }: &mut History, limit: Duration, up: &Up) {
    let now = Instant::now();
    // What is gone does not come back.
    seen.retain(|(_, index), _| connection.stream(*index).is_some_and(|stream| !stream.is(State::Retired)));
    let mut stall = |count: Sign, index: usize, flight: InFlight| {
        let InFlight { unacked, unsent, acked, .. } = flight;
        let seen = seen.entry((count, index)).or_insert(Seen { acked, at: now, checks: 0 });
        if !(unacked || unsent) || acked != seen.acked {
            *seen = Seen { acked, at: now, checks: 0 };
        }
        seen.checks += 1;
        Stall { time: now - seen.at, checks: seen.checks }
    };
    let is_down = |rail: Rail| up.as_ref().is_some_and(|all| !all.contains(&rail.ours));
    let mut stuck: Vec<Stuck> = Vec::new();
    for (index, stream) in connection.alive() {
        let flight = stream.in_flight().unwrap_or_default();
        let stalled = stall(Sign::Kernel, index, flight);
        let patience = limit.max(patience(flight.rto));
        let is_stalled = stalled.reaches(patience);
        let why = if stalled.checks > 1 && stream.rail.is_some_and(is_down) {
            "its interface is down".to_owned()
        } else if is_stalled && flight.unacked {
            format!("the peer's kernel has acknowledged nothing for {patience:?}")
        } else if is_stalled && flight.open {
            format!("this host has sent nothing of it for {patience:?}, and the peer's kernel would take it")
        } else if is_stalled && stream.rail.is_some_and(|rail| !rail.is_routed()) {
            "this host has no route over it any more".to_owned()
        } else if connection.relayed() {
            let received = |pinged| InFlight { unacked: pinged, acked: stream.probe.received(), ..InFlight::default() };
            if stall(Sign::Quiet, index, received(true)).reaches(limit)
                && !stream.probe.is_pinged()
                && connection.requests.any()
            {
                stream.probe.ping();
                connection.wake(index);
            }
            if !stall(Sign::Pinged, index, received(stream.probe.is_pinged())).reaches(limit * RELAYED_FACTOR) {
                connection.suspect(index, false);
                continue;
            }
            format!("no reply through its relays for {:?}", limit * RELAYED_FACTOR)
        } else {
            if stalled.checks <= 1 {
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
        if stall(Sign::Ended, index, closed).reaches(limit) && connection.alive().next().is_some() {
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
        let works =
            |(other, stream): (usize, &DataStream)| stream.rail != *rail && stuck.iter().all(|s| s.index != other);
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
