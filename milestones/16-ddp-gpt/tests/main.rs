//! All tests from outside in one program: each program more would link the library once more.

mod cli;
mod common;
mod faults;
mod gpu;
mod gradients;
mod learning;
mod local;
mod local_faults;
mod ranks;
mod resume;
mod sharding;
mod torch;
