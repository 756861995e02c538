//! The kernel and its number of blocks for each size. The figures are of H200s joined by NVLink; see docs/benchmarks.

use crate::kernels::{self, Family, Kernel};
use crate::window::{Layout, needs_slots};
use tinynccl_plan::device::{Choice, Framing, Protocol};
use tinynccl_plan::wire::{Algorithm, Collective};

/// Protocols of lines, and the bytes up to which each is taken if none before it was. For all_reduce of two ranks,
/// where two steps send no less than one.
const ALL_REDUCE_OF_TWO: &[(Protocol, usize)] = &[
    (Protocol::OneShot, 64 << 10),
    (Protocol::OneShot128, 2 << 20),
    (Protocol::TwoShot128, 8 << 20),
    (Protocol::OneShot, 1 << 20),
];
/// Protocols of all_reduce of more than two ranks, as [`ALL_REDUCE_OF_TWO`]; measured on four.
const ALL_REDUCE: &[(Protocol, usize)] = &[
    (Protocol::OneShot, 4 << 10),
    (Protocol::OneShot128, 256 << 10),
    (Protocol::OneShot, 128 << 10),
    (Protocol::TwoShot128, 8 << 20),
    (Protocol::TwoShot, 512 << 10),
];
/// The others, by the bytes of all messages of a rank.
const OTHERS_OF_TWO: &[(Protocol, usize)] =
    &[(Protocol::OneShot, 128 << 10), (Protocol::OneShot128, 8 << 20), (Protocol::OneShot, 1 << 20)];
const OTHERS: &[(Protocol, usize)] =
    &[(Protocol::OneShot, 32 << 10), (Protocol::OneShot128, 8 << 20), (Protocol::OneShot, 1 << 20)];
/// In lines the root sends all of it to each rank; through slots, only once.
const BROADCAST: &[(Protocol, usize)] =
    &[(Protocol::OneShot, 32 << 10), (Protocol::OneShot128, 9 << 18), (Protocol::OneShot, 1 << 20)];
/// In one step all of it crosses the root's link n-1 times.
const REDUCE: &[(Protocol, usize)] = &[
    (Protocol::OneShot, 32 << 10),
    (Protocol::OneShot128, 2 << 20),
    (Protocol::TwoShot128, 24 << 20),
    (Protocol::OneShot, 1 << 20),
];
/// Bytes for which a ring is faster than all ranks at once. Its links carry no less, and with one sender for each
/// receiver more arrives through the switch; in LL128 each line goes on as it arrives. A ring of more ranks, which has
/// more hops, is not measured.
///
/// Each with its least bytes, and its most if there are too many.
type Rings = &'static [(Collective, Framing, usize, Option<usize>)];
const RINGS_OF_THREE: Rings = &[
    (Collective::AllReduce, Framing::Ll128, 3 << 20, Some(12 << 20)),
    (Collective::AllReduce, Framing::Simple, 64 << 20, None),
    (Collective::AllGather, Framing::Ll128, 5 << 19, Some(14 << 20)),
    (Collective::AllGather, Framing::Simple, 14 << 20, None),
    (Collective::ReduceScatter, Framing::Ll128, 4 << 20, Some(32 << 20)),
    (Collective::ReduceScatter, Framing::Simple, 32 << 20, None),
    (Collective::Broadcast, Framing::Ll128, 400 << 10, Some(6 << 20)),
    (Collective::Broadcast, Framing::Simple, 48 << 20, None),
    (Collective::Reduce, Framing::Ll128, 700 << 10, Some(32 << 20)),
    (Collective::Reduce, Framing::Simple, 32 << 20, None),
];
const RINGS_OF_FOUR: Rings = &[
    (Collective::AllReduce, Framing::Ll128, 3 << 20, Some(14 << 20)),
    (Collective::AllReduce, Framing::Simple, 24 << 20, None),
    (Collective::AllGather, Framing::Ll128, 3 << 18, Some(5 << 20)),
    (Collective::AllGather, Framing::Simple, 6 << 20, None),
    (Collective::ReduceScatter, Framing::Simple, 6 << 20, None),
    (Collective::Broadcast, Framing::Ll128, 400 << 10, Some(12 << 20)),
    (Collective::Broadcast, Framing::Simple, 96 << 20, None),
    (Collective::Reduce, Framing::Ll128, 700 << 10, Some(48 << 20)),
    (Collective::Reduce, Framing::Simple, 48 << 20, None),
];
/// Bytes of a segment of registered buffers from which on a ring is faster than writing it to all ranks at once.
const RING_OR_DIRECT: usize = 16 << 20;
/// Bytes sent from which on lines are no better than registered buffers.
const LINES_OR_DIRECT: usize = 6 << 20;
/// Bytes sent up to which a rank reduces straight from its only peer's registered buffer. Above, slots are better:
/// writes use the link better than reads.
const READ_AT_MOST: usize = 64 << 20;
/// Bytes that justify another block of a Simple kernel.
const SIMPLE_PER_BLOCK: usize = 16 << 10;
/// Bytes from which on a registered buffer pays if data goes one way: the agreement takes about 3 us at the beginning
/// and 1 at the end.
const DIRECT_ONE_WAY: usize = 12 << 20;
/// Words that a block of an LL kernel handles: one per thread.
const WORDS_PER_BLOCK: usize = crate::kernels::THREADS as usize;
/// Words that a block of an LL128 kernel handles, with half of its warps busy: more blocks are worth more than full
/// ones.
const WORDS_PER_BLOCK_128: usize = WORDS_PER_BLOCK * 15 / 16;

