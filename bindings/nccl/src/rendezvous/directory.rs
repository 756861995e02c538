//! The stores of this process, by name: the rendezvous directory that its listener serves.
//!
//! An id costs nothing until a rank uses it. Its secret is computed from a key of this process and the id's number, and
//! its store is opened on the first request. A store that is over is forgotten; of an id remains that it was used.

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tinynccl::bootstrap::{Observer, Server, Standing};
use tinynccl::{Config, Secret};

use super::id::{Id, Name, name_of, used};
use super::protocol::Reply;
use super::{address, digest};
use crate::abi::error::{Error, Result};
use crate::env::settings;

/// A store to which no rank has connected is closed after this long; the next rank opens another.
const EMPTY: Duration = Duration::from_secs(60);
/// Between two looks at stores that no rank of this process has taken.
const SWEEP: Duration = Duration::from_secs(1);

/// The part that a rank of this process takes in the store of an id.
pub(crate) enum Claim {
    /// It is the only rank: no store is needed.
    Alone,
    /// It hosts the store.
    Host(Box<Server>),
    /// It requests the address from the id's listener.
    Guest,
}

struct Entry {
    observer: Observer,
    addresses: Vec<SocketAddr>,
    /// The store, until a rank of this process takes it.
    untaken: Option<Server>,
    opened: Instant,
    /// Number of the store's id; `None` for a store that has none.
    number: Option<u64>,
}

/// Numbers of ids that were used, as runs from first to last: they are mostly used in the order of their numbers.
#[derive(Debug, Default)]
struct Used(BTreeMap<u64, u64>);

impl Used {
    fn contains(&self, number: u64) -> bool {
        self.0.range(..=number).next_back().is_some_and(|(_, last)| number <= *last)
    }

    fn insert(&mut self, number: u64) {
        if self.contains(number) {
            return;
        }
        let before =
            self.0.range(..number).next_back().filter(|(_, last)| **last + 1 == number).map(|(first, _)| *first);
        let last = self.0.remove(&(number + 1)).unwrap_or(number);
        self.0.insert(before.unwrap_or(number), last);
    }
}

/// The ids and stores of this process. A forked child has a separate one.
pub(crate) struct Directory {
    process: u32,
    key: [u8; 32],
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Ids so far.
    ids: u64,
    used: Used,
    stores: HashMap<Name, Entry>,
    /// The listeners that are open: this process's own, and those at addresses that the environment names.
    own: Option<Vec<SocketAddr>>,
    others: Vec<SocketAddr>,
}

/// Returns this process's directory.
///
/// # Errors
/// `ncclSystemError` where the system has no random bytes.
pub(crate) fn here() -> Result<&'static Directory> {
    static CURRENT: AtomicPtr<Directory> = AtomicPtr::new(std::ptr::null_mut());
    let process = std::process::id();
    loop {
        let found = CURRENT.load(Ordering::Acquire);
        // SAFETY: null, or a directory that was leaked below.
        if let Some(directory) = unsafe { found.as_ref() }.filter(|directory| directory.process == process) {
            return Ok(directory);
        }
        // That of the parent stays as it is: another thread may have had its lock when it forked.
        let new = Box::new(Directory { process, key: digest::random()?, state: Mutex::default() });
        let new = Box::into_raw(new);
        if CURRENT.compare_exchange(found, new, Ordering::AcqRel, Ordering::Acquire).is_err() {
            // SAFETY: made above, and known to no other thread.
            drop(unsafe { Box::from_raw(new) });
        }
    }
}

impl Directory {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn secret(&self, number: u64) -> [u8; 32] {
        digest::of("secret of an id", &[&self.key, &number.to_le_bytes()])
    }

    /// Makes number and secret of a new id.
    pub(crate) fn new_id(&self) -> (u64, [u8; 32]) {
        let number = {
            let mut state = self.state();
            state.ids += 1;
            state.ids
        };
        (number, self.secret(number))
    }

