//! The end of a job: a rank leaves when its last communicator is gone.

use std::sync::Arc;

use super::control::Control;
use crate::membership::Membership;
use tinynccl_transport::bootstrap::Server;

/// Lives as long as the last communicator of a rendezvous. It leaves first, then waits for the others if it hosts the
/// store.
pub(crate) struct Home {
    control: Arc<dyn Control>,
    _server: Option<Server>,
    /// Membership of the communicator that this one was made from ([`Comm::shrink`](crate::Comm::shrink)): a member
    /// that missed the outcome of its last agreement can still ask for it.
    _former: Option<Arc<Membership>>,
}

impl Home {
    pub(crate) fn new(control: Arc<dyn Control>, server: Option<Server>, former: Option<Arc<Membership>>) -> Home {
        Home { control, _server: server, _former: former }
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        self.control.close();
    }
}
