//! Text from a trained model, one character at a time.

use anyhow::Result;

use crate::data::Tokenizer;
use crate::rng::{self, Stream};

/// Only this many likeliest characters are drawn from.
const TOP_K: usize = 40;

/// Settings of the draw of characters.
#[derive(Debug, Clone, Copy)]
pub struct Sampling {
    /// Divides the logits: below 1 bolder, above 1 more random; 0 always takes the likeliest.
    pub temperature: f64,
    /// Seed of the draws.
    pub seed: u64,
}

/// Draws `chars` characters, as at the begin of a line. `logits` gives the model's, at one place of a window of
/// `context` tokens.
pub fn sample(
    tokenizer: &Tokenizer,
    context: usize,
    chars: usize,
    how: Sampling,
    mut logits: impl FnMut(&[u32], usize) -> Result<Vec<f32>>,
) -> Result<String> {
    let mut tokens = vec![tokenizer.encode('\n').unwrap_or(0)];
    // Attention is causal: what stands behind the last real character cannot change its logits, so zeros may.
    let mut window = vec![0; context];
    let mut text = String::new();
    for i in 0..chars {
        let seen = &tokens[tokens.len().saturating_sub(context)..];
        window[..seen.len()].copy_from_slice(seen);
        let logits = logits(&window, seen.len() - 1)?;
        let dice = rng::uniform(rng::key(how.seed, Stream::Sample, &[i as u64]));
        let token = draw(&logits, how.temperature, TOP_K, dice);
        tokens.push(token);
        text.extend(tokenizer.decode(token));
    }
    Ok(text)
}

/// A token from the `top` largest logits, by `dice` in [0, 1).
fn draw(logits: &[f32], temperature: f64, top: usize, dice: f64) -> u32 {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
    order.truncate(top);
    let Some(&best) = order.first() else { return 0 };
    if temperature <= 0.0 {
        return best as u32;
    }
    let weight = |i: usize| (f64::from(logits[i] - logits[best]) / temperature).exp();
    let mut left = dice * order.iter().map(|&i| weight(i)).sum::<f64>();
    for &i in &order {
        left -= weight(i);
        if left < 0.0 {
            return i as u32;
        }
    }
    best as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Preset;
    use crate::cpu::model::Workspace;
    use crate::cpu::parallel::Threads;
    use crate::dropout::Dropout;
    use crate::params::Model;

    #[test]
    fn draws_follow_the_probabilities() {
        let logits = [0.0, 2f32.ln(), f32::NEG_INFINITY, 5f32.ln()];
        let share = |temperature, top, token| {
            let drawn = (0..800).filter(|&i| draw(&logits, temperature, top, f64::from(i) / 800.0) == token);
            drawn.count() as f64 / 800.0
        };
        approx::assert_abs_diff_eq!(share(1.0, 4, 3), 0.625, epsilon = 0.01);
        approx::assert_abs_diff_eq!(share(1.0, 4, 0), 0.125, epsilon = 0.01);
        assert_eq!(share(1.0, 4, 2), 0.0);
        approx::assert_abs_diff_eq!(share(1.0, 2, 3), 5.0 / 7.0, epsilon = 0.01);
        assert_eq!(share(0.0, 4, 3), 1.0);
    }

    #[test]
    fn runs_past_the_context_and_repeats_itself_for_a_seed() {
        let tokenizer = Tokenizer::of("abc\n");
        let model = Model::new(Preset::Tiny.model(4), 1);
        let context = model.config.context;
        let draw = || {
            let mut workspace = Workspace::new(&model.config, 1, context, false, Threads::new(1));
            let how = Sampling { temperature: 1.0, seed: 3 };
            let text = sample(&tokenizer, context, 40, how, |window, last| {
                workspace.forward(&model, window, &Dropout::OFF);
                Ok(workspace.logits()[last * 4..][..4].to_vec())
            });
            text.unwrap()
        };
        assert_eq!(draw().chars().count(), 40);
        assert_eq!(draw(), draw());
    }
}
