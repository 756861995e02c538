//! GELU in its tanh form (Hendrycks and Gimpel 2016, as in GPT-2): x·σ(2u), u = √(2/π)·(x + 0.044715·x³).

use super::parallel::{Rows, Threads};
use super::profile::{Class, time};
use super::simd::{self, simd_fn};

const TWO_SQRT_2_OVER_PI: f32 = 1.595_769;
const CUBIC: f32 = 0.044_715;

/// σ(2u), as ½(1 + tanh u) is the logistic function of 2u.
#[inline(always)]
fn gate(x: f32) -> f32 {
    let two_u = TWO_SQRT_2_OVER_PI * (x + CUBIC * x * x * x);
    1.0 / (1.0 + simd::exp(-two_u))
}

simd_fn! {
    fn forward_chunk(out: &mut [f32], x: &[f32]) {
        for (o, &x) in out.iter_mut().zip(x) {
            *o = x * gate(x);
        }
    }
}

simd_fn! {
    fn backward_chunk(d: &mut [f32], x: &[f32]) {
        for (d, &x) in d.iter_mut().zip(x) {
            let s = gate(x);
            *d *= s + x * s * (1.0 - s) * (TWO_SQRT_2_OVER_PI * (1.0 + 3.0 * CUBIC * x * x));
        }
    }
}

/// `out = gelu(x)`.
pub fn forward(out: &mut [f32], x: &[f32], threads: Threads) {
    let work = |first, Rows(out, _): Rows<'_>| forward_chunk(out, &x[first..]);
    time(Class::Gelu, 1, || threads.rows(x.len(), Rows(out, 1), work));
}

/// `d *= gelu'(x)`.
pub fn backward(d: &mut [f32], x: &[f32], threads: Threads) {
    let work = |first, Rows(d, _): Rows<'_>| backward_chunk(d, &x[first..]);
    time(Class::Gelu, 1, || threads.rows(x.len(), Rows(d, 1), work));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agrees_with_the_definition_and_its_derivative() {
        let exact = |x: f64| {
            let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
            0.5 * x * (1.0 + u.tanh())
        };
        let x: Vec<f32> = (-800..=800).map(|i| i as f32 / 100.0).collect();
        let (mut y, mut d) = (vec![0.0; x.len()], vec![1.0; x.len()]);
        forward(&mut y, &x, Threads::new(1));
        backward(&mut d, &x, Threads::new(1));
        for i in 0..x.len() {
            let (v, h) = (f64::from(x[i]), 1e-5);
            approx::assert_abs_diff_eq!(f64::from(y[i]), exact(v), epsilon = 1e-6 * v.abs().max(1.0));
            let slope = (exact(v + h) - exact(v - h)) / (2.0 * h);
            approx::assert_abs_diff_eq!(f64::from(d[i]), slope, epsilon = 3e-6);
        }
    }
}
