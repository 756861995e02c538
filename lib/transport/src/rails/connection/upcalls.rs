//! Calls of the data path and of queue pairs to their connection.

use crate::rails::connection::Connection;
use crate::rails::data::control::Kind;
use crate::rails::data::frame::Frame;
use crate::rails::data::session::Session;
use crate::rails::data::side::{Directed, Side};
use crate::rails::data::upcalls::{Streams, Upcalls};
use crate::rails::failover::agreement::Agreement;
use crate::rails::failover::slot::State;
use crate::rails::stream::{Rail, Stream};
use tinynccl_sys::threads::{lock, try_lock};

impl Streams for Connection {
    #[inline]
    fn session(&self) -> &Session {
        &self.core.session
    }

    #[inline]
    fn stream(&self, index: usize) -> Option<&Stream> {
        self.core.stream(index).map(|stream| &**stream)
    }

    fn alive_on(&self, on: &dyn Fn(Rail) -> bool) -> Vec<usize> {
        self.core.alive().filter(|(_, stream)| stream.rail.is_some_and(on)).map(|(index, _)| index).collect()
    }

    fn spread(&self, len: usize) -> (usize, bool) {
        (self.core.eligible(len).count(), self.core.is_uneven())
    }

    fn first_to_arrive(&self, index: usize, bytes: usize) -> Result<(), usize> {
        self.core.first_to_arrive(index, bytes)
    }

    #[inline]
    fn avoids(&self, stream: &Stream) -> bool {
        self.core.is_avoided(stream)
    }

    fn wake(&self, index: usize) {
        self.core.wake(index);
    }

    fn wake_beside(&self, index: usize) {
        self.core.wake_beside(index);
    }

    fn wake_some(&self, some: usize, len: usize) {
        self.core.wake_some(some, len);
    }

    fn resume(&self, index: usize) {
        self.core.resume(index);
    }

    fn send_control(&self, frames: Vec<Frame>) {
        self.core.send_control(frames);
    }

    fn fail(&self, detail: String) {
        self.core.fail(detail);
    }
}

impl Directed for Connection {
    #[inline]
    fn side(&self) -> &Side {
        &self.core.side
    }
}

impl Upcalls for Connection {
    fn handle_ack(&self, index: usize, fragments: u64) -> Result<(), String> {
        let (Some(stream), Side::Out(sender)) = (self.core.stream(index), &self.side) else { return Ok(()) };
        {
            let mut writer = lock(&stream.writer);
            // What was sent last over a stream that others replace is read late.
            if stream.is(State::Retired) {
                return Ok(());
            }
            writer.acked(&self.requests, stream, fragments)?;
        }
        sender.wake(self);
        Ok(())
    }

    fn write_inline(&self, len: usize, most: usize) {
        for (index, stream) in self.core.eligible(len) {
            if self.several() && self.core.first_to_arrive(index, len).is_err() {
                continue;
            }
            let Some(mut writer) = try_lock(&stream.writer) else { continue };
            if writer.is_idle() {
                writer.pump(self, index, most);
                break;
            }
        }
    }

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
