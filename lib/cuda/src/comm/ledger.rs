//! Calls that were enqueued on the device, and how many of them are over: for reports to a reader outside.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::path::{DataPath, Progress};
use tinynccl_comm::{DeviceCalls, Enqueued, OnDevice, RECORDED, Recorded, Ring};
use tinynccl_plan::wire::{Algorithm, Collective, Header};
use tinynccl_plan::{Call, DType};

/// The calls of a communicator, written by one thread at a time.
pub(crate) struct Ledger {
    device: usize,
    path: Arc<dyn DataPath>,
    /// Number of the last call; 0 before the first.
    last: AtomicU32,
    /// Calls made, by the code of the collective.
    made: [AtomicU64; Collective::ALL.len()],
    /// Collectives made.
    collectives: AtomicU32,
    kept: Ring,
}

/// A round of messages: the ranks that we send to and receive from.
type Ends = (Option<usize>, Option<usize>);

/// Half of a word that stands for no rank.
const NOBODY: u32 = 0xffff;

impl Ledger {
    pub(crate) fn new(device: usize, path: Arc<dyn DataPath>) -> Ledger {
        let (last, collectives) = (AtomicU32::new(0), AtomicU32::new(0));
        Ledger { device, path, last, made: Default::default(), collectives, kept: Ring::default() }
    }

    /// Records collective `number`. Costs a few stores.
    #[inline]
    pub(crate) fn note(&self, number: u32, call: &Call) {
        let seq = self.collectives.load(Ordering::Relaxed).wrapping_add(1);
        self.collectives.store(seq, Ordering::Relaxed);
        let header = call.header(0, Algorithm::Direct);
        self.record(number, (call.collective, header.root), [header.op, header.dtype], call.count as u64);
    }

    /// Records a round of messages, of this many bytes to the first of the two or from the other.
    pub(crate) fn note_round(&self, number: u32, (to, from): Ends, bytes: usize) {
        let half = |rank: Option<usize>| rank.map_or(NOBODY, |rank| (rank as u32).min(NOBODY));
        let ends = half(to) << 16 | half(from);
        self.record(number, (Collective::SendRecv, ends), [Header::NO_OP, DType::U8 as u8], bytes as u64);
    }

    #[inline]
    fn record(&self, number: u32, (what, upper): (Collective, u32), [op, dtype]: [u8; 2], count: u64) {
        let made = &self.made[what as usize];
        made.store(made.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        let seq = self.collectives.load(Ordering::Relaxed);
        let kind = u64::from(upper) << 32 | u64::from_le_bytes([op, dtype, what as u8, 1, 0, 0, 0, 0]);
        self.kept.write(u64::from(number) << 32 | u64::from(seq), [count, kind], u64::MAX);
        self.last.store(number, Ordering::Release);
    }

    /// Records a call of a communicator of one rank, whose calls have no numbers elsewhere.
    pub(crate) fn note_alone(&self, call: &Call) {
        self.note(self.last.load(Ordering::Relaxed).wrapping_add(1), call);
    }

    /// The call with this number, if it is remembered.
    fn get(&self, number: u32) -> Option<Header> {
        Some(enqueued(&self.kept.get(number)?).call)
    }

    /// Calls up to a number, by the code of the collective; `None` where more came after it than are remembered.
    fn up_to(&self, number: u32, last: u32) -> Option<Vec<u64>> {
        let mut counts = self.made();
        let later = last.wrapping_sub(number);
        if later as usize > RECORDED {
            return None;
        }
        for after in 1..=later {
            let code = self.get(number.wrapping_add(after))?.collective;
            counts[usize::from(code)] = counts[usize::from(code)].saturating_sub(1);
        }
        Some(counts)
    }

    fn made(&self) -> Vec<u64> {
        self.made.iter().map(|count| count.load(Ordering::Relaxed)).collect()
    }
}

impl OnDevice for Ledger {
    fn enqueued(&self) -> u32 {
        self.last.load(Ordering::Relaxed)
    }

    fn recorded(&self) -> Vec<Enqueued> {
        self.kept.last(self.enqueued(), RECORDED).iter().map(enqueued).collect()
    }

