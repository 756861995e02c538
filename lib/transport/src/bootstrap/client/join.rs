//! Finding the store and registering with it.

use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use rustix::event::PollFd;
use serde_json::Value;

use super::resume::Ways;
use crate::bootstrap::UniqueId;
use crate::bootstrap::environment::interface::{self, LocalAddress};
use crate::bootstrap::wire::admission::{self, Challenge, Generation};
use crate::bootstrap::wire::connection::{Connection, Fill, broken};
use crate::bootstrap::wire::frame::{Hello, MAX_FRAME, MAX_REGISTER};
use crate::bootstrap::wire::message::{Bytes, ToRank, ToStore};
use crate::bootstrap::wire::unique_id::PROTOCOL_VERSION;
use crate::seal::{self, Opening};
use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::backoff::SLICE;
use tinynccl_sys::config::Config;
use tinynccl_sys::interrupt::asked_to_stop;
use tinynccl_sys::secret::Secret;
use tinynccl_sys::threads::{deadline_after, left, poll};

/// Longest time for one attempt to connect, or for the first answer, while there are other addresses to try.
const ATTEMPT_LIMIT: Duration = Duration::from_secs(5);
/// Time for which a store of a job that is over may still occupy the address.
const STALE_LIMIT: Duration = Duration::from_secs(2);
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_millis(250);

const OP: &str = "rendezvous";

/// A registered rank's connection, and the endpoints of all ranks.
pub(crate) struct Joined {
    pub(crate) connection: Connection,
    pub(crate) infos: Vec<Value>,
    /// The store's addresses, and what the links' secret is.
    pub(crate) ways: Ways,
}

/// Error of one attempt.
enum Failed {
    /// No store (of ours) there yet.
    Again(String),
    /// Refused; `stale` when it may be for a job that is ending.
    Refused { reason: String, stale: bool },
    /// For good.
    Final(Error),
}

