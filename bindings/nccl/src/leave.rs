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

use crate::abi::{self, Status};
use crate::export::export;
use crate::fault::{Fault, Result};
use crate::gpu::Current;
use crate::group;
use crate::handle::{Handle, handle, take};
use crate::member::{Member, Phase};

/// Longest wait of a caller for the other ranks' destroy; after that the rest is done in the background.
const PATIENCE: Duration = Duration::from_secs(2);
/// Longest wait of a caller for kernels that were signalled to exit. They poll every few milliseconds; a program aborts
/// its communicators one after the other, and kernels of the next one may keep the GPU busy until it is aborted, too.
const ABORTING: Duration = Duration::from_millis(200);

/// The ranks of a communicator in this process.
#[derive(Debug, Default)]
struct Here {
    /// Ranks that have not been destroyed.
    present: usize,
    /// Ranks whose teardown is under way.
    leaving: usize,
}

static HERE: Mutex<Option<HashMap<[u8; 32], Here>>> = Mutex::new(None);
static CHANGED: Condvar = Condvar::new();

fn here() -> MutexGuard<'static, Option<HashMap<[u8; 32], Here>>> {
    HERE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Counts a rank of the communicator with this token, whose rendezvous is complete.
pub(crate) fn arrived(token: &[u8; 32]) {
    here().get_or_insert_default().entry(*token).or_default().present += 1;
}

/// Frees what a communicator has, in the background. Waits for that at most `patience`, and not while another rank of
/// it in this process is not destroyed yet.
pub(crate) fn leave(member: Arc<Member>, patience: Duration) {
    let Some(token) = member.any_ranks().map(|ranks| ranks.roster.token) else {
        // Its thread, if it has one, ends by itself.
        return member.stop();
    };
    let alone = {
        let mut here = here();
        let ranks = here.get_or_insert_default().entry(token).or_default();
        ranks.present = ranks.present.saturating_sub(1);
        ranks.leaving += 1;
        ranks.present == 0
    };
    let name = member.name().to_owned();
    let left = move || {
        let mut here = here();
        if let Some(ranks) = here.get_or_insert_default().get_mut(&token) {
            ranks.leaving -= 1;
            if ranks.leaving == 0 && ranks.present == 0 {
                here.get_or_insert_default().remove(&token);
            }
        }
        CHANGED.notify_all();
    };
    let work = move || {
        // Another thread may capture a graph meanwhile.
        let uncaptured = Uncaptured::begin();
        drop(member);
        drop(uncaptured);
        left();
    };
    if let Err(e) = std::thread::Builder::new().name("tinynccl-leave".to_owned()).spawn(work) {
        // The closure, and the communicator with it, was dropped here: its teardown is complete.
        log::debug!("communicator {name}: leaving without a thread: {e}");
        left();
    }
    if alone && !patience.is_zero() {
        let left = |here: &mut Option<HashMap<[u8; 32], Here>>| {
            here.as_ref().and_then(|here| here.get(&token)).is_some_and(|ranks| ranks.leaving > 0)
        };
        let waited = CHANGED.wait_timeout_while(here(), patience, left).unwrap_or_else(PoisonError::into_inner);
        if waited.1.timed_out() {
            log::info!(
                "communicator {name}: other ranks have not left it for {PATIENCE:?}; it is freed when they have"
            );
        }
    }
}

/// Waits for the calls enqueued so far.
///
/// # Errors
/// A call ended early.
fn finish(member: &Member) -> Result<()> {
    let Some(ranks) = member.any_ranks() else { return Ok(()) };
    let _current = Current::enter(ranks.device.context())?;
    Ok(ranks.device.finish()?)
}

fn destroy(comm: Handle) -> Result<()> {
    let member = take(comm)?;
    if member.phase() == Phase::Starting {
        log::info!("communicator {} is destroyed before it was ready", member.name());
        member.enter(Phase::Aborted);
    }
    let blocking = member.is_blocking();
    if blocking && let Err(fault) = finish(&member) {
        log::info!("communicator {} is destroyed after: {}", member.name(), fault.text);
    }
    leave(member, if blocking { PATIENCE } else { Duration::ZERO });
    Ok(())
}

fn abort(comm: Handle) -> Result<()> {
    let member = take(comm)?;
    member.enter(Phase::Aborted);
    member.stop();
    if let Some(ranks) = member.any_ranks() {
        ranks.device.abort();
    }
    leave(member, ABORTING);
    Ok(())
}

export! {
    /// Waits until the calls enqueued so far are done; later ones are errors. With `blocking = 0` it returns
    /// `ncclInProgress`, and `ncclCommGetAsyncError` says when that is so. That also reports how the calls failed, if
    /// they did: as with NCCL, it is no error of this function, so a program that ends after a failure ends in good
    /// order. Another rank that fails or is destroyed after these calls is no failure of theirs.
    fn ncclCommFinalize / pncclCommFinalize [comm] (comm: Handle) {
        // As NCCL: ending nothing is no error.
        if comm.is_null() {
            return Ok(Status::Success);
        }
        group::noted(handle(comm).and_then(|member| {
            member.ranks()?;
            let run = |member: &Arc<Member>| {
                if let Err(fault) = finish(member) {
                    log::warn!("communicator {} is finalized after: {}", member.name(), fault.text);
                    member.fail(fault);
                }
                member.enter(Phase::Finalized);
                Ok(())
            };
            // No rank waits for another one's.
            group::meet(&member, run, |_| ())
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
        group::noted((|| {
            if flags != abi::REVOKE_DEFAULT {
                return Err(Fault::argument(format!("revokeFlags is {flags}, expected 0 (NCCL_REVOKE_DEFAULT)")));
            }
            let member = handle(comm)?;
            let ranks = member.parent()?;
            member.enter(Phase::Revoked);
            ranks.device.abort();
            Ok(Status::Success)
        })())
    }
}
