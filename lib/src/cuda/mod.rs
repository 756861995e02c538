//! Collectives on GPUs.
//!
//! A [`DeviceComm`] is one rank's membership in a group of ranks that each drive a GPU. Its calls only enqueue: they return
//! at once, and the collective runs in the order of the caller's stream. Where all ranks reach each other's memory, every rank
//! owns a *window* of its device's memory that all others have mapped (by CUDA IPC between processes, by address within one),
//! and the kernels of the ranks talk through those windows alone: no call into the driver, and no host, between the launch and
//! the result. Otherwise data goes through the hosts' memory ([`Path`]).
//!
//! Nothing of CUDA is needed to build this. The driver is opened at run time; the kernels are CUDA C, compiled by NVRTC when
//! they are first used and kept in the user's cache.
//!
//! | module | idea |
//! | --- | --- |
//! | `comm`, `setup` | the communicator, and how it comes to be |
//! | `collectives`, `enqueue`, `call`, `buffers` | calls, checked and put into a stream |
//! | `path` | what every path does; `peer`, `phased` and `hosted` are the three |
//! | `window`, `path_check` | memory that all ranks' kernels reach |
//! | `kernels`, `compile`, `report` | the kernels, their compiler, and what they say when they give up |
//! | `registered` | buffers that calls use where they are |
//! | `driver`, `inventory` | CUDA's driver, and the GPUs of this host |

mod buffers;
mod call;
mod collectives;
mod comm;
mod compile;
mod driver;
mod enqueue;
mod group;
mod hosted;
mod inventory;
mod kernels;
pub(crate) mod messages;
mod path;
mod path_check;
mod peer;
mod phased;
mod registered;
mod report;
mod setup;
mod window;

pub use call::Stream;
pub use comm::{DeviceComm, Explanation};
pub use compile::compile;
pub(crate) use driver::cuda;
pub use driver::{available, device_count, open, words};
pub use inventory::{Gpu, Inventory, inventory, nvrtc};
pub use path::Path;
pub use peer::{Choice, Framing, Protocol, Reason, Registration};
pub use registered::Registered;
