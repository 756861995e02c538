//! Joining a group that runs: tickets, and the wait of a newcomer until the group takes it in.

use std::fmt;
use std::net::SocketAddr;
use std::rc::Rc;
use std::str::FromStr;
use std::time::{Duration, Instant};

use super::Comm;
use super::membership::lobby::{Answer, News, Request, Stage};
use super::state::control::encode;
use super::survive::until;
use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::config::Config;
use tinynccl_sys::interrupt::asked_to_stop;
use tinynccl_sys::secret;
use tinynccl_sys::threads::make_room_for_descriptors;
use tinynccl_transport::bootstrap::UniqueId;
use tinynccl_transport::{Failure, Knocker, Visit};

/// Invitation to join a group later: where its ranks let newcomers in, and a secret. Hand it over by any means that
/// others cannot read. It names at most 64 addresses, and is good while one of the ranks named in it lives.
///
/// Its text is one printable ASCII line: `ticket-` and that of a [`UniqueId`].
#[derive(Clone, PartialEq, Eq)]
pub struct Ticket(UniqueId);

impl fmt::Display for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PREFIX}{}", self.0)
    }
}

/// Prints no secret, so that a log does not give it away.
impl fmt::Debug for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Ticket").field(&self.0.addresses()).finish()
    }
}

impl FromStr for Ticket {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let Some(id) = text.trim().strip_prefix(PREFIX) else {
            return Err(Error::config(
                "ticket",
                "",
                "expected a text that begins with ticket-, as Comm::ticket gives it",
            ));
        };
        Ok(Ticket(id.parse()?))
    }
}

const PREFIX: &str = "ticket-";
const OP: &str = "join";
/// Heartbeats without any member's answer after which a group that was met counts as gone, if none of them listens.
const GONE_BEATS: u32 = 4;
/// Longest time for one door.
const ATTEMPT: Duration = Duration::from_secs(5);
/// Pause after a round in which no door was opened.
const PAUSE: Duration = Duration::from_millis(20);
/// Interval between looks at the caller's check.
const SLICE: Duration = Duration::from_millis(20);

impl Comm {
    /// Returns a ticket with which processes join this group later ([`Comm::from_ticket`]). Waits for nothing.
    ///
    /// A group whose ranks have all been on one host since it started is reached from that host alone.
    ///
    /// # Errors
    /// [`Error::Unsupported`] on communicators of [`Comm::threads`] and where no rank listens over TCP.
    pub fn ticket(&self) -> Result<Ticket> {
        let (secret, doors) = self.membership("ticket")?.door().lobby.ticket();
        if doors.is_empty() {
            let detail =
                "no rank of this group listens over TCP; set TINYNCCL_TRANSPORT to auto, shm or tcp".to_owned();
            return Err(Error::Unsupported { what: "ticket".to_owned(), detail });
        }
        Ok(Ticket(UniqueId::new(secret, doors)))
    }

    /// Returns the number of newcomers that wait at this rank and show that they live. Waits for nothing.
    ///
    /// Each newcomer waits at one rank: a sum over all ranks counts them. [`Comm::grow`] takes them in.
    pub fn waiting(&self) -> usize {
        let state = &self.inner.state;
        // In a forked child a lock may be held forever.
        let membership = state.control.membership().filter(|_| state.origin.is_here());
        membership.map_or(0, |membership| membership.door().lobby.waiting().len())
    }

    /// Joins the group that made the ticket, once it takes newcomers in ([`Comm::grow`]). A spare is a newcomer that
    /// the group does not need yet.
    ///
    /// Waits `TINYNCCL_CONNECT_TIMEOUT` for the first answer of a rank, then for as long as the group lives: newcomer
    /// and rank hear from each other once a heartbeat (`TINYNCCL_HEARTBEAT`). It learns the addresses of later ranks.
    /// Settings that must be equal on all ranks are those of the group; the newcomer has the cost model of rank 0, and
    /// is not traced. Its [`Comm::local_rank`] is the lowest number that no rank of its host has.
    ///
    /// # Errors
    /// - [`Error::Bootstrap`]: no rank has answered, or those that did know another secret (`TINYNCCL_SECRET` counts,
    ///   too).
    /// - [`Error::Connection`]: the group has ended, or none of its ranks can be reached any more.
    /// - [`Error::Config`]: a setting differs from the group's.
    /// - [`Error::Aborted`]: [`interrupt`](tinynccl_sys::interrupt) ended the wait.
    pub fn from_ticket(ticket: &Ticket, config: Config) -> Result<Comm> {
        make_room_for_descriptors();
        Newcomer::new(ticket, config)?.join()
    }
}

/// A process that is to become a rank.
struct Newcomer {
    ticket: UniqueId,
    config: Config,
    knocker: Knocker,
    /// Addresses at which the group let newcomers in at the last answer.
    doors: Vec<SocketAddr>,
    /// The door at which we wait, and our connection.
    visit: Option<(SocketAddr, Rc<Visit>)>,
    met: bool,
}

impl Newcomer {
    fn new(ticket: &Ticket, config: Config) -> Result<Newcomer> {
        let (ticket, newcomer) = (ticket.0.clone(), u64::from_le_bytes(secret::random()?));
        let knocker = Knocker::new(&ticket.secret(), newcomer, &config)?;
        Ok(Newcomer { ticket, config, knocker, doors: Vec::new(), visit: None, met: false })
    }

