//! Messages of 64 bytes between two queue pairs: a write with an immediate word for each, and [`Credits`]. Both ends
//! are in this process, on the first device with a usable port.

use std::sync::Arc;

use anyhow::{Context as _, Result, anyhow, ensure};
use verbs_kit::pair::{End, Pair};
use verbs_kit::verbs::{Mr, ffi};

use crate::credits::{Credits, Kind};

/// Bytes of a message.
pub const MESSAGE: usize = 64;

/// Code of the pause that an end asks for when it has no receive: 0.64 ms.
const PAUSE: u8 = 12;
/// Retry forever when the peer has no receive.
const FOR_EVER: u8 = 7;

/// One end.
#[derive(Debug)]
pub struct Mailbox {
    end: End,
    credits: Credits,
    /// The peer writes to the first half; we send from the second half.
    memory: Arc<Mr>,
    /// The peer's memory.
    remote: (u64, u32),
    /// Slots that a write of ours is still read from.
    in_use: Vec<bool>,
    /// Messages written without asking for credit.
    reckless: u64,
}

/// Two connected ends that hold `depth` messages in each direction.
///
/// # Errors
/// No RDMA device; what its driver refuses.
pub fn pair(depth: u64) -> Result<[Mailbox; 2]> {
    use ffi::ibv_access_flags as Access;
    let access = Access::IBV_ACCESS_LOCAL_WRITE.0 | Access::IBV_ACCESS_REMOTE_WRITE.0;
    let Pair { pd, sender, receiver, .. } = Pair::new(access, PAUSE, FOR_EVER)?;
    let credits = Credits::new(depth);
    let slots = usize::try_from(credits.slots())?;
    let [a, b] = [Mr::new(&pd, 2 * slots * MESSAGE, access)?, Mr::new(&pd, 2 * slots * MESSAGE, access)?];
    let of = |mr: &Mr| (mr.address(), mr.rkey());
    let (to_a, to_b) = (of(&a), of(&b));
    let mailbox = |end, memory, remote| {
        let credits = credits.clone();
        let receives = credits.receives();
        let mut mailbox = Mailbox { end, credits, memory, remote, in_use: vec![false; slots], reckless: 0 };
        (0..receives).try_for_each(|_| mailbox.post_receive())?;
        Ok::<_, anyhow::Error>(mailbox)
    };
    Ok([mailbox(sender, a, to_b)?, mailbox(receiver, b, to_a)?])
}

impl Mailbox {
    /// Sends a message; false without credit.
    ///
    /// # Errors
    /// Those of the device.
    pub fn send(&mut self, message: &[u8; MESSAGE]) -> Result<bool> {
        self.poll()?;
        let next = self.credits.clone().reserve();
        // The device may have to repeat the message that was there before.
        let Some(slot) = next.filter(|&slot| !self.in_use[slot as usize]) else { return Ok(false) };
        self.credits.reserve();
        self.write(Some(slot), message)?;
        Ok(true)
    }

    /// Sends a message to the next slot, whether the peer has read what is there or not.
    ///
    /// # Errors
    /// Those of the device.
    pub fn send_recklessly(&mut self, message: &[u8; MESSAGE]) -> Result<()> {
        let slot = self.reckless % self.credits.slots();
        self.reckless += 1;
        while self.in_use[slot as usize] {
            self.poll()?;
        }
        self.write(Some(slot), message)
    }

    /// The oldest message, if there is one.
    ///
    /// # Errors
    /// Those of the device; a peer that sends without credit.
    pub fn recv(&mut self) -> Result<Option<[u8; MESSAGE]>> {
        self.poll()?;
        let Some(slot) = self.credits.oldest() else { return Ok(None) };
        let message = self.read(slot)?;
        if self.credits.free() {
            self.write(None, &[0; MESSAGE])?;
        }
        Ok(Some(message))
    }

    /// Slots of each end.
    pub fn slots(&self) -> u64 {
        self.credits.slots()
    }

    /// The bytes in a slot of ours.
    ///
    /// # Errors
    /// There is no such slot.
    pub fn read(&self, slot: u64) -> Result<[u8; MESSAGE]> {
        let at = slot as usize * MESSAGE;
        self.memory.read(at..at + MESSAGE)?.try_into().map_err(|_| anyhow!("a slot of another length"))
    }

    /// Posts a WRITE of the message to this slot, or of nothing, with the immediate word.
    fn write(&mut self, slot: Option<u64>, message: &[u8; MESSAGE]) -> Result<()> {
        let kind = slot.map_or(Kind::Report, |_| Kind::Message);
        let (at, len) = slot.map_or((0, 0), |slot| (slot as usize * MESSAGE, MESSAGE));
        let mut request = ffi::ibv_send_wr {
            wr_id: slot.unwrap_or(u64::MAX),
            opcode: ffi::ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM,
            send_flags: ffi::ibv_send_flags::IBV_SEND_SIGNALED.0,
            ..Default::default()
        };
        request.__bindgen_anon_1.imm_data = self.credits.word(kind).to_be();
        request.wr.rdma.remote_addr = self.remote.0 + at as u64;
        request.wr.rdma.rkey = self.remote.1;
        let staging = self.in_use.len() * MESSAGE + at;
        if let Some(slot) = slot {
            self.memory.write(staging, message)?;
            self.in_use[slot as usize] = true;
        }
        self.end.qp.post(request, &self.memory, staging..staging + len)
    }

    fn post_receive(&mut self) -> Result<()> {
        // The bytes go where the write says: a receive has no memory.
        self.end.qp.post_recv(0, &self.memory, 0..0)
    }

    /// Takes in all completions.
    ///
    /// # Errors
    /// A request failed; the peer sent without credit.
    pub fn poll(&mut self) -> Result<()> {
        while let Some(completion) = self.end.cq.poll()? {
            ensure!(completion.ok(), "a request failed: {completion}");
            if completion.opcode < 128 {
                if let Some(place) = self.in_use.get_mut(completion.wr_id as usize) {
                    *place = false;
                }
                continue;
            }
            self.post_receive()?;
            let word = completion.imm.context("a write without an immediate word")?;
            self.credits.credit(word).map_err(|e| anyhow!("the peer: {e}"))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use verbs_kit::unavailable::Unavailable;

    use super::*;

    fn ends(depth: u64) -> Option<[Mailbox; 2]> {
        match pair(depth) {
            Err(error) if error.is::<Unavailable>() => {
                program_kit::testing::skipped("credits over RDMA", &error.to_string());
                None
            }
            ends => Some(ends.unwrap()),
        }
    }

    fn message(n: u64) -> [u8; MESSAGE] {
        std::array::from_fn(|i| (n.wrapping_mul(31) + i as u64) as u8)
    }

    #[test]
    fn credits_keep_every_message_over_a_device() {
        for depth in [1, 4, 16] {
            let Some(mut ends) = ends(depth) else { return };
            let (mut sent, mut read) = ([0; 2], [0; 2]);
            let begin = Instant::now();
            let total = 2000;
            while read != [total; 2] {
                assert!(begin.elapsed() < Duration::from_secs(60), "depth {depth}: sent {sent:?}, read {read:?}");
                for i in 0..2 {
                    while sent[i] < total && ends[i].send(&message(sent[i])).unwrap() {
                        sent[i] += 1;
                    }
                    // The reader takes less than there is, so that the sender runs out of credit.
                    for _ in 0..1 + depth / 2 {
                        if let Some(got) = ends[1 - i].recv().unwrap() {
                            assert_eq!(got, message(read[i]), "depth {depth}, message {}", read[i]);
                            read[i] += 1;
                        }
                    }
                }
            }
        }
    }
}
