//! One rank's copy of the model and the step that keeps all copies the same, on two streams.
//!
//! *compute*: forward, backward, optimiser. *exchange*: the all-reduces. Events connect them: an all-reduce waits for
//! the event after the last gradient of its bucket, and the optimiser for the event after each all-reduce. The host
//! only enqueues.

use std::sync::Arc;

use anyhow::{Context as _, Result};
use course_kit::train::mlp::Mlp;
use course_kit::train::proof;
use cudarc::driver::sys::CUevent_flags;
use cudarc::driver::{CudaEvent, CudaSlice, CudaStream, result};
use tinynccl::ReduceOp;
use tinynccl::process_group::{BufferMut, ProcessGroup};

use crate::kernels::Kernels;
use crate::model::{Batch, DeviceMlp};
use crate::timeline::{Timeline, Transfer};

/// Schedule of a step's all-reduces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exchange {
    /// Each as soon as backward has produced its bucket.
    Overlapped,
    /// All of them after backward.
    AfterBackward,
    /// Not at all, to time the computation alone. The replicas then diverge.
    Never,
}

/// Events of one bucket.
#[derive(Debug)]
struct Events {
    /// The last gradient is complete (compute stream).
    produced: CudaEvent,
    /// The all-reduce begins (exchange stream).
    begin: CudaEvent,
    /// It is complete.
    reduced: CudaEvent,
}

/// Events at the boundaries of a step's parts (compute stream).
#[derive(Debug)]
struct Marks {
    forward: CudaEvent,
    backward: CudaEvent,
    update: CudaEvent,
    end: CudaEvent,
}

/// One rank's model, streams and events.
#[derive(Debug)]
pub struct Replica<'g> {
    group: &'g ProcessGroup,
    kernels: &'g Kernels,
    model: DeviceMlp,
    compute: Arc<CudaStream>,
    exchange: Arc<CudaStream>,
    buckets: Vec<Events>,
    marks: Marks,
    how: Exchange,
}

