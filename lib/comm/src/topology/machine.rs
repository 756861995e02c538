//! Hardware of this machine, as the kernel and NVIDIA's driver describe it: NUMA nodes with their cores, GPUs, network
//! ports, and their places in the PCIe tree.

use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::gpus::{self, Gpu};
use super::pcie::{self, Slot};
use tinynccl_plan::error::Result;
use tinynccl_sys::config::Config;
use tinynccl_transport::bootstrap::interface::{LocalAddress, local_addresses};

/// A machine.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    /// The processor's name.
    pub processor: String,
    /// Its NUMA nodes; one at least.
    pub numa: Vec<Numa>,
    /// Bandwidth between two sockets of such a processor, in GB/s.
    pub socket_gb_s: f64,
    /// Its GPUs.
    pub gpus: Vec<Gpu>,
    /// The reason for which NVIDIA's management library (NVML) says nothing: the NVLinks are not known then.
    pub no_nvml: Option<String>,
}

/// A NUMA node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Numa {
    /// The kernel's number.
    pub number: usize,
    /// Numbers of its cores.
    pub cores: Vec<usize>,
}

/// A network port, which is up.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Port {
    /// Name of the interface.
    pub interface: String,
    /// Its addresses, with the bits of their subnets.
    pub addresses: Vec<(std::net::IpAddr, u8)>,
    /// Mbit/s, where the interface is a card, or made of cards, and the driver knows.
    pub mbit: Option<u32>,
    /// The card's place.
    pub slot: Option<Slot>,
}

impl Machine {
    /// The machine we run on.
    pub fn here() -> Machine {
        Machine::of_kernel().with_gpus()
    }

    /// Reads what the kernel tells of the machine, which takes less than a millisecond.
    pub(crate) fn of_kernel() -> Machine {
        Machine::below(Path::new("/"))
    }

    /// Asks NVIDIA's driver, too, once in a process.
    pub(crate) fn with_gpus(self) -> Machine {
        let (gpus, no_nvml) = gpus::here();
        Machine { gpus, no_nvml, ..self }
    }

    /// The machine whose `/proc` and `/sys` are in `root`, with the GPUs that these show.
    fn below(root: &Path) -> Machine {
        let text = |path: &str| fs::read_to_string(root.join(path)).unwrap_or_default();
        let cpuinfo = text("proc/cpuinfo");
        let field = |name: &str| {
            let line = cpuinfo.lines().find(|line| line.split(':').next().is_some_and(|key| key.trim() == name));
            line.and_then(|line| line.split_once(':')).map_or("", |(_, value)| value.trim())
        };
        let number = |name: &str| field(name).parse().unwrap_or(0);
        let arch = std::env::consts::ARCH;
        let socket_gb_s = tinynccl_plan::simulate::machine::nominal::socket_gb_s(
            arch,
            field("vendor_id"),
            number("cpu family"),
            number("model"),
        );
        let processor = match field("model name") {
            "" => arch.to_owned(),
            name => name.to_owned(),
        };
        let online = |what: &str| list(text(&format!("sys/devices/system/{what}")).trim());
        let mut numa: Vec<Numa> = online("node/online")
            .into_iter()
            .map(|number| Numa { number, cores: online(&format!("node/node{number}/cpulist")) })
            // Memory without cores: no rank runs there.
            .filter(|numa| !numa.cores.is_empty())
            .collect();
        if numa.is_empty() {
            numa.push(Numa { number: 0, cores: online("cpu/online") });
        }
        Machine { processor, numa, socket_gb_s, gpus: gpus::in_sysfs(root), no_nvml: None }
    }

    /// The NUMA node, by its index, that has all of these cores; otherwise that of the first of them.
    pub fn numa_of(&self, cores: impl Iterator<Item = usize>) -> usize {
        let home = |core: usize| self.numa.iter().position(|numa| numa.cores.contains(&core));
        cores.filter_map(home).min().unwrap_or(0)
    }

    /// The NUMA node, by its index, of a device; the first where the kernel names none.
    pub fn numa_of_slot(&self, slot: Option<&Slot>) -> usize {
        let number = slot.and_then(|slot| slot.numa);
        self.numa.iter().position(|numa| Some(numa.number) == number).unwrap_or(0)
    }
}

/// The network ports that the settings allow, loopback left out.
///
/// # Errors
/// The interfaces cannot be listed, or `TINYNCCL_IFNAME` names none.
pub fn ports(config: &Config) -> Result<Vec<Port>> {
    let mut ports: Vec<Port> = Vec::new();
    for LocalAddress { interface, ip, prefix, loopback } in local_addresses(config)? {
        if loopback {
            continue;
        }
        match ports.iter_mut().find(|port| port.interface == interface) {
            Some(port) => port.addresses.push((ip, prefix)),
            None => ports.push(port(Path::new("/sys"), interface, vec![(ip, prefix)])),
        }
    }
    // What has an address of IPv4 is reached by that.
    for port in &mut ports {
        if port.addresses.iter().any(|(ip, _)| ip.is_ipv4()) {
            port.addresses.retain(|(ip, _)| ip.is_ipv4());
        }
    }
    Ok(ports)
}

