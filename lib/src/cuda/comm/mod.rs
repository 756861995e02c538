//! The communicator.
//!
//! | file | idea |
//! | --- | --- |
//! | `communicator` | its state, its calls' order, its failure |
//! | `scratch` | stream-ordered memory for one call |

mod communicator;
pub(in crate::cuda) mod scratch;

pub(in crate::cuda) use communicator::Order;
pub use communicator::{DeviceComm, Explanation};
