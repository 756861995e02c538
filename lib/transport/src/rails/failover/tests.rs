//! Two machines, a sender's and a receiver's, joined by streams in memory that are cut, stall and are replaced at any
//! step.

use std::collections::{BTreeMap, VecDeque};

use proptest::prelude::*;

use super::agreement::{Agreement, Ending, Loss, Notice, Order};
use super::slot::{Slot, State};
use super::unacked::{Counted, Unacked};

const POSITIONS: usize = 4;
/// Steps without a fault after which everything has arrived, or the connection has failed.
const BOUND: usize = 2000;

/// What goes over a stream. `None` in a pipe's place is its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Message {
    Fragment(u32),
    Ack(u64),
    Join,
    Notice(Notice, usize, u64),
}

/// One end of a connection, with what its connection keeps beside the agreement.
struct End {
    receives: bool,
    slots: Vec<Option<Slot>>,
    refused: Vec<usize>,
    outbox: VecDeque<Message>,
    failed: bool,
    /// Of the sender: fragments to send, those in flight by stream, and those that are over.
    queue: VecDeque<u32>,
    unacked: BTreeMap<usize, Unacked<u32>>,
    done: Vec<u32>,
    /// Of the receiver: what was read, by stream; fragments that were placed; numbers that were reported at last.
    counted: BTreeMap<usize, Counted>,
    placed: BTreeMap<u32, u32>,
}

impl Agreement for End {
    fn receives(&self) -> bool {
        self.receives
    }

    fn several(&self) -> bool {
        true
    }

    fn positions(&self) -> usize {
        POSITIONS
    }

    fn at(&self, position: usize) -> Option<&Slot> {
        self.slots[position].as_ref()
    }
}

impl End {
    fn new(receives: bool, streams: usize, fragments: u32) -> End {
        End {
            receives,
            slots: (0..POSITIONS).map(|n| (n < streams).then(|| Slot::new(n, State::Alive))).collect(),
            refused: Vec::new(),
            outbox: VecDeque::new(),
            failed: false,
            queue: (0..fragments).collect(),
            unacked: BTreeMap::new(),
            done: Vec::new(),
            counted: BTreeMap::new(),
            placed: BTreeMap::new(),
        }
    }

    fn slot(&self, number: usize) -> Option<&Slot> {
        self.at_position_of(number).filter(|slot| slot.number() == number)
    }

    /// Has another stream begin in a position.
    fn begin(&mut self, number: usize, state: State) {
        match &mut self.slots[number % POSITIONS] {
            Some(slot) => slot.renew(number, state),
            empty => *empty = Some(Slot::new(number, state)),
        }
    }

    fn remind(&mut self) {
        let notices: Vec<_> = self.unanswered().map(|(notice, about)| Message::Notice(notice, about, 0)).collect();
        self.outbox.extend(notices);
    }
}

/// The socket pair of a stream.
#[derive(Default)]
struct Pipe {
    /// Towards the receiver, and towards the sender.
    under_way: [VecDeque<Message>; 2],
    /// This end writes no more; the other one reads the end behind what is under way.
    ended: [bool; 2],
    /// The end was read.
    read: [bool; 2],
    /// Each end finds the socket broken.
    broken: [bool; 2],
    /// Nothing gets through, and the ends that have written something see that.
    stalled: bool,
    seen: [bool; 2],
    /// It never moves again.
    dead: bool,
}

impl Pipe {
    /// From now on nothing gets through: an end sees that if something of its own is under way.
    fn stall(&mut self, forever: bool) {
        if !self.stalled {
            self.seen = [SENDER, RECEIVER].map(|end| !self.under_way[end].is_empty());
        }
        self.stalled = true;
        self.dead |= forever;
    }

    fn moves(&mut self) {
        if !self.dead {
            (self.stalled, self.seen) = (false, [false; 2]);
        }
    }
}

struct World {
    ends: [End; 2],
    pipes: BTreeMap<usize, Pipe>,
    /// Streams that the sender has and the receiver has not accepted yet.
    late: Vec<usize>,
}

const SENDER: usize = 0;
const RECEIVER: usize = 1;

impl World {
    fn new(streams: usize, fragments: u32) -> World {
        World {
            ends: [End::new(false, streams, fragments), End::new(true, streams, 0)],
            pipes: (0..streams).map(|n| (n, Pipe::default())).collect(),
            late: Vec::new(),
        }
    }

    /// Shuts an end's socket: it reads nothing more, and the peer reads what is under way and then the end.
    fn shut(&mut self, end: usize, number: usize) {
        if let Some(pipe) = self.pipes.get_mut(&number) {
            pipe.ended[end] = true;
            pipe.under_way[1 - end].clear();
            pipe.read[1 - end] = true;
        }
    }

