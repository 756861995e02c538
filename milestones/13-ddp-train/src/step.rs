//! The step that keeps the copies of all ranks the same: data parallelism in 20 lines.

use anyhow::{Context as _, Result};
use course_kit::train::replica::Replica;

use crate::backward::backward;

/// One step on our shard of the global batch. `loss` gets the outputs, writes its derivative with respect to them,
/// and returns the mean over our shard, which this function returns too. All shards must have the same size, as the
/// ranks' gradients are averaged without weights. With `local` memory for gradients nothing is averaged.
// EXERCISE 3 (How it works): forward, loss, backward into the buckets, wait for the averages, and update every
// parameter by its averaged gradient; with `local` memory, by our own.
pub(crate) fn step(
    replica: &mut Replica<'_>,
    local: Option<&mut Vec<Vec<f32>>>,
    input: &[f32],
    batch: usize,
    loss: impl FnOnce(&[f32], &mut [f32]) -> f64,
) -> Result<f64> {
    let Replica { model, ddp, optimizer, trace, d_output, .. } = replica;
    let output = model.forward(input, batch, trace);
    d_output.clear();
    d_output.resize(output.len(), 0.0);
    let value = loss(output, d_output);
    optimizer.begin_step();
    match local {
        None => {
            ddp.zero();
            backward(model, trace, d_output, ddp).context("backward")?;
            ddp.finish().context("averaging the gradients")?;
            for (index, values) in model.params_mut().into_iter().enumerate() {
                optimizer.update(index, values, ddp.gradient(index)?);
            }
        }
        Some(gradients) => {
            gradients.iter_mut().for_each(|g| g.fill(0.0));
            backward(model, trace, d_output, gradients)?;
            for (index, values) in model.params_mut().into_iter().enumerate() {
                optimizer.update(index, values, &gradients[index]);
            }
        }
    }
    Ok(value)
}
