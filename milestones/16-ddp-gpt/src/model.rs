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

use crate::config::ModelConfig;
use crate::gradients::Gradients;
use crate::ops::attention::{self, Env, Shape};
use crate::ops::dropout::{self, Dropout, Site};
use crate::ops::matmul::{Mat, MatMut, matmul};
use crate::ops::parallel::Threads;
use crate::ops::{embedding, gelu, layernorm, loss};
use crate::params::{self, ParamInfo, Tensor, WPE, WTE, final_ln, index};
use crate::profile::{Class, Profile};

/// Shape, values and layout of the parameters.
#[derive(Debug)]
pub struct Model {
    /// Shape.
    pub config: ModelConfig,
    /// Names and places of the tensors.
    pub layout: Vec<ParamInfo>,
    /// All values.
    pub values: Vec<f32>,
}

impl Model {
    /// A model with initial values.
    pub fn new(config: ModelConfig, seed: u64) -> Self {
        let layout = params::layout(&config);
        let values = params::initialise(&config, &layout, seed);
        Model { config, layout, values }
    }

    /// Values of tensor `i`.
    pub fn param(&self, i: usize) -> &[f32] {
        &self.values[self.layout[i].range()]
    }

    fn tensor(&self, layer: usize, tensor: Tensor) -> &[f32] {
        self.param(index(layer, tensor))
    }
}

/// Activations of one block that the backward pass needs.
#[derive(Debug)]
struct Block {
    ln1: Vec<f32>,
    ln1_stats: Vec<f32>,
    qkv: Vec<f32>,
    probs: Vec<f32>,
    attended: Vec<f32>,
    /// Residual stream between attention and MLP.
    middle: Vec<f32>,
    ln2: Vec<f32>,
    ln2_stats: Vec<f32>,
    hidden: Vec<f32>,
    activated: Vec<f32>,
    /// Residual stream after the block.
    out: Vec<f32>,
}

/// All memory of the two passes for batches of one size, taken once.
#[derive(Debug)]
pub struct Workspace {
    config: ModelConfig,
    samples: usize,
    context: usize,
    threads: Threads,
    /// Time and operations of everything that ran here.
    pub profile: Profile,
    embedded: Vec<f32>,
    blocks: Vec<Block>,
    lnf: Vec<f32>,
    lnf_stats: Vec<f32>,
    logits: Vec<f32>,
    scratch: Vec<f32>,
    partial: Vec<f32>,
    backward: Option<BackwardSpace>,
}

/// Gradients of activations; one set serves all blocks.
#[derive(Debug)]
struct BackwardSpace {
    /// Of the residual stream.
    stream: Vec<f32>,
    /// Of a branch, [rows, C].
    branch: Vec<f32>,
    /// Of the MLP's hidden layer, [rows, 4C].
    hidden: Vec<f32>,
    /// Of queries, keys and values, [rows, 3C].
    qkv: Vec<f32>,
}

impl Workspace {
    /// Memory for `samples` sequences of `context` characters, with what the backward pass needs if `training`.
    pub fn new(config: &ModelConfig, samples: usize, context: usize, training: bool, threads: Threads) -> Self {
        let (rows, c) = (samples * context, config.channels);
        let zeros = |n: usize| vec![0.0f32; n];
        let block = || Block {
            ln1: zeros(rows * c),
            ln1_stats: zeros(rows * 2),
            qkv: zeros(rows * 3 * c),
            probs: zeros(samples * config.heads * context * context),
            attended: zeros(rows * c),
            middle: zeros(rows * c),
            ln2: zeros(rows * c),
            ln2_stats: zeros(rows * 2),
            hidden: zeros(rows * 4 * c),
            activated: zeros(rows * 4 * c),
            out: zeros(rows * c),
        };
        let shape = Shape { context, heads: config.heads, channels: c };
        Workspace {
            config: *config,
            samples,
            context,
            threads,
            profile: Profile::default(),
            embedded: zeros(rows * c),
            blocks: (0..config.layers).map(|_| block()).collect(),
            lnf: zeros(rows * c),
            lnf_stats: zeros(rows * 2),
            logits: zeros(rows * config.vocab),
            scratch: zeros(threads.count() * shape.scratch()),
            partial: zeros(threads.count() * c.max(2)),
            backward: training.then(|| BackwardSpace {
                stream: zeros(rows * c),
                branch: zeros(rows * c),
                hidden: zeros(rows * 4 * c),
                qkv: zeros(rows * 3 * c),
            }),
        }
    }

    /// Logits of the last [`forward`], [rows, vocabulary], until [`cross_entropy`] turns them into gradients.
    ///
    /// [`forward`]: Workspace::forward
    /// [`cross_entropy`]: Workspace::cross_entropy
    pub fn logits(&self) -> &[f32] {
        &self.logits
    }

    /// Threads of the rank.
    pub fn threads(&self) -> Threads {
        self.threads
    }