    fn fail(&mut self, end: usize) {
        self.ends[end].failed = true;
        for number in self.pipes.keys().copied().collect::<Vec<_>>() {
            self.shut(end, number);
        }
    }

    fn failure(&mut self, end: usize, number: usize) {
        match self.ends[end].handle_failure(number) {
            Loss::Known => {}
            Loss::Unconfirmed => self.shut(end, number),
            Loss::Last => self.fail(end),
            Loss::Retiring => {
                self.shut(end, number);
                self.ends[end].remind();
            }
        }
    }

    fn end_of(&mut self, end: usize, number: usize) {
        match self.ends[end].handle_end(number) {
            Ending::Unconfirmed => {}
            Ending::Last => self.fail(end),
            Ending::Others => self.ends[end].remind(),
        }
    }

    /// Writes one message over a stream, if there is one and the stream takes it.
    fn write(&mut self, end: usize, number: usize) {
        let own = &mut self.ends[end];
        let Some(slot) = own.slots[number % POSITIONS].as_ref().filter(|slot| slot.number() == number) else { return };
        if own.failed || !slot.is(State::Alive) || own.is_avoided(slot) {
            return;
        }
        if self.pipes.get(&number).is_some_and(|pipe| pipe.broken[end]) {
            return self.failure(end, number);
        }
        let message = match own.outbox.pop_front() {
            Some(message) => message,
            None if own.receives => {
                let Some(counted) = own.counted.get(&number) else { return };
                Message::Ack(counted.fragments())
            }
            None => {
                let Some(fragment) = own.queue.pop_front() else { return };
                own.unacked.entry(number).or_default().push(fragment);
                Message::Fragment(fragment)
            }
        };
        if let Some(pipe) = self.pipes.get_mut(&number) {
            pipe.seen[end] |= pipe.stalled;
            if pipe.ended[end] {
                // A relay has closed it, and resets what comes.
                pipe.broken[end] = true;
            } else {
                pipe.under_way[end].push_back(message);
            }
        }
    }

    /// Reads one message, the end or the failure of a stream.
    fn read(&mut self, end: usize, number: usize) -> Result<(), TestCaseError> {
        let from = 1 - end;
        let Some(pipe) = self.pipes.get_mut(&number) else { return Ok(()) };
        if self.ends[end].failed || pipe.read[from] || (pipe.stalled && !pipe.broken[end]) {
            return Ok(());
        }
        if self.ends[end].slot(number).is_none_or(|slot| slot.is(State::Retired)) {
            return Ok(());
        }
        if pipe.broken[end] {
            pipe.read[from] = true;
            self.failure(end, number);
            return Ok(());
        }
        let Some(message) = pipe.under_way[from].pop_front() else {
            if pipe.ended[from] {
                pipe.read[from] = true;
                self.end_of(end, number);
            }
            return Ok(());
        };
        match message {
            Message::Join => drop(self.ends[end].slot(number).map(|slot| slot.advance(State::Alive))),
            Message::Fragment(fragment) => {
                let own = &mut self.ends[end];
                own.counted.entry(number).or_default().read(false);
                *own.placed.entry(fragment).or_default() += 1;
                prop_assert_eq!(own.placed[&fragment], 1, "fragment {} was placed twice", fragment);
            }
            Message::Ack(fragments) => {
                let own = &mut self.ends[end];
                if own.slot(number).is_some_and(|slot| !slot.is(State::Retired)) {
                    let over = own.unacked.entry(number).or_default().handle_ack(fragments, false);
                    own.done.extend(over.map_err(|most| TestCaseError::fail(format!("{fragments} of {most}")))?);
                }
            }
            Message::Notice(notice, about, count) => self.notice(end, number, (notice, about, count))?,
        }
        Ok(())
    }

    fn notice(
        &mut self,
        end: usize,
        over: usize,
        (notice, about, count): (Notice, usize, u64),
    ) -> Result<(), TestCaseError> {
        let mut refused = std::mem::take(&mut self.ends[end].refused);
        let order = self.ends[end].handle_notice(&mut refused, over, notice, about);
        self.ends[end].refused = refused;
        let order = order.map_err(|e| TestCaseError::fail(format!("{e:?}: {notice:?} about {about} over {over}")))?;
        match order {
            Order::Nothing => {}
            Order::Refuse => self.ends[end].outbox.push_back(Message::Notice(Notice::RetireAck, about, 0)),
            Order::Fail => self.failure(end, about),
            Order::Retire => self.stall(end, about),
            Order::StopReading => {
                self.shut(end, about);
                let own = &mut self.ends[end];
                let read = own.counted.get(&about).map_or(0, |counted| counted.fragments());
                own.outbox.push_back(Message::Notice(Notice::RetireAck, about, read));
                own.remind();
            }
            Order::Acked => {
                let own = &mut self.ends[end];
                let slot = own.slots[about % POSITIONS].as_ref().expect("a stream has the position");
                if own.handle_retire_ack(slot) {
                    let mut unacked = own.unacked.remove(&about).unwrap_or_default();
                    let over = unacked.handle_ack(count, false);
                    own.done.extend(over.map_err(|most| TestCaseError::fail(format!("{count} of {most}")))?);
                    own.queue.extend(unacked.take());
                    self.shut(end, about);
                }
            }
        }
        Ok(())
    }

