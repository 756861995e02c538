//! The thread of a session: reads the store's messages, sends heartbeats and the frames that the callers queued.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use super::mailbox::{Exchanged, Mailbox};
use super::resume::{NoPath, Ways};
use crate::bootstrap::wire::connection::{Connection, Fill, GONE_HOST, LOST, is_of_the_path};
use crate::bootstrap::wire::event::Event;
use crate::bootstrap::wire::frame::MAX_FRAME;
use crate::bootstrap::wire::message::{ToRank, ToStore};
use tinynccl_sys::threads::{deadline_after, left, lock, poll};

/// Limit for the goodbye.
const BYE_LIMIT: Duration = Duration::from_secs(1);
/// A stream that gets nothing through for this long is given up for another, if there is one.
const STUCK: Duration = Duration::from_secs(2);
/// [`STUCK`] for the goodbye, for which no caller should wait long.
const STUCK_BYE: Duration = Duration::from_millis(250);
/// [`STUCK`] for a stream over which nothing is sent: the kernel has sent two keepalive probes meanwhile.
const SILENT: Duration = Duration::from_secs(12);
/// Time within which a stream that ended may go on over another. Its end is that of the process, if nothing listens any
/// more; otherwise the store's kernel gave the stream up while nothing got through.
const RESET: Duration = Duration::from_secs(1);
/// Limit of the first attempt within [`RESET`]; each has twice that of the one before. A process that is being killed
/// may drop a connection's first packet, which the kernel repeats after a second: a new attempt finds out at once.
const FIRST_ATTEMPT: Duration = Duration::from_millis(20);
/// Heartbeats by which this thread must be late for its process to count as one that was stopped: others take it for
/// gone then.
const STOPPED_BEATS: u32 = 3;
/// Time between two searches for another path.
const PAUSE: Duration = Duration::from_millis(250);

pub(crate) struct Monitor {
    connection: Connection,
    ways: Ways,
    /// Streams given up, until a message of the store comes over the one that came after.
    former: Vec<Connection>,
    /// Earliest time of the next search for another path.
    next_search: Instant,
    mailbox: Arc<Mailbox>,
    heartbeat: Duration,
    /// Deadline of the goodbye; `None` while we are not closing.
    bye: Option<Instant>,
}

/// Reason for which the monitor ends.
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

    /// Serves the connection until its end.
    fn listen(&mut self) -> End {
        let mut next_beat = Instant::now();
        let mut state: io::Result<Fill> = Ok(Fill::Open);
        loop {
            // Messages that came before the end count: the store may have sent the reason. Some came with the answer to
            // our registration.
            if let Err(end) = self.handle_all() {
                return end;
            }
            if let Err(end) = self.stay(state) {
                return end;
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
                poll(&mut fds, left(until)).map_err(io::Error::from)
            };
            if Instant::now() > until + self.heartbeat * STOPPED_BEATS {
                self.mailbox.stopped.store(true, Ordering::Relaxed);
            }
            self.mailbox.bell.drain();
            let filled = self.connection.fill();
            state = flushed.and(polled).and(filled);
        }
    }

    /// Goes on over another stream if this one is over, or gets nothing through.
    fn stay(&mut self, state: io::Result<Fill>) -> Result<(), End> {
        match state {
            Ok(Fill::Open) => self.find_way(),
            // The store's last messages were read, or it did not take ours.
            _ if self.bye.is_some() => Err(End::Good("this session is closed")),
            Ok(Fill::End) => self.replace("it closed without a word", RESET),
            // The kernel gave the stream up.
            Err(e) if is_of_the_path(&e) => {
                self.replace(&e.to_string(), LOST.saturating_sub(self.connection.silent_for()))
            }
            Err(e) => self.replace(&e.to_string(), RESET),
        }
    }

    /// Replaces a stream that is over, for the reason `why`, by another one, within `limit`.
    fn replace(&mut self, why: &str, limit: Duration) -> Result<(), End> {
        let until = deadline_after(limit);
        let ended = || lock(&self.mailbox.outbox).bye;
        let mut attempt = FIRST_ATTEMPT;
        loop {
            let found = if limit > RESET {
                self.ways.resume(&mut self.connection, ended)
            } else {
                // The end of a stream came over the address in use: there is a path.
                self.ways.resume_here(&mut self.connection, attempt)
            };
            attempt = attempt.saturating_mul(2).min(RESET);
            match found {
                Ok(_) => return Ok(()),
                Err(NoPath::Ever(reason)) => return Err(End::Lost(reason)),
                Err(NoPath::Nobody) => return Err(gone(why)),
                Err(NoPath::Yet) if ended() => return Err(End::Good("this session is closed")),
                Err(NoPath::Yet) if left(until).is_zero() && limit > RESET => {
                    return Err(End::Lost(format!("{GONE_HOST}: {why}")));
                }
                Err(NoPath::Yet) if left(until).is_zero() => return Err(gone(why)),
                Err(NoPath::Yet) => {}
            }
            let mut bell = [PollFd::new(&self.mailbox.bell, PollFlags::IN)];
            // A failing poll shortens the pause.
            let _ = poll(&mut bell, PAUSE.min(limit / 100));
            self.mailbox.bell.drain();
        }
    }

    fn patience(&self) -> Duration {
        if self.bye.is_some() { STUCK_BYE } else { STUCK }
    }

    /// Looks for another path to the store if this one gets nothing through.
    fn find_way(&mut self) -> Result<(), End> {
        let silent = self.connection.silent_for();
        if (self.connection.stuck_for() < self.patience() && silent < SILENT) || Instant::now() < self.next_search {
            return Ok(());
        }
        let bye = self.bye;
        let ended = || bye.map_or_else(|| lock(&self.mailbox.outbox).bye, |until| left(until).is_zero());
        match self.ways.resume(&mut self.connection, ended) {
            Ok(former) => {
                self.former.push(former);
                self.bye = bye.map(|_| deadline_after(BYE_LIMIT));
            }
            Err(NoPath::Ever(reason)) => return Err(End::Lost(reason)),
            Err(_) if silent >= LOST => return Err(End::Lost(GONE_HOST.to_owned())),
            Err(NoPath::Yet | NoPath::Nobody) => {}
        }
        self.next_search = deadline_after(PAUSE);
        Ok(())
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
        // First a heartbeat that a caller requested: its messages rely on it. At the end our last calls, for ranks that
        // make others.
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
        // Read before their values: a thread that drops one now writes its last values first.
        let mut used =
            tracked.iter().map(|(_, progress)| Arc::strong_count(progress) > 1).collect::<Vec<_>>().into_iter();
        fence(Ordering::Acquire);
        // First the number of the last call, then the calls: the store knows every call whose number it receives.
        let progress = tracked.iter().map(|(comm, p)| (*comm, p.snapshot())).collect();
        let calls = tracked.iter().map(|(comm, p)| (*comm, p.unsent()));
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
                // No caller waits any more when it is not there.
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
