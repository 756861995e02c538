//! Cuts a buffer: segments into windows, windows into parts.
//!
//! ```text
//! segment  |------------------------------ count ------------------------------|
//! windows  |--------- 0 ---------|--------- 1 ---------|--------- 2 ----------|    as equal as possible
//! parts    |- 0 -|- 1 -|- 2 -|-3-|- 0 -|- 1 -|- 2 -|-3-|- 0 -|- 1 -|- 2 -|-3-|    each at most one message
//! ```
//! All divisions are in [`Partition::new`], and none is needed for fewer elements than parts or for one part: an 8-byte
//! all_reduce takes this path.

use std::ops::Range;

/// Borders are multiples of this many bytes when windows are large: a cache line, and the widest vector register.
const ALIGN: usize = 64;
/// Bytes per part from which borders are aligned; below, one line more or less would unbalance the parts.
const ALIGNED_PART: usize = 4 << 10;

/// The cut of one segment. Two ranks with the same arguments get the same cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Partition {
    count: usize,
    elem_size: usize,
    parts: usize,
    windows: usize,
    /// Elements per unit; borders lie on multiples of it (or at the end).
    #[doc(hidden)]
    pub unit: usize,
    /// Units of a small window.
    #[doc(hidden)]
    pub base: usize,
    /// The first `extra` windows have `base + 1` units.
    #[doc(hidden)]
    pub extra: usize,
    /// Cut of a window of `base` units (`large`: of `base + 1`).
    #[doc(hidden)]
    pub small: Cut,
    #[doc(hidden)]
    pub large: Cut,
}

/// `units` over the parts: each gets `each`, the first `more` of them one more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[doc(hidden)]
pub struct Cut {
    pub each: usize,
    pub more: usize,
}

impl Cut {
    fn new(units: usize, parts: usize) -> Cut {
        if units < parts {
            return Cut { each: 0, more: units };
        }
        let each = if parts == 1 { units } else { units / parts };
        Cut { each, more: units - each * parts }
    }

    /// Units before part `p`.
    #[inline]
    fn before(self, p: usize) -> usize {
        p * self.each + p.min(self.more)
    }
}

impl Partition {
    /// Cuts segments of `count` elements of `elem_size` bytes into windows of `parts` parts of at most `max_message`
    /// bytes.
    ///
    /// A part holds at least one element, even if `max_message` is smaller than that. `parts` and `elem_size` of 0
    /// count as 1.
    pub fn new(count: usize, elem_size: usize, parts: usize, max_message: usize) -> Partition {
        let (elem_size, parts) = (elem_size.max(1), parts.max(1));
        // Elements per cache line; 1 (never aligned) for sizes that do not divide it.
        let line =
            if elem_size.is_power_of_two() && elem_size <= ALIGN { ALIGN >> elem_size.trailing_zeros() } else { 1 };
        let max_part = if elem_size.is_power_of_two() {
            max_message >> elem_size.trailing_zeros()
        } else {
            max_message / elem_size
        }
        .max(1);
        // `line` is a power of two.
        let aligned = max_part & !(line - 1);
        if aligned > 0 {
            let windows = windows(count, parts.saturating_mul(aligned));
            let window = if windows == 1 { count } else { count / windows };
            if window.saturating_mul(elem_size) >= parts.saturating_mul(ALIGNED_PART) {
                return Partition::with_unit(count, elem_size, parts, windows, line);
            }
        }
        let windows = windows(count, parts.saturating_mul(max_part));
        Partition::with_unit(count, elem_size, parts, windows, 1)
    }

    fn with_unit(count: usize, elem_size: usize, parts: usize, windows: usize, unit: usize) -> Partition {
        let units = if unit == 1 { count } else { count.div_ceil(unit) };
        let base = if windows == 1 { units } else { units / windows };
        let extra = units - base * windows;
        let small = Cut::new(base, parts);
        let large = if extra == 0 { small } else { Cut::new(base + 1, parts) };
        Partition { count, elem_size, parts, windows, unit, base, extra, small, large }
    }

    /// Elements per segment.
    #[inline]
    pub fn count(&self) -> usize {
        self.count
    }

    /// Bytes per element.
    #[inline]
    pub fn elem_size(&self) -> usize {
        self.elem_size
    }

    /// Number of windows: at least 1, also for an empty segment (its messages are headers only).
    #[inline]
    pub fn windows(&self) -> usize {
        self.windows
    }

