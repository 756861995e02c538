//! NCCL's C interface over tinynccl: the library `libnccl.so.2` that unchanged programs load.
//!
//! A function is declared once (`export!`), checks what it is given, and hands over to the communicator's
//! [`DeviceComm`](tinynccl::cuda::DeviceComm). Nothing here moves data.
//!
//! | module | idea |
//! | --- | --- |
//! | `abi` | NCCL's types, and what they are here |
//! | `export`, `fault`, `last_error` | exported functions, and their errors |
//! | `handle`, `member` | the target of `ncclComm_t`, and the state of a communicator |
//! | `facts`, `memory` | functions that answer from what is known |
//! | `id`, `door`, `directory`, `visit`, `place`, `digest` | rendezvous of the ranks |
//! | `start`, `family`, `meet` | making communicators: by id, and from others |
//! | `leave` | finalize, destroy, abort, revoke |
//! | `calls`, `group`, `launch` | calls, kept until a group ends, and put onto streams |
//! | `scaled`, `rma` | custom operators, one-sided messages |
//! | `buffers`, `windows` | memory, and buffers that all ranks reach |
//! | `params`, `device_api` | settings by name, host functions of the device API |
//! | `gpu` | the GPU of a thread |
//! | `config`, `version`, `debug` | configurations, NCCL's version, its log |
//! | `settings`, `lists`, `conf` | NCCL's variables, lists in them, files of them |

pub mod abi;
mod buffers;
mod calls;
mod conf;
mod config;
mod debug;
mod device_api;
mod digest;
mod directory;
mod door;
mod export;
mod facts;
mod family;
mod fault;
mod gpu;
mod group;
mod handle;
mod id;
mod last_error;
mod launch;
mod leave;
mod lists;
mod meet;
mod member;
mod memory;
mod params;
mod place;
mod rma;
mod scaled;
mod settings;
mod start;
mod version;
mod visit;
mod windows;
