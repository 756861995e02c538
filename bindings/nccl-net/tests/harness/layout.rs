//! The structures, against offsets that a C compiler gave for NCCL's headers (x86-64; 64-bit ARM has the same).

use std::mem::{offset_of, size_of};

use nccl_net_tinynccl::abi::{CommConfig, PropertiesV8, PropertiesV9, Status, VirtualDevice};
use nccl_net_tinynccl::{v8, v9, v10, v11, v12};

macro_rules! at {
    ($ty:ty { $($field:ident: $offset:expr),* $(,)? }) => { $(assert_eq!(offset_of!($ty, $field), $offset, stringify!($field));)* };
}

#[test]
fn properties_are_where_nccl_looks() {
    at!(PropertiesV8 {
        name: 0,
        pci_path: 8,
        guid: 16,
        ptr_support: 24,
        reg_is_global: 28,
        speed: 32,
        port: 36,
        latency: 40,
        max_comms: 44,
        max_recvs: 48,
        net_device_type: 52,
        net_device_version: 56,
    });
    assert_eq!(size_of::<PropertiesV8>(), 64);
    at!(PropertiesV9<4> {
        name: 0, pci_path: 8, guid: 16, ptr_support: 24, reg_is_global: 28, force_flush: 32, speed: 36, port: 40,
        latency: 44, max_comms: 48, max_recvs: 52, net_device_type: 56, net_device_version: 60, v_props: 64,
        max_p2p_bytes: 88, max_coll_bytes: 96,
    });
    assert_eq!(size_of::<PropertiesV9<4>>(), 104);
    at!(v11::Properties { common: 0, max_multi_request_size: 104 });
    assert_eq!(size_of::<v11::Properties>(), 112);
    at!(PropertiesV9<8> { v_props: 64, max_p2p_bytes: 104, max_coll_bytes: 112 });
    at!(v12::Properties { common: 0, max_multi_request_size: 120, rail_id: 124, plane_id: 126 });
    assert_eq!(size_of::<v12::Properties>(), 128);
    assert_eq!((size_of::<VirtualDevice<4>>(), size_of::<VirtualDevice<8>>(), size_of::<CommConfig>()), (20, 36, 4));
    assert_eq!((size_of::<Status>(), Status::RemoteError as i32), (4, 6));
}

#[test]
fn functions_are_where_nccl_looks() {
    const WORD: usize = 8;
    macro_rules! table {
        ($ty:ty, $words:expr) => {
            at!($ty {
                name: 0,
                init: WORD,
                devices: 2 * WORD,
                get_properties: 3 * WORD,
                listen: 4 * WORD,
                connect: 5 * WORD,
                accept: 6 * WORD,
                reg_mr: 7 * WORD,
                reg_mr_dma_buf: 8 * WORD,
                dereg_mr: 9 * WORD,
                isend: 10 * WORD,
                irecv: 11 * WORD,
                iflush: 12 * WORD,
                test: 13 * WORD,
                close_send: 14 * WORD,
                close_recv: 15 * WORD,
                close_listen: 16 * WORD,
                get_device_mr: 17 * WORD,
                irecv_consumed: 18 * WORD,
            });
            assert_eq!(size_of::<$ty>(), $words * WORD);
        };
    }
    table!(v8::Table, 19);
    table!(v9::Table, 20);
    table!(v10::Table, 20);
    table!(v11::Table, 22);
    table!(v12::Table, 22);
    at!(v10::Table { make_v_device: 19 * WORD });
    at!(v12::Table { make_v_device: 19 * WORD, finalize: 20 * WORD, set_net_attr: 21 * WORD });
}
