//! What the passes need in device memory, taken once: parameters, gradients, activations. One flat array each for parameters and
//! gradients, in the order of the layout, so that a bucket of gradients is a slice.

use anyhow::Result;

use super::device::Gpu;
use super::fused_gelu::FusedGelu;
use super::gemm::Blas;
use super::kernels::{Arg, Grid, Kernels, Mask, Shape};
use super::memory::Array;
use super::{Precision, error::cuda};
use crate::config::ModelConfig;
use crate::ops::dropout::{Dropout, Site};
use crate::params::{self, ParamInfo, Tensor};

/// Activations of one block that the backward pass needs. `u8`: of the precision's type.
#[derive(Debug)]
pub struct Block {
    pub(super) ln1: Array<u8>,
    pub(super) ln1_stats: Array<f32>,
    pub(super) qkv: Array<u8>,
    /// Fused: the logarithm of each row's sum, f32. Else all probabilities.
    pub(super) probs: Array<u8>,
    pub(super) attended: Array<u8>,
    /// Residual stream between attention and MLP.
    pub(super) middle: Array<f32>,
    pub(super) ln2: Array<u8>,
    pub(super) ln2_stats: Array<f32>,
    pub(super) hidden: Array<u8>,
    pub(super) activated: Array<u8>,
    /// Residual stream after the block.
    pub(super) out: Array<f32>,
}

/// Between products of the unfused attention; one set serves all blocks.
#[derive(Debug)]
pub(super) struct Scores {
    /// [samples, heads, context, context], f32.
    pub(super) scores: Array<f32>,
    pub(super) dropped: Array<u8>,
    pub(super) dscores: Array<u8>,
}

/// The network on a GPU, for batches of one size.
#[derive(Debug)]
pub struct Network {
    /// The GPU.
    pub gpu: Gpu,
    /// Shape.
    pub config: ModelConfig,
    /// Names and places of the tensors.
    pub layout: Vec<ParamInfo>,
    /// Sequences in a batch.
    pub samples: usize,
    /// Parameters.
    pub values: Array<f32>,
    /// Gradients of the mean loss.
    pub gradients: Array<f32>,
    pub(super) kernels: Kernels,
    pub(super) blas: Blas,
    pub(super) gelu: Option<FusedGelu>,
    pub(super) shape: Shape,
    pub(super) dropout: Dropout,
    /// The parameters as products read them, when that is not f32.
    pub(super) copy: Option<Array<u8>>,
    pub(super) inputs: Array<u32>,
    pub(super) targets: Array<u32>,
    /// [sites, samples]
    pub(super) keys: Array<u64>,
    pub(super) embedded: Array<f32>,
    pub(super) blocks: Vec<Block>,
    pub(super) scores: Option<Scores>,
    pub(super) lnf: Array<u8>,
    pub(super) lnf_stats: Array<f32>,
    /// [rows, vocabulary rounded up]
    pub(super) logits: Array<f32>,
    pub(super) losses: Array<f32>,
    /// Of a branch, forth and back, [rows, C].
    pub(super) branch: Array<u8>,
    pub(super) dlogits: Array<u8>,
    pub(super) onehot: Array<u8>,
    /// Gradient of the residual stream.
    pub(super) stream: Array<f32>,
    pub(super) dhidden: Array<u8>,
    pub(super) dqkv: Array<u8>,
    /// Per LayerNorm, in order of the layout: shares of its weight's gradient, [lines, C].
    pub(super) partial: Vec<Array<f32>>,
    pub(super) lines: usize,
}

impl Network {
    /// Memory for `samples` sequences. `dropout` gives the share of activations to drop; its seed and step do not matter, keys come
    /// from [`super::step`].
    pub fn new(
        gpu: Gpu,
        config: ModelConfig,
        samples: usize,
        precision: Precision,
        dropout: Dropout,
    ) -> Result<Network> {
        Self::with(gpu, Shape::new(config, precision)?, samples, dropout)
    }

    /// [`Network::new`] with a shape that may say how attention is computed.
    pub fn with(gpu: Gpu, shape: Shape, samples: usize, dropout: Dropout) -> Result<Network> {
        let (config, precision) = (shape.model, shape.precision);
        let kernels = Kernels::new(&gpu, &shape)?;
        let blas = Blas::new(&gpu, precision)?;
        let layout = params::layout(&config);
        let (rows, c) = (samples * config.context, config.channels);
        let wide = |n: usize| Array::<f32>::new(&gpu, n);
        let act = |n: usize| Array::<u8>::new(&gpu, n * precision.bytes());
        let squares = samples * config.heads * config.context * config.context;
        let block = || -> Result<Block> {
            Ok(Block {
                ln1: act(rows * c)?,
                ln1_stats: wide(rows * 2)?,
                qkv: act(rows * 3 * c)?,
                probs: if shape.fused { Array::new(&gpu, rows * config.heads * 4)? } else { act(squares)? },
                attended: act(rows * c)?,
                middle: wide(rows * c)?,
                ln2: act(rows * c)?,
                ln2_stats: wide(rows * 2)?,
                hidden: act(rows * 4 * c)?,
                activated: act(rows * 4 * c)?,
                out: wide(rows * c)?,
            })
        };
        let blocks = (0..config.layers).map(|_| block()).collect::<Result<_>>()?;
        let scores = if shape.fused {
            None
        } else {
            Some(Scores { scores: wide(squares)?, dropped: act(squares)?, dscores: act(squares)? })
        };
        let count = params::count(&layout);
        let lines = (2 * gpu.multiprocessors as usize).min(rows.div_ceil(8));
        let vocab = rows * shape.vocab_stride();
        let network = Network {
            values: wide(count)?,
            gradients: wide(count)?,
            copy: if precision == Precision::Bf16 { Some(act(count)?) } else { None },
            inputs: Array::new(&gpu, rows)?,
            targets: Array::new(&gpu, rows)?,
            keys: Array::new(&gpu, sites(&config) * samples)?,
            embedded: wide(rows * c)?,
            blocks,
            scores,
            lnf: act(rows * c)?,
            lnf_stats: wide(rows * 2)?,
            logits: wide(vocab)?,
            losses: wide(rows)?,
            branch: act(rows * c)?,
            dlogits: act(vocab)?,
            onehot: act(vocab)?,
            stream: wide(rows * c)?,
            dhidden: act(rows * 4 * c)?,
            dqkv: act(rows * 3 * c)?,
            partial: (0..2 * config.layers + 1).map(|_| wide(lines * c)).collect::<Result<_>>()?,
            lines,
            config,
            layout,
            samples,
            gelu: fused_gelu(&gpu, precision, rows, c),
            kernels,
            blas,
            shape,
            dropout,
            gpu,
        };
        Ok(network)
    }

