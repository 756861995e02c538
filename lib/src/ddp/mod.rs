//! Data parallelism: gradients in flat buckets, averaged over the ranks while backward still runs.
//!
//! As in PyTorch's `DistributedDataParallel` (Li et al., VLDB 2020): parameters are assigned to buckets in reverse
//! order, because backward finishes the last layer first; when every gradient of a bucket is ready, the bucket's
//! all-reduce starts on the progress thread of the [`ProcessGroup`] while the caller computes on. Gradients lie in host
//! memory, so the group's backend is tinynccl or mpi.

use std::time::{Duration, Instant};

use crate::declared;
use crate::process_group::{ProcessGroup, Work};
use tinynccl_comm::trace::{self, Span};
use tinynccl_plan::dtype::ReduceOp;
use tinynccl_plan::error::{Error, Result};

/// A parameter: what backward produces one gradient for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParamSpec {
    /// Name, for errors.
    pub name: String,
    /// Number of elements.
    pub len: usize,
}

/// Settings of [`Ddp`].
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct DdpOptions {
    /// A bucket is closed when it holds at least this many bytes. PyTorch's default is 25 MiB; smaller buckets start
    /// earlier, larger ones cost fewer calls.
    pub bucket_bytes: usize,
}

impl Default for DdpOptions {
    fn default() -> Self {
        DdpOptions { bucket_bytes: 4 << 20 }
    }
}

/// Time spent in [`Ddp`] since it was made.
#[derive(Debug, Clone, Copy, Default)]
pub struct DdpStats {
    /// Waiting in [`Ddp::finish`]: communication that was not hidden behind computation.
    pub exposed: Duration,
    /// All-reduces started.
    pub buckets: usize,
    /// Gradient bytes handed to them.
    pub bytes: u64,
}

/// Location of a parameter's gradient: bucket, and offset and length in elements.
#[derive(Debug, Clone, Copy)]
struct Home {
    bucket: usize,
    offset: usize,
    len: usize,
}

#[derive(Debug)]
struct Bucket {
    /// `None` while the all-reduce owns it.
    data: Option<Vec<f32>>,
    work: Option<Work<Vec<f32>>>,
    params: usize,
    waiting: usize,
}

/// Gradient buckets of one model replica.
///
/// One step: [`Ddp::zero`]; backward writes [`Ddp::gradient_mut`] and calls [`Ddp::ready`] once per parameter;
/// [`Ddp::finish`]; then [`Ddp::gradient`] is the average over all ranks, the same bits on each.
///
/// ```no_run
#[doc = include_str!("../../examples/ddp.rs")]
/// ```
#[derive(Debug)]
pub struct Ddp<'g> {
    group: &'g ProcessGroup,
    params: Vec<ParamSpec>,
    homes: Vec<Home>,
    ready: Vec<bool>,
    buckets: Vec<Bucket>,
    stats: DdpStats,
}

