//! Memory of the library, registrations and windows, where ranks do not reach each other's memory.

use std::ffi::c_void;

use super::functions::*;
use super::rank::{INVALID_ARGUMENT, INVALID_USAGE, Rank, gpu, ok, refused, threads};

/// Writes numbers into memory that is there, sums them over the ranks in place, and checks.
fn sums(rank: &Rank, at: *mut c_void, count: usize) {
    let numbers = vec![1 + rank.rank as i32; count];
    rank.context.bind_to_thread().unwrap();
    // SAFETY: memory of `count` numbers, which nothing else uses.
    unsafe { cudarc::driver::result::memcpy_htod_sync(at as u64, &numbers) }.unwrap();
    ok(ncclAllReduce(at, at, count, 2, 0, rank.comm, rank.stream()));
    rank.wait();
    let mut got = vec![0i32; count];
    // SAFETY: as above.
    unsafe { cudarc::driver::result::memcpy_dtoh_sync(&mut got, at as u64) }.unwrap();
    assert!(got.iter().all(|&x| x == (rank.size * (rank.size + 1) / 2) as i32), "rank {}", rank.rank);
}

fn alloc(bytes: usize) -> *mut c_void {
    let mut at = std::ptr::null_mut();
    ok(ncclMemAlloc(&mut at, bytes));
    at
}

apart! {
    fn memory_of_the_library_is_of_the_current_gpu() {
        threads(2, |rank| {
            let at = alloc(400_000);
            let mut device = -1i32;
            let attribute = cudarc::driver::sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL;
            // SAFETY: writes the number.
            unsafe { cudarc::driver::sys::cuPointerGetAttribute((&raw mut device).cast(), attribute, at as u64) }
                .result()
                .unwrap();
            assert_eq!(device, rank.rank as i32);
            sums(rank, at, 100_000);
            ok(ncclMemFree(at));
            refused(ncclMemFree(at), INVALID_ARGUMENT, &["ncclMemFree", "ncclMemAlloc"]);
            ok(ncclMemFree(std::ptr::null_mut()));
        });
        let _gpu = gpu(0);
        let mut at = std::ptr::null_mut();
        let status = ncclMemAlloc(&mut at, 1 << 60);
        refused(status, 1, &["CUDA_ERROR_OUT_OF_MEMORY"]);
    }

    fn a_registration_is_a_hint() {
        threads(2, |rank| {
            let (at, mut handle) = (alloc(4000), std::ptr::null_mut());
            ok(ncclCommRegister(rank.comm, at, 4000, &mut handle));
            sums(rank, at, 1000);
            ok(ncclCommDeregister(rank.comm, handle));
            refused(ncclCommDeregister(rank.comm, handle), INVALID_USAGE, &["ncclCommRegister"]);
            ok(ncclMemFree(at));
        });
    }

    // As NCCL has it: no window where there is nothing to map, and no error.
    fn a_window_is_ordinary_memory_here() {
        threads(2, |rank| {
            let (at, mut window) = (alloc(8192), std::ptr::dangling_mut());
            ok(ncclCommWindowRegister(rank.comm, at, 8192, &mut window, 1));
            assert!(window.is_null());
            sums(rank, at, 2048);
            ok(ncclCommWindowDeregister(rank.comm, window));
            ok(ncclMemFree(at));
        });
    }

    fn one_sided_messages_say_why_they_cannot_be() {
        threads(2, |rank| {
            let status = ncclSignal(1 - rank.rank as i32, 0, 0, 0, rank.comm, rank.stream());
            refused(status, INVALID_USAGE, &["ncclSignal", "do not reach each other's memory", "send and receive"]);
            rank.still_works();
        });
    }

    fn a_suspended_communicator_resumes() {
        threads(2, |rank| {
            ok(ncclCommSuspend(rank.comm, 1));
            ok(ncclCommResume(rank.comm));
            refused(ncclCommSuspend(rank.comm, 77), INVALID_ARGUMENT, &["flags is 77"]);
            rank.still_works();
        });
    }
}
