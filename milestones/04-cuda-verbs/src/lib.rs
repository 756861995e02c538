//! Milestone 04: a GPU's memory over RDMA verbs, as a library. The program `cuda-verbs` runs it.
//!
//! ```text
//! probe     which memory does the wire use?   dmabuf, else peer memory, else pinned staging
//! buffer    the bytes to move                 a GPU's memory, or host memory that says so
//! pinned    memory beside the bytes to move   the CPU's, for staging
//! exporter  a dmabuf without a GPU            udmabuf, vgem
//! wire      how they move                     verbs or TCP
//! transfer  chunk by chunk                    GPU -> staging -> wire -> staging -> GPU, as a pipeline
//! ```

pub mod buffer;
pub mod cli;
pub mod exporter;
pub mod pattern;
pub mod pinned;
pub mod plan;
pub mod probe;
pub mod rdma;
pub mod report;
pub mod run;
pub mod terms;
pub mod transfer;
pub mod why;
pub mod wire;
