//! The network: forward and backward pass, written out.
//!
//! ```text
//! x = wte[token] + wpe[position]
//! per block:  x += proj(attention(layernorm(x)));  x += mlp_out(gelu(mlp_in(layernorm(x))))
//! logits = layernorm(x) · wteᵀ                      (output layer tied to the token embedding)
//! ```
//!
//! The backward pass goes through the same lines from the last to the first. It hands each gradient over as soon as it
//! is final, so that averaging the last block's gradients over the ranks runs while the first block's are computed.

use anyhow::Result;

use super::attention::{self, Attention};
use super::gradients::Gradients;
use super::layernorm::Norm;
use super::matmul::{linear, linear_input, linear_weight};
use super::parallel::Threads;
use super::residual::{self, Place, residual};
use super::{embedding, gelu, loss};
use crate::config::ModelConfig;
use crate::dropout::{Dropout, Site};
use crate::params::{Model, WPE, WTE, final_ln, of_block};

/// Activations of one block that the backward pass needs.
struct Block {
    ln1: Norm,
    qkv: Vec<f32>,
    probs: Vec<f32>,
    attended: Vec<f32>,
    /// Residual stream between attention and MLP.
    middle: Vec<f32>,
    ln2: Norm,
    hidden: Vec<f32>,
    activated: Vec<f32>,
    /// Residual stream after the block.
    out: Vec<f32>,
}

/// All memory of the two passes for batches of one size, taken once.
pub struct Workspace {
    config: ModelConfig,
    samples: usize,
    context: usize,
    threads: Threads,
    embedded: Vec<f32>,
    blocks: Vec<Block>,
    lnf: Norm,
    logits: Vec<f32>,
    scratch: Vec<f32>,
    partial: Vec<f32>,
    /// With `training`, gradients of activations, which serve all blocks: of the residual stream [rows, C], of a branch
    /// [rows, C], of the MLP's hidden layer [rows, 4C], and of queries, keys and values [rows, 3C].
    backward: Option<[Vec<f32>; 4]>,
}

impl Workspace {
    /// Memory for `samples` sequences of `context` characters, with what the backward pass needs if `training`.
    pub fn new(config: &ModelConfig, samples: usize, context: usize, training: bool, threads: Threads) -> Self {
        let (rows, c) = (samples * context, config.channels);
        let zeros = |n: usize| vec![0.0f32; n];
        let block = || Block {
            ln1: Norm::new(rows, c),
            qkv: zeros(rows * 3 * c),
            probs: zeros(samples * config.heads * context * context),
            attended: zeros(rows * c),
            middle: zeros(rows * c),
            ln2: Norm::new(rows, c),
            hidden: zeros(rows * 4 * c),
            activated: zeros(rows * 4 * c),
            out: zeros(rows * c),
        };
        Workspace {
            config: *config,
            samples,
            context,
            threads,
            embedded: zeros(rows * c),
            blocks: (0..config.layers).map(|_| block()).collect(),
            lnf: Norm::new(rows, c),
            logits: zeros(rows * config.vocab),
            scratch: zeros(threads.count() * attention::scratch(context)),
            partial: zeros(threads.count() * c.max(2)),
            backward: training.then(|| [1, 1, 4, 3].map(|width| zeros(rows * width * c))),
        }
    }

    /// Logits of the last [`forward`], [rows, vocabulary], until [`cross_entropy`] turns them into gradients.
    ///
    /// [`forward`]: Workspace::forward
    /// [`cross_entropy`]: Workspace::cross_entropy
    pub fn logits(&self) -> &[f32] {
        &self.logits
    }

    /// Computes the logits for `samples` sequences of `context` tokens.
    pub fn forward(&mut self, model: &Model, tokens: &[u32], dropout: &Dropout) {
        let ModelConfig { heads, channels: c, .. } = self.config;
        let (t, th) = (self.context, self.threads);
        let rows = self.samples * t;
        assert_eq!(tokens.len(), rows, "tokens for another workspace");
        let attention = |layer| Attention { context: t, heads, channels: c, dropout, layer, threads: th };
        let place = |site| Place { dropout, site, sample: t * c };
        embedding::forward(&mut self.embedded, tokens, [WTE, WPE].map(|i| model.param(i)), t, th);
        residual::dropout_in_place(&mut self.embedded, place(Site::Embedding), th);
        let mut x: &[f32] = &self.embedded;
        for (l, b) in self.blocks.iter_mut().enumerate() {
            let [ln1, qkv, attention_out, ln2, mlp_in, mlp_out] = of_block(l).map(|i| model.param(i));
            b.ln1.forward(x, ln1, th);
            linear(&mut b.qkv, &b.ln1.out, qkv, rows, th);
            attention(l).forward(&mut b.attended, &mut b.probs, &mut self.scratch, &b.qkv);
            linear(&mut b.middle, &b.attended, attention_out, rows, th);
            residual(&mut b.middle, x, place(Site::AttentionOut(l)), th);
            b.ln2.forward(&b.middle, ln2, th);
            linear(&mut b.hidden, &b.ln2.out, mlp_in, rows, th);
            gelu::forward(&mut b.activated, &b.hidden, th);
            linear(&mut b.out, &b.activated, mlp_out, rows, th);
            residual(&mut b.out, &b.middle, place(Site::MlpOut(l)), th);
            x = &b.out;
        }
        self.lnf.forward(x, model.param(final_ln(&self.config)), th);
        linear(&mut self.logits, &self.lnf.out, model.param(WTE), rows, th);
    }

