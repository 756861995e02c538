//! Behaviour of the stand-in that NVIDIA's driver does not have.

use cudarc::driver::sys::{self, CUresult::*};

use super::*;

#[test]
fn it_says_what_it_is() {
    if !is_standin() {
        return;
    }
    let mut name = [0u8; 64];
    // SAFETY: writes up to 64 bytes.
    ok(unsafe { sys::cuDeviceGetName(name.as_mut_ptr().cast(), 64, 1) });
    assert!(name.starts_with(b"tinynccl stand-in (no GPU)\0"));
    let (mut reaches, mut module) = (7, std::ptr::null_mut());
    // SAFETY: writes the answer.
    ok(unsafe { sys::cuDeviceCanAccessPeer(&mut reaches, 0, 1) });
    assert_eq!(reaches, 0);
    // SAFETY: refused.
    fails(unsafe { sys::cuModuleLoadData(&mut module, std::ptr::null()) }, CUDA_ERROR_NOT_SUPPORTED);
    let other = context(1);
    context(0);
    // SAFETY: a context that lives.
    fails(unsafe { sys::cuCtxEnablePeerAccess(other, 0) }, CUDA_ERROR_PEER_ACCESS_UNSUPPORTED);
}

/// In a separate context, which is lost.
#[test]
fn work_on_memory_that_is_gone_loses_the_context() {
    if !is_standin() {
        return;
    }
    let primary = context(0);
    let mut own = std::ptr::null_mut();
    // SAFETY: writes the handle, and makes it current.
    ok(unsafe { sys::cuCtxCreate_v2(&mut own, 0, 0) });
    let (one, two) = (stream(), stream());
    let gate = &words(1)[0];
    let mut at = 0;
    // SAFETY: writes the address.
    ok(unsafe { sys::cuMemAllocAsync(&mut at, 400, one) });
    ok(wait(two, gate, 1));
    ok(fill(two, at, 1, 100));
    // SAFETY: too early: that is the point.
    ok(unsafe { sys::cuMemFreeAsync(at, one) });
    ok(synchronize(one));
    release(gate);
    fails(synchronize(two), CUDA_ERROR_ILLEGAL_ADDRESS);
    fails(synchronize(one), CUDA_ERROR_ILLEGAL_ADDRESS);
    // SAFETY: ours, used no more.
    ok(unsafe { sys::cuCtxDestroy_v2(own) });
    // SAFETY: it lives.
    ok(unsafe { sys::cuCtxSetCurrent(primary) });
}
