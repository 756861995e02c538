//! The symbols, with their versions.
//!
//! A symbol with a version is made by the assembler (`.symver`): a jump to the function, as the linker takes a version
//! for names of its own file alone. The versions are declared in `versions.map`. This needs lld, which Rust uses by
//! default on x86-64 Linux from 1.90 on; GNU ld does not take two version scripts, and rustc gives one already.

use std::arch::global_asm;
use std::ffi::CStr;

use softroce_verbs::{nothing, unsupported, unsupported_object};

use crate::system::{Forward, Slot};
use crate::{objects, system};

/// A text of a macro, which ends with a zero.
pub(crate) fn text(bytes: &'static str) -> &'static CStr {
    CStr::from_bytes_until_nul(bytes.as_bytes()).unwrap_or_default()
}

/// A symbol that jumps: `@@` with the version that programs are linked to today, `@` with an older one.
macro_rules! symbol {
    ($label:literal, $name:ident, $at:literal, $version:literal, $jump:tt, $($operand:tt)*) => {
        global_asm!(
            ".pushsection .text",
            concat!(".globl ", $label, stringify!($name)),
            concat!(".type ", $label, stringify!($name), ",@function"),
            concat!($label, stringify!($name), ":"),
            $jump!(),
            concat!(".symver ", $label, stringify!($name), ",", stringify!($name), $at, $version),
            ".popsection",
            $($operand)*
        );
    };
}

#[cfg(target_arch = "x86_64")]
macro_rules! to_function {
    () => {
        "jmp {function}"
    };
}
#[cfg(target_arch = "aarch64")]
macro_rules! to_function {
    () => {
        "b {function}"
    };
}
#[cfg(target_arch = "x86_64")]
macro_rules! through_slot {
    () => {
        "jmp *{slot}(%rip)"
    };
}
#[cfg(target_arch = "aarch64")]
macro_rules! through_slot {
    () => {
        "adrp x16, {slot}\nldr x16, [x16, :lo12:{slot}]\nbr x16"
    };
}

macro_rules! exports {
    ($($version:literal { $($name:ident = $function:path,)* })*) => {
        $($(symbol!("tinyroce_", $name, "@@", $version, to_function, function = sym $function);)*)*
    };
}

/// Symbols beside one of another version: `historic` of 2006, with structures of other lengths.
macro_rules! also {
    ($label:literal $($version:literal { $($name:ident = $function:path,)* })*) => {
        $($(symbol!($label, $name, "@", $version, to_function, function = sym $function);)*)*
    };
}

/// Symbols that lead on, by their slots: a module for them, the function that lists them, and `@` as above.
macro_rules! forwards {
    ($slots:ident $list:ident $label:literal $at:literal $($version:literal { $($name:ident = $until_then:path,)* })*) => {
        #[allow(non_upper_case_globals, reason = "symbols' names")]
        mod $slots {
            use super::*;
            $($(pub(super) static $name: Slot = Slot::new($until_then as *const ());)*)*
        }

        /// Returns the symbols that the system's library takes over when it is opened.
        pub(crate) fn $list() -> impl Iterator<Item = Forward> {
            [$($((text(concat!(stringify!($name), "\0")), text(concat!($version, "\0")), &$slots::$name),)*)*].into_iter()
        }

        $($(symbol!($label, $name, $at, $version, through_slot, slot = sym $slots::$name, options(att_syntax));)*)*
    };
}

exports! {
    "IBVERBS_1.0" {
        ibv_create_comp_channel = objects::ibv_create_comp_channel,
        ibv_destroy_comp_channel = objects::ibv_destroy_comp_channel,
        ibv_rate_to_mult = softroce_verbs::ibv_rate_to_mult,
        mult_to_ibv_rate = softroce_verbs::mult_to_ibv_rate,
    }
    "IBVERBS_1.1" {
        ibv_get_device_name = objects::ibv_get_device_name,
        ibv_get_device_guid = objects::ibv_get_device_guid,
        ibv_open_device = objects::ibv_open_device,
        ibv_close_device = objects::ibv_close_device,
        ibv_query_device = objects::ibv_query_device,
        ibv_query_port = objects::ibv_query_port,
        ibv_query_gid = objects::ibv_query_gid,
        ibv_query_pkey = objects::ibv_query_pkey,
        ibv_get_async_event = objects::ibv_get_async_event,
        ibv_alloc_pd = objects::ibv_alloc_pd,
        ibv_dealloc_pd = objects::ibv_dealloc_pd,
        ibv_reg_mr = objects::ibv_reg_mr,
        ibv_rereg_mr = objects::ibv_rereg_mr,
        ibv_dereg_mr = objects::ibv_dereg_mr,
        ibv_create_cq = objects::ibv_create_cq,
        ibv_resize_cq = objects::ibv_resize_cq,
        ibv_destroy_cq = objects::ibv_destroy_cq,
        ibv_get_cq_event = objects::ibv_get_cq_event,
        ibv_ack_cq_events = objects::ibv_ack_cq_events,
        ibv_create_srq = objects::ibv_create_srq,
        ibv_modify_srq = objects::ibv_modify_srq,
        ibv_query_srq = objects::ibv_query_srq,
        ibv_destroy_srq = objects::ibv_destroy_srq,
        ibv_create_qp = objects::ibv_create_qp,
        ibv_modify_qp = objects::ibv_modify_qp,
        ibv_query_qp = objects::ibv_query_qp,
        ibv_destroy_qp = objects::ibv_destroy_qp,
        ibv_create_ah = objects::ibv_create_ah,
        ibv_destroy_ah = objects::ibv_destroy_ah,
        ibv_init_ah_from_wc = objects::ibv_init_ah_from_wc,
        ibv_create_ah_from_wc = objects::ibv_create_ah_from_wc,
        ibv_attach_mcast = objects::ibv_attach_mcast,
        ibv_detach_mcast = objects::ibv_detach_mcast,
        ibv_resolve_eth_l2_from_gid = objects::ibv_resolve_eth_l2_from_gid,
        ibv_get_device_list = objects::ibv_get_device_list,
        ibv_free_device_list = objects::ibv_free_device_list,
        ibv_ack_async_event = objects::ibv_ack_async_event,
        ibv_fork_init = objects::ibv_fork_init,
        ibv_wc_status_str = softroce_verbs::ibv_wc_status_str,
        ibv_event_type_str = softroce_verbs::ibv_event_type_str,
        ibv_node_type_str = softroce_verbs::ibv_node_type_str,
        ibv_port_state_str = softroce_verbs::ibv_port_state_str,
        ibv_rate_to_mbps = softroce_verbs::ibv_rate_to_mbps,
        mbps_to_ibv_rate = softroce_verbs::mbps_to_ibv_rate,
    }
    "IBVERBS_1.5" {
        ibv_get_pkey_index = objects::ibv_get_pkey_index,
    }
    "IBVERBS_1.6" {
        ibv_qp_to_qp_ex = objects::ibv_qp_to_qp_ex,
    }
    "IBVERBS_1.7" {
        ibv_reg_mr_iova = objects::ibv_reg_mr_iova,
    }
    "IBVERBS_1.8" {
        ibv_reg_mr_iova2 = objects::ibv_reg_mr_iova2,
    }
    "IBVERBS_1.9" {
        ibv_get_device_index = objects::ibv_get_device_index,
    }
    "IBVERBS_1.10" {
        ibv_query_ece = objects::ibv_query_ece,
        ibv_set_ece = objects::ibv_set_ece,
        ibv_import_pd = objects::ibv_import_pd,
        ibv_import_mr = objects::ibv_import_mr,
        ibv_unimport_pd = objects::ibv_unimport_pd,
        ibv_unimport_mr = objects::ibv_unimport_mr,
    }
    "IBVERBS_1.11" {
        _ibv_query_gid_ex = objects::_ibv_query_gid_ex,
        _ibv_query_gid_table = objects::_ibv_query_gid_table,
    }
    "IBVERBS_1.12" {
        ibv_reg_dmabuf_mr = objects::ibv_reg_dmabuf_mr,
    }
    "IBVERBS_1.13" {
        ibv_import_dm = objects::ibv_import_dm,
        ibv_unimport_dm = objects::ibv_unimport_dm,
        ibv_is_fork_initialized = objects::ibv_is_fork_initialized,
    }
    "IBVERBS_1.14" {
        ibv_query_qp_data_in_order = objects::ibv_query_qp_data_in_order,
    }
    "IBVERBS_1.15" {
        ibv_alloc_dmah = objects::ibv_alloc_dmah,
        ibv_dealloc_dmah = objects::ibv_dealloc_dmah,
        ibv_reg_mr_ex = objects::ibv_reg_mr_ex,
    }
    "IBVERBS_1.16" {
        ibv_dm_export_dmabuf_fd = objects::ibv_dm_export_dmabuf_fd,
        ibv_query_port_speed = objects::ibv_query_port_speed,
    }
    "IBVERBS_1.17" {
        ibv_alloc_buf = objects::ibv_alloc_buf,
        ibv_free_buf = objects::ibv_free_buf,
        ibv_reg_buf_mr = objects::ibv_reg_buf_mr,
    }
    "IBVERBS_1.18" {
        _ibv_query_comp_cntr_caps = objects::_ibv_query_comp_cntr_caps,
        ibv_create_comp_cntr = objects::ibv_create_comp_cntr,
        ibv_destroy_comp_cntr = objects::ibv_destroy_comp_cntr,
        ibv_export_buf_dmabuf_fd = objects::ibv_export_buf_dmabuf_fd,
        ibv_inc_comp_cntr = objects::ibv_inc_comp_cntr,
        ibv_inc_err_comp_cntr = objects::ibv_inc_err_comp_cntr,
        ibv_qp_attach_comp_cntr = objects::ibv_qp_attach_comp_cntr,
        ibv_read_comp_cntr = objects::ibv_read_comp_cntr,
        ibv_read_err_comp_cntr = objects::ibv_read_err_comp_cntr,
        ibv_set_comp_cntr = objects::ibv_set_comp_cntr,
        ibv_set_err_comp_cntr = objects::ibv_set_err_comp_cntr,
    }
    "IBVERBS_PRIVATE_34" {
        ibv_query_gid_type = objects::ibv_query_gid_type,
        verbs_register_driver_34 = system::register_driver,
    }
}

also! {
    "tinyroce_old_"
    "IBVERBS_1.0" {
        ibv_ack_async_event = nothing,
        ibv_ack_cq_events = nothing,
        ibv_alloc_pd = unsupported_object,
        ibv_attach_mcast = unsupported,
        ibv_close_device = unsupported,
        ibv_create_ah = unsupported_object,
        ibv_create_cq = unsupported_object,
        ibv_create_qp = unsupported_object,
        ibv_create_srq = unsupported_object,
        ibv_dealloc_pd = unsupported,
        ibv_dereg_mr = unsupported,
        ibv_destroy_ah = unsupported,
        ibv_destroy_cq = unsupported,
        ibv_destroy_qp = unsupported,
        ibv_destroy_srq = unsupported,
        ibv_detach_mcast = unsupported,
        ibv_free_device_list = nothing,
        ibv_get_async_event = unsupported,
        ibv_get_cq_event = unsupported,
        ibv_get_device_guid = nothing,
        ibv_get_device_list = unsupported_object,
        ibv_get_device_name = unsupported_object,
        ibv_modify_qp = unsupported,
        ibv_modify_srq = unsupported,
        ibv_open_device = unsupported_object,
        ibv_query_device = unsupported,
        ibv_query_gid = unsupported,
        ibv_query_pkey = unsupported,
        ibv_query_port = unsupported,
        ibv_query_qp = unsupported,
        ibv_query_srq = unsupported,
        ibv_reg_mr = unsupported_object,
        ibv_resize_cq = unsupported,
    }
    "IBVERBS_1.1" {
        ibv_register_driver = nothing,
    }
}

// Functions that librdmacm and providers of real devices (librxe, libmlx5, libefa) are linked to: the system's library
// executes them where it is open, and otherwise no device needs them.
forwards! {
    slots forwards "tinyroce_" "@@"
    "IBVERBS_1.0" {
        ibv_get_sysfs_path = softroce_verbs::ibv_get_sysfs_path,
        ibv_read_sysfs_file = softroce_verbs::ibv_read_sysfs_file,
        ibv_copy_path_rec_from_kern = unsupported,
        ibv_copy_path_rec_to_kern = unsupported,
        ibv_copy_qp_attr_from_kern = unsupported,
    }
    "IBVERBS_1.1" {
        ibv_copy_ah_attr_from_kern = unsupported,
        ibv_dontfork_range = nothing,
        ibv_dofork_range = nothing,
    }
    "IBVERBS_1.10" {
        ibv_import_device = unsupported_object,
    }
    "IBVERBS_PRIVATE_34" {
        __ioctl_final_num_attrs = unsupported,
        __verbs_log = unsupported,
        _verbs_init_and_alloc_context = unsupported_object,
        execute_ioctl = unsupported,
        ibv_read_ibdev_sysfs_file = refused_file,
        ibv_cmd_advise_mr = unsupported,
        ibv_cmd_alloc_dm = unsupported,
        ibv_cmd_alloc_mw = unsupported,
        ibv_cmd_alloc_pd = unsupported,
        ibv_cmd_attach_mcast = unsupported,
        ibv_cmd_close_xrcd = unsupported,
        ibv_cmd_create_ah = unsupported,
        ibv_cmd_create_counters = unsupported,
        ibv_cmd_create_cq = unsupported,
        ibv_cmd_create_cq_ex = unsupported,
        ibv_cmd_create_flow = unsupported,
        ibv_cmd_create_flow_action_esp = unsupported,
        ibv_cmd_create_qp = unsupported,
        ibv_cmd_create_qp_ex = unsupported,
        ibv_cmd_create_qp_ex2 = unsupported,
        ibv_cmd_create_rwq_ind_table = unsupported,
        ibv_cmd_create_srq = unsupported,
        ibv_cmd_create_srq_ex = unsupported,
        ibv_cmd_create_wq = unsupported,
        ibv_cmd_dealloc_mw = unsupported,
        ibv_cmd_dealloc_pd = unsupported,
        ibv_cmd_dereg_mr = unsupported,
        ibv_cmd_destroy_ah = unsupported,
        ibv_cmd_destroy_counters = unsupported,
        ibv_cmd_destroy_cq = unsupported,
        ibv_cmd_destroy_flow = unsupported,
        ibv_cmd_destroy_flow_action = unsupported,
        ibv_cmd_destroy_qp = unsupported,
        ibv_cmd_destroy_rwq_ind_table = unsupported,
        ibv_cmd_destroy_srq = unsupported,
        ibv_cmd_destroy_wq = unsupported,
        ibv_cmd_detach_mcast = unsupported,
        ibv_cmd_free_dm = unsupported,
        ibv_cmd_get_context = unsupported,
        ibv_cmd_modify_cq = unsupported,
        ibv_cmd_modify_flow_action_esp = unsupported,
        ibv_cmd_modify_qp = unsupported,
        ibv_cmd_modify_qp_ex = unsupported,
        ibv_cmd_modify_srq = unsupported,
        ibv_cmd_modify_wq = unsupported,
        ibv_cmd_open_qp = unsupported,
        ibv_cmd_open_xrcd = unsupported,
        ibv_cmd_poll_cq = unsupported,
        ibv_cmd_post_recv = unsupported,
        ibv_cmd_post_send = unsupported,
        ibv_cmd_post_srq_recv = unsupported,
        ibv_cmd_query_context = unsupported,
        ibv_cmd_query_device_any = unsupported,
        ibv_cmd_query_mr = unsupported,
        ibv_cmd_query_port = unsupported,
        ibv_cmd_query_qp = unsupported,
        ibv_cmd_query_srq = unsupported,
        ibv_cmd_read_counters = unsupported,
        ibv_cmd_reg_dm_mr = unsupported,
        ibv_cmd_reg_dmabuf_mr = unsupported,
        ibv_cmd_reg_mr = unsupported,
        ibv_cmd_req_notify_cq = unsupported,
        ibv_cmd_rereg_mr = unsupported,
        ibv_cmd_resize_cq = unsupported,
        verbs_init_cq = unsupported,
        verbs_open_device = unsupported_object,
        verbs_set_ops = unsupported,
        verbs_uninit_context = unsupported,
    }
}

// The private interface of rdma-core's newest release, for its providers: names that the older one has as well stand
// beside those.
also! {
    "tinyroce_65_"
    "IBVERBS_PRIVATE_65" {
        ibv_query_gid_type = objects::ibv_query_gid_type,
    }
}

exports! {
    "IBVERBS_PRIVATE_65" {
        verbs_register_driver_65 = system::register_driver,
    }
}

forwards! {
    slots_65 forwards_65 "tinyroce_65_" "@"
    "IBVERBS_PRIVATE_65" {
        __ioctl_final_num_attrs = unsupported,
        __verbs_log = unsupported,
        _verbs_init_and_alloc_context = unsupported_object,
        execute_ioctl = unsupported,
        ibv_cmd_advise_mr = unsupported,
        ibv_cmd_alloc_dm = unsupported,
        ibv_cmd_alloc_dmah = unsupported,
        ibv_cmd_alloc_mw = unsupported,
        ibv_cmd_alloc_pd = unsupported,
        ibv_cmd_attach_mcast = unsupported,
        ibv_cmd_close_xrcd = unsupported,
        ibv_cmd_create_ah = unsupported,
        ibv_cmd_create_comp_cntr = unsupported,
        ibv_cmd_create_counters = unsupported,
        ibv_cmd_create_cq = unsupported,
        ibv_cmd_create_cq_ex = unsupported,
        ibv_cmd_create_cq_ex2 = unsupported,
        ibv_cmd_create_flow = unsupported,
        ibv_cmd_create_flow_action_esp = unsupported,
        ibv_cmd_create_qp = unsupported,
        ibv_cmd_create_qp_ex = unsupported,
        ibv_cmd_create_qp_ex2 = unsupported,
        ibv_cmd_create_rwq_ind_table = unsupported,
        ibv_cmd_create_srq = unsupported,
        ibv_cmd_create_srq_ex = unsupported,
        ibv_cmd_create_wq = unsupported,
        ibv_cmd_dealloc_mw = unsupported,
        ibv_cmd_dealloc_pd = unsupported,
        ibv_cmd_dereg_mr = unsupported,
        ibv_cmd_destroy_ah = unsupported,
        ibv_cmd_destroy_comp_cntr = unsupported,
        ibv_cmd_destroy_counters = unsupported,
        ibv_cmd_destroy_cq = unsupported,
        ibv_cmd_destroy_flow = unsupported,
        ibv_cmd_destroy_flow_action = unsupported,
        ibv_cmd_destroy_qp = unsupported,
        ibv_cmd_destroy_rwq_ind_table = unsupported,
        ibv_cmd_destroy_srq = unsupported,
        ibv_cmd_destroy_wq = unsupported,
        ibv_cmd_detach_mcast = unsupported,
        ibv_cmd_export_dmabuf_fd = unsupported,
        ibv_cmd_free_dm = unsupported,
        ibv_cmd_free_dmah = unsupported,
        ibv_cmd_get_context = unsupported,
        ibv_cmd_inc_comp_cntr = unsupported,
        ibv_cmd_inc_err_comp_cntr = unsupported,
        ibv_cmd_modify_cq = unsupported,
        ibv_cmd_modify_flow_action_esp = unsupported,
        ibv_cmd_modify_qp = unsupported,
        ibv_cmd_modify_qp_ex = unsupported,
        ibv_cmd_modify_srq = unsupported,
        ibv_cmd_modify_wq = unsupported,
        ibv_cmd_open_qp = unsupported,
        ibv_cmd_open_xrcd = unsupported,
        ibv_cmd_poll_cq = unsupported,
        ibv_cmd_post_recv = unsupported,
        ibv_cmd_post_send = unsupported,
        ibv_cmd_post_srq_recv = unsupported,
        ibv_cmd_qp_attach_comp_cntr = unsupported,
        ibv_cmd_query_comp_cntr_caps = unsupported,
        ibv_cmd_query_context = unsupported,
        ibv_cmd_query_device_any = unsupported,
        ibv_cmd_query_mr = unsupported,
        ibv_cmd_query_port = unsupported,
        ibv_cmd_query_port_speed = unsupported,
        ibv_cmd_query_qp = unsupported,
        ibv_cmd_query_srq = unsupported,
        ibv_cmd_read_comp_cntr = unsupported,
        ibv_cmd_read_counters = unsupported,
        ibv_cmd_read_err_comp_cntr = unsupported,
        ibv_cmd_reg_dm_mr = unsupported,
        ibv_cmd_reg_dmabuf_mr = unsupported,
        ibv_cmd_reg_mr = unsupported,
        ibv_cmd_reg_mr_ex = unsupported,
        ibv_cmd_req_notify_cq = unsupported,
        ibv_cmd_rereg_mr = unsupported,
        ibv_cmd_resize_cq = unsupported,
        ibv_cmd_set_comp_cntr = unsupported,
        ibv_cmd_set_err_comp_cntr = unsupported,
        ibv_dmabuf_heap_alloc = unsupported,
        ibv_dmabuf_heap_cc_shared_init = unsupported_object,
        ibv_dmabuf_heap_destroy = unsupported,
        ibv_dmabuf_heap_free = unsupported,
        ibv_read_ibdev_sysfs_file = refused_file,
        ibv_wr_opcode_str = opcode_name,
        verbs_init_cq = unsupported,
        verbs_open_device = unsupported_object,
        verbs_set_ops = unsupported,
        verbs_uninit_context = unsupported,
    }
}

/// The name of a request, of which providers write in their logs.
unsafe extern "C" fn opcode_name() -> *const std::ffi::c_char {
    c"unknown".as_ptr()
}

/// A file of sysfs that is not there.
unsafe extern "C" fn refused_file() -> std::ffi::c_int {
    -1
}

// A flag that providers read: whether what a removed device has is freed without an error.
global_asm!(
    ".pushsection .bss",
    ".globl tinyroce_verbs_allow_disassociate_destroy",
    ".type tinyroce_verbs_allow_disassociate_destroy,@object",
    ".size tinyroce_verbs_allow_disassociate_destroy,1",
    "tinyroce_verbs_allow_disassociate_destroy:",
    ".zero 8",
    ".symver tinyroce_verbs_allow_disassociate_destroy,verbs_allow_disassociate_destroy@@IBVERBS_PRIVATE_34",
    ".globl tinyroce_65_verbs_allow_disassociate_destroy",
    ".type tinyroce_65_verbs_allow_disassociate_destroy,@object",
    ".size tinyroce_65_verbs_allow_disassociate_destroy,1",
    ".set tinyroce_65_verbs_allow_disassociate_destroy,tinyroce_verbs_allow_disassociate_destroy",
    ".symver tinyroce_65_verbs_allow_disassociate_destroy,verbs_allow_disassociate_destroy@IBVERBS_PRIVATE_65",
    ".popsection",
);
