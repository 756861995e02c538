//! Captures of streams into graphs: rules, and lists of work.
//!
//! A capture keeps its operations in the order in which they came. Each stream that takes part knows the operations
//! that it is behind, which shows whether all of them lie before the capture's end.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::thread::ThreadId;

use cudarc::driver::sys::{
    CUgraph, CUgraphNode, CUresult, CUstream, CUstreamCaptureMode as Mode, CUstreamCaptureStatus as Status,
};

use crate::calls::{Answer, ensure, lock, put, put_if_asked};
use crate::context::current;
use crate::graph;
use crate::stream::{Kind, Stream, stream};
use crate::work::Work;

/// A capture.
pub(crate) struct Capture {
    id: u64,
    origin: usize,
    thread: ThreadId,
    mode: Mode,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    work: Vec<Work>,
    streams: Vec<Weak<Stream>>,
    invalid: bool,
    over: bool,
}

/// A stream's part in a capture.
pub(crate) struct Joined {
    capture: Arc<Capture>,
    behind: BTreeSet<usize>,
}

impl Joined {
    pub(crate) fn invalidate(&self) {
        self.capture.invalidate();
    }
}

/// Captures under way.
static ACTIVE: Mutex<Vec<Arc<Capture>>> = Mutex::new(Vec::new());
/// Length of [`ACTIVE`], to be read without its lock.
static COUNT: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static MODE: Cell<Mode> = const { Cell::new(Mode::CU_STREAM_CAPTURE_MODE_GLOBAL) };
}

impl Capture {
    pub(crate) fn invalidate(&self) {
        lock(&self.state).invalid = true;
    }

    fn check(&self) -> Answer {
        let state = lock(&self.state);
        ensure(!state.over, CUresult::CUDA_ERROR_INVALID_VALUE)?;
        ensure(!state.invalid, CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)
    }

    fn end(&self) {
        let mut active = lock(&ACTIVE);
        active.retain(|one| one.id != self.id);
        COUNT.store(active.len(), Ordering::Release);
        drop(active);
        let streams = {
            let mut state = lock(&self.state);
            state.over = true;
            std::mem::take(&mut state.streams)
        };
        for stream in streams.iter().filter_map(Weak::upgrade) {
            let mut joined = lock(&stream.capture);
            if joined.as_ref().is_some_and(|joined| joined.capture.id == self.id) {
                *joined = None;
            }
        }
    }
}

/// The default stream would wait for what is captured, which cannot be.
fn no_implicit_wait(stream: &Stream) -> Answer {
    if stream.kind != Kind::Legacy || COUNT.load(Ordering::Acquire) == 0 {
        return Ok(());
    }
    for other in stream.context()?.streams().iter().filter(|other| other.kind == Kind::Blocking) {
        if let Some(joined) = &*lock(&other.capture) {
            joined.invalidate();
            return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
        }
    }
    Ok(())
}

/// Adds work to the stream's capture; gives it back if there is none.
pub(crate) fn add(stream: &Stream, work: Work) -> Answer<Option<Work>> {
    no_implicit_wait(stream)?;
    let mut joined = lock(&stream.capture);
    let Some(joined) = &mut *joined else { return Ok(Some(work)) };
    joined.capture.check()?;
    let mut state = lock(&joined.capture.state);
    joined.behind.insert(state.work.len());
    state.work.push(work);
    Ok(None)
}

pub(crate) fn is_captured(stream: &Stream) -> bool {
    lock(&stream.capture).is_some()
}

/// For calls that make no sense on a stream that is captured, and spoil the capture.
pub(crate) fn not_captured(stream: &Stream) -> Answer {
    no_implicit_wait(stream)?;
    refuse(stream, CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
}

/// For a wait of a captured stream for something outside of the capture.
pub(crate) fn isolated(stream: &Stream) -> Answer {
    no_implicit_wait(stream)?;
    refuse(stream, CUresult::CUDA_ERROR_STREAM_CAPTURE_ISOLATION)
}

fn refuse(stream: &Stream, error: CUresult) -> Answer {
    match &*lock(&stream.capture) {
        Some(joined) => {
            joined.invalidate();
            Err(error)
        }
        None => Ok(()),
    }
}

/// Returns the capture of a stream and the operations that an event recorded now is behind; `None` if the stream is not
/// captured.
pub(crate) fn mark(stream: &Stream) -> Answer<Option<(Arc<Capture>, BTreeSet<usize>)>> {
    no_implicit_wait(stream)?;
    let joined = lock(&stream.capture);
    let Some(joined) = &*joined else { return Ok(None) };
    joined.capture.check()?;
    Ok(Some((joined.capture.clone(), joined.behind.clone())))
}

/// Makes a stream wait for an event of a capture: it takes part from then on.
pub(crate) fn join(stream: &Arc<Stream>, capture: &Arc<Capture>, behind: &BTreeSet<usize>) -> Answer {
    capture.check()?;
    if stream.kind == Kind::Legacy {
        capture.invalidate();
        return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    }
    let mut joined = lock(&stream.capture);
    match &mut *joined {
        Some(joined) if joined.capture.id != capture.id => {
            joined.invalidate();
            capture.invalidate();
            Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_MERGE)
        }
        Some(joined) => {
            joined.behind.extend(behind);
            Ok(())
        }
        None => {
            lock(&capture.state).streams.push(Arc::downgrade(stream));
            *joined = Some(Joined { capture: capture.clone(), behind: behind.clone() });
            Ok(())
        }
    }
}

