//! Splits calls into messages, for paths and libraries that lack such a call.

use std::collections::VecDeque;
use std::ops::Range;

use super::call::{Own, Round};
use crate::window::needs_slots;
use tinynccl_comm::RawCall;
use tinynccl_comm::executor::Ranges;
use tinynccl_plan::error::{Error, Result};
use tinynccl_plan::wire::Collective;

/// Bytes between this rank and another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Message {
    pub peer: usize,
    pub address: *mut u8,
    pub bytes: usize,
}

/// The launch of a message between `rank` and another; `None` for all other calls.
pub(crate) fn round(call: &RawCall, rank: usize) -> Option<Round> {
    let (input, output) = call.device_addresses();
    let peer = call.receiver(rank).unwrap_or(call.root);
    let end = |at| Some((at, call.bytes(), peer));
    let round = match call.receiver(rank) {
        Some(_) => Round { to: end(input), ..Round::default() },
        None => Round { from: end(output), ..Round::default() },
    };
    (call.collective == Collective::SendRecv && peer != rank).then_some(round)
}

/// The messages of a rank, for calls that only move data.
#[derive(Debug, Default)]
pub struct Messages {
    /// To other ranks.
    pub sends: Vec<Message>,
    /// From other ranks.
    pub recvs: Vec<Message>,
}

