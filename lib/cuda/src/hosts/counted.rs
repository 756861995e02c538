//! Progress of calls, from the numbers of the calls that they are made of.

use std::collections::VecDeque;

use crate::path::Progress;

/// Calls that are remembered at most.
const MOST: usize = 4096;

/// The last calls, each with the number of the last call inside the host that was made by then.
#[derive(Debug, Default)]
pub(super) struct Counted {
    calls: VecDeque<(u32, u32)>,
}

/// Returns true if number `a` is `b` or came before it; numbers begin again.
fn up_to(a: u32, b: u32) -> bool {
    b.wrapping_sub(a) as i32 >= 0
}

impl Counted {
    pub(super) fn note(&mut self, number: u32, inside: u32) {
        if self.calls.len() == MOST {
            self.calls.pop_front();
        }
        self.calls.push_back((number, inside));
    }

    /// Progress of the calls, where those inside are as far as `inner`, and those between hosts as far as `outer`, of
    /// which the last one belongs to call `last`.
    pub(super) fn progress(&self, inner: Progress, (outer, last): (Progress, u32)) -> Progress {
        let Some(&(newest, made)) = self.calls.back() else { return outer };
        // Before the first call inside there is nothing to wait for.
        let over = inner.finished.or((made == 0).then_some(0));
        let finished = over.and_then(|over| self.calls.iter().rev().find(|(_, inside)| up_to(*inside, over)));
        let between = outer.finished.map(|over| if over == last { newest } else { over });
        let finished = match (finished, between) {
            (Some(&(a, _)), Some(b)) => Some(if up_to(a, b) { a } else { b }),
            _ => None,
        };
        let inside = inner.begun.filter(|&begun| begun != 0 && up_to(begun, made));
        let inside = inside.and_then(|begun| self.calls.iter().find(|(_, inside)| up_to(begun, *inside)));
        let begun = match (inside, outer.begun) {
            (Some(&(a, _)), Some(b)) => Some(if up_to(a, b) { b } else { a }),
            (one, other) => one.map(|one| one.0).or(other),
        };
        Progress { begun, finished }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(begun: u32, finished: u32) -> Progress {
        Progress { begun: Some(begun), finished: Some(finished) }
    }

    #[test]
    fn a_call_is_over_when_all_its_calls_are() {
        let mut counted = Counted::default();
        // Two calls inside each, and a message inside alone.
        for (number, inside) in [(1, 2), (2, 4), (3, 5)] {
            counted.note(number, inside);
        }
        // The second is between the hosts.
        assert_eq!(counted.progress(at(3, 3), (at(2, 1), 2)), at(2, 1));
        // It has come, and is passed on inside.
        assert_eq!(counted.progress(at(4, 3), (at(2, 2), 2)), at(2, 1));
        assert_eq!(counted.progress(at(5, 4), (at(2, 2), 2)), at(3, 2));
        assert_eq!(counted.progress(at(5, 5), (at(2, 2), 2)), at(3, 3));
        // The path inside does not say.
        let unknown = Progress::default();
        assert_eq!(counted.progress(unknown, (at(2, 2), 2)), Progress { begun: Some(2), finished: None });
    }

    #[test]
    fn calls_that_are_not_divided_have_nothing_inside() {
        let mut counted = Counted::default();
        counted.note(1, 0);
        counted.note(2, 0);
        assert_eq!(counted.progress(Progress::default(), (at(2, 1), 2)), at(2, 1));
        assert_eq!(counted.progress(Progress::default(), (at(2, 2), 2)), at(2, 2));
    }

    #[test]
    fn numbers_begin_again() {
        let mut counted = Counted::default();
        counted.note(u32::MAX, u32::MAX - 1);
        counted.note(0, 1);
        assert_eq!(counted.progress(at(0, u32::MAX - 1), (at(0, u32::MAX), 0)), at(0, u32::MAX));
    }
}
