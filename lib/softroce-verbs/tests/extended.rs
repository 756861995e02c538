//! The extended interface on the loopback device: requests built call by call, completions read field by field.

use std::ffi::c_int;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use softroce_verbs::*;

/// What two requests of one kind bring.
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
