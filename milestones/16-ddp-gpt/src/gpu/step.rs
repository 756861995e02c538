//! A training step, all of it on the GPU: batch, passes, averages, optimizer. The host only enqueues, or launches a graph of it.

use std::path::Path;

use anyhow::{Context, Result};
use cudarc::driver::{CudaEvent, CudaGraph, CudaStream, sys};

use super::backward::Ready;
use super::buckets::{self, Bucket};
use super::error::cuda;
use super::kernels::{Arg, Grid};
use super::memory::Array;
use super::network::{Network, sites};
use super::reducer::Reducer;
use super::trace::{Overlap, Trace, WAITING};
use crate::adamw::AdamW;
use crate::config::TrainConfig;
use crate::data::{Corpus, Split};
use crate::rng::Stream;
use crate::schedule::learning_rate;

/// Blocks, and so shares, of the sum of squares of a bucket.
const SQUARE_BLOCKS: usize = 128;
/// Steps that the host may be ahead of the GPU. A few keep it busy; hundreds of graphs fill the driver's queues, whose stalls then
/// reach the other ranks.
const AHEAD: usize = 8;

/// Everything that training keeps on the GPU.
pub struct Training<'r> {
    /// The network.
    pub network: Network,
    reducer: &'r dyn Reducer,
    config: TrainConfig,
    first_sample: usize,
    mean: Array<f32>,
    square: Array<f32>,
    /// Per group of C values: whether they decay.
    decays: Array<u8>,
    /// Per step: rate, correction, keep, nothing.
    schedule: Array<f32>,
    /// The step that runs, and the next.
    clock: Array<u64>,
    /// 0, 1, 2 …: steps of evaluation batches.
    numbers: Array<u64>,
    text: [Array<u32>; 2],
    /// Mean loss of each step's own batch.
    means: Array<f64>,
    validation: Array<f64>,
    buckets: Vec<Bucket>,
    /// One per bucket: its gradients are there; one more: all averages are done.
    events: Vec<CudaEvent>,
    squares: Array<f32>,
    /// When the passes ended; the nanoseconds that steps waited for averages after that.
    waits: Array<u64>,
    trace: Option<Trace>,
    graph: Option<CudaGraph>,
    /// The ends of the last steps, and the number of steps.
    ends: Vec<CudaEvent>,
    enqueued: usize,
}

