//! Collectives on GPUs. Without a GPU every test says that it is skipped.

#[path = "../common/mod.rs"]
mod common;

mod driver;
mod faults;
mod fused;
mod growing;
mod hangs;
mod hosted;
mod hosts;
mod messages;
mod one_sided;
mod peers;
mod ranks;
mod registered;
mod schedules;
mod standin;
mod verify;
