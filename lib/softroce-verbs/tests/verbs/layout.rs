//! This crate beside verbs.h as ibverbs-sys (bindgen) has it: a structure or a number that differs fails here.

#![allow(non_snake_case, reason = "tests have the names of what they compare")]

use std::mem::offset_of;
use std::process::{Command, Stdio};

use ibverbs_sys as theirs;
use softroce_verbs as ours;

/// Bytes of a field.
fn field_size<T, F>(_: fn(*const T) -> *const F) -> usize {
    size_of::<F>()
}

/// Sizes and the named fields.
macro_rules! compare {
    ($name:ident { $($field:ident)* }) => {
        assert_eq!(size_of::<ours::$name>(), size_of::<theirs::$name>(), "size");
        assert_eq!(align_of::<ours::$name>(), align_of::<theirs::$name>(), "alignment");
        $(
            let name = stringify!($field);
            assert_eq!(offset_of!(ours::$name, $field), offset_of!(theirs::$name, $field), "offset of {name}");
            // SAFETY: nothing is read.
            let own = field_size(|of: *const ours::$name| unsafe { &raw const (*of).$field });
            // SAFETY: as above.
            let other = field_size(|of: *const theirs::$name| unsafe { &raw const (*of).$field });
            assert_eq!(own, other, "size of {name}");
        )*
    };
}

/// A test for each structure. Each lists all fields of both, or it does not compile.
macro_rules! structures {
    ($($name:ident { $($field:ident)* })*) => {$(
        #[test]
        fn $name() {
            compare!($name { $($field)* });
            let _ = |of: ours::$name| { let ours::$name { $($field: _),* } = of; };
            let _ = |of: theirs::$name| { let theirs::$name { $($field: _),* } = of; };
        }
    )*};
}

/// A test for each structure of which some fields have no name that both know: the named fields alone.
macro_rules! parts {
    ($($name:ident { $($field:ident)* })*) => {$(
        #[test]
        fn $name() {
            compare!($name { $($field)* });
        }
    )*};
}

