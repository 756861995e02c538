//! The commands as processes.

#[cfg(feature = "doctor")]
mod doctor;
mod replay;
#[cfg(feature = "doctor")]
mod run;
mod schedule;
mod simulate;
