//! A burst of messages to a reader that does not look, with credits and without.

use std::time::{Duration, Instant};

use allreduce_verbs::mailbox::{MESSAGE, pair};
use anyhow::{Result, ensure};

const DEPTH: u64 = 4;
const BURST: u64 = 12;
/// The reader looks again after this.
const AWAY: Duration = Duration::from_millis(50);

fn message(n: u64) -> [u8; MESSAGE] {
    [n as u8; MESSAGE]
}

fn main() -> Result<()> {
    let [mut a, mut b] = pair(DEPTH)?;
    let begin = Instant::now();
    let (mut sent, mut waited, mut wrong) = (0, 0u64, 0);
    let mut read = 0;
    while read < BURST {
        while sent < BURST && a.send(&message(sent))? {
            sent += 1;
        }
        waited += u64::from(sent < BURST);
        std::thread::sleep(AWAY);
        while let Some(got) = b.recv()? {
            wrong += u64::from(got != message(read));
            read += 1;
        }
        ensure!(begin.elapsed() < Duration::from_secs(60), "{read} of {BURST} messages came");
    }
    println!("with credits:     {BURST} messages, the sender waited {waited} times, {wrong} were wrong");

    let [mut a, b] = pair(DEPTH)?;
    #[cfg(not(feature = "verbs"))]
    let before = softroce::counters().rcvd_rnr_err;
    for n in 0..2 * DEPTH {
        a.send_recklessly(&message(n))?;
    }
    std::thread::sleep(AWAY);
    let slots: Vec<u8> = (0..b.slots()).map(|slot| Ok(b.read(slot)?[0])).collect::<Result<_>>()?;
    println!("without credits:  messages 0 to 7 were sent, the reader did not poll, and the slots hold {slots:?}");
    #[cfg(not(feature = "verbs"))]
    println!("                  the card refused {} writes: no receive", softroce::counters().rcvd_rnr_err - before);
    Ok(())
}
