//! NCCL's C interface over tinynccl: the library `libnccl.so.2` that unchanged programs load.
//!
//! A function is declared once (`export!`), checks what it is given, and hands over to the communicator's
//! [`DeviceComm`](tinynccl::cuda::DeviceComm). Nothing here moves data.
//!
//! | module | idea |
//! | --- | --- |
//! | `abi` | NCCL's types, and what they are here |
//! | `export`, `fault`, `last_error` | how functions are exported, and how they fail |
//! | `handle`, `member` | what `ncclComm_t` points to, and the state of a communicator |
//! | `facts` | functions that answer from what is known |
//! | `current` | the caller's GPU |
//! | `buffers`, `windows` | memory, and buffers that all ranks reach |
//! | `scaled` | custom operators |
//! | `rma` | one-sided messages |
//! | `params` | settings by name |
//! | `device_api` | host functions of the device API |
//! | `settings`, `debug` | NCCL's environment variables, and its log |
//!
//! An operator from [`abi::NUM_OPS`] on is resolved by `scaled::operator(op, comm)`.

pub mod abi;
mod buffers;
mod current;
mod debug;
mod device_api;
mod export;
mod facts;
mod fault;
mod group;
mod handle;
mod last_error;
mod member;
mod params;
mod rma;
mod scaled;
mod settings;
mod windows;
