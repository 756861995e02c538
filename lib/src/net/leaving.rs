//! Loss of a connection's streams, and the agreement of both ends on it: streams end, fail, or stand still
//! ([`rails`](super::rails)).

use std::net::Shutdown;
use std::sync::Arc;

use super::frame::{Frame, Word};
use super::link::{Link, Side};
use super::stream::{State, Stream};
use super::worker::Task;
use crate::threads::lock;

impl Link {
    /// Takes in that the peer has closed a stream, between two fragments. What came over the others before still
    /// counts.
    #[cold]
    pub(super) fn end_of_stream(self: &Arc<Link>, index: usize) {
        if let Some(stream) = self.stream(index) {
            if stream.is(State::New) {
                // The sender never had it.
                stream.becomes(State::Gone);
                return;
            }
            stream.becomes(State::Ended);
        }
        self.rdma.settle(self);
        // Or the peer has given it up, and did not read the last control frame.
        self.restate();
        if self.alive().next().is_none() && !self.is_closed() {
            let who = if self.relayed() { "the peer or a relay" } else { "the peer" };
            self.fate().seal(self.error(format!("{who} closed it; {}", self.elsewhere())));
        }
    }

    /// Gives a stream up, for the reason `detail`. The others carry on, if there are others.
    #[cold]
    pub(super) fn lose(self: &Arc<Link>, index: usize, detail: String) {
        let Some(stream) = self.stream(index) else { return };
        {
            let _one_at_a_time = lock(&self.losing);
            if self.is_closed() || stream.is(State::Lost) || stream.is(State::Gone) {
                return;
            }
            if stream.is(State::New) {
                // The sender may not have it, and reports it if it does.
                stream.becomes(State::Gone);
                return stream.shut(Shutdown::Both);
            }
            if !self.several() || self.alive().all(|(other, _)| other == index) {
                return self.fail(format!("stream {index}: {detail}; {}", self.elsewhere()));
            }
            stream.becomes(State::Lost);
        }
        stream.shut(Shutdown::Both);
        self.left(stream, index, &detail);
    }

    /// Marks a stream as standing still for too long, or as moving again. What its kernel has may still arrive, so
    /// nothing is shut: the other end may have nothing but this one left, and its end would be that of the connection.
    /// Both ends agree first, and the sender decides. True if that is new.
    #[cold]
    pub(super) fn doubt(self: &Arc<Link>, index: usize, doubted: bool) -> bool {
        let Some(stream) = self.stream(index) else { return false };
        let new = stream.doubt(doubted);
        if new {
            stream.load.unlearn();
            // Others take what it would have, or it does again.
            self.wake_some(usize::MAX, usize::MAX);
        }
        new
    }

    /// Gives up a doubted stream: the sender leaves it unless it may be the last one, and the receiver requests that.
    #[cold]
    pub(super) fn retire(self: &Arc<Link>, index: usize, detail: &str) {
        let Some(stream) = self.stream(index) else { return };
        if self.side.receives() {
            self.restate();
            return;
        }
        {
            let _one_at_a_time = lock(&self.losing);
            let others = || self.alive().any(|(other, of)| other != index && !of.is_doubted());
            if self.is_closed() || !stream.is(State::Alive) || !others() {
                return;
            }
            stream.becomes(State::Lost);
        }
        self.left(stream, index, detail);
    }

    /// Logs that this end has left a stream, notifies the peer, and gives up queue pairs that have no stream left
    /// beside them.
    fn left(self: &Arc<Link>, stream: &Stream, index: usize, detail: &str) {
        stream.load.unlearn();
        log::warn!("net: {}: stream {index} over {}: {detail}; others carry on", self.name, stream.way());
        self.restate();
        if let Some(cable) = stream.rail.filter(|_| self.alive().all(|(_, other)| other.rail != stream.rail)) {
            self.rdma.lose_cable(self, cable);
        }
    }

    /// Notifies the peer of all streams that are lost: it may not have received that, if it went over one of them. The
    /// receiver also requests that the sender leave those that stand still.
    pub(super) fn restate(self: &Arc<Link>) {
        let word = match self.side {
            Side::Out(_) => Word::Left,
            Side::In(_) => Word::Lost,
        };
        let asks = |stream: &Stream| self.side.receives() && stream.is(State::Alive) && self.spares(stream);
        let lost = self.streams().filter(|(_, stream)| stream.is(State::Lost) || asks(stream));
        let streams = lost.map(|(index, _)| Frame::say(word, index as i32, 0));
        let words: Vec<Frame> = streams.chain(self.rdma.lost(word)).collect();
        if !words.is_empty() {
            self.say(words);
        }
    }

    /// Handles a control frame of the peer's about a stream, which came over the stream `over`.
    #[cold]
    pub(super) fn heard(self: &Arc<Link>, over: usize, word: Word, frame: &Frame) -> Result<(), String> {
        let about = frame.stream();
        if word == Word::Left && self.side.receives() && self.is_free(about) {
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
                self.say(vec![Frame::say(Word::Agreed, about as i32, 0)]);
                return Ok(());
            }
        }
        let wrong = || format!("expected a word on another stream, got {frame:x?}");
        let Some(stream) = self.beside(about).filter(|of| self.several() && about <= of.number()) else {
            return Err(wrong());
        };
        if about < stream.number() {
            // A repeated control frame, about a stream that both ends have left long ago.
            return Ok(());
        }
        match (word, &self.side) {
            // What comes over it gets through.
            (Word::Lost, Side::Out(_)) if about == over => Ok(()),
            _ if about == over => Err(wrong()),
            (Word::Lost, Side::Out(_)) => {
                let why = "the peer can read nothing from it";
                // Its end, which the peer has shut, came first.
                if stream.is(State::Ended) {
                    self.lose(about, why.to_owned())
                } else {
                    self.retire(about, why)
                }
                Ok(())
            }
            // Its own thread stops reading, then answers.
            (Word::Left, Side::In(_)) => {
                stream.becomes(State::Gone);
                stream.shut(Shutdown::Both);
                stream.worker.push(Task::Leave(self.clone(), about));
                Ok(())
            }
            (Word::Agreed, Side::Out(outgoing)) => outgoing.agreed(self, stream, frame.number),
            _ => Err(format!("expected what this end receives, got {frame:x?}")),
        }
    }
}
