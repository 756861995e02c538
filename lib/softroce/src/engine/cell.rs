//! A queue pair as threads share it.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Mutex, MutexGuard, TryLockError};

use super::send::{Sending, Way};
use super::{Shared, now};
use crate::memory::{Table, begin_turn};
use crate::qp::{Machine, Outbox, State, Turn};
use crate::sync::{lock, read};
use crate::wire::icrc::Route;
use crate::wire::{Packet, Service};

/// Packets that a queue pair makes before they are sent.
const OUTBOX: usize = 64;
/// Batches that one call sends before other queue pairs are served.
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
    /// Buffers of each thread that sends.
    static SIDES: RefCell<Sides> = RefCell::default();
}

/// A queue pair as threads share it.
///
/// Its machine is locked while packets are made of requests and while one is taken in, not while they are sent: a
/// thread that sends a long message does not block one that has received an acknowledgement.
///
/// Locks are taken in this order: the receiving side, the table of regions (for reading), the sending side (`way`), a
/// machine, a completion queue.
pub(crate) struct Cell {
    qpn: u32,
    /// Lock of the sending side and the route to the peer: packets leave in the order in which they were made. `None`
    /// without one.
    way: Mutex<Option<Way>>,
    machine: Mutex<Machine>,
    /// True if there may be more to send than the sending thread has seen.
    again: AtomicBool,
    /// Time at which the machine wants to be called, in nanoseconds of the monotonic clock; [`NEVER`] for none.
    pub(super) deadline: AtomicU64,
    /// True while the queue pair is in the engine's list of those with more to send.
    pub(super) listed: AtomicBool,
}

impl Cell {
    pub(super) fn new(machine: Machine) -> Cell {
        Cell {
            qpn: machine.parts.qpn,
            way: Mutex::default(),
            machine: Mutex::new(machine),
            again: AtomicBool::new(false),
            deadline: AtomicU64::new(NEVER),
            listed: AtomicBool::new(false),
        }
    }

    /// Looks at the machine or posts to it, without sending.
    pub(crate) fn with<R>(&self, f: impl FnOnce(&mut Machine) -> R) -> R {
        f(&mut lock(&self.machine))
    }

    /// Changes the machine. What it has to send then is sent by this thread, or by one that is sending already.
    pub(crate) fn act<R>(&self, shared: &Shared, f: impl FnOnce(&mut Machine) -> R) -> R {
        let table = read(&shared.memory);
        let result = self.with(f);
        self.serve(shared, &table, shared.programs_wait());
        result
    }

    /// Sends at once the acknowledgement that is owed. For a queue pair that goes.
    pub(crate) fn hurry(&self, shared: &Shared) {
        let table = read(&shared.memory);
        let mut way = lock(&self.way);
        self.with(Machine::hurry);
        self.send(shared, &table, &mut way, true);
    }

    /// Changes attributes, which may change the route to the peer.
    pub(crate) fn modify<R>(&self, shared: &Shared, f: impl FnOnce(&mut Machine) -> R) -> R {
        let table = read(&shared.memory);
        let mut way = lock(&self.way);
        // In another state it may acknowledge nothing.
        self.with(Machine::hurry);
        self.send(shared, &table, &mut way, true);
        let result = {
            let mut machine = lock(&self.machine);
            let result = f(&mut machine);
            let attr = &machine.attr;
            *way = match (&attr.path, machine.parts.service) {
                (Some(path), Service::Rc | Service::Uc) if attr.state != State::Reset => {
                    Way::new(shared, path, attr.dest_qpn)
                }
                _ => None,
            };
            let local = attr.path.as_ref().is_some_and(|path| path.local);
            if !local && !matches!(attr.state, State::Reset | State::Init) {
                shared.expect_others();
            }
            result
        };
        drop(way);
        self.serve(shared, &table, true);
        result
    }

