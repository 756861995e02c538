//! Learning rate: linear warm-up, then half a cosine down to the minimum (Loshchilov and Hutter 2017).

use crate::config::TrainConfig;

/// Learning rate of a step, counted from 0.
pub fn learning_rate(config: &TrainConfig, step: usize) -> f64 {
    if step < config.warmup {
        return config.lr * (step + 1) as f64 / (config.warmup + 1) as f64;
    }
    let length = config.steps.saturating_sub(config.warmup).max(1);
    let progress = ((step - config.warmup) as f64 / length as f64).min(1.0);
    let min = config.min_lr.min(config.lr);
    min + 0.5 * (1.0 + (std::f64::consts::PI * progress).cos()) * (config.lr - min)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Preset;

    #[test]
    fn rises_then_falls_to_the_minimum() {
        let config = Preset::Full.train();
        let lr = |s| learning_rate(&config, s);
        assert!((0..config.warmup).all(|s| lr(s) < lr(s + 1)));
        assert!((config.warmup..config.steps).all(|s| lr(s) >= lr(s + 1)));
        assert_eq!(lr(config.warmup), config.lr);
        approx::assert_abs_diff_eq!(lr(config.steps), config.min_lr, epsilon = 1e-12);
    }
}
