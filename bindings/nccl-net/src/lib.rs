//! A network plugin of NVIDIA's NCCL: `NCCL_NET_PLUGIN=tinynccl` loads `libnccl-net-tinynccl.so`, and NCCL's data
//! between hosts goes over tinynccl's connections ([`tinynccl_transport::rails`]). `docs/nccl-net.md` says how to use
//! it.
//!
//! | module | idea |
//! |---|---|
//! | `abi` | types that all versions of NCCL's interface have in common |
//! | `table` | what all versions of the table have in common |
//! | `v8` to `v12` | the tables, each with the differences of its version |
//! | `plugin` | the functions behind all tables |
//! | `device` | the one device that the plugin shows to NCCL |
//! | `logger` | our log through NCCL's |

pub mod abi;
mod device;
mod logger;
mod plugin;
mod table;
pub mod v10;
pub mod v11;
pub mod v12;
pub mod v8;
pub mod v9;
