//! The backward pass of [`crate::cpu::model`] as launches. It says when gradients are final: from there to the end of
//! the flat array.

use anyhow::Result;

use super::device::Array;
use super::gemm::{Operand, Output};
use super::kernels::{Grid, args};
use super::network::{Network, Norm};
use crate::dropout::Site;
use crate::params::{WPE, WTE, final_ln, of_block};

impl Network {
    /// Enqueues the backward pass. It calls `ready(tensor, norm)` in the order in which gradients become final, the
    /// last in the layout first: from `tensor` to the end all are, but that [`Network::sum_norm`] must add the shares
    /// of LayerNorm number `norm`.
    pub fn backward(&self, mut ready: impl FnMut(usize, Option<usize>) -> Result<()>) -> Result<()> {
        let (c, rows, layers) = (self.config.channels, self.rows(), self.config.layers);
        let (vocab, stride) = (self.config.vocab, self.shape.vocab_stride());

        // The output layer. Its weight is the token embedding, whose gradient is final only at the very end.
        let (dlogits, lnf) = (Operand::new(&self.dlogits, stride), Operand::new(&self.lnf.out, c));
        let dwte = Output::wide(self.gradient(WTE), c);
        self.blas.multiply(dwte, (vocab, c, rows), dlogits.t(), lnf)?;
        let wte = Operand::new(self.weight(WTE), c);
        self.blas.multiply(Output::new(&self.branch, c), (rows, c, self.shape.vocab_columns()), dlogits, wte)?;
        let last = final_ln(&self.config);
        self.norm_backward(2 * layers, last, (self.stream_before(layers), &self.lnf), Site::MlpOut(layers - 1))?;
        ready(last, Some(2 * layers))?;

        for l in (0..layers).rev() {
            let b = &self.blocks[l];
            let [ln1, qkv, attention_out, ln2, mlp_in, mlp_out] = of_block(l);

            // The MLP branch.
            self.linear_weight(mlp_out, &self.branch, &b.activated, (c, 4 * c))?;
            self.linear_input(&self.dhidden, &self.branch, mlp_out, (c, 4 * c))?;
            let eighths = rows * 4 * c / 8;
            self.launch("gelu_backward", Grid::each(eighths), args![&self.dhidden, &b.hidden, eighths as u32])?;
            self.linear_weight(mlp_in, &self.dhidden, &b.ln2.out, (4 * c, c))?;
            self.linear_input(&self.branch, &self.dhidden, mlp_in, (4 * c, c))?;
            self.norm_backward(2 * l + 1, ln2, (&b.middle, &b.ln2), Site::AttentionOut(l))?;
            ready(ln2, Some(2 * l + 1))?;

            // The attention branch. `dhidden` is free again and takes the gradient of the attended values.
            self.linear_weight(attention_out, &self.branch, &b.attended, (c, c))?;
            self.linear_input(&self.dhidden, &self.branch, attention_out, (c, c))?;
            self.attention_backward(l)?;
            self.linear_weight(qkv, &self.dqkv, &b.ln1.out, (3 * c, c))?;
            self.linear_input(&self.branch, &self.dqkv, qkv, (3 * c, c))?;
            let site = if l == 0 { Site::Embedding } else { Site::MlpOut(l - 1) };
            self.norm_backward(2 * l, ln1, (self.stream_before(l), &b.ln1), site)?;
            ready(ln1, Some(2 * l))?;
        }

        let arguments = args![self.gradient(WPE), &self.branch, self.samples as u32];
        self.launch("positions_backward", Grid::each(self.config.context * c / 4), arguments)?;
        let (onehot, d) = (Operand::new(&self.onehot, stride).t(), Operand::new(&self.branch, c));
        self.blas.multiply(Output { add: true, ..dwte }, (vocab, c, rows), onehot, d)?;
        ready(WTE, None)
    }

    /// Adds up the shares of the gradient of LayerNorm number `number`, whose weight is `tensor`, on the averaging
    /// stream.
    pub fn sum_norm(&self, tensor: usize, number: usize) -> Result<()> {
        let grid = Grid { threads: (32, 32), ..Grid::blocks(self.config.channels.div_ceil(32)) };
        self.launch_aside("column_sum", grid, args![self.gradient(tensor), &self.partial[number], self.lines as u32])
    }

    /// The residual stream that enters a block.
    fn stream_before(&self, layer: usize) -> &Array<f32> {
        if layer == 0 { &self.embedded } else { &self.blocks[layer - 1].out }
    }

    /// Through a LayerNorm: adds to the stream's gradient, and leaves in `branch` what enters the branch at `site`.
    fn norm_backward(&self, number: usize, tensor: usize, (x, norm): (&Array<f32>, &Norm), site: Site) -> Result<()> {
        let (stream, branch, partial, weight) = (&self.stream, &self.branch, &self.partial[number], self.value(tensor));
        let (mask, rows, first) = (self.mask(site, true), self.rows() as u32, number == 2 * self.config.layers);
        let arguments = args![stream, branch, partial, branch, x, &norm.stats, weight, mask, rows, u32::from(first)];
        self.launch("norm_backward", Grid::blocks(self.lines), arguments)
    }

    /// `dx[rows, I] = dy[rows, O] · weight[O, I]`
    fn linear_input(&self, dx: &Array<u8>, dy: &Array<u8>, tensor: usize, (o, i): (usize, usize)) -> Result<()> {
        let (dy, weight) = (Operand::new(dy, o), Operand::new(self.weight(tensor), i));
        self.blas.multiply(Output::new(dx, i), (self.rows(), i, o), dy, weight)
    }

    /// `dweight[O, I] = dy[rows, O]ᵀ · x[rows, I]`
    fn linear_weight(&self, tensor: usize, dy: &Array<u8>, x: &Array<u8>, (o, i): (usize, usize)) -> Result<()> {
        let (dy, x) = (Operand::new(dy, o).t(), Operand::new(x, i));
        self.blas.multiply(Output::wide(self.gradient(tensor), i), (o, i, self.rows()), dy, x)
    }
}
