//! The forward pass of [`crate::model`] as launches. A residual connection and the LayerNorm behind it are one kernel.

use anyhow::Result;

use super::gemm::{Operand, Output};
use super::kernels::{Arg, Grid};
use super::memory::Array;
use super::network::Network;
use crate::ops::dropout::Site;
use crate::params::{Tensor, WPE, WTE, final_ln, index};

impl Network {
    /// Enqueues the forward pass over the batch; with `training`, dropout is on.
    pub fn forward(&self, training: bool) -> Result<()> {
        let (c, rows, layers) = (self.config.channels, self.rows(), self.config.layers);
        let first = &self.blocks[0];
        self.launch(
            "embed_norm",
            Grid::rows(rows),
            &[
                Arg::At(self.embedded.at()),
                Arg::At(first.ln1.at()),
                Arg::At(first.ln1_stats.at()),
                Arg::At(self.inputs.at()),
                Arg::At(self.value(WTE)),
                Arg::At(self.value(WPE)),
                Arg::At(self.value(index(0, Tensor::Ln1))),
                Arg::Mask(self.mask(Site::Embedding, training)),
                Arg::U32(rows as u32),
            ],
        )?;
        let mut x = &self.embedded;
        for (l, b) in self.blocks.iter().enumerate() {
            self.linear(&b.qkv, &b.ln1, self.block_weight(l, Tensor::Qkv), 3 * c, c)?;
            self.attention(l, training)?;
            self.linear(&self.branch, &b.attended, self.block_weight(l, Tensor::AttentionOut), c, c)?;
            let weight = self.value(index(l, Tensor::Ln2));
            self.residual(&b.middle, (&b.ln2, &b.ln2_stats), x, weight, Site::AttentionOut(l), training)?;
            self.gelu_forward(l)?;
            self.linear(&self.branch, &b.activated, self.block_weight(l, Tensor::MlpOut), c, 4 * c)?;
            let (weight, norm) = match self.blocks.get(l + 1) {
                Some(next) => (self.value(index(l + 1, Tensor::Ln1)), (&next.ln1, &next.ln1_stats)),
                None => (self.value(index(layers, Tensor::Ln1)), (&self.lnf, &self.lnf_stats)),
            };
            self.residual(&b.out, norm, &b.middle, weight, Site::MlpOut(l), training)?;
            x = &b.out;
        }
        debug_assert_eq!(index(layers, Tensor::Ln1), final_ln(&self.config));
        self.blas.multiply(
            Output::new(self.logits.at(), self.shape.vocab_stride()).wide(),
            (rows, self.shape.vocab_columns(), c),
            Operand::new(self.lnf.at(), c),
            Operand::new(self.weight(WTE), c).t(),
        )
    }

    /// Enqueues the loss of every row; with `gradient`, also the gradients of the logits.
    pub fn cross_entropy(&self, gradient: bool) -> Result<()> {
        let rows = self.rows();
        self.launch(
            "cross_entropy",
            Grid::rows(rows),
            &[
                Arg::At(self.losses.at()),
                Arg::At(self.dlogits.at()),
                Arg::At(self.onehot.at()),
                Arg::At(self.logits.at()),
                Arg::At(self.targets.at()),
                Arg::At(self.inputs.at()),
                Arg::U32(rows as u32),
                Arg::F32(1.0 / rows as f32),
                Arg::U32(gradient.into()),
            ],
        )
    }

    /// `out[rows, outputs] = x[rows, inputs] · weight[outputs, inputs]ᵀ`
    pub(super) fn linear(
        &self,
        out: &Array<u8>,
        x: &Array<u8>,
        weight: u64,
        outputs: usize,
        inputs: usize,
    ) -> Result<()> {
        let (x, weight) = (Operand::new(x.at(), inputs), Operand::new(weight, inputs).t());
        self.blas.multiply(Output::new(out.at(), outputs), (self.rows(), outputs, inputs), x, weight)
    }

    /// `stream = before + dropout(branch)`, and the LayerNorm of it.
    fn residual(
        &self,
        stream: &Array<f32>,
        (norm, stats): (&Array<u8>, &Array<f32>),
        before: &Array<f32>,
        weight: u64,
        site: Site,
        training: bool,
    ) -> Result<()> {
        self.launch(
            "residual_norm",
            Grid::rows(self.rows()),
            &[
                Arg::At(stream.at()),
                Arg::At(norm.at()),
                Arg::At(stats.at()),
                Arg::At(before.at()),
                Arg::At(self.branch.at()),
                Arg::At(weight),
                Arg::Mask(self.mask(site, training)),
                Arg::U32(self.rows() as u32),
            ],
        )
    }
}
