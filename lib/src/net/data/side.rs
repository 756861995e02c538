//! The two directions of a connection.

use crate::net::data::receiver::ReceiveQueue;
use crate::net::data::sender::SendQueue;
use crate::net::data::upcalls::Upcalls;

/// Sending or receiving end of a connection.
#[derive(Debug)]
pub(in crate::net) enum Side {
    Out(SendQueue),
    In(ReceiveQueue),
}

impl Side {
    pub(in crate::net) fn receives(&self) -> bool {
        matches!(self, Side::In(_))
    }
}

/// A connection with its direction.
pub(in crate::net) trait Directed: Upcalls {
    /// Queue of what is sent or received.
    fn side(&self) -> &Side;
}
