//! The reason why a step was not possible, and its remedy.

use std::fmt;
use std::io;

/// A reason and the next step, both in words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Why {
    /// The obstacle.
    pub reason: String,
    /// The remedy: something to install, load or change.
    pub next: String,
}

impl Why {
    /// Combines the two parts.
    pub fn new(reason: impl Into<String>, next: impl Into<String>) -> Why {
        Why { reason: reason.into(), next: next.into() }
    }
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}; {}", self.reason, self.next)
    }
}

impl std::error::Error for Why {}

/// An operating system error with its name from the manuals: `EOPNOTSUPP (95, Operation not supported)`.
pub fn errno(error: &io::Error) -> String {
    let Some(number) = error.raw_os_error() else { return error.to_string() };
    let text = error.to_string();
    let text = text.split(" (os error").next().unwrap_or_default();
    format!("{} ({number}, {text})", errno_name(number))
}

/// The name of an errno that the calls of this program can return.
fn errno_name(number: i32) -> &'static str {
    match number {
        libc::EPERM => "EPERM",
        libc::ENOENT => "ENOENT",
        libc::EIO => "EIO",
        libc::ENXIO => "ENXIO",
        libc::EBADF => "EBADF",
        libc::EAGAIN => "EAGAIN",
        libc::ENOMEM => "ENOMEM",
        libc::EACCES => "EACCES",
        libc::EFAULT => "EFAULT",
        libc::EBUSY => "EBUSY",
        libc::ENODEV => "ENODEV",
        libc::EINVAL => "EINVAL",
        libc::EMFILE => "EMFILE",
        libc::ENOTTY => "ENOTTY",
        libc::ENOSPC => "ENOSPC",
        libc::ENOSYS => "ENOSYS",
        libc::EPROTONOSUPPORT => "EPROTONOSUPPORT",
        libc::EOPNOTSUPP => "EOPNOTSUPP",
        _ => "errno",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_errno_has_name_number_and_meaning() {
        let text = errno(&io::Error::from_raw_os_error(libc::EOPNOTSUPP));
        assert_eq!(text, "EOPNOTSUPP (95, Operation not supported)");
        assert!(errno(&io::Error::from_raw_os_error(4000)).starts_with("errno (4000, "));
        assert_eq!(errno(&io::Error::other("no errno")), "no errno");
    }
}
