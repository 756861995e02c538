//! Average as a sum with a factor before it or a division behind it, as in NCCL.
//!
//! Floats are multiplied by 1/n before the sum, so that a sum of large values does not overflow. Integers are divided
//! behind it, or they would lose their remainders one by one. (NCCL: `hostToDevRedOp` in `src/enqueue.cc`,
//! `FuncPreMulSum` and `FuncSumPostDiv` in `src/device/reduce_kernel.h`)

use super::{Division, Scale, kernels};
use tinynccl_plan::dtype::{DType, ReduceOp};

/// The two ends of an average. Both are `None` for other operators, and for one rank.
#[derive(Debug, Clone, Copy, Default)]
pub struct Average {
    /// Applied to every rank's input, once.
    pub scale: Option<Scale>,
    /// Applied to the sum over all ranks, once.
    pub division: Option<Division>,
}

impl Average {
    /// For `op` of `dtype` among `ranks`.
    pub fn new(dtype: DType, op: Option<ReduceOp>, ranks: usize) -> Average {
        if op != Some(ReduceOp::Avg) || ranks < 2 {
            return Average::default();
        }
        let divide = kernels(dtype, ReduceOp::Avg).divide;
        Average { scale: Scale::new(dtype, 1.0 / ranks as f64), division: divide.map(|f| Division::new(f, ranks)) }
    }
}
