//! Agreement of a communicator's members without the rendezvous store, which may have died with its host.
//!
//! | file | idea |
//! | --- | --- |
//! | `agreement` | the protocol, without I/O; `model` checks every order of messages and deaths |
//! | `group` | the agreements of one communicator, round by round |
//! | `post` | sends messages in order, and notices silence |
//! | `waiting_list` | the newcomers that wait, and what became of the attempts to take them in |
//! | `mod` | runs an agreement: feeds the protocol with calls, messages, proven deaths and silence |

pub(crate) mod agreement;
mod group;
mod post;
pub(crate) mod waiting_list;

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use agreement::{Agreement, Message, Out, Outcome, Vote};
use group::Group;
use post::Post;
use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::config::Config;
use tinynccl_sys::interrupt::asked_to_stop;
use tinynccl_sys::secret::Secret;
use tinynccl_sys::threads::lock;
use tinynccl_transport::{Endpoint, EndpointInfo, beacon};
use waiting_list::WaitingList;

/// Interval between looks at the beacons of members on this host while an agreement is under way.
const LOOK: Duration = Duration::from_millis(5);

/// Message between two ranks' processes. Members are counted as in the communicator.
#[derive(Debug, Serialize, Deserialize)]
enum Letter {
    /// The sender wants a sign of life: the confirmation of this message.
    Ping,
    /// The sender has revoked this communicator.
    Revoke { comm: u32, reason: String },
    /// The sender could not start in this attempt to make a new group.
    GaveUp { attempt: u64 },
    /// Message of an agreement.
    Agreement { comm: u32, round: u64, message: Message },
}

impl Letter {
    fn to_bytes(&self) -> Result<Vec<u8>> {
        let bytes = serde_json::to_vec(self).map_err(|e| Error::invalid("message", e.to_string()))?;
        match bytes.len() {
            length if length > Endpoint::LONGEST_MESSAGE => {
                let most = Endpoint::LONGEST_MESSAGE;
                Err(Error::invalid("agreement", format!("a message of {length} bytes, at most {most} are possible")))
            }
            _ => Ok(bytes),
        }
    }
}

/// Called with the sender, the communicator and the reason when another rank revokes it.
pub(super) type Revoked = Box<dyn Fn(usize, u32, String) + Send + Sync>;

/// One rank's part in agreements, of all communicators of its world.
pub(crate) struct Membership {
    shared: Arc<Shared>,
}

/// Entrance of this process for newcomers. Communicators that are made from this one have the same.
#[derive(Clone)]
pub(crate) struct Admission {
    pub(crate) list: Arc<WaitingList>,
    /// Endpoint of the first communicator of this process, or of the one with which it joined.
    endpoint: Arc<Endpoint>,
}

impl Admission {
    /// Admits newcomers at `endpoint` that know `secret`.
    pub(super) fn open(endpoint: &Arc<Endpoint>, secret: Secret, config: &Config) -> Result<Admission> {
        Ok(Admission { list: WaitingList::open(endpoint, secret, config)?, endpoint: endpoint.clone() })
    }

    /// Its addresses.
    pub(crate) fn addresses(&self) -> Vec<SocketAddr> {
        self.endpoint.info().tcp
    }
}

struct Shared {
    post: Post,
    admission: Admission,
    secret: Secret,
    stopped: Arc<AtomicBool>,
    groups: Mutex<HashMap<u32, Group>>,
    changed: Condvar,
    revoked: Revoked,
    timeout: Duration,
}

/// The ranks of a world, as one of them sees them.
pub(super) struct World {
    pub(super) rank: usize,
    /// Addresses, by rank.
    pub(super) infos: Vec<EndpointInfo>,
    /// Known to these ranks alone.
    pub(super) secret: Secret,
    /// True once this process has not run for several heartbeats: the others may have gone on without it, and ended.
    pub(super) stopped: Arc<AtomicBool>,
}

/// One agreement, as its caller sees it.
pub(super) struct Asked<'a> {
    /// For errors.
    pub(super) op: &'static str,
    pub(super) comm: u32,
    /// World rank by rank.
    pub(super) members: &'a [usize],
    pub(super) vote: Vote,
    /// Makes [`Outcome::offer`], which is not empty, if this rank leads the agreement; none: it is empty.
    pub(super) offer: Option<&'a dyn Fn() -> Result<Vec<u8>>>,
}

impl Membership {
    /// Takes messages at `endpoint` from now on.
    pub(super) fn new(
        endpoint: Arc<Endpoint>,
        admission: Admission,
        World { rank, infos, secret, stopped }: World,
        config: &Config,
        revoked: Revoked,
    ) -> Arc<Membership> {
        let shared = Arc::new(Shared {
            post: Post::new(endpoint, rank, infos, config),
            admission,
            secret,
            stopped,
            groups: Mutex::default(),
            changed: Condvar::new(),
            revoked,
            timeout: config.timeout,
        });
        let weak = Arc::downgrade(&shared);
        let receive = move |from: usize, bytes: &[u8]| {
            weak.upgrade().inspect(|shared| shared.receive(from, bytes));
        };
        shared.post.endpoint().on_message(Box::new(receive));
        Arc::new(Membership { shared })
    }