    /// Overwrites the parameters.
    pub fn set_values(&mut self, values: &[f32]) -> Result<()> {
        self.values.write(&self.gpu, values)?;
        self.refresh_copy()
    }

    /// Makes the copy that products read from the parameters.
    pub fn refresh_copy(&self) -> Result<()> {
        let Some(copy) = &self.copy else { return Ok(()) };
        let quads = self.values.len() / 4;
        self.launch(
            "copy_values",
            Grid::each(quads),
            &[Arg::At(copy.at()), Arg::At(self.values.at()), Arg::U64(quads as u64)],
        )
    }

    /// Overwrites the batch.
    pub fn set_batch(&mut self, inputs: &[u32], targets: &[u32]) -> Result<()> {
        self.inputs.write(&self.gpu, inputs)?;
        self.targets.write(&self.gpu, targets)
    }

    /// Positions in a batch.
    pub fn rows(&self) -> usize {
        self.samples * self.config.context
    }

    /// Logits of the last forward pass at one row.
    pub fn logits(&self, row: usize) -> Result<Vec<f32>> {
        let at = row * self.shape.vocab_stride();
        self.logits.read(&self.gpu, at, at + self.config.vocab)
    }

    /// Mean loss of the last [`Network::cross_entropy`], summed here.
    pub fn loss(&self) -> Result<f64> {
        let losses = self.losses.read(&self.gpu, 0, self.rows())?;
        Ok(losses.iter().map(|&v| f64::from(v)).sum::<f64>() / self.rows() as f64)
    }

    /// Enqueues a kernel on the passes' stream.
    pub(super) fn launch(&self, name: &str, grid: Grid, arguments: &[Arg]) -> Result<()> {
        self.kernels.launch(&self.gpu.stream, name, grid, arguments)
    }

    /// Address of tensor `i` as products read it.
    pub(super) fn weight(&self, i: usize) -> u64 {
        match &self.copy {
            Some(copy) => copy.place(2 * self.layout[i].offset),
            None => self.value(i),
        }
    }

    /// Address of tensor `i`.
    pub(super) fn value(&self, i: usize) -> u64 {
        self.values.place(self.layout[i].offset)
    }

    /// Address of the gradient of tensor `i`.
    pub(super) fn gradient(&self, i: usize) -> u64 {
        self.gradients.place(self.layout[i].offset)
    }

    pub(super) fn block_weight(&self, layer: usize, tensor: Tensor) -> u64 {
        self.weight(params::index(layer, tensor))
    }

    /// The masks of a place; none with `on` false.
    pub(super) fn mask(&self, site: Site, on: bool) -> Mask {
        Mask {
            keys: self.keys.place(self.samples * site.id() as usize),
            threshold: if on { self.dropout.threshold() } else { 0 },
            scale: self.dropout.scale(),
        }
    }

    /// Computes this step's keys on the host, for tests that compare one step with the CPU's.
    pub fn set_dropout(&mut self, dropout: Dropout) -> Result<()> {
        let mut keys = Vec::new();
        for site in Site::all(self.config.layers) {
            keys.extend((0..self.samples).map(|sample| dropout.mask(site, sample).key()));
        }
        self.dropout = dropout;
        self.keys.write(&self.gpu, &keys)
    }

    /// Lets the averaging stream wait for everything on the passes' stream so far, or the other way round.
    pub(super) fn order(&self, event: &cudarc::driver::CudaEvent, side_first: bool) -> Result<()> {
        let (first, second) = match side_first {
            false => (&self.gpu.stream, &self.gpu.side),
            true => (&self.gpu.side, &self.gpu.stream),
        };
        event.record(first).and_then(|()| second.wait(event)).map_err(|e| cuda("cannot order two streams", e))
    }
}

fn fused_gelu(gpu: &Gpu, precision: Precision, rows: usize, channels: usize) -> Option<FusedGelu> {
    if precision != Precision::Bf16 {
        return None;
    }
    FusedGelu::new(gpu, rows, channels)
}

/// Places in the network that have masks.
pub(super) fn sites(config: &ModelConfig) -> usize {
    1 + 3 * config.layers
}
