//! The ranks that a worker's communicators join.

use std::sync::{Arc, Weak};

use crate::path::names::{Names, Renamed};
use tinynccl_comm::{Attached, Comm};
use tinynccl_plan::error::Error;

/// A communicator of hosts, and the numbers that its ranks have in the device's communicator, where it is a part of
/// that.
#[derive(Debug)]
pub(crate) struct Reach {
    pub(super) comm: Comm,
    names: Option<Names>,
    /// Passes its failures on.
    _renamed: Option<Arc<Renamed>>,
}

impl Reach {
    pub(crate) fn new(comm: Comm, names: Option<Names>) -> Reach {
        Reach { comm, names, _renamed: None }
    }

    /// Notifies `one` when the communicator fails.
    pub(super) fn attach(&mut self, one: Weak<dyn Attached>) {
        let Some(names) = &self.names else { return self.comm.attach(one) };
        let renamed = Arc::new(Renamed { to: one, names: names.clone() });
        let weak: Weak<Renamed> = Arc::downgrade(&renamed);
        self._renamed = Some(renamed);
        self.comm.attach(weak);
    }

    /// An error of the communicator, in the ranks of the device's.
    pub(super) fn error(&self, error: Error) -> Error {
        match &self.names {
            Some(names) => names.error(error),
            None => error,
        }
    }
}

/// A worker's communicators.
#[derive(Debug)]
pub(crate) struct Lanes {
    /// Communicator of all ranks.
    pub(crate) all: Reach,
    /// Communicator of the ranks with our number on their hosts, where calls are divided among hosts.
    pub(crate) lane: Option<Reach>,
}
