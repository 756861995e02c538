//! A GPU's memory, which the processor cannot access: CUDA's driver copies each packet's bytes.
//!
//! An RDMA adapter reads and writes it over PCIe (GPUDirect RDMA). An RDMA device in user space has no such path, so a
//! program sees GPUDirect's interface and pays a copy. The copies are on a separate stream: a kernel that waits for a
//! message does not hold them up.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::{Arc, Mutex, OnceLock, Weak};

use libloading::os::unix::{Library, RTLD_LAZY};

use super::Refusal;
use crate::sync::lock;

/// `CUresult`.
type Code = c_int;
/// `CUcontext` and `CUstream`.
type Handle = *mut c_void;

// Of cuda.h.
const ATTRIBUTE_CONTEXT: c_int = 1;
const ATTRIBUTE_MEMORY_TYPE: c_int = 2;
const ATTRIBUTE_DEVICE_ORDINAL: c_int = 9;
const ATTRIBUTE_RANGE_START: c_int = 11;
const ATTRIBUTE_RANGE_SIZE: c_int = 12;
const MEMORY_TYPE_DEVICE: c_uint = 2;
const STREAM_NON_BLOCKING: c_uint = 1;
const CAPTURE_MODE_RELAXED: c_int = 2;

/// Declares the functions of the driver that the RDMA device calls, and how they are found.
macro_rules! driver {
    ($($field:ident = $symbol:literal ($($arg:ty),*);)*) => {
        #[derive(Debug)]
        struct Driver {
            $($field: unsafe extern "C" fn($($arg),*) -> Code,)*
            _library: Library,
        }

        impl Driver {
            fn load() -> Result<Driver, libloading::Error> {
                // SAFETY: the library is in the process already; nothing is initialized by this.
                let library = unsafe { Library::open(Some("libcuda.so.1"), RTLD_LAZY | libc::RTLD_NOLOAD) }?;
                // SAFETY: the functions' types are those of cuda.h.
                unsafe {
                    Ok(Driver {
                        $($field: *library.get(concat!($symbol, "\0").as_bytes())?,)*
                        _library: library,
                    })
                }
            }
        }
    };
}

driver! {
    attribute = "cuPointerGetAttribute"(*mut c_void, c_int, u64);
    device = "cuDeviceGet"(*mut c_int, c_int);
    retain = "cuDevicePrimaryCtxRetain"(*mut Handle, c_int);
    push = "cuCtxPushCurrent_v2"(Handle);
    pop = "cuCtxPopCurrent_v2"(*mut Handle);
    exchange_capture_mode = "cuThreadExchangeStreamCaptureMode"(*mut c_int);
    create_stream = "cuStreamCreate"(*mut Handle, c_uint);
    destroy_stream = "cuStreamDestroy_v2"(Handle);
    synchronize = "cuStreamSynchronize"(Handle);
    to_device = "cuMemcpyHtoDAsync_v2"(u64, *const c_void, usize, Handle);
    to_host = "cuMemcpyDtoHAsync_v2"(*mut c_void, u64, usize, Handle);
}

/// The driver that the program has loaded. Memory of a GPU is in a process only where that is so.
fn driver() -> Result<&'static Driver, String> {
    static DRIVER: OnceLock<Driver> = OnceLock::new();
    if let Some(driver) = DRIVER.get() {
        return Ok(driver);
    }
    let driver = Driver::load().map_err(|e| format!("CUDA's driver is not in this process ({e})"))?;
    Ok(DRIVER.get_or_init(|| driver))
}

fn check(code: Code) -> Result<(), Code> {
    if code == 0 { Ok(()) } else { Err(code) }
}

/// A GPU's memory that is registered.
#[derive(Debug)]
pub(crate) struct GpuMemory {
    gpu: Arc<Gpu>,
    held: Mutex<Held>,
}

/// The context of a GPU's memory, and a stream for copies.
#[derive(Debug)]
struct Gpu {
    driver: &'static Driver,
    context: Handle,
    stream: Handle,
    /// Held during an atomic operation: a copy out and a copy in.
    atomics: Mutex<()>,
}

