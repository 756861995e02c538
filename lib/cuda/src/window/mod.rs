//! A rank's window: memory of its device that the other ranks' kernels write into.
//!
//! ```text
//! epochs    per channel: calls made through it            (ours alone)
//! counters  per FIFO: slots sent and received             (ours alone)
//! flags     per FIFO: tail (slots filled), head (slots freed), 32 bytes apart
//! calls     per channel, set and sender: LL lines about the call itself
//! lines     per channel, set and sender: LL lines of 16 bytes (8 of data beside their flags)
//! messages  per sender: LL lines of short messages, a set for each slot of a FIFO
//! table     per rank and registration: where this rank has that allocation      (ours alone)
//! count     calls and messages that used no slots, in a line of the cache       (ours alone)
//! progress  the last calls that have begun and that are over, behind the count   (ours alone)
//! guard     whether calls must not begin, behind the progress                    (ours alone)
//! ```
//! It is there from the start and takes 2 to 5 MiB (more without LL128: LL lines then carry longer calls). The
//! *extension* of the window is allocated when a call first needs it ([`Extension`]):
//!
//! ```text
//! lines128  per channel, set and sender: lines of 128 bytes (120 of data), if the links keep such lines whole
//! slots     per kind, channel and sender: the slots of a FIFO (of messages: per two channels, twice as long)
//! ```
//! A *channel* is a block of a kernel. A rank sends nothing to itself, so senders are numbered without the window's
//! owner. `kernels/team.cuh` computes the same offsets.
//!
//! | With 128 channels, NVLink | 2 ranks | 4 ranks | 8 ranks |
//! | --- | --- | --- | --- |
//! | window | 2.6 MiB | 3.3 MiB | 4.9 MiB |
//! | lines128 | 17.3 MiB | 34.5 MiB | 33.3 MiB |
//! | slots | 42 MiB | 94.5 MiB | 110.3 MiB |
//!
//! | file | idea |
//! | --- | --- |
//! | this one | the windows of all ranks, and their memory |
//! | `layout` | places and sizes |
//! | `extension` | the memory that comes when a call first needs it |
//! | `reach` | makes the other ranks' windows reachable |
//! | `mapping`, `mailbox` | memory mapped by descriptors, and descriptor passing |

mod extension;
mod layout;
mod mailbox;
mod mapping;
mod reach;

use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::{CudaContext, DriverError, result, sys};

pub(crate) use extension::Extension;
#[cfg(test)]
pub(crate) use layout::places;
pub(crate) use layout::{AREAS, Layout, REGISTRATIONS, SCRATCH_BYTES, needs_slots};
use mapping::Mapping;
use reach::PeerWindow;
pub(crate) use reach::{Import, RankGpu, Reached, enable};

use super::driver::cuda;
use tinynccl_plan::error::{Error, Result};

/// Ranks at most: the GPUs that one NVLink domain of a host joins directly.
pub(crate) const MAX_RANKS: usize = 8;

/// The windows of all ranks, as one rank's kernels reach them.
#[derive(Debug)]
pub(crate) struct Windows {
    pub(crate) rank: usize,
    pub(crate) layout: Layout,
    pub(crate) addresses: [u64; MAX_RANKS],
    pub(crate) extension: Arc<Extension>,
    // Unmapped before ours is freed.
    peers: Vec<PeerWindow>,
    /// Ours, or those of all ranks of this process.
    pub(crate) memory: Arc<Vec<Window>>,
}

impl Windows {
    /// Windows of the ranks of one process, as rank `rank` sees them.
    pub(crate) fn within_process(rank: usize, layout: Layout, memory: &Arc<Vec<Window>>) -> Windows {
        let mut addresses = [0; MAX_RANKS];
        for (address, window) in addresses.iter_mut().zip(memory.iter()) {
            *address = window.address;
        }
        let extension = Arc::new(Extension::behind(&addresses, &layout));
        Windows { rank, layout, addresses, extension, peers: Vec::new(), memory: memory.clone() }
    }

    /// Address of ours.
    pub(crate) fn own(&self) -> u64 {
        self.addresses[self.rank]
    }

    /// Bytes of ours, without an extension that came later.
    pub(crate) fn own_bytes(&self) -> usize {
        self.memory.first().map_or(0, |window| window.bytes)
    }

    /// Makes the lines as they were at first. No kernel of any rank uses them meanwhile.
    pub(crate) fn clear_lines(&self) -> Result<()> {
        let places = self.layout.lines_of_all();
        // Ours, also where `memory` has those of all ranks.
        let Some(window) = self.memory.iter().find(|window| window.address == self.own()) else { return Ok(()) };
        window.clear(places).map_err(|e| cuda("DeviceComm", "clearing the lines of a window", e))
    }

    /// Unmaps the other ranks'.
    pub(crate) fn unmap(&mut self) {
        self.peers.clear();
        self.extension.unmap();
    }