/// For calls that CUDA forbids while captures are under way, because they may wait for work that is only recorded.
pub(crate) fn unsafe_call() -> Answer {
    if COUNT.load(Ordering::Acquire) == 0 {
        return Ok(());
    }
    let (mode, thread) = (MODE.get(), std::thread::current().id());
    let mut forbidden = false;
    for capture in lock(&ACTIVE).iter() {
        let everywhere =
            capture.mode == Mode::CU_STREAM_CAPTURE_MODE_GLOBAL && mode == Mode::CU_STREAM_CAPTURE_MODE_GLOBAL;
        let relaxed = [capture.mode, mode].contains(&Mode::CU_STREAM_CAPTURE_MODE_RELAXED);
        if everywhere || (!relaxed && capture.thread == thread) {
            capture.invalidate();
            forbidden = true;
        }
    }
    ensure(!forbidden, CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
}

/// A stream's capture: status, and number.
fn status(stream: &Stream) -> Answer<(Status, u64)> {
    no_implicit_wait(stream)?;
    Ok(match &*lock(&stream.capture) {
        None => (Status::CU_STREAM_CAPTURE_STATUS_NONE, 0),
        Some(joined) if lock(&joined.capture.state).invalid => {
            (Status::CU_STREAM_CAPTURE_STATUS_INVALIDATED, joined.capture.id)
        }
        Some(joined) => (Status::CU_STREAM_CAPTURE_STATUS_ACTIVE, joined.capture.id),
    })
}

/// Ends the capture that began in this stream.
fn end(stream: &Stream) -> Answer<Vec<Work>> {
    let (capture, behind) = {
        let joined = lock(&stream.capture);
        let joined = joined.as_ref().ok_or(CUresult::CUDA_ERROR_ILLEGAL_STATE)?;
        (joined.capture.clone(), joined.behind.clone())
    };
    if capture.origin != stream.handle {
        capture.invalidate();
        return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
    }
    // The capture is over even where its end is refused, as over NVIDIA's driver.
    let here = capture.mode == Mode::CU_STREAM_CAPTURE_MODE_RELAXED || capture.thread == std::thread::current().id();
    let valid = capture.check();
    capture.end();
    ensure(here, CUresult::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD)?;
    valid?;
    let work = std::mem::take(&mut lock(&capture.state).work);
    ensure(behind.len() == work.len(), CUresult::CUDA_ERROR_STREAM_CAPTURE_UNJOINED)?;
    Ok(work)
}

calls! {
    fn cuStreamBeginCapture_v2(handle: CUstream, mode: Mode) {
        static NUMBER: AtomicU64 = AtomicU64::new(1);
        current()?;
        let stream = stream(handle)?;
        ensure(stream.kind != Kind::Legacy, CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)?;
        let mut joined = lock(&stream.capture);
        ensure(joined.is_none(), CUresult::CUDA_ERROR_ILLEGAL_STATE)?;
        let state = State { streams: vec![std::sync::Arc::downgrade(&stream)], ..State::default() };
        let capture = Arc::new(Capture {
            id: NUMBER.fetch_add(1, Ordering::Relaxed),
            origin: stream.handle,
            thread: std::thread::current().id(),
            mode,
            state: Mutex::new(state),
        });
        *joined = Some(Joined { capture: capture.clone(), behind: BTreeSet::new() });
        let mut active = lock(&ACTIVE);
        active.push(capture);
        COUNT.store(active.len(), Ordering::Release);
        Ok(())
    }

    fn cuStreamEndCapture(handle: CUstream, to: *mut CUgraph) {
        put_if_asked(to, std::ptr::null_mut());
        put(to, graph::make(end(&*stream(handle)?)?))
    }

    fn cuStreamIsCapturing(handle: CUstream, to: *mut Status) { put(to, status(&*stream(handle)?)?.0) }

    fn cuStreamGetCaptureInfo_v2(
        handle: CUstream,
        to: *mut Status,
        id: *mut u64,
        unfinished: *mut CUgraph,
        dependencies: *mut *const CUgraphNode,
        count: *mut usize,
    ) {
        let known = unfinished.is_null() && dependencies.is_null() && count.is_null();
        ensure(known, CUresult::CUDA_ERROR_NOT_SUPPORTED)?;
        let (status, number) = status(&*stream(handle)?)?;
        put_if_asked(id, number);
        put(to, status)
    }

    fn cuThreadExchangeStreamCaptureMode(mode: *mut Mode) {
        ensure(!mode.is_null(), CUresult::CUDA_ERROR_INVALID_VALUE)?;
        *mode = MODE.replace(*mode);
        Ok(())
    }
}
