//! Loss of a connection's streams: what its sockets, its peer and [`health`](crate::rails::health) report goes to the
//! [`Agreement`], and what that returns is carried out here.

use std::net::Shutdown;
use std::sync::atomic::Ordering;

use crate::rails::connection::Connection;
use crate::rails::connection::core::DataStream;
use crate::rails::data::control::Kind;
use crate::rails::data::frame::Frame;
use crate::rails::data::sender::SendQueue;
use crate::rails::data::side::Side;
use crate::rails::failover::agreement::{Agreement, Ending, Loss, Notice, Order};
use crate::rails::stream::Stream;
use crate::rails::worker::thread::Job;
use tinynccl_sys::threads::lock;

/// Returns the frame of a notice about a stream.
fn frame(notice: Notice, about: usize, fragments: u64) -> Frame {
    let kind = match notice {
        Notice::StreamFailed => Kind::StreamFailed,
        Notice::Retire => Kind::Retire,
        Notice::RetireAck => Kind::RetireAck,
    };
    Frame::control(kind, about as i32, fragments)
}

impl Connection {
    /// Takes in that the peer has closed a stream, between two fragments. What came over the others before still
    /// counts.
    #[cold]
    pub(in crate::rails) fn end_of_stream(&self, index: usize) {
        let ending = {
            let _one_at_a_time = lock(&self.refused);
            self.handle_end(index)
        };
        if ending == Ending::Unconfirmed {
            return;
        }
        self.rdma.drain(self);
        // Or the peer has failed it over, and did not read the last control frame.
        self.resend_control();
        if ending == Ending::Last && !self.is_closed() {
            let who = if self.relayed() { "the peer or a relay" } else { "the peer" };
            self.status().fail(self.error(format!("{who} closed it; {}", self.advice())));
        }
    }

    /// Fails a stream over, for the reason `detail`. The others carry on, if there are others.
    #[cold]
    pub(in crate::rails) fn fail_stream(&self, index: usize, detail: String) {
        let Some(stream) = self.stream(index) else { return };
        let loss = {
            let _one_at_a_time = lock(&self.refused);
            if self.is_closed() { Loss::Known } else { self.handle_failure(index) }
        };
        match loss {
            Loss::Known => {}
            Loss::Unconfirmed => stream.shut(Shutdown::Both),
            Loss::Last => self.fail(format!("stream {index}: {detail}; {}", self.advice())),
            Loss::Retiring => {
                stream.shut(Shutdown::Both);
                self.retired(stream, index, &detail);
            }
        }
    }

    /// Marks a stream as stalled for too long, or as moving again. True if that is new.
    #[cold]
    pub(in crate::rails) fn suspect(&self, index: usize, suspected: bool) -> bool {
        let Some(stream) = self.stream(index) else { return false };
        let new = stream.suspect(suspected);
        if new {
            stream.load.reset();
            // Others take what it would have, or it does again.
            self.wake_some(usize::MAX, usize::MAX);
        }
        new
    }

    /// Fails over a suspected stream: the sender retires it unless it may be the last one, and the receiver requests
    /// that.
    #[cold]
    pub(in crate::rails) fn retire(&self, index: usize, detail: &str) {
        let Some(stream) = self.stream(index) else { return };
        let retiring = {
            let _one_at_a_time = lock(&self.refused);
            !self.is_closed() && self.handle_stall(index)
        };
        if retiring {
            self.retired(stream, index, detail);
        } else if self.side.receives() {
            self.resend_control();
        }
    }

    /// Logs that this end retires a stream, notifies the peer, and fails over queue pairs that have no stream beside
    /// them any more.
    fn retired(&self, stream: &Stream, index: usize, detail: &str) {
        stream.load.reset();
        log::warn!("net: {}: stream {index} over {}: {detail}; others carry on", self.name, stream.describe());
        self.resend_control();
        if let Some(rail) = stream.rail.filter(|_| self.alive().all(|(_, other)| other.rail != stream.rail)) {
            self.rdma.fail_rail(self, rail);
        }
    }

    /// Sends all notices again that the peer has not answered: it may not have received them, if they went over a
    /// stream that is lost.
    pub(in crate::rails) fn resend_control(&self) {
        let streams = self.unanswered().map(|(notice, about)| frame(notice, about, 0));
        let kind = if self.side.receives() { Kind::StreamFailed } else { Kind::Retire };
        let frames: Vec<Frame> = streams.chain(self.rdma.retiring(kind)).collect();
        if !frames.is_empty() {
            self.send_control(frames);
        }
    }

    /// Handles a control frame of the peer's about a stream, which came over the stream `over`.
    #[cold]
    pub(in crate::rails) fn handle_stream_control(&self, over: usize, kind: Kind, of: &Frame) -> Result<(), String> {
        let (about, unexpected) = (of.stream(), || format!("expected what this end receives, got {of:x?}"));
        let notice = match kind {
            Kind::StreamFailed => Notice::StreamFailed,
            Kind::Retire => Notice::Retire,
            Kind::RetireAck => Notice::RetireAck,
            _ => return Err(unexpected()),
        };
        let order = {
            let mut refused = lock(&self.refused);
            if self.is_over() {
                return Ok(());
            }
            self.handle_notice(&mut refused, over, notice, about).map_err(|_| unexpected())?
        };
        match (order, self.stream(about), &self.side) {
            (Order::Refuse, ..) => self.send_control(vec![frame(Notice::RetireAck, about, 0)]),
            (Order::Fail, ..) => self.fail_stream(about, "the peer can read nothing from it".to_owned()),
            (Order::Retire, ..) => self.retire(about, "the peer can read nothing from it"),
            // Its own thread stops reading, then answers.
            (Order::StopReading, Some(stream), _) => {
                stream.shut(Shutdown::Both);
                stream.retires.store(true, Ordering::Release);
                stream.worker.push(Job::Read(stream.key));
            }
            (Order::Acked, Some(stream), Side::Out(sender)) => {
                return self.retire_acked(sender, stream, of.number);
            }
            _ => {}
        }
        Ok(())
    }

    /// Takes in that the receiver has read `fragments` fragments from a lost stream, and reads no more from it: the
    /// other fragments go over other streams.
    fn retire_acked(&self, sender: &SendQueue, stream: &DataStream, fragments: u64) -> Result<(), String> {
        let unacked = {
            let mut writer = lock(&stream.writer);
            // Not the second time.
            if !self.handle_retire_ack(stream) {
                return Ok(());
            }
            writer.acked(&self.requests, stream, fragments)?;
            stream.shut(Shutdown::Both);
            writer.take_unacked(&self.requests, stream)
        };
        sender.resend_unacked(self, unacked);
        Ok(())
    }
}
