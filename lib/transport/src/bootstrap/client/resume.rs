//! Continuation of a rank's connection over another stream, where the one in use gets nothing through any more.
//!
//! ```text
//!   rank                                            store
//!   hello, as at the start                     ─▶
//!                                              ◀─   challenge
//!   resume: proof with the secret of the links ─▶
//!                                              ◀─   resumed: number of bytes taken
//!   took: number of bytes taken                ─▶
//!   all bytes after those                      ◀▶   all bytes after those
//! ```
//! The rank repeats that for half a minute. Up to the last message of the rank both still have the former stream, and
//! may go on with that. The store closes it when it receives that message, and the rank when it receives more: a stream
//! that ends is a process that ended, and one that is given up must not look like that.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use super::join::{Reply, challenged, dial, wait};
use crate::bootstrap::wire::connection::Connection;
use crate::bootstrap::wire::frame::Hello;
use crate::bootstrap::wire::message::{ToRank, ToStore};
use tinynccl_sys::secret::Secret;
use tinynccl_sys::threads::deadline_after;

/// Longest time for one address: the store replies within it, or the path is down.
const LIMIT: Duration = Duration::from_secs(1);

/// A rank's paths to its store.
#[derive(Debug)]
pub(crate) struct Ways {
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
    /// Connections are encrypted.
    pub(crate) encrypt: bool,
    /// Secret that the store and the rank prove to each other.
    pub(crate) secret: Secret,
    /// Secret of the links, which only ranks of this start of the job know.
    pub(crate) links: Secret,
    /// Addresses at which the store may be reached, most likely first.
    pub(crate) addresses: Vec<SocketAddr>,
    /// The one of them that is in use.
    pub(crate) address: SocketAddr,
    /// Tries so far to go on over another stream.
    pub(crate) tries: u64,
}

/// Reason for which there is no other stream.
#[derive(Debug)]
pub(crate) enum NoPath {
    /// None was found.
    Yet,
    /// Nothing listens at the address in use any more.
    Nobody,
    /// The store has rejected the rank, for this reason.
    Ever(String),
}

impl Ways {
    /// Tries the addresses, the one in use last, until one answers or `stop`. Then `connection` goes on there, and its
    /// former stream is returned.
    pub(crate) fn resume(
        &mut self,
        connection: &mut Connection,
        stop: impl Fn() -> bool,
    ) -> Result<Connection, NoPath> {
        let others = self.addresses.iter().copied().filter(|address| *address != self.address);
        let all: Vec<SocketAddr> = others.chain([self.address]).collect();
        for address in all {
            if stop() {
                break;
            }
            match self.resume_at(address, connection, LIMIT) {
                // The host has another address that it gave to the store, perhaps.
                Err(NoPath::Yet | NoPath::Nobody) => {}
                outcome => return outcome,
            }
        }
        Err(NoPath::Yet)
    }

    /// As [`Ways::resume`], over the address in use, which replies within `limit`.
    pub(crate) fn resume_here(&mut self, connection: &mut Connection, limit: Duration) -> Result<Connection, NoPath> {
        self.resume_at(self.address, connection, limit)
    }

    fn resume_at(
        &mut self,
        address: SocketAddr,
        connection: &mut Connection,
        limit: Duration,
    ) -> Result<Connection, NoPath> {
        let (rank, before) = (self.rank, self.address);
        match self.over(address, connection, limit) {
            Ok(former) => {
                log::warn!(
                    "rank {rank}: nothing gets through to the rendezvous store at {before} any more: it goes on over {address}"
                );
                self.address = address;
                Ok(former)
            }
            Err(Failed::Refused(reason)) => Err(NoPath::Ever(reason)),
            Err(Failed::Silent(detail)) => {
                log::debug!("rank {rank}: no path to the store over {address}: {detail}");
                Err(NoPath::Yet)
            }
            Err(Failed::Nobody) => Err(NoPath::Nobody),
        }
    }

    fn over(
        &mut self,
        address: SocketAddr,
        connection: &mut Connection,
        limit: Duration,
    ) -> Result<Connection, Failed> {
        let hello = Hello::new(self.rank, self.world_size).map_err(|e| e.to_string())?;
        let until = deadline_after(limit);
        let seal = self.encrypt.then_some(&self.secret);
        let (mut other, opening) = dial(address, &hello, seal, limit).map_err(|e| match e.kind() {
            std::io::ErrorKind::ConnectionRefused => Failed::Nobody,
            _ => Failed::Silent(e.to_string()),
        })?;
        let challenge = match hear(&mut other, until)? {
            ToRank::Challenge { nonce, proof, seal } => {
                challenged(&mut other, (hello, opening), &self.secret, (&nonce, &proof, &seal))
                    .ok_or("it is another job's".to_owned())?
            }
            message => return Err(format!("unexpected first answer {message:?}").into()),
        };
        self.tries += 1;
        let proof = challenge.answer_again(&self.links);
        other.queue(&ToStore::Resume { proof, number: self.tries })?;
        let taken = match hear(&mut other, until)? {
            ToRank::Resumed { bytes } => bytes,
            ToRank::Rejected { reason, .. } => return Err(Failed::Refused(reason)),
            message => return Err(format!("unexpected answer {message:?}").into()),
        };
        let ours = connection.account();
        other.queue(&ToStore::Took { bytes: ours })?;
        // A stream that is new takes a few bytes.
        if !other.flush().map_err(|e| e.to_string())? {
            return Err("it takes no bytes".to_owned().into());
        }
        connection.go_on(&mut other, taken, ours)?;
        Ok(other)
    }
}

enum Failed {
    /// Rejected by the store of this job.
    Refused(String),
    /// Connection refused by the host.
    Nobody,
    Silent(String),
}

impl From<String> for Failed {
    fn from(detail: String) -> Failed {
        Failed::Silent(detail)
    }
}

fn hear(connection: &mut Connection, until: Instant) -> Result<ToRank, String> {
    match wait(connection, until) {
        Reply::Message(message) => Ok(message),
        Reply::Nonsense(detail) | Reply::End(detail) => Err(detail),
        Reply::Nothing | Reply::Stop => Err("connected, but no answer".to_owned()),
    }
}
