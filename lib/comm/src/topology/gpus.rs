//! GPUs of this machine and their NVLinks, from NVIDIA's management library (NVML), which is opened at run time. Where
//! that is missing, sysfs shows which GPUs there are, and nothing of their NVLinks.
//!
//! The functions and the layouts are those of `nvml.h`.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fs;
use std::path::Path;
use std::sync::OnceLock;

use libloading::Library;
use serde::{Deserialize, Serialize};

use super::pcie::{self, Slot};

/// A GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gpu {
    /// Model.
    pub name: String,
    /// `GPU-…`; empty if unknown.
    pub uuid: String,
    /// Bus id: `0000:3b:00.0`.
    pub busid: String,
    /// Compute capability, as 90 for 9.0; 0 if unknown.
    pub sm: u32,
    /// Its place in the PCIe tree.
    pub slot: Option<Slot>,
    /// Its NVLinks that are up: the other end, and the number of links.
    pub nvlinks: Vec<(End, u32)>,
}

/// The other end of an NVLink.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum End {
    /// The GPU of this bus id.
    Gpu(String),
    /// An NVSwitch.
    Switch,
    /// The processor.
    Processor,
}

/// The GPUs, and the reason for which NVML says nothing. Read once in a process.
pub(super) fn here() -> (Vec<Gpu>, Option<String>) {
    static HERE: OnceLock<(Vec<Gpu>, Option<String>)> = OnceLock::new();
    let read = || match Nvml::open().and_then(|nvml| nvml.gpus()) {
        Ok(gpus) => (gpus, None),
        Err(why) => (in_sysfs(Path::new("/")), Some(why)),
    };
    HERE.get_or_init(read).clone()
}

/// NVIDIA's GPUs among the PCIe devices below `root`.
pub(super) fn in_sysfs(root: &Path) -> Vec<Gpu> {
    let devices = root.join("sys/bus/pci/devices");
    let mut gpus: Vec<Gpu> = fs::read_dir(devices)
        .into_iter()
        .flatten()
        .flatten()
        .filter(|device| {
            let text = |file: &str| fs::read_to_string(device.path().join(file)).unwrap_or_default();
            let class = text("class");
            text("vendor").trim() == "0x10de" && ["0x0300", "0x0302"].iter().any(|gpu| class.starts_with(gpu))
        })
        .map(|device| Gpu {
            name: "NVIDIA GPU".to_owned(),
            uuid: String::new(),
            busid: device.file_name().to_string_lossy().into_owned(),
            sm: 0,
            slot: pcie::slot(&device.path()),
            nvlinks: Vec::new(),
        })
        .collect();
    gpus.sort_by(|a, b| a.busid.cmp(&b.busid));
    gpus
}

/// `nvmlDevice_t`.
type Device = *mut c_void;
/// `nvmlReturn_t`.
type Status = c_int;

/// `nvmlPciInfo_t`.
#[repr(C)]
#[derive(Clone, Copy)]
struct PciInfo {
    legacy: [c_char; 16],
    domain: c_uint,
    bus: c_uint,
    device: c_uint,
    ids: [c_uint; 2],
    busid: [c_char; 32],
}

impl PciInfo {
    const NONE: PciInfo = PciInfo { legacy: [0; 16], domain: 0, bus: 0, device: 0, ids: [0; 2], busid: [0; 32] };

    /// As sysfs writes it.
    fn busid(&self) -> String {
        format!("{:04x}:{:02x}:{:02x}.0", self.domain, self.bus, self.device)
    }
}

macro_rules! functions {
    ($($field:ident = $name:literal : fn($($arg:ty),*) -> $result:ty;)*) => {
        /// The functions that are called here.
        struct Nvml {
            $($field: unsafe extern "C" fn($($arg),*) -> $result,)*
        }

        impl Nvml {
            /// # Safety
            /// The library must be NVML, and stay open.
            unsafe fn load(library: &Library) -> Result<Nvml, String> {
                Ok(Nvml {
                    // SAFETY: the signatures are those of nvml.h; the caller keeps the library open.
                    $($field: *unsafe { library.get($name) }.map_err(|_| format!("NVML lacks {}", $name))?,)*
                })
            }
        }
    };
}

functions! {
    init = "nvmlInit_v2": fn() -> Status;
    words = "nvmlErrorString": fn(Status) -> *const c_char;
    count = "nvmlDeviceGetCount_v2": fn(*mut c_uint) -> Status;
    device = "nvmlDeviceGetHandleByIndex_v2": fn(c_uint, *mut Device) -> Status;
    name = "nvmlDeviceGetName": fn(Device, *mut c_char, c_uint) -> Status;
    uuid = "nvmlDeviceGetUUID": fn(Device, *mut c_char, c_uint) -> Status;
    place = "nvmlDeviceGetPciInfo_v3": fn(Device, *mut PciInfo) -> Status;
    capability = "nvmlDeviceGetCudaComputeCapability": fn(Device, *mut c_int, *mut c_int) -> Status;
    link_state = "nvmlDeviceGetNvLinkState": fn(Device, c_uint, *mut c_int) -> Status;
    link_place = "nvmlDeviceGetNvLinkRemotePciInfo_v2": fn(Device, c_uint, *mut PciInfo) -> Status;
    link_type = "nvmlDeviceGetNvLinkRemoteDeviceType": fn(Device, c_uint, *mut c_int) -> Status;
}

/// Links of a GPU at most: 18 of Hopper and Blackwell, and as many again for what comes.
const MOST_LINKS: c_uint = 36;
/// Values of `nvmlIntNvLinkDeviceType_t`.
const TO_GPU: c_int = 0;
const TO_PROCESSOR: c_int = 1;

