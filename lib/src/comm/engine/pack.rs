//! Small all_reduces of a group become one: copied side by side, reduced together, copied back.
//!
//! A message costs about as much as copying some kilobytes, so messages dominate the cost of many short calls. The
//! packing depends only on the group's list of calls, which is the same on every rank. The header carries a hash of the
//! lengths, so ranks whose lists differ are detected even if the sums agree.

use super::bound::Bound;
use crate::dtype::{DType, ReduceOp};
use crate::wire::{Collective, Header};

/// Longest call that is packed, in bytes.
const LONGEST: usize = 4 << 10;
/// Most bytes in one pack.
const CAPACITY: usize = 64 << 10;

/// A unit that runs as one call.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Unit {
    /// A call, by its index.
    Call(usize),
    /// Several all_reduces of one type and operator.
    Pack(Pack),
}

/// Calls that are packed, in order.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Pack {
    pub(super) calls: Vec<usize>,
    /// Elements of all of them.
    pub(super) count: usize,
}

/// Puts calls together. A pack stands where its first call stood.
pub(super) fn units(calls: &[Bound], ranks: usize) -> Vec<Unit> {
    let mut units: Vec<Unit> = Vec::with_capacity(calls.len());
    // The pack of each type and operator that still has room, as an index of `units`.
    let mut open: Vec<(DType, ReduceOp, usize)> = Vec::new();
    for (index, call) in calls.iter().enumerate() {
        let (dtype, bytes) = (call.dtype, call.count.saturating_mul(call.dtype.size()));
        let op = match (call.collective, call.op) {
            (Collective::AllReduce, Some(op)) if ranks > 1 && bytes <= LONGEST => op,
            _ => {
                units.push(Unit::Call(index));
                continue;
            }
        };
        let known = open.iter_mut().find(|(d, o, _)| (*d, *o) == (dtype, op));
        if let Some((_, _, at)) = &known
            && let Some(unit) = units.get_mut(*at)
            && unit.add(index, call.count, calls)
        {
            continue;
        }
        match known {
            Some((_, _, at)) => *at = units.len(),
            None => open.push((dtype, op, units.len())),
        }
        units.push(Unit::Call(index));
    }
    units
}

impl Unit {
    /// Adds a call of the same type and operator, if there is room.
    fn add(&mut self, index: usize, count: usize, calls: &[Bound]) -> bool {
        let (first, before) = match self {
            Unit::Call(first) => (*first, calls[*first].count),
            Unit::Pack(pack) => (pack.calls[0], pack.count),
        };
        if (before + count) * calls[first].dtype.size() > CAPACITY {
            return false;
        }
        if let Unit::Call(first) = *self {
            *self = Unit::Pack(Pack { calls: vec![first], count: before });
        }
        if let Unit::Pack(pack) = self {
            pack.calls.push(index);
            pack.count += count;
        }
        true
    }
}

impl Pack {
    /// Bytes of working memory, rounded up to whole words.
    pub(super) fn words(&self, calls: &[Bound]) -> usize {
        (self.count * calls[self.calls[0]].dtype.size()).div_ceil(8)
    }

