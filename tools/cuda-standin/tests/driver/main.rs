//! Behaviour that a program may expect of CUDA's driver, called through the bindings that the library uses.
//!
//! The tests are run over the stand-in: `over_standin` starts this program again. They hold for NVIDIA's driver as
//! well, but for those in `standin.rs`: with `TINYNCCL_TEST_DRIVER=nvidia` they run over it, on a machine with a GPU.

mod apart;
mod captures;
mod contexts;
mod events;
mod memory;
mod standin;
mod streams;

use std::process::{Command, Output};
use std::sync::atomic::{AtomicU32, Ordering};

use cudarc::driver::sys::{self, CUresult, CUstream};

/// Set where tests are to run: to `standin` or `nvidia`.
const DRIVER: &str = "TINYNCCL_TEST_DRIVER";

/// Runs this program's tests over the stand-in.
fn again(arguments: &[&str], settings: &[(&str, &str)]) -> Output {
    Command::new(std::env::current_exe().unwrap())
        .args(arguments)
        .env("LD_LIBRARY_PATH", cuda_standin::folder().unwrap())
        .env(DRIVER, "standin")
        .env_remove("CUDA_VISIBLE_DEVICES")
        .envs(settings.iter().copied())
        .output()
        .unwrap()
}

fn passes(output: &Output) {
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && !out.contains("running 0 tests"), "{}\n{out}\n{err}", output.status);
}

#[test]
fn over_standin() {
    // One after the other: a capture in one thread forbids calls in others.
    passes(&again(&["--test-threads=1", "--skip", "over_standin", "--skip", "apart::"], &[]));
}

#[test]
fn over_standin_apart() {
    passes(&again(&["before_the_driver"], &[]));
    passes(&again(&["a_wait_without_end"], &[("TINYNCCL_STANDIN_PATIENCE", "0")]));
    let settings =
        [("TINYNCCL_STANDIN_DEVICES", "4"), ("CUDA_VISIBLE_DEVICES", "3,1"), ("TINYNCCL_STANDIN_MEMORY", "64")];
    passes(&again(&["devices_are_as_many_as"], &settings));
    let touched = again(&["a_program_that_touches", "--nocapture"], &[]);
    let signal = std::os::unix::process::ExitStatusExt::signal(&touched.status);
    assert_eq!(signal, Some(11), "{}", String::from_utf8_lossy(&touched.stdout));
}

fn driver() -> String {
    std::env::var(DRIVER).unwrap_or_default()
}

/// Returns true if this process is to run tests over a driver; GPU 0 is current afterwards.
fn here() -> bool {
    let here = !driver().is_empty();
    if here {
        context(0);
    }
    here
}

/// Returns true if this process runs over the stand-in.
fn is_standin() -> bool {
    here() && driver() == "standin"
}

/// Makes a GPU's primary context current. It is never released.
fn context(device: i32) -> sys::CUcontext {
    let mut context = std::ptr::null_mut();
    // SAFETY: writes the handle.
    ok(unsafe { sys::cuInit(0) });
    // SAFETY: as above.
    ok(unsafe { sys::cuDevicePrimaryCtxRetain(&mut context, device) });
    // SAFETY: a context that lives.
    ok(unsafe { sys::cuCtxSetCurrent(context) });
    context
}

#[track_caller]
fn ok(result: CUresult) {
    assert_eq!(result, CUresult::CUDA_SUCCESS);
}

#[track_caller]
fn fails(result: CUresult, with: CUresult) {
    assert_eq!(result, with);
}

/// A stream that does not wait for the default one.
fn stream() -> CUstream {
    stream_of(1)
}

fn stream_of(flags: u32) -> CUstream {
    let mut stream = std::ptr::null_mut();
    // SAFETY: writes the handle.
    ok(unsafe { sys::cuStreamCreate(&mut stream, flags) });
    stream
}

fn synchronize(stream: CUstream) -> CUresult {
    // SAFETY: a stream, or what the driver must refuse.
    unsafe { sys::cuStreamSynchronize(stream) }
}

fn query(stream: CUstream) -> CUresult {
    // SAFETY: as above.
    unsafe { sys::cuStreamQuery(stream) }
}

/// Device memory.
fn alloc(bytes: usize) -> u64 {
    let mut at = 0;
    // SAFETY: writes the address.
    ok(unsafe { sys::cuMemAlloc_v2(&mut at, bytes) });
    at
}

fn free(at: u64) -> CUresult {
    // SAFETY: memory that no one uses, or what the driver must refuse.
    unsafe { sys::cuMemFree_v2(at) }
}

/// Page-locked words, all 0, for streams and this program. They stay forever.
fn words(count: usize) -> &'static [AtomicU32] {
    let mut at = std::ptr::null_mut();
    let flags = sys::CU_MEMHOSTALLOC_DEVICEMAP | sys::CU_MEMHOSTALLOC_PORTABLE;
    // SAFETY: writes the address.
    ok(unsafe { sys::cuMemHostAlloc(&mut at, 4 * count, flags) });
    // SAFETY: fresh, that long, never freed; zeroes are valid.
    unsafe {
        at.cast::<u32>().write_bytes(0, count);
        std::slice::from_raw_parts(at.cast(), count)
    }
}

/// Returns the address by which a stream reaches a page-locked word.
fn address(word: &AtomicU32) -> u64 {
    let mut at = 0;
    // SAFETY: writes the address.
    ok(unsafe { sys::cuMemHostGetDevicePointer_v2(&mut at, word.as_ptr().cast(), 0) });
    at
}

/// Makes a stream wait until a word is at least `value`.
fn wait(stream: CUstream, word: &AtomicU32, value: u32) -> CUresult {
    // SAFETY: memory that lives forever.
    unsafe { sys::cuStreamWaitValue32_v2(stream, address(word), value, 0) }
}

/// Makes a stream write a word.
fn write(stream: CUstream, word: &AtomicU32, value: u32) -> CUresult {
    // SAFETY: as above.
    unsafe { sys::cuStreamWriteValue32_v2(stream, address(word), value, 0) }
}

fn release(word: &AtomicU32) {
    word.store(1, Ordering::Release);
}

/// Gives other streams the time to do what they must not do: a test cannot fail by it, only find less.
fn let_others_run() {
    let (own, word) = (stream(), &words(1)[0]);
    for turn in 0..1000 {
        ok(write(own, word, turn));
        ok(synchronize(own));
    }
}

/// A `memset` of words.
fn fill(stream: CUstream, at: u64, value: u32, count: usize) -> CUresult {
    // SAFETY: memory of `count` words, or what the driver must refuse.
    unsafe { sys::cuMemsetD32Async(at, value, count, stream) }
}

/// Reads words of device memory, when the stream has come here.
fn read(stream: CUstream, at: u64, count: usize) -> Vec<u32> {
    let mut words = vec![0u32; count];
    // SAFETY: `count` words on both sides, until the stream is waited for.
    ok(unsafe { sys::cuMemcpyDtoHAsync_v2(words.as_mut_ptr().cast(), at, 4 * count, stream) });
    ok(synchronize(stream));
    words
}