    pub(super) fn endpoint(&self) -> &Endpoint {
        self.shared.post.endpoint()
    }

    /// Entrance of this process for newcomers.
    pub(super) fn admission(&self) -> &Admission {
        &self.shared.admission
    }

    /// Addresses of the ranks of the world.
    pub(super) fn infos(&self) -> &[EndpointInfo] {
        self.shared.post.infos()
    }

    /// True if other hosts reach this rank, or may.
    pub(super) fn is_wide(&self) -> bool {
        self.endpoint().info().tcp.iter().any(|address| !address.ip().is_loopback())
    }

    /// A secret that the ranks of this world share, another one for every `context`.
    pub(super) fn secret(&self, context: &str) -> Secret {
        self.shared.secret.derive("survivors", context.as_bytes())
    }

    /// The beacons of the members on this host.
    pub(super) fn beacons(&self, members: &[usize]) -> Vec<String> {
        let of = |&member: &usize| self.shared.post.beacon(member).map(str::to_owned);
        members.iter().filter_map(of).collect()
    }

    /// Sends all other `members` that `comm` is revoked. Does not wait.
    pub(super) fn revoke(&self, comm: u32, members: &[usize], reason: &str) -> Result<()> {
        self.send_others(members, &Letter::Revoke { comm, reason: reason.to_owned() })
    }

    /// Sends all other `members` that this one could not start in `attempt`: they may not see why, and would wait for
    /// it.
    pub(super) fn give_up(&self, members: &[usize], attempt: u64) -> Result<()> {
        self.send_others(members, &Letter::GaveUp { attempt })
    }

    fn send_others(&self, members: &[usize], letter: &Letter) -> Result<()> {
        let bytes = letter.to_bytes()?;
        let others = members.iter().filter(|&&member| member != self.shared.post.rank());
        others.for_each(|&member| self.shared.post.send(member, bytes.clone()));
        Ok(())
    }

    /// Runs the next agreement of a communicator, which every member must call; those that die do not hold it up.
    ///
    /// # Errors
    /// [`Error::Timeout`] when too few members are known to live, or one that lives does not call it in time;
    /// [`Error::Aborted`] when the others have gone on without this rank; [`Error::InvalidArgument`] when they have made
    /// another call. After it, or a time-out, the agreement is still to come.
    pub(super) fn agree(&self, asked: &Asked<'_>) -> Result<Outcome> {
        let (shared, began) = (&*self.shared, Instant::now());
        let rank = asked.members.iter().position(|&member| member == shared.post.rank());
        let rank = rank.ok_or_else(|| Error::invalid(asked.op, "this rank is no member"))?;
        let mut watch = HashMap::new();
        let mut lacking = None;
        let mut groups = lock(&shared.groups);
        let round = shared.group(&mut groups, asked, rank).round;
        let step = |groups: &mut HashMap<u32, Group>, input: &mut dyn FnMut(&mut Agreement, &mut Out)| {
            let group = shared.group(groups, asked, rank);
            let out = group.step(round, |agreement, out| input(agreement, out));
            shared.send(asked.comm, round, asked.members, out);
        };
        let strict = shared.stopped.load(Ordering::Relaxed);
        let out = shared.group(&mut groups, asked, rank).call(asked.vote.clone(), strict);
        shared.send(asked.comm, round, asked.members, out);
        loop {
            let agreement = shared.group(&mut groups, asked, rank).agreement(round);
            if let Some(outcome) = agreement.decided().cloned() {
                if !outcome.alive.contains(&rank) {
                    // For good: later calls find the same.
                    return Err(excluded(asked, rank, &outcome));
                }
                if outcome.offer.is_empty() != asked.offer.is_none() {
                    // This agreement is still to come for the call that the others have made.
                    let theirs = if asked.offer.is_none() { "shrink or grow" } else { "agree" };
                    return Err(Error::invalid(
                        asked.op,
                        format!("the other ranks have called {theirs}: call it, too"),
                    ));
                }
                shared.group(&mut groups, asked, rank).round += 1;
                return Ok(outcome);
            }
            let (wants_offer, missing) = (agreement.wants_offer(), agreement.no_quorum().map(<[usize]>::to_vec));
            let (awaited, dead) = (agreement.awaited(), agreement.proven().clone());
            let waited = began.elapsed();
            // Silent members may be slow: they have as much time again.
            lacking = missing.as_ref().map(|_| lacking.unwrap_or_else(Instant::now));
            let over = lacking.is_some_and(|since: Instant| since.elapsed() >= shared.post.silence());
            let failed = match missing.filter(|_| over) {
                Some(missing) => {
                    let size = asked.members.len();
                    let here = size - missing.len() - if strict { 0 } else { dead.len() };
                    Some((missing, format!("{here} of {size} members are no majority: {}", no_majority(strict))))
                }
                None if waited >= shared.timeout || asked_to_stop() => {
                    let detail = "their processes live, but have not made this call".to_owned();
                    Some((awaited.clone(), detail))
                }
                None => None,
            };
            if let Some((missing, detail)) = failed {
                step(&mut groups, &mut |agreement, out| agreement.give_up(out));
                return Err(Error::Timeout { op: asked.op.to_owned(), rank, waited, missing, detail });
            }
            drop(groups);
            if wants_offer {
                let offer = asked.offer.map_or(Ok(Vec::new()), |make| make());
                groups = lock(&shared.groups);
                let offer = match offer {
                    Ok(offer) => offer,
                    Err(error) => {
                        step(&mut groups, &mut |agreement, out| agreement.give_up(out));
                        return Err(error);
                    }
                };
                step(&mut groups, &mut |agreement, out| agreement.offer(offer.clone(), out));
                continue;
            }
            let out = |&member: &usize| !dead.contains(&member) && shared.post.is_dead(asked.members[member]);
            let died: Vec<usize> = (0..asked.members.len()).filter(|&member| member != rank).filter(out).collect();
            watch.retain(|member, _| awaited.contains(member));
            let mut silent = HashSet::new();
            for &member in &awaited {
                let since = *watch.entry(member).or_insert_with(Instant::now);
                if shared.post.is_silent(asked.members[member], since) {
                    silent.insert(member);
                }
            }
            groups = lock(&shared.groups);
            if died.is_empty() && silent.is_empty() {
                groups = shared.wait(groups, asked.comm, round);
                continue;
            }
            died.iter().for_each(|&member| step(&mut groups, &mut |agreement, out| agreement.dead(member, out)));
            silent.iter().for_each(|&member| step(&mut groups, &mut |agreement, out| agreement.silent(member, out)));
        }
    }
}

