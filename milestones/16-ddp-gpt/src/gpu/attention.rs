//! Attention, forth and back: one kernel each where there is one for the shape, else matrix products with a softmax between.

use anyhow::Result;

use super::gemm::{Batch, Operand, Output};
use super::kernels::{Arg, Grid};
use super::memory::Array;
use super::network::{Network, Scores};
use crate::ops::dropout::Site;

/// Threads of a block of the fused kernels (WARPS in `kernels/mma.cuh`).
const FUSED_THREADS: u32 = 128;

impl Network {
    /// `attended` from `qkv` of a block.
    pub(super) fn attention(&self, layer: usize, training: bool) -> Result<()> {
        let b = &self.blocks[layer];
        let mask = self.mask(Site::Attention(layer), training);
        let Some(Scores { scores, dropped, .. }) = &self.scores else {
            return self.launch(
                "attention_forward",
                self.fused_grid(),
                &[
                    Arg::At(b.attended.at()),
                    Arg::At(b.probs.at()),
                    Arg::At(b.qkv.at()),
                    Arg::Mask(mask),
                    Arg::F32(self.scale()),
                ],
            );
        };
        let (t, hd, c) = (self.config.context, self.config.head_dim(), self.config.channels);
        for head in 0..self.config.heads {
            let [q, k, _] = self.heads_of(&b.qkv, head);
            let out = Output::new(scores.place(head * t * t), t).wide().scaled(self.scale());
            self.blas.multiply_batch(out, (t, t, hd), q, k.t(), self.batch((3, 3, 0)))?;
        }
        let rows = self.rows() * self.config.heads;
        self.launch(
            "causal_softmax",
            Grid::rows(rows),
            &[
                Arg::At(b.probs.at()),
                Arg::At(dropped.at()),
                Arg::At(scores.at()),
                Arg::Mask(mask),
                Arg::U32(rows as u32),
            ],
        )?;
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
        let dattended = self.dhidden.at();
        let Some(Scores { scores, dropped, dscores }) = &self.scores else {
            return self.launch(
                "attention_backward",
                self.fused_grid().times(2),
                &[
                    Arg::At(self.dqkv.at()),
                    Arg::At(b.probs.at()),
                    Arg::At(dattended),
                    Arg::At(b.attended.at()),
                    Arg::At(b.qkv.at()),
                    Arg::Mask(mask),
                    Arg::F32(self.scale()),
                ],
            );
        };
        let (t, hd, c) = (self.config.context, self.config.head_dim(), self.config.channels);
        let d = |head: usize| Operand::new(self.act(&self.dhidden, head * hd), c);
        for head in 0..self.config.heads {
            let [_, _, v] = self.heads_of(&b.qkv, head);
            let out = Output::new(scores.place(head * t * t), t).wide();
            self.blas.multiply_batch(out, (t, t, hd), d(head), v.t(), self.batch((1, 3, 0)))?;
        }
        let rows = self.rows() * self.config.heads;
        self.launch(
            "softmax_backward",
            Grid::rows(rows),
            &[
                Arg::At(dscores.at()),
                Arg::At(dropped.at()),
                Arg::At(scores.at()),
                Arg::At(b.probs.at()),
                Arg::Mask(mask),
                Arg::U32(rows as u32),
            ],
        )?;
        for head in 0..self.config.heads {
            let [q, k, _] = self.heads_of(&b.qkv, head);
            let out = |part: usize| Output::new(self.act(&self.dqkv, part * c + head * hd), 3 * c);
            let ds = self.square(dscores, head);
            let shape = (t, hd, t);
            self.blas.multiply_batch(out(0).scaled(self.scale()), shape, ds, k, self.batch((0, 3, 3)))?;
            self.blas.multiply_batch(out(1).scaled(self.scale()), shape, ds.t(), q, self.batch((0, 3, 3)))?;
            self.blas.multiply_batch(out(2), shape, self.square(dropped, head).t(), d(head), self.batch((0, 1, 3)))?;
        }
        Ok(())
    }

    fn scale(&self) -> f32 {
        1.0 / (self.config.head_dim() as f32).sqrt()
    }

    fn fused_grid(&self) -> Grid {
        Grid::blocks(self.samples * self.config.heads).of((FUSED_THREADS, 1)).shared(self.shape.attention_bytes())
    }

    /// The address of activation `i`.
    fn act(&self, array: &Array<u8>, i: usize) -> u64 {
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

    /// Over the samples. Each distance as a multiple of a sample's [context, C]; 0 stands for [heads, context, context].
    fn batch(&self, (left, right, out): (usize, usize, usize)) -> Batch {
        let t = self.config.context;
        let distance = |n: usize| if n == 0 { self.config.heads * t * t } else { n * t * self.config.channels };
        Batch { count: self.samples, left: distance(left), right: distance(right), out: distance(out) }
    }
}