/// `bytes` are those of the whole buffer for all_reduce, broadcast and reduce, of a segment for the others.
/// `registered`: whether the communicator has registered buffers; the same on all ranks.
pub(crate) fn choose(layout: &Layout, collective: Collective, bytes: usize, registered: bool) -> Choice {
    if collective == Collective::Scan {
        // There is no other kernel for it.
        let protocol = Protocol::Schedule(Algorithm::Direct, Framing::Simple);
        return Choice { protocol, blocks: blocks(layout, protocol, bytes) };
    }
    let preferred = match (collective, layout.ranks) {
        (Collective::AllReduce, 2) => ALL_REDUCE_OF_TWO,
        (Collective::AllReduce, _) => ALL_REDUCE,
        (_, 2) => OTHERS_OF_TWO,
        (Collective::Broadcast, _) => BROADCAST,
        (Collective::Reduce, _) => REDUCE,
        _ => OTHERS,
    };
    let sent = if collective == Collective::AllReduce { bytes } else { bytes.saturating_mul(layout.ranks - 1) };
    let with_blocks = |protocol| {
        let blocks = match is_messages(collective, protocol, layout.ranks) {
            true => pair_channels(layout, bytes as u64),
            false => blocks(layout, protocol, bytes),
        };
        Choice { protocol, blocks }
    };
    let is_direct = match collective {
        Collective::Broadcast | Collective::Reduce => bytes >= DIRECT_ONE_WAY,
        Collective::AllReduce | Collective::ReduceScatter => sent <= READ_AT_MOST,
        _ => true,
    };
    let large = match collective {
        Collective::Gather if layout.ranks > 2 => Protocol::Schedule(Algorithm::Direct, Framing::Simple),
        _ if registered && is_direct && kernel(collective, Protocol::Direct, layout.ranks).is_some() => {
            Protocol::Direct
        }
        _ => Protocol::Simple,
    };
    let rings = match layout.ranks {
        3 => RINGS_OF_THREE,
        4 => RINGS_OF_FOUR,
        _ => &[],
    };
    // Slots, and shares of the lines, suffice for any size.
    let ring = rings.iter().find(|(of, framing, least, most)| {
        *of == collective
            && bytes >= *least
            && most.is_none_or(|most| bytes <= most)
            && (*framing != Framing::Ll128 || layout.lines128 > 0)
    });
    if let Some(&(_, framing, ..)) = ring
        && (large != Protocol::Direct || bytes >= RING_OR_DIRECT)
    {
        return with_blocks(Protocol::Schedule(Algorithm::Ring, framing));
    }
    // With few blocks lines have room for less, and for LL128 there may be none.
    let direct_is_better = large == Protocol::Direct && sent >= LINES_OR_DIRECT;
    let small = preferred.iter().filter(|(_, most)| sent <= *most && !direct_is_better);
    let fitting = small.map(|&(p, _)| with_blocks(p)).find(|&choice| fits(layout, collective, choice, bytes));
    fitting.unwrap_or_else(|| with_blocks(large))
}

/// Returns true if a collective is carried as messages: between two ranks gather and scatter are one message, and a
/// copy of the root's own segment beside it. Among more ranks the root's messages would be a launch each; a kernel is
/// one.
pub(crate) fn is_messages(collective: Collective, protocol: Protocol, ranks: usize) -> bool {
    ranks == 2 && protocol == Protocol::Simple && matches!(collective, Collective::Gather | Collective::Scatter)
}

