//! Memory of GPUs: allocations, and buffers that all ranks reach.
//!
//! | file | idea |
//! | --- | --- |
//! | `device_api` | host functions of the device API |
//! | `windows` | buffers that all ranks register together |
//! | `buffers` | `ncclMemAlloc`, `ncclCommRegister` |
//! | `stats` | memory of a communicator: figures, suspend, resume |

pub(crate) mod buffers;
pub(crate) mod device_api;
pub(crate) mod stats;
pub(crate) mod windows;
