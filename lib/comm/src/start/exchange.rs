//! Values that ranks exchange while something is set up on top of a communicator.

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::Comm;
use crate::executor::Supervisor;
use crate::state::control::{decode, encode};
use tinynccl_plan::error::{Error, Result};

impl Comm {
    /// True if all ranks of this communicator are on one host.
    pub fn is_one_host(&self) -> bool {
        let state = &self.inner.state;
        state.members.iter().all(|&m| state.control.shares_host(m))
    }

    /// Ranks of this communicator on our host.
    pub fn ranks_here(&self) -> usize {
        let state = &self.inner.state;
        state.members.iter().filter(|&&m| state.control.shares_host(m)).count()
    }

    /// The host of every rank, as the lowest rank of this communicator there; the same on all ranks.
    pub fn hosts(&self) -> Vec<usize> {
        let state = &self.inner.state;
        let first = |&member: &usize| state.members.iter().position(|&other| state.control.same_host(member, other));
        state.members.iter().map(|member| first(member).unwrap_or(0)).collect()
    }

    /// Every rank's bytes, in rank order, through the rendezvous: a few hundred bytes each, for set-up. Every rank must
    /// call it with the same `what`, which no call before has had.
    ///
    /// # Errors
    /// [`Error::PeerLost`] and [`Error::Timeout`] name the ranks that did not come.
    pub fn exchange_bytes(&self, what: &str, ours: &[u8]) -> Result<Vec<Vec<u8>>> {
        let state = &self.inner.state;
        state.check(|| what.to_owned())?;
        let (key, members) = (state.key(&format!("bytes: {what}")), &state.members);
        let offered = state.control.offer(&key, members, ours.to_vec());
        let values = offered.and_then(|()| state.control.collect(&key, members, &|| state.has_failed()));
        values.map_err(|error| state.exchange_failed(what, error))
    }

    /// Makes this rank's bytes of [`Comm::exchange_bytes`] known, and waits for none of the others.
    pub fn offer_bytes(&self, what: &str, ours: &[u8]) -> Result<()> {
        let state = &self.inner.state;
        state.check(|| what.to_owned())?;
        let offered = state.control.offer(&state.key(&format!("bytes: {what}")), &state.members, ours.to_vec());
        offered.map_err(|error| state.exchange_failed(what, error))
    }

    /// Every rank's value, in rank order, through the rendezvous; for set-up. Once per `what`.
    pub fn exchange<T: Serialize + DeserializeOwned>(&self, what: &str, value: &T) -> Result<Vec<T>> {
        self.inner.state.exchange(what, value)
    }

    /// Makes a value known to `peer` and does not wait: once per `what` and peer. The peer gets it by
    /// [`Comm::value_of`] once it has made a value of the same `what` known to us.
    pub fn offer<T: Serialize>(&self, what: &str, peer: usize, value: &T) -> Result<()> {
        let state = &self.inner.state;
        state.check(|| what.to_owned())?;
        let (key, members) = self.pair(what, peer)?;
        state.control.offer(&key, &members, encode(what, value)?).map_err(|error| state.of_members(error))
    }

    /// The value that `peer` has made known to us, for which it waits; [`Comm::offer`] must come first.
    ///
    /// # Errors
    /// [`Error::PeerLost`] and [`Error::Timeout`] name the peer; an abort of this communicator ends the wait.
    pub fn value_of<T: DeserializeOwned>(&self, what: &str, peer: usize) -> Result<T> {
        let state = &self.inner.state;
        let (key, members) = self.pair(what, peer)?;
        let values = state.control.collect(&key, &members, &|| state.has_failed());
        let values = values.map_err(|error| state.exchange_failed(what, error))?;
        let theirs = usize::from(peer > self.rank());
        let bytes = values.get(theirs).ok_or_else(|| Error::invalid(what, "the exchange has no value of the peer"))?;
        decode(what, bytes)
    }

