//! One-sided messages of NCCL 2.29: `ncclPutSignal`, `ncclSignal`, `ncclWaitSignal`.
//!
//! As in NCCL 2.30 there is one signal per pair of ranks and one context, both number 0.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;

use cudarc::driver::sys::CUstream;

use crate::abi::error::{Error, Result};
use crate::abi::export::export;
use crate::abi::{self, WaitSignalDesc, Window as Opaque};
use crate::comm::communicator::Communicator;
use crate::comm::handle::{Handle, handle};
use crate::memory::windows::{self, reaches};
use crate::submit::group;

/// A peer's number, once signal, context and flags are what they must be.
fn peer(comm: &Communicator, peer: c_int, signal: c_int, context: c_int, flags: c_uint) -> Result<usize> {
    for (name, value) in [("sigIdx", i64::from(signal)), ("ctx", i64::from(context)), ("flags", i64::from(flags))] {
        if value != 0 {
            return Err(Error::argument(format!("{name} is {value}, expected 0: there is one of them")));
        }
    }
    let size = comm.size()?;
    usize::try_from(peer)
        .ok()
        .filter(|&peer| peer < size)
        .ok_or_else(|| Error::argument(format!("peer is {peer}, expected a rank below {size}")))
}

/// The ranks' memory must be within reach, and the communicator ready.
fn check(comm: &Communicator) -> Result<()> {
    let device = comm.device()?;
    if device.size() == 1 {
        return Err(Error::usage(format!("communicator {} has one rank, and none to signal", comm.name())));
    }
    if reaches(device) {
        return Ok(());
    }
    Err(Error::usage(format!(
        "communicator {}: ranks do not reach each other's memory, as one-sided messages need ({}): send and receive \
         instead",
        comm.name(),
        device.path_reason()
    )))
}

/// Checks the descriptions; returns for each the rank and the number of its signals to wait for.
fn awaited(comm: &Communicator, descriptions: &[WaitSignalDesc]) -> Result<Vec<(usize, u32)>> {
    let one = |(index, one): (usize, &WaitSignalDesc)| {
        let WaitSignalDesc { op_count, peer: from, signal, context } = *one;
        let from = peer(comm, from, signal, context, 0)
            .map_err(|error| Error { text: format!("signalDescs[{index}]: {}", error.text), ..error })?;
        match u32::try_from(op_count) {
            Ok(count @ 1..) => Ok((from, count)),
            _ => Err(Error::argument(format!("signalDescs[{index}]: opCnt is {op_count}, expected 1 or more"))),
        }
    };
    descriptions.iter().enumerate().map(one).collect()
}

fn signal(comm: &Arc<Communicator>, stream: CUstream, to: usize) -> Result<()> {
    // SAFETY: the caller's stream of this GPU; peers keep their memory of signals as long as the communicator.
    Ok(unsafe { comm.device()?.signal(stream, comm.windows().signals()?, to) }?)
}

export! {
    /// Copies `count` elements into the window of `peer`, `offset` bytes from its begin, then signals that rank.
    fn ncclPutSignal / pncclPutSignal [comm] (
        source: *const c_void, count: usize, datatype: c_int, to: c_int, win: *mut Opaque, offset: usize,
        sig_idx: c_int, ctx: c_int, flags: c_uint, comm: Handle, stream: CUstream
    ) {
        group::recorded((|| {
            let comm = handle(comm)?;
            check(&comm)?;
            let to = peer(&comm, to, sig_idx, ctx, flags)?;
            let dtype = abi::dtype(datatype)?;
            let bytes = count.checked_mul(dtype.size());
            let too_many = || Error::argument(format!("{count} elements of {dtype} are more than memory holds"));
            let bytes = bytes.ok_or_else(too_many)?;
            if source.is_null() && bytes > 0 {
                return Err(Error::argument(format!("localbuff is NULL, expected {bytes} bytes of the GPU")));
            }
            let window = windows::find_of(win, &comm)?;
            let source = source as u64;
            group::enqueue(&comm, stream, None, move |comm, stream| {
                // SAFETY: the caller's memory and stream, by the contract of ncclPutSignal; peers keep a window until
                // they have seen the signals that they expect.
                unsafe { comm.device()?.put(stream, source, bytes, &window.registration, to, offset) }?;
                signal(comm, stream, to)
            })
        })())
    }

    /// Signals `peer`.
    fn ncclSignal / pncclSignal [comm] (
        to: c_int, sig_idx: c_int, ctx: c_int, flags: c_uint, comm: Handle, stream: CUstream
    ) {
        group::recorded((|| {
            let comm = handle(comm)?;
            check(&comm)?;
            let to = peer(&comm, to, sig_idx, ctx, flags)?;
            group::enqueue(&comm, stream, None, move |comm, stream| signal(comm, stream, to))
        })())
    }

    /// Makes the stream wait for signals: of each rank that is named, `opCnt` more than were waited for before. The
    /// wait ends with the communicator's deadline.
    fn ncclWaitSignal / pncclWaitSignal [comm] (
        count: c_int, descriptions: *mut WaitSignalDesc, comm: Handle, stream: CUstream
    ) {
        group::recorded((|| {
            let comm = handle(comm)?;
            check(&comm)?;
            let count = usize::try_from(count).ok().filter(|&count| count > 0 && !descriptions.is_null());
            let none = || Error::argument("nDesc is not positive or signalDescs is NULL, expected an array");
            let count = count.ok_or_else(none)?;
            // SAFETY: the caller's array of `count` elements.
            let awaited = awaited(&comm, unsafe { std::slice::from_raw_parts(descriptions, count) })?;
            group::wait(&comm, stream, move |comm, stream| {
                // SAFETY: the caller's stream of this GPU; the memory of signals lives as long as the communicator.
                Ok(unsafe { comm.device()?.wait_signals(stream, comm.windows().signals()?, &awaited) }?)
            })
        })())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::Status;
    use crate::abi::config::Options;

    #[test]
    fn descriptions_are_checked_one_by_one() {
        let comm = Communicator::starting(Options::standard(), 0, Some((0, 3)));
        let good = WaitSignalDesc { op_count: 2, peer: 1, signal: 0, context: 0 };
        assert_eq!(awaited(&comm, &[good, WaitSignalDesc { peer: 2, op_count: 1, ..good }]).unwrap(), [(1, 2), (2, 1)]);
        for (wrong, what) in [
            (WaitSignalDesc { op_count: 0, ..good }, "opCnt is 0"),
            (WaitSignalDesc { peer: 3, ..good }, "peer is 3, expected a rank below 3"),
            (WaitSignalDesc { peer: -1, ..good }, "peer is -1"),
            (WaitSignalDesc { signal: 1, ..good }, "sigIdx is 1"),
            (WaitSignalDesc { context: 1, ..good }, "ctx is 1"),
        ] {
            let error = awaited(&comm, &[good, wrong]).unwrap_err();
            assert_eq!(error.status, Status::InvalidArgument);
            assert!(error.text.starts_with("signalDescs[1]: ") && error.text.contains(what), "{}", error.text);
        }
    }
}
