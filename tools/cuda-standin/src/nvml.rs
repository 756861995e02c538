//! NVIDIA's management library as far as it tells which GPUs there are, and what their NVLinks lead to. The functions
//! have the signatures of `nvml.h`.
//!
//! `TINYNCCL_STANDIN_NVLINKS` is the number of links of each device (0): to a switch, or with `gpu` behind the number
//! to the next device.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use crate::settings;

/// `NVML_SUCCESS`, and the errors that are given.
const SUCCESS: c_int = 0;
const INVALID: c_int = 2;
const NOT_SUPPORTED: c_int = 3;

/// `nvmlPciInfo_t`.
#[repr(C)]
pub(crate) struct PciInfo {
    legacy: [c_char; 16],
    domain: c_uint,
    bus: c_uint,
    device: c_uint,
    ids: [c_uint; 2],
    busid: [c_char; 32],
}

/// A device's handle: its number, and one, as no handle is null.
fn number(device: *mut c_void) -> Option<usize> {
    (device as usize).checked_sub(1).filter(|&number| number < settings::DEVICES.len())
}

/// Number of links, and whether they lead to a GPU.
fn links() -> (c_uint, bool) {
    let text = std::env::var("TINYNCCL_STANDIN_NVLINKS").unwrap_or_default();
    let to_gpu = text.ends_with("gpu");
    (text.trim_end_matches("gpu").parse().unwrap_or(0), to_gpu)
}

fn write_text(text: &str, to: *mut c_char, length: c_uint) -> c_int {
    if to.is_null() || text.len() >= length as usize {
        return INVALID;
    }
    for (at, byte) in text.bytes().chain([0]).enumerate() {
        // SAFETY: the caller gives `length` bytes, and the text with its end is no longer.
        unsafe { to.add(at).write(byte as c_char) };
    }
    SUCCESS
}

fn write<T>(value: T, to: *mut T) -> c_int {
    if to.is_null() {
        return INVALID;
    }
    // SAFETY: the caller gives a place for the value.
    unsafe { to.write(value) };
    SUCCESS
}

/// In a domain where no machine has devices, as CUDA's stand-in has it.
fn place(number: usize) -> PciInfo {
    let bus = settings::DEVICES.get(number).map_or(0, |&physical| physical + 1) as c_uint;
    PciInfo { legacy: [0; 16], domain: 0xffff, bus, device: 0, ids: [0; 2], busid: [0; 32] }
}

#[unsafe(no_mangle)]
extern "C" fn nvmlInit_v2() -> c_int {
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn nvmlErrorString(_status: c_int) -> *const c_char {
    const WORDS: &CStr = c"an error of the stand-in";
    WORDS.as_ptr()
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetCount_v2(count: *mut c_uint) -> c_int {
    write(settings::DEVICES.len() as c_uint, count)
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetHandleByIndex_v2(index: c_uint, device: *mut *mut c_void) -> c_int {
    let handle = (index as usize + 1) as *mut c_void;
    if number(handle).is_some() { write(handle, device) } else { INVALID }
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetName(device: *mut c_void, name: *mut c_char, length: c_uint) -> c_int {
    number(device).map_or(INVALID, |_| write_text("tinynccl stand-in (no GPU)", name, length))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetUUID(device: *mut c_void, uuid: *mut c_char, length: c_uint) -> c_int {
    number(device).map_or(INVALID, |number| write_text(&format!("GPU-stand-in-{number}"), uuid, length))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetPciInfo_v3(device: *mut c_void, info: *mut PciInfo) -> c_int {
    number(device).map_or(INVALID, |number| write(place(number), info))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetCudaComputeCapability(device: *mut c_void, major: *mut c_int, minor: *mut c_int) -> c_int {
    number(device).map_or(INVALID, |_| write(9, major).max(write(0, minor)))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetNvLinkState(device: *mut c_void, link: c_uint, state: *mut c_int) -> c_int {
    match number(device) {
        Some(_) if link < links().0 => write(1, state),
        Some(_) => NOT_SUPPORTED,
        None => INVALID,
    }
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetNvLinkRemotePciInfo_v2(device: *mut c_void, link: c_uint, info: *mut PciInfo) -> c_int {
    match number(device) {
        Some(number) if link < links().0 => write(place((number + 1) % settings::DEVICES.len()), info),
        _ => INVALID,
    }
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetNvLinkRemoteDeviceType(device: *mut c_void, link: c_uint, kind: *mut c_int) -> c_int {
    match number(device) {
        // NVML_NVLINK_DEVICE_TYPE_GPU, NVML_NVLINK_DEVICE_TYPE_SWITCH
        Some(_) if link < links().0 => write(if links().1 { 0 } else { 2 }, kind),
        _ => INVALID,
    }
}
