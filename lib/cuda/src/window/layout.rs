//! Places and sizes in a window and in its extension.

use std::ops::Range;

use super::MAX_RANKS;
use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::config::{Config, Sums};

/// Kinds of FIFO between two ranks: scatter, gather, point to point.
const KINDS: usize = 3;
/// Distance of two flags: each has a sector of the L2 cache to itself.
const FLAG_BYTES: usize = 32;
/// A cache line, the unit of the link. A warp's stores that begin inside a line are sent in one packet more, which cost
/// 7 to 8 % of the rate.
const LINE_BYTES: usize = 128;
/// 4 for each possible channel.
const EPOCH_BYTES: usize = 512;
/// LL lines about the call itself: its description, the locations of input and output, its end. Four more align the
/// next sender's lines to a cache line.
const CALL_LINES: usize = 8;
/// Sets of the lines about calls, and of those of calls of one block, of which a launch of several calls runs half as
/// many at the same time (`kernels/ll.cuh`).
const LINE_SETS: usize = 8;
/// LL lines per channel and sender at most.
const MOST_LINES: usize = 1024;
/// One for each thread of a block: with LL128, calls that are better in LL have no more words per block.
const LEAST_LINES: usize = 512;
/// With LL128: LL lines of a set, of all channels and senders together. One sender has lines in 128 channels, seven
/// have them in 18, and the calls that are better in LL then take 2 (`peer/select.rs`).
const SET_LINES: usize = 1 << 16;
/// LL128 lines of a channel and set, of all senders together, at most.
const LINES_128: usize = 2048;
/// Words of a message that travels in LL lines, at most: one for each thread of eight blocks.
const MESSAGE_WORDS: usize = 8 * 512;
/// LL lines of such a message: its words, then its length for each channel that a message may have: half of all.
const MESSAGE_LINES: usize = MESSAGE_WORDS + EPOCH_BYTES / 4 / 2;
/// Channels for which the figures in [`lines128`] are.
const CHANNELS_128: usize = 128;
/// Buffers that a rank can have registered at a time.
pub(crate) const REGISTRATIONS: usize = 1024;
/// Slots of a sender that phased calls use one after the other.
pub(crate) const AREAS: usize = 2;
/// Enough for a window of any schedule but the largest, which are cut smaller.
pub(crate) const SCRATCH_BYTES: usize = 16 << 20;
/// Slots are not made shorter for `TINYNCCL_CUDA_MEMORY`; fewer channels are.
const LEAST_SLOT: usize = 8 << 10;

/// Sizes of the parts of a window and of its extension; the same on all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) ranks: usize,
    /// Blocks of a kernel at most.
    pub(crate) channels: usize,
    /// Channels that have LL lines: blocks of a kernel in LL at most.
    pub(crate) line_channels: usize,
    /// LL lines per channel and sender, in one set.
    pub(crate) lines: usize,
    /// LL128 lines per channel and sender, in one set; 0 where LL128 is not used.
    pub(crate) lines128: usize,
    pub(crate) slots: usize,
    pub(crate) slot_bytes: usize,
    /// Kernels round sums of floats once.
    pub(crate) exact_sums: bool,
}

/// Bytes of a slot, unless `TINYNCCL_CUDA_SLOT` says otherwise: each round a block sends one to every other rank.
/// Longer ones are hardly faster between two GPUs, and with these a window and its extension fit in 64 MiB.
fn default_slot(ranks: usize) -> usize {
    (112 << 10) / ranks
}

/// LL128 lines per channel and sender: enough for the longest calls that are best in LL128 (`peer/select.rs`).
fn lines128(ranks: usize, channels: usize) -> usize {
    let wanted = match ranks {
        0..=2 => 552,
        3 => 680,
        more => 1104 / (more - 1),
    };
    (wanted * CHANNELS_128 / channels).min(LINES_128 / ranks) / 8 * 8
}

/// Returns true if a message goes through slots, which are in the extension, and not in lines. The length alone
/// decides, so that both ends know.
pub(crate) fn needs_slots(bytes: usize) -> bool {
    bytes > 8 * MESSAGE_WORDS
}

