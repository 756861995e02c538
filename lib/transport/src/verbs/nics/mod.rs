//! The ports that an endpoint uses, opened, with the memory that their devices know.

mod device;
mod registered;
mod table;

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use super::address::{VerbsAddress, list, pairs};
use super::options::{self, LocalPort};
use super::sys::{Access, Gid, Remote, Timing};
use tinynccl_plan::error::Result;
use tinynccl_sys::config::Config;

pub(crate) use device::Device;
pub(crate) use registered::Registered;

/// A port with one of its addresses.
#[derive(Debug)]
pub(crate) struct Nic {
    pub(crate) device: Arc<Device>,
    pub(crate) port: LocalPort,
}

impl Nic {
    /// Returns the address of a peer's queue pair, as one at this port needs it, from its number and first PSN, and its
    /// port's GID, LID and MTU code.
    pub(crate) fn remote(&self, (qpn, psn): (u32, u32), gid: [u8; 16], lid: u16, mtu: u32) -> Remote {
        let LocalPort { address, gid_index, .. } = &self.port;
        Remote {
            qpn,
            psn,
            gid: Gid(gid),
            lid,
            mtu: self.port.mtu.min(mtu),
            port: address.port,
            gid_index: *gid_index,
            infiniband: address.infiniband,
        }
    }
}

/// Ports of a queue pair: ours, and the peer's with the GID `to`.
#[derive(Debug, Clone, Copy)]
pub(super) struct PortPair<'a> {
    pub(super) nic: &'a Nic,
    pub(super) to: [u8; 16],
}

impl PortPair<'_> {
    pub(super) fn in_words(&self) -> String {
        format!("{} from {}", Gid(self.to).ip(), self.nic.port.address)
    }

    /// Lists the distinct ones of some pairs, in words.
    pub(super) fn list(pairs: &[PortPair<'_>]) -> String {
        let mut words: Vec<String> = Vec::new();
        for pair in pairs.iter().map(PortPair::in_words) {
            if !words.contains(&pair) {
                words.push(pair);
            }
        }
        words.join(", ")
    }
}

/// All ports that the configuration lets through.
#[derive(Debug)]
pub(crate) struct Nics {
    rank: usize,
    devices: Vec<Arc<Device>>,
    nics: Vec<Nic>,
    pub(crate) timing: Timing,
    /// Queue pairs of a link.
    qps: usize,
}

impl Nics {
    /// Opens the devices.
    ///
    /// # Errors
    /// [`Error::Unsupported`](tinynccl_plan::Error::Unsupported) without a device or a usable port;
    /// [`Error::Config`](tinynccl_plan::Error::Config) for one that does not exist.
    pub(crate) fn open(rank: usize, config: &Config) -> Result<Nics> {
        let (mut devices, mut nics): (Vec<Arc<Device>>, Vec<Nic>) = Default::default();
        let names = options::devices(config)?;
        for name in &names {
            let (context, device) = Device::new(name)?;
            let ports = options::ports(&context, config)?;
            for port in &ports {
                log::debug!("rank {rank}: RDMA at {}, GID index {}", port.address, port.gid_index);
            }
            if !ports.is_empty() {
                devices.push(device.clone());
            }
            nics.extend(ports.into_iter().map(|port| Nic { device: device.clone(), port }));
        }
        // A peer on another host would take such an address for its own, unless the user knows better.
        if config.verbs_device.is_none() && nics.iter().any(|r| !r.port.everywhere) {
            nics.retain(|r| !r.port.everywhere);
            devices.retain(|d| nics.iter().any(|r| Arc::ptr_eq(&r.device, d)));
        }
        if nics.is_empty() {
            let names = names.join(", ");
            return Err(options::none(format!(
                "no active port with a RoCE v2 or InfiniBand address on {names}; see ibv_devinfo, and give the port's network \
                 interface an IP address"
            )));
        }
        Ok(Nics { rank, devices, nics, timing: options::timing(config), qps: config.verbs_qps })
    }

    /// Returns the addresses of the ports, as the other ranks receive them.
    pub(crate) fn addresses(&self) -> Vec<VerbsAddress> {
        self.nics.iter().map(|r| r.port.address.clone()).collect()
    }

    /// Our port and the peer's for each queue pair of a link of channel `channel`: the pairs of ports that share a
    /// subnet, in turn, and each channel begins with the next one.
    ///
    /// # Errors
    /// Why there are none.
    pub(super) fn port_pairs(&self, theirs: &[VerbsAddress], channel: u32) -> Result<Vec<PortPair<'_>>, String> {
        let ours = self.addresses();
        let indices = pairs(&ours, theirs);
        let pair = |&(o, t): &(usize, usize)| Some(PortPair { nic: self.nics.get(o)?, to: theirs.get(t)?.gid });
        let pairs: Vec<PortPair<'_>> = indices
            .iter()
            .filter_map(pair)
            .cycle()
            .skip(channel as usize % indices.len().max(1))
            .take(self.qps)
            .collect();
        if pairs.is_empty() {
            return Err(format!(
                "no two ports of theirs share a subnet. Rank {}: {}. The other: {}. Give them addresses in one subnet, \
                 choose other devices with TINYNCCL_VERBS_DEVICE",
                self.rank,
                list(&ours),
                list(theirs)
            ));
        }
        Ok(pairs)
    }

    /// The devices of the ports.
    pub(crate) fn devices(&self) -> &[Arc<Device>] {
        &self.devices
    }

    pub(crate) fn all(&self) -> &[Nic] {
        &self.nics
    }

    /// The port of ours that the peer wants.
    pub(super) fn of_gid(&self, gid: &[u8; 16]) -> Option<&Nic> {
        self.nics.iter().find(|r| r.port.address.gid == *gid)
    }

    /// Registers a caller's memory with every device, for the use `access`.
    ///
    /// # Safety
    /// The memory must stay allocated, at its place, until the registration is dropped.
    ///
    /// # Errors
    /// [`Error::Os`](tinynccl_plan::Error::Os) when a device refuses, most often for the limit of locked memory.
    pub(crate) unsafe fn register(&self, base: NonNull<u8>, bytes: usize, access: Access) -> Result<Registered> {
        // SAFETY: by the caller.
        unsafe { Registered::new(&self.devices, (base, bytes), access) }
    }

    /// Descriptors that become readable when a device has an event. A lost device reports no more.
    pub(crate) fn event_fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.devices.iter().filter(|d| d.failure().is_none()).map(|d| d.event_fd())
    }

    /// Handles the events of the devices.
    pub(crate) fn handle_events(&self) {
        for device in self.devices.iter().filter(|d| d.failure().is_none()) {
            device.handle_events(&format_args!("rank {}", self.rank), |_| {});
        }
    }
}
