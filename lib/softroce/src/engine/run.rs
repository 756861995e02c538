//! The engine's thread: waits for packets, timers, the doorbell, and changes of the interface.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::event::epoll;

use super::cell::{Cell, NEVER};
use super::polling::{Absence, Wait};
use super::{Shared, now, send};
use crate::sync::{lock, read};

/// Event numbers of the descriptors of the wait; sockets have the numbers from `SOCKETS` on.
pub(super) const BELL: u64 = 0;
pub(super) const TIMER: u64 = 1;
pub(super) const UNIX: u64 = 2;
pub(super) const WATCH: u64 = 3;
/// Bell, timer or watch.
pub(super) const CONTROL: u64 = 4;
pub(super) const SOCKETS: u64 = 5;

/// The socket that a number stands for; `None` for the slot's own.
pub(super) fn socket(number: u64) -> Option<usize> {
    number.checked_sub(SOCKETS).map(|socket| socket as usize)
}

/// Descriptors of one wait.
pub(super) const EVENTS: usize = 16;
pub(super) const AT_ONCE: rustix::time::Timespec = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };

/// Asks the scheduler to be woken at once. Programs that wait for an RDMA device often spin, on as many threads as
/// there are processors, and would keep the device from running: a thread with a shorter slice preempts one that has a
/// longer one, and with a higher share, which takes a privilege (`RLIMIT_NICE`), it still does when it has run more
/// than its share.
fn ask_to_be_woken_at_once() {
    const SLICE: u64 = 100_000;
    const HIGHER: i32 = 10;
    let size = size_of::<libc::sched_attr>() as u32;
    // SAFETY: all zeros are attributes of the usual policy; the calls fill and read them, of the size given. Kernels
    // before 6.12 ignore the slice.
    unsafe {
        let mut attributes: libc::sched_attr = std::mem::zeroed();
        if libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attributes, size, 0) != 0 {
            return;
        }
        let nice = attributes.sched_nice;
        attributes.sched_runtime = SLICE;
        attributes.sched_nice = (nice - HIGHER).max(-20);
        if libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) != 0 {
            attributes.sched_nice = nice;
            libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0);
        }
    }
}

/// Runs until `stop` is set.
pub(super) fn run(shared: &Shared) {
    ask_to_be_woken_at_once();
    let mut events = Vec::with_capacity(EVENTS);
    let mut absence = Absence::default();
    let (mut more, mut came) = (false, false);
    while !shared.stop.load(Ordering::Acquire) {
        events.clear();
        let nanos = |tv_nsec: u64| rustix::time::Timespec { tv_sec: 0, tv_nsec: tv_nsec as _ };
        let (epoll, time) = match absence.next(&shared.polling, now(), came) {
            Wait::Away(time) => (&shared.control, Some(nanos(time))),
            Wait::Not => (&shared.epoll, Some(AT_ONCE)),
            Wait::All => (&shared.epoll, None),
        };
        let time = if more { Some(AT_ONCE) } else { time };
        let mut result = epoll::wait(epoll, rustix::buffer::spare_capacity(&mut events), time.as_ref());
        if events.iter().any(|event| event.data.u64() == CONTROL) {
            events.reserve(EVENTS);
            result = epoll::wait(&shared.control, rustix::buffer::spare_capacity(&mut events), Some(&AT_ONCE));
        }
        if let Err(e) = result
            && e != rustix::io::Errno::INTR
        {
            log::error!("the engine of {} cannot wait: {e}", shared.interface);
            return;
        }
        (more, came) = (false, false);
        for event in &events {
            match event.data.u64() {
                BELL => {
                    let mut count = [0; 8];
                    let _ = rustix::io::read(&shared.bell, &mut count);
                }
                TIMER => expire(shared),
                WATCH => shared.watch(),
                CONTROL => {}
                number => {
                    came = true;
                    more |= shared.receive(socket(number));
                }
            }
        }
        more |= if shared.program_sends() { shared.has_listed() } else { continue_listed(shared) };
        if let Some(trace) = shared.faults.trace.as_ref().filter(|_| !more) {
            trace.flush();
        }
    }
}

/// Serves the queue pairs whose time has come, and sets the timer for the others.
fn expire(shared: &Shared) {
    shared.timer.fired();
    shared.look_after_canaries(now());
    let now = now();
    send::release(shared, now);
    let cells: Vec<Arc<Cell>> = read(&shared.cells).iter().flatten().cloned().collect();
    let table = read(&shared.memory);
    for cell in cells {
        let deadline = cell.deadline.load(Ordering::Acquire);
        if deadline <= now {
            cell.serve(shared, &table, false);
        } else if deadline != NEVER {
            shared.timer.at_latest(deadline);
        }
    }
}

/// Serves the queue pairs that had more to send than their time slice allowed. `true` where there are such again.
pub(super) fn continue_listed(shared: &Shared) -> bool {
    let listed = std::mem::take(&mut *lock(&shared.listed));
    if listed.is_empty() {
        return false;
    }
    let table = read(&shared.memory);
    for qpn in listed {
        if let Some(cell) = shared.cell(qpn) {
            cell.listed.store(false, Ordering::Release);
            cell.serve(shared, &table, false);
        }
    }
    shared.has_listed()
}
