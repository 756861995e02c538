//! Interface of the data path to the connection above it.

use std::ops::Deref;

use crate::net::data::control::Kind;
use crate::net::data::core::Core;
use crate::net::data::frame::Frame;

/// A connection as its data path and its queue pairs see it: its core, and what concerns more than one of its parts.
pub(in crate::net) trait Upcalls: Deref<Target = Core> {
    /// Handles a control frame about a stream or a queue pair, which came over the stream `over`.
    fn handle_control(&self, over: usize, kind: Kind, frame: &Frame) -> Result<(), String>;

    /// Sends all control frames again that the peer has not answered, as some may be lost.
    fn resend_control(&self);

    /// Fails a stream over, for the reason `detail`.
    fn fail_stream(&self, index: usize, detail: String);

    /// Takes in that the peer has closed a stream, between two fragments.
    fn end_of_stream(&self, index: usize);

    /// Returns true if this end has RDMA ports.
    fn has_rdma(&self) -> bool;

    /// Returns true while there is a queue pair that carries fragments.
    fn has_queue_pair(&self) -> bool;

    /// Returns true if a message of this memory may go by RDMA.
    fn takes_rdma(&self, data: *const u8, len: usize) -> bool;

    /// Has queue pairs take what is posted and clear to send.
    fn pump_rdma(&self);

    /// Returns the CTS frames of a posted receive: one for each queue pair, or one without a key if the memory is not
    /// registered.
    fn cts_frames(&self, message: (i32, u64), data: *const u8, bytes: usize, id: u16) -> Vec<Frame>;

    /// Has the thread of queue pair `number` serve it from now on.
    fn serve_queue_pair(&self, number: usize);
}
