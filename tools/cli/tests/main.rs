//! The commands as processes.

mod doctor;
mod simulate;