    /// Leaves ours mapped until the process ends: another rank may still use it.
    pub(crate) fn keep(&self) {
        std::mem::forget(self.memory.clone());
        self.extension.keep();
    }
}

/// Device memory that other processes may map, a window or a registered buffer.
#[derive(Debug)]
pub(crate) struct Window {
    context: Arc<CudaContext>,
    pub(crate) address: sys::CUdeviceptr,
    pub(crate) bytes: usize,
    /// Otherwise from `cuMemAlloc`, because CUDA IPC cannot export memory of a stream-ordered pool.
    mapping: Option<Mapping>,
}

impl Window {
    /// Allocates and clears, for mapping by CUDA IPC or by address.
    pub(crate) fn new(context: &Arc<CudaContext>, bytes: usize) -> Result<Window> {
        Self::sized(context, bytes, WINDOW)
    }

    /// Allocates and clears `bytes` bytes for `what`, which names the memory in errors; for mapping by CUDA IPC or by
    /// address.
    pub(crate) fn sized(context: &Arc<CudaContext>, bytes: usize, what: &str) -> Result<Window> {
        // SAFETY: allocates; the address is freed once, by `drop`.
        let allocate = || unsafe { result::malloc_sync(bytes) };
        let failed = |e| not_allocated(context, bytes, what, e);
        context.bind_to_thread().map_err(failed)?;
        let window = Window { context: context.clone(), address: allocate().map_err(failed)?, bytes, mapping: None };
        window.clear(0..bytes).map_err(failed)?;
        Ok(window)
    }

    /// Allocates while calls are enqueued or under way; the caller holds [`Uncaptured`](super::driver::Uncaptured) if
    /// they may be captured: no kernel is waited for but by the allocation itself, and only the first `cleared` bytes
    /// are cleared.
    pub(crate) fn amid_calls(context: &Arc<CudaContext>, bytes: usize, cleared: usize, what: &str) -> Result<Window> {
        let failed = |e| not_allocated(context, bytes, what, e);
        context.bind_to_thread().map_err(failed)?;
        // SAFETY: allocates; the address is freed once, by `drop`.
        let address = unsafe { result::malloc_sync(bytes) }.map_err(failed)?;
        let window = Window { context: context.clone(), address, bytes, mapping: None };
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking).map_err(failed)?;
        // SAFETY: the memory is ours and that long; the stream is ours.
        let done = unsafe {
            result::memset_d8_async(address, 0, cleared, stream).and_then(|()| result::stream::synchronize(stream))
        };
        // SAFETY: made above, and not used any more.
        let ended = unsafe { result::stream::destroy(stream) };
        done.and(ended).map_err(failed)?;
        Ok(window)
    }

    /// A window for mapping by descriptors.
    fn with_descriptor(context: &Arc<CudaContext>, bytes: usize) -> Result<Window> {
        let failed = |e| not_allocated(context, bytes, WINDOW, e);
        let mapping = Mapping::create(context, bytes).map_err(failed)?;
        let window = Window { context: context.clone(), address: mapping.address, bytes, mapping: Some(mapping) };
        window.clear(0..bytes).map_err(failed)?;
        Ok(window)
    }

    /// Its shareable handle, if it is made for descriptors.
    fn mapping(&self) -> Option<&Mapping> {
        self.mapping.as_ref()
    }

    /// Zeroes these of its bytes.
    fn clear(&self, places: Range<usize>) -> Result<(), DriverError> {
        let places = places.start..places.end.min(self.bytes);
        self.context.bind_to_thread()?;
        // SAFETY: the memory is ours and that long.
        unsafe { result::memset_d8_sync(self.address + places.start as u64, 0, places.len()) }?;
        self.context.synchronize()
    }
}

const WINDOW: &str =
    "a window (TINYNCCL_CUDA_MEMORY, fewer TINYNCCL_CUDA_BLOCKS or a smaller TINYNCCL_CUDA_SLOT make it smaller)";
const EXTENSION: &str = "the extension of a window (TINYNCCL_CUDA_MEMORY, fewer TINYNCCL_CUDA_BLOCKS or a smaller TINYNCCL_CUDA_SLOT make it smaller)";

fn not_allocated(context: &Arc<CudaContext>, bytes: usize, what: &str, error: DriverError) -> Error {
    let (wanted, device) = (bytes.div_ceil(1 << 20), context.ordinal());
    let room = result::mem_get_info()
        .map_or_else(|_| String::new(), |(free, all)| format!("; {} of {} MiB are free", free >> 20, all >> 20));
    cuda("DeviceComm", format!("allocating {wanted} MiB of GPU {device} for {what}{room}"), error)
}

impl Drop for Window {
    fn drop(&mut self) {
        if self.mapping.is_none() && self.context.bind_to_thread().is_ok() {
            // SAFETY: allocated by `sized`, freed once. The owner drops this only when no kernel uses it any more.
            if let Err(error) = unsafe { result::free_sync(self.address) } {
                log::debug!("freeing a window: {error:?}");
            }
        }
    }
}
