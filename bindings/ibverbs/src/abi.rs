//! Structures of libibverbs' interface, as `infiniband/verbs.h` of rdma-core lays them out.

use std::ffi::{c_char, c_int, c_uint, c_void};

use softroce::Sge;

pub(crate) type Function = Option<unsafe extern "C" fn()>;

#[repr(C)]
pub(crate) struct Device {
    pub(crate) ops: [Function; 2],
    pub(crate) node_type: c_int,
    pub(crate) transport_type: c_int,
    pub(crate) name: [c_char; 64],
    pub(crate) dev_name: [c_char; 64],
    pub(crate) dev_path: [c_char; 256],
    pub(crate) ibdev_path: [c_char; 256],
}

/// The table of a context that the inline functions of the header call.
#[repr(C)]
pub(crate) struct ContextOps {
    pub(crate) compat1: [Function; 7],
    pub(crate) alloc_mw: Function,
    pub(crate) bind_mw: Function,
    pub(crate) dealloc_mw: Function,
    pub(crate) compat2: Function,
    pub(crate) poll_cq: Option<unsafe extern "C" fn(*mut Cq, c_int, *mut Wc) -> c_int>,
    pub(crate) req_notify_cq: Option<unsafe extern "C" fn(*mut Cq, c_int) -> c_int>,
    pub(crate) compat3: [Function; 7],
    pub(crate) post_srq_recv: Option<unsafe extern "C" fn(*mut Srq, *mut RecvWr, *mut *mut RecvWr) -> c_int>,
    pub(crate) compat4: [Function; 4],
    pub(crate) post_send: Option<unsafe extern "C" fn(*mut Qp, *mut SendWr, *mut *mut SendWr) -> c_int>,
    pub(crate) post_recv: Option<unsafe extern "C" fn(*mut Qp, *mut RecvWr, *mut *mut RecvWr) -> c_int>,
    pub(crate) compat5: [Function; 5],
}

#[repr(C)]
pub(crate) struct Context {
    pub(crate) device: *mut Device,
    pub(crate) ops: ContextOps,
    pub(crate) cmd_fd: c_int,
    pub(crate) async_fd: c_int,
    pub(crate) num_comp_vectors: c_int,
    pub(crate) mutex: libc::pthread_mutex_t,
    pub(crate) abi_compat: *mut c_void,
}

/// Extended operations: they lie before the context, and the table grows to the front.
#[repr(C)]
pub(crate) struct VerbsContext {
    pub(crate) query_port: Option<unsafe extern "C" fn(*mut Context, u8, *mut PortAttr, usize) -> c_int>,
    /// From `advise_mr` to `query_rt_values`: not there.
    pub(crate) before: [Function; 24],
    pub(crate) create_cq_ex: Function,
    pub(crate) private: *mut c_void,
    pub(crate) query_device_ex:
        Option<unsafe extern "C" fn(*mut Context, *const c_void, *mut DeviceAttrEx, usize) -> c_int>,
    /// Flows and placeholders: not there.
    pub(crate) flows: [Function; 4],
    pub(crate) open_qp: Function,
    pub(crate) create_qp_ex: Option<unsafe extern "C" fn(*mut Context, *mut QpInitAttrEx) -> *mut Qp>,
    pub(crate) get_srq_num: Function,
    pub(crate) create_srq_ex: Option<unsafe extern "C" fn(*mut Context, *mut SrqInitAttrEx) -> *mut Srq>,
    pub(crate) open_xrcd: Function,
    pub(crate) close_xrcd: Function,
    pub(crate) placeholder: u64,
    pub(crate) size: usize,
    pub(crate) context: Context,
}

#[repr(C)]
pub(crate) struct DeviceAttr {
    pub(crate) fw_ver: [c_char; 64],
    pub(crate) node_guid: [u8; 8],
    pub(crate) sys_image_guid: [u8; 8],
    pub(crate) max_mr_size: u64,
    pub(crate) page_size_cap: u64,
    pub(crate) vendor_id: u32,
    pub(crate) vendor_part_id: u32,
    pub(crate) hw_ver: u32,
    pub(crate) max_qp: c_int,
    pub(crate) max_qp_wr: c_int,
    pub(crate) device_cap_flags: c_uint,
    pub(crate) max_sge: c_int,
    pub(crate) max_sge_rd: c_int,
    pub(crate) max_cq: c_int,
    pub(crate) max_cqe: c_int,
    pub(crate) max_mr: c_int,
    pub(crate) max_pd: c_int,
    pub(crate) max_qp_rd_atom: c_int,
    pub(crate) max_ee_rd_atom: c_int,
    pub(crate) max_res_rd_atom: c_int,
    pub(crate) max_qp_init_rd_atom: c_int,
    pub(crate) max_ee_init_rd_atom: c_int,
    pub(crate) atomic_cap: c_int,
    pub(crate) unused: [c_int; 8],
    pub(crate) max_ah: c_int,
    pub(crate) max_fmr: c_int,
    pub(crate) max_map_per_fmr: c_int,
    pub(crate) max_srq: c_int,
    pub(crate) max_srq_wr: c_int,
    pub(crate) max_srq_sge: c_int,
    pub(crate) max_pkeys: u16,
    pub(crate) local_ca_ack_delay: u8,
    pub(crate) phys_port_cnt: u8,
}