impl<'r> Training<'r> {
    /// Uploads parameters, optimizer and text. `first_sample`: number, in the global batch, of this rank's first sequence.
    #[expect(clippy::too_many_arguments, reason = "the parts of a training, put together in one place")]
    pub fn new(
        mut network: Network,
        reducer: &'r dyn Reducer,
        config: TrainConfig,
        values: &[f32],
        adamw: &AdamW,
        corpus: &Corpus,
        first_sample: usize,
        evaluations: usize,
        bucket_bytes: usize,
    ) -> Result<Training<'r>> {
        network.set_values(values)?;
        let gpu = &network.gpu;
        let (shape, layout) = (network.config, &network.layout);
        let schedule: Vec<f32> = (0..config.steps).flat_map(|step| rates(&config, step)).collect();
        let decays: Vec<u8> =
            layout.iter().flat_map(|p| std::iter::repeat_n(u8::from(p.decays()), p.len / shape.channels)).collect();
        let buckets = buckets::plan(&shape, layout, bucket_bytes);
        let event = |_| gpu.context.new_event(None).map_err(|e| cuda("cannot make an event", e));
        let numbers: Vec<u64> = (0..evaluations.max(1) as u64).collect();
        let training = Training {
            reducer,
            config,
            first_sample,
            mean: Array::of(gpu, &adamw.mean)?,
            square: Array::of(gpu, &adamw.square)?,
            decays: Array::of(gpu, &decays)?,
            schedule: Array::of(gpu, &schedule)?,
            clock: Array::of(gpu, &[0, adamw.updates as u64])?,
            text: [Array::of(gpu, corpus.part(Split::Train))?, Array::of(gpu, corpus.part(Split::Validation))?],
            means: Array::new(gpu, config.steps)?,
            validation: Array::new(gpu, numbers.len())?,
            numbers: Array::of(gpu, &numbers)?,
            events: (0..buckets.len() + 1).map(event).collect::<Result<_>>()?,
            squares: Array::new(gpu, buckets.len() * SQUARE_BLOCKS)?,
            buckets,
            waits: Array::new(gpu, 2)?,
            trace: None,
            graph: None,
            ends: (0..AHEAD).map(event).collect::<Result<_>>()?,
            enqueued: 0,
            network,
        };
        let (gpu, values) = (&training.network.gpu, &training.network.values);
        gpu.synchronize()?;
        reducer.broadcast(&gpu.side, values.at(), values.len())?;
        gpu.synchronize()?;
        reducer.check()?;
        training.network.refresh_copy()?;
        Ok(training)
    }

    /// Averages per step.
    pub fn buckets(&self) -> usize {
        self.buckets.len()
    }

    /// Stamps the following steps.
    pub fn start_trace(&mut self) -> Result<()> {
        self.trace = Some(Trace::new(&self.network.gpu)?);
        Ok(())
    }

    /// Writes the stamps of the last step; gives how its averages and passes overlapped.
    pub fn save_trace(&self, rank: usize, path: &Path) -> Result<Option<Overlap>> {
        self.trace.as_ref().map(|trace| trace.save(&self.network.gpu, rank, path)).transpose()
    }

    /// Makes the following steps launches of one graph. Every kernel must have run before.
    pub fn capture(&mut self) -> Result<()> {
        let stream = self.network.gpu.stream.clone();
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        self.network.gpu.synchronize()?;
        stream.begin_capture(mode).map_err(|e| cuda("cannot capture a step", e))?;
        let enqueued = self.enqueue();
        let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY;
        let graph = stream.end_capture(flags);
        enqueued?;
        let graph =
            graph.map_err(|e| cuda("cannot make a graph of a step", e))?.context("the graph of a step is empty")?;
        graph.upload().map_err(|e| cuda("cannot upload the graph of a step", e))?;
        self.graph = Some(graph);
        Ok(())
    }

    /// Enqueues the next step; waits while too many are under way.
    pub fn step(&mut self) -> Result<()> {
        let slot = self.enqueued % AHEAD;
        if self.enqueued >= AHEAD {
            self.ends[slot].synchronize().map_err(|e| cuda("the GPU stopped", e))?;
            self.reducer.check()?;
        }
        match &self.graph {
            Some(graph) => graph.launch().map_err(|e| cuda("cannot launch a step", e))?,
            None => self.enqueue()?,
        }
        self.enqueued += 1;
        self.ends[slot].record(&self.network.gpu.stream).map_err(|e| cuda("cannot record an event", e))
    }

    fn enqueue(&mut self) -> Result<()> {
        if let Some(trace) = &mut self.trace {
            trace.begin();
        }
        let begun = self.stamp(false)?;
        let network = &self.network;
        let (samples, first) = (network.samples as u32, self.first_sample as u64);
        network.launch(
            "begin_step",
            Grid::blocks(1).of((1024, 1)),
            &[
                Arg::At(self.clock.at()),
                Arg::At(network.keys.at()),
                Arg::U64(self.config.seed),
                Arg::U32(sites(&network.config) as u32),
                Arg::U32(samples),
                Arg::U64(first),
            ],
        )?;
        self.fill_batch(Split::Train, self.clock.at())?;
        network.forward(true)?;
        network.cross_entropy(true)?;
        let mut before = self.span("forward", false, begun)?;

        let (mut next, mut norms) = (0, Vec::new());
        let this = &mut *self;
        let network = &this.network;
        let (buckets, events, squares, reducer) = (&this.buckets, &this.events, &this.squares, this.reducer);
        let (means, clock, trace) = (&this.means, this.clock.at(), &mut this.trace);
        network.backward(|Ready { tensor, norm }| {
            norms.extend(norm);
            before = span(network, trace, || format!("backward to {}", network.layout[tensor].name), false, before)?;
            let bucket = &buckets[next];
            if bucket.tensor != tensor {
                return Ok(());
            }
            network.order(&events[next], false)?;
            let start = stamp(network, trace, true)?;
            if next == 0 {
                // The mean is one block's work: beside the passes it costs nothing.
                mean_loss(network, &network.gpu.side, means, clock)?;
            }
            for (tensor, number) in norms.drain(..) {
                network.sum_norm(tensor, number)?;
            }
            let at = network.gradients.place(bucket.range.start);
            reducer.average(&network.gpu.side, at, bucket.range.len())?;
            network.kernels.launch(
                &network.gpu.side,
                "square_sum",
                Grid::blocks(SQUARE_BLOCKS),
                &[Arg::At(squares.place(next * SQUARE_BLOCKS)), Arg::At(at), Arg::U64(bucket.range.len() as u64 / 4)],
            )?;
            let kib = (bucket.range.len() * 4) >> 10;
            span(network, trace, || format!("bucket {next}, {kib} KiB"), true, start)?;
            next += 1;
            Ok(())
        })?;
        self.waited(0)?;
        self.network.order(&self.events[self.buckets.len()], true)?;
        self.waited(1)?;
        let before = self.span(WAITING, false, before)?;
        self.optimize()?;
        self.span("AdamW", false, before)?;
        Ok(())
    }

    /// Averages the losses of validation batches with the numbers 0 to `batches`.
    pub fn evaluate(&mut self, batches: usize) -> Result<f64> {
        for i in 0..batches {
            self.fill_batch(Split::Validation, self.numbers.place(i))?;
            self.network.forward(false)?;
            self.network.cross_entropy(false)?;
            mean_loss(&self.network, &self.network.gpu.stream, &self.validation, self.numbers.place(i))?;
        }
        Ok(self.validation.read(&self.network.gpu, 0, batches)?.iter().sum::<f64>() / batches as f64)
    }

    /// This rank's losses of steps `from..to`, after they ran.
    pub fn losses(&self, from: usize, to: usize) -> Result<Vec<f64>> {
        let losses = self.means.read(&self.network.gpu, from, to)?;
        self.reducer.check()?;
        Ok(losses)
    }

    /// Seconds that the steps so far waited for averages after their backward passes.
    pub fn waited_seconds(&self) -> Result<f64> {
        Ok(self.waits.read(&self.network.gpu, 1, 2)?[0] as f64 / 1e9)
    }

    /// Parameters and the optimizer's two means.
    pub fn download(&self) -> Result<[Vec<f32>; 3]> {
        let (gpu, n) = (&self.network.gpu, self.mean.len());
        Ok([self.network.values.read(gpu, 0, n)?, self.mean.read(gpu, 0, n)?, self.square.read(gpu, 0, n)?])
    }

    /// A batch of a part of the text; `step`: address of its number.
    fn fill_batch(&self, split: Split, step: u64) -> Result<()> {
        let network = &self.network;
        let (text, stream) = match split {
            Split::Train => (&self.text[0], Stream::Batch),
            Split::Validation => (&self.text[1], Stream::Eval),
        };
        network.launch(
            "fill_batch",
            Grid::blocks(network.samples),
            &[
                Arg::At(network.inputs.at()),
                Arg::At(network.targets.at()),
                Arg::At(text.at()),
                Arg::U64(text.len() as u64),
                Arg::At(step),
                Arg::U64(self.config.seed),
                Arg::U64(stream as u64),
                Arg::U64(self.first_sample as u64),
            ],
        )
    }

    fn optimize(&self) -> Result<()> {
        let network = &self.network;
        let quads = self.mean.len() / 4;
        let blocks = (8 * network.gpu.multiprocessors as usize).min(quads.div_ceil(256));
        network.launch(
            "adamw",
            Grid::blocks(blocks),
            &[
                Arg::At(network.values.at()),
                Arg::At(network.copy.as_ref().map_or(0, Array::at)),
                Arg::At(self.mean.at()),
                Arg::At(self.square.at()),
                Arg::At(network.gradients.at()),
                Arg::At(self.decays.at()),
                Arg::At(self.squares.at()),
                Arg::U32(self.squares.len() as u32),
                Arg::At(self.schedule.at()),
                Arg::At(self.clock.at()),
                Arg::F32(self.config.beta1 as f32),
                Arg::F32(self.config.beta2 as f32),
                Arg::F32(self.config.clip as f32),
                Arg::U64(quads as u64),
            ],
        )
    }

    /// With several ranks: the clock before (0) and after (1) the passes wait for the averages.
    fn waited(&self, end: u32) -> Result<()> {
        if self.reducer.size() == 1 {
            return Ok(());
        }
        let one = Grid::blocks(1).of((1, 1));
        self.network.launch("count_wait", one, &[Arg::At(self.waits.at()), Arg::U32(end)])
    }

    fn stamp(&mut self, side: bool) -> Result<usize> {
        stamp(&self.network, &mut self.trace, side)
    }

    /// Names the time since stamp `from`; gives the stamp at its end.
    fn span(&mut self, name: &str, side: bool, from: usize) -> Result<usize> {
        span(&self.network, &mut self.trace, || name.to_owned(), side, from)
    }
}