/// Connects, registers and waits for all ranks, within `config.connect_timeout`.
pub(crate) fn join(id: &UniqueId, rank: usize, world_size: usize, info: Value, config: &Config) -> Result<Joined> {
    check(id, rank, world_size, &info)?;
    let local = interface::local_addresses(config)?;
    let candidates = interface::order_candidates(&local, id.addresses(), true);
    let started = Instant::now();
    let attempt = Attempt {
        rank,
        world_size,
        secret: admission::join_secret(&id.secret(), config)?,
        encrypt: config.encrypt,
        info,
        local,
        started,
        deadline: deadline_after(config.connect_timeout),
        alone: candidates.len() == 1,
    };
    let mut pause = FIRST_PAUSE;
    let mut refused_since = None;
    loop {
        let mut refused = None;
        let mut failures = Vec::new();
        for (address, _) in &candidates {
            match attempt.at(*address) {
                Ok(joined) => return Ok(joined),
                Err(Failed::Final(e)) => return Err(e),
                Err(Failed::Again(detail)) => failures.push(format!("{address}: {detail}")),
                Err(Failed::Refused { reason, stale }) => {
                    let limit = *refused_since.get_or_insert_with(|| deadline_after(STALE_LIMIT));
                    if !stale || Instant::now() >= limit {
                        refused = Some((*address, reason.clone()));
                    }
                    failures.push(format!("{address}: {reason}"));
                }
            }
        }
        if let Some((address, reason)) = refused {
            let detail = format!("rank {rank} was refused: {reason}");
            return Err(Error::bootstrap(address, detail));
        }
        if asked_to_stop() {
            return Err(stopped(rank));
        }
        if left(attempt.deadline) <= pause {
            let detail = format!(
                "rank {rank} found no store for {:.1?} ({}); check that the process which runs it (rank 0 or the launcher) was \
                 started and that its address can be reached from here",
                started.elapsed(),
                failures.join("; ")
            );
            return Err(Error::bootstrap(id.address_list(), detail));
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

fn check(id: &UniqueId, rank: usize, world_size: usize, info: &Value) -> Result<()> {
    if world_size == 0 || rank >= world_size || world_size > u32::MAX as usize {
        let detail = format!("rank {rank} of world size {world_size}: ranks are 0 to world size - 1, at least one");
        return Err(Error::invalid(OP, detail));
    }
    if id.version() != PROTOCOL_VERSION {
        let detail = format!(
            "the unique id is of protocol version {}, this build speaks {PROTOCOL_VERSION}: build all ranks from the same version",
            id.version()
        );
        return Err(Error::invalid(OP, detail));
    }
    if id.addresses().is_empty() {
        return Err(Error::invalid(OP, "the unique id holds no address"));
    }
    let length = info.to_string().len();
    // 64 bytes for the name of the message around it.
    if length + 64 > MAX_REGISTER {
        let detail = format!("the endpoints take {length} bytes, at most {MAX_REGISTER} are allowed");
        return Err(Error::invalid(OP, detail));
    }
    Ok(())
}

struct Attempt {
    rank: usize,
    world_size: usize,
    secret: Secret,
    encrypt: bool,
    info: Value,
    local: Vec<LocalAddress>,
    started: Instant,
    deadline: Instant,
    /// There is no other address to try.
    alone: bool,
}

impl Attempt {
    fn limit(&self) -> Instant {
        if self.alone { self.deadline } else { self.deadline.min(deadline_after(ATTEMPT_LIMIT)) }
    }

    fn at(&self, address: SocketAddr) -> Result<Joined, Failed> {
        let hello = Hello::new(self.rank, self.world_size).map_err(Failed::Final)?;
        let seal = self.encrypt.then_some(&self.secret);
        let (mut connection, mut opening) =
            dial(address, &hello, seal, left(self.limit())).map_err(|e| Failed::Again(e.to_string()))?;
        let (generation, mut addresses) = loop {
            match wait(&mut connection, self.limit()) {
                Reply::Message(ToRank::Challenge { nonce, proof, seal }) => {
                    let answer = (&nonce, &proof, &seal);
                    let Some(challenge) = challenged(&mut connection, (hello, opening.take()), &self.secret, answer)
                    else {
                        goodbye(&mut connection, admission::WRONG_SECRET);
                        let reason = admission::WRONG_SECRET.to_owned();
                        // The store of an older job, perhaps, which occupies the address for a moment.
                        return Err(Failed::Refused { reason, stale: true });
                    };
                    let proof = challenge.answer(&self.secret);
                    connection.queue(&ToStore::Proof { proof }).map_err(Failed::Again)?;
                }
                Reply::Message(ToRank::Welcome { generation: Bytes(bytes), addresses }) => {
                    match Generation::try_from(bytes) {
                        Ok(generation) => break (generation, addresses),
                        Err(bytes) => return Err(refused(format!("its generation has {} bytes", bytes.len()))),
                    }
                }
                Reply::Message(ToRank::Rejected { reason, again }) => {
                    return Err(Failed::Refused { reason, stale: again });
                }
                Reply::Message(other) => return Err(refused(format!("unexpected first answer {other:?}"))),
                Reply::Nonsense(e) => return Err(refused(format!("what listens there is not a tinynccl store ({e})"))),
                Reply::End(e) => return Err(Failed::Again(e)),
                Reply::Nothing => return Err(Failed::Again("connected, but no answer".to_owned())),
                Reply::Stop => return Err(Failed::Final(stopped(self.rank))),
            }
        };
        addresses.retain(|other| *other != address);
        addresses.push(address);
        let ways = interface::order_candidates(&self.local, &addresses, true);
        self.register(
            connection,
            Ways {
                rank: self.rank,
                world_size: self.world_size,
                encrypt: self.encrypt,
                secret: self.secret,
                links: admission::link_secret(&self.secret, &generation),
                addresses: ways.into_iter().map(|(address, _)| address).collect(),
                address,
                tries: 0,
            },
        )
    }

    /// Registers, and waits for all ranks. From here on the store counts on us, and there is no other to try.
    fn register(&self, mut connection: Connection, ways: Ways) -> Result<Joined, Failed> {
        let address = ways.address;
        let fatal = |detail: String| Failed::Final(Error::bootstrap(address, detail));
        let message = ToStore::Register { info: self.info.clone() };
        connection.queue(&message).map_err(fatal)?;
        let mut missing = Vec::new();
        let mut notes = Vec::new();
        let mut host = None;
        loop {
            match wait(&mut connection, self.deadline) {
                Reply::Message(ToRank::Table { infos }) => {
                    return Ok(Joined { connection, infos, ways });
                }
                Reply::Message(ToRank::Waiting { missing: m, notes: n, host: h }) => (missing, notes, host) = (m, n, h),
                Reply::Message(ToRank::Rejected { reason, again }) => {
                    return Err(Failed::Refused { reason, stale: again });
                }
                Reply::Message(ToRank::NotFormed { missing, reason }) => {
                    goodbye(&mut connection, "");
                    let never =
                        if missing.is_empty() { String::new() } else { format!("; never came: {}", list(&missing)) };
                    return Err(fatal(format!("rank {}: {reason}{never}", self.rank)));
                }
                Reply::Message(_) => {}
                Reply::Nonsense(e) => {
                    return Err(fatal(format!("rank {}: the store broke the protocol: {e}", self.rank)));
                }
                Reply::End(e) => {
                    if let Some(peer) = host {
                        let detail = format!("it hosted the rendezvous, and ended before all ranks had come: {e}");
                        let (op, address) = (OP.to_owned(), address.to_string());
                        return Err(Failed::Final(Error::PeerLost { op, rank: self.rank, peer, address, detail }));
                    }
                    return Err(fatal(format!("rank {} lost the store before all ranks had come: {e}", self.rank)));
                }
                Reply::Stop => {
                    goodbye(&mut connection, "it was interrupted");
                    return Err(Failed::Final(stopped(self.rank)));
                }
                Reply::Nothing => {
                    let waited = self.started.elapsed();
                    goodbye(&mut connection, &format!("it waited {waited:.1?} for {}", list(&missing)));
                    let mut detail =
                        format!("the store at {address} knows the other ranks; check that these were started");
                    for note in notes {
                        detail = format!("{detail}; {note}");
                    }
                    return Err(Failed::Final(Error::Timeout {
                        op: OP.to_owned(),
                        rank: self.rank,
                        waited,
                        missing,
                        detail,
                    }));
                }
            }
        }
    }
}

/// Connects and queues the hello; with that of the encryption, if `seal` is the secret for it.
pub(in crate::bootstrap) fn dial(
    address: SocketAddr,
    hello: &Hello,
    seal: Option<&Secret>,
    limit: Duration,
) -> std::io::Result<(Connection, Option<Opening>)> {
    let limit = limit.max(Duration::from_millis(1));
    let stream = TcpStream::connect_timeout(&address, limit)?;
    // A connect to a free port of this host can reach itself when the kernel picks that very port for our side.
    if stream.local_addr().is_ok_and(|own| own == address) {
        return Err(std::io::Error::new(std::io::ErrorKind::ConnectionRefused, "no process listens there"));
    }
    let mut connection = Connection::new(stream, seal.is_some())?;
    let mut bytes = hello.encode(seal.is_some()).to_vec();
    let opening = match seal.map(|secret| seal::begin(secret, &bytes)).transpose().map_err(std::io::Error::other)? {
        Some((opening, message)) => {
            bytes.extend(message);
            Some(opening)
        }
        None => None,
    };
    connection.queue_bytes(&bytes).map_err(std::io::Error::other)?;
    Ok((connection, opening))
}

/// Takes a challenge in, and seals the connection if we have asked for that. `None` when the challenge does not come
/// from a store that knows the secret and encrypts as we do.
pub(in crate::bootstrap) fn challenged(
    connection: &mut Connection,
    (hello, opening): (Hello, Option<Opening>),
    secret: &Secret,
    (nonce, proof, seal): (&Bytes, &Bytes, &Bytes),
) -> Option<Challenge> {
    let keys = opening.map(|opening| opening.finish(&seal.0)).transpose().ok()?;
    let binding = keys.as_ref().map(|keys| keys.binding);
    let challenge = Challenge::received(secret, hello, (nonce, proof), binding)?;
    if let Some(keys) = keys {
        connection.seal(keys).ok()?;
    }
    Some(challenge)
}

fn stopped(rank: usize) -> Error {
    Error::Aborted { op: OP.to_owned(), rank, reason: format!("rank {rank}: interrupted") }
}

fn refused(reason: String) -> Failed {
    Failed::Refused { reason, stale: false }
}

fn list(ranks: &[usize]) -> String {
    let names: Vec<String> = ranks.iter().map(usize::to_string).collect();
    match names.as_slice() {
        [] => "no rank".to_owned(),
        [one] => format!("rank {one}"),
        many => format!("ranks {}", many.join(", ")),
    }
}

/// Notifies the store that we give up, so that the others need not wait for us.
fn goodbye(connection: &mut Connection, reason: &str) {
    if connection.queue(&ToStore::Bye { reason: reason.to_owned() }).is_ok() {
        // The kernel delivers it after we close; if the store is gone no one needs it.
        let _ = connection.flush();
        connection.end_of_stream();
    }
}

pub(in crate::bootstrap) enum Reply {
    Message(ToRank),
    /// Bytes that are no message.
    Nonsense(String),
    /// The connection ended.
    End(String),
    /// The time is over.
    Nothing,
    /// The caller is to stop.
    Stop,
}

/// Sends what is queued and waits for one message.
pub(in crate::bootstrap) fn wait(connection: &mut Connection, deadline: Instant) -> Reply {
    let mut ended = None;
    loop {
        match connection.next(MAX_FRAME) {
            Ok(Some(message)) => return Reply::Message(message),
            Ok(None) => {}
            Err(e) => return Reply::Nonsense(e),
        }
        if let Some(detail) = ended {
            return Reply::End(detail);
        }
        if left(deadline).is_zero() {
            return Reply::Nothing;
        }
        if asked_to_stop() {
            return Reply::Stop;
        }
        let filled = connection.flush().and_then(|_| {
            let interest = connection.interest();
            poll(&mut [PollFd::from_borrowed_fd(connection.fd(), interest)], left(deadline).min(SLICE))?;
            connection.fill()
        });
        match filled {
            Ok(Fill::Open) => {}
            Ok(Fill::End) => ended = Some("it closed the connection".to_owned()),
            Err(e) => ended = Some(broken(&e)),
        }
    }
}
