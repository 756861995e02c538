//! A call together with its memory: all that the engine needs to run it.

use std::ops::{Deref, Range};

use crate::executor::{Buffers, Ranges};
use tinynccl_plan::Call;
use tinynccl_plan::dtype::DType;
use tinynccl_plan::wire::Collective;

/// A call over memory given by address. Addresses must be aligned to the type; they may be null where nothing is read
/// or written. Input and output are apart, or lie as in the `_in_place` form of the call.
#[derive(Debug, Clone)]
pub struct RawCall {
    /// Collective, type, count, operation and ranks.
    #[doc(hidden)]
    pub call: Call,
    /// Addresses of input and output.
    #[doc(hidden)]
    pub buffers: Buffers,
    /// Set if each pair of ranks has its own length; the call then has no count.
    #[doc(hidden)]
    pub ranges: Option<Box<Ranges>>,
}

// SAFETY: addresses alone; the caller of the unsafe function that runs or enqueues the call vouches for the memory.
unsafe impl Send for RawCall {}
// SAFETY: as above.
unsafe impl Sync for RawCall {}

impl Deref for RawCall {
    type Target = Call;
    #[inline]
    fn deref(&self) -> &Call {
        &self.call
    }
}

impl RawCall {
    /// A collective, or a message made by [`Call::send`] or [`Call::recv`].
    pub const fn new(call: Call, input: *const u8, output: *mut u8) -> RawCall {
        RawCall::over(call, Buffers { input, output })
    }

    /// A collective or a message in a GPU's memory, for `DeviceComm::enqueue`.
    pub const fn on_device(call: Call, input: u64, output: u64) -> RawCall {
        RawCall::new(call, input as *const u8, output as *mut u8)
    }

    /// A call whose ranks have equal lengths.
    #[inline]
    pub const fn over(call: Call, buffers: Buffers) -> RawCall {
        RawCall { call, buffers, ranges: None }
    }

    /// [`Comm::all_to_all_v`](crate::Comm::all_to_all_v); the ranges count elements from `input` and from `output`.
    pub fn all_to_all_v(
        dtype: DType,
        input: *const u8,
        send: Vec<Range<usize>>,
        output: *mut u8,
        recv: Vec<Range<usize>>,
    ) -> RawCall {
        RawCall::uneven(Collective::AllToAll, dtype, Buffers { input, output }, Ranges { send, recv })
    }

    /// [`Comm::all_gather_v`](crate::Comm::all_gather_v) of our `count` elements.
    pub fn all_gather_v(
        dtype: DType,
        count: usize,
        input: *const u8,
        output: *mut u8,
        recv: Vec<Range<usize>>,
    ) -> RawCall {
        let send = std::iter::once(0..count).collect();
        RawCall::uneven(Collective::AllGather, dtype, Buffers { input, output }, Ranges { send, recv })
    }

    fn uneven(collective: Collective, dtype: DType, buffers: Buffers, ranges: Ranges) -> RawCall {
        RawCall { call: Call::of(collective).with_count(dtype, 0), buffers, ranges: Some(Box::new(ranges)) }
    }

    /// The addresses of input and output.
    pub fn addresses(&self) -> (*const u8, *mut u8) {
        (self.buffers.input, self.buffers.output)
    }

    /// The addresses of input and output in a GPU's memory.
    pub fn device_addresses(&self) -> (u64, u64) {
        (self.buffers.input as u64, self.buffers.output as u64)
    }

    /// The name of the method of [`Comm`](crate::Comm) that makes such a call.
    pub fn name(&self) -> &'static str {
        match (self.collective, &self.ranges) {
            (Collective::SendRecv, _) if self.root == Call::OWN => "send",
            (Collective::SendRecv, _) => "recv",
            (Collective::AllToAll, Some(_)) => "all_to_all_v",
            (Collective::AllGather, Some(_)) => "all_gather_v",
            (Collective::Gather, Some(_)) => "gather_v",
            (Collective::Scatter, Some(_)) => "scatter_v",
            (collective, _) => collective.name(),
        }
    }
}