/// The kernel of a collective among `ranks` ranks; `None` if there is none.
pub(crate) fn kernel(collective: Collective, protocol: Protocol, ranks: usize) -> Option<Kernel> {
    let framing = match protocol {
        Protocol::OneShot | Protocol::TwoShot | Protocol::Schedule(_, Framing::Ll) => kernels::Framing::Ll,
        Protocol::OneShot128 | Protocol::TwoShot128 | Protocol::Schedule(_, Framing::Ll128) => kernels::Framing::Ll128,
        Protocol::Simple | Protocol::Schedule(_, Framing::Simple) => kernels::Framing::Simple,
        Protocol::Direct => kernels::Framing::Direct,
    };
    if let Protocol::Schedule(..) = protocol {
        return Some(Kernel::new(Family::Schedule, framing));
    }
    // Of gather and scatter there is none. Among more than two ranks it would be slower than slots, unless each rank
    // writes its own data to all others.
    let exchanges = matches!(collective, Collective::AllGather | Collective::AllToAll);
    let rooted = matches!(collective, Collective::Gather | Collective::Scatter);
    if protocol == Protocol::Direct && !exchanges && (ranks > 2 || rooted) {
        return None;
    }
    let two_steps = match protocol {
        Protocol::TwoShot | Protocol::TwoShot128 => true,
        // Between two ranks one step sends as much.
        Protocol::Simple => ranks > 2,
        _ => false,
    };
    let family = match collective {
        Collective::AllReduce if two_steps => Family::AllReduceTwoShot,
        Collective::AllReduce if protocol == Protocol::Direct => Family::AllReduceDirect,
        // In one step it scatters the same to all.
        Collective::AllReduce | Collective::ReduceScatter => Family::ReduceScatter,
        // With slots one kernel has both forms.
        Collective::Reduce if matches!(protocol, Protocol::TwoShot | Protocol::TwoShot128) => Family::ReduceTwoShot,
        Collective::Reduce => Family::Reduce,
        Collective::Broadcast => Family::Broadcast,
        _ if is_messages(collective, protocol, ranks) => Family::SendRecv,
        Collective::AllGather | Collective::AllToAll | Collective::Gather | Collective::Scatter => Family::Exchange,
        _ => return None,
    };
    Some(Kernel::new(family, framing)).filter(|kernel| kernel.exists())
}

/// The number of blocks that suits a protocol and a size.
pub(crate) fn blocks(layout: &Layout, protocol: Protocol, bytes: usize) -> u32 {
    let words = bytes.div_ceil(8);
    let wanted = match protocol {
        Protocol::OneShot => words.div_ceil(WORDS_PER_BLOCK),
        Protocol::TwoShot => words.div_ceil(WORDS_PER_BLOCK * layout.ranks.min(2)),
        Protocol::OneShot128 => words.div_ceil(WORDS_PER_BLOCK_128),
        Protocol::TwoShot128 => words.div_ceil(WORDS_PER_BLOCK_128 * layout.ranks.min(2)),
        Protocol::Simple | Protocol::Direct => bytes.div_ceil(SIMPLE_PER_BLOCK),
        Protocol::Schedule(..) => protocol.blocks(bytes) as usize,
    };
    let most = if needs_extension(protocol) { layout.channels } else { layout.line_channels };
    wanted.clamp(1, most) as u32
}

/// Returns true if calls by this protocol use the windows' extensions: all do but those that send lines of LL alone.
pub(crate) fn needs_extension(protocol: Protocol) -> bool {
    !matches!(protocol, Protocol::OneShot | Protocol::TwoShot | Protocol::Schedule(_, Framing::Ll))
}

/// Returns true if a call fits the memory that its protocol uses, if that is no schedule.
pub(crate) fn fits(layout: &Layout, collective: Collective, choice: Choice, bytes: usize) -> bool {
    let blocks = choice.blocks as usize;
    // Blocks take equal parts, up to one word more.
    let words = bytes.div_ceil(8).div_ceil(blocks.max(1));
    // For reductions in two steps, where possible.
    let segments = match collective {
        Collective::AllReduce => Some(layout.ranks),
        Collective::Reduce if layout.ranks > 2 => Some(layout.ranks - 1),
        _ => None,
    };
    let most = if needs_extension(choice.protocol) { layout.channels } else { layout.line_channels };
    (1..=most).contains(&blocks)
        && match choice.protocol {
            Protocol::OneShot => words <= layout.lines,
            Protocol::TwoShot => segments.is_some_and(|n| words.div_ceil(n) <= layout.lines / 2),
            Protocol::OneShot128 => lines128(words) <= layout.lines128,
            // Segments differ by a word.
            Protocol::TwoShot128 => segments.is_some_and(|n| lines128(words.div_ceil(n) + 1) <= layout.lines128 / 2),
            Protocol::Simple | Protocol::Direct => true,
            // Depends on the program: `DeviceComm::fits`.
            Protocol::Schedule(..) => false,
        }
}

