//! The agreement in every order of calls, messages and deaths.

use super::model::{Protocol, explore};
use super::{Event, Member, Message, Out, Outcome};

impl Protocol for Member {
    type Message = Message;

    fn new(rank: usize, size: usize, value: u64) -> Member {
        Member::new(rank, size, value)
    }

    fn step(&mut self, event: Event, out: &mut Out) {
        Member::step(self, event, out);
    }

    fn decided(&self) -> Option<&Outcome> {
        self.decided.as_ref()
    }
}

fn holds(ranks: usize, crashes: usize) {
    match explore::<Member>(ranks, crashes) {
        Ok(states) => println!("{ranks} ranks, up to {crashes} deaths: {states} states, all of them right"),
        Err(run) => panic!("{ranks} ranks, up to {crashes} deaths: {run}"),
    }
}

#[test]
fn step_agrees_when_no_rank_dies() {
    holds(1, 0);
    holds(3, 0);
}

#[test]
fn step_agrees_whichever_rank_dies() {
    holds(2, 1);
    holds(3, 1);
    holds(4, 1);
}

#[test]
fn step_agrees_whichever_two_ranks_die() {
    holds(3, 2);
}
