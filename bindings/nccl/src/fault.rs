//! Error of a function of the C interface: a status and a text.

use tinynccl::Error;

use crate::abi::Status;
use crate::{settings, version};

/// Result of the functions below the C interface.
pub(crate) type Result<T, E = Fault> = std::result::Result<T, E>;

/// A failure, as the caller of the C interface gets it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Fault {
    pub(crate) status: Status,
    /// Text for the user: failure, expected, got, next step; [`crate::export`] puts the function's name in front.
    pub(crate) text: String,
}

impl Fault {
    pub(crate) fn new(status: Status, text: impl Into<String>) -> Fault {
        Fault { status, text: text.into() }
    }

    /// A wrong argument.
    pub(crate) fn argument(text: impl Into<String>) -> Fault {
        Fault::new(Status::InvalidArgument, text)
    }

    /// A call that does not fit the calls before it, or that is not supported.
    pub(crate) fn usage(text: impl Into<String>) -> Fault {
        Fault::new(Status::InvalidUsage, text)
    }

    /// An error inside this library.
    pub(crate) fn internal(text: impl Into<String>) -> Fault {
        Fault::new(Status::InternalError, text)
    }

    /// A function of the driver that failed.
    pub(crate) fn cuda(what: impl std::fmt::Display, error: cudarc::driver::DriverError) -> Fault {
        Fault::new(Status::UnhandledCudaError, format!("{what}: {}", tinynccl::cuda::words(error)))
    }
}

impl From<Error> for Fault {
    fn from(error: Error) -> Fault {
        let status = match &error {
            Error::PeerLost { .. } | Error::Aborted { .. } | Error::Protocol { .. } => Status::RemoteError,
            // Programs built for an NCCL before 2.30 know no such status.
            Error::Timeout { .. } if version::version() >= 23_000 => Status::Timeout,
            Error::Timeout { .. } => Status::RemoteError,
            Error::InvalidArgument { .. } => Status::InvalidArgument,
            Error::Mismatch { .. } | Error::Config { .. } | Error::Unsupported { .. } => Status::InvalidUsage,
            Error::Bootstrap { .. } | Error::Os { .. } => Status::SystemError,
            Error::Cuda { .. } => Status::UnhandledCudaError,
            _ => Status::InternalError,
        };
        let error = match error {
            Error::Config { name, value, detail } => Error::Config { name: settings::spelt(name), value, detail },
            other => other,
        };
        Fault { status, text: error.to_string() }
    }
}
