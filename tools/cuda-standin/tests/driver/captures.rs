//! Captures into graphs, and their launches.

use cudarc::driver::sys::{
    self, CUgraph, CUgraphExec, CUresult::*, CUstream, CUstreamCaptureMode as Mode, CUstreamCaptureStatus as Status,
};

use super::events::{event, record, wait_for};
use super::*;

const LOCAL: Mode = Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
const GLOBAL: Mode = Mode::CU_STREAM_CAPTURE_MODE_GLOBAL;

fn begin(stream: CUstream, mode: Mode) -> CUresult {
    // SAFETY: a stream of this test.
    unsafe { sys::cuStreamBeginCapture_v2(stream, mode) }
}

fn end(stream: CUstream) -> (CUresult, CUgraph) {
    let mut graph = std::ptr::null_mut();
    // SAFETY: as above; writes the handle.
    (unsafe { sys::cuStreamEndCapture(stream, &mut graph) }, graph)
}

fn status(stream: CUstream) -> Status {
    let mut status = Status::CU_STREAM_CAPTURE_STATUS_NONE;
    // SAFETY: as above.
    ok(unsafe { sys::cuStreamIsCapturing(stream, &mut status) });
    status
}

fn instantiate(graph: CUgraph) -> CUgraphExec {
    let mut executable = std::ptr::null_mut();
    // SAFETY: writes the handle; the graph is not needed any more then.
    unsafe {
        ok(sys::cuGraphInstantiateWithFlags(&mut executable, graph, 0));
        ok(sys::cuGraphDestroy(graph));
    }
    executable
}

fn launch(graph: CUgraphExec, stream: CUstream) {
    // SAFETY: its memory lives until the stream has been waited for.
    ok(unsafe { sys::cuGraphLaunch(graph, stream) });
}

#[test]
fn what_is_captured_is_done_at_each_launch() {
    if !here() {
        return;
    }
    let (stream, one, two) = (stream(), alloc(400), alloc(400));
    ok(fill(stream, one, 1, 100));
    ok(fill(stream, two, 0, 100));
    ok(synchronize(stream));
    assert_eq!(status(stream), Status::CU_STREAM_CAPTURE_STATUS_NONE);
    ok(begin(stream, LOCAL));
    assert_eq!(status(stream), Status::CU_STREAM_CAPTURE_STATUS_ACTIVE);
    // SAFETY: 400 bytes each, until the graph's last launch.
    ok(unsafe { sys::cuMemcpyDtoDAsync_v2(two, one, 400, stream) });
    ok(fill(stream, one, 9, 100));
    let (result, graph) = end(stream);
    ok(result);
    assert_eq!(status(stream), Status::CU_STREAM_CAPTURE_STATUS_NONE);
    assert_eq!(read(stream, two, 100), [0; 100], "nothing was done so far");
    let graph = instantiate(graph);
    for (before, after) in [(3, 3), (4, 4)] {
        ok(fill(stream, one, before, 100));
        launch(graph, stream);
        assert_eq!(read(stream, two, 100), [after; 100]);
        assert_eq!(read(stream, one, 100), [9; 100]);
    }
    launch(graph, stream);
    launch(graph, stream);
    assert_eq!(read(stream, two, 100), [9; 100]);
    // SAFETY: used no more.
    ok(unsafe { sys::cuGraphExecDestroy(graph) });
    ok(free(one));
    ok(free(two));
}

#[test]
fn other_streams_join_by_events_and_come_back() {
    if !here() {
        return;
    }
    let (one, two, forth, back) = (stream(), stream(), event(2), event(2));
    let memory = alloc(400);
    ok(begin(one, LOCAL));
    ok(fill(one, memory, 1, 100));
    ok(record(forth, one));
    ok(wait_for(two, forth));
    assert_eq!(status(two), Status::CU_STREAM_CAPTURE_STATUS_ACTIVE);
    ok(fill(two, memory, 2, 50));
    ok(record(back, two));
    ok(wait_for(one, back));
    ok(fill(one, memory, 3, 25));
    let (result, graph) = end(one);
    ok(result);
    assert_eq!(status(two), Status::CU_STREAM_CAPTURE_STATUS_NONE);
    launch(instantiate(graph), two);
    let got = read(two, memory, 100);
    assert!(got[..25].iter().all(|&x| x == 3) && got[25..50].iter().all(|&x| x == 2) && got[50..] == [1; 50]);
    ok(free(memory));
}

