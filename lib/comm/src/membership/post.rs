//! Messages to other ranks' processes: in order, again and again until they are confirmed or the receiver is dead.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::Letter;
use tinynccl_plan::error::Error;
use tinynccl_sys::config::Config;
use tinynccl_sys::threads::{Thread, lock};
use tinynccl_transport::wait::Wait;
use tinynccl_transport::{Endpoint, EndpointInfo, Failure, beacon};

/// Heartbeats without a sign of life after which a rank counts as silent.
const SILENT_BEATS: u32 = 4;
/// Pause after an attempt that failed at once.
const PAUSE: Duration = Duration::from_millis(2);
/// Longest time for messages that are still unsent when the communicator goes.
const LAST: Duration = Duration::from_millis(500);

/// The messages to one rank.
struct Outbox {
    queue: VecDeque<Arc<[u8]>>,
    /// A thread sends them.
    busy: bool,
    /// Last sign of life.
    heard: Option<Instant>,
    dead: bool,
    pinged: Option<Instant>,
}

/// Sends messages for one rank.
pub(super) struct Post {
    office: Arc<Office>,
    threads: Mutex<Vec<Thread>>,
}

struct Office {
    endpoint: Arc<Endpoint>,
    rank: usize,
    infos: Vec<EndpointInfo>,
    outboxes: Vec<Mutex<Outbox>>,
    heartbeat: Duration,
    /// Time after which nothing more is sent.
    closed: Mutex<Option<Instant>>,
}

impl Post {
    pub(super) fn new(endpoint: Arc<Endpoint>, rank: usize, infos: Vec<EndpointInfo>, config: &Config) -> Post {
        let empty = || Outbox { queue: VecDeque::new(), busy: false, heard: None, dead: false, pinged: None };
        let outboxes = infos.iter().map(|_| Mutex::new(empty())).collect();
        let heartbeat = config.heartbeat;
        let office = Office { endpoint, rank, infos, outboxes, heartbeat, closed: Mutex::default() };
        Post { office: Arc::new(office), threads: Mutex::default() }
    }

    pub(super) fn endpoint(&self) -> &Endpoint {
        &self.office.endpoint
    }

    pub(super) fn rank(&self) -> usize {
        self.office.rank
    }

    pub(super) fn infos(&self) -> &[EndpointInfo] {
        &self.office.infos
    }

    /// The beacon of a rank's process, if that proves its death to us.
    pub(super) fn beacon(&self, rank: usize) -> Option<&str> {
        self.office.beacon(rank)
    }

    /// Sends a message and does not wait.
    pub(super) fn send(&self, to: usize, message: Vec<u8>) {
        let Some(outbox) = self.office.outboxes.get(to) else { return };
        let mut outbox = lock(outbox);
        if outbox.dead {
            return;
        }
        outbox.queue.push_back(message.into());
        if std::mem::replace(&mut outbox.busy, true) {
            return;
        }
        drop(outbox);
        let office = self.office.clone();
        let what = format!("the thread that sends messages to rank {to}");
        let started = Thread::start("message", format!("tinynccl-post-{to}"), what, move || office.send_all(to));
        let mut threads = lock(&self.threads);
        threads.retain(|thread| !thread.is_finished());
        match started {
            Ok(thread) => threads.push(thread),
            Err(e) => {
                // The next message tries again.
                log::error!("rank {}: {e}", self.rank());
                self.office.outboxes.get(to).inspect(|outbox| lock(outbox).busy = false);
            }
        }
    }

    /// Notes a sign of life.
    pub(super) fn heard(&self, from: usize) {
        self.office.outboxes.get(from).inspect(|outbox| lock(outbox).heard = Some(Instant::now()));
    }

    /// Returns true if the death of a rank's process is proven.
    pub(super) fn is_dead(&self, rank: usize) -> bool {
        self.office.is_dead(rank)
    }

    /// Returns true if no sign of life has come from a rank for too long, and asks it for one. It is awaited `since`
    /// then.
    pub(super) fn is_silent(&self, rank: usize, since: Instant) -> bool {
        let Some(outbox) = self.office.outboxes.get(rank) else { return false };
        let mut outbox = lock(outbox);
        let heard = outbox.heard.map_or(since, |heard| heard.max(since));
        let due = outbox.pinged.is_none_or(|pinged| pinged.elapsed() >= self.office.heartbeat);
        let ping = due && heard.elapsed() >= self.office.heartbeat && outbox.queue.is_empty();
        if ping {
            outbox.pinged = Some(Instant::now());
        }
        drop(outbox);
        if let (true, Ok(bytes)) = (ping, Letter::Ping.to_bytes()) {
            self.send(rank, bytes);
        }
        heard.elapsed() > self.office.silence()
    }

    /// Time without a sign of life after which a rank counts as silent.
    pub(super) fn silence(&self) -> Duration {
        self.office.silence()
    }

    /// Gives the threads a moment for what is unsent, and ends them.
    pub(super) fn close(&self) {
        *lock(&self.office.closed) = Some(Instant::now() + LAST);
        drop(std::mem::take(&mut *lock(&self.threads)));
    }
}

impl Office {
    fn silence(&self) -> Duration {
        self.heartbeat.saturating_mul(SILENT_BEATS)
    }

    fn beacon(&self, rank: usize) -> Option<&str> {
        let (ours, theirs) = (self.infos.get(self.rank)?, self.infos.get(rank)?);
        theirs.beacon.as_deref().filter(|_| ours.host.same_network(&theirs.host))
    }

    fn is_dead(&self, rank: usize) -> bool {
        let Some(outbox) = self.outboxes.get(rank) else { return false };
        if lock(outbox).dead {
            return true;
        }
        let dead = self.beacon(rank).is_some_and(beacon::is_out);
        if dead {
            lock(outbox).dead = true;
        }
        dead
    }

    fn is_over(&self) -> bool {
        lock(&self.closed).is_some_and(|until| Instant::now() >= until)
    }

    /// Sends what is queued for a rank.
    fn send_all(&self, to: usize) {
        let (Some(outbox), Some(info)) = (self.outboxes.get(to), self.infos.get(to)) else { return };
        let next = || {
            let mut outbox = lock(outbox);
            let message = outbox.queue.front().cloned();
            outbox.busy = message.is_some();
            message
        };
        while let Some(message) = next() {
            if let Err(why) = self.send(to, info, &message) {
                log::debug!("rank {}: a message to rank {to} is lost: {why}", self.rank);
                lock(outbox).queue.clear();
                continue;
            }
            let mut outbox = lock(outbox);
            outbox.heard = Some(Instant::now());
            outbox.queue.pop_front();
        }
    }

    /// Sends one message, for as long as a silent rank may take.
    fn send(&self, to: usize, info: &EndpointInfo, message: &[u8]) -> Result<(), String> {
        let ended = || {
            let reason = match () {
                () if self.is_over() => "this communicator is closed",
                () if self.is_dead(to) => "its process is dead",
                () => return None,
            };
            Some(Error::Aborted { op: "message".to_owned(), rank: self.rank, reason: reason.to_owned() })
        };
        let wait = Wait::new(self.rank, to, self.silence(), &ended);
        loop {
            let why = match self.endpoint.send_message(to, info, message, &wait) {
                Ok(()) => return Ok(()),
                Err(Failure::Final(e)) => return Err(e.to_string()),
                Err(failure) => failure.text(),
            };
            wait.pause(PAUSE, || why.clone()).map_err(|e| e.to_string())?;
        }
    }
}
