//! Calls in random order with random arguments, from several threads, with signals, forked children and devices that
//! are closed early. A small model predicts what each destroy returns, which requests may complete, and what is
//! refused. The same seed makes the same calls: `SOFTROCE_CALLS_SEED`; `SOFTROCE_CALLS_SECONDS` makes it go on for
//! hours.

use std::collections::HashMap;
use std::ffi::c_int;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use softroce_verbs::*;

use crate::{extended, open};

const THREADS: u64 = 3;
/// Bytes of each thread's memory, which is never freed; objects of each kind at most.
const BYTES: usize = 64 << 10;
const MOST: usize = 6;

struct Dice(u64);

impl Dice {
    fn roll(&mut self, below: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) % below as u64) as usize
    }
}

/// An object, and how many others are made of it.
struct Counted<T> {
    at: *mut T,
    users: usize,
}

struct Mr {
    at: *mut ibv_mr,
    pd: *mut ibv_pd,
}

struct Qp {
    at: *mut ibv_qp,
    pd: *mut ibv_pd,
    cqs: [*mut ibv_cq; 2],
    srq: *mut ibv_srq,
}

/// One thread's objects, of a device that it opened itself.
struct World {
    dice: Dice,
    context: *mut ibv_context,
    memory: u64,
    pds: Vec<Counted<ibv_pd>>,
    channels: Vec<Counted<ibv_comp_channel>>,
    cqs: Vec<(Counted<ibv_cq>, *mut ibv_comp_channel)>,
    srqs: Vec<(Counted<ibv_srq>, *mut ibv_pd)>,
    mrs: Vec<Mr>,
    qps: Vec<Qp>,
    /// Requests that may complete, once, by the queue pair; null is a shared receive queue's.
    posted: HashMap<u64, *mut ibv_qp>,
    next: u64,
}

fn find<T>(all: &mut [Counted<T>], at: *mut T) -> &mut Counted<T> {
    all.iter_mut().find(|one| one.at == at).expect("in the model")
}

fn non_blocking(fd: c_int) {
    // SAFETY: a descriptor of the device's.
    unsafe { libc::fcntl(fd, libc::F_SETFL, libc::O_NONBLOCK) };
}

/// Result of a destroy by the model, for an object with `users`: `EBUSY`, or 0 without any.
fn expected(users: usize) -> c_int {
    if users > 0 { libc::EBUSY } else { 0 }
}

impl World {
    fn new(seed: u64) -> World {
        let context = open();
        // SAFETY: an open context.
        non_blocking(unsafe { (*context).async_fd });
        let memory = Box::leak(vec![0u64; BYTES / 8].into_boxed_slice()).as_mut_ptr() as u64;
        let (pds, channels, cqs, srqs) = Default::default();
        let (mrs, qps, posted) = Default::default();
        World { dice: Dice(seed), context, memory, pds, channels, cqs, srqs, mrs, qps, posted, next: 1 }
    }

    fn some<T: Copy>(&mut self, all: impl Fn(&World) -> Vec<T>) -> Option<T> {
        let all = all(self);
        if all.is_empty() { None } else { all.get(self.dice.roll(all.len())).copied() }
    }

    fn pd(&mut self) -> Option<*mut ibv_pd> {
        self.some(|w| w.pds.iter().map(|pd| pd.at).collect())
    }

    fn qp(&mut self) -> Option<*mut ibv_qp> {
        self.some(|w| w.qps.iter().map(|qp| qp.at).collect())
    }

    fn cq(&mut self) -> Option<*mut ibv_cq> {
        self.some(|w| w.cqs.iter().map(|(cq, _)| cq.at).collect())
    }

