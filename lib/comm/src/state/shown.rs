//! Facts about a communicator that only reports need: its name, and the device that its calls run on.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Instant;

use crate::Comm;
use tinynccl_plan::wire::Header;
use tinynccl_sys::threads::lock;
use tinynccl_transport::bootstrap::Change;

/// Calls that run on a device, as a report shows them.
#[derive(Debug, Clone, Default)]
pub struct DeviceCalls {
    /// Number of the device, as CUDA counts.
    pub device: usize,
    /// Path of the data, as text.
    pub path: String,
    /// Number of the last call that was enqueued; 0 before the first.
    pub enqueued: u32,
    /// Number of the last call that has begun to exchange data, where it is known.
    pub begun: Option<u32>,
    /// Number of the last call that is over on the device, where it is known.
    pub finished: Option<u32>,
    /// The call that is the first not to be over, else the last one that was enqueued.
    pub call: Option<Header>,
    /// Calls that were enqueued, by the code of the collective.
    pub made: Vec<u64>,
    /// Calls of `made` that have begun to exchange data, where that is known.
    pub started: Option<Vec<u64>>,
    /// Calls of `made` that are over, where that is known.
    pub over: Option<Vec<u64>>,
}

/// A call that was enqueued on a device, as a record has it.
#[derive(Debug, Clone, Copy)]
pub struct Enqueued {
    /// The call, or a round of messages; its number counts both.
    pub call: Header,
    /// Number of the collective among the collectives; of a message, of the one before it.
    pub collective: u32,
    /// Receiver of our message.
    pub to: Option<usize>,
    /// Sender of the message to us.
    pub from: Option<usize>,
    /// Ticks when it was enqueued.
    pub ticks: u64,
}

/// A component that runs the calls of a communicator's ranks on their devices.
pub trait OnDevice: Send + Sync {
    /// Returns the number of the last call that was enqueued. It asks no device.
    fn enqueued(&self) -> u32;

    /// Returns the last calls, in order.
    fn recorded(&self) -> Vec<Enqueued>;

    /// Returns the calls so far. It may ask the device, and waits for it at most a second.
    fn calls(&self) -> DeviceCalls;
}

/// The numbers that a device gave last, and when a question found others than the one before.
#[derive(Default)]
struct Asked {
    last: Option<(Option<u32>, Option<u32>)>,
    moved: Option<Instant>,
}

/// Facts for reports, on one communicator.
#[derive(Default)]
pub(crate) struct Shown {
    /// Something outside of calls that this rank does with all others, by name, and since when.
    meets: Mutex<Option<(String, Instant)>>,
    name: OnceLock<String>,
    hidden: AtomicBool,
    device: Mutex<Option<Weak<dyn OnDevice>>>,
    /// Number of the last call that was enqueued, as of the heartbeats.
    change: Change,
    asked: Mutex<Asked>,
}

/// A wait for all other ranks, which ends with this.
pub(crate) struct Meets<'a>(&'a Shown);

impl Drop for Meets<'_> {
    fn drop(&mut self) {
        *lock(&self.0.meets) = None;
    }
}

impl Shown {
    /// From now on this rank waits for the others in `what`, which has the same name on all.
    pub(crate) fn meets(&self, what: &str) -> Meets<'_> {
        *lock(&self.meets) = Some((what.to_owned(), Instant::now()));
        Meets(self)
    }

    /// Name of what this rank waits for the others in, outside of calls, and the milliseconds since it came.
    pub(crate) fn met(&self) -> Option<(String, u64)> {
        lock(&self.meets).as_ref().map(|(what, since)| (what.clone(), since.elapsed().as_millis() as u64))
    }

    pub(crate) fn name(&self) -> Option<&str> {
        self.name.get().map(String::as_str)
    }

    /// True for one that the library uses by itself, as a part of another.
    pub(crate) fn is_hidden(&self) -> bool {
        self.hidden.load(Ordering::Relaxed)
    }

    /// The calls on the device, if it has one, and the milliseconds since they were last seen to go on.
    pub(crate) fn device(&self) -> Option<(DeviceCalls, u64)> {
        let calls = self.on_device()?.calls();
        let quiet = self.change.look(calls.enqueued.into(), 0);
        let mut asked = lock(&self.asked);
        let now = Some((calls.begun, calls.finished));
        if asked.last.is_some_and(|last| Some(last) != now) {
            asked.moved = Some(Instant::now());
        }
        asked.last = now;
        let moved = asked.moved.map_or(u64::MAX, |moved| moved.elapsed().as_millis() as u64);
        Some((calls, quiet.min(moved)))
    }

    /// Looks at the calls that were enqueued, so that a later report knows since when there are no others. True if
    /// there is a device.
    pub(crate) fn look(&self) -> bool {
        self.on_device().map(|device| self.change.look(device.enqueued().into(), 0)).is_some()
    }

    /// The last calls on the device, if it has one, with the numbers of the last that have begun and are over.
    pub(crate) fn recorded(&self) -> Option<(Vec<Enqueued>, DeviceCalls)> {
        let device = self.on_device()?;
        Some((device.recorded(), device.calls()))
    }

    fn on_device(&self) -> Option<Arc<dyn OnDevice>> {
        lock(&self.device).as_ref()?.upgrade()
    }
}

impl Comm {
    /// Names the communicator in reports ([`status`](crate::status)); the first name stays.
    pub fn set_name(&self, name: &str) {
        let _ = self.inner.state.shown.name.set(name.to_owned());
    }

    /// Leaves the communicator out of reports: it is a part of another one, which is shown.
    #[doc(hidden)]
    pub fn hide(&self) {
        self.inner.state.shown.hidden.store(true, Ordering::Relaxed);
    }

    /// Reports show the calls of `device` for this communicator's.
    #[doc(hidden)]
    pub fn show_device(&self, device: Weak<dyn OnDevice>) {
        *lock(&self.inner.state.shown.device) = Some(device);
        self.inner.look_at_device();
    }
}
