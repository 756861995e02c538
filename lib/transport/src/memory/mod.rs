//! Memory that links share between threads and processes.
//!
//! | file | idea |
//! | --- | --- |
//! | `mapping` | mapped memory |
//! | `huge` | large pages |
//! | `pagemap` | which pages are large |
//! | `fence` | a sleeper against its waker |

pub mod fence;
pub mod huge;
pub mod mapping;
pub(crate) mod pagemap;