    /// Computes the logits for `samples` sequences of `context` tokens.
    pub fn forward(&mut self, model: &Model, tokens: &[u32], dropout: &Dropout) {
        let (c, t, th) = (self.config.channels, self.context, self.threads);
        let rows = self.samples * t;
        assert_eq!(tokens.len(), rows, "tokens for another workspace");
        let shape = Shape { context: t, heads: self.config.heads, channels: c };
        let profile = &self.profile;
        profile.time(Class::Embedding, 1, || {
            let (wte, wpe) = (model.param(WTE), model.param(WPE));
            embedding::forward(&mut self.embedded, tokens, wte, wpe, c, t, th);
            dropout::dropout_in_place(&mut self.embedded, dropout, Site::Embedding, t * c, th);
            0
        });
        let mut x: &[f32] = &self.embedded;
        for (l, b) in self.blocks.iter_mut().enumerate() {
            let weight = |tensor| model.tensor(l, tensor);
            let env = Env { dropout, layer: l, threads: th, profile };
            norm(profile, &mut b.ln1, &mut b.ln1_stats, x, weight(Tensor::Ln1), th);
            linear(profile, &mut b.qkv, &b.ln1, weight(Tensor::Qkv), rows, th);
            attention::forward(&mut b.attended, &mut b.probs, &mut self.scratch, &b.qkv, shape, env);
            linear(profile, &mut b.middle, &b.attended, weight(Tensor::AttentionOut), rows, th);
            profile.time(Class::Residual, 1, || {
                dropout::residual(&mut b.middle, x, dropout, Site::AttentionOut(l), t * c, th);
                0
            });
            norm(profile, &mut b.ln2, &mut b.ln2_stats, &b.middle, weight(Tensor::Ln2), th);
            linear(profile, &mut b.hidden, &b.ln2, weight(Tensor::MlpIn), rows, th);
            profile.time(Class::Gelu, 1, || {
                gelu::forward(&mut b.activated, &b.hidden, th);
                0
            });
            linear(profile, &mut b.out, &b.activated, weight(Tensor::MlpOut), rows, th);
            profile.time(Class::Residual, 1, || {
                dropout::residual(&mut b.out, &b.middle, dropout, Site::MlpOut(l), t * c, th);
                0
            });
            x = &b.out;
        }
        norm(profile, &mut self.lnf, &mut self.lnf_stats, x, model.param(final_ln(&self.config)), th);
        linear(profile, &mut self.logits, &self.lnf, model.param(WTE), rows, th);
    }

    /// Mean loss in nats of the last [`forward`](Workspace::forward). With `gradient`, a [`backward`](Workspace::backward)
    /// may follow.
    pub fn cross_entropy(&mut self, targets: &[u32], gradient: bool) -> f64 {
        assert_eq!(targets.len(), self.samples * self.context, "targets for another workspace");
        let mut value = 0.0;
        self.profile.time(Class::Loss, 1, || {
            let (vocab, partial) = (self.config.vocab, &mut self.partial);
            value = loss::cross_entropy(&mut self.logits, targets, vocab, gradient, partial, self.threads);
            0
        });
        value
    }

