//! A queue pair as threads share it.

use std::cell::RefCell;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::send::{Sending, Way};
use super::{Shared, now};
use crate::memory::Table;
use crate::qp::{Machine, Outbox, State, Turn};
use crate::sync::{lock, read};
use crate::wire::icrc::Route;
use crate::wire::{Packet, Service};

/// Packets that a queue pair makes before they are sent.
const OUTBOX: usize = 64;
/// Times that this happens before others get their turn.
const ROUNDS: usize = 16;
/// No timer.
pub(super) const NEVER: u64 = u64::MAX;

pub(super) struct Sides {
    out: Outbox,
    sending: Sending,
}

impl Default for Sides {
    fn default() -> Sides {
        Sides { out: Outbox::new(OUTBOX), sending: Sending::default() }
    }
}

thread_local! {
    /// Each thread that sends has its own room for it.
    static SIDES: RefCell<Sides> = RefCell::default();
}

/// A queue pair's machine, and the way to its peer.
struct Inner {
    machine: Machine,
    way: Option<Way>,
}

/// A queue pair as threads share it.
///
/// Locks are taken in this order: who receives, the table of regions (for reading), a queue pair, a completion queue.
pub(crate) struct Cell {
    inner: Mutex<Inner>,
    /// When its machine wants to be called.
    pub(super) deadline: AtomicU64,
    /// It is in the engine's list of those with more to send.
    pub(super) listed: AtomicBool,
}

impl Cell {
    pub(super) fn new(machine: Machine) -> Cell {
        Cell {
            inner: Mutex::new(Inner { machine, way: None }),
            deadline: AtomicU64::new(NEVER),
            listed: AtomicBool::new(false),
        }
    }

    /// Looks at the machine or posts to it, without sending.
    pub(crate) fn with<R>(&self, f: impl FnOnce(&mut Machine) -> R) -> R {
        f(&mut lock(&self.inner).machine)
    }

    /// Changes the machine, and sends what it has to send then.
    pub(crate) fn act<R>(&self, shared: &Shared, f: impl FnOnce(&mut Machine) -> R) -> R {
        let table = read(&shared.memory);
        let mut inner = lock(&self.inner);
        let result = f(&mut inner.machine);
        self.serve_locked(shared, &table, &mut inner);
        result
    }

    /// Changes attributes: the way to the peer may be another then.
    pub(crate) fn modify<R>(&self, shared: &Shared, f: impl FnOnce(&mut Machine) -> R) -> R {
        let table = read(&shared.memory);
        let mut inner = lock(&self.inner);
        // In another state it may acknowledge nothing.
        inner.machine.hurry();
        self.serve_locked(shared, &table, &mut inner);
        let result = f(&mut inner.machine);
        let attr = &inner.machine.attr;
        let way = match (&attr.path, inner.machine.parts.service) {
            (Some(path), Service::Rc | Service::Uc) if attr.state != State::Reset => {
                Way::new(shared, path, attr.dest_qpn)
            }
            _ => None,
        };
        inner.way = way;
        self.serve_locked(shared, &table, &mut inner);
        result
    }

    /// Takes a packet. [`Cell::serve`] sends what it calls for.
    pub(super) fn receive(&self, packet: &Packet<'_>, route: &Route, table: &Table) {
        let mut inner = lock(&self.inner);
        // A connection's packets come from its peer's address.
        if let Some(path) = &inner.machine.attr.path
            && path.dst != route.src.ip()
        {
            log::debug!("queue pair {:#x}: a packet from {}, not from its peer", inner.machine.parts.qpn, route.src);
            return;
        }
        let mut none = Outbox::new(0);
        inner.machine.receive(packet, route, &mut Turn { now: now(), memory: table, out: &mut none });
    }

    /// Sends what there is to send.
    pub(super) fn serve(&self, shared: &Shared, table: &Table) -> bool {
        self.serve_locked(shared, table, &mut lock(&self.inner))
    }

    /// The process ends: sends the acknowledgement that waits, if nobody is at work with the queue pair. `false` where
    /// somebody is.
    pub(super) fn finish(&self, shared: &Shared, table: &Table, sides: &mut Sides) -> bool {
        let Ok(mut inner) = self.inner.try_lock() else { return false };
        let inner = &mut *inner;
        // What was received but not served yet begins to wait in the first round.
        for _ in 0..2 {
            inner.machine.hurry();
            sides.out.clear();
            inner.machine.service(&mut Turn { now: now(), memory: table, out: &mut sides.out });
            // SAFETY: the reference to the table is the lock that its pieces need.
            unsafe { sides.sending.flush(shared, &sides.out, inner.way.as_mut()) };
        }
        true
    }

    /// `true` where there is more to send, which the engine then does.
    fn serve_locked(&self, shared: &Shared, table: &Table, inner: &mut Inner) -> bool {
        let more = SIDES.with_borrow_mut(|sides| {
            let mut more = true;
            for _ in 0..ROUNDS {
                let out = &mut sides.out;
                out.clear();
                more = inner.machine.service(&mut Turn { now: now(), memory: table, out });
                // SAFETY: the reference to the table is the lock that its pieces need.
                unsafe { sides.sending.flush(shared, out, inner.way.as_mut()) };
                if !more {
                    break;
                }
            }
            sides.out.clear();
            more
        });
        let deadline = inner.machine.next_timer().unwrap_or(NEVER);
        self.deadline.store(deadline, Ordering::Release);
        shared.timer.at_latest(deadline);
        if more {
            shared.list(inner.machine.parts.qpn, self);
        }
        more
    }
}
