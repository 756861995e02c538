//! RDMA devices as the kernel lists them: no libibverbs is needed to look.

use std::net::{IpAddr, Ipv6Addr};
use std::path::Path;

use serde::Serialize;

use super::{Roots, text};

/// RDMA on this machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Rdma {
    pub(crate) devices: Vec<Device>,
    /// Programs may open devices: `/dev/infiniband/uverbs*` is there.
    pub(crate) uverbs: bool,
}

/// An RDMA device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Device {
    pub(crate) name: String,
    pub(crate) ports: Vec<Port>,
}

/// Its port.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Port {
    pub(crate) number: u32,
    /// `ACTIVE`, `DOWN`, …
    pub(crate) state: String,
    /// `Ethernet` or `InfiniBand`.
    pub(crate) link_layer: String,
    /// `100 Gb/sec (4X EDR)`.
    pub(crate) rate: String,
    pub(crate) gids: Vec<Gid>,
}

/// An entry of a port's GID table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Gid {
    pub(crate) index: u32,
    pub(crate) gid: Ipv6Addr,
    /// `RoCE v2`, `IB/RoCE v1`.
    pub(crate) kind: String,
    /// The network interface that it belongs to.
    pub(crate) interface: Option<String>,
}

impl Gid {
    /// Returns true for the entries that are fit for use: all over InfiniBand, else RoCE v2 with an address that is
    /// neither link-local nor empty.
    pub(crate) fn is_usable(&self, link_layer: &str) -> bool {
        let ip = IpAddr::V6(self.gid).to_canonical();
        let is_local = match ip {
            IpAddr::V4(ip) => ip.is_link_local(),
            IpAddr::V6(ip) => ip.is_unicast_link_local(),
        };
        link_layer == "InfiniBand" || (self.kind == "RoCE v2" && !is_local && !ip.is_unspecified())
    }
}

impl Rdma {
    pub(crate) fn read(roots: &Roots) -> Rdma {
        let uverbs = names(&roots.dev.join("infiniband")).iter().any(|name| name.starts_with("uverbs"));
        let devices = roots.sys.join("class/infiniband");
        let device = |name: String| {
            let folder = devices.join(&name).join("ports");
            let mut numbers: Vec<u32> = names(&folder).iter().filter_map(|n| n.parse().ok()).collect();
            numbers.sort_unstable();
            Device {
                ports: numbers.into_iter().map(|number| port(&folder.join(number.to_string()), number)).collect(),
                name,
            }
        };
        Rdma { devices: names(&devices).into_iter().map(device).collect(), uverbs }
    }

    /// An active port with an address to talk to, on a device that programs may open.
    pub(crate) fn is_usable(&self) -> bool {
        let usable =
            |port: &Port| port.state == "ACTIVE" && port.gids.iter().any(|gid| gid.is_usable(&port.link_layer));
        self.uverbs && self.devices.iter().flat_map(|device| &device.ports).any(usable)
    }
}

fn port(folder: &Path, number: u32) -> Port {
    let file = |file: &str| text(folder.join(file)).unwrap_or_default();
    let mut indices: Vec<u32> = names(&folder.join("gids")).iter().filter_map(|n| n.parse().ok()).collect();
    indices.sort_unstable();
    let entry = |index: u32| {
        let gid: Ipv6Addr = file(&format!("gids/{index}")).parse().ok()?;
        // All zeros: the table is longer than its entries.
        (!gid.is_unspecified()).then(|| Gid {
            index,
            gid,
            kind: file(&format!("gid_attrs/types/{index}")),
            interface: text(folder.join(format!("gid_attrs/ndevs/{index}"))),
        })
    };
    Port {
        number,
        state: state(&file("state")).to_owned(),
        link_layer: file("link_layer"),
        rate: file("rate"),
        gids: indices.into_iter().filter_map(entry).collect(),
    }
}

/// The word of `4: ACTIVE`.
fn state(text: &str) -> &str {
    text.split_once(':').map_or(text, |(_, word)| word.trim())
}

/// The entries of a folder, sorted; empty if there is no folder.
fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A tree with one device of one port.
    fn tree(files: &[(&str, &str)]) -> (tempfile::TempDir, Roots) {
        let folder = tempfile::tempdir().unwrap();
        for (path, contents) in files {
            let path = folder.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, format!("{contents}\n")).unwrap();
        }
        let roots =
            Roots { proc: folder.path().into(), sys: folder.path().join("sys"), dev: folder.path().join("dev") };
        (folder, roots)
    }

    const PORT: &str = "sys/class/infiniband/rxe0/ports/1";

    fn rxe(state: &str) -> (tempfile::TempDir, Roots) {
        let at = |file: &str| format!("{PORT}/{file}");
        let files = [
            (at("state"), state),
            (at("link_layer"), "Ethernet"),
            (at("rate"), "2.5 Gb/sec (1X SDR)"),
            (at("gids/0"), "fe80:0000:0000:0000:0000:00ff:fe00:0101"),
            (at("gids/1"), "0000:0000:0000:0000:0000:ffff:0a01:0101"),
            (at("gids/10"), "0000:0000:0000:0000:0000:0000:0000:0000"),
            (at("gid_attrs/types/0"), "RoCE v2"),
            (at("gid_attrs/types/1"), "RoCE v2"),
            (at("gid_attrs/ndevs/1"), "eth0"),
            ("dev/infiniband/uverbs0".to_owned(), ""),
        ];
        let files: Vec<(&str, &str)> = files.iter().map(|(path, contents)| (path.as_str(), *contents)).collect();
        tree(&files)
    }

    #[test]
    fn a_port_and_its_table() {
        let (_folder, roots) = rxe("4: ACTIVE");
        let rdma = Rdma::read(&roots);
        let port = &rdma.devices[0].ports[0];
        assert_eq!((rdma.devices[0].name.as_str(), port.number, port.state.as_str()), ("rxe0", 1, "ACTIVE"));
        let gids: Vec<(u32, String)> = port.gids.iter().map(|g| (g.index, g.gid.to_string())).collect();
        assert_eq!(gids, [(0, "fe80::ff:fe00:101".to_owned()), (1, "::ffff:10.1.1.1".to_owned())]);
        assert_eq!(port.gids[1].interface.as_deref(), Some("eth0"));
        assert!(!port.gids[0].is_usable(&port.link_layer) && port.gids[1].is_usable(&port.link_layer));
        assert!(rdma.is_usable());
        let unfit = ["fe80::1", "::ffff:169.254.1.2", "::ffff:0.0.0.0", "::"];
        let gid = |gid: &str| Gid { gid: gid.parse().expect("an address"), ..port.gids[1].clone() };
        assert!(unfit.iter().all(|unfit| !gid(unfit).is_usable(&port.link_layer)));
    }

    #[test]
    fn a_port_that_is_down_and_a_machine_without() {
        assert!(!Rdma::read(&rxe("1: DOWN").1).is_usable());
        let (_folder, roots) = tree(&[]);
        assert_eq!(Rdma::read(&roots), Rdma { devices: Vec::new(), uverbs: false });
    }

    proptest! {
        #[test]
        fn states_have_a_number_in_front(number in 0..9, word in "[A-Z]{1,8}") {
            let text = format!("{number}: {word}");
            prop_assert_eq!(state(&text), word);
        }

        #[test]
        fn no_text_is_a_panic(text in any::<String>()) {
            let _ = state(&text);
        }
    }
}
