//! A ring of the last calls: written by the thread that makes them with a few stores, read by any.
//!
//! The clock is the dearest part: a read takes as long as all stores. Long calls have their times, those that wait for
//! a rank for long, and of the others one in [`TIMED`].

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use tinynccl_sys::ticks;

/// Calls that are kept.
pub const RECORDED: usize = 4096;
/// Calls for which memory is taken at once: 6 KiB. A communicator with few calls takes little.
const TOGETHER: usize = 128;

/// Short calls of which one has its times.
const TIMED: u32 = 16;
/// Bytes from which a call is long: it takes a hundred times as long as a look at the clock.
const LONG: u64 = 16 << 10;

/// One call, as its owner wrote it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Recorded {
    /// Its number (the upper half), and what its owner adds; not 0.
    pub stamp: u64,
    /// Elements.
    pub count: u64,
    /// The other arguments.
    pub kind: u64,
    /// Ticks when it was recorded; 0 where that was not noted.
    pub begun: u64,
    /// Ticks when it was over; 0 before that, and where that was not noted.
    pub over: u64,
}

impl Recorded {
    /// Returns the number of the call.
    pub fn number(&self) -> u32 {
        (self.stamp >> 32) as u32
    }
}

/// A sequence lock around a [`Recorded`] without its times: the stamp is 0 while the others are written.
#[derive(Debug, Default)]
struct Entry {
    stamp: AtomicU64,
    count: AtomicU64,
    kind: AtomicU64,
}

/// Times of a call, apart from the calls: most have none, and a call that writes less moves fewer cache lines.
#[derive(Debug, Default)]
struct Times {
    /// Number of the call, and 1 in the upper half.
    of: AtomicU64,
    begun: AtomicU64,
    over: AtomicU64,
}

impl Times {
    /// Begin and end of the call with this number, if they are here and not being written.
    fn of(&self, number: u32) -> Option<[u64; 2]> {
        let word = |word: &AtomicU64| word.load(Ordering::Relaxed);
        let ours = 1 << 32 | u64::from(number);
        let of = self.of.load(Ordering::Acquire);
        let both = [word(&self.begun), word(&self.over)];
        fence(Ordering::Acquire);
        (of == ours && word(&self.of) == ours).then_some(both)
    }
}

/// [`TOGETHER`] calls.
#[derive(Debug)]
struct Segment {
    entries: [Entry; TOGETHER],
    times: [Times; TOGETHER],
}

/// The last [`RECORDED`] calls, by number. One thread writes at a time.
#[derive(Debug)]
pub struct Ring {
    segments: [OnceLock<Box<Segment>>; RECORDED / TOGETHER],
    /// Number of the last call that has its times.
    timed: AtomicU32,
}

impl Default for Ring {
    fn default() -> Ring {
        Ring { segments: std::array::from_fn(|_| OnceLock::new()), timed: AtomicU32::new(u32::MAX) }
    }
}

impl Ring {
    fn place(number: u32) -> (usize, usize) {
        let at = number as usize % RECORDED;
        (at / TOGETHER, at % TOGETHER)
    }

    /// Entry and times of a call that is written.
    #[inline]
    fn of(&self, number: u32) -> (&Entry, &Times) {
        let (segment, at) = Ring::place(number);
        let segment = self.segments[segment].get_or_init(|| {
            let (entries, times) =
                (std::array::from_fn(|_| Entry::default()), std::array::from_fn(|_| Times::default()));
            Box::new(Segment { entries, times })
        });
        (&segment.entries[at], &segment.times[at])
    }

    /// Records a call of this many bytes, whose number is in the upper half of `stamp`.
    #[inline]
    pub fn write(&self, stamp: u64, [count, kind]: [u64; 2], bytes: u64) {
        let number = (stamp >> 32) as u32;
        let (entry, _) = self.of(number);
        entry.stamp.store(0, Ordering::Relaxed);
        fence(Ordering::Release);
        entry.count.store(count, Ordering::Relaxed);
        entry.kind.store(kind, Ordering::Relaxed);
        entry.stamp.store(stamp, Ordering::Release);
        if bytes >= LONG || number.is_multiple_of(TIMED) {
            self.time(number);
        }
    }

    /// Notes that a call begins now.
    fn time(&self, number: u32) {
        let (_, times) = self.of(number);
        times.of.store(0, Ordering::Relaxed);
        fence(Ordering::Release);
        times.begun.store(ticks::now(), Ordering::Relaxed);
        times.over.store(0, Ordering::Relaxed);
        times.of.store(1 << 32 | u64::from(number), Ordering::Release);
        self.timed.store(number, Ordering::Relaxed);
    }