    /// Returns the addresses of this process's listener; `open` opens it, if it is not.
    pub(crate) fn own_listener(&self, open: impl FnOnce() -> Result<Vec<SocketAddr>>) -> Result<Vec<SocketAddr>> {
        let mut state = self.state();
        if state.own.is_none() {
            state.own = Some(open()?);
        }
        Ok(state.own.clone().unwrap_or_default())
    }

    /// Ensures a listener at `address`; `open` opens it, if it is not.
    pub(crate) fn listener_at(&self, address: SocketAddr, open: impl FnOnce() -> Result<()>) -> Result<()> {
        let mut state = self.state();
        if !state.others.contains(&address) {
            open()?;
            state.others.push(address);
        }
        Ok(())
    }

    /// Answers requests for `name` with this store's addresses from now on.
    pub(crate) fn publish(&self, name: Name, server: &Server) {
        let mut state = self.state();
        sweep(&mut state);
        state.stores.insert(name, Entry::of(server, None));
    }

    /// Returns the part of a rank of this process that joins by `id`, `alone` or not.
    ///
    /// # Errors
    /// `ncclInvalidUsage` for an id of this process that was used; those of opening a store.
    pub(crate) fn claim(&self, id: &Id, alone: bool, config: &Config) -> Result<Claim> {
        let state = &mut *self.state();
        sweep(state);
        if !self.is_ours(state, id.number, &name_of(&id.secret)) {
            return Ok(Claim::Guest);
        }
        match state.stores.get_mut(&name_of(&id.secret)) {
            Some(entry) if entry.observer.standing() >= Standing::Formed => Err(used()),
            Some(entry) => Ok(entry.untaken.take().map_or(Claim::Guest, |server| Claim::Host(Box::new(server)))),
            None if state.used.contains(id.number) => Err(used()),
            None if alone => {
                state.used.insert(id.number);
                Ok(Claim::Alone)
            }
            None => Ok(Claim::Host(Box::new(open(state, id.number, id.secret, config)?))),
        }
    }

    /// Returns the reply to a request for `name`, with the `number` of an id or [`super::id::NO_NUMBER`]. The first
    /// request for an id of this process opens its store.
    pub(crate) fn lookup(&self, name: &Name, number: u64) -> Reply {
        let state = &mut *self.state();
        sweep(state);
        if let Some(entry) = state.stores.get(name) {
            let over = entry.number.is_some() && entry.observer.standing() >= Standing::Formed;
            return if over { Reply::Used } else { Reply::At(entry.addresses.clone()) };
        }
        if !self.is_ours(state, number, name) {
            return Reply::Unknown;
        }
        if state.used.contains(number) {
            return Reply::Used;
        }
        let config = settings::config().map_err(Error::from);
        let opened = config.and_then(|config| open(state, number, self.secret(number), &config));
        match opened {
            Ok(server) => {
                let addresses = server.unique_id().addresses().to_vec();
                if let Some(entry) = state.stores.get_mut(name) {
                    entry.untaken = Some(server);
                }
                Reply::At(addresses)
            }
            Err(error) => {
                log::warn!("a rank requests the store of an id, which cannot be opened: {}", error.text);
                Reply::Unknown
            }
        }
    }

    /// Ends the stores that are over. Returns the pause until the next call, or `None` while no store needs one.
    pub(crate) fn maintain(&self) -> Option<Duration> {
        let mut state = self.state();
        sweep(&mut state);
        state.stores.values().any(|entry| entry.untaken.is_some()).then_some(SWEEP)
    }

    fn is_ours(&self, state: &State, number: u64, name: &Name) -> bool {
        (1..=state.ids).contains(&number) && name_of(&self.secret(number)) == *name
    }
}

impl Entry {
    fn of(server: &Server, number: Option<u64>) -> Entry {
        let addresses = server.unique_id().addresses().to_vec();
        Entry { observer: server.observer(), addresses, untaken: None, opened: Instant::now(), number }
    }
}

