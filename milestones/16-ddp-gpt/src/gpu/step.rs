//! A training step, all of it on the GPU: batch, passes, averages, optimizer. The host only enqueues, or launches a
//! graph of it, and reads losses only where somebody wants to see them.

use std::time::Instant;

use anyhow::{Context, Result};
use cudarc::driver::{CudaEvent, CudaGraph, CudaStream, sys};
use tinynccl::{Comm, ReduceOp};

use super::Options;
use super::averages::{self, Averages, Bucket};
use super::device::{Address, Array, Gpu, failed};
use super::kernels::{Grid, Shape, args};
use super::network::Network;
use super::trace::{Trace, WAITING};
use crate::config::TrainConfig;
use crate::cpu::adamw::Rates;
use crate::data::{Batch, Corpus, Split};
use crate::dropout::{Dropout, Site};
use crate::params::{Model, ParamInfo};
use crate::report::Report;
use crate::rng::Stream;
use crate::train::{Engine, Pace, Plan, State};

/// Blocks, and so shares, of the sum of squares of a bucket.
const SQUARE_BLOCKS: usize = 128;
/// Steps that the host may be ahead of the GPU. A few keep it busy; hundreds of graphs fill the driver's queues, whose
/// stalls then reach the other ranks.
const AHEAD: usize = 8;

/// A rank that computes on a GPU, and everything that its training keeps there. Fields go in this order: the
/// communicator waits for what is on the network's streams.
pub struct Training<'a> {
    plan: &'a Plan,
    options: &'a Options,
    comm: &'a Comm,
    began: Instant,
    graph: Option<CudaGraph>,
    averages: Averages,
    first_sample: usize,
    mean: Array<f32>,
    square: Array<f32>,
    /// Per group of C values: whether they decay.
    decays: Array<u8>,
    /// Per step, as `struct Rates` of `kernels/adamw.cu`: rate, correction, keep, nothing.
    schedule: Array<f32>,
    /// The step that runs, and the next.
    clock: Array<u64>,
    /// 0, 1, 2 …: steps of evaluation batches.
    numbers: Array<u64>,
    /// Both parts of the text.
    train: Array<u32>,
    held_out: Array<u32>,
    /// Mean loss of each step's own batch.
    means: Array<f64>,
    validation: Array<f64>,
    buckets: Vec<Bucket>,
    /// One per bucket: its gradients are there; one more: all averages are done.
    events: Vec<CudaEvent>,
    squares: Array<f32>,
    /// Clock in nanoseconds when the passes ended; total nanoseconds that steps waited for averages after that.
    waits: Array<u64>,
    trace: Trace,
    /// The ends of the last steps, and the number of steps.
    ends: Vec<CudaEvent>,
    enqueued: usize,
    pace: Pace,
    /// Steps per second from one report to the next.
    rates: Vec<f64>,
    network: Network,
}

