//! Devices by name, and an opened one.

use std::ffi::{CStr, c_int};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Once};

use super::gid::GidEntry;
use super::{Handle, check, ffi, last_error};
use tinynccl_plan::error::{Error, Result};

/// The devices of this machine: `look` is called with each and its name, until it returns something.
fn find<T>(mut look: impl FnMut(*mut ffi::ibv_device, &CStr) -> Option<T>) -> Result<Option<T>> {
    let mut n: c_int = 0;
    // SAFETY: the call writes the number of entries to `n` and returns an array of as many, or null.
    let list = unsafe { ffi::ibv_get_device_list(&raw mut n) };
    if list.is_null() {
        return match last_error("listing RDMA devices") {
            // No kernel support.
            Error::Os { errno: libc::ENOSYS, .. } => Ok(None),
            e => Err(e),
        };
    }
    let found = (0..usize::try_from(n).unwrap_or(0)).find_map(|i| {
        // SAFETY: `i` is below the number of entries; a device's name is a string that lives as long as the list.
        let (device, name) = unsafe {
            let device = *list.add(i);
            (device, CStr::from_ptr(ffi::ibv_get_device_name(device)))
        };
        look(device, name)
    });
    // SAFETY: the list is ours and nothing refers to it any more; an opened device outlives it.
    unsafe { ffi::ibv_free_device_list(list) };
    Ok(found)
}

/// Names of the RDMA devices of this machine; none without kernel support.
pub(crate) fn device_names() -> Result<Vec<String>> {
    let mut names = Vec::new();
    find(|_, name| -> Option<()> {
        names.push(name.to_string_lossy().into_owned());
        None
    })?;
    Ok(names)
}

/// The attributes of a port.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PortState {
    pub(crate) active: bool,
    pub(crate) infiniband: bool,
    pub(crate) lid: u16,
    /// Largest packet, as the `ibv_mtu` code: 256 bytes times 2 to the power of (code - 1).
    pub(crate) mtu: u32,
}

/// An opened device.
#[derive(Debug)]
pub(crate) struct Context {
    raw: Handle<ffi::ibv_context>,
    name: String,
}

impl Context {
    /// Opens the device called `name`.
    pub(crate) fn open(name: &str) -> Result<Arc<Context>> {
        prepare_for_fork();
        let open = |device, found: &CStr| {
            // SAFETY: `device` is from the list, which is not freed yet.
            (found.to_bytes() == name.as_bytes()).then(|| unsafe { ffi::ibv_open_device(device) })
        };
        let raw = find(open)?.ok_or_else(|| Error::invalid("verbs", format!("there is no RDMA device {name}")))?;
        let raw = Handle::new(raw, || format!("opening the RDMA device {name}"))?;
        let context = Arc::new(Context { raw, name: name.to_owned() });
        context.make_events_nonblocking()?;
        Ok(context)
    }

    pub(super) fn raw(&self) -> *mut ffi::ibv_context {
        self.raw.get()
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Number of ports; they count from 1.
    pub(crate) fn ports(&self) -> Result<u8> {
        let mut attr = ffi::ibv_device_attr::default();
        // SAFETY: the context is open and the call fills `attr`.
        let result = unsafe { ffi::ibv_query_device(self.raw(), &raw mut attr) };
        check(result, || format!("querying the RDMA device {}", self.name))?;
        Ok(attr.phys_port_cnt)
    }

    /// State of port `port`.
    pub(crate) fn port(&self, port: u8) -> Result<PortState> {
        let mut attr = ffi::ibv_port_attr::default();
        // SAFETY: the context is open. The symbol fills the older, shorter form of the structure, a prefix of this one.
        let result = unsafe { ffi::ibv_query_port(self.raw(), port, (&raw mut attr).cast()) };
        check(result, || format!("querying port {port} of the RDMA device {}", self.name))?;
        Ok(PortState {
            active: attr.state == ffi::ibv_port_state::IBV_PORT_ACTIVE,
            infiniband: u32::from(attr.link_layer) == ffi::IBV_LINK_LAYER_INFINIBAND,
            lid: attr.lid,
            mtu: attr.active_mtu,
        })
    }

    /// The GID tables of all ports, empty entries left out.
    pub(crate) fn gids(&self) -> Result<Vec<GidEntry>> {
        // The kernel takes up to 64 KiB for the answer and refuses more.
        let mut entries = vec![ffi::ibv_gid_entry::default(); 2000];
        // SAFETY: the call writes at most `entries.len()` entries of the given size.
        let n = unsafe {
            ffi::_ibv_query_gid_table(
                self.raw(),
                entries.as_mut_ptr(),
                entries.len(),
                0,
                size_of::<ffi::ibv_gid_entry>(),
            )
        };
        let Ok(n) = usize::try_from(n) else {
            return check(c_int::try_from(-n).unwrap_or(libc::EINVAL), || {
                format!("reading the GID table of the RDMA device {}", self.name)
            })
            .map(|()| Vec::new());
        };
        entries.truncate(n);
        Ok(entries.into_iter().map(GidEntry::new).collect())
    }

    /// The descriptor that becomes readable with the next asynchronous event.
    pub(crate) fn event_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is open for as long as the context is.
        unsafe { BorrowedFd::borrow_raw((*self.raw()).async_fd) }
    }

    fn make_events_nonblocking(&self) -> Result<()> {
        let fd = self.event_fd();
        rustix::fs::fcntl_getfl(fd.as_fd())
            .and_then(|flags| rustix::fs::fcntl_setfl(fd, flags | rustix::fs::OFlags::NONBLOCK))
            .map_err(|e| Error::errno("verbs", format!("preparing the event descriptor of {}", self.name), e))
    }
}

/// On kernels before 5.12 a fork could take registered pages away from the device; this keeps them with the parent.
fn prepare_for_fork() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: called before any memory is registered by us; where the kernel needs no help the call does nothing.
        if let Err(e) = check(unsafe { ffi::ibv_fork_init() }, || "ibv_fork_init".to_owned()) {
            log::warn!("{e}; programs that this process starts may disturb its RDMA transfers");
        }
    });
}
