//! The trait of a data path, and failures that kernels report.
//!
//! | file | idea |
//! | --- | --- |
//! | `data_path` | the trait: `peer`, `phased`, `hosted`, `hosts` and `alone` implement it |
//! | `report` | failures that kernels report |
//! | `names` | errors of a part of a communicator, in the ranks of the whole |

mod data_path;
pub(crate) mod names;
pub(crate) mod report;

pub(crate) use data_path::{DataPath, Progress, Turn, obstacle};