impl Layout {
    /// `sharing`: the largest number of ranks on one GPU. All blocks of their kernels must be resident at the same
    /// time. The links keep lines of 128 bytes whole.
    pub(crate) fn new(ranks: usize, sharing: usize, config: &Config) -> Layout {
        let channels = (config.cuda_blocks / sharing.max(1)).max(2);
        let slot_bytes = if config.cuda_slot == 0 { default_slot(ranks) } else { config.cuda_slot };
        let lines128 = lines128(ranks, channels);
        let slot_bytes = slot_bytes.next_multiple_of(LINE_BYTES);
        let exact_sums = config.sum == Sums::Exact;
        let layout = Layout { ranks, channels, line_channels: 0, lines: 0, lines128, slots: 3, slot_bytes, exact_sums };
        layout.with_lines()
    }

    /// [`Layout::new`] for GPUs of which the smallest has `multiprocessors` multiprocessors: fewer blocks if they would
    /// not all be resident, each on its own multiprocessor.
    ///
    /// # Errors
    /// [`Error::Unsupported`] when that many ranks cannot share such a GPU.
    pub(crate) fn resident(ranks: usize, sharing: usize, multiprocessors: usize, config: &Config) -> Result<Layout> {
        let most = config.cuda_blocks.min(multiprocessors);
        let layout = Layout::new(ranks, sharing, &config.clone().with(|c| c.cuda_blocks = most));
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

    /// For links that may tear lines of 128 bytes.
    pub(crate) fn without_ll128(self) -> Layout {
        Layout { lines128: 0, ..self }.with_lines()
    }

    /// With the LL lines that its other fields ask for.
    fn with_lines(self) -> Layout {
        if self.lines128 == 0 {
            return Layout { lines: MOST_LINES, line_channels: self.channels, ..self };
        }
        let of_sender = SET_LINES / self.senders();
        let lines = (of_sender / self.channels / 8 * 8).clamp(LEAST_LINES, MOST_LINES);
        Layout { lines, line_channels: (of_sender / lines).min(self.channels), ..self }
    }

    /// In `most` bytes, if that is possible (0: without a limit): with shorter slots first, then with fewer channels.
    pub(crate) fn within(mut self, most: usize) -> Layout {
        while most > 0 && self.bytes() > most {
            if self.slot_bytes > LEAST_SLOT {
                self.slot_bytes = (self.slot_bytes / 2).max(LEAST_SLOT).next_multiple_of(LINE_BYTES);
            } else if self.channels > 2 {
                self.channels = (self.channels / 2).max(2);
                self.line_channels = self.line_channels.min(self.channels);
            } else {
                break;
            }
        }
        self
    }

    /// Other ranks: one at least, so that a layout of one rank has no parts of 0 bytes.
    pub(crate) fn senders(&self) -> usize {
        (self.ranks - 1).max(1)
    }

    /// Kinds of collectives that have slots: between two ranks nothing is gathered in a second step.
    fn slot_kinds(&self) -> usize {
        if self.ranks > 2 { 2 } else { 1 }
    }

    /// Bytes of a slot in calls of collectives in which a rank receives from one other only, in each channel: it has
    /// the slots of all senders and kinds.
    pub(crate) fn long_slot_bytes(&self) -> usize {
        self.slot_kinds() * self.senders() * self.slot_bytes
    }

    /// Bytes of a window and its extension.
    pub(crate) fn bytes(&self) -> usize {
        self.window_bytes() + self.extension_bytes()
    }

    /// Bytes of a window.
    pub(crate) fn window_bytes(&self) -> usize {
        self.direct_count() + LINE_BYTES
    }

    /// Bytes of its extension.
    pub(crate) fn extension_bytes(&self) -> usize {
        self.slots_begin() + self.slot_memory()
    }

    /// Place of the first line about calls.
    fn calls(&self) -> usize {
        let fifos = KINDS * self.channels * MAX_RANKS;
        (EPOCH_BYTES + 4 * 2 * fifos + FLAG_BYTES * 2 * fifos).next_multiple_of(LINE_BYTES)
    }

    /// The LL lines of all channels, sets and senders: those about calls first, those of messages last.
    pub(crate) fn lines_of_all(&self) -> Range<usize> {
        self.calls()..self.table()
    }

    /// Place of the first line of messages: a set for each slot of a FIFO.
    fn messages(&self) -> usize {
        let lines = LINE_SETS * self.channels * CALL_LINES + (LINE_SETS + 2 * self.line_channels) * self.lines;
        self.calls() + 16 * self.senders() * lines
    }

    /// Place of the table of registered allocations.
    fn table(&self) -> usize {
        self.messages() + 16 * self.senders() * self.slots * MESSAGE_LINES
    }

    /// Place of the count of calls without slots, 8 bytes.
    pub(crate) fn direct_count(&self) -> usize {
        self.table() + 8 * self.ranks * REGISTRATIONS
    }

    /// Place of the numbers of the last calls that have begun and that are over, 4 bytes each.
    pub(crate) fn progress(&self) -> usize {
        self.direct_count() + 8
    }

    /// Place of the word that keeps calls behind a failed one from beginning.
    pub(crate) fn guard(&self) -> usize {
        self.progress() + 8
    }

    /// Place of a registration of a rank in it.
    pub(crate) fn registration(&self, rank: usize, id: u16) -> usize {
        self.table() + 8 * (rank * REGISTRATIONS + usize::from(id))
    }

    /// Place of the first slot in the extension, behind the LL128 lines.
    pub(crate) fn slots_begin(&self) -> usize {
        LINE_BYTES * self.channels * 2 * self.senders() * self.lines128
    }

    /// Bytes of all slots; phased calls cut them anew.
    pub(crate) fn slot_memory(&self) -> usize {
        (self.slot_kinds() + 1) * self.channels * self.senders() * self.slots * self.slot_bytes
    }

    /// Bytes of one of them.
    pub(crate) fn area_bytes(&self) -> usize {
        self.slot_memory() / (AREAS * self.senders()) / 256 * 256
    }

    /// Place of a flag of the first kind and channel: 0 for a tail, 1 for a head.
    pub(crate) fn flag(&self, which: usize, peer: usize) -> usize {
        let counters = 4 * 2 * KINDS * self.channels * MAX_RANKS;
        EPOCH_BYTES + counters + FLAG_BYTES * (which * KINDS * self.channels * MAX_RANKS + peer)
    }

    /// Definitions of the layout for the compiler of the kernels.
    pub(crate) fn defines(&self) -> Vec<String> {
        [
            ("MAX_RANKS", MAX_RANKS),
            ("RANKS", self.ranks),
            ("SENDERS", self.senders()),
            ("CHANNELS", self.channels),
            ("LINE_CHANNELS", self.line_channels),
            ("LL_LINES", self.lines),
            ("LL128_LINES", self.lines128),
            ("CALL_LINES", CALL_LINES),
            ("LINE_SETS", LINE_SETS),
            ("MESSAGE_WORDS", MESSAGE_WORDS),
            ("MESSAGE_LINES", MESSAGE_LINES),
            ("REGISTRATIONS", REGISTRATIONS),
            ("SLOT_COUNT", self.slots),
            ("SLOT_BYTES", self.slot_bytes),
            ("SLOT_KINDS", self.slot_kinds()),
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
        .chain(self.exact_sums.then(|| "-DEXACT_SUMS".to_owned()))
        .collect()
    }
}

/// Places that the kernels compute, each as `team.cuh` names it and as the host has it.
#[cfg(test)]
pub(crate) fn places(layout: &Layout) -> Vec<(String, usize)> {
    let lines = layout.lines_of_all();
    [
        ("CALLS", lines.start),
        ("MESSAGES", layout.messages()),
        ("TABLE", lines.end),
        ("DIRECT_COUNT", layout.direct_count()),
        ("PROGRESS", layout.progress()),
        ("GUARD", layout.guard()),
        ("SLOTS", layout.slots_begin()),
        ("FLAGS", layout.flag(0, 0)),
    ]
    .map(|(name, place)| (name.to_owned(), place))
    .to_vec()
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

    /// Layouts of every number of ranks, with many and few channels, with and without LL128 and limits.
    fn layouts() -> Vec<Layout> {
        let mut all = Vec::new();
        for ranks in 1..=MAX_RANKS {
            for (cuda_blocks, cuda_slot, most) in
                [(128, 0, 0), (2, 4 << 10, 0), (3, 5000, 0), (46, 0, 0), (128, 0, 32 << 20), (128, 1 << 20, 1)]
            {
                let layout = Layout::new(
                    ranks,
                    1,
                    &Config::default().with(|c| {
                        c.cuda_blocks = cuda_blocks;
                        c.cuda_slot = cuda_slot;
                    }),
                );
                all.extend([layout, layout.without_ll128()].map(|layout| layout.within(most)));
            }
        }
        all
    }

    #[test]
    fn parts_are_aligned_and_do_not_overlap() {
        for layout in layouts() {
            let fifos = KINDS * layout.channels * MAX_RANKS;
            let (senders, sets) = (layout.senders(), 2 * layout.channels);
            assert!(4 * layout.channels <= EPOCH_BYTES);
            // In their order: each part begins behind the end of the one before.
            assert_eq!(layout.flag(0, 0), EPOCH_BYTES + 8 * fifos, "behind the counters");
            assert_eq!(layout.flag(0, 0) % FLAG_BYTES, 0);
            assert_eq!(layout.flag(1, 0), layout.flag(0, 0) + FLAG_BYTES * fifos, "heads behind tails");
            let calls = layout.lines_of_all().start;
            assert!(calls >= layout.flag(1, 0) + FLAG_BYTES * fifos && calls.is_multiple_of(LINE_BYTES), "{layout:?}");
            let lines = calls + 16 * LINE_SETS * layout.channels * senders * CALL_LINES;
            assert_eq!(lines % LINE_BYTES, 0);
            let rows = LINE_SETS + 2 * layout.line_channels;
            assert_eq!(layout.messages(), lines + 16 * rows * senders * layout.lines);
            assert_eq!(layout.messages() % LINE_BYTES, 0);
            assert_eq!(layout.table(), layout.messages() + 16 * senders * layout.slots * MESSAGE_LINES);
            assert_eq!(layout.table() % LINE_BYTES, 0);
            assert_eq!(layout.registration(layout.ranks - 1, REGISTRATIONS as u16 - 1) + 8, layout.direct_count());
            assert_eq!(layout.window_bytes(), layout.direct_count() + LINE_BYTES);
            assert_eq!(layout.slots_begin(), LINE_BYTES * sets * senders * layout.lines128);
            assert_eq!(layout.bytes() - layout.window_bytes() - layout.slots_begin(), layout.slot_memory());
            assert_eq!(layout.slot_bytes % LINE_BYTES, 0);
            // Of each sender.
            assert_eq!(16 * layout.lines % LINE_BYTES, 0);
            assert_eq!(16 * MESSAGE_LINES % LINE_BYTES, 0);
            assert_eq!(layout.lines % 2, 0);
            assert_eq!(layout.lines128 % 8, 0, "halves of it hold whole warps' lines");
            assert!((1..=layout.channels).contains(&layout.line_channels), "{layout:?}");
            assert!(AREAS * senders * layout.area_bytes() <= layout.slot_memory());
        }
    }

    #[test]
    fn a_window_is_small_until_it_is_extended() {
        let of = |ranks| Layout::new(ranks, 1, &Config::default());
        for ranks in 1..=MAX_RANKS {
            assert!(of(ranks).window_bytes() <= 5 << 20, "{ranks} ranks: {}", of(ranks).window_bytes());
        }
        // As the module's documentation says, in tenths of MiB.
        let tenths = |bytes: usize| (bytes * 10 + (1 << 19)) >> 20;
        let parts = |ranks| {
            let layout = of(ranks);
            [layout.window_bytes(), layout.slots_begin(), layout.slot_memory()].map(tenths)
        };
        assert_eq!([2, 4, 8].map(parts), [[26, 173, 420], [33, 345, 945], [49, 333, 1103]]);
        // Where LL has to carry longer calls too.
        assert!(of(2).without_ll128().window_bytes() < 6 << 20);
    }

    #[test]
    fn a_limit_is_kept_down_to_the_smallest_window() {
        for ranks in 2..=MAX_RANKS {
            let whole = Layout::new(ranks, 1, &Config::default());
            for layout in [whole, whole.without_ll128()] {
                let mut least = usize::MAX;
                for most in [256 << 20, 128 << 20, 64 << 20, 32 << 20, 16 << 20, 8 << 20, 4 << 20] {
                    let less = layout.within(most);
                    assert!(less.bytes() <= most, "{ranks} ranks, {most}: {} bytes, {less:?}", less.bytes());
                    assert!(less.bytes() <= least);
                    least = less.bytes();
                }
                assert_eq!(layout.within(1).channels, 2, "the smallest there is");
                assert_eq!([layout.within(0), layout.within(usize::MAX)], [layout; 2]);
            }
        }
    }
}
