//! Splitting: communicators over subsets of the ranks.

use std::sync::atomic::Ordering;

use crate::Comm;
use crate::state::State;
use crate::state::control::encode;
use crate::trace::{self, Span};
use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::threads::lock;

/// Each rank's message to the others: colour (or none), key, the number that its new communicator has if it is the
/// first in it; or why it does not take part.
type Vote = Result<(Option<u32>, i32, u32), String>;

impl Comm {
    /// Makes one communicator per colour, its ranks ordered by `key`, then by their rank here; `None` for ranks without
    /// a colour.
    ///
    /// Every rank of this communicator must call it.
    ///
    /// ```
    /// # extern crate tinynccl_comm as tinynccl;
    /// # tinynccl::comm::on_threads(4, |comm| {
    /// // Even and odd ranks.
    /// let half = comm.split(Some(comm.rank() as u32 % 2), 0)?.expect("every rank has a colour");
    /// assert_eq!((half.rank(), half.size()), (comm.rank() / 2, 2));
    /// # Ok(())
    /// # }).unwrap();
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] on every rank when one of them refused ([`Comm::refuse_split`]).
    pub fn split(&self, color: Option<u32>, key: i32) -> Result<Option<Comm>> {
        let inner = &self.inner;
        let state = &inner.state;
        state.check(|| OP.to_owned())?;
        inner.drain();
        let begin = trace::now();
        let control = &state.control;
        let vote: Vote = Ok((color, key, control.numbers().give()?));
        let votes: Vec<Vote> = state.exchange(&self.next_split(), &vote)?;
        let refused = |(rank, vote): (usize, Vote)| {
            vote.map_err(|why| Error::invalid(OP, format!("rank {rank} does not take part: {why}")))
        };
        let votes = votes.into_iter().enumerate().map(refused).collect::<Result<Vec<_>>>()?;
        // By colour, then in the order of the new ranks.
        let mut ranks: Vec<(u32, i32, usize)> =
            votes.iter().enumerate().filter_map(|(rank, v)| Some((v.0?, v.1, rank))).collect();
        ranks.sort_unstable();
        let groups = || ranks.chunk_by(|a, b| a.0 == b.0);
        let number = |group: &[(u32, i32, usize)]| votes[group[0].2].2;
        control.numbers().note(groups().map(number));
        let Some(mine) = groups().position(|group| Some(group[0].0) == color) else { return Ok(None) };
        let groups: Vec<&[(u32, i32, usize)]> = groups().collect();
        let ranks = groups[mine];
        let id = number(ranks);
        let rank = ranks.iter().position(|&(.., r)| r == state.rank).unwrap_or(0);
        let members = ranks.iter().map(|&(.., r)| state.members[r]).collect();
        let sink = state.trace.as_ref().map(|trace| trace.sink().clone());
        let groups: Vec<Vec<usize>> = groups.iter().map(|group| group.iter().map(|&(.., r)| r).collect()).collect();
        let tuned = lock(&inner.engine).tuned.split(&groups, mine);
        let child = State::new(id, rank, members, state.config.clone(), control.clone(), sink)?;
        if let Some(trace) = &state.trace {
            trace.span(begin, Span::Split);
        }
        Ok(Some(Comm::assemble(child, inner.local_rank, Some(tuned), inner._home.clone())))
    }

    /// Notifies the other ranks, in place of [`Comm::split`], that this one does not call it, and `why`. It waits for
    /// none of them; their calls fail with that reason.
    pub fn refuse_split(&self, why: &str) -> Result<()> {
        let state = &self.inner.state;
        state.check(|| OP.to_owned())?;
        let (what, vote) = (self.next_split(), Vote::Err(why.to_owned()));
        let offered = state.control.offer(&state.key(&what), &state.members, encode(&what, &vote)?);
        offered.map_err(|error| state.exchange_failed(&what, error))
    }

    /// The name of the next exchange: all ranks split in the same order.
    fn next_split(&self) -> String {
        format!("{OP} {}", self.inner.splits.fetch_add(1, Ordering::Relaxed))
    }
}

const OP: &str = "split";

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use crate::Comm;
    use tinynccl_plan::{ReduceOp, Result};
    use tinynccl_sys::Config;

    #[test]
    fn a_rank_that_refuses_waits_for_none_and_the_others_hear_why() {
        let ranks = Comm::threads(3, Config::default()).unwrap();
        // Before the others have come.
        ranks[1].refuse_split("its color is -2").unwrap();
        std::thread::scope(|scope| {
            let others = [&ranks[0], &ranks[2]].map(|rank| scope.spawn(|| rank.split(Some(0), 0).unwrap_err()));
            for other in others {
                let text = other.join().unwrap().to_string();
                assert!(text.contains("rank 1 does not take part: its color is -2"), "{text}");
            }
        });
        // The next one is a separate split.
        std::thread::scope(|scope| {
            let all: Vec<_> = ranks.iter().map(|rank| scope.spawn(|| rank.split(Some(0), 0).unwrap())).collect();
            assert!(all.into_iter().all(|one| one.join().unwrap().is_some_and(|part| part.size() == 3)));
        });
    }

    /// Each rank splits both parents at once, in two threads.
    #[test]
    fn communicators_that_are_split_at_once_are_told_apart() {
        let parents = Comm::threads(2, Config::default()).unwrap();
        let both = Barrier::new(4);
        let run = |parent: &Comm, value: i32| -> Result<(u32, i32)> {
            both.wait();
            let child = parent.split(Some(0), 0)?.expect("every rank has a colour");
            let mut sum = [value];
            child.all_reduce_in_place(&mut sum, ReduceOp::Sum)?;
            Ok((child.inner.state.id, sum[0]))
        };
        let of = |parent: &Comm| -> Result<[(u32, i32); 2]> {
            let other = parent.split(Some(0), 0)?.expect("every rank has a colour");
            std::thread::scope(|scope| {
                let first = scope.spawn(|| run(parent, 1));
                Ok([run(&other, 10)?, first.join().unwrap()?])
            })
        };
        let found: Vec<[(u32, i32); 2]> = std::thread::scope(|scope| {
            let ranks: Vec<_> = parents.iter().map(|parent| scope.spawn(move || of(parent))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap().unwrap()).collect()
        });
        assert_eq!(found[0], found[1]);
        let [(ten, tens), (one, ones)] = found[0];
        assert!(ten != one && (tens, ones) == (20, 2), "{found:?}");
    }
}
