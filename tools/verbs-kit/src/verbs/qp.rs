//! A queue pair: a send queue and a receive queue, the steps of its life, and its requests.

use std::io;
use std::ops::Range;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use anyhow::{Result, anyhow, bail, ensure};
use ffi::ibv_qp_attr_mask as Mask;

use super::{Cq, Mr, Pd, complain, ffi};
use crate::words;

/// The number of outstanding requests that each queue can hold.
#[derive(Debug, Clone, Copy)]
pub struct Depth {
    /// SENDs, WRITEs and READs.
    pub send: u32,
    /// RECVs.
    pub receive: u32,
}

/// A queue pair of the kind RC, reliable connection (`struct ibv_qp`).
#[derive(Debug)]
pub struct Qp {
    raw: NonNull<ffi::ibv_qp>,
    /// Memory of posted requests; the device may use it until the QP is gone.
    memory: Vec<Arc<Mr>>,
    /// Freed after `drop` has run.
    _cq: Arc<Cq>,
    _pd: Arc<Pd>,
}

// SAFETY: libibverbs allows every call from every thread; the pointer is freed once, in `drop`.
unsafe impl Send for Qp {}

impl Qp {
    /// A new QP in state RESET. Both queues report to `cq`.
    pub fn new(pd: &Arc<Pd>, cq: &Arc<Cq>, depth: Depth) -> Result<Qp> {
        let mut attributes = ffi::ibv_qp_init_attr {
            send_cq: cq.raw(),
            recv_cq: cq.raw(),
            cap: ffi::ibv_qp_cap {
                max_send_wr: depth.send,
                max_recv_wr: depth.receive,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: 0,
            },
            qp_type: ffi::ibv_qp_type::IBV_QPT_RC,
            ..Default::default()
        };
        // SAFETY: PD and CQ exist and outlive the QP, which keeps both.
        let raw = NonNull::new(unsafe { ffi::ibv_create_qp(pd.raw(), &mut attributes) }).ok_or_else(|| {
            anyhow!("ibv_create_qp({}, {depth:?}): {}", pd.context().name(), io::Error::last_os_error())
        })?;
        let qp = Qp { raw, memory: Vec::new(), _cq: Arc::clone(cq), _pd: Arc::clone(pd) };
        // The call has stored the actual depths: at least the requested ones.
        let ffi::ibv_qp_cap { max_send_wr, max_recv_wr, max_inline_data, .. } = attributes.cap;
        log::debug!("QP {}: {max_send_wr} sends, {max_recv_wr} receives, {max_inline_data} bytes inline", qp.number());
        Ok(qp)
    }

    /// The QP's number, which the peer must know.
    pub fn number(&self) -> u32 {
        // SAFETY: the QP exists.
        unsafe { self.raw.as_ref() }.qp_num
    }

