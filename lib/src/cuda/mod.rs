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

mod buffers;
mod call;
mod collectives;
mod comm;
mod compile;
mod decide;
mod driver;
mod enqueue;
mod hosted;
mod inventory;
mod kernels;
mod launch;
mod mailbox;
mod mapped;
mod path;
mod path_check;
mod peers;
mod phased;
mod program;
mod registered;
mod registry;
mod report;
mod schedules;
mod select;
mod setup;
mod window;

pub use call::{Call, Stream};
pub use comm::{DeviceComm, Explanation};
pub use decide::Reason;
pub(crate) use driver::cuda;
pub use driver::{available, device_count, open};
pub use inventory::{Gpu, Inventory, inventory, nvrtc};
pub use path::Path;
pub use registered::Registered;
pub use registry::Registration;
pub use select::{Choice, Framing, Protocol};
