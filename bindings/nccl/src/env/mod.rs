//! The environment: variables, NCCL's files of variables, and the log.
//!
//! | file | idea |
//! | --- | --- |
//! | `debug` | `NCCL_DEBUG`: the log |
//! | `settings` | NCCL's variables as settings of this library |
//! | `version` | the version of NCCL that this library stands for |
//! | `variables` | variables of the environment and of files |
//! | `conf` | NCCL's files of variables |
//! | `lists` | lists of algorithms and protocols in variables |

pub(crate) mod conf;
pub(crate) mod debug;
pub(crate) mod lists;
pub(crate) mod settings;
pub(crate) mod variables;
pub(crate) mod version;
