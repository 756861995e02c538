//! The extended interface on the loopback device: requests built call by call, completions read field by field. With
//! the feature `verbs` also this crate beside verbs.h.

mod calls;
#[cfg(feature = "verbs")]
mod layout;

use std::ffi::c_int;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use softroce_verbs::*;

/// Bytes of each of the four parts of the test's memory.
const BYTES: usize = 4096;

struct Loop {
    context: *mut ibv_context,
    pd: *mut ibv_pd,
    cq: *mut ibv_cq_ex,
    qp: *mut ibv_qp,
    mr: *mut ibv_mr,
    memory: Vec<u8>,
}

unsafe fn extended<'a>(context: *mut ibv_context) -> &'a verbs_context {
    // SAFETY: the context is a field of the structure.
    unsafe { &*context.byte_sub(std::mem::offset_of!(verbs_context, context)).cast() }
}

fn open() -> *mut ibv_context {
    // SAFETY: verbs' own contracts.
    unsafe {
        let mut count = 0;
        let list = ibv_get_device_list(&raw mut count);
        // The loopback device is the last one.
        let context = ibv_open_device(*list.add(count as usize - 1));
        ibv_free_device_list(list);
        assert!(!context.is_null());
        context
    }
}

fn cq_attr(context: *mut ibv_context, wc_flags: u32) -> *mut ibv_cq_ex {
    let mut init = ibv_cq_init_attr_ex { cqe: 16, wc_flags: u64::from(wc_flags), ..Default::default() };
    // SAFETY: an open context and attributes.
    unsafe { (extended(context).create_cq_ex.expect("an operation"))(context, &raw mut init) }
}

impl Loop {
    /// A queue pair that is connected to itself.
    fn new() -> Loop {
        // SAFETY: verbs' own contracts, here and below; all objects live until the end of the test.
        unsafe {
            let context = open();
            let pd = ibv_alloc_pd(context);
            let cq = cq_attr(context, IBV_WC_EX_WITH_BYTE_LEN | IBV_WC_EX_WITH_IMM | IBV_WC_EX_WITH_QP_NUM);
            assert!(!cq.is_null());
            let mut init = ibv_qp_init_attr_ex { pd, send_cq: cq.cast(), recv_cq: cq.cast(), ..Default::default() };
            init.qp_type = ibv_qp_type::IBV_QPT_RC;
            init.cap =
                ibv_qp_cap { max_send_wr: 8, max_recv_wr: 8, max_send_sge: 2, max_recv_sge: 1, max_inline_data: 64 };
            init.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
            init.send_ops_flags = u64::from(IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM | IBV_QP_EX_WITH_RDMA_READ);
            let qp = (extended(context).create_qp_ex.expect("an operation"))(context, &raw mut init);
            assert!(!qp.is_null());
            let mut memory = vec![0u8; 4 * BYTES];
            let access = ibv_access_flags::IBV_ACCESS_LOCAL_WRITE
                | ibv_access_flags::IBV_ACCESS_REMOTE_WRITE
                | ibv_access_flags::IBV_ACCESS_REMOTE_READ;
            let mr = ibv_reg_mr(pd, memory.as_mut_ptr().cast(), memory.len(), access.0 as c_int);
            assert!(!mr.is_null());
            let all = Loop { context, pd, cq, qp, mr, memory };
            all.connect(access);
            all
        }
    }

