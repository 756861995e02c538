//! A multi-layer perceptron with tanh between its layers: forward, and backward by hand.
//!
//! Layer `l` computes `z = x Wᵀ + b`; all but the last one apply tanh. `W` is row-major, one row per output. Parameters
//! are numbered in forward order: `2l` is the weight of layer `l`, `2l + 1` its bias. Backward produces gradients from
//! the last to the first and hands over each as soon as it is complete, so communication can start early.

use tinynccl::ddp::ParamSpec;

use crate::rng::Rng;

/// One linear layer.
#[derive(Debug, Clone, PartialEq)]
struct Layer {
    inputs: usize,
    outputs: usize,
    /// `outputs` rows of `inputs`.
    weight: Vec<f32>,
    bias: Vec<f32>,
}

/// The model.
#[derive(Debug, Clone, PartialEq)]
pub struct Mlp {
    layers: Vec<Layer>,
}

/// The activations that backward needs: the input of every layer, and the last layer's output.
#[derive(Debug, Clone, Default)]
pub struct Trace {
    activations: Vec<Vec<f32>>,
    batch: usize,
}

/// Takes gradients from backward, one parameter at a time.
pub trait GradientSink {
    /// The error of [`GradientSink::put`].
    type Error;

    /// Takes the gradient of parameter `index`: `write` writes it into memory that holds zeros.
    fn put(&mut self, index: usize, write: impl FnOnce(&mut [f32])) -> Result<(), Self::Error>;
}

/// Local gradients, one vector per parameter: no communication.
impl GradientSink for Vec<Vec<f32>> {
    type Error = std::convert::Infallible;

    fn put(&mut self, index: usize, write: impl FnOnce(&mut [f32])) -> Result<(), Self::Error> {
        write(&mut self[index]);
        Ok(())
    }
}

impl Mlp {
    /// A model with layers `sizes[0] -> sizes[1] -> …`; weights normal with variance 1/inputs, biases 0.
    pub fn new(sizes: &[usize], rng: &mut Rng) -> Mlp {
        let layer = |pair: &[usize]| {
            let (inputs, outputs) = (pair[0], pair[1]);
            let scale = 1.0 / (inputs as f32).sqrt();
            let weight = (0..inputs * outputs).map(|_| scale * rng.normal()).collect();
            Layer { inputs, outputs, weight, bias: vec![0.0; outputs] }
        };
        Mlp { layers: sizes.windows(2).map(layer).collect() }
    }

    /// Name and length of every parameter, in order.
    pub fn specs(&self) -> Vec<ParamSpec> {
        self.layers
            .iter()
            .enumerate()
            .flat_map(|(l, layer)| {
                [("weight", layer.weight.len()), ("bias", layer.bias.len())]
                    .map(|(what, len)| ParamSpec { name: format!("layer{l}.{what}"), len })
            })
            .collect()
    }

    /// The parameters, in order.
    pub fn params(&self) -> Vec<&[f32]> {
        self.layers.iter().flat_map(|l| [l.weight.as_slice(), l.bias.as_slice()]).collect()
    }

    /// The parameters, in order, mutable.
    pub fn params_mut(&mut self) -> Vec<&mut [f32]> {
        self.layers.iter_mut().flat_map(|l| [l.weight.as_mut_slice(), l.bias.as_mut_slice()]).collect()
    }

    /// Number of elements of all parameters.
    pub fn len(&self) -> usize {
        self.params().iter().map(|p| p.len()).sum()
    }

