//! The links a communicator has opened so far, by (channel, peer).

use std::collections::HashMap;

use crate::verify::Audit;
use tinynccl_plan::error::{Error, Result};
use tinynccl_plan::wire::Header;
use tinynccl_transport::{LinkPair, RecvLink, SendLink};

/// Sending and receiving ends in separate vectors: a fused step borrows one of each, often of the same peer.
#[derive(Debug, Default)]
pub(crate) struct Links {
    pub(super) sends: Vec<Box<dyn SendLink>>,
    pub(super) recvs: Vec<Box<dyn RecvLink>>,
    index: HashMap<(u32, usize), u32>,
    /// Communicator rank of the peer, by index.
    pub(super) peers: Vec<usize>,
    pub(super) kinds: Vec<&'static str>,
    /// True if some of the links may read a message's memory after the send call returned (zero copy): if receivers
    /// only copy the message, and if they reduce it.
    zero_copy: [bool; 2],
    any_length: Vec<bool>,
    /// The run that is going on sends and receives.
    pub(super) two_way: bool,
    /// Verifies the calls that `TINYNCCL_VERIFY` chooses, if it chooses any.
    pub(crate) audit: Option<Box<Audit>>,
}

impl Links {
    /// Index of the links with `peer` on `channel`.
    pub(crate) fn get(&self, channel: u32, peer: usize) -> Option<u32> {
        self.index.get(&(channel, peer)).copied()
    }

    /// Adds the links with `peer` on `channel`.
    pub(crate) fn insert(&mut self, channel: u32, peer: usize, mut pair: LinkPair) -> u32 {
        let index = self.sends.len() as u32;
        let receiver_pulls = pair.send.zero_copy().map(|link| link.receiver_pulls());
        self.zero_copy[0] |= receiver_pulls.is_some();
        // A receiver that reduces a message would have to copy it first: two copies again.
        self.zero_copy[1] |= receiver_pulls == Some(false);
        self.sends.push(pair.send);
        self.recvs.push(pair.recv);
        self.peers.push(peer);
        self.kinds.push(pair.kind);
        self.any_length.push(pair.any_length);
        self.index.insert((channel, peer), index);
        index
    }

    /// Returns true if some of the links may read a message's memory after the send call returned (zero copy);
    /// `reduced`: for a message that its receiver reduces.
    pub(crate) fn zero_copy(&self, reduced: bool) -> bool {
        self.zero_copy[usize::from(reduced)]
    }

    /// Returns true if all of `links` can send messages of any length by zero copy.
    pub(crate) fn any_length(&self, mut links: impl Iterator<Item = (u32, usize)>) -> bool {
        links.all(|(channel, peer)| self.get(channel, peer).is_some_and(|i| self.any_length[i as usize]))
    }

    /// True if this call is verified.
    #[inline]
    pub(crate) fn verifies(&self, header: &Header) -> bool {
        self.audit.as_ref().is_some_and(|audit| audit.has(header))
    }

    /// Number of links, each with both directions.
    pub(super) fn len(&self) -> usize {
        self.peers.len()
    }

    /// Communicator rank at the other end.
    pub(crate) fn peer(&self, index: usize) -> usize {
        self.peers[index]
    }

    /// `(kind, number of links)`, for reports.
    pub(crate) fn census(&self) -> Vec<(&'static str, usize)> {
        let mut counts: Vec<(&'static str, usize)> = Vec::new();
        for &kind in &self.kinds {
            match counts.iter_mut().find(|(k, _)| *k == kind) {
                Some((_, n)) => *n += 1,
                None => counts.push((kind, 1)),
            }
        }
        counts
    }

    /// Messages sent without a copy so far.
    pub(crate) fn zero_copy_messages(&mut self) -> u64 {
        self.sends.iter_mut().filter_map(|send| send.zero_copy()).map(|link| link.messages()).sum()
    }

    /// Pushes committed messages out; `true` when none is left in this process.
    pub(crate) fn flush(&mut self) -> Result<bool> {
        let mut clean = true;
        for send in &mut self.sends {
            if !send.is_flushed() {
                send.progress()?;
                clean &= send.is_flushed();
            }
        }
        Ok(clean)
    }

    /// After a failure: no link reads the call's memory when this returns.
    #[cold]
    pub(super) fn revoke(&mut self) {
        for link in self.sends.iter_mut().filter_map(|send| send.zero_copy()) {
            link.revoke();
        }
    }

    /// Links with committed messages that have not left this process.
    pub(super) fn unflushed(&self) -> impl Iterator<Item = usize> {
        self.sends.iter().enumerate().filter(|(_, send)| !send.is_flushed()).map(|(i, _)| i)
    }

    /// Bytes that have passed over all links, those of unfinished messages included.
    pub(crate) fn bytes_moved(&self) -> u64 {
        let sent = self.sends.iter().map(|send| send.bytes_moved());
        let received = self.recvs.iter().map(|recv| recv.bytes_moved());
        sent.chain(received).fold(0, u64::wrapping_add)
    }

    /// Lets every link receive and send as much as it can, whether a step waits for it or not. If a rank blocked on one
    /// link left another one full, two ranks that send to each other would wait forever.
    ///
    /// A peer that has left is no error here, because it may have all it needs. A step that waits for it detects that
    /// itself.
    pub(crate) fn progress(&mut self) -> Result<bool> {
        let sends = self.sends.iter_mut().map(|send| send.progress());
        let recvs = self.recvs.iter_mut().map(|recv| recv.progress());
        let mut moved = false;
        for outcome in sends.chain(recvs) {
            match outcome {
                Ok(progress) => moved |= progress,
                Err(Error::PeerLost { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(moved)
    }
}
