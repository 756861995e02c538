//! Stage 1: the buffer as a dmabuf, imported by the RDMA device.

use std::io;
use std::os::fd::AsFd;

use super::{Attempt, Device, Export, Memory, Path, Probe};
use crate::why::{Why, errno};

/// Exports the buffer, then lets the device import it. The probe tries each half regardless of the other, so that the
/// report covers the half that a machine has.
pub fn attempt<B: Memory + ?Sized, D: Device>(probe: &Probe<'_, B, D>) -> Attempt<D::Mr> {
    let export = probe.buffer.export();
    let device = match &probe.device {
        Ok(device) => *device,
        Err(none) => return Attempt::NotTaken(without_device(export, none)),
    };
    // A driver without dmabuf support refuses before it looks at the descriptor.
    let cause = device.ask_dmabuf();
    if cause.raw_os_error().is_some_and(unsupported) {
        let exported = match &export {
            Ok(export) => format!("{} exports the buffer, but ", export.source),
            Err(why) => format!("{}; and ", why.reason),
        };
        return Attempt::NotTaken(Why {
            reason: format!(
                "{exported}ibv_reg_dmabuf_mr on {}: {}: its driver imports no dmabuf",
                device.name(),
                errno(&cause)
            ),
            next: "a card's driver that does (mlx5 since Linux 5.12, irdma and bnxt_re later ones)".to_owned(),
        });
    }
    let export = match export {
        Ok(export) => export,
        Err(why) => return Attempt::NotTaken(why),
    };
    let (buffer, range) = (probe.buffer, (export.offset, probe.buffer.len()));
    match device.reg_dmabuf_mr(export.fd.as_fd(), range, buffer.address(), buffer.owner()) {
        Ok(mr) => Attempt::Taken(
            Path::Direct(mr),
            format!(
                "{} exported {} bytes, {} registered them: {}",
                export.source,
                range.1,
                device.name(),
                device.direct()
            ),
        ),
        Err(cause) => Attempt::NotTaken(refused(&export, device.name(), &cause)),
    }
}

/// The kernel's errnos for a driver without this function, for either form of the command (write and ioctl).
fn unsupported(errno: i32) -> bool {
    [libc::EOPNOTSUPP, libc::EPROTONOSUPPORT, libc::ENOSYS].contains(&errno)
}

fn without_device(export: Result<Export, Why>, none: &Why) -> Why {
    match export {
        Ok(export) => Why {
            reason: format!("{} exports the buffer, but there is nothing to import it: {}", export.source, none.reason),
            next: none.next.clone(),
        },
        Err(why) => {
            Why { reason: format!("{}; and {}", why.reason, none.reason), next: format!("{}; {}", why.next, none.next) }
        }
    }
}

fn refused(export: &Export, device: &str, cause: &io::Error) -> Why {
    let (meaning, next) = match cause.raw_os_error() {
        Some(libc::EINVAL) => (
            "the two drivers do not agree on this memory",
            "offset and length in whole pages; GPU and card behind one PCIe root; on a GPU: the open kernel modules of NVIDIA",
        ),
        Some(libc::ENOMEM) => ("no room for the registration", "raise the limit of locked memory (`ulimit -l`)"),
        Some(libc::EPERM | libc::EACCES) => ("not allowed", "run as a user that may use /dev/infiniband"),
        Some(libc::EBADF) => ("the descriptor is no dmabuf", "report this as a fault of this program"),
        _ => ("the import failed", "the kernel's log (dmesg) says more"),
    };
    Why::new(
        format!("{} exports the buffer, but ibv_reg_dmabuf_mr on {device}: {}: {meaning}", export.source, errno(cause)),
        next,
    )
}
