//! CUDA's driver and compiler, opened at run time, and the GPUs of this host.
//!
//! | file | idea |
//! | --- | --- |
//! | `api` | the driver's functions, with errors that name the operation |
//! | `compile` | NVRTC, and the cache of compiled kernels |
//! | `inventory` | the GPUs, and which reach each other |

mod api;
pub(crate) mod compile;
pub(crate) mod inventory;

pub use api::{Uncaptured, available, device_count, open, words};
pub(crate) use api::{capture_of, devices, is_capturing, reaches, version};
pub use api::{copy, cuda};
