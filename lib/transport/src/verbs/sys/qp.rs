//! A reliable connected queue pair, from nothing to ready, and what is posted to it.

use std::ffi::c_int;
use std::ptr::NonNull;
use std::sync::Arc;

use super::{Cq, Gid, Handle, Pd, check, ffi};
use tinynccl_plan::error::{Error, Result};

/// Capacity of a queue pair.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Capacity {
    pub(crate) sends: u32,
    pub(crate) recvs: u32,
    /// Bytes that are copied when they are posted.
    pub(crate) inline: u32,
}

/// Address of the other queue pair, and how ours reaches it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Remote {
    pub(crate) qpn: u32,
    /// First packet sequence number that comes from there.
    pub(crate) psn: u32,
    pub(crate) gid: Gid,
    pub(crate) lid: u16,
    /// `ibv_mtu` code, the smaller of both ports.
    pub(crate) mtu: u32,
    /// Our port, and the index of our GID in its table.
    pub(crate) port: u8,
    pub(crate) gid_index: u8,
    /// Addressed by LID and not by GID.
    pub(crate) infiniband: bool,
}

/// Limits after which the device gives a packet up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Timing {
    /// Wait for an acknowledgement 4.096 µs times 2 to the power of this.
    pub(crate) timeout: u8,
    /// Repetitions without an acknowledgement.
    pub(crate) retries: u8,
    /// Repetitions when the receiver had no receive posted, which our credits rule out.
    pub(crate) rnr_retries: u8,
}

/// Registered memory to send from: a scatter-gather element.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sge {
    pub(crate) at: NonNull<u8>,
    pub(crate) len: u32,
    pub(crate) lkey: u32,
}

/// One RDMA write with an immediate word.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Write {
    pub(crate) from: Sge,
    /// Follows `from` without a gap where it is written; not inline.
    pub(crate) then: Option<Sge>,
    /// Address in the peer's memory.
    pub(crate) remote: u64,
    pub(crate) word: u32,
    pub(crate) signaled: bool,
    pub(crate) inline: bool,
}

#[derive(Debug)]
pub(crate) struct Qp {
    raw: Handle<ffi::ibv_qp>,
    _cq: Arc<Cq>,
    _pd: Arc<Pd>,
    inline: u32,
}

impl Qp {
    /// A queue pair in state RESET, with both its queues' completions in `cq`. Inline capacity is taken down until the
    /// device agrees: devices say how much they can only by refusing more.
    pub(crate) fn new(pd: &Arc<Pd>, cq: &Arc<Cq>, capacity: &Capacity) -> Result<Qp> {
        let mut inline = capacity.inline;
        loop {
            let mut attr = ffi::ibv_qp_init_attr {
                send_cq: cq.raw(),
                recv_cq: cq.raw(),
                cap: ffi::ibv_qp_cap {
                    max_send_wr: capacity.sends,
                    max_recv_wr: capacity.recvs,
                    max_send_sge: 2,
                    max_recv_sge: 1,
                    max_inline_data: inline,
                },
                qp_type: ffi::ibv_qp_type::IBV_QPT_RC,
                ..ffi::ibv_qp_init_attr::default()
            };
            // SAFETY: domain and queue are valid; the call reads and updates `attr`.
            let raw = unsafe { ffi::ibv_create_qp(pd.raw(), &raw mut attr) };
            let made = Handle::new(raw, || {
                let Capacity { sends, recvs, .. } = capacity;
                format!("creating a queue pair for {sends} sends and {recvs} receives on {}", pd.context().name())
            });
            match made {
                Err(_) if inline > 0 => inline /= 2,
                made => {
                    let (raw, inline) = (made?, attr.cap.max_inline_data);
                    return Ok(Qp { raw, _cq: cq.clone(), _pd: pd.clone(), inline });
                }
            }
        }
    }

    /// A first packet sequence number that nothing of an older queue pair fits.
    pub(crate) fn random_psn() -> Result<u32> {
        let mut psn = [0u8; 4];
        rustix::rand::getrandom(&mut psn, rustix::rand::GetRandomFlags::empty())
            .map_err(|e| Error::errno("connect", "a random packet sequence number", e))?;
        Ok(u32::from_le_bytes(psn) & 0x00ff_ffff)
    }

