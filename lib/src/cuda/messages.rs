//! Splits calls into messages, for paths and libraries that lack such a call.

use std::collections::VecDeque;
use std::ops::Range;

use super::call::Stream;
use super::driver::cuda;
use crate::Call;
use crate::comm::{Ranges, RawCall};
use crate::error::{Error, Result};
use crate::wire::Collective;

/// Bytes between this rank and another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Message {
    pub(crate) peer: usize,
    pub(crate) address: *mut u8,
    pub(crate) bytes: usize,
}

/// The messages of a rank, for calls that only move data.
#[derive(Debug, Default)]
pub(crate) struct Messages {
    pub(crate) sends: Vec<Message>,
    pub(crate) recvs: Vec<Message>,
    /// Our own segment, as (from, to, bytes).
    pub(crate) own: Vec<(*const u8, *mut u8, usize)>,
}

impl Messages {
    /// Adds a call; false, and nothing is added, when it is not made of messages alone.
    pub(crate) fn add(&mut self, call: &RawCall, rank: usize, size: usize) -> bool {
        let (input, output) = call.addresses();
        let (input, elem) = (input.cast_mut(), call.dtype.size());
        // Element ranges of segments.
        let even = |segment: usize| segment * call.count..(segment + 1) * call.count;
        let message = |base: *mut u8, peer: usize, range: Range<usize>| {
            let address = base.wrapping_add(range.start * elem);
            Message { peer, address, bytes: range.len() * elem }
        };
        let at_root = call.root == rank;
        let every = || 0..size;
        match (call.collective, call.ranges()) {
            (Collective::SendRecv, _) => {
                let peer =
                    call.partner(if call.root == Call::OWN || call.peer == Call::OWN { Call::OWN } else { rank });
                let sends = call.root == Call::OWN || call.peer != Call::OWN && at_root;
                match sends {
                    true => self.sends.push(message(input, peer, even(0))),
                    false => self.recvs.push(message(output, peer, even(0))),
                }
            }
            (Collective::AllToAll, Some(Ranges { send, recv })) => {
                self.sends.extend(every().map(|peer| message(input, peer, send[peer].clone())));
                self.recvs.extend(every().map(|peer| message(output, peer, recv[peer].clone())));
            }
            (Collective::AllToAll, None) => {
                self.sends.extend(every().map(|peer| message(input, peer, even(peer))));
                self.recvs.extend(every().map(|peer| message(output, peer, even(peer))));
            }
            (_, Some(Ranges { recv, .. })) => {
                self.sends.extend(every().map(|peer| message(input, peer, even(0))));
                self.recvs.extend(every().map(|peer| message(output, peer, recv[peer].clone())));
            }
            (Collective::Gather, None) => {
                self.sends.push(message(input, call.root, even(0)));
                self.recvs.extend(every().filter(|_| at_root).map(|peer| message(output, peer, even(peer))));
            }
            (Collective::Scatter, None) => {
                self.sends.extend(every().filter(|_| at_root).map(|peer| message(input, peer, even(peer))));
                self.recvs.push(message(output, call.root, even(0)));
            }
            _ => return false,
        }
        true
    }

    /// Whether there are none between ranks.
    pub(crate) fn is_empty(&self) -> bool {
        self.sends.is_empty() && self.recvs.is_empty()
    }

    /// The other rank of each, as often as it occurs.
    pub(crate) fn peers(&self) -> impl Iterator<Item = usize> + Clone {
        self.sends.iter().chain(&self.recvs).map(|message| message.peer)
    }

