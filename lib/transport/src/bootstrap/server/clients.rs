//! The store's clients: messages from and to them.

use std::io;
use std::time::{Duration, Instant};

use super::{Loop, REGISTER_LIMIT};
use crate::bootstrap::wire::admission::Challenge;
use crate::bootstrap::wire::connection::{Connection, Fill, GONE_HOST, LOST, broken, is_of_the_path};
use crate::bootstrap::wire::frame::{Hello, MAX_FRAME};
use crate::bootstrap::wire::message::{ToRank, ToStore};
use tinynccl_sys::half_open::Source;
use tinynccl_sys::threads::deadline_after;

/// A member without a message for this long may be stopped, or its host gone: its kernel shows which.
const SILENT: Duration = Duration::from_secs(5);
/// Time within which a member whose connection was reset may go on over another stream: its kernel may have given up
/// one that got nothing through, and resets it when the path is back. A process that ended resets its connection only
/// if it had not read all.
const RESET_LIMIT: Duration = Duration::from_secs(1);
/// A rejected client may take this long to read the reason, one that said goodbye to close.
const ENDING_LIMIT: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub(super) struct Client {
    pub(super) id: u64,
    pub(super) connection: Connection,
    pub(super) source: Source,
    pub(super) address: String,
    pub(super) phase: Phase,
    /// Deadline of its phase, unless it is a member.
    pub(super) until: Instant,
    /// Set once its stream is over, with the reason; it is a member that may go on over another until then.
    pub(super) over: Option<(Instant, String)>,
    /// Highest number of its tries to do so that we have received.
    pub(super) tries: u64,
}

impl Client {
    /// Begins the end of a client of which nothing more is expected: it may read our last messages.
    pub(super) fn start_ending(&mut self) {
        self.phase = Phase::Ending { budget: 1 << 20, ended: false };
        self.until = deadline_after(ENDING_LIMIT);
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// Connected, no whole hello received.
    Hello,
    /// Its hello is here, and the encryption's message is to follow.
    Seal { hello: Hello },
    /// Its hello was answered by our challenge.
    Prove { challenge: Challenge },
    /// The proof was right.
    Register { hello_rank: u32, world_size: u32 },
    /// A registered rank.
    Member { rank: usize },
    /// A member over another stream, which it has not begun to use; we have acknowledged `acknowledged` bytes to it.
    Resume { rank: usize, acknowledged: u64 },
    /// Nothing more is expected of it: it said goodbye, or is being notified that the store closes or that it is
    /// rejected. `budget` more bytes of it are discarded, because closing with unread bytes would reset the connection
    /// under our last messages.
    Ending { budget: usize, ended: bool },
    /// To be removed.
    Gone,
}

impl Loop {
    /// Reads from one client and answers.
    pub(super) fn serve(&mut self, index: usize) {
        let Some(client) = self.clients.get_mut(index) else { return };
        // When sending fails, what came before may still be read: a goodbye, perhaps.
        let flushed = client.connection.flush();
        if let Phase::Ending { budget, ended } = client.phase {
            client.phase = match client.connection.discard() {
                Ok(Some(n)) if n < budget => Phase::Ending { budget: budget - n, ended },
                _ => Phase::Gone,
            };
            return self.end(index);
        }
        let filled = client.connection.fill();
        while let Some(client) = self.clients.get_mut(index) {
            let more = match client.phase {
                Phase::Hello => self.hello(index),
                Phase::Seal { hello } => self.seal(index, hello),
                Phase::Prove { challenge } => self.prove(index, &challenge),
                Phase::Register { hello_rank, world_size } => self.register(index, hello_rank, world_size),
                Phase::Member { rank } => self.member(index, rank),
                Phase::Resume { rank, acknowledged } => self.resume(index, rank, acknowledged),
                _ => false,
            };
            if !more {
                break;
            }
        }
        match filled.and_then(|f| flushed.map(|_| f)) {
            Ok(Fill::Open) => {}
            Ok(Fill::End) => self.ended(index),
            Err(e) => self.broke(index, &e),
        }
    }

    /// The client's stream has failed.
    fn broke(&mut self, index: usize, error: &io::Error) {
        let Some(client) = self.clients.get_mut(index) else { return };
        let limit = match error.kind() {
            _ if self.closing || !matches!(client.phase, Phase::Member { .. }) => Duration::ZERO,
            _ if is_of_the_path(error) => LOST.saturating_sub(client.connection.silent_for()),
            io::ErrorKind::ConnectionReset => RESET_LIMIT,
            _ => Duration::ZERO,
        };
        if limit.is_zero() {
            return self.fail(index, broken(error));
        }
        client.over = Some((deadline_after(limit), broken(error)));
    }

