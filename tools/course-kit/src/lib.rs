//! Code over the library that several milestones share, so that each builds and reads alone.
//!
//! ```text
//! measure     an all-reduce, checked and timed    07, 08
//! on_threads  ranks that are threads, for tests   07, 08
//! python      ranks of Python                     11, 12, and the doctor of tools/cli
//! train       data-parallel training of an MLP    13, 14, 15
//! ```

pub mod measure;
pub mod on_threads;
pub mod python;
pub mod train;