    /// Pairs the messages of `rank` to itself: the k-th sent is the k-th received.
    pub(crate) fn take_own(&mut self, rank: usize) -> Result<()> {
        let take = |messages: &mut Vec<Message>| -> Vec<Message> {
            messages.extract_if(.., |message| message.peer == rank).collect()
        };
        let (sends, recvs) = (take(&mut self.sends), take(&mut self.recvs));
        let lengths = |all: &[Message]| all.iter().map(|m| m.bytes).collect::<Vec<_>>();
        if lengths(&sends) != lengths(&recvs) {
            let (sends, recvs) = (lengths(&sends), lengths(&recvs));
            let detail = format!(
                "rank {rank} sends messages of {sends:?} bytes to itself but receives {recvs:?}: put both into one group"
            );
            return Err(Error::invalid("send/recv", detail));
        }
        let pairs = sends.iter().zip(&recvs).map(|(send, recv)| (send.address.cast_const(), recv.address, send.bytes));
        self.own.extend(pairs.filter(|&(from, to, _)| from != to.cast_const()));
        Ok(())
    }

    /// The messages in rounds of at most one send and one receive, which cannot deadlock if all ranks take them in this
    /// order: in round (k, r), rank i sends its k-th message for rank i + r, and receives the k-th of rank i - r.
    pub(crate) fn rounds(&self, rank: usize, size: usize) -> Vec<(Option<Message>, Option<Message>)> {
        let by_peer = |messages: &[Message]| {
            let mut queues = vec![VecDeque::new(); size];
            for message in messages {
                queues[message.peer].push_back(*message);
            }
            queues
        };
        let (mut sends, mut recvs) = (by_peer(&self.sends), by_peer(&self.recvs));
        let mut rounds = Vec::new();
        while sends.iter().chain(&recvs).any(|queue| !queue.is_empty()) {
            for r in 1..size {
                let round = (sends[(rank + r) % size].pop_front(), recvs[(rank + size - r) % size].pop_front());
                if round != (None, None) {
                    rounds.push(round);
                }
            }
        }
        rounds
    }

    /// Copies our own segments on the device.
    ///
    /// # Safety
    /// They must be device memory, until `stream` has passed the copies.
    pub(crate) unsafe fn enqueue_own(&self, stream: &Stream) -> Result<()> {
        for &(from, to, bytes) in &self.own {
            // SAFETY: forwarded from the caller.
            unsafe { copy_on_device(from, to, bytes, stream) }?;
        }
        Ok(())
    }
}

