//! The trait of a data path, and failures that kernels report.
//!
//! | file | idea |
//! | --- | --- |
//! | `data_path` | the trait: `peer`, `phased`, `hosted` and `alone` implement it |
//! | `report` | failures that kernels report |

mod data_path;
pub(crate) mod report;

pub(crate) use data_path::{DataPath, Progress, Turn, obstacle};
