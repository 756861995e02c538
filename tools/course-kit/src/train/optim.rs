//! Optimisers. Each rank runs its own copy on the same averaged gradients, so their state is never sent.

use tinynccl::ddp::ParamSpec;

/// Updates parameters by their gradients.
#[derive(Debug, Clone)]
pub enum Optimizer {
    /// Gradient descent with momentum: `v = momentum v + g; p -= rate v`.
    Sgd {
        /// Learning rate.
        rate: f32,
        /// Decay of the velocity.
        momentum: f32,
        /// `v` of every parameter.
        velocity: Vec<Vec<f32>>,
    },
    /// Adam (Kingma and Ba, 2015) with its default decay rates.
    Adam {
        /// Learning rate.
        rate: f32,
        /// Mean of the gradients, of every parameter.
        mean: Vec<Vec<f32>>,
        /// Mean of their squares.
        square: Vec<Vec<f32>>,
        /// Steps taken.
        steps: i32,
    },
}

fn zeros(params: &[ParamSpec]) -> Vec<Vec<f32>> {
    params.iter().map(|p| vec![0.0; p.len]).collect()
}

impl Optimizer {
    /// [`Optimizer::Sgd`] with momentum 0.9.
    pub fn sgd(rate: f32, params: &[ParamSpec]) -> Optimizer {
        Optimizer::Sgd { rate, momentum: 0.9, velocity: zeros(params) }
    }

    /// [`Optimizer::Adam`].
    pub fn adam(rate: f32, params: &[ParamSpec]) -> Optimizer {
        Optimizer::Adam { rate, mean: zeros(params), square: zeros(params), steps: 0 }
    }

    /// Must be called once per step, before [`Optimizer::update`].
    pub fn begin_step(&mut self) {
        if let Optimizer::Adam { steps, .. } = self {
            *steps += 1;
        }
    }

    /// Changes the rate, for a schedule.
    pub fn set_rate(&mut self, to: f32) {
        match self {
            Optimizer::Sgd { rate, .. } | Optimizer::Adam { rate, .. } => *rate = to,
        }
    }

    /// Applies the gradient of parameter `index`.
    pub fn update(&mut self, index: usize, values: &mut [f32], gradient: &[f32]) {
        match self {
            Optimizer::Sgd { rate, momentum, velocity } => {
                for ((p, g), v) in values.iter_mut().zip(gradient).zip(&mut velocity[index]) {
                    *v = *momentum * *v + g;
                    *p -= *rate * *v;
                }
            }
            Optimizer::Adam { rate, mean, square, steps } => {
                let (b1, b2) = (0.9f32, 0.999f32);
                let (c1, c2) = (1.0 - b1.powi(*steps), 1.0 - b2.powi(*steps));
                let state = mean[index].iter_mut().zip(&mut square[index]);
                for ((p, g), (m, s)) in values.iter_mut().zip(gradient).zip(state) {
                    *m = b1 * *m + (1.0 - b1) * g;
                    *s = b2 * *s + (1.0 - b2) * g * g;
                    *p -= *rate * (*m / c1) / ((*s / c2).sqrt() + 1e-8);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec() -> Vec<ParamSpec> {
        vec![ParamSpec { name: "p".into(), len: 1 }]
    }

    #[test]
    fn sgd_keeps_momentum() {
        let (mut o, mut p) = (Optimizer::sgd(0.1, &spec()), [1.0f32]);
        o.update(0, &mut p, &[1.0]);
        approx::assert_relative_eq!(p[0], 0.9);
        o.update(0, &mut p, &[1.0]);
        approx::assert_relative_eq!(p[0], 0.9 - 0.1 * 1.9);
    }

    #[test]
    fn the_first_step_of_adam_is_the_rate() {
        let (mut o, mut p) = (Optimizer::adam(0.1, &spec()), [1.0f32]);
        o.begin_step();
        o.update(0, &mut p, &[-123.0]);
        approx::assert_relative_eq!(p[0], 1.1, epsilon = 1e-6);
    }
}
