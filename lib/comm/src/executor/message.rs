//! A plan of one message, without lanes and their order, so that a short send or receive costs little more than the
//! link's time.

use std::slice;

use super::Task;
use super::links::Links;
use tinynccl_plan::schedule::Step;
use tinynccl_plan::wire::Header;
use tinynccl_transport::{Received, ZeroCopy};

/// Longest message taken here if longer ones may use zero copy.
const LONGEST: usize = 32 << 10;

/// Tries to do a task of one message, looking for it `turns` times; `false`: nothing has happened, use [`super::run`].
///
/// Only over links that move whole messages. It leaves errors to [`super::run`], which runs into them again and
/// explains them.
///
/// # Safety
/// As [`super::run`].
#[inline]
pub(crate) unsafe fn one_message(task: &Task<'_>, links: &mut Links, turns: u32) -> bool {
    let plan = task.plan;
    let ([instruction], [lane]) = (&plan.instructions[..], &plan.lanes[..]) else { return false };
    let link = match instruction.step {
        Step::Send { to: link, .. } | Step::Recv { from: link, .. } => link as usize,
        _ => return false,
    };
    if links.verifies(&task.header)
        || lane.windows != 1
        || !links.recvs.get(link).is_some_and(|recv| recv.shows_in_place())
    {
        return false;
    }
    let bytes = lane.partition.count() * plan.elem;
    // A zero-copy send does not complete at once.
    if plan.zero_copy && bytes > LONGEST {
        return false;
    }
    let header = Header { count: lane.count.unwrap_or(task.header.count), len: bytes as u32, ..task.header };
    match instruction.step {
        Step::Send { .. } => {
            // SAFETY: by the caller, the input holds `count` elements.
            let data = unsafe { slice::from_raw_parts(task.buffers.input, bytes) };
            // A zero-copy message must be awaited.
            let takes = |link: &mut dyn ZeroCopy| link.takes(data);
            let zero_copy = plan.zero_copy && links.sends[link].zero_copy().is_some_and(takes);
            !zero_copy && links.sends[link].send_from(&header, data).unwrap_or(false)
        }
        Step::Recv { .. } => {
            // SAFETY: by the caller, the output holds `count` elements, and nothing else accesses them.
            let data = unsafe { slice::from_raw_parts_mut(task.buffers.output, bytes) };
            for _ in 0..turns {
                match links.recvs[link].recv_into(&header, data) {
                    Ok(Received::Done) => return true,
                    Ok(Received::Pending) => std::hint::spin_loop(),
                    Ok(Received::Mismatch(_)) | Err(_) => return false,
                }
            }
            false
        }
        _ => false,
    }
}
