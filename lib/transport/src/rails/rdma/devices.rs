//! The RDMA ports of a process, and asynchronous events of their devices.

use std::fmt;
use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use crate::rails::worker::service::{Remaining, Service};
use crate::rails::worker::thread::{Job, Worker};
use crate::verbs::nics::{Nic, Nics};
use crate::verbs::sys::Timing;
use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::config::Config;
use tinynccl_sys::threads::lock;

/// A user of RDMA ports, which is notified when one goes up or down.
pub(in crate::rails) trait PortListener: fmt::Debug + Send + Sync {
    fn port(&self, ip: IpAddr, up: bool);
}

/// The RDMA ports of a process.
#[derive(Debug)]
pub(in crate::rails) struct Devices {
    pub(super) nics: Nics,
    /// Timeout and retries of a queue pair where other rails can take over.
    impatient: Timing,
    /// Connections that have had queue pairs.
    listeners: Mutex<Vec<Weak<dyn PortListener>>>,
}

impl Devices {
    /// Opens the ports; `None` if RDMA is off or there are none, so that streams carry all.
    pub(in crate::rails) fn open(config: &Config) -> Result<Option<Arc<Devices>>> {
        if !config.net_rdma {
            return Ok(None);
        }
        if config.encrypt {
            log::info!("net: no RDMA, which cannot be encrypted: TINYNCCL_ENCRYPT is 1");
            return Ok(None);
        }
        match Nics::open(0, config) {
            Ok(nics) => {
                let impatient = within(nics.timing, config.net_rail_timeout);
                Ok(Some(Arc::new(Devices { nics, impatient, listeners: Mutex::default() })))
            }
            Err(e @ Error::Config { .. }) => Err(e),
            Err(e) => {
                log::warn!("net: no RDMA, long messages go over TCP: {e}");
                Ok(None)
            }
        }
    }

    pub(super) fn timing(&self, several: bool) -> Timing {
        if several { self.impatient } else { self.nics.timing }
    }

    /// Returns the port with this address.
    pub(super) fn at(&self, ip: IpAddr) -> Option<&Nic> {
        self.nics.all().iter().find(|nic| !nic.port.address.infiniband && nic.port.address.ip() == ip)
    }

    pub(super) fn ports(&self) -> String {
        self.nics.all().iter().map(|nic| nic.port.address.to_string()).collect::<Vec<_>>().join(", ")
    }

    /// Returns true if the port with this address is active now.
    pub(super) fn is_up(&self, ip: IpAddr) -> bool {
        let state = self.at(ip).map(|nic| nic.device.pd.context().port(nic.port.address.port));
        state.is_some_and(|state| state.is_ok_and(|state| state.active))
    }

    /// Registers a connection, which is notified of ports that go up or down.
    pub(super) fn subscribe(&self, listener: Arc<dyn PortListener>) {
        let mut listeners = lock(&self.listeners);
        listeners.retain(|one| one.strong_count() > 0 && !std::ptr::addr_eq(one.as_ptr(), Arc::as_ptr(&listener)));
        listeners.push(Arc::downgrade(&listener));
    }

    /// Handles the asynchronous events of a device. False once it is lost, and has no more.
    fn event(&self, number: usize) -> bool {
        let Some(device) = self.nics.devices().get(number) else { return false };
        let mut changed = Vec::new();
        device.handle_events(&"net", |event| {
            let Some(up) = event.port_is_up() else { return };
            let of = |nic: &&Nic| Arc::ptr_eq(&nic.device, device) && event.concerns(nic.port.address.port);
            changed.extend(self.nics.all().iter().filter(of).map(|nic| (nic.port.address.ip(), up)));
        });
        let listeners: Vec<Arc<dyn PortListener>> = match changed.is_empty() {
            true => Vec::new(),
            false => lock(&self.listeners).iter().filter_map(Weak::upgrade).collect(),
        };
        for listener in listeners {
            changed.iter().for_each(|&(ip, up)| listener.port(ip, up));
        }
        device.failure().is_none()
    }
}

/// Asynchronous events of a device.
struct DeviceService {
    devices: Arc<Devices>,
    number: usize,
}

impl Service for DeviceService {
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.devices.nics.devices().get(self.number).map(|device| device.event_fd())
    }

    fn readable(&self, _hung_up: bool) -> Remaining {
        // A device that is lost stays readable.
        if self.devices.event(self.number) { Remaining::Nothing } else { Remaining::Unwatch }
    }

    /// Does nothing: queue pairs fail without these events, too.
    fn fail(&self, _detail: &str) {}
}

/// Has `worker` handle the asynchronous events of all devices from now on.
pub(in crate::rails) fn watch(devices: &Arc<Devices>, worker: &Worker) {
    for number in 0..devices.nics.devices().len() {
        let service = DeviceService { devices: devices.clone(), number };
        worker.push(Job::Add { key: worker.new_key(), service: Box::new(service), edge: false });
    }
}

/// Returns the timing with which a queue pair gives up after `limit`, rounded up, and one repetition: packets wait for
/// tens of milliseconds in the queue of a slow link, and to repeat them meanwhile would cost half of it.
fn within(timing: Timing, limit: Duration) -> Timing {
    let retries = timing.retries.min(1);
    let unit = Duration::from_nanos(4096) * (u32::from(retries) + 1);
    // 22: 17 s.
    let timeout = (8..22).find(|code| unit * (1 << code) >= limit).unwrap_or(22);
    Timing { timeout, retries, ..timing }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_pair_gives_up_in_about_the_time_of_a_rail() {
        let timing = Timing { timeout: 14, retries: 6, rnr_retries: 7 };
        let code = |limit| within(timing, Duration::from_secs_f64(limit)).timeout;
        assert_eq!([0.0001, 0.1, 0.12, 0.14, 60.0, 1e6].map(code), [8, 14, 14, 15, 22, 22]);
        assert_eq!(within(Timing { retries: 0, ..timing }, Duration::from_millis(100)).timeout, 15);
    }
}
