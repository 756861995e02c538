//! Calls that were enqueued on the device, and how many of them are over: for reports to a reader outside.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::path::{DataPath, Progress};
use tinynccl_comm::{DeviceCalls, OnDevice};
use tinynccl_plan::Call;
use tinynccl_plan::wire::{Algorithm, Collective, Header};

/// Calls that are remembered: as many as a stream takes before its caller waits.
const KEPT: usize = 1024;

/// The calls of a communicator, written by one thread at a time.
pub(crate) struct Ledger {
    device: usize,
    path: Arc<dyn DataPath>,
    /// Number of the last call; 0 before the first.
    last: AtomicU32,
    /// Calls made, by the code of the collective.
    made: [AtomicU64; Collective::ALL.len()],
    kept: Box<[Kept]>,
}

/// One call: number and code, root and the codes of type and operator, count.
#[derive(Default)]
struct Kept {
    call: AtomicU64,
    kind: AtomicU64,
    count: AtomicU64,
}

impl Ledger {
    pub(crate) fn new(device: usize, path: Arc<dyn DataPath>) -> Ledger {
        let kept = (0..KEPT).map(|_| Kept::default()).collect();
        Ledger { device, path, last: AtomicU32::new(0), made: Default::default(), kept }
    }

    /// Records call `number`. Costs a few stores.
    #[inline]
    pub(crate) fn note(&self, number: u32, call: &Call) {
        let code = call.collective as usize;
        self.made[code].store(self.made[code].load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        let header = call.header(0, Algorithm::Direct);
        let kept = &self.kept[number as usize % KEPT];
        kept.kind.store(
            u64::from(header.root) << 32 | u64::from(header.dtype) << 8 | u64::from(header.op),
            Ordering::Relaxed,
        );
        kept.count.store(call.count as u64, Ordering::Relaxed);
        kept.call.store(u64::from(number) << 8 | code as u64, Ordering::Release);
        self.last.store(number, Ordering::Release);
    }

    /// Records a call of a communicator of one rank, whose calls have no numbers elsewhere.
    pub(crate) fn note_alone(&self, call: &Call) {
        self.note(self.last.load(Ordering::Relaxed).wrapping_add(1), call);
    }

    /// The call with this number, if it is remembered.
    fn get(&self, number: u32) -> Option<Header> {
        let kept = &self.kept[number as usize % KEPT];
        let call = kept.call.load(Ordering::Acquire);
        if call >> 8 != u64::from(number) || call == 0 {
            return None;
        }
        let kind = kept.kind.load(Ordering::Relaxed);
        Some(Header {
            count: kept.count.load(Ordering::Relaxed),
            seq: number,
            root: (kind >> 32) as u32,
            collective: call as u8,
            dtype: (kind >> 8) as u8,
            op: kind as u8,
            algorithm: Header::NO_ALGORITHM,
            ..Header::default()
        })
    }

    /// Calls up to a number, by the code of the collective; `None` where more came after it than are remembered.
    fn up_to(&self, number: u32, last: u32) -> Option<Vec<u64>> {
        let mut counts = self.made();
        let later = last.wrapping_sub(number);
        if later as usize > KEPT {
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
    use tinynccl_plan::{DType, ReduceOp, Result};

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
        for number in 1..=2000 {
            let collective = if number % 10 == 0 { Collective::Broadcast } else { Collective::AllReduce };
            ledger.note(number, &call(collective, number as usize));
        }
        let count = |calls: &DeviceCalls, collective: Collective| calls.over.as_ref().unwrap()[collective as usize];
        let calls = at(None, Some(1985));
        assert_eq!((count(&calls, Collective::AllReduce), count(&calls, Collective::Broadcast)), (1787, 198));
        let next = calls.call.unwrap();
        assert_eq!((next.seq, next.count, next.collective), (1986, 1986, Collective::AllReduce as u8));
        assert_eq!(calls.made[Collective::AllReduce as usize], 1800);
        let calls = at(Some(1990), Some(1985));
        assert_eq!(calls.call.unwrap().collective, Collective::Broadcast as u8);
        assert_eq!(calls.started.unwrap()[Collective::Broadcast as usize], 199);
        // More than are remembered, and one that is not recorded yet.
        assert_eq!(at(None, Some(2000 - KEPT as u32 - 1)).over, None);
        assert_eq!((at(None, Some(2001)).finished, at(None, None).finished), (Some(2000), None));
    }
}