    fn make(&mut self) -> Option<()> {
        // SAFETY: verbs' own contracts: objects of the model are live, and memory is never freed.
        unsafe {
            match self.dice.roll(6) {
                0 if self.pds.len() < MOST => self.pds.push(Counted { at: ibv_alloc_pd(self.context), users: 0 }),
                1 if self.channels.len() < MOST => {
                    let at = ibv_create_comp_channel(self.context);
                    non_blocking((*at).fd);
                    self.channels.push(Counted { at, users: 0 });
                }
                2 if self.cqs.len() < MOST => {
                    let channel = self.some(|w| w.channels.iter().map(|c| c.at).collect()).unwrap_or(null_mut());
                    let cqe = [-1, 0, 1, 100, 1 << 22, (1 << 22) + 1][self.dice.roll(6)];
                    let vector = c_int::from(self.dice.roll(8) == 0);
                    let at = ibv_create_cq(self.context, cqe, null_mut(), channel, vector);
                    assert_eq!(at.is_null(), cqe <= 0 || cqe > 1 << 22 || vector != 0, "{cqe} {vector}");
                    if !at.is_null() {
                        if !channel.is_null() {
                            find(&mut self.channels, channel).users += 1;
                        }
                        self.cqs.push((Counted { at, users: 0 }, channel));
                    }
                }
                3 if self.srqs.len() < MOST => {
                    let pd = self.pd()?;
                    let max_wr = [0, 1, 16, 1 << 20][self.dice.roll(4)];
                    let attr = ibv_srq_attr { max_wr, max_sge: 2, srq_limit: 0 };
                    let at = ibv_create_srq(pd, &mut ibv_srq_init_attr { srq_context: null_mut(), attr });
                    assert_eq!(at.is_null(), !(1..=1 << 16).contains(&max_wr));
                    if !at.is_null() {
                        find(&mut self.pds, pd).users += 1;
                        self.srqs.push((Counted { at, users: 0 }, pd));
                    }
                }
                4 if self.mrs.len() < MOST => {
                    let pd = self.pd()?;
                    let access = self.dice.roll(16) as c_int;
                    let at = ibv_reg_mr(pd, self.memory as *mut _, BYTES, access);
                    assert_eq!(at.is_null(), access & 0b1010 != 0 && access & 1 == 0, "{access}");
                    if !at.is_null() {
                        find(&mut self.pds, pd).users += 1;
                        self.mrs.push(Mr { at, pd });
                    }
                }
                5 if self.qps.len() < MOST => self.make_qp()?,
                _ => {}
            }
        }
        Some(())
    }

    fn make_qp(&mut self) -> Option<()> {
        let (pd, cqs) = (self.pd()?, [self.cq()?, self.cq()?]);
        let srq = if self.dice.roll(3) == 0 { self.some(|w| w.srqs.iter().map(|(s, _)| s.at).collect()) } else { None };
        let srq = srq.unwrap_or(null_mut());
        let mut init = ibv_qp_init_attr { send_cq: cqs[0], recv_cq: cqs[1], srq, ..Default::default() };
        init.qp_type = 2 + self.dice.roll(4) as u32;
        let max_send_sge = [1, 4, 33][self.dice.roll(3)];
        init.cap = ibv_qp_cap { max_send_wr: 8, max_recv_wr: 8, max_send_sge, max_recv_sge: 2, max_inline_data: 64 };
        init.sq_sig_all = self.dice.roll(2) as c_int;
        // SAFETY: as in `make`.
        let at = unsafe { ibv_create_qp(pd, &raw mut init) };
        assert_eq!(at.is_null(), init.qp_type > 4 || max_send_sge > 32, "{} {max_send_sge}", init.qp_type);
        if !at.is_null() {
            find(&mut self.pds, pd).users += 1;
            for cq in cqs {
                self.cqs.iter_mut().find(|(c, _)| c.at == cq).expect("in the model").0.users += 1;
            }
            if let Some((srq, _)) = self.srqs.iter_mut().find(|(s, _)| s.at == srq) {
                srq.users += 1;
            }
            self.qps.push(Qp { at, pd, cqs, srq });
        }
        Some(())
    }

