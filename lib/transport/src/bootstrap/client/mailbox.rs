//! State shared by the callers of a session and its thread.

use std::collections::HashMap;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Instant;

use crate::bootstrap::ledger::progress::{Health, Progress};
use crate::bootstrap::wire::connection::encode;
use crate::bootstrap::wire::event::Event;
use crate::bootstrap::wire::message::{Failure, ToStore};
use tinynccl_sys::backoff::SLICE;
use tinynccl_sys::doorbell::Doorbell;
use tinynccl_sys::interrupt::asked_to_stop;
use tinynccl_sys::threads::{left, lock};

pub(crate) type Handler = Arc<dyn Fn(&Event) + Send + Sync>;

/// State shared by the callers' threads and the monitor.
pub(crate) struct Mailbox {
    pub(crate) bell: Arc<Doorbell>,
    pub(crate) outbox: Mutex<Outbox>,
    pub(crate) answers: Mutex<Answers>,
    pub(crate) changed: Condvar,
    pub(crate) events: Mutex<Events>,
    pub(crate) tracked: Mutex<Vec<(u32, Arc<Progress>)>>,
    /// This process did not run for several heartbeats.
    pub(crate) stopped: Arc<AtomicBool>,
}

/// Frames to send, and a flag for the goodbye after them.
#[derive(Default)]
pub(crate) struct Outbox {
    pub(crate) frames: Vec<u8>,
    pub(crate) bye: bool,
    /// A heartbeat is due at once.
    pub(crate) beat: bool,
}

/// Answers that callers wait for: `None` until they come.
#[derive(Default)]
pub(crate) struct Answers {
    pub(crate) exchanges: HashMap<String, Option<Exchanged>>,
    pub(crate) healths: HashMap<u64, Option<Vec<Health>>>,
    pub(crate) next_ticket: u64,
    /// Reason for which no more answers will come; `None` while they do.
    pub(crate) over: Option<String>,
}

/// Outcome of an exchange: the members' values.
pub(crate) type Exchanged = Result<Vec<Vec<u8>>, Failure>;

#[derive(Default)]
pub(crate) struct Events {
    pub(crate) list: Vec<Event>,
    /// Handlers, with the communicator that each belongs to; `None` for one that stays as long as the session.
    pub(crate) handlers: Vec<(Option<u32>, Handler)>,
}

impl Mailbox {
    pub(crate) fn new(bell: Arc<Doorbell>) -> Mailbox {
        Mailbox {
            bell,
            outbox: Mutex::default(),
            answers: Mutex::default(),
            changed: Condvar::new(),
            events: Mutex::default(),
            tracked: Mutex::default(),
            stopped: Arc::default(),
        }
    }

    pub(crate) fn send(&self, message: &ToStore) {
        match encode(message) {
            Ok(frame) => lock(&self.outbox).frames.extend_from_slice(&frame),
            // Callers check sizes before.
            Err(e) => return log::error!("rendezvous: {e}"),
        }
        self.bell.ring();
    }

    /// Waits until `ready`, at most until `deadline` or until the caller wants it to end; whether it came to that.
    pub(crate) fn wait_for(&self, deadline: Instant, ready: impl Fn(&Answers) -> bool) -> bool {
        let mut answers = lock(&self.answers);
        loop {
            let left = left(deadline);
            let wait = self.changed.wait_timeout_while(answers, left.min(SLICE), |a| !ready(a));
            let outcome;
            (answers, outcome) = wait.unwrap_or_else(PoisonError::into_inner);
            if !outcome.timed_out() {
                return true;
            }
            if left <= SLICE {
                return false;
            }
            // The check may run code of the program, which may make calls itself.
            drop(answers);
            if asked_to_stop() {
                return false;
            }
            answers = lock(&self.answers);
        }
    }

    /// Changes the answers and wakes who waits for them.
    pub(crate) fn answer(&self, change: impl FnOnce(&mut Answers)) {
        change(&mut lock(&self.answers));
        self.changed.notify_all();
    }

    /// Remembers an event and calls the handlers.
    pub(crate) fn dispatch(&self, event: Event) {
        let handlers = {
            let mut events = lock(&self.events);
            events.list.push(event.clone());
            events.handlers.clone()
        };
        for (_, handler) in handlers {
            let call = std::panic::AssertUnwindSafe(|| handler(&event));
            if std::panic::catch_unwind(call).is_err() {
                log::error!("an event handler panicked at {event:?}");
            }
        }
    }
}