    /// Its number, by which the peer addresses it.
    pub(crate) fn number(&self) -> u32 {
        // SAFETY: the queue pair is valid and its number does not change.
        unsafe { (*self.raw.get()).qp_num }
    }

    /// Bytes that may be posted inline.
    pub(crate) fn inline(&self) -> u32 {
        self.inline
    }

    fn modify(
        &self,
        mut attr: ffi::ibv_qp_attr,
        mask: ffi::ibv_qp_attr_mask,
        what: impl FnOnce() -> String,
    ) -> Result<()> {
        let mask = (mask | ffi::ibv_qp_attr_mask::IBV_QP_STATE).0;
        // SAFETY: the queue pair is valid; the call reads what the mask names.
        check(unsafe { ffi::ibv_modify_qp(self.raw.get(), &raw mut attr, mask as c_int) }, what)
    }

    /// RESET to INIT: receives can be posted, nothing is sent.
    pub(crate) fn init(&self, port: u8) -> Result<()> {
        use ffi::ibv_qp_attr_mask as Mask;
        let attr = ffi::ibv_qp_attr {
            qp_state: ffi::ibv_qp_state::IBV_QPS_INIT,
            pkey_index: 0,
            port_num: port,
            qp_access_flags: ffi::ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0,
            ..ffi::ibv_qp_attr::default()
        };
        self.modify(attr, Mask::IBV_QP_PKEY_INDEX | Mask::IBV_QP_PORT | Mask::IBV_QP_ACCESS_FLAGS, || {
            format!("bringing a queue pair to INIT on port {port}")
        })
    }

    /// INIT to RTR, "ready to receive": the device takes what comes from the peer's queue pair.
    pub(crate) fn ready_to_receive(&self, to: &Remote) -> Result<()> {
        use ffi::ibv_qp_attr_mask as Mask;
        let grh = ffi::ibv_global_route {
            dgid: to.gid.raw(),
            sgid_index: to.gid_index,
            hop_limit: 64,
            ..ffi::ibv_global_route::default()
        };
        let ah_attr = ffi::ibv_ah_attr {
            grh,
            dlid: to.lid,
            is_global: u8::from(!to.infiniband),
            port_num: to.port,
            ..ffi::ibv_ah_attr::default()
        };
        let attr = ffi::ibv_qp_attr {
            qp_state: ffi::ibv_qp_state::IBV_QPS_RTR,
            path_mtu: to.mtu,
            dest_qp_num: to.qpn,
            rq_psn: to.psn,
            max_dest_rd_atomic: 0,
            // 0.64 ms until a sender may try again that found no receive posted.
            min_rnr_timer: 12,
            ah_attr,
            ..ffi::ibv_qp_attr::default()
        };
        let mask = Mask::IBV_QP_AV
            | Mask::IBV_QP_PATH_MTU
            | Mask::IBV_QP_DEST_QPN
            | Mask::IBV_QP_RQ_PSN
            | Mask::IBV_QP_MAX_DEST_RD_ATOMIC
            | Mask::IBV_QP_MIN_RNR_TIMER;
        self.modify(attr, mask, || {
            format!(
                "bringing a queue pair to RTR: to GID {} (queue pair {}, MTU {} bytes) from port {}, GID index {}; \
                 is there a route, and does the GID still exist (show_gids)?",
                to.gid.ip(),
                to.qpn,
                128u32 << to.mtu.min(6),
                to.port,
                to.gid_index
            )
        })
    }

    /// RTR to RTS, "ready to send". `psn` is the first packet sequence number of ours.
    pub(crate) fn ready_to_send(&self, psn: u32, timing: &Timing) -> Result<()> {
        use ffi::ibv_qp_attr_mask as Mask;
        let attr = ffi::ibv_qp_attr {
            qp_state: ffi::ibv_qp_state::IBV_QPS_RTS,
            timeout: timing.timeout,
            retry_cnt: timing.retries,
            rnr_retry: timing.rnr_retries,
            sq_psn: psn,
            max_rd_atomic: 0,
            ..ffi::ibv_qp_attr::default()
        };
        let mask = Mask::IBV_QP_TIMEOUT
            | Mask::IBV_QP_RETRY_CNT
            | Mask::IBV_QP_RNR_RETRY
            | Mask::IBV_QP_SQ_PSN
            | Mask::IBV_QP_MAX_QP_RD_ATOMIC;
        self.modify(attr, mask, || format!("bringing a queue pair to RTS with {timing:?}"))
    }

