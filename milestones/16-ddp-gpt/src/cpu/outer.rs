//! The outer optimizer of DiLoCo (Douillard et al., "DiLoCo: distributed low-communication training of language
//! models", arXiv 2311.08105): SGD with Nesterov momentum, whose gradient is the way that the ranks' local steps went.

use crate::config::OuterConfig;

/// The optimizer's state, the same on all ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct Outer {
    /// Momentum, in the layout of the parameters.
    pub momentum: Vec<f32>,
}

impl Outer {
    /// State for `count` parameters.
    pub fn new(count: usize) -> Self {
        Outer { momentum: vec![0.0; count] }
    }

    /// One step along `sum` / `ranks`, the mean of the ranks' pseudo-gradients (outer parameters minus local ones).
    pub fn step(&mut self, values: &mut [f32], sum: &[f32], ranks: f32, config: &OuterConfig) {
        let (lr, keep) = (config.lr as f32, config.momentum as f32);
        for ((value, momentum), sum) in values.iter_mut().zip(&mut self.momentum).zip(sum) {
            let gradient = sum / ranks;
            *momentum = keep * *momentum + gradient;
            *value -= lr * (gradient + keep * *momentum);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Nesterov (1983) as published: a step from a point that looks ahead, in f64. Gives the points that it looks from,
    /// which are what an optimizer keeps as its parameters (Sutskever et al. 2013 have the change of variables).
    fn look_ahead(start: &[f64], gradients: &[Vec<f64>], lr: f64, keep: f64) -> Vec<f64> {
        let (mut at, mut velocity) = (start.to_vec(), vec![0.0; start.len()]);
        let mut ahead = at.clone();
        for gradient in gradients {
            for i in 0..at.len() {
                velocity[i] = keep * velocity[i] - lr * gradient[i];
                at[i] += velocity[i];
                ahead[i] = at[i] + keep * velocity[i];
            }
        }
        ahead
    }

    proptest! {
        #[test]
        fn agrees_with_nesterovs_own_formulation(
            start in prop::collection::vec(-2.0..2.0f32, 5),
            steps in prop::collection::vec((prop::collection::vec(-1.0..1.0f32, 5), 1..9u8), 0..12),
            lr in 0.0..1.5f64,
            momentum in 0.0..0.99f64,
        ) {
            let config = OuterConfig { local_steps: 1, lr, momentum };
            let mut values = start.clone();
            let mut outer = Outer::new(values.len());
            for (sum, ranks) in &steps {
                outer.step(&mut values, sum, f32::from(*ranks), &config);
            }
            let wide = |values: &[f32]| values.iter().map(|&value| f64::from(value)).collect::<Vec<_>>();
            let mean = |(sum, ranks): &(Vec<f32>, u8)| wide(sum).iter().map(|sum| sum / f64::from(*ranks)).collect();
            let means: Vec<Vec<f64>> = steps.iter().map(mean).collect();
            for (got, want) in wide(&values).iter().zip(look_ahead(&wide(&start), &means, lr, momentum)) {
                prop_assert!(approx::abs_diff_eq!(*got, want, epsilon = 1e-4), "{got} {want}");
            }
        }
    }
}
