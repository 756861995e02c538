//! A completion queue: where the device reports what became of the work.

use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::{Channel, Context, Handle, check, ffi};
use tinynccl_plan::error::{Error, Result};

/// Outcome of posted work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Work of ours, with all that was posted before it.
    Sent,
    /// A write of the peer's, of `len` bytes, with its immediate word.
    Written { len: usize, word: u32 },
    /// Something that we never ask for.
    Other(u32),
    /// A failure: `ibv_wc_status` and the vendor's own code.
    Failed { status: u32, vendor: u32 },
}

/// One completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Completion {
    /// The number that the work was posted with.
    pub(crate) id: u64,
    pub(crate) outcome: Outcome,
}

#[derive(Debug)]
pub(crate) struct Cq {
    raw: Handle<ffi::ibv_cq>,
    /// Events taken and not acknowledged.
    unacknowledged: AtomicU32,
    channel: Channel,
    _context: Arc<Context>,
}

/// Acknowledging takes a lock: many at once.
const ACKNOWLEDGE: u32 = 256;

impl Cq {
    /// Completions taken at once.
    pub(crate) const BATCH: usize = BATCH;

    /// A queue for `entries` completions, which rings `channel` when asked to.
    pub(crate) fn new(context: &Arc<Context>, channel: Channel, entries: usize) -> Result<Arc<Cq>> {
        let wanted = c_int::try_from(entries).unwrap_or(c_int::MAX);
        // SAFETY: context and channel are valid; vector 0 always exists.
        let raw = unsafe { ffi::ibv_create_cq(context.raw(), wanted, std::ptr::null_mut(), channel.raw(), 0) };
        let what = || format!("creating a completion queue of {entries} entries on {}", context.name());
        let raw = Handle::new(raw, what)?;
        Ok(Arc::new(Cq { raw, unacknowledged: AtomicU32::new(0), channel, _context: context.clone() }))
    }

    pub(super) fn raw(&self) -> *mut ffi::ibv_cq {
        self.raw.get()
    }

    /// Takes out what has come, at most [`BATCH`] completions.
    #[inline]
    pub(crate) fn poll(&self) -> Result<Batch> {
        let mut batch = Batch { raw: [const { MaybeUninit::uninit() }; BATCH], n: 0 };
        // SAFETY: the queue is valid; its context's table of operations was filled when the device was opened, and the
        // call writes at most `BATCH` entries.
        let n = unsafe {
            let ops = &(*(*self.raw()).context).ops;
            match ops.poll_cq {
                Some(poll) => poll(self.raw(), BATCH as c_int, batch.raw.as_mut_ptr().cast()),
                None => -libc::ENOSYS,
            }
        };
        match usize::try_from(n) {
            Ok(n) => batch.n = n,
            Err(_) => {
                let detail = "polling a completion queue".to_owned();
                return Err(Error::Os { op: "verbs".to_owned(), detail, errno: -n });
            }
        }
        Ok(batch)
    }

    /// Asks for one event with the next completion. Earlier completions do not count: poll again after this.
    pub(crate) fn request_event(&self) -> Result<()> {
        // SAFETY: as in `poll`.
        let result = unsafe {
            let ops = &(*(*self.raw()).context).ops;
            ops.req_notify_cq.map_or(libc::ENOSYS, |request| request(self.raw(), 0))
        };
        check(result, || "asking for a completion event".to_owned())
    }

    /// Takes the events out of the channel; true when there were any.
    pub(crate) fn drain_events(&self) -> Result<bool> {
        let mut any = false;
        while self.channel.take_event()? {
            any = true;
            if self.unacknowledged.fetch_add(1, Ordering::Relaxed) + 1 >= ACKNOWLEDGE {
                self.acknowledge();
            }
        }
        Ok(any)
    }

    fn acknowledge(&self) {
        let n = self.unacknowledged.swap(0, Ordering::Relaxed);
        if n > 0 {
            // SAFETY: so many events of this queue, the only one of its channel, were taken and not acknowledged.
            unsafe { ffi::ibv_ack_cq_events(self.raw(), n) };
        }
    }
}

/// Completions taken at once.
const BATCH: usize = 16;

/// The completions of one look at the queue.
pub(crate) struct Batch {
    raw: [MaybeUninit<ffi::ibv_wc>; BATCH],
    n: usize,
}

impl Batch {
    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.n
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = Completion> {
        self.raw.iter().take(self.n).map(|raw| {
            // SAFETY: `poll` has written the first `n` entries.
            let wc = unsafe { raw.assume_init_ref() };
            let outcome = match wc.error() {
                Some((status, vendor)) => Outcome::Failed { status, vendor },
                None => match wc.opcode() {
                    ffi::ibv_wc_opcode::IBV_WC_RDMA_WRITE => Outcome::Sent,
                    ffi::ibv_wc_opcode::IBV_WC_RECV_RDMA_WITH_IMM => {
                        Outcome::Written { len: wc.len(), word: u32::from_be(wc.imm_data) }
                    }
                    other => Outcome::Other(other),
                },
            };
            Completion { id: wc.wr_id(), outcome }
        })
    }
}

impl AsFd for Cq {
    /// The channel's descriptor.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.channel.as_fd()
    }
}

impl Drop for Cq {
    fn drop(&mut self) {
        // Destroying, which comes next, waits until all events are acknowledged.
        self.acknowledge();
    }
}