impl Nvml {
    /// Opens and initialises the library; it stays open.
    fn open() -> Result<Nvml, String> {
        // SAFETY: NVIDIA's library has no requirements on when it is opened.
        let library = unsafe { Library::new("libnvidia-ml.so.1") }.map_err(|error| {
            // The system's words are behind the library's.
            std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string)
        })?;
        // It has threads and handlers of its own, and may not go while they run.
        let library = Box::leak(Box::new(library));
        // SAFETY: it is NVML by its name, and leaked.
        let nvml = unsafe { Nvml::load(library) }?;
        // SAFETY: it has no arguments.
        nvml.check("starting", unsafe { (nvml.init)() })?;
        Ok(nvml)
    }

    fn check(&self, doing: &str, status: Status) -> Result<(), String> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: any status may be asked for.
        let words = unsafe { (self.words)(status) };
        let words = match words.is_null() {
            true => status.to_string(),
            // SAFETY: a text of the library's, which is constant.
            false => unsafe { CStr::from_ptr(words) }.to_string_lossy().into_owned(),
        };
        Err(format!("NVML, {doing}: {words}"))
    }

    fn gpus(&self) -> Result<Vec<Gpu>, String> {
        let mut count = 0;
        // SAFETY: the number is written to `count`.
        self.check("counting the GPUs", unsafe { (self.count)(&mut count) })?;
        (0..count).map(|index| self.gpu(index)).collect()
    }

    fn gpu(&self, index: c_uint) -> Result<Gpu, String> {
        let doing = format!("GPU {index}");
        let mut device: Device = std::ptr::null_mut();
        // SAFETY: the handle is written to `device`.
        self.check(&doing, unsafe { (self.device)(index, &mut device) })?;
        let text = |get: unsafe extern "C" fn(Device, *mut c_char, c_uint) -> Status| {
            let mut text: [c_char; 96] = [0; 96];
            // SAFETY: a handle of the library's, and a buffer of the length that is named.
            self.check(&doing, unsafe { get(device, text.as_mut_ptr(), text.len() as c_uint) })?;
            let bytes: Vec<u8> = text.iter().take_while(|&&byte| byte != 0).map(|&byte| byte as u8).collect();
            Ok::<_, String>(String::from_utf8_lossy(&bytes).into_owned())
        };
        let mut place = PciInfo::NONE;
        // SAFETY: a handle of the library's, and its struct.
        self.check(&doing, unsafe { (self.place)(device, &mut place) })?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: a handle of the library's, and two numbers that are written.
        self.check(&doing, unsafe { (self.capability)(device, &mut major, &mut minor) })?;
        let busid = place.busid();
        let mut nvlinks: Vec<(End, u32)> = Vec::new();
        for end in (0..MOST_LINKS).filter_map(|link| self.end(device, link)) {
            match nvlinks.iter_mut().find(|(known, _)| *known == end) {
                Some((_, count)) => *count += 1,
                None => nvlinks.push((end, 1)),
            }
        }
        Ok(Gpu {
            name: text(self.name)?,
            uuid: text(self.uuid)?,
            slot: pcie::slot(&Path::new("/sys/bus/pci/devices").join(&busid)),
            busid,
            sm: u32::try_from(10 * major + minor).unwrap_or(0),
            nvlinks,
        })
    }

    /// The other end of a link that is up; `None` for one that is down, or not there.
    fn end(&self, device: Device, link: c_uint) -> Option<End> {
        let (mut state, mut kind, mut place) = (0, 0, PciInfo::NONE);
        // SAFETY: a handle of the library's, and a number that is written.
        let asked = unsafe { (self.link_state)(device, link, &mut state) };
        if asked != 0 || state == 0 {
            return None;
        }
        // SAFETY: as above.
        let typed = unsafe { (self.link_type)(device, link, &mut kind) } == 0;
        // SAFETY: as above, with the library's struct.
        let placed = unsafe { (self.link_place)(device, link, &mut place) } == 0;
        match kind {
            TO_GPU if typed && placed => Some(End::Gpu(place.busid())),
            TO_PROCESSOR if typed => Some(End::Processor),
            // What it does not tell is a switch: in a virtual machine these are hidden.
            _ => Some(End::Switch),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_in_sysfs_without_other_devices() {
        let folder = tempfile::tempdir().unwrap();
        for (busid, vendor, class) in [
            ("0000:3b:00.0", "0x10de", "0x030200"),
            ("0000:1a:00.0", "0x10de", "0x030000"),
            ("0000:3b:00.1", "0x10de", "0x040300"),
            ("0000:00:02.0", "0x8086", "0x030000"),
        ] {
            let device = folder.path().join("sys/bus/pci/devices").join(busid);
            fs::create_dir_all(&device).unwrap();
            fs::write(device.join("vendor"), format!("{vendor}\n")).unwrap();
            fs::write(device.join("class"), format!("{class}\n")).unwrap();
        }
        let found: Vec<String> = in_sysfs(folder.path()).into_iter().map(|gpu| gpu.busid).collect();
        assert_eq!(found, ["0000:1a:00.0", "0000:3b:00.0"]);
    }

    /// With NVML every GPU has a name; without, there is a reason.
    #[test]
    fn this_machine_has_gpus_or_a_reason() {
        let (gpus, why) = here();
        assert!(why.is_none_or(|why| !why.is_empty()));
        assert!(gpus.iter().all(|gpu| !gpu.name.is_empty() && gpu.busid.len() >= 12), "{gpus:?}");
    }

    #[test]
    fn bus_ids_are_those_of_sysfs() {
        let place = PciInfo { domain: 0, bus: 0x3b, device: 0, ..PciInfo::NONE };
        assert_eq!(place.busid(), "0000:3b:00.0");
        assert_eq!(size_of::<PciInfo>(), 68);
    }
}
