//! The layout of the parameters in the flat buffers, and the ranges of the gradients that are reduced together.
//!
//! Like the library's `ddp`: from the last parameter to the first, because backward finishes the last layer first. A
//! bucket closes once it holds enough bytes.

use std::ops::Range;

use tinynccl::ddp::ParamSpec;

/// Buckets begin at multiples of this many elements (128 bytes), so kernels can move 16 bytes at a time.
const ALIGN: usize = 32;

/// The layout of one model's parameters, gradients and velocities: the same for all three.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Buckets {
    /// The range of each parameter's elements, by its number.
    homes: Vec<Range<usize>>,
    /// The range of each bucket's elements.
    spans: Vec<Range<usize>>,
    /// The parameter whose gradient completes each bucket.
    last: Vec<usize>,
}

impl Buckets {
    /// Lays out `params`; a bucket closes when it holds at least `bytes`.
    // EXERCISE 1 (How it works): lay the parameters out from the last to the first; close a bucket once it holds
    // enough bytes, and begin the next at a multiple of ALIGN.
    pub fn new(params: &[ParamSpec], bytes: usize) -> Buckets {
        let mut buckets = Buckets { homes: vec![0..0; params.len()], spans: Vec::new(), last: Vec::new() };
        let mut start = 0;
        let mut end = 0;
        for (index, param) in params.iter().enumerate().rev() {
            buckets.homes[index] = end..end + param.len;
            end += param.len;
            if (end - start) * size_of::<f32>() >= bytes || index == 0 {
                buckets.spans.push(start..end);
                buckets.last.push(index);
                start = end.next_multiple_of(ALIGN);
                end = start;
            }
        }
        buckets
    }

    /// Number of elements of the flat buffers, with the gaps between buckets.
    pub fn elements(&self) -> usize {
        self.spans.last().map_or(0, |span| span.end)
    }

    /// The range of parameter `index`.
    pub fn home(&self, index: usize) -> Range<usize> {
        self.homes[index].clone()
    }

    /// The range of each bucket, in the order in which backward completes them.
    pub fn spans(&self) -> &[Range<usize>] {
        &self.spans
    }

    /// The bucket that the gradient of `param` completes, when backward goes from the last parameter to the first.
    pub fn completed_by(&self, param: usize) -> Option<usize> {
        self.last.iter().position(|&last| last == param)
    }

    /// The parameters of bucket `bucket`, from the last to the first.
    pub fn params(&self, bucket: usize) -> impl Iterator<Item = usize> {
        let above = if bucket == 0 { self.homes.len() } else { self.last[bucket - 1] };
        (self.last[bucket]..above).rev()
    }
}

#[cfg(test)]
mod tests {
    use tinynccl::ddp::{Ddp, DdpOptions};
    use tinynccl::process_group::ProcessGroup;
    use tinynccl::{Comm, Config};

    use super::*;

    fn specs(lens: &[usize]) -> Vec<ParamSpec> {
        lens.iter().enumerate().map(|(i, &len)| ParamSpec { name: format!("p{i}"), len }).collect()
    }

    #[test]
    fn from_the_last_to_the_first_closed_when_full() {
        // Bytes: 400, 40, 400, 4.
        let buckets = Buckets::new(&specs(&[100, 10, 100, 1]), 400);
        assert_eq!(buckets.spans(), [0..101, 128..238]);
        assert_eq!([3, 2, 1, 0].map(|i| buckets.home(i)), [0..1, 1..101, 128..138, 138..238]);
        assert_eq!([3, 2, 1, 0].map(|i| buckets.completed_by(i)), [None, Some(0), None, Some(1)]);
        assert_eq!(buckets.params(0).collect::<Vec<_>>(), [3, 2]);
        assert_eq!(buckets.params(1).collect::<Vec<_>>(), [1, 0]);
        assert_eq!(buckets.elements(), 238);
    }

    #[test]
    fn every_element_lies_in_one_bucket_and_buckets_are_aligned() {
        let params = specs(&[7, 1, 64, 64, 3, 1000, 2]);
        for bytes in [1, 100, 1000, 1 << 20] {
            let buckets = Buckets::new(&params, bytes);
            let mut seen = vec![0; buckets.elements()];
            for (bucket, span) in buckets.spans().iter().enumerate() {
                assert_eq!(span.start % ALIGN, 0);
                let inside: usize = buckets.params(bucket).map(|p| params[p].len).sum();
                assert_eq!(inside, span.len());
                for p in buckets.params(bucket) {
                    let home = buckets.home(p);
                    assert!(span.start <= home.start && home.end <= span.end);
                    home.for_each(|i| seen[i] += 1);
                }
            }
            assert_eq!(seen.iter().filter(|&&n| n == 1).count(), params.iter().map(|p| p.len).sum::<usize>());
            assert!(seen.iter().all(|&n| n <= 1));
        }
    }

    #[test]
    fn as_many_as_the_librarys_ddp_makes() {
        let group = ProcessGroup::from(Comm::threads(1, Config::default()).unwrap().remove(0));
        let params = specs(&[128, 64, 4096, 64, 192, 3]);
        for bytes in [1, 300, 8192, 17_000, 1 << 20] {
            let mut options = DdpOptions::default();
            options.bucket_bytes = bytes;
            let theirs = Ddp::new(&group, &params, options).unwrap().buckets();
            assert_eq!(Buckets::new(&params, bytes).spans().len(), theirs, "{bytes} bytes");
        }
    }
}
