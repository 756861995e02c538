//! Splitting: communicators over subsets of the ranks.

use std::sync::atomic::Ordering;

use crate::comm::Comm;
use crate::comm::state::State;
use crate::comm::state::control::raise_ids;
use crate::error::{Error, Result};
use crate::threads::lock;
use crate::trace::{self, Span};

/// Each rank's message to the others: colour (or none), key, next free communicator id.
type Vote = (Option<u32>, i32, u32);

impl Comm {
    /// Makes one communicator per colour, its ranks ordered by `key`, then by their rank here; `None` for ranks without
    /// a colour.
    ///
    /// Every rank of this communicator must call it.
    ///
    /// ```
    /// # tinynccl::comm::on_threads(4, |comm| {
    /// // Even and odd ranks.
    /// let half = comm.split(Some(comm.rank() as u32 % 2), 0)?.expect("every rank has a colour");
    /// assert_eq!((half.rank(), half.size()), (comm.rank() / 2, 2));
    /// # Ok(())
    /// # }).unwrap();
    /// ```
    pub fn split(&self, color: Option<u32>, key: i32) -> Result<Option<Comm>> {
        let inner = &self.inner;
        let state = &inner.state;
        state.check(|| "split".to_owned())?;
        inner.drain();
        let begin = trace::now();
        let control = &state.control;
        let turn = inner.splits.fetch_add(1, Ordering::Relaxed);
        let vote: Vote = (color, key, control.ids().load(Ordering::Relaxed));
        let bytes = serde_json::to_vec(&vote).map_err(|e| Error::invalid("split", e.to_string()))?;
        let votes = control
            .exchange(&format!("{}-{turn}", state.key("split")), &state.members, bytes)?
            .iter()
            .enumerate()
            .map(|(rank, bytes)| {
                serde_json::from_slice(bytes)
                    .map_err(|e| Error::invalid("split", format!("the message of rank {rank} does not parse: {e}")))
            })
            .collect::<Result<Vec<Vote>>>()?;
        let mut colors: Vec<u32> = votes.iter().filter_map(|v| v.0).collect();
        colors.sort_unstable();
        colors.dedup();
        // Ids are unique per pair of processes: every rank starts from the highest that any rank has used.
        let base = votes.iter().map(|v| v.2).max().unwrap_or(1);
        raise_ids(&**control, base + colors.len() as u32);
        let Some(color) = color else { return Ok(None) };
        let mut ranks: Vec<(i32, usize)> =
            votes.iter().enumerate().filter(|(_, v)| v.0 == Some(color)).map(|(rank, v)| (v.1, rank)).collect();
        ranks.sort_unstable();
        let id = base + colors.iter().position(|&c| c == color).unwrap_or(0) as u32;
        let rank = ranks.iter().position(|&(_, r)| r == state.rank).unwrap_or(0);
        let members = ranks.iter().map(|&(_, r)| state.members[r]).collect();
        let sink = state.trace.as_ref().map(|trace| trace.sink().clone());
        let tuned = lock(&inner.engine).tuned.among(ranks.iter().map(|&(_, r)| r));
        let child = State::new(id, rank, members, state.config.clone(), control.clone(), sink)?;
        if let Some(trace) = &state.trace {
            trace.span(begin, Span::Split);
        }
        Ok(Some(Comm::assemble(child, inner.local_rank, Some(tuned), inner._home.clone())))
    }
}
