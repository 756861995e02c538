//! Cost of communication, and the choice of the algorithm.
//!
//! The model, the choice and the routes only compute: `lib/plan/src/topology`. Queries of the machine are here:
//!
//! | file | idea |
//! | --- | --- |
//! | [`store`] | the file that keeps a measured model |
//! | [`host`] | the machine that a measured model depends on: processor, caches, kernel |

pub mod host;
pub mod store;

#[doc(inline)]
pub use tinynccl_plan::topology::*;
