//! Address handles.

use std::ffi::c_int;
use std::sync::Arc;

use softroce::{Gid, Path};

use crate::context::Context;
use crate::memory::Pd;
use crate::types::{ibv_ah, ibv_ah_attr, ibv_context, ibv_gid, ibv_global_route, ibv_pd, ibv_wc};
use crate::{code, give, null, take};

/// An address handle.
#[repr(C)]
pub(crate) struct Ah {
    base: ibv_ah,
    pub(crate) path: Arc<Path>,
}

/// The path that an attribute describes.
pub(crate) fn path(context: &softroce::Context, attr: &ibv_ah_attr) -> softroce::Result<Path> {
    if attr.is_global == 0 {
        return Err(softroce::Error::new(libc::EINVAL, "RoCE addresses by GID: is_global must be set"));
    }
    // SAFETY: both forms of a GID are 16 bytes.
    let gid = Gid(unsafe { attr.grh.dgid.raw });
    let mut path = context.path(gid, attr.grh.sgid_index)?;
    path.traffic_class = attr.grh.traffic_class;
    path.flow_label = attr.grh.flow_label;
    if attr.grh.hop_limit > 0 {
        path.hop_limit = attr.grh.hop_limit;
    }
    Ok(path)
}

/// The attribute of a path.
pub(crate) fn attribute(path: &Path) -> ibv_ah_attr {
    ibv_ah_attr {
        grh: ibv_global_route {
            dgid: ibv_gid { raw: Gid::from(path.dst).0 },
            flow_label: path.flow_label,
            sgid_index: path.sgid_index,
            hop_limit: path.hop_limit,
            traffic_class: path.traffic_class,
        },
        dlid: 0,
        sl: 0,
        src_path_bits: 0,
        static_rate: 0,
        is_global: 1,
        port_num: 1,
    }
}

pub unsafe extern "C" fn ibv_create_ah(pd: *mut ibv_pd, attr: *mut ibv_ah_attr) -> *mut ibv_ah {
    // SAFETY: a domain of ours, and the program's attribute.
    let (ours, attr) = unsafe { (Pd::of(pd), &*attr) };
    match path(ours.inner.context(), attr) {
        Ok(path) => {
            // SAFETY: a domain of ours.
            let context = unsafe { (*pd).context };
            ours.uses.add();
            give(Ah { base: ibv_ah { context, pd, handle: 0 }, path: Arc::new(path) }).cast()
        }
        Err(e) => null(&e),
    }
}

pub unsafe extern "C" fn ibv_destroy_ah(ah: *mut ibv_ah) -> c_int {
    // SAFETY: `create_ah` made it; the program does not use it any more.
    unsafe {
        if Context::of((*ah).context).is_inherited() {
            return 0;
        }
        let pd = (*ah).pd;
        drop(take::<Ah, _>(ah));
        Pd::of(pd).uses.release();
    }
    0
}

pub unsafe extern "C" fn ibv_init_ah_from_wc(
    context: *mut ibv_context,
    port: u8,
    _wc: *mut ibv_wc,
    grh: *mut [u8; 40],
    to: *mut ibv_ah_attr,
) -> c_int {
    // SAFETY: an open context, the GRH of a receive, the program's output buffer.
    unsafe {
        let device = Context::of(context).inner.device();
        let Some((from, us)) = softroce::wire::grh::addresses(&*grh) else { return -1 };
        let gids = device.gids();
        let Some(index) = gids.iter().position(|gid| gid.ip() == us) else { return -1 };
        match Context::of(context).inner.path(Gid::from(from), index as u8) {
            Ok(path) => {
                to.write(ibv_ah_attr { port_num: port, ..attribute(&path) });
                0
            }
            Err(e) => {
                code(&e);
                -1
            }
        }
    }
}

pub unsafe extern "C" fn ibv_create_ah_from_wc(
    pd: *mut ibv_pd,
    wc: *mut ibv_wc,
    grh: *mut [u8; 40],
    port: u8,
) -> *mut ibv_ah {
    let mut attr = std::mem::MaybeUninit::uninit();
    // SAFETY: as the caller promises; the attribute is written where the call succeeds.
    unsafe {
        if ibv_init_ah_from_wc((*pd).context, port, wc, grh, attr.as_mut_ptr()) != 0 {
            return std::ptr::null_mut();
        }
        ibv_create_ah(pd, attr.as_mut_ptr())
    }
}
