//! The symbols, with their versions.
//!
//! A symbol with a version is made by the assembler (`.symver`): a jump to the function, as the linker takes a version
//! for names of its own file alone. The versions are declared in `versions.map`. This needs lld, which Rust uses by
//! default on x86-64 Linux from 1.90 on; GNU ld does not take two version scripts, and rustc gives one already.

use std::arch::global_asm;

use softroce_verbs::*;

#[cfg(target_arch = "x86_64")]
macro_rules! jump {
    () => {
        "jmp {function}"
    };
}
#[cfg(target_arch = "aarch64")]
macro_rules! jump {
    () => {
        "b {function}"
    };
}

macro_rules! exports {
    ($($version:literal { $($name:literal = $function:path,)* })*) => {
        $($(global_asm!(
            ".pushsection .text",
            concat!(".globl tinyroce_", $name),
            concat!(".type tinyroce_", $name, ",@function"),
            concat!("tinyroce_", $name, ":"),
            jump!(),
            concat!(".symver tinyroce_", $name, ",", $name, "@@", $version),
            ".popsection",
            function = sym $function,
        );)*)*
    };
}

exports! {
    "IBVERBS_1.0" {
        "ibv_create_comp_channel" = ibv_create_comp_channel,
        "ibv_destroy_comp_channel" = ibv_destroy_comp_channel,
        "ibv_read_sysfs_file" = ibv_read_sysfs_file,
        "ibv_get_sysfs_path" = ibv_get_sysfs_path,
        "ibv_rate_to_mult" = ibv_rate_to_mult,
        "ibv_copy_path_rec_from_kern" = unsupported,
        "ibv_copy_qp_attr_from_kern" = unsupported,
    }
    "IBVERBS_1.1" {
        "ibv_get_device_list" = ibv_get_device_list,
        "ibv_free_device_list" = ibv_free_device_list,
        "ibv_get_device_name" = ibv_get_device_name,
        "ibv_get_device_guid" = ibv_get_device_guid,
        "ibv_open_device" = ibv_open_device,
        "ibv_close_device" = ibv_close_device,
        "ibv_query_device" = ibv_query_device,
        "ibv_query_port" = ibv_query_port,
        "ibv_query_gid" = ibv_query_gid,
        "ibv_query_pkey" = ibv_query_pkey,
        "ibv_get_async_event" = ibv_get_async_event,
        "ibv_ack_async_event" = ibv_ack_async_event,
        "ibv_fork_init" = ibv_fork_init,
        "ibv_alloc_pd" = ibv_alloc_pd,
        "ibv_dealloc_pd" = ibv_dealloc_pd,
        "ibv_reg_mr" = ibv_reg_mr,
        "ibv_dereg_mr" = ibv_dereg_mr,
        "ibv_create_cq" = ibv_create_cq,
        "ibv_resize_cq" = ibv_resize_cq,
        "ibv_destroy_cq" = ibv_destroy_cq,
        "ibv_get_cq_event" = ibv_get_cq_event,
        "ibv_ack_cq_events" = ibv_ack_cq_events,
        "ibv_create_srq" = ibv_create_srq,
        "ibv_modify_srq" = ibv_modify_srq,
        "ibv_query_srq" = ibv_query_srq,
        "ibv_destroy_srq" = ibv_destroy_srq,
        "ibv_create_qp" = ibv_create_qp,
        "ibv_modify_qp" = ibv_modify_qp,
        "ibv_query_qp" = ibv_query_qp,
        "ibv_destroy_qp" = ibv_destroy_qp,
        "ibv_create_ah" = ibv_create_ah,
        "ibv_destroy_ah" = ibv_destroy_ah,
        "ibv_init_ah_from_wc" = ibv_init_ah_from_wc,
        "ibv_create_ah_from_wc" = ibv_create_ah_from_wc,
        "ibv_wc_status_str" = ibv_wc_status_str,
        "ibv_event_type_str" = ibv_event_type_str,
        "ibv_node_type_str" = ibv_node_type_str,
        "ibv_port_state_str" = ibv_port_state_str,
        "ibv_rate_to_mbps" = ibv_rate_to_mbps,
        "ibv_attach_mcast" = unsupported,
        "ibv_detach_mcast" = unsupported,
        "ibv_rereg_mr" = unsupported,
        "ibv_resolve_eth_l2_from_gid" = unsupported,
        "ibv_dontfork_range" = nothing,
        "ibv_dofork_range" = nothing,
        "ibv_copy_ah_attr_from_kern" = unsupported,
    }
    "IBVERBS_1.5" {
        "ibv_get_pkey_index" = ibv_get_pkey_index,
    }
    "IBVERBS_1.6" {
        "ibv_qp_to_qp_ex" = ibv_qp_to_qp_ex,
    }
    "IBVERBS_1.7" {
        "ibv_reg_mr_iova" = ibv_reg_mr_iova,
    }
    "IBVERBS_1.8" {
        "ibv_reg_mr_iova2" = ibv_reg_mr_iova2,
    }
    "IBVERBS_1.9" {
        "ibv_get_device_index" = ibv_get_device_index,
    }
    "IBVERBS_1.10" {
        "ibv_query_ece" = ibv_query_ece,
        "ibv_set_ece" = ibv_set_ece,
        "ibv_import_device" = unsupported_object,
        "ibv_import_pd" = unsupported_object,
        "ibv_import_mr" = unsupported_object,
        "ibv_unimport_pd" = unsupported,
        "ibv_unimport_mr" = unsupported,
    }
    "IBVERBS_1.11" {
        "_ibv_query_gid_ex" = _ibv_query_gid_ex,
        "_ibv_query_gid_table" = _ibv_query_gid_table,
    }
    "IBVERBS_1.12" {
        "ibv_reg_dmabuf_mr" = ibv_reg_dmabuf_mr,
    }
    "IBVERBS_1.13" {
        "ibv_is_fork_initialized" = ibv_is_fork_initialized,
    }
    "IBVERBS_1.14" {
        "ibv_query_qp_data_in_order" = nothing,
    }
    "IBVERBS_1.16" {
        "ibv_query_port_speed" = ibv_query_port_speed,
    }
}

