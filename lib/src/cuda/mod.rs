//! Collectives on GPUs.
//!
//! A [`DeviceComm`] is one rank's membership in a group of ranks that each drive a GPU. Its calls only enqueue: they
//! return at once, and the collective runs in the order of the caller's stream. If all ranks reach each other's memory,
//! every rank owns a *window* of device memory that all others map (by CUDA IPC between processes, by address within
//! one). The kernels communicate through those windows alone, without the driver or the host between launch and result.
//! Otherwise data goes through the hosts' memory ([`Path`]).
//!
//! The build needs no part of CUDA. The driver is opened at run time. NVRTC compiles the kernels, written in CUDA C, at
//! first use, into the user's cache.
//!
//! | module | idea |
//! | --- | --- |
//! | `comm`, `setup` | the communicator, and its creation |
//! | `collectives`, `enqueue`, `call`, `buffers`, `scratch` | calls, checked and enqueued |
//! | `group`, `fused`, `messages` | several calls together |
//! | `path` | the trait of the three paths: `peer`, `phased` and `hosted`; `alone` is that of one rank |
//! | `window`, `path_check` | memory that all ranks' kernels reach |
//! | `kernels`, `compile`, `report` | the kernels, their compiler, and their reports of failures |
//! | `registered` | buffers that calls use without copies |
//! | `one_sided` | writes into other ranks' buffers, and signals |
//! | `driver`, `inventory` | CUDA's driver, and the GPUs of this host |

mod alone;
mod buffers;
mod call;
mod collectives;
mod comm;
mod compile;
mod driver;
mod enqueue;
mod fused;
mod group;
mod hosted;
mod inventory;
mod kernels;
pub(crate) mod messages;
mod one_sided;
mod path;
mod path_check;
mod peer;
mod phased;
mod registered;
mod report;
mod scratch;
mod setup;
mod window;

pub use crate::device::{Choice, Framing, Path, Protocol};
pub use call::Stream;
pub use comm::{DeviceComm, Explanation};
pub use compile::compile;
pub use driver::{Uncaptured, available, device_count, open, words};
pub(crate) use driver::{copy, cuda};
pub use inventory::{Gpu, Inventory, inventory, nvrtc};
pub use kernels::ELEMENTS;
pub use one_sided::Signals;
pub use peer::{Reason, Registration};
pub use registered::Registered;
