//! A rank's window: memory of its device that the other ranks' kernels write into.
//!
//! ```text
//! epochs    per channel: calls made through it            (ours alone)
//! counters  per FIFO: slots sent and received             (ours alone)
//! flags     per FIFO: tail (slots filled), head (slots freed), 32 bytes apart
//! lines     per channel, set and sender: LL lines of 16 bytes (8 of data beside their flags)
//! lines128  the same of LL128: lines of 128 bytes (120 of data), if the links keep such lines whole
//! table     per rank and registration: where this rank has that allocation      (ours alone)
//! count     calls and messages that used no slots, in a line of the cache       (ours alone)
//! slots     per kind, channel and sender: the slots of a FIFO (of messages: per two channels, twice as long)
//! scratch   of a schedule: partial sums                   (ours alone)
//! ```
//! A *channel* is a block of a kernel. `kernels/team.cuh` computes the same offsets.
//!
//! | file | idea |
//! | --- | --- |
//! | this one | the window's layout and its memory |
//! | `reach` | makes the other ranks' windows reachable |
//! | `mapping`, `mailbox` | memory mapped by descriptors, and descriptor passing |

mod mailbox;
mod mapping;
mod reach;

use std::sync::Arc;

use cudarc::driver::{CudaContext, DriverError, result, sys};

use mapping::Mapping;
use reach::PeerWindow;
pub(crate) use reach::{Import, RankGpu, Reached, enable};

use super::driver::cuda;
use crate::config::Config;
use crate::error::{Error, Result};

/// Ranks at most: the GPUs that one NVLink domain of a host joins directly.
pub(crate) const MAX_RANKS: usize = 8;
/// Kinds of FIFO between two ranks: scatter, gather, point to point.
const KINDS: usize = 3;
/// Distance of two flags: each has a sector of the L2 cache to itself.
const FLAG_BYTES: usize = 32;
/// A cache line, the unit of the link. A warp's stores that begin inside a line are sent in one packet more, which cost
/// 7 to 8 % of the rate.
pub(crate) const LINE_BYTES: usize = 128;
/// 4 for each possible channel.
const EPOCH_BYTES: usize = 512;
/// LL lines about the call itself: its description, the locations of input and output, its end. Four more align the
/// next sender's lines to a cache line.
const CALL_LINES: usize = 8;
/// LL128 lines of a channel and set: of all senders together.
const LINES_128: usize = 2048;
/// Buffers that a rank can have registered at a time.
pub(crate) const REGISTRATIONS: usize = 1024;
/// Slots of a sender that phased calls use in turn.
pub(crate) const AREAS: usize = 2;
/// Enough for a window of any schedule but the largest, which are cut smaller.
pub(crate) const SCRATCH_BYTES: usize = 16 << 20;

/// Sizes of a window's parts; the same on all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) ranks: usize,
    /// Blocks of a kernel at most.
    pub(crate) channels: usize,
    /// LL lines per channel and sender, in one of the two sets.
    pub(crate) lines: usize,
    /// The same of LL128; 0 where it is not used.
    pub(crate) lines128: usize,
    pub(crate) slots: usize,
    pub(crate) slot_bytes: usize,
}

impl Layout {
    /// `sharing`: the largest number of ranks on one GPU. All blocks of their kernels must be resident at the same
    /// time.
    pub(crate) fn new(ranks: usize, sharing: usize, config: &Config) -> Layout {
        // Each round a block sends a slot to every other rank.
        let slot_bytes = if config.cuda_slot == 0 { (256 << 10) / ranks } else { config.cuda_slot };
        Layout {
            ranks,
            channels: (config.cuda_blocks / sharing.max(1)).max(2),
            lines: 1024,
            lines128: LINES_128 / ranks / 8 * 8,
            slots: 3,
            slot_bytes: slot_bytes.next_multiple_of(LINE_BYTES),
        }
    }

