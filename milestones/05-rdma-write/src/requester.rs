//! The client: posts every request and reports its completion.

use std::time::Duration;

use anyhow::{Result, anyhow, ensure};
use rdma_write::fault::{Fault, announced};
use rdma_write::pattern;
use verbs_kit::say;
use verbs_kit::side::Side;
use verbs_kit::verbs::{Local, Mr};

use crate::connect::{Access, Node};
use crate::one_sided::{Here, read, write, write_with_imm};
use crate::target::{IMM, Step};

pub(crate) fn run(local: &Local, side: Side, bytes: usize, patience: Duration) -> Result<()> {
    let mut node = Node::new(local, side, patience)?;
    // Only our own device needs access to our memory.
    let mr = Mr::new(&node.pd, bytes, Access::IBV_ACCESS_LOCAL_WRITE.0)?;
    let here = || Here { mr: &mr, range: 0..bytes };
    node.side.send(&format!("bytes={bytes}"))?;
    let open = announced(&node.side.receive("region")?, "open").map_err(|e| anyhow!(e))?;
    let closed = announced(&node.side.receive("region")?, "closed").map_err(|e| anyhow!(e))?;
    ensure!(open.len == bytes as u64 && closed.len == open.len, "the server offers other sizes than {bytes} bytes");
    say!("the server's memory: address {:#x}, {} bytes, rkey {:#x}", open.address, open.len, open.rkey);

    let mut qp = node.connect(Access::IBV_ACCESS_LOCAL_WRITE)?;
    node.side.meet("connected")?;

    say!("WRITE, {bytes} bytes, wr_id 1");
    mr.write(0, &pattern::bytes(Step::WRITE, bytes))?;
    write(&mut qp, 1, here(), open)?;
    node.success(1)?;
    node.side.meet("WRITE")?;
    node.side.meet("looked")?;

    say!("WRITE_WITH_IMM, {bytes} bytes and {IMM:#x}, wr_id 2");
    mr.write(0, &pattern::bytes(Step::IMM, bytes))?;
    write_with_imm(&mut qp, 2, here(), open, IMM)?;
    node.success(2)?;
    node.side.meet("looked")?;

    say!("READ, {bytes} bytes, wr_id 3");
    let read_done = read(&mut qp, 3, here(), open).and_then(|()| node.success(3))?;
    ensure!(read_done.byte_len as usize == bytes, "READ of {} bytes, expected {bytes}", read_done.byte_len);
    pattern::check(Step::READ, &mr.read(0..bytes)?).map_err(|e| anyhow!("READ: {e}"))?;
    say!("  every byte is the server's");
    node.side.meet("READ")?;
    node.side.meet("looked")?;
    drop(qp);

    for fault in Fault::ALL {
        // An error ends a connection for good, so each fault gets new queue pairs.
        let mut qp = node.connect(Access::IBV_ACCESS_LOCAL_WRITE)?;
        node.side.meet("connected")?;
        say!("{}, wr_id 1; behind it one without fault, wr_id 2", fault.title());
        write(&mut qp, 1, here(), fault.aim(open, closed, bytes as u64))?;
        write(&mut qp, 2, here(), open)?;
        let refused = node.completion()?;
        let flushed = node.completion()?;
        say!("  our QP is now in state {}", qp.state()?);
        ensure!((refused.wr_id, flushed.wr_id) == (1, 2), "completions in another order than the requests");
        ensure!(!refused.ok() && !flushed.ok(), "a request succeeded that must be refused");
        node.side.meet("refused")?;
        node.side.meet("looked")?;
    }
    say!("done");
    Ok(())
}
