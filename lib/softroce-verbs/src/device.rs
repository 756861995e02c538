//! Devices: `ibv_get_device_list`, and attributes of a device that is not open.

use std::ffi::{c_char, c_int};
use std::sync::OnceLock;

use crate::types::ibv_device;

/// A device as C sees it, and ours. Never freed: programs keep pointers after `ibv_free_device_list`.
#[repr(C)]
pub(crate) struct Device {
    base: ibv_device,
    pub(crate) inner: softroce::Device,
}

// SAFETY: made once and then only read.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

const NODE_CA: c_int = 1;
const TRANSPORT_IB: c_int = 0;

fn text<const N: usize>(value: &str) -> [c_char; N] {
    let mut raw = [0; N];
    for (place, byte) in raw.iter_mut().take(N - 1).zip(value.bytes()) {
        *place = byte as c_char;
    }
    raw
}

static ALL: OnceLock<Vec<Device>> = OnceLock::new();

/// Returns true for one of this library's devices, false for another library's. Nothing is read of it.
pub fn is_device(device: *const ibv_device) -> bool {
    ALL.get().is_some_and(|all| all.as_ptr_range().contains(&device.cast()))
}

/// The number of this library's devices; 0 before they are listed.
pub(crate) fn count() -> usize {
    ALL.get().map_or(0, |all| all.len())
}

fn all() -> softroce::Result<&'static [Device]> {
    if let Some(all) = ALL.get() {
        return Ok(all);
    }
    let list = softroce::Device::list()?;
    Ok(ALL.get_or_init(|| {
        list.into_iter()
            .map(|inner| Device {
                base: ibv_device {
                    _ops: [None; 2],
                    node_type: NODE_CA,
                    transport_type: TRANSPORT_IB,
                    name: text(inner.name()),
                    dev_name: text(&format!("uverbs-{}", inner.name())),
                    dev_path: text(""),
                    ibdev_path: text(&format!("/sys/class/infiniband/{}", inner.name())),
                },
                inner,
            })
            .collect()
    }))
}

pub unsafe extern "C" fn ibv_get_device_list(count: *mut c_int) -> *mut *mut ibv_device {
    let devices = match all() {
        Ok(devices) => devices,
        Err(e) => return crate::null(&e),
    };
    let mut list: Vec<*mut ibv_device> = devices.iter().map(|d| (&raw const *d).cast_mut().cast()).collect();
    list.push(std::ptr::null_mut());
    if !count.is_null() {
        // SAFETY: the program's output buffer for the count.
        unsafe { *count = devices.len() as c_int };
    }
    // Its length is found again by the null at its end.
    Box::into_raw(list.into_boxed_slice()).cast()
}

pub unsafe extern "C" fn ibv_free_device_list(list: *mut *mut ibv_device) {
    if list.is_null() {
        return;
    }
    // SAFETY: `get_device_list` made it, with a null at its end.
    unsafe {
        let len = (0..).take_while(|i| !(*list.add(*i)).is_null()).count();
        drop(Box::from_raw(std::ptr::slice_from_raw_parts_mut(list, len + 1)));
    }
}

pub unsafe extern "C" fn ibv_get_device_name(device: *mut ibv_device) -> *const c_char {
    // SAFETY: a device of ours.
    unsafe { (*device).name.as_ptr() }
}

pub unsafe extern "C" fn ibv_get_device_guid(device: *mut ibv_device) -> u64 {
    // SAFETY: a device of ours.
    let device = unsafe { &*device.cast::<Device>() };
    u64::from_ne_bytes(device.inner.guid())
}

pub unsafe extern "C" fn ibv_get_device_index(_device: *mut ibv_device) -> c_int {
    -1
}
