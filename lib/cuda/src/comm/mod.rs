//! The communicator.
//!
//! | file | idea |
//! | --- | --- |
//! | `communicator` | its state, its calls' order, its failure |
//! | `scratch` | stream-ordered memory for one call |

mod communicator;
pub(crate) mod scratch;

pub(crate) use communicator::Order;
pub use communicator::{DeviceComm, Explanation};
