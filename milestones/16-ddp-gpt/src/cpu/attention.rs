//! Causal self-attention with several heads.
//!
//! `qkv` holds, per position, the query, key and value of all heads side by side: [B·T, 3C]. Queries go in blocks of
//! [`BLOCK`] rows, and a block looks only at the keys up to its own last row: about half of a long sequence's products
//! are never computed. Probabilities are kept for the backward pass: [B, heads, T, T], of which the part above each
//! block's last row is never written nor read.

use super::matmul::{Mat, MatMut, matmul};
use super::parallel::{PerThread, Rows, Threads};
use super::profile::{Class, products, time};
use super::residual;
use super::simd::{self, simd_fn};
use crate::dropout::{Dropout, Mask, Site};

/// Query rows per block.
pub const BLOCK: usize = 64;

/// Scratch values per thread that both passes need.
pub fn scratch(context: usize) -> usize {
    2 * BLOCK.min(context) * context
}

/// The attention of a layer: sizes, masks, threads.
#[derive(Debug, Clone, Copy)]
pub struct Attention<'a> {
    /// Positions per sequence.
    pub context: usize,
    /// Heads.
    pub heads: usize,
    /// Channels of all heads together.
    pub channels: usize,
    /// Masks on the probabilities.
    pub dropout: &'a Dropout,
    /// Layer, for the masks.
    pub layer: usize,
    /// Threads of the rank; samples are split over them.
    pub threads: Threads,
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

/// The first of the mask's elements for row `r`: an element's number in its sample is (head·T + row)·T + column,
/// `start` is head·T + the block's first row.
fn element(start: usize, r: usize, t: usize) -> u32 {
    ((start + r) * t) as u32
}

/// A block of probabilities as the product with the values reads it: behind dropout, in `space`, where there is any.
fn weights<'a>(space: &'a mut [f32], probs: &'a [f32], mask: Mask, cols: usize, start: usize, t: usize) -> Mat<'a> {
    let rows = space.len() / cols;
    if !mask.is_on() {
        return Mat::strided(probs, rows, cols, t);
    }
    for (r, out) in space.chunks_mut(cols).enumerate() {
        residual::apply(out, &probs[r * t..][..cols], mask, element(start, r, t));
    }
    Mat::new(space, rows, cols)
}

