//! Ranks on network namespaces as nodes.

use program_kit::again::Process;
use program_kit::nodes::{node, run};

/// A rank on a separate node for each address at which it finds rank 0, before there are NIC pairs.
pub(crate) fn ranks<const N: usize>(test: &str, meet: [&str; N], settings: &[(&str, &str)]) -> [Process; N] {
    let mut rank = 0..;
    meet.map(|meet| {
        let (rank, size) = (rank.next().unwrap_or(0).to_string(), N.to_string());
        let place = [
            ("RANK", &*rank),
            ("WORLD_SIZE", &size),
            ("LOCAL_RANK", "0"),
            ("MASTER_ADDR", meet),
            ("MASTER_PORT", "29512"),
            ("TINYNCCL_TUNE", "off"),
        ];
        let node = node(test, &rank, &[&place, settings].concat());
        // A rank reaches itself over it.
        run(&node, "ip link set lo up");
        node
    })
}
