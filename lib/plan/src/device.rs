//! Path, protocol and blocks of a call on GPUs, with their names.

use std::fmt;

use crate::wire::Algorithm;

/// Blocks of a kernel at most.
const MOST_BLOCKS: usize = 128;
/// Bytes for which another block of a schedule pays, by its framing.
const SCHEDULE_PER_BLOCK: usize = 32 << 10;
const SCHEDULE_LL_PER_BLOCK: usize = 4 << 10;
const SCHEDULE_LL128_PER_BLOCK: usize = 12 << 10;

/// Path by which the calls of a `DeviceComm` reach the other ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Path {
    /// Kernels write into the other ranks' memory.
    Peer,
    /// Kernels that never wait write into the other ranks' memory: for ranks of several processes on one GPU.
    Phased,
    /// Data goes through page-locked memory of the hosts and the links of the host communicator.
    Hosted,
    /// One of the other paths inside each host, and the hosts' memory and links between them.
    Hosts,
}

impl Path {
    /// Returns true if the path has several protocols to choose from.
    pub fn chooses(self) -> bool {
        self == Path::Peer
    }

    /// Returns true if calls can be captured in a CUDA graph.
    pub fn captures(self) -> bool {
        self == Path::Peer
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Path::Peer => "kernels over the peers' memory",
            Path::Phased => "kernels in turns over shared GPUs",
            Path::Hosted => "through the hosts' memory",
            Path::Hosts => "inside each host, then between the hosts",
        })
    }
}

/// Framing by which the messages of a schedule cross the link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Framing {
    /// Slots, with a counter behind the data: full bandwidth, any size.
    Simple,
    /// Lines, with flags beside the data: lowest latency, twice the bytes, short messages only.
    Ll,
    /// Lines whose flags are a sixteenth of the bytes, any size: over NVLink only.
    Ll128,
}

/// Protocol by which data crosses the link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Protocol {
    /// LL: flags beside the data, sent to all ranks in one step. Lowest latency.
    OneShot,
    /// LL in two steps: reduce-scatter, then all-gather, or, for reduce among more than two ranks, to the root.
    TwoShot,
    /// As OneShot in LL128, whose flags are a sixteenth of the sent bytes and not half: over NVLink only.
    OneShot128,
    /// As TwoShot in LL128.
    TwoShot128,
    /// Slots, in rounds: full bandwidth.
    Simple,
    /// From one rank's buffer into another's, if the buffers are registered; otherwise as Simple.
    Direct,
    /// A schedule of [`algorithm::program_by_switch`](crate::algorithm::program_by_switch), with a channel per block.
    Schedule(Algorithm, Framing),
}

impl Protocol {
    /// Blocks that suit a schedule of `bytes` bytes (as in [`Choice`]), on a GPU that is not shared; 1 for other
    /// protocols.
    pub fn blocks(self, bytes: usize) -> u32 {
        let per_block = match self {
            Protocol::Schedule(_, Framing::Simple) => SCHEDULE_PER_BLOCK,
            Protocol::Schedule(_, Framing::Ll) => SCHEDULE_LL_PER_BLOCK,
            Protocol::Schedule(_, Framing::Ll128) => SCHEDULE_LL128_PER_BLOCK,
            _ => return 1,
        };
        bytes.div_ceil(per_block).clamp(1, MOST_BLOCKS) as u32
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Protocol::OneShot => "LL, one step",
            Protocol::TwoShot => "LL, two steps",
            Protocol::OneShot128 => "LL128, one step",
            Protocol::TwoShot128 => "LL128, two steps",
            Protocol::Simple => "Simple",
            Protocol::Direct => "Direct",
            Protocol::Schedule(algorithm, Framing::Simple) => return write!(f, "{algorithm}, Simple"),
            Protocol::Schedule(algorithm, Framing::Ll) => return write!(f, "{algorithm}, LL"),
            Protocol::Schedule(algorithm, Framing::Ll128) => return write!(f, "{algorithm}, LL128"),
        })
    }
}

/// Protocol and blocks of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Choice {
    /// Protocol by which data crosses the link.
    pub protocol: Protocol,
    /// Blocks of the kernel.
    pub blocks: u32,
}
