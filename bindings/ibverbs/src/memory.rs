//! Protection domains and memory regions.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;

use softroce::Access;

use crate::context::Context;
use crate::{abi, give, null, take};

/// A protection domain.
#[repr(C)]
pub(crate) struct Pd {
    base: abi::Pd,
    pub(crate) inner: Arc<softroce::Pd>,
}

/// A memory region.
#[repr(C)]
struct Mr {
    base: abi::Mr,
    _inner: softroce::Mr,
}

pub(crate) unsafe extern "C" fn alloc_pd(context: *mut abi::Context) -> *mut abi::Pd {
    // SAFETY: an open context.
    let inner = unsafe { Context::of(context) }.inner.alloc_pd();
    give(Pd { base: abi::Pd { context, handle: 0 }, inner }).cast()
}

pub(crate) unsafe extern "C" fn dealloc_pd(pd: *mut abi::Pd) -> c_int {
    // SAFETY: `alloc_pd` made it; the program does not use it any more.
    drop(unsafe { take::<Pd, _>(pd) });
    0
}

pub(crate) unsafe extern "C" fn reg_mr(pd: *mut abi::Pd, at: *mut c_void, len: usize, access: c_int) -> *mut abi::Mr {
    // SAFETY: as the caller promises.
    unsafe { reg_mr_iova2(pd, at, len, at as u64, access as c_uint) }
}

pub(crate) unsafe extern "C" fn reg_mr_iova(
    pd: *mut abi::Pd,
    at: *mut c_void,
    len: usize,
    iova: u64,
    access: c_int,
) -> *mut abi::Mr {
    // SAFETY: as the caller promises.
    unsafe { reg_mr_iova2(pd, at, len, iova, access as c_uint) }
}

pub(crate) unsafe extern "C" fn reg_mr_iova2(
    pd: *mut abi::Pd,
    at: *mut c_void,
    len: usize,
    iova: u64,
    access: c_uint,
) -> *mut abi::Mr {
    // SAFETY: a domain of ours; the program keeps the memory until it deregisters.
    unsafe {
        let ours = &*pd.cast::<Pd>();
        match ours.inner.reg_mr(at.cast(), len, iova, Access::from_bits(access)) {
            Ok(inner) => {
                let context = (*pd).context;
                let (lkey, rkey) = (inner.lkey(), inner.rkey());
                let base = abi::Mr { context, pd, addr: at, length: len, handle: 0, lkey, rkey };
                give(Mr { base, _inner: inner }).cast()
            }
            Err(e) => null(&e),
        }
    }
}

pub(crate) unsafe extern "C" fn dereg_mr(mr: *mut abi::Mr) -> c_int {
    // SAFETY: `reg_mr` made it; the program does not use it any more.
    drop(unsafe { take::<Mr, _>(mr) });
    0
}

pub(crate) unsafe extern "C" fn reg_dmabuf_mr(
    _pd: *mut abi::Pd,
    _offset: u64,
    _len: usize,
    _iova: u64,
    _fd: c_int,
    _access: c_int,
) -> *mut abi::Mr {
    null(&softroce::Error::new(libc::EOPNOTSUPP, "memory of other devices (dma-buf) cannot be registered"))
}