structures! {
    ibv_device { _ops node_type transport_type name dev_name dev_path ibdev_path }
    ibv_context { device ops cmd_fd async_fd num_comp_vectors mutex abi_compat }
    ibv_device_attr {
        fw_ver node_guid sys_image_guid max_mr_size page_size_cap vendor_id vendor_part_id hw_ver max_qp max_qp_wr
        device_cap_flags max_sge max_sge_rd max_cq max_cqe max_mr max_pd max_qp_rd_atom max_ee_rd_atom max_res_rd_atom
        max_qp_init_rd_atom max_ee_init_rd_atom atomic_cap max_ee max_rdd max_mw max_raw_ipv6_qp max_raw_ethy_qp
        max_mcast_grp max_mcast_qp_attach max_total_mcast_qp_attach max_ah max_fmr max_map_per_fmr max_srq max_srq_wr
        max_srq_sge max_pkeys local_ca_ack_delay phys_port_cnt
    }
    ibv_port_attr {
        state max_mtu active_mtu gid_tbl_len port_cap_flags max_msg_sz bad_pkey_cntr qkey_viol_cntr pkey_tbl_len lid
        sm_lid lmc max_vl_num sm_sl subnet_timeout init_type_reply active_width active_speed phys_state link_layer flags
        port_cap_flags2 active_speed_ex
    }
    ibv_gid__bindgen_ty_1 { subnet_prefix interface_id }
    ibv_sge { addr length lkey }
    ibv_pd { context handle }
    ibv_mr { context pd addr length handle lkey rkey }
    ibv_mw { context pd rkey handle type_ }
    ibv_mw_bind_info { mr addr length mw_access_flags }
    ibv_mw_bind { wr_id send_flags bind_info }
    ibv_comp_channel { context fd refcnt }
    ibv_cq { context channel cq_context handle cqe mutex cond comp_events_completed async_events_completed }
    ibv_srq { context srq_context pd handle mutex cond events_completed }
    ibv_qp { context qp_context pd send_cq recv_cq srq handle qp_num state qp_type mutex cond events_completed }
    ibv_data_buf { addr length }
    ibv_ah { context pd handle }
    ibv_global_route { dgid flow_label sgid_index hop_limit traffic_class }
    ibv_ah_attr { grh dlid sl src_path_bits static_rate is_global port_num }
    ibv_qp_cap { max_send_wr max_recv_wr max_send_sge max_recv_sge max_inline_data }
    ibv_qp_init_attr { qp_context send_cq recv_cq srq cap qp_type sq_sig_all }
    ibv_qp_attr {
        qp_state cur_qp_state path_mtu path_mig_state qkey rq_psn sq_psn dest_qp_num qp_access_flags cap ah_attr
        alt_ah_attr pkey_index alt_pkey_index en_sqd_async_notify sq_draining max_rd_atomic max_dest_rd_atomic
        min_rnr_timer port_num timeout retry_cnt rnr_retry alt_port_num alt_timeout rate_limit
    }
    ibv_send_wr__bindgen_ty_2__bindgen_ty_1 { remote_addr rkey }
    ibv_send_wr__bindgen_ty_2__bindgen_ty_2 { remote_addr compare_add swap rkey }
    ibv_send_wr__bindgen_ty_2__bindgen_ty_3 { ah remote_qpn remote_qkey }
    ibv_send_wr__bindgen_ty_4__bindgen_ty_1 { mw rkey bind_info }
    ibv_send_wr { wr_id next sg_list num_sge opcode send_flags __bindgen_anon_1 wr qp_type __bindgen_anon_2 }
    ibv_recv_wr { wr_id next sg_list num_sge }
    ibv_srq_attr { max_wr max_sge srq_limit }
    ibv_srq_init_attr { srq_context attr }
    ibv_async_event { element event_type }
    ibv_odp_caps { general_caps per_transport_caps }
    ibv_tso_caps { max_tso supported_qpts }
    ibv_rss_caps {
        supported_qpts max_rwq_indirection_tables max_rwq_indirection_table_size rx_hash_fields_mask rx_hash_function
    }
    ibv_packet_pacing_caps { qp_rate_limit_min qp_rate_limit_max supported_qpts }
    ibv_tm_caps { max_rndv_hdr_size max_num_tags flags max_ops max_sge }
    ibv_cq_moderation_caps { max_cq_count max_cq_period }
    ibv_pci_atomic_caps { fetch_add swap compare_swap }
    ibv_device_attr_ex {
        orig_attr comp_mask odp_caps completion_timestamp_mask hca_core_clock device_cap_flags_ex tso_caps rss_caps
        max_wq_type_rq packet_pacing_caps raw_packet_caps tm_caps cq_mod_caps max_dm_size pci_atomic_caps xrc_odp_caps
        phys_port_cnt_ex
    }
    ibv_values_ex { comp_mask raw_clock }
    ibv_rx_hash_conf { rx_hash_function rx_hash_key_len rx_hash_key rx_hash_fields_mask }
    ibv_qp_init_attr_ex {
        qp_context send_cq recv_cq srq cap qp_type sq_sig_all comp_mask pd xrcd create_flags max_tso_header rwq_ind_tbl
        rx_hash_conf source_qpn send_ops_flags
    }
    ibv_tm_cap { max_num_tags max_ops }
    ibv_srq_init_attr_ex { srq_context attr comp_mask srq_type pd xrcd cq tm_cap }
    ibv_cq_init_attr_ex { cqe cq_context channel comp_vector wc_flags comp_mask flags parent_domain }
    ibv_poll_cq_attr { comp_mask }
    ibv_wc_tm_info { tag priv_ }
    ibv_cq_ex {
        context channel cq_context handle cqe mutex cond comp_events_completed async_events_completed comp_mask status
        wr_id start_poll next_poll end_poll read_opcode read_vendor_err read_byte_len read_imm_data read_qp_num
        read_src_qp read_wc_flags read_slid read_sl read_dlid_path_bits read_completion_ts read_cvlan read_flow_tag
        read_tm_info read_completion_wallclock_ns
    }
    ibv_ece { vendor_id options comp_mask }
    ibv_gid_entry { gid gid_index port_num gid_type ndev_ifindex }
    ibv_qp_ex {
        qp_base comp_mask wr_id wr_flags wr_atomic_cmp_swp wr_atomic_fetch_add wr_bind_mw wr_local_inv wr_rdma_read
        wr_rdma_write wr_rdma_write_imm wr_send wr_send_imm wr_send_inv wr_send_tso wr_set_ud_addr wr_set_xrc_srqn
        wr_set_inline_data wr_set_inline_data_list wr_set_sge wr_set_sge_list wr_start wr_complete wr_abort
        wr_atomic_write wr_flush
    }
}

