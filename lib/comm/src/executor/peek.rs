//! Waits until a message can be received, without receiving it.

use std::time::Instant;

use super::links::Links;
use super::wait::{Supervisor, WaitPolicy, sleep_on};
use tinynccl_plan::error::Result;
use tinynccl_plan::wire::Header;
use tinynccl_sys::backoff::{Phase, SLICE};
use tinynccl_sys::interrupt::asked_to_stop;

/// True when the first part of a message has arrived at `links`' receiving end `index`; false when none has arrived by
/// the deadline of `policy`, which is no failure. `header` names the receive in errors.
pub(crate) fn peek(
    links: &mut Links,
    index: usize,
    header: &Header,
    supervisor: &dyn Supervisor,
    policy: &WaitPolicy,
) -> Result<bool> {
    let begin = Instant::now();
    loop {
        let explain = |e| supervisor.explain(header, e);
        let recv = &mut links.recvs[index];
        if recv.must_pull() || recv.peek().map_err(explain)?.is_some() {
            return Ok(true);
        }
        supervisor.alive()?;
        let waited = begin.elapsed();
        if waited >= policy.deadline {
            return Ok(false);
        }
        if asked_to_stop() {
            return Err(supervisor.interrupted(header));
        }
        // The peer may need a free slot on another link before it sends on this one.
        links.progress().map_err(explain)?;
        if policy.backoff.pause(waited) == Phase::Sleep {
            let sending: Vec<usize> = links.unflushed().collect();
            let slice = SLICE.min(policy.deadline - waited);
            sleep_on(links, (&[index], &sending), header, supervisor, slice)?;
        }
    }
}