    /// True for a model without layers.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Outputs for `batch` inputs (row-major); writes the activations for [`Mlp::backward`] into `trace`.
    pub fn forward<'t>(&self, input: &[f32], batch: usize, trace: &'t mut Trace) -> &'t [f32] {
        trace.batch = batch;
        trace.activations.resize(self.layers.len() + 1, Vec::new());
        trace.activations[0].clear();
        trace.activations[0].extend_from_slice(input);
        for (l, layer) in self.layers.iter().enumerate() {
            let (before, after) = trace.activations.split_at_mut(l + 1);
            let (x, y) = (&before[l], &mut after[0]);
            y.clear();
            for row in x.chunks_exact(layer.inputs) {
                for (w, b) in layer.weight.chunks_exact(layer.inputs).zip(&layer.bias) {
                    y.push(b + dot(w, row));
                }
            }
            if l + 1 < self.layers.len() {
                y.iter_mut().for_each(|v| *v = v.tanh());
            }
        }
        &trace.activations[self.layers.len()]
    }

    /// Gradients for `d_output`, the derivative of the loss with respect to each output of the forward pass in `trace`.
    // EXERCISE 2 (How it works): from the last layer to the first: hand the bias's gradient (number 2l + 1) and the
    // weight's (2l) to the sink as soon as they are complete, then propagate through the weights and the tanh to the
    // layer below.
    pub fn backward<S: GradientSink>(&self, trace: &Trace, d_output: &[f32], sink: &mut S) -> Result<(), S::Error> {
        let mut dz = d_output.to_vec();
        for (l, layer) in self.layers.iter().enumerate().rev() {
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
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// `y += a x`.
fn add_scaled(y: &mut [f32], a: f32, x: &[f32]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y += a * x;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loss::{cross_entropy, mean_squared_error};

    fn zeros(model: &Mlp) -> Vec<Vec<f32>> {
        model.specs().iter().map(|s| vec![0.0; s.len]).collect()
    }

    fn gradients(model: &Mlp, input: &[f32], batch: usize, loss: &dyn Fn(&[f32], &mut [f32]) -> f64) -> Vec<Vec<f32>> {
        let mut trace = Trace::default();
        let output = model.forward(input, batch, &mut trace);
        let mut d = vec![0.0; output.len()];
        loss(output, &mut d);
        let mut sink = zeros(model);
        model.backward(&trace, &d, &mut sink).unwrap();
        sink
    }

    /// Compares every gradient with (loss(p + h) - loss(p - h)) / 2h.
    fn check(model: &Mlp, input: &[f32], batch: usize, loss: &dyn Fn(&[f32], &mut [f32]) -> f64) {
        let analytic = gradients(model, input, batch, loss);
        let h = 1e-2;
        for (p, spec) in model.specs().iter().enumerate() {
            for (i, &ours) in analytic[p].iter().enumerate() {
                let at = |delta: f32| {
                    let mut moved = model.clone();
                    moved.params_mut()[p][i] += delta;
                    let mut trace = Trace::default();
                    let output = moved.forward(input, batch, &mut trace);
                    loss(output, &mut vec![0.0; output.len()])
                };
                let numeric = (at(h) - at(-h)) / (2.0 * f64::from(h));
                let ours = f64::from(ours);
                let close = approx::relative_eq!(numeric, ours, epsilon = 2e-4, max_relative = 1e-2);
                assert!(close, "{}[{i}]: {ours} {numeric}", spec.name);
            }
        }
    }

    #[test]
    fn cross_entropy_gradients_match_finite_differences() {
        let mut rng = Rng::new(3);
        let model = Mlp::new(&[2, 7, 5, 3], &mut rng);
        let input: Vec<f32> = (0..10).map(|_| rng.normal()).collect();
        check(&model, &input, 5, &|y, d| cross_entropy(y, &[0, 2, 1, 1, 0], d).loss);
    }

    #[test]
    fn squared_error_gradients_match_finite_differences() {
        let mut rng = Rng::new(4);
        let model = Mlp::new(&[1, 6, 6, 2], &mut rng);
        let input: Vec<f32> = (0..4).map(|_| rng.normal()).collect();
        let target: Vec<f32> = (0..8).map(|_| rng.normal()).collect();
        check(&model, &input, 4, &|y, d| mean_squared_error(y, &target, d));
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
        model.backward(&trace, &[1.0, 0.0, 0.0], &mut order).unwrap();
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
            gradients(&model, x, samples.len(), &|y, d| cross_entropy(y, &labels[samples.clone()], d).loss)
        };
        let (whole, a, b) = (of(0..4), of(0..2), of(2..4));
        for ((whole, a), b) in whole.iter().flatten().zip(a.iter().flatten()).zip(b.iter().flatten()) {
            approx::assert_abs_diff_eq!(*whole, 0.5 * (a + b), epsilon = 1e-6);
        }
    }
}
