//! Parts of a larger call, over raw memory: what a call that is cut into chunks elsewhere makes of this communicator.

use std::ptr::NonNull;
use std::time::Duration;

use super::Comm;
use super::call::Call;
use crate::dtype::{DType, ReduceOp};
use crate::error::Result;
use crate::executor::{Buffers, CallKey};
use crate::transport::Registration;
use crate::wire::Collective;

/// A part of a collective. Ranks compare the whole call's count, so that calls which differ are found in their first part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) collective: Collective,
    pub(crate) dtype: DType,
    pub(crate) op: ReduceOp,
    pub(crate) root: usize,
    /// Elements per segment of this part.
    pub(crate) count: usize,
    /// Elements per segment of the whole call.
    pub(crate) whole: usize,
}

/// A part of a message.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Message {
    pub(crate) at: *mut u8,
    pub(crate) bytes: usize,
    /// Bytes of the whole message.
    pub(crate) whole: usize,
    pub(crate) peer: usize,
}

impl Comm {
    /// Runs a part of a collective; `background` as for asynchronous calls: the waits leave the core to others.
    ///
    /// # Safety
    /// `input` must be readable and `output` writable for all segments of the part, and nothing else may touch that memory until
    /// this returns. They overlap only as the collective's in-place form says.
    pub(crate) unsafe fn part(&self, part: &Part, input: *const u8, output: *mut u8, background: bool) -> Result<()> {
        let Part { collective, dtype, op, root, count, whole } = *part;
        let op = collective.reduces().then_some(op);
        let key = CallKey { collective, dtype, op, root, count, whole, peer: 0 };
        // SAFETY: forwarded from the caller.
        unsafe { self.inner.collective(&key, Buffers { input, output }, background) }
    }

    /// Sends a part of a message, receives one, or both at the same time.
    ///
    /// # Safety
    /// As [`Comm::part`].
    pub(crate) unsafe fn part_messages(
        &self,
        send: Option<Message>,
        recv: Option<Message>,
        background: bool,
    ) -> Result<()> {
        let rank = self.rank();
        let call = |one: Message, sender, receiver| {
            let buffers = Buffers { input: one.at, output: one.at };
            let mut call = Call::message(DType::U8, sender, receiver, one.bytes, buffers);
            call.key.whole = one.whole;
            call
        };
        let calls: Vec<Call> =
            [send.map(|m| call(m, rank, m.peer)), recv.map(|m| call(m, m.peer, rank))].into_iter().flatten().collect();
        match calls.as_slice() {
            // SAFETY: forwarded from the caller.
            [one] => unsafe { self.inner.execute(one, background) },
            // SAFETY: forwarded from the caller.
            many => unsafe { self.inner.batch("send/recv", many, background) },
        }
    }

    /// Ranks of this communicator on our host.
    pub(crate) fn ranks_here(&self) -> usize {
        let state = &self.inner.state;
        state.members.iter().filter(|&&m| state.control.shares_host(m)).count()
    }

    /// How long a wait may spin.
    pub(crate) fn spin(&self, background: bool) -> Duration {
        self.inner.patience(background).spin
    }

    /// Registers memory with the devices that carry the links; `None` where it is of no use.
    ///
    /// # Safety
    /// The memory must stay allocated, at its place, until the registration is dropped.
    pub(crate) unsafe fn register(&self, base: NonNull<u8>, bytes: usize) -> Result<Option<Registration>> {
        // SAFETY: forwarded from the caller.
        unsafe { self.inner.state.control.register(base, bytes) }
    }
}
