//! Loss of a connection's streams, and the agreement of both ends on it: streams end, fail, or stall
//! ([`health`](crate::net::health)).

use std::net::Shutdown;
use std::sync::atomic::Ordering;

use crate::net::connection::Connection;
use crate::net::connection::core::DataStream;
use crate::net::data::control::Kind;
use crate::net::data::frame::Frame;
use crate::net::data::sender::SendQueue;
use crate::net::data::side::Side;
use crate::net::stream::{State, Stream};
use crate::net::worker::thread::Job;
use crate::threads::lock;

impl Connection {
    /// Takes in that the peer has closed a stream, between two fragments. What came over the others before still
    /// counts.
    #[cold]
    pub(in crate::net) fn end_of_stream(&self, index: usize) {
        if let Some(stream) = self.stream(index) {
            if stream.is(State::New) {
                // The sender never had it.
                stream.advance(State::Retired);
                return;
            }
            stream.advance(State::Ended);
        }
        self.rdma.drain(self);
        // Or the peer has failed it over, and did not read the last control frame.
        self.resend_control();
        if self.alive().next().is_none() && !self.is_closed() {
            let who = if self.relayed() { "the peer or a relay" } else { "the peer" };
            self.status().fail(self.error(format!("{who} closed it; {}", self.advice())));
        }
    }

    /// Fails a stream over, for the reason `detail`. The others carry on, if there are others.
    #[cold]
    pub(in crate::net) fn fail_stream(&self, index: usize, detail: String) {
        let Some(stream) = self.stream(index) else { return };
        {
            let _one_at_a_time = lock(&self.losing);
            if self.is_closed() || stream.is(State::Retiring) || stream.is(State::Retired) {
                return;
            }
            if stream.is(State::New) {
                // The sender may not have it, and reports it if it does.
                stream.advance(State::Retired);
                return stream.shut(Shutdown::Both);
            }
            if !self.several() || self.alive().all(|(other, _)| other == index) {
                return self.fail(format!("stream {index}: {detail}; {}", self.advice()));
            }
            stream.advance(State::Retiring);
        }
        stream.shut(Shutdown::Both);
        self.retired(stream, index, &detail);
    }

    /// Marks a stream as stalled for too long, or as moving again. What its kernel has may still arrive, so
    /// nothing is shut: the other end may have nothing but this one left, and its end would be that of the connection.
    /// Both ends agree first, and the sender decides. True if that is new.
    #[cold]
    pub(in crate::net) fn suspect(&self, index: usize, suspected: bool) -> bool {
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
    pub(in crate::net) fn retire(&self, index: usize, detail: &str) {
        let Some(stream) = self.stream(index) else { return };
        if self.side.receives() {
            self.resend_control();
            return;
        }
        {
            let _one_at_a_time = lock(&self.losing);
            let others = || self.alive().any(|(other, of)| other != index && !of.is_suspect());
            if self.is_closed() || !stream.is(State::Alive) || !others() {
                return;
            }
            stream.advance(State::Retiring);
        }
        self.retired(stream, index, detail);
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

    /// Notifies the peer of all streams that are lost: it may not have received that, if it went over one of them. The
    /// receiver also requests that the sender retire those that stall.
    pub(in crate::net) fn resend_control(&self) {
        let kind = match self.side {
            Side::Out(_) => Kind::Retire,
            Side::In(_) => Kind::StreamFailed,
        };
        let asks = |stream: &Stream| self.side.receives() && stream.is(State::Alive) && self.avoids(stream);
        let lost = self.streams().filter(|(_, stream)| stream.is(State::Retiring) || asks(stream));
        let streams = lost.map(|(index, _)| Frame::control(kind, index as i32, 0));
        let frames: Vec<Frame> = streams.chain(self.rdma.retiring(kind)).collect();
        if !frames.is_empty() {
            self.send_control(frames);
        }
    }

    /// Handles a control frame of the peer's about a stream, which came over the stream `over`.
    #[cold]
    pub(in crate::net) fn handle_stream_control(&self, over: usize, kind: Kind, frame: &Frame) -> Result<(), String> {
        let about = frame.stream();
        if kind == Kind::Retire && self.side.receives() && self.is_free(about) {
            // The sender's end alone was made, or this one is late.
            let refuse = || {
                let mut refused = lock(&self.refused);
                let free = self.is_free(about);
                if free && !refused.contains(&about) {
                    refused.push(about);
                }
                free
            };
            if refuse() {
                self.send_control(vec![Frame::control(Kind::RetireAck, about as i32, 0)]);
                return Ok(());
            }
        }
        let wrong = || format!("expected a control frame about another stream, got {frame:x?}");
        let Some(stream) = self.beside(about).filter(|of| self.several() && about <= of.number()) else {
            return Err(wrong());
        };
        if about < stream.number() {
            // A repeated control frame, about a stream that both ends have retired long ago.
            return Ok(());
        }
        match (kind, &self.side) {
            // What comes over it gets through.
            (Kind::StreamFailed, Side::Out(_)) if about == over => Ok(()),
            _ if about == over => Err(wrong()),
            (Kind::StreamFailed, Side::Out(_)) => {
                let why = "the peer can read nothing from it";
                // Its end, which the peer has shut, came first.
                if stream.is(State::Ended) {
                    self.fail_stream(about, why.to_owned())
                } else {
                    self.retire(about, why)
                }
                Ok(())
            }
            // Its own thread stops reading, then answers.
            (Kind::Retire, Side::In(_)) => {
                stream.advance(State::Retired);
                stream.shut(Shutdown::Both);
                stream.retires.store(true, Ordering::Release);
                stream.worker.push(Job::Read(stream.key));
                Ok(())
            }
            (Kind::RetireAck, Side::Out(sender)) => self.handle_retire_ack(sender, stream, frame.number),
            _ => Err(format!("expected what this end receives, got {frame:x?}")),
        }
    }

    /// Takes in that the receiver has read `fragments` fragments from a lost stream, and reads no more from it: the
    /// other fragments go over other streams.
    fn handle_retire_ack(&self, sender: &SendQueue, stream: &DataStream, fragments: u64) -> Result<(), String> {
        let unacked = {
            let mut writer = lock(&stream.writer);
            if !stream.is(State::Retiring) {
                // The peer sent this twice.
                return Ok(());
            }
            writer.acked(&self.requests, stream, fragments)?;
            stream.advance(State::Retired);
            stream.shut(Shutdown::Both);
            writer.take_unacked(&self.requests, stream)
        };
        sender.resend_unacked(self, unacked);
        Ok(())
    }
}
