//! Calls of the data path and of queue pairs to their connection.

use crate::net::connection::Connection;
use crate::net::data::control::Kind;
use crate::net::data::frame::Frame;
use crate::net::data::upcalls::Upcalls;

impl Upcalls for Connection {
    fn handle_control(&self, over: usize, kind: Kind, frame: &Frame) -> Result<(), String> {
        if matches!(kind, Kind::QpInfo | Kind::Rts) || frame.queue().is_some() {
            self.rdma.handle_control(self, kind, frame)
        } else {
            self.handle_stream_control(over, kind, frame)
        }
    }

    fn resend_control(&self) {
        Connection::resend_control(self);
    }

    fn fail_stream(&self, index: usize, detail: String) {
        Connection::fail_stream(self, index, detail);
    }

    fn end_of_stream(&self, index: usize) {
        Connection::end_of_stream(self, index);
    }

    fn has_rdma(&self) -> bool {
        self.rdma.is_on()
    }

    fn has_queue_pair(&self) -> bool {
        self.rdma.any()
    }

    fn takes_rdma(&self, data: *const u8, len: usize) -> bool {
        self.rdma.takes(data, len)
    }

    fn pump_rdma(&self) {
        self.rdma.pump(self);
    }

    fn cts_frames(&self, message: (i32, u64), data: *const u8, bytes: usize, id: u16) -> Vec<Frame> {
        self.rdma.cts_frames(message, data, bytes, id)
    }

    fn serve_queue_pair(&self, number: usize) {
        Connection::serve_queue_pair(self, number);
    }
}
