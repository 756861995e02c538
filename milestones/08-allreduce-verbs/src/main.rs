//! Milestone 08: ring all-reduce over RDMA. The program is milestone 07's; this file holds the difference.

#[cfg(any(feature = "verbs", test))]
use std::path::Path;
use std::process::ExitCode;

use allreduce_tcp::{Count, Over};
use tinynccl::config::TransportChoice;

// EXERCISE 1 (How it works): call milestone 07's program with the differences: links over RDMA, the devices' counters,
// and the list of ports to print first.
fn main() -> ExitCode {
    allreduce_tcp::main(&Over {
        program: env!("CARGO_PKG_NAME"),
        transport: TransportChoice::Verbs,
        name: "RDMA",
        counted: ["packets", "in packets, acknowledgements included, by the devices' counters"],
        #[cfg(feature = "verbs")]
        count: Count::Machine(|| packets(Path::new("/sys/class/infiniband"))),
        #[cfg(not(feature = "verbs"))]
        count: Count::Process(|| softroce::counters().sent_pkts),
        prepare: |config| {
            let ports = tinynccl::transport::rdma_ports(config)?;
            let list: Vec<String> = ports.iter().map(|p| format!("  {p}")).collect();
            Ok(Some(format!("RDMA ports of this machine that the ranks may use:\n{}\n", list.join("\n"))))
        },
    })
}

/// Packets that all RDMA ports below `devices` have sent. Software devices and adapters count in different places.
// EXERCISE 2 (Expected output): wait until the counters are fresh, then add up the packets sent by every port of every
// device: hw_counters/sent_pkts, or counters/port_xmit_packets. None when there is no port.
#[cfg(any(feature = "verbs", test))]
fn packets(devices: &Path) -> Option<u64> {
    // The kernel refreshes a device's counters once per interval (`hw_counters/lifespan`, 10 ms) and returns cached
    // values in between.
    std::thread::sleep(std::time::Duration::from_millis(20));
    let mut sum = None;
    for device in std::fs::read_dir(devices).ok()?.flatten() {
        for port in std::fs::read_dir(device.path().join("ports")).ok()?.flatten() {
            let read = |name: &str| std::fs::read_to_string(port.path().join(name)).ok()?.trim().parse::<u64>().ok();
            let sent = read("hw_counters/sent_pkts").or_else(|| read("counters/port_xmit_packets"))?;
            sum = Some(sum.unwrap_or(0) + sent);
        }
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_ports_are_added_wherever_their_counters_are() {
        let devices = tempfile::tempdir().unwrap();
        assert_eq!(packets(devices.path()), None, "no device");
        assert_eq!(packets(&devices.path().join("none")), None, "no folder");
        for (name, packets) in [
            ("rxe0/ports/1/hw_counters/sent_pkts", "5\n"),
            ("mlx5_0/ports/1/counters/port_xmit_packets", "70\n"),
            ("mlx5_0/ports/2/counters/port_xmit_packets", "900\n"),
        ] {
            let file = devices.path().join(name);
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(file, packets).unwrap();
        }
        assert_eq!(packets(devices.path()), Some(975));
    }
}