impl<'a> Training<'a> {
    /// Opens this rank's GPU, and uploads optimizer and text. Every rank calls it.
    pub fn new(plan: &'a Plan, options: &'a Options, state: &State, corpus: &Corpus, comm: &'a Comm) -> Result<Self> {
        let began = Instant::now();
        let (config, shape) = (&plan.config, plan.model);
        let gpu = Gpu::open(comm.local_rank())?;
        let averages = Averages::new(comm, &gpu, options.comm_blocks)?;
        let batch = Batch::new(config.batch, shape.context, comm.rank(), comm.size())?;
        let dropout = Dropout::new(config.dropout, config.seed, 0, 0);
        let network = Network::new(gpu, Shape::new(shape, options.precision)?, batch.samples(), dropout)?;
        let gpu = &network.gpu;
        let rates = |step| {
            let Rates { rate, correction, keep } = Rates::new(config, config.learning_rate(step), step + 1);
            [rate, correction, keep, 0.0]
        };
        let schedule: Vec<f32> = (0..config.steps).flat_map(rates).collect();
        let groups = |p: &ParamInfo| std::iter::repeat_n(u8::from(p.decays()), p.len / shape.channels);
        let decays: Vec<u8> = network.layout.iter().flat_map(groups).collect();
        let buckets = averages::plan(&shape, &network.layout, plan.bucket_bytes);
        let event = |_| gpu.context.new_event(None).map_err(failed("cannot make an event"));
        let numbers: Vec<u64> = (0..plan.eval_batches as u64).collect();
        Ok(Training {
            plan,
            options,
            comm,
            began,
            graph: None,
            averages,
            first_sample: batch.first,
            mean: Array::of(gpu, &state.adamw.mean)?,
            square: Array::of(gpu, &state.adamw.square)?,
            decays: Array::of(gpu, &decays)?,
            schedule: Array::of(gpu, &schedule)?,
            clock: Array::of(gpu, &[0, state.adamw.updates as u64])?,
            numbers: Array::of(gpu, &numbers)?,
            train: Array::of(gpu, corpus.part(Split::Train))?,
            held_out: Array::of(gpu, corpus.part(Split::Validation))?,
            means: Array::new(gpu, config.steps)?,
            validation: Array::new(gpu, numbers.len())?,
            events: (0..buckets.len() + 1).map(event).collect::<Result<_>>()?,
            squares: Array::new(gpu, buckets.len() * SQUARE_BLOCKS)?,
            buckets,
            waits: Array::new(gpu, 2)?,
            trace: Trace::new(&network, options.trace.is_some())?,
            ends: (0..AHEAD).map(event).collect::<Result<_>>()?,
            enqueued: 0,
            pace: Pace::default(),
            rates: Vec::new(),
            network,
        })
    }

    /// Enqueues the next step; waits while too many are under way.
    fn step(&mut self) -> Result<()> {
        let slot = self.enqueued % AHEAD;
        if self.enqueued >= AHEAD {
            self.ends[slot].synchronize().map_err(failed("the GPU stopped"))?;
            self.averages.check()?;
        }
        match &self.graph {
            Some(graph) => graph.launch().map_err(failed("cannot launch a step"))?,
            None => self.enqueue()?,
        }
        self.enqueued += 1;
        self.ends[slot].record(&self.network.gpu.stream).map_err(failed("cannot record an event"))
    }

    /// Makes a graph of a step. Every kernel must have run before.
    fn capture(&self) -> Result<CudaGraph> {
        let stream = &self.network.gpu.stream;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        self.network.gpu.synchronize()?;
        stream.begin_capture(mode).map_err(failed("cannot capture a step"))?;
        let enqueued = self.enqueue();
        let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY;
        let graph = stream.end_capture(flags);
        enqueued?;
        let graph = graph.map_err(failed("cannot make a graph of a step"))?.context("the graph of a step is empty")?;
        graph.upload().map_err(failed("cannot upload the graph of a step"))?;
        Ok(graph)
    }

    fn enqueue(&self) -> Result<()> {
        let (network, trace) = (&self.network, &self.trace);
        let gpu = &network.gpu;
        trace.begin();
        let begun = trace.stamp(network, false)?;
        let sites = Site::all(network.config.layers).len() as u32;
        let (seed, samples, first) = (self.plan.config.seed, network.samples as u32, self.first_sample as u64);
        let arguments = args![&self.clock, &network.keys, seed, sites, samples, first];
        network.launch("begin_step", Grid { threads: (1024, 1), ..Grid::ONE }, arguments)?;
        self.fill_batch(Split::Train, self.clock.place(0))?;
        network.forward(true)?;
        network.cross_entropy(true)?;
        let mut before = trace.span(network, || "forward".to_owned(), false, begun)?;

        let (mut next, mut norms) = (0, Vec::new());
        network.backward(|tensor, norm| {
            norms.extend(norm.map(|number| (tensor, number)));
            before = trace.span(network, || format!("backward to {}", network.layout[tensor].name), false, before)?;
            let Bucket { range, tensor: last } = &self.buckets[next];
            if *last != tensor {
                return Ok(());
            }
            order(&self.events[next], [&gpu.stream, &gpu.side])?;
            let start = trace.stamp(network, true)?;
            if next == 0 {
                // The mean is one block's work: beside the passes it costs nothing.
                self.mean_loss(&gpu.side, &self.means, self.clock.place(0))?;
            }
            for (tensor, number) in norms.drain(..) {
                network.sum_norm(tensor, number)?;
            }
            let (at, quads) = (network.gradients.place(range.start), range.len() as u64 / 4);
            self.averages.average(&gpu.side, at, range.len())?;
            let partial = self.squares.place(next * SQUARE_BLOCKS);
            network.launch_aside("square_sum", Grid::blocks(SQUARE_BLOCKS), args![partial, at, quads])?;
            trace.span(network, || format!("bucket {next}, {} KiB", (range.len() * 4) >> 10), true, start)?;
            next += 1;
            Ok(())
        })?;
        self.count_wait(0)?;
        order(&self.events[self.buckets.len()], [&gpu.side, &gpu.stream])?;
        self.count_wait(1)?;
        before = trace.span(network, || WAITING.to_owned(), false, before)?;
        self.optimize()?;
        trace.span(network, || "AdamW".to_owned(), false, before)?;
        Ok(())
    }