    fn stall(&mut self, end: usize, number: usize) {
        if self.ends[end].handle_stall(number) || self.ends[end].receives {
            self.ends[end].remind();
        }
    }

    /// Does what the health check of an end does: suspects what stalls, and fails over what has ended.
    fn check(&mut self, end: usize) {
        if self.ends[end].failed {
            return;
        }
        let slots: Vec<(usize, bool)> =
            self.ends[end].slots.iter().flatten().map(|slot| (slot.number(), slot.is(State::Ended))).collect();
        for (number, ended) in slots {
            let stalled = self.pipes.get(&number).is_some_and(|pipe| pipe.stalled && pipe.seen[end]);
            if let Some(slot) = self.ends[end].slot(number) {
                slot.suspect(stalled);
            }
            if ended && self.ends[end].live().next().is_some() {
                self.failure(end, number);
            } else if stalled {
                self.stall(end, number);
            }
        }
        self.ends[end].remind();
    }

    /// Dials a stream again in a position. `how`: both ends get it, the receiver's alone, the sender's alone, or the
    /// receiver's later.
    fn redial(&mut self, position: usize, how: u8) {
        let next = self.ends.iter().filter_map(|end| end.at(position)).map(Slot::number).max();
        let next = next.map_or(position, |number| number + POSITIONS);
        if self.ends.iter().any(|end| end.failed || !end.admits(&end.refused, next)) {
            return;
        }
        let mut pipe = Pipe::default();
        if how == 1 {
            pipe.ended[SENDER] = true;
        } else {
            self.ends[SENDER].begin(next, State::Alive);
            pipe.under_way[SENDER].push_back(Message::Join);
        }
        match how {
            2 => pipe.broken[SENDER] = true,
            3 => self.late.push(next),
            _ => self.ends[RECEIVER].begin(next, State::New),
        }
        self.pipes.insert(next, pipe);
    }

    /// The receiver accepts a stream, or refuses it.
    fn accept(&mut self) {
        let Some(number) = self.late.pop() else { return };
        let receiver = &mut self.ends[RECEIVER];
        if !receiver.failed && receiver.admits(&receiver.refused, number) {
            receiver.begin(number, State::New);
        } else {
            self.shut(RECEIVER, number);
        }
    }

    fn numbers(&self) -> Vec<usize> {
        self.pipes.keys().copied().collect()
    }

    /// Does one random thing.
    fn step(&mut self, (what, which, end): (u8, prop::sample::Index, bool)) -> Result<(), TestCaseError> {
        let numbers = self.numbers();
        let number = numbers[which.index(numbers.len())];
        let end = usize::from(end);
        match what {
            0..=7 => self.write(end, number),
            8..=17 => self.read(end, number)?,
            // Both directions break, and what is under way is lost.
            18 => {
                let pipe = self.pipes.get_mut(&number).expect("listed");
                pipe.moves();
                if !pipe.dead {
                    pipe.broken = [true; 2];
                    pipe.under_way.iter_mut().for_each(VecDeque::clear);
                }
            }
            // A relay closes it: what is under way arrives.
            19 => self.pipes.get_mut(&number).expect("listed").ended = [true; 2],
            20 => self.pipes.get_mut(&number).expect("listed").moves(),
            21 | 22 => self.pipes.get_mut(&number).expect("listed").stall(what == 22),
            23 => self.accept(),
            24 | 25 => self.check(end),
            _ => self.redial(which.index(POSITIONS), what - 26),
        }
        Ok(())
    }

