//! What fails with a communicator.

use crate::error::Error;

/// Something that waits elsewhere than in the communicator's calls: on a device, say.
pub(crate) trait Attached: Send + Sync {
    /// The communicator has failed: wait no longer. Called once, on any thread; it must not block.
    fn failed(&self, error: &Error);
}