    /// A batch of a part of the text; `step`: address of its number.
    fn fill_batch(&self, split: Split, step: Address) -> Result<()> {
        let network = &self.network;
        let (text, stream) = match split {
            Split::Train => (&self.train, Stream::Batch),
            Split::Validation => (&self.held_out, Stream::Eval),
        };
        let (length, seed, first) = (text.size() as u64, self.plan.config.seed, self.first_sample as u64);
        let arguments = args![&network.inputs, &network.targets, text, length, step, seed, stream as u64, first];
        network.launch("fill_batch", Grid::blocks(network.samples), arguments)
    }

    /// `means[*place]` = the mean of the rows' losses.
    fn mean_loss(&self, stream: &CudaStream, means: &Array<f64>, place: Address) -> Result<()> {
        let arguments = args![means, place, &self.network.losses, self.network.rows() as u32];
        self.network.kernels.launch(stream, "mean_loss", Grid { threads: (1024, 1), ..Grid::ONE }, arguments)
    }

    /// With several ranks: the clock before (0) and after (1) the passes wait for the averages.
    fn count_wait(&self, end: u32) -> Result<()> {
        if self.comm.size() == 1 {
            return Ok(());
        }
        self.network.launch("count_wait", Grid::ONE, args![&self.waits, end])
    }

    fn optimize(&self) -> Result<()> {
        let Training { mean, square, decays, squares, schedule, clock, .. } = self;
        let Network { values, gradients, gpu, .. } = &self.network;
        let copy = self.network.copy.as_ref().map_or(Address(0), Address::from);
        let (shares, quads) = (squares.size() as u32, mean.size() / 4);
        let TrainConfig { beta1, beta2, clip, .. } = self.plan.config;
        let [beta1, beta2, most] = [beta1, beta2, clip].map(|value| value as f32);
        let quads64 = quads as u64;
        let arguments = args![
            values, copy, mean, square, gradients, decays, squares, shares, schedule, clock, beta1, beta2, most,
            quads64
        ];
        let blocks = (8 * gpu.multiprocessors as usize).min(quads.div_ceil(256));
        self.network.launch("adamw", Grid::blocks(blocks), arguments)
    }

    /// Seconds that the steps so far waited for averages after their backward passes.
    fn waited(&self) -> Result<f64> {
        Ok(self.waits.read(&self.network.gpu, 1, 2)?[0] as f64 / 1e9)
    }
}