    fn connect(&self, access: ibv_access_flags) {
        use ibv_qp_attr_mask as M;
        // SAFETY: as in `new`.
        unsafe {
            let mut attr = ibv_qp_attr { port_num: 1, qp_access_flags: access.0, ..Default::default() };
            let go = |state, mask: M, attr: &mut ibv_qp_attr| {
                attr.qp_state = state;
                assert_eq!(ibv_modify_qp(self.qp, attr, (mask | M::IBV_QP_STATE).0 as c_int), 0);
            };
            let init = M::IBV_QP_PKEY_INDEX | M::IBV_QP_PORT | M::IBV_QP_ACCESS_FLAGS;
            go(ibv_qp_state::IBV_QPS_INIT, init, &mut attr);
            let mut gid = std::mem::zeroed();
            assert_eq!(ibv_query_gid(self.context, 1, 0, &raw mut gid), 0);
            attr.ah_attr = ibv_ah_attr { is_global: 1, port_num: 1, ..Default::default() };
            attr.ah_attr.grh.dgid = gid;
            (attr.path_mtu, attr.dest_qp_num) = (IBV_MTU_1024, (*self.qp).qp_num);
            (attr.max_dest_rd_atomic, attr.max_rd_atomic, attr.min_rnr_timer) = (1, 1, 12);
            let rtr = M::IBV_QP_AV | M::IBV_QP_PATH_MTU | M::IBV_QP_DEST_QPN | M::IBV_QP_RQ_PSN;
            let rtr = rtr | M::IBV_QP_MAX_DEST_RD_ATOMIC | M::IBV_QP_MIN_RNR_TIMER;
            go(ibv_qp_state::IBV_QPS_RTR, rtr, &mut attr);
            (attr.timeout, attr.retry_cnt, attr.rnr_retry) = (14, 7, 7);
            let rts = M::IBV_QP_TIMEOUT | M::IBV_QP_RETRY_CNT | M::IBV_QP_RNR_RETRY;
            let rts = rts | M::IBV_QP_SQ_PSN | M::IBV_QP_MAX_QP_RD_ATOMIC;
            go(ibv_qp_state::IBV_QPS_RTS, rts, &mut attr);
        }
    }

    fn at(&self, part: usize) -> u64 {
        self.memory.as_ptr() as u64 + (part * BYTES) as u64
    }

    /// Begins reading the next completion; it comes within seconds.
    fn next(&self) {
        let deadline = Instant::now() + Duration::from_secs(20);
        // SAFETY: as in `new`.
        unsafe {
            let mut attr = ibv_poll_cq_attr::default();
            while ((*self.cq).start_poll.expect("a call"))(self.cq, &raw mut attr) == libc::ENOENT {
                assert!(Instant::now() < deadline, "no completion");
            }
        }
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        // SAFETY: each object once, those that others use last.
        unsafe {
            // A test may have destroyed it.
            assert!(self.qp.is_null() || ibv_destroy_qp(self.qp) == 0);
            assert_eq!(ibv_dereg_mr(self.mr), 0);
            assert_eq!(ibv_destroy_cq(self.cq.cast()), 0);
            assert_eq!(ibv_dealloc_pd(self.pd), 0);
            assert_eq!(ibv_close_device(self.context), 0);
        }
    }
}

#[test]
fn requests_are_built_and_completions_read_field_by_field() {
    let mut all = Loop::new();
    all.memory[..BYTES].fill(7);
    // SAFETY: as in `Loop::new`.
    unsafe {
        let mut recv = ibv_recv_wr { wr_id: 30, ..Default::default() };
        let mut bad = null_mut();
        let post = (*all.context).ops.post_recv.expect("an operation");
        assert_eq!(post(all.qp, &raw mut recv, &raw mut bad), 0);

        let (lkey, rkey) = ((*all.mr).lkey, (*all.mr).rkey);
        let qp = ibv_qp_to_qp_ex(all.qp);
        let x = &mut *qp;
        (x.wr_start.expect("a call"))(qp);
        (x.wr_id, x.wr_flags) = (10, ibv_send_flags::IBV_SEND_SIGNALED.0);
        (x.wr_rdma_write_imm.expect("a call"))(qp, rkey, all.at(1), 0x0403_0201);
        let list = [
            ibv_sge { addr: all.at(0), length: 1000, lkey },
            ibv_sge { addr: all.at(0) + 1000, length: BYTES as u32 - 1000, lkey },
        ];
        (x.wr_set_sge_list.expect("a call"))(qp, 2, list.as_ptr());
        x.wr_id = 20;
        (x.wr_rdma_read.expect("a call"))(qp, rkey, all.at(1));
        (x.wr_set_sge.expect("a call"))(qp, lkey, all.at(2), BYTES as u32);
        assert_eq!((x.wr_complete.expect("a call"))(qp), 0);

        let mut seen = Vec::new();
        for _ in 0..3 {
            all.next();
            let cq = &*all.cq;
            assert_eq!(cq.status, ibv_wc_status::IBV_WC_SUCCESS);
            assert_eq!((cq.read_qp_num.expect("a call"))(all.cq), (*all.qp).qp_num);
            let imm = (cq.read_wc_flags.expect("a call"))(all.cq) & ibv_wc_flags::IBV_WC_WITH_IMM.0 != 0;
            seen.push((
                cq.wr_id,
                (cq.read_opcode.expect("a call"))(all.cq),
                imm.then(|| ((cq.read_imm_data.expect("a call"))(all.cq), (cq.read_byte_len.expect("a call"))(all.cq))),
            ));
            (cq.end_poll.expect("a call"))(all.cq);
        }
        seen.sort_unstable();
        let expected = [
            (10, ibv_wc_opcode::IBV_WC_RDMA_WRITE, None),
            (20, ibv_wc_opcode::IBV_WC_RDMA_READ, None),
            (30, ibv_wc_opcode::IBV_WC_RECV_RDMA_WITH_IMM, Some((0x0403_0201, BYTES as u32))),
        ];
        assert_eq!(seen, expected);
    }
    assert!(all.memory[..3 * BYTES].iter().all(|byte| *byte == 7), "written and read back");
    assert!(all.memory[3 * BYTES..].iter().all(|byte| *byte == 0));
}

