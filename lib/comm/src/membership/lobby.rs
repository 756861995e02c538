//! Newcomers that wait to become ranks, as one member sees them, and what comes of the attempts to take them in.
//!
//! ```text
//!   newcomer                                  a member
//!   visit: I wait                         ─▶
//!                                         ◀─  the addresses of all doors                        until it comes again,
//!                                         ◀─  start: store, rank, size    (the group has agreed)    once a heartbeat
//!   visit: I have started, is it used?    ─▶
//!                                         ◀─  sealed, or void: wait on    (the group has agreed)
//! ```
//! A newcomer keeps one connection, whose end shows its death. Every member knows the attempts, so that a newcomer whose
//! member dies hears the rest from another one. The lobby belongs to a process and outlives its communicators: the
//! addresses in a ticket stay good.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::agreement::MOST_NEWCOMERS;
use tinynccl_plan::error::Result;
use tinynccl_sys::config::Config;
use tinynccl_sys::secret::Secret;
use tinynccl_sys::threads::lock;
use tinynccl_transport::{Endpoint, Guest};

/// Attempts that are remembered: a newcomer asks at once what came of its own.
const KEPT: usize = 8;
/// Times that a newcomer may fail to come before it counts as gone.
const MISSED: u32 = 4;
/// Most addresses that newcomers are told.
const DOORS: usize = 64;

/// A newcomer's message when it comes.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Request {
    pub(crate) stage: Stage,
    /// Time after which it comes again, unless it is starting.
    pub(crate) again: Duration,
}

/// Progress of a newcomer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Stage {
    Waiting,
    /// Has its communicator of this attempt, and does not know whether the others use it.
    Started(u64),
    /// Has no communicator of this attempt, and waits.
    Failed(u64),
}

/// A member's message.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Answer {
    /// Addresses at which newcomers are let in now.
    pub(crate) doors: Vec<SocketAddr>,
    pub(crate) news: Option<News>,
}

/// Decision of the group.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum News {
    /// Start as `rank` of `size` at the store of this id ([`UniqueId`](tinynccl_transport::bootstrap::UniqueId)).
    Start { attempt: u64, store: String, rank: usize, size: usize },
    /// All use the communicator.
    Sealed,
    /// Nobody does.
    Void,
}

/// One attempt of the group to start with newcomers.
#[derive(Debug)]
pub(crate) struct Attempt {
    /// Random.
    pub(crate) number: u64,
    pub(crate) store: String,
    /// Ranks before those of the newcomers.
    pub(crate) members: usize,
    pub(crate) newcomers: Vec<u64>,
}

impl Attempt {
    fn start(&self, newcomer: u64) -> Option<News> {
        let place = self.newcomers.iter().position(|&other| other == newcomer)?;
        let (rank, size) = (self.members + place, self.members + self.newcomers.len());
        Some(News::Start { attempt: self.number, store: self.store.clone(), rank, size })
    }
}

/// An attempt, and what came of it.
struct Course {
    attempt: Attempt,
    /// Newcomers that could not start.
    failed: BTreeSet<u64>,
    sealed: Option<bool>,
}

impl Course {
    /// True while the newcomer belongs to the attempt, or to the group that came of it.
    fn has(&self, newcomer: u64) -> bool {
        self.sealed != Some(false) && !self.failed.contains(&newcomer) && self.attempt.newcomers.contains(&newcomer)
    }
}

/// A newcomer that is here.
struct Waiting {
    guest: Guest,
    /// Time at which it counts as gone.
    until: Instant,
    stage: Stage,
}

#[derive(Default)]
struct Hall {
    doors: Vec<SocketAddr>,
    waiting: BTreeMap<u64, Waiting>,
    courses: VecDeque<Course>,
    /// Attempts that a member has given up.
    given_up: VecDeque<u64>,
}

/// The newcomers that wait at one process.
pub(crate) struct Lobby {
    /// Secret of the group's tickets, before the setting is mixed in.
    secret: Secret,
    hall: Mutex<Hall>,
}

impl Lobby {
    /// Lets newcomers in at `endpoint` that know `secret`.
    pub(super) fn open(endpoint: &Endpoint, secret: Secret, config: &Config) -> Result<Arc<Lobby>> {
        let lobby = Arc::new(Lobby { secret, hall: Mutex::default() });
        let here = lobby.clone();
        endpoint.open_door(
            &secret,
            config,
            Box::new(move |newcomer, request, guest| here.take(newcomer, request, guest)),
        )?;
        Ok(lobby)
    }

    /// The secret and the addresses of a ticket.
    pub(crate) fn ticket(&self) -> (Secret, Vec<SocketAddr>) {
        (self.secret, lock(&self.hall).doors.clone())
    }

    /// Sets where the members let newcomers in: each one's addresses, the most useful first.
    pub(crate) fn set_doors(&self, members: &[Vec<SocketAddr>]) {
        let longest = members.iter().map(Vec::len).max().unwrap_or(0);
        // If there are too many, each member's first ones count.
        let doors = (0..longest).flat_map(|i| members.iter().filter_map(move |member| member.get(i)));
        lock(&self.hall).doors = doors.copied().take(DOORS).collect();
    }

