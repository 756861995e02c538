//! The end of a communicator: finalize, destroy, abort, revoke.
//!
//! A rank's memory is freed when the other ranks use it no more, so destroying synchronises with them. Programs destroy
//! one rank after the other in one thread, or in another order on another rank; neither may wait for what only the same
//! thread can do. So a rank is torn down in a separate thread. The caller waits for it for a while, unless this process
//! still has ranks of the same communicator to destroy.

use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tinynccl::cuda::Uncaptured;

use crate::abi::error::{Error, Result};
use crate::abi::export::export;
use crate::abi::{self, Status};
use crate::comm::communicator::{Communicator, Phase};
use crate::comm::gpu::Current;
use crate::comm::handle::{Handle, handle, take};
use crate::submit::group;

/// Longest wait of a caller for the other ranks' destroy; after that the rest is done in the background.
const DESTROY_WAIT: Duration = Duration::from_secs(2);
/// Longest wait of a caller for kernels that were signalled to exit. They poll every few milliseconds; a program aborts
/// its communicators one after the other, and kernels of the next one may keep the GPU busy until it is aborted, too.
const ABORT_WAIT: Duration = Duration::from_millis(200);

/// The ranks of a communicator in this process.
#[derive(Debug, Default)]
struct LocalRanks {
    /// Ranks that have not been destroyed.
    present: usize,
    /// Ranks whose teardown is under way.
    ending: usize,
}

static LOCAL: Mutex<Option<HashMap<[u8; 32], LocalRanks>>> = Mutex::new(None);
static CHANGED: Condvar = Condvar::new();

fn local() -> MutexGuard<'static, Option<HashMap<[u8; 32], LocalRanks>>> {
    LOCAL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Counts a rank of this process in the communicator with this token, whose rendezvous is complete.
pub(crate) fn joined(token: &[u8; 32]) {
    local().get_or_insert_default().entry(*token).or_default().present += 1;
}

/// Frees what a communicator has, in the background. Waits for that at most `wait`, and not while another rank of it in
/// this process is not destroyed yet.
pub(crate) fn tear_down(comm: Arc<Communicator>, wait: Duration) {
    let Some(token) = comm.connected().map(|ranks| ranks.roster.token) else {
        // Its thread, if it has one, ends by itself.
        return comm.stop();
    };
    let alone = {
        let mut local = local();
        let ranks = local.get_or_insert_default().entry(token).or_default();
        ranks.present = ranks.present.saturating_sub(1);
        ranks.ending += 1;
        ranks.present == 0
    };
    let name = comm.name().to_owned();
    let ended = move || {
        let mut local = local();
        if let Some(ranks) = local.get_or_insert_default().get_mut(&token) {
            ranks.ending -= 1;
            if ranks.ending == 0 && ranks.present == 0 {
                local.get_or_insert_default().remove(&token);
            }
        }
        CHANGED.notify_all();
    };
    let work = move || {
        // Another thread may capture a graph meanwhile.
        let uncaptured = Uncaptured::begin();
        drop(comm);
        drop(uncaptured);
        ended();
    };
    if let Err(e) = std::thread::Builder::new().name("tinynccl-free".to_owned()).spawn(work) {
        // The closure, and the communicator with it, was dropped here: its teardown is complete.
        log::debug!("communicator {name}: torn down without a thread: {e}");
        ended();
    }
    if alone && !wait.is_zero() {
        let ending = |local: &mut Option<HashMap<[u8; 32], LocalRanks>>| {
            local.as_ref().and_then(|local| local.get(&token)).is_some_and(|ranks| ranks.ending > 0)
        };
        let waited = CHANGED.wait_timeout_while(local(), wait, ending).unwrap_or_else(PoisonError::into_inner);
        if waited.1.timed_out() {
            log::info!(
                "communicator {name}: other ranks have not destroyed it for {DESTROY_WAIT:?}; it is freed when they do"
            );
        }
    }
}

/// Waits for the calls enqueued so far.
///
/// # Errors
/// A call ended early.
fn finish(comm: &Communicator) -> Result<()> {
    let Some(ranks) = comm.connected() else { return Ok(()) };
    let _current = Current::enter(ranks.device.context())?;
    Ok(ranks.device.finish()?)
}

fn destroy(comm: Handle) -> Result<()> {
    let comm = take(comm)?;
    if comm.phase() == Phase::Starting {
        log::info!("communicator {} is destroyed before it was ready", comm.name());
        comm.enter(Phase::Aborted);
    }
    let blocking = comm.is_blocking();
    if blocking && let Err(error) = finish(&comm) {
        log::info!("communicator {} is destroyed after: {}", comm.name(), error.text);
    }
    tear_down(comm, if blocking { DESTROY_WAIT } else { Duration::ZERO });
    Ok(())
}

fn abort(comm: Handle) -> Result<()> {
    let comm = take(comm)?;
    comm.enter(Phase::Aborted);
    comm.stop();
    if let Some(ranks) = comm.connected() {
        ranks.device.abort();
    }
    tear_down(comm, ABORT_WAIT);
    Ok(())
}

export! {
    /// Waits until the calls enqueued so far are done; later ones are errors. With `blocking = 0` it returns
    /// `ncclInProgress`, and `ncclCommGetAsyncError` reports the end. That also reports how the calls failed, if they
    /// did: as with NCCL, it is no error of this function, so a program that ends after a failure ends in good order.
    /// Another rank that fails or is destroyed after these calls is no failure of theirs.
    fn ncclCommFinalize / pncclCommFinalize [comm] (comm: Handle) {
        // As NCCL: ending nothing is no error.
        if comm.is_null() {
            return Ok(Status::Success);
        }
        group::recorded(handle(comm).and_then(|comm| {
            comm.ready()?;
            let run = |comm: &Arc<Communicator>| {
                if let Err(error) = finish(comm) {
                    log::warn!("communicator {} is finalized after: {}", comm.name(), error.text);
                    comm.fail(error);
                }
                comm.enter(Phase::Finalized);
                Ok(())
            };
            // No rank waits for another one's.
            group::submit_on(&comm, run, |_| ())
        }))
    }

    /// Waits for the calls enqueued so far, and destroys the communicator; its handle names none from now on.
    fn ncclCommDestroy / pncclCommDestroy [] (comm: Handle) {
        if comm.is_null() { Ok(()) } else { destroy(comm) }
    }

    /// Ends the calls that wait, from any thread, and destroys the communicator; its handle names none from now on. The
    /// other ranks get `ncclRemoteError`.
    fn ncclCommAbort / pncclCommAbort [] (comm: Handle) {
        if comm.is_null() { Ok(()) } else { abort(comm) }
    }

    /// Ends the calls that wait. The communicator takes no more, but can be split, shrunk and destroyed.
    fn ncclCommRevoke / pncclCommRevoke [comm] (comm: Handle, flags: c_int) {
        if comm.is_null() {
            return Ok(Status::Success);
        }
        group::recorded((|| {
            if flags != abi::REVOKE_DEFAULT {
                return Err(Error::argument(format!("revokeFlags is {flags}, expected 0 (NCCL_REVOKE_DEFAULT)")));
            }
            let comm = handle(comm)?;
            let ranks = comm.parent()?;
            comm.enter(Phase::Revoked);
            ranks.device.abort();
            Ok(Status::Success)
        })())
    }
}
