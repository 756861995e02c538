//! NCCL's C interface over tinynccl: the library `libnccl.so.2` that unchanged programs load.
//!
//! A function is declared once (`export!`), checks what it is given, and hands over to the communicator's
//! [`DeviceComm`](tinynccl::cuda::DeviceComm). Nothing here moves data.
//!
//! | folder, from top to bottom | idea |
//! | --- | --- |
//! | `calls` | collectives, messages, one-sided messages |
//! | `query` | functions that answer from what is known |
//! | `memory` | allocations, windows, host functions of the device API |
//! | `lifecycle` | begin and end of communicators: init, split, finalize |
//! | `submit` | groups; operations in threads and on streams |
//! | `comm` | handle and state of a communicator |
//! | `ras` | the server that NCCL's client `ncclras` asks |
//! | `rendezvous` | how the ranks of a new communicator find each other |
//! | `abi` | NCCL's types, exported functions, errors |
//! | `env` | variables, files of variables, version, log |
//!
//! A folder imports only from those below it; a test (`arrows`) checks that, and the order of the files in each folder.

pub mod abi;
mod calls;
mod comm;
mod env;
mod lifecycle;
mod memory;
mod query;
mod ras;
mod rendezvous;
mod submit;
