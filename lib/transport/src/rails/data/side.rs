//! The two directions of a connection.

use crate::rails::data::receiver::ReceiveQueue;
use crate::rails::data::sender::SendQueue;
use crate::rails::data::upcalls::Upcalls;

/// Sending or receiving end of a connection.
#[derive(Debug)]
pub(in crate::rails) enum Side {
    Out(SendQueue),
    In(ReceiveQueue),
}

impl Side {
    pub(in crate::rails) fn receives(&self) -> bool {
        matches!(self, Side::In(_))
    }
}

/// A connection with its direction.
pub(in crate::rails) trait Directed: Upcalls {
    /// Queue of what is sent or received.
    fn side(&self) -> &Side;
}
