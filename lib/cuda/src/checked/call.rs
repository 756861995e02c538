//! The stream of a call, and the 8-byte signature by which ranks compare their calls.

use std::fmt;
use std::sync::Arc;

use cudarc::driver::{CudaStream, sys};

use tinynccl_plan::dtype::{DType, ReduceOp};
use tinynccl_plan::error::Error;
use tinynccl_plan::wire::Collective;

/// One end of a message: where its buffer is, its bytes, and the other rank.
pub(crate) type End = (u64, usize, usize);

/// A copy within the device: a rank's own segment of an output, or a message to itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Own {
    pub(crate) from: u64,
    pub(crate) to: u64,
    pub(crate) bytes: u64,
}

/// Content of one launch: a message to a rank, one from a rank, and a copy; any of them may be missing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Round {
    pub(crate) to: Option<End>,
    pub(crate) from: Option<End>,
    pub(crate) own: Option<Own>,
}

/// The stream of a call: owned here, or a handle that the caller keeps valid until the communicator's next call.
#[derive(Debug, Clone)]
pub enum Stream {
    /// A stream of cudarc.
    Kept(Arc<CudaStream>),
    /// The driver's handle.
    Handle(sys::CUstream),
}

impl Stream {
    /// Returns the handle that the driver knows.
    #[doc(hidden)]
    pub fn handle(&self) -> sys::CUstream {
        match self {
            Stream::Kept(stream) => stream.cu_stream(),
            Stream::Handle(handle) => *handle,
        }
    }
}

impl From<&Arc<CudaStream>> for Stream {
    fn from(stream: &Arc<CudaStream>) -> Stream {
        Stream::Kept(stream.clone())
    }
}

impl From<sys::CUstream> for Stream {
    fn from(handle: sys::CUstream) -> Stream {
        Stream::Handle(handle)
    }
}

/// A call in 8 bytes, which ranks compare.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Signature(pub(crate) u64);

const COUNT_BITS: u32 = 40;

impl Signature {
    pub(crate) fn new(call: &tinynccl_plan::Call) -> Signature {
        let op = call.op.map_or(0, |op| op as u64);
        let kind = call.collective as u64 | (call.dtype as u64) << 8 | op << 12 | (call.root as u64) << 16;
        Signature(kind << COUNT_BITS | call.count as u64 & ((1 << COUNT_BITS) - 1))
    }
}

impl fmt::Display for Signature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = self.0 >> COUNT_BITS;
        let count = self.0 & ((1 << COUNT_BITS) - 1);
        let (collective, dtype) = (Collective::from_code(kind as u8), DType::from_code((kind >> 8 & 15) as u8));
        let (Some(collective), Some(dtype)) = (collective, dtype) else {
            return write!(f, "something unknown ({:#x})", self.0);
        };
        write!(f, "{collective} of {count} {dtype}")?;
        if collective.reduces() {
            write!(
                f,
                ", {}",
                ReduceOp::from_code((kind >> 12 & 15) as u8).map_or("an unknown operator", ReduceOp::name)
            )?;
        }
        if collective.has_root() {
            write!(f, ", root {}", kind >> 16 & 255)?;
        }
        Ok(())
    }
}

impl fmt::Debug for Signature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

pub(crate) fn unsupported(collective: Collective) -> Error {
    Error::Unsupported {
        what: format!("{collective} on the device"),
        detail: "use the host's communicator, or all_gather or all_to_all".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tinynccl_plan::Call;

    #[test]
    fn a_signature_holds_what_ranks_must_agree_on() {
        let call = Call::new(Collective::Reduce, DType::Bf16, ReduceOp::Max, 3, 12_345_678_901);
        assert_eq!(Signature::new(&call).to_string(), "reduce of 12345678901 bf16, max, root 3");
        let other = Call::new(Collective::AllGather, DType::U64, ReduceOp::Max, 3, 7);
        assert_eq!(Signature::new(&other).to_string(), "all_gather of 7 u64");
    }
}
