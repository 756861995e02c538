//! Protection domains and memory regions.

use std::ffi::{c_int, c_uint, c_void};
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use softroce::Access;

use crate::constants::{IBV_REREG_MR_CHANGE_ACCESS, IBV_REREG_MR_CHANGE_PD, IBV_REREG_MR_CHANGE_TRANSLATION};
use crate::context::Context;
use crate::extended::ibv_mr_init_attr;
use crate::types::{ibv_context, ibv_mr, ibv_pd};
use crate::uses::Uses;
use crate::{code, give, null, take};

/// A protection domain.
#[repr(C)]
pub(crate) struct Pd {
    base: ibv_pd,
    pub(crate) inner: Arc<softroce::Pd>,
    /// Regions, windows, address handles and queues of it.
    pub(crate) uses: Uses,
}

impl Pd {
    /// # Safety
    /// A domain of ours.
    pub(crate) unsafe fn of<'a>(pd: *mut ibv_pd) -> &'a Pd {
        // SAFETY: by the caller.
        unsafe { &*pd.cast() }
    }
}

/// A memory region.
#[repr(C)]
struct Mr {
    base: ibv_mr,
    iova: u64,
    access: c_uint,
    /// True for a dma-buf, which cannot be registered again (`ibv_rereg_mr`), as with libibverbs.
    dmabuf: bool,
    inner: softroce::Mr,
}

pub unsafe extern "C" fn ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    // SAFETY: an open context.
    let ours = unsafe { Context::of(context) };
    if let Err(e) = ours.inner.check_here() {
        return null(&e);
    }
    ours.uses.add();
    give(Pd { base: ibv_pd { context, handle: 0 }, inner: ours.inner.alloc_pd(), uses: Uses::default() }).cast()
}

pub unsafe extern "C" fn ibv_dealloc_pd(pd: *mut ibv_pd) -> c_int {
    // SAFETY: `alloc_pd` made it; where the call succeeds the program does not use it any more.
    unsafe {
        let (ours, context) = (Pd::of(pd), (*pd).context);
        if Context::of(context).is_inherited() {
            return 0;
        }
        if let Err(busy) = ours.uses.check("a protection domain", "regions, windows, handles and queues") {
            return busy;
        }
        drop(take::<Pd, _>(pd));
        Context::release(context);
    }
    0
}

pub unsafe extern "C" fn ibv_reg_mr(pd: *mut ibv_pd, at: *mut c_void, len: usize, access: c_int) -> *mut ibv_mr {
    // SAFETY: as the caller promises.
    unsafe { ibv_reg_mr_iova2(pd, at, len, at as u64, access as c_uint) }
}

pub unsafe extern "C" fn ibv_reg_mr_iova(
    pd: *mut ibv_pd,
    at: *mut c_void,
    len: usize,
    iova: u64,
    access: c_int,
) -> *mut ibv_mr {
    // SAFETY: as the caller promises.
    unsafe { ibv_reg_mr_iova2(pd, at, len, iova, access as c_uint) }
}

pub unsafe extern "C" fn ibv_reg_mr_iova2(
    pd: *mut ibv_pd,
    at: *mut c_void,
    len: usize,
    iova: u64,
    access: c_uint,
) -> *mut ibv_mr {
    // SAFETY: a domain of ours; the program keeps the memory until it deregisters.
    unsafe {
        match Pd::of(pd).inner.reg_mr(at.cast(), len, iova, Access::from_bits(access)) {
            Ok(inner) => region(pd, at, iova, access, false, inner),
            Err(e) => null(&e),
        }
    }
}

/// # Safety
/// A domain of ours.
unsafe fn region(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    iova: u64,
    access: c_uint,
    dmabuf: bool,
    inner: softroce::Mr,
) -> *mut ibv_mr {
    // SAFETY: as the caller promises.
    let context = unsafe { (*pd).context };
    let (length, lkey, rkey) = (inner.len(), inner.lkey(), inner.rkey());
    // SAFETY: as above.
    unsafe { Pd::of(pd) }.uses.add();
    let base = ibv_mr { context, pd, addr, length, handle: 0, lkey, rkey };
    give(Mr { base, iova, access, dmabuf, inner }).cast()
}

pub unsafe extern "C" fn ibv_dereg_mr(mr: *mut ibv_mr) -> c_int {
    // SAFETY: `reg_mr` made it; where the call succeeds the program does not use it any more.
    unsafe {
        if Context::of((*mr).context).is_inherited() {
            return 0;
        }
        if (*mr.cast::<Mr>()).inner.has_windows() {
            return code(&softroce::Error::new(libc::EBUSY, "a memory window is bound to the region"));
        }
        let pd = (*mr).pd;
        drop(take::<Mr, _>(mr));
        Pd::of(pd).uses.release();
    }
    0
}

/// Results of `ibv_rereg_mr` for arguments that do not fit, and for a change that failed (`ibv_rereg_mr_err_code`).
const ERR_INPUT: c_int = -1;
const ERR_CMD: c_int = -4;