/// Bytes of packets that go to consecutive addresses, held back: each copy by the driver costs some microseconds.
#[derive(Debug, Default)]
struct Held {
    to: u64,
    bytes: Vec<u8>,
}

/// Bytes that are held back at most.
const HELD: usize = 256 << 10;

// SAFETY: handles of a driver that any thread may call.
unsafe impl Send for Gpu {}
// SAFETY: as above.
unsafe impl Sync for Gpu {}

impl GpuMemory {
    /// The memory `at..at + len`, or the reason why not all of it is a GPU's.
    pub(crate) fn new(at: u64, len: usize) -> Result<GpuMemory, String> {
        Ok(GpuMemory { gpu: Gpu::of(at, len)?, held: Mutex::default() })
    }

    /// Writes `from` to the address `to`. With `ends` it is there when this returns; without, when a later write with
    /// `ends` returns.
    pub(super) fn write(&self, to: u64, from: &[u8], ends: bool) -> Result<(), Refusal> {
        let mut held = lock(&self.held);
        if held.to + held.bytes.len() as u64 != to || held.bytes.len() + from.len() > HELD {
            self.let_go(&mut held)?;
            held.to = to;
        }
        if ends && held.bytes.is_empty() {
            return self.gpu.to_device(to, from, true);
        }
        held.bytes.extend_from_slice(from);
        if !ends {
            return Ok(());
        }
        self.let_go(&mut held)?;
        self.gpu.copy(true, || 0)
    }

    /// Reads `len` bytes at the address `from` to `to`.
    ///
    /// # Safety
    /// `to` may be written for `len` bytes.
    pub(super) unsafe fn read(&self, from: u64, to: *mut u8, len: usize) -> Result<(), Refusal> {
        self.let_go(&mut lock(&self.held))?;
        // SAFETY: as the caller promises.
        unsafe { self.gpu.to_host(from, to, len) }
    }

    /// Changes the word at `at`, atomically among an RDMA device's requests (`IBV_ATOMIC_HCA`), not before the GPU's
    /// own.
    pub(super) fn atomic(&self, at: u64, f: impl Fn(u64) -> Option<u64>) -> Result<u64, Refusal> {
        let _one = lock(&self.gpu.atomics);
        let mut word = [0; 8];
        // SAFETY: eight bytes of ours.
        unsafe { self.read(at, word.as_mut_ptr(), 8) }?;
        let old = u64::from_ne_bytes(word);
        if let Some(new) = f(old) {
            self.gpu.to_device(at, &new.to_ne_bytes(), true)?;
        }
        Ok(old)
    }

    /// Waits until all copies are done.
    pub(super) fn settle(&self) {
        if let Err(refusal) = self.let_go(&mut lock(&self.held)).and_then(|()| self.gpu.copy(true, || 0)) {
            log::debug!("the last copies to a region that goes: {refusal}");
        }
    }

    /// Enqueues the copy of the bytes that are held back.
    fn let_go(&self, held: &mut Held) -> Result<(), Refusal> {
        if held.bytes.is_empty() {
            return Ok(());
        }
        let done = self.gpu.to_device(held.to, &held.bytes, false);
        held.bytes.clear();
        done
    }
}

/// Contexts in use, so that regions of one context share a stream.
static GPUS: Mutex<Vec<Weak<Gpu>>> = Mutex::new(Vec::new());

impl Gpu {
    fn of(at: u64, len: usize) -> Result<Arc<Gpu>, String> {
        let driver = driver()?;
        let refused = |code| format!("CUDA's driver does not know all of it as a GPU's memory (code {code})");
        let context = driver.context_of(at, len).map_err(refused)?;
        let mut gpus = lock(&GPUS);
        gpus.retain(|gpu| gpu.strong_count() > 0);
        if let Some(gpu) = gpus.iter().filter_map(Weak::upgrade).find(|gpu| gpu.context == context) {
            return Ok(gpu);
        }
        let stream = driver.within(context, || {
            let mut stream = std::ptr::null_mut();
            // SAFETY: the context is current, the variable holds a handle.
            check(unsafe { (driver.create_stream)(&mut stream, STREAM_NON_BLOCKING) }).map(|()| stream)
        });
        let stream = stream.map_err(|code| format!("a stream for copies to the GPU: CUDA's code {code}"))?;
        let gpu = Arc::new(Gpu { driver, context, stream, atomics: Mutex::default() });
        gpus.push(Arc::downgrade(&gpu));
        Ok(gpu)
    }

