//! The MLP of milestone 13 on a device: parameters, gradients and velocities in three flat buffers of one layout.

use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use course_kit::train::mlp::Mlp;
use cudarc::driver::{CudaSlice, CudaStream, CudaView, CudaViewMut};
use tinynccl::ddp::ParamSpec;

use crate::buckets::Buckets;
use crate::kernels::{Kernels, Shape};

/// Decay of the velocity, as in milestone 13's optimiser.
const MOMENTUM: f32 = 0.9;

/// Samples on the device, and the memory for their results.
#[derive(Debug)]
pub struct Batch<'a> {
    /// Rows of inputs.
    pub points: CudaView<'a, f32>,
    /// The class of each row.
    pub labels: CudaView<'a, u8>,
    /// Receives each sample's loss.
    pub losses: CudaViewMut<'a, f32>,
    /// Receives 1 for each sample that the model classified correctly.
    pub right: CudaViewMut<'a, u8>,
}

/// A model on a device.
#[derive(Debug)]
pub struct DeviceMlp {
    /// Width of the input and of each layer's output.
    sizes: Vec<usize>,
    specs: Vec<ParamSpec>,
    buckets: Buckets,
    params: CudaSlice<f32>,
    pub(crate) gradients: CudaSlice<f32>,
    velocity: CudaSlice<f32>,
    /// Each layer's output, for backward.
    outputs: Vec<CudaSlice<f32>>,
    /// The derivative of the loss with respect to each layer's sums.
    deltas: Vec<CudaSlice<f32>>,
    /// Samples that `outputs` and `deltas` have room for.
    room: usize,
}

impl DeviceMlp {
    /// A copy of `model`, whose layers have the widths `sizes`, with room for batches of `room` samples.
    pub fn new(
        stream: &Arc<CudaStream>,
        model: &Mlp,
        sizes: &[usize],
        room: usize,
        bucket_bytes: usize,
    ) -> Result<DeviceMlp> {
        let specs = model.specs();
        let buckets = Buckets::new(&specs, bucket_bytes);
        let zeros = |elements| stream.alloc_zeros::<f32>(elements).context("allocating device memory");
        let layers = || sizes[1..].iter().map(|width| zeros(room * width)).collect::<Result<Vec<_>>>();
        let mut device = DeviceMlp {
            params: zeros(buckets.elements())?,
            gradients: zeros(buckets.elements())?,
            velocity: zeros(buckets.elements())?,
            outputs: layers()?,
            deltas: layers()?,
            sizes: sizes.to_vec(),
            specs,
            buckets,
            room,
        };
        device.load(stream, model)?;
        Ok(device)
    }

    /// Takes the weights of `model`, and resets the velocities.
    pub fn load(&mut self, stream: &Arc<CudaStream>, model: &Mlp) -> Result<()> {
        let mut flat = vec![0f32; self.buckets.elements()];
        for (index, values) in model.params().into_iter().enumerate() {
            flat[self.buckets.home(index)].copy_from_slice(values);
        }
        stream.memcpy_htod(&flat, &mut self.params).context("copying the weights to the device")?;
        stream.memset_zeros(&mut self.velocity).context("clearing the velocities")?;
        // `flat` must live until the copy has run.
        stream.synchronize().context("copying the weights to the device")
    }

    /// Name and length of every parameter, in forward order.
    pub fn specs(&self) -> &[ParamSpec] {
        &self.specs
    }

    /// The layout of parameters and gradients.
    pub fn buckets(&self) -> &Buckets {
        &self.buckets
    }

    /// All parameters, flat.
    pub fn params_mut(&mut self) -> &mut CudaSlice<f32> {
        &mut self.params
    }

    /// The parameters, on the host, in forward order. Waits for `stream`.
    pub fn params(&self, stream: &Arc<CudaStream>) -> Result<Vec<Vec<f32>>> {
        self.to_host(stream, &self.params)
    }

    /// The gradients, as [`DeviceMlp::params`].
    pub fn gradients(&self, stream: &Arc<CudaStream>) -> Result<Vec<Vec<f32>>> {
        self.to_host(stream, &self.gradients)
    }

    fn to_host(&self, stream: &Arc<CudaStream>, flat: &CudaSlice<f32>) -> Result<Vec<Vec<f32>>> {
        let flat = stream.clone_dtoh(flat).context("copying from the device")?;
        stream.synchronize().context("copying from the device")?;
        Ok((0..self.specs.len()).map(|index| flat[self.buckets.home(index)].to_vec()).collect())
    }

