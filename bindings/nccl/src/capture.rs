//! What a thread may do while one of its streams is captured into a graph.

use cudarc::driver::sys;

/// While this lives the thread may allocate, load code and wait, also during a capture that forbids it (the default
/// mode does): none of that goes to the captured stream. Frameworks allocate and register in the middle of captures.
#[derive(Debug)]
pub(crate) struct Relaxed {
    before: sys::CUstreamCaptureMode,
}

impl Relaxed {
    /// The driver must be open.
    pub(crate) fn enter() -> Relaxed {
        Relaxed { before: exchange(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED) }
    }
}

impl Drop for Relaxed {
    fn drop(&mut self) {
        exchange(self.before);
    }
}

/// Sets the mode; the one before. A failure changes nothing, and then what is done under it tells.
fn exchange(mut mode: sys::CUstreamCaptureMode) -> sys::CUstreamCaptureMode {
    // SAFETY: reads and writes the mode of this thread.
    if let Err(error) = unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut mode) }.result() {
        log::debug!("the capture mode of the thread: {error:?}");
    }
    mode
}
