//! The backward pass of [`crate::model`] as launches. It says when gradients are final: from there to the end of the flat array.

use anyhow::Result;

use super::gemm::{Operand, Output};
use super::kernels::{Arg, Grid};
use super::memory::Array;
use super::network::Network;
use crate::ops::dropout::Site;
use crate::params::{Tensor, WPE, WTE, final_ln, index};

/// Gradients that became final, the last in the layout first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ready {
    /// Everything from this tensor to the end is final, but for the sums below.
    pub tensor: usize,
    /// The LayerNorm weight whose shares [`Network::sum_norm`] must add first, and their number.
    pub norm: Option<(usize, usize)>,
}

impl Network {
    /// Enqueues the backward pass. `ready` is called in the order in which gradients become final.
    pub fn backward(&self, mut ready: impl FnMut(Ready) -> Result<()>) -> Result<()> {
        let (c, rows, layers) = (self.config.channels, self.rows(), self.config.layers);
        let vocab = (self.config.vocab, self.shape.vocab_stride());

        // The output layer. Its weight is the token embedding, whose gradient is final only at the very end.
        let dlogits = Operand::new(self.dlogits.at(), vocab.1);
        self.blas.multiply(
            Output::new(self.gradient(WTE), c).wide(),
            (vocab.0, c, rows),
            dlogits.t(),
            Operand::new(self.lnf.at(), c),
        )?;
        let weight = Operand::new(self.weight(WTE), c);
        self.blas.multiply(Output::new(self.branch.at(), c), (rows, c, self.shape.vocab_columns()), dlogits, weight)?;
        let last = final_ln(&self.config);
        self.norm_backward(2 * layers, last, (self.stream_before(layers), &self.lnf_stats), Site::MlpOut(layers - 1))?;
        ready(Ready { tensor: last, norm: Some((last, 2 * layers)) })?;

        for l in (0..layers).rev() {
            let b = &self.blocks[l];
            let at = |tensor| index(l, tensor);

            // The MLP branch.
            self.linear_weight(at(Tensor::MlpOut), &self.branch, &b.activated, (c, 4 * c))?;
            self.gelu_backward(l)?;
            self.linear_weight(at(Tensor::MlpIn), &self.dhidden, &b.ln2, (4 * c, c))?;
            self.linear_input(&self.branch, &self.dhidden, at(Tensor::MlpIn), (4 * c, c))?;
            self.norm_backward(2 * l + 1, at(Tensor::Ln2), (&b.middle, &b.ln2_stats), Site::AttentionOut(l))?;
            ready(Ready { tensor: at(Tensor::Ln2), norm: Some((at(Tensor::Ln2), 2 * l + 1)) })?;

            // The attention branch. `dhidden` is free again and takes the gradient of the attended values.
            self.linear_weight(at(Tensor::AttentionOut), &self.branch, &b.attended, (c, c))?;
            self.linear_input(&self.dhidden, &self.branch, at(Tensor::AttentionOut), (c, c))?;
            self.attention_backward(l)?;
            self.linear_weight(at(Tensor::Qkv), &self.dqkv, &b.ln1, (3 * c, c))?;
            self.linear_input(&self.branch, &self.dqkv, at(Tensor::Qkv), (3 * c, c))?;
            let site = if l == 0 { Site::Embedding } else { Site::MlpOut(l - 1) };
            self.norm_backward(2 * l, at(Tensor::Ln1), (self.stream_before(l), &b.ln1_stats), site)?;
            ready(Ready { tensor: at(Tensor::Ln1), norm: Some((at(Tensor::Ln1), 2 * l)) })?;
        }

        self.launch(
            "positions_backward",
            Grid::each(self.config.context * c / 4),
            &[Arg::At(self.gradient(WPE)), Arg::At(self.branch.at()), Arg::U32(self.samples as u32)],
        )?;
        self.blas.multiply(
            Output::new(self.gradient(WTE), c).wide().added(),
            (vocab.0, c, rows),
            Operand::new(self.onehot.at(), vocab.1).t(),
            Operand::new(self.branch.at(), c),
        )?;
        ready(Ready { tensor: WTE, norm: None })
    }

    /// The backward pass and nothing beside it, run to its end: all gradients are there, averaged with nobody's.
    pub fn backward_alone(&self) -> Result<()> {
        let mut norms = Vec::new();
        self.backward(|ready| {
            norms.extend(ready.norm);
            Ok(())
        })?;
        self.gpu.synchronize()?;
        norms.into_iter().try_for_each(|(tensor, number)| self.sum_norm(tensor, number))?;
        self.gpu.synchronize()
    }

    /// Adds up the shares of a LayerNorm weight's gradient, on the averaging stream.
    pub fn sum_norm(&self, tensor: usize, number: usize) -> Result<()> {
        self.kernels.launch(
            &self.gpu.side,
            "column_sum",
            Grid::blocks(self.config.channels.div_ceil(32)).of((32, 32)),
            &[Arg::At(self.gradient(tensor)), Arg::At(self.partial[number].at()), Arg::U32(self.lines as u32)],
        )
    }

    /// The residual stream that enters a block.
    fn stream_before(&self, layer: usize) -> &Array<f32> {
        if layer == 0 { &self.embedded } else { &self.blocks[layer - 1].out }
    }

    /// Through a LayerNorm: adds to the stream's gradient, and leaves in `branch` what enters the branch at `site`.
    fn norm_backward(
        &self,
        number: usize,
        tensor: usize,
        (x, stats): (&Array<f32>, &Array<f32>),
        site: Site,
    ) -> Result<()> {
        self.launch(
            "norm_backward",
            Grid::blocks(self.lines),
            &[
                Arg::At(self.stream.at()),
                Arg::At(self.branch.at()),
                Arg::At(self.partial[number].at()),
                Arg::At(self.branch.at()),
                Arg::At(x.at()),
                Arg::At(stats.at()),
                Arg::At(self.value(tensor)),
                Arg::Mask(self.mask(site, true)),
                Arg::U32(self.rows() as u32),
                Arg::U32((number == 2 * self.config.layers).into()),
            ],
        )
    }

    /// `dx[rows, inputs] = dy[rows, outputs] · weight[outputs, inputs]`
    pub(super) fn linear_input(
        &self,
        dx: &Array<u8>,
        dy: &Array<u8>,
        tensor: usize,
        (outputs, inputs): (usize, usize),
    ) -> Result<()> {
        let (dy, weight) = (Operand::new(dy.at(), outputs), Operand::new(self.weight(tensor), inputs));
        self.blas.multiply(Output::new(dx.at(), inputs), (self.rows(), inputs, outputs), dy, weight)
    }

    /// `dweight[outputs, inputs] = dy[rows, outputs]ᵀ · x[rows, inputs]`
    fn linear_weight(
        &self,
        tensor: usize,
        dy: &Array<u8>,
        x: &Array<u8>,
        (outputs, inputs): (usize, usize),
    ) -> Result<()> {
        let (dy, x) = (Operand::new(dy.at(), outputs).t(), Operand::new(x.at(), inputs));
        self.blas.multiply(Output::new(self.gradient(tensor), inputs).wide(), (outputs, inputs, self.rows()), dy, x)
    }
}
