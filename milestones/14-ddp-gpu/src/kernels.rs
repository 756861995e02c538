//! The kernels as functions, which check lengths and enqueue the launch. None of them waits.

use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use cudarc::driver::{CudaContext, CudaFunction, CudaStream, CudaView, CudaViewMut, LaunchConfig, PushKernelArg};

use crate::compile::load;

/// Names of the kernels in the source.
pub const NAMES: [&str; 6] = [
    "layer_forward",
    "layer_weight_gradient",
    "layer_bias_gradient",
    "layer_backward",
    "cross_entropy",
    "momentum_step",
];

/// Elements along each side of a tile, as in `matmul.cuh`.
const TILE: u32 = 64;
/// Threads along each side of the block that computes a tile, as there.
const SIDE: u32 = 16;
/// Threads of a block in the other kernels.
const THREADS: u32 = 256;

/// The dimensions of a layer's computation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Rows of input and output.
    pub batch: usize,
    /// Columns of the input.
    pub inputs: usize,
    /// Columns of the output.
    pub outputs: usize,
}

impl Shape {
    /// The dimensions as the kernels take them.
    fn dimensions(self) -> Result<[i32; 3]> {
        let dimension = |n: usize| i32::try_from(n).with_context(|| format!("{n} is more than the kernels count to"));
        Ok([dimension(self.batch)?, dimension(self.inputs)?, dimension(self.outputs)?])
    }
}

/// The compiled kernels of one device.
#[derive(Debug)]
pub struct Kernels {
    functions: [CudaFunction; NAMES.len()],
}

impl Kernels {
    /// Compiles and loads them.
    ///
    /// # Errors
    /// NVRTC is not installed; or the compiler's or the driver's message.
    pub fn new(context: &Arc<CudaContext>) -> Result<Kernels> {
        let module = load(context)?;
        let find = |name: &str| module.load_function(name).with_context(|| format!("finding {name} in the module"));
        let [forward, weight, bias, backward, loss, step] = NAMES;
        let functions = [find(forward)?, find(weight)?, find(bias)?, find(backward)?, find(loss)?, find(step)?];
        Ok(Kernels { functions })
    }

    /// `y = x Wᵀ + b`, then tanh if `squash`.
    pub fn forward(
        &self,
        stream: &CudaStream,
        shape: Shape,
        x: &CudaView<'_, f32>,
        (w, bias): (&CudaView<'_, f32>, &CudaView<'_, f32>),
        y: &mut CudaViewMut<'_, f32>,
        squash: bool,
    ) -> Result<()> {
        let Shape { batch, inputs, outputs } = shape;
        lengths(&[(x.len(), batch * inputs), (w.len(), outputs * inputs), (bias.len(), outputs)])?;
        lengths(&[(y.len(), batch * outputs)])?;
        let ([batch, inputs, outputs], squash) = (shape.dimensions()?, i32::from(squash));
        let mut launch = stream.launch_builder(&self.functions[0]);
        launch.arg(y).arg(x).arg(w).arg(bias).arg(&batch).arg(&inputs).arg(&outputs).arg(&squash);
        // SAFETY: the kernel's parameters, in its order; the checked lengths cover all that it reads and writes.
        unsafe { launch.launch(tiles(shape.batch, shape.outputs)) }.context("launching layer_forward")?;
        Ok(())
    }

    /// `dw = dzᵀ x`.
    pub fn weight_gradient(
        &self,
        stream: &CudaStream,
        shape: Shape,
        dz: &CudaView<'_, f32>,
        x: &CudaView<'_, f32>,
        dw: &mut CudaViewMut<'_, f32>,
    ) -> Result<()> {
        let Shape { batch, inputs, outputs } = shape;
        lengths(&[(dz.len(), batch * outputs), (x.len(), batch * inputs), (dw.len(), outputs * inputs)])?;
        let [batch, inputs, outputs] = shape.dimensions()?;
        let mut launch = stream.launch_builder(&self.functions[1]);
        launch.arg(dw).arg(dz).arg(x).arg(&batch).arg(&inputs).arg(&outputs);
        // SAFETY: as in `forward`.
        unsafe { launch.launch(tiles(shape.outputs, shape.inputs)) }.context("launching layer_weight_gradient")?;
        Ok(())
    }

    /// `db` = column sums of `dz`.
    pub fn bias_gradient(
        &self,
        stream: &CudaStream,
        shape: Shape,
        dz: &CudaView<'_, f32>,
        db: &mut CudaViewMut<'_, f32>,
    ) -> Result<()> {
        lengths(&[(dz.len(), shape.batch * shape.outputs), (db.len(), shape.outputs)])?;
        let [batch, _, outputs] = shape.dimensions()?;
        let mut launch = stream.launch_builder(&self.functions[2]);
        launch.arg(db).arg(dz).arg(&batch).arg(&outputs);
        // SAFETY: as in `forward`.
        unsafe { launch.launch(threads(shape.outputs)) }.context("launching layer_bias_gradient")?;
        Ok(())
    }

