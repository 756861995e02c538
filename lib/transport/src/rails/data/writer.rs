//! Writing of fragments and control frames to a stream, and the fragments that the peer has not acknowledged yet.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;

use crate::rails::data::control::Kind;
use crate::rails::data::frame::{COPIED, Frame, WHOLE};
use crate::rails::data::request::Requests;
use crate::rails::data::sender::{Fragment, Payload, Source};
use crate::rails::data::side::{Directed, Side};
use crate::rails::failover::slot::State;
use crate::rails::failover::unacked::Unacked;
use crate::rails::stream::{Due, Stream};
use crate::rails::worker::service::Remaining;
use crate::seal::Fault;

/// Payload that a stream writes in its time slice, before others of its thread have theirs.
const TURN: usize = 2 << 20;

/// Payload in flight that a fragment of `len` bytes counts for; 0 for short ones, which are acknowledged late, with
/// others.
fn counted(len: usize) -> usize {
    if len > COPIED { len } else { 0 }
}

/// Sending state of a stream, with the fragments that the peer has not acknowledged yet.
#[derive(Debug)]
pub(in crate::rails) struct Writer {
    /// Payload of a frame, and what was copied behind it.
    head: Vec<u8>,
    head_at: usize,
    /// The rest of the fragment, where the caller has it.
    data: Source,
    len: usize,
    at: usize,
    /// The request that it belongs to, and how much of it is over when it is written.
    done: Option<(usize, usize)>,
    /// True for a fragment, false for a control frame.
    fragment: bool,
    blocked: bool,
    /// Fragments that were begun, where the connection has several rails.
    unacked: Unacked<Fragment>,
}

impl Default for Writer {
    fn default() -> Self {
        Writer {
            head: Vec::new(),
            head_at: 0,
            data: Source(std::ptr::null()),
            len: 0,
            at: 0,
            done: None,
            fragment: false,
            blocked: false,
            unacked: Unacked::default(),
        }
    }
}

impl Writer {
    /// Returns the state of a stream that replaces a lost one: its first bytes report that this end has it, and which
    /// queue pair beside it.
    pub(in crate::rails) fn joining(index: usize, qp_info: Option<Frame>) -> Writer {
        let frames: Vec<Frame> = [Frame::control(Kind::Join, index as i32, 0)].into_iter().chain(qp_info).collect();
        let head = bytemuck::cast_slice(&frames).to_vec();
        Writer { head, ..Writer::default() }
    }

    pub(in crate::rails) fn is_idle(&self) -> bool {
        !self.blocked && self.is_written()
    }

    fn is_written(&self) -> bool {
        self.head_at == self.head.len() && self.at == self.len
    }

    /// The socket takes more again.
    pub(in crate::rails) fn unblock(&mut self) {
        self.blocked = false;
    }

    /// Forgets the fragment; true when there was none.
    pub(in crate::rails) fn clear(&mut self) -> bool {
        let whole = self.is_written();
        *self = Writer::default();
        whole
    }

    /// Writes until there is nothing of at most `most` bytes, the kernel takes no more, or the time slice is over.
    pub(in crate::rails) fn pump(&mut self, connection: &impl Directed, index: usize, most: usize) -> Remaining {
        let Some(stream) = connection.stream(index) else { return Remaining::Nothing };
        let mut written = 0;
        while !self.blocked && !connection.session().is_closed() && stream.is(State::Alive) {
            if self.is_idle() {
                if written >= TURN {
                    return Remaining::More;
                }
                if !self.load(connection, (index, stream), most) {
                    return Remaining::Nothing;
                }
            }
            match self.write(stream) {
                Ok(n) => written += n,
                Err(Fault::AGAIN) => self.blocked = true,
                Err(Fault::INTR) => {}
                Err(e) => {
                    connection.fail_stream(index, format!("writing: {e}"));
                    return Remaining::Nothing;
                }
            }
            if self.is_written()
                && let Some((slot, amount)) = self.done.take()
                && let Some(request) = connection.session().requests.get(slot)
            {
                request.finish(amount);
            }
        }
        Remaining::Nothing
    }

