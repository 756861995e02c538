//! Stage 2: `ibv_reg_mr` on the GPU's own address.

use std::io;

use super::{Attempt, Device, Memory, Path, Probe};
use crate::why::{Why, errno};

/// Modules that resolve a GPU's addresses, newest first: the first ships with NVIDIA's driver, the second is Mellanox's
/// earlier one.
const MODULES: [&str; 2] = ["nvidia_peermem", "nv_peer_mem"];

/// The loaded one, which has a folder in `sysfs_module` (`/sys/module`).
pub fn loaded_module(sysfs_module: &std::path::Path) -> Option<&'static str> {
    MODULES.into_iter().find(|name| sysfs_module.join(name).is_dir())
}

/// Registers the GPU's address as if it were ordinary memory. The kernel's own code finds no pages there (EFAULT);
/// a peer-memory client that knows the address supplies the GPU's pages.
pub fn attempt<B: Memory + ?Sized, D: Device>(probe: &Probe<'_, B, D>) -> Attempt<D::Mr> {
    let pointer = match probe.buffer.device_pointer() {
        Ok(pointer) => pointer,
        Err(why) => return Attempt::NotTaken(why),
    };
    let in_user_space = probe.device.as_ref().is_ok_and(|device| device.is_in_user_space());
    if !in_user_space && let Err(why) = probe.buffer.gpudirect() {
        return Attempt::NotTaken(why);
    }
    let loaded = match probe.peer_module {
        _ if in_user_space => "no module is needed".to_owned(),
        Some(module) => format!("the module {module} is loaded"),
        None => "the module nvidia_peermem is not loaded".to_owned(),
    };
    let device = match &probe.device {
        Ok(device) => *device,
        Err(none) => {
            return Attempt::NotTaken(Why::new(format!("{}; {loaded}", none.reason), none.next.clone()));
        }
    };
    match device.reg_mr(pointer, probe.buffer.len(), probe.buffer.owner()) {
        Ok(mr) => Attempt::Taken(
            Path::Direct(mr),
            format!("{loaded}, {} registered the GPU's address {pointer:#x}: {}", device.name(), device.direct()),
        ),
        Err(cause) => Attempt::NotTaken(refused(device.name(), &loaded, probe.peer_module, &cause)),
    }
}

fn refused(device: &str, loaded: &str, module: Option<&str>, cause: &io::Error) -> Why {
    let next = match (cause.raw_os_error(), module) {
        (Some(libc::EFAULT), None) => {
            "`modprobe nvidia_peermem` as root; if that says 'Invalid argument', the kernel's ib_core has no peer-memory \
             clients: install NVIDIA's DOCA-OFED, or use dmabuf"
        }
        (Some(libc::EFAULT), Some(_)) => {
            "load the module after the RDMA driver (`rmmod nvidia_peermem; modprobe nvidia_peermem`); the kernel's log \
             (dmesg) says whether ib_core accepted it"
        }
        (Some(libc::ENOMEM), _) => {
            "raise the limit of locked memory (`ulimit -l`), or the GPU's BAR1 is used up (`nvidia-smi -q`)"
        }
        _ => "the kernel's log (dmesg) says more",
    };
    let meaning = match cause.raw_os_error() {
        Some(libc::EFAULT) => ": no pages of this process, and no module that knows the address",
        _ => "",
    };
    Why::new(format!("ibv_reg_mr of the GPU's address on {device}: {}{meaning}; {loaded}", errno(cause)), next)
}