/// Lines of LL128 for `words` words: 15 in each, and by four, as a warp sends them.
fn lines128(words: usize) -> usize {
    words.div_ceil(60) * 4
}

/// Least bytes of a message that goes straight into the receiver's buffer, if buffers are registered.
const DIRECT_MESSAGE: u64 = 4 << 20;

/// Returns true for a message that goes straight into the receiver's buffer, if that is registered. Its sender waits
/// for the receiver. Through the slots only a sender of more than they hold does, so a shorter message takes these:
/// programs may send to each other before they receive, whether buffers are registered or not.
pub(crate) fn is_direct(layout: &Layout, bytes: u64) -> bool {
    let slots = pair_channels(layout, bytes) as usize * layout.slots * 2 * layout.slot_bytes;
    bytes >= DIRECT_MESSAGE && bytes > slots as u64
}

/// Channels of a message between two ranks: a function of its length, so that both ends cut it alike. At most half of
/// all channels, because each uses the slots of two. In lines, one for each piece of a word per thread.
pub(crate) fn pair_channels(layout: &Layout, bytes: u64) -> u32 {
    let of_channel = if needs_slots(bytes as usize) { SIMPLE_PER_BLOCK } else { 8 * WORDS_PER_BLOCK };
    bytes.div_ceil(of_channel as u64).clamp(1, layout.channels as u64 / 2) as u32
}

