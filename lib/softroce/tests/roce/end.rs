//! One end of a connection, ready to use.

use std::io::{Read, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

use softroce::{
    Access, AttrMask, Capacity, Context, Cq, Device, Gid, Mr, Pd, Qp, QpAttr, QpInit, RecvRequest, Remote, SendFlags,
    SendOp, SendRequest, Service, Sge, State, Wc,
};

/// Bytes of memory at each end.
pub(crate) const BYTES: usize = 4 << 20;

pub(crate) struct End {
    // Dropped in this order.
    pub(crate) qp: Arc<Qp>,
    pub(crate) mr: Mr,
    pub(crate) cq: Arc<Cq>,
    pub(crate) pd: Arc<Pd>,
    pub(crate) gid_index: u8,
    pub(crate) memory: *mut u8,
}

/// Connection details of an end, for the other one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Card {
    pub(crate) qpn: u32,
    pub(crate) psn: u32,
    pub(crate) gid: Gid,
    pub(crate) remote: Remote,
}

pub(crate) fn loopback() -> Arc<Context> {
    let devices = Device::list().expect("interfaces");
    devices.iter().find(|d| d.is_loopback()).expect("a loopback interface").open().expect("opened")
}

impl End {
    pub(crate) fn new(context: &Arc<Context>, service: Service) -> End {
        End::at(context, service, context.device().default_gid_index())
    }

    pub(crate) fn at(context: &Arc<Context>, service: Service, gid_index: u8) -> End {
        let pd = context.alloc_pd();
        let cq = context.create_cq(4096, 0, None).expect("a queue");
        // Page-aligned, and never freed: the RDMA device may write to it until the process ends.
        let memory = Box::leak(vec![0u64; BYTES / 8].into_boxed_slice()).as_mut_ptr().cast::<u8>();
        let all = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
        // SAFETY: leaked above.
        let mr = unsafe { pd.reg_mr(memory, BYTES, memory as u64, all) }.expect("registered");
        let capacity = Capacity { sends: 256, recvs: 256, send_sges: 4, recv_sges: 4, inline: 64 };
        let qp = pd
            .create_qp(&QpInit {
                service,
                capacity,
                signal_all: false,
                send_cq: cq.clone(),
                recv_cq: cq.clone(),
                srq: None,
            })
            .expect("a queue pair");
        End { qp, mr, cq, pd, gid_index, memory }
    }

    pub(crate) fn card(&self) -> Card {
        let gid = self.pd.context().device().gids()[usize::from(self.gid_index)];
        let remote = Remote { addr: self.mr.addr() as u64, rkey: self.mr.rkey() };
        Card { qpn: self.qp.number(), psn: self.qp.number().wrapping_mul(77) & 0xff_ffff, gid, remote }
    }

    pub(crate) fn connect(&self, to: &Card) {
        self.connect_with(to, |_| {});
    }

    pub(crate) fn connect_with(&self, to: &Card, change: impl Fn(&mut QpAttr)) {
        use AttrMask as M;
        let rc = self.qp.init().service == Service::Rc;
        let mut attr = QpAttr {
            port: 1,
            access: Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC,
            path: Some(self.pd.context().path(to.gid, self.gid_index).expect("a way")),
            path_mtu: self.pd.context().port().active_mtu,
            timeout: 14,
            retry_cnt: 7,
            rnr_retry: 7,
            rq_psn: to.psn,
            sq_psn: self.card().psn,
            max_rd_atomic: 4,
            max_dest_rd_atomic: 4,
            min_rnr_timer: 1,
            dest_qpn: to.qpn,
            ..QpAttr::default()
        };
        change(&mut attr);
        let (mut rtr, mut rts) = (M::STATE | M::PATH | M::PATH_MTU | M::DEST_QPN | M::RQ_PSN, M::STATE | M::SQ_PSN);
        if rc {
            rtr |= M::MAX_DEST_RD_ATOMIC | M::MIN_RNR_TIMER;
            rts |= M::TIMEOUT | M::RETRY_CNT | M::RNR_RETRY | M::MAX_RD_ATOMIC;
        }
        let init = M::STATE | M::PKEY_INDEX | M::PORT | M::ACCESS;
        for (state, mask) in [(State::Init, init), (State::Rtr, rtr), (State::Rts, rts)] {
            attr.state = state;
            self.qp.modify(&attr, mask).expect("a way to RTS");
        }
    }

    /// Bytes of ours, read one by one: the peer's RDMA device may write meanwhile.
    pub(crate) fn read(&self, at: usize, len: usize) -> Vec<u8> {
        assert!(at + len <= BYTES);
        // SAFETY: within the memory.
        (at..at + len).map(|i| unsafe { self.memory.add(i).read_volatile() }).collect()
    }

    pub(crate) fn write(&self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= BYTES);
        // SAFETY: within the memory, which tests write to only between transfers.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.memory.add(at), bytes.len()) };
    }

    pub(crate) fn sge(&self, at: usize, len: usize) -> Sge {
        Sge { addr: (self.mr.addr() + at) as u64, len: len as u32, lkey: self.mr.lkey() }
    }

    pub(crate) fn send(&self, id: u64, op: SendOp, at: usize, len: usize) {
        let sges = [self.sge(at, len)];
        let flags = SendFlags { signaled: true, ..SendFlags::default() };
        // SAFETY: the memory is never freed.
        unsafe { self.qp.post_send(&[SendRequest { id, op, sges: &sges, flags, to: None }]) }.expect("posted");
    }

    pub(crate) fn recv(&self, id: u64, at: usize, len: usize) {
        let sges = [self.sge(at, len)];
        // SAFETY: the memory is never freed.
        unsafe { self.qp.post_recv(&[RecvRequest { id, sges: &sges }]) }.expect("posted");
    }

    /// The next completion.
    pub(crate) fn wait(&self) -> Wc {
        let start = Instant::now();
        loop {
            if let Some(wc) = self.cq.poll_one() {
                return wc;
            }
            assert!(start.elapsed() < Duration::from_secs(60), "no completion");
            std::thread::yield_now();
        }
    }
}

/// Exchanges the [`Card`]s of both ends.
pub(crate) fn exchange(stream: &mut (impl Read + Write), ours: &Card) -> Card {
    let mut raw = [0; 36];
    raw[..4].copy_from_slice(&ours.qpn.to_be_bytes());
    raw[4..8].copy_from_slice(&ours.psn.to_be_bytes());
    raw[8..24].copy_from_slice(&ours.gid.0);
    raw[24..32].copy_from_slice(&ours.remote.addr.to_be_bytes());
    raw[32..].copy_from_slice(&ours.remote.rkey.to_be_bytes());
    stream.write_all(&raw).expect("written");
    stream.read_exact(&mut raw).expect("read");
    let word = |at: usize| u32::from_be_bytes(raw[at..at + 4].try_into().expect("four"));
    let addr = u64::from_be_bytes(raw[24..32].try_into().expect("eight"));
    let gid = Gid(raw[8..24].try_into().expect("sixteen"));
    Card { qpn: word(0), psn: word(4), gid, remote: Remote { addr, rkey: word(32) } }
}

pub(crate) fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|i| (i as u32).wrapping_mul(2_654_435_761).to_be_bytes()[0] ^ seed).collect()
}