impl Attention<'_> {
    fn scale(&self) -> f32 {
        1.0 / ((self.channels / self.heads) as f32).sqrt()
    }

    /// `rows` rows from row `first` on of a head's queries (`part` 0), keys (1) or values (2) in a sample's `qkv`.
    fn part<'q>(&self, qkv: &'q [f32], part: usize, head: usize, first: usize, rows: usize) -> Mat<'q> {
        let (c, width) = (self.channels, self.channels / self.heads);
        Mat::strided(&qkv[(3 * first + part) * c + head * width..], rows, width, 3 * c)
    }

    /// `rows` rows of a head's queries, keys or values in a sample's `qkv`, as in `part`, to write to.
    fn part_mut<'q>(&self, qkv: &'q mut [f32], part: usize, head: usize, first: usize, rows: usize) -> MatMut<'q> {
        let (c, width) = (self.channels, self.channels / self.heads);
        MatMut::strided(&mut qkv[(3 * first + part) * c + head * width..], rows, width, 3 * c)
    }

    /// `out[B·T, C]` from `qkv[B·T, 3C]`; `probs` is kept for [`Attention::backward`].
    pub fn forward(&self, out: &mut [f32], probs: &mut [f32], scratch_space: &mut [f32], qkv: &[f32]) {
        let (t, heads, c, hd) = (self.context, self.heads, self.channels, self.channels / self.heads);
        let (one, share, samples) = (Threads::new(1), self.threads.count(), qkv.len() / (t * 3 * c));
        let parts = (Rows(out, t * c), (Rows(probs, heads * t * t), PerThread(scratch_space, scratch(t))));
        self.threads.rows(samples, parts, |first, (Rows(out, _), (Rows(probs, _), PerThread(space, _)))| {
            for (s, (out, probs)) in out.chunks_mut(t * c).zip(probs.chunks_mut(heads * t * t)).enumerate() {
                let qkv = &qkv[(first + s) * t * 3 * c..][..t * 3 * c];
                let mask = self.dropout.mask(Site::Attention(self.layer), first + s);
                for (h, probs) in probs.chunks_mut(t * t).enumerate() {
                    for r0 in (0..t).step_by(BLOCK) {
                        let rows = BLOCK.min(t - r0);
                        let cols = r0 + rows;
                        let q = self.part(qkv, 0, h, r0, rows);
                        let [k, v] = [1, 2].map(|part| self.part(qkv, part, h, 0, cols));
                        let scores = &mut probs[r0 * t..];
                        products(Class::Attention, share, || {
                            matmul(MatMut::strided(scores, rows, cols, t), q, k.t(), self.scale(), false, one)
                        });
                        let weights = time(Class::Softmax, share, || {
                            causal_softmax(scores, rows, cols, t, r0);
                            weights(&mut space[..rows * cols], scores, mask, cols, h * t + r0, t)
                        });
                        products(Class::Attention, share, || {
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
    pub fn backward(&self, dqkv: &mut [f32], scratch_space: &mut [f32], dout: &[f32], qkv: &[f32], probs: &[f32]) {
        let (t, heads, c, hd) = (self.context, self.heads, self.channels, self.channels / self.heads);
        let (one, share, samples) = (Threads::new(1), self.threads.count(), qkv.len() / (t * 3 * c));
        let parts = (Rows(dqkv, t * 3 * c), PerThread(scratch_space, scratch(t)));
        self.threads.rows(samples, parts, |first, (Rows(dqkv, _), PerThread(space, _))| {
            let (dscores, kept) = space.split_at_mut(scratch(t) / 2);
            for (s, dqkv) in dqkv.chunks_mut(t * 3 * c).enumerate() {
                let sample = first + s;
                let qkv = &qkv[sample * t * 3 * c..][..t * 3 * c];
                let dout = &dout[sample * t * c..][..t * c];
                let mask = self.dropout.mask(Site::Attention(self.layer), sample);
                for h in 0..heads {
                    let probs = &probs[(sample * heads + h) * t * t..][..t * t];
                    // The last block sees all keys and overwrites their gradients; the earlier ones add.
                    for r0 in (0..t).step_by(BLOCK).rev() {
                        let rows = BLOCK.min(t - r0);
                        let cols = r0 + rows;
                        let add = cols < t;
                        let q = self.part(qkv, 0, h, r0, rows);
                        let [k, v] = [1, 2].map(|part| self.part(qkv, part, h, 0, cols));
                        let d = Mat::strided(&dout[r0 * c + h * hd..], rows, hd, c);
                        let (p, start) = (&probs[r0 * t..], h * t + r0);
                        let (dscores, kept) = (&mut dscores[..rows * cols], &mut kept[..rows * cols]);
                        let weights = time(Class::Softmax, share, || weights(kept, p, mask, cols, start, t));
                        products(Class::Attention, share, || {
                            let dv = self.part_mut(dqkv, 2, h, 0, cols);
                            matmul(dv, weights.t(), d, 1.0, add, one)
                                + matmul(MatMut::new(dscores, rows, cols), d, v.t(), 1.0, false, one)
                        });
                        time(Class::Softmax, share, || {
                            if mask.is_on() {
                                let rows = dscores.chunks_mut(cols).enumerate();
                                rows.for_each(|(r, row)| residual::apply_in_place(row, mask, element(start, r, t)));
                            }
                            softmax_backward(dscores, p, rows, cols, t);
                        });
                        products(Class::Attention, share, || {
                            let ds = Mat::new(dscores, rows, cols);
                            let dq = self.part_mut(dqkv, 0, h, r0, rows);
                            let done = matmul(dq, ds, k, self.scale(), false, one);
                            let dk = self.part_mut(dqkv, 1, h, 0, cols);
                            done + matmul(dk, ds.t(), q, self.scale(), add, one)
                        });
                    }
                }
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn causal_softmax_sees_the_keys_up_to_its_query() {
        // Rows of 4 keys in memory of 5; the queries 1 and 2. exp(1000) would overflow.
        let (one, two) = (1000.0, 1000.0 + 2f32.ln());
        let mut scores = [one, two, 7.0, 7.0, -1.0, one, one, two, 7.0, -1.0];
        causal_softmax(&mut scores, 2, 4, 5, 1);
        let expected = [1.0 / 3.0, 2.0 / 3.0, 0.0, 0.0, -1.0, 0.25, 0.25, 0.5, 0.0, -1.0];
        for (got, expected) in scores.into_iter().zip(expected) {
            approx::assert_abs_diff_eq!(got, expected, epsilon = 1e-4);
        }
    }

    #[test]
    fn softmax_backward_is_the_derivative() {
        // Two rows of 2 in d, of 3 in probs, whose last value is not theirs.
        let probs = [0.25, 0.75, 9.0, 0.5, 0.5, 9.0];
        let mut d = [1.0, 2.0, -3.0, 5.0];
        softmax_backward(&mut d, &probs, 2, 2, 3);
        // d·p is 1.75 and 1.
        for (got, expected) in d.into_iter().zip([-0.1875, 0.1875, -2.0, 2.0]) {
            approx::assert_abs_diff_eq!(got, expected, epsilon = 1e-5);
        }
    }
}