impl Engine for Training<'_> {
    fn start(&mut self, model: &Model, report: &Report) -> Result<()> {
        self.network.set_values(&model.values)?;
        let (name, precision, buckets) = (self.network.gpu.describe(), self.options.precision, self.buckets.len());
        let ready = self.began.elapsed().as_secs_f64();
        report.note(&format!("{name}: {precision:?} products, {buckets} buckets, ready after {ready:.1} s"));
        if self.options.graph && !self.averages.captures() {
            report
                .note("note: ranks share a GPU, and their averages cannot be captured: steps are launched one by one");
        }
        Ok(())
    }

    /// The first step runs alone: it loads kernels, which a graph needs loaded and no clock should see.
    fn queues(&self) -> bool {
        self.enqueued > 0
    }

    fn steps(&mut self, state: &mut State, to: usize) -> Result<Vec<f64>> {
        let (from, first) = (state.step, self.enqueued == 0);
        let start = Instant::now();
        for _ in from..to {
            self.step()?;
        }
        let mut losses = self.means.read(&self.network.gpu, from, to)?;
        self.averages.check()?;
        if first {
            // From here on it counts what is waited.
            self.pace.waited = -self.waited()?;
            if self.options.graph && self.averages.captures() {
                self.graph = Some(self.capture()?);
            }
        } else {
            let seconds = start.elapsed().as_secs_f64();
            self.pace.seconds += seconds;
            self.pace.steps += to - from;
            self.rates.push((to - from) as f64 / seconds);
        }
        self.comm.all_reduce_in_place(&mut losses, ReduceOp::Avg)?;
        Ok(losses)
    }

    fn evaluate(&mut self, _model: &Model) -> Result<f64> {
        let batches = self.plan.eval_batches;
        for i in 0..batches {
            self.fill_batch(Split::Validation, self.numbers.place(i))?;
            self.network.forward(false)?;
            self.network.cross_entropy(false)?;
            self.mean_loss(&self.network.gpu.stream, &self.validation, self.numbers.place(i))?;
        }
        Ok(self.validation.read(&self.network.gpu, 0, batches)?.iter().sum::<f64>() / batches as f64)
    }

    /// In the first sequence of the batch; the others keep what they have.
    fn logits(&mut self, _model: &Model, tokens: &[u32], last: usize) -> Result<Vec<f32>> {
        self.network.inputs.write(&self.network.gpu, tokens)?;
        self.network.forward(false)?;
        let (network, at) = (&self.network, last * self.network.shape.vocab_stride());
        network.logits.read(&network.gpu, at, at + network.config.vocab)
    }

    fn pace(&self) -> Result<Pace> {
        let waited = if self.pace.steps == 0 { 0.0 } else { self.pace.waited + self.waited()? };
        Ok(Pace { waited, ..self.pace })
    }

    fn fetch(&self, state: &mut State) -> Result<()> {
        let (gpu, n) = (&self.network.gpu, self.mean.size());
        state.model.values = self.network.values.read(gpu, 0, n)?;
        state.adamw.mean = self.mean.read(gpu, 0, n)?;
        state.adamw.square = self.square.read(gpu, 0, n)?;
        state.adamw.updates = state.step;
        Ok(())
    }

    fn finish(&self, report: &Report) -> Result<()> {
        if let Some(path) = &self.options.trace {
            let several = self.comm.size() > 1;
            let rank = self.comm.rank();
            let path = if several { path.with_extension(format!("{rank}.json")) } else { path.clone() };
            if let Some(overlap) = self.trace.save(&self.network, rank, &path)? {
                report.note(&format!("{}: {overlap}", path.display()));
            }
        }
        let Pace { steps, seconds, .. } = self.pace;
        let mut sorted = self.rates.clone();
        sorted.sort_by(f64::total_cmp);
        let (pace, ms) = (steps as f64 / seconds.max(1e-9), 1e3 * seconds / steps.max(1) as f64);
        let (stretches, median) = (sorted.len(), sorted.get(sorted.len() / 2).copied().unwrap_or(0.0));
        report.note(&format!(
            "{pace:.1} steps/s, {ms:.3} ms a step; median of {stretches} stretches {median:.1} steps/s"
        ));
        Ok(())
    }
}

/// Lets the second stream wait for everything on the first one so far.
fn order(event: &CudaEvent, [first, second]: [&CudaStream; 2]) -> Result<()> {
    event.record(first).and_then(|()| second.wait(event)).map_err(failed("cannot order two streams"))
}

impl Drop for Training<'_> {
    fn drop(&mut self) {
        // Nothing may be freed under a kernel.
        if let Err(error) = self.network.gpu.synchronize() {
            log::debug!("leaving after: {error:#}");
        }
    }
}
