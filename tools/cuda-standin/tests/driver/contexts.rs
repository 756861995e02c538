//! Contexts, and which one is current.

use cudarc::driver::sys::{self, CUcontext, CUresult::*};

use super::*;

fn current() -> CUcontext {
    let mut context = std::ptr::null_mut();
    // SAFETY: writes the handle.
    ok(unsafe { sys::cuCtxGetCurrent(&mut context) });
    context
}

fn device() -> (CUresult, i32) {
    let mut device = -1;
    // SAFETY: writes the number.
    (unsafe { sys::cuCtxGetDevice(&mut device) }, device)
}

#[test]
fn each_thread_has_a_stack_of_its_own() {
    if !here() {
        return;
    }
    let first = current();
    std::thread::spawn(move || {
        assert!(current().is_null());
        fails(device().0, CUDA_ERROR_INVALID_CONTEXT);
        let mut at = 0;
        // SAFETY: writes the address.
        fails(unsafe { sys::cuMemAlloc_v2(&mut at, 100) }, CUDA_ERROR_INVALID_CONTEXT);
        assert_eq!(context(0).addr(), device_zero());
        assert_eq!(device(), (CUDA_SUCCESS, 0));
    })
    .join()
    .unwrap();
    assert_eq!(current(), first);
    // SAFETY: a context that lives.
    ok(unsafe { sys::cuCtxPushCurrent_v2(first) });
    // SAFETY: none.
    ok(unsafe { sys::cuCtxSetCurrent(std::ptr::null_mut()) });
    // What was below is current again: null takes one off.
    assert_eq!(current(), first);
    let mut popped = std::ptr::null_mut();
    // SAFETY: writes the handle.
    ok(unsafe { sys::cuCtxPopCurrent_v2(&mut popped) });
    assert_eq!((popped, current().is_null()), (first, true));
    // SAFETY: as above.
    fails(unsafe { sys::cuCtxPopCurrent_v2(&mut popped) }, CUDA_ERROR_INVALID_CONTEXT);
    context(0);
}

fn device_zero() -> usize {
    let mut context = std::ptr::null_mut();
    // SAFETY: writes the handle.
    ok(unsafe { sys::cuDevicePrimaryCtxRetain(&mut context, 0) });
    context.addr()
}

#[test]
fn a_context_that_was_destroyed_is_of_no_use() {
    if !here() {
        return;
    }
    let mut own = std::ptr::null_mut();
    // SAFETY: writes the handle, and makes it current.
    ok(unsafe { sys::cuCtxCreate_v2(&mut own, 0, 0) });
    let memory = alloc(1000);
    // SAFETY: our context, which no one else uses. Below it is the primary one.
    ok(unsafe { sys::cuCtxPushCurrent_v2(own) });
    let other = own.addr();
    std::thread::spawn(move || {
        let own: CUcontext = std::ptr::without_provenance_mut(other);
        // SAFETY: it lives.
        ok(unsafe { sys::cuCtxSetCurrent(own) });
        // SAFETY: as above; it is current in two threads.
        ok(unsafe { sys::cuCtxDestroy_v2(own) });
    })
    .join()
    .unwrap();
    let mut at = 0;
    // SAFETY: writes the address.
    fails(unsafe { sys::cuMemAlloc_v2(&mut at, 100) }, CUDA_ERROR_CONTEXT_IS_DESTROYED);
    context(0);
    // Its memory went with it.
    fails(free(memory), CUDA_ERROR_INVALID_VALUE);
}

#[test]
fn what_is_not_there_is_refused() {
    if !here() {
        return;
    }
    let mut device = 0;
    // SAFETY: writes the number.
    fails(unsafe { sys::cuDeviceGet(&mut device, 99) }, CUDA_ERROR_INVALID_DEVICE);
    let mut context = std::ptr::null_mut();
    // SAFETY: as above.
    fails(unsafe { sys::cuDevicePrimaryCtxRetain(&mut context, 99) }, CUDA_ERROR_INVALID_DEVICE);
    // SAFETY: null is refused.
    fails(unsafe { sys::cuDeviceGetCount(std::ptr::null_mut()) }, CUDA_ERROR_INVALID_VALUE);
    let mut name = [1i8; 8];
    // SAFETY: writes up to eight bytes.
    ok(unsafe { sys::cuDeviceGetName(name.as_mut_ptr(), 8, 0) });
    assert_eq!(name[7], 0);
}

#[test]
fn errors_have_names() {
    if !here() {
        return;
    }
    let mut name = std::ptr::null();
    // SAFETY: writes a pointer to a text that stays.
    let text = unsafe {
        ok(sys::cuGetErrorName(CUDA_ERROR_NOT_READY, &mut name));
        std::ffi::CStr::from_ptr(name)
    };
    assert_eq!(text, c"CUDA_ERROR_NOT_READY");
    // SAFETY: as above.
    let text = unsafe {
        ok(sys::cuGetErrorString(CUDA_ERROR_NOT_READY, &mut name));
        std::ffi::CStr::from_ptr(name)
    };
    assert!(text.to_str().unwrap().contains("not ready"), "{text:?}");
}
