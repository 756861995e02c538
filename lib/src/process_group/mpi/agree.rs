//! Before every collective, the ranks exchange their calls. In MPI a disagreement is undefined behaviour, and the wait
//! for a missing rank has no deadline. This check names both.

use tinynccl_comm::Inner;
use tinynccl_comm::RawCall;
use tinynccl_comm::calls::table::asked;
use tinynccl_comm::executor::Supervisor;
use tinynccl_plan::error::{Error, Result};
use tinynccl_plan::wire::{Algorithm, Header};

/// Words of a header.
const WORDS: usize = Header::BYTES / size_of::<u64>();

/// Waits until every rank is in `call`.
///
/// # Errors
/// [`Error::Mismatch`] naming two ranks and their calls; [`Error::Timeout`] naming the missing ranks.
pub(super) fn agree(comm: &Inner, call: &RawCall, background: bool) -> Result<()> {
    let state = comm.state();
    let ranks = comm.size();
    if ranks == 1 {
        return state.check(|| call.collective.name().to_owned());
    }
    let ours = call.header(state.id, Algorithm::Direct);
    let words: [u64; WORDS] = bytemuck::cast(ours);
    let mut all = vec![0u64; WORDS * ranks];
    let check = comm.call(asked!(AllGather), &words[..], &mut all[..])?;
    // SAFETY: both buffers stay until this returns.
    let met = unsafe { comm.execute(&check, background) };
    met.map_err(|error| match error {
        Error::Timeout { rank, waited, missing, detail, .. } => {
            Error::Timeout { op: call.collective.name().to_owned(), rank, waited, missing, detail }
        }
        other => other,
    })?;
    for (peer, theirs) in all.chunks_exact(WORDS).enumerate() {
        let theirs: Header = bytemuck::pod_read_unaligned(bytemuck::cast_slice(theirs));
        if theirs != ours {
            return Err(state.mismatch(peer, ours, theirs));
        }
    }
    Ok(())
}
