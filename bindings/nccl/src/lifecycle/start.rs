//! Steps that all ways of making a communicator share.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;

use tinynccl::cuda::{DeviceComm, Uncaptured};
use tinynccl::{Comm, interrupt};

use super::finalize;
use crate::abi::Status;
use crate::abi::error::{Error, Result};
use crate::comm::communicator::{Communicator, Connected, Roster};
use crate::comm::gpu::{self, Current};
use crate::comm::handle::{self, Handle};
use crate::ras;
use crate::rendezvous::{address, digest, listener};
use crate::submit::group;
use crate::submit::jobs::Job;

/// Begins a communicator: gives the caller its handle, and runs `connect` now, at the end of the group, or in the
/// background. Errors of what is done now are the caller's; after them there is no handle.
/// `refuse` notifies the ranks of the parent that this one does not take part.
pub(crate) fn begin(
    new: &mut Handle,
    comm: Communicator,
    parent: Option<&Arc<Communicator>>,
    connect: impl FnOnce(&Arc<Communicator>) -> Result<Connected> + Send + 'static,
    refuse: impl FnOnce(&Error) + Send + 'static,
) -> Result<Status> {
    ras::start();
    let comm = Arc::new(comm);
    let named = handle::new(comm.clone());
    *new = named;
    // As NCCL: the parent decides whether the caller waits, or without one the new communicator.
    let (own, blocking) = (comm.clone(), parent.unwrap_or(&comm).is_blocking());
    let stops: Vec<Arc<Communicator>> = parent.into_iter().chain([&comm]).cloned().collect();
    let creation = Creation(own.clone());
    let run = move || {
        let _creation = creation;
        let outcome = interruptible(stops, || connect(&own));
        let joined = outcome.as_ref().is_ok_and(|connected| {
            finalize::joined(&connected.roster.token);
            true
        });
        own.started(outcome).inspect_err(|_| {
            if joined {
                finalize::tear_down(own.clone(), Duration::ZERO);
            }
        })
    };
    // Jobs of one parent stay in order.
    let ordered_by = parent.unwrap_or(&comm).clone();
    let refused = comm.clone();
    let refuse = move |why: &Error| {
        refused.fail(why.clone());
        refuse(why);
    };
    let outcome = group::submit(Job { comm: ordered_by, blocking, run: Box::new(run), refuse: Box::new(refuse) });
    if outcome.is_err() {
        *new = std::ptr::null_mut();
        let _ = handle::take(named);
    }
    outcome
}

/// A communicator that is being created. It fails if the thread that creates it panics.
struct Creation(Arc<Communicator>);

impl Drop for Creation {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.fail(Error::internal("making the communicator panicked: a bug in this library, please report it"));
        }
    }
}

/// Adds a communicator of GPUs to that of the hosts, with the GPU of `comm`.
pub(crate) fn with_gpu(host: Comm, comm: &Communicator) -> Result<Connected> {
    let context = gpu::context(comm.ordinal())?;
    let (_current, _uncaptured) = (Current::enter(&context)?, Uncaptured::begin());
    let device = DeviceComm::new(&host, &context)?;
    let roster = roster(&host)?;
    comm.identify(&roster.token);
    // Reports show the device's communicator: this one only serves it.
    host.hide();
    device.set_name(comm.name());
    let (rank, size) = (host.rank(), host.size());
    log::info!(
        "communicator {}: rank {rank} of {size} on GPU {}, path {} ({}), {} MiB",
        comm.name(),
        comm.ordinal(),
        device.path(),
        device.path_reason(),
        device.window_bytes() >> 20
    );
    Ok(Connected { device: Arc::new(device), host, roster })
}

/// Exchanges the table of the ranks.
fn roster(host: &Comm) -> Result<Roster> {
    let token = digest::random()?;
    if host.size() == 1 {
        return Ok(Roster { token, listeners: vec![Vec::new()] });
    }
    let ours: Vec<u8> = listener::addresses(host.config())?.into_iter().flat_map(address::encode).collect();
    let all = host.exchange_bytes("roster", &[&token[..], &ours].concat())?;
    let broken = || Error::internal("a rank's addresses do not parse: do all ranks load the same library?");
    let parts: Vec<(&[u8; 32], &[u8])> =
        all.iter().map(|bytes| bytes.split_first_chunk().ok_or_else(broken)).collect::<Result<_>>()?;
    let listeners = parts.iter().map(|(_, rest)| address::decode(rest).ok_or_else(broken)).collect::<Result<_>>()?;
    let token = parts.first().map(|(token, _)| **token).ok_or_else(broken)?;
    Ok(Roster { token, listeners })
}

thread_local! {
    /// The communicator that this thread makes, and the one from which it makes it.
    static CREATING: RefCell<Vec<Arc<Communicator>>> = const { RefCell::new(Vec::new()) };
}

/// Runs `work` so that an abort of one of `comms` ends its waits.
pub(crate) fn interruptible<R>(comms: Vec<Arc<Communicator>>, work: impl FnOnce() -> R) -> R {
    /// Puts back what was there before, also when the work unwinds.
    struct Restore(Vec<Arc<Communicator>>);
    impl Drop for Restore {
        fn drop(&mut self) {
            CREATING.set(std::mem::take(&mut self.0));
        }
    }
    let _restore = Restore(CREATING.replace(comms));
    interrupt::watched(|| CREATING.with_borrow(|creating| creating.iter().any(|comm| comm.is_stopped())), work)
}
