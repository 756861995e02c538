//! Devices.

use std::ffi::{CStr, c_char, c_int};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex};

use cudarc::driver::sys::{CUcontext, CUdevice, CUdevice_P2PAttribute, CUdevice_attribute, CUresult, CUuuid};

use crate::calls::{Answer, ensure, put};
use crate::context::Primary;
use crate::memory::Pool;
use crate::settings;

const NAME: &CStr = c"tinynccl stand-in (no GPU)";

/// The CUDA version: of the header whose functions are here.
const VERSION: c_int = 12_000;

/// A device.
pub(crate) struct Device {
    /// Among those that the program sees.
    pub(crate) ordinal: usize,
    physical: usize,
    pub(crate) primary: Mutex<Primary>,
    /// Bytes of its allocations.
    pub(crate) used: AtomicUsize,
    pub(crate) pool: Arc<Pool>,
    pub(crate) current_pool: Mutex<Arc<Pool>>,
}

static DEVICES: LazyLock<Vec<Device>> = LazyLock::new(|| {
    let device = |(ordinal, &physical)| {
        let pool = Pool::register(ordinal);
        let (primary, used) = (Mutex::default(), AtomicUsize::new(0));
        Device { ordinal, physical, primary, used, current_pool: Mutex::new(pool.clone()), pool }
    };
    settings::DEVICES.iter().enumerate().map(device).collect()
});

static INITIALISED: AtomicBool = AtomicBool::new(false);

pub(crate) fn initialised() -> Answer {
    ensure(INITIALISED.load(Ordering::Acquire), CUresult::CUDA_ERROR_NOT_INITIALIZED)
}

pub(crate) fn device(device: CUdevice) -> Answer<&'static Device> {
    initialised()?;
    let found = usize::try_from(device).ok().and_then(|ordinal| DEVICES.get(ordinal));
    found.ok_or(CUresult::CUDA_ERROR_INVALID_DEVICE)
}

impl Device {
    /// Takes memory, if that much is left.
    pub(crate) fn take(&self, bytes: usize) -> Answer {
        let more = |used: usize| used.checked_add(bytes).filter(|&used| used <= *settings::MEMORY);
        let taken = self.used.fetch_update(Ordering::AcqRel, Ordering::Acquire, more);
        taken.map(|_| ()).map_err(|_| CUresult::CUDA_ERROR_OUT_OF_MEMORY)
    }

    /// `0000:05:00.0`, in a domain where no machine has devices.
    fn bus_id(&self) -> String {
        format!("FFFF:{:02X}:00.0", self.physical + 1)
    }

    /// Returns the UUID, which is the same in every process.
    fn uuid(&self) -> CUuuid {
        let mut bytes = *b"tinynccl-standin";
        bytes[15] = self.physical as u8;
        CUuuid { bytes: bytes.map(|byte| byte as c_char) }
    }

    fn attribute(&self, attribute: CUdevice_attribute) -> c_int {
        use CUdevice_attribute as A;
        match attribute {
            A::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK | A::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X => 1024,
            A::CU_DEVICE_ATTRIBUTE_WARP_SIZE => 32,
            // As many as a large GPU has, so that what is laid out for kernels is laid out.
            A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT => 132,
            A::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID => 0xffff,
            A::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID => self.physical as c_int + 1,
            A::CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT => 2,
            A::CU_DEVICE_ATTRIBUTE_GPU_OVERLAP
            | A::CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY
            | A::CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS
            | A::CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING
            | A::CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY
            | A::CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED
            | A::CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED
            | A::CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
            | A::CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS
            | A::CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR
            | A::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED => 1,
            // Above all: capability 0.0, no descriptors, no RDMA, no cooperative launches.
            _ => 0,
        }
    }
}

/// Writes a string into a caller's array, cut to its length.
unsafe fn put_text(to: *mut c_char, len: c_int, text: &CStr) -> Answer {
    let len = usize::try_from(len).unwrap_or(0);
    ensure(!to.is_null() && len > 0, CUresult::CUDA_ERROR_INVALID_VALUE)?;
    let kept = text.to_bytes().iter().take(len - 1).chain(&[0]);
    for (i, &byte) in kept.enumerate() {
        // SAFETY: within the caller's array of `len`.
        unsafe { to.add(i).write(byte as c_char) };
    }
    Ok(())
}

calls! {
    fn cuInit(flags: u32) {
        ensure(flags == 0, CUresult::CUDA_ERROR_INVALID_VALUE)?;
        INITIALISED.store(true, Ordering::Release);
        ensure(!settings::DEVICES.is_empty(), CUresult::CUDA_ERROR_NO_DEVICE)
    }

    fn cuDriverGetVersion(to: *mut c_int) { put(to, VERSION) }

    fn cuDeviceGetCount(to: *mut c_int) {
        initialised()?;
        put(to, DEVICES.len() as c_int)
    }

    fn cuDeviceGet(to: *mut CUdevice, ordinal: c_int) {
        device(ordinal)?;
        put(to, ordinal)
    }

    fn cuDeviceGetName(to: *mut c_char, len: c_int, which: CUdevice) {
        device(which)?;
        put_text(to, len, NAME)
    }

    fn cuDeviceGetUuid(to: *mut CUuuid, which: CUdevice) { put(to, device(which)?.uuid()) }

    fn cuDeviceGetUuid_v2(to: *mut CUuuid, which: CUdevice) { put(to, device(which)?.uuid()) }

    fn cuDeviceTotalMem_v2(to: *mut usize, which: CUdevice) {
        device(which)?;
        put(to, *settings::MEMORY)
    }

    fn cuDeviceGetAttribute(to: *mut c_int, attribute: CUdevice_attribute, which: CUdevice) {
        put(to, device(which)?.attribute(attribute))
    }

    fn cuDeviceGetPCIBusId(to: *mut c_char, len: c_int, which: CUdevice) {
        let id = std::ffi::CString::new(device(which)?.bus_id()).unwrap_or_default();
        put_text(to, len, &id)
    }

    fn cuDeviceGetByPCIBusId(to: *mut CUdevice, id: *const c_char) {
        initialised()?;
        ensure(!id.is_null(), CUresult::CUDA_ERROR_INVALID_VALUE)?;
        let id = CStr::from_ptr(id).to_bytes();
        let found = DEVICES.iter().find(|device| id.eq_ignore_ascii_case(device.bus_id().as_bytes()));
        put(to, found.ok_or(CUresult::CUDA_ERROR_INVALID_DEVICE)?.ordinal as CUdevice)
    }

    fn cuDeviceCanAccessPeer(to: *mut c_int, which: CUdevice, peer: CUdevice) {
        device(which)?;
        device(peer)?;
        put(to, 0)
    }

    fn cuDeviceGetP2PAttribute(to: *mut c_int, _: CUdevice_P2PAttribute, from: CUdevice, other: CUdevice) {
        device(from)?;
        device(other)?;
        ensure(from != other, CUresult::CUDA_ERROR_INVALID_DEVICE)?;
        put(to, 0)
    }

    fn cuCtxEnablePeerAccess(peer: CUcontext, _: u32) {
        let (ours, theirs) = (crate::context::current()?, crate::context::CONTEXTS.get(peer)?);
        let same = ours.device.ordinal == theirs.device.ordinal;
        Err(if same { CUresult::CUDA_ERROR_INVALID_DEVICE } else { CUresult::CUDA_ERROR_PEER_ACCESS_UNSUPPORTED })
    }

    fn cuCtxDisablePeerAccess(_: CUcontext) { Err(CUresult::CUDA_ERROR_PEER_ACCESS_NOT_ENABLED) }
}
