//! The thread of a session: reads what the store says, sends heartbeats and what the callers queued.

use std::sync::Arc;
use std::time::{Duration, Instant};
use std::sync::atomic::{Ordering, fence};

use rustix::event::{PollFd, PollFlags};

use super::connection::{Connection, Fill};
use super::event::Event;
use super::frame::MAX_FRAME;
use super::mailbox::{Exchanged, Mailbox};
use super::message::{ToRank, ToStore};
use super::resume::Ways;
use crate::threads::{deadline_after, left, lock, poll};

/// How long the goodbye may take.
const BYE_LIMIT: Duration = Duration::from_secs(1);
/// A stream that gets nothing through for so long is given up for another, if there is one. It is less than 30 s, after
/// which a stream fails by itself.
const STUCK: Duration = Duration::from_secs(2);
/// The same for the goodbye, for which nobody should wait long.
const STUCK_BYE: Duration = Duration::from_millis(250);
/// Time between two searches for another way.
const PAUSE: Duration = Duration::from_millis(250);

pub(crate) struct Monitor {
    connection: Connection,
    ways: Ways,
    /// Streams given up, until the store is heard over the one that came after.
    former: Vec<Connection>,
    /// When another way may be looked for.
    next_search: Instant,
    mailbox: Arc<Mailbox>,
    heartbeat: Duration,
    /// Since when we are closing, as a deadline.
    bye: Option<Instant>,
}

/// Why the monitor ends.
enum End {
    /// We said goodbye, or the store did.
    Good(&'static str),
    /// The store is gone.
    Lost(String),
}

fn gone(what: &str) -> End {
    End::Lost(format!("{what}: the process that ran it (rank 0 or the launcher) ended or was killed"))
}

impl Monitor {
    pub(crate) fn new(connection: Connection, ways: Ways, mailbox: Arc<Mailbox>, heartbeat: Duration) -> Self {
        let (former, next_search) = (Vec::new(), Instant::now());
        Monitor { connection, ways, former, next_search, mailbox, heartbeat, bye: None }
    }

    pub(crate) fn run(mut self) {
        match self.listen() {
            _ if self.bye.is_some() => self.mailbox.answer(|a| a.over = Some("this session is closed".to_owned())),
            End::Good(why) => self.mailbox.answer(|a| a.over = Some(why.to_owned())),
            End::Lost(detail) => {
                log::debug!("rank {}: lost the store: {detail}", self.ways.rank);
                let over = format!("the connection to the store is lost: {detail}");
                self.mailbox.answer(|a| a.over = Some(over));
                self.mailbox.dispatch(Event::StoreLost { detail });
            }
        }
    }

    /// Until the end of the connection.
    fn listen(&mut self) -> End {
        let mut next_beat = Instant::now();
        let mut state: std::io::Result<Fill> = Ok(Fill::Open);
        loop {
            // What came before the end counts: the store may have said why. Some came with the answer to our
            // registration.
            if let Err(end) = self.handle_all() {
                return end;
            }
            match state {
                Ok(Fill::Open) => {}
                Ok(Fill::End) => return gone("it closed without a word"),
                Err(e) => return gone(&e.to_string()),
            }
            if let Err(end) = self.take_outbox() {
                return end;
            }
            if self.bye.is_none() && Instant::now() >= next_beat {
                next_beat = deadline_after(self.heartbeat);
                if let Err(end) = self.beat() {
                    return end;
                }
            }
            if self.bye.is_some_and(|until| left(until).is_zero()) {
                return End::Good("this session is closed");
            }
            let until = self.bye.unwrap_or(next_beat).min(deadline_after(self.patience()));
            let flushed = self.connection.flush();
            let polled = {
                let mut fds = [
                    PollFd::new(&self.mailbox.bell, PollFlags::IN),
                    PollFd::from_borrowed_fd(self.connection.fd(), self.connection.interest()),
                ];
                poll(&mut fds, left(until)).map_err(std::io::Error::from)
            };
            self.mailbox.bell.drain();
            let filled = self.connection.fill();
            state = flushed.and(polled).and(filled);
            if matches!(state, Ok(Fill::Open)) {
                self.find_way();
            }
        }
    }

    fn patience(&self) -> Duration {
        if self.bye.is_some() { STUCK_BYE } else { STUCK }
    }

