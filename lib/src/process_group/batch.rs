//! Calls that are collected and run as one.

use super::ProcessGroup;
use super::buffer::{Buffer, BufferMut, Place, Spot};
use super::gpu::Stream;
use super::own::Own;
use tinynccl_comm::RawCall;
use tinynccl_comm::calls::table::{asked, collectives};
use tinynccl_plan::dtype::ReduceOp;
use tinynccl_plan::error::{Error, Result};

/// Calls collected for one run, as one call of the backend. The order among sends and receives does not matter, and
/// small all_reduces share messages. The methods are those of [`ProcessGroup`], by the same names.
///
/// Every rank must add the same collectives in the same order, and each pair of ranks its messages. All buffers of a
/// batch are on the host, or all on one stream.
///
/// ```
/// # fn f(group: &tinynccl::process_group::ProcessGroup) -> tinynccl::Result<()> {
/// let (right, left) = ((group.rank() + 1) % group.size(), (group.rank() + group.size() - 1) % group.size());
/// let (mine, mut theirs) = (vec![1.0f32; 1000], vec![0.0f32; 1000]);
/// let mut batch = group.batch();
/// batch.send(&mine, right)?;
/// batch.recv(&mut theirs, left)?;
/// batch.run()
/// # }
/// ```
#[must_use = "nothing is sent before Batch::run"]
#[derive(Debug)]
pub struct Batch<'a> {
    group: &'a ProcessGroup,
    calls: Vec<RawCall>,
    /// Messages to ourselves.
    own: Own,
    /// Memory of the calls. Buffers of a device record their use in the stream with cudarc when they are dropped.
    places: Vec<Place<'a>>,
}

impl ProcessGroup {
    /// An empty batch.
    pub fn batch(&self) -> Batch<'_> {
        Batch { group: self, calls: Vec::new(), own: Own::default(), places: Vec::new() }
    }
}

macro_rules! batched {
    ($($(#[$doc:meta])* $form:ident $collective:ident $arguments:tt: $name:ident, $async:ident, $device:tt;)*) => {
        impl<'a> Batch<'a> {
            $(batched! { @ $form $name $collective $arguments })*
        }
    };
    (@ apart $name:ident $collective:ident ($($arg:ident: $ty:ty),*)) => {
        #[doc = concat!("Adds [`ProcessGroup::", stringify!($name), "`].")]
        pub fn $name(
            &mut self,
            input: impl Into<Buffer<'a>>,
            output: impl Into<BufferMut<'a>>
            $(, $arg: $ty)*
        ) -> Result<()> {
            let (input, mut output) = (input.into(), output.into());
            let call = self.group.comm.inner().call(asked!($collective $(, $arg)*), &input, &mut output)?;
            self.push(call, [input.place, output.place])
        }
    };
    (@ place $name:ident $collective:ident ($($arg:ident: $ty:ty),*)) => {
        #[doc = concat!("Adds [`ProcessGroup::", stringify!($name), "`].")]
        pub fn $name(&mut self, buffer: impl Into<BufferMut<'a>> $(, $arg: $ty)*) -> Result<()> {
            let mut buffer = buffer.into();
            let call = self.group.comm.inner().call_in_place(asked!($collective $(, $arg)*), &mut buffer)?;
            self.push(call, [buffer.place])
        }
    };
}
collectives!(batched);

impl<'a> Batch<'a> {
    /// Adds a send to `peer` (our own rank included, if the batch also receives from it).
    pub fn send(&mut self, data: impl Into<Buffer<'a>>, peer: usize) -> Result<()> {
        let data = data.into();
        let call = self.group.comm.inner().send(&data, peer)?;
        let own = peer == self.group.rank();
        let call = if own { self.own.send(call) } else { Some(call) };
        self.push(call, [data.place])
    }

    /// Adds a receive from `peer`.
    pub fn recv(&mut self, data: impl Into<BufferMut<'a>>, peer: usize) -> Result<()> {
        let mut data = data.into();
        let call = self.group.comm.inner().recv(&mut data, peer)?;
        let own = peer == self.group.rank();
        let call = if own { self.own.recv(call) } else { Some(call) };
        self.push(call, [data.place])
    }

    fn push<const N: usize>(&mut self, call: impl Into<Option<RawCall>>, places: [Place<'a>; N]) -> Result<()> {
        for place in places {
            if matches!(place, Place::Nowhere) {
                continue;
            }
            if let Some(first) = self.places.first() {
                first.joined(&place, "batch")?;
            }
            self.places.push(place);
        }
        self.calls.extend(call.into());
        Ok(())
    }

    /// Runs the calls and waits for all of them. An empty batch does nothing.
    pub fn run(self) -> Result<()> {
        let Batch { group, calls, own, places } = &self;
        match places.first().map_or(Spot::Host, Place::spot) {
            Spot::Host => {
                // SAFETY: the buffers are borrowed for 'a, which outlives self.
                unsafe { own.copy(group.rank()) }?;
                let inner = group.comm.inner();
                inner.drain();
                // SAFETY: as above.
                unsafe { group.backend.run_batch(inner, calls) }
            }
            Spot::Device(stream) => {
                let op = self.put_into(stream)?;
                group.mark(stream, op)?.wait()
            }
        }
    }

    /// Enqueues the calls, which are on device memory, on their stream and returns. [`ProcessGroup::synchronize`]
    /// returns their failure.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for host memory, whose calls have no stream.
    pub fn enqueue(self) -> Result<()> {
        match self.places.first().map(Place::spot) {
            None => Ok(()),
            Some(Spot::Device(stream)) => self.put_into(stream).map(drop),
            Some(Spot::Host) => {
                Err(Error::invalid("batch", "host memory cannot be enqueued, it has no stream: use Batch::run"))
            }
        }
    }

    /// Returns the name of the enqueued call.
    fn put_into(&self, stream: &Stream) -> Result<&'static str> {
        let Batch { group, calls, own, .. } = self;
        let context = group.backend.device().ok_or_else(|| Error::invalid("batch", "the group has no GPU"))?;
        // SAFETY: the buffers are borrowed for 'a, and cudarc keeps them until the stream has passed; all are of this
        // stream.
        unsafe { own.enqueue(group.rank(), context, stream) }?;
        // SAFETY: as above.
        unsafe { group.enqueue_unmarked(calls, stream) }
    }
}
