//! Error of a function of the C interface: a status and a text.

use tinynccl::Error as LibraryError;

use super::types::Status;
use crate::env::{variables, version};

/// Result of the functions below the C interface.
pub(crate) type Result<T, E = Error> = std::result::Result<T, E>;

/// A failure, as the caller of the C interface gets it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Error {
    pub(crate) status: Status,
    /// Text for the user: failure, expected, got, next step; [`super::export`] puts the function's name in front.
    pub(crate) text: String,
}

impl Error {
    pub(crate) fn new(status: Status, text: impl Into<String>) -> Error {
        Error { status, text: text.into() }
    }

    /// A wrong argument.
    pub(crate) fn argument(text: impl Into<String>) -> Error {
        Error::new(Status::InvalidArgument, text)
    }

    /// A call that does not fit the calls before it, or that is not supported.
    pub(crate) fn usage(text: impl Into<String>) -> Error {
        Error::new(Status::InvalidUsage, text)
    }

    /// An error inside this library.
    pub(crate) fn internal(text: impl Into<String>) -> Error {
        Error::new(Status::InternalError, text)
    }

    /// A function of the driver that failed.
    pub(crate) fn cuda(what: impl std::fmt::Display, error: cudarc::driver::DriverError) -> Error {
        Error::new(Status::UnhandledCudaError, format!("{what}: {}", tinynccl::cuda::words(error)))
    }
}

impl From<LibraryError> for Error {
    fn from(error: LibraryError) -> Error {
        let status = match &error {
            LibraryError::PeerLost { .. }
            | LibraryError::Aborted { .. }
            | LibraryError::Protocol { .. }
            | LibraryError::Corrupt { .. } => Status::RemoteError,
            // Programs built for an NCCL before 2.30 know no such status.
            LibraryError::Timeout { .. } if version::version() >= 23_000 => Status::Timeout,
            LibraryError::Timeout { .. } => Status::RemoteError,
            LibraryError::InvalidArgument { .. } => Status::InvalidArgument,
            LibraryError::Mismatch { .. } | LibraryError::Config { .. } | LibraryError::Unsupported { .. } => {
                Status::InvalidUsage
            }
            LibraryError::Bootstrap { .. } | LibraryError::Os { .. } => Status::SystemError,
            LibraryError::Cuda { .. } => Status::UnhandledCudaError,
            _ => Status::InternalError,
        };
        let error = match error {
            LibraryError::Config { name, value, detail } => {
                LibraryError::Config { name: variables::spelt(name), value, detail }
            }
            other => other,
        };
        Error { status, text: error.to_string() }
    }
}