/// As `struct Rates` of `kernels/adamw.cu`.
fn rates(config: &TrainConfig, step: usize) -> [f32; 4] {
    let (lr, t) = (learning_rate(config, step), (step + 1) as f64);
    [
        (lr / (1.0 - config.beta1.powf(t))) as f32,
        (1.0 / (1.0 - config.beta2.powf(t))) as f32,
        (1.0 - lr * config.weight_decay) as f32,
        0.0,
    ]
}

/// `means[*place]` = the mean of the rows' losses.
fn mean_loss(network: &Network, stream: &CudaStream, means: &Array<f64>, place: u64) -> Result<()> {
    let arguments =
        [Arg::At(means.at()), Arg::At(place), Arg::At(network.losses.at()), Arg::U32(network.rows() as u32)];
    network.kernels.launch(stream, "mean_loss", Grid::blocks(1).of((1024, 1)), &arguments)
}

fn stamp(network: &Network, trace: &mut Option<Trace>, side: bool) -> Result<usize> {
    let Some(trace) = trace else { return Ok(0) };
    let (number, place) = trace.stamp()?;
    let stream = if side { &network.gpu.side } else { &network.gpu.stream };
    network.kernels.launch(stream, "stamp", Grid::blocks(1).of((1, 1)), &[Arg::At(place)])?;
    Ok(number)
}

fn span(
    network: &Network,
    trace: &mut Option<Trace>,
    name: impl FnOnce() -> String,
    side: bool,
    from: usize,
) -> Result<usize> {
    if trace.is_none() {
        return Ok(0);
    }
    let to = stamp(network, trace, side)?;
    if let Some(trace) = trace {
        trace.span(name(), side, from, to);
    }
    Ok(to)
}

impl std::fmt::Debug for Training<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Training on {}, {} buckets", self.network.gpu.describe(), self.buckets.len())
    }
}

impl Drop for Training<'_> {
    fn drop(&mut self) {
        // Nothing may be freed under a kernel.
        if let Err(error) = self.network.gpu.synchronize() {
            log::debug!("leaving after: {error:#}");
        }
    }
}
