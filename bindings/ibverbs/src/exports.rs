//! The symbols, with their versions.
//!
//! A symbol with a version is made by the assembler (`.symver`): a jump to the function, as the linker takes a version
//! for names of its own file alone. The versions are declared in `versions.map`. This needs lld, which Rust uses by
//! default on x86-64 Linux from 1.90 on; GNU ld does not take two version scripts, and rustc gives one already.

use std::arch::global_asm;

use crate::{ah, context, cq, device, memory, names, qp, srq};

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
        "ibv_create_comp_channel" = cq::create_comp_channel,
        "ibv_destroy_comp_channel" = cq::destroy_comp_channel,
        "ibv_read_sysfs_file" = names::read_sysfs_file,
        "ibv_get_sysfs_path" = names::get_sysfs_path,
        "ibv_rate_to_mult" = names::rate_to_mult,
        "ibv_copy_path_rec_from_kern" = names::unsupported,
        "ibv_copy_qp_attr_from_kern" = names::unsupported,
    }
    "IBVERBS_1.1" {
        "ibv_get_device_list" = device::get_device_list,
        "ibv_free_device_list" = device::free_device_list,
        "ibv_get_device_name" = device::get_device_name,
        "ibv_get_device_guid" = device::get_device_guid,
        "ibv_open_device" = context::open_device,
        "ibv_close_device" = context::close_device,
        "ibv_query_device" = context::query_device,
        "ibv_query_port" = context::query_port,
        "ibv_query_gid" = context::query_gid,
        "ibv_query_pkey" = context::query_pkey,
        "ibv_get_async_event" = context::get_async_event,
        "ibv_ack_async_event" = context::ack_async_event,
        "ibv_fork_init" = context::fork_init,
        "ibv_alloc_pd" = memory::alloc_pd,
        "ibv_dealloc_pd" = memory::dealloc_pd,
        "ibv_reg_mr" = memory::reg_mr,
        "ibv_dereg_mr" = memory::dereg_mr,
        "ibv_create_cq" = cq::create_cq,
        "ibv_resize_cq" = cq::resize_cq,
        "ibv_destroy_cq" = cq::destroy_cq,
        "ibv_get_cq_event" = cq::get_cq_event,
        "ibv_ack_cq_events" = cq::ack_cq_events,
        "ibv_create_srq" = srq::create,
        "ibv_modify_srq" = srq::modify,
        "ibv_query_srq" = srq::query,
        "ibv_destroy_srq" = srq::destroy,
        "ibv_create_qp" = qp::create,
        "ibv_modify_qp" = qp::modify,
        "ibv_query_qp" = qp::query,
        "ibv_destroy_qp" = qp::destroy,
        "ibv_create_ah" = ah::create_ah,
        "ibv_destroy_ah" = ah::destroy_ah,
        "ibv_init_ah_from_wc" = ah::init_ah_from_wc,
        "ibv_create_ah_from_wc" = ah::create_ah_from_wc,
        "ibv_wc_status_str" = names::wc_status_str,
        "ibv_event_type_str" = names::event_type_str,
        "ibv_node_type_str" = names::node_type_str,
        "ibv_port_state_str" = names::port_state_str,
        "ibv_rate_to_mbps" = names::rate_to_mbps,
        "ibv_attach_mcast" = names::unsupported,
        "ibv_detach_mcast" = names::unsupported,
        "ibv_rereg_mr" = names::unsupported,
        "ibv_resolve_eth_l2_from_gid" = names::unsupported,
        "ibv_dontfork_range" = names::nothing,
        "ibv_dofork_range" = names::nothing,
        "ibv_copy_ah_attr_from_kern" = names::unsupported,
    }
    "IBVERBS_1.5" {
        "ibv_get_pkey_index" = context::get_pkey_index,
    }
    "IBVERBS_1.6" {
        "ibv_qp_to_qp_ex" = qp::to_extended,
    }
    "IBVERBS_1.7" {
        "ibv_reg_mr_iova" = memory::reg_mr_iova,
    }
    "IBVERBS_1.8" {
        "ibv_reg_mr_iova2" = memory::reg_mr_iova2,
    }
    "IBVERBS_1.9" {
        "ibv_get_device_index" = device::get_device_index,
    }
    "IBVERBS_1.10" {
        "ibv_query_ece" = names::no_ece,
        "ibv_set_ece" = names::set_ece,
        "ibv_import_device" = names::unsupported_object,
        "ibv_import_pd" = names::unsupported_object,
        "ibv_import_mr" = names::unsupported_object,
        "ibv_unimport_pd" = names::unsupported,
        "ibv_unimport_mr" = names::unsupported,
    }
    "IBVERBS_1.11" {
        "_ibv_query_gid_ex" = context::query_gid_ex,
        "_ibv_query_gid_table" = context::query_gid_table,
    }
    "IBVERBS_1.12" {
        "ibv_reg_dmabuf_mr" = memory::reg_dmabuf_mr,
    }
    "IBVERBS_1.13" {
        "ibv_is_fork_initialized" = context::is_fork_initialized,
    }
    "IBVERBS_1.14" {
        "ibv_query_qp_data_in_order" = names::nothing,
    }
    "IBVERBS_1.16" {
        "ibv_query_port_speed" = context::query_port_speed,
    }
}

