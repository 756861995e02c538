//! Stage 3: pinned CPU memory beside the buffer, with a copy on each side of the wire.

use std::any::Any;
use std::sync::Arc;

use anyhow::{Context as _, Result, anyhow};

use super::{Attempt, Device, Memory, Path, Probe};
use crate::why::errno;

/// Allocates the slots, and registers them when the wire is RDMA.
///
/// # Errors
/// Out of memory, or the limit on locked memory is too low.
pub fn attempt<B: Memory + ?Sized, D: Device>(probe: &Probe<'_, B, D>) -> Result<Attempt<D::Mr>> {
    let slots = Arc::new(probe.buffer.pinned(probe.staging).context("staging")?);
    let how = format!("{} bytes of {}", slots.len(), slots.kind());
    let Ok(device) = &probe.device else {
        return Ok(Attempt::Taken(Path::Staged(slots, None), format!("{how}, not registered: the wire is TCP")));
    };
    let owner: Arc<dyn Any + Send + Sync> = slots.clone();
    let mr = device.reg_mr(slots.address(), slots.len(), owner).map_err(|cause| {
        let hint = match cause.raw_os_error() {
            Some(libc::ENOMEM) => {
                "; raise the limit of locked memory (`ulimit -l`), or take a smaller --chunk or --slots"
            }
            _ => "",
        };
        anyhow!("staging: ibv_reg_mr of {} bytes on {}: {}{hint}", slots.len(), device.name(), errno(&cause))
    })?;
    Ok(Attempt::Taken(Path::Staged(slots, Some(mr)), format!("{how}, registered with {}", device.name())))
}