    fn destroy(&mut self, kind: usize) {
        // SAFETY: as in `make`; what was destroyed leaves the model.
        unsafe {
            match kind {
                0 if !self.pds.is_empty() => {
                    let i = self.dice.roll(self.pds.len());
                    let want = expected(self.pds[i].users);
                    assert_eq!(ibv_dealloc_pd(self.pds[i].at), want);
                    if want == 0 {
                        self.pds.remove(i);
                    }
                }
                1 if !self.channels.is_empty() => {
                    let i = self.dice.roll(self.channels.len());
                    let want = expected(self.channels[i].users);
                    assert_eq!(ibv_destroy_comp_channel(self.channels[i].at), want);
                    if want == 0 {
                        self.channels.remove(i);
                    }
                }
                2 if !self.cqs.is_empty() => {
                    let i = self.dice.roll(self.cqs.len());
                    let want = expected(self.cqs[i].0.users);
                    assert_eq!(ibv_destroy_cq(self.cqs[i].0.at), want);
                    if want == 0 {
                        let (_, channel) = self.cqs.remove(i);
                        if !channel.is_null() {
                            find(&mut self.channels, channel).users -= 1;
                        }
                    }
                }
                3 if !self.srqs.is_empty() => {
                    let i = self.dice.roll(self.srqs.len());
                    let want = expected(self.srqs[i].0.users);
                    assert_eq!(ibv_destroy_srq(self.srqs[i].0.at), want);
                    if want == 0 {
                        let (_, pd) = self.srqs.remove(i);
                        find(&mut self.pds, pd).users -= 1;
                    }
                }
                4 if !self.mrs.is_empty() => {
                    let i = self.dice.roll(self.mrs.len());
                    let Mr { at, pd } = self.mrs.remove(i);
                    assert_eq!(ibv_dereg_mr(at), 0);
                    find(&mut self.pds, pd).users -= 1;
                }
                5 if !self.qps.is_empty() => {
                    let i = self.dice.roll(self.qps.len());
                    let Qp { at, pd, cqs, srq } = self.qps.remove(i);
                    assert_eq!(ibv_destroy_qp(at), 0);
                    self.posted.retain(|_, qp| *qp != at);
                    find(&mut self.pds, pd).users -= 1;
                    for cq in cqs {
                        self.cqs.iter_mut().find(|(c, _)| c.at == cq).expect("in the model").0.users -= 1;
                    }
                    if let Some((srq, _)) = self.srqs.iter_mut().find(|(s, _)| s.at == srq) {
                        srq.users -= 1;
                    }
                }
                _ => {}
            }
        }
    }

