//! Streams: order, independence, waits, functions of the program.

use std::ffi::c_void;
use std::sync::Mutex;

use cudarc::driver::sys::{self, CUresult::*, CUstream};

use super::*;

#[test]
fn a_stream_waits_for_a_word_and_another_does_not() {
    if !here() {
        return;
    }
    let (waits, free) = (stream(), stream());
    let [gate, first, second] = words(3) else { panic!("three words") };
    ok(wait(waits, gate, 1));
    ok(write(waits, first, 1));
    ok(write(free, second, 1));
    ok(synchronize(free));
    assert_eq!((first.load(Ordering::Acquire), second.load(Ordering::Acquire)), (0, 1));
    fails(query(waits), CUDA_ERROR_NOT_READY);
    ok(query(free));
    release(gate);
    ok(synchronize(waits));
    assert_eq!(first.load(Ordering::Acquire), 1);
    ok(query(waits));
}

#[test]
fn waits_compare_as_they_are_told() {
    if !here() {
        return;
    }
    let stream = stream();
    let word = &words(2)[0];
    let at = address(word);
    // True at once, each: at least (with wrapping), equal, and, nor.
    for (found, value, flags) in
        [(5u32, 5u32, 0u32), (6, 5, 0), (2, u32::MAX, 0), (7, 7, 1), (6, 2, 2), (0, 1, 3), (u32::MAX - 1, 0, 3)]
    {
        word.store(found, Ordering::Release);
        // SAFETY: memory that lives.
        ok(unsafe { sys::cuStreamWaitValue32_v2(stream, at, value, flags) });
        if flags < 3 && value < 100 {
            // SAFETY: as above; 64 bits, of which the upper ones are 0.
            ok(unsafe { sys::cuStreamWaitValue64_v2(stream, at & !7, value.into(), flags) });
        }
        ok(synchronize(stream));
    }
    // SAFETY: refused.
    fails(unsafe { sys::cuStreamWaitValue32_v2(stream, at + 1, 0, 0) }, CUDA_ERROR_INVALID_VALUE);
    let pageable = AtomicU32::new(0);
    // SAFETY: refused: the device does not know this memory.
    fails(unsafe { sys::cuStreamWriteValue32_v2(stream, pageable.as_ptr() as u64, 0, 0) }, CUDA_ERROR_INVALID_VALUE);
}

#[test]
fn streams_release_each_other() {
    if !here() {
        return;
    }
    let (one, two) = (stream(), stream());
    let words = words(100);
    for (i, pair) in words.chunks(2).enumerate() {
        let value = i as u32 + 1;
        ok(wait(one, &pair[0], value));
        ok(write(one, &pair[1], value));
        ok(write(two, &pair[0], value));
        ok(wait(two, &pair[1], value));
    }
    ok(synchronize(one));
    ok(synchronize(two));
}

#[test]
fn a_batch_of_memory_operations_is_done_in_order() {
    if !here() {
        return;
    }
    use sys::CUstreamBatchMemOpType as Type;
    let stream = stream();
    let [gate, done] = words(2) else { panic!("two words") };
    // SAFETY: a union of numbers and addresses.
    let mut list: [sys::CUstreamBatchMemOpParams; 2] = unsafe { std::mem::zeroed() };
    // SAFETY: the members that the operations select.
    unsafe {
        list[0].waitValue.operation = Type::CU_STREAM_MEM_OP_WAIT_VALUE_32;
        list[0].waitValue.address = address(gate);
        list[0].waitValue.__bindgen_anon_1.value = 1;
        list[1].writeValue.operation = Type::CU_STREAM_MEM_OP_WRITE_VALUE_32;
        list[1].writeValue.address = address(done);
        list[1].writeValue.__bindgen_anon_1.value = 8;
        ok(sys::cuStreamBatchMemOp_v2(stream, 2, list.as_mut_ptr(), 0));
    }
    fails(query(stream), CUDA_ERROR_NOT_READY);
    assert_eq!(done.load(Ordering::Acquire), 0);
    release(gate);
    ok(synchronize(stream));
    assert_eq!(done.load(Ordering::Acquire), 8);
}

