//! Memory that links share between threads and processes.
//!
//! | file | idea |
//! | --- | --- |
//! | `mapping` | mapped memory |
//! | `huge` | large pages |
//! | `pagemap` | which pages are large |
//! | `fence` | a sleeper against its waker |

pub(crate) mod fence;
pub(crate) mod huge;
pub(crate) mod mapping;
pub(in crate::transport) mod pagemap;
