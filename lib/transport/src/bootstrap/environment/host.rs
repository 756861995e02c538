//! The machine that a rank runs on, and its network namespace: they decide whether two ranks can share memory or
//! connect over loopback.

use serde::{Deserialize, Serialize};
use tinynccl_sys::config::Config;

/// Identity of the host on which a process runs. Sent with a rank's endpoints.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Host {
    /// The kernel's boot id: equal for all processes under one running kernel, containers included. Empty if unknown.
    pub boot_id: String,
    /// Host name, for people.
    pub hostname: String,
    /// Inode of the network namespace; 0 if unknown.
    pub net_namespace: u64,
    /// Effective user id.
    pub uid: u32,
    /// Name by which the settings divide a machine into hosts (`TINYNCCL_HOST_ID`); empty without one.
    #[serde(default)]
    pub name: String,
}

impl Host {
    /// Returns the host of this process.
    pub fn current() -> Host {
        use std::os::unix::fs::MetadataExt;
        Host {
            boot_id: std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned(),
            hostname: rustix::system::uname().nodename().to_string_lossy().into_owned(),
            net_namespace: std::fs::metadata("/proc/self/ns/net").map_or(0, |m| m.ino()),
            uid: rustix::process::geteuid().as_raw(),
            name: String::new(),
        }
    }

    /// Returns the host of this process, as the settings name it.
    pub fn of(config: &Config) -> Host {
        Host { name: config.host_id.clone().unwrap_or_default(), ..Host::current() }
    }

    /// True when both run under the same kernel. Where the boot id is unknown, the host name decides.
    pub fn same_machine(&self, other: &Host) -> bool {
        self.boot_id == other.boot_id && (!self.boot_id.is_empty() || self.hostname == other.hostname)
    }

    /// True when both count as one host: they run under the same kernel, and no setting divides them.
    pub fn same_host(&self, other: &Host) -> bool {
        self.same_machine(other) && self.name == other.name
    }

    /// True when both see the same network interfaces, loopback and abstract sockets.
    pub fn same_network(&self, other: &Host) -> bool {
        self.same_machine(other) && self.net_namespace == other.net_namespace
    }

    /// Returns the reason for which a memory descriptor cannot go from one to the other over an abstract Unix socket;
    /// `None` if it can.
    pub fn separation(&self, other: &Host) -> Option<&'static str> {
        if self.boot_id.is_empty() {
            Some("this machine's boot id is unknown")
        } else if !self.same_machine(other) {
            Some("they run on different machines")
        } else if self.name != other.name {
            Some("TINYNCCL_HOST_ID makes them ranks of different hosts")
        } else if !self.same_network(other) {
            Some("they run in different network namespaces")
        } else if self.uid != other.uid {
            Some("they run as different users")
        } else {
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn we_are_on_our_own_host_and_not_on_another() {
        let here = Host::current();
        let text = serde_json::to_string(&here).unwrap();
        let same: Host = serde_json::from_str(&text).unwrap();
        assert_eq!(same, here);
        assert!(here.same_machine(&same) && here.same_network(&same));
        let container = Host { net_namespace: here.net_namespace + 1, ..here.clone() };
        assert!(here.same_machine(&container) && !here.same_network(&container));
        assert_eq!(here.separation(&same), None);
        assert!(here.separation(&container).is_some());
        assert!(here.separation(&Host { uid: here.uid + 1, ..here.clone() }).is_some());
        let named = Host { name: "another".into(), ..here.clone() };
        assert!(here.separation(&named).is_some_and(|why| why.contains("TINYNCCL_HOST_ID")));
        assert!(here.same_network(&named) && !here.same_host(&named) && here.same_host(&same));
        let other = Host { boot_id: "another".into(), ..here.clone() };
        assert!(here.separation(&other).is_some());
        assert!(!here.same_machine(&other) && !here.same_network(&other) && !here.same_host(&other));
    }
}