    fn shape(&self, layer: usize, batch: usize) -> Shape {
        Shape { batch, inputs: self.sizes[layer], outputs: self.sizes[layer + 1] }
    }

    /// Enqueues forward and loss.
    pub fn forward(&mut self, kernels: &Kernels, stream: &CudaStream, batch: &mut Batch<'_>) -> Result<()> {
        let samples = batch.labels.len();
        ensure!(samples <= self.room, "a batch of {samples} samples, there is room for {}", self.room);
        let layers = self.sizes.len() - 1;
        for layer in 0..layers {
            let shape = self.shape(layer, samples);
            let (before, after) = self.outputs.split_at_mut(layer);
            let x = input(&batch.points, before.last(), samples * shape.inputs);
            let w = self.params.slice(self.buckets.home(2 * layer));
            let bias = self.params.slice(self.buckets.home(2 * layer + 1));
            let mut y = after[0].slice_mut(..samples * shape.outputs);
            kernels.forward(stream, shape, &x, (&w, &bias), &mut y, layer + 1 < layers)?;
        }
        let classes = self.sizes[layers];
        let outputs = self.outputs[layers - 1].slice(..samples * classes);
        let mut d = self.deltas[layers - 1].slice_mut(..samples * classes);
        kernels.cross_entropy(stream, (&outputs, &batch.labels), &mut d, &mut batch.losses, &mut batch.right)
    }

    /// Enqueues backward. It calls `produced(gradients, bucket)` when the kernels of a bucket's last gradient are in
    /// the stream, so that work enqueued after them finds the bucket complete.
    pub fn backward(
        &mut self,
        kernels: &Kernels,
        stream: &CudaStream,
        batch: &Batch<'_>,
        mut produced: impl FnMut(&mut CudaSlice<f32>, usize) -> Result<()>,
    ) -> Result<()> {
        let samples = batch.labels.len();
        for layer in (0..self.sizes.len() - 1).rev() {
            let shape = self.shape(layer, samples);
            let (weight, bias) = (2 * layer, 2 * layer + 1);
            let (lower, upper) = self.deltas.split_at_mut(layer);
            let dz = upper[0].slice(..samples * shape.outputs);
            let x = input(&batch.points, self.outputs[..layer].last(), samples * shape.inputs);
            for param in [bias, weight] {
                let mut gradient = self.gradients.slice_mut(self.buckets.home(param));
                if param == bias {
                    kernels.bias_gradient(stream, shape, &dz, &mut gradient)?;
                } else {
                    kernels.weight_gradient(stream, shape, &dz, &x, &mut gradient)?;
                }
                if let Some(bucket) = self.buckets.completed_by(param) {
                    produced(&mut self.gradients, bucket)?;
                }
            }
            if let Some(below) = lower.last_mut() {
                let w = self.params.slice(self.buckets.home(weight));
                let mut dx = below.slice_mut(..samples * shape.inputs);
                kernels.backward(stream, shape, &dz, (&w, &x), &mut dx)?;
            }
        }
        Ok(())
    }

    /// Enqueues the optimiser's step for one bucket.
    pub fn update(&mut self, kernels: &Kernels, stream: &CudaStream, bucket: usize, rate: f32) -> Result<()> {
        let span = self.buckets.spans()[bucket].clone();
        let (mut p, mut v) = (self.params.slice_mut(span.clone()), self.velocity.slice_mut(span.clone()));
        kernels.momentum_step(stream, (rate, MOMENTUM), &mut p, &mut v, &self.gradients.slice(span))
    }
}

/// The input of a layer: the points, or the output of the layer below.
fn input<'a>(points: &'a CudaView<'_, f32>, below: Option<&'a CudaSlice<f32>>, elements: usize) -> CudaView<'a, f32> {
    match below {
        Some(outputs) => outputs.slice(..elements),
        None => points.slice(..elements),
    }
}

/// Parameters of a model with these widths, as [`Mlp::specs`] lists them.
pub fn specs(sizes: &[usize]) -> Vec<ParamSpec> {
    let layers = sizes.windows(2).enumerate();
    layers
        .flat_map(|(l, pair)| {
            [("weight", pair[0] * pair[1]), ("bias", pair[1])]
                .map(|(what, len)| ParamSpec { name: format!("layer{l}.{what}"), len })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use course_kit::train::rng::Rng;

    use super::*;

    #[test]
    fn the_parameters_are_those_of_the_model() {
        let sizes = [2, 5, 4, 3];
        assert_eq!(specs(&sizes), Mlp::new(&sizes, &mut Rng::new(1)).specs());
    }
}