    /// The client will send no more.
    fn ended(&mut self, index: usize) {
        let Some(client) = self.clients.get_mut(index) else { return };
        match client.phase {
            Phase::Member { .. } => {
                self.fail(index, "its connection closed without a goodbye: the process ended or was killed".to_owned());
            }
            // Since just now: it may still read our last messages.
            Phase::Ending { .. } => {}
            // It may come again; if not, this is what is known of it.
            Phase::Register { hello_rank, .. } => {
                client.phase = Phase::Gone;
                let address = &client.address;
                self.store.note(format!("rank {hello_rank} came from {address} and went away before it had joined"));
            }
            _ => client.phase = Phase::Gone,
        }
    }

    pub(super) fn member(&mut self, index: usize, rank: usize) -> bool {
        let Some(client) = self.clients.get_mut(index) else { return false };
        match client.connection.next::<ToStore>(MAX_FRAME) {
            Ok(None) => false,
            Ok(Some(ToStore::Took { bytes })) => match client.connection.settle(bytes) {
                Ok(()) => true,
                Err(detail) => {
                    self.fail(index, format!("it broke the protocol: {detail}"));
                    false
                }
            },
            Ok(Some(message)) => {
                if let Some(bytes) = client.connection.due_account() {
                    // Short, and sent with what is next.
                    let _ = client.connection.queue(&ToRank::Took { bytes });
                }
                let bye = matches!(message, ToStore::Bye { .. });
                if bye {
                    client.start_ending();
                }
                self.store.handle(rank, message, Instant::now());
                self.deliver();
                if bye {
                    self.end(index);
                }
                !bye
            }
            Err(detail) => {
                self.fail(index, format!("it broke the protocol: {detail}"));
                false
            }
        }
    }

    pub(super) fn end(&mut self, index: usize) {
        let Some(client) = self.clients.get_mut(index) else { return };
        if let Phase::Ending { budget, ended: false } = client.phase {
            match client.connection.flush() {
                Ok(true) => {
                    client.connection.end_of_stream();
                    client.phase = Phase::Ending { budget, ended: true };
                }
                Ok(false) => {}
                Err(_) => client.phase = Phase::Gone,
            }
        }
    }

    /// The client's connection is of no more use.
    pub(super) fn fail(&mut self, index: usize, detail: String) {
        let Some(client) = self.clients.get_mut(index) else { return };
        let phase = std::mem::replace(&mut client.phase, Phase::Gone);
        if let Phase::Member { rank } = phase {
            let level = if self.interrupted { log::Level::Debug } else { log::Level::Warn };
            log::log!(level, "rendezvous store: rank {rank} at {}: {detail}", client.address);
            self.store.lost(rank, detail);
            self.deliver();
        } else if let Phase::Register { hello_rank, .. } = phase {
            self.store.note(format!(
                "rank {hello_rank} came from {} and was gone before it had joined: {detail}",
                client.address
            ));
        }
    }

    /// Sends the store's queued messages.
    pub(super) fn deliver(&mut self) {
        let mut full = Vec::new();
        for (rank, message) in self.store.take_out() {
            let Some(index) = self.place_of(rank) else { continue };
            let Some(client) = self.clients.get_mut(index) else { continue };
            match client.connection.queue(&message) {
                // A failing connection shows when it is read: what it sent before counts still.
                Ok(()) => drop(client.connection.flush()),
                Err(detail) => full.push((index, detail)),
            }
        }
        for (index, detail) in full {
            self.fail(index, detail);
        }
    }

    /// Returns the index of a rank among the clients.
    pub(super) fn place_of(&self, rank: usize) -> Option<usize> {
        // They are kept in the order of their ids.
        self.clients.binary_search_by_key(self.by_rank.get(&rank)?, |c| c.id).ok()
    }

    /// Notifies the members that the store closes. A member that receives it closes, too, without a goodbye, and is not
    /// lost by that.
    pub(super) fn say_closing(&mut self) {
        for client in &mut self.clients {
            if let Phase::Member { .. } = client.phase {
                let _ = client.connection.queue(&ToRank::Closing);
                let _ = client.connection.flush();
                client.start_ending();
            }
        }
    }

    /// Drops the clients whose time is over.
    pub(super) fn expire(&mut self) {
        let now = Instant::now();
        for index in 0..self.clients.len() {
            let Some(client) = self.clients.get_mut(index) else { continue };
            if let Phase::Member { rank } = client.phase {
                let quiet = || self.store.silence(rank, now) > SILENT && client.connection.silent_for() >= LOST;
                let lost = match &client.over {
                    Some((until, detail)) => (now >= *until).then(|| detail.clone()),
                    None => quiet().then(|| GONE_HOST.to_owned()),
                };
                if let Some(detail) = lost {
                    self.fail(index, detail);
                }
                continue;
            }
            if now < client.until {
                continue;
            }
            match client.phase {
                Phase::Hello
                | Phase::Seal { .. }
                | Phase::Prove { .. }
                | Phase::Register { .. }
                | Phase::Resume { .. } => {
                    self.reject(index, format!("no registration within {REGISTER_LIMIT:?}"), false);
                }
                Phase::Ending { .. } => client.phase = Phase::Gone,
                Phase::Member { .. } | Phase::Gone => {}
            }
        }
    }
}
