//! What things cost, and which algorithm to take.
//!
//! The model, the choice and the routes only compute: `lib/plan/src/topology`. What asks the machine is here:
//!
//! | file | idea |
//! | --- | --- |
//! | [`store`] | the file that keeps a measured model |
//! | [`host`] | what a measured model depends on: processor, caches, kernel |

pub mod host;
pub mod store;

#[doc(inline)]
pub use tinynccl_plan::topology::*;
