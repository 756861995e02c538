//! The one error type: a number of `errno`, as verbs returns it, with a text.

use std::borrow::Cow;
use std::fmt;
use std::io;

/// Result of every fallible call in this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A failure: what failed as text, and the number that verbs returns for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Error {
    errno: i32,
    text: Cow<'static, str>,
}

impl Error {
    /// An error with the number `errno` of `errno.h`.
    #[must_use]
    pub fn new(errno: i32, text: impl Into<Cow<'static, str>>) -> Error {
        Error { errno, text: text.into() }
    }

    /// An argument that the call does not take.
    pub(crate) fn invalid(text: impl Into<Cow<'static, str>>) -> Error {
        Error::new(libc::EINVAL, text)
    }

    /// An error for a table or queue that is full (`ENOMEM`).
    pub(crate) fn full(text: impl Into<Cow<'static, str>>) -> Error {
        Error::new(libc::ENOMEM, text)
    }

    /// An error of the system; `what` names what it refused.
    pub(crate) fn system(what: impl fmt::Display, error: &io::Error) -> Error {
        Error::new(error.raw_os_error().unwrap_or(libc::EIO), format!("{what}: {error}"))
    }

    /// The number of `errno.h`.
    #[must_use]
    pub fn errno(&self) -> i32 {
        self.errno
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for Error {}
