//! NCCL's C interface: its types, and the rules of a function that C programs call.
//!
//! Sizes, offsets and values are NCCL's. Enums that callers pass are plain `int`s here: an unknown value must be an
//! error, not undefined behaviour.
//!
//! | file | idea |
//! | --- | --- |
//! | `export` | macros that export a function |
//! | `config` | `ncclConfig_t`: settings of one communicator |
//! | `datatypes` | element types and operators |
//! | `error` | error of a function |
//! | `last_error` | `ncclGetLastError` |
//! | `types` | structures, flags, statuses |

pub(crate) mod config;
mod datatypes;
pub(crate) mod error;
pub(crate) mod export;
pub(crate) mod last_error;
mod types;

pub use datatypes::{OPERATORS, TYPES};
pub(crate) use datatypes::{dtype, operator};
pub use types::*;
