//! Contexts, and the current one of each thread.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{c_int, c_uint};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::thread::ThreadId;

use cudarc::driver::sys::{CUcontext, CUdevice, CUexecAffinityParam, CUlimit, CUresult};

use crate::calls::{Answer, ensure, lock, put, put_if_asked};
use crate::capture;
use crate::device::{Device, device, initialised};
use crate::handles::{self, Table};
use crate::memory;
use crate::stream::{Kind, Point, Stream};

pub(crate) static CONTEXTS: Table<Context> = Table::new();

/// A context.
pub(crate) struct Context {
    pub(crate) handle: usize,
    pub(crate) device: &'static Device,
    flags: AtomicU32,
    /// An error that makes all later calls fail; 0 without one.
    failure: AtomicU32,
    destroyed: AtomicBool,
    legacy: OnceLock<Arc<Stream>>,
    /// Per-thread streams, of the threads that have used theirs.
    of_threads: Mutex<HashMap<ThreadId, Arc<Stream>>>,
    /// All streams.
    streams: Mutex<Vec<Weak<Stream>>>,
}

/// The primary context of a device, and how often it is retained.
#[derive(Default)]
pub(crate) struct Primary {
    context: Option<Arc<Context>>,
    retained: usize,
    flags: u32,
}

thread_local! {
    /// Contexts that this thread has pushed; the last is the current one.
    static STACK: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

fn with_stack<R>(f: impl FnOnce(&mut Vec<usize>) -> R) -> Answer<R> {
    // A thread that ends may have no stack left.
    STACK.try_with(|stack| f(&mut stack.borrow_mut())).map_err(|_| CUresult::CUDA_ERROR_DEINITIALIZED)
}

/// The handle of this thread's current context; 0 for none.
fn current_handle() -> Answer<usize> {
    with_stack(|stack| stack.last().copied().unwrap_or(0))
}

/// The current context, if it is of use.
pub(crate) fn current() -> Answer<Arc<Context>> {
    initialised()?;
    let handle = current_handle()?;
    ensure(handle != 0, CUresult::CUDA_ERROR_INVALID_CONTEXT)?;
    let context =
        CONTEXTS.get(handles::pointer::<()>(handle)).map_err(|_| CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED)?;
    context.check()?;
    Ok(context)
}

impl Context {
    fn new(device: &'static Device, flags: u32) -> Arc<Context> {
        let context = Arc::new(Context {
            handle: handles::fresh(),
            device,
            flags: AtomicU32::new(flags),
            failure: AtomicU32::new(0),
            destroyed: AtomicBool::new(false),
            legacy: OnceLock::new(),
            of_threads: Mutex::default(),
            streams: Mutex::default(),
        });
        CONTEXTS.insert(context.handle, context.clone());
        context
    }

    /// An error if it is lost or gone.
    pub(crate) fn check(&self) -> Answer {
        ensure(!self.destroyed.load(Ordering::Acquire), CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED)?;
        match self.failure.load(Ordering::Acquire) {
            0 => Ok(()),
            error if error == CUresult::CUDA_ERROR_LAUNCH_TIMEOUT as u32 => Err(CUresult::CUDA_ERROR_LAUNCH_TIMEOUT),
            _ => Err(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS),
        }
    }

    /// Loses the context; the first error stays.
    pub(crate) fn fail(&self, error: CUresult) {
        let _ = self.failure.compare_exchange(0, error as u32, Ordering::AcqRel, Ordering::Acquire);
    }

    pub(crate) fn enter(&self, stream: &Arc<Stream>) {
        let mut streams = lock(&self.streams);
        streams.retain(|stream| stream.strong_count() > 0);
        streams.push(Arc::downgrade(stream));
    }

    pub(crate) fn legacy(self: &Arc<Self>) -> Arc<Stream> {
        self.legacy.get_or_init(|| Stream::new(self, Kind::Legacy, 0)).clone()
    }

    pub(crate) fn of_thread(self: &Arc<Self>) -> Arc<Stream> {
        let thread = std::thread::current().id();
        lock(&self.of_threads).entry(thread).or_insert_with(|| Stream::new(self, Kind::Blocking, 0)).clone()
    }

    pub(crate) fn streams(&self) -> Vec<Arc<Stream>> {
        lock(&self.streams).iter().filter_map(Weak::upgrade).collect()
    }

    /// Waits for all that is enqueued.
    pub(crate) fn synchronize(&self) -> Answer {
        // Without the lock: streams may go meanwhile.
        let points: Vec<Point> = self.streams().iter().map(Stream::tail).collect();
        points.iter().for_each(Point::wait);
        self.check()
    }

    /// Ends it: streams drop their work, memory is gone, and calls find it destroyed.
    fn destroy(&self) -> Answer {
        self.destroyed.store(true, Ordering::Release);
        CONTEXTS.remove(handles::pointer::<()>(self.handle))?;
        for stream in self.streams() {
            stream.close();
        }
        memory::forget(self);
        Ok(())
    }
}

/// `CUcontext` of a handle.
fn pointer(handle: usize) -> CUcontext {
    handles::pointer(handle)
}

unsafe fn create(to: *mut CUcontext, flags: u32, which: CUdevice) -> Answer {
    let context = Context::new(device(which)?, flags);
    // SAFETY: forwarded.
    unsafe { put(to, pointer(context.handle)) }?;
    with_stack(|stack| stack.push(context.handle))
}

/// Destroys a device's primary context, if there is one, once `last` returns true.
fn end_primary(which: CUdevice, last: impl FnOnce(&mut Primary) -> Answer<bool>) -> Answer {
    let mut primary = lock(&device(which)?.primary);
    if !last(&mut primary)? {
        return Ok(());
    }
    let context = primary.context.take();
    drop(primary);
    context.map_or(Ok(()), |context| context.destroy())
}

calls! {
    fn cuDevicePrimaryCtxRetain(to: *mut CUcontext, which: CUdevice) {
        let device = device(which)?;
        let mut primary = lock(&device.primary);
        let flags = primary.flags;
        let handle = primary.context.get_or_insert_with(|| Context::new(device, flags)).handle;
        primary.retained += 1;
        put(to, pointer(handle))
    }

    fn cuDevicePrimaryCtxRelease_v2(which: CUdevice) {
        end_primary(which, |primary| {
            let left = primary.retained.checked_sub(1).ok_or(CUresult::CUDA_ERROR_INVALID_CONTEXT)?;
            primary.retained = left;
            Ok(left == 0)
        })
    }

    // Those who retain it keep their claim, and find it destroyed: as CUDA has it.
    fn cuDevicePrimaryCtxReset_v2(which: CUdevice) { end_primary(which, |_| Ok(true)) }

    fn cuDevicePrimaryCtxGetState(which: CUdevice, flags: *mut c_uint, active: *mut c_int) {
        let primary = lock(&device(which)?.primary);
        put(flags, primary.flags)?;
        put(active, c_int::from(primary.context.is_some()))
    }

    fn cuDevicePrimaryCtxSetFlags_v2(which: CUdevice, flags: c_uint) {
        lock(&device(which)?.primary).flags = flags;
        Ok(())
    }

    fn cuCtxCreate_v2(to: *mut CUcontext, flags: c_uint, which: CUdevice) { create(to, flags, which) }

    fn cuCtxCreate_v3(to: *mut CUcontext, _: *mut CUexecAffinityParam, affinities: c_int, flags: c_uint, which: CUdevice) {
        ensure(affinities == 0, CUresult::CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY)?;
        create(to, flags, which)
    }

    fn cuCtxDestroy_v2(context: CUcontext) {
        let context = CONTEXTS.get(context)?;
        let primary = lock(&context.device.primary).context.as_ref().is_some_and(|one| one.handle == context.handle);
        ensure(!primary, CUresult::CUDA_ERROR_INVALID_CONTEXT)?;
        with_stack(|stack| {
            if stack.last() == Some(&context.handle) {
                stack.pop();
            }
        })?;
        context.destroy()
    }

    fn cuCtxPushCurrent_v2(context: CUcontext) {
        CONTEXTS.get(context).map_err(|_| CUresult::CUDA_ERROR_INVALID_CONTEXT)?;
        with_stack(|stack| stack.push(context.addr()))
    }

    fn cuCtxPopCurrent_v2(to: *mut CUcontext) {
        let popped = with_stack(Vec::pop)?.ok_or(CUresult::CUDA_ERROR_INVALID_CONTEXT)?;
        put_if_asked(to, pointer(popped));
        Ok(())
    }

    fn cuCtxSetCurrent(context: CUcontext) {
        initialised()?;
        if !context.is_null() {
            CONTEXTS.get(context).map_err(|_| CUresult::CUDA_ERROR_INVALID_CONTEXT)?;
        }
        with_stack(|stack| {
            stack.pop();
            stack.extend(Some(context.addr()).filter(|&handle| handle != 0));
        })
    }

    fn cuCtxGetCurrent(to: *mut CUcontext) {
        initialised()?;
        put(to, pointer(current_handle()?))
    }

    fn cuCtxGetDevice(to: *mut CUdevice) { put(to, current()?.device.ordinal as CUdevice) }

    fn cuCtxSynchronize() {
        let context = current()?;
        capture::unsafe_call()?;
        context.synchronize()
    }

    fn cuCtxGetFlags(to: *mut c_uint) { put(to, current()?.flags.load(Ordering::Relaxed)) }

    fn cuCtxGetId(context: CUcontext, to: *mut u64) {
        let context = if context.is_null() { current()? } else { CONTEXTS.get(context)? };
        put(to, context.handle as u64)
    }

    fn cuCtxGetApiVersion(context: CUcontext, to: *mut c_uint) {
        if !context.is_null() {
            CONTEXTS.get(context).map_err(|_| CUresult::CUDA_ERROR_INVALID_CONTEXT)?;
        }
        put(to, 3020)
    }

    fn cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) {
        current()?;
        put_if_asked(least, 0);
        put_if_asked(greatest, GREATEST_PRIORITY);
        Ok(())
    }

    // No limit bounds anything here.
    fn cuCtxGetLimit(to: *mut usize, _: CUlimit) {
        current()?;
        put(to, 0)
    }

    fn cuCtxSetLimit(_: CUlimit, _: usize) { current().map(|_| ()) }
}

/// Greatest stream priority that is reported; priorities make no difference.
pub(crate) const GREATEST_PRIORITY: c_int = -5;