/// Changes a region's memory, domain or rights, under the same keys. Where it fails the region is what it was.
pub unsafe extern "C" fn ibv_rereg_mr(
    mr: *mut ibv_mr,
    flags: c_int,
    pd: *mut ibv_pd,
    at: *mut c_void,
    len: usize,
    access: c_int,
) -> c_int {
    let has = |flag: c_uint| flags as c_uint & flag != 0;
    let known = IBV_REREG_MR_CHANGE_TRANSLATION | IBV_REREG_MR_CHANGE_PD | IBV_REREG_MR_CHANGE_ACCESS;
    let moved = has(IBV_REREG_MR_CHANGE_TRANSLATION);
    // SAFETY: a region of ours.
    let dmabuf = unsafe { (*mr.cast::<Mr>()).dmabuf };
    if flags == 0
        || dmabuf
        || has(!known)
        || (moved && (at.is_null() || len == 0))
        || (has(IBV_REREG_MR_CHANGE_PD) && pd.is_null())
    {
        crate::set_errno(libc::EINVAL);
        return ERR_INPUT;
    }
    // SAFETY: a region and a domain of ours; the program keeps the memory until it deregisters.
    unsafe {
        let old = &mut *mr.cast::<Mr>();
        let pd = if has(IBV_REREG_MR_CHANGE_PD) { pd } else { old.base.pd };
        let (at, len, iova) = if moved { (at, len, at as u64) } else { (old.base.addr, old.base.length, old.iova) };
        let access = if has(IBV_REREG_MR_CHANGE_ACCESS) { access as c_uint } else { old.access };
        let domain = &Pd::of(pd).inner;
        if let Err(e) = old.inner.change(domain, at.cast(), len, iova, Access::from_bits(access)) {
            code(&e);
            return ERR_CMD;
        }
        Pd::of(pd).uses.add();
        Pd::of(old.base.pd).uses.release();
        (old.base.pd, old.base.addr, old.base.length) = (pd, at, len);
        (old.iova, old.access) = (iova, access);
    }
    0
}

/// Fields of [`ibv_mr_init_attr`] that are there, in `comp_mask` (`enum ibv_mr_init_attr_mask`).
const IBV_REG_MR_MASK_IOVA: u64 = 1;
const IBV_REG_MR_MASK_ADDR: u64 = 1 << 1;
const IBV_REG_MR_MASK_FD: u64 = 1 << 2;
const IBV_REG_MR_MASK_FD_OFFSET: u64 = 1 << 3;

/// Registers memory as an attribute describes it: of the program, or another driver's.
pub unsafe extern "C" fn ibv_reg_mr_ex(pd: *mut ibv_pd, attr: *mut ibv_mr_init_attr) -> *mut ibv_mr {
    // SAFETY: the program's attribute.
    let (mask, length, access) = unsafe { ((*attr).comp_mask, (*attr).length, (*attr).access) };
    let has = |bit: u64| mask & bit != 0;
    let (memory, file) = (has(IBV_REG_MR_MASK_ADDR), has(IBV_REG_MR_MASK_FD));
    let known = IBV_REG_MR_MASK_IOVA | IBV_REG_MR_MASK_ADDR | IBV_REG_MR_MASK_FD | IBV_REG_MR_MASK_FD_OFFSET;
    if mask & !known != 0 {
        return null(&softroce::Error::new(libc::EOPNOTSUPP, format!("regions with mask {mask:#x}")));
    }
    if memory == file || has(IBV_REG_MR_MASK_FD_OFFSET) != file || (file && !has(IBV_REG_MR_MASK_IOVA)) {
        return null(&softroce::Error::new(libc::EINVAL, format!("a region with mask {mask:#x}")));
    }
    // SAFETY: as the caller promises.
    unsafe {
        if file {
            return ibv_reg_dmabuf_mr(pd, (*attr).fd_offset, length, (*attr).iova, (*attr).fd, access);
        }
        let at = (*attr).addr;
        let iova = if has(IBV_REG_MR_MASK_IOVA) { (*attr).iova } else { at as u64 };
        ibv_reg_mr_iova2(pd, at, length, iova, access as c_uint)
    }
}

/// Registers another driver's memory. Its `addr` is the offset, as libibverbs has it.
pub unsafe extern "C" fn ibv_reg_dmabuf_mr(
    pd: *mut ibv_pd,
    offset: u64,
    len: usize,
    iova: u64,
    fd: c_int,
    access: c_int,
) -> *mut ibv_mr {
    // Programs test by it whether dma-bufs are supported: NCCL does.
    if fd < 0 {
        return null(&softroce::Error::new(libc::EBADF, "registering a dma-buf: the descriptor is negative"));
    }
    // SAFETY: a domain of ours; the program keeps the descriptor until this returns, the memory until it deregisters.
    unsafe {
        let (ours, access) = (Pd::of(pd), access as c_uint);
        let fd = BorrowedFd::borrow_raw(fd);
        match ours.inner.reg_dmabuf_mr(offset, len, iova, fd, Access::from_bits(access)) {
            Ok(inner) => region(pd, offset as *mut c_void, iova, access, true, inner),
            Err(e) => null(&e),
        }
    }
}
