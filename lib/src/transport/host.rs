//! Which machine, network namespace and user this process belongs to: two processes that agree can share memory.

use std::os::unix::fs::MetadataExt;

use serde::{Deserialize, Serialize};

/// The facts that decide whether a memfd can go from one process to another over an abstract Unix socket.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Host {
    /// The kernel's boot id: the same in all containers of a machine, different after a reboot and on every other one.
    pub boot_id: String,
    /// Inode of the network namespace, which is where abstract socket names live.
    pub net_ns: u64,
    /// Effective user.
    pub uid: u32,
}

impl Host {
    /// This process's.
    pub(crate) fn current() -> Host {
        let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_else(|e| {
            log::warn!("no boot id ({e}): this process shares memory with no other");
            format!("unknown, process {}", std::process::id())
        });
        let net_ns = std::fs::metadata("/proc/self/ns/net").map_or(0, |m| m.ino());
        Host { boot_id: boot_id.trim().to_owned(), net_ns, uid: rustix::process::geteuid().as_raw() }
    }

    /// Loopback addresses reach the other process.
    pub(crate) fn same_network(&self, other: &Host) -> bool {
        self.boot_id == other.boot_id && self.net_ns == other.net_ns
    }

    /// Why memory can not be shared, if it can not.
    pub(crate) fn separation(&self, other: &Host) -> Option<&'static str> {
        if self.boot_id != other.boot_id {
            Some("they run on different machines")
        } else if self.net_ns != other.net_ns {
            Some("they run in different network namespaces")
        } else if self.uid != other.uid {
            Some("they run as different users")
        } else {
            None
        }
    }
}
