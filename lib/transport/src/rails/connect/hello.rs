//! Purposes of connections between two processes that have no ranks.

use crate::handshake::Purpose;

/// A stream of a connection. Attached is the route that it took ([`SourceRoute`](crate::rails::relay::SourceRoute)), if
/// relays are on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(super) struct StreamHello {
    pub(super) listener: u32,
    /// Number that the dialer has drawn for the connection.
    pub(super) connection: u32,
    /// Number of the stream.
    pub(super) stream: u32,
    /// Streams of the connection when it is made.
    pub(super) streams: u32,
    /// Routes of the connection.
    pub(super) routes: u32,
    /// Window per tag in bytes (`TINYNCCL_NET_WINDOW`), which must be equal at both ends.
    pub(super) window: u32,
}

impl Purpose for StreamHello {
    const NUMBER: u32 = 2;
}

impl StreamHello {
    /// Returns the listener's number and the connection's, which belong to one connection only.
    pub(super) fn key(&self) -> (u32, u32) {
        (self.listener, self.connection)
    }
}

/// Report to a listener that there will be no connection. Attached is the error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(super) struct FailureReport {
    pub(super) listener: u32,
}

impl Purpose for FailureReport {
    const NUMBER: u32 = 4;
}
