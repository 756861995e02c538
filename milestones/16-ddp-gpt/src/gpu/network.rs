//! Device memory of the passes, taken once: parameters, gradients, activations. One flat array each for parameters and
//! gradients, in the order of the layout, so that a bucket of gradients is a slice.

use anyhow::Result;

use super::Precision;
use super::device::{Address, Array, Gpu};
use super::fused_gelu::FusedGelu;
use super::gemm::Blas;
use super::kernels::{Arg, Grid, Kernels, Mask, Shape, args};
use crate::config::ModelConfig;
use crate::dropout::{Dropout, Site};
use crate::params::{self, ParamInfo};

/// The output of a LayerNorm, and mean and 1 / standard deviation of each row.
pub(super) struct Norm {
    pub(super) out: Array<u8>,
    pub(super) stats: Array<f32>,
}

/// Activations of one block that the backward pass needs. `u8`: of the precision's type.
pub struct Block {
    pub(super) ln1: Norm,
    pub(super) qkv: Array<u8>,
    /// Fused: the logarithm of each row's sum, f32. Else all probabilities.
    pub(super) probs: Array<u8>,
    pub(super) attended: Array<u8>,
    /// Residual stream between attention and MLP.
    pub(super) middle: Array<f32>,
    pub(super) ln2: Norm,
    pub(super) hidden: Array<u8>,
    pub(super) activated: Array<u8>,
    /// Residual stream after the block.
    pub(super) out: Array<f32>,
}

/// Between products of the unfused attention; one set serves all blocks.
pub(super) struct Scores {
    /// [samples, heads, context, context], f32.
    pub(super) scores: Array<f32>,
    pub(super) dropped: Array<u8>,
    pub(super) dscores: Array<u8>,
}

/// The network on a GPU, for batches of one size.
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
    /// Threshold and scale of all dropout masks; seed and step do not matter.
    pub dropout: Dropout,
    /// The parameters as products read them, when that is not f32.
    pub(super) copy: Option<Array<u8>>,
    /// The batch, [samples, context].
    pub inputs: Array<u32>,
    /// The batch one character later, [samples, context].
    pub targets: Array<u32>,
    /// Keys of dropout's masks, [sites, samples].
    pub keys: Array<u64>,
    pub(super) embedded: Array<f32>,
    pub(super) blocks: Vec<Block>,
    pub(super) scores: Option<Scores>,
    pub(super) lnf: Norm,
    /// [rows, vocabulary rounded up]
    pub(super) logits: Array<f32>,
    /// Loss of each row.
    pub losses: Array<f32>,
    /// Values of a branch in the forward pass, gradients of one in the backward pass, [rows, C].
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
    /// Memory for `samples` sequences. `dropout` gives the share of activations to drop; its seed and step do not
    /// matter, keys come from [`super::step`].
    pub fn new(gpu: Gpu, shape: Shape, samples: usize, dropout: Dropout) -> Result<Network> {
        let (config, precision) = (shape.model, shape.precision);
        let kernels = Kernels::new(&gpu, &shape)?;
        let blas = Blas::new(&gpu, precision)?;
        let layout = params::layout(&config);
        let (rows, c) = (samples * config.context, config.channels);
        let wide = |n: usize| Array::<f32>::new(&gpu, n);
        let act = |n: usize| Array::<u8>::new(&gpu, n * precision.bytes());
        let squares = samples * config.heads * config.context * config.context;
        let norm = || Ok::<_, anyhow::Error>(Norm { out: act(rows * c)?, stats: wide(rows * 2)? });
        let block = || -> Result<Block> {
            Ok(Block {
                ln1: norm()?,
                qkv: act(rows * 3 * c)?,
                probs: if shape.fused { Array::new(&gpu, rows * config.heads * 4)? } else { act(squares)? },
                attended: act(rows * c)?,
                middle: wide(rows * c)?,
                ln2: norm()?,
                hidden: act(rows * 4 * c)?,
                activated: act(rows * 4 * c)?,
                out: wide(rows * c)?,
            })
        };
        let blocks = (0..config.layers).map(|_| block()).collect::<Result<_>>()?;
        let scores = || {
            Ok::<_, anyhow::Error>(Scores { scores: wide(squares)?, dropped: act(squares)?, dscores: act(squares)? })
        };
        let count = params::count(&layout);
        let sites = Site::all(config.layers).len();
        let lines = (2 * gpu.multiprocessors as usize).min(rows.div_ceil(8));
        let vocab = rows * shape.vocab_stride();
        Ok(Network {
            values: wide(count)?,
            gradients: wide(count)?,
            copy: if precision == Precision::Bf16 { Some(act(count)?) } else { None },
            inputs: Array::new(&gpu, rows)?,
            targets: Array::new(&gpu, rows)?,
            keys: Array::new(&gpu, sites * samples)?,
            embedded: wide(rows * c)?,
            blocks,
            scores: if shape.fused { None } else { Some(scores()?) },
            lnf: norm()?,
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
            gelu: if precision == Precision::Bf16 { FusedGelu::new(&gpu, rows, c) } else { None },
            kernels,
            blas,
            shape,
            dropout,
            gpu,
        })
    }

    /// Overwrites the parameters, and makes the copy that products read.
    pub fn set_values(&mut self, values: &[f32]) -> Result<()> {
        self.values.write(&self.gpu, values)?;
        let Some(copy) = &self.copy else { return Ok(()) };
        let quads = self.values.size() / 4;
        self.launch("copy_values", Grid::each(quads), args![copy, &self.values, quads as u64])
    }

    /// Positions in a batch.
    pub fn rows(&self) -> usize {
        self.samples * self.config.context
    }

    /// Enqueues a kernel on the passes' stream.
    pub(super) fn launch(&self, name: &str, grid: Grid, arguments: &[Arg]) -> Result<()> {
        self.kernels.launch(&self.gpu.stream, name, grid, arguments)
    }

    /// Enqueues a kernel on the averaging stream.
    pub(super) fn launch_aside(&self, name: &str, grid: Grid, arguments: &[Arg]) -> Result<()> {
        self.kernels.launch(&self.gpu.side, name, grid, arguments)
    }

    /// Address of tensor `i` as products read it.
    pub(super) fn weight(&self, i: usize) -> Address {
        match &self.copy {
            Some(copy) => copy.place(2 * self.layout[i].offset),
            None => self.value(i),
        }
    }

    /// Address of tensor `i`.
    pub(super) fn value(&self, i: usize) -> Address {
        self.values.place(self.layout[i].offset)
    }

    /// Address of the gradient of tensor `i`.
    pub(super) fn gradient(&self, i: usize) -> Address {
        self.gradients.place(self.layout[i].offset)
    }

    /// The masks of a site; none with `on` false.
    pub(super) fn mask(&self, site: Site, on: bool) -> Mask {
        Mask {
            keys: self.keys.place(self.samples * site.id() as usize),
            threshold: if on { self.dropout.threshold } else { 0 },
            scale: self.dropout.scale,
        }
    }
}
