//! The objects that events name, asynchronous ones and those of completion channels. A program's thread may look at an
//! object until it has acknowledged the event, so destroying the object waits for that, as in rdma-core
//! (`ibv_get_async_event(3)`).

use std::collections::HashMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use softroce::Affected;

/// Longest wait for a program to acknowledge the events of an object that it destroys.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// The objects of one device that events may name.
#[derive(Default)]
pub(crate) struct Named {
    objects: Mutex<Objects>,
    acknowledged: Condvar,
}

#[derive(Default)]
struct Objects {
    /// Objects by address.
    live: HashMap<usize, Object>,
    /// Addresses of queue pairs, by number.
    qps: HashMap<u32, usize>,
}

#[derive(Default)]
struct Object {
    /// Events that the program has, and has not acknowledged.
    events: u32,
    /// A queue pair's number; `None` for other objects.
    number: Option<u32>,
}

impl Named {
    fn lock(&self) -> MutexGuard<'_, Objects> {
        self.objects.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a completion queue or a shared receive queue, whose events have its address as their cookie.
    pub(crate) fn add(&self, address: usize) {
        self.lock().live.insert(address, Object::default());
    }

    pub(crate) fn add_qp(&self, number: u32, address: usize) {
        let mut objects = self.lock();
        objects.qps.insert(number, address);
        objects.live.insert(address, Object { events: 0, number: Some(number) });
    }

    /// Addresses of all queue pairs.
    pub(crate) fn qps(&self) -> Vec<usize> {
        self.lock().qps.values().copied().collect()
    }

    /// The address of the object that an event concerns, for the program; `None` where it is destroyed.
    pub(crate) fn deliver(&self, affected: Affected) -> Option<usize> {
        let mut objects = self.lock();
        let address = match affected {
            Affected::Qp(number) => *objects.qps.get(&number)?,
            Affected::Cq(cookie) | Affected::Srq(cookie) => cookie as usize,
            Affected::Port(_) => return None,
        };
        objects.live.get_mut(&address)?.events += 1;
        Some(address)
    }

    /// Records that the program has acknowledged `count` events of an object.
    pub(crate) fn acknowledge(&self, address: usize, count: u32) {
        if let Some(object) = self.lock().live.get_mut(&address) {
            object.events = object.events.saturating_sub(count);
            self.acknowledged.notify_all();
        }
    }

    /// Removes an object once all events that name it are acknowledged. `false` where they are not after `patience`.
    pub(crate) fn remove(&self, address: usize, patience: Duration) -> bool {
        let busy = |objects: &mut Objects| objects.live.get(&address).is_some_and(|object| object.events > 0);
        let waited = self.acknowledged.wait_timeout_while(self.lock(), patience, busy);
        let (mut objects, outcome) = waited.unwrap_or_else(PoisonError::into_inner);
        if outcome.timed_out() {
            return false;
        }
        if let Some(number) = objects.live.remove(&address).and_then(|object| object.number) {
            objects.qps.remove(&number);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_object_stays_until_its_events_are_acknowledged() {
        let named = Named::default();
        named.add_qp(7, 0x1000);
        named.add(0x2000);
        assert_eq!([named.deliver(Affected::Qp(7)), named.deliver(Affected::Qp(7))], [Some(0x1000); 2]);
        assert!(named.remove(0x2000, Duration::ZERO), "no event names it");
        assert_eq!(named.deliver(Affected::Cq(0x2000)), None, "it is gone");
        named.acknowledge(0x1000, 1);
        assert!(!named.remove(0x1000, Duration::ZERO), "one of two is acknowledged");
        named.acknowledge(0x1000, 1);
        assert!(named.remove(0x1000, Duration::ZERO));
        assert_eq!(named.deliver(Affected::Qp(7)), None);
        named.acknowledge(0x1000, 1);
    }
}