    /// Lets time pass without faults until nothing happens any more. True if all has arrived, false if the connection
    /// has failed.
    fn settle(&mut self) -> Result<bool, TestCaseError> {
        self.pipes.values_mut().for_each(Pipe::moves);
        while !self.late.is_empty() {
            self.accept();
        }
        for round in 0..BOUND {
            for end in [SENDER, RECEIVER] {
                self.check(end);
            }
            for number in self.numbers() {
                for end in [SENDER, RECEIVER] {
                    for _ in 0..4 {
                        self.write(end, number);
                        self.read(end, number)?;
                    }
                }
            }
            let [sender, receiver] = &self.ends;
            if sender.failed && receiver.failed {
                return Ok(false);
            }
            let over =
                sender.queue.is_empty() && sender.unacked.values().all(|unacked| unacked.iter().next().is_none());
            // With no stream that works the owner gives up.
            let works = |end: &End| end.live().any(|slot| !self.pipes[&slot.number()].dead);
            if !works(sender) || !works(receiver) {
                return Ok(false);
            }
            if over && !sender.failed && !receiver.failed && round > POSITIONS {
                return Ok(true);
            }
        }
        let [sender, receiver] = &self.ends;
        Err(TestCaseError::fail(format!(
            "no end after {BOUND} rounds: failed {} {}, queue {:?}, unacked {:?}, slots {:?} {:?}",
            sender.failed, receiver.failed, sender.queue, sender.unacked, sender.slots, receiver.slots
        )))
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 20_000, ..ProptestConfig::default() })]

    #[test]
    fn every_fragment_is_placed_once_or_both_ends_fail(
        streams in 1usize..=POSITIONS,
        fragments in 0u32..40,
        steps in prop::collection::vec((0u8..30, any::<prop::sample::Index>(), any::<bool>()), 0..300),
    ) {
        let mut world = World::new(streams, fragments);
        for step in steps {
            world.step(step)?;
        }
        let whole = world.settle()?;
        let [sender, receiver] = &world.ends;
        if whole {
            let all: Vec<u32> = (0..fragments).collect();
            let mut done = sender.done.clone();
            done.sort_unstable();
            prop_assert_eq!(&done, &all);
            prop_assert_eq!(receiver.placed.keys().copied().collect::<Vec<_>>(), all);
        }
    }

    #[test]
    fn an_acknowledgement_ends_the_oldest_fragments_once(acks in prop::collection::vec(0u64..12, 0..20)) {
        let mut unacked = Unacked::default();
        (0..8).for_each(|n| unacked.push(n));
        let mut over = Vec::new();
        for ack in acks {
            match unacked.handle_ack(ack, false) {
                Ok(more) => over.extend(more),
                Err(most) => prop_assert!(most == 8 && ack > 8),
            }
        }
        prop_assert_eq!(&over, &(0..over.len() as u64).collect::<Vec<_>>());
        prop_assert_eq!(unacked.take(), (over.len() as u64..8).collect::<Vec<_>>());
    }
}

#[test]
fn a_state_only_moves_down() {
    let slot = Slot::new(0, State::New);
    assert!(slot.advance(State::Alive) && slot.is(State::Alive));
    assert!(slot.advance(State::Retiring) && !slot.advance(State::Ended) && slot.is(State::Retiring));
    assert!(slot.advance(State::Retired) && !slot.advance(State::Retired));
    slot.renew(4, State::New);
    assert!(slot.is(State::New) && slot.number() == 4);
}

#[test]
fn short_fragments_are_acknowledged_together() {
    let mut counted = Counted::default();
    assert!((1..16).all(|_| counted.read(true).is_none()));
    assert_eq!((counted.read(true), counted.read(false), counted.read(true)), (Some(16), Some(17), None));
    assert_eq!(counted.fragments(), 18);
}

#[test]
fn a_stream_that_was_refused_is_not_accepted_later() {
    let (receiver, mut refused) = (End::new(true, 1, 0), Vec::new());
    for _ in 0..2 {
        assert_eq!(receiver.handle_notice(&mut refused, 0, Notice::Retire, 1), Ok(Order::Refuse));
    }
    assert_eq!(refused, [1]);
    assert!(!receiver.admits(&refused, 1) && receiver.admits(&refused, 1 + POSITIONS));
    // The sender's notices, and those about the stream that they come over, are not for this end.
    assert!(receiver.handle_notice(&mut refused, 0, Notice::StreamFailed, 0).is_err());
    assert!(receiver.handle_notice(&mut refused, 0, Notice::Retire, 0).is_err());
}

#[test]
fn the_last_stream_that_works_is_not_retired() {
    let sender = End::new(false, 2, 0);
    let slot = |number| sender.slot(number).expect("begun");
    assert!(slot(1).suspect(true));
    assert!(!sender.handle_stall(0), "the other one stalls");
    assert!(sender.handle_stall(1) && !sender.handle_stall(1));
    assert!(sender.unanswered().eq([(Notice::Retire, 1)]));
    assert_eq!(sender.handle_failure(0), Loss::Last);
    assert!(sender.handle_retire_ack(slot(1)) && !sender.handle_retire_ack(slot(1)));
}