/// A window of each type, bound by each call that binds, and taken back; its region stays for as long as it is bound.
#[test]
fn windows_open_a_part_of_a_region_until_they_are_taken_back() {
    let mut all = Loop::new();
    all.memory[..BYTES].fill(7);
    // SAFETY: as in `Loop::new`.
    unsafe {
        let ops = &(*all.context).ops;
        let (alloc, dealloc) = (ops.alloc_mw.expect("an operation"), ops.dealloc_mw.expect("an operation"));
        let access = (ibv_access_flags::IBV_ACCESS_LOCAL_WRITE | ibv_access_flags::IBV_ACCESS_MW_BIND).0 as c_int;
        let closed = ibv_reg_mr(all.pd, all.memory.as_mut_ptr().cast(), all.memory.len(), access);
        assert!(alloc(all.pd, 3).is_null());
        let windows = [alloc(all.pd, IBV_MW_TYPE_1), alloc(all.pd, IBV_MW_TYPE_2)];
        let part = |n| ibv_mw_bind_info {
            mr: closed,
            addr: all.at(n),
            length: BYTES as u64,
            mw_access_flags: ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0,
        };
        let signaled = ibv_send_flags::IBV_SEND_SIGNALED.0;
        let done = |opcode| {
            all.next();
            let cq = &*all.cq;
            let seen = (cq.status, (cq.read_opcode.expect("a call"))(all.cq));
            (cq.end_poll.expect("a call"))(all.cq);
            assert_eq!(seen.1, opcode);
            seen.0
        };
        let first = (*windows[0]).rkey;
        let mut how = ibv_mw_bind { wr_id: 1, send_flags: signaled, bind_info: part(1) };
        assert_eq!((ops.bind_mw.expect("an operation"))(all.qp, windows[0], &raw mut how), 0);
        assert_eq!(done(ibv_wc_opcode::IBV_WC_BIND_MW), ibv_wc_status::IBV_WC_SUCCESS);
        assert!((*windows[0]).rkey != first && (*windows[0]).rkey >> 8 == first >> 8);

        let x = ibv_qp_to_qp_ex(all.qp);
        let post = |build: &dyn Fn()| {
            ((*x).wr_start.expect("a call"))(x);
            (*x).wr_flags = signaled;
            build();
            assert_eq!(((*x).wr_complete.expect("a call"))(x), 0);
        };
        let second = (*windows[1]).rkey;
        post(&|| ((*x).wr_bind_mw.expect("a call"))(x, windows[1], second, &part(2)));
        assert_eq!(done(ibv_wc_opcode::IBV_WC_BIND_MW), ibv_wc_status::IBV_WC_SUCCESS);
        assert_eq!(ibv_dereg_mr(closed), libc::EBUSY);
        let write = |rkey, n| {
            post(&|| {
                ((*x).wr_rdma_write.expect("a call"))(x, rkey, all.at(n));
                ((*x).wr_set_sge.expect("a call"))(x, (*all.mr).lkey, all.at(0), BYTES as u32);
            });
            done(ibv_wc_opcode::IBV_WC_RDMA_WRITE)
        };
        assert_eq!(write((*windows[0]).rkey, 1), ibv_wc_status::IBV_WC_SUCCESS);
        assert_eq!(write(second, 2), ibv_wc_status::IBV_WC_SUCCESS);

        let mut wr =
            ibv_send_wr { opcode: ibv_wr_opcode::IBV_WR_LOCAL_INV, send_flags: signaled, ..Default::default() };
        wr.__bindgen_anon_1.invalidate_rkey = second;
        assert_eq!((ops.post_send.expect("an operation"))(all.qp, &raw mut wr, &mut null_mut()), 0);
        assert_eq!(done(ibv_wc_opcode::IBV_WC_LOCAL_INV), ibv_wc_status::IBV_WC_SUCCESS);
        std::ptr::write_bytes(all.at(2) as *mut u8, 0, 2 * BYTES);
        // Both ends are the same queue pair: its responder refuses, which ends its requester.
        assert_eq!(write(second, 2), ibv_wc_status::IBV_WC_WR_FLUSH_ERR);
        assert_eq!(windows.map(|window| dealloc(window)), [0, 0]);
        assert_eq!(ibv_dereg_mr(closed), 0);
    }
    assert!(all.memory[..2 * BYTES].iter().all(|byte| *byte == 7), "written by the first window");
    assert!(all.memory[2 * BYTES..].iter().all(|byte| *byte == 0), "an invalidated key opens nothing");
}