#[test]
fn a_stream_that_does_not_come_back_spoils_the_capture() {
    if !here() {
        return;
    }
    let (one, two, forth, memory) = (stream(), stream(), event(2), alloc(400));
    ok(begin(one, LOCAL));
    ok(record(forth, one));
    ok(wait_for(two, forth));
    ok(fill(two, memory, 2, 50));
    fails(end(one).0, CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
    // Both are as before.
    ok(fill(two, memory, 2, 50));
    ok(synchronize(two));
    ok(synchronize(one));
    ok(free(memory));
}

#[test]
fn a_capture_that_is_ended_in_another_stream_is_spoiled() {
    if !here() {
        return;
    }
    let (one, two, forth) = (stream(), stream(), event(2));
    ok(begin(one, LOCAL));
    ok(record(forth, one));
    ok(wait_for(two, forth));
    fails(end(two).0, CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
    fails(end(one).0, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    ok(synchronize(two));
    ok(synchronize(one));
}

#[test]
fn waits_for_what_is_captured_are_refused() {
    if !here() {
        return;
    }
    let (stream, inside, outside, memory) = (stream(), event(2), event(2), alloc(400));
    let gate = &words(1)[0];
    let spoiled = |result: CUresult, with: CUresult| {
        fails(result, with);
        assert_eq!(status(stream), Status::CU_STREAM_CAPTURE_STATUS_INVALIDATED);
        fails(fill(stream, memory, 1, 1), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        let (result, graph) = end(stream);
        fails(result, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        assert!(graph.is_null());
        ok(synchronize(stream));
    };
    ok(begin(stream, LOCAL));
    spoiled(synchronize(stream), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    ok(begin(stream, LOCAL));
    spoiled(query(stream), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    ok(begin(stream, LOCAL));
    ok(record(inside, stream));
    // SAFETY: an event of ours.
    spoiled(unsafe { sys::cuEventQuery(inside) }, CUDA_ERROR_CAPTURED_EVENT);
    // An event of a stream that still waits: the graph would be bound to the present.
    let other = super::stream();
    ok(wait(other, gate, 1));
    ok(record(outside, other));
    ok(begin(stream, LOCAL));
    spoiled(wait_for(stream, outside), CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
    release(gate);
    ok(synchronize(other));
    ok(free(memory));
}

#[test]
fn the_default_stream_is_refused_while_a_blocking_one_is_captured() {
    if !here() {
        return;
    }
    let (blocking, memory) = (stream_of(0), alloc(400));
    fails(begin(std::ptr::null_mut(), LOCAL), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    ok(begin(blocking, LOCAL));
    fails(fill(std::ptr::null_mut(), memory, 1, 1), CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    fails(end(blocking).0, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    ok(free(memory));
}

/// Only this thread, in this process, captures globally: the tests of captures are in one test for that.
#[test]
fn allocating_is_refused_unless_the_thread_relaxes() {
    if !here() {
        return;
    }
    let stream = stream();
    let mut at = 0;
    // SAFETY: writes the address.
    let mut allocate = || unsafe { sys::cuMemAlloc_v2(&mut at, 100) };
    ok(begin(stream, LOCAL));
    fails(allocate(), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    fails(end(stream).0, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    let mut mode = Mode::CU_STREAM_CAPTURE_MODE_RELAXED;
    ok(begin(stream, LOCAL));
    // SAFETY: exchanges the value.
    ok(unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut mode) });
    assert_eq!(mode, GLOBAL);
    ok(allocate());
    // SAFETY: as above.
    ok(unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut mode) });
    assert_eq!(mode, Mode::CU_STREAM_CAPTURE_MODE_RELAXED);
    let (result, graph) = end(stream);
    ok(result);
    // SAFETY: used no more.
    ok(unsafe { sys::cuGraphDestroy(graph) });
    ok(free(at));
}

#[test]
fn a_capture_ends_in_the_thread_where_it_began() {
    if !here() {
        return;
    }
    let stream = stream();
    ok(begin(stream, LOCAL));
    let handle = stream.addr();
    std::thread::spawn(move || {
        context(0);
        fails(end(std::ptr::without_provenance_mut(handle)).0, CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
    })
    .join()
    .unwrap();
    // That was its end all the same.
    fails(end(stream).0, CUDA_ERROR_ILLEGAL_STATE);
    ok(synchronize(stream));
}
