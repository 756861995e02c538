//! Causal self-attention with several heads.
//!
//! `qkv` holds, per position, the query, key and value of all heads side by side: [B·T, 3C]. Queries go in blocks of
//! [`BLOCK`] rows, and a block looks only at the keys up to its own last row: about half of a long sequence's products
//! are never computed. Probabilities are kept for the backward pass: [B, heads, T, T], of which the part above each
//! block's last row is never written nor read.

use super::dropout::{self, Dropout, Mask, Site};
use super::matmul::{Mat, MatMut, matmul};
use super::parallel::{PerThread, Rows, Threads};
use super::simd;
use crate::profile::{Class, Profile};
use crate::simd_fn;

/// Query rows per block.
pub const BLOCK: usize = 64;

/// Sizes of a call.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    /// Positions per sequence.
    pub context: usize,
    /// Heads.
    pub heads: usize,
    /// Channels of all heads together.
    pub channels: usize,
}

impl Shape {
    /// Scratch values per thread that both passes need.
    pub fn scratch(&self) -> usize {
        2 * BLOCK.min(self.context) * self.context
    }

    fn head_dim(&self) -> usize {
        self.channels / self.heads
    }

    fn scale(&self) -> f32 {
        1.0 / (self.head_dim() as f32).sqrt()
    }
}

/// Which masks apply and where time is booked.
#[derive(Debug, Clone, Copy)]
pub struct Env<'a> {
    /// Masks on the probabilities.
    pub dropout: &'a Dropout,
    /// Layer, for the masks.
    pub layer: usize,
    /// Threads of the rank; samples are split over them.
    pub threads: Threads,
    /// Time and operations.
    pub profile: &'a Profile,
}

simd_fn! {
    /// Softmax of each row over its first `first + 1 + row` values; the rest becomes 0.
    // EXERCISE 1 (How it works): row r is query first + r: the softmax, without overflow, over the keys it may see;
    // the other values of the row become 0.
    fn causal_softmax(scores: &mut [f32], rows: usize, cols: usize, stride: usize, first: usize) {
        for r in 0..rows {
            let (seen, unseen) = scores[r * stride..][..cols].split_at_mut(first + r + 1);
            let max = simd::max(seen);
            for v in seen.iter_mut() {
                *v = simd::exp(*v - max);
            }
            let total = simd::sum([seen], |[v]| v);
            let inverse = 1.0 / total;
            for v in seen.iter_mut() {
                *v *= inverse;
            }
            unseen.fill(0.0);
        }
    }
}

simd_fn! {
    /// In each row: d = p * (d - Σ d·p), the gradient through softmax.
    // EXERCISE 2 (How it works): the gradient through softmax, row by row: d = p * (d - sum of d * p).
    fn softmax_backward(d: &mut [f32], probs: &[f32], rows: usize, cols: usize, stride: usize) {
        for r in 0..rows {
            let d = &mut d[r * cols..][..cols];
            let p = &probs[r * stride..][..cols];
            let dot = simd::sum([d, p], |[d, p]| d * p);
            for i in 0..cols {
                d[i] = p[i] * (d[i] - dot);
            }
        }
    }
}

/// `out = mask * x` for a block of rows `stride` apart. An element's number in its sample is (head·T + row)·T + column;
/// `start` is (head·T + first row).
fn drop_block(out: &mut [f32], x: &[f32], mask: Mask, cols: usize, stride: usize, start: usize, t: usize) {
    for (r, out) in out.chunks_mut(cols).enumerate() {
        dropout::apply(out, &x[r * stride..][..cols], mask, ((start + r) * t) as u32);
    }
}

/// `out[B·T, C]` from `qkv[B·T, 3C]`; `probs` is kept for [`backward`].
pub fn forward(out: &mut [f32], probs: &mut [f32], scratch: &mut [f32], qkv: &[f32], shape: Shape, env: Env<'_>) {
    let Shape { context: t, heads, channels: c } = shape;
    let (hd, one, share) = (shape.head_dim(), Threads::new(1), env.threads.count());
    let samples = qkv.len() / (t * 3 * c);
    let parts = (Rows(out, t * c), Rows(probs, heads * t * t), PerThread(scratch, shape.scratch()));
    env.threads.rows(samples, parts, |first, (Rows(out, _), Rows(probs, _), PerThread(scratch, _))| {
        for (s, (out, probs)) in out.chunks_mut(t * c).zip(probs.chunks_mut(heads * t * t)).enumerate() {
            let qkv = &qkv[(first + s) * t * 3 * c..][..t * 3 * c];
            let mask = env.dropout.mask(Site::Attention(env.layer), first + s);
            for (h, probs) in probs.chunks_mut(t * t).enumerate() {
                for r0 in (0..t).step_by(BLOCK) {
                    let rows = BLOCK.min(t - r0);
                    let cols = r0 + rows;
                    let q = Mat::strided(&qkv[r0 * 3 * c + h * hd..], rows, hd, 3 * c);
                    let k = Mat::strided(&qkv[c + h * hd..], cols, hd, 3 * c);
                    let v = Mat::strided(&qkv[2 * c + h * hd..], cols, hd, 3 * c);
                    let scores = &mut probs[r0 * t..];
                    env.profile.time(Class::Attention, share, || {
                        matmul(MatMut::strided(scores, rows, cols, t), q, k.t(), shape.scale(), false, one)
                    });
                    env.profile.time(Class::Softmax, share, || {
                        causal_softmax(scores, rows, cols, t, r0);
                        if env.dropout.is_on() {
                            drop_block(&mut scratch[..rows * cols], scores, mask, cols, t, h * t + r0, t);
                        }
                        0
                    });
                    let weights = if env.dropout.is_on() {
                        Mat::new(&scratch[..rows * cols], rows, cols)
                    } else {
                        Mat::strided(scores, rows, cols, t)
                    };
                    env.profile.time(Class::Attention, share, || {
                        let out = MatMut::strided(&mut out[r0 * c + h * hd..], rows, hd, c);
                        matmul(out, weights, v, 1.0, false, one)
                    });
                }
            }
        }
    });
}