    /// Stops the queue pair: nothing more is sent or taken, and what was posted completes as flushed.
    pub(crate) fn stop(&self) -> Result<()> {
        let attr = ffi::ibv_qp_attr { qp_state: ffi::ibv_qp_state::IBV_QPS_ERR, ..ffi::ibv_qp_attr::default() };
        self.modify(attr, ffi::ibv_qp_attr_mask(0), || "stopping a queue pair".to_owned())
    }

    /// Posts a write to the peer's memory with key `rkey`. Its completion has `id`.
    ///
    /// # Safety
    /// `from` must be valid, registered under its `lkey` unless inline, and must not be written to until the write has
    /// completed (inline: until this returns). The same holds for what is sent `then`.
    #[inline]
    pub(crate) unsafe fn post_write(&self, id: u64, rkey: u32, write: &Write) -> Result<()> {
        let Write { from, then, remote, word, signaled, inline } = *write;
        let entry = |s: &Sge| ffi::ibv_sge { addr: s.at.as_ptr() as u64, length: s.len, lkey: s.lkey };
        let mut list = [entry(&from), entry(&then.unwrap_or(from))];
        let entries = if then.is_some() { 2 } else { c_int::from(from.len > 0) };
        let mut flags = 0;
        if signaled {
            flags |= ffi::ibv_send_flags::IBV_SEND_SIGNALED.0;
        }
        if inline {
            flags |= ffi::ibv_send_flags::IBV_SEND_INLINE.0;
        }
        let mut wr = ffi::ibv_send_wr {
            wr_id: id,
            next: std::ptr::null_mut(),
            sg_list: list.as_mut_ptr(),
            num_sge: entries,
            opcode: ffi::ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM,
            send_flags: flags,
            __bindgen_anon_1: ffi::ibv_send_wr__bindgen_ty_1 { imm_data: word.to_be() },
            wr: ffi::ibv_send_wr__bindgen_ty_2 {
                rdma: ffi::ibv_send_wr__bindgen_ty_2__bindgen_ty_1 { remote_addr: remote, rkey },
            },
            ..ffi::ibv_send_wr::default()
        };
        let mut bad = std::ptr::null_mut();
        // SAFETY: the queue pair is valid, as is its context's table of operations; the request and its list live until
        // the call returns, the memory by the caller.
        let result = unsafe {
            let ops = &(*(*self.raw.get()).context).ops;
            ops.post_send.map_or(libc::ENOSYS, |post| post(self.raw.get(), &raw mut wr, &raw mut bad))
        };
        check(result, || format!("posting a write of {} bytes", from.len + then.map_or(0, |s| s.len)))
    }

    /// Posts `n` receives without memory: what comes for them is an immediate word. Their completions have `id`.
    #[inline]
    pub(crate) fn post_receives(&self, n: usize, id: u64) -> Result<()> {
        let mut wrs = [ffi::ibv_recv_wr { wr_id: id, ..ffi::ibv_recv_wr::default() }; 16];
        let mut left = n;
        while left > 0 {
            let count = left.min(wrs.len());
            let mut next = std::ptr::null_mut();
            for wr in wrs.iter_mut().take(count).rev() {
                wr.next = next;
                next = wr;
            }
            let mut bad = std::ptr::null_mut();
            // SAFETY: as in `post_write`; the chain lives until the call returns and names no memory.
            let result = unsafe {
                let ops = &(*(*self.raw.get()).context).ops;
                ops.post_recv.map_or(libc::ENOSYS, |post| post(self.raw.get(), next, &raw mut bad))
            };
            check(result, || format!("posting {count} receives"))?;
            left -= count;
        }
        Ok(())
    }
}
