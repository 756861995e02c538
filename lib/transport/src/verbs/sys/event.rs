//! Asynchronous events: what a device reports by itself.

use super::{Context, ffi};
use tinynccl_plan::error::{Error, Result};

/// An event, as `ibv_event_type`. The object it belongs to is not kept: it may be gone by the time that somebody looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Event {
    pub(crate) code: u32,
    /// Number of the port; `None` for events that are not of a port.
    pub(crate) port: Option<i32>,
}

impl Event {
    /// Returns true if a port carries packets from now on, false if it does not; `None` for events that do not show it.
    pub(crate) fn port_is_up(&self) -> Option<bool> {
        match self.code {
            ffi::IBV_EVENT_PORT_ACTIVE => Some(true),
            ffi::IBV_EVENT_PORT_ERR | ffi::IBV_EVENT_DEVICE_FATAL => Some(false),
            _ => None,
        }
    }

    /// Returns true if it is about this port of its device, or about no port in particular.
    pub(crate) fn concerns(&self, port: u8) -> bool {
        self.port.is_none_or(|of| of == i32::from(port))
    }
}

impl Context {
    /// The next event, if there is one.
    pub(crate) fn next_event(&self) -> Result<Option<Event>> {
        let mut raw = ffi::ibv_async_event::default();
        // SAFETY: the context is open and the call fills `raw`.
        if unsafe { ffi::ibv_get_async_event(self.raw(), &raw mut raw) } != 0 {
            return match std::io::Error::last_os_error() {
                e if matches!(e.raw_os_error(), Some(libc::EAGAIN | libc::EINTR)) => Ok(None),
                e => Err(Error::io("verbs", format!("reading events of {}", self.name()), &e)),
            };
        }
        let port = match raw.event_type {
            ffi::IBV_EVENT_PORT_ACTIVE
            | ffi::IBV_EVENT_PORT_ERR
            | ffi::IBV_EVENT_LID_CHANGE
            | ffi::IBV_EVENT_PKEY_CHANGE
            | ffi::IBV_EVENT_SM_CHANGE
            | ffi::IBV_EVENT_CLIENT_REREGISTER
            | ffi::IBV_EVENT_GID_CHANGE => {
                // SAFETY: for these events the element is a port's number.
                Some(unsafe { raw.element.port_num })
            }
            _ => None,
        };
        // Destroying an object waits for its events to be acknowledged: at once, then.
        // SAFETY: the event was just taken.
        unsafe { ffi::ibv_ack_async_event(&raw mut raw) };
        Ok(Some(Event { code: raw.event_type, port }))
    }
}
