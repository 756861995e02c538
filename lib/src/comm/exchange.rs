//! What ranks tell each other while something is set up on top of a communicator.

use super::Comm;
use crate::error::Result;

impl Comm {
    /// True if all ranks of this communicator are on one host.
    pub(crate) fn is_one_host(&self) -> bool {
        let state = &self.inner.state;
        state.members.iter().all(|&m| state.control.shares_host(m))
    }

    /// Gives every rank every rank's bytes, in rank order, through the rendezvous; for set-up. Once per `what`.
    pub(crate) fn exchange_bytes(&self, what: &str, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        let state = &self.inner.state;
        state.check(|| what.to_owned())?;
        state.control.exchange(&format!("{what}-{}", state.id), &state.members, bytes)
    }
}
