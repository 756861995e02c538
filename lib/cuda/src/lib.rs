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
//! | `start` | creation of a communicator |
//! | `calls` | calls, checked and enqueued; several together; registered buffers and one-sided writes |
//! | `comm` | the communicator |
//! | `peer`, `phased`, `hosted` | the three data paths |
//! | `hosts` | the path over several hosts: one of them inside each, the hosts' memory between |
//! | `path` | the trait of a data path, and failures that kernels report |
//! | `kernels` | the kernels |
//! | `checked` | calls whose arguments are checked |
//! | `verify` | sums of what calls moved, for `TINYNCCL_VERIFY` |
//! | `window` | memory that all ranks' kernels reach |
//! | `driver` | CUDA's driver and compiler, and the GPUs of this host |

// Modules are public for the crates above; their documentation also links what is private to them.
#![allow(rustdoc::private_intra_doc_links)]

mod calls;
mod checked;
mod comm;
mod driver;
mod hosted;
mod hosts;
mod kernels;
mod path;
mod peer;
mod phased;
mod start;
mod verify;
mod window;

pub use calls::group::Group;
pub use calls::one_sided::Signals;
pub use calls::registered::Registered;
pub use checked::call::Stream;
#[doc(hidden)]
pub use checked::messages::Messages;
pub use comm::{DeviceComm, Explanation};
pub use driver::compile::compile;
pub use driver::inventory::{Gpu, Inventory, inventory, nvrtc};
pub use driver::{Uncaptured, available, device_count, open, words};
#[doc(hidden)]
pub use driver::{copy, cuda};
pub use kernels::ELEMENTS;
pub use peer::{Reason, Registration};
pub use tinynccl_plan::device::{Choice, Framing, Path, Protocol};
#[doc(hidden)]
pub use verify::Spoil;
