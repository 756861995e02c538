//! Split of a long message over the streams of a link.
//!
//! ```text
//! stream 0   | header | stripe 0 | header | stripe 0 | header, payload | ...
//! stream 1            | stripe 1 |        | stripe 1 |
//! stream 2            | stripe 2 |        | stripe 2 |     short messages: stream 0 alone
//! ```
//! Both ends compute the stripes from the length in the header, so that only payload is on the other streams, in the
//! messages' order. One stream is bound by its congestion window, by a rate limit per flow as clouds have it, by one of
//! several bonded wires, or by the core that its packets are steered to; several are not. Over loopback they gain
//! nothing: all copies are made by the two threads that call the link.
//!
//! The idea is NCCL's `NCCL_NSOCKS_PERTHREAD` (`src/transport/net_socket.cc`).

use std::ops::Range;

use tinynccl_sys::config::MAX_STREAMS;

/// Shorter stripes are not worth a system call each.
const SHORTEST: usize = 16 << 10;

/// The streams besides the first, and how far each is with the current message.
#[derive(Debug)]
pub(super) struct Stripes {
    streams: usize,
    done: [usize; MAX_STREAMS],
}

impl Stripes {
    pub(super) fn new(streams: usize) -> Stripes {
        Stripes { streams: streams.clamp(1, MAX_STREAMS), done: [0; MAX_STREAMS] }
    }

    /// Streams that a message of `len` bytes goes over.
    pub(super) fn count(&self, len: usize) -> usize {
        if self.streams == 1 { 1 } else { (len / SHORTEST).clamp(1, self.streams) }
    }

    /// Bytes of the payload on the first stream.
    pub(super) fn first(&self, len: usize) -> usize {
        match self.count(len) {
            1 => len,
            count => len.div_ceil(count).next_multiple_of(64),
        }
    }

    /// Range of the payload that stream `stream`, not the first, still has to carry.
    pub(super) fn rest(&self, len: usize, stream: usize) -> Range<usize> {
        let each = self.first(len);
        let done = self.done.get(stream).copied().unwrap_or(0);
        let end = len.min((stream + 1) * each);
        (stream * each + done).min(end)..end
    }

    /// Stream `stream` has carried `n` bytes more.
    pub(super) fn advance(&mut self, stream: usize, n: usize) {
        if let Some(done) = self.done.get_mut(stream) {
            *done += n;
        }
    }

    /// The first stream besides the first one that is not done.
    pub(super) fn unfinished(&self, len: usize) -> Option<usize> {
        (1..self.count(len)).find(|&stream| !self.rest(len, stream).is_empty())
    }

    /// The next message begins.
    pub(super) fn reset(&mut self) {
        if self.streams > 1 {
            self.done = [0; MAX_STREAMS];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stripes_cover_a_message_once_whatever_its_length() {
        for streams in 1..=MAX_STREAMS {
            let mut stripes = Stripes::new(streams);
            for len in [0, 1, 16 << 10, (16 << 10) + 1, (32 << 10) - 1, 32 << 10, 70_001, 1 << 20, (1 << 20) + 63] {
                let mut at = stripes.first(len);
                assert!(stripes.count(len) <= streams && at <= len);
                for stream in 1..stripes.count(len) {
                    let stripe = stripes.rest(len, stream);
                    assert_eq!(stripe.start, at);
                    assert!(stripe.end > at);
                    at = stripe.end;
                }
                assert_eq!(at, len);
                while let Some(stream) = stripes.unfinished(len) {
                    stripes.advance(stream, 1.max(stripes.rest(len, stream).len() / 2));
                }
                stripes.reset();
                assert_eq!(stripes.unfinished(len).is_some(), stripes.count(len) > 1);
            }
        }
    }
}