    /// Loads the next frame or fragment to write; false if there is none.
    fn load(&mut self, connection: &impl Directed, (index, stream): (usize, &Stream), most: usize) -> bool {
        self.head.clear();
        (self.head_at, self.at, self.len, self.fragment) = (0, 0, 0, false);
        if connection.session().relayed()
            && let Some(due) = stream.probe.due()
        {
            let kind = match due {
                Due::Ping => Kind::Ping,
                Due::Pong => Kind::Pong,
            };
            self.head.extend(bytemuck::bytes_of(&Frame::control(kind, 0, 0)));
            return true;
        }
        if connection.avoids(stream) {
            return false;
        }
        if let Some(frame) = connection.session().next_control() {
            if !stream.is(State::Alive) {
                // Control frames that were lost with it are sent again after the loss, but this one may have been among
                // them.
                connection.send_control(vec![frame]);
                return false;
            }
            self.head.extend(bytemuck::bytes_of(&frame));
            return true;
        }
        match connection.side() {
            Side::In(receiver) => {
                let fragments =
                    if connection.session().several() { stream.acknowledge.swap(0, Ordering::AcqRel) } else { 0 };
                let ack = (fragments > 0).then(|| Frame::control(Kind::Ack, 0, fragments));
                let Some(frame) = ack.or_else(|| receiver.next_window_update()) else { return false };
                self.head.extend(bytemuck::bytes_of(&frame));
            }
            Side::Out(sender) => {
                if connection.session().several()
                    && sender.waiting.load(Ordering::Acquire) > 0
                    && let Err(other) = connection.first_to_arrive(index, WHOLE)
                {
                    connection.wake_beside(other);
                    return false;
                }
                let Some(fragment) = sender.take(most) else { return false };
                self.begin(fragment, connection.session().several().then_some(stream));
            }
        }
        true
    }

    /// Begins to write a fragment. With `acknowledged` it is kept until the peer has read it from that stream.
    fn begin(&mut self, fragment: Fragment, acknowledged: Option<&Stream>) {
        let len = fragment.len();
        self.head.extend(bytemuck::bytes_of(&fragment.frame));
        (self.done, self.fragment) = (fragment.share(), true);
        let copied = match &fragment.bytes {
            Payload::Copied(bytes) => {
                self.head.extend(bytes);
                true
            }
            Payload::Posted(_, data) if len <= COPIED && len > 0 => {
                // SAFETY: part of a posted send, valid until its request is done, which is after this is written.
                self.head.extend(unsafe { std::slice::from_raw_parts(data.0, len) });
                true
            }
            Payload::Posted(_, data) => {
                (self.data, self.len) = (*data, len);
                len == 0
            }
        };
        let Some(stream) = acknowledged else { return };
        stream.load.sent(counted(len));
        self.unacked.push(if copied {
            // A short message is done when it is written: a message more for each would cost more than the copy.
            let bytes = self.head.get(Frame::BYTES..).unwrap_or_default().to_vec();
            Fragment { frame: fragment.frame, bytes: Payload::Copied(bytes) }
        } else {
            self.done = None;
            fragment
        });
    }

    /// Takes in that the peer has read `fragments` fragments from this stream in all.
    pub(in crate::rails) fn acked(
        &mut self,
        requests: &Requests,
        stream: &Stream,
        fragments: u64,
    ) -> Result<(), String> {
        let begun = self.fragment && !self.is_written();
        let over = self.unacked.handle_ack(fragments, begun);
        let over = over.map_err(|most| format!("expected at most {most} fragments to be read, got {fragments}"))?;
        let mut bytes = 0;
        for fragment in over {
            bytes += counted(fragment.len());
            if let Some((slot, amount)) = fragment.share()
                && let Some(request) = requests.get(slot)
            {
                request.finish(amount);
            }
        }
        stream.load.arrived(bytes);
        Ok(())
    }

    /// The fragments of a lost stream, which others take.
    pub(in crate::rails) fn take_unacked(&mut self, requests: &Requests, stream: &Stream) -> VecDeque<Fragment> {
        stream.load.cancel(self.unacked.iter().map(|fragment| counted(fragment.len())).sum());
        if let Some((slot, amount)) = self.done.take()
            && let Some(request) = requests.get(slot)
        {
            // It was copied, and is not needed any more.
            request.finish(amount);
        }
        std::mem::take(self).unacked.take()
    }

    fn write(&mut self, stream: &Stream) -> Result<usize, Fault> {
        let head = self.head.get(self.head_at..).unwrap_or_default();
        let data = match self.len - self.at {
            0 => &[],
            // SAFETY: the part from `at` on of a posted send, valid until its request is done, which is after this is
            // written; a connection that is closed writes no more.
            rest => unsafe { std::slice::from_raw_parts(self.data.0.add(self.at), rest) },
        };
        let n = stream.send(head, data)?;
        let of_head = n.min(head.len());
        self.head_at += of_head;
        self.at += n - of_head;
        Ok(n)
    }
}