    /// `dx = (dz W) (1 - x²)`: through the layer and through the tanh before it.
    pub fn backward(
        &self,
        stream: &CudaStream,
        shape: Shape,
        dz: &CudaView<'_, f32>,
        (w, x): (&CudaView<'_, f32>, &CudaView<'_, f32>),
        dx: &mut CudaViewMut<'_, f32>,
    ) -> Result<()> {
        let Shape { batch, inputs, outputs } = shape;
        lengths(&[(dz.len(), batch * outputs), (w.len(), outputs * inputs)])?;
        lengths(&[(x.len(), batch * inputs), (dx.len(), batch * inputs)])?;
        let [batch, inputs, outputs] = shape.dimensions()?;
        let mut launch = stream.launch_builder(&self.functions[3]);
        launch.arg(dx).arg(dz).arg(w).arg(x).arg(&batch).arg(&inputs).arg(&outputs);
        // SAFETY: as in `forward`.
        unsafe { launch.launch(tiles(shape.batch, shape.inputs)) }.context("launching layer_backward")?;
        Ok(())
    }

    /// Loss and hit of each sample, and the derivative of the mean loss with respect to each output.
    pub fn cross_entropy(
        &self,
        stream: &CudaStream,
        (outputs, labels): (&CudaView<'_, f32>, &CudaView<'_, u8>),
        d_outputs: &mut CudaViewMut<'_, f32>,
        losses: &mut CudaViewMut<'_, f32>,
        right: &mut CudaViewMut<'_, u8>,
    ) -> Result<()> {
        let samples = labels.len();
        let classes = outputs.len() / samples.max(1);
        lengths(&[(outputs.len(), samples * classes), (d_outputs.len(), samples * classes)])?;
        lengths(&[(losses.len(), samples), (right.len(), samples)])?;
        let [batch, classes, _] = Shape { batch: samples, inputs: classes, outputs: 0 }.dimensions()?;
        let mut launch = stream.launch_builder(&self.functions[4]);
        launch.arg(d_outputs).arg(losses).arg(right).arg(outputs).arg(labels).arg(&batch).arg(&classes);
        // SAFETY: as in `forward`; labels are below the number of classes (the data's, `CLASSES`).
        unsafe { launch.launch(threads(samples)) }.context("launching cross_entropy")?;
        Ok(())
    }

    /// `v = momentum v + g; p -= rate v`.
    pub fn momentum_step(
        &self,
        stream: &CudaStream,
        (rate, momentum): (f32, f32),
        p: &mut CudaViewMut<'_, f32>,
        v: &mut CudaViewMut<'_, f32>,
        g: &CudaView<'_, f32>,
    ) -> Result<()> {
        let elements = g.len();
        lengths(&[(p.len(), elements), (v.len(), elements)])?;
        let count = elements as i64;
        let mut launch = stream.launch_builder(&self.functions[5]);
        launch.arg(p).arg(v).arg(g).arg(&count).arg(&rate).arg(&momentum);
        // SAFETY: as in `forward`.
        unsafe { launch.launch(threads(elements)) }.context("launching momentum_step")?;
        Ok(())
    }
}

/// Blocks that cover a matrix in tiles.
fn tiles(rows: usize, columns: usize) -> LaunchConfig {
    LaunchConfig {
        grid_dim: ((columns as u32).div_ceil(TILE), (rows as u32).div_ceil(TILE), 1),
        block_dim: (SIDE, SIDE, 1),
        shared_mem_bytes: 0,
    }
}

/// Blocks with a thread for each element.
fn threads(elements: usize) -> LaunchConfig {
    LaunchConfig {
        grid_dim: (elements.div_ceil(THREADS as usize) as u32, 1, 1),
        block_dim: (THREADS, 1, 1),
        shared_mem_bytes: 0,
    }
}

/// Both lengths of each (length, expected) pair must be equal, as a kernel does not check them.
fn lengths(pairs: &[(usize, usize)]) -> Result<()> {
    for (position, (length, expected)) in pairs.iter().enumerate() {
        ensure!(length == expected, "buffer {position} has {length} elements, expected {expected}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compile::SOURCE;

    #[test]
    fn tiles_cover_every_element() {
        assert_eq!(tiles(1, 1).grid_dim, (1, 1, 1));
        assert_eq!(tiles(65, 128).grid_dim, (2, 2, 1));
        assert_eq!(threads(257).grid_dim, (2, 1, 1));
    }

    #[test]
    fn the_source_has_the_same_tiles() {
        assert!(SOURCE.contains(&format!("TILE = {TILE};")) && SOURCE.contains(&format!("SIDE = {SIDE};")));
    }

    #[test]
    fn a_buffer_of_another_length_is_refused() {
        assert!(lengths(&[(3, 3), (4, 4)]).is_ok());
        let error = lengths(&[(3, 3), (4, 5)]).unwrap_err().to_string();
        assert_eq!(error, "buffer 1 has 4 elements, expected 5");
    }
}