    /// A change of state: mostly the next one towards RTS, connected to any queue pair of the world.
    fn modify(&mut self) -> Option<()> {
        use ibv_qp_attr_mask as M;
        let (qp, peer) = (self.qp()?, self.qp()?);
        // SAFETY: as in `make`.
        unsafe {
            let mut attr =
                ibv_qp_attr { port_num: 1, qp_access_flags: self.dice.roll(16) as u32, ..Default::default() };
            attr.ah_attr = ibv_ah_attr { is_global: 1, port_num: 1, ..Default::default() };
            assert_eq!(ibv_query_gid(self.context, 1, 0, &mut attr.ah_attr.grh.dgid), 0);
            (attr.path_mtu, attr.dest_qp_num, attr.qkey) = (1 + self.dice.roll(5) as u32, (*peer).qp_num, 5);
            (attr.max_rd_atomic, attr.max_dest_rd_atomic) = (self.dice.roll(3) as u8, self.dice.roll(3) as u8);
            (attr.timeout, attr.retry_cnt, attr.rnr_retry) = (8, self.dice.roll(3) as u8, self.dice.roll(3) as u8);
            attr.min_rnr_timer = 1;
            let state = (*qp).state;
            attr.qp_state = if self.dice.roll(8) == 0 { self.dice.roll(8) as u32 } else { (state + 1).min(3) };
            let (rc, ud) = ((*qp).qp_type == ibv_qp_type::IBV_QPT_RC, (*qp).qp_type == ibv_qp_type::IBV_QPT_UD);
            let own = if ud { M::IBV_QP_QKEY } else { M::IBV_QP_ACCESS_FLAGS };
            let mut mask = M::IBV_QP_STATE;
            match (state, attr.qp_state) {
                (0, 1) => mask |= M::IBV_QP_PKEY_INDEX | M::IBV_QP_PORT | own,
                (1, 2) if !ud => {
                    mask |= M::IBV_QP_AV | M::IBV_QP_PATH_MTU | M::IBV_QP_DEST_QPN | M::IBV_QP_RQ_PSN;
                    if rc {
                        mask |= M::IBV_QP_MAX_DEST_RD_ATOMIC | M::IBV_QP_MIN_RNR_TIMER;
                    }
                }
                (2, 3) => {
                    mask |= M::IBV_QP_SQ_PSN;
                    if rc {
                        mask |= M::IBV_QP_TIMEOUT | M::IBV_QP_RETRY_CNT | M::IBV_QP_RNR_RETRY;
                        mask |= M::IBV_QP_MAX_QP_RD_ATOMIC;
                    }
                }
                _ => {}
            }
            if self.dice.roll(16) == 0 {
                mask = M(mask.0 ^ 1 << self.dice.roll(21));
            }
            let done = ibv_modify_qp(qp, &raw mut attr, mask.0 as c_int);
            if done == 0 && mask.0 & 1 != 0 {
                if attr.qp_state == ibv_qp_state::IBV_QPS_RESET {
                    self.posted.retain(|_, at| *at != qp);
                }
                // It may have failed since, or be there already.
                let now = (*qp).state;
                assert!([attr.qp_state, 5, 6].contains(&now), "{now} after {}", attr.qp_state);
            }
            assert!(done == 0 || done == libc::EINVAL, "{done}");
        }
        Some(())
    }

    fn sges(&mut self, room: &mut [ibv_sge]) {
        for sge in room {
            let lkey = match self.dice.roll(8) {
                0 => self.dice.roll(1 << 30) as u32,
                // SAFETY: live regions.
                _ => self.some(|w| w.mrs.iter().map(|mr| unsafe { (*mr.at).lkey }).collect()).unwrap_or(7),
            };
            let at = self.dice.roll(BYTES - 4096) as u64;
            *sge = ibv_sge { addr: self.memory + at, length: [0, 1, 8, 64, 4096][self.dice.roll(5)], lkey };
        }
    }

    fn post(&mut self) -> Option<()> {
        let qp = self.qp()?;
        let mut sges = [ibv_sge::default(); 40];
        self.sges(&mut sges[..4]);
        let num_sge = [0, 1, 1, 1, 2, 3, 40, -1, c_int::MIN][self.dice.roll(9)];
        let (sg_list, id) = (sges.as_mut_ptr(), self.next);
        self.next += 1;
        let refused = !(0..=32).contains(&num_sge);
        // SAFETY: as in `make`.
        unsafe {
            let ops = &(*self.context).ops;
            let srq = self.qps.iter().find(|q| q.at == qp).map_or(null_mut(), |q| q.srq);
            if self.dice.roll(2) == 0 {
                let mut wr = ibv_recv_wr { wr_id: id, next: null_mut(), sg_list, num_sge };
                let mut bad = null_mut();
                let done = match srq.is_null() {
                    true => (ops.post_recv.expect("an operation"))(qp, &raw mut wr, &raw mut bad),
                    false => (ops.post_srq_recv.expect("an operation"))(srq, &raw mut wr, &raw mut bad),
                };
                assert!(!refused || done == libc::EINVAL, "{num_sge}: {done}");
                assert!((done == 0) == bad.is_null());
                if done == 0 {
                    self.posted.insert(id, if srq.is_null() { qp } else { null_mut() });
                }
                return Some(());
            }
            let mut wr = ibv_send_wr { wr_id: id, sg_list, num_sge, ..Default::default() };
            // Not those that name windows.
            wr.opcode = [0, 1, 2, 3, 4, 5, 6, 7, 9, 14, 99][self.dice.roll(11)];
            wr.send_flags = self.dice.roll(16) as u32;
            let rkey = self.some(|w| w.mrs.iter().map(|mr| (*mr.at).rkey).collect()).unwrap_or(9);
            let remote = self.memory + (self.dice.roll(BYTES) as u64 & !7);
            if [5, 6].contains(&wr.opcode) {
                (wr.wr.atomic.remote_addr, wr.wr.atomic.rkey) = (remote, rkey);
            } else if (*qp).qp_type != ibv_qp_type::IBV_QPT_UD {
                (wr.wr.rdma.remote_addr, wr.wr.rdma.rkey) = (remote, rkey);
            }
            let mut bad = null_mut();
            let done = (ops.post_send.expect("an operation"))(qp, &raw mut wr, &raw mut bad);
            // A datagram here has no address handle.
            let refused = refused || wr.opcode == 99 || (*qp).qp_type == ibv_qp_type::IBV_QPT_UD;
            assert!(!refused || done == libc::EINVAL, "{num_sge} {}: {done}", wr.opcode);
            assert!((done == 0) == bad.is_null());
            if done == 0 {
                self.posted.insert(id, qp);
            }
        }
        Some(())
    }