    /// Computes every gradient of the mean loss, and announces each as soon as it is final.
    pub fn backward(
        &mut self,
        model: &Model,
        tokens: &[u32],
        dropout: &Dropout,
        gradients: &mut dyn Gradients,
    ) -> Result<()> {
        let (c, t, th) = (self.config.channels, self.context, self.threads);
        let rows = self.samples * t;
        let shape = Shape { context: t, heads: self.config.heads, channels: c };
        let (profile, partial) = (&self.profile, &mut self.partial);
        let Some(BackwardSpace { stream, branch, hidden, qkv }) = self.backward.as_mut() else {
            anyhow::bail!("this workspace was made without memory for the backward pass");
        };

        // The output layer. Its weight is the token embedding, whose gradient is final only at the very end.
        linear_weight(profile, gradients.gradient_mut(WTE)?, &self.logits, &self.lnf, rows, th);
        linear_input(profile, branch, &self.logits, model.param(WTE), rows, th);
        stream.fill(0.0);
        let last = final_ln(&self.config);
        let x = self.blocks.last().map_or(&self.embedded, |b| &b.out);
        let (dw, w) = (gradients.gradient_mut(last)?, model.param(last));
        profile.time(Class::LayerNorm, 1, || {
            layernorm::backward(stream, dw, partial, branch, x, &self.lnf_stats, w, th);
            0
        });
        gradients.ready(last)?;

        for l in (0..self.config.layers).rev() {
            let (before, rest) = self.blocks.split_at(l);
            let b = &rest[0];
            let x = before.last().map_or(&self.embedded, |b| &b.out);
            let at = |tensor| index(l, tensor);
            let weight = |tensor| model.tensor(l, tensor);

            // The MLP branch.
            let d = masked(profile, branch, stream, dropout, Site::MlpOut(l), t * c, th);
            linear_weight(profile, gradients.gradient_mut(at(Tensor::MlpOut))?, d, &b.activated, rows, th);
            gradients.ready(at(Tensor::MlpOut))?;
            linear_input(profile, hidden, d, weight(Tensor::MlpOut), rows, th);
            profile.time(Class::Gelu, 1, || {
                gelu::backward(hidden, &b.hidden, th);
                0
            });
            linear_weight(profile, gradients.gradient_mut(at(Tensor::MlpIn))?, hidden, &b.ln2, rows, th);
            gradients.ready(at(Tensor::MlpIn))?;
            linear_input(profile, branch, hidden, weight(Tensor::MlpIn), rows, th);
            let (dw, w) = (gradients.gradient_mut(at(Tensor::Ln2))?, weight(Tensor::Ln2));
            profile.time(Class::LayerNorm, 1, || {
                layernorm::backward(stream, dw, partial, branch, &b.middle, &b.ln2_stats, w, th);
                0
            });
            gradients.ready(at(Tensor::Ln2))?;

            // The attention branch. `hidden` is free again and takes the gradient of the attended values.
            let d = masked(profile, branch, stream, dropout, Site::AttentionOut(l), t * c, th);
            linear_weight(profile, gradients.gradient_mut(at(Tensor::AttentionOut))?, d, &b.attended, rows, th);
            gradients.ready(at(Tensor::AttentionOut))?;
            let dattended = &mut hidden[..rows * c];
            linear_input(profile, dattended, d, weight(Tensor::AttentionOut), rows, th);
            let env = Env { dropout, layer: l, threads: th, profile };
            attention::backward(qkv, &mut self.scratch, dattended, &b.qkv, &b.probs, shape, env);
            linear_weight(profile, gradients.gradient_mut(at(Tensor::Qkv))?, qkv, &b.ln1, rows, th);
            gradients.ready(at(Tensor::Qkv))?;
            linear_input(profile, branch, qkv, weight(Tensor::Qkv), rows, th);
            let (dw, w) = (gradients.gradient_mut(at(Tensor::Ln1))?, weight(Tensor::Ln1));
            profile.time(Class::LayerNorm, 1, || {
                layernorm::backward(stream, dw, partial, branch, x, &b.ln1_stats, w, th);
                0
            });
            gradients.ready(at(Tensor::Ln1))?;
        }

        let d = masked(profile, branch, stream, dropout, Site::Embedding, t * c, th);
        let dwpe = gradients.gradient_mut(WPE)?;
        profile.time(Class::Embedding, 1, || {
            embedding::backward_positions(dwpe, d, c, t);
            0
        });
        gradients.ready(WPE)?;
        let dwte = gradients.gradient_mut(WTE)?;
        profile.time(Class::Embedding, 1, || {
            embedding::backward_tokens(dwte, d, tokens, c);
            0
        });
        gradients.ready(WTE)
    }
}

fn norm(profile: &Profile, out: &mut [f32], stats: &mut [f32], x: &[f32], weight: &[f32], threads: Threads) {
    profile.time(Class::LayerNorm, 1, || {
        layernorm::forward(out, stats, x, weight, threads);
        0
    });
}

/// `out[rows, O] = x[rows, I] · weight[O, I]ᵀ`.
fn linear(profile: &Profile, out: &mut [f32], x: &[f32], weight: &[f32], rows: usize, threads: Threads) {
    let (outputs, inputs) = (out.len() / rows, x.len() / rows);
    profile.time(Class::Linear, 1, || {
        let weight = Mat::new(weight, outputs, inputs).t();
        matmul(MatMut::new(out, rows, outputs), Mat::new(x, rows, inputs), weight, 1.0, false, threads)
    });
}

/// `dx[rows, I] = dy[rows, O] · weight[O, I]`.
fn linear_input(profile: &Profile, dx: &mut [f32], dy: &[f32], weight: &[f32], rows: usize, threads: Threads) {
    let (outputs, inputs) = (dy.len() / rows, dx.len() / rows);
    profile.time(Class::Linear, 1, || {
        let weight = Mat::new(weight, outputs, inputs);
        matmul(MatMut::new(dx, rows, inputs), Mat::new(dy, rows, outputs), weight, 1.0, false, threads)
    });
}

/// `dweight[O, I] = dy[rows, O]ᵀ · x[rows, I]`.
fn linear_weight(profile: &Profile, dweight: &mut [f32], dy: &[f32], x: &[f32], rows: usize, threads: Threads) {
    let (outputs, inputs) = (dy.len() / rows, x.len() / rows);
    profile.time(Class::Linear, 1, || {
        let dy = Mat::new(dy, rows, outputs).t();
        matmul(MatMut::new(dweight, outputs, inputs), dy, Mat::new(x, rows, inputs), 1.0, false, threads)
    });
}

/// The stream's gradient through a dropout: the stream itself when there is none, else `space`, filled.
fn masked<'a>(
    profile: &Profile,
    space: &'a mut [f32],
    stream: &'a [f32],
    dropout: &Dropout,
    site: Site,
    sample: usize,
    threads: Threads,
) -> &'a [f32] {
    if !dropout.is_on() {
        return stream;
    }
    profile.time(Class::Residual, 1, || {
        dropout::dropout(space, stream, dropout, site, sample, threads);
        0
    });
    space
}
