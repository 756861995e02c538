//! The symbols that lead on to the system's libibverbs, with their versions.

use std::arch::global_asm;

use softroce_verbs::{nothing, unsupported, unsupported_object};

use crate::slot::{Forward, Slot, text};

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