    /// Mean loss in nats of the last [`forward`](Workspace::forward). With `gradient`, a
    /// [`backward`](Workspace::backward) may follow.
    pub fn cross_entropy(&mut self, targets: &[u32], gradient: bool) -> f64 {
        assert_eq!(targets.len(), self.samples * self.context, "targets for another workspace");
        loss::cross_entropy(&mut self.logits, targets, self.config.vocab, gradient, &mut self.partial, self.threads)
    }

    /// Computes every gradient of the mean loss, and announces each as soon as it is final.
    pub fn backward(
        &mut self,
        model: &Model,
        tokens: &[u32],
        dropout: &Dropout,
        gradients: &mut dyn Gradients,
    ) -> Result<()> {
        let ModelConfig { heads, channels: c, .. } = self.config;
        let (t, th) = (self.context, self.threads);
        let rows = self.samples * t;
        let attention = |layer| Attention { context: t, heads, channels: c, dropout, layer, threads: th };
        let place = |site| Place { dropout, site, sample: t * c };
        let partial = &mut self.partial;
        let Some([stream, branch, hidden, qkv]) = self.backward.as_mut() else {
            anyhow::bail!("this workspace was made without memory for the backward pass");
        };

        // The output layer. Its weight is the token embedding, whose gradient is final only at the very end.
        linear_weight(gradients.gradient_mut(WTE)?, &self.logits, &self.lnf.out, rows, th);
        linear_input(branch, &self.logits, model.param(WTE), rows, th);
        stream.fill(0.0);
        let last = final_ln(&self.config);
        let x = self.blocks.last().map_or(&self.embedded, |b| &b.out);
        let dw = gradients.gradient_mut(last)?;
        self.lnf.backward(stream, dw, partial, branch, (x, model.param(last)), th);
        gradients.ready(last)?;

        for l in (0..self.config.layers).rev() {
            let (before, rest) = self.blocks.split_at(l);
            let b = &rest[0];
            let x = before.last().map_or(&self.embedded, |b| &b.out);
            let [ln1, w_qkv, attention_out, ln2, mlp_in, mlp_out] = of_block(l);

            // The MLP branch.
            let d = residual::backward(branch, stream, place(Site::MlpOut(l)), th);
            linear_weight(gradients.gradient_mut(mlp_out)?, d, &b.activated, rows, th);
            gradients.ready(mlp_out)?;
            linear_input(hidden, d, model.param(mlp_out), rows, th);
            gelu::backward(hidden, &b.hidden, th);
            linear_weight(gradients.gradient_mut(mlp_in)?, hidden, &b.ln2.out, rows, th);
            gradients.ready(mlp_in)?;
            linear_input(branch, hidden, model.param(mlp_in), rows, th);
            let dw = gradients.gradient_mut(ln2)?;
            b.ln2.backward(stream, dw, partial, branch, (&b.middle, model.param(ln2)), th);
            gradients.ready(ln2)?;

            // The attention branch. `hidden` is free again and takes the gradient of the attended values.
            let d = residual::backward(branch, stream, place(Site::AttentionOut(l)), th);
            linear_weight(gradients.gradient_mut(attention_out)?, d, &b.attended, rows, th);
            gradients.ready(attention_out)?;
            let dattended = &mut hidden[..rows * c];
            linear_input(dattended, d, model.param(attention_out), rows, th);
            attention(l).backward(qkv, &mut self.scratch, dattended, &b.qkv, &b.probs);
            linear_weight(gradients.gradient_mut(w_qkv)?, qkv, &b.ln1.out, rows, th);
            gradients.ready(w_qkv)?;
            linear_input(branch, qkv, model.param(w_qkv), rows, th);
            let dw = gradients.gradient_mut(ln1)?;
            b.ln1.backward(stream, dw, partial, branch, (x, model.param(ln1)), th);
            gradients.ready(ln1)?;
        }

        let d = residual::backward(branch, stream, place(Site::Embedding), th);
        embedding::backward_positions(gradients.gradient_mut(WPE)?, d, t * c);
        gradients.ready(WPE)?;
        embedding::backward_tokens(gradients.gradient_mut(WTE)?, d, tokens);
        gradients.ready(WTE)
    }
}
