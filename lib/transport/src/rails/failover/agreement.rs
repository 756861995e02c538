//! Which streams a connection has lost, as both of its ends come to know it.
//!
//! Sender and receiver may lose different streams, and a closed socket is the end of the connection for a peer without
//! another stream. So a stream that stalls is closed by no end alone: the receiver requests that the sender retire it
//! ([`Notice::StreamFailed`]), the sender retires it once another one works ([`Notice::Retire`]), and the receiver
//! replies with the number of fragments that it has read ([`Notice::RetireAck`]). The rest goes over other streams.
//! Notices are idempotent: they are sent again until they are answered, over any stream.

use super::slot::{Slot, State};

/// A control frame about a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::rails) enum Notice {
    /// The receiver can read nothing from the stream.
    StreamFailed,
    /// The sender writes nothing to the stream any more.
    Retire,
    /// The receiver reads nothing from the stream any more.
    RetireAck,
}

/// What the failure of a stream's socket means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::rails) enum Loss {
    /// It is known.
    Known,
    /// The sender may not have the stream, and reports it if it does: close it.
    Unconfirmed,
    /// No other one is left: the connection has failed.
    Last,
    /// It is retired: close it, and send the notices.
    Retiring,
}

/// What the peer's end of a stream means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::rails) enum Ending {
    /// The sender never had the stream.
    Unconfirmed,
    /// No stream is left: the connection has failed.
    Last,
    /// Others carry on: send the notices, as the peer may have closed this one for want of an answer.
    Others,
}

/// What a notice of the peer's requires.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::rails) enum Order {
    /// It is known.
    Nothing,
    /// Reply that nothing was read from a stream that this end never had.
    Refuse,
    /// The stream has failed for both ends ([`Agreement::handle_failure`]).
    Fail,
    /// The stream stalls for the peer ([`Agreement::handle_stall`]).
    Retire,
    /// Read no more from the stream, close it, and reply with the number of fragments that were read.
    StopReading,
    /// The receiver's number of fragments is final ([`Agreement::handle_retire_ack`]).
    Acked,
}

/// The streams of one end of a connection. Failures and stalls are handled one at a time (so that two streams that are
/// lost at once do not take each other for the one that is left), and so are notices and new streams.
pub(in crate::rails) trait Agreement {
    /// True at the receiving end.
    fn receives(&self) -> bool;

    /// True if several paths lead to the peer.
    fn several(&self) -> bool;

    /// Number of positions, which streams have one after another: stream `n` the one of `n` modulo this.
    fn positions(&self) -> usize;

    /// The stream that has a position now.
    fn at(&self, position: usize) -> Option<&Slot>;

    /// The stream that has the position of stream `number` now.
    fn at_position_of(&self, number: usize) -> Option<&Slot> {
        self.at(number % self.positions().max(1))
    }

    /// Streams that carry something.
    fn live(&self) -> impl Iterator<Item = &Slot> {
        (0..self.positions()).filter_map(|position| self.at(position)).filter(|slot| slot.is(State::Alive))
    }

    /// Returns true if a stream is suspected while another live one is not: others should carry its data.
    fn is_avoided(&self, slot: &Slot) -> bool {
        slot.is_suspect() && self.live().any(|other| !other.is_suspect())
    }

    /// Returns true if a stream of this number may begin: both ends have retired the one before it in its position, or
    /// the sender has never had that. `refused`: numbers that this end has refused.
    fn admits(&self, refused: &[usize], number: usize) -> bool {
        let is_past = |slot: &Slot| slot.number() < number && (slot.is(State::Retired) || slot.is(State::New));
        self.several() && self.at_position_of(number).is_none_or(is_past) && !refused.contains(&number)
    }

    /// The socket of a stream has failed.
    fn handle_failure(&self, number: usize) -> Loss {
        let Some(slot) = self.at_position_of(number).filter(|slot| slot.number() == number) else { return Loss::Known };
        if slot.is(State::Retiring) || slot.is(State::Retired) {
            return Loss::Known;
        }
        if slot.is(State::New) {
            slot.advance(State::Retired);
            return Loss::Unconfirmed;
        }
        if !self.several() || self.live().all(|other| other.number() == number) {
            return Loss::Last;
        }
        slot.advance(State::Retiring);
        Loss::Retiring
    }

    /// A stream stalls for too long, here or at the receiver. True if the sender retires it; it does not if that may be
    /// the last one.
    fn handle_stall(&self, number: usize) -> bool {
        let Some(slot) = self.at_position_of(number).filter(|slot| slot.number() == number) else { return false };
        let others = || self.live().any(|other| other.number() != number && !other.is_suspect());
        !self.receives() && slot.is(State::Alive) && others() && slot.advance(State::Retiring)
    }

    /// The peer has closed a stream, between two fragments.
    fn handle_end(&self, number: usize) -> Ending {
        if let Some(slot) = self.at_position_of(number).filter(|slot| slot.number() == number) {
            if slot.is(State::New) {
                slot.advance(State::Retired);
                return Ending::Unconfirmed;
            }
            slot.advance(State::Ended);
        }
        if self.live().next().is_none() { Ending::Last } else { Ending::Others }
    }

    /// A notice of the peer's about stream `about` has come over the stream `over`. The error: this end sends what it
    /// has received, or the stream is none of the connection's.
    fn handle_notice(
        &self,
        refused: &mut Vec<usize>,
        over: usize,
        notice: Notice,
        about: usize,
    ) -> Result<Order, UnexpectedNotice> {
        if notice == Notice::Retire && self.receives() && self.admits(&[], about) {
            // The sender's end alone was made, or this one is late: from now on it is refused.
            if !refused.contains(&about) {
                refused.push(about);
            }
            return Ok(Order::Refuse);
        }
        let slot = self.at_position_of(about).filter(|slot| self.several() && about <= slot.number());
        let slot = slot.ok_or(UnexpectedNotice)?;
        if about < slot.number() {
            // Sent again, about a stream that both ends have retired long ago.
            return Ok(Order::Nothing);
        }
        match (notice, self.receives()) {
            // What comes over it gets through.
            (Notice::StreamFailed, false) if about == over => Ok(Order::Nothing),
            _ if about == over => Err(UnexpectedNotice),
            // Its end, which the peer has closed, came first.
            (Notice::StreamFailed, false) if slot.is(State::Ended) => Ok(Order::Fail),
            (Notice::StreamFailed, false) => Ok(Order::Retire),
            (Notice::Retire, true) => {
                slot.advance(State::Retired);
                Ok(Order::StopReading)
            }
            (Notice::RetireAck, false) => Ok(Order::Acked),
            _ => Err(UnexpectedNotice),
        }
    }

    /// The receiver has read the last from a stream. True the first time: what it has not read goes over others.
    fn handle_retire_ack(&self, slot: &Slot) -> bool {
        slot.is(State::Retiring) && slot.advance(State::Retired)
    }

    /// Notices that the peer has not answered.
    fn unanswered(&self) -> impl Iterator<Item = (Notice, usize)> {
        let receives = self.receives();
        let notice = if receives { Notice::StreamFailed } else { Notice::Retire };
        let stalls = move |slot: &Slot| receives && slot.is(State::Alive) && self.is_avoided(slot);
        let all = (0..self.positions()).filter_map(|position| self.at(position));
        all.filter(move |slot| slot.is(State::Retiring) || stalls(slot)).map(move |slot| (notice, slot.number()))
    }
}

/// A notice that this end does not receive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::rails) struct UnexpectedNotice;