    fn join(mut self) -> Result<Comm> {
        let (mut stage, mut started) = (Stage::Waiting, None);
        loop {
            match self.news(&stage)? {
                Some(News::Start { attempt, store, rank, size }) if started.is_none() => {
                    match self.start(&store, rank, size) {
                        Ok(comm) => (stage, started) = (Stage::Started(attempt), Some(comm)),
                        // All ranks found it.
                        Err(error @ Error::Config { .. }) => return Err(error),
                        Err(error) => {
                            log::info!("newcomer: could not start as rank {rank} of {size}, waits on: {error}");
                            stage = Stage::Failed(attempt);
                        }
                    }
                }
                Some(News::Void) => {
                    started = None;
                    if let Stage::Started(attempt) = stage {
                        stage = Stage::Failed(attempt);
                    }
                }
                Some(News::Sealed) => {
                    if let Some(comm) = started.take() {
                        return Ok(comm);
                    }
                }
                _ => {}
            }
            if asked_to_stop() {
                return Err(interrupted());
            }
        }
    }

    fn start(&self, store: &str, rank: usize, size: usize) -> Result<Comm> {
        let id: UniqueId = store.parse()?;
        let visit = self.visit.as_ref().map(|(_, visit)| visit.clone());
        // What is said before we have started is that the group gives up; so does one whose member is gone.
        let is_over = move || visit.as_ref().is_some_and(|visit| visit.has_news());
        until(is_over, || Comm::enter(&id, (rank, size), self.ticket.secret(), self.config.clone()))
    }

    /// Goes to a door, and waits there for a heartbeat.
    fn news(&mut self, stage: &Stage) -> Result<Option<News>> {
        let again = self.config.heartbeat;
        let request = encode(OP, &Request { stage: stage.clone(), again })?;
        let answer = self.come(&request)?;
        if answer.news.is_some() {
            return Ok(answer.news);
        }
        let since = Instant::now();
        while let Some((_, visit)) = self.visit.as_ref().filter(|_| since.elapsed() < again) {
            match hear(visit, SLICE) {
                Ok(Some(answer)) => {
                    self.doors = answer.doors;
                    return Ok(answer.news);
                }
                Ok(None) if asked_to_stop() => return Err(interrupted()),
                Ok(None) => {}
                Err(why) => {
                    log::debug!("newcomer: the rank at which it waits is gone: {why}");
                    break;
                }
            }
        }
        Ok(None)
    }

    /// Goes to the doors, beginning with the last, until one answers.
    fn come(&mut self, request: &[u8]) -> Result<Answer> {
        let since = Instant::now();
        loop {
            let mut doors = Vec::from_iter(self.visit.as_ref().map(|(door, _)| *door));
            for door in self.knocker.order(&self.doors).into_iter().chain(self.knocker.order(self.ticket.addresses())) {
                if !doors.contains(&door) {
                    doors.push(door);
                }
            }
            let mut failures = Vec::new();
            let (mut refused, mut slow) = (false, false);
            for door in doors {
                match self.knock(door, request) {
                    Ok((visit, answer)) => {
                        // Only now the connection before it may go: the group takes its end for ours.
                        (self.visit, self.met) = (Some((door, Rc::new(visit))), true);
                        self.doors.clone_from(&answer.doors);
                        return Ok(answer);
                    }
                    Err(failure) => {
                        refused |= matches!(failure, Failure::Refused(_));
                        slow |= matches!(failure, Failure::Slow(_) | Failure::Final(_));
                        failures.push(format!("{door}: {}", failure.text()));
                    }
                }
                if asked_to_stop() {
                    return Err(interrupted());
                }
            }
            let (waited, failures) = (since.elapsed(), failures.join("; "));
            if self.met {
                let limit = if slow { self.config.connect_timeout } else { self.config.heartbeat * GONE_BEATS };
                if waited >= limit {
                    return Err(Error::Connection {
                        op: OP.to_owned(),
                        connection: "a newcomer and its group".to_owned(),
                        detail: format!(
                            "the group has ended, or none of its ranks has answered for {waited:.1?} ({failures})"
                        ),
                    });
                }
            } else if refused && !slow || waited >= self.config.connect_timeout {
                let address = self.ticket.addresses().iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
                let detail = format!(
                    "no rank has let this newcomer in within {waited:.1?} ({failures}); check that the ticket is of a group that \
                     lives (Comm::ticket), that TINYNCCL_SECRET is the group's, and that its addresses can be reached from here"
                );
                return Err(Error::bootstrap(address, detail));
            }
            std::thread::sleep(PAUSE);
        }
    }

    fn knock(&self, door: SocketAddr, request: &[u8]) -> Result<(Visit, Answer), Failure> {
        let abort = || asked_to_stop().then(interrupted);
        let visit = self.knocker.knock(door, request, ATTEMPT.min(self.config.connect_timeout), &abort)?;
        // A member answers in the same breath.
        let since = Instant::now();
        while since.elapsed() < ATTEMPT && !asked_to_stop() {
            if let Some(answer) = hear(&visit, SLICE).map_err(Failure::Slow)? {
                return Ok((visit, answer));
            }
        }
        Err(Failure::Slow(format!("no answer within {ATTEMPT:?}")))
    }
}

/// The member's next answer.
fn hear(visit: &Visit, limit: Duration) -> Result<Option<Answer>, String> {
    let Some(bytes) = visit.hear(limit)? else { return Ok(None) };
    let answer = serde_json::from_slice(&bytes);
    answer.map(Some).map_err(|e| format!("its answer does not parse ({e}): do all ranks run the same version?"))
}

fn interrupted() -> Error {
    Error::Aborted { op: OP.to_owned(), rank: 0, reason: "newcomer: interrupted".to_owned() }
}