parts! {
    ibv_wc { imm_data qp_num src_qp wc_flags pkey_index slid sl dlid_path_bits }
    ibv_gid { raw global }
    ibv_send_wr__bindgen_ty_1 { imm_data invalidate_rkey }
    ibv_send_wr__bindgen_ty_2 { rdma atomic ud }
    ibv_send_wr__bindgen_ty_4 { bind_mw }
    ibv_async_event__bindgen_ty_1 { cq qp srq port_num }
    ibv_context_ops { alloc_mw bind_mw dealloc_mw poll_cq req_notify_cq post_srq_recv post_send post_recv }
}

macro_rules! modules {
    ($($name:ident { $($constant:ident = $value:literal,)* })*) => {$(
        #[test]
        fn $name() {
            $(assert_eq!($value, theirs::$name::$constant, stringify!($constant));)*
        }
    )*};
}

macro_rules! numbers {
    ($($name:ident { $($constant:ident = $value:literal,)* })*) => {$(
        #[test]
        fn $name() {
            $(assert_eq!($value, theirs::$constant, stringify!($constant));)*
        }
    )*};
}

macro_rules! bits {
    ($($name:ident { $($constant:ident = $bit:literal,)* })*) => {$(
        #[test]
        fn $name() {
            $(assert_eq!(1 << $bit, theirs::$name::$constant.0, stringify!($constant));)*
        }
    )*};
}

include!("../../src/numbers.rs");

/// `verbs_context`, which bindgen's list leaves out: a C compiler with the system's header agrees.
#[test]
fn verbs_context() {
    macro_rules! fields {
        ($($field:ident = $theirs:literal)*) => {
            [$((concat!("offsetof(struct verbs_context, ", $theirs, ")"), offset_of!(ours::verbs_context, $field)),)*]
        };
    }
    let offsets = fields! {
        query_port = "query_port" before = "advise_mr" query_rt_values = "query_rt_values" create_cq_ex = "create_cq_ex"
        private = "priv" query_device_ex = "query_device_ex" flows = "ibv_destroy_flow" open_qp = "open_qp"
        create_qp_ex = "create_qp_ex" get_srq_num = "get_srq_num" create_srq_ex = "create_srq_ex"
        open_xrcd = "open_xrcd" close_xrcd = "close_xrcd" size = "sz" context = "context"
    };
    let mut source = String::from("#include <stddef.h>\n#include <infiniband/verbs.h>\n");
    let size = ("sizeof(struct verbs_context)", size_of::<ours::verbs_context>());
    for (expression, value) in offsets.into_iter().chain([size]) {
        source += &format!("_Static_assert({expression} == {value}, \"{expression} is not {value}\");\n");
    }
    let file = std::env::temp_dir().join(format!("softroce-layout-{}.c", std::process::id()));
    std::fs::write(&file, source).expect("written");
    let output = Command::new("cc").args(["-fsyntax-only", "-x", "c"]).arg(&file).stdin(Stdio::null()).output();
    std::fs::remove_file(&file).expect("removed");
    let output = output.expect("a C compiler, as the feature asks for");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