fn open(state: &mut State, number: u64, secret: [u8; 32], config: &Config) -> Result<Server> {
    let server = Server::open(address::anywhere(config)?, Secret::new(secret), config)?;
    state.stores.insert(name_of(&secret), Entry::of(&server, Some(number)));
    Ok(server)
}

/// Forgets the stores that are over, and drops those that no rank of this process has taken: they go on for their
/// ranks.
fn sweep(state: &mut State) {
    let mut left = Vec::new();
    state.stores.retain(|_, entry| {
        let standing = entry.observer.standing();
        let expired = standing == Standing::Empty && entry.untaken.is_some() && entry.opened.elapsed() > EMPTY;
        if standing >= Standing::Formed || expired {
            left.extend(entry.untaken.take());
        }
        if let (Standing::Over, Some(number)) = (standing, entry.number) {
            state.used.insert(number);
        }
        standing != Standing::Over && !expired
    });
    if left.is_empty() {
        return;
    }
    // Dropping a store waits until its ranks have disconnected.
    let end = std::thread::Builder::new().name("tinynccl-stores".to_owned()).spawn(move || drop(left));
    if let Err(e) = end {
        log::debug!("stores that are over were ended without a thread: {e}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rendezvous::unique_id;

    #[test]
    fn numbers_are_kept_as_runs() {
        let mut used = Used::default();
        for number in [5, 1, 2, 9, 4, 3, 7, 9] {
            used.insert(number);
        }
        assert_eq!(used.0.into_iter().collect::<Vec<_>>(), [(1, 5), (7, 7), (9, 9)]);
        let mut used = Used::default();
        (1..=1000).rev().for_each(|number| used.insert(number));
        assert!(
            used.0.len() == 1 && used.contains(1) && used.contains(1000) && !used.contains(0) && !used.contains(1001)
        );
    }

    #[test]
    fn an_id_has_one_store_which_is_opened_when_it_is_requested() {
        let (directory, config) = (here().unwrap(), settings::config().unwrap());
        let (one, other) = (unique_id::new().unwrap(), unique_id::new().unwrap());
        let of = |id: &Id| directory.state().stores.contains_key(&name_of(&id.secret));
        assert!(!of(&one));
        let Ok(Claim::Host(server)) = directory.claim(&one, false, &config) else { panic!("no store") };
        assert!(of(&one) && matches!(directory.claim(&one, false, &config), Ok(Claim::Guest)));
        assert_eq!(
            directory.lookup(&name_of(&one.secret), one.number),
            Reply::At(server.unique_id().addresses().to_vec())
        );
        // Opened by a request, then taken by a rank of this process.
        assert!(matches!(directory.lookup(&name_of(&other.secret), other.number), Reply::At(_)));
        assert!(
            directory.maintain().is_some() && matches!(directory.claim(&other, false, &config), Ok(Claim::Host(_)))
        );
        // The name and the number belong together, and both to this process.
        assert_eq!(directory.lookup(&name_of(&other.secret), one.number), Reply::Unknown);
        assert_eq!(directory.lookup(&name_of(&[7; 32]), one.number), Reply::Unknown);
        assert_eq!(directory.lookup(&name_of(&directory.secret(u64::MAX)), u64::MAX), Reply::Unknown);
        // It has ended.
        drop(server);
        assert_eq!(directory.lookup(&name_of(&one.secret), one.number), Reply::Used);
        assert!(!of(&one) && directory.claim(&one, false, &config).err().unwrap().text.contains("the id was used"));
    }

    #[test]
    fn one_rank_alone_needs_no_store() {
        let (directory, config) = (here().unwrap(), settings::config().unwrap());
        let id = unique_id::new().unwrap();
        assert!(matches!(directory.claim(&id, true, &config), Ok(Claim::Alone)));
        assert!(directory.claim(&id, true, &config).is_err() && directory.claim(&id, false, &config).is_err());
        let foreign = Id { number: id.number, secret: [9; 32], ..unique_id::new().unwrap() };
        assert!(matches!(directory.claim(&foreign, true, &config), Ok(Claim::Guest)));
    }
}
