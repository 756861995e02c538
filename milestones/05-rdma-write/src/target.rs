//! The server: offers memory, posts a RECV where a step needs one, and reports what it sees of the client's requests.

use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, bail, ensure};
use rdma_write::fault::{Fault, size};
use rdma_write::pattern;
use rdma_write::region::Region;
use verbs_kit::say;
use verbs_kit::side::Side;
use verbs_kit::verbs::{Local, Mr};

use crate::connect::{Access, Node};

/// The 32 bits of the WRITE_WITH_IMM.
pub(crate) const IMM: u32 = 0xc0ffee;

/// Size of the RECV that the WRITE_WITH_IMM consumes, and the fill of its buffer.
const INBOX: usize = 64;
const UNTOUCHED: u8 = 0xaa;

/// Wait for an event that may never come.
const BRIEFLY: Duration = Duration::from_secs(1);

/// Steps, each with its own data ([`pattern`]).
pub(crate) struct Step;

impl Step {
    pub(crate) const WRITE: u8 = 1;
    pub(crate) const IMM: u8 = 2;
    pub(crate) const READ: u8 = 3;
    pub(crate) const FAULT: u8 = 4;
}

pub(crate) fn run(local: &Local, side: Side, bytes: usize, patience: Duration) -> Result<()> {
    let mut node = Node::new(local, side, patience)?;
    let line = node.side.receive("size")?;
    let wanted = size(&line).map_err(|e| anyhow!("{} is no rdma-write: {e}", node.side.peer()))?;
    ensure!(
        wanted == bytes,
        "the client moves {wanted} bytes per request, the server {bytes}: give both the same --bytes"
    );

    let all = Access::IBV_ACCESS_LOCAL_WRITE | Access::IBV_ACCESS_REMOTE_WRITE | Access::IBV_ACCESS_REMOTE_READ;
    let open = Mr::new(&node.pd, bytes, all.0)?;
    let closed = Mr::new(&node.pd, bytes, (Access::IBV_ACCESS_LOCAL_WRITE | Access::IBV_ACCESS_REMOTE_READ).0)?;
    let inbox = Mr::new(&node.pd, INBOX, Access::IBV_ACCESS_LOCAL_WRITE.0)?;
    for (name, mr) in [("open", &open), ("closed", &closed)] {
        let region = Region { address: mr.address(), len: mr.len() as u64, rkey: mr.rkey() };
        node.side.send(&format!("{name} {region}"))?;
    }
    inbox.write(0, &[UNTOUCHED; INBOX])?;

    let mut qp = node.connect(all)?;
    say!("one RECV of {INBOX} bytes, wr_id 1");
    qp.post_recv(1, &inbox, 0..INBOX)?;
    node.side.meet("connected")?;

    node.side.meet("WRITE")?;
    say!("after the WRITE");
    nothing_completed(&node)?;
    holds(&open, Step::WRITE, "all bytes of our memory are now the client's")?;
    say!("asleep until a completion comes");
    node.side.meet("looked")?;

    let told = node.success(1)?;
    ensure!(told.imm == Some(IMM), "imm_data is {:x?}, expected {IMM:#x}", told.imm);
    ensure!(told.byte_len as usize == bytes, "byte_len is {}, expected {bytes}", told.byte_len);
    holds(&open, Step::IMM, "all bytes of our memory are now the client's")?;
    ensure!(inbox.read(0..INBOX)? == [UNTOUCHED; INBOX], "the RECV's own buffer was written to");
    say!("  the RECV is used up, its own buffer untouched");
    // For the next step: post it before the client may continue.
    open.write(0, &pattern::bytes(Step::READ, bytes))?;
    node.side.meet("looked")?;

    node.side.meet("READ")?;
    say!("after the READ");
    nothing_completed(&node)?;
    holds(&open, Step::READ, "our memory is as it was")?;
    node.side.meet("looked")?;
    drop(qp);

    for mr in [&open, &closed] {
        mr.write(0, &pattern::bytes(Step::FAULT, bytes))?;
    }
    for fault in Fault::ALL {
        let access = if fault == Fault::QpForbids { Access::IBV_ACCESS_LOCAL_WRITE } else { all };
        let mut qp = node.connect(access)?;
        qp.post_recv(1, &inbox, 0..INBOX)?;
        node.side.meet("connected")?;
        node.side.meet("refused")?;
        say!("after the {}", fault.title());
        match node.cq.wait(Instant::now() + BRIEFLY)? {
            Some(completion) => say!("  completion: {completion}"),
            None => say!("  no completion within {BRIEFLY:?}"),
        }
        say!("  our QP is now in state {}", qp.state()?);
        match local.context.async_event()? {
            Some(event) => say!("  asynchronous event: {event}"),
            None => say!("  no asynchronous event"),
        }
        for mr in [&open, &closed] {
            holds(mr, Step::FAULT, "")?;
        }
        say!("  our memory is as it was");
        node.side.meet("looked")?;
    }
    say!("done");
    Ok(())
}

/// Checks every byte of `mr` and prints the result.
fn holds(mr: &Mr, step: u8, text: &str) -> Result<()> {
    match pattern::check(step, &mr.read(0..mr.len())?) {
        Ok(()) if text.is_empty() => Ok(()),
        Ok(()) => {
            say!("  {text}");
            Ok(())
        }
        Err(e) => bail!("our memory: {e}"),
    }
}

/// The client's request is complete; we must have no completion for it.
fn nothing_completed(node: &Node<'_>) -> Result<()> {
    match node.cq.poll()? {
        None => say!("  no completion: no notice of it"),
        Some(completion) => bail!("an unexpected completion: {completion}"),
    }
    Ok(())
}
