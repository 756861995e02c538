//! libibverbs under types that free what they hold: one object per file.
//!
//! `ibverbs` names the devices and gives GIDs their type; its handles are private and its objects cannot do one-sided writes,
//! completion channels or memory of the caller's, so everything that is opened goes through `ibverbs-sys`.
//!
//! Each object keeps the ones it depends on alive through `Arc`s, so that they are destroyed in the order that libibverbs
//! wants, on error paths too. Destroying never panics: what fails is logged.

mod channel;
mod context;
mod cq;
mod event;
mod gid;
mod mr;
mod pd;
mod qp;
pub(super) mod status;

pub(super) use channel::Channel;
pub(super) use context::{Context, device_names};
pub(super) use cq::{Completion, Cq, What};
pub(super) use gid::{Gid, GidEntry, GidType};
pub(super) use mr::{Access, Mr};
pub(super) use pd::Pd;
pub(super) use qp::{Capacity, Qp, Route, Stretch, Timing, Write};

use std::ffi::c_int;

use crate::error::Error;

/// The error of a call that returned a null pointer and set `errno`.
#[cold]
fn last_error(what: impl Into<String>) -> Error {
    Error::io("verbs", what, &std::io::Error::last_os_error())
}

/// The error of a call that returned an error number, or -1 and set `errno`.
fn check(result: c_int, what: impl FnOnce() -> String) -> Result<(), Error> {
    match result {
        0 => Ok(()),
        e if e > 0 => Err(Error::Os { op: "verbs".to_owned(), detail: what(), errno: e }),
        _ => Err(last_error(what())),
    }
}

/// As [`check`], where nobody can be told but the log.
fn check_on_drop(result: c_int, what: &str) {
    if let Err(e) = check(result, || what.to_owned()) {
        log::error!("{e}");
    }
}
