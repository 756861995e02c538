//! A multi-layer perceptron with tanh between its layers: forward, and backward by hand.
//!
//! Layer `l` computes `z = x Wᵀ + b`; all but the last one apply tanh. `W` is row-major, one row per output. Parameters
//! are numbered in forward order: `2l` is the weight of layer `l`, `2l + 1` its bias. Backward produces gradients from
//! the last to the first and hands over each as soon as it is complete, so communication can start early.

use tinynccl::ddp::ParamSpec;

use super::rng::Rng;

/// One linear layer.
#[derive(Debug, Clone, PartialEq)]
pub struct Layer {
    /// Width of its input.
    pub inputs: usize,
    /// Width of its output.
    pub outputs: usize,
    /// `outputs` rows of `inputs`.
    pub weight: Vec<f32>,
    /// One value per output.
    pub bias: Vec<f32>,
}

/// The model.
#[derive(Debug, Clone, PartialEq)]
pub struct Mlp {
    layers: Vec<Layer>,
}

/// The activations that backward needs: the input of every layer, and the last layer's output.
#[derive(Debug, Clone, Default)]
pub struct Trace {
    /// One more than there are layers; each holds the batch's rows.
    pub activations: Vec<Vec<f32>>,
    /// Number of rows.
    pub batch: usize,
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

    /// The layers, in forward order.
    pub fn layers(&self) -> &[Layer] {
        &self.layers
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
pub fn add_scaled(y: &mut [f32], a: f32, x: &[f32]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y += a * x;
    }
}

/// The gradients that `loss` has by finite differences, (loss(p + h) - loss(p - h)) / 2h: what tests compare backward
/// with.
pub fn numeric_gradients(model: &Mlp, loss: impl Fn(&Mlp) -> f64) -> Vec<Vec<f32>> {
    let h = 1e-2;
    let at = |p: usize, i: usize, delta: f32| {
        let mut moved = model.clone();
        moved.params_mut()[p][i] += delta;
        loss(&moved)
    };
    let of = |p: usize, i: usize| ((at(p, i, h) - at(p, i, -h)) / (2.0 * f64::from(h))) as f32;
    model.specs().iter().enumerate().map(|(p, spec)| (0..spec.len).map(|i| of(p, i)).collect()).collect()
}

#[cfg(test)]
mod tests {
    use super::super::loss::{cross_entropy, mean_squared_error};
    use super::*;

    /// Compares every gradient of `loss`, which writes the derivative by the outputs, with finite differences.
    fn check(model: &Mlp, input: &[f32], batch: usize, loss: &dyn Fn(&[f32], &mut [f32]) -> f64) {
        let mut trace = Trace::default();
        let mut d = vec![0.0; model.forward(input, batch, &mut trace).len()];
        loss(trace.activations.last().unwrap(), &mut d);
        let mut ours: Vec<Vec<f32>> = model.specs().iter().map(|s| vec![0.0; s.len]).collect();
        model.backward(&trace, &d, &mut ours).unwrap();
        let numeric = numeric_gradients(model, |moved| {
            let mut trace = Trace::default();
            let output = moved.forward(input, batch, &mut trace);
            loss(output, &mut vec![0.0; output.len()])
        });
        for (ours, numeric) in ours.iter().flatten().zip(numeric.iter().flatten()) {
            approx::assert_relative_eq!(*ours, *numeric, epsilon = 2e-4, max_relative = 1e-2);
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
}
