//! Which gradients are averaged together. The backward pass finishes them from the end of the flat array to its beginning, so a
//! bucket is a slice, and is averaged as soon as its first tensor is final.

use std::ops::Range;

use crate::config::ModelConfig;
use crate::params::{ParamInfo, Tensor, WTE, count, final_ln, index};

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
    let blocks = (0..config.layers).rev().flat_map(|l| [index(l, Tensor::Ln2), index(l, Tensor::Ln1)]);
    std::iter::once(final_ln(config)).chain(blocks).chain([WTE]).collect()
}

/// Buckets of at least `bytes`, in the order in which they become ready. The last one holds the embeddings alone, whatever their
/// size: nothing is left to hide its average behind, so it should be short.
pub fn plan(config: &ModelConfig, layout: &[ParamInfo], bytes: usize) -> Vec<Bucket> {
    let mut buckets = Vec::new();
    let mut end = count(layout);
    let last_block = index(0, Tensor::Ln1);
    for tensor in order(config) {
        let start = layout[tensor].offset;
        if (end - start) * size_of::<f32>() >= bytes || tensor == last_block || tensor == WTE {
            buckets.push(Bucket { range: start..end, tensor });
            end = start;
        }
    }
    buckets
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
