//! A queue pair of the RDMA device in user space, with memory and a completion queue.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use softroce::{
    Access, AttrMask as M, Capacity, Context, Cq, Device, Mr, Qp, QpAttr, QpInit, RecvRequest, Remote, SendFlags,
    SendOp, SendRequest, Service, Sge, State, Wc,
};

use crate::ranks::CannotRunHere;

/// Longest wait for a completion.
const PATIENCE: Duration = Duration::from_secs(60);

/// One end of a connection.
pub(crate) struct End {
    // Dropped in this order.
    qp: Arc<Qp>,
    mr: Mr,
    cq: Arc<Cq>,
    context: Arc<Context>,
    memory: *mut u8,
    len: usize,
}

/// Connection attributes of an end.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Terms {
    /// Bytes of payload in a packet.
    pub(crate) mtu: u32,
    /// Code of the wait for an acknowledgement: 4.096 us times 2^code.
    pub(crate) timeout: u8,
    /// Times that packets are sent again without progress; 7 is forever.
    pub(crate) retry_cnt: u8,
    /// Code of the pause that this end requests where it has no receive posted.
    pub(crate) min_rnr_timer: u8,
}

/// The first packet of each direction has this number.
pub(crate) const FIRST_PSN: u32 = 100;

impl End {
    /// A queue pair of the loopback interface's RDMA device, and `len` bytes that the peer may read and write.
    pub(crate) fn new(len: usize) -> Result<End> {
        let devices = Device::list()?;
        let device = devices.iter().find(|d| d.is_loopback()).context("there is no loopback interface")?;
        let context = device.open().map_err(|e| CannotRunHere(e.to_string()))?;
        let pd = context.alloc_pd();
        let cq = context.create_cq(1024, 0, None)?;
        // Never freed: the device may write to it until the process ends. Words, for atomic operations.
        let memory = Box::leak(vec![0u64; len.div_ceil(8)].into_boxed_slice()).as_mut_ptr().cast::<u8>();
        let all = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
        // SAFETY: leaked above.
        let mr = unsafe { pd.reg_mr(memory, len, memory as u64, all) }?;
        let qp = pd.create_qp(&QpInit {
            service: Service::Rc,
            capacity: Capacity { sends: 64, recvs: 64, send_sges: 1, recv_sges: 1, inline: 0 },
            signal_all: true,
            send_cq: cq.clone(),
            recv_cq: cq.clone(),
            srq: None,
        })?;
        Ok(End { qp, mr, cq, context, memory, len })
    }

    pub(crate) fn number(&self) -> u32 {
        self.qp.number()
    }

    /// Memory of this end, for the peer's requests.
    pub(crate) fn remote(&self, at: usize) -> Remote {
        Remote { addr: (self.mr.addr() + at) as u64, rkey: self.mr.rkey() }
    }

    /// Connects to queue pair `dest_qpn` of this host.
    pub(crate) fn connect(&self, dest_qpn: u32, terms: Terms) -> Result<()> {
        let index = self.context.device().default_gid_index();
        let gid = *self.context.device().gids().get(usize::from(index)).context("no GID")?;
        let mut attr = QpAttr {
            port: 1,
            access: Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC,
            path: Some(self.context.path(gid, index)?),
            path_mtu: terms.mtu,
            timeout: terms.timeout,
            retry_cnt: terms.retry_cnt,
            rnr_retry: 7,
            rq_psn: FIRST_PSN,
            sq_psn: FIRST_PSN,
            max_rd_atomic: 4,
            max_dest_rd_atomic: 4,
            min_rnr_timer: terms.min_rnr_timer,
            dest_qpn,
            ..QpAttr::default()
        };
        let init = M::STATE | M::PKEY_INDEX | M::PORT | M::ACCESS;
        let rtr = M::STATE | M::PATH | M::PATH_MTU | M::DEST_QPN | M::RQ_PSN | M::MAX_DEST_RD_ATOMIC | M::MIN_RNR_TIMER;
        let rts = M::STATE | M::SQ_PSN | M::TIMEOUT | M::RETRY_CNT | M::RNR_RETRY | M::MAX_RD_ATOMIC;
        for (state, mask) in [(State::Init, init), (State::Rtr, rtr), (State::Rts, rts)] {
            attr.state = state;
            self.qp.modify(&attr, mask)?;
        }
        Ok(())
    }

    fn sge(&self, at: usize, len: usize) -> Result<Sge> {
        ensure!(at + len <= self.len, "{len} bytes at {at}: the memory has {}", self.len);
        Ok(Sge { addr: (self.mr.addr() + at) as u64, len: len as u32, lkey: self.mr.lkey() })
    }

    pub(crate) fn send(&self, op: SendOp, at: usize, len: usize) -> Result<()> {
        let sges = [self.sge(at, len)?];
        let request = SendRequest { id: 0, op, sges: &sges, flags: SendFlags::default(), to: None };
        // SAFETY: the memory is never freed, and read only between transfers.
        unsafe { self.qp.post_send(&[request]) }.map_err(|(_, e)| e)?;
        Ok(())
    }

    pub(crate) fn recv(&self, at: usize, len: usize) -> Result<()> {
        let sges = [self.sge(at, len)?];
        // SAFETY: as in `send`.
        unsafe { self.qp.post_recv(&[RecvRequest { id: 0, sges: &sges }]) }.map_err(|(_, e)| e)?;
        Ok(())
    }

    pub(crate) fn poll(&self) -> Option<Wc> {
        self.cq.poll_one()
    }

    /// The next completion.
    pub(crate) fn wait(&self) -> Result<Wc> {
        let start = Instant::now();
        loop {
            if let Some(wc) = self.poll() {
                return Ok(wc);
            }
            ensure!(start.elapsed() < PATIENCE, "no completion came");
            std::thread::yield_now();
        }
    }

    /// The 8-byte word at offset `at` of the memory.
    pub(crate) fn word(&self, at: usize) -> Result<u64> {
        ensure!(at + 8 <= self.len && at.is_multiple_of(8), "no word at {at}");
        // SAFETY: within the memory, and aligned; volatile, as the device may write to it.
        Ok(unsafe { self.memory.add(at).cast::<u64>().read_volatile() })
    }
}
