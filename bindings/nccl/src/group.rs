//! Calls of a group.

use std::sync::Arc;

use cudarc::driver::sys::CUstream;

use crate::fault::Result;
use crate::member::Member;

/// A job that meets the other ranks.
pub(crate) fn meet(member: &Arc<Member>, job: impl FnOnce(&Arc<Member>) -> Result<()> + Send + 'static) -> Result<()> {
    job(member)
}

/// A job that enqueues on a stream.
pub(crate) fn enqueue(
    member: &Arc<Member>,
    stream: CUstream,
    job: impl FnOnce(&Arc<Member>, CUstream) -> Result<()> + 'static,
) -> Result<()> {
    job(member, stream)
}