#[test]
fn what_is_not_there_is_refused_with_its_error() {
    let context = open();
    let errno = || std::io::Error::last_os_error().raw_os_error();
    // SAFETY: as in `Loop::new`.
    unsafe {
        assert!(cq_attr(context, IBV_WC_EX_WITH_COMPLETION_TIMESTAMP).is_null());
        assert_eq!(errno(), Some(libc::EOPNOTSUPP));
        let (pd, cq) = (ibv_alloc_pd(context), ibv_create_cq(context, 4, null_mut(), null_mut(), 0));
        let mut init = ibv_qp_init_attr_ex { pd, send_cq: cq, recv_cq: cq, ..Default::default() };
        init.qp_type = ibv_qp_type::IBV_QPT_UD;
        init.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
        init.send_ops_flags = u64::from(IBV_QP_EX_WITH_RDMA_READ);
        assert!((extended(context).create_qp_ex.expect("an operation"))(context, &raw mut init).is_null());
        assert_eq!(errno(), Some(libc::EOPNOTSUPP), "datagrams read nothing");

        let mut values = ibv_values_ex { comp_mask: IBV_VALUES_MASK_RAW_CLOCK, ..Default::default() };
        let query = extended(context).query_rt_values.expect("an operation");
        assert_eq!(query(context, &raw mut values), 0);
        assert!(values.raw_clock.tv_sec > 0 || values.raw_clock.tv_nsec > 0);
        values.comp_mask = 2;
        assert_eq!(query(context, &raw mut values), libc::EOPNOTSUPP);

        // A program of another age knows a longer structure, or a shorter one.
        let query = extended(context).query_device_ex.expect("an operation");
        let mut longer = [u8::MAX; 408];
        assert_eq!(query(context, std::ptr::null(), longer.as_mut_ptr().cast(), longer.len()), 0);
        assert_eq!(longer[400..], [0; 8]);
        let mut shorter = [u8::MAX; 240];
        assert_eq!(query(context, std::ptr::null(), shorter.as_mut_ptr().cast(), 232), 0);
        assert_eq!((&shorter[..232], &shorter[232..]), (&longer[..232], &[u8::MAX; 8][..]));

        assert_eq!((ibv_destroy_cq(cq), ibv_dealloc_pd(pd), ibv_close_device(context)), (0, 0, 0));
    }
}