    /// [`Layout::new`] for GPUs of which the smallest has so many multiprocessors: fewer blocks if they would not all
    /// be resident, each on its own multiprocessor.
    ///
    /// # Errors
    /// [`Error::Unsupported`] when that many ranks cannot share such a GPU.
    pub(crate) fn resident(ranks: usize, sharing: usize, multiprocessors: usize, config: &Config) -> Result<Layout> {
        let most = config.cuda_blocks.min(multiprocessors);
        let layout = Layout::new(ranks, sharing, &Config { cuda_blocks: most, ..config.clone() });
        if sharing > 1 && layout.channels * sharing > multiprocessors {
            return Err(Error::Unsupported {
                what: format!("a GPU of {multiprocessors} multiprocessors for {sharing} ranks of one process"),
                detail: format!(
                    "their kernels wait for each other and must run at the same time, with {} blocks each: expected at most {} \
                     ranks on it; start the others as processes",
                    layout.channels,
                    multiprocessors / layout.channels
                ),
            });
        }
        Ok(layout)
    }

    pub(crate) fn bytes(&self) -> usize {
        self.slots_begin() + self.slot_memory() + SCRATCH_BYTES
    }

    /// Place of the first slot.
    pub(crate) fn slots_begin(&self) -> usize {
        self.direct_count() + LINE_BYTES
    }

    /// Place of the table of registered allocations.
    fn table(&self) -> usize {
        let fifos = KINDS * self.channels * MAX_RANKS;
        let areas = self.channels * 2 * self.ranks;
        let lines = EPOCH_BYTES + 4 * 2 * fifos + FLAG_BYTES * 2 * fifos + 16 * areas * (self.lines + CALL_LINES);
        lines.next_multiple_of(LINE_BYTES) + LINE_BYTES * areas * self.lines128
    }

    /// Place of the count of calls without slots, 8 bytes.
    pub(crate) fn direct_count(&self) -> usize {
        self.table() + 8 * self.ranks * REGISTRATIONS
    }

    /// Place of a registration of a rank in it.
    pub(crate) fn registration(&self, rank: usize, id: u16) -> usize {
        self.table() + 8 * (rank * REGISTRATIONS + usize::from(id))
    }

    /// Bytes of all slots; phased calls cut them anew.
    pub(crate) fn slot_memory(&self) -> usize {
        KINDS * self.channels * self.ranks * self.slots * self.slot_bytes
    }

    /// Bytes of one of them.
    pub(crate) fn area_bytes(&self) -> usize {
        self.slot_memory() / (AREAS * self.ranks) / 256 * 256
    }

    /// Place of a flag of the first kind and channel: 0 for a tail, 1 for a head.
    pub(crate) fn flag(&self, which: usize, peer: usize) -> usize {
        let counters = 4 * 2 * KINDS * self.channels * MAX_RANKS;
        EPOCH_BYTES + counters + FLAG_BYTES * (which * KINDS * self.channels * MAX_RANKS + peer)
    }

    /// The same, for the compiler of the kernels.
    pub(crate) fn defines(&self) -> Vec<String> {
        [
            ("MAX_RANKS", MAX_RANKS),
            ("RANKS", self.ranks),
            ("CHANNELS", self.channels),
            ("LL_LINES", self.lines),
            ("LL128_LINES", self.lines128),
            ("CALL_LINES", CALL_LINES),
            ("REGISTRATIONS", REGISTRATIONS),
            ("SLOT_COUNT", self.slots),
            ("SLOT_BYTES", self.slot_bytes),
            ("EPOCH_BYTES", EPOCH_BYTES),
            ("FLAG_BYTES", FLAG_BYTES),
            ("LINE_BYTES", LINE_BYTES),
            ("AREAS", AREAS),
            ("AREA_BYTES", self.area_bytes()),
            ("KINDS", KINDS),
            ("SCATTER", 0),
            ("GATHER", 1),
            ("PAIR", 2),
        ]
        .iter()
        .map(|(name, value)| format!("-D{name}={value}"))
        .collect()
    }
}

/// The windows of all ranks, as one rank's kernels reach them.
#[derive(Debug)]
pub(crate) struct Windows {
    pub(crate) rank: usize,
    pub(crate) layout: Layout,
    pub(crate) addresses: [u64; MAX_RANKS],
    // Unmapped before ours is freed.
    peers: Vec<PeerWindow>,
    /// Ours, or those of all ranks of this process.
    pub(crate) memory: Arc<Vec<Window>>,
}