    fn look(&mut self) {
        // SAFETY: as in `make`.
        unsafe {
            let mut event = ibv_async_event { event_type: 0, ..std::mem::zeroed() };
            while ibv_get_async_event(self.context, &raw mut event) == 0 {
                let known = match event.event_type {
                    IBV_EVENT_CQ_ERR => self.cqs.iter().any(|(cq, _)| cq.at == event.element.cq),
                    IBV_EVENT_SRQ_LIMIT_REACHED => self.srqs.iter().any(|(srq, _)| srq.at == event.element.srq),
                    IBV_EVENT_GID_CHANGE | IBV_EVENT_PORT_ACTIVE | IBV_EVENT_PORT_ERR => true,
                    _ => self.qps.iter().any(|qp| qp.at == event.element.qp),
                };
                assert!(known, "an event of an object that is gone: {}", event.event_type);
                ibv_ack_async_event(&raw mut event);
            }
            for channel in &self.channels {
                let (mut cq, mut cookie) = (null_mut(), null_mut());
                while ibv_get_cq_event(channel.at, &raw mut cq, &raw mut cookie) == 0 {
                    assert!(self.cqs.iter().any(|(one, _)| one.at == cq), "an event of a queue that is gone");
                    ibv_ack_cq_events(cq, 1);
                }
            }
            let (poll, notify) =
                ((*self.context).ops.poll_cq.expect("an operation"), (*self.context).ops.req_notify_cq.expect("one"));
            let mut found = [const { std::mem::MaybeUninit::<ibv_wc>::uninit() }; 8];
            for (cq, _) in &self.cqs {
                let n = poll(cq.at, found.len() as c_int, found.as_mut_ptr().cast());
                assert!(n >= 0);
                for wc in &found[..n as usize] {
                    let id = wc.assume_init_ref().wr_id();
                    assert!(self.posted.remove(&id).is_some(), "{id} completed twice, or was never posted");
                }
                assert_eq!(notify(cq.at, self.next as c_int & 1), 0);
            }
        }
    }

    /// A child makes calls on everything that it has inherited.
    fn fork(&mut self) {
        // SAFETY: the child makes the calls and ends; the parent waits for it.
        unsafe {
            let child = libc::fork();
            if child == 0 {
                libc::_exit(i32::from(!self.calls_of_a_child()));
            }
            let mut status = -1;
            while libc::waitpid(child, &raw mut status, 0) < 0 {}
            assert_eq!(status, 0, "a forked child");
        }
    }

