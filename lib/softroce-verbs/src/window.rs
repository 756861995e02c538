//! Memory windows.

use std::ffi::c_int;

use softroce::{Access, Bind, SendOp, WindowKind};

use crate::constants::{IBV_MW_TYPE_1, IBV_MW_TYPE_2, ibv_mw_type};
use crate::context::Context;
use crate::memory::Pd;
use crate::types::{ibv_mw, ibv_mw_bind_info, ibv_pd};
use crate::{give, null, take};

/// A memory window.
#[repr(C)]
struct Mw {
    base: ibv_mw,
    inner: softroce::Mw,
}

pub(crate) unsafe extern "C" fn alloc(pd: *mut ibv_pd, type_: ibv_mw_type) -> *mut ibv_mw {
    let kind = match type_ {
        IBV_MW_TYPE_1 => WindowKind::Any,
        IBV_MW_TYPE_2 => WindowKind::OneQp,
        other => return null(&softroce::Error::new(libc::EINVAL, format!("memory windows of type {other}"))),
    };
    // SAFETY: a domain of ours.
    let (context, ours) = unsafe { ((*pd).context, Pd::of(pd)) };
    match ours.inner.alloc_mw(kind) {
        Ok(inner) => {
            ours.uses.add();
            give(Mw { base: ibv_mw { context, pd, rkey: inner.rkey(), handle: 0, type_ }, inner }).cast()
        }
        Err(e) => null(&e),
    }
}

pub(crate) unsafe extern "C" fn dealloc(mw: *mut ibv_mw) -> c_int {
    // SAFETY: `alloc` made it; the program does not use it any more.
    unsafe {
        if Context::of((*mw).context).is_inherited() {
            return 0;
        }
        let pd = (*mw).pd;
        drop(take::<Mw, _>(mw));
        Pd::of(pd).uses.release();
    }
    0
}

/// The request that binds a window under a new key.
///
/// # Safety
/// A window of ours, and a region of ours or null.
pub(crate) unsafe fn request(mw: *mut ibv_mw, rkey: u32, info: &ibv_mw_bind_info) -> SendOp {
    // SAFETY: by the caller.
    let (own, lkey) = unsafe { ((*mw.cast::<Mw>()).inner.rkey(), info.mr.as_ref().map_or(0, |mr| mr.lkey)) };
    // The program chooses the low byte alone.
    let rkey = own & !0xff | rkey & 0xff;
    let access = Access::from_bits(info.mw_access_flags);
    SendOp::Bind(Bind { rkey, lkey, addr: info.addr, len: info.length, access })
}
