//! Address handles.

use std::ffi::c_int;
use std::sync::Arc;

use softroce::{Gid, Path};

use crate::context::Context;
use crate::memory::Pd;
use crate::{abi, code, give, null, take};

/// An address handle.
#[repr(C)]
pub(crate) struct Ah {
    base: abi::Ah,
    pub(crate) path: Arc<Path>,
}

/// The way that an attribute describes.
pub(crate) fn path(context: &softroce::Context, attr: &abi::AhAttr) -> softroce::Result<Path> {
    if attr.is_global == 0 {
        return Err(softroce::Error::new(libc::EINVAL, "RoCE addresses by GID: is_global must be set"));
    }
    let mut gid = Gid::default();
    for (place, half) in gid.0.chunks_exact_mut(8).zip(attr.grh.dgid) {
        place.copy_from_slice(&half.to_ne_bytes());
    }
    let mut path = context.path(gid, attr.grh.sgid_index)?;
    path.traffic_class = attr.grh.traffic_class;
    path.flow_label = attr.grh.flow_label;
    if attr.grh.hop_limit > 0 {
        path.hop_limit = attr.grh.hop_limit;
    }
    Ok(path)
}

/// The attribute of a way.
pub(crate) fn attribute(path: &Path) -> abi::AhAttr {
    let gid = Gid::from(path.dst).0;
    let half = |at: usize| gid.get(at..).and_then(|b| b.first_chunk()).map_or(0, |b| u64::from_ne_bytes(*b));
    abi::AhAttr {
        grh: abi::GlobalRoute {
            dgid: [half(0), half(8)],
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

pub(crate) unsafe extern "C" fn create_ah(pd: *mut abi::Pd, attr: *mut abi::AhAttr) -> *mut abi::Ah {
    // SAFETY: a domain of ours, and the program's attribute.
    let (ours, attr) = unsafe { (&*pd.cast::<Pd>(), &*attr) };
    match path(ours.inner.context(), attr) {
        Ok(path) => {
            // SAFETY: a domain of ours.
            let context = unsafe { (*pd).context };
            give(Ah { base: abi::Ah { context, pd, handle: 0 }, path: Arc::new(path) }).cast()
        }
        Err(e) => null(&e),
    }
}

pub(crate) unsafe extern "C" fn destroy_ah(ah: *mut abi::Ah) -> c_int {
    // SAFETY: `create_ah` made it; the program does not use it any more.
    drop(unsafe { take::<Ah, _>(ah) });
    0
}

pub(crate) unsafe extern "C" fn init_ah_from_wc(
    context: *mut abi::Context,
    port: u8,
    _wc: *mut abi::Wc,
    grh: *mut [u8; 40],
    to: *mut abi::AhAttr,
) -> c_int {
    // SAFETY: an open context, the GRH of a receive, the program's place.
    unsafe {
        let device = Context::of(context).inner.device();
        let Some((from, us)) = softroce::wire::grh::addresses(&*grh) else { return -1 };
        let gids = device.gids();
        // Packets of the same host come by an address of their own: any of ours that is of the same kind answers.
        let index = gids
            .iter()
            .position(|gid| gid.ip() == us)
            .or_else(|| gids.iter().position(|gid| gid.ip().is_ipv4() == us.is_ipv4()));
        let Some(index) = index else { return -1 };
        match Context::of(context).inner.path(Gid::from(from), index as u8) {
            Ok(path) => {
                to.write(abi::AhAttr { port_num: port, ..attribute(&path) });
                0
            }
            Err(e) => {
                code(&e);
                -1
            }
        }
    }
}

pub(crate) unsafe extern "C" fn create_ah_from_wc(
    pd: *mut abi::Pd,
    wc: *mut abi::Wc,
    grh: *mut [u8; 40],
    port: u8,
) -> *mut abi::Ah {
    let mut attr = std::mem::MaybeUninit::uninit();
    // SAFETY: as the caller promises; the attribute is written where the call says so.
    unsafe {
        if init_ah_from_wc((*pd).context, port, wc, grh, attr.as_mut_ptr()) != 0 {
            return std::ptr::null_mut();
        }
        create_ah(pd, attr.as_mut_ptr())
    }
}
