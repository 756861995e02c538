//! Chunks by SEND and RECV over a reliable connection.
//!
//! The receiver announces each posted RECV with an empty SEND (a credit). The sender sends only as many chunks as it
//! has credits, so no SEND ever reaches a receiver that is not ready.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use verbs_kit::completion::Completion;
use verbs_kit::connect;
use verbs_kit::endpoint::field;
use verbs_kit::side::Side;
use verbs_kit::verbs::ffi::{ibv_access_flags, ibv_send_flags, ibv_send_wr, ibv_wr_opcode};
use verbs_kit::verbs::{Channel, Cq, Depth, Mr, Qp};

use super::Wire;
use crate::rdma::Rdma;

/// The kind of a request, in the upper half of its `wr_id`; the lower half holds the chunk's index.
const DATA_OUT: u64 = 1 << 32;
const DATA_IN: u64 = 2 << 32;
const CREDIT_OUT: u64 = 3 << 32;
const CREDIT_IN: u64 = 4 << 32;

/// One side.
#[derive(Debug)]
pub struct Verbs {
    qp: Qp,
    cq: Arc<Cq>,
    memory: Arc<Mr>,
    /// Memory for the RECVs of credits, which carry no bytes.
    nothing: Arc<Mr>,
    /// Expected bytes of each posted RECV, oldest first.
    expected: VecDeque<u32>,
    /// Chunks that left our memory, credits received, chunks received. All are in order, so a count suffices.
    out: usize,
    credits: usize,
    inn: usize,
    /// Sent credits whose completions we have not taken, and their limit.
    unfinished: usize,
    most_credits: usize,
}

impl Verbs {
    /// Connects to the peer over `side`. `slots` is the number of chunks in flight; `sends` selects the direction.
    pub fn connect(rdma: &Rdma, side: &mut Side, memory: Arc<Mr>, slots: usize, sends: bool) -> Result<Verbs> {
        let local = &rdma.local;
        let channel = Channel::new(&local.context)?;
        // The peer may have more slots, and then more credits in flight.
        side.send(&format!("slots={slots}"))?;
        let line = side.receive("slots")?;
        let theirs: usize = field(&mut std::iter::once(line.as_str()), "slots")
            .map_err(|e| anyhow!("{} is no cuda-verbs: {e}", side.peer()))?;
        ensure!((2..=crate::cli::MOST_SLOTS).contains(&theirs), "{} has {theirs} slots", side.peer());
        let depth = u32::try_from(slots.max(theirs) + 1)?;
        let cq = Cq::with_channel(&local.context, 4 * depth, &channel)?;
        let mut qp = Qp::new(&rdma.pd, &cq, Depth { send: 2 * depth, receive: 2 * depth })?;
        let access = ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0;
        connect::over(side, &mut qp, local, access, "cuda-verbs")?;
        let nothing = Mr::new(&rdma.pd, 64, access)?;
        let mut verbs = Verbs {
            qp,
            cq,
            memory,
            nothing,
            expected: VecDeque::new(),
            out: 0,
            credits: 0,
            inn: 0,
            unfinished: 0,
            most_credits: 2 * slots,
        };
        // RECVs are consumed in posting order: at the receiver, a chunk would consume one of these.
        for index in 0..if sends { theirs } else { 0 } {
            verbs.post_credit(index)?;
        }
        side.meet("connected")?;
        Ok(verbs)
    }

    fn post_credit(&mut self, index: usize) -> Result<()> {
        let nothing = Arc::clone(&self.nothing);
        self.qp.post_recv(CREDIT_IN | index as u64, &nothing, 0..64)
    }

    fn post_send(&mut self, wr_id: u64, memory: &Arc<Mr>, place: Range<usize>) -> Result<()> {
        let request = ibv_send_wr {
            wr_id,
            opcode: ibv_wr_opcode::IBV_WR_SEND,
            send_flags: ibv_send_flags::IBV_SEND_SIGNALED.0,
            ..Default::default()
        };
        self.qp.post(request, memory, place)
    }

    /// Takes the next completion, or fails at the deadline.
    fn pump(&mut self, what: &str, deadline: Instant) -> Result<()> {
        let Some(completion) = self.cq.wait(deadline)? else {
            bail!("verbs: {what}: nothing completed in time (--timeout); is the other side still there?")
        };
        ensure!(completion.ok(), "verbs: {what}: {completion}");
        self.take(completion)
    }

    fn take(&mut self, completion: Completion) -> Result<()> {
        let kind = completion.wr_id >> 32 << 32;
        match kind {
            DATA_OUT => self.out += 1,
            CREDIT_OUT => self.unfinished -= 1,
            CREDIT_IN => {
                ensure!(completion.byte_len == 0, "verbs: {} bytes instead of a credit", completion.byte_len);
                self.credits += 1;
                self.post_credit((completion.wr_id ^ kind) as usize)?;
            }
            DATA_IN => {
                let expected = self.expected.pop_front().context("verbs: a chunk that nobody waits for")?;
                let got = completion.byte_len;
                ensure!(got == expected, "verbs: chunk {} has {got} bytes, expected {expected}", self.inn);
                self.inn += 1;
            }
            _ => bail!("verbs: a completion of an unknown request: {completion}"),
        }
        Ok(())
    }
}

impl Wire for Verbs {
    fn begin(&mut self) -> Result<()> {
        ensure!(self.expected.is_empty(), "verbs: chunks of the transfer before are missing");
        (self.out, self.credits, self.inn) = (0, 0, 0);
        Ok(())
    }

    fn send(&mut self, index: usize, place: Range<usize>, deadline: Instant) -> Result<()> {
        while self.credits <= index {
            self.pump(&format!("waiting to send chunk {index}"), deadline)?;
        }
        let memory = Arc::clone(&self.memory);
        self.post_send(DATA_OUT | index as u64, &memory, place)
    }

    fn sent(&mut self, index: usize, deadline: Instant) -> Result<()> {
        while self.out <= index {
            self.pump(&format!("sending chunk {index}"), deadline)?;
        }
        Ok(())
    }

    fn post(&mut self, index: usize, place: Range<usize>, deadline: Instant) -> Result<()> {
        // A credit's entry in the send queue is free again once its completion has been taken.
        while self.unfinished >= self.most_credits {
            self.pump("sending credits", deadline)?;
        }
        self.expected.push_back(u32::try_from(place.len()).context("a chunk of 4 GiB")?);
        let memory = Arc::clone(&self.memory);
        self.qp.post_recv(DATA_IN | index as u64, &memory, place)?;
        let nothing = Arc::clone(&self.nothing);
        self.post_send(CREDIT_OUT | index as u64, &nothing, 0..0)?;
        self.unfinished += 1;
        Ok(())
    }

    fn received(&mut self, index: usize, deadline: Instant) -> Result<()> {
        while self.inn <= index {
            self.pump(&format!("waiting for chunk {index}"), deadline)?;
        }
        Ok(())
    }
}
