//! Messages between two ranks as one-lane programs on their own channel.

use tinynccl_plan::Call;
use tinynccl_plan::schedule::{Lane, Loc, Program, Step};
use tinynccl_plan::wire::Collective;
use tinynccl_transport::LinkOptions;
use tinynccl_transport::bootstrap::Message;

/// Messages are not cut below this many bytes.
const SHORTEST: usize = 32 << 10;

/// The channel of point-to-point messages: apart from the collectives', so that the two never wait for each other.
pub(crate) const CHANNEL: u32 = 1 << 16;

/// `rank`'s program for a message from `sender` to `receiver`.
pub(super) fn program(rank: usize, sender: usize, receiver: usize) -> Program {
    let step = if rank == sender {
        Step::Send { to: receiver as u32, src: Loc::input(0, 0) }
    } else {
        Step::Recv { from: sender as u32, dst: Loc::output(0, 0) }
    };
    Program { parts: 1, span: 1, scratch_segments: 0, lanes: vec![Lane { channel: CHANNEL, steps: vec![step] }] }
}

/// Longest message over a link that cuts it itself or passes it by zero copy: one system call reads it in about 50 us.
const LONGEST: usize = 1 << 20;

/// Message `seq` of a pair of ranks as `rank`, one of them, records it.
#[inline]
pub(super) fn recorded(call: &Call, rank: usize, seq: u32) -> Message {
    let peer = call.partner(rank) as u32;
    Message { peer, sends: call.root == rank, seq, dtype: call.dtype as u8, count: call.count as u64 }
}

/// Message size for `bytes` bytes, where the link does not cut messages up by itself. In shared memory the receiver
/// copies one message out while the sender copies the next one in; both ends must cut alike, so this depends on nothing
/// else.
pub(super) fn length(bytes: usize, longest: usize, shared: bool) -> usize {
    match shared {
        true => (bytes / 4).max(SHORTEST).min(longest),
        false => longest,
    }
}

/// Longest message of a call on a link that takes messages of any length: as few as possible. Within a collective of
/// two ranks a message must not be longer than half of what a link holds, because they send before they receive.
pub(super) fn long_length(options: &LinkOptions, collective: Collective) -> usize {
    let longest = options.max_message.max(LONGEST);
    match collective {
        Collective::SendRecv => longest,
        _ => (options.max_message * (options.depth / 2).max(1)).min(longest),
    }
}
