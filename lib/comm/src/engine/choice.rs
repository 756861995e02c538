//! Choice of the algorithm of a call over links.

use std::sync::atomic::Ordering;

use crate::reduce::exact;
use crate::topology::{Choice, choose};
use crate::{Engine, Inner};
use tinynccl_plan::Call;
use tinynccl_plan::algorithm::{self, Hosts, Shape, hierarchical};
use tinynccl_plan::error::{Error, Result};
use tinynccl_plan::wire::Algorithm;
use tinynccl_sys::config::Sums;

/// Longest message of a collective that reduces on three or more ranks. A message that arrives whole is read again at
/// once and should still be in the L2 cache. Two ranks combine data in chunks as it arrives.
pub(super) const REDUCED_MESSAGE: usize = 256 << 10;

impl Inner {
    /// Longest message of a collective.
    pub(super) fn longest(&self, shape: &Shape) -> usize {
        match shape.collective.reduces() && shape.ranks > 2 {
            true => self.options.max_message.min(REDUCED_MESSAGE),
            false => self.options.max_message,
        }
    }

    /// True for a sum or an average that is to be rounded once.
    pub(super) fn sums_exactly(&self, call: &Call) -> bool {
        self.state.config.sum == Sums::Exact && call.collective.reduces() && exact::covers(call.dtype, call.op)
    }

    pub(super) fn choice(&self, engine: &Engine, call: &Call, bytes: usize) -> Result<Choice> {
        let shape = self.shape(call.collective, call.root);
        // Algorithms in rank order bring all operands of an element to one rank.
        let in_order = self.state.config.fixed_order || self.sums_exactly(call);
        choose(&shape, bytes, self.longest(&shape), &engine.tuned.model, engine.forced)
            .and_then(|choice| if in_order { in_rank_order(choice, &shape, engine.forced) } else { Some(choice) })
            .ok_or_else(|| Error::invalid(call.collective.name(), format!("no algorithm for {} ranks", shape.ranks)))
    }

    /// Logs once per collective that the requested algorithm was not taken.
    pub(super) fn warn_refused(&self, shape: &Shape, hosts: &Hosts, choice: &Choice) {
        let Some(refused) = choice.refused else { return };
        let bit = 1 << shape.collective as u8;
        if self.warned.fetch_or(bit, Ordering::Relaxed) & bit == 0 {
            let (rank, ranks) = (self.state.rank, shape.ranks);
            let able = match refused {
                Algorithm::Hierarchical => hierarchical::supports(shape, hosts),
                _ => algorithm::supports(refused, shape),
            };
            let reason = if able { "keeps no fixed order in" } else { "does not support" };
            let taken = choice.algorithm;
            log::warn!(
                "rank {rank}: {refused} was requested, but {reason} {} of {ranks} ranks; taking {taken}",
                shape.collective
            );
        }
    }
}

/// `choice` among the algorithms that reduce in rank order; `None` when there is none. The requested algorithm,
/// `forced`, may be refused.
fn in_rank_order(mut choice: Choice, shape: &Shape, forced: Option<Algorithm>) -> Option<Choice> {
    choice.estimates.retain(|e| algorithm::keeps_rank_order(e.algorithm, shape));
    if !choice.estimates.iter().any(|e| e.algorithm == choice.algorithm) {
        let fastest = choice.estimates.first()?;
        (choice.algorithm, choice.message) = (fastest.algorithm, fastest.message);
        choice.refused = forced;
    }
    Some(choice)
}