/// The program's thread that got an event may look at its object until it acknowledges it: destroying waits for that.
#[test]
fn a_queue_pair_stays_until_its_event_is_acknowledged() {
    let mut all = Loop::new();
    // SAFETY: as in `Loop::new`.
    unsafe {
        let mut sge = ibv_sge { addr: all.at(0), length: 8, lkey: (*all.mr).lkey };
        let mut wr = ibv_send_wr { sg_list: &raw mut sge, num_sge: 1, ..Default::default() };
        wr.opcode = ibv_wr_opcode::IBV_WR_RDMA_WRITE;
        wr.wr.rdma.remote_addr = all.at(1);
        wr.wr.rdma.rkey = (*all.mr).rkey ^ 1;
        let post = (*all.context).ops.post_send.expect("an operation");
        assert_eq!(post(all.qp, &raw mut wr, &mut null_mut()), 0);
        let mut event = ibv_async_event { event_type: 0, ..std::mem::zeroed() };
        assert_eq!(ibv_get_async_event(all.context, &raw mut event), 0);
        assert_eq!((event.event_type, event.element.qp), (IBV_EVENT_QP_ACCESS_ERR, all.qp));

        let (qp, acknowledged) = (all.qp as usize, AtomicBool::new(false));
        std::thread::scope(|scope| {
            let destroys = scope.spawn(|| {
                assert_eq!(ibv_destroy_qp(std::ptr::with_exposed_provenance_mut(qp)), 0);
                assert!(acknowledged.load(Ordering::SeqCst), "it was destroyed under the program's hands");
            });
            assert_eq!((*event.element.qp).context, all.context);
            acknowledged.store(true, Ordering::SeqCst);
            ibv_ack_async_event(&raw mut event);
            destroys.join().expect("no panic");
        });
        all.qp = null_mut();
    }
}

/// A WRITE of one element, for `ibv_post_send`.
fn write_request(all: &Loop, sge: &mut ibv_sge) -> ibv_send_wr {
    // SAFETY: a live region.
    *sge = ibv_sge { addr: all.at(0), length: 8, lkey: unsafe { (*all.mr).lkey } };
    let mut wr = ibv_send_wr { sg_list: sge, num_sge: 1, ..Default::default() };
    (wr.opcode, wr.send_flags) = (ibv_wr_opcode::IBV_WR_RDMA_WRITE, ibv_send_flags::IBV_SEND_SIGNALED.0);
    // SAFETY: as above.
    (wr.wr.rdma.remote_addr, wr.wr.rdma.rkey) = (all.at(1), unsafe { (*all.mr).rkey });
    wr
}