impl Windows {
    /// Those of the ranks of one process, seen by one of them.
    pub(crate) fn within_process(rank: usize, layout: Layout, memory: &Arc<Vec<Window>>) -> Windows {
        let mut addresses = [0; MAX_RANKS];
        for (address, window) in addresses.iter_mut().zip(memory.iter()) {
            *address = window.address;
        }
        Windows { rank, layout, addresses, peers: Vec::new(), memory: memory.clone() }
    }

    /// Address of ours.
    pub(crate) fn own(&self) -> u64 {
        self.addresses[self.rank]
    }

    /// Unmaps the other ranks'.
    pub(crate) fn unmap(&mut self) {
        self.peers.clear();
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

    /// The same for `what`.
    pub(crate) fn sized(context: &Arc<CudaContext>, bytes: usize, what: &str) -> Result<Window> {
        // SAFETY: allocates; the address is freed once, by `drop`.
        let allocate = || unsafe { result::malloc_sync(bytes) };
        let failed = |e| not_allocated(context, bytes, what, e);
        context.bind_to_thread().map_err(failed)?;
        let window = Window { context: context.clone(), address: allocate().map_err(failed)?, bytes, mapping: None };
        window.clear().map_err(failed)?;
        Ok(window)
    }

    /// A window for mapping by descriptors.
    fn with_descriptor(context: &Arc<CudaContext>, bytes: usize) -> Result<Window> {
        let failed = |e| not_allocated(context, bytes, WINDOW, e);
        let mapping = Mapping::create(context, bytes).map_err(failed)?;
        let window = Window { context: context.clone(), address: mapping.address, bytes, mapping: Some(mapping) };
        window.clear().map_err(failed)?;
        Ok(window)
    }

    /// Its shareable handle, if it is made for descriptors.
    fn mapping(&self) -> Option<&Mapping> {
        self.mapping.as_ref()
    }

    fn clear(&self) -> Result<(), DriverError> {
        // SAFETY: the memory is ours and that long.
        unsafe { result::memset_d8_sync(self.address, 0, self.bytes) }?;
        self.context.synchronize()
    }
}

const WINDOW: &str = "a window (fewer TINYNCCL_CUDA_BLOCKS or a smaller TINYNCCL_CUDA_SLOT take less)";

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_ranks_that_share_a_gpu_are_all_resident() {
        let config = Config::default();
        for multiprocessors in [16, 46, 80, 132] {
            for (ranks, sharing) in [(2, 1), (2, 2), (8, 4), (8, 8)] {
                let layout = Layout::resident(ranks, sharing, multiprocessors, &config).unwrap();
                assert!(layout.channels * sharing <= multiprocessors, "{layout:?} on {multiprocessors}");
            }
        }
        assert_eq!(Layout::resident(4, 2, 132, &config).unwrap(), Layout::new(4, 2, &config));
        let error = Layout::resident(8, 8, 14, &config).unwrap_err().to_string();
        assert!(error.contains("14 multiprocessors for 8 ranks") && error.contains("at most 7 ranks"), "{error}");
    }

    #[test]
    fn lines_and_slots_are_aligned() {
        for ranks in 2..=MAX_RANKS {
            let layout = Layout::new(ranks, 1, &Config::default());
            let fifos = KINDS * layout.channels * MAX_RANKS;
            let flags = EPOCH_BYTES + 8 * fifos;
            assert!(4 * layout.channels <= EPOCH_BYTES);
            assert_eq!(flags % FLAG_BYTES, 0);
            let lines = flags + FLAG_BYTES * 2 * fifos;
            assert_eq!(lines % LINE_BYTES, 0);
            assert_eq!(16 * (layout.lines + CALL_LINES) % LINE_BYTES, 0, "of each sender");
            assert_eq!(layout.slots_begin() % LINE_BYTES, 0);
            assert_eq!(layout.slot_bytes % LINE_BYTES, 0);
            assert_eq!(layout.slot_memory() % LINE_BYTES, 0, "scratch memory lies behind the slots");
            assert_eq!(layout.lines % 2, 0);
            assert_eq!(layout.lines128 % 8, 0, "halves of it hold whole warps' lines");
            assert!(layout.bytes() > lines);
            assert_eq!(layout.table() % 16, 0);
            assert_eq!((layout.bytes() - layout.slot_memory()) % 16, 0);
        }
    }
}