/// Blocking streams and the default stream wait for each other; the others do not.
#[test]
fn the_default_stream_waits_for_blocking_ones() {
    if !here() {
        return;
    }
    let legacy: CUstream = std::ptr::null_mut();
    let (blocking, other) = (stream_of(0), stream());
    let [gate, first, second, third] = words(4) else { panic!("four words") };
    ok(wait(blocking, gate, 1));
    ok(write(legacy, first, 1));
    ok(write(blocking, second, 1));
    ok(write(other, third, 1));
    ok(synchronize(other));
    let all = || [first, second, third].map(|word| word.load(Ordering::Acquire));
    let_others_run();
    assert_eq!(all(), [0, 0, 1]);
    fails(query(legacy), CUDA_ERROR_NOT_READY);
    release(gate);
    ok(synchronize(legacy));
    assert_eq!(first.load(Ordering::Acquire), 1);
    ok(synchronize(blocking));
    assert_eq!(all(), [1, 1, 1]);
    // The other way round.
    gate.store(0, Ordering::Release);
    ok(wait(legacy, gate, 1));
    ok(write(blocking, second, 2));
    ok(write(other, third, 2));
    ok(synchronize(other));
    let_others_run();
    assert_eq!(all(), [1, 1, 2]);
    release(gate);
    ok(synchronize(blocking));
    assert_eq!(all(), [1, 2, 2]);
}

unsafe extern "C" fn note(list: *mut c_void) {
    // SAFETY: of the test below, which waits for the stream.
    let list = unsafe { &*list.cast::<Mutex<Vec<usize>>>() };
    let mut list = list.lock().unwrap();
    let next = list.len();
    list.push(next);
}

#[test]
fn functions_of_the_program_are_called_in_order() {
    if !here() {
        return;
    }
    let (stream, list) = (stream(), Mutex::new(Vec::<usize>::new()));
    let done = &words(1)[0];
    let data = (&raw const list).cast_mut().cast();
    for _ in 0..2000 {
        // SAFETY: the list lives until the stream has been waited for.
        ok(unsafe { sys::cuLaunchHostFunc(stream, Some(note), data) });
    }
    ok(write(stream, done, 1));
    ok(synchronize(stream));
    assert_eq!(*list.lock().unwrap(), (0..2000).collect::<Vec<usize>>());
    // SAFETY: refused.
    fails(unsafe { sys::cuLaunchHostFunc(stream, None, data) }, CUDA_ERROR_INVALID_VALUE);
}

#[test]
fn a_stream_that_is_destroyed_does_its_work() {
    if !here() {
        return;
    }
    let (stream, other) = (stream(), stream());
    let [gate, done] = words(2) else { panic!("two words") };
    ok(wait(stream, gate, 1));
    ok(write(stream, done, 5));
    // SAFETY: ours, and used no more.
    ok(unsafe { sys::cuStreamDestroy_v2(stream) });
    release(gate);
    ok(wait(other, done, 5));
    ok(synchronize(other));
}

#[test]
fn streams_say_what_they_are() {
    if !here() {
        return;
    }
    let (mut least, mut greatest, mut made) = (1, 1, std::ptr::null_mut());
    // SAFETY: writes both.
    ok(unsafe { sys::cuCtxGetStreamPriorityRange(&mut least, &mut greatest) });
    assert!(least == 0 && greatest < 0);
    // SAFETY: writes the handle.
    ok(unsafe { sys::cuStreamCreateWithPriority(&mut made, 1, greatest - 100) });
    let (mut priority, mut flags, mut of) = (1, 7, std::ptr::null_mut());
    // SAFETY: writes all three.
    unsafe {
        ok(sys::cuStreamGetPriority(made, &mut priority));
        ok(sys::cuStreamGetFlags(made, &mut flags));
        ok(sys::cuStreamGetCtx(made, &mut of));
    }
    assert_eq!((priority, flags, of), (greatest, 1, context(0)));
    // SAFETY: refused.
    fails(unsafe { sys::cuStreamCreate(&mut made, 99) }, CUDA_ERROR_INVALID_VALUE);
}
