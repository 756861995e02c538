//! Joining a group that runs: tickets, and the wait of a newcomer until the group takes it in.

use std::fmt;
use std::net::SocketAddr;
use std::rc::Rc;
use std::str::FromStr;
use std::time::{Duration, Instant};

use super::Comm;
use super::membership::waiting_list::{Answer, News, Request, Stage};
use super::state::control::encode;
use super::survive::until;
use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::config::Config;
use tinynccl_sys::interrupt::asked_to_stop;
use tinynccl_sys::secret;
use tinynccl_sys::threads::make_room_for_descriptors;
use tinynccl_transport::bootstrap::UniqueId;
use tinynccl_transport::{Failure, JoinDialer, MemberConn};

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
/// Longest time for one rank.
const ATTEMPT: Duration = Duration::from_secs(5);
/// Pause after a round in which no rank has answered.
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
        let (secret, addresses) = self.membership("ticket")?.admission().list.ticket();
        if addresses.is_empty() {
            let detail =
                "no rank of this group listens over TCP; set TINYNCCL_TRANSPORT to auto, shm or tcp".to_owned();
            return Err(Error::Unsupported { what: "ticket".to_owned(), detail });
        }
        Ok(Ticket(UniqueId::new(secret, addresses)))
    }

    /// Returns the number of newcomers that wait at this rank and show that they live. Waits for nothing.
    ///
    /// Each newcomer waits at one rank: a sum over all ranks counts them. [`Comm::grow`] takes them in.
    pub fn waiting(&self) -> usize {
        let state = &self.inner.state;
        // In a forked child a lock may be held forever.
        let membership = state.control.membership().filter(|_| state.origin.is_here());
        membership.map_or(0, |membership| membership.admission().list.waiting().len())
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
    dialer: JoinDialer,
    /// Addresses at which the group let newcomers in, by the last answer.
    addresses: Vec<SocketAddr>,
    /// The address at which we wait, and our connection.
    member: Option<(SocketAddr, Rc<MemberConn>)>,
    met: bool,
}

impl Newcomer {
    fn new(ticket: &Ticket, config: Config) -> Result<Newcomer> {
        let (ticket, newcomer) = (ticket.0.clone(), u64::from_le_bytes(secret::random()?));
        let dialer = JoinDialer::new(&ticket.secret(), newcomer, &config)?;
        Ok(Newcomer { ticket, config, dialer, addresses: Vec::new(), member: None, met: false })
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
        let member = self.member.as_ref().map(|(_, member)| member.clone());
        // What is said before we have started is that the group gives up; so does one whose member is gone.
        let is_over = move || member.as_ref().is_some_and(|member| member.is_readable());
        until(is_over, || Comm::enter(&id, (rank, size), self.ticket.secret(), self.config.clone()))
    }

    /// Registers at a rank, and waits there for a heartbeat.
    fn news(&mut self, stage: &Stage) -> Result<Option<News>> {
        let again = self.config.heartbeat;
        let request = encode(OP, &Request { stage: stage.clone(), again })?;
        let answer = self.register(&request)?;
        if answer.news.is_some() {
            return Ok(answer.news);
        }
        let since = Instant::now();
        while let Some((_, member)) = self.member.as_ref().filter(|_| since.elapsed() < again) {
            match receive(member, SLICE) {
                Ok(Some(answer)) => {
                    self.addresses = answer.addresses;
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

    /// Registers at the first address that answers, beginning with the last one used.
    fn register(&mut self, request: &[u8]) -> Result<Answer> {
        let since = Instant::now();
        loop {
            let mut addresses = Vec::from_iter(self.member.as_ref().map(|(address, _)| *address));
            for address in
                self.dialer.order(&self.addresses).into_iter().chain(self.dialer.order(self.ticket.addresses()))
            {
                if !addresses.contains(&address) {
                    addresses.push(address);
                }
            }
            let mut failures = Vec::new();
            let (mut refused, mut slow) = (false, false);
            for address in addresses {
                match self.register_at(address, request) {
                    Ok((member, answer)) => {
                        // Only now the connection before it may go: the group takes its end for ours.
                        (self.member, self.met) = (Some((address, Rc::new(member))), true);
                        self.addresses.clone_from(&answer.addresses);
                        return Ok(answer);
                    }
                    Err(failure) => {
                        refused |= matches!(failure, Failure::Refused(_));
                        slow |= matches!(failure, Failure::Slow(_) | Failure::Final(_));
                        failures.push(format!("{address}: {}", failure.text()));
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

    fn register_at(&self, address: SocketAddr, request: &[u8]) -> Result<(MemberConn, Answer), Failure> {
        let abort = || asked_to_stop().then(interrupted);
        let member = self.dialer.dial(address, request, ATTEMPT.min(self.config.connect_timeout), &abort)?;
        // A member answers in the same breath.
        let since = Instant::now();
        while since.elapsed() < ATTEMPT && !asked_to_stop() {
            if let Some(answer) = receive(&member, SLICE).map_err(Failure::Slow)? {
                return Ok((member, answer));
            }
        }
        Err(Failure::Slow(format!("no answer within {ATTEMPT:?}")))
    }
}

/// The member's next answer.
fn receive(member: &MemberConn, limit: Duration) -> Result<Option<Answer>, String> {
    let Some(bytes) = member.receive(limit)? else { return Ok(None) };
    let answer = serde_json::from_slice(&bytes);
    answer.map(Some).map_err(|e| format!("its answer does not parse ({e}): do all ranks run the same version?"))
}

fn interrupted() -> Error {
    Error::Aborted { op: OP.to_owned(), rank: 0, reason: "newcomer: interrupted".to_owned() }
}