    /// Receives a packet. [`Cell::serve`] sends what it calls for.
    pub(super) fn receive(&self, packet: &Packet<'_>, route: &Route, table: &Table, now: u64) {
        let mut machine = lock(&self.machine);
        // A connection's packets come from its peer's address.
        if let Some(path) = &machine.attr.path
            && path.dst != route.src.ip()
        {
            log::debug!("queue pair {:#x}: a packet from {}, not from its peer", self.qpn, route.src);
            return;
        }
        let mut none = Outbox::new(0);
        machine.receive(packet, route, &mut Turn { now, memory: table, out: &mut none });
    }

    /// Sends what there is to send. If another thread is sending, that one looks again, or this one `waits` for it.
    pub(super) fn serve(&self, shared: &Shared, table: &Table, waits: bool) {
        self.serve_parts(shared, table, waits, true);
    }

    /// Sends answers, and lists the queue pair if it has requests: a program's thread sends them, see `polling`.
    pub(super) fn answer(&self, shared: &Shared, table: &Table) {
        self.serve_parts(shared, table, false, false);
    }

    fn serve_parts(&self, shared: &Shared, table: &Table, waits: bool, mut requests: bool) {
        loop {
            self.again.store(true, Ordering::Relaxed);
            // A thread that fails to get the lock has set `again` before; the thread that releases it reads `again`
            // afterwards. One of the two sees the other, given the fences.
            fence(Ordering::SeqCst);
            let Some(mut way) = (if waits { Some(lock(&self.way)) } else { self.try_way() }) else { return };
            self.again.store(false, Ordering::Relaxed);
            let more = self.send(shared, table, &mut way, requests);
            drop(way);
            if more {
                // The engine goes on, and must find the lock free.
                return shared.list(self.qpn, self);
            }
            fence(Ordering::SeqCst);
            if !self.again.load(Ordering::Relaxed) {
                return;
            }
            // Another thread may have failed to get the lock for requests.
            requests = true;
        }
    }

    fn try_way(&self) -> Option<MutexGuard<'_, Option<Way>>> {
        match self.way.try_lock() {
            Ok(way) => Some(way),
            Err(TryLockError::Poisoned(e)) => Some(e.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Sends the acknowledgement that is owed, as the process ends. `false` where another thread holds the queue pair.
    pub(super) fn finish(&self, shared: &Shared, table: &Table, sides: &mut Sides) -> bool {
        let (Some(mut way), Ok(mut machine)) = (self.try_way(), self.machine.try_lock()) else { return false };
        begin_turn();
        machine.hurry();
        sides.out.clear();
        machine.service(&mut Turn { now: now(), memory: table, out: &mut sides.out });
        // SAFETY: the reference to the table is the lock that its pieces need.
        unsafe { sides.sending.flush(shared, &sides.out, way.as_mut()) };
        true
    }

    /// Sends up to `ROUNDS` batches, or until the kernel's queue is full: a thread that posts does not wait for the
    /// wire. `true` where there is more to send.
    fn send(&self, shared: &Shared, table: &Table, way: &mut Option<Way>, requests: bool) -> bool {
        begin_turn();
        SIDES.with_borrow_mut(|sides| {
            let out = &mut sides.out;
            for _ in 0..ROUNDS {
                out.clear();
                let (more, left, deadline) = {
                    let mut machine = lock(&self.machine);
                    if let Some(way) = way.as_mut().filter(|_| requests) {
                        way.spread(shared, &machine);
                    }
                    let mut turn = Turn { now: now(), memory: table, out };
                    let more = if requests { machine.service(&mut turn) } else { machine.service_answers(&mut turn) };
                    (more, !requests && machine.has_requests(), machine.next_timer().unwrap_or(NEVER))
                };
                self.deadline.store(deadline, Ordering::Release);
                shared.timer.at_latest(deadline);
                // SAFETY: the reference to the table is the lock that its pieces need.
                let waited = unsafe { sides.sending.flush(shared, out, way.as_mut()) };
                if !more {
                    return left;
                }
                if waited {
                    break;
                }
            }
            true
        })
    }
}
