//! Milestone 08: ring all-reduce over RDMA. The program is that of milestone 07; what differs is said here.

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use allreduce_tcp::Over;
use tinynccl::config::TransportChoice;

fn main() -> ExitCode {
    allreduce_tcp::main(&Over {
        program: env!("CARGO_PKG_NAME"),
        transport: TransportChoice::Verbs,
        name: "RDMA",
        counted: ["packets", "in packets, acknowledgements included, by the devices' counters"],
        count: || packets(Path::new("/sys/class/infiniband")),
        prepare: |config| {
            let ports = tinynccl::transport::rdma_ports(config)?;
            let list: Vec<String> = ports.iter().map(|p| format!("  {p}")).collect();
            Ok(Some(format!("RDMA ports of this machine that the ranks may use:\n{}\n", list.join("\n"))))
        },
    })
}

/// The kernel asks a device for its counters once in so long (`hw_counters/lifespan`, 10 ms), and hands out the old ones until then.
const LIFESPAN: Duration = Duration::from_millis(20);

/// Packets that all RDMA ports below `devices` have sent. Software devices and adapters count in different places.
fn packets(devices: &Path) -> Option<u64> {
    std::thread::sleep(LIFESPAN);
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