    /// Key and members of an exchange between two ranks.
    fn pair(&self, what: &str, peer: usize) -> Result<(String, [usize; 2])> {
        let state = &self.inner.state;
        let (low, high) = (peer.min(self.rank()), peer.max(self.rank()));
        match (state.members.get(low), state.members.get(high)) {
            (Some(&first), Some(&second)) if low != high => {
                Ok((state.key(&format!("{what} {low} {high}")), [first, second]))
            }
            _ => Err(Error::invalid(what, format!("rank {}: peer is {peer}, expected another rank", self.rank()))),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc::channel;

    use crate::Comm;
    use tinynccl_plan::{Error, Result};
    use tinynccl_sys::Config;
    use tinynccl_sys::interrupt::watched;

    /// Both in one thread: an offer does not wait.
    #[test]
    fn an_offer_waits_for_no_one() {
        let comms = Comm::threads(3, Config::default()).unwrap();
        comms[0].offer("place", 2, &"of 0 for 2").unwrap();
        comms[2].offer("place", 0, &"of 2 for 0").unwrap();
        comms[2].offer("place", 1, &"of 2 for 1").unwrap();
        comms[1].offer("place", 2, &"of 1 for 2").unwrap();
        assert_eq!(comms[2].value_of::<String>("place", 0).unwrap(), "of 0 for 2");
        assert_eq!(comms[0].value_of::<String>("place", 2).unwrap(), "of 2 for 0");
        assert_eq!(comms[1].value_of::<String>("place", 2).unwrap(), "of 2 for 1");
        assert!(comms[1].offer("place", 1, &"oneself").is_err());
        assert!(comms[1].offer("place", 3, &"no rank").is_err());
    }

    #[test]
    fn a_wait_for_a_value_ends_with_an_abort_and_with_a_rank_that_leaves() {
        let mut comms = Comm::threads(2, Config::default()).unwrap();
        comms[0].offer("place", 1, &0).unwrap();
        let (one, zero) = (comms.pop().unwrap(), comms.pop().unwrap());
        let (began, begins) = channel();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                began.send(()).unwrap();
                zero.value_of::<i32>("place", 1).unwrap_err()
            });
            begins.recv().unwrap();
            one.abort("no more");
            let error = waiter.join().unwrap();
            assert!(matches!(error, Error::Aborted { .. }) && error.to_string().contains("no more"), "{error}");
        });
        let mut comms = Comm::threads(2, Config::default()).unwrap();
        comms[0].offer("place", 1, &0).unwrap();
        drop(comms.pop());
        let error = comms[0].value_of::<i32>("place", 1).unwrap_err();
        assert!(matches!(error, Error::PeerLost { peer: 1, .. }), "{error}");
    }

    #[test]
    fn set_up_that_waits_for_a_rank_ends_with_an_abort() {
        static WAITS: AtomicBool = AtomicBool::new(false);
        type Call = fn(&Comm) -> Result<()>;
        fn waits() -> bool {
            WAITS.store(true, Ordering::Release);
            false
        }
        let calls: [(&str, Call); 4] = [
            ("exchange", |comm| comm.exchange("place", &0).map(drop)),
            ("alloc", |comm| comm.alloc::<f32>(1 << 16).map(drop)),
            ("split", |comm| comm.split(Some(0), 0).map(drop)),
            ("the first collective", |comm| comm.barrier()),
        ];
        for (what, call) in calls {
            let comms = Comm::threads(2, Config::default()).unwrap();
            WAITS.store(false, Ordering::Release);
            std::thread::scope(|scope| {
                let waiter = scope.spawn(|| watched(waits, || call(&comms[0])));
                while !WAITS.load(Ordering::Acquire) {
                    std::thread::yield_now();
                }
                comms[1].abort("no more");
                let error = waiter.join().unwrap().unwrap_err();
                assert!(matches!(error, Error::Aborted { .. }), "{what}: {error}");
                assert!(error.to_string().contains("rank 1: no more"), "{what}: {error}");
            });
        }
    }

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
