//! Every gradient against central differences of the loss.
//!
//! A directional derivative per tensor: for a random direction d, (L(w + hd) - L(w - hd)) / 2h must be ⟨∇L, d⟩. Losses
//! are means over rows in f32, good to about 1e-7 of their value; h is large enough that the difference stands out.

use ddp_gpt::config::ModelConfig;
use ddp_gpt::cpu::model::Workspace;
use ddp_gpt::cpu::parallel::Threads;
use ddp_gpt::data::{Batch, Split};
use ddp_gpt::dropout::Dropout;
use ddp_gpt::params::Model;
use ddp_gpt::rng::{Stream, key, normal_pair};

use crate::common;

/// `context` above the attention block of 64 rows takes the path with several blocks.
fn check(context: usize, probability: f64) {
    let corpus = common::corpus();
    let config = ModelConfig { vocab: corpus.tokenizer.size(), context, layers: 2, heads: 2, channels: 12 };
    let mut model = Model::new(config, 3);
    // Larger values than a fresh model's, so that no part of the network is close to linear or to zero.
    for (info, scale) in model.layout.clone().iter().map(|info| (info, if info.decays() { 12.0 } else { 1.0 })) {
        for (j, v) in model.values[info.range()].iter_mut().enumerate() {
            *v = *v * scale + 0.1 * ((j as f32) * 1.7).sin();
        }
    }
    let mut batch = Batch::new(3, context, 0, 1).unwrap();
    batch.fill(&corpus, Split::Train, 5, 0);
    let dropout = Dropout::new(probability, 11, 2, 0);
    let (_, gradients) = common::loss_and_gradients(&model, &batch, &dropout, 1);

    let mut workspace = Workspace::new(&config, 3, context, false, Threads::new(1));
    let mut loss = |model: &Model| {
        workspace.forward(model, &batch.inputs, &dropout);
        workspace.cross_entropy(&batch.targets, false)
    };
    for (i, info) in model.layout.clone().iter().enumerate() {
        for direction in 0..3u64 {
            // Half along the gradient, so that the derivative is well above rounding, half at random, so that a wrong
            // gradient cannot agree with itself.
            let g = &gradients[info.range()];
            let length = g.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt();
            assert!(length > 1e-6, "{} has no gradient", info.name);
            let d: Vec<f64> = (0..info.len)
                .map(|j| {
                    let bits = |k| key(17, Stream::Init, &[i as u64, direction, j as u64, k]);
                    let noise = normal_pair(bits(0), bits(1)).0 / (info.len as f64).sqrt();
                    f64::from(g[j]) / length + noise
                })
                .collect();
            let expected: f64 = g.iter().zip(&d).map(|(g, d)| f64::from(*g) * d).sum();
            let saved = model.values[info.range()].to_vec();
            let mut slope = |h: f64| {
                let mut at = |sign: f64| {
                    for ((v, s), d) in model.values[info.range()].iter_mut().zip(&saved).zip(&d) {
                        *v = (f64::from(*s) + sign * h * d) as f32;
                    }
                    loss(&model)
                };
                (at(1.0) - at(-1.0)) / (2.0 * h)
            };
            // Richardson: the h² term of the central difference cancels.
            let h = 1e-2;
            let measured = (4.0 * slope(h / 2.0) - slope(h)) / 3.0;
            model.values[info.range()].copy_from_slice(&saved);
            assert!(
                approx::relative_eq!(measured, expected, epsilon = 1e-4, max_relative = 2e-3),
                "{} context {context} dropout {probability}: backward says {expected}, differences say {measured}",
                info.name
            );
        }
    }
}

#[test]
fn gradients_agree_with_finite_differences() {
    check(8, 0.0);
}

#[test]
fn with_dropout() {
    check(8, 0.25);
}

#[test]
fn with_several_attention_blocks() {
    check(150, 0.0);
    check(130, 0.1);
}
