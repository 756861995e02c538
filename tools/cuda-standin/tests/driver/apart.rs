//! State that a process has only once, and errors that end it: each of these tests has a separate process.

use cudarc::driver::sys::{self, CUresult::*};

use super::*;

#[test]
fn before_the_driver_is_initialised() {
    if driver().is_empty() {
        return;
    }
    let mut count = 0;
    // SAFETY: writes the number.
    fails(unsafe { sys::cuDeviceGetCount(&mut count) }, CUDA_ERROR_NOT_INITIALIZED);
    let mut version = 0;
    // SAFETY: as above.
    ok(unsafe { sys::cuDriverGetVersion(&mut version) });
    assert!(version >= 12_000);
    // SAFETY: as above.
    fails(unsafe { sys::cuCtxGetDevice(&mut count) }, CUDA_ERROR_NOT_INITIALIZED);
    // SAFETY: a flag that is none.
    fails(unsafe { sys::cuInit(1) }, CUDA_ERROR_INVALID_VALUE);
    assert!(here());
}

#[test]
fn devices_are_as_many_as_the_environment_says() {
    if driver() != "standin" {
        return;
    }
    let (mut count, mut bytes) = (0, 0);
    context(1);
    // SAFETY: writes both.
    unsafe {
        ok(sys::cuDeviceGetCount(&mut count));
        ok(sys::cuDeviceTotalMem_v2(&mut bytes, 0));
    }
    assert_eq!((count, bytes), (2, 64 << 20));
    let mut at = 0;
    // SAFETY: writes the address.
    fails(unsafe { sys::cuMemAlloc_v2(&mut at, 65 << 20) }, CUDA_ERROR_OUT_OF_MEMORY);
    let mut id = [0u8; 32];
    // SAFETY: writes up to 32 bytes. The first device that is visible is the last that is there.
    ok(unsafe { sys::cuDeviceGetPCIBusId(id.as_mut_ptr().cast(), 32, 0) });
    assert!(id.starts_with(b"FFFF:04:00.0\0"), "{id:?}");
    let mut device = 9;
    // SAFETY: a text that ends with a zero.
    ok(unsafe { sys::cuDeviceGetByPCIBusId(&mut device, id.as_ptr().cast()) });
    assert_eq!(device, 0);
}

/// The patience of this process is 0.
#[test]
fn a_wait_without_end_ends_and_loses_the_context() {
    if !is_standin() {
        return;
    }
    let (stream, word) = (stream(), &words(1)[0]);
    ok(wait(stream, word, 1));
    fails(synchronize(stream), CUDA_ERROR_LAUNCH_TIMEOUT);
    fails(query(stream), CUDA_ERROR_LAUNCH_TIMEOUT);
    let mut at = 0;
    // SAFETY: writes the address.
    fails(unsafe { sys::cuMemAlloc_v2(&mut at, 100) }, CUDA_ERROR_LAUNCH_TIMEOUT);
}

/// It ends by a signal: its parent looks for that.
#[test]
fn a_program_that_touches_device_memory_dies() {
    if !here() {
        return;
    }
    let memory = alloc(4096);
    // SAFETY: none: that is the point.
    let byte = unsafe { std::ptr::with_exposed_provenance::<u8>(memory as usize).read_volatile() };
    println!("device memory was read: {byte}");
}
