//! Backpropagation by hand: each gradient is handed over as soon as it is complete, so its all-reduce can start early.

use course_kit::train::mlp::{GradientSink, Mlp, Trace, add_scaled};

/// Gradients for `d_output`, the derivative of the loss with respect to each output of the forward pass in `trace`.
// EXERCISE 2 (How it works): from the last layer to the first: hand the bias's gradient (number 2l + 1) and the
// weight's (2l) to the sink as soon as they are complete, then propagate through the weights and the tanh to the
// layer below.
pub(crate) fn backward<S: GradientSink>(
    model: &Mlp,
    trace: &Trace,
    d_output: &[f32],
    sink: &mut S,
) -> Result<(), S::Error> {
    let mut dz = d_output.to_vec();
    for (l, layer) in model.layers().iter().enumerate().rev() {
        let x = &trace.activations[l];
        let samples = || dz.chunks_exact(layer.outputs).zip(x.chunks_exact(layer.inputs));
        // db = column sums of dz, dW = dzᵀ x.
        sink.put(2 * l + 1, |db| samples().for_each(|(dz, _)| add_scaled(db, 1.0, dz)))?;
        sink.put(2 * l, |dw| {
            for (dz, x) in samples() {
                for (row, &d) in dw.chunks_exact_mut(layer.inputs).zip(dz) {
                    add_scaled(row, d, x);
                }
            }
        })?;
        if l > 0 {
            // dx = dz W, then through tanh: d/dz tanh(z) = 1 - tanh(z)², and x holds tanh(z).
            let mut dx = vec![0.0; trace.batch * layer.inputs];
            for (dx, dz) in dx.chunks_exact_mut(layer.inputs).zip(dz.chunks_exact(layer.outputs)) {
                for (w, &d) in layer.weight.chunks_exact(layer.inputs).zip(dz) {
                    add_scaled(dx, d, w);
                }
            }
            dx.iter_mut().zip(x).for_each(|(d, x)| *d *= 1.0 - x * x);
            dz = dx;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use course_kit::train::loss::cross_entropy;
    use course_kit::train::mlp::numeric_gradients;
    use course_kit::train::rng::Rng;

    use super::*;

    fn gradients(model: &Mlp, input: &[f32], labels: &[u8]) -> Vec<Vec<f32>> {
        let mut trace = Trace::default();
        let output = model.forward(input, labels.len(), &mut trace);
        let mut d = vec![0.0; output.len()];
        cross_entropy(output, labels, &mut d);
        let mut sink: Vec<Vec<f32>> = model.specs().iter().map(|s| vec![0.0; s.len]).collect();
        backward(model, &trace, &d, &mut sink).unwrap();
        sink
    }

    #[test]
    fn backward_matches_finite_differences() {
        let mut rng = Rng::new(3);
        let model = Mlp::new(&[2, 7, 5, 3], &mut rng);
        let input: Vec<f32> = (0..10).map(|_| rng.normal()).collect();
        let labels = [0, 2, 1, 1, 0];
        let numeric = numeric_gradients(&model, |moved| {
            let mut trace = Trace::default();
            let output = moved.forward(&input, 5, &mut trace);
            cross_entropy(output, &labels, &mut vec![0.0; output.len()]).loss
        });
        for (spec, (ours, numeric)) in model.specs().iter().zip(gradients(&model, &input, &labels).iter().zip(&numeric))
        {
            for (i, (ours, numeric)) in ours.iter().zip(numeric).enumerate() {
                let close = approx::relative_eq!(*ours, *numeric, epsilon = 2e-4, max_relative = 1e-2);
                assert!(close, "{}[{i}]: {ours}, by finite differences {numeric}", spec.name);
            }
        }
    }

    #[test]
    fn backward_hands_over_each_parameter_once_from_the_last_to_the_first() {
        struct Order(Vec<usize>);
        impl GradientSink for Order {
            type Error = ();
            fn put(&mut self, index: usize, _: impl FnOnce(&mut [f32])) -> Result<(), ()> {
                self.0.push(index);
                Ok(())
            }
        }
        let model = Mlp::new(&[2, 4, 4, 3], &mut Rng::new(5));
        let (mut trace, mut order) = (Trace::default(), Order(vec![]));
        model.forward(&[0.5, -0.5], 1, &mut trace);
        backward(&model, &trace, &[1.0, 0.0, 0.0], &mut order).unwrap();
        assert_eq!(order.0, [5, 4, 3, 2, 1, 0]);
    }

    #[test]
    fn the_mean_of_half_batch_gradients_is_the_whole_batch_gradient() {
        let mut rng = Rng::new(6);
        let model = Mlp::new(&[2, 8, 3], &mut rng);
        let input: Vec<f32> = (0..8).map(|_| rng.normal()).collect();
        let labels = [0u8, 1, 2, 1];
        let of = |samples: std::ops::Range<usize>| {
            let x = &input[2 * samples.start..2 * samples.end];
            gradients(&model, x, &labels[samples])
        };
        let (whole, a, b) = (of(0..4), of(0..2), of(2..4));
        for ((whole, a), b) in whole.iter().flatten().zip(a.iter().flatten()).zip(b.iter().flatten()) {
            approx::assert_abs_diff_eq!(*whole, 0.5 * (a + b), epsilon = 1e-6);
        }
    }
}