    fn calls(&self) -> DeviceCalls {
        let Progress { begun, finished } = self.path.progress();
        let enqueued = self.last.load(Ordering::Acquire);
        // A call may have ended before it was recorded, and one that a graph repeats has its number of then.
        let known = |number: u32| if enqueued.wrapping_sub(number) as i32 >= 0 { number } else { enqueued };
        let (begun, finished) = (begun.map(known), finished.map(known));
        let next = finished.filter(|&finished| finished != enqueued).map_or(enqueued, |one| one.wrapping_add(1));
        DeviceCalls {
            device: self.device,
            path: self.path.path().to_string(),
            enqueued,
            begun,
            finished,
            call: self.get(begun.unwrap_or(next)),
            made: self.made(),
            started: begun.and_then(|begun| self.up_to(begun, enqueued)),
            over: finished.and_then(|finished| self.up_to(finished, enqueued)),
        }
    }
}

/// An entry as it was noted.
fn enqueued(entry: &Recorded) -> Enqueued {
    let [op, dtype, collective, ..] = entry.kind.to_le_bytes();
    let upper = (entry.kind >> 32) as u32;
    let message = collective == Collective::SendRecv as u8;
    let end = |half: u32| (message && half != NOBODY).then_some(half as usize);
    Enqueued {
        call: Header {
            count: entry.count,
            seq: entry.number(),
            root: if message { Header::NO_ROOT } else { upper },
            collective,
            dtype,
            op,
            algorithm: Header::NO_ALGORITHM,
            ..Header::default()
        },
        collective: entry.stamp as u32,
        to: end(upper >> 16),
        from: end(upper & NOBODY),
        ticks: entry.begun,
    }
}

impl fmt::Debug for Ledger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Ledger ({} calls)", self.last.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checked::call::Round;
    use crate::path::Turn;
    use std::sync::Mutex;
    use tinynccl_comm::{Comm, RawCall};
    use tinynccl_plan::device::{Choice, Path};
    use tinynccl_plan::{ReduceOp, Result};

    /// A path that is as far as it is set.
    #[derive(Debug)]
    struct At(Mutex<Progress>);

    impl DataPath for At {
        fn path(&self) -> Path {
            Path::Hosted
        }
        fn bytes(&self) -> usize {
            0
        }
        unsafe fn carry(&self, _: Turn, _: &RawCall, _: Choice) -> Result<()> {
            Ok(())
        }
        unsafe fn carry_round(&self, _: Turn, _: &RawCall, _: Round) -> Result<()> {
            Ok(())
        }
        fn check(&self, _: Option<&Comm>) -> Result<()> {
            Ok(())
        }
        fn abort(&self, _: tinynccl_plan::Error) {}
        fn progress(&self) -> Progress {
            *self.0.lock().unwrap()
        }
    }

    #[test]
    fn calls_that_are_over_are_counted_by_collective() {
        let path = Arc::new(At(Mutex::default()));
        let ledger = Ledger::new(3, path.clone());
        let call = |collective, count| Call::new(collective, DType::F32, ReduceOp::Sum, 0, count);
        let at = |begun, finished| {
            *path.0.lock().unwrap() = Progress { begun, finished };
            ledger.calls()
        };
        assert_eq!((at(Some(0), Some(0)).enqueued, at(None, None).call), (0, None));
        for number in 1..=8000 {
            let collective = if number % 10 == 0 { Collective::Broadcast } else { Collective::AllReduce };
            ledger.note(number, &call(collective, number as usize));
        }
        let count = |calls: &DeviceCalls, collective: Collective| calls.over.as_ref().unwrap()[collective as usize];
        let calls = at(None, Some(7985));
        assert_eq!((count(&calls, Collective::AllReduce), count(&calls, Collective::Broadcast)), (7187, 798));
        let next = calls.call.unwrap();
        assert_eq!((next.seq, next.count, next.collective), (7986, 7986, Collective::AllReduce as u8));
        assert_eq!(calls.made[Collective::AllReduce as usize], 7200);
        let calls = at(Some(7990), Some(7985));
        assert_eq!(calls.call.unwrap().collective, Collective::Broadcast as u8);
        assert_eq!(calls.started.unwrap()[Collective::Broadcast as usize], 799);
        let all = ledger.recorded();
        assert_eq!(
            (all.len(), all[0].call.count, all[0].collective),
            (RECORDED, 8001 - RECORDED as u64, 8001 - RECORDED as u32)
        );
        // More than are remembered, and one that is not recorded yet.
        assert_eq!(at(None, Some(8000 - RECORDED as u32 - 1)).over, None);
        assert_eq!((at(None, Some(8001)).finished, at(None, None).finished), (Some(8000), None));
    }

    #[test]
    fn rounds_of_messages_are_recorded_with_their_ends_and_are_no_collectives() {
        let ledger = Ledger::new(0, Arc::new(At(Mutex::default())));
        let barrier = || Call::new(Collective::Barrier, DType::U8, ReduceOp::Sum, 0, 0);
        ledger.note(1, &barrier());
        ledger.note_round(2, (Some(3), None), 64);
        ledger.note_round(3, (Some(0), Some(70_000)), 65);
        ledger.note(4, &barrier());
        let all = ledger.recorded();
        let ends: Vec<_> = all.iter().map(|one| (one.call.seq, one.collective, one.to, one.from)).collect();
        assert_eq!(ends, [(1, 1, None, None), (2, 1, Some(3), None), (3, 1, Some(0), None), (4, 2, None, None)]);
        assert_eq!((all[1].call.count, all[2].call.collective), (64, Collective::SendRecv as u8));
        assert!(all.is_sorted_by_key(|one| one.ticks));
    }
}
