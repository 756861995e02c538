//! Our log, through the function that NCCL gives its plugins: `NCCL_DEBUG` decides what is seen.

use std::ffi::{CString, c_int, c_ulong};
use std::sync::{PoisonError, RwLock};

use log::{Level, LevelFilter, Log, Metadata, Record};

use crate::abi::Logger;

const WARN: c_int = 2;
const INFO: c_int = 3;
const TRACE: c_int = 5;
/// `NCCL_INIT | NCCL_NET`.
const SUBSYSTEMS: c_ulong = 0x1 | 0x10;

struct Forward {
    to: RwLock<Option<Logger>>,
}

/// The logger of this library. A library that is loaded has its own `log`, so no other part of the program has set one.
static FORWARD: Forward = Forward { to: RwLock::new(None) };

/// Sends all further lines to `to`; `None` drops them.
pub(crate) fn set(to: Option<Logger>) {
    *FORWARD.to.write().unwrap_or_else(PoisonError::into_inner) = to;
    // Refused the second time, and where a program of Rust has linked this crate and has a log.
    if log::set_logger(&FORWARD).is_ok() {
        // What is more than that is of no use under NCCL, and would cost a call.
        log::set_max_level(LevelFilter::Info);
    }
}

impl Log for Forward {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= log::max_level()
    }

    fn log(&self, record: &Record<'_>) {
        let to = *self.to.read().unwrap_or_else(PoisonError::into_inner);
        let Some(to) = to.filter(|_| self.enabled(record.metadata())) else { return };
        let level = match record.level() {
            Level::Error | Level::Warn => WARN,
            Level::Info => INFO,
            Level::Debug | Level::Trace => TRACE,
        };
        let Ok(text) = CString::new(format!("NET/tinynccl : {}", record.args())) else { return };
        // SAFETY: NCCL's function, which may be called from any thread; the format takes one text, ended by a zero.
        unsafe {
            to(
                level,
                SUBSYSTEMS,
                c"tinynccl".as_ptr(),
                record.line().unwrap_or(0) as c_int,
                c"%s".as_ptr(),
                text.as_ptr(),
            )
        };
    }

    fn flush(&self) {}
}
