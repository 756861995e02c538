//! Calls on streams: collectives, messages, and one-sided messages.
//!
//! Each exported function checks its arguments, and makes a call that `submit` enqueues.
//!
//! | file | idea |
//! | --- | --- |
//! | `collectives` | collectives, and messages between two ranks |
//! | `rma` | one-sided messages: put, signal, wait |
//! | `pre_mul_sum` | `ncclRedOpCreatePreMulSum`: sums of inputs times a factor; its kernel is `pre_mul_sum.cu` |

pub(crate) mod collectives;
pub(crate) mod pre_mul_sum;
pub(crate) mod rma;
