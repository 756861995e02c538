//! Events.

use std::collections::BTreeSet;
use std::ffi::c_uint;
use std::sync::{Arc, Mutex};

use cudarc::driver::sys::{CUevent, CUresult, CUstream};

use crate::calls::{Answer, ensure, lock, put};
use crate::capture::{self, Capture};
use crate::context::current;
use crate::handles::{self, Table};
use crate::stream::{Point, stream};
use crate::work::{Stamp, Work};

const DISABLE_TIMING: c_uint = 2;
const INTERPROCESS: c_uint = 4;
/// `CU_EVENT_RECORD_EXTERNAL`, `CU_EVENT_WAIT_EXTERNAL`.
const EXTERNAL: c_uint = 1;

static EVENTS: Table<Event> = Table::new();

pub(crate) struct Event {
    timed: bool,
    context: usize,
    recorded: Mutex<Recorded>,
}

/// Latest recording of an event.
#[derive(Clone, Default)]
pub(crate) enum Recorded {
    #[default]
    Never,
    Live(Point, Arc<Stamp>),
    /// In a capture, behind those of its operations.
    Captured(Arc<Capture>, BTreeSet<usize>),
}

impl Event {
    fn recorded(&self) -> Recorded {
        lock(&self.recorded).clone()
    }

    /// Returns the point of the latest recording; `None` if there is none. One in a capture invalidates the capture
    /// and is an error.
    fn point(&self) -> Answer<Option<(Point, Arc<Stamp>)>> {
        match self.recorded() {
            Recorded::Never => Ok(None),
            Recorded::Live(point, stamp) => Ok(Some((point, stamp))),
            Recorded::Captured(capture, _) => {
                capture.invalidate();
                Err(CUresult::CUDA_ERROR_CAPTURED_EVENT)
            }
        }
    }
}

fn record(event: CUevent, handle: CUstream, flags: c_uint) -> Answer {
    current()?;
    ensure(flags & !EXTERNAL == 0, CUresult::CUDA_ERROR_INVALID_VALUE)?;
    let (event, stream) = (EVENTS.get(event)?, stream(handle)?);
    ensure(stream.context()?.handle == event.context, CUresult::CUDA_ERROR_INVALID_HANDLE)?;
    let recorded = match capture::mark(&stream)? {
        // Of use to the launches of the graph; until then it stays where it was.
        Some(_) if flags == EXTERNAL => return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED),
        Some((capture, behind)) => Recorded::Captured(capture, behind),
        None => {
            let stamp = Arc::new(Stamp::default());
            Recorded::Live(stream.enqueue_live(Work::Stamp(stamp.clone()))?, stamp)
        }
    };
    *lock(&event.recorded) = recorded;
    Ok(())
}

calls! {
    fn cuEventCreate(to: *mut CUevent, flags: c_uint) {
        let context = current()?;
        ensure(flags < 8, CUresult::CUDA_ERROR_INVALID_VALUE)?;
        ensure(flags & INTERPROCESS == 0, CUresult::CUDA_ERROR_NOT_SUPPORTED)?;
        let (timed, recorded) = (flags & DISABLE_TIMING == 0, Mutex::default());
        let handle = handles::fresh();
        EVENTS.insert(handle, Arc::new(Event { timed, context: context.handle, recorded }));
        put(to, handles::pointer(handle))
    }

    fn cuEventDestroy_v2(event: CUevent) { EVENTS.remove(event).map(|_| ()) }

    fn cuEventRecord(event: CUevent, handle: CUstream) { record(event, handle, 0) }

    fn cuEventRecordWithFlags(event: CUevent, handle: CUstream, flags: c_uint) { record(event, handle, flags) }

    fn cuStreamWaitEvent(handle: CUstream, event: CUevent, flags: c_uint) {
        ensure(flags == 0, CUresult::CUDA_ERROR_NOT_SUPPORTED)?;
        current()?;
        let (stream, event) = (stream(handle)?, EVENTS.get(event)?);
        match event.recorded() {
            Recorded::Never => Ok(()),
            Recorded::Captured(capture, behind) => capture::join(&stream, &capture, &behind),
            Recorded::Live(point, _) => {
                // A capture cannot wait for what is outside.
                capture::isolated(&stream)?;
                if point.is_reached() { Ok(()) } else { stream.enqueue_live(Work::Reach(point)).map(|_| ()) }
            }
        }
    }

    fn cuEventQuery(event: CUevent) {
        let Some((point, _)) = EVENTS.get(event)?.point()? else { return Ok(()) };
        capture::unsafe_call()?;
        ensure(point.is_reached(), CUresult::CUDA_ERROR_NOT_READY)?;
        point.context()?.check()
    }

    fn cuEventSynchronize(event: CUevent) {
        let Some((point, _)) = EVENTS.get(event)?.point()? else { return Ok(()) };
        capture::unsafe_call()?;
        point.wait();
        point.context()?.check()
    }

    fn cuEventElapsedTime(to: *mut f32, begin: CUevent, end: CUevent) {
        let (begin, end) = (EVENTS.get(begin)?, EVENTS.get(end)?);
        ensure(begin.timed && end.timed, CUresult::CUDA_ERROR_INVALID_HANDLE)?;
        let never = CUresult::CUDA_ERROR_INVALID_HANDLE;
        let ((first, begin), (last, end)) = (begin.point()?.ok_or(never)?, end.point()?.ok_or(never)?);
        ensure(first.is_reached() && last.is_reached(), CUresult::CUDA_ERROR_NOT_READY)?;
        let (begin, end) = (begin.time().ok_or(never)?, end.time().ok_or(never)?);
        let passed = end.saturating_duration_since(begin).as_secs_f64() - begin.saturating_duration_since(end).as_secs_f64();
        put(to, (passed * 1e3) as f32)
    }
}