/// Objects stay while another object uses them, in any order in which a program destroys them.
#[test]
fn what_is_in_use_is_not_destroyed() {
    // SAFETY: as in `Loop::new`.
    unsafe {
        let context = open();
        let channel = ibv_create_comp_channel(context);
        let cqs = [0, 1].map(|_| ibv_create_cq(context, 4, null_mut(), channel, 0));
        let pds = [0, 1].map(|_| ibv_alloc_pd(context));
        let mut memory = vec![0u8; 64];
        let local = ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0 as c_int;
        let mr = ibv_reg_mr(pds[0], memory.as_mut_ptr().cast(), memory.len(), local);
        let mut srq_attr =
            ibv_srq_init_attr { srq_context: null_mut(), attr: ibv_srq_attr { max_wr: 4, max_sge: 1, srq_limit: 0 } };
        let srq = ibv_create_srq(pds[0], &raw mut srq_attr);
        let mut ah_attr = ibv_ah_attr { is_global: 1, port_num: 1, ..Default::default() };
        assert_eq!(ibv_query_gid(context, 1, 0, &raw mut ah_attr.grh.dgid), 0);
        let ah = ibv_create_ah(pds[0], &raw mut ah_attr);
        let ops = &(*context).ops;
        let mw = (ops.alloc_mw.expect("an operation"))(pds[0], IBV_MW_TYPE_1);
        let mut init = ibv_qp_init_attr { send_cq: cqs[0], recv_cq: cqs[1], srq, ..Default::default() };
        init.qp_type = ibv_qp_type::IBV_QPT_RC;
        let qp = ibv_create_qp(pds[0], &raw mut init);
        assert!(![mr.is_null(), srq.is_null(), ah.is_null(), mw.is_null(), qp.is_null()].contains(&true));

        let busy = |channel_too: bool, cq: bool, srq_too: bool| {
            assert_eq!(ibv_dealloc_pd(pds[0]), libc::EBUSY);
            assert!(!channel_too || ibv_destroy_comp_channel(channel) == libc::EBUSY);
            assert!(!cq || cqs.map(|cq| ibv_destroy_cq(cq)) == [libc::EBUSY; 2]);
            assert!(!srq_too || ibv_destroy_srq(srq) == libc::EBUSY);
        };
        busy(true, true, true);
        assert_eq!(ibv_destroy_qp(qp), 0);
        busy(true, false, false);
        assert_eq!(ibv_destroy_cq(cqs[0]), 0);
        busy(true, false, false);
        assert_eq!((ibv_destroy_srq(srq), ibv_destroy_ah(ah)), (0, 0));
        busy(true, false, false);
        assert_eq!((ops.dealloc_mw.expect("an operation"))(mw), 0);
        busy(true, false, false);
        // The region goes over to the other domain.
        let moved = IBV_REREG_MR_CHANGE_PD as c_int;
        assert_eq!(ibv_rereg_mr(mr, moved, pds[1], null_mut(), 0, 0), 0);
        assert_eq!((ibv_dealloc_pd(pds[0]), ibv_dealloc_pd(pds[1])), (0, libc::EBUSY));
        assert_eq!((ibv_dereg_mr(mr), ibv_dealloc_pd(pds[1])), (0, 0));
        assert_eq!((ibv_destroy_cq(cqs[1]), ibv_destroy_comp_channel(channel)), (0, 0));
        assert_eq!(ibv_close_device(context), 0);
    }
}

/// A closed device's queue pairs are still; they and all else can be destroyed all the same.
#[test]
fn a_device_is_closed_before_its_objects() {
    let mut all = Loop::new();
    let mut sge = ibv_sge::default();
    let mut wr = write_request(&all, &mut sge);
    // SAFETY: as in `Loop::new`. The context stays, as it has objects.
    unsafe {
        let post = (*all.context).ops.post_send.expect("an operation");
        assert_eq!(ibv_close_device(all.context), 0);
        assert_eq!(post(all.qp, &raw mut wr, &mut null_mut()), libc::EINVAL);
        assert_eq!(((*all.cq).start_poll.expect("a call"))(all.cq, &mut ibv_poll_cq_attr::default()), libc::ENOENT);
        assert_eq!(ibv_destroy_qp(std::mem::replace(&mut all.qp, null_mut())), 0);
        assert_eq!((ibv_dereg_mr(all.mr), ibv_destroy_cq(all.cq.cast()), ibv_dealloc_pd(all.pd)), (0, 0, 0));
    }
    std::mem::forget(all);
}

#[test]
fn a_batch_with_a_refused_request_sends_nothing() {
    let all = Loop::new();
    // SAFETY: as in `Loop::new`.
    unsafe {
        let qp = ibv_qp_to_qp_ex(all.qp);
        let x = &mut *qp;
        let (lkey, rkey) = ((*all.mr).lkey, (*all.mr).rkey);
        let refuse: [&dyn Fn(); 4] = [
            // More elements than the queue was made for, and than any is.
            &|| (0..3).for_each(|_| ((*qp).wr_set_sge.expect("a call"))(qp, lkey, all.at(0), 8)),
            &|| ((*qp).wr_set_sge_list.expect("a call"))(qp, usize::MAX, std::ptr::dangling()),
            &|| ((*qp).wr_set_inline_data.expect("a call"))(qp, all.at(0) as *mut _, 65),
            &|| ((*qp).wr_set_ud_addr.expect("a call"))(qp, null_mut(), 0, 0),
        ];
        for (n, refuse) in refuse.into_iter().enumerate() {
            for at in 0..3 {
                (x.wr_start.expect("a call"))(qp);
                x.wr_flags = ibv_send_flags::IBV_SEND_SIGNALED.0;
                for i in 0..3 {
                    (x.wr_rdma_write.expect("a call"))(qp, rkey, all.at(1));
                    match i == at && n < 3 {
                        true => refuse(),
                        false => (x.wr_set_sge.expect("a call"))(qp, lkey, all.at(0), 8),
                    }
                }
                let done = (x.wr_complete.expect("a call"))(qp);
                assert_eq!(done != 0, n < 3, "{n} {at}: {done}");
                for _ in 0..if n < 3 { 0 } else { 3 } {
                    all.next();
                    assert_eq!((*all.cq).status, ibv_wc_status::IBV_WC_SUCCESS);
                }
                assert_eq!(((*all.cq).start_poll.expect("a call"))(all.cq, null_mut()), libc::ENOENT, "{n} {at}");
            }
        }
    }
}

