//! The forward pass of [`crate::cpu::model`] as launches. A residual connection and the LayerNorm behind it are one
//! kernel.

use anyhow::Result;

use super::device::{Address, Array};
use super::gemm::{Operand, Output};
use super::kernels::{Grid, args};
use super::network::{Block, Network};
use crate::dropout::Site;
use crate::params::{WPE, WTE, final_ln, of_block};

impl Network {
    /// Enqueues the forward pass over the batch; with `training`, dropout is on.
    pub fn forward(&self, training: bool) -> Result<()> {
        let (c, rows, embedded) = (self.config.channels, self.rows(), &self.embedded);
        let (first, ln1, mask) = (&self.blocks[0], of_block(0)[0], self.mask(Site::Embedding, training));
        let (tokens, wte, wpe, ln1) = (&self.inputs, self.value(WTE), self.value(WPE), self.value(ln1));
        let arguments = args![embedded, &first.ln1.out, &first.ln1.stats, tokens, wte, wpe, ln1, mask, rows as u32];
        self.launch("embed_norm", Grid::rows(rows), arguments)?;
        let mut x = &self.embedded;
        for (l, b) in self.blocks.iter().enumerate() {
            let [_, qkv, attention_out, ln2, mlp_in, mlp_out] = of_block(l);
            self.linear(&b.qkv, &b.ln1.out, self.weight(qkv), (3 * c, c))?;
            self.attention(l, training)?;
            self.linear(&self.branch, &b.attended, self.weight(attention_out), (c, c))?;
            let mask = self.mask(Site::AttentionOut(l), training);
            let arguments =
                args![&b.middle, &b.ln2.out, &b.ln2.stats, x, &self.branch, self.value(ln2), mask, rows as u32];
            self.launch("residual_norm", Grid::rows(rows), arguments)?;
            self.gelu(b, self.weight(mlp_in))?;
            self.linear(&self.branch, &b.activated, self.weight(mlp_out), (c, 4 * c))?;
            let mask = self.mask(Site::MlpOut(l), training);
            let last = (&self.lnf, final_ln(&self.config));
            let (norm, after) = self.blocks.get(l + 1).map_or(last, |next| (&next.ln1, of_block(l + 1)[0]));
            let arguments =
                args![&b.out, &norm.out, &norm.stats, &b.middle, &self.branch, self.value(after), mask, rows as u32];
            self.launch("residual_norm", Grid::rows(rows), arguments)?;
            x = &b.out;
        }
        let (lnf, wte) = (Operand::new(&self.lnf.out, c), Operand::new(self.weight(WTE), c).t());
        let logits = Output::wide(&self.logits, self.shape.vocab_stride());
        self.blas.multiply(logits, (rows, self.shape.vocab_columns(), c), lnf, wte)
    }

    /// Enqueues the loss of every row; with `gradient`, also the gradients of the logits.
    pub fn cross_entropy(&self, gradient: bool) -> Result<()> {
        let (rows, dlogits, onehot, tokens) = (self.rows(), &self.dlogits, &self.onehot, &self.inputs);
        let (rows32, scale, gradient) = (rows as u32, 1.0 / rows as f32, u32::from(gradient));
        let arguments =
            args![&self.losses, dlogits, onehot, &self.logits, &self.targets, tokens, rows32, scale, gradient];
        self.launch("cross_entropy", Grid::rows(rows), arguments)
    }

    /// `out[rows, O] = x[rows, I] · weight[O, I]ᵀ`
    fn linear(&self, out: &Array<u8>, x: &Array<u8>, weight: Address, (o, i): (usize, usize)) -> Result<()> {
        let (x, weight) = (Operand::new(x, i), Operand::new(weight, i).t());
        self.blas.multiply(Output::new(out, o), (self.rows(), o, i), x, weight)
    }

    /// `hidden = ln2 · weightᵀ` and `activated = gelu(hidden)` of a block.
    fn gelu(&self, b: &Block, weight: Address) -> Result<()> {
        if let Some(fused) = &self.gelu {
            return fused.run(&self.gpu, weight, [&b.ln2.out, &b.activated, &b.hidden].map(Address::from));
        }
        let c = self.config.channels;
        self.linear(&b.hidden, &b.ln2.out, weight, (4 * c, c))?;
        let eighths = self.rows() * 4 * c / 8;
        self.launch("gelu_forward", Grid::each(eighths), args![&b.activated, &b.hidden, eighths as u32])
    }
}
