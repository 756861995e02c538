//! The requests of this milestone, and the content of `struct ibv_send_wr` for each.

use std::ops::Range;
use std::sync::Arc;

use anyhow::Result;
use ffi::ibv_wr_opcode::{IBV_WR_RDMA_READ, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM};
use rdma_write::region::Region;
use verbs_kit::verbs::{Mr, Qp, ffi};

/// The local memory of a request.
pub(crate) struct Here<'a> {
    /// The memory region.
    pub(crate) mr: &'a Arc<Mr>,
    /// The range of bytes in it.
    pub(crate) range: Range<usize>,
}

/// WRITE: our bytes to the peer's memory. The peer's program gets no notification.
pub(crate) fn write(qp: &mut Qp, wr_id: u64, here: Here<'_>, there: Region) -> Result<()> {
    qp.post(request(wr_id, IBV_WR_RDMA_WRITE, there), here.mr, here.range)
}

/// WRITE_WITH_IMM: the same, plus 32 bits that complete one of the peer's RECVs.
// EXERCISE 4 (How it works): a WRITE that also carries 32 bits, in network byte order, and completes one
// of the peer's RECVs. Post it.
pub(crate) fn write_with_imm(qp: &mut Qp, wr_id: u64, here: Here<'_>, there: Region, imm: u32) -> Result<()> {
    let mut request = request(wr_id, IBV_WR_RDMA_WRITE_WITH_IMM, there);
    // On the wire the 32 bits are in network byte order; verbs leaves the conversion to both programs.
    request.__bindgen_anon_1.imm_data = imm.to_be();
    qp.post(request, here.mr, here.range)
}

/// READ: the peer's bytes to our memory. The peer's program gets no notification.
pub(crate) fn read(qp: &mut Qp, wr_id: u64, here: Here<'_>, there: Region) -> Result<()> {
    qp.post(request(wr_id, IBV_WR_RDMA_READ, there), here.mr, here.range)
}

// EXERCISE 3 (How it works): the part common to all three requests: number, opcode, the flag that asks for
// a completion, and the peer's address and key.
fn request(wr_id: u64, opcode: ffi::ibv_wr_opcode::Type, there: Region) -> ffi::ibv_send_wr {
    let mut request = ffi::ibv_send_wr {
        wr_id,
        opcode,
        // Without this flag a successful request has no completion.
        send_flags: ffi::ibv_send_flags::IBV_SEND_SIGNALED.0,
        ..Default::default()
    };
    request.wr.rdma.remote_addr = there.address;
    request.wr.rdma.rkey = there.rkey;
    request
}
