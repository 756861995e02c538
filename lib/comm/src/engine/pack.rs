//! Small all_reduces of a group become one: copied side by side, reduced together, copied back.
//!
//! A message costs about as much as copying some kilobytes, so messages dominate the cost of many short calls. The
//! packing depends only on the group's list of calls, which is the same on every rank. The header carries a hash of the
//! list, so ranks whose lists differ are detected even if the sums of their lengths agree.

use super::raw_call::RawCall;
use crate::Progress;
use tinynccl_plan::Call;
use tinynccl_plan::dtype::{DType, ReduceOp};
use tinynccl_plan::wire::{Collective, Header};

/// Longest call that is packed, in bytes.
const LONGEST: usize = 4 << 10;
/// Most bytes in one pack.
const CAPACITY: usize = 64 << 10;
const _: () = assert!((CAPACITY as u64) < Header::PACK_LIMIT, "the header counts a pack's elements");

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
pub(super) fn units(calls: &[RawCall], ranks: usize) -> Vec<Unit> {
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
    fn add(&mut self, index: usize, count: usize, calls: &[RawCall]) -> bool {
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
    pub(super) fn words(&self, calls: &[RawCall]) -> usize {
        (self.count * calls[self.calls[0]].dtype.size()).div_ceil(8)
    }

    /// The header of the pack's messages, made from that of an all_reduce of its length.
    pub(super) fn header(&self, calls: &[RawCall], progress: &Progress, header: Header) -> Header {
        let members = self.calls.iter().map(|&index| {
            let Call { collective, dtype, op, count, .. } = calls[index].call;
            let op = op.map_or(Header::NO_OP, |op| op as u8);
            [count as u64, u64::from_le_bytes([collective as u8, dtype as u8, op, 0, 0, 0, 0, 0])]
        });
        header.packed(self.calls.len(), progress.hash(members))
    }

    /// The first call whose input (or, with `outputs`, output) does not have the bits of its part of `memory`: its
    /// index, and both parts.
    ///
    /// # Safety
    /// As [`Pack::gather`] or [`Pack::scatter`].
    pub(super) unsafe fn difference<'m>(
        &self,
        calls: &[RawCall],
        mut memory: *const u8,
        outputs: bool,
    ) -> Option<(usize, [&'m [u8]; 2])> {
        self.calls.iter().find_map(|&index| {
            let call = &calls[index];
            let theirs = if outputs { call.buffers.output.cast_const() } else { call.buffers.input };
            let bytes = call.count * call.dtype.size();
            // SAFETY: by the caller; `memory` moves over the sum of the lengths.
            let [theirs, ours] = [theirs, memory].map(|at| unsafe { std::slice::from_raw_parts(at, bytes) });
            memory = memory.wrapping_add(bytes);
            (theirs != ours).then_some((index, [theirs, ours]))
        })
    }

    /// Copies the calls' inputs side by side to `to`.
    ///
    /// # Safety
    /// Every call's input must be readable, and `to` be writable for [`Pack::words`] words.
    pub(super) unsafe fn gather(&self, calls: &[RawCall], mut to: *mut u8) {
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
    pub(super) unsafe fn scatter(&self, calls: &[RawCall], mut from: *const u8) {
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
    use crate::executor::Buffers;
    use tinynccl_plan::wire::Algorithm;
    use tinynccl_sys::secret::Secret;

    fn call(collective: Collective, dtype: DType, op: ReduceOp, count: usize) -> RawCall {
        let buffers = Buffers { input: std::ptr::null(), output: std::ptr::null_mut() };
        RawCall::over(Call::new(collective, dtype, op, 0, count), buffers)
    }

    fn all_reduce(dtype: DType, op: ReduceOp, count: usize) -> RawCall {
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
        let calls: Vec<RawCall> = (0..40).map(|_| all_reduce(DType::F64, ReduceOp::Sum, 512)).collect();
        let ranges = [0..16, 16..32, 32..40];
        assert_eq!(units(&calls, 2), ranges.map(|r| pack(&r.clone().collect::<Vec<_>>(), r.len() * 512)));
    }

    fn header(counts: &[usize], secret: u8) -> Header {
        let calls: Vec<RawCall> = counts.iter().map(|&n| all_reduce(DType::F32, ReduceOp::Sum, n)).collect();
        let Unit::Pack(pack) = units(&calls, 2).remove(0) else { panic!("not packed") };
        let whole = Call::new(Collective::AllReduce, DType::F32, ReduceOp::Sum, 0, pack.count);
        let progress = Progress::new(&Secret::new([secret; 32]), 0);
        pack.header(&calls, &progress, whole.header(0, Algorithm::Direct))
    }

    #[test]
    fn the_header_tells_lists_apart() {
        assert_eq!(header(&[1, 2], 1), header(&[1, 2], 1));
        assert_ne!(header(&[1, 2], 1), header(&[1, 2], 2), "the hash depends on the job");
        assert_eq!((header(&[1, 2], 1).elements(), header(&[1, 2], 1).pack().unwrap().0), (3, 2));
        for other in [&[2, 1][..], &[3, 0], &[0, 3], &[1, 1, 1], &[1, 2, 0]] {
            assert_ne!(header(&[1, 2], 1), header(other, 1), "{other:?}");
        }
        assert_ne!(header(&vec![0; 5000], 1), header(&vec![0; 5001], 1));
    }

    /// 186,000 lists of three calls: a hash of 20 bits is the same for many of them, one of 32 bits for a few.
    #[test]
    fn of_all_lists_of_one_sum_no_two_have_one_header() {
        let progress = Progress::new(&Secret::random().unwrap(), 0);
        let mut headers = std::collections::HashSet::new();
        let mut lists = 0;
        for sum in [100, 600] {
            let whole =
                Call::new(Collective::AllReduce, DType::F32, ReduceOp::Sum, 0, sum).header(0, Algorithm::Direct);
            for first in 0..=sum {
                for second in 0..=sum - first {
                    let calls = [first, second, sum - first - second].map(|n| all_reduce(DType::F32, ReduceOp::Sum, n));
                    let pack = Pack { calls: vec![0, 1, 2], count: sum };
                    headers.insert(bytemuck::bytes_of(&pack.header(&calls, &progress, whole)).to_vec());
                    lists += 1;
                }
            }
        }
        assert_eq!(headers.len(), lists);
    }
}
