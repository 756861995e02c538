//! Cost of communication, and the choice of the algorithm.
//!
//! The model, the choice and the routes only compute: `lib/plan/src/topology`. Queries of the machine are here:
//!
//! | file | idea |
//! | --- | --- |
//! | [`store`] | the file that keeps a measured model |
//! | [`host`] | the machine that a measured model depends on: processor, caches, kernel |
//! | [`machine`] | this machine's NUMA nodes, GPUs and network ports |
//! | [`gpus`] | GPUs and their NVLinks, from NVML or sysfs |
//! | [`pcie`] | places of devices in the PCIe tree, and switches |
//! | `pairs` | the pairs of ranks that stand for all others in a measurement |
//! | `assemble` | one graph of what all ranks have found and measured |

pub(crate) mod assemble;
pub mod gpus;
pub mod host;
pub mod machine;
pub(crate) mod pairs;
pub mod pcie;
pub mod store;

#[doc(inline)]
pub use tinynccl_plan::topology::*;
