//! Events.

use cudarc::driver::sys::{self, CUevent, CUresult::*};

use super::*;

pub(super) fn event(flags: u32) -> CUevent {
    let mut event = std::ptr::null_mut();
    // SAFETY: writes the handle.
    ok(unsafe { sys::cuEventCreate(&mut event, flags) });
    event
}

pub(super) fn record(event: CUevent, stream: sys::CUstream) -> CUresult {
    // SAFETY: handles of this test.
    unsafe { sys::cuEventRecord(event, stream) }
}

pub(super) fn wait_for(stream: sys::CUstream, event: CUevent) -> CUresult {
    // SAFETY: as above.
    unsafe { sys::cuStreamWaitEvent(stream, event, 0) }
}

fn query_event(event: CUevent) -> CUresult {
    // SAFETY: as above.
    unsafe { sys::cuEventQuery(event) }
}

#[test]
fn an_event_is_reached_when_its_stream_is_there() {
    if !here() {
        return;
    }
    let (one, two, reached) = (stream(), stream(), event(0));
    let [gate, done] = words(2) else { panic!("two words") };
    // Nowhere recorded: nothing to wait for.
    ok(query_event(reached));
    ok(wait_for(two, reached));
    ok(wait(one, gate, 1));
    ok(record(reached, one));
    ok(wait_for(two, reached));
    ok(write(two, done, 1));
    let_others_run();
    fails(query_event(reached), CUDA_ERROR_NOT_READY);
    fails(query(two), CUDA_ERROR_NOT_READY);
    assert_eq!(done.load(Ordering::Acquire), 0);
    // The wait is for where it was recorded then.
    ok(record(reached, two));
    release(gate);
    // SAFETY: an event of ours.
    ok(unsafe { sys::cuEventSynchronize(reached) });
    assert_eq!(done.load(Ordering::Acquire), 1);
    ok(query_event(reached));
    // SAFETY: used no more.
    ok(unsafe { sys::cuEventDestroy_v2(reached) });
}

#[test]
fn times_are_of_timed_events_that_are_reached() {
    if !here() {
        return;
    }
    let (stream, gate) = (stream(), &words(1)[0]);
    let (begin, end, untimed) = (event(0), event(0), event(2));
    let elapsed = |begin, end| {
        let mut time = -1f32;
        // SAFETY: writes the time.
        (unsafe { sys::cuEventElapsedTime(&mut time, begin, end) }, time)
    };
    fails(elapsed(begin, end).0, CUDA_ERROR_INVALID_HANDLE);
    ok(record(begin, stream));
    ok(wait(stream, gate, 1));
    ok(record(end, stream));
    ok(record(untimed, stream));
    fails(elapsed(begin, end).0, CUDA_ERROR_NOT_READY);
    release(gate);
    ok(synchronize(stream));
    let (result, time) = elapsed(begin, end);
    ok(result);
    assert!(time >= 0.0 && elapsed(end, begin).1 <= 0.0, "{time}");
    fails(elapsed(begin, untimed).0, CUDA_ERROR_INVALID_HANDLE);
}

#[test]
fn an_event_belongs_to_its_context() {
    if !here() {
        return;
    }
    let (primary, mine) = (context(0), stream());
    let mut own = std::ptr::null_mut();
    // SAFETY: writes the handle, and makes it current.
    ok(unsafe { sys::cuCtxCreate_v2(&mut own, 0, 0) });
    let other = event(0);
    fails(record(other, mine), CUDA_ERROR_INVALID_HANDLE);
    let theirs = stream();
    ok(record(other, theirs));
    // A wait may be across contexts.
    ok(wait_for(mine, other));
    ok(synchronize(mine));
    // SAFETY: ours, used no more.
    ok(unsafe { sys::cuCtxDestroy_v2(own) });
    // SAFETY: it lives.
    ok(unsafe { sys::cuCtxSetCurrent(primary) });
}