impl<'g> Ddp<'g> {
    /// Lays out the buckets. A communicator becomes a group by `ProcessGroup::from(comm)`. All ranks must have the same
    /// parameters: names and lengths are compared, and the first difference is named together with both ranks.
    pub fn new(group: &'g ProcessGroup, params: &[ParamSpec], options: DdpOptions) -> Result<Ddp<'g>> {
        let lines = params.iter().map(|param| format!("'{}' with {} elements", param.name, param.len));
        declared::compare(group.comm(), "ddp: new", "parameter", lines)?;
        let mut homes = vec![Home { bucket: 0, offset: 0, len: 0 }; params.len()];
        let mut sizes: Vec<(usize, usize)> = Vec::new(); // (elements, parameters)
        let mut full = true;
        for (index, param) in params.iter().enumerate().rev() {
            if full {
                sizes.push((0, 0));
            }
            let bucket = sizes.len() - 1;
            let (elements, count) = &mut sizes[bucket];
            homes[index] = Home { bucket, offset: *elements, len: param.len };
            *elements += param.len;
            *count += 1;
            full = *elements * size_of::<f32>() >= options.bucket_bytes;
        }
        let buckets = sizes
            .into_iter()
            .map(|(elements, params)| Bucket { data: Some(vec![0.0; elements]), work: None, params, waiting: params })
            .collect();
        Ok(Ddp {
            group,
            params: params.to_vec(),
            ready: vec![false; homes.len()],
            homes,
            buckets,
            stats: DdpStats::default(),
        })
    }

    /// Number of buckets.
    pub fn buckets(&self) -> usize {
        self.buckets.len()
    }

    /// Time and volume so far.
    pub fn stats(&self) -> DdpStats {
        self.stats
    }

    /// Makes every rank's parameters those of rank 0. `values[i]` belongs to parameter `i`.
    pub fn broadcast_parameters(&self, values: &mut [&mut [f32]]) -> Result<()> {
        if values.len() != self.params.len() {
            let detail = format!("{} values for {} parameters", values.len(), self.params.len());
            return Err(Error::invalid("ddp: broadcast_parameters", detail));
        }
        for (value, param) in values.iter_mut().zip(&self.params) {
            if value.len() != param.len {
                let detail = format!("'{}' has {} elements, expected {}", param.name, value.len(), param.len);
                return Err(Error::invalid("ddp: broadcast_parameters", detail));
            }
            self.group.broadcast_in_place(&mut **value, 0)?;
        }
        Ok(())
    }

    fn home(&self, op: &str, index: usize) -> Result<Home> {
        self.homes
            .get(index)
            .copied()
            .ok_or_else(|| Error::invalid(format!("ddp: {op}"), format!("parameter {index} of {}", self.homes.len())))
    }

    fn in_flight(&self, op: &str, index: usize) -> Error {
        let name = &self.params[index].name;
        Error::invalid(format!("ddp: {op}"), format!("the bucket of '{name}' is being reduced: call finish() first"))
    }

    /// The gradient of parameter `index`: the average after [`Ddp::finish`], our own contribution before.
    pub fn gradient(&self, index: usize) -> Result<&[f32]> {
        let home = self.home("gradient", index)?;
        match &self.buckets[home.bucket].data {
            Some(data) => Ok(&data[home.offset..home.offset + home.len]),
            None => Err(self.in_flight("gradient", index)),
        }
    }

    /// As [`Ddp::gradient`], to write to.
    pub fn gradient_mut(&mut self, index: usize) -> Result<&mut [f32]> {
        let home = self.home("gradient_mut", index)?;
        if self.buckets[home.bucket].data.is_none() {
            return Err(self.in_flight("gradient_mut", index));
        }
        match &mut self.buckets[home.bucket].data {
            Some(data) => Ok(&mut data[home.offset..home.offset + home.len]),
            None => Err(Error::invalid("ddp: gradient_mut", "in flight")),
        }
    }

    /// Marks the gradient of parameter `index` as complete for this step; starts its bucket's all-reduce when it
    /// was the last one there. Buckets start in the same order on all ranks: bucket `k` waits for bucket `k - 1`.
    pub fn ready(&mut self, index: usize) -> Result<()> {
        let home = self.home("ready", index)?;
        if std::mem::replace(&mut self.ready[index], true) {
            let name = &self.params[index].name;
            return Err(Error::invalid("ddp: ready", format!("'{name}' was ready already in this step")));
        }
        self.buckets[home.bucket].waiting -= 1;
        self.start_ready_buckets()
    }

    /// Ranks may finish gradients in different orders; collectives must not.
    fn start_ready_buckets(&mut self) -> Result<()> {
        for (index, bucket) in self.buckets.iter_mut().enumerate() {
            if bucket.waiting > 0 {
                break;
            }
            if bucket.work.is_none()
                && let Some(data) = bucket.data.take()
            {
                let bytes = (data.len() * size_of::<f32>()) as u64;
                self.stats.buckets += 1;
                self.stats.bytes += bytes;
                if let Some(trace) = self.group.comm().trace() {
                    trace.span(trace::now(), Span::BucketReady { bucket: index as u32, bytes });
                }
                bucket.work = Some(self.group.all_reduce_in_place_async(data, ReduceOp::Avg)?);
            }
        }
        Ok(())
    }

    /// Waits for every bucket. An error names the parameters that were never [`Ddp::ready`].
    pub fn finish(&mut self) -> Result<()> {
        let missing: Vec<&str> =
            self.params.iter().zip(&self.ready).filter(|(_, r)| !**r).map(|(p, _)| p.name.as_str()).collect();
        if !missing.is_empty() {
            let detail = format!("no gradient for {}: call ready() for every parameter", missing.join(", "));
            return Err(Error::invalid("ddp: finish", detail));
        }
        let start = Instant::now();
        let trace = self.group.comm().trace().map(|trace| (trace, trace::now()));
        for (index, bucket) in self.buckets.iter_mut().enumerate() {
            if let Some(work) = bucket.work.take() {
                let begin = trace.map(|_| trace::now());
                bucket.data = Some(work.wait()?);
                if let (Some((trace, _)), Some(begin)) = (trace, begin) {
                    trace.span(begin, Span::BucketWait { bucket: index as u32 });
                }
            }
            bucket.waiting = bucket.params;
        }
        if let Some((trace, begin)) = trace {
            trace.span(begin, Span::Finish);
        }
        self.ready.fill(false);
        self.stats.exposed += start.elapsed();
        Ok(())
    }

    /// Sets all gradients to zero.
    pub fn zero(&mut self) {
        for data in self.buckets.iter_mut().filter_map(|b| b.data.as_mut()) {
            data.fill(0.0);
        }
    }
}
