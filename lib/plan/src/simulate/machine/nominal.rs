//! Speeds of links by what they are, where nothing was measured. GB/s, each way.
//!
//! | link | figure | source |
//! |---|---|---|
//! | PCIe | 3/4 of the bits that a lane carries: the rest is headers and flow control | NCCL `src/graph/topo.cc` |
//! | NVLink | what copies reach over one link, by the GPU's generation | NCCL `src/graph/topo.h` |
//! | between sockets | what GPUs reach over it, by the processor | the same |
//! | a port of unknown speed | 10 Gbit/s | NCCL `src/graph/topo.cc` |
//!
//! Latencies are those of a message in NCCL's tables (`src/graph/tuning.cc`, protocol LL: 0.6 µs over NVLink, 1 over
//! PCIe, 5 over a network), divided among the links on its way: a route over NVLink has to be shorter than one over
//! PCIe.

/// Latency of a link in microseconds: NVLink.
pub const NVLINK_US: f64 = 0.3;
/// PCIe.
pub const PCIE_US: f64 = 0.5;
/// Between sockets.
pub const SOCKET_US: f64 = 0.5;
/// From a port into the network.
pub const NETWORK_US: f64 = 2.5;
/// A port of unknown speed, in Mbit/s.
pub const UNKNOWN_MBIT: f64 = 10_000.0;

/// A PCIe link of `lanes` lanes at the speed that sysfs has as text, like `16.0 GT/s PCIe`. An unknown speed counts as
/// the third generation's, no lanes as 16.
pub fn pcie_gb_s(speed: &str, lanes: u32) -> f64 {
    let number = speed.split_whitespace().next().and_then(|word| word.parse::<f64>().ok());
    let gigatransfers = number.filter(|speed| (1.0..1e4).contains(speed)).unwrap_or(8.0);
    // Ten bits carry eight up to the second generation.
    let share = if gigatransfers <= 5.0 { 0.8 * 0.75 } else { 0.75 };
    let lanes = if lanes == 0 { 16 } else { lanes };
    gigatransfers * share * f64::from(lanes) / 8.0
}

/// One NVLink of a GPU of compute capability `sm`, as 90 for 9.0.
pub fn nvlink_gb_s(sm: u32) -> f64 {
    match sm {
        100.. => 40.1,
        90..100 => 20.6,
        86 => 12.0,
        60..70 => 18.0,
        _ => 20.0,
    }
}

/// A network port of `mbit` Mbit/s; not positive: unknown.
pub fn port_gb_s(mbit: f64) -> f64 {
    let mbit = if mbit.is_finite() && mbit > 0.0 { mbit } else { UNKNOWN_MBIT };
    mbit / 8000.0
}

/// The links between two sockets of a processor with this architecture (as `uname` has it), vendor, and family and
/// model as `/proc/cpuinfo` has them.
pub fn socket_gb_s(arch: &str, vendor: &str, family: u32, model: u32) -> f64 {
    match (arch, vendor) {
        ("ppc64" | "ppc64le", _) => 32.0,
        ("arm64" | "aarch64", _) => 6.0,
        (_, "AuthenticAMD") => 16.0,
        (_, "GenuineIntel") if family == 6 && model >= 0xcf => 40.0,
        (_, "GenuineIntel") if family == 6 && model >= 0x8f => 22.0,
        (_, "GenuineIntel") if family == 6 && model >= 0x55 => 10.0,
        _ => 6.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_figures_of_nccls_tables() {
        // Hundreds of Mbit/s per lane there.
        for (speed, per_lane) in [
            ("2.5 GT/s", 15.0),
            ("5 GT/s", 30.0),
            ("5.0 GT/s PCIe", 30.0),
            ("8 GT/s", 60.0),
            ("16.0 GT/s PCIe", 120.0),
            ("32.0 GT/s PCIe", 240.0),
            ("64.0 GT/s PCIe", 480.0),
            ("Unknown", 60.0),
            ("", 60.0),
            ("-1 GT/s", 60.0),
            ("1e308 GT/s", 60.0),
        ] {
            approx::assert_relative_eq!(pcie_gb_s(speed, 16), 16.0 * per_lane / 80.0, max_relative = 1e-12);
        }
        assert_eq!(pcie_gb_s("8 GT/s", 0), pcie_gb_s("8 GT/s", 16));
        let links = [60, 70, 75, 80, 86, 87, 90, 100, 120].map(nvlink_gb_s);
        assert_eq!(links, [18.0, 20.0, 20.0, 20.0, 12.0, 20.0, 20.6, 40.1, 40.1]);
        assert_eq!((port_gb_s(400_000.0), port_gb_s(-1.0), port_gb_s(f64::NAN)), (50.0, 1.25, 1.25));
        assert_eq!(socket_gb_s("x86_64", "GenuineIntel", 6, 0x8f), 22.0);
        assert_eq!(socket_gb_s("x86_64", "AuthenticAMD", 25, 1), 16.0);
    }
}
