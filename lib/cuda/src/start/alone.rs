//! The path of a communicator of one rank, whose calls are copies: it has no window, and no kernels.

use std::sync::{Mutex, PoisonError};

use crate::checked::call::{Round, unsupported};
use crate::path::{DataPath, Turn};
use tinynccl_comm::{Comm, RawCall};
use tinynccl_plan::device::{Choice, Path};
use tinynccl_plan::error::{Error, Result};

/// One rank by itself.
#[derive(Debug, Default)]
pub(crate) struct Alone {
    failure: Mutex<Option<Error>>,
}

impl DataPath for Alone {
    fn path(&self) -> Path {
        Path::Peer
    }

    fn bytes(&self) -> usize {
        0
    }

    unsafe fn carry(&self, _: Turn, call: &RawCall, _: Choice) -> Result<()> {
        // `DeviceComm::enqueue` copies.
        Err(unsupported(call.collective))
    }

    unsafe fn carry_round(&self, _: Turn, call: &RawCall, _: Round) -> Result<()> {
        Err(unsupported(call.collective))
    }

    fn check(&self, _: Option<&Comm>) -> Result<()> {
        match &*self.failure.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
    }

    fn abort(&self, error: Error) {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
    }
}
