//! The table of functions that NCCL finds by its version: what all versions have in common.

/// The functions that are the same in versions 8 to 12, in the order in which tables have them.
macro_rules! table {
    ($(#[$doc:meta])* $name:ident {
        init: $init:ty, properties: $properties:ty, listen: $listen:ty, connect: $connect:ty, isend: $isend:ty,
        irecv: $irecv:ty $(, $extra:ident: $extra_ty:ty)* $(,)?
    }) => {
        $(#[$doc])*
        #[derive(Debug)]
        #[repr(C)]
        #[allow(missing_docs, reason = "the functions are NCCL's, and documented in its headers")]
        pub struct $name {
            pub name: *const std::ffi::c_char,
            pub init: $init,
            pub devices: unsafe extern "C" fn(*mut std::ffi::c_int) -> $crate::abi::Status,
            pub get_properties: unsafe extern "C" fn(std::ffi::c_int, *mut $properties) -> $crate::abi::Status,
            pub listen: $listen,
            pub connect: $connect,
            pub accept: unsafe extern "C" fn(*mut std::ffi::c_void, *mut *mut std::ffi::c_void, *mut *mut std::ffi::c_void) -> $crate::abi::Status,
            pub reg_mr: unsafe extern "C" fn(*mut std::ffi::c_void, *mut std::ffi::c_void, usize, std::ffi::c_int, *mut *mut std::ffi::c_void) -> $crate::abi::Status,
            pub reg_mr_dma_buf: unsafe extern "C" fn(*mut std::ffi::c_void, *mut std::ffi::c_void, usize, std::ffi::c_int, u64, std::ffi::c_int, *mut *mut std::ffi::c_void) -> $crate::abi::Status,
            pub dereg_mr: unsafe extern "C" fn(*mut std::ffi::c_void, *mut std::ffi::c_void) -> $crate::abi::Status,
            pub isend: $isend,
            pub irecv: $irecv,
            pub iflush: unsafe extern "C" fn(*mut std::ffi::c_void, std::ffi::c_int, *mut *mut std::ffi::c_void, *mut std::ffi::c_int, *mut *mut std::ffi::c_void, *mut *mut std::ffi::c_void) -> $crate::abi::Status,
            pub test: unsafe extern "C" fn(*mut std::ffi::c_void, *mut std::ffi::c_int, *mut std::ffi::c_int) -> $crate::abi::Status,
            pub close_send: unsafe extern "C" fn(*mut std::ffi::c_void) -> $crate::abi::Status,
            pub close_recv: unsafe extern "C" fn(*mut std::ffi::c_void) -> $crate::abi::Status,
            pub close_listen: unsafe extern "C" fn(*mut std::ffi::c_void) -> $crate::abi::Status,
            pub get_device_mr: $crate::abi::Absent,
            pub irecv_consumed: $crate::abi::Absent,
            $(pub $extra: $extra_ty,)*
        }

        // SAFETY: addresses of functions, and of a text that does not change.
        unsafe impl Sync for $name {}
    };
}
pub(crate) use table;

/// A table with the functions of [`plugin`](crate::plugin), and those that the version alone has.
macro_rules! filled {
    ($name:ident { $($field:ident: $value:expr),* $(,)? }) => {
        $name {
            name: $crate::plugin::NAME.as_ptr(),
            devices: $crate::plugin::devices,
            accept: $crate::plugin::accept,
            reg_mr: $crate::plugin::reg_mr,
            reg_mr_dma_buf: $crate::plugin::reg_mr_dma_buf,
            dereg_mr: $crate::plugin::dereg_mr,
            iflush: $crate::plugin::iflush,
            test: $crate::plugin::test,
            close_send: $crate::plugin::close_send,
            close_recv: $crate::plugin::close_recv,
            close_listen: $crate::plugin::close_listen,
            get_device_mr: None,
            irecv_consumed: None,
            $($field: $value,)*
        }
    };
}
pub(crate) use filled;
