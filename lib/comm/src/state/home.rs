//! The end of a job: a rank leaves when its last communicator is gone.

use std::sync::Arc;

use super::control::Control;
use tinynccl_transport::bootstrap::Server;

/// Lives as long as the last communicator of a rendezvous. It leaves first, then waits for the others if it hosts the
/// store.
pub(crate) struct Home {
    control: Arc<dyn Control>,
    _server: Option<Server>,
}

impl Home {
    pub(crate) fn new(control: Arc<dyn Control>, server: Option<Server>) -> Home {
        Home { control, _server: server }
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        self.control.close();
    }
}
