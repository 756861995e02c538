//! Couples the failure of a communicator with that of objects built on it, both ways.

use std::sync::{Arc, Weak};

use super::State;
use crate::Comm;
use crate::executor::Supervisor as _;
use tinynccl_plan::error::Error;
use tinynccl_sys::threads::lock;

/// A component that waits outside the communicator's calls, for example on a device.
pub trait Attached: Send + Sync {
    /// The communicator has failed, so the wait must end. Called once, on any thread; it must not block.
    fn failed(&self, error: &Error);
}

/// Writes the record of a communicator that has failed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Recorder {
    /// Writes it, in the calling thread.
    pub(crate) write: fn(&State),
    /// Makes a thread of the library call [`State::record`] soon.
    pub(crate) wake: fn(),
}

impl State {
    /// From here on a failure is recorded.
    pub(crate) fn record_by(&self, recorder: Recorder) {
        let _ = self.recorder.set(recorder);
    }

    /// Makes sure that the failure, if there is one, has been recorded: an error that the program sees may be the last
    /// thing that happens in it.
    pub(crate) fn record(&self) {
        if let Some(recorder) = self.recorder.get()
            && self.has_failed()
        {
            self.recorded.call_once_force(|_| (recorder.write)(self));
        }
    }

    /// The first failure, also while it is being recorded.
    pub(crate) fn first_failure(&self) -> Option<Error> {
        lock(&self.failure).clone()
    }
}

impl Comm {
    /// Notifies `one` when this communicator fails, at once if it has failed.
    pub fn attach(&self, one: Weak<dyn Attached>) {
        self.inner.state.attach(one);
    }

    /// `child`, of the same ranks in the same order, fails when this communicator does.
    pub fn attach_child(&self, child: &Comm) {
        let state: Weak<State> = Arc::downgrade(&child.inner.state);
        self.attach(state);
    }

    /// Fails, on all ranks. Gives the first cause.
    pub fn fail_everywhere(&self, error: Error) -> Error {
        self.inner.state.fail_everywhere(error)
    }

    /// The ranks that are gone or silent, and their known state, for a stuck wait for `peers`. Takes four seconds at
    /// most.
    pub fn find_absent(&self, peers: &[usize]) -> Option<(Vec<usize>, String)> {
        self.inner.state.find_absent(peers)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use tinynccl_sys::Config;

    #[derive(Default)]
    struct Heard(Mutex<Vec<String>>);

    impl Attached for Heard {
        fn failed(&self, error: &Error) {
            self.0.lock().unwrap().push(error.to_string());
        }
    }

    fn attached(comm: &Comm) -> Arc<Heard> {
        let heard = Arc::new(Heard::default());
        let weak: Weak<Heard> = Arc::downgrade(&heard);
        comm.attach(weak);
        heard
    }

    #[test]
    fn what_is_attached_hears_of_a_failure_once_on_every_rank() {
        let comms = Comm::threads(2, Config::default()).unwrap();
        let before: Vec<_> = comms.iter().map(attached).collect();
        comms[1].abort("enough");
        comms[1].abort("again");
        let after: Vec<_> = comms.iter().map(attached).collect();
        for heard in before.iter().chain(&after) {
            let heard = heard.0.lock().unwrap();
            assert_eq!(heard.len(), 1, "{heard:?}");
            assert!(heard[0].contains("rank 1: enough"), "{heard:?}");
        }
    }

    #[test]
    fn a_child_fails_with_its_parent_and_not_the_other_way() {
        let comms = Comm::threads(2, Config::default()).unwrap();
        let split = |comm: &Comm| {
            let child = comm.split(Some(0), 0).unwrap().unwrap();
            comm.attach_child(&child);
            child
        };
        let [first, second] = [(); 2].map(|()| {
            std::thread::scope(|scope| {
                let children: Vec<_> = comms.iter().map(|comm| scope.spawn(move || split(comm))).collect();
                children.into_iter().map(|child| child.join().unwrap()).collect::<Vec<_>>()
            })
        });
        let reason = |comm: &Comm| comm.barrier().unwrap_err().to_string();
        second[0].abort("the child");
        assert!(second.iter().all(|child| reason(child).contains("the child")));
        comms[0].abort("the parent");
        assert!(first.iter().all(|child| reason(child).contains("the parent")));
        assert!(second.iter().all(|child| reason(child).contains("the child")));
    }
}
