//! Attention, forth and back: one kernel each where there is one for the shape, else matrix products with a softmax
//! between.

use anyhow::Result;

use super::device::{Address, Array};
use super::gemm::{Batch, Operand, Output};
use super::kernels::{Grid, args};
use super::network::{Network, Scores};
use crate::dropout::Site;

/// Threads of a block of the fused kernels (WARPS in `kernels/mma.cuh`).
const FUSED_THREADS: u32 = 128;

impl Network {
    /// `attended` from `qkv` of a block.
    pub(super) fn attention(&self, layer: usize, training: bool) -> Result<()> {
        let b = &self.blocks[layer];
        let mask = self.mask(Site::Attention(layer), training);
        let Some(Scores { scores, dropped, .. }) = &self.scores else {
            let arguments = args![&b.attended, &b.probs, &b.qkv, mask, self.scale()];
            return self.launch("attention_forward", self.fused_grid(1), arguments);
        };
        let (t, hd, c) = (self.config.context, self.config.head_dim(), self.config.channels);
        for head in 0..self.config.heads {
            let [q, k, _] = self.heads_of(&b.qkv, head);
            let out = Output { scale: self.scale(), ..Output::wide(scores.place(head * t * t), t) };
            self.blas.multiply_batch(out, (t, t, hd), q, k.t(), self.batch((3, 3, 0)))?;
        }
        let rows = self.rows() * self.config.heads;
        self.launch("causal_softmax", Grid::rows(rows), args![&b.probs, dropped, scores, mask, rows as u32])?;
        for head in 0..self.config.heads {
            let [_, _, v] = self.heads_of(&b.qkv, head);
            let out = Output::new(self.act(&b.attended, head * hd), c);
            self.blas.multiply_batch(out, (t, hd, t), self.square(dropped, head), v, self.batch((0, 3, 1)))?;
        }
        Ok(())
    }

    /// `dqkv` from the gradient of `attended`, which is in `dhidden`.
    pub(super) fn attention_backward(&self, layer: usize) -> Result<()> {
        let b = &self.blocks[layer];
        let mask = self.mask(Site::Attention(layer), true);
        let dattended = &self.dhidden;
        let Some(Scores { scores, dropped, dscores }) = &self.scores else {
            let arguments = args![&self.dqkv, &b.probs, dattended, &b.attended, &b.qkv, mask, self.scale()];
            return self.launch("attention_backward", self.fused_grid(2), arguments);
        };
        let (t, hd, c) = (self.config.context, self.config.head_dim(), self.config.channels);
        let d = |head: usize| Operand::new(self.act(dattended, head * hd), c);
        for head in 0..self.config.heads {
            let [_, _, v] = self.heads_of(&b.qkv, head);
            let out = Output::wide(scores.place(head * t * t), t);
            self.blas.multiply_batch(out, (t, t, hd), d(head), v.t(), self.batch((1, 3, 0)))?;
        }
        let rows = self.rows() * self.config.heads;
        let arguments = args![dscores, dropped, scores, &b.probs, mask, rows as u32];
        self.launch("softmax_backward", Grid::rows(rows), arguments)?;
        for head in 0..self.config.heads {
            let [q, k, _] = self.heads_of(&b.qkv, head);
            let out = |part: usize| Output::new(self.act(&self.dqkv, part * c + head * hd), 3 * c);
            let scaled = |part| Output { scale: self.scale(), ..out(part) };
            let (shape, ds) = ((t, hd, t), self.square(dscores, head));
            self.blas.multiply_batch(scaled(0), shape, ds, k, self.batch((0, 3, 3)))?;
            self.blas.multiply_batch(scaled(1), shape, ds.t(), q, self.batch((0, 3, 3)))?;
            self.blas.multiply_batch(out(2), shape, self.square(dropped, head).t(), d(head), self.batch((0, 1, 3)))?;
        }
        Ok(())
    }

    fn scale(&self) -> f32 {
        1.0 / (self.config.head_dim() as f32).sqrt()
    }

    /// A block for each head of each sample, `times` over.
    fn fused_grid(&self, times: u32) -> Grid {
        Grid {
            blocks: ((self.samples * self.config.heads) as u32, times),
            threads: (FUSED_THREADS, 1),
            shared: self.shape.attention_bytes() as u32,
        }
    }

    /// The address of activation `i`.
    fn act(&self, array: &Array<u8>, i: usize) -> Address {
        array.place(i * self.shape.precision.bytes())
    }

    /// Queries, keys and values of one head of the first sample.
    fn heads_of(&self, qkv: &Array<u8>, head: usize) -> [Operand; 3] {
        let (c, hd) = (self.config.channels, self.config.head_dim());
        [0, 1, 2].map(|part| Operand::new(self.act(qkv, part * c + head * hd), 3 * c))
    }

    /// A [context, context] matrix of one head of the first sample.
    fn square(&self, array: &Array<u8>, head: usize) -> Operand {
        let t = self.config.context;
        Operand::new(self.act(array, head * t * t), t)
    }

    /// Over the samples. Each distance as a multiple of a sample's [context, C]; 0 stands for [heads, context,
    /// context].
    fn batch(&self, (left, right, out): (usize, usize, usize)) -> Batch {
        let t = self.config.context;
        let distance = |n: usize| if n == 0 { self.config.heads * t * t } else { n * t * self.config.channels };
        Batch { count: self.samples, left: distance(left), right: distance(right), out: distance(out) }
    }
}
