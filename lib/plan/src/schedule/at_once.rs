//! Reductions of all operands at once, as an exact sum needs them: it is rounded once, so no partial sum may be stored.
//!
//! In a program they are [`Step::Reduce`]s in a row into one place, the last of which finishes the result. So the
//! verifier and the simulator know them as they are, and an executor may take them as one step.

use super::{Lane, Loc, Program, Step};

/// A reduction of several parts into one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AtOnce {
    /// Its operands, in the order in which single steps would combine them.
    pub operands: Vec<Loc>,
    /// Location of the result.
    pub dst: Loc,
    /// Number of the lane's steps that it stands for.
    pub steps: usize,
}

impl Lane {
    /// The reduction that begins at this step; `None` where none does, or where the steps do not finish one.
    pub fn at_once(&self, index: usize) -> Option<AtOnce> {
        let Some(&Step::Reduce { dst, .. }) = self.steps.get(index) else { return None };
        let mut operands = vec![dst];
        for (at, step) in self.steps.iter().enumerate().skip(index) {
            match *step {
                Step::Reduce { src, dst: same, last } if same == dst => {
                    operands.push(src);
                    if last {
                        let steps = at + 1 - index;
                        // The place of the operands is needed no more once the result was copied out.
                        return Some(match self.steps.get(at + 1) {
                            Some(&Step::Copy { src, dst: output }) if src == dst => {
                                AtOnce { operands, dst: output, steps: steps + 1 }
                            }
                            _ => AtOnce { operands, dst, steps },
                        });
                    }
                }
                _ => return None,
            }
        }
        None
    }
}

impl Program {
    /// The first step that combines two values by itself, so that its result is a partial one or was made of partial
    /// ones; `None` if every reduction is [at once](Lane::at_once).
    pub fn pairwise(&self) -> Option<Step> {
        for lane in &self.lanes {
            let mut index = 0;
            while let Some(&step) = lane.steps.get(index) {
                index += match step {
                    Step::Reduce { .. } => match lane.at_once(index) {
                        Some(reduction) => reduction.steps,
                        None => return Some(step),
                    },
                    Step::RecvReduceCopy { .. } | Step::RecvReduceSend { .. } | Step::RecvReduceCopySend { .. } => {
                        return Some(step);
                    }
                    _ => 1,
                };
            }
        }
        None
    }
}
