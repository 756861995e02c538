//! An RDMA device that a rank uses.

use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex};

use super::table::Table;
use crate::verbs::sys::{Context, Event, Pd, status};
use tinynccl_plan::error::Result;
use tinynccl_sys::threads::lock;

/// An opened device, and why it can no longer be used.
#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) pd: Arc<Pd>,
    /// Callers' memory that it may send from.
    pub(crate) registered: Table,
    failed: Mutex<Option<String>>,
}

impl Device {
    pub(crate) fn new(name: &str) -> Result<(Arc<Context>, Arc<Device>)> {
        let context = Context::open(name)?;
        let pd = Pd::new(&context)?;
        Ok((context, Arc::new(Device { pd, registered: Table::default(), failed: Mutex::new(None) })))
    }

    /// Why it is lost, if it is.
    pub(crate) fn failure(&self) -> Option<String> {
        lock(&self.failed).clone()
    }

    /// Handles the events that the device has reported, calling `heard` with each; the log names `whose` device it is.
    pub(crate) fn handle_events(&self, whose: &dyn fmt::Display, mut heard: impl FnMut(Event)) {
        let context = self.pd.context();
        loop {
            match context.next_event() {
                Ok(None) => return,
                Ok(Some(event)) => {
                    let (text, level) = status::event(event.code, event.port);
                    log::log!(level, "{whose}: RDMA device {}: {text}", context.name());
                    if level == log::Level::Error {
                        let text = format!("our RDMA device {}: {text}", context.name());
                        lock(&self.failed).get_or_insert(text);
                    }
                    heard(event);
                }
                Err(e) => {
                    log::error!("{whose}: {e}");
                    lock(&self.failed).get_or_insert(e.to_string());
                    return;
                }
            }
        }
    }

    pub(crate) fn event_fd(&self) -> BorrowedFd<'_> {
        self.pd.context().event_fd()
    }
}
