//! The data that a phased call moves, and its ranks.

use crate::checked::call::End;
use tinynccl_comm::RawCall;
use tinynccl_plan::wire::Collective;

/// The bytes that a call moves: destinations, sources, and the distance of their segments.
#[derive(Debug, Clone, Copy)]
pub(super) struct Traffic {
    /// Bytes of each message sent, and of each received.
    pub(super) lengths: (u64, u64),
    pub(super) input: u64,
    pub(super) output: u64,
    pub(super) targets: u32,
    pub(super) sources: u32,
    pub(super) input_stride: u64,
    pub(super) output_stride: u64,
    /// Address of our own input, if it is added to the sources' data.
    pub(super) reduces: Option<u64>,
    /// True if both ends are the same call, which kernels then compare.
    pub(super) compares: bool,
}

impl Traffic {
    /// Returns the traffic of a message sent, a message received (each as address, bytes, peer), or both.
    pub(super) fn pair(to: Option<End>, from: Option<End>) -> Traffic {
        let (input, sent, target) = to.map_or((0, 0, 0), |(at, bytes, peer)| (at, bytes, 1 << peer));
        let (output, received, source) = from.map_or((0, 0, 0), |(at, bytes, peer)| (at, bytes, 1 << peer));
        Traffic {
            lengths: (sent as u64, received as u64),
            input,
            output,
            targets: target,
            sources: source,
            input_stride: 0,
            output_stride: 0,
            reduces: None,
            compares: false,
        }
    }

    /// Returns the traffic of a collective of `size` ranks, seen by `rank`; `None` for one that has no phased form.
    pub(super) fn of(call: &RawCall, rank: usize, size: usize) -> Option<Traffic> {
        let bytes = (call.count * call.dtype.size()) as u64;
        let others = ((1u32 << size) - 1) & !(1 << rank);
        let root = 1u32 << call.root;
        let at_root = call.root == rank;
        let own = rank as u64 * bytes;
        let (input, output) = call.device_addresses();
        let whole = Traffic {
            lengths: (bytes, bytes),
            input,
            output,
            targets: others,
            sources: others,
            input_stride: 0,
            output_stride: 0,
            reduces: Some(input),
            compares: true,
        };
        Some(match call.collective {
            Collective::AllReduce => whole,
            Collective::ReduceScatter => Traffic { input_stride: bytes, reduces: Some(input + own), ..whole },
            Collective::Reduce if at_root => Traffic { targets: 0, ..whole },
            Collective::Reduce => Traffic { targets: root, sources: 0, reduces: None, ..whole },
            Collective::Broadcast if at_root => Traffic { sources: 0, reduces: None, ..whole },
            Collective::Broadcast => Traffic { targets: 0, sources: root, reduces: None, ..whole },
            Collective::AllGather => Traffic { output_stride: bytes, reduces: None, ..whole },
            Collective::AllToAll => Traffic { input_stride: bytes, output_stride: bytes, reduces: None, ..whole },
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::window::MAX_RANKS;
    use super::*;
    use tinynccl_plan::Call;
    use tinynccl_plan::{DType, ReduceOp};

    #[test]
    fn every_message_has_a_sender_and_a_receiver() {
        for size in 2..=MAX_RANKS {
            for root in 0..size {
                for collective in Collective::ALL {
                    let call = Call::new(collective, DType::F32, ReduceOp::Sum, root, 10);
                    let call = RawCall::on_device(call, 0, 1 << 20);
                    let all: Option<Vec<Traffic>> = (0..size).map(|rank| Traffic::of(&call, rank, size)).collect();
                    let Some(all) = all else { continue };
                    for (from, ours) in all.iter().enumerate() {
                        assert_eq!(ours.targets >> from & 1, 0);
                        for (to, theirs) in all.iter().enumerate() {
                            assert_eq!(ours.targets >> to & 1, theirs.sources >> from & 1, "{collective} {from} {to}");
                        }
                    }
                }
            }
        }
    }
}