// Providers of real devices (libmlx5, libefa) and librdmacm are linked to these, and programs to them; with ours in
// front of the real library there are no such devices, so nothing is to be done.
exports! {
    "IBVERBS_PRIVATE_34" {
        "ibv_query_gid_type" = ibv_query_gid_type,
        "__verbs_log" = unsupported,
        "_verbs_init_and_alloc_context" = unsupported,
        "execute_ioctl" = unsupported,
        "ibv_cmd_advise_mr" = unsupported,
        "ibv_cmd_alloc_dm" = unsupported,
        "ibv_cmd_alloc_mw" = unsupported,
        "ibv_cmd_alloc_pd" = unsupported,
        "ibv_cmd_attach_mcast" = unsupported,
        "ibv_cmd_close_xrcd" = unsupported,
        "ibv_cmd_create_ah" = unsupported,
        "ibv_cmd_create_counters" = unsupported,
        "ibv_cmd_create_cq_ex" = unsupported,
        "ibv_cmd_create_flow" = unsupported,
        "ibv_cmd_create_flow_action_esp" = unsupported,
        "ibv_cmd_create_qp_ex" = unsupported,
        "ibv_cmd_create_qp_ex2" = unsupported,
        "ibv_cmd_create_rwq_ind_table" = unsupported,
        "ibv_cmd_create_srq" = unsupported,
        "ibv_cmd_create_srq_ex" = unsupported,
        "ibv_cmd_create_wq" = unsupported,
        "ibv_cmd_dealloc_mw" = unsupported,
        "ibv_cmd_dealloc_pd" = unsupported,
        "ibv_cmd_dereg_mr" = unsupported,
        "ibv_cmd_destroy_ah" = unsupported,
        "ibv_cmd_destroy_counters" = unsupported,
        "ibv_cmd_destroy_cq" = unsupported,
        "ibv_cmd_destroy_flow" = unsupported,
        "ibv_cmd_destroy_flow_action" = unsupported,
        "ibv_cmd_destroy_qp" = unsupported,
        "ibv_cmd_destroy_rwq_ind_table" = unsupported,
        "ibv_cmd_destroy_srq" = unsupported,
        "ibv_cmd_destroy_wq" = unsupported,
        "ibv_cmd_detach_mcast" = unsupported,
        "ibv_cmd_free_dm" = unsupported,
        "ibv_cmd_get_context" = unsupported,
        "ibv_cmd_modify_cq" = unsupported,
        "ibv_cmd_modify_flow_action_esp" = unsupported,
        "ibv_cmd_modify_qp" = unsupported,
        "ibv_cmd_modify_qp_ex" = unsupported,
        "ibv_cmd_modify_srq" = unsupported,
        "ibv_cmd_modify_wq" = unsupported,
        "ibv_cmd_open_qp" = unsupported,
        "ibv_cmd_open_xrcd" = unsupported,
        "ibv_cmd_query_context" = unsupported,
        "ibv_cmd_query_device_any" = unsupported,
        "ibv_cmd_query_mr" = unsupported,
        "ibv_cmd_query_port" = unsupported,
        "ibv_cmd_query_qp" = unsupported,
        "ibv_cmd_query_srq" = unsupported,
        "ibv_cmd_read_counters" = unsupported,
        "ibv_cmd_reg_dm_mr" = unsupported,
        "ibv_cmd_reg_dmabuf_mr" = unsupported,
        "ibv_cmd_reg_mr" = unsupported,
        "ibv_cmd_rereg_mr" = unsupported,
        "ibv_cmd_resize_cq" = unsupported,
        "verbs_allow_disassociate_destroy" = unsupported,
        "verbs_init_cq" = unsupported,
        "verbs_open_device" = unsupported,
        "verbs_register_driver_34" = unsupported,
        "verbs_set_ops" = unsupported,
        "verbs_uninit_context" = unsupported,
    }
}
