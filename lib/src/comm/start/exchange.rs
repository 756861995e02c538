//! Values that ranks exchange while something is set up on top of a communicator.

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::comm::Comm;
use crate::error::{Error, Result};

impl Comm {
    /// True if all ranks of this communicator are on one host.
    pub(crate) fn is_one_host(&self) -> bool {
        let state = &self.inner.state;
        state.members.iter().all(|&m| state.control.shares_host(m))
    }

    /// Ranks of this communicator on our host.
    pub(crate) fn ranks_here(&self) -> usize {
        let state = &self.inner.state;
        state.members.iter().filter(|&&m| state.control.shares_host(m)).count()
    }

    /// Every rank's bytes, in rank order, through the rendezvous: a few hundred bytes each, for set-up. Every rank must
    /// call it with the same `what`, which no call before has had.
    ///
    /// # Errors
    /// [`Error::PeerLost`] and [`Error::Timeout`] name the ranks that did not come.
    pub fn exchange_bytes(&self, what: &str, ours: &[u8]) -> Result<Vec<Vec<u8>>> {
        let state = &self.inner.state;
        state.check(|| what.to_owned())?;
        let key = state.key(&format!("bytes: {what}"));
        state.control.exchange(&key, &state.members, ours.to_vec()).map_err(|error| state.of_members(error))
    }

    /// Every rank's value, in rank order, through the rendezvous; for set-up. Once per `what`.
    pub(crate) fn exchange<T: Serialize + DeserializeOwned>(&self, what: &str, value: &T) -> Result<Vec<T>> {
        let state = &self.inner.state;
        let broken = |e: serde_json::Error| {
            Error::invalid(what, format!("does not parse ({e}): do all ranks run the same version?"))
        };
        let bytes = serde_json::to_vec(value).map_err(broken)?;
        let key = state.key(what);
        let values = state.control.exchange(&key, &state.members, bytes).map_err(|error| state.of_members(error))?;
        values.iter().map(|bytes| serde_json::from_slice(bytes).map_err(broken)).collect()
    }
}

#[cfg(test)]
mod tests {
    use crate::{Comm, Config};

    #[test]
    fn every_rank_gets_the_bytes_of_all() {
        let comms = Comm::threads(3, Config::default()).unwrap();
        let all: Vec<_> = std::thread::scope(|scope| {
            let one = |comm: Comm| scope.spawn(move || comm.exchange_bytes("ranks", &vec![7; comm.rank()]).unwrap());
            let threads: Vec<_> = comms.into_iter().map(one).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(all.iter().all(|got| *got == [vec![], vec![7], vec![7, 7]]), "{all:?}");
    }
}
