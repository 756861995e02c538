//! The commands as processes.

#[cfg(feature = "doctor")]
mod doctor;
mod simulate;
