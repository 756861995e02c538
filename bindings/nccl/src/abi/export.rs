//! Macros that export a function of the C interface: under both of its names, with nothing that unwinds into C.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::error::{Error, Result};
use super::last_error;
use super::types::Status;
use crate::env::debug;

/// Keeper of the text of a call's error, besides the thread: the communicator that the call is for.
pub(crate) trait ErrorOwner {
    /// Keeps the text, for `ncclGetLastError`.
    fn keep_error(&self, text: &str);
}

/// Owner of the errors of calls that are for no communicator.
pub(crate) struct NoOwner;

impl ErrorOwner for NoOwner {
    fn keep_error(&self, _text: &str) {}
}

/// Declares functions of the C interface, each once: `fn ncclX / pncclX(arguments) { body }`. The body returns
/// `Result<()>` or `Result<Status>`; an error's text is kept for `ncclGetLastError`, for the communicator that is named
/// in `[brackets]` and for this thread, and logged. The twin is not a call of the first name, which a profiler may have
/// replaced.
macro_rules! export {
    ($(
        $(#[$doc:meta])*
        fn $name:ident / $twin:ident [$($comm:expr)?] ($($arg:ident : $ty:ty),* $(,)?) $body:block
    )*) => {$(
        const _: () = {
            #[allow(clippy::too_many_arguments, reason = "as many as NCCL's function has")]
            fn inner($($arg: $ty),*) -> $crate::abi::Status {
                let _owner = $crate::abi::export::NoOwner;
                $(let _owner = $comm;)?
                $crate::abi::export::run(stringify!($name), _owner, || $body)
            }

            $(#[$doc])*
            #[unsafe(no_mangle)]
            #[allow(non_snake_case)]
            unsafe extern "C" fn $name($($arg: $ty),*) -> $crate::abi::Status {
                inner($($arg),*)
            }

            /// The function under the name that profilers call.
            #[unsafe(no_mangle)]
            #[allow(non_snake_case)]
            unsafe extern "C" fn $twin($($arg: $ty),*) -> $crate::abi::Status {
                inner($($arg),*)
            }
        };
    )*};
}
pub(crate) use export;

/// As [`export!`] for functions that return something else than a status: `-> type, value after a panic`.
macro_rules! export_value {
    ($(
        $(#[$doc:meta])*
        fn $name:ident / $twin:ident ($($arg:ident : $ty:ty),* $(,)?) -> $out:ty, $lost:expr; $body:block
    )*) => {$(
        const _: () = {
            fn inner($($arg: $ty),*) -> $out {
                $crate::abi::export::caught(stringify!($name), || $body).unwrap_or($lost)
            }

            $(#[$doc])*
            #[unsafe(no_mangle)]
            #[allow(non_snake_case)]
            unsafe extern "C" fn $name($($arg: $ty),*) -> $out {
                inner($($arg),*)
            }

            /// The function under the name that profilers call.
            #[unsafe(no_mangle)]
            #[allow(non_snake_case)]
            unsafe extern "C" fn $twin($($arg: $ty),*) -> $out {
                inner($($arg),*)
            }
        };
    )*};
}
pub(crate) use export_value;

/// Runs the body of a function, whose error belongs to `owner`.
pub(crate) fn run<T: Into<Status>>(
    name: &'static str,
    owner: impl ErrorOwner,
    body: impl FnOnce() -> Result<T>,
) -> Status {
    let all = || {
        debug::begin();
        match catch_unwind(AssertUnwindSafe(body)) {
            Ok(Ok(done)) => done.into(),
            Ok(Err(error)) => failed(name, &owner, error),
            Err(panic) => failed(name, &owner, panicked(&*panic)),
        }
    };
    // The outer net is for the log and the texts of errors.
    catch_unwind(AssertUnwindSafe(all)).unwrap_or(Status::InternalError)
}

/// Runs the body of a function that cannot fail; `None` after a panic.
pub(crate) fn caught<T>(name: &'static str, body: impl FnOnce() -> T) -> Option<T> {
    let mut value = None;
    run(name, NoOwner, || {
        value = Some(body());
        Ok(())
    });
    value
}

fn panicked(panic: &(dyn Any + Send)) -> Error {
    let text = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    Error::internal(format!("panicked ({}): a bug in this library, please report it", text.unwrap_or("no message")))
}

#[cold]
fn failed(name: &str, owner: &impl ErrorOwner, error: Error) -> Status {
    let text = format!("{name}: {}", error.text);
    if error.status != Status::InProgress {
        log::warn!("{text}");
        keep(owner, text);
    }
    error.status
}

/// Keeps the text of an error for `ncclGetLastError`: for its owner, this thread and this process.
pub(crate) fn keep(owner: &impl ErrorOwner, text: String) {
    owner.keep_error(&text);
    last_error::keep(text);
}

/// Returns an argument that must not be NULL, to be written through.
///
/// # Safety
/// `pointer` is null, or valid for writes for as long as the call lasts.
pub(crate) unsafe fn out<'a, T>(name: &str, pointer: *mut T) -> Result<&'a mut T> {
    // SAFETY: by the contract above; C callers pass their own memory, which nothing else uses during the call.
    unsafe { pointer.as_mut() }.ok_or_else(|| Error::argument(format!("{name} is NULL")))
}
