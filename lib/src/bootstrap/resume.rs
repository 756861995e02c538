//! How a rank and the store go on over another stream, where the one that they have gets nothing through any more.
//!
//! ```text
//!   rank                                            store
//!   hello, as at the start                     ─▶
//!                                              ◀─   challenge
//!   resume: proof with the secret of the links ─▶
//!                                              ◀─   resumed: so many bytes I have taken
//!   took: so many bytes I have taken           ─▶
//!   all bytes after those                      ◀▶   all bytes after those
//! ```
//! Up to the last message of the rank both still have the stream of before, and may go on with that. The store closes
//! it when it hears that message, and the rank when it hears more: a stream that ends is a process that ended, and one
//! that is given up must not look like that.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use super::admission;
use super::connection::Connection;
use super::frame::Hello;
use super::join::{Heard, dial, wait};
use super::message::{ToRank, ToStore};
use crate::secret::Secret;
use crate::threads::deadline_after;

/// Longest time for one address: the store is there, or its cable is not.
const LIMIT: Duration = Duration::from_secs(1);

/// What a rank knows of the ways to its store.
#[derive(Debug)]
pub(crate) struct Ways {
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
    /// What the store and the rank prove to each other.
    pub(crate) secret: Secret,
    /// What only ranks of this start of the job know.
    pub(crate) links: Secret,
    /// Where the store may be reached, most likely first.
    pub(crate) addresses: Vec<SocketAddr>,
    /// The one of them that is in use.
    pub(crate) address: SocketAddr,
}

impl Ways {
    /// Tries the addresses, the one in use last, until one answers or `ended`. Then `connection` goes on there, and the
    /// stream that it had comes back.
    pub(crate) fn resume(&mut self, connection: &mut Connection, ended: impl Fn() -> bool) -> Option<Connection> {
        let others = self.addresses.iter().copied().filter(|address| *address != self.address);
        let all: Vec<SocketAddr> = others.chain([self.address]).collect();
        for address in all {
            if ended() {
                break;
            }
            match self.resume_at(address, connection) {
                Ok(former) => {
                    log::warn!(
                        "rank {}: nothing gets through to the rendezvous store at {} any more: it goes on over {address}",
                        self.rank,
                        self.address
                    );
                    self.address = address;
                    return Some(former);
                }
                Err(detail) => log::debug!("rank {}: no way to the store over {address}: {detail}", self.rank),
            }
        }
        None
    }

    fn resume_at(&self, address: SocketAddr, connection: &mut Connection) -> Result<Connection, String> {
        let hello = Hello::new(self.rank, self.world_size).map_err(|e| e.to_string())?;
        let until = deadline_after(LIMIT);
        let mut other = dial(address, &hello, LIMIT)?;
        let nonce = match hear(&mut other, until)? {
            ToRank::Challenge { nonce, proof } => {
                admission::answer(&self.secret, &hello, &nonce, &proof).ok_or("it is another job's")?;
                nonce
            }
            message => return Err(format!("unexpected first answer {message:?}")),
        };
        other.queue(&ToStore::Resume { proof: admission::answer_again(&self.links, &hello, &nonce) })?;
        let taken = match hear(&mut other, until)? {
            ToRank::Resumed { bytes } => bytes,
            ToRank::Rejected { reason, .. } => return Err(reason),
            message => return Err(format!("unexpected answer {message:?}")),
        };
        let ours = connection.account();
        other.queue(&ToStore::Took { bytes: ours })?;
        // A stream that is new takes a few bytes.
        if !other.flush().map_err(|e| e.to_string())? {
            return Err("it takes no bytes".to_owned());
        }
        connection.go_on(&mut other, taken, ours)?;
        Ok(other)
    }
}

fn hear(connection: &mut Connection, until: Instant) -> Result<ToRank, String> {
    match wait(connection, until) {
        Heard::Message(message) => Ok(message),
        Heard::Nonsense(detail) | Heard::End(detail) => Err(detail),
        Heard::Nothing | Heard::Stop => Err("connected, but no answer".to_owned()),
    }
}