/// The part of the extended attributes that has something; what follows is cleared.
#[repr(C)]
pub(crate) struct DeviceAttrEx {
    pub(crate) orig: DeviceAttr,
    pub(crate) comp_mask: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct PortAttr {
    pub(crate) state: c_int,
    pub(crate) max_mtu: c_int,
    pub(crate) active_mtu: c_int,
    pub(crate) gid_tbl_len: c_int,
    pub(crate) port_cap_flags: u32,
    pub(crate) max_msg_sz: u32,
    pub(crate) bad_pkey_cntr: u32,
    pub(crate) qkey_viol_cntr: u32,
    pub(crate) pkey_tbl_len: u16,
    pub(crate) lid: u16,
    pub(crate) sm_lid: u16,
    pub(crate) lmc: u8,
    pub(crate) max_vl_num: u8,
    pub(crate) sm_sl: u8,
    pub(crate) subnet_timeout: u8,
    pub(crate) init_type_reply: u8,
    pub(crate) active_width: u8,
    pub(crate) active_speed: u8,
    pub(crate) phys_state: u8,
    pub(crate) link_layer: u8,
    pub(crate) flags: u8,
    pub(crate) port_cap_flags2: u16,
}

#[repr(C)]
pub(crate) struct Pd {
    pub(crate) context: *mut Context,
    pub(crate) handle: u32,
}

#[repr(C)]
pub(crate) struct Mr {
    pub(crate) context: *mut Context,
    pub(crate) pd: *mut Pd,
    pub(crate) addr: *mut c_void,
    pub(crate) length: usize,
    pub(crate) handle: u32,
    pub(crate) lkey: u32,
    pub(crate) rkey: u32,
}

#[repr(C)]
pub(crate) struct CompChannel {
    pub(crate) context: *mut Context,
    pub(crate) fd: c_int,
    pub(crate) refcnt: c_int,
}

#[repr(C)]
pub(crate) struct Cq {
    pub(crate) context: *mut Context,
    pub(crate) channel: *mut CompChannel,
    pub(crate) cq_context: *mut c_void,
    pub(crate) handle: u32,
    pub(crate) cqe: c_int,
    pub(crate) mutex: libc::pthread_mutex_t,
    pub(crate) cond: libc::pthread_cond_t,
    pub(crate) comp_events_completed: u32,
    pub(crate) async_events_completed: u32,
}

#[repr(C)]
pub(crate) struct Srq {
    pub(crate) context: *mut Context,
    pub(crate) srq_context: *mut c_void,
    pub(crate) pd: *mut Pd,
    pub(crate) handle: u32,
    pub(crate) mutex: libc::pthread_mutex_t,
    pub(crate) cond: libc::pthread_cond_t,
    pub(crate) events_completed: u32,
}

#[repr(C)]
pub(crate) struct Qp {
    pub(crate) context: *mut Context,
    pub(crate) qp_context: *mut c_void,
    pub(crate) pd: *mut Pd,
    pub(crate) send_cq: *mut Cq,
    pub(crate) recv_cq: *mut Cq,
    pub(crate) srq: *mut Srq,
    pub(crate) handle: u32,
    pub(crate) qp_num: u32,
    pub(crate) state: c_int,
    pub(crate) qp_type: c_int,
    pub(crate) mutex: libc::pthread_mutex_t,
    pub(crate) cond: libc::pthread_cond_t,
    pub(crate) events_completed: u32,
}

/// A queue pair with the calls that build requests (`ibv_wr_*`).
#[repr(C)]
pub(crate) struct QpEx {
    pub(crate) base: Qp,
    pub(crate) comp_mask: u64,
    pub(crate) wr_id: u64,
    pub(crate) wr_flags: c_uint,
    pub(crate) cmp_swp: unsafe extern "C" fn(*mut QpEx, u32, u64, u64, u64),
    pub(crate) fetch_add: unsafe extern "C" fn(*mut QpEx, u32, u64, u64),
    pub(crate) bind_mw: Function,
    pub(crate) local_inv: Function,
    pub(crate) rdma_read: unsafe extern "C" fn(*mut QpEx, u32, u64),
    pub(crate) rdma_write: unsafe extern "C" fn(*mut QpEx, u32, u64),
    pub(crate) rdma_write_imm: unsafe extern "C" fn(*mut QpEx, u32, u64, u32),
    pub(crate) send: unsafe extern "C" fn(*mut QpEx),
    pub(crate) send_imm: unsafe extern "C" fn(*mut QpEx, u32),
    pub(crate) send_inv: unsafe extern "C" fn(*mut QpEx, u32),
    pub(crate) send_tso: Function,
    pub(crate) set_ud_addr: unsafe extern "C" fn(*mut QpEx, *mut Ah, u32, u32),
    pub(crate) set_xrc_srqn: Function,
    pub(crate) set_inline_data: unsafe extern "C" fn(*mut QpEx, *mut c_void, usize),
    pub(crate) set_inline_data_list: unsafe extern "C" fn(*mut QpEx, usize, *const DataBuf),
    pub(crate) set_sge: unsafe extern "C" fn(*mut QpEx, u32, u64, u32),
    pub(crate) set_sge_list: unsafe extern "C" fn(*mut QpEx, usize, *const Sge),
    pub(crate) start: unsafe extern "C" fn(*mut QpEx),
    pub(crate) complete: unsafe extern "C" fn(*mut QpEx) -> c_int,
    pub(crate) abort: unsafe extern "C" fn(*mut QpEx),
    pub(crate) atomic_write: Function,
}

#[repr(C)]
pub(crate) struct DataBuf {
    pub(crate) addr: *mut c_void,
    pub(crate) length: usize,
}

#[repr(C)]
pub(crate) struct Ah {
    pub(crate) context: *mut Context,
    pub(crate) pd: *mut Pd,
    pub(crate) handle: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Wc {
    pub(crate) wr_id: u64,
    pub(crate) status: c_int,
    pub(crate) opcode: c_int,
    pub(crate) vendor_err: u32,
    pub(crate) byte_len: u32,
    /// Immediate data in network byte order, or the invalidated key.
    pub(crate) imm_data: u32,
    pub(crate) qp_num: u32,
    pub(crate) src_qp: u32,
    pub(crate) wc_flags: c_uint,
    pub(crate) pkey_index: u16,
    pub(crate) slid: u16,
    pub(crate) sl: u8,
    pub(crate) dlid_path_bits: u8,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct GlobalRoute {
    pub(crate) dgid: [u64; 2],
    pub(crate) flow_label: u32,
    pub(crate) sgid_index: u8,
    pub(crate) hop_limit: u8,
    pub(crate) traffic_class: u8,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct AhAttr {
    pub(crate) grh: GlobalRoute,
    pub(crate) dlid: u16,
    pub(crate) sl: u8,
    pub(crate) src_path_bits: u8,
    pub(crate) static_rate: u8,
    pub(crate) is_global: u8,
    pub(crate) port_num: u8,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct QpCap {
    pub(crate) max_send_wr: u32,
    pub(crate) max_recv_wr: u32,
    pub(crate) max_send_sge: u32,
    pub(crate) max_recv_sge: u32,
    pub(crate) max_inline_data: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct QpInitAttr {
    pub(crate) qp_context: *mut c_void,
    pub(crate) send_cq: *mut Cq,
    pub(crate) recv_cq: *mut Cq,
    pub(crate) srq: *mut Srq,
    pub(crate) cap: QpCap,
    pub(crate) qp_type: c_int,
    pub(crate) sq_sig_all: c_int,
}

/// The extended form, as far as it is read.
#[repr(C)]
pub(crate) struct QpInitAttrEx {
    pub(crate) base: QpInitAttr,
    pub(crate) comp_mask: u32,
    pub(crate) pd: *mut Pd,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct QpAttr {
    pub(crate) qp_state: c_int,
    pub(crate) cur_qp_state: c_int,
    pub(crate) path_mtu: c_int,
    pub(crate) path_mig_state: c_int,
    pub(crate) qkey: u32,
    pub(crate) rq_psn: u32,
    pub(crate) sq_psn: u32,
    pub(crate) dest_qp_num: u32,
    pub(crate) qp_access_flags: c_uint,
    pub(crate) cap: QpCap,
    pub(crate) ah_attr: AhAttr,
    pub(crate) alt_ah_attr: AhAttr,
    pub(crate) pkey_index: u16,
    pub(crate) alt_pkey_index: u16,
    pub(crate) en_sqd_async_notify: u8,
    pub(crate) sq_draining: u8,
    pub(crate) max_rd_atomic: u8,
    pub(crate) max_dest_rd_atomic: u8,
    pub(crate) min_rnr_timer: u8,
    pub(crate) port_num: u8,
    pub(crate) timeout: u8,
    pub(crate) retry_cnt: u8,
    pub(crate) rnr_retry: u8,
    pub(crate) alt_port_num: u8,
    pub(crate) alt_timeout: u8,
    pub(crate) rate_limit: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Rdma {
    pub(crate) remote_addr: u64,
    pub(crate) rkey: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Atomic {
    pub(crate) remote_addr: u64,
    pub(crate) compare_add: u64,
    pub(crate) swap: u64,
    pub(crate) rkey: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Ud {
    pub(crate) ah: *mut Ah,
    pub(crate) remote_qpn: u32,
    pub(crate) remote_qkey: u32,
}

#[repr(C)]
pub(crate) union Where {
    pub(crate) rdma: Rdma,
    pub(crate) atomic: Atomic,
    pub(crate) ud: Ud,
}

#[repr(C)]
pub(crate) struct SendWr {
    pub(crate) wr_id: u64,
    pub(crate) next: *mut SendWr,
    pub(crate) sg_list: *mut Sge,
    pub(crate) num_sge: c_int,
    pub(crate) opcode: c_int,
    pub(crate) send_flags: c_uint,
    pub(crate) imm_data: u32,
    pub(crate) wr: Where,
    pub(crate) remote_srqn: u32,
    pub(crate) rest: [u64; 6],
}

#[repr(C)]
pub(crate) struct RecvWr {
    pub(crate) wr_id: u64,
    pub(crate) next: *mut RecvWr,
    pub(crate) sg_list: *mut Sge,
    pub(crate) num_sge: c_int,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct SrqAttr {
    pub(crate) max_wr: u32,
    pub(crate) max_sge: u32,
    pub(crate) srq_limit: u32,
}

#[repr(C)]
pub(crate) struct SrqInitAttr {
    pub(crate) srq_context: *mut c_void,
    pub(crate) attr: SrqAttr,
}

/// The extended form, as far as it is read.
#[repr(C)]
pub(crate) struct SrqInitAttrEx {
    pub(crate) srq_context: *mut c_void,
    pub(crate) attr: SrqAttr,
    pub(crate) comp_mask: u32,
    pub(crate) srq_type: c_int,
    pub(crate) pd: *mut Pd,
}

#[repr(C)]
pub(crate) struct AsyncEvent {
    pub(crate) element: u64,
    pub(crate) event_type: c_int,
}

#[repr(C)]
pub(crate) struct GidEntry {
    pub(crate) gid: [u64; 2],
    pub(crate) gid_index: u32,
    pub(crate) port_num: u32,
    pub(crate) gid_type: u32,
    pub(crate) ndev_ifindex: u32,
}

// Sizes on 64-bit Linux, as a C compiler has them.
#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
const _: () = {
    assert!(size_of::<Device>() == 664);
    assert!(size_of::<ContextOps>() == 256);
    assert!(size_of::<Context>() == 328);
    assert!(size_of::<VerbsContext>() == 648);
    assert!(size_of::<DeviceAttr>() == 232);
    assert!(size_of::<PortAttr>() == 52);
    assert!(size_of::<Mr>() == 48);
    assert!(size_of::<Cq>() == 128);
    assert!(size_of::<Srq>() == 128);
    assert!(size_of::<Qp>() == 160);
    assert!(size_of::<QpEx>() == 352);
    assert!(size_of::<Wc>() == 48);
    assert!(size_of::<AhAttr>() == 32);
    assert!(size_of::<QpInitAttr>() == 64);
    assert!(size_of::<QpAttr>() == 144);
    assert!(size_of::<SendWr>() == 128);
    assert!(size_of::<RecvWr>() == 32);
    assert!(size_of::<AsyncEvent>() == 16);
    assert!(size_of::<GidEntry>() == 32);
};