    /// The newcomers that wait here and show that they live.
    pub(crate) fn waiting(&self) -> Vec<u64> {
        let mut hall = lock(&self.hall);
        let Hall { waiting, courses, .. } = &mut *hall;
        let starting = |newcomer: u64| courses.iter().any(|course| course.has(newcomer));
        let open = |newcomer: u64| courses.iter().any(|course| course.sealed.is_none() && course.has(newcomer));
        // One that starts has no time to come; if it is gone, the attempt has yet to notice.
        waiting.retain(|&newcomer, one| {
            open(newcomer) || !one.guest.is_gone() && (starting(newcomer) || Instant::now() < one.until)
        });
        waiting.keys().copied().filter(|&newcomer| !starting(newcomer)).take(MOST_NEWCOMERS).collect()
    }

    /// Begins an attempt: its newcomers hear that they are to start.
    pub(crate) fn begin(&self, attempt: Attempt) {
        let mut hall = lock(&self.hall);
        let open: Vec<u64> = hall.courses.iter().filter(|c| c.sealed.is_none()).map(|c| c.attempt.number).collect();
        open.into_iter().for_each(|number| hall.conclude(number, false));
        for &newcomer in &attempt.newcomers {
            hall.tell(newcomer, attempt.start(newcomer));
        }
        if hall.courses.len() == KEPT {
            hall.courses.pop_front();
        }
        hall.courses.push_back(Course { attempt, failed: BTreeSet::new(), sealed: None });
    }

    /// Another member has given an attempt up, which may not have begun here.
    pub(super) fn give_up(&self, number: u64) {
        let mut hall = lock(&self.hall);
        if hall.given_up.len() == KEPT {
            hall.given_up.pop_front();
        }
        hall.given_up.push_back(number);
    }

    /// True once an attempt cannot succeed: another member has given it up, or a newcomer is lost.
    pub(crate) fn is_void(&self, number: u64) -> bool {
        let given_up = lock(&self.hall).given_up.contains(&number);
        given_up || !self.lost(number).is_empty()
    }

    /// The newcomers of an attempt that are known to be gone, or to have failed.
    pub(crate) fn lost(&self, number: u64) -> Vec<u64> {
        let hall = lock(&self.hall);
        let Some(course) = hall.courses.iter().find(|course| course.attempt.number == number) else {
            return Vec::new();
        };
        let gone = |newcomer: &u64| hall.waiting.get(newcomer).is_some_and(|one| one.guest.is_gone());
        let all = course.attempt.newcomers.iter().copied();
        all.filter(|newcomer| course.failed.contains(newcomer) || gone(newcomer)).collect()
    }

    /// Ends an attempt: its newcomers hear whether the group uses the communicator.
    pub(crate) fn conclude(&self, number: u64, sealed: bool) {
        lock(&self.hall).conclude(number, sealed);
    }

    /// A newcomer has come. Runs in the acceptor's thread.
    fn take(&self, newcomer: u64, request: &[u8], guest: Guest) {
        let Request { stage, again } = match serde_json::from_slice(request) {
            Ok(request) => request,
            Err(e) => return log::warn!("a newcomer at {} speaks another version: {e}", guest.address()),
        };
        let mut hall = lock(&self.hall);
        let number = match stage {
            Stage::Waiting => None,
            Stage::Started(number) | Stage::Failed(number) => Some(number),
        };
        let own = hall.courses.iter_mut().find(|course| Some(course.attempt.number) == number);
        let news = if let Stage::Started(_) = stage {
            match own.map(|course| course.sealed) {
                Some(None) => None,
                Some(Some(true)) => Some(News::Sealed),
                // An attempt that we do not know is over for long.
                Some(Some(false)) | None => Some(News::Void),
            }
        } else {
            own.map(|course| course.failed.insert(newcomer));
            let open = hall.courses.iter().rev().find(|course| course.sealed.is_none() && course.has(newcomer));
            open.and_then(|course| course.attempt.start(newcomer))
        };
        let over = matches!(news, Some(News::Sealed));
        let until = Instant::now() + again.saturating_mul(MISSED).min(Duration::from_secs(3600));
        // The old connection goes only now: the newcomer is never without one.
        hall.waiting.insert(newcomer, Waiting { guest, until, stage });
        hall.tell(newcomer, news);
        if over {
            hall.waiting.remove(&newcomer);
        }
    }
}

impl Hall {
    fn conclude(&mut self, number: u64, sealed: bool) {
        let Some(course) = self.courses.iter_mut().find(|course| course.attempt.number == number) else { return };
        course.sealed = Some(sealed);
        let newcomers = course.attempt.newcomers.clone();
        for newcomer in newcomers {
            let started = self.waiting.get(&newcomer).is_some_and(|one| one.stage == Stage::Started(number));
            match sealed {
                // One that has not started to the end asks when it has.
                true if !started => {}
                true => {
                    self.tell(newcomer, Some(News::Sealed));
                    self.waiting.remove(&newcomer);
                }
                false => self.tell(newcomer, Some(News::Void)),
            }
        }
    }

    fn tell(&mut self, newcomer: u64, news: Option<News>) {
        if let Err(e) = self.say(newcomer, news) {
            log::debug!("a newcomer went away: {e}");
        }
    }

    fn say(&mut self, newcomer: u64, news: Option<News>) -> Result<(), String> {
        let Some(one) = self.waiting.get_mut(&newcomer) else { return Ok(()) };
        let answer = Answer { doors: self.doors.clone(), news };
        one.guest.tell(&serde_json::to_vec(&answer).map_err(|e| e.to_string())?)
    }
}
