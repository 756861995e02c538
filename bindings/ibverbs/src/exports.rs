//! The symbols of functions of this library, with their versions.

use std::arch::global_asm;

use softroce_verbs::{nothing, unsupported, unsupported_object};

use crate::{objects, system};

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
