//! Calls taken apart into messages, for backends that lack the call, and messages of a rank to itself.

use std::collections::VecDeque;
use std::sync::Arc;

use cudarc::driver::CudaContext;

use crate::comm::call::Call;
use crate::cuda::{Stream, cuda};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::executor::Buffers;
use crate::wire::Collective;

/// Bytes between this rank and another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Message {
    pub(super) peer: usize,
    pub(super) address: *mut u8,
    pub(super) bytes: usize,
}

/// What a rank does for calls that only move data.
#[derive(Debug, Default)]
pub(super) struct Messages {
    pub(super) sends: Vec<Message>,
    pub(super) recvs: Vec<Message>,
    /// Our own segment, as (from, to, bytes).
    pub(super) own: Vec<(*const u8, *mut u8, usize)>,
}

impl Messages {
    /// Adds a call; false, and nothing is added, when it is not made of messages alone.
    pub(super) fn add(&mut self, call: &Call, rank: usize, size: usize) -> bool {
        let key = &call.key;
        let Buffers { input, output } = call.buffers;
        let bytes = key.count * key.dtype.size();
        let input = input.cast_mut();
        let at = |base: *mut u8, segment: usize| base.wrapping_add(segment * bytes);
        let others = (0..size).filter(|&peer| peer != rank);
        let send = |peer: usize, segment: usize| Message { peer, address: at(input, segment), bytes };
        let recv = |peer: usize, segment: usize| Message { peer, address: at(output, segment), bytes };
        let own = match key.collective {
            Collective::SendRecv if key.root == rank => {
                self.sends.push(send(key.peer, 0));
                None
            }
            Collective::SendRecv => {
                self.recvs.push(recv(key.root, 0));
                None
            }
            Collective::Gather if key.root == rank => {
                self.recvs.extend(others.map(|peer| recv(peer, peer)));
                Some((input, at(output, rank)))
            }
            Collective::Gather => {
                self.sends.push(send(key.root, 0));
                None
            }
            Collective::Scatter if key.root == rank => {
                self.sends.extend(others.map(|peer| send(peer, peer)));
                Some((at(input, rank), output))
            }
            Collective::Scatter => {
                self.recvs.push(recv(key.root, 0));
                None
            }
            Collective::AllToAll => {
                self.sends.extend(others.clone().map(|peer| send(peer, peer)));
                self.recvs.extend(others.map(|peer| recv(peer, peer)));
                Some((at(input, rank), at(output, rank)))
            }
            _ => return false,
        };
        if let Some((from, to)) = own
            && from != to
        {
            self.own.push((from.cast_const(), to, bytes));
        }
        true
    }

    /// The messages in rounds of at most one send and one receive, which cannot deadlock if all ranks take them in this order:
    /// in round (k, r), rank i sends its k-th message for rank i + r, and receives the k-th of rank i - r.
    pub(super) fn rounds(&self, rank: usize, size: usize) -> Vec<(Option<Message>, Option<Message>)> {
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
    pub(super) unsafe fn enqueue_own(&self, stream: &Stream) -> Result<()> {
        for &(from, to, bytes) in &self.own {
            // SAFETY: forwarded from the caller.
            unsafe { copy_on_device(from, to, bytes, stream) }?;
        }
        Ok(())
    }
}

/// Messages of a rank to itself: the k-th sent is the k-th received.
#[derive(Debug, Default)]
pub(super) struct Own {
    sends: Vec<(DType, usize, *const u8)>,
    recvs: Vec<(DType, usize, *mut u8)>,
}

impl Own {
    /// Takes a message that we send to ourselves; gives nothing back.
    pub(super) fn send(&mut self, call: Call) -> Option<Call> {
        self.sends.push((call.key.dtype, call.key.count, call.buffers.input));
        None
    }

    /// Takes a message that we receive from ourselves; gives nothing back.
    pub(super) fn recv(&mut self, call: Call) -> Option<Call> {
        self.recvs.push((call.key.dtype, call.key.count, call.buffers.output));
        None
    }

    fn pairs(&self, rank: usize) -> Result<impl Iterator<Item = (*const u8, *mut u8, usize)>> {
        let (sends, recvs) = (self.sends.len(), self.recvs.len());
        if sends != recvs {
            let detail = format!("rank {rank} sends {sends} times to itself but receives {recvs} times");
            return Err(Error::invalid("batch", detail));
        }
        let pairs = || self.sends.iter().zip(&self.recvs);
        if let Some((send, recv)) = pairs().find(|(send, recv)| (send.0, send.1) != (recv.0, recv.1)) {
            let detail =
                format!("rank {rank} sends {} {} to itself but receives {} {}", send.1, send.0, recv.1, recv.0);
            return Err(Error::invalid("batch", detail));
        }
        Ok(pairs().map(|(send, recv)| (send.2, recv.2, send.1 * send.0.size())))
    }

    /// # Safety
    /// The memory must be of the host and valid.
    pub(super) unsafe fn copy(&self, rank: usize) -> Result<()> {
        for (from, to, bytes) in self.pairs(rank)? {
            // SAFETY: by the caller; what is written is borrowed exclusively, so the two are apart.
            unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) };
        }
        Ok(())
    }

    /// # Safety
    /// The memory must be of the device, until `stream` has passed the copies.
    pub(super) unsafe fn enqueue(&self, rank: usize, context: &Arc<CudaContext>, stream: &Stream) -> Result<()> {
        context.bind_to_thread().map_err(|e| cuda("batch", "taking the GPU", e))?;
        for (from, to, bytes) in self.pairs(rank)? {
            // SAFETY: forwarded from the caller.
            unsafe { copy_on_device(from, to, bytes, stream) }?;
        }
        Ok(())
    }
}

/// # Safety
/// As [`Messages::enqueue_own`].
unsafe fn copy_on_device(from: *const u8, to: *mut u8, bytes: usize, stream: &Stream) -> Result<()> {
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
            // Everybody to everybody, twice, in the order of the ranks: sends first would deadlock without buffers.
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
}