/// # Safety
/// As [`Messages::enqueue_own`].
pub(crate) unsafe fn copy_on_device(from: *const u8, to: *mut u8, bytes: usize, stream: &Stream) -> Result<()> {
    if bytes == 0 {
        return Ok(());
    }
    // SAFETY: forwarded from the caller.
    unsafe { cudarc::driver::result::memcpy_dtod_async(to as u64, from as u64, bytes, stream.handle()) }
        .map_err(|e| cuda("copy", format!("{bytes} bytes on the device"), e))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, ReduceOp};

    fn message(peer: usize, bytes: usize) -> Message {
        Message { peer, address: std::ptr::null_mut(), bytes }
    }

    /// Ranks that take their rounds one after the other, each waiting for the other side of its messages.
    fn runs(all: &[Messages]) -> bool {
        let size = all.len();
        let mut rounds: Vec<VecDeque<_>> =
            all.iter().enumerate().map(|(rank, m)| VecDeque::from(m.rounds(rank, size))).collect();
        loop {
            // A rank's round is over when each message's other side is in its first round too.
            let fits = |rank: usize| {
                let (send, recv): &(Option<Message>, Option<Message>) = rounds[rank].front()?;
                let there = send.is_none_or(|m| {
                    rounds[m.peer].front().is_some_and(|other| other.1.is_some_and(|o| o.peer == rank))
                });
                let back = recv.is_none_or(|m| {
                    rounds[m.peer].front().is_some_and(|other| other.0.is_some_and(|o| o.peer == rank))
                });
                Some(there && back)
            };
            let ready: Vec<usize> = (0..size).filter(|&rank| fits(rank) == Some(true)).collect();
            if ready.is_empty() {
                return rounds.iter().all(VecDeque::is_empty);
            }
            for rank in ready {
                rounds[rank].pop_front();
            }
        }
    }

    #[test]
    fn rounds_do_not_deadlock() {
        for size in 1..8 {
            // All to all, twice, in the order of the ranks: sends first would deadlock without buffers.
            let all: Vec<Messages> = (0..size)
                .map(|rank| {
                    let peers = (0..size).filter(|&p| p != rank).flat_map(|p| [message(p, 1), message(p, 2)]);
                    Messages { sends: peers.clone().collect(), recvs: peers.collect(), own: Vec::new() }
                })
                .collect();
            assert!(runs(&all), "{size} ranks");
            // All to one.
            let all: Vec<Messages> = (0..size)
                .map(|rank| match rank {
                    0 => Messages { recvs: (1..size).map(|p| message(p, 1)).collect(), ..Messages::default() },
                    _ => Messages { sends: vec![message(0, 1)], ..Messages::default() },
                })
                .collect();
            assert!(runs(&all), "{size} ranks to one");
        }
    }

    /// For every call made of messages, each rank expects exactly the bytes that the others send to it.
    #[test]
    fn both_ends_of_a_call_have_the_same_messages() {
        const SIZE: usize = 3;
        let at = |segments: usize| (1 << 20) + 4 * segments as u64;
        let f32s = |collective, count| Call::new(collective, DType::F32, ReduceOp::Sum, 1, count);
        let lengths = |rank: usize| crate::comm::packed(&[rank + 1; SIZE]);
        let from_each = || crate::comm::packed(&(1..=SIZE).collect::<Vec<_>>());
        let (null, some) = (std::ptr::null(), at(0) as *mut u8);
        let calls = |rank: usize| {
            vec![
                RawCall::on_device(f32s(Collective::Gather, 5), at(0), at(100)),
                RawCall::on_device(f32s(Collective::Scatter, 5), at(0), at(100)),
                RawCall::on_device(f32s(Collective::AllToAll, 5), at(0), at(100)),
                RawCall::all_to_all_v(DType::F32, some, lengths(rank), some, from_each()),
                RawCall::all_gather_v(DType::F32, rank + 1, some, some, from_each()),
                RawCall::new(Call::send(DType::U8, (rank + 1) % SIZE, 7), some, some),
                RawCall::new(Call::recv(DType::U8, (rank + SIZE - 1) % SIZE, 7), null, some),
                RawCall::new(Call::send(DType::U8, rank, 9), some, some),
                RawCall::new(Call::recv(DType::U8, rank, 9), null, some.wrapping_add(64)),
            ]
        };
        let all: Vec<Messages> = (0..SIZE)
            .map(|rank| {
                let mut messages = Messages::default();
                assert!(calls(rank).iter().all(|call| messages.add(call, rank, SIZE)));
                assert!(!messages.add(&RawCall::on_device(f32s(Collective::AllReduce, 5), 0, 0), rank, SIZE));
                messages.take_own(rank).unwrap();
                messages
            })
            .collect();
        let between = |messages: &[Message], peer| {
            messages.iter().filter(|m| m.peer == peer).map(|m| m.bytes).collect::<Vec<_>>()
        };
        for (rank, ours) in all.iter().enumerate() {
            assert!(!ours.own.is_empty());
            for (peer, theirs) in all.iter().enumerate().filter(|(peer, _)| *peer != rank) {
                assert_eq!(between(&ours.sends, peer), between(&theirs.recvs, rank), "{rank} to {peer}");
                assert!(!between(&ours.sends, peer).is_empty());
            }
            assert!(between(&ours.sends, rank).is_empty() && between(&ours.recvs, rank).is_empty());
        }
        assert!(runs(&all));
    }

    #[test]
    fn a_message_to_oneself_has_two_ends() {
        let send = RawCall::new(Call::send(DType::U8, 0, 9), 64 as *const u8, std::ptr::null_mut());
        let mut messages = Messages::default();
        messages.add(&send, 0, 2);
        let error = messages.take_own(0).unwrap_err().to_string();
        assert!(error.contains("rank 0") && error.contains("[9]"), "{error}");
    }
}