impl<'g> Replica<'g> {
    /// A copy of `model` (whose layers have the widths `sizes`) on the group's GPU. Every rank calls it. The weights
    /// are our own until [`Replica::broadcast`].
    pub fn new(
        group: &'g ProcessGroup,
        kernels: &'g Kernels,
        model: &Mlp,
        sizes: &[usize],
        room: usize,
        bucket_bytes: usize,
        how: Exchange,
    ) -> Result<Replica<'g>> {
        let context = group.device().context("the group has no GPU")?;
        // SAFETY: we order every use of a buffer in two streams by events, and free none before both streams have run
        // all their work (`drop`).
        unsafe { context.disable_event_tracking() };
        let compute = context.new_stream().context("making a stream")?;
        // The range is (lowest, highest) priority. An all-reduce's blocks go first when both streams have blocks to
        // place, because other ranks wait for them.
        context.bind_to_thread().context("making a stream")?;
        let (_lowest, highest) = result::stream::get_priority_range().context("asking for priorities")?;
        let exchange = context.new_stream_with_priority(highest).context("making a stream")?;
        let model = DeviceMlp::new(&compute, model, sizes, room, bucket_bytes)?;
        let event = || context.new_event(Some(CUevent_flags::CU_EVENT_DEFAULT)).context("making an event");
        let buckets = (0..model.buckets().spans().len())
            .map(|_| Ok(Events { produced: event()?, begin: event()?, reduced: event()? }))
            .collect::<Result<_>>()?;
        let marks = Marks { forward: event()?, backward: event()?, update: event()?, end: event()? };
        Ok(Replica { group, kernels, model, compute, exchange, buckets, marks, how })
    }

    /// Sets every rank's weights to rank 0's.
    pub fn broadcast(&mut self) -> Result<()> {
        let params = BufferMut::device(&self.exchange, self.model.params_mut());
        self.group.broadcast_in_place(params, 0).context("broadcasting the initial weights")
    }

    /// Takes the weights of `model`, and resets the velocities.
    pub fn load(&mut self, model: &Mlp) -> Result<()> {
        self.synchronize()?;
        self.model.load(&self.compute, model)
    }

    /// Changes when the all-reduces run.
    pub fn set_exchange(&mut self, how: Exchange) {
        self.how = how;
    }

    /// Enqueues one step on our shard of the global batch, and returns. All shards must have the same size.
    pub fn step(&mut self, batch: &mut Batch<'_>, rate: f32) -> Result<()> {
        self.marks.forward.record(&self.compute)?;
        self.model.forward(self.kernels, &self.compute, batch)?;
        self.backward(batch)?;
        for (bucket, events) in self.buckets.iter().enumerate() {
            if self.how != Exchange::Never {
                self.compute.wait(&events.reduced)?;
            }
            self.model.update(self.kernels, &self.compute, bucket, rate)?;
        }
        self.marks.end.record(&self.compute)?;
        Ok(())
    }

    /// The averaged gradients of a batch, without a step. Waits for the device.
    pub fn gradients(&mut self, batch: &mut Batch<'_>) -> Result<Vec<Vec<f32>>> {
        self.model.forward(self.kernels, &self.compute, batch)?;
        self.backward(batch)?;
        self.synchronize()?;
        self.model.gradients(&self.compute)
    }

    /// Enqueues backward and the all-reduces.
    // EXERCISE 2 (Which waits are needed; needs GPU): enqueue backward; after each bucket's last gradient record
    // `produced`, let the exchange stream wait for it, average the bucket there and record `reduced`. Without overlap
    // do all of this at the end.
    fn backward(&mut self, batch: &Batch<'_>) -> Result<()> {
        let Replica { group, kernels, model, compute, exchange, buckets, marks, how } = self;
        let spans = model.buckets().spans().to_vec();
        let all_reduce = |gradients: &mut CudaSlice<f32>, bucket: usize, behind: &CudaEvent| -> Result<()> {
            exchange.wait(behind)?;
            buckets[bucket].begin.record(exchange)?;
            let mut elements = gradients.slice_mut(spans[bucket].clone());
            let mut batch = group.batch();
            batch.all_reduce_in_place(BufferMut::device(exchange, &mut elements), ReduceOp::Avg)?;
            batch.enqueue().context("averaging the gradients")?;
            Ok(buckets[bucket].reduced.record(exchange)?)
        };
        marks.backward.record(compute)?;
        model.backward(kernels, compute, batch, |gradients, bucket| {
            let produced = &buckets[bucket].produced;
            produced.record(compute)?;
            match how {
                Exchange::Overlapped => all_reduce(gradients, bucket, produced),
                Exchange::AfterBackward | Exchange::Never => Ok(()),
            }
        })?;
        marks.update.record(compute)?;
        if *how == Exchange::AfterBackward {
            for bucket in 0..buckets.len() {
                all_reduce(&mut model.gradients, bucket, &marks.update)?;
            }
        }
        Ok(())
    }

    /// Waits for all enqueued work. Only here does the host wait for the device.
    ///
    /// # Errors
    /// The failure of enqueued work, such as a rank that did not arrive.
    pub fn synchronize(&self) -> Result<()> {
        self.group.synchronize(&self.exchange).context("waiting for the all-reduces")?;
        self.compute.synchronize().context("waiting for the compute stream")
    }

    /// The stream of forward, backward and optimiser.
    pub fn compute(&self) -> &Arc<CudaStream> {
        &self.compute
    }

    /// The model.
    pub fn model(&self) -> &DeviceMlp {
        &self.model
    }

    /// Proves that all ranks hold the same bits; gives their fingerprint. Waits for the device.
    pub fn prove_identical(&self) -> Result<u64> {
        self.synchronize()?;
        let params = self.model.params(&self.compute)?;
        let params: Vec<&[f32]> = params.iter().map(Vec::as_slice).collect();
        proof::prove_identical(self.group.comm(), self.model.specs(), &params)
    }

    /// Times of the last step's parts; without all-reduces, no transfers. Waits for the device.
    pub fn timeline(&self) -> Result<Timeline> {
        self.synchronize()?;
        let at = |event: &CudaEvent| -> Result<f64> { Ok(1e3 * f64::from(self.marks.forward.elapsed_ms(event)?)) };
        let buckets = if self.how == Exchange::Never { &[] } else { self.buckets.as_slice() };
        let transfers = buckets.iter().zip(self.model.buckets().spans()).map(|(events, span)| {
            let bytes = span.len() * size_of::<f32>();
            Ok(Transfer {
                bytes,
                produced: at(&events.produced)?,
                begin: at(&events.begin)?,
                end: at(&events.reduced)?,
            })
        });
        Ok(Timeline {
            transfers: transfers.collect::<Result<_>>()?,
            forward: at(&self.marks.backward)?,
            backward: at(&self.marks.update)?,
            step: at(&self.marks.end)?,
        })
    }
}

impl Drop for Replica<'_> {
    fn drop(&mut self) {
        // Buffers are freed in the order of one stream; the other one may still use them.
        let _ = self.exchange.synchronize();
        let _ = self.compute.synchronize();
    }
}