/// Blocks that copy a rank's own segment beside its messages: a quarter of all channels at most. A message has half of
/// them, so a copy of its length ends first if a block copies within the device twice as fast as over the link. These
/// blocks come last in the grid and wait for no other: they may exceed the channels.
pub(crate) fn own_blocks(layout: &Layout, bytes: u64) -> u32 {
    bytes.div_ceil(SIMPLE_PER_BLOCK as u64).clamp(1, (layout.channels as u64 / 4).max(1)) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_choice_fits() {
        for (ranks, sharing) in [(2, 1), (2, 2), (3, 1), (4, 1), (4, 4), (8, 1), (8, 8)] {
            let layout = Layout::new(ranks, sharing, &tinynccl_sys::Config::default());
            for collective in Collective::ALL {
                for (bytes, registered) in [0, 1, 8, 4095, 64 << 10, (128 << 10) + 8, 512 << 10, 513 << 10, 1 << 30]
                    .into_iter()
                    .flat_map(|b| [(b, false), (b, true)])
                {
                    let choice = choose(&layout, collective, bytes, registered);
                    let known = matches!(choice.protocol, Protocol::Schedule(..));
                    assert!(
                        known || fits(&layout, collective, choice, bytes),
                        "{ranks} {collective} {bytes} {choice:?}"
                    );
                    assert!((1..=layout.channels).contains(&(choice.blocks as usize)));
                }
            }
        }
    }

    /// Windows are no larger than the choices need: with more room they would be the same.
    #[test]
    fn lines_have_room_for_all_calls_that_are_best_in_them() {
        let sizes = (0..=30).flat_map(|power| {
            let whole = 1usize << power;
            [whole, whole + 8, whole + whole / 2, whole + whole / 4 * 3]
        });
        let limits = [64 << 10, 128 << 10, 256 << 10, 9 << 18, 2 << 20, 8 << 20, 12 << 20, 24 << 20];
        let sizes: Vec<usize> = sizes
            .chain(limits.iter().flat_map(|&most| (1..8).flat_map(move |n| [most / n, most / n / 8 * 8])))
            .collect();
        for ranks in 2..=8 {
            for (blocks, whole_lines) in [(128, true), (64, true), (128, false)] {
                let layout = Layout::new(ranks, 1, &tinynccl_sys::Config::default().with(|c| c.cuda_blocks = blocks));
                let layout = if whole_lines { layout } else { layout.without_ll128() };
                // As windows were when each sender had this many.
                let roomy = Layout {
                    lines: 1024,
                    line_channels: layout.channels,
                    lines128: if whole_lines { 2048 / ranks / 8 * 8 } else { 0 },
                    ..layout
                };
                for collective in Collective::ALL {
                    for &bytes in &sizes {
                        for registered in [false, true] {
                            let (one, other) = (
                                choose(&layout, collective, bytes, registered),
                                choose(&roomy, collective, bytes, registered),
                            );
                            assert_eq!(one, other, "{collective} of {bytes} bytes, {ranks} ranks, {layout:?}");
                        }
                    }
                }
            }
        }
    }

    /// Small calls are equally without an extension on all ranks: the choice is a function of what they agree on.
    #[test]
    fn small_calls_need_no_extension() {
        for ranks in 2..=8 {
            let layout = Layout::new(ranks, 1, &tinynccl_sys::Config::default());
            let in_lines = |c: &Collective| kernel(*c, Protocol::OneShot, ranks).is_some();
            for collective in Collective::ALL.into_iter().filter(in_lines) {
                let needs =
                    |bytes, registered| needs_extension(choose(&layout, collective, bytes, registered).protocol);
                assert!(!needs(0, false) && !needs(4096, true), "{collective}, {ranks} ranks");
                for bytes in [1 << 20, 16 << 20, 1 << 30] {
                    assert!(needs(bytes, false) && needs(bytes, true), "{collective} of {bytes}, {ranks} ranks");
                }
            }
        }
        // Without LL128 lines of LL carry up to 1 MiB.
        let layout = Layout::new(2, 1, &tinynccl_sys::Config::default()).without_ll128();
        assert!(!needs_extension(choose(&layout, Collective::AllReduce, 1 << 20, false).protocol));
        assert!(needs_extension(choose(&layout, Collective::AllReduce, (1 << 20) + 8, false).protocol));
        for (protocol, needs) in [
            (Protocol::OneShot128, true),
            (Protocol::Direct, true),
            (Protocol::Schedule(Algorithm::Ring, Framing::Simple), true),
            (Protocol::Schedule(Algorithm::Ring, Framing::Ll), false),
        ] {
            assert_eq!(needs_extension(protocol), needs, "{protocol}");
        }
    }

    /// With its own segment's copy a message in one direction takes no more blocks than are resident.
    #[test]
    fn large_gather_and_scatter_are_messages_between_two_ranks() {
        for (ranks, sharing, blocks) in [(2, 1, 128), (2, 2, 128), (2, 1, 2), (3, 1, 128)] {
            let layout = Layout::new(ranks, sharing, &tinynccl_sys::Config::default().with(|c| c.cuda_blocks = blocks));
            for bytes in [0, 1, 100_003, 100_000_003, 1 << 30] {
                let (message, own) = (pair_channels(&layout, bytes), own_blocks(&layout, bytes));
                assert!(message > 0 && own > 0 && (message + own) as usize <= layout.channels, "{layout:?} {bytes}");
                for collective in [Collective::Gather, Collective::Scatter] {
                    let choice = choose(&layout, collective, bytes as usize, false);
                    let as_messages = choice == Choice { protocol: Protocol::Simple, blocks: message };
                    let large = bytes > 8 << 20;
                    assert_eq!(
                        as_messages,
                        ranks == 2 && large,
                        "{collective} of {bytes} bytes, {layout:?}: {choice:?}"
                    );
                    let family = kernel(collective, Protocol::Simple, ranks).map(|kernel| kernel.family);
                    assert_eq!(family, Some(if ranks == 2 { Family::SendRecv } else { Family::Exchange }));
                }
            }
        }
    }

    /// A word of a message in lines has the same channel in all of them: `kernels/send_recv.cu`.
    #[test]
    fn a_message_without_slots_has_a_channel_for_each_piece() {
        let most = (0..).take_while(|&bytes| !needs_slots(bytes)).last().unwrap();
        assert_eq!(most, 32 << 10);
        for (blocks, channels) in [(128, 8), (8, 4), (2, 1)] {
            let layout = Layout::new(2, 1, &tinynccl_sys::Config::default().with(|c| c.cuda_blocks = blocks));
            assert_eq!(pair_channels(&layout, most as u64), channels);
            assert_eq!([1, 4096].map(|bytes| pair_channels(&layout, bytes)), [1, 1]);
            assert_eq!(pair_channels(&layout, 4097), channels.min(2));
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let layout = Layout::new(4, 1, &tinynccl_sys::Config::default());
        let one = |protocol, blocks| Choice { protocol, blocks };
        assert!(!fits(&layout, Collective::AllReduce, one(Protocol::OneShot, 1), 8 * 1025));
        assert!(!fits(&layout, Collective::AllGather, one(Protocol::TwoShot, 1), 8));
        assert!(!fits(&layout, Collective::AllReduce, one(Protocol::Simple, 0), 8));
        assert!(!fits(&layout, Collective::AllReduce, one(Protocol::Simple, 129), 8));
    }
}