/// `dqkv[B·T, 3C]` from `dout[B·T, C]`.
// EXERCISE 3 (How it works): per sample, head and block of queries: dv from the probabilities and dout, the
// probabilities' gradient from dout and v, back through softmax, then dq and dk. The last block overwrites, the
// earlier ones add.
pub fn backward(
    dqkv: &mut [f32],
    scratch: &mut [f32],
    dout: &[f32],
    qkv: &[f32],
    probs: &[f32],
    shape: Shape,
    env: Env<'_>,
) {
    let Shape { context: t, heads, channels: c } = shape;
    let (hd, one, share) = (shape.head_dim(), Threads::new(1), env.threads.count());
    let samples = qkv.len() / (t * 3 * c);
    let parts = (Rows(dqkv, t * 3 * c), PerThread(scratch, shape.scratch()));
    env.threads.rows(samples, parts, |first, (Rows(dqkv, _), PerThread(scratch, _))| {
        let (dscores, kept) = scratch.split_at_mut(shape.scratch() / 2);
        for (s, dqkv) in dqkv.chunks_mut(t * 3 * c).enumerate() {
            let sample = first + s;
            let qkv = &qkv[sample * t * 3 * c..][..t * 3 * c];
            let dout = &dout[sample * t * c..][..t * c];
            let mask = env.dropout.mask(Site::Attention(env.layer), sample);
            for h in 0..heads {
                let probs = &probs[(sample * heads + h) * t * t..][..t * t];
                // The last block sees all keys and overwrites their gradients; the earlier ones add.
                for r0 in (0..t).step_by(BLOCK).rev() {
                    let rows = BLOCK.min(t - r0);
                    let cols = r0 + rows;
                    let add = cols < t;
                    let q = Mat::strided(&qkv[r0 * 3 * c + h * hd..], rows, hd, 3 * c);
                    let k = Mat::strided(&qkv[c + h * hd..], cols, hd, 3 * c);
                    let v = Mat::strided(&qkv[2 * c + h * hd..], cols, hd, 3 * c);
                    let d = Mat::strided(&dout[r0 * c + h * hd..], rows, hd, c);
                    let p = &probs[r0 * t..];
                    let (dscores, kept) = (&mut dscores[..rows * cols], &mut kept[..rows * cols]);
                    env.profile.time(Class::Softmax, share, || {
                        if env.dropout.is_on() {
                            drop_block(kept, p, mask, cols, t, h * t + r0, t);
                        }
                        0
                    });
                    let weights =
                        if env.dropout.is_on() { Mat::new(kept, rows, cols) } else { Mat::strided(p, rows, cols, t) };
                    env.profile.time(Class::Attention, share, || {
                        let dv = MatMut::strided(&mut dqkv[2 * c + h * hd..], cols, hd, 3 * c);
                        matmul(dv, weights.t(), d, 1.0, add, one)
                            + matmul(MatMut::new(dscores, rows, cols), d, v.t(), 1.0, false, one)
                    });
                    env.profile.time(Class::Softmax, share, || {
                        if env.dropout.is_on() {
                            kept.copy_from_slice(dscores);
                            drop_block(dscores, kept, mask, cols, cols, h * t + r0, t);
                        }
                        softmax_backward(dscores, p, rows, cols, t);
                        0
                    });
                    env.profile.time(Class::Attention, share, || {
                        let ds = Mat::new(dscores, rows, cols);
                        let dq = MatMut::strided(&mut dqkv[r0 * 3 * c + h * hd..], rows, hd, 3 * c);
                        let done = matmul(dq, ds, k, shape.scale(), false, one);
                        let dk = MatMut::strided(&mut dqkv[c + h * hd..], cols, hd, 3 * c);
                        done + matmul(dk, ds.t(), q, shape.scale(), add, one)
                    });
                }
            }
        }
    });
}