/// The interface with its card. A virtual one reports a speed that it has not: veth 10 Gbit/s.
fn port(sys: &Path, interface: String, addresses: Vec<(std::net::IpAddr, u8)>) -> Port {
    let folder = sys.join("class/net").join(&interface);
    let slot = pcie::slot(&folder.join("device"));
    let is_card = folder.join("device").exists();
    let is_made_of_cards = folder.join("bonding").exists();
    let speed = fs::read_to_string(folder.join("speed")).ok().and_then(|text| text.trim().parse::<i64>().ok());
    let mbit = speed.filter(|_| is_card || is_made_of_cards).and_then(|mbit| u32::try_from(mbit).ok());
    Port { interface, addresses, mbit: mbit.filter(|&mbit| mbit > 0 && mbit < i32::MAX as u32), slot }
}

/// Numbers in a list of the kernel's, like `0-3,8`.
fn list(text: &str) -> Vec<usize> {
    let range = |range: &str| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last) = (first.trim().parse::<usize>().ok()?, last.trim().parse::<usize>().ok()?);
        // No machine has more cores.
        (last < 1 << 16).then_some(first..=last)
    };
    text.split(',').filter_map(range).flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) fn write(root: &Path, files: &[(&str, &str)]) {
        for (path, text) in files {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
    }

    #[test]
    fn two_sockets_and_memory_without_cores() {
        let folder = tempfile::tempdir().unwrap();
        let cpuinfo =
            "processor\t: 0\nvendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 143\nmodel name\t: Xeon\n";
        write(
            folder.path(),
            &[
                ("proc/cpuinfo", cpuinfo),
                ("sys/devices/system/node/online", "0-2\n"),
                ("sys/devices/system/node/node0/cpulist", "0-1,4-5\n"),
                ("sys/devices/system/node/node1/cpulist", "2-3,6-7\n"),
                ("sys/devices/system/node/node2/cpulist", "\n"),
            ],
        );
        let machine = Machine::below(folder.path());
        let numa = |number, cores: &[usize]| Numa { number, cores: cores.to_vec() };
        assert_eq!(machine.numa, [numa(0, &[0, 1, 4, 5]), numa(1, &[2, 3, 6, 7])]);
        assert_eq!((machine.processor.as_str(), machine.socket_gb_s), ("Xeon", 22.0));
        assert_eq!(machine.numa_of([6, 7].into_iter()), 1);
        assert_eq!(machine.numa_of([6, 0].into_iter()), 0, "it may run on both");
        assert_eq!(machine.numa_of([99].into_iter()), 0);
        let slot = Slot { numa: Some(1), ..Slot::default() };
        assert_eq!((machine.numa_of_slot(Some(&slot)), machine.numa_of_slot(None)), (1, 0));
    }

    #[test]
    fn a_machine_that_tells_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let machine = Machine::below(folder.path());
        assert_eq!((machine.numa.len(), machine.gpus.len()), (1, 0));
        assert!(!machine.processor.is_empty());
    }

    #[test]
    fn this_machine_has_cores_and_the_ports_that_are_up() {
        let here = Machine::here();
        assert!(here.numa.iter().map(|numa| numa.cores.len()).sum::<usize>() > 0, "{here:?}");
        let ports = ports(&Config::default()).unwrap();
        assert!(ports.iter().all(|port| !port.addresses.is_empty()), "{ports:?}");
    }

    #[test]
    fn only_the_speed_of_cards_is_believed() {
        let folder = tempfile::tempdir().unwrap();
        write(
            folder.path(),
            &[
                ("class/net/veth0/speed", "10000\n"),
                ("class/net/eth0/speed", "25000\n"),
                ("class/net/eth0/device/vendor", "x"),
                ("class/net/eth1/speed", "-1\n"),
                ("class/net/eth1/device/vendor", "x"),
                ("class/net/bond0/speed", "50000\n"),
                ("class/net/bond0/bonding/mode", "x"),
            ],
        );
        let mbit = |name: &str| port(folder.path(), name.to_owned(), vec![]).mbit;
        let all = ["veth0", "eth0", "eth1", "bond0", "none"].map(mbit);
        assert_eq!(all, [None, Some(25_000), None, Some(50_000), None]);
    }

    #[test]
    fn lists_of_the_kernel() {
        assert_eq!(list("0-2,8"), [0, 1, 2, 8]);
        assert_eq!(list(""), [0usize; 0]);
        assert_eq!(list("3-1,x,5-99999999999,-4"), [0usize; 0]);
    }
}
