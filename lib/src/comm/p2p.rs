//! Point to point: `send` and `recv` between two ranks, as one-lane programs on a channel of their own.

use super::Comm;
use crate::dtype::Element;
use crate::error::{Error, Result};
use crate::schedule::{Lane, Loc, Program, Step};

/// The channel of point-to-point messages: apart from the collectives', so that the two never wait for each other.
pub(super) const CHANNEL: u32 = 1 << 16;

/// What `rank` does for a message from `sender` to `receiver`.
pub(super) fn program(rank: usize, sender: usize, receiver: usize) -> Program {
    let step = if rank == sender {
        Step::Send { to: receiver as u32, src: Loc::input(0, 0) }
    } else {
        Step::Recv { from: sender as u32, dst: Loc::output(0, 0) }
    };
    Program { parts: 1, span: 1, scratch_segments: 0, lanes: vec![Lane { channel: CHANNEL, steps: vec![step] }] }
}

impl Comm {
    /// Sends `data` to `peer`, which must [`Comm::recv`] the same number of elements of the same type.
    ///
    /// Returns when `data` may be reused: small messages are buffered by the link, larger ones wait for the receiver.
    /// The first message between two ranks also waits until the peer makes its call, because the link is opened then.
    /// Ranks that send in a circle before they receive may therefore wait for each other: use [`Comm::group`].
    pub fn send<T: Element>(&self, data: &[T], peer: usize) -> Result<()> {
        self.not_self("send", peer)?;
        self.group(|group| group.send(data, peer))
    }

    /// Receives from `peer` what it [`Comm::send`]s to us.
    pub fn recv<T: Element>(&self, data: &mut [T], peer: usize) -> Result<()> {
        self.not_self("recv", peer)?;
        self.group(|group| group.recv(data, peer))
    }

    fn not_self(&self, op: &str, peer: usize) -> Result<()> {
        if peer == self.rank() {
            return Err(Error::invalid(
                op,
                format!("rank {peer} cannot wait for itself: put the send and the recv into one group"),
            ));
        }
        Ok(())
    }
}
