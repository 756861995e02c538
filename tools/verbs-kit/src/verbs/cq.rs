//! A completion queue: the device reports finished requests there.

use std::io;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Result, anyhow, bail, ensure};

use super::{Channel, Context, complain, ffi};
use crate::completion::Completion;

/// A completion queue (`struct ibv_cq`).
#[derive(Debug)]
pub struct Cq {
    raw: NonNull<ffi::ibv_cq>,
    channel: Option<Arc<Channel>>,
    /// Freed after `drop` has run.
    _context: Arc<Context>,
}

// SAFETY: libibverbs allows every call from every thread; the pointer is freed once, in `drop`.
unsafe impl Send for Cq {}
// SAFETY: as above.
unsafe impl Sync for Cq {}

impl Cq {
    /// A polled queue for at least `entries` completions. An overflow breaks it permanently.
    pub fn new(context: &Arc<Context>, entries: u32) -> Result<Arc<Cq>> {
        Cq::create(context, entries, None)
    }

    /// A queue for at least `entries` completions, with a channel to sleep on.
    pub fn with_channel(context: &Arc<Context>, entries: u32, channel: &Arc<Channel>) -> Result<Arc<Cq>> {
        Cq::create(context, entries, Some(Arc::clone(channel)))
    }

    fn create(context: &Arc<Context>, entries: u32, channel: Option<Arc<Channel>>) -> Result<Arc<Cq>> {
        let events = channel.as_ref().map_or(ptr::null_mut(), |c| c.raw());
        // SAFETY: context and channel are open and outlive the queue, which keeps both.
        let raw = unsafe { ffi::ibv_create_cq(context.raw(), entries as i32, ptr::null_mut(), events, 0) };
        let raw = NonNull::new(raw).ok_or_else(|| {
            anyhow!("ibv_create_cq({}, {entries} entries): {}", context.name(), io::Error::last_os_error())
        })?;
        Ok(Arc::new(Cq { raw, channel, _context: Arc::clone(context) }))
    }

    /// The pointer for calls of libibverbs; valid while `self` is.
    pub fn raw(&self) -> *mut ffi::ibv_cq {
        self.raw.as_ptr()
    }

    /// The driver's functions. `ibv_poll_cq` and similar calls are inline functions in the header that use this table.
    fn ops(&self) -> &ffi::ibv_context_ops {
        // SAFETY: the queue holds its context, which holds the table.
        unsafe { &(*self.raw.as_ref().context).ops }
    }

    /// Takes the oldest completion without waiting.
    pub fn poll(&self) -> Result<Option<Completion>> {
        let Some(poll_cq) = self.ops().poll_cq else { bail!("the driver has no poll_cq") };
        let mut wc = ffi::ibv_wc::default();
        // SAFETY: `wc` has room for the one completion that the call may store.
        let count = unsafe { poll_cq(self.raw(), 1, &mut wc) };
        ensure!(count >= 0, "ibv_poll_cq failed with {count}: the completion queue is broken (overflow?)");
        let (status, vendor_err) = wc.error().unwrap_or((0, 0));
        let completion = (count > 0).then(|| Completion {
            wr_id: wc.wr_id(),
            status,
            opcode: wc.opcode(),
            byte_len: wc.len() as u32,
            imm: wc.imm_data().map(u32::from_be),
            vendor_err,
            qp_num: wc.qp_num,
        });
        if let Some(completion) = &completion {
            log::debug!("QP {}: completion: {completion}", wc.qp_num);
        }
        Ok(completion)
    }

    /// Polls for the oldest completion until `deadline`, in a loop that keeps a core busy.
    pub fn spin(&self, deadline: Instant) -> Result<Option<Completion>> {
        loop {
            if let Some(completion) = self.poll()? {
                return Ok(Some(completion));
            }
            if Instant::now() >= deadline {
                return Ok(None);
            }
            std::thread::yield_now();
        }
    }

    /// Sleeps for the oldest completion until `deadline`: poll, arm, poll again, wait.
    ///
    /// A completion that arrives between the first poll and arming raises no event, so only the second poll finds it. A
    /// completion that arrives after arming raises an event, which ends the sleep. Without the second poll the waiter
    /// could sleep through the first kind.
    pub fn wait(&self, deadline: Instant) -> Result<Option<Completion>> {
        let Some(channel) = &self.channel else { return self.spin(deadline) };
        loop {
            if let Some(completion) = self.poll()? {
                return Ok(Some(completion));
            }
            self.arm()?;
            if let Some(completion) = self.poll()? {
                return Ok(Some(completion));
            }
            if !channel.wait(deadline)? {
                return self.poll();
            }
        }
    }

    /// Asks for one event at the next completion.
    fn arm(&self) -> Result<()> {
        let Some(req_notify_cq) = self.ops().req_notify_cq else { bail!("the driver has no req_notify_cq") };
        // SAFETY: the queue exists; 0 asks for an event on any completion, not only on solicited ones.
        let code = unsafe { req_notify_cq(self.raw(), 0) };
        ensure!(code == 0, "ibv_req_notify_cq: {}", io::Error::from_raw_os_error(code));
        Ok(())
    }
}

impl Drop for Cq {
    fn drop(&mut self) {
        // SAFETY: created by us, destroyed once; its QPs held an `Arc` and are gone, its events are acknowledged.
        complain("ibv_destroy_cq", unsafe { ffi::ibv_destroy_cq(self.raw()) });
    }
}
