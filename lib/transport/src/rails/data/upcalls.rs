//! Interface of the data path to the connection above it.

use crate::rails::data::control::Kind;
use crate::rails::data::frame::Frame;
use crate::rails::data::session::Session;
use crate::rails::stream::{Rail, Stream};

/// Streams of a connection, among which its data path chooses.
pub(in crate::rails) trait Streams {
    /// State that the streams share.
    fn session(&self) -> &Session;

    /// The stream of this number, unless another one has its position by now.
    fn stream(&self, index: usize) -> Option<&Stream>;

    /// Numbers of the live streams on rails for which `on` is true.
    fn alive_on(&self, on: &dyn Fn(Rail) -> bool) -> Vec<usize>;

    /// Number of streams that take a message of `len` bytes, and whether the rates of their rails differ much.
    fn spread(&self, len: usize) -> (usize, bool);

    /// Returns `Ok` if a fragment of `bytes` bytes would arrive over stream `index` as early as over any other, else
    /// `Err` with the number of the stream that should take it.
    fn first_to_arrive(&self, index: usize, bytes: usize) -> Result<(), usize>;

    /// Returns true if `stream` is suspected while another live stream is not: others should carry its data.
    fn avoids(&self, stream: &Stream) -> bool;

    /// Has the thread of stream `index` look for something to send.
    fn wake(&self, index: usize);

    /// Has the threads of all live streams on the rail of stream `index` look for something to send.
    fn wake_beside(&self, index: usize);

    /// Wakes up to `some` streams that take a message of `len` bytes; other ones each time.
    fn wake_some(&self, some: usize, len: usize);

    /// Has a stream's thread read from it again: there may be a posted buffer for the fragment that it holds.
    fn resume(&self, index: usize);

    /// Sends control frames to the peer, over whichever stream is free first.
    fn send_control(&self, frames: Vec<Frame>);

    /// Fails everything on this connection, for the reason `detail`.
    fn fail(&self, detail: String);
}

/// A connection as its data path and its queue pairs see it.
pub(in crate::rails) trait Upcalls: Streams {
    /// Takes in that the receiver has read `fragments` fragments from a stream in all.
    fn handle_ack(&self, index: usize, fragments: u64) -> Result<(), String>;

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

    /// Writes a posted message of `len` bytes, and others of at most `most`, on the caller's thread if a stream is
    /// idle.
    fn write_inline(&self, len: usize, most: usize);

    /// Has queue pairs take what is posted and clear to send.
    fn pump_rdma(&self);

    /// Returns the CTS frames of a posted receive: one for each queue pair, or one without a key if the memory is not
    /// registered.
    fn cts_frames(&self, message: (i32, u64), data: *const u8, bytes: usize, id: u16) -> Vec<Frame>;

    /// Has the thread of queue pair `number` serve it from now on.
    fn serve_queue_pair(&self, number: usize);
}
