//! Averaging gradients over the ranks: which together, and by what. The backward pass finishes gradients from the end
//! of the flat array to its beginning, so a bucket is a slice, and is averaged as soon as its first tensor is final.

use std::ops::Range;
use std::sync::Arc;

use anyhow::Result;
use cudarc::driver::CudaStream;
use tinynccl::comm::RawCall;
use tinynccl::cuda::{DeviceComm, Protocol};
use tinynccl::dtype::DType;
use tinynccl::wire::Collective;
use tinynccl::{Call, Comm, ReduceOp};

use super::device::{Address, Gpu};
use crate::config::ModelConfig;
use crate::params::{ParamInfo, WTE, count, final_ln, of_block};

/// One slice of the flat gradients.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bucket {
    /// Values.
    pub range: Range<usize>,
    /// The tensor whose readiness completes it: the first in it.
    pub tensor: usize,
}

/// The tensors that the backward pass announces, in its order. Each stands for all from it to the one announced before.
pub fn order(config: &ModelConfig) -> Vec<usize> {
    let norms = |l| {
        let [ln1, _, _, ln2, ..] = of_block(l);
        [ln2, ln1]
    };
    let blocks = (0..config.layers).rev().flat_map(norms);
    std::iter::once(final_ln(config)).chain(blocks).chain([WTE]).collect()
}

/// Buckets of at least `bytes`, in the order in which they become ready. The last one holds the embeddings alone,
/// whatever their size: nothing is left to hide its average behind, so it should be short.
pub fn plan(config: &ModelConfig, layout: &[ParamInfo], bytes: usize) -> Vec<Bucket> {
    let mut buckets = Vec::new();
    let mut end = count(layout);
    let [last_block, ..] = of_block(0);
    for tensor in order(config) {
        let start = layout[tensor].offset;
        if (end - start) * size_of::<f32>() >= bytes || tensor == last_block || tensor == WTE {
            buckets.push(Bucket { range: start..end, tensor });
            end = start;
        }
    }
    buckets
}

/// Averages over the ranks, in the order of a stream: the library's communicator of GPUs, where there is more than one
/// rank. Calls only enqueue.
pub struct Averages {
    comm: Option<DeviceComm>,
    /// Blocks that the average of a large bucket may take, 0 for the communicator's own choice: what it takes, the
    /// passes do not have meanwhile.
    blocks: u32,
}

impl Averages {
    /// Every rank calls it.
    pub fn new(comm: &Comm, gpu: &Gpu, blocks: u32) -> Result<Averages> {
        let comm = if comm.size() > 1 { Some(DeviceComm::new(comm, &gpu.context)?) } else { None };
        Ok(Averages { comm, blocks })
    }

    /// Returns true if calls may be captured into a graph.
    pub fn captures(&self) -> bool {
        self.comm.as_ref().is_none_or(|comm| comm.path().captures())
    }

    /// Replaces `count` values at `at` by their mean over the ranks.
    pub fn average(&self, stream: &Arc<CudaStream>, at: Address, count: usize) -> Result<()> {
        let Some(comm) = &self.comm else { return Ok(()) };
        let mut choice = comm.choice(Collective::AllReduce, count * size_of::<f32>());
        if self.blocks > 0 && matches!(choice.protocol, Protocol::Simple | Protocol::Direct | Protocol::Schedule(..)) {
            choice.blocks = choice.blocks.min(self.blocks);
        }
        let call =
            RawCall::on_device(Call::new(Collective::AllReduce, DType::F32, ReduceOp::Avg, 0, count), at.0, at.0);
        // SAFETY: the caller enqueues slices of its gradients, which live as long as the training; the passes write
        // them again only after the optimizer, which waits for this.
        Ok(unsafe { comm.enqueue_as(stream.cu_stream(), &call, choice) }?)
    }

    /// The failure of a call that ran before, if one has failed.
    pub fn check(&self) -> Result<()> {
        self.comm.as_ref().map_or(Ok(()), |comm| Ok(comm.check()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Preset;
    use crate::params::layout;

    #[test]
    fn buckets_cover_everything_once_from_the_end() {
        let config = Preset::Full.model(65);
        let layout = layout(&config);
        for (bytes, expected) in [(1, 14), (1 << 20, 13), (4 << 20, 8), (7 << 20, 5), (1 << 30, 2)] {
            let buckets = plan(&config, &layout, bytes);
            assert_eq!(buckets.len(), expected, "{bytes}");
            let mut end = count(&layout);
            for bucket in &buckets {
                assert_eq!(bucket.range.end, end);
                assert_eq!(bucket.range.start, layout[bucket.tensor].offset);
                assert!(bucket.range.len() % 4 == 0 && bucket.range.start % 4 == 0);
                end = bucket.range.start;
            }
            assert_eq!(end, 0);
        }
    }

    #[test]
    fn every_tensor_follows_one_that_is_announced() {
        let config = Preset::Tiny.model(30);
        let order = order(&config);
        assert!(order.windows(2).all(|w| w[0] > w[1]));
        assert_eq!(order.len(), 2 * config.layers + 2);
        assert_eq!((order[0], order[order.len() - 1]), (final_ln(&config), WTE));
    }
}
