//! The commands as processes.

#[cfg(feature = "doctor")]
mod doctor;
#[cfg(feature = "doctor")]
mod hangs;
#[cfg(feature = "doctor")]
mod mesh;
#[cfg(feature = "doctor")]
mod record;
mod replay;
#[cfg(feature = "doctor")]
mod run;
mod schedule;
mod simulate;
#[cfg(feature = "doctor")]
mod status;
mod topology;
