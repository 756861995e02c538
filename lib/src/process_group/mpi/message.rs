//! Messages between two ranks. Each begins with our header, so that a receiver can check it first. Each passes through
//! a buffer of ours, so that MPI does not use a caller's buffer after a deadline.

use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::time::Instant;

use mpi::ffi;

use super::world::{Mpi, done};
use tinynccl_comm::Inner;
use tinynccl_comm::RawCall;
use tinynccl_comm::executor::Supervisor;
use tinynccl_plan::error::{Error, Result};
use tinynccl_plan::wire::{Algorithm, Header};

/// The tag of all our messages: MPI keeps those of a pair in order.
const TAG: c_int = 1;

/// A message in flight.
pub(super) struct Sending {
    request: ffi::MPI_Request,
    memory: Vec<u8>,
    peer: usize,
}

impl Mpi {
    /// Begins a send.
    ///
    /// # Safety
    /// The call's input must be valid.
    pub(super) unsafe fn begin_send(&self, comm: &Inner, call: &RawCall) -> Result<Sending> {
        let bytes = call.count * call.dtype.size();
        let length = c_int::try_from(Header::BYTES + bytes)
            .map_err(|_| Error::invalid("send", format!("{bytes} bytes: MPI sends less than 2 GiB at once")))?;
        let mut memory = Vec::with_capacity(Header::BYTES + bytes);
        memory.extend_from_slice(bytemuck::bytes_of(&self.header(comm, call)));
        if bytes > 0 {
            // SAFETY: by the caller.
            memory.extend_from_slice(unsafe { std::slice::from_raw_parts(call.buffers.input, bytes) });
        }
        let mut request = MaybeUninit::uninit();
        // SAFETY: the memory is kept, where it is, until the request is complete.
        let request = unsafe {
            let status = ffi::MPI_Isend(
                memory.as_ptr().cast(),
                length,
                ffi::RSMPI_UINT8_T,
                call.peer as c_int,
                TAG,
                self.comm,
                request.as_mut_ptr(),
            );
            done("send by backend mpi", status)?;
            request.assume_init()
        };
        Ok(Sending { request, memory, peer: call.peer })
    }

    /// Waits until MPI has taken the message.
    pub(super) fn finish_send(&self, comm: &Inner, mut sending: Sending) -> Result<()> {
        let outcome = self.poll(comm, "send", sending.peer, || {
            let mut complete = 0;
            // SAFETY: the request is under way.
            let status = unsafe { ffi::MPI_Test(&mut sending.request, &mut complete, ffi::RSMPI_STATUS_IGNORE) };
            done("send by backend mpi", status).map(|()| (complete != 0).then_some(()))
        });
        if outcome.is_err() {
            // MPI may still read it.
            std::mem::forget(sending.memory);
        }
        outcome
    }

    /// Receives a message.
    ///
    /// # Safety
    /// The call's output must be valid and exclusive.
    pub(super) unsafe fn recv(&self, comm: &Inner, call: &RawCall) -> Result<()> {
        let peer = call.root;
        let mut message = MaybeUninit::<ffi::MPI_Message>::uninit();
        let mut status = MaybeUninit::<ffi::MPI_Status>::uninit();
        self.poll(comm, "recv", peer, || {
            let mut there = 0;
            // SAFETY: fills both when a message is there.
            let code = unsafe {
                ffi::MPI_Improbe(peer as c_int, TAG, self.comm, &mut there, message.as_mut_ptr(), status.as_mut_ptr())
            };
            done("recv by backend mpi", code).map(|()| (there != 0).then_some(()))
        })?;
        let mut length = 0;
        // SAFETY: the probe has filled the status.
        let code = unsafe { ffi::MPI_Get_count(status.as_ptr(), ffi::RSMPI_UINT8_T, &mut length) };
        done("recv by backend mpi", code)?;
        let mut memory = vec![0u8; usize::try_from(length).unwrap_or(0)];
        // SAFETY: the memory is as long as the message; the probe has filled the message.
        let code = unsafe {
            ffi::MPI_Mrecv(
                memory.as_mut_ptr().cast(),
                length,
                ffi::RSMPI_UINT8_T,
                message.as_mut_ptr(),
                ffi::RSMPI_STATUS_IGNORE,
            )
        };
        done("recv by backend mpi", code)?;
        let ours = self.header(comm, call);
        let theirs = memory.get(..Header::BYTES).map(bytemuck::pod_read_unaligned::<Header>);
        match theirs {
            Some(theirs) if theirs == ours && memory.len() == Header::BYTES + call.count * call.dtype.size() => {
                let payload = &memory[Header::BYTES..];
                // SAFETY: the output is as long as the call says, and so is the message.
                unsafe { std::ptr::copy_nonoverlapping(payload.as_ptr(), call.buffers.output, payload.len()) };
                Ok(())
            }
            Some(theirs) => Err(comm.state().mismatch(peer, ours, theirs)),
            None => Err(Error::Protocol {
                op: "recv".to_owned(),
                rank: self.rank,
                peer,
                address: "by MPI".to_owned(),
                detail: format!("a message of {length} bytes, expected a header of {} first", Header::BYTES),
            }),
        }
    }

    fn header(&self, comm: &Inner, call: &RawCall) -> Header {
        call.header(comm.state().id, Algorithm::Direct)
    }

    /// Polls until there is an answer, with the group's deadline.
    fn poll(&self, comm: &Inner, op: &str, peer: usize, mut ask: impl FnMut() -> Result<Option<()>>) -> Result<()> {
        let start = Instant::now();
        let mut turns = 0u32;
        loop {
            if ask()?.is_some() {
                return Ok(());
            }
            turns += 1;
            if !turns.is_multiple_of(16) {
                continue;
            }
            let state = comm.state();
            if let Some(error) = state.failure() {
                return Err(error);
            }
            let waited = start.elapsed();
            if waited >= self.timeout {
                return Err(state.fail_everywhere(Error::Timeout {
                    op: op.to_owned(),
                    rank: self.rank,
                    waited,
                    missing: vec![peer],
                    detail: "by MPI: has that rank made the matching call?".to_owned(),
                }));
            }
            std::thread::yield_now();
        }
    }
}