    /// Looks for another way to the store if this one gets nothing through.
    fn find_way(&mut self) {
        if self.connection.stuck_for() < self.patience() || Instant::now() < self.next_search {
            return;
        }
        let bye = self.bye;
        let ended = || bye.map_or_else(|| lock(&self.mailbox.outbox).bye, |until| left(until).is_zero());
        if let Some(former) = self.ways.resume(&mut self.connection, ended) {
            self.former.push(former);
            self.bye = bye.map(|_| deadline_after(BYE_LIMIT));
        }
        self.next_search = deadline_after(PAUSE);
    }

    fn handle_all(&mut self) -> Result<(), End> {
        while let Some(message) = self.connection.next(MAX_FRAME).map_err(End::Lost)? {
            self.former.clear();
            self.handle(message)?;
        }
        if let Some(bytes) = self.connection.due_account() {
            self.connection.queue(&ToStore::Took { bytes }).map_err(End::Lost)?;
        }
        Ok(())
    }

    fn take_outbox(&mut self) -> Result<(), End> {
        let mut outbox = lock(&self.mailbox.outbox);
        let frames = std::mem::take(&mut outbox.frames);
        let (bye, beat) = (outbox.bye, std::mem::take(&mut outbox.beat));
        drop(outbox);
        if self.bye.is_some() {
            return Ok(());
        }
        // First what a caller asked for: its messages rely on it. At the end our last calls, for those who make others.
        if beat || bye {
            self.beat()?;
        }
        let mut queued = self.connection.queue_bytes(&frames);
        if bye {
            self.bye = Some(deadline_after(BYE_LIMIT));
            queued = queued.and_then(|()| self.connection.queue(&ToStore::Bye { reason: String::new() }));
        }
        queued.map_err(End::Lost)
    }

    fn beat(&mut self) -> Result<(), End> {
        let mut tracked = lock(&self.mailbox.tracked);
        // First the number of the last call, then the calls: the store knows those that it hears of.
        let progress = tracked.iter().map(|(comm, p)| (*comm, p.snapshot())).collect();
        let calls = tracked.iter().map(|(comm, p)| (*comm, p.untold()));
        let calls = calls.filter(|(_, calls)| !calls.is_empty()).collect();
        // Also the last time of one that is not used any more.
        tracked.retain(|_| used.next().unwrap_or(true));
        drop(tracked);
        self.connection.queue(&ToStore::Beat { progress, calls }).map_err(End::Lost)
    }

    fn handle(&mut self, message: ToRank) -> Result<(), End> {
        match message {
            ToRank::Values { key, values } => self.answer_exchange(key, Ok(values.into_iter().map(|b| b.0).collect())),
            ToRank::ExchangeFailed { key, failure } => self.answer_exchange(key, Err(failure)),
            ToRank::Health { ticket, ranks } => self.mailbox.answer(|a| {
                // Nobody waits any more when it is not there.
                if let Some(slot) = a.healths.get_mut(&ticket) {
                    *slot = Some(ranks);
                }
            }),
            ToRank::Lost { rank, detail } => self.mailbox.dispatch(Event::RankLost { rank, detail }),
            ToRank::Left { rank } => self.mailbox.dispatch(Event::RankLeft { rank }),
            ToRank::Abort { from, comm, reason } => self.mailbox.dispatch(Event::Abort { from, comm, reason }),
            ToRank::Disagree(disagreement) => self.mailbox.dispatch(Event::Disagree(disagreement)),
            ToRank::Took { bytes } => self.connection.settle(bytes).map_err(End::Lost)?,
            ToRank::Closing => return Err(End::Good("the store has closed in good order")),
            ToRank::Rejected { reason, .. } => return Err(End::Lost(reason)),
            ToRank::Challenge { .. }
            | ToRank::Welcome { .. }
            | ToRank::Resumed { .. }
            | ToRank::Waiting { .. }
            | ToRank::NotFormed { .. }
            | ToRank::Table { .. } => {}
        }
        Ok(())
    }

    fn answer_exchange(&self, key: String, outcome: Exchanged) {
        self.mailbox.answer(|a| {
            if let Some(slot) = a.exchanges.get_mut(&key) {
                *slot = Some(outcome);
            }
        });
    }
}
        // Asked before what they say: who drops one now has something to say first.
        let mut used =
            tracked.iter().map(|(_, progress)| Arc::strong_count(progress) > 1).collect::<Vec<_>>().into_iter();
        fence(Ordering::Acquire);