    /// The description of the calls in the messages' header: their number (the upper 12 bits), and a hash of their
    /// lengths.
    pub(super) fn digest(&self, calls: &[Bound]) -> u32 {
        // FNV-1a.
        let hash = self.calls.iter().fold(0xcbf2_9ce4_8422_2325u64, |hash, &call| {
            let count = calls[call].count as u64;
            count.to_le_bytes().iter().fold(hash, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
        });
        let hash = ((hash >> 44) ^ hash) as u32 & Header::PACK_HASH;
        (self.calls.len().min(Header::MAX_PACKED) as u32) << Header::PACK_HASH.count_ones() | hash
    }

    /// Copies the calls' inputs side by side to `to`.
    ///
    /// # Safety
    /// Every call's input must be readable, and `to` be writable for [`Pack::words`] words.
    pub(super) unsafe fn gather(&self, calls: &[Bound], mut to: *mut u8) {
        for call in self.calls.iter().map(|&index| &calls[index]) {
            let bytes = call.count * call.dtype.size();
            // SAFETY: by the caller; `to` moves over the sum of the lengths.
            unsafe {
                std::ptr::copy_nonoverlapping(call.buffers.input, to, bytes);
                to = to.add(bytes);
            }
        }
    }

    /// Copies the results from `from` to the calls' outputs.
    ///
    /// # Safety
    /// Every call's output must be writable, and `from` be readable for [`Pack::words`] words.
    pub(super) unsafe fn scatter(&self, calls: &[Bound], mut from: *const u8) {
        for call in self.calls.iter().map(|&index| &calls[index]) {
            let bytes = call.count * call.dtype.size();
            // SAFETY: by the caller; `from` moves over the sum of the lengths.
            unsafe {
                std::ptr::copy_nonoverlapping(from, call.buffers.output, bytes);
                from = from.add(bytes);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Call;
    use crate::executor::Buffers;

    fn call(collective: Collective, dtype: DType, op: ReduceOp, count: usize) -> Bound {
        let buffers = Buffers { input: std::ptr::null(), output: std::ptr::null_mut() };
        Bound::new(Call::new(collective, dtype, op, 0, count), buffers)
    }

    fn all_reduce(dtype: DType, op: ReduceOp, count: usize) -> Bound {
        call(Collective::AllReduce, dtype, op, count)
    }

    fn pack(calls: &[usize], count: usize) -> Unit {
        Unit::Pack(Pack { calls: calls.to_vec(), count })
    }

    #[test]
    fn small_calls_of_one_type_and_operator_are_packed_where_the_first_stood() {
        use DType::{F32, I32};
        use ReduceOp::{Max, Sum};
        let calls = [
            all_reduce(F32, Sum, 10),
            call(Collective::Broadcast, F32, Sum, 5),
            all_reduce(I32, Sum, 3),
            all_reduce(F32, Sum, 0),
            all_reduce(F32, Max, 7),
            all_reduce(F32, Sum, 1025), // longer than 4 KiB
            all_reduce(F32, Sum, 1024),
            all_reduce(I32, Sum, 4),
        ];
        let expected = [pack(&[0, 3, 6], 1034), Unit::Call(1), pack(&[2, 7], 7), Unit::Call(4), Unit::Call(5)];
        assert_eq!(units(&calls, 2), expected);
        assert_eq!(units(&calls, 1), (0..8).map(Unit::Call).collect::<Vec<_>>());
    }

    #[test]
    fn a_full_pack_is_followed_by_another() {
        let calls: Vec<Bound> = (0..40).map(|_| all_reduce(DType::F64, ReduceOp::Sum, 512)).collect();
        let ranges = [0..16, 16..32, 32..40];
        assert_eq!(units(&calls, 2), ranges.map(|r| pack(&r.clone().collect::<Vec<_>>(), r.len() * 512)));
    }

    #[test]
    fn the_digest_tells_lists_apart() {
        let digest = |counts: &[usize]| {
            let calls: Vec<Bound> = counts.iter().map(|&n| all_reduce(DType::F32, ReduceOp::Sum, n)).collect();
            match units(&calls, 2).remove(0) {
                Unit::Pack(pack) => pack.digest(&calls),
                Unit::Call(_) => panic!("not packed"),
            }
        };
        assert_eq!(digest(&[1, 2]), digest(&[1, 2]));
        assert_eq!(digest(&[1, 2]) >> 20, 2);
        for other in [&[2, 1][..], &[3, 0], &[0, 3], &[1, 1, 1], &[1, 2, 0]] {
            assert_ne!(digest(&[1, 2]), digest(other), "{other:?}");
        }
        assert_ne!(digest(&vec![0; 5000]), Header::NO_ROOT);
    }
}