    unsafe fn calls_of_a_child(&self) -> bool {
        // SAFETY: live objects of the parent's.
        unsafe {
            let ops = &(*self.context).ops;
            let mut wc = std::mem::MaybeUninit::<ibv_wc>::uninit();
            let mut wr = ibv_send_wr::default();
            let mut attr = ibv_qp_attr { qp_state: ibv_qp_state::IBV_QPS_ERR, ..Default::default() };
            let state = ibv_qp_attr_mask::IBV_QP_STATE.0 as c_int;
            let polled = |cq: *mut ibv_cq| (ops.poll_cq.expect("one"))(cq, 1, wc.as_mut_ptr());
            let ok = self.cqs.iter().map(|(cq, _)| cq.at).map(polled).all(|n| n < 0)
                && self.qps.iter().all(|qp| {
                    (ops.post_send.expect("one"))(qp.at, &raw mut wr, &mut null_mut()) == libc::EINVAL
                        && ibv_modify_qp(qp.at, &raw mut attr, state) == libc::EINVAL
                        && ibv_destroy_qp(qp.at) == 0
                })
                && self.mrs.iter().all(|mr| ibv_dereg_mr(mr.at) == 0)
                && self.srqs.iter().all(|(srq, _)| ibv_destroy_srq(srq.at) == 0)
                && self.cqs.iter().all(|(cq, _)| ibv_destroy_cq(cq.at) == 0)
                && self.channels.iter().all(|channel| ibv_destroy_comp_channel(channel.at) == 0);
            ok && ibv_alloc_pd(self.context).is_null() && ibv_close_device(self.context) == 0
        }
    }

    fn step(&mut self) {
        match self.dice.roll(1000) {
            0..150 => drop(self.make()),
            150..200 => {
                let kind = self.dice.roll(6);
                self.destroy(kind);
            }
            200..450 => drop(self.modify()),
            450..850 => drop(self.post()),
            850..998 => self.look(),
            _ => self.fork(),
        }
    }

    /// Ends everything, sometimes after the device was closed.
    fn end(mut self) {
        let early = self.dice.roll(2) == 0;
        // SAFETY: as in `make`; a context stays while it has objects.
        unsafe {
            if early {
                assert_eq!(ibv_close_device(self.context), 0);
            }
            for kind in [5, 4, 3, 2, 1, 0] {
                (0..MOST).for_each(|_| self.destroy(kind));
            }
            let left = [self.pds.len(), self.channels.len(), self.cqs.len(), self.srqs.len(), self.mrs.len()];
            assert_eq!((left, self.qps.len()), ([0; 5], 0));
            if !early {
                assert_eq!(ibv_close_device(self.context), 0);
            }
        }
    }
}

extern "C" fn nothing_to_do(_signal: c_int) {}

#[test]
fn random_calls_do_what_the_model_says() {
    let number = |name: &str, default: u64| std::env::var(name).ok().and_then(|n| n.parse().ok()).unwrap_or(default);
    let (seed, seconds) = (number("SOFTROCE_CALLS_SEED", 1), number("SOFTROCE_CALLS_SECONDS", 10));
    // SAFETY: a handler that does nothing: calls are interrupted.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = nothing_to_do as extern "C" fn(c_int) as usize;
        assert_eq!(libc::sigaction(libc::SIGUSR1, &raw const action, null_mut()), 0);
    }
    let context = open();
    // SAFETY: as in `World::make`.
    unsafe {
        assert!(extended(context).query_device_ex.is_some());
        assert_eq!(ibv_close_device(context), 0);
    }
    let (until, done) = (Instant::now() + Duration::from_secs(seconds), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(3));
                // SAFETY: a signal to this process, which has a handler.
                unsafe { libc::kill(libc::getpid(), libc::SIGUSR1) };
            }
        });
        let workers: Vec<_> = (0..THREADS)
            .map(|thread| {
                scope.spawn(move || {
                    let mut round = 0;
                    while Instant::now() < until {
                        let seed = (seed * THREADS + thread) << 32 | round;
                        eprintln!("seed {seed}");
                        let mut world = World::new(seed);
                        (0..4000).for_each(|_| world.step());
                        world.end();
                        round += 1;
                    }
                })
            })
            .collect();
        let ended: Vec<_> = workers.into_iter().map(|worker| worker.join()).collect();
        done.store(true, Ordering::Relaxed);
        assert!(ended.iter().all(Result::is_ok), "see above");
    });
}