impl Messages {
    /// Adds a call; false, and nothing is added, when it is not made of messages alone.
    pub fn add(&mut self, call: &RawCall, rank: usize, size: usize) -> bool {
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
        match (call.collective, call.ranges.as_deref()) {
            (Collective::SendRecv, _) => match call.receiver(rank) {
                Some(receiver) => self.sends.push(message(input, receiver, even(0))),
                None => self.recvs.push(message(output, call.root, even(0))),
            },
            (Collective::AllToAll, Some(Ranges { send, recv })) => {
                self.sends.extend(every().map(|peer| message(input, peer, send[peer].clone())));
                self.recvs.extend(every().map(|peer| message(output, peer, recv[peer].clone())));
            }
            (Collective::AllToAll, None) => {
                self.sends.extend(every().map(|peer| message(input, peer, even(peer))));
                self.recvs.extend(every().map(|peer| message(output, peer, even(peer))));
            }
            (_, Some(Ranges { send, recv })) => {
                self.sends.extend(every().map(|peer| message(input, peer, send[0].clone())));
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

    /// Returns true if there are no messages.
    pub(crate) fn is_empty(&self) -> bool {
        self.sends.is_empty() && self.recvs.is_empty()
    }

    /// The ranks but `rank`, which is ours, that send or receive any of them through slots, as often as they do.
    pub(crate) fn peers_by_slots(&self, rank: usize) -> impl Iterator<Item = usize> + Clone {
        let by_slots = self.sends.iter().chain(&self.recvs).filter(|message| needs_slots(message.bytes));
        by_slots.map(|message| message.peer).filter(move |&peer| peer != rank)
    }

    /// All of it: the messages in rounds, each with one of our own copies beside it while there are any. Copies that
    /// are left over come first: the driver may load code for them, and that may wait for a kernel that waits for a
    /// rank of the same thread.
    pub(crate) fn launches(mut self, rank: usize, size: usize) -> Result<Vec<Round>> {
        let mut own = self.take_own(rank)?;
        let end = |m: Message| (m.address as u64, m.bytes, m.peer);
        let rounds = self.rounds(rank, size);
        let mut beside = own.drain(..own.len().min(rounds.len())).collect::<Vec<_>>().into_iter();
        let alone = own.into_iter().map(|own| Round { own: Some(own), ..Round::default() });
        let together = |(to, from): (Option<Message>, Option<Message>)| Round {
            to: to.map(end),
            from: from.map(end),
            own: beside.next(),
        };
        Ok(alone.chain(rounds.into_iter().map(together)).collect())
    }

    /// Takes out the messages of `rank` to itself: the k-th sent is the k-th received.
    fn take_own(&mut self, rank: usize) -> Result<Vec<Own>> {
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
        let copies = sends.iter().zip(&recvs).map(|(send, recv)| Own {
            from: send.address as u64,
            to: recv.address as u64,
            bytes: send.bytes as u64,
        });
        Ok(copies.filter(|own| own.from != own.to && own.bytes > 0).collect())
    }

    /// The messages in rounds of at most one send and one receive, which cannot deadlock if all ranks take them in this
    /// order: in round (k, r), rank i sends its k-th message for rank i + r, and receives the k-th of rank i - r.
    fn rounds(&self, rank: usize, size: usize) -> Vec<(Option<Message>, Option<Message>)> {
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
}

#[cfg(test)]
mod tests {
    use super::*;
    use tinynccl_plan::Call;
    use tinynccl_plan::{DType, ReduceOp};

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
                    Messages { sends: peers.clone().collect(), recvs: peers.collect() }
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
        let lengths = |rank: usize| tinynccl_comm::packed(&[rank + 1; SIZE]);
        let from_each = || tinynccl_comm::packed(&(1..=SIZE).collect::<Vec<_>>());
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
        let all: Vec<(Messages, Vec<Own>)> = (0..SIZE)
            .map(|rank| {
                let mut messages = Messages::default();
                assert!(calls(rank).iter().all(|call| messages.add(call, rank, SIZE)));
                assert!(!messages.add(&RawCall::on_device(f32s(Collective::AllReduce, 5), 0, 0), rank, SIZE));
                let own = messages.take_own(rank).unwrap();
                (messages, own)
            })
            .collect();
        let between = |messages: &[Message], peer| {
            messages.iter().filter(|m| m.peer == peer).map(|m| m.bytes).collect::<Vec<_>>()
        };
        for (rank, (ours, own)) in all.iter().enumerate() {
            assert!(!own.is_empty());
            for (peer, (theirs, _)) in all.iter().enumerate().filter(|(peer, _)| *peer != rank) {
                assert_eq!(between(&ours.sends, peer), between(&theirs.recvs, rank), "{rank} to {peer}");
                assert!(!between(&ours.sends, peer).is_empty());
            }
            assert!(between(&ours.sends, rank).is_empty() && between(&ours.recvs, rank).is_empty());
        }
        assert!(runs(&all.into_iter().map(|(messages, _)| messages).collect::<Vec<_>>()));
    }

    /// Gather and scatter of two ranks are one launch each; copies without a message beside them come first.
    #[test]
    fn our_own_segments_go_beside_the_messages() {
        let (input, output) = (1 << 20, 1 << 21);
        let of = |rank: usize, size: usize, calls: &[RawCall]| {
            let mut messages = Messages::default();
            assert!(calls.iter().all(|call| messages.add(call, rank, size)));
            messages.launches(rank, size).unwrap()
        };
        let at = |collective, input, output| {
            RawCall::on_device(Call::new(collective, DType::U8, ReduceOp::Sum, 1, 9), input, output)
        };
        let gather = |input| at(Collective::Gather, input, output);
        let own = |from, to| Some(Own { from, to, bytes: 9 });
        let (to, from) = (None, Some((output, 9, 0)));
        assert_eq!(of(1, 2, &[gather(input)]), [Round { to, from, own: own(input, output + 9) }]);
        assert_eq!(of(1, 2, &[gather(output + 9)]), [Round { to, from, own: None }]);
        assert_eq!(of(0, 2, &[gather(input)]), [Round { to: Some((input, 9, 1)), from: None, own: None }]);
        let scatter = at(Collective::Scatter, input, output);
        assert_eq!(
            of(1, 2, std::slice::from_ref(&scatter)),
            [Round { to: Some((input, 9, 0)), from: None, own: own(input + 9, output) }]
        );
        assert_eq!(of(0, 2, &[scatter]), [Round { to, from: Some((output, 9, 1)), own: None }]);
        // Three to ourselves, of which one is empty, and a round of one message.
        let message = |place: u64, bytes| {
            [
                RawCall::on_device(Call::send(DType::U8, 0, bytes), input + place, 0),
                RawCall::on_device(Call::recv(DType::U8, 0, bytes), 0, output + place),
            ]
        };
        let mut calls = [message(0, 9), message(32, 0), message(64, 9)].concat();
        calls.push(RawCall::on_device(Call::send(DType::U8, 1, 5), input + 96, 0));
        assert_eq!(
            of(0, 2, &calls),
            [
                Round { own: own(input + 64, output + 64), ..Round::default() },
                Round { to: Some((input + 96, 5, 1)), from: None, own: own(input, output) },
            ]
        );
    }

    #[test]
    fn short_messages_need_no_slots() {
        let sends = vec![message(1, 32 << 10), message(2, (32 << 10) + 1), message(0, 1 << 20)];
        let messages = Messages { sends, recvs: vec![message(3, 1 << 20), message(4, 0), message(2, 40_000)] };
        assert_eq!(messages.peers_by_slots(0).collect::<Vec<_>>(), [2, 3, 2]);
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
