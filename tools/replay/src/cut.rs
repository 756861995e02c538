//! The end of a trace that a page has room for.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::path::Path;

use anyhow::Result;

use crate::events::{self, Event};

/// Slices that a page holds unless it is asked for another number: about 2 MB of page.
pub const EVENTS: usize = 60_000;

/// The part of a trace to show: slices that end after `from`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cut {
    /// Nanoseconds of the trace's clock.
    pub(crate) from: i64,
    /// Slices in the whole trace.
    pub(crate) slices: usize,
    /// Events that the ranks no longer had when they wrote.
    pub(crate) dropped: u64,
}

/// Finds the cut that leaves at most `most` slices, and none of a time for which a rank has forgotten its events.
pub(crate) fn find(path: &Path, most: usize) -> Result<Cut> {
    let mut search = Search { most: most.max(1), ..Search::default() };
    events::each(path, |event| search.event(&event))?;
    Ok(search.end())
}

#[derive(Debug, Default)]
struct Search {
    most: usize,
    /// The latest ends, the earliest of them on top.
    latest: BinaryHeap<Reverse<i64>>,
    slices: usize,
    dropped: u64,
    /// First slice of each process since it last reported how many events it dropped: a communicator's.
    block: BTreeMap<u64, i64>,
    /// Before this a rank has forgotten something.
    whole: Option<i64>,
}

impl Search {
    fn event(&mut self, event: &Event) {
        if event.is_slice() {
            self.slices += 1;
            let first = self.block.entry(event.pid).or_insert(i64::MAX);
            *first = (*first).min(event.end());
            self.latest.push(Reverse(event.end()));
            if self.latest.len() - 1 > self.most {
                self.latest.pop();
            }
        }
        let Some(dropped) = event.args.dropped else { return };
        let first = self.block.remove(&event.pid);
        if dropped > 0 {
            self.dropped += dropped;
            self.whole = self.whole.max(first);
        }
    }

    fn end(self) -> Cut {
        // One slice more than fits: all that fit end later.
        let fits = self.latest.peek().filter(|_| self.slices > self.most).map(|end| end.0);
        let from = fits.max(self.whole).unwrap_or(i64::MIN);
        Cut { from, slices: self.slices, dropped: self.dropped }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn search(most: usize, lines: &[&str]) -> Cut {
        let mut search = Search { most, ..Search::default() };
        for line in lines {
            search.event(&serde_json::from_str(line).unwrap());
        }
        search.end()
    }

    const A: &str = r#"{"ph":"X","pid":1,"ts":1.0,"dur":1.0}"#;
    const B: &str = r#"{"ph":"X","pid":1,"ts":3.0,"dur":1.0}"#;
    const C: &str = r#"{"ph":"X","pid":2,"ts":2.0,"dur":9.0}"#;
    const WRITTEN: &str = r#"{"ph":"i","pid":1,"ts":4.0,"args":{"dropped":0}}"#;
    const FORGOT: &str = r#"{"ph":"i","pid":1,"ts":4.0,"args":{"dropped":7}}"#;

    #[test]
    fn the_latest_stay() {
        let cut = |most| search(most, &[A, C, B, WRITTEN]);
        assert_eq!(cut(3), Cut { from: i64::MIN, slices: 3, dropped: 0 });
        assert_eq!(cut(2).from, 2000, "A ends there and is cut");
        assert_eq!(cut(1).from, 4000, "C ends last");
    }

    #[test]
    fn nothing_before_a_rank_remembers() {
        assert_eq!(search(9, &[C, A, B, FORGOT]), Cut { from: 2000, slices: 3, dropped: 7 });
        assert_eq!(search(9, &[C, A, WRITTEN, B, FORGOT]).from, 4000, "of the communicator that forgot");
    }
}