    /// Enqueues a copy from pageable memory, which the driver has read when this returns.
    fn to_device(&self, to: u64, from: &[u8], wait: bool) -> Result<(), Refusal> {
        // SAFETY: the GPU's memory is registered, or was: then its owner waits for `settle`.
        self.copy(wait, || unsafe { (self.driver.to_device)(to, from.as_ptr().cast(), from.len(), self.stream) })
    }

    /// Copies to `to`, and waits.
    ///
    /// # Safety
    /// `to` may be written for `len` bytes.
    unsafe fn to_host(&self, from: u64, to: *mut u8, len: usize) -> Result<(), Refusal> {
        // SAFETY: as the caller promises.
        self.copy(true, || unsafe { (self.driver.to_host)(to.cast(), from, len, self.stream) })
    }

    fn copy(&self, wait: bool, enqueue: impl FnOnce() -> Code) -> Result<(), Refusal> {
        let done = self.driver.within(self.context, || {
            check(enqueue())?;
            // SAFETY: a stream of ours.
            if wait { check(unsafe { (self.driver.synchronize)(self.stream) }) } else { Ok(()) }
        });
        done.map_err(Refusal::Gpu)
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        let done = self.driver.within(self.context, || {
            // SAFETY: a stream of ours, which is not used any more.
            check(unsafe { (self.driver.destroy_stream)(self.stream) })
        });
        if let Err(code) = done {
            log::debug!("a stream for copies to a GPU: CUDA's code {code}");
        }
    }
}

impl Driver {
    fn attribute<T: Default>(&self, attribute: c_int, at: u64) -> Result<T, Code> {
        let mut value = T::default();
        // SAFETY: the callers ask with the attribute's type.
        check(unsafe { (self.attribute)((&raw mut value).cast(), attribute, at) }).map(|()| value)
    }

    /// The context in which all of `at..at + len` is memory of a GPU.
    fn context_of(&self, at: u64, len: usize) -> Result<Handle, Code> {
        const INVALID_VALUE: Code = 1;
        let end = at.saturating_add(len as u64);
        let (mut from, mut ordinal) = (at, None);
        while from < end || ordinal.is_none() {
            let one = self.attribute::<c_int>(ATTRIBUTE_DEVICE_ORDINAL, from)?;
            let until = self.attribute::<u64>(ATTRIBUTE_RANGE_START, from)?
                + self.attribute::<u64>(ATTRIBUTE_RANGE_SIZE, from)?;
            let of_device = self.attribute::<c_uint>(ATTRIBUTE_MEMORY_TYPE, from)? == MEMORY_TYPE_DEVICE;
            if !of_device || until <= from || ordinal.is_some_and(|other| other != one) {
                return Err(INVALID_VALUE);
            }
            (from, ordinal) = (until, Some(one));
        }
        // Memory of pools and of mapped handles names no context: all of the device's have it.
        let context = self.attribute::<usize>(ATTRIBUTE_CONTEXT, at)? as Handle;
        if !context.is_null() {
            return Ok(context);
        }
        let (mut device, mut context) = (0, std::ptr::null_mut());
        // SAFETY: variables for a device and a handle.
        check(unsafe { (self.device)(&mut device, ordinal.unwrap_or(0)) })?;
        // SAFETY: as above. It is kept to the process's end, as the program's own is.
        check(unsafe { (self.retain)(&mut context, device) })?;
        Ok(context)
    }

    /// Calls `f` with the context current, also in a thread that captures a graph.
    fn within<R>(&self, context: Handle, f: impl FnOnce() -> Result<R, Code>) -> Result<R, Code> {
        let mut mode = CAPTURE_MODE_RELAXED;
        // SAFETY: an open context, and variables for what was current before. A thread's mode is put back as it was.
        unsafe {
            check((self.push)(context))?;
            (self.exchange_capture_mode)(&mut mode);
            let result = f();
            (self.exchange_capture_mode)(&mut mode);
            (self.pop)(&mut std::ptr::null_mut());
            result
        }
    }
}
