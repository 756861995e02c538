//! A bounded list that keeps the most recent events.

use super::event::Event;

#[derive(Debug)]
pub(super) struct Ring {
    events: Vec<Event>,
    capacity: usize,
    /// Oldest event, once the list is full.
    oldest: usize,
    dropped: u64,
}

impl Ring {
    /// Room for `capacity` events. The memory is reserved but not touched before it is used.
    pub(super) fn new(capacity: usize) -> Ring {
        let mut events = Vec::new();
        let mut capacity = capacity.max(1);
        while events.try_reserve_exact(capacity).is_err() && capacity > 1 {
            capacity /= 2;
        }
        Ring { events, capacity, oldest: 0, dropped: 0 }
    }

    #[inline]
    pub(super) fn push(&mut self, event: Event) {
        if self.events.len() < self.capacity {
            self.events.push(event);
        } else if let Some(slot) = self.events.get_mut(self.oldest) {
            *slot = event;
            self.oldest = if self.oldest + 1 == self.capacity { 0 } else { self.oldest + 1 };
            self.dropped += 1;
        }
    }

    /// The events in the order they were recorded, and how many were lost before them; leaves the list empty.
    pub(super) fn take(&mut self, f: impl FnOnce(&mut [Event], u64)) {
        self.events.rotate_left(self.oldest);
        f(&mut self.events, self.dropped);
        self.events.clear();
        self.oldest = 0;
        self.dropped = 0;
    }

    pub(super) fn is_empty(&self) -> bool {
        self.events.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::super::event::{Content, Span, Track};
    use super::*;

    fn at(begin: u64) -> Event {
        Event { begin, end: begin + 1, track: Track::Calls, content: Content::Span(Span::Start) }
    }

    fn taken(ring: &mut Ring) -> (Vec<u64>, u64) {
        let mut out = (Vec::new(), 0);
        ring.take(|events, dropped| out = (events.iter().map(|e| e.begin).collect(), dropped));
        out
    }

    #[test]
    fn a_full_list_keeps_the_most_recent_and_counts_the_rest() {
        let mut ring = Ring::new(4);
        (0..3).for_each(|t| ring.push(at(t)));
        assert_eq!(taken(&mut ring), (vec![0, 1, 2], 0));
        assert!(ring.is_empty());
        (10..21).for_each(|t| ring.push(at(t)));
        assert_eq!(taken(&mut ring), (vec![17, 18, 19, 20], 7));
        (30..34).for_each(|t| ring.push(at(t)));
        assert_eq!(taken(&mut ring), (vec![30, 31, 32, 33], 0));
    }

    #[test]
    fn it_never_grows() {
        let mut ring = Ring::new(1000);
        let memory = ring.events.capacity();
        (0..10_000).for_each(|t| ring.push(at(t)));
        assert_eq!(ring.events.capacity(), memory);
        assert_eq!(Ring::new(0).capacity, 1);
    }
}