    /// Elements of the largest window: what one segment of scratch memory must hold.
    #[inline]
    pub fn largest_window(&self) -> usize {
        self.window(0).len()
    }

    /// Elements of window `w`, as offsets within a segment. Empty at the end from `windows()` on.
    #[inline]
    pub fn window(&self, w: usize) -> Range<usize> {
        self.border(self.units_before(w))..self.border(self.units_before(w.saturating_add(1)))
    }

    /// Elements of part `p` of window `w`, as offsets within a segment. Empty from `parts` on.
    #[inline]
    pub fn part(&self, w: usize, p: usize) -> Range<usize> {
        self.parts(w, p..p.saturating_add(1))
    }

    /// Elements of several neighbouring parts of window `w`, as offsets within a segment.
    #[inline]
    pub fn parts(&self, w: usize, parts: Range<usize>) -> Range<usize> {
        let start = self.units_before(w);
        let cut = if w < self.extra { self.large } else { self.small };
        if w >= self.windows {
            return self.count..self.count;
        }
        let (first, end) = (parts.start.min(self.parts), parts.end.min(self.parts));
        self.border(start + cut.before(first))..self.border(start + cut.before(end))
    }

    /// Offset of a part in a segment of scratch memory, which is one window long: its offset in the first window, where
    /// every part is longest. So parts never overlap in any window, and lanes that work on different parts may be in
    /// different windows.
    #[inline]
    pub fn scratch_start(&self, part: usize) -> usize {
        let cut = if self.extra > 0 { self.large } else { self.small };
        self.border(cut.before(part.min(self.parts)))
    }

    /// Elements of the given parts over all windows.
    pub fn total(&self, parts: Range<usize>) -> u64 {
        let (first, end) = (parts.start.min(self.parts), parts.end.min(self.parts));
        let units = |cut: Cut| (cut.before(end).saturating_sub(cut.before(first))) as u128;
        let whole = self.extra as u128 * units(self.large) + (self.windows - self.extra) as u128 * units(self.small);
        let last = if self.small.each == 0 { self.small.more } else { self.parts };
        // The last unit of the last window may be cut short; it belongs to the last part that has any.
        let all = (self.base as u128 * self.windows as u128 + self.extra as u128) * self.unit as u128;
        let missing = if first < last && last <= end { all - self.count as u128 } else { 0 };
        (whole * self.unit as u128 - missing) as u64
    }

    /// Bytes of the given parts over all windows.
    pub fn total_bytes(&self, parts: Range<usize>) -> u64 {
        self.total(parts).saturating_mul(self.elem_size as u64)
    }

    /// Units before window `w`.
    #[inline]
    fn units_before(&self, w: usize) -> usize {
        let w = w.min(self.windows);
        w * self.base + w.min(self.extra)
    }

    /// Element offset of a border.
    #[inline]
    fn border(&self, units: usize) -> usize {
        units.saturating_mul(self.unit).min(self.count)
    }
}

