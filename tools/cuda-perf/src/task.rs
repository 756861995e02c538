//! The task to time: an operation of some size, and its buffers.

use std::sync::Arc;

use anyhow::Result;
use clap::ValueEnum;
use cudarc::driver::{CudaSlice, CudaStream, DevicePtr};
use tinynccl::DType;
use tinynccl::cuda::{DeviceComm, Registered};
use tinynccl::wire::Collective;

/// The operations, in nccl-tests' sense.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Operation {
    AllReduce,
    AllGather,
    ReduceScatter,
    Broadcast,
    Reduce,
    AllToAll,
    /// To rank 0; bytes are those of its output.
    Gather,
    /// From rank 0; bytes are those of its input.
    Scatter,
    /// Each rank sends to the next and receives from the one before.
    SendRecv,
}

impl Operation {
    /// Returns true if its bytes are those of one segment per rank.
    fn has_segments(self) -> bool {
        use Operation::{AllGather, AllToAll, Gather, ReduceScatter, Scatter};
        matches!(self, AllGather | ReduceScatter | AllToAll | Gather | Scatter)
    }
}

/// One operation of one size.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Task {
    pub(crate) operation: Operation,
    pub(crate) dtype: DType,
    /// Elements, as the collective counts them: of a segment where there are segments.
    pub(crate) count: usize,
    /// Bytes, as nccl-tests count them.
    bytes: usize,
    ranks: usize,
}

/// Device memory of a task, as addresses.
#[derive(Debug)]
pub(crate) struct Buffers {
    pub(crate) input: u64,
    pub(crate) output: u64,
    _memory: Memory,
}

/// The owner of the memory.
#[derive(Debug)]
enum Memory {
    Plain([CudaSlice<u8>; 2]),
    Registered(Box<[Registered<u8>; 2]>),
}

impl Task {
    /// `None` if so few bytes cannot be cut into the segments.
    pub(crate) fn new(operation: Operation, dtype: DType, bytes: usize, ranks: usize) -> Option<Task> {
        let elements = bytes / dtype.size();
        let count = if operation.has_segments() { elements / ranks } else { elements };
        (count > 0).then_some(Task { operation, dtype, count, bytes, ranks })
    }

    pub(crate) fn collective(&self) -> Collective {
        match self.operation {
            Operation::AllReduce => Collective::AllReduce,
            Operation::AllGather => Collective::AllGather,
            Operation::ReduceScatter => Collective::ReduceScatter,
            Operation::Broadcast => Collective::Broadcast,
            Operation::Reduce => Collective::Reduce,
            Operation::AllToAll => Collective::AllToAll,
            Operation::Gather => Collective::Gather,
            Operation::Scatter => Collective::Scatter,
            Operation::SendRecv => Collective::SendRecv,
        }
    }

    /// With `device`, registered with it.
    pub(crate) fn buffers(
        &self,
        stream: &Arc<CudaStream>,
        rank: usize,
        device: Option<&DeviceComm>,
    ) -> Result<Buffers> {
        let host = self.pattern(rank);
        let mut memory = match device {
            Some(device) => {
                let pair = [device.alloc(stream, self.bytes)?, device.alloc(stream, self.bytes)?];
                Memory::Registered(Box::new(pair))
            }
            None => Memory::Plain([stream.alloc_zeros(self.bytes)?, stream.alloc_zeros(self.bytes)?]),
        };
        let (input, output) = match &mut memory {
            Memory::Plain([input, output]) => {
                stream.memcpy_htod(&host, input)?;
                (input.device_ptr(stream).0, output.device_ptr(stream).0)
            }
            Memory::Registered(pair) => {
                let [input, output] = pair.as_mut();
                stream.memcpy_htod(&host, &mut input.as_view_mut())?;
                (input.device_ptr(stream).0, output.device_ptr(stream).0)
            }
        };
        Ok(Buffers { input, output, _memory: memory })
    }

    /// Bytes of each buffer.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Not of zeroes: they can be faster than data.
    fn pattern(&self, rank: usize) -> Vec<u8> {
        // Small whole numbers in f32 and bf16 alike: 1.0 and 2.0 have a zero low half in f32.
        let pattern: Vec<u8> =
            (0..self.bytes.min(1 << 20)).map(|i| if i % 2 == 1 { 0x3f } else { (i / 2 + rank) as u8 & 0x7f }).collect();
        let mut host = Vec::with_capacity(self.bytes);
        while host.len() < self.bytes {
            let more = pattern.len().min(self.bytes - host.len());
            host.extend_from_slice(&pattern[..more]);
        }
        host
    }

    /// GB/s of the link that an ideal algorithm would need: nccl-tests' PERFORMANCE.md.
    pub(crate) fn busbw(&self, seconds: f64) -> f64 {
        let n = self.ranks as f64;
        let factor = match self.operation {
            Operation::AllReduce => 2.0 * (n - 1.0) / n,
            _ if self.operation.has_segments() => (n - 1.0) / n,
            _ => 1.0,
        };
        factor * self.bytes as f64 / seconds / 1e9
    }
}
