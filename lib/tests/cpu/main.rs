//! The library without GPUs: communicators, their calls and their failures, over every transport, as threads and as
//! processes.
//!
//! One program, so that the library is linked once. Tests that need ranks as processes start this program again for one
//! test.

#[path = "../common/mod.rs"]
mod common;

mod admission;
mod arrows;
mod averages;
mod awaited;
mod churn;
mod closing;
mod collectives;
mod config_docs;
mod described;
mod disagree;
mod discover;
mod exact;
mod exhaustive;
mod exits;
mod fixed_order;
mod flat;
mod fork;
mod groups;
mod hangs;
mod hosts;
mod interrupted;
mod join;
mod line;
mod meeting;
mod on_nodes;
mod opening;
mod own_program;
mod paced;
mod persistent;
mod probe;
mod processes;
mod rails;
mod rdma;
mod rdma_faults;
mod relayed;
mod shared_state;
mod storm;
mod survive;
mod symmetric;
mod symmetric_processes;
mod trace;
mod tuning;
mod uneven;
mod verify;
mod zero_copy;