    /// Notes the time of the call with this number, written last, which waits.
    #[cold]
    pub fn waits(&self, number: u32) {
        if self.timed.load(Ordering::Relaxed) != number {
            self.time(number);
        }
    }

    /// Records that the call with this number, written last, is over.
    #[inline]
    pub fn over(&self, number: u32) {
        if self.timed.load(Ordering::Relaxed) == number {
            self.of(number).1.over.store(ticks::now(), Ordering::Relaxed);
        }
    }

    /// Returns the call with this number, if it is kept and not being written.
    pub fn get(&self, number: u32) -> Option<Recorded> {
        let (segment, at) = Ring::place(number);
        let segment = self.segments[segment].get()?;
        let (entry, times) = (&segment.entries[at], &segment.times[at]);
        let stamp = entry.stamp.load(Ordering::Acquire);
        let word = |word: &AtomicU64| word.load(Ordering::Relaxed);
        let (count, kind) = (word(&entry.count), word(&entry.kind));
        fence(Ordering::Acquire);
        let whole = stamp != 0 && (stamp >> 32) as u32 == number && word(&entry.stamp) == stamp;
        let [begun, over] = times.of(number).unwrap_or_default();
        whole.then_some(Recorded { stamp, count, kind, begun, over })
    }

    /// Returns up to `most` calls that are kept, in order, of which the last has number `newest`.
    pub fn last(&self, newest: u32, most: usize) -> Vec<Recorded> {
        let back = (0..most.min(RECORDED) as u32).rev();
        back.filter_map(|back| self.get(newest.wrapping_sub(back))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    fn stamp(number: u32) -> u64 {
        u64::from(number) << 32 | 1
    }

    #[test]
    fn the_last_calls_are_kept_in_order_also_where_numbers_begin_again() {
        let ring = Ring::default();
        assert_eq!((ring.last(0, 9), ring.get(0)), (vec![], None));
        let first = u32::MAX - 5000;
        for i in 0..10_000 {
            ring.write(stamp(first.wrapping_add(i)), [u64::from(i), 7], u64::from(i) * 4);
            ring.over(first.wrapping_add(i));
        }
        let newest = first.wrapping_add(9_999);
        let all = ring.last(newest, usize::MAX);
        let counts: Vec<u64> = all.iter().map(|call| call.count).collect();
        assert_eq!(counts, (10_000 - RECORDED as u64..10_000).collect::<Vec<u64>>());
        assert!(
            all.is_sorted_by_key(|call| call.begun) && all.iter().all(|call| call.over >= call.begun && call.begun > 0)
        );
        assert_eq!(ring.last(newest, 2).iter().map(Recorded::number).collect::<Vec<_>>(), [newest - 1, newest]);
        assert_eq!(ring.get(newest.wrapping_add(1)), None, "another is in its place");
    }

    #[test]
    fn short_calls_have_times_where_they_wait_and_one_in_sixteen() {
        let ring = Ring::default();
        for number in 1..=40 {
            ring.write(stamp(number), [1, 7], 4);
            if number == 20 {
                ring.waits(number);
                ring.waits(number);
            }
            ring.over(number);
        }
        let timed = |call: &Recorded| (call.begun > 0).then_some(call.number());
        let all = ring.last(40, 100);
        assert_eq!(all.iter().filter_map(timed).collect::<Vec<_>>(), [16, 20, 32]);
        assert!(all.iter().all(|call| (call.begun > 0) == (call.over > 0) && call.over >= call.begun));
    }

    #[test]
    fn a_call_that_is_written_meanwhile_is_read_whole_or_not_at_all() {
        let (ring, ended) = (Ring::default(), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for i in 0..400_000u32 {
                    ring.write(stamp(i), [u64::from(i), !u64::from(i)], 0);
                }
                ended.store(true, Ordering::Release);
            });
            while !ended.load(Ordering::Acquire) {
                for call in (0..RECORDED).filter_map(|at| {
                    let segment = ring.segments[at / TOGETHER].get()?;
                    let stamp = segment.entries[at % TOGETHER].stamp.load(Ordering::Relaxed);
                    ring.get((stamp >> 32) as u32)
                }) {
                    assert_eq!((call.count, call.kind), (u64::from(call.number()), !u64::from(call.number())));
                }
            }
        });
    }
}