    /// The name of the state that the device reports.
    pub fn state(&self) -> Result<&'static str> {
        let mut attributes = ffi::ibv_qp_attr::default();
        let mut first = ffi::ibv_qp_init_attr::default();
        // SAFETY: the QP exists, both places outlive the call.
        let code =
            unsafe { ffi::ibv_query_qp(self.raw.as_ptr(), &mut attributes, Mask::IBV_QP_STATE.0 as i32, &mut first) };
        ensure!(code == 0, "ibv_query_qp({}): {}", self.number(), io::Error::from_raw_os_error(code));
        Ok(words::qp_state(attributes.qp_state))
    }

    /// One step of the QP's life, named `step` in errors: sets the `attributes` that `mask` names.
    ///
    /// # Errors
    /// The device refuses.
    pub fn modify(&mut self, step: &str, mut attributes: ffi::ibv_qp_attr, mask: Mask) -> Result<()> {
        // SAFETY: the QP exists; `mask` names the attributes that are set.
        let code = unsafe { ffi::ibv_modify_qp(self.raw.as_ptr(), &mut attributes, mask.0 as i32) };
        ensure!(
            code == 0,
            "ibv_modify_qp({}, {step}): {}; an attribute is outside of what the device allows, or the path to the \
             peer's GID cannot be resolved (route, neighbour)",
            self.number(),
            io::Error::from_raw_os_error(code)
        );
        log::debug!("QP {}: {step}, mask {:#x}", self.number(), mask.0);
        Ok(())
    }

    /// Posts a RECV: the peer's next SEND goes to the bytes of `range`.
    pub fn post_recv(&mut self, wr_id: u64, mr: &Arc<Mr>, range: Range<usize>) -> Result<()> {
        let mut sge = mr.sge(range)?;
        let mut request = ffi::ibv_recv_wr { wr_id, next: ptr::null_mut(), sg_list: &mut sge, num_sge: 1 };
        let mut bad = ptr::null_mut();
        let Some(post_recv) = self.ops().post_recv else { bail!("the driver has no post_recv") };
        self.keep(mr);
        // SAFETY: request and list outlive the call, which copies them; the memory stays registered (`keep`).
        let code = unsafe { post_recv(self.raw.as_ptr(), &mut request, &mut bad) };
        ensure!(code == 0, "ibv_post_recv({}, wr_id {wr_id}): {}", self.number(), io::Error::from_raw_os_error(code));
        log::debug!("QP {}: RECV wr_id {wr_id} of up to {} bytes posted", self.number(), sge.length);
        Ok(())
    }

    /// Posts a SEND of the bytes of `range`, with a completion.
    pub fn post_send(&mut self, wr_id: u64, mr: &Arc<Mr>, range: Range<usize>) -> Result<()> {
        let request = ffi::ibv_send_wr {
            wr_id,
            opcode: ffi::ibv_wr_opcode::IBV_WR_SEND,
            send_flags: ffi::ibv_send_flags::IBV_SEND_SIGNALED.0,
            ..Default::default()
        };
        self.post(request, mr, range)
    }

    /// Posts a SEND, WRITE or READ whose local memory is `range` of `mr`. Fills in the request's list and link.
    pub fn post(&mut self, mut request: ffi::ibv_send_wr, mr: &Arc<Mr>, range: Range<usize>) -> Result<()> {
        use ffi::ibv_wr_opcode::{
            IBV_WR_RDMA_READ, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_SEND, IBV_WR_SEND_WITH_IMM,
        };
        // The others carry pointers themselves.
        ensure!(
            [IBV_WR_SEND, IBV_WR_SEND_WITH_IMM, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_RDMA_READ]
                .contains(&request.opcode),
            "opcode {} is not posted by this program",
            request.opcode
        );
        let mut sge = mr.sge(range)?;
        request.next = ptr::null_mut();
        request.sg_list = &mut sge;
        request.num_sge = i32::from(sge.length > 0);
        let mut bad = ptr::null_mut();
        let Some(post_send) = self.ops().post_send else { bail!("the driver has no post_send") };
        self.keep(mr);
        // SAFETY: request and list outlive the call, which copies them; the memory stays registered (`keep`), and
        // lkey and range belong together (`Mr::sge`). The peer's device checks the access to the peer's memory.
        let code = unsafe { post_send(self.raw.as_ptr(), &mut request, &mut bad) };
        ensure!(
            code == 0,
            "ibv_post_send({}, wr_id {}): {}",
            self.number(),
            request.wr_id,
            io::Error::from_raw_os_error(code)
        );
        let (number, bytes) = (self.number(), sge.length);
        log::debug!("QP {number}: request wr_id {}, opcode {}, {bytes} bytes posted", request.wr_id, request.opcode);
        Ok(())
    }

    /// Keeps the memory until the QP is destroyed, because the device may access it until then.
    fn keep(&mut self, mr: &Arc<Mr>) {
        if !self.memory.iter().any(|kept| Arc::ptr_eq(kept, mr)) {
            self.memory.push(Arc::clone(mr));
        }
    }

    /// The driver's functions. `ibv_post_send` and similar calls are inline functions in the header that use this
    /// table.
    fn ops(&self) -> &ffi::ibv_context_ops {
        // SAFETY: the QP's PD holds the context, which holds the table.
        unsafe { &(*self.raw.as_ref().context).ops }
    }
}

impl Drop for Qp {
    fn drop(&mut self) {
        // SAFETY: created by us, destroyed once; after this the device touches none of `memory`.
        complain("ibv_destroy_qp", unsafe { ffi::ibv_destroy_qp(self.raw.as_ptr()) });
    }
}