#[test]
fn lists_and_lengths_that_are_none_are_refused() {
    let all = Loop::new();
    let mut sge = ibv_sge::default();
    let good = write_request(&all, &mut sge);
    // SAFETY: as in `Loop::new`.
    unsafe {
        let ops = &(*all.context).ops;
        let (send, recv) = (ops.post_send.expect("an operation"), ops.post_recv.expect("an operation"));
        let srq_recv = ops.post_srq_recv.expect("an operation");
        let attr = ibv_srq_attr { max_wr: 4, max_sge: 1, srq_limit: 0 };
        let srq = ibv_create_srq(all.pd, &mut ibv_srq_init_attr { srq_context: null_mut(), attr });
        for (num_sge, sg_list) in
            [(-1, good.sg_list), (c_int::MIN, good.sg_list), (c_int::MAX, good.sg_list), (1, null_mut())]
        {
            let mut wr = ibv_send_wr { num_sge, sg_list, ..good };
            let mut bad = null_mut();
            assert_eq!(send(all.qp, &raw mut wr, &raw mut bad), libc::EINVAL, "{num_sge}");
            assert_eq!(bad, &raw mut wr);
            // Behind one that is good.
            let mut first = ibv_send_wr { next: &raw mut wr, ..good };
            assert_eq!((send(all.qp, &raw mut first, &raw mut bad), bad), (libc::EINVAL, &raw mut wr));
            all.next();
            let mut wr = ibv_recv_wr { wr_id: 0, next: null_mut(), sg_list, num_sge };
            let mut bad = null_mut();
            assert_eq!((recv(all.qp, &raw mut wr, &raw mut bad), bad), (libc::EINVAL, &raw mut wr));
            let mut bad = null_mut();
            assert_eq!((srq_recv(srq, &raw mut wr, &raw mut bad), bad), (libc::EINVAL, &raw mut wr));
        }
        assert_eq!(ibv_destroy_srq(srq), 0);
        let mut device = ibv_device_attr::default();
        assert_eq!(ibv_query_device(all.context, &raw mut device), 0);
        for cqe in [-1, 0, device.max_cqe + 1, c_int::MAX] {
            assert_eq!(ibv_resize_cq(all.cq.cast(), cqe), libc::EINVAL, "{cqe}");
            assert!(ibv_create_cq(all.context, cqe, null_mut(), null_mut(), 0).is_null(), "{cqe}");
        }
        assert_eq!(ibv_resize_cq(all.cq.cast(), device.max_cqe), 0);
        assert_eq!((*all.cq).cqe, device.max_cqe);
    }
}