fn no_majority(strict: bool) -> &'static str {
    match strict {
        true => "this process was stopped for a while, so the others may have gone on without it, and ended",
        false => "the missing ones are not known to be dead, and may go on by themselves",
    }
}

fn excluded(asked: &Asked<'_>, rank: usize, outcome: &Outcome) -> Error {
    let reason = format!(
        "ranks {:?} have agreed to go on without this one, from which no sign of life had come: end this process, or start it anew",
        outcome.alive
    );
    Error::Aborted { op: asked.op.to_owned(), rank, reason }
}

impl Drop for Membership {
    fn drop(&mut self) {
        self.shared.post.close();
    }
}

impl Shared {
    /// The group of a communicator of which we are member `rank`, with what has come for it before.
    fn group<'g>(&self, groups: &'g mut HashMap<u32, Group>, asked: &Asked<'_>, rank: usize) -> &'g mut Group {
        let group = groups.entry(asked.comm).or_default();
        if group.introduce(rank, asked.members) {
            for (round, from, message) in group.take_early() {
                let Some(from) = asked.members.iter().position(|&member| member == from) else { continue };
                let out = group.receive(round, from, message);
                self.send(asked.comm, round, asked.members, out);
            }
        }
        group
    }

    /// Waits for a message, or for the time of the next look.
    fn wait<'g>(
        &self,
        mut groups: std::sync::MutexGuard<'g, HashMap<u32, Group>>,
        comm: u32,
        round: u64,
    ) -> std::sync::MutexGuard<'g, HashMap<u32, Group>> {
        let decided = groups.get_mut(&comm).is_some_and(|group| group.agreement(round).decided().is_some());
        if !decided {
            groups = self.changed.wait_timeout(groups, LOOK).unwrap_or_else(PoisonError::into_inner).0;
        }
        groups
    }

    fn send(&self, comm: u32, round: u64, members: &[usize], out: Out) {
        for (to, message) in out {
            let Some(&member) = members.get(to) else { continue };
            match (Letter::Agreement { comm, round, message }).to_bytes() {
                Ok(bytes) => self.post.send(member, bytes),
                Err(e) => log::error!("rank {}: {e}", self.post.rank()),
            }
        }
    }

    /// A message of another rank. Runs in the acceptor's thread.
    fn receive(&self, from: usize, bytes: &[u8]) {
        self.post.heard(from);
        let letter = match serde_json::from_slice(bytes) {
            Ok(letter) => letter,
            Err(e) => return log::warn!("rank {}: a message of rank {from} does not parse: {e}", self.post.rank()),
        };
        match letter {
            Letter::Ping => {}
            Letter::Revoke { comm, reason } => (self.revoked)(from, comm, reason),
            Letter::GaveUp { attempt } => self.admission.list.give_up(attempt),
            Letter::Agreement { comm, round, message } => {
                let mut groups = lock(&self.groups);
                let group = groups.entry(comm).or_default();
                let Some(members) = group.members().map(<[usize]>::to_vec) else {
                    return group.keep(round, from, message);
                };
                if let Some(member) = members.iter().position(|&member| member == from) {
                    let out = group.receive(round, member, message);
                    self.send(comm, round, &members, out);
                    self.changed.notify_all();
                }
            }
        }
    }
}

/// True when one of these beacons is out: a process has died.
pub(super) fn any_dead(beacons: &[String]) -> bool {
    beacons.iter().any(|name| beacon::is_out(name))
}
