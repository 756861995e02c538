//! A box that translates addresses, and does not know what is inside of UDP.

use anyhow::{Result, ensure};
use softroce::{SendOp, Status};

use crate::card::end::{End, Terms};
use crate::card::wire::{Rules, Side, Wire};
use crate::ranks::Announced;

/// 67 ms, and three more tries.
const TERMS: Terms = Terms { mtu: 1024, timeout: 14, retry_cnt: 3, min_rnr_timer: 12 };

pub(crate) fn run(fixed: bool) -> Result<u8> {
    let (a, b) = (End::new(4096)?, End::new(4096)?);
    let mut wire = Wire::lay()?;
    a.connect(wire.peer_of(Side::A), TERMS)?;
    b.connect(wire.peer_of(Side::B), TERMS)?;
    wire.carry(a.number(), b.number(), Rules { renews_icrc: fixed, loses: Box::new(|_, _| false) })?;
    b.recv(0, 4096)?;
    a.send(SendOp::Send, 0, 500)?;
    let ours = a.wait()?;
    println!("the box took these, and sent each one on:");
    wire.lines().iter().for_each(|line| println!("{line}"));
    println!("A: completion: {:?}", ours.status);
    match b.poll() {
        Some(wc) => println!("B: completion: {:?}, {} B", wc.status, wc.byte_len),
        None => println!("B: neither a completion nor an error"),
    }
    if ours.status == Status::RetriesExceeded {
        return Err(Announced(
            "all of them arrived, B had a receive posted, and no acknowledgement came (IBV_WC_RETRY_EXC_ERR)"
                .to_owned(),
        )
        .into());
    }
    ensure!(ours.status == Status::Success, "A's SEND ended with {:?}", ours.status);
    Ok(0)
}