/// A completion queue overruns: its event, and the queue pair is in ERR.
#[test]
fn an_overrun_is_an_error_of_queue_and_queue_pair() {
    let all = Loop::new();
    let mut sge = ibv_sge::default();
    let mut wr = write_request(&all, &mut sge);
    // SAFETY: as in `Loop::new`.
    unsafe {
        let post = (*all.context).ops.post_send.expect("an operation");
        assert_eq!(ibv_resize_cq(all.cq.cast(), 4), 0);
        let deadline = Instant::now() + Duration::from_secs(20);
        let mut attr = ibv_qp_attr::default();
        for _ in 0..8 {
            while post(all.qp, &raw mut wr, &mut null_mut()) == libc::ENOMEM {
                assert!(Instant::now() < deadline);
            }
        }
        let mut told = Vec::new();
        for _ in 0..2 {
            let mut event = ibv_async_event { event_type: 0, ..std::mem::zeroed() };
            assert_eq!(ibv_get_async_event(all.context, &raw mut event), 0);
            told.push((event.event_type, event.element.qp));
            ibv_ack_async_event(&raw mut event);
        }
        assert_eq!(told, [(IBV_EVENT_CQ_ERR, all.cq.cast()), (IBV_EVENT_QP_FATAL, all.qp)]);
        assert_eq!(ibv_query_qp(all.qp, &raw mut attr, 0, null_mut()), 0);
        assert_eq!(attr.qp_state, ibv_qp_state::IBV_QPS_ERR);
    }
}

fn is_readable(fd: c_int) -> bool {
    let mut wait = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // SAFETY: one structure.
    unsafe { libc::poll(&raw mut wait, 1, 0) == 1 }
}

/// Events that no thread took go with the objects that they name; those that a program took keep them until it is done.
#[test]
fn events_go_with_their_objects() {
    let mut all = Loop::new();
    let mut sge = ibv_sge::default();
    let mut wr = write_request(&all, &mut sge);
    // SAFETY: as in `Loop::new`.
    unsafe {
        let channel = ibv_create_comp_channel(all.context);
        let cq = ibv_create_cq(all.context, 16, null_mut(), channel, 0);
        let mut init = ibv_qp_init_attr { send_cq: cq, recv_cq: cq, ..Default::default() };
        init.qp_type = ibv_qp_type::IBV_QPT_RC;
        let init = &raw mut init;
        let ops = &(*all.context).ops;
        let (notify, post) = (ops.req_notify_cq.expect("an operation"), ops.post_send.expect("an operation"));
        let mut make = |all: &mut Loop| {
            assert_eq!(ibv_destroy_qp(all.qp), 0);
            all.qp = ibv_create_qp(all.pd, init);
            all.connect(ibv_access_flags::IBV_ACCESS_REMOTE_WRITE);
            assert_eq!(notify(cq, 0), 0);
            // Both ends are the same queue pair: its responder refuses, which is an event, and ends its requester.
            wr.wr.rdma.rkey ^= 1;
            assert_eq!(post(all.qp, &raw mut wr, &mut null_mut()), 0);
            wr.wr.rdma.rkey ^= 1;
            let deadline = Instant::now() + Duration::from_secs(20);
            while !is_readable((*channel).fd) || !is_readable((*all.context).async_fd) {
                assert!(Instant::now() < deadline, "no event");
            }
        };
        make(&mut all);
        assert_eq!(ibv_destroy_qp(all.qp), 0);
        assert!(!is_readable((*all.context).async_fd), "of a queue pair that is gone");
        all.qp = ibv_create_qp(all.pd, init);
        make(&mut all);
        let (mut which, mut cookie) = (null_mut(), null_mut());
        assert_eq!(ibv_get_cq_event(channel, &raw mut which, &raw mut cookie), 0);
        assert_eq!(which, cq);
        make(&mut all);
        assert_eq!(ibv_destroy_qp(std::mem::replace(&mut all.qp, null_mut())), 0);
        // One event is the program's, another was not taken.
        let (address, acknowledged) = (cq as usize, AtomicBool::new(false));
        std::thread::scope(|scope| {
            let destroys = scope.spawn(|| {
                assert_eq!(ibv_destroy_cq(std::ptr::with_exposed_provenance_mut(address)), 0);
                assert!(acknowledged.load(Ordering::SeqCst), "it was destroyed under the program's hands");
            });
            assert_eq!((*which).context, all.context);
            acknowledged.store(true, Ordering::SeqCst);
            ibv_ack_cq_events(which, 1);
            destroys.join().expect("no panic");
        });
        assert!(!is_readable((*channel).fd), "of a queue that is gone");
        assert_eq!(ibv_destroy_comp_channel(channel), 0);
    }
}