/// Windows of at most `capacity` elements.
fn windows(count: usize, capacity: usize) -> usize {
    if count <= capacity { 1 } else { count.div_ceil(capacity) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn elem_size() -> impl Strategy<Value = usize> {
        prop_oneof![Just(1usize), Just(2), Just(4), Just(8)]
    }

    #[test]
    fn an_empty_segment_has_one_window_of_empty_parts() {
        let p = Partition::new(0, 4, 3, 1 << 10);
        assert_eq!((p.windows(), p.window(0), p.part(0, 2), p.largest_window()), (1, 0..0, 0..0, 0));
    }

    #[test]
    fn small_counts_are_balanced_by_element() {
        let p = Partition::new(10, 4, 4, 1 << 20);
        let parts: Vec<_> = (0..4).map(|i| p.part(0, i)).collect();
        assert_eq!(parts, [0..3, 3..6, 6..8, 8..10]);
    }

    #[test]
    fn large_windows_have_aligned_borders() {
        let p = Partition::new(100_001, 4, 3, 64 << 10);
        assert_eq!(p.windows(), 3);
        for w in 0..3 {
            for i in 0..3 {
                assert_eq!(p.part(w, i).start % 16, 0);
            }
        }
        assert_eq!(p.window(2).end, 100_001);
    }

    #[test]
    fn two_gigabytes_and_the_end_of_the_address_space() {
        for (count, size) in [(3usize << 30, 4), (usize::MAX, 1), (usize::MAX / 8, 8), (usize::MAX - 1, 1)] {
            let p = Partition::new(count, size, 7, 256 << 10);
            let last = p.windows() - 1;
            assert_eq!(p.part(last, 6).end, count);
            assert_eq!(p.part(0, 0).start, 0);
            assert_eq!(p.total(0..7), count as u64);
            assert!(p.part(last, 6).len() * size <= 256 << 10);
        }
        let p = Partition::new(usize::MAX, 1, 1, usize::MAX);
        assert_eq!((p.windows(), p.part(0, 0)), (1 + usize::from(p.windows() == 2), p.window(0)));
    }

    #[test]
    fn nonsense_arguments_do_not_panic() {
        let p = Partition::new(5, 0, 0, 0);
        assert_eq!(p.windows(), 5);
        assert_eq!(p.part(9, 9), 5..5);
        assert_eq!(p.part(0, usize::MAX), 1..1);
        assert_eq!(p.window(usize::MAX), 5..5);
        let _ = Partition::new(usize::MAX, usize::MAX, usize::MAX, usize::MAX).part(0, usize::MAX - 1);
    }

    proptest! {
        #[test]
        fn windows_and_parts_cover_in_order(
            count in 0usize..300_000, size in elem_size(), parts in 1usize..20, max in 8usize..70_000,
        ) {
            let p = Partition::new(count, size, parts, max);
            let mut at = 0;
            let (mut low, mut high) = (usize::MAX, 0);
            for w in 0..p.windows() {
                let window = p.window(w);
                prop_assert_eq!(window.start, at);
                prop_assert!(window.len() <= p.largest_window());
                (low, high) = (low.min(window.len()), high.max(window.len()));
                let mut lens = vec![];
                for i in 0..parts {
                    let part = p.part(w, i);
                    prop_assert_eq!(part.start, at);
                    prop_assert!(part.len() * size <= max);
                    let scratch = p.scratch_start(i);
                    let next = if i + 1 < parts { p.scratch_start(i + 1) } else { p.largest_window() };
                    prop_assert!(scratch + part.len() <= next, "part {i} of window {w} runs into the next in scratch memory");
                    lens.push(part.len());
                    at = part.end;
                }
                prop_assert_eq!(at, window.end);
                let slack = if p.unit == 1 { 1 } else { 2 * 64 / size };
                prop_assert!(lens.iter().max().unwrap() - lens.iter().min().unwrap() <= slack);
                // Only if a part and a line more fit in a message.
                let room = window.len() * size / parts + 64 <= max;
                if window.len() * size >= parts * ALIGNED_PART + 64 && p.windows() == 1 && room {
                    prop_assert!((0..parts).all(|i| (p.part(w, i).start * size).is_multiple_of(64)));
                }
            }
            prop_assert_eq!(at, count);
            prop_assert!(high - low <= 2 * p.unit);
            prop_assert!(p.windows() >= 1);
            // No more windows than needed, up to alignment.
            prop_assert!(p.windows() == 1 || (p.windows() - 1) * parts * (max / size) / 64 * 63 / 2 < count);
        }

        #[test]
        fn totals_are_sums_over_windows(
            count in 0usize..200_000, size in elem_size(), parts in 1usize..12, max in 64usize..30_000,
            a in 0usize..12, b in 0usize..12,
        ) {
            let p = Partition::new(count, size, parts, max);
            let (a, b) = (a.min(b), a.max(b));
            let sum: usize = (0..p.windows()).map(|w| (a..b).map(|i| p.part(w, i).len()).sum::<usize>()).sum();
            prop_assert_eq!(p.total(a..b), sum as u64);
            prop_assert!((0..p.windows()).all(|w| p.parts(w, a..b).len() == (a..b).map(|i| p.part(w, i).len()).sum::<usize>()));
        }

        #[test]
        fn near_the_end_of_the_address_space(
            below in 0usize..10_000, size in elem_size(), parts in 1usize..100_000, max in 4096usize..(16 << 20), at in 0usize..1000,
        ) {
            let count = (usize::MAX - below) / size;
            let p = Partition::new(count, size, parts, max);
            let w = p.windows() - 1 - at.min(p.windows() - 1);
            let i = at % parts;
            prop_assert!(p.part(w, i).len() * size <= max);
            prop_assert_eq!(p.part(w, 0).start, p.window(w).start);
            prop_assert_eq!(p.part(w, parts - 1).end, p.window(w).end);
            prop_assert_eq!(p.window(p.windows() - 1).end, count);
            prop_assert_eq!(p.total(0..parts), count as u64);
        }
    }
}
