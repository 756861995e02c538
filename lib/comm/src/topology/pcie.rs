//! Places of devices in the PCIe tree, and the switches that several of them are behind.
//!
//! ```text
//! /sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:00.0/0000:03:00.0
//!                         root port    └── a switch: its port above, one below ──┘  the device
//! ```

use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

use tinynccl_plan::simulate::machine::nominal::pcie_gb_s;

/// A device's place.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Slot {
    /// Bus ids from the root port to the device.
    pub path: Vec<String>,
    /// Number of its NUMA node.
    pub numa: Option<usize>,
    /// Speed of its link, as sysfs has it: `16.0 GT/s PCIe`. Empty if unknown.
    pub speed: String,
    /// Lanes; 0 if unknown.
    pub lanes: u32,
}

impl Slot {
    /// The device's own bus id.
    pub fn busid(&self) -> &str {
        self.path.last().map_or("", String::as_str)
    }

    /// Bandwidth of its link in GB/s.
    pub fn gb_s(&self) -> f64 {
        pcie_gb_s(&self.speed, self.lanes)
    }
}

/// The place of a device by its link in sysfs; `None` if it is none of PCIe.
pub(super) fn slot(device: &Path) -> Option<Slot> {
    let place = fs::canonicalize(device).ok()?;
    let path: Vec<String> =
        place.iter().filter_map(|part| part.to_str()).filter(|part| is_busid(part)).map(str::to_owned).collect();
    // A virtual card is a child of its PCIe device.
    let last = path.last()?;
    let own = place.ancestors().find(|folder| folder.file_name().is_some_and(|name| name == last.as_str()))?;
    let text = |file: &str| fs::read_to_string(own.join(file)).unwrap_or_default().trim().to_owned();
    let numa = text("numa_node").parse().ok();
    Some(Slot { numa, speed: text("max_link_speed"), lanes: text("max_link_width").parse().unwrap_or(0), path })
}

/// `0000:3b:00.0`.
fn is_busid(text: &str) -> bool {
    let hex = |text: &str, least: usize| text.len() >= least && text.bytes().all(|b| b.is_ascii_hexdigit());
    let mut parts = text.split([':', '.']);
    let widths = [4, 2, 2, 1];
    widths.into_iter().all(|width| parts.next().is_some_and(|part| hex(part, width))) && parts.next().is_none()
}

/// A switch: its bus id, and what is behind it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Switch {
    /// Bus ids from the root port to the switch's port above.
    pub(super) path: Vec<String>,
}

impl Switch {
    pub(super) fn busid(&self) -> &str {
        self.path.last().map_or("", String::as_str)
    }

    pub(super) fn holds(&self, path: &[String]) -> bool {
        path.len() > self.path.len() && path.starts_with(&self.path)
    }
}

/// The switches that two or more of the devices are behind, those further up first. Of a chain that holds the same
/// devices the lowest counts. A root port is none.
pub(super) fn switches<'a>(devices: impl Iterator<Item = &'a Slot>) -> Vec<Switch> {
    let paths: Vec<&[String]> = devices.map(|slot| slot.path.as_slice()).collect();
    let mut found: Vec<(Vec<usize>, Switch)> = Vec::new();
    for path in &paths {
        for length in 2..path.len() {
            let switch = Switch { path: path[..length].to_vec() };
            let held: Vec<usize> = (0..paths.len()).filter(|&at| switch.holds(paths[at])).collect();
            if held.len() < 2 {
                continue;
            }
            match found.iter_mut().find(|(others, _)| *others == held) {
                Some((_, known)) if known.path.len() < length => *known = switch,
                Some(_) => {}
                None => found.push((held, switch)),
            }
        }
    }
    found.sort_by(|(_, a), (_, b)| (a.path.len(), &a.path).cmp(&(b.path.len(), &b.path)));
    found.into_iter().map(|(_, switch)| switch).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slot_at(path: &str) -> Slot {
        Slot { path: path.split('/').map(str::to_owned).collect(), ..Slot::default() }
    }

    #[test]
    fn what_two_devices_are_behind_is_a_switch() {
        let of = |paths: &[&str]| {
            let slots: Vec<Slot> = paths.iter().map(|path| slot_at(path)).collect();
            let found = switches(slots.iter());
            found.iter().map(|switch| switch.busid().to_owned()).collect::<Vec<_>>()
        };
        // A root port each.
        assert_eq!(of(&["r0/g0", "r1/g1"]), [""; 0]);
        assert_eq!(of(&["r0/u/d0/g0", "r0/u/d1/g1", "r1/g2"]), ["u"]);
        // A switch behind a switch.
        assert_eq!(of(&["r/u/d0/g0", "r/u/d1/v/e0/g1", "r/u/d1/v/e1/n0"]), ["u", "v"]);
        // Both functions of one card.
        assert_eq!(of(&["r/u/d/f0", "r/u/d/f1"]), ["d"]);
        assert_eq!(of(&[]), [""; 0]);
    }

    #[test]
    fn a_device_in_sysfs() {
        let folder = tempfile::tempdir().unwrap();
        let device = folder.path().join("devices/pci0000:00/0000:00:01.0/0000:01:00.0");
        fs::create_dir_all(device.join("virtio1/net/eth0")).unwrap();
        for (file, text) in [("numa_node", "-1\n"), ("max_link_speed", "16.0 GT/s PCIe\n"), ("max_link_width", "8\n")] {
            fs::write(device.join(file), text).unwrap();
        }
        let link = folder.path().join("device");
        std::os::unix::fs::symlink(device.join("virtio1"), &link).unwrap();
        let slot = slot(&link).unwrap();
        assert_eq!((slot.path.len(), slot.busid(), slot.numa, slot.gb_s()), (2, "0000:01:00.0", None, 12.0));
        assert_eq!(super::slot(folder.path()), None);
        for text in ["pci0000:00", "0000:00:01", "0000:00:01.0.1", "0000:00:01.g", "a:b:c.d", ""] {
            assert!(!is_busid(text), "{text}");
        }
    }
}
