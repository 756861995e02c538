//! The communicator.
//!
//! | file | idea |
//! | --- | --- |
//! | `communicator` | its state, its calls' order, its failure |
//! | `ledger` | the calls, for reports |
//! | `scratch` | stream-ordered memory for one call |

mod communicator;
mod ledger;
pub(crate) mod scratch;

pub(crate) use communicator::Order;
pub use communicator::{DeviceComm, Explanation};
pub(crate) use ledger::Ledger;
