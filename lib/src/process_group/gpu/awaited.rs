//! Tasks that await calls in streams: a thread looks at the calls' events, and wakes the tasks. It ends with the last
//! one.
//!
//! CUDA can call a function behind an event, but not at a deadline.

use std::sync::{Arc, Mutex};
use std::task::{Poll, Waker};
use std::time::Duration;

use super::enqueued::Enqueued;
use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::fork::Origin;
use tinynccl_sys::threads::lock;

/// Pause between two looks.
const PAUSE: Duration = Duration::from_micros(50);

struct Awaited {
    call: Arc<Enqueued>,
    waker: Waker,
}

/// Calls that tasks await, and the process whose thread looks at them; `None` while there is no thread.
static AWAITED: Mutex<(Option<Origin>, Vec<Awaited>)> = Mutex::new((None, Vec::new()));

/// The outcome of a call, or [`Poll::Pending`]; the waker is called when there is one.
pub(super) fn poll(call: &Arc<Enqueued>, waker: &Waker) -> Poll<Result<()>> {
    if call.is_over() {
        return Poll::Ready(call.wait());
    }
    if call.is_late() {
        return Poll::Ready(call.wait_within(Duration::ZERO));
    }
    let mut awaited = lock(&AWAITED);
    let (thread, calls) = &mut *awaited;
    if thread.is_some_and(|origin| !origin.is_here()) {
        // A forked child has its parent's list, but not its thread.
        *thread = None;
        std::mem::take(calls).into_iter().for_each(std::mem::forget);
    }
    match calls.iter_mut().find(|other| Arc::ptr_eq(&other.call, call)) {
        Some(known) => known.waker.clone_from(waker),
        None => calls.push(Awaited { call: call.clone(), waker: waker.clone() }),
    }
    if thread.is_none() {
        if let Err(e) = std::thread::Builder::new().name("tinynccl-await".to_owned()).spawn(look) {
            return Poll::Ready(Err(Error::io("await", "starting the thread that wakes tasks", &e)));
        }
        *thread = Some(Origin::here());
    }
    Poll::Pending
}

/// Wakes the tasks whose calls are over or late, until none is left.
fn look() {
    loop {
        let mut awaited = lock(&AWAITED);
        let (thread, calls) = &mut *awaited;
        let over: Vec<Awaited> = calls.extract_if(.., |one| one.call.is_over() || one.call.is_late()).collect();
        let ends = calls.is_empty();
        if ends {
            *thread = None;
        }
        drop(awaited);
        over.into_iter().for_each(|one| one.waker.wake());
        if ends {
            return;
        }
        std::thread::sleep(PAUSE);
    }
}
