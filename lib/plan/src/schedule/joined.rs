//! Steps that receive and send on at once.

use super::Step;

/// Joins a step that receives with the one behind it that sends this on, if `may(from, to)`. A sum that is sent is not
/// kept unless it is finished: no other step may read it.
pub(crate) fn joined(steps: Vec<Step>, may: impl Fn(usize, usize) -> bool) -> Vec<Step> {
    let mut joined: Vec<Step> = Vec::with_capacity(steps.len());
    for step in steps {
        let both = match (joined.last(), step) {
            (Some(&Step::Recv { from, dst }), Step::Send { to, src }) if dst == src => {
                Some(Step::RecvCopySend { from, to, dst })
            }
            (Some(&Step::RecvReduceCopy { from, src, dst, last: true }), Step::Send { to, src: sent })
                if dst == sent =>
            {
                Some(Step::RecvReduceCopySend { from, to, src, dst, last: true })
            }
            (Some(&Step::RecvReduceCopy { from, src, dst, last: false }), Step::Send { to, src: sent })
                if dst == sent =>
            {
                Some(Step::RecvReduceSend { from, to, src })
            }
            _ => None,
        };
        let both = both.filter(|step| step.source().zip(step.destination()).is_some_and(|(from, to)| may(from, to)));
        match (both, joined.last_mut()) {
            (Some(both), Some(last)) => *last = both,
            _ => joined.push(step),
        }
    }
    joined
}