// Providers of real devices (libmlx5, libefa) and librdmacm are linked to these, and programs to them; with ours in
// front of the real library there are no such devices, so nothing is to be done.
exports! {
    "IBVERBS_PRIVATE_34" {
        "ibv_query_gid_type" = context::query_gid_type,
        "__verbs_log" = names::unsupported,
        "_verbs_init_and_alloc_context" = names::unsupported,
        "execute_ioctl" = names::unsupported,
        "ibv_cmd_advise_mr" = names::unsupported,
        "ibv_cmd_alloc_dm" = names::unsupported,
        "ibv_cmd_alloc_mw" = names::unsupported,
        "ibv_cmd_alloc_pd" = names::unsupported,
        "ibv_cmd_attach_mcast" = names::unsupported,
        "ibv_cmd_close_xrcd" = names::unsupported,
        "ibv_cmd_create_ah" = names::unsupported,
        "ibv_cmd_create_counters" = names::unsupported,
        "ibv_cmd_create_cq_ex" = names::unsupported,
        "ibv_cmd_create_flow" = names::unsupported,
        "ibv_cmd_create_flow_action_esp" = names::unsupported,
        "ibv_cmd_create_qp_ex" = names::unsupported,
        "ibv_cmd_create_qp_ex2" = names::unsupported,
        "ibv_cmd_create_rwq_ind_table" = names::unsupported,
        "ibv_cmd_create_srq" = names::unsupported,
        "ibv_cmd_create_srq_ex" = names::unsupported,
        "ibv_cmd_create_wq" = names::unsupported,
        "ibv_cmd_dealloc_mw" = names::unsupported,
        "ibv_cmd_dealloc_pd" = names::unsupported,
        "ibv_cmd_dereg_mr" = names::unsupported,
        "ibv_cmd_destroy_ah" = names::unsupported,
        "ibv_cmd_destroy_counters" = names::unsupported,
        "ibv_cmd_destroy_cq" = names::unsupported,
        "ibv_cmd_destroy_flow" = names::unsupported,
        "ibv_cmd_destroy_flow_action" = names::unsupported,
        "ibv_cmd_destroy_qp" = names::unsupported,
        "ibv_cmd_destroy_rwq_ind_table" = names::unsupported,
        "ibv_cmd_destroy_srq" = names::unsupported,
        "ibv_cmd_destroy_wq" = names::unsupported,
        "ibv_cmd_detach_mcast" = names::unsupported,
        "ibv_cmd_free_dm" = names::unsupported,
        "ibv_cmd_get_context" = names::unsupported,
        "ibv_cmd_modify_cq" = names::unsupported,
        "ibv_cmd_modify_flow_action_esp" = names::unsupported,
        "ibv_cmd_modify_qp" = names::unsupported,
        "ibv_cmd_modify_qp_ex" = names::unsupported,
        "ibv_cmd_modify_srq" = names::unsupported,
        "ibv_cmd_modify_wq" = names::unsupported,
        "ibv_cmd_open_qp" = names::unsupported,
        "ibv_cmd_open_xrcd" = names::unsupported,
        "ibv_cmd_query_context" = names::unsupported,
        "ibv_cmd_query_device_any" = names::unsupported,
        "ibv_cmd_query_mr" = names::unsupported,
        "ibv_cmd_query_port" = names::unsupported,
        "ibv_cmd_query_qp" = names::unsupported,
        "ibv_cmd_query_srq" = names::unsupported,
        "ibv_cmd_read_counters" = names::unsupported,
        "ibv_cmd_reg_dm_mr" = names::unsupported,
        "ibv_cmd_reg_dmabuf_mr" = names::unsupported,
        "ibv_cmd_reg_mr" = names::unsupported,
        "ibv_cmd_rereg_mr" = names::unsupported,
        "ibv_cmd_resize_cq" = names::unsupported,
        "verbs_allow_disassociate_destroy" = names::unsupported,
        "verbs_init_cq" = names::unsupported,
        "verbs_open_device" = names::unsupported,
        "verbs_register_driver_34" = names::unsupported,
        "verbs_set_ops" = names::unsupported,
        "verbs_uninit_context" = names::unsupported,
    }
}
